"""The confound check of membership inference: can members be told from non-members without any model? AUROC, 0..1.

Where a blind classifier can, a membership score may only repeat what it saw (another year, topic or length), and the label
is *distribution shift, not membership*. Not firing is no proof: `detectable_auroc` says how large a shift had to be.
Samples must be independent: several pieces of one document in a set make the check fire on the document.

Source: statistics specification, section 7; Das, Zhang, Tramer 2024 (2406.16201), blind baselines.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from memguard.errors import MissingExtraError

MIN_TEXTS = 10  # a set; fewer leave folds with one label
MAX_TEXTS = 1000  # a set; the classifier takes time and memory with their square
FOLDS = 5
PERMUTATIONS = 999
COLUMNS = 2**18  # that words and letters are hashed into
RIDGE = 1.0  # of kernels whose diagonal is near 3; .3 and 10 find fewer shifts of one word among 60 and 60 texts
DIGITS = 9  # predictions closer than that are ties: identical texts differ by rounding


def _shape(text: str) -> str:
    """Letters and digits by their kind alone: capitals, punctuation and layout are shifts too, spread over all words."""
    return re.sub(r"[0-9]", "0", re.sub(r"[a-z]+", "a", re.sub(r"[A-Z]", "A", text)))


FEATURES: tuple[dict[str, Any], ...] = (
    {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"\w+|[^\w\s]"},
    {"analyzer": "char_wb", "ngram_range": (2, 4)},
    {"analyzer": "char", "ngram_range": (1, 2), "preprocessor": _shape},
)


@dataclass(frozen=True)
class ShiftEstimate:
    """How well members are told from non-members by their text alone.

    Args:
        auroc: of the blind classifier on texts it was not fitted to, 0..1; its mean is exactly 1/2 without a shift.
        low, high: interval, as wide as the AUROCs of permuted labels are spread.
        confidence: of the whole check: exchangeable sets are called shifted with a chance of at most 1 - confidence.
        p_value: of the blind classifier, one-sided, by permutation.
        detectable_auroc: what the classifier had to exceed.
        length_p_value: of a two-sided rank test of the lengths.
        median_length_members, median_length_non_members: characters.
        n_members, n_non_members: texts given.
        n_used_members, n_used_non_members: texts the classifier saw.
        num_duplicate_members, num_duplicate_non_members: texts that repeat an earlier one of their set.
        num_shared: distinct texts that are in both sets.
        reasons: a sentence for each test that fired.
    """

    auroc: float
    low: float
    high: float
    confidence: float
    p_value: float
    detectable_auroc: float
    length_p_value: float
    median_length_members: float
    median_length_non_members: float
    n_members: int
    n_non_members: int
    n_used_members: int
    n_used_non_members: int
    num_duplicate_members: int
    num_duplicate_non_members: int
    num_shared: int
    reasons: tuple[str, ...]

    @property
    def is_shift(self) -> bool:
        """Whether the label is *distribution shift, not membership*."""
        return bool(self.reasons)


def estimate_distribution_shift(
    members: Sequence[str], non_members: Sequence[str], *, confidence: float = 0.95, seed: int = 0
) -> ShiftEstimate:
    """AUROC, 0..1, of a classifier that sees texts and no model, beside a rank test of lengths and counts of duplicates.

    The classifier is kernel ridge regression on TF-IDF of words, letters and kinds of letters, cross-fitted. Cross-fitted
    predictions depend on one another: an interval that takes them as independent calls 6 to 8% of exchangeable sets shifted
    where 2.5% are allowed (60 texts each). Hence labels are permuted, in folds that never look at them. Half of the allowed
    chance goes to the classifier, half to the lengths.

    Args:
        members: texts that were trained on, at least 10, as they are scored: cut where samples are cut.
        non_members: texts that were not, at least 10.
        confidence: of the whole check, 0..1 exclusive.
        seed: of the folds, the permutations and the choice of texts where there are more than 1,000 in a set.

    Returns:
        `ShiftEstimate`.

    Raises:
        ValueError: too few texts, an empty one, or a confidence out of range.
        MissingExtraError: scikit-learn is not installed.

    Example:
        >>> early, late = ([f"It was built in {year}." for year in years] for years in (range(1950, 1990), range(1990, 2030)))
        >>> found = estimate_distribution_shift(early, late)
        >>> found.is_shift, found.length_p_value
        (True, 1.0)

    Source: statistics specification, section 7. Differs: folds are ranked apart, so that AUROCs without a shift are fair.
    """
    _check(members, non_members, confidence)
    level = (1.0 - confidence) / 2.0
    lengths = np.array([len(text) for text in members]), np.array([len(text) for text in non_members])
    length_p = float(stats.mannwhitneyu(*lengths).pvalue)
    used = [_sample(texts, seed) for texts in (members, non_members)]
    auroc, null = _blind_aurocs(used[0], used[1], seed)
    room = int(level * (null.size + 1) + 1e-9)  # permutations that may reach the AUROC: p <= level
    top, bottom = (np.sort(null)[[-room, room - 1]] if room else np.array([1.0, 0.0])).tolist()
    reasons = [f"a classifier without a model tells the sets apart, AUROC {auroc:.3f}."] if auroc > top else []
    reasons += [f"lengths differ, p = {length_p:.2g}."] if length_p <= level else []
    digests = [[_digest(text) for text in texts] for texts in (members, non_members)]
    return ShiftEstimate(
        auroc=auroc,
        low=max(0.0, 0.5 + (auroc - top)),
        high=min(1.0, 0.5 + (auroc - bottom)),
        confidence=confidence,
        p_value=(1 + int((null >= auroc).sum())) / (null.size + 1),
        detectable_auroc=top,
        length_p_value=length_p,
        median_length_members=float(np.median(lengths[0])),
        median_length_non_members=float(np.median(lengths[1])),
        n_members=len(members),
        n_non_members=len(non_members),
        n_used_members=len(used[0]),
        n_used_non_members=len(used[1]),
        num_duplicate_members=len(digests[0]) - len(set(digests[0])),
        num_duplicate_non_members=len(digests[1]) - len(set(digests[1])),
        num_shared=len(set(digests[0]) & set(digests[1])),
        reasons=tuple(reasons),
    )


def _blind_aurocs(members: Sequence[str], non_members: Sequence[str], seed: int) -> tuple[float, NDArray[np.float64]]:
    """Cross-fitted AUROC of the true labels, and those of permuted ones, shape (PERMUTATIONS,)."""
    model_selection, ridge = _learn("model_selection"), _learn("kernel_ridge")
    kernel = _kernel([*members, *non_members])
    is_member = np.repeat([1.0, 0.0], [len(members), len(non_members)])
    rng = np.random.default_rng(seed)
    permuted = rng.permuted(np.tile(is_member[:, None], PERMUTATIONS), axis=0)
    labels = np.column_stack([is_member, permuted])
    folds = list(model_selection.KFold(FOLDS, shuffle=True, random_state=seed % 2**32).split(kernel))
    predicted = model_selection.cross_val_predict(
        ridge.KernelRidge(alpha=RIDGE, kernel="precomputed"), kernel, labels - is_member.mean(), cv=folds
    )
    # Ranked fold by fold: across folds, labels that one fold has too many of are missing from what it was fitted to.
    above, pairs = np.zeros(labels.shape[1]), np.zeros(labels.shape[1])
    for _, held in folds:
        inside = labels[held].sum(axis=0)
        ranks = stats.rankdata(np.round(predicted[held], DIGITS), axis=0)
        above += (ranks * labels[held]).sum(axis=0) - inside * (inside + 1) / 2
        pairs += inside * (len(held) - inside)
    aurocs: NDArray[np.float64] = np.where(pairs > 0, above / np.maximum(pairs, 1.0), 0.5)
    return float(aurocs[0]), aurocs[1:]


def _kernel(texts: Sequence[str]) -> NDArray[np.float64]:
    """Likeness of every pair of texts, (n, n): products of TF-IDF of each kind of feature, less their means."""
    text, make_pipeline = _learn("feature_extraction.text"), _learn("pipeline").make_pipeline
    kernel = np.zeros((len(texts), len(texts)))
    for options in FEATURES:
        counts = text.HashingVectorizer(n_features=COLUMNS, alternate_sign=False, norm=None, lowercase=False, **options)
        rows = make_pipeline(counts, text.TfidfTransformer(sublinear_tf=True)).fit_transform(texts)
        kernel += (rows @ rows.T).toarray()
    centred: NDArray[np.float64] = kernel - kernel.mean(axis=0) - kernel.mean(axis=1, keepdims=True) + kernel.mean()
    return centred


def _learn(module: str) -> Any:
    """A module of scikit-learn, loaded on first use."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise MissingExtraError("the confound check", "hf") from None


def _sample(texts: Sequence[str], seed: int) -> list[str]:
    """All texts, or as many random ones as the classifier takes."""
    if len(texts) <= MAX_TEXTS:
        return list(texts)
    return [texts[place] for place in np.random.default_rng(seed).choice(len(texts), MAX_TEXTS, replace=False)]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _check(members: Sequence[str], non_members: Sequence[str], confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence}.")
    for name, texts in (("members", members), ("non_members", non_members)):
        if len(texts) < MIN_TEXTS:
            raise ValueError(f"{name} must hold at least {MIN_TEXTS} texts, got {len(texts)}.")
        empty = [place for place, text in enumerate(texts) if not text]
        if empty:
            raise ValueError(f"{name} must hold texts that are not empty, got none at {empty[:5]}.")
