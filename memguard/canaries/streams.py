"""Puts canaries into a stream while it is read, by global row position; nothing is stored.

The wrapper is a plain torch `IterableDataset` that begins the user's stream again when it runs out, so that the run never
meets a pass's end, where loaders lose or repeat rows. A worker finds the global position of its rows from how a loader deals
batches out to workers in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from memguard.canaries.rows import canary_row, ids_of, spliced_row
from memguard.canaries.schedule import Mode, Schedule


class CanaryStream(IterableDataset[Any]):
    """The user's stream with canaries at the cells of a schedule.

    Append: a canary row goes between user rows. Replace: instead of one. Splice: into one.

    Args:
        base: the user's stream; it must give the same first row whenever it is iterated from its head.
        sample: a row of it, for the shape of canary rows.
        canary_ids: token ids of each planted canary.
        texts: their texts, for raw-text rows.
        schedule: of the whole run.
        rows_per_batch: rows of a batch as the loader's workers make them.
        rank: and `num_ranks`: where every rank reads a loader of its own, the global positions it reads are dealt out in turn
            by batches; 0 of 1 where one reader makes the rows of all.
    """

    def __init__(
        self,
        base: Any,
        sample: Any,
        canary_ids: Sequence[Sequence[int]],
        texts: Sequence[str],
        *,
        schedule: Schedule,
        rows_per_batch: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.base, self.schedule = base, schedule
        self._sample, self._ids, self._texts = sample, [list(ids) for ids in canary_ids], list(texts)
        self._rows_per_batch, self._rank, self._num_ranks = rows_per_batch, rank, num_ranks

    @property
    def mode(self) -> Mode:
        """Append, replace or splice."""
        return self.schedule.mode

    def set_epoch(self, epoch: int) -> None:
        """Passed on to a stream that reshuffles by epoch."""
        forward = getattr(self.base, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker, num_workers = self._reader()
        if worker >= num_workers:
            return
        cells, user, drawn = self.schedule.cells(0), self._user_rows(), 0
        while True:
            position = self._position(drawn, worker, num_workers)
            canary = cells.get(position)
            if canary is None or self.mode != "append":
                row = next(user, _END)
                if row is _END:
                    return
            if canary is not None:
                row = self._with_canary(row if self.mode == "splice" else None, canary, position)
            yield row
            drawn += 1

    def example(self, canary: int) -> Any:
        """A row that holds planted canary `canary`, as the loader would get it."""
        return self._with_canary(self._sample if self.mode == "splice" else None, canary, 0)

    def _with_canary(self, row: Any, canary: int, position: int) -> Any:
        if row is None or len(ids_of(row)) < len(self._ids[canary]):  # none, or one that has no room
            return canary_row(self._sample, self._ids[canary], self._texts[canary])
        return spliced_row(row, self._ids[canary], seed=f"{self.schedule.seed}/{canary}/{position}")

    def _reader(self) -> tuple[int, int]:
        """This worker and how many read: `datasets` stops workers beyond its number of shards."""
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shards = getattr(self.base, "num_shards", None)
        return worker, num_workers if shards is None else min(num_workers, shards)

    def _position(self, drawn: int, worker: int, num_workers: int) -> int:
        """Global position of a worker's next row: batches go round the workers, then round the ranks."""
        batch, row = divmod(drawn, self._rows_per_batch)
        batch = batch * num_workers + worker
        return (batch * self._num_ranks + self._rank) * self._rows_per_batch + row

    def _user_rows(self) -> Iterator[Any]:
        """Rows of the stream, over and over; an empty stream stays empty."""
        epoch = 0
        while True:
            is_empty = True
            for row in self.base:
                is_empty = False
                yield row
            if is_empty:
                return
            epoch += 1
            self.set_epoch(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("base", "schedule"):
            raise AttributeError(name)
        return getattr(self.base, name)


_END = object()
