"""Did exposure rise from older training runs to a new one? One-sided tests beside the paired sign flips of `family`; bits.

Two situations that sign flips do not know: several older runs, whose spread shows how much training alone moves the mean,
and canaries that are not the same ones. Source: statistics specification, section 3, against the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from memguard.metrics.family import normal_quantile

POWER = 0.95
MANY_DEGREES = 20
# How much the variance of a sampled exposure grows with each bit that its mean rises: normal scores that shift alike, any
# number of references; bits squared a bit.
VARIANCE_A_BIT = 1.95


@dataclass(frozen=True)
class RiseTest:
    """A mean rise in bits with its one-sided p-value. `error` is the standard error, bits; `run_sd` that of whole runs."""

    rise: float
    p_value: float
    error: float
    degrees_of_freedom: float
    n: int
    method: str
    run_sd: float | None = None

    def p_value_of(self, rise: float, *, tolerance_bits: float) -> float:
        """The p-value that a mean rise of so many bits would have had, 0..1."""
        return _upper_tail(rise - tolerance_bits, self.error, self.degrees_of_freedom)

    def detectable(self, *, tolerance_bits: float, significance: float) -> float:
        """Smallest mean rise that is found with 95% power at this significance; bits, tolerance included."""
        return smallest_rise(
            self.error, self.degrees_of_freedom, self.n, tolerance_bits=tolerance_bits, significance=significance
        )


def runs_rise_test(
    new: ArrayLike,
    runs: Sequence[ArrayLike],
    strata: Sequence[object],
    *,
    tolerance_bits: float,
    paired: bool = True,
    over: ArrayLike | None = None,
) -> RiseTest:
    """Did the canaries rise by more than a tolerance over the mean of several runs, training noise included? Bits.

    SE^2 = sd^2 / K + s_run^2 (1 + 1 / B) with the sd of the rises within strata and the sd of the B runs' means; t on B - 1
    degrees of freedom. With few runs that is honest and weak: look at `detectable`.

    Args:
        new: exposure of the new run's canaries, shape (K,).
        runs: the same of B >= 2 older runs, each shape (K,); in the same order where they are paired.
        strata: K hashable labels (format x tier).
        tolerance_bits: rise to be tolerated.
        paired: the canaries are the same ones in all runs; otherwise the spread of whole runs holds that of canaries too.
        over: the one run to rise over, in place of the mean of the runs, which then only tell how much training moves it.

    Returns:
        `RiseTest` with `run_sd`.

    Raises:
        ValueError: fewer than two runs, shapes that differ, or a figure that is not finite.

    Example:
        >>> found = runs_rise_test([3.0, 5.0], [[1.0, 2.0], [2.0, 3.0], [1.5, 2.5]], ["a", "a"], tolerance_bits=0.5)
        >>> found.rise, found.degrees_of_freedom, round(found.run_sd, 3)
        (2.0, 2.0, 0.5)

    Source: statistics specification, section 3.
    """
    if len(runs) < 2:
        raise ValueError(f"runs must hold at least two runs, got {len(runs)}.")
    after = _checked(new, "new")
    older = [_checked(run, "runs") for run in runs]
    if paired and any(run.shape != after.shape for run in older):
        raise ValueError("runs must hold one figure for each canary of new.")
    means = np.array([float(run.mean()) for run in older])
    run_sd = float(means.std(ddof=1))
    one = None if over is None else _checked(over, "over")
    if paired and one is not None and one.shape != after.shape:
        raise ValueError("over must hold one figure for each canary of new.")
    rise = float(after.mean() - (means.mean() if one is None else one.mean()))
    # Where canaries are fresh in each run, the spread of the runs' means already holds that of the canaries.
    within = 0.0
    if paired:
        within = _squared_error(after - (np.mean(older, axis=0) if one is None else one), strata)
    error = math.sqrt(within + run_sd**2 * (1 + 1 / (len(runs) if one is None else 1)))
    return RiseTest(
        rise=rise,
        p_value=_upper_tail(rise - tolerance_bits, error, len(runs) - 1),
        error=error,
        degrees_of_freedom=float(len(runs) - 1),
        n=after.size,
        method="t over accepted runs",
        run_sd=run_sd,
    )


def unpaired_rise_test(
    new: ArrayLike, old: ArrayLike, strata: Sequence[object], old_strata: Sequence[object], *, tolerance_bits: float
) -> RiseTest:
    """Are fresh canaries of the same design more exposed than the older ones, by more than a tolerance? Bits.

    The difference of stratified means, weighted by the new run's strata, with Welch's degrees of freedom. Run-to-run
    variation of training is not in it.

    Args:
        new: exposure of the new run's canaries, shape (K,).
        old: exposure of the older run's canaries, shape (K_old,).
        strata: K labels (format x tier); a label with fewer than two canaries on a side joins a common rest.
        old_strata: K_old labels, of the same set.
        tolerance_bits: rise to be tolerated.

    Returns:
        `RiseTest`.

    Raises:
        ValueError: fewer than two canaries on a side, strata that differ, or a figure that is not finite.

    Example:
        >>> found = unpaired_rise_test([3.0, 5.0, 4.0], [1.0, 2.0, 1.5], ["a"] * 3, ["a"] * 3, tolerance_bits=0.5)
        >>> found.rise, round(found.p_value, 3)
        (2.5, 0.027)

    Source: statistics specification, section 3; Welch, Biometrika 34 (1947).
    """
    after, before = _checked(new, "new"), _checked(old, "old")
    if after.size != len(strata) or before.size != len(old_strata):
        raise ValueError("strata must have one label for each canary.")
    if set(strata) != set(old_strata) or min(after.size, before.size) < 2:
        raise ValueError("new and old must hold at least two canaries each, of the same strata.")
    rise, parts = 0.0, []
    cells = _cells(after, before, list(strata), list(old_strata))
    total = sum(first.size for first, _ in cells)  # without a lone canary of its stratum
    for first, second in cells:
        weight = first.size / total
        rise += weight * float(first.mean() - second.mean())
        parts += [(weight**2 * float(side.var(ddof=1)) / side.size, side.size - 1) for side in (first, second)]
    squared = math.fsum(part for part, _ in parts)
    freedom = squared**2 / math.fsum(part**2 / size for part, size in parts) if squared > 0.0 else float(after.size)
    error = math.sqrt(squared)
    return RiseTest(
        rise=rise,
        p_value=_upper_tail(rise - tolerance_bits, error, freedom),
        error=error,
        degrees_of_freedom=freedom,
        n=after.size,
        method="stratified Welch t",
    )


def smallest_rise(error: float, freedom: float, num_canaries: int, *, tolerance_bits: float, significance: float) -> float:
    """Smallest mean rise that a t test finds with 95% power, by the noncentral t; bits, tolerance included.

    The error is that of a rise which is there: exposures spread the more, the higher they lie.

    Args:
        error: standard error of the mean rise as it was found, bits.
        freedom: degrees of freedom.
        num_canaries: K of the new run.
        tolerance_bits: rise to be tolerated.
        significance: of the test.

    Returns:
        Bits; infinity where no rise is found so often.

    Source: statistics specification, section 3; simulated by the table `printed` of `benchmarks/gate_errors.py`.
    """
    distance = distance_for_power(freedom, significance)
    return smallest_effect(tolerance_bits, distance, error**2, VARIANCE_A_BIT / num_canaries)


def distance_for_power(freedom: float, significance: float) -> float:
    """Standard errors by which an effect must exceed its threshold for a t test to find it with 95% power.

    The noncentral t, exactly below 20 degrees of freedom. Above, where expansions are within 0.01, without scipy.special, whose
    import is a third of what a gate takes.

    Example:
        >>> round(distance_for_power(84, 0.002), 2)
        4.64

    Source: Hill, CACM 13 (1970), for the quantile of t; Johnson and Welch, Biometrika 31 (1940), for the noncentral one.
    """
    if freedom < MANY_DEGREES:
        critical = float(scipy.special.stdtrit(freedom, 1.0 - significance))
        return float(scipy.special.nctdtrinc(freedom, 1.0 - POWER, critical))
    z = -normal_quantile(significance)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return t * (1 - 1 / (4 * freedom)) + normal_quantile(POWER) * math.sqrt(1 + t**2 / (2 * freedom))


def smallest_effect(threshold: float, distance: float, variance: float, growth: float) -> float:
    """The effect that lies `distance` of its own standard errors above a threshold: its variance grows by `growth` a bit.

    Solves x = threshold + distance * sqrt(variance + growth * x). Bits, bits squared, bits squared a bit.

    Example:
        >>> smallest_effect(1.0, 2.0, 0.25, 0.0)
        2.0
        >>> smallest_effect(1.0, 2.0, 0.25, 0.1)  # 1 + 2 * sqrt(0.25 + 0.24)
        2.4
    """
    if not all(map(math.isfinite, (threshold, distance, variance))):
        return math.inf
    half = threshold + distance**2 * growth / 2
    return half + math.sqrt(half**2 - threshold**2 + distance**2 * variance)


def _cells(
    after: NDArray[np.float64], before: NDArray[np.float64], strata: list[object], old_strata: list[object]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    small = {one for one in strata if min(strata.count(one), old_strata.count(one)) < 2}
    labels = [None if one in small else one for one in strata]
    old_labels = [None if one in small else one for one in old_strata]
    return [
        (after[[label == one for label in labels]], before[[label == one for label in old_labels]])
        for one in dict.fromkeys(labels)
        if min(labels.count(one), old_labels.count(one)) > 1
    ]


def _squared_error(values: NDArray[np.float64], strata: Sequence[object]) -> float:
    """Squared standard error of the mean, with the variance taken within strata."""
    if len(strata) != values.size:
        raise ValueError("strata must have one label for each canary.")
    squared = 0.0
    counts = {one: list(strata).count(one) for one in strata}
    labels = [one if counts[one] > 1 else None for one in strata]
    for one in dict.fromkeys(labels):
        members = values[[label == one for label in labels]]
        squared += members.size * float(members.var(ddof=1)) if members.size > 1 else 0.0
    return squared / values.size**2


def _upper_tail(excess: float, error: float, freedom: float) -> float:
    if error == 0.0:
        return 0.0 if excess > 0.0 else 1.0
    return float(scipy.special.stdtr(freedom, -excess / error))


def _checked(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a list of finite numbers.")
    return array
