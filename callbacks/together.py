"""Work of one rank, or of each, whose failure all ranks learn of at one point: none waits for one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memguard.errors import MemguardError, ScoringError
from memguard.scoring.team import Team

T = TypeVar("T")


def on_first(team: Team, what: str, work: Callable[[], T]) -> T:
    """What the first rank's work gives, on all ranks; every rank calls it.

    Args:
        team: the ranks.
        what: names the point.
        work: done on the first rank alone; holds no exchange between ranks.

    Raises:
        Exception: what the work raised, on the first rank; a `ScoringError` with its reason on the others.
    """
    value: T | None = None
    failure: Exception | None = None
    if team.rank == 0:
        try:
            value = work()
        except Exception as error:
            failure = error
    value, reason = team.agreed(what, (value, reason_of(failure) if failure is not None else None))
    if failure is not None:
        raise failure
    if reason is not None:
        raise ScoringError(f"rank 0 failed: {reason}")
    return value  # type: ignore[return-value]


def jointly(team: Team, what: str, work: Callable[[], T]) -> T:
    """What this rank's work gives, once all ranks have done theirs; every rank calls it.

    Args:
        team: the ranks.
        what: names the point.
        work: done on every rank; holds no exchange between ranks.

    Raises:
        Exception: what the work raised, on its rank; a `ScoringError` with rank and reason on the others.
    """
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    reasons = team.gather(what, reason_of(failure) if failure is not None else None)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise ScoringError(f"rank {rank} failed: {reason}")
    return value  # type: ignore[return-value]


def reason_of(error: Exception) -> str:
    """Why something failed, in a sentence without a secret: a foreign message could quote what it was given.

    Example:
        >>> reason_of(KeyError("4000 1234 5678 9017"))
        'KeyError.'
    """
    if isinstance(error, MemguardError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}."
    return f"{type(error).__name__}."
