"""`memguard gate` without its command line: files in, a decision and its file out."""

from __future__ import annotations

from pathlib import Path

from memguard.audit.report import Decision
from memguard.errors import InputError
from memguard.gates.baseline import accept as accept_report
from memguard.gates.decision import decide
from memguard.gates.promotion_inputs import load_inputs
from memguard.gates.terminal import format_decision

__all__ = ["format_decision", "gate_report"]

DECISION_NAME = "decision.json"


def gate_report(
    report_path: Path,
    *,
    policy: Path | str,
    baseline: Path | None = None,
    accept: Path | None = None,
    by: str | None = None,
    reason: str | None = None,
    pin: bool = False,
    require_signature: Path | None = None,
    output: Path | None = None,
    write: bool = True,
    attempts: int = 1,
) -> Decision:
    """Decide on a report file, write the decision, and accept the report as baseline where asked to.

    With `accept` and no `baseline`, a file that exists at `accept` is what the report is compared with: a release cannot
    join a baseline that it is worse than.

    Args:
        report_path: report.json.
        policy: policy.yaml, or `default` or `strict`.
        baseline: baseline.json, or a bare report to compare with.
        accept: the baseline to write the report into; needs `by` and `reason`.
        by: who accepts.
        reason: why.
        pin: make the accepted report the anchor that later ones may not drift from.
        require_signature: public keys; report, baseline and a policy of one's own must each be signed by one of them.
        output: where the decision goes; `decision.json` beside the report when None.
        write: false writes no decision file.
        attempts: how often this plan met the gate; a strict policy divides alpha by it.

    Returns:
        The decision as it was written; that of a first release keeps its exit code 3, since it had no baseline.

    Raises:
        InputError: a file, key or argument cannot be used.
        EvidenceError: a file was changed or is not signed; or the report may not be accepted: the decision is written all
            the same.
    """
    report_path = Path(report_path)
    target = Path(output) if output is not None else report_path.with_name(DECISION_NAME)
    _check_arguments(report_path, target, baseline, accept, by, reason)
    if pin and accept is None:
        raise InputError("--anchor belongs to --accept BASELINE.")
    if baseline is None and accept is not None and accept.exists():
        baseline = accept
    report, rules, accepted = load_inputs(report_path, policy, baseline, keys=require_signature)
    decision = decide(report, rules, accepted, attempts=attempts)
    if write:
        decision.save(target)
    if accept is not None:
        accept_report(report, rules, decision, accept, by=by or "", reason=reason or "", pin=pin)
    return decision


def _check_arguments(
    report_path: Path, target: Path, baseline: Path | None, accept: Path | None, by: str | None, reason: str | None
) -> None:
    """Everything that is wrong with the arguments, before a file is written."""
    problems = []
    if accept is not None and not ((by or "").strip() and (reason or "").strip()):
        problems.append("--accept needs --by NAME and --reason TEXT: a baseline names who accepted it, and why.")
    if accept is None and (by is not None or reason is not None):
        problems.append("--by and --reason belong to --accept BASELINE.")
    inputs = [path.absolute() for path in (report_path, baseline, accept) if path is not None]
    if target.absolute() in inputs:
        problems.append("the decision must not be written over the report or the baseline; give another --output.")
    if accept is not None and accept.absolute() == report_path.absolute():
        problems.append("the baseline must be a file of its own, not the report.")
    if problems:
        raise InputError(" ".join(problems))
