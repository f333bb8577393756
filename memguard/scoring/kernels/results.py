"""What the kernels return, and how results over parts of the vocabulary become one.

A `Partial` holds the statistics of some columns of every row, relative to the largest logit among them. Held as absolute
sums, means lose 1e-3 at logits of 1e4 and raw second moments lose 4e-4; relative to a running maximum neither happens.

Letters: N rows, T targets (several of a row are allowed), S parts of the vocabulary. Everything is in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(FLOOR) is exactly 0 in float32 and float64, and 0 * FLOOR is 0 where 0 * -inf would be NaN.
FLOOR = -1000.0
NO_COLUMN = -1


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of N distributions over the vocabulary and of T targets in them; nats.

    A row that holds a NaN, a +inf, or no finite logit at all is no distribution. Its figures are NaN, its `argmax` and the
    ranks of its targets are -1, its `num_top_ties` is 0 and none of its targets is greedy.

    Args:
        log_prob: (T,) log-probability of each target, float32 (float64 where the inputs or the path are).
        is_greedy: (T,) whether the target is the `argmax` of its row. Exact for the logits as computed here; a model that
            rounds its logits to bf16 picks another token in a few percent of rows.
        logsumexp: (N,) log of the normaliser.
        argmax: (N,) the most likely column, the lowest index among equals.
        num_top_ties: (N,) columns equal to the maximum; 1 is no tie.
        rank_low: (T,) 1 + columns that are above the target beyond rounding; None unless asked for.
        rank_high: (T,) 1 + other columns that are not below it beyond rounding. The true rank, ties counted either way,
            lies from `rank_low` to `rank_high`. `is_greedy` implies `rank_low == 1`; `rank_high == 1` implies `is_greedy`.
        entropy: (N,) of the distribution; None unless moments are asked for.
        mean_log_prob: (N,) expectation of the log-probability under the distribution; the negative entropy.
        variance_log_prob: (N,) variance of the log-probability under the distribution.
    """

    log_prob: Tensor
    is_greedy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    num_top_ties: Tensor
    rank_low: Tensor | None = None
    rank_high: Tensor | None = None
    entropy: Tensor | None = None
    mean_log_prob: Tensor | None = None
    variance_log_prob: Tensor | None = None


@dataclass(frozen=True)
class Moments:
    """First two moments of z - maximum under the softmax of a part: the mean, and the sum of weighted squares about it."""

    mean: Tensor
    spread: Tensor


@dataclass(frozen=True)
class Partial:
    """A part of the vocabulary: `total` is the sum of exp(z - maximum), `argmax` a column of the whole vocabulary."""

    maximum: Tensor
    total: Tensor
    argmax: Tensor
    num_ties: Tensor
    moments: Moments | None = None


@dataclass(frozen=True)
class TargetCounts:
    """For each target, columns above it and columns not below it beyond rounding, itself left out."""

    above: Tensor
    not_below: Tensor


def merge(first: Partial, second: Partial) -> Partial:
    """The statistics of two parts together; `first` holds the lower columns, so that it wins a tie."""
    maximum = torch.maximum(first.maximum, second.maximum)
    anchor = finite_anchor(maximum)
    shift1, shift2 = (first.maximum - anchor).clamp(min=FLOOR), (second.maximum - anchor).clamp(min=FLOOR)
    total1, total2 = first.total * shift1.exp(), second.total * shift2.exp()
    total = total1 + total2
    ties1, ties2 = first.num_ties * (first.maximum == maximum), second.num_ties * (second.maximum == maximum)
    argmax = torch.where(second.maximum > first.maximum, second.argmax, first.argmax)
    if first.moments is None or second.moments is None:
        return Partial(maximum, total, argmax, ties1 + ties2)
    mean1, mean2 = first.moments.mean + shift1, second.moments.mean + shift2
    step, share2 = mean2 - mean1, total2 / total.clamp(min=1)
    spread = first.moments.spread * shift1.exp() + second.moments.spread * shift2.exp() + step * step * total1 * share2
    # mean1 + step * share2 is the same and loses a rounding of step, which is large where the second part is far above
    mean = (total1 * mean1 + total2 * mean2) / total.clamp(min=1)
    return Partial(maximum, total, argmax, ties1 + ties2, Moments(mean, spread))


def merge_stacked(parts: Partial) -> Partial:
    """The statistics of S parts together, stacked as (S, N): `merge` applied to all at once, in ten operations."""
    maximum = parts.maximum.amax(dim=0)
    shift = (parts.maximum - finite_anchor(maximum)).clamp(min=FLOOR)
    factor = shift.exp()
    totals = parts.total * factor
    total = totals.sum(dim=0)
    is_top = parts.maximum == maximum
    far = torch.iinfo(parts.argmax.dtype).max
    argmax = torch.where(is_top, parts.argmax, far).amin(dim=0)
    ties = (parts.num_ties * is_top).sum(dim=0)
    if parts.moments is None:
        return Partial(maximum, total, argmax, ties)
    means = parts.moments.mean + shift
    mean = (totals * means).sum(dim=0) / total.clamp(min=1)
    spread = (parts.moments.spread * factor + totals * (means - mean).square()).sum(dim=0)
    return Partial(maximum, total, argmax, ties, Moments(mean, spread))


def finite_anchor(maximum: Tensor) -> Tensor:
    """The maximum, or 0 where it is -inf: subtracting it never gives -inf minus -inf."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def finish(
    whole: Partial, target_logits: Tensor, targets: Tensor, *, rows: Tensor | None, counts: TargetCounts | None
) -> TokenStatistics:
    """Statistics from the merged parts and the targets' own logits; `rows` None means one target a row, in order."""
    is_defined = (whole.total > 0) & whole.maximum.isfinite()
    maximum = torch.where(is_defined, whole.maximum, torch.nan)
    log_total = whole.total.log()
    argmax = torch.where(is_defined, whole.argmax, NO_COLUMN)

    def at_targets(values: Tensor) -> Tensor:
        return values if rows is None else values[rows]

    is_greedy = at_targets(argmax) == targets
    low, high = _ranks(counts, is_greedy, at_targets(is_defined))
    mean = variance = None
    if whole.moments is not None:
        mean = torch.where(is_defined, whole.moments.mean - log_total, torch.nan)
        variance = torch.where(is_defined, whole.moments.spread / whole.total, torch.nan)
    return TokenStatistics(
        log_prob=(target_logits - at_targets(maximum)) - at_targets(log_total),
        is_greedy=is_greedy,
        logsumexp=maximum + log_total,
        argmax=argmax,
        num_top_ties=torch.where(is_defined, whole.num_ties, 0).long(),
        rank_low=low,
        rank_high=high,
        entropy=None if mean is None else -mean,
        mean_log_prob=mean,
        variance_log_prob=variance,
    )


def _ranks(counts: TargetCounts | None, is_greedy: Tensor, is_defined: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Counts as ranks. The greedy column is the top of its own product, whatever a separate dot of it said."""
    if counts is None:
        return None, None
    low = torch.where(is_greedy, 1, 1 + counts.above)
    high = torch.where(is_greedy, 1 + counts.not_below, (1 + counts.not_below).clamp(min=2))
    return torch.where(is_defined, low, NO_COLUMN), torch.where(is_defined, high, NO_COLUMN)
