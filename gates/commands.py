"""`memguard gate` without its command line: files in, a decision and its file out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from memguard.audit.report import Decision
from memguard.errors import InputError, RegistryError
from memguard.gates.baseline import accept as accept_report
from memguard.gates.decision import decide
from memguard.gates.promotion_inputs import load_inputs
from memguard.gates.terminal import format_decision

__all__ = ["format_decision", "gate_report"]

DECISION_NAME = "decision.json"
LOCK_S = 30.0


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

    Returns:
        The decision as it was written; that of a first release keeps its exit code 3, since it had no baseline.

    Raises:
        InputError: a file, key or argument cannot be used.
        EvidenceError: a file was changed or is not signed; or the report may not be accepted: the decision is written all
            the same.
    """
    report_path = Path(report_path)
    target = Path(output) if output is not None else report_path.with_name(DECISION_NAME)
    _check_arguments(report_path, target, policy, baseline, accept, by, reason)
    if pin and accept is None:
        raise InputError("--anchor belongs to --accept BASELINE.")
    with _alone(accept):
        if accept is not None and accept.exists():
            if baseline is not None and baseline.resolve() != accept.resolve():
                raise InputError("--accept adds to a baseline that exists, and compares with that one: leave --baseline out.")
            baseline = accept
        report, rules, accepted = load_inputs(report_path, policy, baseline, keys=require_signature)
        decision = decide(report, rules, accepted)
        decision.save(target)
        if accept is not None:
            accept_report(report, rules, decision, accept, by=by or "", reason=reason or "", pin=pin)
    return decision


@contextlib.contextmanager
def _alone(accept: Path | None) -> Iterator[None]:
    """One at a time adds to a baseline, from the comparison with it to the new file: none of the runs is lost."""
    if accept is None:
        yield
        return
    from filelock import FileLock, Timeout

    accept.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(accept.resolve().with_name(f".{accept.name}.lock"), timeout=LOCK_S):
            yield
    except Timeout:
        raise RegistryError(f"baseline '{accept.name}' is being written by somebody else; try again.") from None


def _check_arguments(
    report_path: Path,
    target: Path,
    policy: Path | str,
    baseline: Path | None,
    accept: Path | None,
    by: str | None,
    reason: str | None,
) -> None:
    """Everything that is wrong with the arguments, before a file is written."""
    problems = []
    if accept is not None and not ((by or "").strip() and (reason or "").strip()):
        problems.append("--accept needs --by NAME and --reason TEXT: a baseline names who accepted it, and why.")
    if accept is None and (by is not None or reason is not None):
        problems.append("--by and --reason belong to --accept BASELINE.")
    inputs = [Path(path).resolve() for path in (report_path, policy, baseline, accept) if path is not None]
    if target.resolve() in inputs:
        problems.append("the decision must not be written over the report, the policy or the baseline; give another --output.")
    if accept is not None and accept.resolve() in (report_path.resolve(), Path(policy).resolve()):
        problems.append("the baseline must be a file of its own, not the report or the policy.")
    if problems:
        raise InputError(" ".join(problems))
