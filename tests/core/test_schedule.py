"""What the schedule counts is what a loader that is replayed batch by batch trains on."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.canaries.schedule import Clock, Count, Mode, Schedule, When
from memguard.errors import CanaryError


def rank_batches(length: int, clock: Clock) -> list[list[list[int]]]:
    """Micro-batches of positions of one epoch, per rank: batches are dealt out in turn, and a short last round is evened
    out with rows from the beginning of the epoch, as accelerate does."""
    per_rank = clock.rows_per_batch // clock.num_ranks
    if not clock.repeats_head:
        return dealt_batches(length, clock, per_rank)
    batches = [list(range(start, min(start + per_rank, length))) for start in range(0, length, per_rank)]
    if clock.drop_last:
        batches = batches[: length // clock.rows_per_batch * clock.num_ranks]
    elif clock.num_ranks > 1 and length % clock.rows_per_batch:
        flat = [position for batch in batches for position in batch]
        wanted = math.ceil(length / clock.rows_per_batch) * clock.rows_per_batch
        while len(flat) < wanted:
            flat += list(range(min(length, wanted - len(flat))))
        batches = [flat[start : start + per_rank] for start in range(0, wanted, per_rank)]
    return [batches[rank :: clock.num_ranks] for rank in range(clock.num_ranks)]


def dealt_batches(length: int, clock: Clock, per_rank: int) -> list[list[list[int]]]:
    """The same where rows are dealt out one by one and ranks are evened with user rows, as Lightning does; those have no
    position here (-1)."""
    total = math.ceil(length / clock.num_ranks) * clock.num_ranks
    rows = [*range(length), *([-1] * (total - length))]
    ranks = [rows[rank :: clock.num_ranks] for rank in range(clock.num_ranks)]
    cut = [[one[start : start + per_rank] for start in range(0, len(one), per_rank)] for one in ranks]
    return [[batch for batch in one if len(batch) == per_rank or not clock.drop_last] for one in cut]


def replay(schedule: Schedule, global_step: int) -> Counter[tuple[int, int]]:
    """(epoch, position) -> how often it is trained on in the first `global_step` optimiser steps."""
    clock, seen, step, epoch = schedule.clock, Counter[tuple[int, int]](), 0, 0
    while step < global_step:
        ranks = rank_batches(len(schedule), clock)
        assert len({len(batches) for batches in ranks}) == 1
        micro_steps = len(ranks[0])
        assert micro_steps > 0
        for first in range(0, micro_steps, clock.accumulation):
            if step == global_step:
                break
            for batches in ranks:
                for batch in batches[first : first + clock.accumulation]:
                    seen.update((epoch, position) for position in batch)
            step += 1
        epoch += 1
    return seen


def sightings(schedule: Schedule, global_step: int) -> list[int]:
    """How often each planted canary is trained on, by replay."""
    counts = [0] * len(schedule.repetitions)
    for (epoch, position), times in replay(schedule, global_step).items():
        canary = schedule.cells(epoch).get(position)
        if canary is not None:
            counts[canary] += times
    return counts


@st.composite
def schedules(draw: st.DrawFn, *, count: Count | None = None) -> Schedule:
    counted: Count = count or draw(st.sampled_from(["per_epoch", "total"]))
    is_stream = counted == "total" and draw(st.booleans())
    modes: list[Mode] = ["append", "replace", "splice"] if counted == "per_epoch" or is_stream else ["replace", "splice"]
    ranks = draw(st.sampled_from([1, 1, 2, 3]))
    schedule = Schedule(
        num_rows=draw(st.integers(1, 60)),
        repetitions=tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))),
        mode=draw(st.sampled_from(modes)),
        count=counted,
        seed=draw(st.integers(0, 2**48)),
        clock=Clock(
            rows_per_batch=ranks * draw(st.integers(1, 7)),
            accumulation=draw(st.integers(1, 5)),
            max_steps=draw(st.integers(1, 40)),
            drop_last=draw(st.booleans()),
            num_ranks=ranks,
            repeats_head=draw(st.booleans()),
        ),
        when=draw(st.sampled_from(["uniform", "early", "late"])) if counted == "total" else "uniform",
        is_stream=is_stream,
    )
    try:
        for epoch in range(schedule.num_epochs):
            schedule.cells(epoch)
    except CanaryError:
        assume(False)
    assume(not schedule.clock.drop_last or schedule._rows_dealt() >= schedule.clock.rows_per_batch)
    return schedule


@given(schedules())
@settings(max_examples=400, deadline=None)
def test_counts_equal_a_replay_of_the_loader_after_every_step(schedule: Schedule) -> None:
    for step in {0, 1, schedule.clock.max_steps // 2, schedule.clock.max_steps}:
        assert schedule.counts(step) == sightings(schedule, step)


@given(schedules(count="total"))
@settings(max_examples=300, deadline=None)
def test_a_total_is_met_exactly_at_every_horizon(schedule: Schedule) -> None:
    assert sightings(schedule, schedule.clock.max_steps) == list(schedule.repetitions)
    assert schedule.counts(schedule.clock.max_steps) == list(schedule.repetitions)


@given(schedules(count="per_epoch"))
@settings(max_examples=300, deadline=None)
def test_every_whole_epoch_shows_each_canary_as_often_as_planned(schedule: Schedule) -> None:
    whole = schedule.clock.max_steps // schedule.steps_per_epoch
    assert sightings(schedule, whole * schedule.steps_per_epoch) == [whole * number for number in schedule.repetitions]


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_steps_and_epochs_are_those_of_the_loader(schedule: Schedule) -> None:
    micro_steps = len(rank_batches(len(schedule), schedule.clock)[0])
    assert schedule.steps_per_epoch == math.ceil(micro_steps / schedule.clock.accumulation)
    trained = replay(schedule, schedule.clock.max_steps)
    assert schedule.num_epochs == 1 + max(epoch for epoch, _ in trained)


@given(schedules())
@settings(max_examples=300, deadline=None)
def test_no_cell_is_dropped_or_trained_twice(schedule: Schedule) -> None:
    horizon = schedule.num_epochs * schedule.steps_per_epoch
    trained = replay(schedule, schedule.clock.max_steps if schedule.count == "total" else horizon)
    for epoch in range(schedule.num_epochs):
        cells = schedule.cells(epoch)
        low, high = schedule.zone(epoch)
        assert all(low <= position < high for position in cells)
        assert all(trained[epoch, position] == 1 for position in range(low, high))


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_cells_are_the_same_on_every_rank_and_after_every_resume(schedule: Schedule) -> None:
    fresh = pickle.loads(pickle.dumps(dataclasses.replace(schedule)))
    for epoch in reversed(range(schedule.num_epochs)):  # in another order
        assert fresh.cells(epoch) == schedule.cells(epoch)
    assert fresh == schedule
    assert hash(fresh) == hash(schedule)


@given(schedules(count="per_epoch"))
@settings(max_examples=200, deadline=None)
def test_cells_of_an_epoch_hold_each_canary_as_often_as_planned(schedule: Schedule) -> None:
    for epoch in range(min(3, schedule.num_epochs)):
        held = Counter(schedule.cells(epoch).values())
        assert [held[index] for index in range(len(schedule.repetitions))] == list(schedule.repetitions)


def test_the_replay_shares_batches_as_accelerate_does() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    from torch.utils.data import BatchSampler, SequentialSampler

    for ranks in (1, 2, 3):
        for per_rank in (1, 2, 5):
            for length in range(1, 33):
                for drop_last in (False, True):
                    clock = Clock(ranks * per_rank, 1, 1, drop_last, ranks)
                    inner = BatchSampler(SequentialSampler(range(length)), per_rank, drop_last)
                    theirs = [list(data_loader.BatchSamplerShard(inner, ranks, rank)) for rank in range(ranks)]
                    assert rank_batches(length, clock) == (theirs if ranks > 1 else [list(inner)])


# -- by hand


def schedule_of(**fields: Any) -> Schedule:
    clock = {"rows_per_batch": 4, "accumulation": 2, "max_steps": 10, "drop_last": False, "num_ranks": 1}
    clock |= {key: fields.pop(key) for key in list(fields) if key in clock}
    defaults: dict[str, Any] = {"num_rows": 22, "repetitions": (1, 4), "mode": "replace", "count": "per_epoch", "seed": 3}
    return Schedule(**(defaults | fields), clock=Clock(**clock))


def test_an_epoch_is_as_long_as_its_rows_and_its_appended_canaries() -> None:
    assert len(schedule_of(mode="append")) == 27
    assert len(schedule_of(mode="replace")) == len(schedule_of(mode="splice")) == 22


def test_steps_are_rounded_up_to_the_last_part_of_an_accumulation() -> None:
    # 22 rows of 4: 6 batches (5 whole), 2 a step: 3 steps; 10 steps begin 4 epochs.
    assert schedule_of().steps_per_epoch == 3
    assert schedule_of(drop_last=True).steps_per_epoch == 3
    assert schedule_of(num_rows=16, drop_last=True).steps_per_epoch == 2
    assert schedule_of().num_epochs == 4


def test_the_dropped_tail_the_evened_head_and_the_unreached_rest_are_outside_the_zone() -> None:
    assert schedule_of().zone(0) == (0, 22)
    assert schedule_of(drop_last=True).zone(0) == (0, 20)
    assert schedule_of(num_ranks=2).zone(0) == (4, 22)
    assert schedule_of(num_ranks=2, num_rows=24).zone(0) == (0, 24)
    assert schedule_of(num_ranks=2, drop_last=True).zone(0) == (0, 20)
    # The fourth epoch of ten steps has one step: 8 rows.
    assert schedule_of(count="total").zone(3) == (0, 8)
    assert schedule_of(count="total").zone(4) == (0, 0)


def test_appended_canaries_cannot_be_counted_in_total() -> None:
    with pytest.raises(ValueError, match="mode 'append' counts per epoch; use 'replace' or 'splice'"):
        schedule_of(mode="append", count="total")


def test_more_sightings_than_usable_rows_of_an_epoch_are_refused() -> None:
    with pytest.raises(CanaryError, match="21 canary sightings must fit in the 20 usable rows of epoch 0"):
        schedule_of(repetitions=(21,), drop_last=True).cells(0)
    assert len(schedule_of(repetitions=(20,), drop_last=True).cells(0)) == 20


def test_more_sightings_than_usable_rows_of_the_run_are_refused() -> None:
    # 3 epochs of 22 rows and 8 rows: 74.
    assert sum(schedule_of(repetitions=(74,), count="total").counts(10)) == 74
    with pytest.raises(CanaryError, match="75 canary sightings must fit in the 74 usable rows of the run"):
        schedule_of(repetitions=(75,), count="total").cells(0)


def test_data_shorter_than_a_batch_that_is_dropped_holds_no_canary() -> None:
    with pytest.raises(CanaryError, match="must fit in the 0 usable rows of epoch 0"):
        schedule_of(num_rows=3, drop_last=True).cells(0)


def test_another_seed_and_another_epoch_place_canaries_elsewhere() -> None:
    big = schedule_of(num_rows=10_000, repetitions=(20, 20))
    assert big.cells(0) != big.cells(1)
    assert big.cells(0) != dataclasses.replace(big, seed=4).cells(0)


def test_cells_are_uniform_over_the_zone() -> None:
    # 22 rows, 5 sightings, 2,000 epochs: every row is taken 5 times in 22.
    taken = Counter(position for epoch in range(2000) for position in schedule_of(max_steps=9000).cells(epoch))
    assert stats.chisquare([taken[row] for row in range(22)]).pvalue > 1e-6


def test_a_total_is_spread_over_the_run_by_usable_rows() -> None:
    # Epochs of 22, 22, 22 and 8 rows: shares of 74 over many seeds.
    shares = Counter(
        epoch
        for seed in range(400)
        for one in [schedule_of(repetitions=(5, 5), count="total", seed=seed)]
        for epoch in range(4)
        for _ in one.cells(epoch)
    )
    expected = [4000 * rows / 74 for rows in (22, 22, 22, 8)]
    assert stats.chisquare([shares[epoch] for epoch in range(4)], expected).pvalue > 1e-6


@pytest.mark.parametrize(("when", "window"), [("early", range(0, 19)), ("late", range(55, 74))])
def test_early_and_late_totals_stand_in_the_first_and_last_quarter_of_the_run(when: When, window: range) -> None:
    # 3 epochs of 22 rows and 8 rows: 74 usable rows, of which a quarter is 19, rounded up.
    schedule = schedule_of(repetitions=(3, 12), count="total", when=when)
    places = sorted(22 * epoch + position for epoch in range(4) for position in schedule.cells(epoch))
    assert len(places) == 15
    assert all(place in window for place in places)
    full = schedule_of(repetitions=(19,), count="total", when=when)
    assert sorted(22 * epoch + position for epoch in range(4) for position in full.cells(epoch)) == list(window)
    with pytest.raises(
        CanaryError, match=f"20 canary sightings must fit in the {'first' if when == 'early' else 'last'} quarter, 19"
    ):
        schedule_of(repetitions=(20,), count="total", when=when).cells(0)


def test_a_window_or_a_stream_speaks_of_the_whole_run() -> None:
    with pytest.raises(ValueError, match="'early' speaks of a whole run; count must be 'total'"):
        schedule_of(when="early")
    with pytest.raises(ValueError, match="a stream has no epochs; count must be 'total'"):
        schedule_of(is_stream=True)


def test_a_stream_is_one_epoch_as_long_as_the_run_in_every_mode() -> None:
    for mode in ("append", "replace", "splice"):
        schedule = schedule_of(mode=mode, count="total", is_stream=True)
        assert len(schedule) == 10 * 2 * 4
        assert (schedule.num_epochs, schedule.steps_per_epoch) == (1, 10)
        assert schedule.counts(10) == [1, 4]
