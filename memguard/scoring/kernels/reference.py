"""The statistics in float64, one row at a time, written as plainly as they can be: what the fast paths are tested against.

Letters: N rows, V vocabulary, D width, T targets. Slow, and it holds one row of V logits at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memguard.scoring.kernels.results import NO_COLUMN, TokenStatistics


@dataclass(frozen=True)
class Row:
    """One distribution: its log-probabilities, and what `TokenStatistics` says of a row."""

    log_probs: Tensor
    logits: Tensor
    logsumexp: float
    argmax: int
    num_top_ties: int
    mean: float
    variance: float


def reference_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    vocabulary_size: int | None = None,
    moments: bool = False,
    ranks: bool = False,
) -> TokenStatistics:
    """What `token_statistics` computes, in float64; arguments as there."""
    columns = weight.double()

    def logits_of(row: int) -> Tensor:
        logits = columns @ hidden[row].double()
        if bias is not None:
            logits = logits + bias.double()
        logits = logits * scale
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    return _collect(logits_of, len(hidden), targets, rows, vocabulary_size or len(weight), moments=moments, ranks=ranks)


def reference_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    vocabulary_size: int | None = None,
    moments: bool = False,
    ranks: bool = False,
) -> TokenStatistics:
    """What `logit_statistics` computes, in float64; arguments as there."""
    width = vocabulary_size or logits.shape[1]
    return _collect(lambda row: logits[row].double(), len(logits), targets, rows, width, moments=moments, ranks=ranks)


def _collect(
    logits_of: Callable[[int], Tensor],
    num_rows: int,
    targets: Tensor,
    rows: Tensor | None,
    num_columns: int,
    *,
    moments: bool,
    ranks: bool,
) -> TokenStatistics:
    chosen = range(num_rows) if rows is None else rows.tolist()
    described = []
    log_probs, is_greedy = [torch.nan] * len(targets), [False] * len(targets)
    low, high = [NO_COLUMN] * len(targets), [NO_COLUMN] * len(targets)
    for number in range(num_rows):
        row = _describe(logits_of(number)[:num_columns])
        described.append((row.logsumexp, row.argmax, row.num_top_ties, row.mean, row.variance))
        for place, (owner, target) in enumerate(zip(chosen, targets.tolist(), strict=True)):
            if owner == number and row.argmax != NO_COLUMN:
                log_probs[place] = float(row.log_probs[target])
                is_greedy[place] = row.argmax == target
                low[place] = 1 + int((row.logits > row.logits[target]).sum())
                high[place] = int((row.logits >= row.logits[target]).sum())

    def column(index: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[index] for values in described], dtype=dtype, device=targets.device)

    def whole(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=targets.device)

    mean = column(3, torch.double)
    return TokenStatistics(
        log_prob=torch.tensor(log_probs, dtype=torch.double, device=targets.device),
        is_greedy=torch.tensor(is_greedy, dtype=torch.bool, device=targets.device),
        logsumexp=column(0, torch.double),
        argmax=column(1, torch.long),
        num_top_ties=column(2, torch.long),
        rank_low=whole(low) if ranks else None,
        rank_high=whole(high) if ranks else None,
        entropy=-mean if moments else None,
        mean_log_prob=mean if moments else None,
        variance_log_prob=column(4, torch.double) if moments else None,
    )


def _describe(logits: Tensor) -> Row:
    """One row; a row that is no distribution has no argmax and NaN for every figure."""
    top = float(logits.max())
    if not torch.isfinite(logits.max()):
        return Row(logits, logits, torch.nan, NO_COLUMN, 0, torch.nan, torch.nan)
    log_total = float((logits - top).exp().sum().log())
    log_probs = (logits - top) - log_total
    possible = log_probs[log_probs > -torch.inf]
    probabilities = possible.exp()
    mean = float((probabilities * possible).sum())
    variance = float((probabilities * (possible - mean).square()).sum())
    ties = (logits == top).nonzero().squeeze(1).tolist()
    return Row(log_probs, logits, top + log_total, ties[0], len(ties), mean, variance)
