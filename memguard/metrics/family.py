"""Family tests over many canaries: is the whole family, or the best of it, above chance?

The null is that the secrets of the family are independent of the model. Ranks among *shared* references are dependent,
so their joint law is simulated exactly; references drawn per canary give independent ranks. Every test carries the
smallest p-value it could return. Source: statistics specification, sections 2 and 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_DRAWS = 99_999
BLOCK_COUNTS = 400_000  # drawn at a time: what stays in the cache


@dataclass(frozen=True)
class FamilyGroup:
    """Canaries of one format. `num_above` counts non-members scored at or above each canary, ties included."""

    num_above: NDArray[np.int64]
    num_non_members: int
    shared: bool
    p_values: NDArray[np.float64]
    rank_high: Sequence[int]
    secret_space_size: int
    is_certified: NDArray[np.bool_]


@dataclass(frozen=True)
class TestResult:
    """A p-value with the smallest one the test could have returned at this size."""

    __test__ = False  # not a test class

    p_value: float
    min_attainable_p: float
    statistic: float
    n: int
    method: str


@functools.lru_cache(maxsize=64)
def _null_counts_sum(num_canaries: int, num_non_members: int, shared: bool, transform: str, seed: int) -> NDArray[np.float64]:
    """Simulated null of the sum over a family of log2 or plain counts, shape (NUM_DRAWS,)."""
    rng = np.random.default_rng([seed, num_canaries, num_non_members, shared])
    total = np.empty(NUM_DRAWS)
    block = max(1, BLOCK_COUNTS // num_canaries)
    # A few counts occur over and over: looking up their logarithms takes 40% off.
    values = _transform(np.arange(num_non_members + 1), num_non_members, transform) if num_non_members < BLOCK_COUNTS else None
    for start in range(0, NUM_DRAWS, block):
        size = min(block, NUM_DRAWS - start)
        if shared:
            above = _draw_sharing(rng, num_canaries, num_non_members, size).T
        else:
            above = rng.integers(0, num_non_members + 1, size=(size, num_canaries))
        terms = values[above] if values is not None else _transform(above, num_non_members, transform)
        total[start : start + size] = terms.sum(axis=1)
    return total


def _draw_sharing(rng: np.random.Generator, num_canaries: int, num_non_members: int, size: int) -> NDArray[np.int64]:
    """Non-members above each of K canaries at random places among the same N, shape (K, size).

    Polya's urn: the count of canary k is one of 0..N or that of one of the k canaries before it, all N + 1 + k alike. Every
    composition of N into K + 1 gaps comes out as often, as it does for a uniform K-subset of K + N places. Over ten times
    faster than to draw the gaps one by one, which took longer than all else that a gate does.
    """
    above = np.empty((num_canaries, size), dtype=np.int64)
    for k, counts in enumerate(above):
        counts[:] = rng.integers(0, num_non_members + 1 + k, size=size)
        repeats = np.flatnonzero(counts > num_non_members)
        counts[repeats] = above[counts[repeats] - num_non_members - 1, repeats]
    return above


def _transform(above: ArrayLike, num_non_members: int, transform: str) -> NDArray[np.float64]:
    counts = np.asarray(above, dtype=np.float64)
    return np.log2(num_non_members + 1) - np.log2(1 + counts) if transform == "bits" else counts


def pooled_test(groups: Sequence[FamilyGroup], *, seed: int = 0) -> TestResult:
    """Is the family as a whole more exposed than chance? One-sided; sums sampled exposure over all canaries.

    Power is with many canaries shifted a little; one memorised canary among many is the max test's to find.

    Args:
        groups: one `FamilyGroup` a format; at least one canary in all.
        seed: of the simulated null.

    Returns:
        `TestResult` with p = (1 + #{T* >= T}) / (B + 1), B = 99,999.

    Raises:
        ValueError: no canary, or no non-member to rank it among.
    """
    groups = [group for group in groups if len(group.num_above)]
    n = sum(len(group.num_above) for group in groups)
    if n == 0:
        raise ValueError("groups must hold at least one canary, got none.")
    if any(group.num_non_members < 1 for group in groups):
        raise ValueError("every group must have at least one non-member, got 0.")
    statistic, null, log_least = 0.0, np.zeros(NUM_DRAWS), 0.0
    for index, group in enumerate(groups):
        k, size = len(group.num_above), group.num_non_members
        statistic += float(_transform(group.num_above, size, "bits").sum())
        null = null + _null_counts_sum(k, size, group.shared, "bits", seed + index)
        log_least -= _log_binomial(size + k, k) if group.shared else k * math.log(size + 1)
    p_value = (1 + int((null >= statistic - 1e-9).sum())) / (NUM_DRAWS + 1)
    least = max(1 / (NUM_DRAWS + 1), math.exp(log_least))
    return TestResult(max(p_value, least), least, statistic, n, "pooled sum of sampled exposure")


def _log_binomial(n: float, k: float) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def max_test(groups: Sequence[FamilyGroup]) -> TestResult:
    """Does one canary stand out? One-sided; combines the best canary of each format.

    Where the best canary is certified by the mass bound, its chance is that of distinct draws from the space:
    1 - C(R - r, K) / C(R, K). Otherwise 1 - (1 - min p)^K, valid for shared references too (they are exchangeable).
    Over F formats the smallest of these counts, corrected as 1 - (1 - min)^F: one quiet format must not hide another.

    Args:
        groups: one `FamilyGroup` a format; at least one canary in all.

    Returns:
        `TestResult`; `min_attainable_p` is what a certified rank of 1 would give.

    Raises:
        ValueError: no canary, or a p-value that is not a number.
    """
    groups = [group for group in groups if len(group.num_above)]
    if not groups:
        raise ValueError("groups must hold at least one canary, got none.")
    if any(np.isnan(group.p_values).any() for group in groups):
        raise ValueError("p_values must be numbers, got NaN.")
    best_format, best_attainable = 1.0, 1.0
    for group in groups:
        k = len(group.p_values)
        best = int(np.argmin(group.p_values))
        if group.is_certified[best]:
            p_format = distinct_draws_p_value(group.rank_high[best], k, group.secret_space_size)
        else:
            p_format = -math.expm1(k * math.log1p(-min(float(group.p_values[best]), 1 - 1e-16)))
        best_format = min(best_format, p_format)
        best_attainable = min(best_attainable, distinct_draws_p_value(1, k, group.secret_space_size))
    n = sum(len(group.p_values) for group in groups)
    statistic = min(float(group.p_values.min()) for group in groups)
    p_value, attainable = (_best_of(p, len(groups)) for p in (best_format, best_attainable))
    return TestResult(p_value, attainable, statistic, n, "best canary, certified or sampled")


def _best_of(p_value: float, count: int) -> float:
    """Chance that the smallest of `count` independent p-values is at most `p_value`."""
    return -math.expm1(count * math.log1p(-p_value)) if p_value < 1.0 else 1.0


def distinct_draws_p_value(best_rank: int, num_canaries: int, secret_space_size: int) -> float:
    """Chance that the best of `num_canaries` distinct random secrets ranks at or above `best_rank`.

    Example:
        >>> distinct_draws_p_value(1, 4, 8)
        0.5
    """
    if best_rank > secret_space_size - num_canaries:
        return 1.0
    # log C(R-r, K) - log C(R, K) by log1p terms: exact for spaces far beyond float precision.
    log_miss = math.fsum(math.log1p(-best_rank / (secret_space_size - i)) for i in range(num_canaries))
    return -math.expm1(log_miss)


def controls_rank_sum_test(
    num_above: ArrayLike, num_tied: ArrayLike, *, num_references: int, shared: bool, seed: int = 0
) -> TestResult:
    """Do never-inserted controls rank like references? Two-sided rank-sum test.

    Args:
        num_above: references at or above each control, ties included, shape (K,).
        num_tied: of these, the tied ones; a tie counts one half.
        num_references: N behind each control.
        shared: all controls share the N references.
        seed: of the simulated null.

    Returns:
        `TestResult`; the null is simulated from the same law as the pooled test's, both tails doubled.
    """
    above = np.asarray(num_above, dtype=np.float64) - np.asarray(num_tied, dtype=np.float64) / 2
    k = above.size
    if k == 0 or num_references < 1:
        raise ValueError(f"the controls' null test needs controls and references, got {k} and {num_references}.")
    null = _null_counts_sum(k, num_references, shared, "count", seed)
    statistic = float(above.sum())
    low = (1 + int((null <= statistic + 1e-9).sum())) / (NUM_DRAWS + 1)
    high = (1 + int((null >= statistic - 1e-9).sum())) / (NUM_DRAWS + 1)
    log_least = -_log_binomial(num_references + k, k) if shared else -k * math.log(num_references + 1)
    least = min(1.0, max(2 / (NUM_DRAWS + 1), 2 * math.exp(log_least)))
    return TestResult(min(1.0, max(2 * min(low, high), least)), least, statistic, k, "two-sided rank-sum of controls")


def paired_rise_test(
    differences_bits: ArrayLike, strata: Sequence[object], *, tolerance_bits: float, num_flips: int = 9_999, seed: int = 0
) -> TestResult:
    """Did exposure rise by more than `tolerance_bits` between two audits of the same canaries? One-sided.

    t = (mean d - tolerance) / SE with the variance taken within strata (format x tier); the p-value comes from
    studentised sign flips of d - tolerance. Run-to-run variation of training is not in it.

    Args:
        differences_bits: new minus old sampled exposure of each canary, same estimator and cap on both sides, shape (K,).
        strata: K hashable labels. A label with one member joins a common rest.
        tolerance_bits: rise to be tolerated.
        num_flips: B.
        seed: of the flips.

    Returns:
        `TestResult`; `statistic` is the mean rise in bits.

    Raises:
        ValueError: fewer than two differences, one that is not finite, or labels that do not match.

    Source: statistics specification, section 3.
    """
    shifted = np.asarray(differences_bits, dtype=np.float64) - tolerance_bits
    k = shifted.size
    if k != len(strata):
        raise ValueError(f"strata must have one label a difference, got {len(strata)} for {k}.")
    if k < 2:
        raise ValueError(f"differences_bits must hold at least two canaries, got {k}.")
    if not np.isfinite(shifted).all():
        raise ValueError("differences_bits must be finite, got NaN or infinity.")
    counts: dict[object, int] = {}
    for label in strata:
        counts[label] = counts.get(label, 0) + 1
    labels = [label if counts[label] > 1 else "the rest" for label in strata]
    masks = np.array([[label == one for label in labels] for one in dict.fromkeys(labels)], dtype=np.float64)
    observed = _studentised(shifted[None, :], masks)[0]
    signs = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(num_flips, k))
    flipped = _studentised(signs * shifted[None, :], masks)
    floor = observed - 1e-9 * max(1.0, abs(observed)) if np.isfinite(observed) else observed
    p_value = (1 + int((flipped >= floor).sum())) / (num_flips + 1)
    least = max(1 / (num_flips + 1), math.pow(2.0, -k))
    return TestResult(
        max(p_value, least), least, float(shifted.mean() + tolerance_bits), k, "studentised sign flips, stratified"
    )


def _studentised(values: NDArray[np.float64], masks: NDArray[np.float64]) -> NDArray[np.float64]:
    """t statistics of rows of `values` (B, K), variance within strata given by `masks` (S, K)."""
    sizes = masks.sum(axis=1)
    sums, squares = values @ masks.T, (values**2) @ masks.T
    spread = squares - sums**2 / sizes
    # What rounding leaves of equal values is no spread: it would set flips of one and the same rise apart.
    variance = np.where(spread > 1e-12 * squares, spread, 0.0) / np.maximum(sizes - 1, 1)
    error = np.sqrt((sizes * variance).sum(axis=1)) / values.shape[1]
    mean = values.mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = mean / error
    # No spread at all: the sign of the mean decides, and zero stays zero.
    extreme = np.where(mean > 0.0, np.inf, -np.inf)
    return np.where(error > 1e-12, statistic, np.where(np.abs(mean) <= 1e-12, 0.0, extreme))


def holm_rejections(p_values: Sequence[float], *, alpha: float) -> list[bool]:
    """Holm's step-down: which of the hypotheses are rejected at family level `alpha`.

    Example:
        >>> holm_rejections([0.004, 0.5, 0.001], alpha=0.01)
        [True, False, True]
    """
    rejected = [False] * len(p_values)
    for step, index in enumerate(np.argsort(p_values, kind="stable")):
        if not p_values[index] <= alpha / (len(p_values) - step):  # a NaN rejects nothing
            break
        rejected[int(index)] = True
    return rejected


def normal_quantile(probability: float) -> float:
    """Quantile of the standard normal; used for the smallest effect a test can be expected to see."""
    return NormalDist().inv_cdf(probability)
