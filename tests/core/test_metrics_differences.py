"""Differences: exact where they can be, at their level where they are not, and nothing at all between equals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.metrics.differences import (
    MAX_EXACT_PAIRS,
    NUM_FLIPS,
    SMALL,
    DifferenceEstimate,
    estimate_paired_difference,
    estimate_share_difference,
    estimate_unpaired_difference,
    rank_sum_p_value,
    sign_flip_p_value,
)

DRAWS = 2_000
SD_LEVEL = math.sqrt(0.05 * 0.95 / DRAWS)  # .0049

values = st.lists(st.integers(-6, 6).map(lambda number: number / 2), min_size=1, max_size=9)


# -- pairs


def test_six_pairs_give_the_median_and_the_range_with_their_exact_coverage() -> None:
    # Differences 2, 3, 1.5, 3, 1.5, 3.5: median (2 + 3) / 2; the range holds the median unless all six fall on one side,
    # 1 - 2 / 64 = .96875. Sign flips: only all + and all - reach a sum of 14.5, 2 / 64.
    found = estimate_paired_difference([3.0, 5.0, 4.0, 6.0, 5.0, 4.5], [1.0, 2.0, 2.5, 3.0, 3.5, 1.0])
    assert (found.value, found.low, found.high, found.confidence) == (2.5, 1.5, 3.5, 0.96875)
    assert found.p_value == 2 / 64
    assert (found.num_new, found.num_old, found.method) == (6, 6, "paired order statistics, median")
    assert found.flags == ()


def test_from_twenty_pairs_on_the_interval_is_that_of_a_one_sample_t_test() -> None:
    rng = np.random.default_rng(1)
    for number in (SMALL, 57):
        new, old = rng.exponential(size=(2, number))
        found = estimate_paired_difference(new, old, confidence=0.9)
        reference = stats.ttest_1samp(new - old, 0.0).confidence_interval(0.9)
        assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=1e-12)
        assert found.value == pytest.approx(float(np.mean(new - old)))
        assert (found.method, found.confidence) == ("paired t, mean", 0.9)


@pytest.mark.parametrize("number", [1, 5, 19, 20, 200])
def test_identical_figures_differ_by_exactly_nothing(number: int) -> None:
    figures = np.random.default_rng(number).exponential(size=number)
    found = estimate_paired_difference(figures, figures.copy())
    assert (found.value, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert found.flags == ("identical",)


def test_equal_differences_leave_an_interval_without_width_and_say_so() -> None:
    old = np.arange(8.0)
    found = estimate_paired_difference(old + 2.0, old)
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    assert found.flags == ("no spread",)
    assert found.p_value == 2 / 2**8


def test_too_few_pairs_for_the_confidence_are_flagged_with_what_they_reach() -> None:
    found = estimate_paired_difference([3.0, 4.0, 6.0, 5.0], [1.0, 1.0, 1.0, 1.0])
    assert (found.low, found.high, found.confidence) == (2.0, 5.0, 1 - 2**-3)
    assert found.flags == ("too few",)
    alone = estimate_paired_difference([3.0], [1.0])
    assert (alone.value, alone.confidence, alone.p_value, alone.flags) == (2.0, 0.0, 1.0, ("too few",))


@given(values, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_changing_sides_changes_the_sign_and_nothing_else(new: list[float], shuffle: object) -> None:
    old = list(new)
    shuffle.shuffle(old)  # type: ignore[attr-defined]
    for estimate in (estimate_paired_difference, estimate_unpaired_difference):
        there, back = estimate(new, old), estimate(old, new)
        assert (back.value, back.low, back.high) == (-there.value, -there.high, -there.low)
        assert back.p_value == pytest.approx(there.p_value)
        assert back.flags == there.flags


# -- sign flips


def _flipped_by_hand(differences: list[float]) -> float:
    sums = [
        abs(sum(sign * one for sign, one in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(one >= abs(sum(differences)) for one in sums) / len(sums)


@given(values)
@settings(deadline=None)
def test_sign_flips_are_counted_exactly_with_ties(differences: list[float]) -> None:
    assert sign_flip_p_value(differences) == _flipped_by_hand(differences)


def test_sign_flips_agree_with_a_permutation_test() -> None:
    differences = np.random.default_rng(3).normal(0.4, 1.0, size=11)
    reference = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=2**11)
    assert sign_flip_p_value(differences) == pytest.approx(reference.pvalue, abs=1e-12)


def test_sign_flips_of_many_pairs_are_drawn_and_agree_with_the_exact_count() -> None:
    differences = np.random.default_rng(4).normal(0.3, 1.0, size=MAX_EXACT_PAIRS)
    exact = sign_flip_p_value(differences)
    drawn = sign_flip_p_value([*differences, 0.0])  # one more pair that carries nothing
    assert 0.02 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / NUM_FLIPS))
    assert sign_flip_p_value(np.ones(60)) == 1 / (NUM_FLIPS + 1)  # a chance of 2^-59 is never drawn, and never 0


# -- two groups


def test_four_against_four_give_the_shift_and_the_range_of_all_differences() -> None:
    # 16 differences from 5 - 3.5 to 9 - 1. At 95% one may be cut off neither side: P(U = 0) = 1 / 70 < .025 <= P(U <= 1) =
    # 2 / 70. Each new value lies above each old one: p = 2 / 70.
    found = estimate_unpaired_difference([5.0, 6.5, 7.0, 9.0], [1.0, 1.5, 3.5, 2.0])
    assert (found.low, found.high) == (1.5, 8.0)
    assert found.confidence == pytest.approx(1 - 2 / 70)
    assert found.p_value == pytest.approx(2 / 70)
    # In order: 1.5, 3, 3, 3.5, 3.5, 4, 4.5, 5 | 5, 5, 5.5, 5.5, 6, 7, 7.5, 8.
    assert found.value == 5.0


@given(st.integers(1, 19), st.integers(1, 30), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_rank_sum_test_agrees_with_mann_whitney_where_nothing_ties(num_new: int, num_old: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    new, old = rng.normal(0.5, 1, size=num_new), rng.normal(size=num_old)
    reference = stats.mannwhitneyu(new, old, method="exact").pvalue
    assert rank_sum_p_value(new, old) == pytest.approx(reference, rel=1e-9)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=5))
@settings(deadline=None)
def test_the_rank_sum_test_counts_ties_exactly(new: list[int], old: list[int]) -> None:
    ranks = stats.rankdata([*new, *old])
    sums = [sum(picked) for picked in itertools.combinations(ranks, len(new))]
    observed = sum(ranks[: len(new)])
    tails = [sum(one <= observed for one in sums), sum(one >= observed for one in sums)]
    assert rank_sum_p_value(new, old) == pytest.approx(min(1.0, 2 * min(tails) / len(sums)))


@given(st.integers(4, 19), st.integers(4, 25), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_shift_interval_holds_exactly_the_shifts_that_the_rank_sum_test_accepts(
    num_new: int, num_old: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    new, old = rng.exponential(size=num_new) + 1.0, rng.exponential(size=num_old)
    found = estimate_unpaired_difference(new, old)
    for shift, accepted in ((found.low + 1e-7, True), (found.high - 1e-7, True), (found.low - 1e-7, False)):
        assert (rank_sum_p_value(new - shift, old) > 0.05) is accepted


def test_from_twenty_on_both_sides_the_interval_and_test_are_those_of_welch() -> None:
    rng = np.random.default_rng(6)
    new, old = rng.exponential(2.0, size=23), rng.exponential(1.0, size=40)
    found, reference = estimate_unpaired_difference(new, old, confidence=0.9), stats.ttest_ind(new, old, equal_var=False)
    interval = reference.confidence_interval(0.9)
    # scipy 1.11's quantile of t is off by up to 6e-10 in probability, newer ones by nothing seen
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-7)
    assert found.p_value == pytest.approx(reference.pvalue, rel=1e-10)
    assert found.method == "Welch t, difference of means"
    assert "Hodges" in estimate_unpaired_difference(new, old[:19]).method


@pytest.mark.parametrize("number", [5, 30])
def test_groups_that_are_all_at_one_value_differ_by_it(number: int) -> None:
    at_cap = estimate_unpaired_difference(np.full(number, 10.0), np.full(number, 10.0))
    assert (at_cap.value, at_cap.low, at_cap.high, at_cap.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert at_cap.flags == ("no spread",)
    apart = estimate_unpaired_difference(np.full(number, 10.0), np.full(number, 4.0))
    assert (apart.low, apart.value, apart.high) == (6.0, 6.0, 6.0)
    assert apart.p_value < 0.01


def test_two_against_two_are_too_few_for_any_interval_at_ninety_five_percent() -> None:
    found = estimate_unpaired_difference([4.0, 5.0], [1.0, 2.0])
    assert (found.low, found.high) == (2.0, 4.0)
    assert found.confidence == pytest.approx(1 - 2 / 6)  # C(4, 2) = 6 orders, the two extreme ones outside
    assert found.flags == ("too few",)


# -- simulated coverage, on exposures: about exponential with a mean of 1.44 bits


def _exposures(rng: np.random.Generator, number: int) -> NDArray[np.float64]:
    return np.asarray(-np.log2(rng.random(number)))


@pytest.mark.parametrize("shift", [0.0, 2.0])
@pytest.mark.parametrize("number", [8, 16, 40])
@pytest.mark.parametrize("estimate", [estimate_paired_difference, estimate_unpaired_difference])
def test_intervals_of_exposure_cover_a_shift_and_its_test_keeps_its_level(
    estimate: Callable[..., DifferenceEstimate], number: int, shift: float
) -> None:
    # Seen at n = 8, 16, 40: pairs .995, .983, .952 and groups .952, .953, .952; p <= .05 in .042 to .049 of the nulls.
    rng = np.random.default_rng(7)
    found = [estimate(_exposures(rng, number) + shift, _exposures(rng, number)) for _ in range(DRAWS)]
    covered = np.mean([one.low <= shift <= one.high for one in found])
    assert covered >= 0.95 - 3 * SD_LEVEL
    assert abs(covered - found[0].confidence) <= 3 * SD_LEVEL
    rejected = np.mean([one.p_value <= 0.05 for one in found])
    assert rejected <= 0.05 + 3 * SD_LEVEL if shift == 0.0 else rejected >= 0.7


@pytest.mark.parametrize(
    ("estimate", "sizes", "least"),
    [
        (estimate_paired_difference, (20, 20), 0.92),  # seen .933
        (estimate_paired_difference, (40, 40), 0.925),  # seen .940
        (estimate_unpaired_difference, (20, 100), 0.91),  # seen .923
    ],
)
def test_t_intervals_of_exposure_that_also_spreads_fall_a_little_short(
    estimate: Callable[..., DifferenceEstimate], sizes: tuple[int, int], least: float
) -> None:
    rng = np.random.default_rng(8)
    truth, hits = (3.4 - 1) / math.log(2.0), 0
    for _ in range(DRAWS):
        found = estimate(3.4 * _exposures(rng, sizes[0]), _exposures(rng, sizes[1]))
        hits += found.low <= truth <= found.high
    assert least <= hits / DRAWS < 0.95


# -- shares


def test_a_difference_of_shares_is_worked_out_by_hand() -> None:
    # Centre 4/18 - 13/18 = -1/2; variance (4*14 + 13*5) / 18^3 = .0207476, 1.959964 of its root is .282314.
    found = estimate_share_difference(3, 16, 12, 16)
    assert found.value == 3 / 16 - 12 / 16
    assert (found.low, found.high) == pytest.approx((-0.782314, -0.217686), abs=1e-6)
    # Hypergeometric: 15 of 32 were hit; P(3 or fewer of 16) doubles by symmetry.
    assert found.p_value == pytest.approx(2 * stats.hypergeom.cdf(3, 32, 15, 16), rel=1e-9)


def test_shares_without_a_hit_keep_an_interval() -> None:
    # 1/18 on both sides: 1.959964 * sqrt(2 * 17 / 18^3) = .149651.
    found = estimate_share_difference(0, 16, 0, 16)
    assert (found.value, found.p_value) == (0.0, 1.0)
    assert (found.low, found.high) == pytest.approx((-0.149651, 0.149651), abs=1e-6)
    extreme = estimate_share_difference(0, 16, 16, 16)
    assert extreme.low == -1.0 <= extreme.value <= extreme.high < -0.6


@given(st.integers(1, 300), st.integers(1, 300), st.data())
@settings(deadline=None, max_examples=60)
def test_the_interval_of_a_share_difference_holds_what_was_observed(num_new: int, num_old: int, data: st.DataObject) -> None:
    counts = data.draw(st.integers(0, num_new)), data.draw(st.integers(0, num_old))
    found = estimate_share_difference(counts[0], num_new, counts[1], num_old)
    assert -1.0 <= found.low <= found.value <= found.high <= 1.0
    assert 0.0 < found.p_value <= 1.0


@pytest.mark.parametrize(("number", "least"), [(8, 0.90), (16, 0.91), (40, 0.92)])
def test_the_exact_coverage_of_share_differences_is_what_the_docstring_says(number: int, least: float) -> None:
    # Over a grid of true shares, by summing binomial probabilities: nothing is drawn. Least .902, .917, .926.
    shares, counts = np.linspace(0, 1, 101), range(number + 1)
    ends = np.array(
        [[(one.low, one.high) for one in (estimate_share_difference(i, number, j, number) for j in counts)] for i in counts]
    )
    chances = stats.binom.pmf(np.arange(number + 1)[:, None], number, shares)
    covered = np.empty((shares.size, shares.size))
    for row, column in itertools.product(range(shares.size), repeat=2):
        truth = shares[row] - shares[column]
        inside = (ends[..., 0] <= truth + 1e-12) & (truth <= ends[..., 1] + 1e-12)
        covered[row, column] = chances[:, row] @ inside @ chances[:, column]
    assert covered.min() >= least
    assert 0.95 <= covered.mean() <= 0.965


# -- refusals


@pytest.mark.parametrize("estimate", [estimate_paired_difference, estimate_unpaired_difference])
def test_what_is_no_list_of_numbers_is_refused(estimate: Callable[..., DifferenceEstimate]) -> None:
    with pytest.raises(ValueError, match=r"new must be a list of at least one number, got shape \(0,\)"):
        estimate([], [])
    with pytest.raises(ValueError, match=r"old must be a list of at least one number, got shape \(1, 2\)"):
        estimate([1.0, 2.0], [[1.0, 2.0]])
    with pytest.raises(ValueError, match="old must be finite, got nan at place 1"):
        estimate([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match="new must be finite, got inf at place 0"):
        estimate([math.inf, 2.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 95"):
        estimate([1.0, 2.0], [1.0, 3.0], confidence=95)


def test_pairs_of_unequal_number_are_refused() -> None:
    with pytest.raises(ValueError, match="new and old must be pairs, got 2 and 3 values"):
        estimate_paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def test_differences_that_are_not_numbers_are_refused_by_both_tests() -> None:
    with pytest.raises(ValueError, match="differences must be finite, got nan"):
        sign_flip_p_value([math.nan])
    with pytest.raises(ValueError, match="old must be finite, got nan"):
        rank_sum_p_value([1.0], [math.nan])


@pytest.mark.parametrize(
    ("counts", "name"), [((3, 2, 1, 2), "new_count"), ((1, 2, -1, 2), "old_count"), ((0, 0, 1, 2), "new_count")]
)
def test_impossible_counts_are_refused_by_name(counts: tuple[int, int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be in 0..its group"):
        estimate_share_difference(*counts)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 1"):
        estimate_share_difference(1, 2, 1, 2, confidence=1.0)
