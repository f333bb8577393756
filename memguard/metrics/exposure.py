"""Exposure of canaries by rank, in bits: exact where a search counted the rank, else sampled, with a bound that is free.

Exposure is log2 of the size of the secret space minus log2 of the canary's rank in it. Where no search ended, the rank is
estimated among sampled references, and bounded by the fact that the probabilities of distinct secrets behind one prefix sum
to at most 1. Ties count against low ranks: a tied reference is counted as above. Log-probabilities are nats, natural logarithm.

Source: Carlini et al., The Secret Sharer (USENIX Security 2019), section 4. Differs: p = (b + 1) / (N + 1), never b / N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy  # loads a part at its first use: the gate starts in half the time
from numpy.typing import ArrayLike, NDArray

from memguard.metrics.intervals import tail_probability_interval

LN2 = math.log(2.0)
MASS_ERROR = 1e-4  # nats that float32 sums leave open: memorised siblings may seem to hold all of the mass


@dataclass(frozen=True)
class ExposureEstimate:
    """Exposure of one canary. `nan` bits mean that its score, or a reference's, was not finite."""

    bits: float
    low_bits: float
    high_bits: float
    confidence: float
    method: str
    cap_bits: float
    p_value: float
    rank_low: int
    rank_high: int
    num_references: int
    num_above: int
    num_tied: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class KnownRank:
    """What a search found out about a rank, siblings left out: 1 + candidates above, without and with ties.

    `is_exact` says that every candidate above was found; otherwise the two are certified bounds.
    """

    low: int
    high: int
    is_exact: bool


@dataclass(frozen=True)
class SkewNormalTail:
    """A skew-normal fitted to reference scores: shown, flagged `extrapolated`, used in no test."""

    shape: float
    location: float
    scale: float
    fit_p_value: float

    def bits(self, log_prob: float, *, cap_bits: float) -> float:
        """-log2 of the fitted chance of a score at or above `log_prob`, capped; bits."""
        if math.isnan(log_prob):
            return math.nan
        tail = scipy.stats.skewnorm.logcdf(-log_prob, self.shape, loc=self.location, scale=self.scale)
        return float(min(cap_bits, max(0.0, -tail / LN2))) if np.isfinite(tail) else cap_bits


def certified_rank_high(
    log_prob: float, secret_space_size: int, *, sibling_log_probs: ArrayLike = (), tolerance: float = 0.0
) -> int:
    """The highest rank a secret can have, from its own log-probability alone.

    Candidates ranked at or above it each hold at least its probability, and together at most the mass that the siblings
    leave: rank <= (1 - sum of sibling probabilities) / p. Needs candidates that are distinct and prefix-free.

    Args:
        log_prob: nats, <= 0.
        secret_space_size: candidates, siblings left out.
        sibling_log_probs: log-probabilities of other planted secrets behind the same prefix; nats. Their mass counts for
            `MASS_ERROR` less than it seems: where it rounds to 1, nothing is certified of what is left.
        tolerance: largest error of a log-probability; nats. Widens the bound.

    Returns:
        An exact integer in 1..secret_space_size.

    Example:
        >>> certified_rank_high(math.log(0.3), 10**9)
        3
        >>> certified_rank_high(math.log(0.3), 10**9, sibling_log_probs=[math.log(0.5)])
        1
    """
    siblings = np.asarray(sibling_log_probs, dtype=np.float64)
    left = -math.expm1(min(0.0, float(scipy.special.logsumexp(siblings))) - tolerance - MASS_ERROR) if siblings.size else 1.0
    log_rank = math.log(left) - log_prob + tolerance
    if log_rank >= math.log(secret_space_size):
        return secret_space_size
    # The nudge keeps 1 / p exact when p is a float such as 1/3; it only ever raises the bound.
    return max(1, min(secret_space_size, math.floor(math.exp(log_rank) * (1.0 + 1e-12))))


def estimate_exposure(
    log_prob: float,
    reference_log_probs: ArrayLike,
    *,
    secret_space_size: int,
    sibling_log_probs: ArrayLike = (),
    tolerance: float = 0.0,
    confidence: float = 0.95,
    known: KnownRank | None = None,
) -> ExposureEstimate:
    """Exposure of one canary among references of its space, in bits, with interval, certified bound and exact rank if known.

    Args:
        log_prob: the canary's summed log-probability; nats.
        reference_log_probs: float64, shape (N,), scored by the same path, drawn without replacement from the space less
            every planted secret.
        secret_space_size: candidates of the space, the other planted secrets left out.
        sibling_log_probs: scores of planted secrets behind the same prefix, for the mass bound; nats.
        tolerance: scores closer than this tie; nats.
        confidence: of the interval, 0..1.
        known: what a search of the space found, if there was one.

    Returns:
        `ExposureEstimate`; `bits` is -log2 of the p-value. Exact ranks give it by themselves, ties counted as above;
        otherwise a bound of the rank lowers it where no reference is above.

    Raises:
        ValueError: no references, or a space smaller than its references.

    Example:
        >>> estimate = estimate_exposure(-3.0, [-20.0, -21.0, -22.0], secret_space_size=1000)
        >>> estimate.method, estimate.rank_high, round(estimate.bits, 2)
        ('certified', 20, 5.64)

    Source: statistics specification, section 1.
    """
    references = np.asarray(reference_log_probs, dtype=np.float64)
    n = references.size
    _check_references(n, secret_space_size)
    space_bits = math.log2(secret_space_size)
    siblings = np.asarray(sibling_log_probs, dtype=np.float64)
    if not (math.isfinite(log_prob) and np.isfinite(references).all() and np.isfinite(siblings).all()):
        return _failed(confidence, space_bits, secret_space_size, n)

    strictly_above = int((references > log_prob + tolerance).sum())
    above = int((references >= log_prob - tolerance).sum())
    if known is not None and known.high <= strictly_above:
        known = None  # more references are above than the search would allow: it is not believed
    rank_low = max(1 + strictly_above, known.low if known is not None else 1)
    rank_high = certified_rank_high(log_prob, secret_space_size, sibling_log_probs=siblings, tolerance=tolerance)
    rank_high = min(rank_high, known.high) if known is not None else rank_high
    rank_high = max(rank_high, rank_low)
    if known is not None and known.is_exact:
        return _exact(known, secret_space_size, confidence, num_references=n, num_above=above, num_tied=above - strictly_above)
    certified_p = rank_high / secret_space_size
    p_value = max((above + 1) / (n + 1), rank_low / secret_space_size)
    method = "sampled"
    if above == 0 and certified_p < p_value:
        p_value, method = certified_p, "certified"

    tail_low, tail_high = (float(end) for end in tail_probability_interval(above, n, confidence=confidence))
    low_bits = max(-math.log2(tail_high), -math.log2(certified_p)) + 0.0
    high_bits = min(space_bits - math.log2(rank_low), -math.log2(tail_low) if tail_low > 0.0 else space_bits)
    bits = -math.log2(p_value) + 0.0  # not -0.0
    flags: tuple[str, ...] = ("ties",) if above > strictly_above else ()
    if method == "sampled" and above == 0:
        flags += ("capped",)
    return ExposureEstimate(
        bits=bits,
        low_bits=min(low_bits, bits),
        high_bits=max(high_bits, bits),
        confidence=confidence,
        method=method,
        cap_bits=space_bits if method == "certified" else math.log2(n + 1),
        p_value=p_value,
        rank_low=rank_low,
        rank_high=rank_high,
        num_references=n,
        num_above=above,
        num_tied=above - strictly_above,
        flags=flags,
    )


def estimate_calibrated_exposure(
    gain: float,
    reference_gains: ArrayLike,
    *,
    secret_space_size: int,
    tolerance: float = 0.0,
    confidence: float = 0.95,
) -> ExposureEstimate:
    """Exposure by what training added: the rank of log p now minus log p at step 0, among the same of references, in bits.

    Has the same exact null as sampled exposure and more power, since what made a secret likely before training drops out.
    Gains are no log-probabilities: no mass bounds their ranks, so the estimate is sampled and capped at log2(N + 1).

    Args:
        gain: log p now - log p at step 0 of the canary; nats, may be of either sign.
        reference_gains: float64, shape (N,), the same of references.
        secret_space_size: candidates of the space, the other planted secrets left out.
        tolerance: gains closer than this tie; nats, twice that of a log-probability.
        confidence: of the interval, 0..1.

    Raises:
        ValueError: no references, or a space smaller than its references.

    Example:
        >>> estimate = estimate_calibrated_exposure(3.0, [0.1, -0.2, 4.0], secret_space_size=1000)
        >>> estimate.method, estimate.num_above, estimate.bits
        ('sampled', 1, 1.0)

    Source: statistics specification, section 7.
    """
    references = np.asarray(reference_gains, dtype=np.float64)
    n = references.size
    _check_references(n, secret_space_size)
    space_bits = math.log2(secret_space_size)
    if not (math.isfinite(gain) and np.isfinite(references).all()):
        return _failed(confidence, space_bits, secret_space_size, n)
    strictly_above = int((references > gain + tolerance).sum())
    above = int((references >= gain - tolerance).sum())
    p_value = (above + 1) / (n + 1)
    tail_low, tail_high = (float(end) for end in tail_probability_interval(above, n, confidence=confidence))
    bits = -math.log2(p_value) + 0.0
    return ExposureEstimate(
        bits=bits,
        low_bits=min(-math.log2(tail_high) + 0.0, bits),
        high_bits=max(-math.log2(tail_low) if tail_low > 0.0 else space_bits, bits),
        confidence=confidence,
        method="sampled",
        cap_bits=math.log2(n + 1),
        p_value=p_value,
        rank_low=1 + strictly_above,
        rank_high=secret_space_size,
        num_references=n,
        num_above=above,
        num_tied=above - strictly_above,
        flags=(*(("ties",) if above > strictly_above else ()), *(("capped",) if above == 0 else ())),
    )


def _check_references(n: int, secret_space_size: int) -> None:
    if n == 0:
        raise ValueError("reference_log_probs must hold at least one score, got none.")
    if secret_space_size < n:
        raise ValueError(f"secret_space_size must be at least the number of references {n}, got {secret_space_size}.")


def _failed(confidence: float, space_bits: float, secret_space_size: int, n: int) -> ExposureEstimate:
    nan = math.nan
    return ExposureEstimate(nan, nan, nan, confidence, "failed", space_bits, nan, 1, secret_space_size, n, 0, 0, ())


def _exact(
    known: KnownRank, secret_space_size: int, confidence: float, *, num_references: int, num_above: int, num_tied: int
) -> ExposureEstimate:
    """Exposure from a rank that a search counted; the interval is what ties leave open."""
    space_bits = math.log2(secret_space_size)
    high, low = min(known.high, secret_space_size), min(known.low, secret_space_size)
    return ExposureEstimate(
        bits=space_bits - math.log2(high),
        low_bits=space_bits - math.log2(high),
        high_bits=space_bits - math.log2(low),
        confidence=confidence,
        method="exact",
        cap_bits=space_bits,
        p_value=high / secret_space_size,
        rank_low=low,
        rank_high=high,
        num_references=num_references,
        num_above=num_above,
        num_tied=num_tied,
        flags=("ties",) if high > low else (),
    )


def sampled_null_mean_bits(num_references: int) -> float:
    """Mean sampled exposure of a secret the model never saw: 1.431 bits for 512 references.

    Example:
        >>> round(sampled_null_mean_bits(512), 3)
        1.431
    """
    n = num_references
    return math.log2(n + 1) - math.lgamma(n + 2) / LN2 / (n + 1)


def fit_skew_normal(reference_log_probs: ArrayLike) -> SkewNormalTail | None:
    """Fit the tail that the Secret Sharer extrapolates with; None where a fit means nothing.

    Needs at least 30 references that are not all alike. The p-value is a Kolmogorov-Smirnov test on the fitted
    parameters, hence too lenient: a small one condemns the fit, a large one does not bless it.
    """
    perplexities: NDArray[np.float64] = -np.asarray(reference_log_probs, dtype=np.float64)
    if perplexities.size < 30 or not np.isfinite(perplexities).all() or np.ptp(perplexities) <= 1e-9:
        return None
    shape, location, scale = scipy.stats.skewnorm.fit(perplexities)
    if not (np.isfinite([shape, location, scale]).all() and scale > 0):
        return None
    fit = scipy.stats.kstest(perplexities, scipy.stats.skewnorm(shape, loc=location, scale=scale).cdf)
    return SkewNormalTail(float(shape), float(location), float(scale), float(fit.pvalue))
