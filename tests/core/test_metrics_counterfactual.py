"""Counterfactual memorisation: differences by hand, intervals against scipy, p-values against every way to deal the coins."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.metrics.counterfactual import (
    correlation_interval,
    estimate_counterfactual,
    estimate_population_counterfactual,
)

# -- a population within one run


def test_the_difference_is_of_the_means_by_hand() -> None:
    # in: (-1 - 3) / 2 = -2; out: (-10 - 11 - 15) / 3 = -12.
    estimate = estimate_population_counterfactual([-10.0, -1.0, -11.0, -3.0, -15.0], [False, True, False, True, False])
    assert (estimate.value, estimate.n_in, estimate.n_out) == (10.0, 2, 3)
    # Included ones hold the two highest places: 1 of C(5, 2) = 10 ways.
    assert estimate.p_value == estimate.min_attainable_p == pytest.approx(0.1)
    assert estimate.flags == ()


@given(st.integers(0, 2**32 - 1), st.integers(2, 30), st.integers(2, 30), st.sampled_from([0.5, 0.95, 0.999]))
@settings(deadline=None, max_examples=40)
def test_the_interval_is_that_of_scipys_welch_test(seed: int, n_in: int, n_out: int, confidence: float) -> None:
    rng = np.random.default_rng(seed)
    is_in = rng.permutation(np.arange(n_in + n_out) < n_in)
    scores = np.where(is_in, 5.0 * rng.standard_normal(n_in + n_out), rng.exponential(size=n_in + n_out)) - 20.0
    estimate = estimate_population_counterfactual(scores, is_in, confidence=confidence)
    welch = stats.ttest_ind(scores[is_in], scores[~is_in], equal_var=False)
    interval = welch.confidence_interval(confidence_level=confidence)
    # scipy 1.11's quantile of t is off by up to 6e-10 in probability, newer ones by nothing seen
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-7, abs=1e-7)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_p_value_counts_every_way_to_deal_the_coins(is_tied: bool) -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(-3, 0, size=9).astype(np.float64) if is_tied else rng.standard_normal(9)
    is_in = np.array([True, False, True, True, False, False, True, False, False])
    observed = scores[is_in].sum()
    sums = np.array([scores[list(ways)].sum() for ways in itertools.combinations(range(9), 4)])
    estimate = estimate_population_counterfactual(scores, is_in)
    # With n_in fixed the difference of means rises with the sum of the included.
    assert estimate.p_value == pytest.approx((sums >= observed - 1e-9).mean(), abs=1e-12)
    assert estimate.min_attainable_p == 1 / 126


def test_many_canaries_are_permuted_at_random_and_reproducibly() -> None:
    is_in = np.arange(60) < 30
    scores = np.random.default_rng(2).standard_normal(60)
    apart = estimate_population_counterfactual(np.where(is_in, 10.0, -10.0) + scores, is_in)
    assert apart.p_value == apart.min_attainable_p == 1 / 10_000
    null = estimate_population_counterfactual(scores, is_in)
    assert null == estimate_population_counterfactual(scores, is_in)
    # The normal law agrees: 9,999 deals leave an sd of at most .005.
    welch = stats.ttest_ind(scores[is_in], scores[~is_in], equal_var=False, alternative="greater")
    assert null.p_value == pytest.approx(welch.pvalue, abs=0.03)


def test_p_values_are_valid_where_inclusion_changes_nothing() -> None:
    rng = np.random.default_rng(3)
    draws = 2000
    p_values: list[float] = []
    scores = rng.exponential(size=9)

    @functools.cache  # 512 ways for the coins to fall
    def p_value(*is_in: bool) -> float:
        return estimate_population_counterfactual(scores, is_in).p_value

    while len(p_values) < draws:
        is_in = rng.random(9) < 0.5
        if 2 <= is_in.sum() <= 7:
            p_values.append(p_value(*is_in.tolist()))
    for level in (0.01, 0.05, 0.2):
        count = sum(p <= level for p in p_values)
        assert count <= stats.binom.ppf(1 - 1e-6, draws, level)
        assert count >= stats.binom.ppf(1e-6, draws, level / 3)  # not idle


def test_scores_without_spread_leave_the_interval_open() -> None:
    estimate = estimate_population_counterfactual([0.1, 0.3, 0.1, 0.3, 0.1, 0.3], [True, False] * 3)
    assert estimate.value == pytest.approx(-0.2)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    assert estimate.flags == ("no spread",)
    assert estimate.p_value == 1.0


def test_spread_on_one_side_is_enough_for_an_interval() -> None:
    # Out: sd 1 over sqrt(3) with 2 degrees of freedom; t(.975, 2) = 4.3027.
    estimate = estimate_population_counterfactual([5.0, 5.0, 5.0, 1.0, 2.0, 3.0], [True] * 3 + [False] * 3)
    assert estimate.high - estimate.value == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)


@pytest.mark.parametrize("is_in", [[True] * 4, [False] * 4, [True, False, False, False]])
def test_fewer_than_two_canaries_on_a_side_are_refused(is_in: list[bool]) -> None:
    with pytest.raises(
        ValueError, match=rf"at least two canaries on either side, got {sum(is_in)} in and {4 - sum(is_in)} out"
    ):
        estimate_population_counterfactual([1.0, 2.0, 3.0, 4.0], is_in)


# -- examples across runs


def test_every_example_has_the_difference_of_its_own_runs() -> None:
    scores = np.array([[0.0, 10.0], [2.0, 20.0], [4.0, 30.0], [10.0, 50.0]])
    is_in = np.array([[True, False], [True, True], [False, False], [False, True]])
    found = estimate_counterfactual(scores, is_in)
    # First: 1 - 7; second: 35 - 20. Squared standard errors: (2 + 18) / 2 and (450 + 200) / 2.
    assert found.value.tolist() == [-6.0, 15.0]
    assert found.standard_error == pytest.approx(np.sqrt([10.0, 325.0]))
    assert (found.n_in.tolist(), found.n_out.tolist()) == ([2, 2], [2, 2])


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(4, 12))
@settings(deadline=None, max_examples=50)
def test_examples_agree_with_scipy_one_by_one_and_keep_their_order(seed: int, num_examples: int, num_runs: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((num_runs, num_examples)) * rng.exponential(size=num_examples)
    is_in = rng.random((num_runs, num_examples)) < 0.5
    found = estimate_counterfactual(scores, is_in, confidence=0.9)
    for i in range(num_examples):
        inside, outside = scores[is_in[:, i], i], scores[~is_in[:, i], i]
        assert (found.n_in[i], found.n_out[i]) == (inside.size, outside.size)
        assert found.is_defined[i] == (min(inside.size, outside.size) >= 2)
        if not found.is_defined[i]:
            assert np.isnan([found.value[i], found.standard_error[i], found.low[i], found.high[i]]).all()
            continue
        welch = stats.ttest_ind(inside, outside, equal_var=False)
        interval = welch.confidence_interval(confidence_level=0.9)
        assert found.value[i] == pytest.approx(inside.mean() - outside.mean(), rel=1e-9)
        assert found.standard_error[i] == pytest.approx(found.value[i] / welch.statistic, rel=1e-9)
        assert (found.low[i], found.high[i]) == pytest.approx((interval.low, interval.high), rel=1e-9)


@pytest.mark.parametrize(("spread_in", "spread_out"), [(1.0, 1.0), (4.0, 0.5)])
def test_intervals_cover_the_true_difference_as_often_as_they_say(spread_in: float, spread_out: float) -> None:
    # 2,000 examples of one truth, 24 runs each: the level .95 has sd .0049, and Welch is off by less than .01 here.
    rng = np.random.default_rng(6)
    is_in = rng.random((24, 2000)) < 0.5
    noise = rng.standard_normal((24, 2000))
    found = estimate_counterfactual(np.where(is_in, 3.0 + spread_in * noise, spread_out * noise), is_in)
    assert found.is_defined.all()
    covered = (found.low <= 3.0) & (found.high >= 3.0)
    assert 0.95 - 0.01 - 5 * 0.0049 <= covered.mean() <= 0.95 + 0.01 + 5 * 0.0049
    assert found.value.mean() == pytest.approx(3.0, abs=5 * found.standard_error.mean() / math.sqrt(2000))


def test_an_example_whose_runs_never_differ_has_a_difference_and_no_interval() -> None:
    found = estimate_counterfactual(
        [[0.1, 1.0], [0.1, 2.0], [0.1, 1.5], [0.3, 0.0], [0.3, 0.5]], [[True, True]] * 3 + [[False, False]] * 2
    )
    assert found.is_defined.tolist() == [True, True]
    assert found.value[0] == pytest.approx(-0.2)
    assert found.standard_error[0] == 0.0
    assert np.isnan([found.low[0], found.high[0]]).all()
    assert np.isfinite([found.low[1], found.high[1]]).all()


def test_examples_that_are_all_undefined_are_no_error() -> None:
    found = estimate_counterfactual([[1.0, 2.0]], [[True, False]])
    assert not found.is_defined.any()
    assert np.isnan(found.value).all()


def test_runs_of_the_wrong_shape_or_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(runs, examples\) with at least one of each, got \(3,\)"):
        estimate_counterfactual([1.0, 2.0, 3.0], [True, False, True])
    with pytest.raises(ValueError, match=r"shape \(runs, examples\) with at least one of each, got \(0, 2\)"):
        estimate_counterfactual(np.empty((0, 2)), np.empty((0, 2), dtype=bool))
    with pytest.raises(ValueError, match=r"is_in must have the shape of scores \(2, 2\), got \(2, 1\)"):
        estimate_counterfactual(np.zeros((2, 2)), [[True], [False]])
    with pytest.raises(ValueError, match="is_in must hold booleans, got float64"):
        estimate_counterfactual(np.zeros((2, 2)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="scores must be finite, got nan in run 1 for example 0"):
        estimate_counterfactual([[0.0, 1.0], [math.nan, 2.0]], np.zeros((2, 2), dtype=bool))


# -- correlation


def test_the_interval_of_a_correlation_is_fishers() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(28)
    y = 0.6 * x + rng.standard_normal(28)
    found = correlation_interval(x, y, confidence=0.95)
    # tanh(artanh r -+ 1.96 / sqrt(n - 3)), n - 3 = 25.
    assert found.value == pytest.approx(np.corrcoef(x, y)[0, 1])
    ends = np.tanh(np.arctanh(found.value) + np.array([-1, 1]) * 1.959963984540054 / 5)
    assert (found.low, found.high) == pytest.approx(tuple(ends))
    assert found.n == 28


def test_a_perfect_correlation_is_one() -> None:
    found = correlation_interval([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])
    assert found.value == pytest.approx(1.0)
    assert found.low <= found.value <= found.high + 1e-12


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], "x must hold at least four values for an interval, got 3"),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0], r"x and y must have one shape \(n,\), got \(4,\) and \(3,\)"),
        ([1.0, 2.0, math.nan, 4.0], [1.0, 2.0, 4.0, 3.0], "x must be finite, got nan at index 2"),
        ([1.0, 2.0, 3.0, 4.0], [1.0, math.inf, 4.0, 3.0], "y must be finite, got inf at index 1"),
        ([1.0, 2.0, 3.0, 4.0], [0.1, 0.1, 0.1, 0.1], "y must hold values that differ, got 4 times 0.1"),
        ([0.0] * 4, [1.0, 2.0, 3.0, 4.0], "x must hold values that differ, got 4 times 0.0"),
    ],
)
def test_pairs_without_a_correlation_are_refused(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correlation_interval(x, y, confidence=0.95)


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_a_confidence_out_of_range_is_refused_everywhere(confidence: float) -> None:
    message = f"confidence must be above 0 and below 1, got {confidence}"
    with pytest.raises(ValueError, match=message):
        correlation_interval([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0], confidence=confidence)
    with pytest.raises(ValueError, match=message):
        estimate_counterfactual(np.eye(4), np.eye(4, dtype=bool), confidence=confidence)
    with pytest.raises(ValueError, match=message):
        estimate_population_counterfactual([1.0, 2.0, 3.0, 4.0], [True, True, False, False], confidence=confidence)
