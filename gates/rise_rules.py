"""The two rules on a baseline: not worse than it by more than a tolerance, and shown to be better by so many bits.

Sampled exposure on both sides, one estimator and one cap. Over one run the estimand is these two checkpoints on these
canaries: seed-to-seed variation is not in it. Over several accepted runs it is, once they are enough to see a rise at all.
Source: statistics specification, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memguard.audit.report import AuditReport, CanaryRow
from memguard.errors import EvidenceError
from memguard.gates.baseline import ITSELF, AcceptedRun, Baseline, comparability, is_itself, is_paired, training_differences
from memguard.gates.judged import sampled_bits, selected_canaries
from memguard.gates.measured import Measured, Unmeasured
from memguard.gates.policy import Policy, SignificanceRule
from memguard.gates.resolution import canaries_needed, rise_detectable_bits
from memguard.metrics.family import paired_rise_test
from memguard.metrics.rises import RiseTest, runs_rise_test, unpaired_rise_test

NUM_FLIPS, MANY_FLIPS = 9_999, 99_999
FLIPS_A_SHARE = 9  # flips expected at the level: fewer make the p-value coarse
MIN_RUNS = 4  # below, t on B - 1 degrees of freedom fires at hardly any rise that sampled exposure could show
NAMED = 5
FAR = 8.0  # standard errors
ONE_RUN = "one baseline run: seed-to-seed variation is not in this test"
MISSING = "there is no baseline to compare with; accept one with --accept"


@dataclass(frozen=True)
class _Compared:
    """One comparison with the baseline: the rise of the mean with its p-value, and the canaries that rose most; bits."""

    rise: float
    p_value: float
    min_attainable_p: float
    detectable: float
    needed: str | None
    note: str
    rose: list[str]
    largest: float | None
    room: float  # the largest mean rise that sampled exposure could show; bits


def measure_rise(
    rule: SignificanceRule,
    report: AuditReport,
    policy: Policy,
    judged: Sequence[CanaryRow],
    baseline: Baseline | None,
    *,
    share: float,
) -> Measured | Unmeasured:
    """Test the rise of the judged canaries over the accepted runs and, so that small rises do not add up, over the anchor.

    Args:
        rule: holds the tolerance; bits.
        report: the candidate.
        policy: says what compares.
        judged: the candidate's canaries that the rule looks at, all with finite figures.
        baseline: None when there is none.
        share: the level of the test; sets how finely its null is drawn.

    Returns:
        What was found; or, without a comparable baseline, why nothing was.

    Source: statistics specification, section 3, against the baseline.
    """
    if baseline is None:
        return Unmeasured("baseline", "insufficient evidence", MISSING)
    if is_itself(report, baseline):
        return Unmeasured("baseline", "insufficient evidence", ITSELF)
    differences = comparability(report, baseline.newest.report, comparable=policy.comparable)
    if differences:
        reason = f"the baseline does not compare: {'; '.join(differences[:4])}"
        return Unmeasured("baseline", "insufficient evidence", reason)
    if len(judged) < 2:
        needed = canaries_needed(share, _num_flips(share)) or "more"
        reason = f"this rule cannot fire with 1 judged canary; {needed} would be needed"
        return Unmeasured("test", "insufficient evidence", reason)
    anchor, anchor_note = _anchor(report, policy, baseline)
    level = share / 2 if anchor is not None else share
    try:
        found = _compare(rule, report, policy, judged, baseline, level)
        drift = _compare(rule, report, policy, judged, baseline, level, anchor) if anchor is not None else None
        if drift is not None and drift.min_attainable_p > level:
            anchor_note, drift = "not compared with the anchor: training runs vary too much for that", None
            found = _compare(rule, report, policy, judged, baseline, share)
    except EvidenceError as error:
        return Unmeasured("baseline", "insufficient evidence", str(error))
    planted = "; ".join(training_differences(report, baseline.newest.report))
    otherwise = f"the baseline is not of the same planting ({planted}), which may hide a rise or be one" if planted else ""
    notes = [baseline.notice, otherwise, found.note, anchor_note]
    return _measured(rule, judged, found, drift, note="; ".join(filter(None, notes)))


def _anchor(report: AuditReport, policy: Policy, baseline: Baseline) -> tuple[AcceptedRun | None, str]:
    """The pinned run where it is another than the newest and compares; why not, otherwise."""
    anchor = baseline.anchor
    if anchor is None or anchor.report_digest == baseline.newest.report_digest:
        return None, ""
    differences = comparability(report, anchor.report, comparable=policy.comparable)
    return (None, f"not compared with the anchor ({differences[0]})") if differences else (anchor, "")


def _compare(
    rule: SignificanceRule,
    report: AuditReport,
    policy: Policy,
    judged: Sequence[CanaryRow],
    baseline: Baseline,
    share: float,
    anchor: AcceptedRun | None = None,
) -> _Compared:
    """With the spread of all accepted runs where they are enough to know it, else with one run: the newest, or the anchor."""
    like = [run for run in baseline.runs if not comparability(report, run.report, comparable=policy.comparable)]
    one = (anchor or like[-1]).report
    if len(like) < MIN_RUNS:
        single = _with_one(rule, report, policy, judged, one, share)
        few = (
            f"{len(like)} accepted runs are too few to know how much training alone moves the mean: the newest is compared with"
        )
        return replace(single, note=few) if len(like) > 1 else single
    paired = all(is_paired(report, run.report) for run in [*like, *([anchor] if anchor is not None else [])])
    older = [_bits(_same(rule, run.report, policy, judged, paired=paired)) for run in like]
    over = None if anchor is None else _bits(_same(rule, anchor.report, policy, judged, paired=paired))
    found = runs_rise_test(_bits(judged), older, _strata(judged), tolerance_bits=rule.tolerance, paired=paired, over=over)
    room = _cap_bits(judged) - float(np.mean([values.mean() for values in older]))
    least = found.p_value_of(room, tolerance_bits=rule.tolerance)
    detectable = found.detectable(tolerance_bits=rule.tolerance, significance=share)
    note = f"over {len(like)} accepted runs, whose means vary by {found.run_sd:.2f} bits (sd)"
    rose, largest = _rose(rule, judged, _same(rule, one, policy, judged, paired=paired), paired=paired)
    needed = "accepted runs that vary less, or more of them,"
    return _Compared(found.rise, max(found.p_value, least), least, detectable, needed, note, rose, largest, room)


def _with_one(
    rule: SignificanceRule, report: AuditReport, policy: Policy, judged: Sequence[CanaryRow], old: AuditReport, share: float
) -> _Compared:
    paired = is_paired(report, old)
    before = _same(rule, old, policy, judged, paired=paired)
    room = _cap_bits(judged) - float(_bits(before).mean())
    if not paired:
        return _with_fresh(rule, judged, before, share, room)
    rises, num_flips = _bits(judged) - _bits(before), _num_flips(share)
    test = functools.partial(paired_rise_test, strata=_strata(judged), num_flips=num_flips)
    result = test(rises, tolerance_bits=rule.tolerance)
    least = result.min_attainable_p
    most = _caps(judged) - _bits(before)
    highest = least if _is_far_above(most, rule.tolerance) else test(most, tolerance_bits=rule.tolerance).p_value
    is_near_cap = highest > share >= least
    # So near the cap no rise could be seen; a candidate that is shown to lie lower needs none to be.
    lower = test(_bits(before) - _highest_bits(judged), tolerance_bits=-rule.tolerance).p_value if is_near_cap else 0.0
    if is_near_cap and (lower > share or _cap_bits(judged) <= rule.tolerance):
        least = highest
    needed = canaries_needed(share, num_flips)
    rose, largest = _rose(rule, judged, before, paired=True)
    return _Compared(
        rise=result.statistic,
        p_value=max(result.p_value, least),
        min_attainable_p=least,
        detectable=rise_detectable_bits(rises, _strata(judged), tolerance_bits=rule.tolerance, share=share),
        needed=_lower(room) if is_near_cap else None if needed is None else f"{needed} judged canaries",
        note=ONE_RUN,
        rose=rose,
        largest=largest,
        room=room,
    )


def _with_fresh(
    rule: SignificanceRule, judged: Sequence[CanaryRow], before: Sequence[CanaryRow], share: float, room: float
) -> _Compared:
    """With one run of other secrets of the same design: no pairs."""

    def test(after: NDArray[np.float64], old: NDArray[np.float64], sign: float = 1.0) -> RiseTest:
        return unpaired_rise_test(
            sign * after, sign * old, _strata(judged), _strata(before), tolerance_bits=sign * rule.tolerance
        )

    welch, old = test(_bits(judged), _bits(before)), _bits(before)
    highest, lower = test(_caps(judged), old).p_value, test(_highest_bits(judged), old, -1.0).p_value
    least = highest if highest > share and (lower > share or _cap_bits(judged) <= rule.tolerance) else 0.0
    detectable = welch.detectable(tolerance_bits=rule.tolerance, significance=share)
    rose, largest = _rose(rule, judged, before, paired=False)
    note = f"fresh secrets of the same design; {ONE_RUN}"
    return _Compared(welch.rise, max(welch.p_value, least), least, detectable, _lower(room), note, rose, largest, room)


def _same(
    rule: SignificanceRule, old: AuditReport, policy: Policy, judged: Sequence[CanaryRow], *, paired: bool
) -> list[CanaryRow]:
    """The canaries of an older run to compare with: the same ones in the same order, or those the rule looks at there."""
    if not paired:
        return selected_canaries(old, policy, rule.select)
    rows = {row.id: row for row in old.canaries if row.role == "canary"}
    return [rows[row.id] for row in judged]


def _bits(rows: Sequence[CanaryRow]) -> NDArray[np.float64]:
    return np.array([sampled_bits(row) for row in rows])


def _strata(rows: Sequence[CanaryRow]) -> list[object]:
    return [(row.format, row.tier) for row in rows]


def _rose(
    rule: SignificanceRule, judged: Sequence[CanaryRow], before: Sequence[CanaryRow], *, paired: bool
) -> tuple[list[str], float | None]:
    """Ids of the canaries that rose most, and the largest rise in bits; of the most exposed ones where they are no pairs."""
    values = _bits(judged) - _bits(before) if paired else _bits(judged)
    order = [index for index in np.argsort(-values, kind="stable")[:NAMED] if not paired or values[index] > rule.tolerance]
    return [judged[index].id for index in order], float(values.max()) if paired else None


def _caps(rows: Sequence[CanaryRow]) -> NDArray[np.float64]:
    """The largest sampled exposure that each canary can have; bits."""
    return np.array([np.log2(row.num_references + 1) for row in rows])


def _highest_bits(rows: Sequence[CanaryRow]) -> NDArray[np.float64]:
    """Sampled exposure, and where it is at its cap all that may lie above; bits."""
    return np.array(
        [
            sampled_bits(row) if row.num_references_above else max(sampled_bits(row), row.exposure.high_bits or 0.0)
            for row in rows
        ]
    )


def _cap_bits(rows: Sequence[CanaryRow]) -> float:
    """The largest mean that sampled exposure can have; bits."""
    return float(_caps(rows).mean())


def _is_far_above(values: NDArray[np.float64], tolerance: float) -> bool:
    """Whether the mean lies so many standard errors above that no flips need to be drawn to know it."""
    return bool(values.mean() - tolerance > FAR * values.std() / np.sqrt(values.size) > 0.0)


def _lower(room: float) -> str:
    return f"a tolerance well below the {max(room, 0.0):.2f} bits that exposure can still rise"


def _num_flips(share: float) -> int:
    return NUM_FLIPS if share * NUM_FLIPS >= FLIPS_A_SHARE else MANY_FLIPS


def _measured(
    rule: SignificanceRule, judged: Sequence[CanaryRow], found: _Compared, drift: _Compared | None, *, note: str
) -> Measured:
    """Both comparisons as one test, Bonferroni over the two."""
    many = 1 if drift is None else 2
    worst = found if drift is None or found.p_value <= drift.p_value else drift
    finding = f"exposure rose {found.rise:.2f} bits on average over {len(judged)} canaries ({rule.tolerance:g} tolerated)"
    if drift is not None:
        finding += f", and {drift.rise:.2f} over the anchor"
    bits = min(one.detectable for one in (found, drift) if one is not None)
    detectable = bits if bits <= found.room else None
    return Measured(
        p_value=min(1.0, many * worst.p_value),
        min_attainable_p=min(1.0, many * worst.min_attainable_p),
        n=len(judged),
        finding=finding,
        needed=found.needed,
        sees="at this size no mean rise" if detectable is None else f"a mean rise of {detectable:.2f} bits",
        detectable_bits=detectable,
        canaries=worst.rose,
        figures={
            "statistic": found.rise,
            "tolerance_bits": rule.tolerance,
            "margin": rule.tolerance - worst.rise,
            "largest_rise": worst.largest,
            "rise_over_anchor": drift.rise if drift is not None else None,
        },
        note=note,
    )
