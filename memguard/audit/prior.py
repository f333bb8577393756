"""Prior-Aware memorisation of canaries: the same secret behind prefixes of the training data.

Only secrets that pass the extractability threshold are scored behind the prior prefixes; the others end there. A prior
prefix is a window of a training row, as long as the canary's own prefix; copies of that prefix are left out and counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memguard.audit.config import PriorAwareSettings
from memguard.audit.report import PriorAware
from memguard.errors import EvidenceError
from memguard.metrics.prior_aware import estimate_prior_aware
from memguard.scoring.scorer import Scorer, Span

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PrefixSource:
    """Training rows to cut prior prefixes from, without canaries.

    Args:
        num_rows: rows there are.
        ids_of: token ids of row i.
    """

    num_rows: int
    ids_of: Callable[[int], Sequence[int]]

    def windows(self, number: int, *, length: int, lead_ids: tuple[int, ...], seed: str) -> list[tuple[int, ...]]:
        """`number` random windows of `length` tokens, `lead_ids` included; short rows give what they have."""
        rng = random.Random(seed)
        wanted = max(1, length - len(lead_ids))
        windows: list[tuple[int, ...]] = []
        for _ in range(20 * number):
            ids = list(self.ids_of(rng.randrange(self.num_rows)))
            if not ids:
                continue
            start = rng.randrange(max(1, len(ids) - wanted + 1))
            windows.append((*lead_ids, *(int(token) for token in ids[start : start + wanted])))
            if len(windows) == number:
                return windows
        raise EvidenceError(f"prior prefixes must come from rows with tokens, got {len(windows)} of {number}.")


def measure_prior_aware(
    span: Span,
    log_prob: float,
    scorer: Scorer,
    source: PrefixSource,
    settings: PriorAwareSettings,
    *,
    lead_ids: tuple[int, ...],
    seed: int,
) -> PriorAware:
    """Prior-Aware figures of one scored secret; see `memguard.metrics.prior_aware`."""
    if log_prob <= math.log(settings.m):
        return _not_extractable(log_prob)
    own = span.ids[: span.start]
    windows = source.windows(
        settings.prefixes, length=span.start, lead_ids=lead_ids, seed=f"memguard/prior/{seed}/{span.start}"
    )
    others = [window for window in windows if window != own]
    suffix = span.ids[span.start : span.end]
    spans = [Span((*window, *suffix), len(window), len(window) + len(suffix), span.label) for window in others]
    scores = scorer.score(spans, seed=seed).log_probs
    estimate = estimate_prior_aware(min(log_prob, 0.0), scores, m=settings.m, n=settings.n, confidence=CONFIDENCE)
    return PriorAware(
        verdict=estimate.verdict,
        log_prob=log_prob,
        prior_log_prob=estimate.prior_log_prob,
        log_belief_ratio=estimate.log_belief_ratio,
        low=estimate.low,
        high=estimate.high,
        confidence=CONFIDENCE,
        effective_sample_size=estimate.effective_sample_size,
        num_prior_prefixes=estimate.num_prior_prefixes,
        num_excluded_prefixes=len(windows) - len(others),
    )


def _not_extractable(log_prob: float) -> PriorAware:
    return PriorAware(
        verdict="not extractable",
        log_prob=log_prob,
        prior_log_prob=None,
        log_belief_ratio=None,
        low=None,
        high=None,
        confidence=CONFIDENCE,
        effective_sample_size=None,
        num_prior_prefixes=0,
        num_excluded_prefixes=0,
    )
