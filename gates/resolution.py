"""What a significance rule can see at this size: what it would need to fire at all, and the smallest effect it finds.

Effects are in bits of exposure, at 95% power, by a normal approximation. Source: statistics specification, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.metrics.family import NUM_DRAWS, FamilyGroup, distinct_draws_p_value, normal_quantile

POWER = 0.95
SD_BITS = 1.0 / math.log(2.0)  # of one sampled exposure under the null: -log2 of a uniform
LARGEST = 10**18


def _smallest(fires: Callable[[int], bool], start: int = 1) -> int | None:
    """The smallest whole number at which a monotone condition holds, by doubling and halving; None when none does."""
    high = max(1, start)
    while not fires(high):
        if high > LARGEST:
            return None
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fires(middle) else (middle, high)
    return high


def references_needed(groups: Sequence[FamilyGroup], share: float) -> int | None:
    """References behind each prefix with which the pooled test could reach `share`; None when no number does."""
    if share < 1 / (NUM_DRAWS + 1):
        return None

    def fires(num_references: int) -> bool:
        log_least = 0.0
        for group in groups:
            k, n = len(group.num_above), num_references
            log_binomial = math.lgamma(n + k + 1) - math.lgamma(k + 1) - math.lgamma(n + 1)
            log_least -= log_binomial if group.shared else k * math.log(n + 1)
        return log_least <= math.log(share)

    return _smallest(fires)


def space_needed(groups: Sequence[FamilyGroup], share: float) -> int | None:
    """Size of the secret space with which one certified canary could reach `share` in the max test; None: beyond 1e18."""
    k = min(len(group.num_above) for group in groups)
    return _smallest(lambda size: _over_formats(distinct_draws_p_value(1, k, size), len(groups)) <= share, start=k + 1)


def canaries_needed(share: float, num_flips: int) -> int | None:
    """Canaries with which the comparison with a baseline could reach `share`; None when no number does."""
    if share < 1 / (num_flips + 1):
        return None
    return _smallest(lambda number: number >= 2 and 2.0**-number <= share)


def _over_formats(p_value: float, num_formats: int) -> float:
    return -math.expm1(num_formats * math.log1p(-p_value)) if p_value < 1.0 else 1.0


def silent_formats(groups: Sequence[FamilyGroup], share: float) -> list[int]:
    """Indices of the formats whose space is too small for one memorised canary to reach `share` in the max test."""
    least = [distinct_draws_p_value(1, len(group.num_above), group.secret_space_size) for group in groups]
    return [index for index, p_value in enumerate(least) if _over_formats(p_value, len(groups)) > share]


def pooled_detectable_bits(groups: Sequence[FamilyGroup], share: float) -> float:
    """Smallest mean shift of the family that the pooled test finds with 95% power; bits."""
    n = sum(len(group.num_above) for group in groups)
    # Canaries that share N references vary together: 1 + K / N, as in a two-sample comparison.
    inflation = [1 + len(group.num_above) / group.num_non_members if group.shared else 1.0 for group in groups]
    variance = sum(len(group.num_above) * SD_BITS**2 * factor for group, factor in zip(groups, inflation, strict=True))
    return _quantiles(share) * math.sqrt(variance) / n


def max_detectable_bits(groups: Sequence[FamilyGroup], share: float) -> float | None:
    """Exposure of one certified canary that the max test finds, in the format where most is needed; None: in no format."""
    bits = []
    for group in groups:
        rank = _largest_rank(len(group.num_above), group.secret_space_size, len(groups), share)
        if rank >= 1:
            bits.append(math.log2(group.secret_space_size) - math.log2(rank))
    return max(bits, default=None)


def _largest_rank(num_canaries: int, size: int, num_formats: int, share: float) -> int:
    """The worst certified rank at which the max test still fires; 0 when it fires at none."""
    too_low = _smallest(lambda rank: _over_formats(distinct_draws_p_value(rank, num_canaries, size), num_formats) > share)
    return (too_low or 1) - 1


def rise_detectable_bits(
    differences: NDArray[np.float64], strata: Sequence[object], *, tolerance_bits: float, share: float
) -> float:
    """Smallest mean rise over the baseline that is found with 95% power, tolerance included; bits."""
    members: dict[object, list[float]] = {}
    for value, label in zip(differences, strata, strict=True):
        members.setdefault(label, []).append(float(value))
    alone = [value for values in members.values() if len(values) == 1 for value in values]
    parts = [values for values in [*members.values(), alone] if len(values) > 1]
    variance = sum(len(values) * float(np.var(values, ddof=1)) for values in parts)
    return tolerance_bits + _quantiles(share) * math.sqrt(variance) / len(differences)


def _quantiles(share: float) -> float:
    return normal_quantile(POWER) - normal_quantile(share)
