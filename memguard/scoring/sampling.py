"""Log-probabilities of spans under a sampler: temperature, then top-k, then top-p, each as `generate` applies it.

What an attacker samples from is not the model's own distribution: tokens outside top-k or top-p have probability 0, and
the others gain what those lose. Logits of the scored rows alone are made, a block at a time. Nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.errors import NonFiniteScoreError
from memguard.scoring.scorer import Scorer, Span, length_class, picks

BLOCK_LOGITS = 2**24  # logits held at a time: 64 MiB of float32, three times over


@dataclass(frozen=True)
class Sampler:
    """How tokens are drawn. `top_k` None and `top_p` 1 leave the distribution whole.

    Args:
        temperature: above 0.
        top_k: tokens kept, those tied with the last of them too; at least 1.
        top_p: the least mass that the likeliest tokens kept must hold, 0..1.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}.")

    def log_probs(self, logits: Tensor) -> Tensor:
        """The distribution that is drawn from, (N, V) float32; nats, -inf for a token that is never drawn."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < last, -torch.inf)
        if self.top_p < 1.0:
            ascending, order = scores.sort(dim=-1)
            removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - self.top_p
            removed[:, -1] = False
            scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
        return scores.log_softmax(dim=-1)


def sampler_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """Log-probability of each target under the sampler; nats, -inf where it is never drawn.

    Args:
        logits: (N, V), the model's own.
        targets: (N,) int64.
        temperature: above 0.
        top_k: tokens kept.
        top_p: mass kept, 0..1.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> round(sampler_log_probs(logits, torch.tensor([1]), top_k=2).item(), 4)  # -ln(1 + e)
        -1.3133
        >>> sampler_log_probs(logits, torch.tensor([2]), top_k=2).item()
        -inf
    """
    chosen = targets.to(logits.device)[:, None]
    return Sampler(temperature, top_k, top_p).log_probs(logits).gather(1, chosen)[:, 0]


def score_under_sampler(scorer: Scorer, spans: Sequence[Span], sampler: Sampler, *, seed: int = 0) -> NDArray[np.float64]:
    """log p_z: the chance that one query behind its prefix writes a span, by one forward pass.

    Args:
        scorer: of the model.
        spans: what is to be written, behind what.
        sampler: how tokens are drawn.
        seed: of the order in batches.

    Returns:
        float64, shape (len(spans),), in order; nats, -inf where the sampler never draws a token of the span.

    Raises:
        ScoringError: a span the model cannot take; names it.
        NonFiniteScoreError: logits that are NaN.
    """
    scorer.check(spans)
    found = np.full(len(spans), np.nan)
    if not spans:
        return found
    scorer.prepare(spans)
    order = np.random.default_rng(seed).permutation(len(spans)).tolist()
    order.sort(key=lambda index: length_class(spans[index].end))

    def work(batch: Sequence[int]) -> NDArray[np.float64]:
        members = [spans[index] for index in batch]
        states = scorer.model.whole([span.ids[: span.end] for span in members])
        rows, places, targets = picks([(row, span.start - 1, span.suffix_ids) for row, span in enumerate(members)])
        sums = torch.zeros(len(batch), dtype=torch.float64)
        block = max(1, BLOCK_LOGITS // scorer.model.vocabulary_size)
        for first in range(0, len(rows), block):
            part = slice(first, first + block)
            log_probs = sampler.log_probs(scorer.model.logits(states[rows[part], places[part]]))
            chosen = log_probs.gather(1, targets[part].to(log_probs.device)[:, None])[:, 0]
            sums.index_add_(0, rows[part], chosen.double().cpu())
        if sums.isnan().any():
            label = members[int(sums.isnan().nonzero()[0])].label
            raise NonFiniteScoreError(f"the score of {label or 'a span'} must be a number, got NaN.")
        summed: NDArray[np.float64] = sums.clamp(max=0.0).numpy()
        return summed

    def store(batch: Sequence[int], summed: NDArray[np.float64]) -> None:
        found[batch] = summed

    scorer.batches.run(order, work, store, width=lambda index: spans[index].end, label=lambda index: spans[index].label)
    return found
