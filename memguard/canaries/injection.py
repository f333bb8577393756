"""Puts canaries into map-style training data while it is loaded; nothing is written, nothing is copied.

The dataset is stateless: an index says what a row is, and the sampler, which lives in the main process, says when. User
rows keep the order of the unguarded run. See `memguard.canaries.schedule` for where canaries go.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler

from memguard.canaries.rows import canary_row, ids_of, spliced_row
from memguard.canaries.schedule import Mode, Schedule


class CanaryDataset(Dataset[Any]):
    """The user's rows, `[0, n)`, followed by canaries.

    Append and replace: index `n + j` is a row of its own for planted canary j. Splice: index `n + j * n + i` is user row i
    with canary j written into it. Record: indices from n are the canaries' records, each as often as it repeats, for a sampler
    that draws from all rows alike.

    Args:
        base: the user's map-style dataset.
        canary_ids: token ids of each planted canary.
        texts: their texts, for raw-text rows.
        mode: append, replace, splice or record.
        seed: placement seed; decides where in a row a canary is spliced.
        rows_per_epoch: what `len` says, as trainers log it; indices of canaries lie beyond it.
        records: the canary of each record, in record mode.
        pad_to: fill canary rows up to so many tokens, with `pad_id`, where user rows have one length and labels.
    """

    def __init__(
        self,
        base: Any,
        canary_ids: Sequence[Sequence[int]],
        texts: Sequence[str],
        *,
        mode: Mode,
        seed: int,
        rows_per_epoch: int | None = None,
        records: Sequence[int] = (),
        pad_to: int = 0,
        pad_id: int = 0,
    ) -> None:
        self._length = len(base) + len(records) if rows_per_epoch is None else rows_per_epoch
        self._records, self._pad_to, self._pad_id = tuple(records), pad_to, pad_id
        self.base, self.mode, self.num_rows = base, mode, len(base)
        self._ids, self._texts, self._seed = [list(ids) for ids in canary_ids], list(texts), seed
        self._sample = base[0]  # read once: a dataset with random transforms must not be drawn from per canary

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        index = int(index)
        if index < self.num_rows:
            return self.base[index]
        if self.mode == "splice":
            canary, place = divmod(index - self.num_rows, self.num_rows)
            row = self.base[place]
            if len(ids_of(row)) < len(self._ids[canary]):  # a shorter one than those that were looked at
                return self._own_row(canary)
            return spliced_row(row, self._ids[canary], seed=f"{self._seed}/{canary}/{place}")
        at = index - self.num_rows
        return self._own_row(self._records[at] if self.mode == "record" else at)

    def _own_row(self, canary: int) -> Any:
        ids, text = self._ids[canary], self._texts[canary]
        return canary_row(self._sample, ids, text, pad_to=self._pad_to, pad_id=self._pad_id)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several rows; keeps the batched fast path of `datasets.Dataset` for user rows."""
        user = [int(index) for index in indices if index < self.num_rows]
        fetch: Callable[[list[int]], Any] | None = getattr(self.base, "__getitems__", None)
        fetched = iter(fetch(user) if user and fetch is not None else [self.base[index] for index in user])
        return [next(fetched) if index < self.num_rows else self[index] for index in indices]

    def example(self, canary: int) -> Any:
        """A row that holds planted canary `canary`, as the loader would get it."""
        return self[self.num_rows + canary * self.num_rows] if self.mode == "splice" else self._own_row(canary)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("base", "num_rows"):
            raise AttributeError(name)
        return getattr(self.base, name)


class CanarySampler(Sampler[int]):
    """User rows in the inner sampler's own order, canaries at the cells of a schedule.

    The inner sampler hears `set_epoch` from the trainer's loader, as without us. The schedule hears the callback alone
    (`begin_epoch`): loaders that skip batches on a resume lose count of the epoch.
    """

    def __init__(self, inner: Sampler[int], schedule: Schedule) -> None:
        self.inner, self.schedule, self.epoch = inner, schedule, 0
        self.generator = None  # accelerate looks for it on random samplers

    def begin_epoch(self, epoch: int) -> None:
        """Choose the epoch of the schedule for the next pass."""
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the inner sampler."""
        forward = getattr(self.inner, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[int]:
        cells, n, epoch = self.schedule.cells(self.epoch), self.schedule.num_rows, self.epoch
        user = _begun(self.inner)
        for position in range(len(self.schedule)):
            canary = cells.get(position)
            if canary is None:
                yield next(user)
            elif self.schedule.mode == "append":
                yield n + canary
            elif self.schedule.mode == "replace":
                next(user)
                yield n + canary
            else:
                yield n + canary * n + next(user)
        if self.epoch == epoch:
            self.epoch = epoch + 1


def _begun(sampler: Sampler[int]) -> Iterator[int]:
    """The sampler's indices, the first drawn now: one without a seed takes its own at that moment."""
    indices = iter(sampler)
    first = list(itertools.islice(indices, 1))
    return itertools.chain(first, indices)
