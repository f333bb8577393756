"""From arrays of scores to the rows of a report: one per canary, format, tier and control group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.items import Group
from memguard.audit.report import (
    RANK_METHODS,
    CanaryRow,
    ControlTest,
    Exposure,
    FormatRow,
    PositiveControl,
    StartTest,
    TierRow,
)
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan, PlannedCanary
from memguard.metrics.exposure import (
    ExposureEstimate,
    KnownRank,
    certified_rank_high,
    estimate_calibrated_exposure,
    estimate_exposure,
    fit_skew_normal,
    sampled_null_mean_bits,
)
from memguard.metrics.family import FamilyGroup, controls_rank_sum_test, max_test, pooled_test
from memguard.metrics.intervals import median_interval

CONFIDENCE = 0.95
POSITIVE_CONTROL_P = 1e-3


@dataclass(frozen=True)
class GroupScores:
    """Scores of one group, in the order of its spans; nats."""

    group: Group
    canary_log_probs: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]
    reference_log_probs: NDArray[np.float64]
    known_ranks: Sequence[KnownRank | None] = ()


def canary_rows(
    scored: GroupScores, ledger: Ledger | None, *, tolerance: float, with_tail: bool, start: GroupScores | None = None
) -> list[CanaryRow]:
    """A row for every planned secret of a group, in plan order.

    Args:
        scored: the group's scores.
        ledger: counts of the run, None when unknown.
        tolerance: scores closer than this tie; nats.
        with_tail: also show the fitted skew-normal tail (shared prefixes only).
        start: the same group scored before training, to show what training added.
    """
    tail = fit_skew_normal(scored.reference_log_probs) if with_tail else None
    rows = [_canary_row(scored, index, ledger, tolerance, tail) for index in range(len(scored.group.canaries))]
    return rows if start is None else [_with_start(row, scored, start, tolerance) for row in rows]


def _with_start(row: CanaryRow, scored: GroupScores, start: GroupScores, tolerance: float) -> CanaryRow:
    """A row with what the canary had before training, and its exposure by what training added."""
    index = next(at for at, canary in enumerate(scored.group.canaries) if canary.id == row.id)
    before = float(start.canary_log_probs[index])
    estimate = estimate_calibrated_exposure(
        float(scored.canary_log_probs[index]) - before,
        scored.reference_log_probs - start.reference_log_probs,
        secret_space_size=scored.group.format.ranked_space_size - (scored.group.num_planted_in_space - 1),
        tolerance=2 * tolerance,
        confidence=CONFIDENCE,
    )
    return row.model_copy(update={"start_log_prob": _finite(before), "calibrated": _exposure(estimate)})


def _canary_row(scored: GroupScores, index: int, ledger: Ledger | None, tolerance: float, tail: Any) -> CanaryRow:
    group, canary = scored.group, scored.group.canaries[index]
    log_prob = float(scored.canary_log_probs[index])
    space = group.format.ranked_space_size - (group.num_planted_in_space - 1)
    others = np.delete(scored.canary_log_probs, index)
    estimate = estimate_exposure(
        log_prob,
        scored.reference_log_probs,
        secret_space_size=space,
        sibling_log_probs=others,
        tolerance=tolerance,
        confidence=CONFIDENCE,
        known=scored.known_ranks[index] if scored.known_ranks else None,
    )
    finite = estimate.method != "failed"
    siblings_above = _planted_above(scored, index, tolerance)
    controls = [i for i, one in enumerate(group.canaries) if one.role == "control" and i != index]
    controls_above = int((scored.canary_log_probs[controls] >= log_prob - tolerance).sum()) if finite else 0
    ranked_among_controls = canary.role == "canary" and not group.format.has_name
    entry = ledger.canaries.get(canary.id) if ledger is not None else None
    rank_high = estimate.rank_high
    is_greedy = bool(scored.is_greedy[index])
    return CanaryRow(
        id=canary.id,
        format=canary.format,
        role=canary.role,
        tier=canary.tier if canary.role != "control" else 0,
        repetitions=entry.repetitions if entry is not None else (canary.tier if canary.is_planted else 0),
        num_insertions=entry.num_insertions if entry is not None else 0,
        num_seen=_num_seen(canary, entry, ledger),
        num_tokens=group.canary_spans[index].end - group.canary_spans[index].start,
        log_prob=_finite(log_prob),
        rank_low=estimate.rank_low if finite else None,
        rank_high=rank_high if finite else None,
        rank_high_with_siblings=_with_siblings(log_prob, rank_high, space, group, tolerance) if finite else None,
        num_siblings_above=siblings_above,
        num_references=estimate.num_references,
        num_references_above=estimate.num_above,
        num_references_tied=estimate.num_tied,
        num_non_members=estimate.num_references + (len(controls) if ranked_among_controls else 0),
        num_non_members_above=estimate.num_above + (controls_above if ranked_among_controls else 0),
        exposure=_exposure(estimate),
        skew_normal_bits=tail.bits(log_prob, cap_bits=math.log2(space)) if tail is not None and finite else None,
        is_greedy=is_greedy and finite,
        is_extracted=finite and (is_greedy or rank_high == 1),
        may_be_extracted=not finite or is_greedy or estimate.rank_low == 1,
    )


def _with_siblings(log_prob: float, rank_high: int, space: int, group: Group, tolerance: float) -> int:
    """The highest rank among all candidates: by the mass bound, or with every sibling above."""
    whole = space + group.num_planted_in_space - 1
    by_mass = max(certified_rank_high(log_prob, whole, tolerance=tolerance), rank_high)
    return min(by_mass, rank_high + group.num_planted_in_space - 1)


def _planted_above(scored: GroupScores, index: int, tolerance: float) -> int:
    floor = scored.canary_log_probs[index] - tolerance
    return sum(
        bool(scored.canary_log_probs[i] >= floor)
        for i, one in enumerate(scored.group.canaries)
        if i != index and one.is_planted
    )


def _num_seen(canary: PlannedCanary, entry: Any, ledger: Ledger | None) -> int | None:
    if ledger is None:
        return None
    return entry.num_seen if entry is not None else 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exposure(estimate: ExposureEstimate) -> Exposure:
    return Exposure(
        bits=_finite(estimate.bits),
        low_bits=_finite(estimate.low_bits),
        high_bits=_finite(estimate.high_bits),
        confidence=estimate.confidence,
        method=estimate.method,
        cap_bits=estimate.cap_bits,
        p_value=_finite(estimate.p_value),
        flags=list(estimate.flags),
    )


def format_rows(plan: CanaryPlan, scored: Sequence[GroupScores]) -> list[FormatRow]:
    """One row per format: size of its space, its references, the fit of the shown tail."""
    rows = []
    for one in plan.formats:
        mine = [item for item in scored if item.group.format.name == one.name]
        if not mine:
            continue
        references = np.concatenate([item.reference_log_probs for item in mine])
        tail = fit_skew_normal(references) if not one.has_name else None
        rows.append(
            FormatRow(
                name=one.name,
                kind=one.secret.kind,
                secret_space_size=one.secret_space_size,
                ranked_space_size=one.ranked_space_size,
                num_planted=mine[0].group.num_planted_in_space,
                shared_prefix=not one.has_name,
                join=one.join,
                terminator=one.secret.variable_length,
                num_references=len(mine[0].group.reference_spans),
                reference_mean=_finite(float(references.mean())),
                reference_sd=_finite(float(references.std())),
                skew_normal_fit_p=tail.fit_p_value if tail is not None else None,
            )
        )
    return rows


def tier_rows(rows: Sequence[CanaryRow]) -> list[TierRow]:
    """Exposure by format and tier, canaries only."""
    keys = dict.fromkeys((row.format, row.tier, row.repetitions) for row in rows if row.role == "canary")
    return [
        _tier_row(key, [row for row in rows if row.role == "canary" and (row.format, row.tier, row.repetitions) == key])
        for key in keys
    ]


def _tier_row(key: tuple[str, int, int], members: Sequence[CanaryRow]) -> TierRow:
    summary = summarise_bits(members)
    seen = [row.num_seen for row in members if row.num_seen is not None]
    return TierRow(
        format=key[0],
        tier=key[1],
        repetitions=key[2],
        n=len(members),
        mean_num_seen=float(np.mean(seen)) if seen else None,
        num_extracted=sum(row.is_extracted for row in members),
        **summary,
    )


def summarise_bits(members: Iterable[CanaryRow]) -> dict[str, Any]:
    """Mean, median and order-statistic interval of the exposure of some rows; None where a score failed."""
    bits = [row.exposure.bits for row in members]
    if not bits or any(value is None for value in bits):
        return {"mean_bits": None, "median_bits": None, "low_bits": None, "high_bits": None, "coverage": 0.0}
    values = np.array(bits, dtype=np.float64)
    interval = median_interval(values, confidence=CONFIDENCE)
    return {
        "mean_bits": float(values.mean()),
        "median_bits": float(np.median(values)),
        "low_bits": interval.low,
        "high_bits": interval.high,
        "coverage": interval.confidence,
    }


def control_tests(formats: Sequence[FormatRow], rows: Sequence[CanaryRow]) -> list[ControlTest]:
    """The null test of every format that has controls; statistics specification, section 2."""
    tests = []
    for one in formats:
        controls = [row for row in rows if row.format == one.name and row.role == "control"]
        if controls:
            tests.append(_control_test(one, controls))
    return tests


def _control_test(one: FormatRow, controls: Sequence[CanaryRow]) -> ControlTest:
    bits = [row.exposure.bits for row in controls]
    finite = all(value is not None for value in bits)
    rank_sum = max_p = None
    if finite:
        rank_sum = controls_rank_sum_test(
            [row.num_references_above for row in controls],
            [row.num_references_tied for row in controls],
            num_references=one.num_references,
            shared=one.shared_prefix,
        ).p_value
        max_p = max_test([family_of(one, controls)]).p_value
    return ControlTest(
        format=one.name,
        num_controls=len(controls),
        mean_exposure_bits=float(np.mean(np.array(bits, dtype=np.float64))) if finite else None,
        expected_exposure_bits=sampled_null_mean_bits(one.num_references),
        rank_sum_p=rank_sum,
        max_p=max_p,
    )


def family_of(one: FormatRow, rows: Sequence[CanaryRow], *, among_controls: bool = False) -> FamilyGroup:
    """Rows of a format as a family; every row must have a finite score.

    Args:
        one: the format.
        rows: all canaries of the format, or all controls.
        among_controls: ranks among controls too, as canaries are; controls are ranked among references alone.
    """
    above = [row.num_non_members_above if among_controls else row.num_references_above for row in rows]
    return FamilyGroup(
        num_above=np.array(above),
        num_non_members=rows[0].num_non_members if among_controls else one.num_references,
        shared=one.shared_prefix,
        p_values=np.array([row.exposure.p_value for row in rows], dtype=np.float64),
        rank_high=[row.rank_high or one.ranked_space_size for row in rows],
        secret_space_size=one.ranked_space_size - (one.num_planted - 1),
        is_certified=np.array([row.exposure.method in RANK_METHODS for row in rows]),
    )


def start_test(formats: Sequence[FormatRow], rows: Sequence[CanaryRow]) -> StartTest | None:
    """The family tests of canaries on the model before training; None where it was not scored.

    Args:
        formats: of the report.
        rows: the canaries' rows before training.

    Source: statistics specification, section 3 (a candidate that began from a model trained on the plan).
    """
    if not rows:
        return None
    if any(row.exposure.method == "failed" for row in rows):
        return StartTest(n=len(rows), pooled_p=None, max_p=None)
    groups = [
        family_of(one, members, among_controls=True)
        for one in formats
        if (members := [row for row in rows if row.format == one.name])
    ]
    return StartTest(n=len(rows), pooled_p=pooled_test(groups).p_value, max_p=max_test(groups).p_value)


def positive_control(rows: Sequence[CanaryRow]) -> PositiveControl:
    """Whether the canaries planted to be memorised were seen to be."""
    members = [row for row in rows if row.role == "positive_control"]
    p_values = [row.exposure.p_value for row in members if row.exposure.p_value is not None]
    seen = [row.num_seen for row in members if row.num_seen is not None]
    best = min(p_values, default=None)
    return PositiveControl(
        kind="in_training" if members else "none",
        n=len(members),
        mean_num_seen=float(np.mean(seen)) if seen else None,
        best_p_value=best,
        detected=best is not None and best * len(members) <= POSITIVE_CONTROL_P,
    )
