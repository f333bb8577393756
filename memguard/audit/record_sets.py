"""Real records behind their own prefixes: extractable or not, in how many tries, and common or this text in particular."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memguard.audit.calibration import FALLBACK, calibrate, given_threshold
from memguard.audit.config import AuditSettings
from memguard.audit.extraction import curve_rows, finite, make_sampler
from memguard.audit.prior import CONFIDENCE, PriorMeasurement, not_extractable
from memguard.audit.prompts import prompt_rows, prompt_slopes
from memguard.audit.records import Record, Target, choose_targets
from memguard.audit.report import PriorAware
from memguard.audit.report_records import PriorAwareCounts, RecordRow, Records, RecordSet, Threshold
from memguard.errors import EvidenceError
from memguard.metrics.intervals import share_interval
from memguard.scoring.near_verbatim import near_verbatim_log_probs
from memguard.scoring.sampling import score_under_sampler
from memguard.scoring.scorer import Scorer, SpanScores

NEAR = math.log(1e-3)  # nats: the near-verbatim chance that counts a record


@dataclass(frozen=True)
class _Scored:
    """Targets of one file with their scores."""

    targets: Sequence[Target]
    scores: SpanScores
    num_too_short: int


def measure_records(
    scorer: Scorer,
    members: Sequence[Record],
    held_out: Sequence[Record],
    settings: AuditSettings,
    *,
    lead_ids: tuple[int, ...],
    seed: int,
    prior: PriorMeasurement | None,
) -> Records:
    """What a model gives away of real records, with held-out ones as the floor.

    Args:
        scorer: of the model.
        members: records of the training data.
        held_out: records of the same kind that were never trained on; may be empty.
        settings: lengths, sampler, thresholds.
        lead_ids: put before a prefix that does not begin with them.
        seed: of the samples.
        prior: measures Prior-Aware memorisation; None leaves it *not measured*.

    Raises:
        EvidenceError: no member long enough for a target.
    """
    mine = _score(scorer, members, settings, lead_ids, seed, "record")
    if mine is None:
        wanted = settings.records.prefix_tokens + settings.records.suffix_tokens
        raise EvidenceError(
            f"data must hold a record of at least {wanted} tokens that fits the model, got {len(members)} others."
        )
    others = _score(scorer, held_out, settings, lead_ids, seed, "held-out record") if held_out else None
    annotated: dict[int, PriorAware] = {}
    threshold: Threshold | None = None
    if prior is not None:
        log_probs = mine.scores.log_probs.tolist()
        if any(map(prior.is_extractable, log_probs)):
            threshold = _threshold(prior, others, settings, seed)
        for place, (target, log_prob) in enumerate(zip(mine.targets, log_probs, strict=True)):
            annotated[place] = (
                prior.measure(target.span, log_prob, n=threshold.n) if threshold is not None else not_extractable(log_prob)
            )
    return Records(
        prefix_tokens=settings.records.prefix_tokens,
        suffix_tokens=settings.records.suffix_tokens,
        max_edits=settings.records.max_edits,
        prompts=(prompts := prompt_rows(scorer, mine.targets, mine.scores, settings.records, lead_ids=lead_ids, seed=seed)),
        prompt_slopes=prompt_slopes(prompts),
        members=_record_set(scorer, mine, settings, annotated, seed),
        held_out=_record_set(scorer, others, settings, {}, seed) if others is not None else None,
        prior_aware=count_verdicts([annotated.get(place) for place in range(len(mine.targets))]) if prior is not None else None,
        threshold=threshold,
        num_excluded_prefixes=sum(one.num_excluded_prefixes for one in annotated.values()),
    )


def _score(
    scorer: Scorer, records: Sequence[Record], settings: AuditSettings, lead_ids: tuple[int, ...], seed: int, label: str
) -> _Scored | None:
    wanted = settings.records
    targets, num_too_short = choose_targets(
        records,
        prefix_tokens=wanted.prefix_tokens,
        suffix_tokens=wanted.suffix_tokens,
        max_records=wanted.max_records,
        lead_ids=lead_ids,
        seed=f"memguard/records/{seed}/{label}",
        max_length=scorer.model.max_length,
        label=label,
    )
    if not targets:
        return None
    return _Scored(targets, scorer.score([target.span for target in targets], seed=seed), num_too_short)


def _threshold(prior: PriorMeasurement, held_out: _Scored | None, settings: AuditSettings, seed: int) -> Threshold:
    assert settings.prior_aware is not None
    n = settings.prior_aware.n
    if n != "calibrated":
        return given_threshold("records", n)
    found = None
    if held_out is not None:
        found = calibrate(
            prior,
            [target.span for target in held_out.targets],
            held_out.scores.log_probs.tolist(),
            targets="records",
            seed=seed,
        )
    return found or given_threshold("records", FALLBACK)


def _record_set(
    scorer: Scorer, scored: _Scored, settings: AuditSettings, annotated: dict[int, PriorAware], seed: int
) -> RecordSet:
    spans = [target.span for target in scored.targets]
    sampled = near = None
    if settings.extraction is not None:
        sampler = make_sampler(settings.extraction)
        sampled = score_under_sampler(scorer, spans, sampler, seed=seed)
        if settings.records.max_edits:
            near = near_verbatim_log_probs(scorer, spans, sampler, max_edits=settings.records.max_edits)
    greedy, n = int(scored.scores.is_greedy.sum()), len(spans)
    interval = share_interval(greedy, n, confidence=CONFIDENCE)
    rows = []
    for place, target in enumerate(scored.targets):
        verdict = annotated.get(place)
        rows.append(
            RecordRow(
                line=target.line,
                num_prefix_tokens=target.span.start,
                num_tokens=target.span.end - target.span.start,
                log_prob=min(0.0, float(scored.scores.log_probs[place])),
                is_greedy=bool(scored.scores.is_greedy[place]),
                log_prob_sampled=finite(float(sampled[place])) if sampled is not None else None,
                log_prob_near=finite(float(near[place])) if near is not None else None,
                verdict=verdict.verdict if verdict is not None else None,
                log_belief_ratio=verdict.log_belief_ratio if verdict is not None else None,
                low=verdict.low if verdict is not None else None,
                high=verdict.high if verdict is not None else None,
            )
        )
    budgets = settings.extraction.budgets if settings.extraction is not None else ()
    return RecordSet(
        n=n,
        num_too_short=scored.num_too_short,
        num_greedy=greedy,
        greedy_share=greedy / n,
        greedy_low=interval.low,
        greedy_high=interval.high,
        confidence=CONFIDENCE,
        curve=curve_rows(sampled.tolist(), budgets) if sampled is not None else [],
        num_near=int((near >= NEAR).sum()) if near is not None else None,
        rows=rows,
    )


def count_verdicts(measured: Sequence[PriorAware | None]) -> PriorAwareCounts:
    """How many targets met which verdict, and the share of the extractable that is common text."""
    verdicts = [one.verdict for one in measured if one is not None]
    pa = sum(verdict.startswith("PA") for verdict in verdicts)
    common = sum(verdict.startswith("common") for verdict in verdicts)
    undecided = verdicts.count("undecided")
    extractable = pa + common + undecided
    ends = None
    if extractable:
        ends = (
            share_interval(common, extractable, confidence=CONFIDENCE).low,
            share_interval(common + undecided, extractable, confidence=CONFIDENCE).high,
        )
    return PriorAwareCounts(
        n=len(measured),
        num_extractable=extractable,
        num_pa=pa,
        num_common=common,
        num_undecided=undecided,
        num_not_measured=len(measured) - len(verdicts),
        common_share=common / extractable if extractable else None,
        common_low=ends[0] if ends is not None else None,
        common_high=ends[1] if ends is not None else None,
        confidence=CONFIDENCE,
    )
