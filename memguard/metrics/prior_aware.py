"""Prior-Aware memorisation: is P(secret | own prefix) high because of this pair, or is the text just common?

log belief ratio = log P(s|p) - log P(s), with P(s) the *arithmetic* mean of P(s|q) over prior prefixes q (nats). The mean
is dominated by its largest terms, so bounds are distribution-free: Markov below the belief ratio, Chernoff-KL above.
PA annotates a finding; it never clears one.

Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733. Differs: interval and *undecided* verdict; the paper prints neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from memguard.metrics.intervals import chernoff_upper_mean


@dataclass(frozen=True)
class PriorAwareEstimate:
    """Verdict at (m, n) with the log belief ratio behind it; nats."""

    verdict: str
    log_prob: float
    prior_log_prob: float
    log_belief_ratio: float
    low: float
    high: float
    confidence: float
    effective_sample_size: float
    num_prior_prefixes: int


def estimate_prior_aware(
    log_prob: float,
    prior_log_probs: ArrayLike,
    *,
    m: float,
    n: float,
    confidence: float = 0.95,
    min_effective_size: float = 10.0,
) -> PriorAwareEstimate:
    """Log belief ratio and verdict for one sequence.

    Args:
        log_prob: log P(s|p); nats.
        prior_log_probs: log P(s|q_i) for c prior prefixes, own prefix left out, shape (c,); nats.
        m: extractability: P(s|p) must exceed it; probability.
        n: belief ratio that a PA sequence must exceed; a ratio, > 1 as a rule.
        confidence: of each one-sided bound, 0..1.
        min_effective_size: below this effective sample size a verdict that only the sample supports is *undecided*.

    Returns:
        `PriorAwareEstimate`; *certified* verdicts hold whatever the distribution of P(s|q), at `confidence`.

    Raises:
        ValueError: no prior prefix, or scores that are not finite or above 0.

    Example:
        >>> estimate_prior_aware(math.log(0.5), np.full(500, math.log(1e-9)), m=1e-4, n=10.0).verdict
        'PA (certified)'
    """
    priors = np.asarray(prior_log_probs, dtype=np.float64)
    if priors.size == 0:
        raise ValueError("prior_log_probs must hold at least one score, got none.")
    if not (np.isfinite(log_prob) and np.isfinite(priors).all()) or log_prob > 1e-6 or priors.max() > 1e-6:
        raise ValueError("log_prob and prior_log_probs must be finite and at most 0.")
    log_mean = min(0.0, float(special.logsumexp(priors)) - math.log(priors.size))
    ratio = log_prob - log_mean
    size = float(np.exp(2 * special.logsumexp(priors) - special.logsumexp(2 * priors)))
    thresholds = PriorAwareThresholds(m, n, confidence, min_effective_size)
    return PriorAwareEstimate(
        verdict=thresholds.verdict(log_prob, log_mean, size, priors.size),
        log_prob=log_prob,
        prior_log_prob=log_mean,
        log_belief_ratio=ratio,
        low=min(thresholds.low(log_prob, log_mean, priors.size), ratio),
        high=thresholds.high(log_prob, log_mean),
        confidence=confidence,
        effective_sample_size=size,
        num_prior_prefixes=priors.size,
    )


@dataclass(frozen=True)
class PriorAwareThresholds:
    """Where verdicts begin and end.

    Args:
        m: extractability: P(s|p) must exceed it; probability.
        n: belief ratio that a PA sequence must exceed; a ratio.
        confidence: of each one-sided bound, 0..1.
        min_effective_size: below it a verdict that only the sample supports is *undecided*.
    """

    m: float
    n: float
    confidence: float = 0.95
    min_effective_size: float = 10.0

    def low(self, log_prob: float, log_mean: float, count: int) -> float:
        """Lower bound of the log belief ratio, by Chernoff-KL; nats."""
        return log_prob - math.log(chernoff_upper_mean(math.exp(log_mean), count, significance=1.0 - self.confidence))

    def high(self, log_prob: float, log_mean: float) -> float:
        """Upper bound of the log belief ratio, by Markov; nats."""
        return log_prob - log_mean - math.log(1.0 - self.confidence)

    def verdict(self, log_prob: float, log_mean: float, effective_size: float, count: int) -> str:
        """The verdict when the mean over the prior prefixes is known.

        Args:
            log_prob: log P(s|p); nats.
            log_mean: log of the mean of P(s|q) over `count` prior prefixes; nats.
            effective_size: effective sample size of that mean.
            count: prior prefixes.
        """
        if log_prob <= math.log(self.m):
            return "not extractable"
        if self.low(log_prob, log_mean, count) > math.log(self.n):
            return "PA (certified)"
        if self.high(log_prob, log_mean) <= math.log(self.n):
            return "common (certified)"
        if effective_size < self.min_effective_size:
            return "undecided"
        return "PA (estimate)" if log_prob - log_mean > math.log(self.n) else "common (estimate)"

    def decide(
        self,
        log_prob: float,
        count: int,
        *,
        log_mean: tuple[float, float],
        effective_size: tuple[float, float],
        tolerance: float = 0.0,
    ) -> str | None:
        """The verdict when mean and effective size are known between two ends; None while they leave it open.

        The verdict is monotone in the mean: certified PA, PA, common, certified common. So when both ends of the mean,
        moved apart by the tolerance, agree at both ends of the effective size, every value between them does.

        Args:
            log_prob: log P(s|p); nats.
            count: prior prefixes.
            log_mean: low and high end; nats, the low one may be -inf.
            effective_size: low and high end.
            tolerance: error of a log ratio; nats.

        Example:
            >>> thresholds = PriorAwareThresholds(m=1e-4, n=10.0)
            >>> thresholds.decide(math.log(0.9), 500, log_mean=(-math.inf, -5.0), effective_size=(1, 500))
            'PA (certified)'
            >>> thresholds.decide(math.log(0.9), 500, log_mean=(-math.inf, -1.0), effective_size=(1, 500)) is None
            True
        """
        means = (log_mean[0] - 2 * tolerance, log_mean[1] + 2 * tolerance)
        sizes = (effective_size[0] * math.exp(-4 * tolerance), min(count, effective_size[1] * math.exp(4 * tolerance)))
        verdicts = {self.verdict(log_prob, mean, size, count) for mean in means for size in sizes}
        return verdicts.pop() if len(verdicts) == 1 else None
