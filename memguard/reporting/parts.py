"""Which parts of an audit were measured, and for a part that was not, what a reader can do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memguard.audit.report import AuditReport
from memguard.audit.report_records import RecordRow

LARGEST_TABLE = 200

NO_EXTRACTION = "audit.extraction is null in the configuration"
NO_PRIOR = "no training rows were given (--data, or audit.records.file), or audit.prior_aware is null in the configuration"


def describe_extent(report: AuditReport) -> str:
    """Whether the audit was full, and what a short one leaves out; a sentence without its full stop."""
    if report.is_full:
        return "full; a part that was not measured says why"
    measured = {
        "extraction": report.extraction is not None,
        "Prior-Aware memorisation": report.prior_aware is not None or report.prior_aware_settings is not None,
        "real records": report.records is not None,
        "membership": report.membership is not None,
    }
    found = [name for name, is_measured in measured.items() if is_measured]
    found += ["privacy"] if report.privacy is not None or report.counterfactual else []
    missing = [name for name, is_measured in measured.items() if not is_measured]
    beside = f"exposure, {join_words(found)}" if found else "exposure alone"
    return f"short: it measured {beside}" + (f"; a full audit also measures {join_words(missing)}" if missing else "")


def join_words(words: Sequence[str]) -> str:
    """Words as a list in a sentence.

    Example:
        >>> join_words(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def why_not_measured(report: AuditReport) -> dict[str, str]:
    """By part, the reason that holds if it was not measured: what to give or set.

    Parts are `extraction`, `prior_aware`, `records`, `held_out`, `near`, `membership`, `propensity` (empty where nobody asked
    for it) and `privacy`.
    """
    has_both = report.records is not None and report.records.held_out is not None
    reasons = {
        "extraction": NO_EXTRACTION,
        "prior_aware": NO_PRIOR,
        "records": _noticed(report, "records were not measured: ") or "no records were given: --data, --held-out",
        "held_out": "no held-out records of this length were given: --held-out",
        "near": "audit.records.max_edits is 0" if _edits(report) == 0 else NO_EXTRACTION,
        "membership": _noticed(report, "membership was not measured: ")
        or (
            "audit.membership is null in the configuration"
            if has_both
            else "it needs records that were trained on and held-out ones: --data, --held-out"
        ),
        "propensity": _noticed(report, "propensity was not measured: ") or "",
        "privacy": "no coins were thrown: draw the plan with canaries.inclusion set to coin"
        if report.plan.inclusion == "planned"
        else "too few coins were thrown: plan more canaries",
    }
    if report.status == "invalid":
        failed = "the audit is invalid, for the reasons on top"
        reasons |= dict.fromkeys(("extraction", "prior_aware", "records", "membership", "privacy"), failed)
    return reasons


def _edits(report: AuditReport) -> int:
    return report.records.max_edits if report.records is not None else 0


def _noticed(report: AuditReport, beginning: str) -> str | None:
    """What a notice of the audit says of a part that its data could not carry."""
    found = [notice.removeprefix(beginning).rstrip(".") for notice in report.notices if notice.startswith(beginning)]
    return found[0] if found else None


def count_found_by(report: AuditReport) -> dict[str, int]:
    """Canaries by the kind of prompt that was continued with their secret; a canary may count under several."""
    rows = [row.extraction for row in report.canaries if row.role == "canary" and row.extraction is not None]
    return dict(Counter(kind for row in rows for kind in row.found_by))


def count_uncounted(report: AuditReport) -> int:
    """Canaries found in a continuation and not called extracted, since chance alone may have put them there."""
    rows = [row for row in report.canaries if row.role == "canary" and row.extraction is not None]
    return sum(bool(row.extraction and row.extraction.found_by) and not row.is_extracted for row in rows)


def shown_records(rows: Sequence[RecordRow]) -> list[RecordRow]:
    """At most `LARGEST_TABLE` records, by line: those that greedy decoding writes go first, then the likeliest."""
    ordered = sorted(rows, key=lambda row: (not row.is_greedy, -row.log_prob, row.line))
    return sorted(ordered[:LARGEST_TABLE], key=lambda row: row.line)
