"""What one rank does, or each of them, ends alike on all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from memguard.callbacks.together import jointly, on_first, reason_of
from memguard.errors import InputError, ScoringError
from memguard.scoring.team import Team

PATIENCE_S = 30.0  # until a rank that waits for one that left is a failure, not a hang


def on_two_ranks(work: Callable[[Team], Any]) -> list[Any]:
    """What `work` gave on each of two threads, or the exception it raised."""
    barrier, said, results = threading.Barrier(2, timeout=PATIENCE_S), [None, None], [None, None]

    def run(rank: int) -> None:
        def exchange(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait()
            both = list(said)
            barrier.wait()
            return both

        try:
            results[rank] = work(Team(rank, 2, exchange))
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def fail_on(rank: int, team: Team, error: Exception) -> int:
    if team.rank == rank:
        raise error
    return team.rank


def test_the_first_ranks_work_is_done_once_and_its_value_is_everywhere() -> None:
    done: list[int] = []

    def work(team: Team) -> Any:
        return on_first(team, "a file", lambda: done.append(team.rank) or "read")

    assert on_two_ranks(work) == ["read", "read"]
    assert done == [0]


def test_a_failure_of_the_first_rank_is_raised_on_all_of_them() -> None:
    first, second = on_two_ranks(lambda team: on_first(team, "a file", lambda: fail_on(0, team, InputError("no such file."))))
    assert isinstance(first, InputError)
    assert isinstance(second, ScoringError)
    assert str(second) == "rank 0 failed: no such file."


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_of_any_rank_is_raised_on_all_of_them(failing: int) -> None:
    found = on_two_ranks(lambda team: jointly(team, "a part", lambda: fail_on(failing, team, KeyError("4000 1234"))))
    assert isinstance(found[failing], KeyError)
    assert isinstance(found[1 - failing], ScoringError)
    assert str(found[1 - failing]) == f"rank {failing} failed: KeyError."


def test_each_rank_keeps_its_own_value_where_none_fails() -> None:
    assert on_two_ranks(lambda team: jointly(team, "a part", lambda: team.rank + 10)) == [10, 11]


def test_ranks_meet_again_after_a_failure() -> None:
    def work(team: Team) -> list[int]:
        with pytest.raises((KeyError, ScoringError)):
            jointly(team, "a part", lambda: fail_on(1, team, KeyError("x")))
        return team.gather("afterwards", team.rank)

    assert on_two_ranks(work) == [[0, 1], [0, 1]]


def test_one_process_alone_needs_nobody() -> None:
    assert on_first(Team.alone(), "a file", lambda: 3) == 3
    with pytest.raises(InputError, match="no such file"):
        jointly(Team.alone(), "a part", lambda: fail_on(0, Team.alone(), InputError("no such file.")))


def test_a_reason_quotes_no_foreign_message() -> None:
    assert reason_of(InputError("the plan is missing.")) == "the plan is missing."
    assert reason_of(OSError(errno.ENOSPC, "No space left on device", "/secret/4000")) == "OSError: No space left on device."
    assert reason_of(ValueError("4000 1234")) == "ValueError."
