"""The history of a run as JSON lines: one line an audit, whole or not at all, no two for one step and kind of subject.

A line holds the tracker metrics and the points that draw the curves, and nothing that the report does not hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memguard.audit.report import AuditReport
from memguard.errors import InputError
from memguard.files import read_text, write_text_atomic
from memguard.reporting.curves import own_points
from memguard.reporting.trackers import flatten_metrics


class JsonlTracker:
    """Appends audits to a JSON lines file.

    A second audit of one step and kind of subject (a resumed run) takes the place of the first; where the step is not known the
    digest stands for it. The file is rewritten under a temporary name and renamed. A last line that a crash cut short is
    dropped; any other broken line is an error, since the file is then not ours to rewrite.

    Args:
        path: `history.jsonl`; its folder is made when needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def log(self, report: AuditReport) -> None:
        """Write one audit.

        Raises:
            InputError: the file exists and holds something else than audits.
        """
        lines = {_key(row): row for row in (read_history(self.path) if self.path.exists() else [])}
        line = history_line(report)
        lines[_key(line)] = line
        write_text_atomic(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in lines.values()))


def history_line(report: AuditReport) -> dict[str, Any]:
    """One line of the history: step, epoch, subject kind and digest, status, cadence, metrics, and curve points."""
    return {
        "created_at": report.created_at,
        "global_step": report.subject.global_step,
        "epoch": report.subject.epoch,
        "kind": report.subject.kind,
        "digest": report.subject.digest,
        "status": report.status,
        "cadence": report.cadence.model_dump() if report.cadence is not None else None,
        "metrics": flatten_metrics(report),
        "points": [point.model_dump() for point in own_points(report)],
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    step, kind = row.get("global_step"), row.get("kind")
    return (step, kind) if step is not None else (step, kind, row.get("digest"), row.get("created_at"))


def read_history(path: Path) -> list[dict[str, Any]]:
    """The audits of a run in the order in which they were first logged.

    `[TrendPoint(**point) for row in read_history(path) for point in row["points"]]` is the trend of the next report.

    Args:
        path: a `history.jsonl`.

    Returns:
        One dict a line, as `history_line` makes it; a last line cut short by a crash is left out.

    Raises:
        InputError: no such file, or a line before the last that is not a JSON object.
    """
    lines = read_text(path, what="history").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise InputError(f"history '{path.name}' must hold one JSON object a line, got something else in line {number}.")
    return rows


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
