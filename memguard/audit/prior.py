"""Prior-Aware memorisation: the same target behind prefixes of the training data.

Only targets that pass the extractability threshold are scored behind the prior prefixes; the others end there. A prior
prefix is a window of a training row, as long as the target's own prefix; copies of that prefix are left out and counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from memguard.audit.config import PriorAwareSettings
from memguard.audit.report import PriorAware
from memguard.errors import EvidenceError
from memguard.metrics.prior_aware import PriorAwareThresholds, estimate_prior_aware
from memguard.scoring.certified import PriorBounds, PriorPrefixes
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
            if tuple(ids[: len(lead_ids)]) == lead_ids:  # a row that begins with them is not given them twice
                ids = ids[len(lead_ids) :] or ids
            start = rng.randrange(max(1, len(ids) - wanted + 1))
            windows.append((*lead_ids, *(int(token) for token in ids[start : start + wanted])))
            if len(windows) == number:
                return windows
        raise EvidenceError(f"prior prefixes must come from rows with tokens, got {len(windows)} of {number}.")


class PriorMeasurement:
    """Measures many targets behind the same prior prefixes, which are encoded once for all targets of a length.

    Args:
        scorer: of the model, which scored the targets already.
        source: training rows.
        settings: extractability, number of prefixes, certified or full.
        lead_ids: ids before every prefix.
        seed: of the choice of prefixes.
        tolerance: error of a score; nats.

    Raises:
        EvidenceError: no training row to cut a prefix from.
    """

    def __init__(
        self,
        scorer: Scorer,
        source: PrefixSource,
        settings: PriorAwareSettings,
        *,
        lead_ids: tuple[int, ...],
        seed: int,
        tolerance: float = 0.0,
    ) -> None:
        if source.num_rows == 0:
            raise EvidenceError("prior prefixes must come from at least one training row, got none.")
        self.scorer, self.source, self.settings = scorer, source, settings
        self.lead_ids, self.seed, self.tolerance = lead_ids, seed, tolerance
        self._windows: dict[int, list[tuple[int, ...]]] = {}
        self._encoded: tuple[tuple[int, tuple[int, ...] | None], PriorPrefixes] | None = None

    def measure(self, span: Span, log_prob: float, *, n: float) -> PriorAware:
        """Prior-Aware figures of one scored target; see `memguard.metrics.prior_aware`.

        Args:
            span: the target behind its own prefix.
            log_prob: its score; nats.
            n: belief ratio that makes it PA.
        """
        if not self.is_extractable(log_prob):
            return not_extractable(log_prob)
        others, num_excluded = self._others(span)
        if self.settings.mode == "certified":
            found = self._certified(span, min(log_prob, 0.0), others, n, num_excluded)
            if found is not None:
                return found
        return self._full(span, min(log_prob, 0.0), others, n, num_excluded)

    def is_extractable(self, log_prob: float) -> bool:
        """Whether a target passes the threshold m, so that its verdict needs a ratio."""
        return log_prob > math.log(self.settings.m)

    def log_ratios(self, spans: Sequence[Span], log_probs: Sequence[float]) -> list[float]:
        """log belief ratios of targets, extractable or not, by every prefix followed to the end; nats, in order."""
        pairs: list[Span] = []
        sizes: list[int] = []
        for span in spans:  # in one call, so that a prefix is encoded once for all targets behind it
            others, _ = self._others(span)
            pairs += _behind(others, span)
            sizes.append(len(others))
        scores = np.minimum(self.scorer.score(pairs, seed=self.seed).log_probs, 0.0)
        parts = np.split(scores, np.cumsum(sizes)[:-1])
        return [
            min(log_prob, 0.0) - (float(special.logsumexp(part)) - math.log(len(part)))
            for log_prob, part in zip(log_probs, parts, strict=True)
        ]

    def _others(self, span: Span) -> tuple[list[tuple[int, ...]], int]:
        """Prior prefixes that are not the target's own, and how many were left out."""
        windows = self._cut(span.start)
        others = [window for window in windows if window != span.prefix_ids]
        if not others:
            raise EvidenceError("prior prefixes must differ from the target's own prefix, got none that does.")
        return others, len(windows) - len(others)

    def _scores(self, span: Span, windows: list[tuple[int, ...]]) -> NDArray[np.float64]:
        return np.minimum(self.scorer.score(_behind(windows, span), seed=self.seed).log_probs, 0.0)

    def _certified(
        self, span: Span, log_prob: float, windows: list[tuple[int, ...]], n: float, num_excluded: int
    ) -> PriorAware | None:
        """The verdict from bounds of the mean; None where it hangs on less than the tolerance."""
        prefixes = self._prefixes(span, windows)
        state = prefixes.begin(span.suffix_ids)
        count = len(windows)
        thresholds = PriorAwareThresholds(self.settings.m, n, CONFIDENCE)

        def decide(bounds: PriorBounds) -> str | None:
            return thresholds.decide(
                log_prob,
                count,
                log_mean=(bounds.log_mean_low, min(0.0, bounds.log_mean_high)),
                effective_size=(bounds.effective_size_low, bounds.effective_size_high),
                tolerance=self.tolerance,
            )

        verdict = prefixes.decide(state, decide)
        if verdict is None:
            return None
        bounds = state.bounds()
        high_mean = min(0.0, bounds.log_mean_high)
        return PriorAware(
            verdict=verdict,
            n=n,
            log_prob=log_prob,
            prior_log_prob=high_mean,
            prior_log_prob_low=bounds.log_mean_low if math.isfinite(bounds.log_mean_low) else None,
            log_belief_ratio=log_prob - high_mean,
            low=min(thresholds.low(log_prob, high_mean, count), log_prob - high_mean),
            high=thresholds.high(log_prob, bounds.log_mean_low) if math.isfinite(bounds.log_mean_low) else None,
            confidence=CONFIDENCE,
            effective_sample_size=bounds.effective_size_low if bounds.num_open == 0 else None,
            num_prior_prefixes=count,
            num_excluded_prefixes=num_excluded,
            num_open_prefixes=bounds.num_open,
        )

    def _full(self, span: Span, log_prob: float, windows: list[tuple[int, ...]], n: float, num_excluded: int) -> PriorAware:
        scores = self._scores(span, windows)
        estimate = estimate_prior_aware(log_prob, scores, m=self.settings.m, n=n, confidence=CONFIDENCE)
        return PriorAware(
            verdict=estimate.verdict,
            n=n,
            log_prob=log_prob,
            prior_log_prob=estimate.prior_log_prob,
            prior_log_prob_low=estimate.prior_log_prob,
            log_belief_ratio=estimate.log_belief_ratio,
            low=estimate.low,
            high=estimate.high,
            confidence=CONFIDENCE,
            effective_sample_size=estimate.effective_sample_size,
            num_prior_prefixes=estimate.num_prior_prefixes,
            num_excluded_prefixes=num_excluded,
        )

    def _cut(self, length: int) -> list[tuple[int, ...]]:
        if length not in self._windows:
            seed = f"memguard/prior/{self.seed}/{length}"
            windows = self.source.windows(self.settings.prefixes, length=length, lead_ids=self.lead_ids, seed=seed)
            self._windows[length] = self.scorer.model.team.agreed("prior windows", windows)  # rows may be augmented at random
        return self._windows[length]

    def _prefixes(self, span: Span, windows: list[tuple[int, ...]]) -> PriorPrefixes:
        """Encoded prefixes, those of the last secret where they are the same ones."""
        left_out = span.prefix_ids if len(windows) < len(self._cut(span.start)) else None
        key = (span.start, left_out)
        if self._encoded is None or self._encoded[0] != key:
            self._encoded = (key, PriorPrefixes(self.scorer, windows))
        return self._encoded[1]


def _behind(windows: Sequence[tuple[int, ...]], span: Span) -> list[Span]:
    """A target behind other prefixes."""
    suffix = span.suffix_ids
    return [Span((*window, *suffix), len(window), len(window) + len(suffix), span.label) for window in windows]


def not_extractable(log_prob: float) -> PriorAware:
    """What is said of a target below the threshold m: nothing of it is scored behind other prefixes."""
    return PriorAware(
        verdict="not extractable",
        n=None,
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
