"""Counterfactual memorisation: what a model scores on a canary when it was trained on it, less what it scores when it was not.

Across several runs that is an estimate for each example; within one run, from inclusion coins, for a whole population. Both
are causal only where inclusion was thrown at random. The unit is the scores' own (nats, or a share of tokens).

Source: Zhang et al., Counterfactual Memorization in Neural Language Models (NeurIPS 2023, arXiv 2112.12938).
Differs: intervals, a p-value, and *undefined* where a side has fewer than two runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from memguard.metrics.privacy import check_coins

NUM_PERMUTATIONS = 9_999
NO_SPREAD = 1e-9  # scores closer than this do not differ


@dataclass(frozen=True)
class PopulationCounterfactual:
    """Mean of the included less mean of the left-out canaries; `nan` ends where neither side has any spread."""

    value: float
    low: float
    high: float
    confidence: float
    p_value: float
    min_attainable_p: float
    n_in: int
    n_out: int
    method: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class ExampleCounterfactuals:
    """One estimate an example, each array of shape (N,); `nan` where `is_defined` is False."""

    value: NDArray[np.float64]
    standard_error: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    n_in: NDArray[np.int64]
    n_out: NDArray[np.int64]
    is_defined: NDArray[np.bool_]
    confidence: float
    method: str


@dataclass(frozen=True)
class Correlation:
    """Pearson's r with its Fisher-z interval."""

    value: float
    low: float
    high: float
    confidence: float
    n: int
    method: str


def estimate_population_counterfactual(
    scores: ArrayLike, is_in: ArrayLike, *, confidence: float = 0.95
) -> PopulationCounterfactual:
    """Mean counterfactual memorisation of canaries within one run, in the unit of the scores, from their inclusion coins.

    Says what inclusion did to the average canary, while the other coins fell as they did; not what it did to any one.

    Args:
        scores: one per canary, higher for what is remembered, shape (m,).
        is_in: what its coin said, bool, shape (m,).
        confidence: of the interval, above 0 and below 1.

    Returns:
        `PopulationCounterfactual`: Welch's interval, two-sided; the p-value is of coins thrown anew (one-sided: included
        canaries score higher), exact where there are at most 9,999 ways to deal them, else from as many at a fixed seed.

    Raises:
        ValueError: fewer than two canaries on a side, scores that are not finite, shapes that do not match.

    Example:
        >>> estimate = estimate_population_counterfactual([-3.0, -4.0, -9.0, -8.0, -10.0], [True, True, False, False, False])
        >>> estimate.value, estimate.p_value == estimate.min_attainable_p == 0.1
        (5.5, True)

    Source: Zhang et al. 2023, section 2, averaged over examples.
    """
    values, coins = check_coins(scores, is_in)
    _check_confidence(confidence)
    inside, outside = values[coins], values[~coins]
    if min(inside.size, outside.size) < 2:
        raise ValueError(f"is_in must have at least two canaries on either side, got {inside.size} in and {outside.size} out.")
    difference = float(inside.mean() - outside.mean())
    flat = np.ptp(inside) <= NO_SPREAD and np.ptp(outside) <= NO_SPREAD
    margin = math.nan if flat else float(_welch(values[:, None], coins[:, None], confidence)[1][0])
    test = stats.permutation_test(
        (inside, outside),
        lambda x, y, axis: x.mean(axis=axis) - y.mean(axis=axis),
        alternative="greater",
        n_resamples=NUM_PERMUTATIONS,
        vectorized=True,
        batch=1000,
        random_state=np.random.default_rng(0),
    )
    ways = math.comb(values.size, inside.size)
    return PopulationCounterfactual(
        value=difference,
        low=difference - margin,
        high=difference + margin,
        confidence=confidence,
        p_value=float(test.pvalue),
        min_attainable_p=1.0 / min(ways, NUM_PERMUTATIONS + 1),
        n_in=inside.size,
        n_out=outside.size,
        method="Welch interval, one-sided permutation test",
        flags=("no spread",) if flat else (),
    )


def estimate_counterfactual(scores: ArrayLike, is_in: ArrayLike, *, confidence: float = 0.95) -> ExampleCounterfactuals:
    """Counterfactual memorisation of each example across K runs on random subsets, in the unit of the scores.

    With few runs the intervals are wide, and the largest of many estimates is as large as it is by chance, too.

    Args:
        scores: of every example in every run, shape (K, N).
        is_in: whether the run trained on the example, bool, shape (K, N).
        confidence: of each interval, above 0 and below 1.

    Returns:
        `ExampleCounterfactuals` in the order of the examples. One with fewer than two runs on a side is undefined: `nan`.
        Where its scores do not differ on either side the difference stands, and the interval is `nan`.

    Raises:
        ValueError: scores that are not finite, or shapes that are not (K, N).

    Example:
        >>> found = estimate_counterfactual(
        ...     [[0.9, 0.5], [0.7, 0.5], [0.1, 0.4], [0.3, 0.6]], [[True, True], [True, False], [False, False], [False, False]]
        ... )
        >>> found.value.round(2).tolist(), found.standard_error.round(3).tolist(), found.is_defined.tolist()
        ([0.6, nan], [0.141, nan], [True, False])

    Source: Zhang et al. 2023, section 2.
    """
    values, members = np.asarray(scores, dtype=np.float64), np.asarray(is_in)
    _check_confidence(confidence)
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"scores must have shape (runs, examples) with at least one of each, got {values.shape}.")
    if members.dtype != np.bool_:
        raise ValueError(f"is_in must hold booleans, got {members.dtype}.")
    if members.shape != values.shape:
        raise ValueError(f"is_in must have the shape of scores {values.shape}, got {members.shape}.")
    bad = np.argwhere(~np.isfinite(values))
    if bad.size:
        run, example = bad[0]
        raise ValueError(f"scores must be finite, got {values[run, example]} in run {run} for example {example}.")
    n_in, n_out = members.sum(axis=0), (~members).sum(axis=0)
    is_defined = (n_in >= 2) & (n_out >= 2)
    value, error, margin = (np.full(values.shape[1], math.nan) for _ in range(3))
    if is_defined.any():
        chosen = values[:, is_defined], members[:, is_defined]
        value[is_defined] = _mean(*chosen) - _mean(chosen[0], ~chosen[1])
        error[is_defined], margin[is_defined] = _welch(*chosen, confidence)
    return ExampleCounterfactuals(
        value=value,
        standard_error=error,
        low=value - margin,
        high=value + margin,
        n_in=n_in,
        n_out=n_out,
        is_defined=is_defined,
        confidence=confidence,
        method="Welch",
    )


def correlation_interval(x: ArrayLike, y: ArrayLike, *, confidence: float = 0.95) -> Correlation:
    """Pearson's r, -1..1, with its Fisher-z interval: does one measure of memorisation follow another?

    Args:
        x: shape (n,), n >= 4.
        y: shape (n,).
        confidence: of the interval, above 0 and below 1. It supposes pairs that are independent and roughly normal.

    Returns:
        `Correlation`.

    Raises:
        ValueError: fewer than four pairs, values that are not finite, or a side whose values are all alike.

    Example:
        >>> found = correlation_interval([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 5.0, 4.0])
        >>> round(found.value, 2), round(found.low, 2), round(found.high, 2)
        (0.9, 0.09, 0.99)
    """
    sides = {"x": np.asarray(x, dtype=np.float64), "y": np.asarray(y, dtype=np.float64)}
    _check_confidence(confidence)
    if sides["x"].shape != sides["y"].shape or sides["x"].ndim != 1:
        raise ValueError(f"x and y must have one shape (n,), got {sides['x'].shape} and {sides['y'].shape}.")
    if sides["x"].size < 4:
        raise ValueError(f"x must hold at least four values for an interval, got {sides['x'].size}.")
    for name, values in sides.items():
        if not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{name} must be finite, got {values[index]} at index {index}.")
        if np.ptp(values) <= NO_SPREAD * np.abs(values).max():
            raise ValueError(f"{name} must hold values that differ, got {values.size} times {values[0]}.")
    result = stats.pearsonr(sides["x"], sides["y"])
    interval = result.confidence_interval(confidence_level=confidence)
    return Correlation(
        value=float(result.statistic),
        low=float(interval.low),
        high=float(interval.high),
        confidence=confidence,
        n=sides["x"].size,
        method="Pearson, Fisher z",
    )


def _mean(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Means over runs of what the mask keeps."""
    return np.asarray(np.where(mask, values, 0.0).sum(axis=0) / mask.sum(axis=0), dtype=np.float64)


def _variance_of_mean(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Squared standard errors of those means, 0 where nothing differs, and their degrees of freedom."""
    n = mask.sum(axis=0)
    deviations = np.where(mask, values - _mean(values, mask), 0.0)
    # What rounding leaves of equal values is no spread.
    deviations[:, np.abs(deviations).max(axis=0) <= NO_SPREAD] = 0.0
    return (deviations**2).sum(axis=0) / (n - 1) / n, (n - 1).astype(np.float64)


def _welch(
    values: NDArray[np.float64], mask: NDArray[np.bool_], confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Standard errors of the differences of means, and half the widths of their intervals: `nan` without spread."""
    inside, outside = _variance_of_mean(values, mask), _variance_of_mean(values, ~mask)
    variance = inside[0] + outside[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = variance**2 / (inside[0] ** 2 / inside[1] + outside[0] ** 2 / outside[1])
        margin = stats.t.ppf((1.0 + confidence) / 2.0, freedom) * np.sqrt(variance)
    return np.sqrt(variance), margin


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence}.")
