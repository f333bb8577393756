"""The files and trackers of one run's audits, on the first rank: written whole or not at all, continued after a resume.

`history.jsonl` (a line per audit), `report.json`, `decision.json` and `report.html` (the latest), `reports/step-N.json` (every
one), `start.json` (scores before training); beside a checkpoint `memguard_audit/report.json` and `decision.json`. What belongs
to steps that the run does not go on from is put aside under `superseded/`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memguard.audit.report import AuditReport, Decision, TrendPoint, load_report
from memguard.audit.start import START_NAME
from memguard.errors import EvidenceError, InputError
from memguard.files import write_text_atomic
from memguard.reporting.html import render_html
from memguard.reporting.jsonl_tracker import JsonlTracker, read_history
from memguard.reporting.trackers import Tracker

logger = logging.getLogger(__name__)

REPORT, DECISION, PAGE, HISTORY = "report.json", "decision.json", "report.html", "history.jsonl"
BESIDE = "memguard_audit"
UNUSABLE = (InputError, EvidenceError)  # a report of another version, or one that was changed
ASIDE = "superseded"


class RunFiles:
    """Writes the audits of one run.

    Args:
        output: folder of the run's reports.
        trackers: where curves go, beside the history.
    """

    def __init__(self, output: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.output, self.trackers = output, list(trackers)
        self.history, self.start = JsonlTracker(output / HISTORY), output / START_NAME
        self._shown: tuple[AuditReport, Decision | None] | None = None

    # -- resume

    def open(self, global_step: int) -> list[TrendPoint]:
        """Put aside what a run at this step does not go on from, and give the trend of what it does.

        Args:
            global_step: steps done already; 0 begins a new run, which goes on from nothing.

        Raises:
            InputError: a history that is not ours to rewrite, or of another version.
        """

        def stays(step: Any) -> bool:
            return global_step > 0 and isinstance(step, int) and step <= global_step

        rows = read_history(self.history.path) if self.history.path.exists() else []
        dropped = [row for row in rows if not stays(row.get("global_step"))]
        for path in sorted((self.output / "reports").glob("step-*.json")):
            number = re.fullmatch(r"step-(\d+)", path.stem)
            if number is not None and not stays(int(number[1])):
                self._put_aside(path)
        if (self.output / REPORT).exists() and not stays(_step_of(self.output / REPORT)):
            for name in (REPORT, DECISION, PAGE):
                self._put_aside(self.output / name)
        if global_step == 0:
            self._put_aside(self.start)
        if dropped:
            self._rewrite([row for row in rows if row not in dropped], dropped)
            logger.info("%d audits that this run does not go on from were put aside in '%s'.", len(dropped), ASIDE)
        self._list_unlisted({row.get("global_step") for row in rows})
        rows = read_history(self.history.path) if self.history.path.exists() else []
        points = [point for row in rows for point in _points(row)]
        return list({(point.global_step, point.tier): point for point in points}.values())

    def _list_unlisted(self, listed: set[Any]) -> None:
        """Give reports a line of the history that a kill kept from having one."""
        for path in sorted((self.output / "reports").glob("step-*.json")):
            number = re.fullmatch(r"step-(\d+)", path.stem)
            if number is not None and int(number[1]) not in listed:
                with contextlib.suppress(*UNUSABLE):
                    self.history.log(load_report(path))

    def _rewrite(self, kept: Sequence[dict[str, Any]], dropped: Sequence[dict[str, Any]]) -> None:
        aside = self.output / ASIDE / HISTORY
        earlier = read_history(aside) if aside.exists() else []
        write_text_atomic(aside, _lines([*earlier, *dropped]))
        write_text_atomic(self.history.path, _lines(kept))

    def _put_aside(self, path: Path) -> None:
        if path.exists():
            (self.output / ASIDE).mkdir(parents=True, exist_ok=True)
            path.replace(self.output / ASIDE / path.name)

    def last_seconds(self) -> float | None:
        """What the latest audit of the earlier part took; a full one only where there is no other."""
        seconds = None
        for path in sorted((self.output / "reports").glob("step-*.json"), reverse=True)[:4]:
            with contextlib.suppress(*UNUSABLE):
                report = load_report(path)
                if report.status == "valid" and not report.is_full:
                    return report.duration_s
                seconds = seconds or report.duration_s
        return seconds

    # -- writing

    def write(
        self, report: AuditReport, decision: Decision | None, *, checkpoint: Path | None, is_new: bool
    ) -> tuple[list[Exception], list[Exception]]:
        """Write one audit everywhere; what fails does not keep the rest from being written.

        Args:
            report: the audit.
            decision: the gate's on this report, where there is a gate.
            checkpoint: folder that the audit was made for.
            is_new: measured just now; figures of a moment ago are not logged to the trackers again.

        Returns:
            Failures that leave a report unwritten, and failures of trackers. A file that could not be written does not stand
            either: an older one would be taken for the newest.
        """
        step = report.subject.global_step or 0
        folders = [self.output, *([checkpoint / BESIDE] if checkpoint is not None else [])]
        unwritten: list[Exception] = []
        lost: list[Exception] = []
        for path in [self.output / "reports" / f"step-{step:08d}.json", *(folder / REPORT for folder in folders)]:
            with _collected(unwritten, path):
                report.save(path)
        for path in [folder / DECISION for folder in folders]:
            with _collected(unwritten, path):
                _save_or_remove(path, decision)
        with _collected(lost):
            self.history.log(report)
        for tracker in self.trackers if is_new else ():
            with _collected(lost):
                tracker.log(report)
        if checkpoint is not None:
            with _collected(lost, self.output / PAGE):
                self.write_page(report, decision)
        return unwritten, lost

    def is_full(self, checkpoint: Path) -> bool:
        """Whether a full report lies beside a checkpoint."""
        try:
            return load_report(checkpoint / BESIDE / REPORT).is_full
        except UNUSABLE:
            return False

    def write_page(self, report: AuditReport, decision: Decision | None) -> None:
        """The page of the latest audit; drawn once."""
        if self._shown is None or self._shown[0] is not report or self._shown[1] is not decision:
            write_text_atomic(self.output / PAGE, render_html(report, decision))
            self._shown = (report, decision)

    def finish(self, report: AuditReport, decision: Decision | None) -> list[Exception]:
        """The page of the last audit, and its table of canaries to the trackers that keep one."""
        lost: list[Exception] = []
        with _collected(lost, self.output / PAGE):
            self.write_page(report, decision)
        for tracker in self.trackers:
            log_table: Callable[[AuditReport], None] | None = getattr(tracker, "log_table", None)
            if log_table is not None:
                with _collected(lost):
                    log_table(report)
        return lost


@contextlib.contextmanager
def _collected(failures: list[Exception], path: Path | None = None) -> Iterator[None]:
    """Keep a failure for later; the file of the block, which it leaves old, is removed."""
    try:
        yield
    except Exception as error:
        failures.append(error)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _save_or_remove(path: Path, decision: Decision | None) -> None:
    """A decision stands only beside the report it was made on."""
    if decision is not None:
        decision.save(path)
    else:
        path.unlink(missing_ok=True)


def _step_of(path: Path) -> int | None:
    try:
        return load_report(path).subject.global_step
    except UNUSABLE:
        return None


def _points(row: dict[str, Any]) -> list[TrendPoint]:
    if row.get("status") != "valid":
        return []
    try:
        return [TrendPoint(**point) for point in row["points"]]
    except (KeyError, TypeError, ValidationError):
        raise InputError(f"'{HISTORY}' holds a line that is no audit of this version. Move the file away.") from None


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
