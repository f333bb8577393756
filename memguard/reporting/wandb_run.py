"""Audits made beside a training run, logged to its Weights & Biases run once it has ended.

W&B keeps one writer's rows by their number: a second process that joins a run in progress overwrites rows of the first, in
shared mode too (wandb issues 10349 and 12269). Audits made meanwhile therefore wait; `history.jsonl` has them at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from memguard.audit.report import AuditReport
from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.errors import InputError, MissingExtraError, RegistryError
from memguard.files import write_text_atomic
from memguard.reporting.wandb_tracker import WandbTracker


class LoggedAudits(Document):
    """Which audits are in which run; kept so that none is logged twice, whoever logs."""

    kind: str = "memguard logged audits"
    schema_version: int = SCHEMA_VERSION
    runs: dict[str, list[str]] = Field(description="by run, the time and subject digest of each audit in it")


class WandbRunLog:
    """Logs audits to a W&B run that has ended, each once.

    Args:
        path: `ENTITY/PROJECT/ID` of the run, or `PROJECT/ID` of the default entity; the last folder name under `wandb/` ends
            with the id.
        state: file that lists what is logged.

    Raises:
        InputError: another form, or W&B is switched off.
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, path: str, state: Path) -> None:
        parts = path.split("/")
        if len(parts) not in (2, 3) or not all(part.strip() for part in parts):
            raise InputError("the W&B run must be ENTITY/PROJECT/ID or PROJECT/ID, got another form.")
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError:
            raise MissingExtraError("logging to W&B", "wandb") from None
        self._mode = self._wandb.setup().settings.mode
        if self._mode == "disabled":
            raise InputError("W&B must not be switched off (WANDB_MODE) where a run to log to is given, got disabled.")
        self.path, self.state = path, state
        self._place: dict[str, Any] = dict(zip(("id", "project", "entity"), reversed(parts), strict=False))

    def log(self, reports: Sequence[AuditReport], *, step_metric: str) -> str | None:
        """Log the audits that are not in the run yet; where the run goes on, tell how many wait for its end.

        Args:
            reports: audits, in any order.
            step_metric: step axis of the run's trainer.

        Raises:
            RegistryError: the run cannot be reached or opened.
        """
        runs = load_document(self.state, LoggedAudits, what="list of logged audits").runs if self.state.exists() else {}
        logged = runs.get(self.path, [])
        new = [report for report in reports if _key(report) not in logged]
        if not new:
            return None
        try:
            ended = self._ended()
            if ended is None:
                return (
                    f"{len(new)} audits wait for the W&B run to end, since a second writer would overwrite its curves: run "
                    "`memguard watch --once` with the same options then."
                )
            for report in self._written(sorted(new, key=lambda one: one.subject.global_step or 0), step_metric, ended):
                logged = [*logged, _key(report)]  # at once: a failure later on must not have it written twice
                document = LoggedAudits(runs=runs | {self.path: logged})
                write_text_atomic(self.state, document.model_dump_json(indent=1) + "\n")
        except Exception as error:
            raise RegistryError(f"the W&B run '{self.path}' cannot be logged to ({type(error).__name__}).") from None
        return None

    def _ended(self) -> int | None:
        """The exit code that keeps the run's state as it ended, None while it goes on. An offline run is a file of its own."""
        if self._mode == "offline":
            return 0
        state = self._wandb.Api().run(self.path).state
        return None if state in ("running", "pending") else int(state != "finished")

    def _written(self, reports: Sequence[AuditReport], step_metric: str, exit_code: int) -> Iterator[AuditReport]:
        """Each report once its row is in the run."""
        settings = self._wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True)
        run = self._wandb.init(**self._place, resume="allow" if self._mode == "offline" else "must", settings=settings)
        try:
            tracker = WandbTracker(step_metric)
            for report in reports:
                tracker.log(report)
                yield report
        finally:
            run.finish(exit_code=exit_code)


def _key(report: AuditReport) -> str:
    return f"{report.created_at} {report.subject.digest}"
