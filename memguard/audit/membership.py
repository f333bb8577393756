"""Membership inference on real samples: check for a confound first, then score, then say how well scores tell members.

Members and non-members are scored in one call, in random batches, by one path: cut at the same number of tokens, with
their text taken from the same source. Run inside `audit_mode`, of the reference model too. Log-probabilities are nats.

Source: statistics specification, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np

from memguard.audit.report_membership import Membership, MembershipByCopies, MembershipScore, ScoreName, ShiftCheck, TprPoint
from memguard.audit.report_records import CopiesBucket
from memguard.errors import InputError
from memguard.metrics.distribution_shift import MIN_TEXTS, ShiftEstimate, estimate_distribution_shift
from memguard.metrics.intervals import Interval
from memguard.metrics.membership import (
    SampleScore,
    TprEstimate,
    estimate_auroc,
    estimate_tpr_at_fpr,
    loss_score,
    lowercase_score,
    min_k_plus_plus_score,
    min_k_score,
    reference_score,
    zlib_score,
)
from memguard.scoring.scorer import Progress, Scorer, Span
from memguard.scoring.token_scores import TokenScores, score_tokens

CONFIDENCE = 0.95
MIN_K_RATIO = 0.2  # fixed in advance: the best of many ratios on the samples themselves would flatter the score
FPR_POINTS = (0.1, 0.01, 0.001)
MIN_TOKENS = 2  # the first has nothing before it
MAX_FINDINGS = 6


class SampleRecord(Protocol):
    """A sample as the audit holds it: its text where there is one, and its token ids as the model reads them."""

    @property
    def text(self) -> str | None:
        """None where only ids are known."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Whole, with the special tokens the model saw in training."""


@dataclass(frozen=True)
class _Sample:
    """Ids cut to the limit, and the text they say."""

    label: str
    ids: tuple[int, ...]
    text: str

    @property
    def span(self) -> Span:
        """Everything behind the first token."""
        return Span(self.ids, 1, len(self.ids), self.label)


def measure_membership(
    scorer: Scorer,
    texts_in: Sequence[SampleRecord],
    texts_out: Sequence[SampleRecord],
    *,
    scores: Sequence[ScoreName],
    tokenizer: Any,
    reference: Scorer | None = None,
    reference_tokenizer: Any = None,
    seed: int,
    max_tokens: int,
    split: Mapping[CopiesBucket, Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> Membership:
    """How well membership scores tell samples that were trained on: AUROC and true-positive rates, 0..1, with intervals.

    Args:
        scorer: of the model that is audited.
        texts_in: samples that were trained on, at least 10; independent of one another, so one piece a document. Those of one
            token have nothing to score; they are left out, and a note counts them.
        texts_out: samples of the same source that were not, at least 10; 3,000 for a false-positive rate of .001.
        scores: which scores, each once, in the order of the result.
        tokenizer: of the model; decodes samples without text and encodes lower-cased ones.
        reference: scorer of a model that was not trained on the samples, for the score `reference`.
        reference_tokenizer: of that model; must have the vocabulary of `tokenizer`.
        seed: of batches, folds and splits.
        max_tokens: every sample is cut to as many tokens, 2 or more; lower-cased samples too.
        split: places in `texts_in` by how often the corpus holds them; each of 10 or more is also scored apart.
        progress: called with the number of rows done after each batch.

    Returns:
        `Membership`; its label is *distribution shift, not membership* where the sets differ without any model.

    Raises:
        InputError: scores, samples or a reference that cannot be used; names all of them.
        MissingExtraError: scikit-learn is not installed.
        ScoringError: a model could not be scored; names the sample.
        NonFiniteScoreError: a figure is not finite; names the sample.
    """
    usable_in, usable_out = ([one for one in texts if len(one.ids) >= MIN_TOKENS] for texts in (texts_in, texts_out))
    _check(usable_in, usable_out, scores, max_tokens)
    _check_reference(scores, tokenizer, reference, reference_tokenizer)
    samples = _samples(usable_in, usable_out, tokenizer, max_tokens)
    members, others = samples[: len(usable_in)], samples[len(usable_in) :]
    shift = estimate_distribution_shift(
        [one.text for one in members], [one.text for one in others], confidence=CONFIDENCE, seed=seed
    )
    spans = [one.span for one in samples]
    tokens = score_tokens(scorer, spans, moments="min_k_plus_plus" in scores, seed=seed, progress=progress)
    beside: dict[str, list[TokenScores]] = {}
    if reference is not None:
        beside["reference"] = score_tokens(reference, spans, moments=False, seed=seed, progress=progress)
    if "lowercase" in scores:
        lowered = [_lowered(one, tokenizer, max_tokens) for one in samples]
        beside["lowercase"] = score_tokens(scorer, lowered, moments=False, seed=seed, progress=progress)
    values = {name: _values(name, samples, tokens, beside) for name in scores}
    rows = [_row(name, values[name], len(members), seed) for name in scores]
    lengths = [len(one.ids) for one in (*texts_in, *texts_out)]
    usable_places = [place for place, one in enumerate(texts_in) if len(one.ids) >= MIN_TOKENS]
    by_copies, notes = _by_copies(values, usable_places, split or {}, seed)
    return Membership(
        label="distribution shift, not membership" if shift.is_shift else "membership",
        scores=rows,
        shift=_shift_check(shift),
        reference=reference is not None,
        max_tokens=max_tokens,
        num_tokens=sum(one.log_probs.size for one in tokens),
        num_undefined_tokens=sum(one.num_undefined for one in values.get("min_k_plus_plus", [])),
        by_copies=by_copies,
        notes=[*shift.reasons, *_duplicate_notes(shift), *_sample_notes(rows, lengths, max_tokens), *notes],
    )


def _values(
    name: ScoreName, samples: Sequence[_Sample], tokens: Sequence[TokenScores], beside: dict[str, list[TokenScores]]
) -> list[SampleScore]:
    """One score of every sample, in order."""
    if name == "loss":
        return [loss_score(one.log_probs) for one in tokens]
    if name == "zlib":
        return [zlib_score(one.log_probs, sample.text) for one, sample in zip(tokens, samples, strict=True)]
    if name == "min_k":
        return [min_k_score(one.log_probs, MIN_K_RATIO) for one in tokens]
    if name == "min_k_plus_plus":
        return [_min_k_plus_plus(one) for one in tokens]
    compare = lowercase_score if name == "lowercase" else reference_score
    return [compare(one.log_probs, other.log_probs) for one, other in zip(tokens, beside[name], strict=True)]


def _min_k_plus_plus(tokens: TokenScores) -> SampleScore:
    assert tokens.mean_log_probs is not None
    assert tokens.variance_log_probs is not None
    return min_k_plus_plus_score(tokens.log_probs, tokens.mean_log_probs, tokens.variance_log_probs, MIN_K_RATIO)


def _row(name: ScoreName, values: Sequence[SampleScore], num_members: int, seed: int) -> MembershipScore:
    """The figures of one score; none at all where some sample has no score, since leaving it out would choose samples."""
    sizes = {"n_members": num_members, "n_non_members": len(values) - num_members}
    undefined = sum(one.is_undefined for one in values)
    found = np.array([0.0 if undefined else one.value for one in values])
    members, others = found[:num_members], found[num_members:]
    points = [estimate_tpr_at_fpr(members, others, max_fpr=rate, confidence=CONFIDENCE, seed=seed) for rate in FPR_POINTS]
    if undefined:
        nothing = dict.fromkeys(("auroc", "low", "high", "p_value"))
        tpr = [_point(one, is_undefined=True) for one in points]
        return MembershipScore(name=name, confidence=CONFIDENCE, num_undefined_samples=undefined, tpr=tpr, **nothing, **sizes)
    estimate = estimate_auroc(members, others, confidence=CONFIDENCE)
    return MembershipScore(
        name=name,
        auroc=estimate.value,
        low=estimate.low,
        high=estimate.high,
        confidence=CONFIDENCE,
        p_value=estimate.p_value,
        tpr=[_point(one, is_undefined=False) for one in points],
        **sizes,
    )


def _by_copies(
    values: Mapping[ScoreName, Sequence[SampleScore]],
    places: Sequence[int],
    split: Mapping[CopiesBucket, Sequence[int]],
    seed: int,
) -> tuple[list[MembershipByCopies], list[str]]:
    """The scores of each part of the members against all non-members, and notes on parts too small for it.

    Args:
        values: of the members that were scored, then of the non-members.
        places: of those members among all.
        split: places of all members, by part.
        seed: of the splits that set thresholds.
    """
    found, small = [], []
    for bucket, wanted in split.items():
        chosen = set(wanted)
        mine = [number for number, place in enumerate(places) if place in chosen]
        if len(mine) < MIN_TEXTS:
            small.append(f"{len(mine)} {bucket}")
            continue
        parts = {name: [*(row[number] for number in mine), *row[len(places) :]] for name, row in values.items()}
        scores = [_row(name, part, len(mine), seed) for name, part in parts.items()]
        found.append(MembershipByCopies(copies=bucket, scores=scores))
    if not small:
        return found, []
    return found, [f"by copies in the corpus, fewer than {MIN_TEXTS} members have no scores of their own: {'; '.join(small)}"]


def _point(estimate: TprEstimate, *, is_undefined: bool) -> TprPoint:
    figures: dict[str, float | None] = dict.fromkeys(("fpr", "fpr_low", "fpr_high", "tpr", "tpr_low", "tpr_high"))
    if not is_undefined:
        figures |= _rate("fpr", estimate.fpr, estimate.fpr_interval) | _rate("tpr", estimate.tpr, estimate.tpr_interval)
    return TprPoint(max_fpr=estimate.max_fpr, is_refused=estimate.is_refused, achievable_fpr=estimate.achievable_fpr, **figures)


def _rate(name: str, value: float | None, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {}
    return {name: value, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _samples(
    texts_in: Sequence[SampleRecord], texts_out: Sequence[SampleRecord], tokenizer: Any, max_tokens: int
) -> list[_Sample]:
    """Members, then non-members. Their texts are all given or all decoded: a difference between the two would be a shift."""
    named = [(f"member {place}", one) for place, one in enumerate(texts_in)]
    named += [(f"non-member {place}", one) for place, one in enumerate(texts_out)]
    given = [one.text for _, one in named if one.text is not None and len(one.ids) <= max_tokens]
    texts = given if len(given) == len(named) else [_decode(tokenizer, one.ids[:max_tokens]) for _, one in named]
    empty = [label for (label, _), text in zip(named, texts, strict=True) if not text]
    if empty:
        raise InputError(f"samples must hold text, got none in {', '.join(empty[:MAX_FINDINGS])}.")
    return [_Sample(label, one.ids[:max_tokens], text) for (label, one), text in zip(named, texts, strict=True)]


def _lowered(sample: _Sample, tokenizer: Any, max_tokens: int) -> Span:
    """The lower-cased sample behind the same first token, which is scored in neither."""
    text = _decode(tokenizer, sample.ids[1:]).lower()
    behind = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not behind:
        raise InputError(f"{sample.label} must hold text behind its first token for the score 'lowercase', got none.")
    ids = (sample.ids[0], *behind[: max_tokens - 1])
    return Span(ids, 1, len(ids), f"{sample.label} in lower case")


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _check(texts_in: Sequence[SampleRecord], texts_out: Sequence[SampleRecord], scores: Sequence[str], max_tokens: int) -> None:
    """Raise once, with everything that is wrong."""
    known = get_args(ScoreName)
    findings = []
    if not scores or len(set(scores)) < len(scores) or not set(scores) <= set(known):
        findings.append(f"scores must name some of {', '.join(known)}, each once, got {', '.join(scores) or 'none'}")
    if max_tokens < MIN_TOKENS:
        findings.append(f"max_tokens must be at least {MIN_TOKENS}, got {max_tokens}")
    for name, texts in (("members", texts_in), ("non-members", texts_out)):
        if len(texts) < MIN_TEXTS:
            findings.append(f"{name} must be at least {MIN_TEXTS} samples of {MIN_TOKENS} tokens or more, got {len(texts)}")
    if findings:
        raise InputError(f"membership inference: {'; '.join(findings)}.")


def _check_reference(scores: Sequence[str], tokenizer: Any, reference: Scorer | None, reference_tokenizer: Any) -> None:
    if ("reference" in scores) != (reference is not None):
        raise InputError("a reference model must be given where scores name 'reference', and only there.")
    if reference is not None and (reference_tokenizer is None or tokenizer.get_vocab() != reference_tokenizer.get_vocab()):
        raise InputError(
            "the reference model must have a tokenizer with the vocabulary of the audited one; take another model."
        )


def _shift_check(shift: ShiftEstimate) -> ShiftCheck:
    return ShiftCheck(
        auroc=shift.auroc,
        low=shift.low,
        high=shift.high,
        confidence=shift.confidence,
        p_value=shift.p_value,
        detectable_auroc=shift.detectable_auroc,
        length_p_value=shift.length_p_value,
        median_length_members=shift.median_length_members,
        median_length_non_members=shift.median_length_non_members,
        num_duplicate_members=shift.num_duplicate_members,
        num_duplicate_non_members=shift.num_duplicate_non_members,
        num_shared=shift.num_shared,
        num_used_members=shift.n_used_members,
        num_used_non_members=shift.n_used_non_members,
        is_shift=shift.is_shift,
    )


def _duplicate_notes(shift: ShiftEstimate) -> list[str]:
    notes = []
    if shift.num_shared:
        notes.append(
            f"{shift.num_shared} texts are in both sets and count as members and as non-members: every score tells the sets "
            "apart less well than it could."
        )
    repeated = shift.num_duplicate_members + shift.num_duplicate_non_members
    if repeated:
        notes.append(
            f"{repeated} samples repeat another of their set; intervals take samples as independent, and are too narrow."
        )
    return notes


def _sample_notes(rows: Sequence[MembershipScore], lengths: Sequence[int], max_tokens: int) -> list[str]:
    num_short, num_cut = sum(one < MIN_TOKENS for one in lengths), sum(one > max_tokens for one in lengths)
    notes = (
        [f"{num_short} samples of fewer than {MIN_TOKENS} tokens were left out: nothing of them is scored."]
        if num_short
        else []
    )
    notes += [f"{num_cut} samples were cut to {max_tokens} tokens."] if num_cut else []
    for row in rows:
        if row.num_undefined_samples:
            notes.append(
                f"score {row.name} is undefined for {row.num_undefined_samples} samples, whose every token has no spread; "
                "no figure is given for it."
            )
    return notes
