"""Log-probabilities of spans of token sequences, in nats, by plain batched forward passes.

Rows are padded on the right, logits are taken to float32 before the log-softmax whatever the model's dtype, and rows are
put into batches in a seeded random order: batch shape shifts low-precision scores, and a canary must meet the same shapes
as its references. Run inside `audit_mode`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.errors import ScoringError


@dataclass(frozen=True)
class Span:
    """Token ids and the half-open range that is scored; `start` >= 1, since the first token has nothing before it."""

    ids: tuple[int, ...]
    start: int
    end: int
    label: str = ""


@dataclass(frozen=True)
class SpanScores:
    """Scores in the order of the spans: summed log-probabilities (nats, float64) and greedy matches."""

    log_probs: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]


class Scorer:
    """Scores spans with one model.

    Args:
        model: a causal language model whose forward takes `input_ids` and `attention_mask` and returns `.logits`
            (batch, length, vocabulary). Padded vocabulary rows stay in the normaliser, as in the model's own softmax.
        batch_size: rows a forward pass.
    """

    def __init__(self, model: Any, *, batch_size: int = 64) -> None:
        self.model, self.batch_size = model, batch_size
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ScoringError("the model must have parameters, got none.")
        self.device = parameter.device
        self.dtype = str(parameter.dtype).removeprefix("torch.")
        self._takes_cache = hasattr(getattr(model, "config", None), "use_cache")

    def score(self, spans: Sequence[Span], *, seed: int = 0, progress: Callable[[int], None] | None = None) -> SpanScores:
        """Score spans, batched in a random order.

        Args:
            spans: what to score; lengths may differ.
            seed: of the order.
            progress: called with the number of rows done after each batch.

        Returns:
            `SpanScores`, arrays of shape (len(spans),). A score that is not finite is returned as it is.

        Raises:
            ScoringError: a span the model cannot take, out of memory, or a forward that fails; names the item.
        """
        self._check(spans)
        log_probs, is_greedy = np.full(len(spans), np.nan), np.zeros(len(spans), dtype=bool)
        order = list(range(len(spans)))
        random.Random(seed).shuffle(order)
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            batch = [spans[index] for index in chosen]
            try:
                log_probs[chosen], is_greedy[chosen] = self._forward(batch)
            except ScoringError:
                raise
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise ScoringError(
                    f"scoring {batch[0].label or 'a batch'} and {len(batch) - 1} rows beside it failed with "
                    f"{type(error).__name__}. A smaller audit.batch_size helps when memory ran out."
                ) from None
            if progress is not None:
                progress(len(chosen))
        return SpanScores(log_probs, is_greedy)

    def _check(self, spans: Sequence[Span]) -> None:
        limit = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        for span in spans:
            if not 1 <= span.start < span.end <= len(span.ids):
                raise ScoringError(
                    f"{span.label or 'a span'} must satisfy 1 <= start < end <= length, "
                    f"got {span.start}, {span.end}, {len(span.ids)}."
                )
            if isinstance(limit, int) and limit > 0 and span.end > limit:
                raise ScoringError(f"{span.label or 'a span'} must fit the model's {limit} positions, got {span.end} tokens.")

    def _forward(self, batch: Sequence[Span]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Scores of one batch. Tokens after a span are cut off: they cannot change it."""
        width = max(span.end for span in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for row, span in enumerate(batch):
            ids[row, : span.end] = torch.tensor(span.ids[: span.end])
            mask[row, : span.end] = 1
        options = {"use_cache": False} if self._takes_cache else {}
        logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device), **options).logits
        if logits is None:
            raise ScoringError("the model returned no logits; switch off a fused loss that swallows them.")
        rows = torch.tensor([row for row, span in enumerate(batch) for _ in range(span.start, span.end)])
        places = torch.tensor([place for span in batch for place in range(span.start, span.end)])
        targets = ids[rows, places].to(logits.device)
        picked = logits[rows.to(logits.device), places.to(logits.device) - 1].float()
        token_log_probs = torch.log_softmax(picked, dim=-1).gather(1, targets[:, None]).squeeze(1).double().cpu()
        misses = (picked.argmax(dim=-1) != targets).cpu()
        sums = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, rows, token_log_probs)
        missed = torch.zeros(len(batch), dtype=torch.long).index_add_(0, rows, misses.long())
        return sums.numpy(), (missed == 0).numpy()
