"""Intervals equal exact binomial arithmetic; nothing that is not a number passes through one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from memguard.metrics.intervals import (
    bounded_mean_interval,
    estimate_quantile,
    median_interval,
    share_interval,
    tail_probability_interval,
)


@pytest.mark.parametrize("num_references", [1, 2, 17, 512])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_the_tail_interval_is_clopper_pearson_at_every_count(num_references: int, confidence: float) -> None:
    counts = np.unique(np.linspace(0, num_references, 18).astype(int))
    low, high = tail_probability_interval(counts, num_references, confidence=confidence)
    for count, one_low, one_high in zip(counts, low, high, strict=True):
        exact = stats.binomtest(int(count), num_references).proportion_ci(confidence, method="exact")
        assert one_low == pytest.approx(exact.low, abs=1e-12)
        assert one_high == pytest.approx(exact.high, abs=1e-12)


def test_the_tail_interval_is_open_below_when_no_reference_is_above() -> None:
    low, high = tail_probability_interval(0, 100, confidence=0.95)
    assert low == 0.0
    # Solve (1 - p)^100 = 0.025.
    assert high == pytest.approx(1 - 0.025 ** (1 / 100))


def test_the_tail_interval_is_open_above_when_every_reference_is_above() -> None:
    low, high = tail_probability_interval(100, 100, confidence=0.95)
    assert low == pytest.approx(0.025 ** (1 / 100))
    assert high == 1.0


def test_the_tail_interval_keeps_the_shape_of_its_counts() -> None:
    low, high = tail_probability_interval(np.array([[0, 1, 2], [3, 4, 5]]), 5, confidence=0.95)
    assert low.shape == high.shape == (2, 3)
    assert (low < high).all()


@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 0.5])
def test_the_tail_interval_covers_at_least_as_often_as_it_says(share: float) -> None:
    # Exact coverage: sum of binomial probabilities of the counts whose interval holds the true share.
    counts = np.arange(201)
    low, high = tail_probability_interval(counts, 200, confidence=0.95)
    coverage = stats.binom.pmf(counts, 200, share)[(low <= share) & (share <= high)].sum()
    assert coverage >= 0.95 - 1e-12


def _exact_coverage(below: int, above: int, number: int) -> Fraction:
    """Chance that [X_(below + 1), X_(number - above)] holds the median of a continuous law."""
    return Fraction(sum(math.comb(number, k) for k in range(below + 1, number - above)), 2**number)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_the_median_interval_states_its_exact_coverage_at_every_size(confidence: float) -> None:
    for number in range(2, 61):
        interval = median_interval(np.random.default_rng(number).permutation(number), confidence=confidence)
        below, above = int(interval.low), number - 1 - int(interval.high)
        assert below == above
        assert interval.confidence == pytest.approx(float(_exact_coverage(below, above, number)), abs=1e-12)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_the_median_interval_is_the_shortest_that_covers_or_else_the_range(confidence: float) -> None:
    for number in range(2, 61):
        interval = median_interval(np.arange(number), confidence=confidence)
        below = int(interval.low)
        if interval.confidence < confidence:
            assert below == 0
        shorter = below + 1
        assert number - 1 - shorter <= shorter or _exact_coverage(shorter, shorter, number) < Fraction(confidence)


def test_five_values_give_their_range_with_a_coverage_of_fifteen_sixteenths() -> None:
    interval = median_interval([3.0, 1.0, 5.0, 2.0, 4.0], confidence=0.95)
    assert (interval.low, interval.high, interval.confidence) == (1.0, 5.0, 15 / 16)


def test_one_value_covers_nothing() -> None:
    interval = median_interval([7.0], confidence=0.95)
    assert (interval.low, interval.high, interval.confidence) == (7.0, 7.0, 0.0)


def test_a_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one number, got none"):
        median_interval([], confidence=0.95)


def test_a_median_with_a_nan_is_refused_even_where_the_interval_would_trim_it() -> None:
    with pytest.raises(ValueError, match="must be numbers, got NaN"):
        median_interval([*range(30), math.nan], confidence=0.95)


def test_a_share_interval_is_clopper_pearson() -> None:
    # 3 of 10: Beta(.025; 3, 8) and Beta(.975; 4, 7), from tables of Clopper and Pearson (1934): .0667 and .6525
    interval = share_interval(3, 10, confidence=0.95)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.0667, 0.6525)
    assert share_interval(10, 10, confidence=0.95).high == 1.0


@pytest.mark.parametrize(("count", "total"), [(-1, 3), (4, 3), (0, 0)])
def test_an_impossible_share_is_refused(count: int, total: int) -> None:
    with pytest.raises(ValueError, match="count must be in 0..total"):
        share_interval(count, total, confidence=0.95)


def test_a_bounded_mean_interval_of_zeros_and_ones_holds_the_binomial_share() -> None:
    values = [1.0] * 7 + [0.0] * 13
    wide, exact = bounded_mean_interval(values, confidence=0.95), share_interval(7, 20, confidence=0.95)
    assert wide.low <= exact.low + 0.02
    assert wide.high >= exact.high - 0.02
    mirrored = bounded_mean_interval([1.0 - value for value in values], confidence=0.95)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - wide.high, 1 - wide.low))


@pytest.mark.parametrize("bad", [[], [1.1], [-0.1], [math.nan]])
def test_a_bounded_mean_needs_values_in_the_unit_interval(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"values must hold at least one number, each in 0..1"):
        bounded_mean_interval(bad, confidence=0.95)


@pytest.mark.parametrize(("n", "probability"), [(30, 0.5), (100, 0.95), (300, 0.99)])
def test_a_quantile_interval_covers_at_its_level(n: int, probability: float) -> None:
    rng = np.random.default_rng(11)
    truth = float(stats.expon.ppf(probability))
    draws = 2000
    estimates = [estimate_quantile(rng.exponential(size=n), probability, confidence=0.95) for _ in range(draws)]
    missed = sum(not one.low <= truth <= one.high for one in estimates)
    assert missed / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


def test_a_quantile_beyond_the_sample_has_an_open_end() -> None:
    estimate = estimate_quantile(range(10), 0.95, confidence=0.95)
    assert (estimate.value, estimate.high) == (9.0, math.inf)
    assert estimate.low <= 9.0


@pytest.mark.parametrize(
    ("values", "probability", "match"), [([], 0.5, "at least one"), ([math.nan], 0.5, "no NaN"), ([1.0], 1.0, "in 0..1")]
)
def test_a_quantile_of_nothing_is_refused(values: list[float], probability: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        estimate_quantile(values, probability, confidence=0.95)
