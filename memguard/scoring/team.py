"""The ranks of a run that audit one model together, in step.

An audit decides by scores alone, so ranks that hold the same scores take the same decisions and make the same forward calls;
those are collectives where weights are sharded. Split over ranks: batches of whole rows, of suffixes, of token scores, of
sampled and greedy continuations and of near-verbatim searches. Replicated, with the numbers of rank 0 for all: the check of
a model, the encoding of prefixes, walks; everything where ranks compute one forward between them (tensor parallelism).
Run with DDP and FSDP2; FSDP1 and DeepSpeed follow the same rule and are untested. A rank of a sharded model that fails alone,
inside a forward or between two exchanges, ends the job as it does in training: by a mismatch or the group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from memguard.errors import MemguardError, MissingExtraError, ScoringError

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What the work of one rank gave: a value, or why there is none."""

    value: T | None = None
    error: ScoringError | None = None


@dataclass(frozen=True)
class _Said:
    """What one rank hands to the others, and at which point of the audit; a failure is said at any point."""

    what: str
    value: Any = None
    failure: Exception | None = None


class Team:
    """Ranks that run the same audit at the same time.

    Args:
        rank: of this process, 0..size - 1.
        size: number of ranks.
        exchange: takes a value of this rank and gives those of all, in the order of ranks; blocks until all have called it.

    Example:
        >>> team = Team.alone()
        >>> team.rank, team.size, team.gather("a number", 7)
        (0, 1, [7])
    """

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        self.rank, self.size, self._exchange = rank, size, exchange
        self._ended: Exception | None = None

    @classmethod
    def alone(cls) -> Team:
        """One process that talks to nobody."""
        return cls(0, 1, lambda value: [value])

    @classmethod
    def current(cls) -> Team:
        """All ranks of torch's default process group, as the trainer set it up; alone where there is none."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return cls.alone()
        return cls(distributed.get_rank(), distributed.get_world_size(), _all_gather)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1

    def gather(self, what: str, value: T) -> list[T]:
        """The values of all ranks, in their order. Every rank calls it, at the same point of the audit.

        Args:
            what: names the point; ranks that name different ones have gone apart.
            value: of this rank; it is pickled.

        Raises:
            MemguardError: another rank failed since, or the ranks have gone apart: on all ranks alike.
        """
        if self.is_alone:
            return [value]
        if self._ended is not None:
            raise self._ended
        said = self._say(_Said(what, value))
        failures = [one.failure for one in said if one.failure is not None]
        if not failures and any(one.what != what for one in said):
            names = ", ".join(f"'{name}'" for name in sorted({one.what for one in said}))
            failures = [ScoringError(f"all ranks must audit the same things in the same order, got {names}.")]
        if failures:
            self._ended = failures[0]
            raise self._ended
        return [one.value for one in said]

    def agreed(self, what: str, value: T) -> T:
        """The value of rank 0, on every rank."""
        return value if self.is_alone else self.gather(what, value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Let a failure of one rank end the block on all of them, so that none waits for a rank that has left.

        A rank that failed raises its own error, the others the first one of memguard's, or a `ScoringError` that names the
        rank: a foreign message could quote what was scored.
        """
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            if self._ended is not None:
                raise self._ended from None
            is_ours = isinstance(error, MemguardError) and not isinstance(error, MissingExtraError)
            failure = error if is_ours else ScoringError(f"rank {self.rank} failed with {type(error).__name__}.")
            self._say(_Said("", failure=failure))
            raise
        finally:
            self._ended = None

    def _say(self, said: _Said) -> list[_Said]:
        try:
            return self._exchange(said)
        except RuntimeError as error:  # of the process group: nothing can be said any more
            self._ended = ScoringError(f"the other ranks could not be reached: {type(error).__name__}.")
            raise self._ended from None


def _all_gather(value: Any) -> list[Any]:
    from torch import distributed

    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered
