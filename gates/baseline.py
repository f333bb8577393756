"""The baseline: reports that somebody accepted, newest last, and whether another report compares with one of them.

A report compares only with one made of the same canaries by the same procedure. Source: statistics specification, section 3.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from memguard.audit.report import AuditReport, Decision, RuleResult, load_report
from memguard.documents import SCHEMA_VERSION, Document, document_digest, load_document, sealed_json
from memguard.errors import EvidenceError, InputError
from memguard.files import read_json, write_text_atomic
from memguard.gates.judged import is_scored
from memguard.gates.policy import Policy
from memguard.gates.wording import clip, quoted

KEPT_RUNS = 8
ITSELF = "the baseline is this very report, which nobody accepted; give the audit of an earlier release"
BARE_REPORT = "a bare report that nobody accepted"
COMPARED = ("dtype", "autocast", "references", "references_per_name", "score")
Comparable = Literal["plan", "design"]

__all__ = ["AcceptedRun", "Baseline", "accept", "comparability", "document_digest", "load_baseline"]


class AcceptedRun(Document):
    """One report, who accepted it and why. Nobody stands behind a bare report."""

    report: AuditReport
    report_digest: str
    accepted_by: str | None = None
    reason: str | None = None
    accepted_at: str | None = Field(default=None, description="UTC, ISO 8601")
    waived: list[str] = Field(default_factory=list, description="rules that failed and were waived")


class Baseline(Document):
    """Accepted runs, oldest first; the last one is what a candidate is compared with, the anchor what it may not drift from."""

    kind: Literal["memguard baseline"] = "memguard baseline"
    schema_version: int = SCHEMA_VERSION
    runs: list[AcceptedRun] = Field(min_length=1)
    anchor: AcceptedRun | None = Field(
        default=None, description="a run that stays when older ones go: the first accepted one, until another is pinned"
    )

    @property
    def all_runs(self) -> list[AcceptedRun]:
        """The anchor where it is none of the kept runs, and the runs, oldest first."""
        kept = {run.report_digest for run in self.runs}
        return [*([self.anchor] if self.anchor is not None and self.anchor.report_digest not in kept else []), *self.runs]

    @property
    def newest(self) -> AcceptedRun:
        """The run that a candidate is compared with."""
        return self.runs[-1]

    @property
    def accepted(self) -> bool:
        """Whether somebody accepted every run."""
        return all(run.accepted_by for run in self.all_runs)

    @property
    def notice(self) -> str | None:
        """What a reader should know of this baseline; None when there is nothing."""
        if self.accepted:
            return None
        live = " and measured a live model" if self.newest.report.subject.kind == "live" else ""
        return f"the baseline is {BARE_REPORT}{live}"


def load_baseline(path: Path | str) -> Baseline:
    """Read a baseline, or a bare report to compare with.

    Args:
        path: `baseline.json`, or a `report.json`.

    Returns:
        The baseline; one of a bare report has `accepted` false and a `notice`.

    Raises:
        InputError: the file cannot be read.
        EvidenceError: the file was changed after it was written, or a report in it is not the one that was accepted.
    """
    path = Path(path)
    data = read_json(path, what="baseline")
    if isinstance(data, dict) and data.get("kind") == "memguard audit report":
        report = load_report(path)
        return Baseline(runs=[AcceptedRun(report=report, report_digest=document_digest(report))])
    baseline = load_document(path, Baseline, what="baseline", sealed=True)
    if not baseline.accepted:
        raise InputError(f"baseline '{path.name}' holds a run that nobody accepted. Write it with `memguard gate --accept`.")
    if any(document_digest(run.report) != run.report_digest for run in baseline.all_runs):
        raise EvidenceError(f"baseline '{path.name}' holds a report that was changed after it was accepted.")
    return baseline


def accept(
    report: AuditReport,
    policy: Policy,
    decision: Decision,
    path: Path,
    *,
    by: str,
    reason: str,
    pin: bool = False,
    now: datetime.datetime | None = None,
) -> Baseline:
    """Write a report into a baseline: what later candidates must not be worse than.

    A first release has no baseline yet: a decision that lacks nothing else is accepted where the file does not exist.

    Args:
        report: the audit to accept.
        policy: the policy it was decided by.
        decision: the decision on this report by this policy.
        path: the baseline; made when missing, else the report is added and the last eight are kept.
        by: who accepts.
        reason: why.
        pin: make this report the anchor; the first accepted one is it otherwise.
        now: the time to write down, UTC; the clock's when None.

    Returns:
        The baseline as written.

    Raises:
        InputError: `by` or `reason` is empty or not one line, or the report is the newest one already.
        EvidenceError: the decision is of another report or policy, invalid, or blocked.
    """
    texts = {what: _one_line(what, text) for what, text in (("by", by), ("reason", reason))}
    _check_decision(report, policy, decision, first=not path.exists())
    old = load_baseline(path) if path.exists() else None
    kept = old.runs if old is not None else []
    digest = document_digest(report)
    if kept and not kept[-1].accepted_by:
        raise InputError(f"'{path.name}' is {BARE_REPORT}, not a baseline. Give the baseline a name of its own.")
    if kept and kept[-1].report_digest == digest:
        raise InputError(f"baseline '{path.name}' holds this report already.")
    moment = (now or datetime.datetime.now(datetime.timezone.utc)).astimezone(datetime.timezone.utc)
    run = AcceptedRun(
        report=report,
        report_digest=digest,
        accepted_by=texts["by"],
        reason=texts["reason"],
        accepted_at=moment.isoformat(timespec="seconds"),
        waived=[rule.name for rule in decision.rules if rule.outcome == "waived"],
    )
    anchor = run if pin or old is None else old.anchor or kept[0]
    baseline = Baseline(runs=[*kept, run][-KEPT_RUNS:], anchor=anchor)
    write_text_atomic(path, sealed_json(baseline))
    return baseline


def _one_line(what: str, text: str) -> str:
    line = text.strip()
    if not line or clip(line) != line:
        raise InputError(f"'{what}' must be one line of 1 to 200 characters. A baseline names who accepted it, and why.")
    return line


def _check_decision(report: AuditReport, policy: Policy, decision: Decision, *, first: bool) -> None:
    if decision.report_digest != document_digest(report) or decision.policy_digest != policy.digest:
        raise EvidenceError("the decision was made on another report or by another policy. Decide again, then accept.")
    if decision.outcome == "block":
        failing = [rule.name for rule in decision.rules if rule.outcome == "block"]
        raise EvidenceError(
            f"a blocked report is accepted only with a waiver in the policy for each failing rule: {quoted(failing)}."
        )
    if decision.outcome == "pass":
        return
    if not _lacks_only_a_baseline(decision):
        raise EvidenceError(f"a report that is no evidence cannot be accepted. {decision.reason}")
    if not first:
        raise EvidenceError("the baseline exists already. Compare the report with it, or begin a new file for a new plan.")


def _lacks_only_a_baseline(decision: Decision) -> bool:
    """Whether the road of a first release is open: no baseline was given, and nothing else is wrong."""
    fine = {"pass", "warn", "waived"} if decision.strict else {"pass", "warn", "waived", "not shown"}
    wrong = [result for result in [*decision.evidence, *decision.rules] if result.outcome not in fine]
    return decision.baseline_digest is None and all(_lacks_baseline(result) for result in wrong)


def _lacks_baseline(result: RuleResult) -> bool:
    return result.kind == "baseline" and result.outcome == "insufficient evidence"


def is_paired(report: AuditReport, baseline_report: AuditReport) -> bool:
    """Whether the two reports are of one plan, so that their canaries are the same ones."""
    return report.plan.digest == baseline_report.plan.digest


def comparability(report: AuditReport, baseline_report: AuditReport, *, comparable: Comparable = "plan") -> list[str]:
    """Why two reports do not compare, one phrase each; empty when they do.

    Args:
        report: the candidate.
        baseline_report: what it would be compared with.
        comparable: plan: only the same canaries compare; design: fresh secrets of the same formats, templates and tiers too.

    Returns:
        Differences in plan or design, tokenizer, procedure and canaries, and what makes the baseline no evidence. The tie
        tolerance is measured anew in every audit and does not count.
    """
    differences, paired = [], is_paired(report, baseline_report)
    if not paired and comparable == "plan":
        differences.append("the plan differs")
    elif not paired and report.plan.design_digest is None:
        differences.append("the report does not name the design of its plan: audit again")
    elif not paired and report.plan.design_digest != baseline_report.plan.design_digest:
        differences.append("the design of the plan differs (formats, templates or tiers)")
    if report.tokenizer_digest != baseline_report.tokenizer_digest:
        differences.append("the tokenizer differs")
    for field in COMPARED:
        new, old = getattr(report.procedure, field), getattr(baseline_report.procedure, field)
        if new != old:
            differences.append(f"the procedure's {field} differs ({clip(str(new), 30)}, baseline {clip(str(old), 30)})")
    if paired and report.procedure.reference_seed != baseline_report.procedure.reference_seed:
        differences.append("the procedure's reference_seed differs")
    rows = _row_differences(report, baseline_report) if paired or comparable == "plan" else []
    return differences + rows + _faults(baseline_report)


def training_differences(report: AuditReport, baseline_report: AuditReport) -> list[str]:
    """How the two runs planted differently, one phrase each: a rise, or none, may then be the planting's.

    They compare all the same, as one run without a defence and one with it do.

    Args:
        report: the candidate.
        baseline_report: what it would be compared with.
    """
    differences = []
    new, old = (
        sorted((r.format, r.repetitions) for r in one.canaries if r.role == "canary") for one in (report, baseline_report)
    )
    if new != old:
        differences.append("the canaries were to be repeated otherwise")
    for field, what in (("count", "counted"), ("mode", "planted"), ("plant_once", "repeated")):
        if getattr(report.ledger, field) != getattr(baseline_report.ledger, field):
            differences.append(f"the canaries were {what} otherwise (ledger.{field})")
    return list(dict.fromkeys(differences))


def is_itself(report: AuditReport, baseline: Baseline) -> bool:
    """Whether the baseline is nothing but this report, which nobody accepted."""
    return not baseline.accepted and baseline.newest.report_digest == document_digest(report)


def _row_differences(report: AuditReport, baseline_report: AuditReport) -> list[str]:
    new = {row.id: row for row in report.canaries if row.role == "canary"}
    old = {row.id: row for row in baseline_report.canaries if row.role == "canary"}
    if set(new) != set(old):
        return [f"the canaries differ ({len(set(new) ^ set(old))} ids are in one report only)"]
    unlike = [
        name for name in new if (new[name].format, new[name].num_references) != (old[name].format, old[name].num_references)
    ]
    return [f"{quoted(unlike)} were ranked among other references"] if unlike else []


def _faults(baseline_report: AuditReport) -> list[str]:
    faults = []
    if baseline_report.status != "valid" or baseline_report.invalid_reasons:
        faults.append("the baseline report is invalid")
    failed = [row.id for row in baseline_report.canaries if row.role == "canary" and not is_scored(row)]
    if failed:
        faults.append(f"the baseline has no usable score for {quoted(failed)}")
    return faults
