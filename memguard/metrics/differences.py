"""What changed between two measurements of the same quantity, new minus old, with an interval: paired, unpaired, shares.

The figures of one training run each: variation from run to run is in none of these intervals. Differences carry the unit of
what goes in (bits, nats). From 20 values on, means and t intervals; below, medians and intervals of order statistics, which
hold their level for any continuous law. Each carries the confidence that it reaches, which is low for a handful of values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from memguard.metrics.intervals import Interval, median_interval

SMALL = 20  # values below which a t interval of skewed exposures is not trusted
MAX_EXACT_PAIRS = 32  # sign flips are counted up to here, drawn beyond
NUM_FLIPS = 9_999
ROUNDING = 1e-9  # sums closer than this share of their size tie


@dataclass(frozen=True)
class DifferenceEstimate:
    """A difference, new minus old, in the unit of the values. `confidence` is the coverage that the interval reaches.

    Flags: *identical* (the same figures on both sides), *no spread* (all differences are equal, so the interval has no
    width), *too few* (no interval of this method reaches the confidence that was asked for).
    """

    value: float
    low: float
    high: float
    confidence: float
    p_value: float
    num_new: int
    num_old: int
    method: str
    flags: tuple[str, ...]


def estimate_paired_difference(new: ArrayLike, old: ArrayLike, *, confidence: float = 0.95) -> DifferenceEstimate:
    """Difference of the same canaries in two audits, in the unit of the values: mean (n >= 20) or median of the pairs.

    The t interval holds 95% for a shift of exposures and 93 to 94% where the spread grows too (n = 20 to 40); the interval
    of the median is exact. The p-value is of another question, whether the *mean* is 0: an exact sign-flip test, right
    whenever the two audits are exchangeable.

    Args:
        new: figures of the canaries in the new audit, shape (n,).
        old: figures of the same canaries in the same order, shape (n,).
        confidence: of the interval, 0..1.

    Returns:
        `DifferenceEstimate`; exactly 0 with an interval of no width, flagged, for identical figures.

    Raises:
        ValueError: no pair, shapes that differ, or a figure that is not finite.

    Example:
        >>> found = estimate_paired_difference([3.0, 5.0, 4.0, 6.0, 5.0, 4.5], [1.0, 2.0, 2.5, 3.0, 3.5, 1.0])
        >>> found.value, found.low, found.high, found.confidence
        (2.5, 1.5, 3.5, 0.96875)

    Source: statistics specification, sections 2 (intervals of tier means) and 3 (sign flips).
    """
    after, before = _checked("new", new), _checked("old", old)
    _check_confidence(confidence)
    if after.shape != before.shape:
        raise ValueError(f"new and old must be pairs, got {after.size} and {before.size} values.")
    change = after - before
    if np.array_equal(after, before):
        return DifferenceEstimate(0.0, 0.0, 0.0, confidence, 1.0, after.size, after.size, "paired", ("identical",))
    if change.size >= SMALL:
        value, method = float(change.mean()), "paired t, mean"
        interval = _t_interval(value, float(np.var(change, ddof=1)) / change.size, change.size - 1, confidence)
    else:
        value, method = float(np.median(change)), "paired order statistics, median"
        interval = median_interval(change, confidence=confidence)
    flags = _flags(interval, confidence, no_spread=bool(np.ptp(change) == 0.0 and change.size > 1))
    p_value = sign_flip_p_value(change)
    return DifferenceEstimate(
        value, interval.low, interval.high, interval.confidence, p_value, change.size, change.size, method, flags
    )


def sign_flip_p_value(differences: ArrayLike, *, seed: int = 0) -> float:
    """Chance that random signs give differences a sum as far from 0 as theirs; two-sided, 0..1.

    Counted over all 2^n signs up to 32 differences; beyond, 9,999 draws and p = (1 + hits) / (1 + draws).

    Args:
        differences: shape (n,), finite.
        seed: of the draws.

    Raises:
        ValueError: no difference, or one that is not finite.

    Example:
        >>> sign_flip_p_value([1.0, 1.0, 1.0])
        0.25
    """
    values = _checked("differences", differences)
    floor = abs(float(values.sum())) - ROUNDING * float(np.abs(values).sum())
    if values.size > MAX_EXACT_PAIRS:
        hits = int((np.abs(_drawn_sums(values, seed)) >= floor).sum())
        return (1 + hits) / (1 + NUM_FLIPS)
    # Every sum is one of the first half's plus one of the second half's: 2^16 sums sorted instead of 2^32 counted.
    half = values.size // 2
    first, second = _signed_sums(values[:half]), np.sort(_signed_sums(values[half:]))
    above = second.size - np.searchsorted(second, floor - first, side="left")
    below = np.searchsorted(second, -floor - first, side="right")
    return min(1.0, math.fsum([*above, *below]) / (first.size * second.size))


def _signed_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def _drawn_sums(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    rng, sums = np.random.default_rng(seed), np.empty(NUM_FLIPS)
    step = max(1, 4_000_000 // values.size)
    for start in range(0, NUM_FLIPS, step):
        shape = (min(step, NUM_FLIPS - start), values.size)
        bits = np.unpackbits(np.frombuffer(rng.bytes(-(-math.prod(shape) // 8)), dtype=np.uint8), count=math.prod(shape))
        sums[start : start + shape[0]] = 2.0 * (bits.reshape(shape).astype(np.float64) @ values) - values.sum()
    return sums


def estimate_unpaired_difference(new: ArrayLike, old: ArrayLike, *, confidence: float = 0.95) -> DifferenceEstimate:
    """Difference of two groups of canaries, in the unit of the values: of means (Welch) or the Hodges-Lehmann shift.

    Welch from 20 values on both sides: it holds 95% for groups of like size and 92 to 94% where one is several times as
    large, since exposures are skewed. Below, the shift is the median of all differences between a new and an old value,
    and its interval inverts the exact rank-sum test: right for any continuous law that moves and keeps its shape, too wide
    where values tie.

    Args:
        new: figures of the new audit, shape (n_new,).
        old: figures of the old audit, shape (n_old,).
        confidence: of the interval, 0..1.

    Returns:
        `DifferenceEstimate` with the p-value of the same test (Welch, or exact rank sum with ties).

    Raises:
        ValueError: no value, or one that is not finite.

    Example:
        >>> found = estimate_unpaired_difference([5.0, 6.5, 7.0, 9.0], [1.0, 1.5, 3.5, 2.0])
        >>> found.value, found.low, found.high, round(found.p_value, 4)
        (5.0, 1.5, 8.0, 0.0286)

    Source: Hodges and Lehmann, Annals of Mathematical Statistics 34 (1963); Welch, Biometrika 34 (1947).
    """
    after, before = _checked("new", new), _checked("old", old)
    _check_confidence(confidence)
    is_constant = bool(np.ptp(after) == 0.0 and np.ptp(before) == 0.0)
    if min(after.size, before.size) < SMALL:
        method = "Hodges-Lehmann shift, rank sum"
        differences = np.sort((after[:, None] - before[None, :]).ravel())
        value = float(np.median(differences))
        interval = _shift_interval(differences, after.size, before.size, confidence)
        p_value = rank_sum_p_value(after, before)
    else:
        method = "Welch t, difference of means"
        value = float(after.mean() - before.mean())
        interval, p_value = _welch(after, before, value, confidence)
    flags = _flags(interval, confidence, no_spread=is_constant)
    return DifferenceEstimate(
        value, interval.low, interval.high, interval.confidence, p_value, after.size, before.size, method, flags
    )


def _welch(after: NDArray[np.float64], before: NDArray[np.float64], value: float, confidence: float) -> tuple[Interval, float]:
    variances = [float(np.var(side, ddof=1)) / side.size for side in (after, before)]
    total = sum(variances)
    if total == 0.0:
        return Interval(value, value, confidence), 1.0 if value == 0.0 else 0.0
    sizes = (after.size, before.size)
    freedom = 1.0 / sum((part / total) ** 2 / (size - 1) for part, size in zip(variances, sizes, strict=True))
    p_value = 2.0 * float(stats.t.sf(abs(value) / math.sqrt(total), freedom))
    return _t_interval(value, total, freedom, confidence), p_value


def _t_interval(value: float, squared_error: float, freedom: float, confidence: float) -> Interval:
    reach = float(stats.t.ppf((1.0 + confidence) / 2.0, freedom)) * math.sqrt(squared_error)
    return Interval(value - reach, value + reach, confidence)


def _shift_interval(differences: NDArray[np.float64], num_new: int, num_old: int, confidence: float) -> Interval:
    """The narrowest pair of ordered differences, as many cut off on either side, that reaches the confidence; else all."""
    size = min(num_new, num_old)
    below = np.cumsum(_rank_sum_chances(tuple(range(2, 2 * (num_new + num_old) + 1, 2)), size)[size * (size + 1) :: 2])
    # Cutting k differences off a side is wrong with the chance that the count of pairs in order is below k + 1.
    cut = max(0, int(np.searchsorted(below, (1.0 - confidence) / 2.0 * (1 + 1e-12), side="right")) - 1)
    return Interval(
        float(differences[cut]), float(differences[differences.size - 1 - cut]), max(0.0, 1.0 - 2.0 * float(below[cut]))
    )


def rank_sum_p_value(new: ArrayLike, old: ArrayLike) -> float:
    """Chance of a rank sum as far out when both groups are one; two-sided, exact with ties, 0..1.

    Counts every way of picking the smaller group from the pooled ranks; meant for a smaller group of some twenty values.

    Args:
        new: shape (n_new,), finite.
        old: shape (n_old,), finite.

    Raises:
        ValueError: no value, or one that is not finite.

    Example:
        >>> rank_sum_p_value([4.0, 5.0], [1.0, 2.0])
        0.3333333333333333
    """
    smaller, larger = sorted((_checked("new", new), _checked("old", old)), key=len)
    doubled = np.rint(2.0 * stats.rankdata(np.concatenate([smaller, larger]))).astype(np.int64)
    chances = _rank_sum_chances(tuple(int(rank) for rank in np.sort(doubled)), smaller.size)
    observed = int(doubled[: smaller.size].sum())
    return min(1.0, 2.0 * min(float(chances[: observed + 1].sum()), float(chances[observed:].sum())))


@functools.lru_cache(maxsize=64)
def _rank_sum_chances(doubled_ranks: tuple[int, ...], size: int) -> NDArray[np.float64]:
    """Chance of each sum of `size` of these numbers drawn without replacement, indexed by the sum."""
    ways = np.zeros((size + 1, sum(sorted(doubled_ranks)[-size:]) + 1))
    ways[0, 0] = 1.0
    for rank in doubled_ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    chances: NDArray[np.float64] = ways[size] / math.comb(len(doubled_ranks), size)
    chances.flags.writeable = False
    return chances


def estimate_share_difference(
    new_count: int, num_new: int, old_count: int, num_old: int, *, confidence: float = 0.95
) -> DifferenceEstimate:
    """Difference of two shares, -1..1: Agresti-Caffo interval, sound at counts of 0; p-value by Fisher's exact test.

    One success and one failure are added to each side for the interval. Its exact coverage at 95% averages 95 to 96% and
    is nowhere below 90% for two groups of 8, 91% for 16 and 92% for 40 (Newcombe: 85, 85 and 88%). Fisher's test never
    exceeds its level. Both take the two groups as independent, which is cautious where they are the same canaries.

    Args:
        new_count: hits among the new.
        num_new: size of the new group.
        old_count: hits among the old.
        num_old: size of the old group.
        confidence: of the interval, 0..1.

    Returns:
        `DifferenceEstimate`; `value` is the difference of the observed shares.

    Raises:
        ValueError: a group without members, or a count outside of it.

    Example:
        >>> found = estimate_share_difference(3, 16, 12, 16)
        >>> round(found.value, 3), round(found.low, 3), round(found.high, 3), round(found.p_value, 4)
        (-0.562, -0.782, -0.218, 0.0038)

    Source: Agresti and Caffo, The American Statistician 54 (2000).
    """
    _check_confidence(confidence)
    for name, count, number in (("new_count", new_count, num_new), ("old_count", old_count, num_old)):
        if number < 1 or not 0 <= count <= number:
            raise ValueError(f"{name} must be in 0..its group, which has at least one member, got {count} of {number}.")
    shares = [(count + 1) / (number + 2) for count, number in ((new_count, num_new), (old_count, num_old))]
    variance = sum(share * (1 - share) / (number + 2) for share, number in zip(shares, (num_new, num_old), strict=True))
    centre, reach = shares[0] - shares[1], float(stats.norm.ppf((1 + confidence) / 2)) * math.sqrt(variance)
    table = [[new_count, num_new - new_count], [old_count, num_old - old_count]]
    return DifferenceEstimate(
        value=new_count / num_new - old_count / num_old,
        low=max(-1.0, centre - reach),
        high=min(1.0, centre + reach),
        confidence=confidence,
        p_value=min(1.0, float(stats.fisher_exact(table)[1])),
        num_new=num_new,
        num_old=num_old,
        method="Agresti-Caffo, Fisher exact",
        flags=(),
    )


def _flags(interval: Interval, confidence: float, *, no_spread: bool) -> tuple[str, ...]:
    flags: tuple[str, ...] = ("no spread",) if no_spread else ()
    return (*flags, "too few") if interval.confidence < confidence - 1e-12 else flags


def _checked(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a list of at least one number, got shape {array.shape}.")
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ValueError(f"{name} must be finite, got {array[place]} at place {place}.")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")
