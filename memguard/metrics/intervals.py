"""Confidence intervals that the metrics share, by scipy. Shares are in 0..1; every interval is two-sided."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # loads a part at its first use: the gate starts in half the time
from numpy.typing import ArrayLike, NDArray

NUM_STAKES = 16  # of the gambler behind `bounded_mean_interval`


@dataclass(frozen=True)
class Interval:
    """Ends of an interval and the confidence (or exact coverage) they carry."""

    low: float
    high: float
    confidence: float


def tail_probability_interval(
    num_above: ArrayLike, num_references: int, *, confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interval of P(reference >= canary) when `num_above` of `num_references` draws were at or above it.

    With none above the lower end is 0: the sample alone cannot say how rare the canary's score is.

    Args:
        num_above: counts b, any shape, 0..num_references.
        num_references: N >= 1.
        confidence: 0..1.

    Returns:
        Lower and upper ends, float64, the shape of `num_above`.

    Source: statistics specification, section 1 (Beta form of Clopper-Pearson, upper end at b + 1 of N + 1).
    """
    above = np.asarray(num_above, dtype=np.float64)
    tail = (1.0 - confidence) / 2.0
    with np.errstate(invalid="ignore"):
        low = np.where(above > 0, scipy.special.betaincinv(np.maximum(above, 1), num_references - above + 1, tail), 0.0)
        high = np.where(
            above < num_references, scipy.special.betaincinv(above + 1, np.maximum(num_references - above, 1), 1.0 - tail), 1.0
        )
    return low, high


def median_interval(values: ArrayLike, *, confidence: float) -> Interval:
    """Order-statistic interval of a median, with its exact coverage; free of any distribution.

    Below six values no pair of order statistics reaches 95%: the range is given, with the coverage it has.

    Args:
        values: float64, shape (n,), n >= 1.
        confidence: the coverage to reach, 0..1.

    Returns:
        `Interval` whose `confidence` is the exact coverage, 1 - 2^(1-n) for the range; 0 for one value.

    Raises:
        ValueError: no value, or a NaN among them.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.size
    if n == 0:
        raise ValueError("values must hold at least one number, got none.")
    if np.isnan(ordered[-1]):
        raise ValueError("values must be numbers, got NaN.")
    best = Interval(float(ordered[0]), float(ordered[-1]), 1.0 - math.pow(2.0, 1 - n))
    for skip in range(1, n // 2):
        coverage = 1.0 - 2.0 * float(scipy.stats.binom.cdf(skip, n, 0.5))
        if coverage < confidence:
            break
        best = Interval(float(ordered[skip]), float(ordered[n - 1 - skip]), coverage)
    return best


def share_interval(count: int, total: int, *, confidence: float) -> Interval:
    """Exact interval of a share (Clopper-Pearson), 0..1.

    Args:
        count: successes, 0..total.
        total: trials, >= 1.
        confidence: 0..1.

    Raises:
        ValueError: no trial, or more successes than trials.

    Example:
        >>> interval = share_interval(0, 100, confidence=0.95)
        >>> round(interval.low, 4), round(interval.high, 4)
        (0.0, 0.0362)
    """
    if not 0 <= count <= total or total < 1:
        raise ValueError(f"count must be in 0..total and total at least 1, got {count} of {total}.")
    ends = scipy.stats.binomtest(count, total).proportion_ci(confidence_level=confidence, method="exact")
    return Interval(float(ends.low), float(ends.high), confidence)


def chernoff_upper_mean(mean: float, count: int, *, significance: float) -> float:
    """Upper bound of the mean of a variable in 0..1: sup{v : count * KL(mean || v) <= ln(1/significance)}.

    Example:
        >>> round(chernoff_upper_mean(0.0, 500, significance=0.05), 5)
        0.00597
    """
    budget = -math.log(significance) / count
    if mean >= 1.0:
        return 1.0
    if mean <= 0.0:
        return -math.expm1(-budget)

    def excess(v: float) -> float:
        divergence = mean * (math.log(mean) - math.log(v)) + (1 - mean) * (math.log1p(-mean) - math.log1p(-v))
        return divergence - budget

    top = 1.0 - 1e-15
    return 1.0 if excess(top) <= 0 else float(scipy.optimize.brentq(excess, mean, top, xtol=1e-15))


def bounded_mean_interval(values: ArrayLike, *, largest: float = 1.0, confidence: float) -> Interval:
    """Interval of the mean of values in 0..largest, whatever their distribution, in their unit.

    A gambler who stakes a share t of his wealth on every value being above a mean m multiplies it by 1 + t (x / m - 1): a
    fair game if m is the mean, so that the average over stakes exceeds 2 / (1 - confidence) with its reciprocal as chance at
    most. The lower end is the least m that does not make him so rich; the upper end is the same for largest - x. The width
    follows the spread, and always leaves room for values as large as `largest` that so few draws may have missed.

    Args:
        values: independent draws, shape (n,).
        largest: of the metric, in its unit; the upper end rests on it.
        confidence: two-sided, above 0 and below 1.

    Raises:
        ValueError: no value, or one outside of 0..largest.

    Example:
        >>> found = bounded_mean_interval([0.0] * 100, confidence=0.95)
        >>> found.low, round(found.high, 3)
        (0.0, 0.046)

    Source: Waudby-Smith, Ramdas, Estimating means of bounded random variables by betting (JRSS-B 2024). Differs: fixed stakes
    averaged, so that the order of the values does not matter.
    """
    x = np.asarray(values, dtype=np.float64) / largest
    if x.size == 0 or not ((x >= 0.0) & (x <= 1.0)).all():
        raise ValueError(f"values must hold at least one number, each in 0..{largest:g}.")
    low, missing = (_least_mean(side, significance=(1.0 - confidence) / 2.0) for side in (x, 1.0 - x))
    return Interval(largest * low, largest * (1.0 - missing), confidence)


def _least_mean(x: NDArray[np.float64], *, significance: float) -> float:
    """The least mean of values in 0..1 under which the averaged gambler's wealth stays below 1 / significance."""
    mean = float(x.mean())
    if mean <= 0.0:
        return 0.0
    # From 1 / n, for rare large values, to 1, for values that are nearly all alike.
    span = math.log(x.size) if x.size > 1 else 1.0
    stakes = np.append(scipy.special.expit(np.linspace(-span, span, NUM_STAKES)), 1.0)

    def excess(log_mean: float) -> float:
        with np.errstate(divide="ignore", over="ignore"):
            log_wealth = np.log1p(stakes[:, None] * (x / math.exp(log_mean) - 1.0)).sum(axis=1)
        return float(np.logaddexp.reduce(log_wealth)) - math.log(stakes.size) + math.log(significance)

    # At the sample mean no stake has won; below, wealth only grows.
    high = math.log(mean)
    low = high - 1.0
    while excess(low) <= 0.0:
        low -= 2.0 * (high - low)
        if low < math.log(np.finfo(np.float64).tiny):
            return 0.0
    return min(mean, math.exp(scipy.optimize.brentq(excess, low, high, xtol=1e-10)))


@dataclass(frozen=True)
class QuantileEstimate:
    """A sample quantile with an interval between order statistics; an end that no order statistic reaches is infinite."""

    value: float
    low: float
    high: float
    confidence: float
    n: int


def estimate_quantile(values: ArrayLike, probability: float, *, confidence: float) -> QuantileEstimate:
    """A quantile of a distribution from a sample, free of its shape.

    Args:
        values: float64, shape (n,), n >= 1.
        probability: of the quantile, 0..1 exclusive.
        confidence: of the interval, 0..1.

    Returns:
        `QuantileEstimate`; the value is the smallest of the sample that at least the share `probability` does not exceed.

    Raises:
        ValueError: no value, a NaN among them, or a probability outside 0..1.

    Example:
        >>> estimate = estimate_quantile(range(1, 101), 0.9, confidence=0.95)
        >>> estimate.value, estimate.low, estimate.high
        (90.0, 84.0, 96.0)
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.size
    if n == 0 or np.isnan(ordered[-1]):
        raise ValueError("values must hold at least one number and no NaN.")
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability must be in 0..1, got {probability}.")
    tail = (1.0 - confidence) / 2.0
    # P(i-th smallest <= quantile) >= P(Bin(n, p) >= i), P(j-th smallest >= quantile) >= P(Bin(n, p) <= j - 1)
    first = int(scipy.stats.binom.ppf(tail, n, probability))
    last = int(scipy.stats.binom.ppf(1.0 - tail, n, probability)) + 1
    low = float(ordered[first - 1]) if first >= 1 else -math.inf
    high = float(ordered[last - 1]) if last <= n else math.inf
    place = max(0, math.ceil(n * probability - 1e-9) - 1)
    return QuantileEstimate(float(ordered[place]), low, high, confidence, n)
