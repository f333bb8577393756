"""Framework-neutral half of a callback: run an audit, write it down, hand it to the trackers, survive its failure.

Files under the output folder: `history.jsonl` (a line per audit), `report.json` and `report.html` (the latest), and
`reports/step-N.json` (every one). Beside a checkpoint: `memguard_audit/report.json`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memguard.audit.config import AuditConfig
from memguard.audit.digest import checkpoint_digest
from memguard.audit.full import load_sources
from memguard.audit.prior import PrefixSource
from memguard.audit.report import AuditReport, Subject, TrendPoint
from memguard.audit.runner import AuditRunner
from memguard.audit.summaries import trend_points
from memguard.callbacks.saved_weights import saved_weights_match
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import MemguardError
from memguard.files import write_text_atomic
from memguard.reporting.html import render_html
from memguard.reporting.jsonl_tracker import JsonlTracker
from memguard.reporting.trackers import Tracker
from memguard.reporting.wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)


class Auditor:
    """Audits one run.

    Args:
        plan: the canaries.
        tokenizer: of the run.
        config: settings.
        output: folder of the run's reports.
        step_metric: the tracker's axis, such as `train/global_step`.
        prior: training rows, for full audits.

    Raises:
        InputError: a file of records that cannot be read.
    """

    def __init__(
        self,
        plan: CanaryPlan,
        tokenizer: Any,
        config: AuditConfig,
        *,
        output: Path,
        step_metric: str,
        prior: PrefixSource | None = None,
    ) -> None:
        self.config, self.output = config, output
        self._make_runner = functools.partial(AuditRunner, plan, tokenizer, config.audit, dp=config.dp)
        self.sources = load_sources(config.audit, tokenizer, prior=prior)
        self.trackers: list[Tracker] = [JsonlTracker(output / "history.jsonl")]
        if config.tracking.wandb == "auto":
            self.trackers.append(WandbTracker(step_metric=step_metric))
        self.trend: list[TrendPoint] = []
        self.last: AuditReport | None = None
        self.seconds = 0.0

    @functools.cached_property
    def runner(self) -> AuditRunner:
        """Made at the first audit, so that a failure to make it is a failed audit, not a failed run."""
        return self._make_runner()

    def audit(
        self,
        model: Any,
        *,
        step: int,
        epoch: float | None,
        ledger: Ledger,
        full: bool = False,
        checkpoint: Path | None = None,
        autocast: str | None = None,
        fresh: bool = False,
    ) -> AuditReport | None:
        """Measure, write and log; None when the audit failed and the settings say to go on.

        Args:
            model: as it stands in training; left as it was found.
            step: optimiser steps done.
            epoch: fraction of epochs done.
            ledger: counts at this step.
            full: measure all there is data for, not exposure alone.
            checkpoint: folder just saved from this model, to bind the report to its bytes.
            autocast: autocast dtype in force.
            fresh: measure again though this step was measured (the weights may have been put back to an earlier step's).
        """
        with self._guarded(f"the audit at step {step}"):
            subject = self._subject(model, step, epoch, checkpoint)
            again = self.last if self.last is not None and self.last.subject.global_step == step and not fresh else None
            if again is not None and (again.is_full or not full):
                report = again.model_copy(update={"subject": subject})  # the same weights, measured a moment ago
            else:
                earlier = [point for point in self.trend if point.global_step != step]
                report = self.runner.run(
                    model,
                    subject=subject,
                    ledger=ledger,
                    full=self.sources if full else None,
                    trend=earlier,
                    autocast=autocast,
                )
                self.trend = earlier + trend_points(report)
            self._write(report, step, checkpoint)
            self.last = report
            return report
        return None

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Count the time, and let a failure be a warning unless the settings say to raise."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            if self.config.audit.on_error == "raise":
                raise
            # A foreign message could quote what it was given; ours never holds a secret.
            reason = str(error) if isinstance(error, MemguardError) else type(error).__name__
            logger.warning("%s failed and training goes on: %s", what, reason)
        finally:
            self.seconds += time.monotonic() - began

    def _subject(self, model: Any, step: int, epoch: float | None, checkpoint: Path | None) -> Subject:
        """A checkpoint only when the saved file holds the very weights that are scored."""
        if checkpoint is None:
            return Subject(kind="live", digest=None, global_step=step, epoch=epoch)
        if not saved_weights_match(checkpoint, model):
            notice = "the saved weights are not those in training (adapter, average, sharded save): audit the checkpoint."
            return Subject(kind="live", digest=None, global_step=step, epoch=epoch, notice=notice)
        return Subject(kind="checkpoint", digest=checkpoint_digest(checkpoint), global_step=step, epoch=epoch)

    def _write(self, report: AuditReport, step: int, checkpoint: Path | None) -> None:
        report.save(self.output / "reports" / f"step-{step:08d}.json")
        report.save(self.output / "report.json")
        if checkpoint is not None:
            report.save(checkpoint / "memguard_audit" / "report.json")
            write_text_atomic(self.output / "report.html", render_html(report))
        for tracker in self.trackers:
            tracker.log(report)

    def finish(self) -> None:
        """The page of the last report, and the table of canaries to the trackers that keep one."""
        if self.last is None:
            return
        with self._guarded("the last page"):
            write_text_atomic(self.output / "report.html", render_html(self.last))
            for tracker in self.trackers:
                log_table = getattr(tracker, "log_table", None)
                if log_table is not None:
                    log_table(self.last)
