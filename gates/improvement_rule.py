"""The rule `exposure.improves_on_baseline`: is the fall in exposure that a defence promises shown? Bits.

Three outcomes by the interval of the difference: shown, shown to be absent (block), or neither, which proves nothing and is
exit code 3. It takes no share of alpha: without proof it does not pass. Source: statistics specification, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memguard.audit.report import AuditReport, CanaryRow, RuleOutcome, RuleResult
from memguard.errors import EvidenceError
from memguard.gates.baseline import ITSELF, Baseline, comparability, is_itself, is_paired
from memguard.gates.judged import is_scored, sampled_bits, selected_canaries
from memguard.gates.policy import Policy, SignificanceRule
from memguard.gates.wording import quoted, sentence
from memguard.metrics.differences import (
    DifferenceEstimate,
    estimate_paired_difference,
    estimate_unpaired_difference,
)

CONFIDENCE = 0.95


def evaluate_improvement(
    rule: SignificanceRule, report: AuditReport, policy: Policy, judged: Sequence[CanaryRow], baseline: Baseline | None
) -> RuleResult:
    """Hold the fall of the judged canaries' exposure against the bits it must have.

    Args:
        rule: holds `bits`.
        report: the candidate.
        policy: says what compares.
        judged: the canaries that the rule looks at.
        baseline: the newest run of it is what the candidate must improve on.

    Returns:
        pass, block, insufficient evidence (not shown, or nothing to compare with), or invalid.

    Source: statistics specification, sections 2 (intervals) and 3.
    """
    least = rule.bits or 0.0
    failed = [row.id for row in judged if not is_scored(row)]
    if failed or not judged:
        reason = f"{quoted(failed)} have no finite score" if failed else "no canary is judged"
        return RuleResult(name=rule.name, kind="test", outcome="invalid", reason=sentence(reason))
    if baseline is None:
        return _unproven(rule, "there is no baseline to improve on; give the audit of the run without the defence")
    if is_itself(report, baseline):
        return _unproven(rule, ITSELF)
    old = baseline.newest.report
    differences = comparability(report, old, comparable=policy.comparable)
    if differences:
        return _unproven(rule, f"the baseline does not compare: {'; '.join(differences[:4])}")
    try:
        found, before = _estimate(rule, report, policy, judged, old)
    except EvidenceError as error:
        return _unproven(rule, str(error))
    fall, low, high = -found.value, -found.high, -found.low
    enough = "too few" not in found.flags
    outcome: RuleOutcome = "insufficient evidence"
    if enough and low >= least:
        outcome = "pass"
    elif enough and high < least:
        outcome = "block"
    if rule.severity == "warn" and outcome != "pass":
        outcome = "warn"
    shown = {"pass": "which is shown", "block": "which is shown to be missing"}.get(outcome, "which is not shown")
    reason = (
        f"exposure fell {fall:.2f} bits ({low:.2f} to {high:.2f}, {found.confidence:.0%}; {found.method}) from "
        f"{np.mean(before):.2f} over {len(judged)} canaries; {least:g} are asked for, {shown}"
    )
    reason += "" if enough else f"; {len(judged)} canaries are too few for an interval"
    return RuleResult(
        name=rule.name,
        kind="test",
        outcome=outcome,
        reason=sentence(reason),
        figures={"fall_bits": fall, "low_bits": low, "high_bits": high, "bits": least, "n": len(judged), "margin": low - least},
    )


def _unproven(rule: SignificanceRule, reason: str) -> RuleResult:
    outcome: RuleOutcome = "warn" if rule.severity == "warn" else "insufficient evidence"
    return RuleResult(name=rule.name, kind="baseline", outcome=outcome, reason=sentence(reason))


def _estimate(
    rule: SignificanceRule, report: AuditReport, policy: Policy, judged: Sequence[CanaryRow], old: AuditReport
) -> tuple[DifferenceEstimate, list[float]]:
    after = [sampled_bits(row) for row in judged]
    if is_paired(report, old):
        rows = {row.id: row for row in old.canaries if row.role == "canary"}
        before = [sampled_bits(rows[row.id]) for row in judged]
        return estimate_paired_difference(after, before, confidence=CONFIDENCE), before
    before = [sampled_bits(row) for row in selected_canaries(old, policy, rule.select)]
    return estimate_unpaired_difference(after, before, confidence=CONFIDENCE), before
