"""When an audit is due, what it may cost, and what a long one shows."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.audit.config import Cadence
from memguard.callbacks.cadence import Budget, is_due, steps_between
from memguard.callbacks.progress import LOG_EVERY_S, PATIENCE_S, AuditProgress
from memguard.errors import InputError


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def budget_of(max_overhead: float | None) -> tuple[Budget, Clock]:
    clock = Clock()
    return Budget(max_overhead, clock=clock), clock


def spend(budget: Budget, clock: Clock, seconds: float, *, full: bool | None = False) -> None:
    with budget.audit(full=full):
        clock.now += seconds


# -- when


def test_a_cadence_in_epochs_is_one_in_steps_of_this_run() -> None:
    assert steps_between(Cadence(epochs=0.25), 10) == 2.5
    assert steps_between(Cadence(epochs=2), 10) == 20.0
    assert steps_between(Cadence(epochs=0.01), 10) == 1.0  # no more often than there are steps
    assert steps_between(Cadence(steps=7), None) == 7.0
    assert steps_between(None, 10) is None


def test_a_stream_has_no_epochs_to_count_in() -> None:
    with pytest.raises(InputError, match=r"audit\.every must be in steps for a stream, which has no epochs, got epochs"):
        steps_between(Cadence(epochs=0.5), None)


def test_steps_of_a_fraction_of_an_epoch_meet_the_epoch_end() -> None:
    # a tenth of 7 steps is 0.7 and not exact in binary; a third of 7 is 2.33
    assert [step for step in range(1, 15) if is_due(step, 7 / 3)] == [3, 5, 7, 10, 12, 14]
    assert all(is_due(7 * epoch, 0.3 * 7) for epoch in range(3, 300, 3))


@given(interval=st.floats(1.0, 50.0), begin=st.integers(0, 200))
def test_a_cadence_is_decided_by_the_step_alone_so_that_a_resume_does_not_move_it(interval: float, begin: int) -> None:
    due = [step for step in range(1, 400) if is_due(step, interval)]
    assert [step for step in range(begin + 1, 400) if is_due(step, interval)] == [step for step in due if step > begin]
    assert len(due) == pytest.approx(399 / interval, abs=1)
    gaps = {after - before for before, after in itertools.pairwise(due)}
    assert gaps <= {math.floor(interval), math.ceil(interval)}


def test_nothing_is_due_without_a_cadence_or_before_the_first_step() -> None:
    assert not is_due(5, None)
    assert not is_due(0, 1.0)


# -- what it may cost


def train_with(budget: Budget, clock: Clock, *, interval: float, steps: int, audit_s: float) -> list[int]:
    """Steps of one second each, audits of `audit_s` where due and allowed; the steps that were audited."""
    audited = []
    for step in range(1, steps + 1):
        clock.now += 1.0
        if is_due(step, interval) and budget.allows_another():
            spend(budget, clock, audit_s)
            audited.append(step)
    return audited


def test_audits_of_the_cadence_wait_until_training_has_paid_for_them() -> None:
    budget, clock = budget_of(0.02)
    audited = train_with(budget, clock, interval=50, steps=10_000, audit_s=10)
    # The first has no measured length and runs. The k-th needs 10 k s of 2% of the training: 500 k s.
    assert audited == [50, *range(1000, 10_001, 500)]
    assert budget.overhead == pytest.approx(0.02)
    assert budget.num_waited == 10_000 // 50 - len(audited)


def test_without_a_limit_or_with_cheap_audits_none_waits() -> None:
    for limit, audit_s in ((None, 100.0), (0.02, 0.9)):
        budget, clock = budget_of(limit)
        assert train_with(budget, clock, interval=50, steps=500, audit_s=audit_s) == list(range(50, 501, 50))
        assert budget.num_waited == 0


def test_named_moments_never_wait_but_count() -> None:
    budget, clock = budget_of(0.1)
    spend(budget, clock, 30.0, full=True)  # the audit at the start, 300 s of the budget
    spend(budget, clock, 2.0)
    audited = train_with(budget, clock, interval=10, steps=500, audit_s=2)
    assert audited[0] == 340  # (30 + 2 + 2) / 0.1
    assert audited[1] == 360


def test_the_next_audit_is_taken_to_be_as_long_as_the_last_short_one() -> None:
    budget, clock = budget_of(0.02)
    assert budget.next_seconds is None
    spend(budget, clock, 60.0, full=True)
    assert budget.next_seconds == 60.0
    spend(budget, clock, 3.0)
    spend(budget, clock, 70.0, full=True)
    spend(budget, clock, 0.01, full=None)  # figures of a moment ago, written beside a checkpoint
    assert budget.next_seconds == 3.0
    assert budget.audits == pytest.approx(133.01)


def test_an_audit_that_fails_counts_too() -> None:
    budget, clock = budget_of(0.02)

    def fails() -> None:
        with budget.audit(full=False):
            clock.now += 4.0
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fails()
    clock.now += 6.0
    assert (budget.audits, budget.training_seconds) == (4.0, 6.0)


def test_the_cadence_in_force_is_the_multiple_that_the_limit_allows() -> None:
    budget, clock = budget_of(0.02)
    assert budget.stretched(50.0, steps=0) == 50.0
    spend(budget, clock, 10.0)
    clock.now += 200.0  # 100 steps of two seconds: 10 s are 2% of 500 s, or 250 steps
    assert budget.stretched(50.0, steps=100) == 250.0
    assert budget.stretched(60.0, steps=100) == 300.0
    assert budget.stretched(400.0, steps=100) == 400.0
    assert budget.stretched(None, steps=100) is None


def test_the_estimate_names_seconds_share_and_the_cadence_that_follows() -> None:
    budget, clock = budget_of(0.02)
    clock.now += 100.0
    assert budget.describe(50.0, steps=50) is None  # no audit was measured yet
    spend(budget, clock, 10.0)
    assert budget.describe(500.0, steps=50) == "an audit takes about 10 s; every 500 steps that is 1.0% of training."
    assert budget.describe(50.0, steps=50) == (
        "an audit takes about 10 s; every 50 steps that is 10.0% of training, above max_overhead 2.0%: "
        "audits come about every 250 steps."
    )
    assert budget.describe(None, steps=50) is None


# -- what a long one shows


def test_a_short_audit_shows_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), AuditProgress("audit at step 5", on_terminal=True, clock=clock) as progress:
        clock.now += PATIENCE_S - 1
        progress(10, 20)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_a_long_audit_logs_a_line_now_and_then_where_there_is_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), AuditProgress("audit at step 5", on_terminal=False, clock=clock) as progress:
        for done in range(1, 5):
            clock.now += LOG_EVERY_S / 2
            progress(done, 4)
    assert [record.message for record in caplog.records] == [
        "audit at step 5: 1 of 4 rows scored.",
        "audit at step 5: 3 of 4 rows scored.",
    ]


def test_a_long_audit_shows_a_bar_on_a_terminal_and_takes_it_away(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    clock = Clock()
    with AuditProgress("audit at step 5", on_terminal=True, clock=clock) as progress:
        clock.now += PATIENCE_S
        progress(1, 4)
        progress(2, 4)
        assert progress._bar.tasks[0].percentage == 50.0
        bar = progress._bar
    assert not bar.live.is_started
    assert "audit at step 5" in capfd.readouterr().err


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO), AuditProgress("audit", is_shown=False, on_terminal=True, clock=clock) as progress:
        clock.now += 100 * PATIENCE_S
        progress(1, 4)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
