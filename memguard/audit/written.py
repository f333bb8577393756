"""Where the reports of an offline audit are put: one folder a checkpoint, the last one also on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memguard.audit.report import AuditReport
from memguard.files import write_text_atomic


def write_reports(reports: Sequence[AuditReport], folders: Sequence[Path], output: Path) -> None:
    """Write a report for each checkpoint and, on top, `report.json` of the last, `report.html` and `history.jsonl`.

    Several checkpoints get `NAME/report.json` each, `RUN-NAME/report.json` where two have one name.

    Args:
        reports: in the order of `folders`.
        folders: the checkpoints; their names name the reports.
        output: the folder to write in.
    """
    from memguard.reporting.html import render_html
    from memguard.reporting.jsonl_tracker import JsonlTracker

    history = JsonlTracker(output / "history.jsonl")
    for report, name in zip(reports, _names(folders), strict=True):
        if len(reports) > 1:
            report.save(output / name / "report.json")
        history.log(report)
    reports[-1].save(output / "report.json")
    write_text_atomic(output / "report.html", render_html(reports[-1]))


def _names(folders: Sequence[Path]) -> list[str]:
    """What tells the checkpoints apart: their names, with those of their parents where two runs have the same ones."""
    paths = [folder.resolve() for folder in folders]
    longest = max(len(path.parts) for path in paths)
    for depth in range(1, longest + 1):
        names = ["-".join(part.strip("/") for part in path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError("folders must be distinct.")
