"""Framework-neutral half of a callback: decides when to audit, audits, writes down, asks the gate, survives failures.

A framework's callback only translates its events: `at(moment, ...)` after each step and at the named moments, `finish()` at the
end; it obeys `should_stop`. Every rank holds an Auditor and calls it at the same moments, since ranks audit in step; the first
rank decides what depends on time or files, and alone writes. Files: see `run_files.py`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memguard.audit.config import AuditConfig
from memguard.audit.corpus import open_index
from memguard.audit.digest import checkpoint_digest
from memguard.audit.failed import failed_report
from memguard.audit.full import Sources, load_sources
from memguard.audit.prior import PrefixSource
from memguard.audit.report import AuditCadence, AuditReport, Decision, Subject, TrendPoint
from memguard.audit.rows import GroupScores
from memguard.audit.runner import AuditRunner
from memguard.audit.start import load_start, save_start
from memguard.audit.summaries import trend_points
from memguard.callbacks.cadence import Budget, is_due, steps_between
from memguard.callbacks.gating import RunGate
from memguard.callbacks.progress import AuditProgress
from memguard.callbacks.run_files import RunFiles
from memguard.callbacks.saved_weights import saved_weights_match
from memguard.callbacks.together import jointly, on_first, reason_of
from memguard.callbacks.trained_text import TrainedText
from memguard.canaries.ledger import LEDGER_NAME, Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError, MemguardError, ScoringError
from memguard.reporting.trackers import Tracker, flatten_metrics
from memguard.reporting.wandb_tracker import WandbTracker
from memguard.scoring.heads import is_sharded
from memguard.scoring.team import Team

logger = logging.getLogger(__name__)

Event = Literal["start", "step", "evaluate", "save", "end"]
NO_START = "the run resumed without the scores before training: exposure is not calibrated by what training added."
FIRST_STEPS = 5  # the first steps of a run are slow; what a step takes is told after these


class Auditor:
    """Audits one run.

    Args:
        plan: the canaries.
        tokenizer: of the run.
        config: settings.
        output: folder of the run's reports.
        step_metric: the tracker's axis, such as `train/global_step`.
        prior: training rows, for full audits.
        steps_per_epoch: optimiser steps an epoch; None for a stream.
        global_step: steps done already, 0 for a new run; the trend goes on from the files of the earlier part.
        can_veto_push: whether the framework asks before it pushes.
        trained: what the run keeps of the rows it trains on, to be indexed for full audits.

    Attributes:
        last: the latest report, valid or not.
        decision: the gate's on it; None without a gate.
        trend: earlier audits of the run and the latest.
        should_stop: the gate says to stop training; the same on all ranks.

    Raises:
        InputError: a file or setting that cannot be used.
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
        steps_per_epoch: int | None = None,
        global_step: int = 0,
        can_veto_push: bool = False,
        trained: TrainedText | None = None,
    ) -> None:
        self.plan, self.config, self.team = plan, config, Team.current()
        self.interval = steps_between(config.audit.every, steps_per_epoch)
        if config.gate is not None and config.gate.push == "gated" and not can_veto_push:
            raise InputError("gate.push must be always where the trainer does not ask before it pushes, got gated.")
        self._make_runner = functools.partial(AuditRunner, plan, tokenizer, config.audit, dp=config.dp, defence=config.defence)
        self.sources = jointly(
            self.team,
            "sources",
            lambda: load_sources(config.audit, tokenizer, prior=prior, with_index=trained is None),
        )
        self._trained, self._tokenizer = trained, tokenizer
        settings = config.gate
        self.gate = on_first(self.team, "gate", lambda: RunGate(settings) if settings is not None else None)
        with_wandb = config.tracking.wandb == "auto"
        self.files = RunFiles(output, [WandbTracker(step_metric=step_metric)] if with_wandb else [])
        self.trend: list[TrendPoint] = on_first(self.team, "history", lambda: self.files.open(global_step))
        self.budget = Budget(config.audit.max_overhead)
        seconds = on_first(self.team, "seconds", self.files.last_seconds) if global_step > 0 else None
        if seconds is not None:
            self.budget.expect(seconds)
        self.last: AuditReport | None = None
        self.decision: Decision | None = None
        self.should_stop = False
        self._first_step = global_step
        self._is_announced = False
        self._misses_start = global_step > 0 and "start" in config.audit.on

    @functools.cached_property
    def runner(self) -> AuditRunner:
        """Made at the first audit, so that a failure to make it is a failed audit, not a failed run."""
        return self._make_runner()

    @property
    def seconds(self) -> float:
        """Seconds of audits so far."""
        return self.budget.audits

    @property
    def trackers(self) -> list[Tracker]:
        """Where curves go, beside the history."""
        return self.files.trackers

    # -- when

    def at(
        self,
        moment: Event,
        model: Any,
        *,
        step: int,
        epoch: float | None,
        ledger: Ledger | Callable[[], Ledger],
        checkpoint: Path | None = None,
        autocast: str | None = None,
        last: bool = False,
        followed_by: Sequence[Event] = (),
        fresh: bool = False,
    ) -> AuditReport | None:
        """Audit now if settings, cadence and budget ask for it. All ranks call it, with the same arguments.

        Args:
            moment: `step` after every optimiser step; a named moment as it comes, as often as it comes.
            model: as it stands in training; left as it was found.
            step: optimiser steps done.
            epoch: epochs done, with fraction.
            ledger: counts at this step, or what gives them; asked for on all ranks, and only for an audit.
            checkpoint: folder just saved from this model, complete on all ranks, to bind the report to its bytes.
            autocast: autocast dtype in force.
            last: no step follows; a save is then the end too.
            followed_by: moments known to follow at this very step; a `step` leaves the audit to them.
            fresh: the weights are not those of this step's last audit (an earlier checkpoint was put back).

        Returns:
            The report that stands for this step, measured now or a moment ago and perhaps *invalid*; None: none asked for.

        Raises:
            Exception: what made the audit fail, with `audit.on_error: raise` alone.
        """
        wanted = self._wanted(moment, step, last)
        if moment == "step":
            self._announce(step)
            if not is_due(step, self.interval) or any(self._wanted(one, step, last) for one in followed_by):
                return None
        elif not wanted:
            return None
        full = any(one in self.config.audit.full_on for one in wanted)
        if fresh and checkpoint is not None:  # what a checkpoint's report showed is not put in place of by less
            full = on_first(self.team, "earlier report", lambda: self.files.is_full(checkpoint)) or full
        stands = self._standing(step, full=full) if not fresh else None
        if stands is not None and checkpoint is None:
            return stands
        if moment == "step" and not self.team.agreed("due", self.budget.allows_another()):
            return None
        with self.budget.audit(full=full if stands is None else None):
            return self._audit(model, step, epoch, ledger, full=full, checkpoint=checkpoint, autocast=autocast, stands=stands)

    def _wanted(self, moment: Event, step: int, last: bool) -> list[Event]:
        """The named moments of the settings that an event stands for."""
        if moment == "start" and step > 0:  # of a run, not of each of its parts
            return []
        events: list[Event] = ["save", "end"] if moment == "save" and last else [moment]
        return [event for event in events if event in self.config.audit.on]

    def _standing(self, step: int, *, full: bool) -> AuditReport | None:
        """The report of this step, where it measured all that is asked for; one that failed is not tried again."""
        if self.last is None or self.last.subject.global_step != step:
            return None
        return self.last if self.last.is_full or not full or not self.last.canaries else None

    def _announce(self, step: int) -> None:
        """Say once what audits cost, as soon as an audit and some steps were measured."""
        if self._is_announced or step < self._first_step + FIRST_STEPS:
            return
        text = self.budget.describe(self.interval, steps=step - self._first_step)
        if text is not None:
            self._is_announced = True
            self._log(logging.INFO, text)

    # -- one audit

    def _audit(
        self,
        model: Any,
        step: int,
        epoch: float | None,
        ledger: Ledger | Callable[[], Ledger],
        *,
        full: bool,
        checkpoint: Path | None,
        autocast: str | None,
        stands: AuditReport | None,
    ) -> AuditReport:
        began = time.monotonic()
        counts: Ledger | None = None
        subject = Subject(kind="live", digest=None, global_step=step, epoch=epoch)
        failure: Exception | None = None
        decision: Decision | None = None
        try:
            counts = ledger() if callable(ledger) else ledger
            subject = self._subject(model, subject, checkpoint)
            if stands is not None:  # the same weights, measured a moment ago
                report = stands.model_copy(update={"subject": subject})
            else:
                report = self._measure(model, subject, counts, full=full, autocast=autocast)
            report, decision, stop = self._conclude(report, model, step)
        except Exception as error:
            failure, stop = error, None
            report = failed_report(
                self.plan,
                self.config.audit.exposure,
                reason=f"the audit failed: {self._agreed_reason(error)}",
                subject=subject,
                ledger=counts,
                trend=self._earlier(step),
                autocast=autocast,
                is_full=full,
                duration_s=time.monotonic() - began,
            ).model_copy(update={"cadence": self._cadence(step)})
        report, lost = self._write(report, decision, checkpoint, is_new=stands is None)
        self._keep(report, decision, step, stop)
        self._complain(step, [failure] if failure is not None else [], lost)
        return report

    def _subject(self, model: Any, live: Subject, checkpoint: Path | None) -> Subject:
        """A checkpoint only when the saved file holds the very weights that are scored."""
        if checkpoint is None:
            return live
        sharded = is_sharded(model)  # whose state is given by all ranks together

        def look() -> Subject:
            if sharded or not saved_weights_match(checkpoint, model):
                notice = "the saved weights are not those in training (adapter, average, sharded save): audit the checkpoint."
                return live.model_copy(update={"notice": notice})
            try:
                return live.model_copy(update={"kind": "checkpoint", "digest": checkpoint_digest(checkpoint)})
            except InputError:  # such as a link that leads nowhere: the figures stand all the same
                return live.model_copy(update={"notice": "what was saved has no digest: audit the checkpoint to see why."})

        return on_first(self.team, "subject", look)

    def _measure(self, model: Any, subject: Subject, ledger: Ledger, *, full: bool, autocast: str | None) -> AuditReport:
        step = subject.global_step or 0
        runner = jointly(self.team, "runner", lambda: self.runner)
        if self._misses_start and runner.start is None:
            self._recall_start(runner)
        sources, lost = self._with_trained() if full else (None, None)
        with AuditProgress(f"audit at step {step}", is_shown=self.team.rank == 0) as progress:
            report = runner.run(
                model,
                subject=subject,
                ledger=ledger,
                full=sources,
                trend=self._earlier(step),
                autocast=autocast,
                progress=progress,
                team=self.team,
            )
        notices = [NO_START] if self._misses_start else []
        notices += [lost] if lost is not None else []
        if notices:
            report = report.model_copy(update={"notices": [*report.notices, *notices]})
        if step == 0 and runner.start is not None and report.status == "valid":
            self._save_start(runner.start)
        return report

    def _with_trained(self) -> tuple[Sources, str | None]:
        """The data of a full audit with the index of what was trained so far; or without, and why."""
        trained = self._trained
        if trained is None:
            return self.sources, None
        lost = trained.try_build()
        if lost is not None:
            return self.sources, f"what was trained is not indexed: {lost}."
        index = jointly(self.team, "index", lambda: open_index(trained.index, self._tokenizer))
        return replace(self.sources, index=index), None

    def _save_start(self, scored: Sequence[GroupScores]) -> None:
        if self.team.rank == 0:
            try:
                save_start(self.files.start, scored, self.plan)
            except (InputError, OSError) as error:  # costs a resumed run its calibrated exposure, and this one nothing
                self._log(logging.WARNING, f"the scores before training were not written: {reason_of(error)}")

    def _recall_start(self, runner: AuditRunner) -> None:
        """Give the runner the scores before training of the run's earlier part, where its file is still there."""

        def load() -> list[GroupScores] | None:
            try:
                return load_start(self.files.start, runner.groups, self.plan)
            except InputError:
                return None

        found = on_first(self.team, "start scores", load)
        if found is not None:
            runner.start = [replace(one, group=group) for one, group in zip(found, runner.groups, strict=True)]
            self._misses_start = False

    def _conclude(self, report: AuditReport, model: Any, step: int) -> tuple[AuditReport, Decision | None, str | None]:
        """The report with its cadence, the gate's decision on it, and why training should stop; alike on all ranks."""

        def conclude() -> tuple[AuditReport, Decision | None, str | None]:
            whole = report.model_copy(update={"cadence": self._cadence(step)})
            if self.gate is None:
                return whole, None, None
            return whole, self.gate.decide(whole), self.gate.stops(whole)

        found = on_first(self.team, "conclusion", conclude)
        if self.gate is not None and found[1] is not None:
            self.gate.remember(found[1], model)
        return found

    def _cadence(self, step: int) -> AuditCadence:
        return AuditCadence(
            steps_between=self.budget.stretched(self.interval, steps=step - self._first_step),
            overhead_share=self.budget.overhead if step > self._first_step else None,
            max_overhead=self.budget.max_overhead,
            num_waited=self.budget.num_waited,
        )

    def _earlier(self, step: int) -> list[TrendPoint]:
        return [point for point in self.trend if point.global_step != step]

    def _write(
        self, report: AuditReport, decision: Decision | None, checkpoint: Path | None, *, is_new: bool
    ) -> tuple[AuditReport, list[Exception]]:
        """Write an audit; one whose report cannot be written is invalid, and says so if that much can be written."""
        problems: list[Exception] = []
        if self.team.rank == 0:
            unwritten, lost = self.files.write(report, decision, checkpoint=checkpoint, is_new=is_new)
            problems = [*unwritten, *lost]
            if unwritten:
                report = failed_report(
                    self.plan,
                    self.config.audit.exposure,
                    reason=f"the report of this audit could not be written: {reason_of(unwritten[0])}",
                    subject=report.subject,
                    trend=report.trend,
                    is_full=report.is_full,
                ).model_copy(update={"cadence": report.cadence})
                self.files.write(report, None, checkpoint=checkpoint, is_new=False)
        report, reasons = self.team.agreed("written", (report, [reason_of(error) for error in problems]))
        return report, problems or [ScoringError(reason) for reason in reasons]

    def _keep(self, report: AuditReport, decision: Decision | None, step: int, stop: str | None) -> None:
        self.last = report
        self.decision = decision if report.canaries else None
        self.trend = self._earlier(step) + trend_points(report)
        if stop is not None and not self.should_stop:
            self.should_stop = True
            self._log(logging.WARNING, f"training stops after step {step} (gate.stop_when: blocked): {stop}")

    def _complain(self, step: int, failed: Sequence[Exception], lost: Sequence[Exception]) -> None:
        """Warn of what went wrong, or raise it where the settings say so."""
        raises = self.config.audit.on_error == "raise"
        for error in failed:
            then = "" if raises else " and training goes on"
            self._log(logging.WARNING, f"the audit at step {step} failed{then}: {reason_of(error)}")
        for reason in dict.fromkeys(reason_of(error) for error in lost):
            then = "" if raises else " Writing failed and training goes on."
            self._log(logging.WARNING, f"the audit at step {step} was not written everywhere: {reason}{then}")
        for error in (*failed, *lost) if raises else ():
            raise error

    # -- beside the audits

    def save_ledger(self, ledger: Ledger, checkpoint: Path) -> None:
        """Write the ledger into a checkpoint, on the first rank; all call it. A full disk ends the run only if told to."""
        try:
            on_first(self.team, "ledger", lambda: ledger.save(checkpoint / LEDGER_NAME))
        except Exception as error:
            if self.config.audit.on_error == "raise":
                raise
            self._log(logging.WARNING, f"the ledger at step {ledger.global_step} was not written: {reason_of(error)}")

    def figures(self) -> dict[str, float]:
        """The last audit's figures as evaluation metrics, `eval_memguard_exposure_max` and the like; alike on all ranks."""
        if self.last is None:
            return {}
        return {f"eval_{name.replace('/', '_')}": value for name, value in flatten_metrics(self.last).items()}

    def finish(self, *, seconds_outside: float | None = None) -> None:
        """The page of the last report, the table of canaries to the trackers, and one line on what it all took.

        Args:
            seconds_outside: that the callback spent beside audits; None when it was not measured.
        """
        try:
            lost = self._trained.try_build() if self._trained is not None else None
        except MemguardError as gone:  # the ranks cannot be reached any more
            lost = reason_of(gone).rstrip(".")
        if lost is not None:
            self._log(logging.WARNING, f"what was trained is not indexed: {lost}.")
        if self.team.rank == 0 and self.last is not None:
            for error in self.files.finish(self.last, self.decision):
                self._log(logging.WARNING, f"writing the last page failed: {reason_of(error)}")
        training = self.budget.training_seconds
        if training > 0:
            text = f"audits took {self.budget.audits / training:.1%} of the training time"
            beside = f", the callback itself {seconds_outside / training:.1%}" if seconds_outside is not None else ""
            self._log(logging.INFO, f"{text}{beside}.")

    def _agreed_reason(self, error: Exception) -> str:
        try:
            return self.team.agreed("failure", reason_of(error))
        except MemguardError:  # the ranks cannot be reached any more
            return reason_of(error)

    def _log(self, level: int, text: str) -> None:
        if self.team.rank == 0:
            logger.log(level, text)
