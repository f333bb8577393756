"""`memguard watch`: audits every checkpoint of a run once, in full, as soon as it is complete. Any number may watch one run.

What was done is in the files alone: the report beside a checkpoint says that it was audited, so a watcher that was killed is
started again and goes on. Locks of the operating system keep two watchers off one checkpoint and vanish with their holder.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from memguard.audit.completeness import BESIDE, Files, Looks, checkpoint_folders, files_of, step_metric_of, step_of_name
from memguard.audit.digest import base_digest, checkpoint_digest
from memguard.audit.failed import failed_report
from memguard.audit.offline import find_ledger
from memguard.audit.one_checkpoint import CheckpointAuditor, checkpoint_subject
from memguard.audit.report import AuditReport, Subject, TrendPoint
from memguard.audit.runner import Progress
from memguard.audit.standing import REPORT, holds_report, place_report, standing_report
from memguard.canaries.ledger import Ledger
from memguard.documents import Document
from memguard.errors import InputError, MemguardError
from memguard.files import write_text_atomic
from memguard.reporting.jsonl_tracker import JsonlTracker, read_history
from memguard.scoring.failures import is_out_of_memory

logger = logging.getLogger(__name__)

Outcome = Literal["valid", "invalid", "incomplete", "elsewhere", "deleted"]
HISTORY = "history.jsonl"
TRIED_AGAIN = "Memory ran out, so a watcher that is started anew tries it again."


class WatchedCheckpoint(Document):
    """What became of one checkpoint."""

    checkpoint: str = Field(description="name of the folder")
    outcome: Outcome = Field(
        description="invalid: no evidence, or it could not be audited; elsewhere: another watcher has it in hand"
    )
    reason: str | None = Field(default=None, description="why it is not valid, a sentence")
    global_step: int | None = Field(default=None, description="optimiser steps done, None: unknown")
    digest: str | None = Field(default=None, description="sha256 of its manifest, None: not looked at, or no weights")
    report: str | None = Field(default=None, description="its report, from the run's folder")
    is_new: bool = Field(default=False, description="audited by this watcher")


class WatchResult(Document):
    """What became of all checkpoints of a run that were looked at."""

    kind: Literal["memguard watch result"] = "memguard watch result"
    checkpoints: list[WatchedCheckpoint] = Field(description="by step, then name")
    unlogged: str | None = Field(default=None, description="why audits are not in the W&B run yet, a sentence; None: all are")
    is_unlogged_by_failure: bool = Field(default=False, description="the W&B run could not be reached or opened")


class Stop(Protocol):
    """Told from outside to stop; `threading.Event` is one."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait so many seconds at most, and tell whether to stop."""
        ...


class RunLogger(Protocol):
    """Where the audits of a run are logged, beside its history."""

    def log(self, reports: Sequence[AuditReport], *, step_metric: str) -> str | None:
        """Log what is not logged yet, on the trainer's step axis, and tell why the rest waits, a sentence."""
        ...


@dataclass(frozen=True)
class _Known:
    """The files that an outcome is about, the reports beside them, and the report that stands."""

    files: Files
    beside: Files
    watched: WatchedCheckpoint
    report: AuditReport | None


class Watcher:
    """Watches the folder that a trainer saves in.

    Args:
        run: the folder; checkpoints are right in it.
        auditor: makes the audits.
        output: folder of the run's history, by default `memguard_audit` in the run's.
        run_logger: where audits are logged beside the history.
        interval: seconds between looks.
        say: told of every outcome once, with the report that stands.
        progress: shows how far an audit is while it is entered.

    Raises:
        InputError: no such folder, or a history in it that is not ours.
    """

    def __init__(
        self,
        run: Path,
        auditor: CheckpointAuditor,
        *,
        output: Path | None = None,
        run_logger: RunLogger | None = None,
        interval: float = 30.0,
        say: Callable[[WatchedCheckpoint, AuditReport | None], None] | None = None,
        progress: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
    ) -> None:
        if not run.is_dir():
            raise InputError(f"run '{run}' must be a folder that a trainer saves in, got none.")
        self.run, self.auditor, self.interval = run, auditor, interval
        self.history = JsonlTracker((output or run / BESIDE) / HISTORY)
        self._run_logger, self._say, self._progress = run_logger, say, progress
        self._looks, self._known, self._tried = Looks(), dict[Path, _Known](), set[Path]()
        self._unlogged: tuple[str | None, bool] = None, False
        self._points()

    def watch(self, stop: Stop, *, once: bool = False) -> WatchResult:
        """Audit checkpoints until told to stop; the audit in hand is ended first.

        Args:
            stop: when to stop.
            once: look at what is there now, a second time where a first look cannot tell whether it is complete, and wait for
                other watchers that have some of it in hand.

        Raises:
            InputError: a file of records that cannot be read.
            OSError: the disk is full, or fails.
        """
        folders = checkpoint_folders(self.run)
        unsettled = {"elsewhere", "incomplete"}
        while not stop.is_set():
            for folder in folders:
                if not stop.is_set():
                    self._keep(folder, self._look(folder))
            self._log_history()
            if not once:  # else when all is done: each time, the W&B run is opened and ended
                self._log_run()
            if once and not unsettled & {known.watched.outcome for known in self._known.values()}:
                break
            if stop.wait(self.interval):
                break
            unsettled = {"elsewhere"}
            folders = folders if once else checkpoint_folders(self.run)
        self._log_run()
        sentence, failed = self._unlogged
        known = [self._known[folder].watched for folder in sorted(self._known, key=self._place)]
        return WatchResult(checkpoints=known, unlogged=sentence, is_unlogged_by_failure=failed)

    # -- one checkpoint

    def _look(self, folder: Path) -> _Known:
        """The outcome of a checkpoint as it lies there now, audited if need be."""
        files, beside = files_of(folder), files_of(folder / BESIDE)
        known = self._known.get(folder)
        if known is not None and known.report is not None and (known.files, known.beside) == (files, beside):
            return known
        if not files:
            return self._end(folder, "deleted", "it was deleted")
        missing = self._looks.missing(folder, files)
        if missing is not None:
            return self._end(folder, "incomplete", f"it is not complete: {missing}")
        try:
            with self._lock(f"locks/{folder.name}", timeout=0):
                return self._settle(folder, files)
        except Timeout:
            return self._end(folder, "elsewhere", "another watcher audits it")

    def _settle(self, folder: Path, files: Files) -> _Known:
        """Audit a complete checkpoint, or take the report that stands; with its lock held."""
        plan = self.auditor.plan
        ledger, subject, failure = self._examine(folder)
        if subject.digest is None and holds_report(folder, plan) and not any(name.endswith(".safetensors") for name in files):
            return self._end(folder, "deleted", "its weights were deleted; the report stands")
        standing, is_new = standing_report(folder, subject, plan), False
        if standing is None or self._may_go_better(folder, standing[1]):
            report = self._overwritten(folder, files)
            if report is None:
                report, is_new = self._audit(folder, subject, ledger, failure), True
            if files_of(folder) != files:
                return self._gone_or_changed(folder)
            path = place_report(folder, report, plan)
            if path is None:
                return self._end(folder, "deleted", "it was deleted while it was audited")
            standing = path, report
        return self._end(folder, standing[1].status, None, standing=standing, files=files, is_new=is_new)

    def _may_go_better(self, folder: Path, report: AuditReport) -> bool:
        """Whether what failed by another watcher, now or before, was the machine and not the checkpoint."""
        return folder not in self._tried and any(reason.endswith(TRIED_AGAIN) for reason in report.invalid_reasons)

    def _overwritten(self, folder: Path, files: Files) -> AuditReport | None:
        """A valid report of these files that the trainer's callback wrote its lesser one over, having begun before."""
        known = self._known.get(folder)
        if known is None or known.report is None or known.files != files or known.report.status != "valid":
            return None
        return known.report if (folder / BESIDE / REPORT).exists() else None

    def _examine(self, folder: Path) -> tuple[Ledger | None, Subject, str | None]:
        """Ledger and subject of a checkpoint, and why it cannot be audited where a part of them cannot be had."""
        digest, base, ledger, failure = None, None, None, None
        try:
            digest, base = checkpoint_digest(folder), base_digest(folder)
            ledger = find_ledger(folder, self.auditor.plan)
        except (MemguardError, OSError) as error:
            failure = _reason(error, folder)
        return ledger, checkpoint_subject(folder, ledger, digest=digest, base_digest=base), failure

    def _audit(self, folder: Path, subject: Subject, ledger: Ledger | None, failure: str | None) -> AuditReport:
        """A full audit, or the report of its failure: a checkpoint that is bad keeps no other from being audited."""
        began = time.monotonic()
        self._tried.add(folder)
        trend = [point for point in self._points() if subject.global_step is None or point.global_step < subject.global_step]
        if failure is None:
            logger.info("%s is being audited.", folder.name)
            try:
                loaded = self.auditor.load(folder)
            except Exception as error:
                failure = _reason(error, folder)
            else:
                self.auditor.prepare(loaded.tokenizer)  # what is wrong here is wrong for every checkpoint, and ends the watch
                try:
                    with self._progress() as progress:
                        return self.auditor.measure(loaded, subject=subject, trend=trend, progress=progress)
                except Exception as error:
                    failure = _reason(error, folder)
        return failed_report(
            self.auditor.plan,
            self.auditor.settings.exposure,
            reason=f"the checkpoint could not be audited: {failure}",
            subject=subject,
            ledger=ledger,
            trend=trend,
            is_full=True,
            duration_s=time.monotonic() - began,
        )

    def _gone_or_changed(self, folder: Path) -> _Known:
        if files_of(folder):
            return self._end(folder, "incomplete", "it was changed while it was audited, and is audited again")
        return self._end(folder, "deleted", "it was deleted while it was audited")

    def _end(
        self,
        folder: Path,
        outcome: Outcome,
        reason: str | None,
        *,
        standing: tuple[Path, AuditReport] | None = None,
        files: Files | None = None,
        is_new: bool = False,
    ) -> _Known:
        """An outcome; with a report it stands until the files change."""
        path, report = standing if standing is not None else (None, None)
        if report is not None and report.invalid_reasons:
            reason = " ".join(report.invalid_reasons)
        watched = WatchedCheckpoint(
            checkpoint=folder.name,
            outcome=outcome,
            reason=reason,
            global_step=report.subject.global_step if report is not None else step_of_name(folder),
            digest=report.subject.digest if report is not None else None,
            report=path.relative_to(self.run).as_posix() if path is not None else None,
            is_new=is_new,
        )
        return _Known(files or {}, files_of(folder / BESIDE), watched, report)

    # -- what is written

    def _keep(self, folder: Path, found: _Known) -> None:
        """Remember an outcome, and tell of it where it is another; an audited checkpoint that was deleted stays audited."""
        before = self._known.get(folder)
        if before is not None and before.report is not None and found.watched.outcome == "deleted":
            return
        self._known[folder] = found
        if before is None or _told(before.watched) != _told(found.watched):
            if found.report is not None:
                self._log_history()
            if self._say is not None:
                self._say(found.watched, found.report)

    def _shown(self) -> list[AuditReport]:
        """The reports that stand where a reader looks for them, and not as a failure beside a better one."""
        known = [one for one in self._known.values() if (one.watched.report or "").endswith(f"/{REPORT}")]
        return [one.report for one in known if one.report is not None]

    def _log_history(self) -> None:
        """Give every report that stands its line of the history, in order of step.

        A line may be missing: a watcher was killed before it wrote it, or the trainer rewrote the file at the same moment.
        """
        with self._lock("history"):
            rows = read_history(self.history.path) if self.history.path.exists() else []
            listed = {(row.get("digest"), row.get("created_at")) for row in rows}
            for report in self._shown():
                if (report.subject.digest, report.created_at) not in listed:
                    self.history.log(report)
            self._sort_history()

    def _log_run(self) -> None:
        if self._run_logger is None:
            return
        own = [report for report in self._shown() if report.cadence is None]  # the callback logged its own
        try:
            with self._lock("run-log"):
                self._unlogged = self._run_logger.log(own, step_metric=step_metric_of(self.run)), False
        except MemguardError as error:
            self._unlogged = str(error), True

    def _sort_history(self) -> None:
        rows = read_history(self.history.path) if self.history.path.exists() else []
        ordered = sorted(rows, key=lambda row: (row.get("global_step") is None, row.get("global_step") or 0))
        if ordered != rows:
            write_text_atomic(self.history.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in ordered))

    def _points(self) -> list[TrendPoint]:
        """The trend of the run so far; a checkpoint's figures before those of the live model at its step."""
        rows = read_history(self.history.path) if self.history.path.exists() else []
        try:
            points = [
                TrendPoint(**point)
                for row in sorted(rows, key=lambda row: row.get("kind") == "checkpoint")
                if row.get("status") == "valid"
                for point in row["points"]
            ]
        except (KeyError, TypeError, ValidationError):
            raise InputError(f"'{HISTORY}' holds a line that is no audit of this version. Move the file away.") from None
        latest = {(point.global_step, point.tier): point for point in points}
        return [latest[key] for key in sorted(latest)]

    @contextmanager
    def _lock(self, name: str, *, timeout: float = -1) -> Iterator[None]:
        """A lock beside the checkpoints, not in one: taking it must not make a deleted folder anew."""
        path = self.run / BESIDE / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path, timeout=timeout):
            yield

    def _place(self, folder: Path) -> tuple[bool, int, str]:
        step = self._known[folder].watched.global_step
        return step is None, step or 0, folder.name


def _told(watched: WatchedCheckpoint) -> tuple[object, ...]:
    return watched.outcome, watched.digest, watched.reason if watched.outcome != "incomplete" else None


def _reason(error: Exception, folder: Path) -> str:
    """One sentence for a report, which names no path; what other libraries say may hold a text, and is left out."""
    if isinstance(error, MemguardError):
        reason = str(error).replace(str(folder), folder.name)
    elif isinstance(error, OSError):
        reason = f"it cannot be read: {error.strerror}."
    else:
        cure = "." if _ran_out_of_memory(error) else "; delete this report to have it tried again."
        reason = f"it failed ({type(error).__name__}){cure}"
    return f"{reason} {TRIED_AGAIN}" if _ran_out_of_memory(error) else reason


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, in an error or in what it was raised from."""
    return error is not None and (is_out_of_memory(error) or _ran_out_of_memory(error.__cause__ or error.__context__))
