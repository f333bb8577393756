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
from scipy import optimize, special


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


def chernoff_upper_mean(mean: float, count: int, *, significance: float) -> float:
    """Upper bound of the mean of a variable in 0..1: sup{v : count * KL(mean || v) <= ln(1/significance)}.

    Example:
        >>> round(chernoff_upper_mean(0.0, 500, significance=0.05), 5)
        0.00597
    """
    budget = -math.log(significance) / count
    if mean >= 1.0:
        return 1.0
    if mean <= 0.0:
        return -math.expm1(-budget)

    def excess(v: float) -> float:
        divergence = mean * (math.log(mean) - math.log(v)) + (1 - mean) * (math.log1p(-mean) - math.log1p(-v))
        return divergence - budget

    top = 1.0 - 1e-15
    return 1.0 if excess(top) <= 0 else float(optimize.brentq(excess, mean, top, xtol=1e-15))


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
    significance = 1.0 - confidence
    low = log_prob - math.log(chernoff_upper_mean(math.exp(log_mean), priors.size, significance=significance))
    high = ratio - math.log(significance)
    size = float(np.exp(2 * special.logsumexp(priors) - special.logsumexp(2 * priors)))
    threshold = math.log(n)
    if log_prob <= math.log(m):
        verdict = "not extractable"
    elif low > threshold:
        verdict = "PA (certified)"
    elif high <= threshold:
        verdict = "common (certified)"
    elif size < min_effective_size:
        verdict = "undecided"
    else:
        verdict = "PA (estimate)" if ratio > threshold else "common (estimate)"
    return PriorAwareEstimate(verdict, log_prob, log_mean, ratio, min(low, ratio), high, confidence, size, priors.size)
