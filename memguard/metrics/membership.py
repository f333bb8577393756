"""Membership inference: scores of one sample from the log-probabilities of its tokens, and how well a score tells members.

Every score is oriented so that HIGHER means more likely a member. A score says nothing by itself: members and non-members
must come from one source (`distribution_shift`), and only the AUROC and the true-positive rate at a small false-positive
rate, each with its interval, are figures. Log-probabilities are nats of one token; rates are 0..1.

Source: Carlini et al. 2021 (2012.07805) loss, zlib, lowercase, reference; Shi et al. (2310.16789) Min-K%; Zhang et al.
(2404.02936) Min-K%++; statistics specification, section 7.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from memguard.metrics.intervals import Interval, share_interval

MIN_VARIANCE = 1e-12  # nats^2: below it a standardised score is rounding divided by rounding
ROUNDING = 1e-3  # nats that a float32 log-probability may stand above 0
ABOVE_FLOOR = 1e-9  # 0.29 * 100 is 28.999999999999996 in floats, and 29 tokens are meant


@dataclass(frozen=True)
class SampleScore:
    """A score of one sample; higher means more likely a member. `nan` where no token of the sample has a score.

    Args:
        value: the score; its unit is that of the function that gave it.
        num_tokens: tokens it rests on.
        num_undefined: tokens left out, because their distribution has no spread.
    """

    value: float
    num_tokens: int
    num_undefined: int = 0

    @property
    def is_undefined(self) -> bool:
        """Whether every token was left out."""
        return math.isnan(self.value)


@dataclass(frozen=True)
class AurocEstimate:
    """Chance that a member scores above a non-member, ties as one half, 0..1; `p_value` is one-sided."""

    value: float
    low: float
    high: float
    confidence: float
    p_value: float
    n_members: int
    n_non_members: int
    method: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class TprEstimate:
    """True-positive rate at a small false-positive rate; None throughout where too few non-members refuse it.

    Args:
        max_fpr: the false-positive rate asked for.
        achievable_fpr: the smallest one that the number of non-members allows.
        is_refused: whether `max_fpr` is smaller than that; `reason` says it in a sentence.
        threshold: scores above it count as members; from one half of the non-members and no member.
        fpr: share of the other half above it.
        tpr: share of the members above it.
        confidence: of each interval (Clopper-Pearson).
    """

    max_fpr: float
    achievable_fpr: float
    is_refused: bool
    reason: str
    confidence: float
    n_members: int
    n_non_members: int
    threshold: float | None = None
    fpr: float | None = None
    fpr_interval: Interval | None = None
    tpr: float | None = None
    tpr_interval: Interval | None = None


def loss_score(log_probs: ArrayLike) -> SampleScore:
    """Mean log-probability of the tokens, nats a token.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.

    Returns:
        `SampleScore`; the negative of the loss.

    Raises:
        ValueError: no token, or a log-probability that is not finite or above 0.

    Example:
        >>> loss_score([-1.0, -3.0]).value
        -2.0

    Source: Carlini et al. 2021, section 5.
    """
    given = _log_probs("log_probs", log_probs)
    return SampleScore(float(given.mean()), given.size)


def zlib_score(log_probs: ArrayLike, text: str) -> SampleScore:
    """Log-probability of a text for each byte that zlib needs for it, nats a byte: text that anything compresses is discounted.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.
        text: what the tokens say.

    Returns:
        `SampleScore`.

    Raises:
        ValueError: no token, no text, or a log-probability that is not finite or above 0.

    Example:
        >>> zlib_score([-4.0, -5.0], "a").value  # zlib writes one letter in nine bytes
        -1.0

    Source: Carlini et al. 2021, section 5. Differs: the sum, not the mean, of the log-probabilities, so that numerator and
    denominator are both of the whole text; for texts of equal length the order is the same.
    """
    given = _log_probs("log_probs", log_probs)
    if not text:
        raise ValueError("text must hold at least one character, got none.")
    return SampleScore(float(given.sum()) / len(zlib.compress(text.encode("utf-8", "surrogatepass"))), given.size)


def lowercase_score(log_probs: ArrayLike, lowercase_log_probs: ArrayLike) -> SampleScore:
    """Mean log-probability less that of the lower-cased text, nats a token; 0 where a text has no capitals.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.
        lowercase_log_probs: of each token of the lower-cased text, shape (T',); nats.

    Returns:
        `SampleScore`; `num_tokens` counts those of the text as it is.

    Raises:
        ValueError: no token, or a log-probability that is not finite or above 0.

    Example:
        >>> lowercase_score([-1.0, -3.0], [-4.0, -4.0, -1.0]).value
        1.0

    Source: Carlini et al. 2021, section 5. Differs: a difference, not a ratio, which explodes where a loss is near 0.
    """
    given = _log_probs("log_probs", log_probs)
    return SampleScore(float(given.mean() - _log_probs("lowercase_log_probs", lowercase_log_probs).mean()), given.size)


def reference_score(log_probs: ArrayLike, reference_log_probs: ArrayLike) -> SampleScore:
    """Mean log-probability less that under a reference model, nats a token: text that any model finds likely is discounted.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.
        reference_log_probs: of the same tokens under a model that was not trained on them, shape (T,); nats.

    Returns:
        `SampleScore`.

    Raises:
        ValueError: no token, shapes that differ, or a log-probability that is not finite or above 0.

    Example:
        >>> reference_score([-1.0, -3.0], [-2.0, -6.0]).value
        2.0

    Source: Carlini et al. 2021, section 5. Differs: a difference, not a ratio.
    """
    given, reference = _log_probs("log_probs", log_probs), _log_probs("reference_log_probs", reference_log_probs)
    _same_shape("reference_log_probs", reference, given)
    return SampleScore(float((given - reference).mean()), given.size)


def min_k_score(log_probs: ArrayLike, ratio: float) -> SampleScore:
    """Mean of the lowest log-probabilities, nats a token: a member has few tokens that surprise the model.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.
        ratio: share of the tokens taken, above 0 and at most 1; max(1, floor(ratio T)) of them.

    Returns:
        `SampleScore`.

    Raises:
        ValueError: no token, a ratio out of range, or a log-probability that is not finite or above 0.

    Example:
        >>> min_k_score([-1.0, -3.0, -9.0, -2.0, -5.0], 0.4).value
        -7.0

    Source: Shi et al., 2310.16789. Differs: at least one token, where the authors' code gives NaN for short texts.
    """
    given = _log_probs("log_probs", log_probs)
    return SampleScore(_lowest_mean(given, ratio), given.size)


def min_k_plus_plus_score(log_probs: ArrayLike, means: ArrayLike, variances: ArrayLike, ratio: float) -> SampleScore:
    """Mean of the lowest standardised log-probabilities, standard deviations: how a token compares with its alternatives.

    Args:
        log_probs: of each token given those before it, shape (T,); nats.
        means: expectation of the log-probability under the model's own distribution at each token, shape (T,); nats.
        variances: variance of the same, shape (T,); nats^2. Below 1e-12 the token is left out and counted.
        ratio: share of the tokens left that is taken, above 0 and at most 1; at least one token.

    Returns:
        `SampleScore`; `nan` where every token was left out.

    Raises:
        ValueError: no token, shapes that differ, a ratio out of range, or a figure that cannot be one.

    Example:
        >>> min_k_plus_plus_score([-1.0, -4.0, -1.0], [-2.0, -2.0, -1.0], [1.0, 4.0, 0.0], 0.5)
        SampleScore(value=-1.0, num_tokens=2, num_undefined=1)

    Source: Zhang et al., 2404.02936. Differs: undefined tokens are left out, where the authors' code gives inf or NaN.
    """
    given, mean = _log_probs("log_probs", log_probs), _log_probs("means", means)
    variance = np.asarray(variances, dtype=np.float64)
    _same_shape("means", mean, given)
    _same_shape("variances", variance, given)
    if not (np.isfinite(variance).all() and (variance >= 0.0).all()):
        raise ValueError("variances must be finite and at least 0.")
    defined = variance >= MIN_VARIANCE
    standardised = (given[defined] - mean[defined]) / np.sqrt(variance[defined])
    return SampleScore(_lowest_mean(standardised, ratio), int(defined.sum()), int((~defined).sum()))


def estimate_auroc(members: ArrayLike, non_members: ArrayLike, *, confidence: float = 0.95) -> AurocEstimate:
    """Chance that a member scores above a non-member, 0..1, with its interval; 1/2 is a coin.

    The interval is Wilson's for as many independent draws as have the AUROC's variance, the largest of DeLong's and of
    Hanley and McNeil's for either set. DeLong's alone vanishes when the sets separate: it covers 85-92% at an AUROC of .95
    with 30 in a set; this one covers 94% or more for 30 to 300 in a set, AUROCs of .5, .7 and .95, equal and unequal
    spreads, and ties. Separated sets of 30 give [.89, 1].

    Args:
        members: scores of samples that were trained on, shape (M,); higher means more likely a member.
        non_members: scores of samples of the same source that were not, shape (N,).
        confidence: of the two-sided interval, 0..1 exclusive.

    Returns:
        `AurocEstimate`; `p_value` is that of the one-sided Mann-Whitney test of members against non-members. Flags: `ties`
        across the sets, `separated` where no score of one set reaches the other.

    Raises:
        ValueError: fewer than two scores in a set, or one that is not finite.

    Example:
        >>> estimate = estimate_auroc([3.0, 2.0], [1.0, 2.0])
        >>> estimate.value, estimate.flags  # 3 above both, 2 above one and level with one: 3.5 of 4 pairs
        (0.875, ('ties',))

    Source: DeLong et al. 1988; Hanley and McNeil 1982; Wilson 1927.
    """
    inside, outside = _scores("members", members), _scores("non_members", non_members)
    _open_share("confidence", confidence)
    m, n = inside.size, outside.size
    value, variance = _auroc_and_variance(inside, outside)
    low, high = _wilson(value, _effective_size(value, variance, m, n), confidence)
    test = stats.mannwhitneyu(inside, outside, alternative="greater")
    flags: tuple[str, ...] = ("ties",) if np.isin(inside, outside).any() else ()
    flags += ("separated",) if value in (0.0, 1.0) else ()
    return AurocEstimate(value, low, high, confidence, float(test.pvalue), m, n, "Wilson at the effective size", flags)


def estimate_tpr_at_fpr(
    members: ArrayLike, non_members: ArrayLike, *, max_fpr: float, confidence: float = 0.95, seed: int = 0
) -> TprEstimate:
    """Share of members found, 0..1, by a threshold that few non-members pass; refused where they are too few to show it.

    The threshold comes from a random half of the non-members and no member, so that the other half and the members give
    rates with exact intervals. It is the j-th largest of the half, j = floor(max_fpr (half + 1)): a new non-member passes it
    with a chance of at most `max_fpr`. The measured `fpr` may still lie above; its interval says how far.

    Args:
        members: scores of samples that were trained on, shape (M,); higher means more likely a member.
        non_members: scores of samples of the same source that were not, shape (N,).
        max_fpr: the false-positive rate to stay within, 0..1 exclusive; needs N >= 3 / max_fpr.
        confidence: of each interval, 0..1 exclusive.
        seed: of the split of the non-members.

    Returns:
        `TprEstimate`.

    Raises:
        ValueError: fewer than two scores in a set, one that is not finite, or a rate outside of 0..1.

    Example:
        >>> estimate = estimate_tpr_at_fpr([5.0, 6.0], range(10), max_fpr=0.1)
        >>> estimate.is_refused, estimate.achievable_fpr, estimate.reason
        (True, 0.3, 'an FPR of 0.1 needs 30 non-members, got 10; they allow 0.3.')

    Source: statistics specification, section 7.
    """
    inside, outside = _scores("members", members), _scores("non_members", non_members)
    _open_share("max_fpr", max_fpr)
    _open_share("confidence", confidence)
    needed, achievable = math.ceil(3.0 / max_fpr - ABOVE_FLOOR), min(1.0, 3.0 / outside.size)
    if outside.size < needed:
        reason = f"an FPR of {max_fpr:g} needs {needed} non-members, got {outside.size}; they allow {achievable:.3g}."
        return TprEstimate(max_fpr, achievable, True, reason, confidence, inside.size, outside.size)
    shuffled = np.random.default_rng(seed).permutation(outside)
    chosen, held = shuffled[: outside.size // 2], shuffled[outside.size // 2 :]
    place = math.floor(max_fpr * (chosen.size + 1) + ABOVE_FLOOR)
    threshold = float(np.sort(chosen)[-place])
    false, true = int((held > threshold).sum()), int((inside > threshold).sum())
    return TprEstimate(
        max_fpr=max_fpr,
        achievable_fpr=achievable,
        is_refused=False,
        reason="",
        confidence=confidence,
        n_members=inside.size,
        n_non_members=outside.size,
        threshold=threshold,
        fpr=false / held.size,
        fpr_interval=share_interval(false, held.size, confidence=confidence),
        tpr=true / inside.size,
        tpr_interval=share_interval(true, inside.size, confidence=confidence),
    )


def _auroc_and_variance(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> tuple[float, float]:
    """AUROC and DeLong's variance of it, from each score's share of the other set that it beats."""
    m, n = inside.size, outside.size
    ranks = stats.rankdata(np.concatenate([inside, outside]))
    beats = (ranks[:m] - stats.rankdata(inside)) / n
    beaten = 1.0 - (ranks[m:] - stats.rankdata(outside)) / m
    return float(beats.sum() / m), float(beats.var(ddof=1) / m + beaten.var(ddof=1) / n)


def _effective_size(value: float, variance: float, m: int, n: int) -> float:
    """Independent draws whose share has the AUROC's variance; min(m, n) is the least that any pair of laws allows."""
    spread = value * (1.0 - value)
    if spread <= 0.0:
        return float(min(m, n))
    lower, upper = value / (2.0 - value) - value**2, 2.0 * value**2 / (1.0 + value) - value**2
    either = [spread + (m - 1) * a + (n - 1) * b for a, b in ((lower, upper), (upper, lower))]
    return spread / max(variance, max(either) / (m * n))


def _wilson(share: float, size: float, confidence: float) -> tuple[float, float]:
    """Wilson's interval; written out, because scipy takes whole counts only."""
    z2 = float(stats.norm.isf((1.0 - confidence) / 2.0)) ** 2
    centre = (share + z2 / (2.0 * size)) / (1.0 + z2 / size)
    half = math.sqrt(z2 * (share * (1.0 - share) / size + z2 / (4.0 * size**2))) / (1.0 + z2 / size)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def _lowest_mean(values: NDArray[np.float64], ratio: float) -> float:
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}.")
    if values.size == 0:
        return math.nan
    taken = max(1, math.floor(ratio * values.size + ABOVE_FLOOR))
    return float(np.sort(values)[:taken].mean())


def _log_probs(name: str, values: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or given.size == 0:
        raise ValueError(f"{name} must have shape (T,) with at least one token, got shape {given.shape}.")
    if not np.isfinite(given).all() or given.max() > ROUNDING:
        raise ValueError(f"{name} must be finite and at most 0.")
    return given


def _scores(name: str, values: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or given.size < 2:
        raise ValueError(f"{name} must have shape (n,) with at least 2 scores, got shape {given.shape}.")
    if not np.isfinite(given).all():
        raise ValueError(f"{name} must be finite, got {int((~np.isfinite(given)).sum())} scores that are not.")
    return given


def _same_shape(name: str, values: NDArray[np.float64], given: NDArray[np.float64]) -> None:
    if values.shape != given.shape:
        raise ValueError(f"{name} must have the shape of log_probs {given.shape}, got {values.shape}.")


def _open_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be above 0 and below 1, got {value}.")
