"""Log-probability of every token of a span, in nats, with the moments of the distribution it was picked from.

Rows are run whole, in the batches and the random order of `Scorer`, so that members and non-members meet the same shapes.
Run inside `audit_mode`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.errors import NonFiniteScoreError
from memguard.scoring.scorer import Progress, Scorer, Span, length_class, picks


@dataclass(frozen=True)
class TokenScores:
    """Figures of the scored tokens of one span, float64, shape (end - start,) each.

    Args:
        log_probs: of each token given those before it; nats.
        mean_log_probs: expectation of the log-probability under the model's distribution there; nats. None unless asked for.
        variance_log_probs: variance of the same; nats^2. None unless asked for.
    """

    log_probs: NDArray[np.float64]
    mean_log_probs: NDArray[np.float64] | None = None
    variance_log_probs: NDArray[np.float64] | None = None


def score_tokens(
    scorer: Scorer, spans: Sequence[Span], *, moments: bool, seed: int = 0, progress: Progress | None = None
) -> list[TokenScores]:
    """Log-probabilities of the tokens of spans, in nats, one array a span.

    Prefixes that spans share are not encoded once: samples of real text share none.

    Args:
        scorer: of the model.
        spans: what to score; lengths may differ.
        moments: also mean and variance of the log-probability, which Min-K%++ standardises with.
        seed: of the order of the batches.
        progress: called with the number of rows done after each batch.

    Returns:
        `TokenScores` in the order of `spans`.

    Raises:
        ScoringError: a span the model cannot take, out of memory, or a forward that fails; names the item.
        NonFiniteScoreError: a figure that is not finite; names the item.
    """
    scorer.check(spans)
    if not spans:
        return []
    scorer.prepare(spans)
    order = list(range(len(spans)))
    random.Random(seed).shuffle(order)
    found: dict[int, TokenScores] = {}

    def store(batch: Sequence[int], scores: list[TokenScores]) -> None:
        found.update(zip(batch, scores, strict=True))
        if progress is not None:
            progress(len(batch))

    scorer.batches.run(
        sorted(order, key=lambda index: length_class(spans[index].end)),
        lambda batch: _score_batch(scorer, [spans[index] for index in batch], moments=moments),
        store,
        width=lambda index: spans[index].end,
        label=lambda index: spans[index].label,
    )
    return [found[index] for index in range(len(spans))]


def _score_batch(scorer: Scorer, spans: Sequence[Span], *, moments: bool) -> list[TokenScores]:
    """Whole rows in one forward pass. Tokens after a span are cut off: they cannot change it."""
    states = scorer.model.whole([span.ids[: span.end] for span in spans])
    rows, places, targets = picks([(row, span.start - 1, span.suffix_ids) for row, span in enumerate(spans)])
    statistics = scorer.model.statistics(states[rows, places], targets, moments=moments)
    names = ("log_prob", "mean_log_prob", "variance_log_prob") if moments else ("log_prob",)
    figures = [_per_span(getattr(statistics, name), spans) for name in names]
    for span, *parts in zip(spans, *figures, strict=True):
        _refuse_non_finite(span, parts)
    return [TokenScores(*parts) for parts in zip(*figures, strict=True)]


def _per_span(values: Tensor, spans: Sequence[Span]) -> list[NDArray[np.float64]]:
    """One array a span, from the tokens of all of them in order."""
    ends = np.cumsum([span.end - span.start for span in spans])
    return np.split(values.to(device="cpu", dtype=torch.float64).numpy(), ends[:-1])


def _refuse_non_finite(span: Span, parts: Sequence[NDArray[np.float64]]) -> None:
    for values in parts:
        if not np.isfinite(values).all():
            raise NonFiniteScoreError(
                f"the score of {span.label or 'a span'} must be finite, got {values[~np.isfinite(values)][0]}. The model's "
                "weights or activations hold NaN or infinity."
            )
