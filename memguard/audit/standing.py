"""The report beside a checkpoint, `memguard_audit/report.json`: does it stand for these files, and putting a new one there.

A report never takes the place of one that shows more: where a valid report of the same files stands and a full audit fails,
the failure lies beside it as `failed.json`. A decision goes when the report it was made on does.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from memguard.audit.completeness import BESIDE, files_of
from memguard.audit.report import AuditReport, Subject, load_report
from memguard.canaries.ledger import LEDGER_NAME
from memguard.canaries.plan import CanaryPlan
from memguard.errors import MemguardError

REPORT, FAILED, DECISION = "report.json", "failed.json", "decision.json"


def standing_report(folder: Path, subject: Subject, plan: CanaryPlan) -> tuple[Path, AuditReport] | None:
    """The report that makes another audit of a checkpoint needless, with its file; None where there is none.

    It is full, of this plan and of the very files that lie there now. An audit that failed counts too, since it would fail
    again, unless it failed in training, where what failed may have been the training's. One without a ledger does not count
    once a ledger has come.

    Args:
        folder: the checkpoint.
        subject: the same with the digests of its files as they are now.
        plan: the canaries.
    """
    for name in (REPORT, FAILED):
        path = folder / BESIDE / name
        report = _load(path)
        if report is None or not report.is_full or not _is_of(report, subject, plan):
            continue
        failed_in_training = report.status == "invalid" and report.cadence is not None
        if not failed_in_training and not _ledger_came_later(report, path, folder):
            return path, report
    return None


def holds_report(folder: Path, plan: CanaryPlan) -> bool:
    """Whether a valid report of the plan stands there, of whatever files."""
    report = _load(folder / BESIDE / REPORT)
    return report is not None and report.status == "valid" and report.plan.digest == plan.digest


def place_report(folder: Path, report: AuditReport, plan: CanaryPlan) -> Path | None:
    """Write a report beside its checkpoint; None, with nothing left behind, where the checkpoint was deleted meanwhile.

    A folder made anew for the report alone would be taken for the newest checkpoint by a trainer that resumes.
    """
    beside = folder / BESIDE
    shown = _load(beside / REPORT)
    is_of = shown is not None and (report.subject.digest is None or _is_of(shown, report.subject, plan))
    if is_of and shown is not None and shown.status == "valid" and report.status == "invalid":
        path = beside / FAILED
    else:
        path = beside / REPORT
        (beside / DECISION).unlink(missing_ok=True)
    report.save(path)
    if report.status == "valid":
        (beside / FAILED).unlink(missing_ok=True)
    if files_of(folder):
        return path
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # what is left in them is not ours
        beside.rmdir()
        folder.rmdir()
    return None


def _load(path: Path) -> AuditReport | None:
    try:
        return load_report(path)
    except MemguardError:  # not readable, or edited by hand: no report
        return None


def _is_of(report: AuditReport, subject: Subject, plan: CanaryPlan) -> bool:
    """Whether a report is about these very files, the base of an adapter among them, and this plan."""
    names = ("kind", "digest", "base_digest")
    is_same = all(getattr(report.subject, name) == getattr(subject, name) for name in names)
    return is_same and report.plan.digest == plan.digest


def _ledger_came_later(report: AuditReport, path: Path, folder: Path) -> bool:
    """Whether a ledger lies there that the audit did not have; one that made it fail does not count until it changes."""
    ledger = folder / LEDGER_NAME
    if report.ledger.found or not ledger.exists():
        return False
    return report.status == "valid" or ledger.stat().st_mtime_ns > path.stat().st_mtime_ns
