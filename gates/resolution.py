"""What a significance rule can see at this size: what it would need to fire at all, and the smallest effect it finds.

Effects are in bits of exposure, at 95% power: as far above what a test needs as the spread *at that effect* asks for, which is
wider than without one. Source: statistics specification, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.metrics.exposure import sampled_null_mean_bits
from memguard.metrics.family import NUM_DRAWS, FamilyGroup, distinct_draws_p_value, normal_quantile
from memguard.metrics.rises import POWER, VARIANCE_A_BIT, smallest_effect, smallest_rise

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


def pooled_detectable_bits(groups: Sequence[FamilyGroup], share: float) -> float | None:
    """Smallest mean shift of the family that the pooled test finds with 95% power; bits. None: no shift is found so often."""
    n = sum(len(group.num_above) for group in groups)
    # Canaries that share N references vary together: 1 + K / N, as in a two-sample comparison.
    inflation = [1 + len(group.num_above) / group.num_non_members if group.shared else 1.0 for group in groups]
    a_bit = sum(len(group.num_above) * factor for group, factor in zip(groups, inflation, strict=True)) / n**2
    threshold = -normal_quantile(share) * SD_BITS * math.sqrt(a_bit)
    bits = smallest_effect(threshold, normal_quantile(POWER), SD_BITS**2 * a_bit, VARIANCE_A_BIT * a_bit)
    room = sum(len(group.num_above) * _room_bits(group.num_non_members) for group in groups) / n
    return bits if bits <= room else None


def _room_bits(num_references: int) -> float:
    """How far above chance sampled exposure can lie; bits."""
    return math.log2(num_references + 1) - sampled_null_mean_bits(num_references)


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
    """Smallest mean rise over one baseline run that is found with 95% power, tolerance included; bits."""
    members: dict[object, list[float]] = {}
    for value, label in zip(differences, strata, strict=True):
        members.setdefault(label, []).append(float(value))
    alone = [value for values in members.values() if len(values) == 1 for value in values]
    parts = [values for values in [*members.values(), alone] if len(values) > 1]
    variance = sum(len(values) * float(np.var(values, ddof=1)) for values in parts)
    freedom = sum(len(values) - 1 for values in parts)
    error = math.sqrt(variance) / len(differences)
    return smallest_rise(error, freedom, len(differences), tolerance_bits=tolerance_bits, significance=share)
