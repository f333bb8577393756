"""Passes over the user's rows and the canaries, as Lightning begins them: a sampler and a stream. Knows no trainer.

The sampler is a `DistributedSampler`, or Lightning would wrap and shuffle it again. Both can be saved in the middle of a pass
by a stateful loader, and both go on in the middle of a pass that Lightning replays from its head.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from memguard.canaries.schedule import Schedule
from memguard.canaries.streams import CanaryStream
from memguard.errors import CanaryError

Place = Callable[[], tuple[int, int]]  # epoch, and batches of it that are done


@dataclass(frozen=True)
class LoaderFacts:
    """What decides where rows of a loader land: rows of a batch on one rank, ranks that read different rows, dropped tails."""

    batch_size: int
    drop_last: bool
    rank: int
    num_ranks: int
    sampler: Any

    @property
    def rows_per_batch(self) -> int:
        """Rows of a batch over all ranks."""
        return self.batch_size * self.num_ranks

    def num_batches(self, num_rows: int) -> int:
        """Batches that Lightning makes of so many rows."""
        rows = math.ceil(num_rows / self.num_ranks)
        return rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)


class GuardedSampler(DistributedSampler[int]):
    """User rows in their own order, canaries at the cells of a schedule, rows of this rank only.

    Position p of an epoch belongs to rank p modulo the number of ranks; ranks are evened with user rows of its head. An epoch
    that is resumed begins with user rows anew, as Lightning does, while canaries go on where they were.

    Args:
        inner: order of the user's rows over all ranks.
        schedule: cells.
        num_rows: rows of the dataset, behind which canaries are found.
        num_positions: rows of an epoch, which may be more than are trained on.
        facts: of the loader.
        place: where the next pass begins.
    """

    def __init__(
        self, inner: Any, schedule: Schedule, *, num_rows: int, num_positions: int, facts: LoaderFacts, place: Place
    ) -> None:
        super().__init__(range(num_positions), facts.num_ranks, facts.rank, shuffle=False)  # type: ignore[arg-type]
        self.inner, self.schedule, self.num_rows, self.num_positions = inner, schedule, num_rows, num_positions
        self.rows_per_rank, self.place = facts.batch_size, place
        self.begun_at: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch as Lightning counts it, for samplers of the user that shuffle by it."""
        super().set_epoch(epoch)
        forward = getattr(self.inner, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __iter__(self) -> Iterator[int]:
        return _Pass(self)

    def index(self, position: int, canary: int | None, draw: Callable[[], int]) -> int:
        """Index of the row at a position; `draw` gives the user's next row."""
        if canary is None:
            return draw()
        if self.schedule.mode == "append":
            return self.num_rows + canary
        row = draw()
        return self.num_rows + canary if self.schedule.mode == "replace" else self.num_rows + canary * self.num_rows + row


class _Pass(Iterator[int]):
    """One pass of a `GuardedSampler`; a stateful loader may save it and go on from there.

    All ranks draw the same rows in rounds, one row a rank, so that the state of one rank is that of all.
    """

    def __init__(self, sampler: GuardedSampler) -> None:
        self._sampler = sampler
        self._user: Iterator[int] | None = None
        self._ahead: list[int] = []
        self._epoch, self._round, self._drawn = 0, 0, 0
        self._head: list[int] = []

    def __next__(self) -> int:
        if self._user is None:  # not before the first row is asked for: Lightning may restore its progress in between
            self._epoch, done = self._begin()
            self._round = done * self._sampler.rows_per_rank
        if self._round >= self._sampler.num_samples:
            raise StopIteration
        ranks, cells = self._sampler.num_replicas, self._sampler.schedule.cells(self._epoch)
        found = [self._row(position, cells) for position in range(self._round * ranks, (self._round + 1) * ranks)]
        self._round += 1
        return found[self._sampler.rank]

    def _row(self, position: int, cells: dict[int, int]) -> int:
        if position >= self._sampler.num_positions:
            return self._head[(position - self._sampler.num_positions) % len(self._head)]
        return self._sampler.index(position, cells.get(position), self._draw)

    def _draw(self) -> int:
        assert self._user is not None
        row = self._ahead.pop() if self._ahead else next(self._user)
        self._drawn += 1
        if len(self._head) < self._sampler.num_replicas:
            self._head.append(row)
        return row

    def _begin(self) -> tuple[int, int]:
        place = self._sampler.begun_at = self._sampler.place()
        self._user = iter(self._sampler.inner)
        if not hasattr(self._user, "state_dict"):
            # a first batch of canaries alone would else let the model draw from the generator before the sampler does
            self._ahead = list(itertools.islice(self._user, 1))
        return place

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is, on any rank; nothing before its first row."""
        if self._user is None:
            return {}
        state = {"epoch": self._epoch, "round": self._round, "drawn": self._drawn, "head": list(self._head)}
        for name, part in (("inner", self._sampler.inner), ("user", self._user)):
            if hasattr(part, "state_dict"):
                state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place, with the user's rows too."""
        if not state:
            return
        if "inner" in state:
            self._sampler.inner.load_state_dict(state["inner"])
        self._begin()
        if "user" in state:
            self._user.load_state_dict(state["user"])  # type: ignore[union-attr]
        elif "inner" not in state:
            for _ in range(state["drawn"]):
                self._draw()
        self._epoch, self._round, self._drawn = state["epoch"], state["round"], state["drawn"]
        self._head = list(state["head"])


class PassedStream(CanaryStream):
    """A stream that Lightning begins anew each pass; canaries go on from the batches done before it.

    Args:
        start: batches done before the next pass; it lies in shared memory, where workers that outlive a pass find it.
        ahead: batches that Lightning reads ahead, which a stateful loader takes for done.
    """

    def __init__(self, *args: Any, start: int = 0, ahead: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = torch.tensor(start, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.ahead = ahead
        self._from = 0

    def __iter__(self) -> Iterator[Any]:
        return _StreamPass(self)

    def rows_from(self, start: int) -> Iterator[Any]:
        """Rows of a pass before which so many batches were trained on."""
        self._from = start
        return super().__iter__()

    def continue_from(self, start: int) -> int:
        """Count a pass that is under way from another batch."""
        self._from = start
        return start

    def _position(self, drawn: int, worker: int, num_workers: int) -> int:
        return self._from * self.schedule.clock.rows_per_batch + super()._position(drawn, worker, num_workers)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # the place of a pass is ours to save, not the user's stream's
            raise AttributeError(name)
        return super().__getattr__(name)


class _StreamPass(Iterator[Any]):
    """One pass of a `PassedStream`; a stateful loader saves how far it is."""

    def __init__(self, stream: PassedStream) -> None:
        self._stream = stream
        self._rows: Iterator[Any] | None = None
        self._start, self._drawn = 0, 0

    def __next__(self) -> Any:
        if self._rows is None:
            self._open(int(self._stream.start))
        row = next(self._rows)  # type: ignore[arg-type]
        self._drawn += 1
        return row

    def _open(self, start: int) -> None:
        self._start, self._rows = start, self._stream.rows_from(start)

    def state_dict(self) -> dict[str, int]:
        """Batches before the pass, and rows of it; nothing before its first row."""
        return {"start": self._start, "drawn": self._drawn} if self._rows is not None else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Read up to a saved place. Batches that were read ahead are lost, as without memguard; canaries go into the next."""
        if not state:
            return
        self._open(state["start"])
        for _ in range(state["drawn"]):
            next(self)
        self._start = self._stream.continue_from(state["start"] - self._stream.ahead)


# -- the user's order


def order_of_rows(facts: LoaderFacts, base: Any, *, lightning_distributes: bool) -> Any:
    """The user's rows over all ranks, in the order of the unguarded run: one process's sampler, or what Lightning makes of it.

    Raises:
        CanaryError: a sampler that deals rows out to ranks itself, or one without a length.
    """
    sampler = facts.sampler
    if not hasattr(sampler, "__len__"):
        raise CanaryError(f"the sampler of the training loader must have a length, got {type(sampler).__name__}.")
    if facts.num_ranks == 1:
        return sampler
    if isinstance(sampler, DistributedSampler) or not lightning_distributes:
        if type(sampler) is DistributedSampler and not sampler.drop_last and sampler.num_replicas == facts.num_ranks:
            return _on_one_rank(copy.copy(sampler))
        raise CanaryError(
            f"rows must be dealt out to ranks by Lightning, or by torch's own DistributedSampler without drop_last, got "
            f"{type(sampler).__name__}: where rows of a rank come from is not known, and canaries would be lost or doubled. "
            "Leave use_distributed_sampler on and pass the sampler of the whole run."
        )
    seed = int(os.getenv("PL_GLOBAL_SEED", "0"))
    if isinstance(sampler, RandomSampler | SequentialSampler):
        return DistributedSampler(base, 1, 0, shuffle=True, seed=seed)
    return _Reordered(sampler, seed)


class _Reordered(DistributedSampler[int]):
    """Rows of a sampler of the user's own in the order that Lightning gives them when it deals them out to ranks."""

    def __init__(self, sampler: Any, seed: int) -> None:
        super().__init__(range(len(sampler)), 1, 0, shuffle=True, seed=seed)  # type: ignore[arg-type]
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        forward = getattr(self.sampler, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __iter__(self) -> Iterator[int]:
        rows = list(self.sampler)
        return (rows[place] for place in super().__iter__())


def _on_one_rank(sampler: Any) -> Any:
    sampler.num_replicas, sampler.rank = 1, 0
    sampler.num_samples = sampler.total_size = len(sampler.dataset)
    return sampler
