"""Where the reports of an offline audit are put: one folder a checkpoint, the last one also on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memguard.audit.report import AuditReport
from memguard.files import write_text_atomic


def write_reports(reports: Sequence[AuditReport], folders: Sequence[Path], output: Path) -> None:
    """Write `NAME/report.json` for each checkpoint and, on top, `report.json`, `report.html` and `history.jsonl`.

    Args:
        reports: in the order of `folders`.
        folders: the checkpoints; their names name the reports.
        output: the folder to write in.
    """
    from memguard.reporting.html import render_html
    from memguard.reporting.jsonl_tracker import JsonlTracker

    history = JsonlTracker(output / "history.jsonl")
    for report, folder in zip(reports, folders, strict=True):
        if len(reports) > 1:
            report.save(output / folder.resolve().name / "report.json")
        history.log(report)
    reports[-1].save(output / "report.json")
    write_text_atomic(output / "report.html", render_html(reports[-1]))
