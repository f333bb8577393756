"""Confidence intervals that the metrics share, by scipy. Shares are in 0..1; every interval is two-sided."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats


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
        low = np.where(above > 0, special.betaincinv(np.maximum(above, 1), num_references - above + 1, tail), 0.0)
        high = np.where(
            above < num_references, special.betaincinv(above + 1, np.maximum(num_references - above, 1), 1.0 - tail), 1.0
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
        coverage = 1.0 - 2.0 * float(stats.binom.cdf(skip, n, 0.5))
        if coverage < confidence:
            break
        best = Interval(float(ordered[skip]), float(ordered[n - 1 - skip]), coverage)
    return best
