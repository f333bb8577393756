"""Audits checkpoints of one plan, one after the other, with references, records and the scores before training loaded once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.audit.completeness import STATE_NAME, step_of_name
from memguard.audit.config import AuditSettings, DpSettings
from memguard.audit.full import Sources, load_sources
from memguard.audit.offline import find_ledger, load_checkpoint
from memguard.audit.report import AuditReport, Subject, TrendPoint
from memguard.audit.runner import AuditRunner, Progress
from memguard.audit.start import load_start
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError
from memguard.files import read_json


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory, of the plan's tokenizer."""

    model: Any
    tokenizer: Any
    ledger: Ledger | None


class CheckpointAuditor:
    """Full audits of one run's checkpoints.

    Args:
        plan: the canaries.
        settings: the `audit` part of the configuration.
        dp: the guarantee that the run states, if any.
        defence: what the run did against memorisation, as it declares it.
        data: records of the training data; None: the settings'.
        held_out: records of the same kind that were never trained on; None: the settings'.
        start: scores before training that the run's callback left (`start.json`); used where they are of this plan.
    """

    def __init__(
        self,
        plan: CanaryPlan,
        settings: AuditSettings,
        *,
        dp: DpSettings | None = None,
        defence: str | None = None,
        data: Path | None = None,
        held_out: Path | None = None,
        start: Path | None = None,
    ) -> None:
        self.plan, self.settings, self.dp, self.defence = plan, settings, dp, defence
        self.data, self.held_out, self.start = data, held_out, start
        self._made: tuple[AuditRunner, Sources] | None = None

    def load(self, folder: Path) -> LoadedCheckpoint:
        """Load a checkpoint; what is raised is about the checkpoint.

        Raises:
            InputError: no weights, no tokenizer or another one, or a ledger of another plan.
            ScoringError: weights that do not load.
        """
        ledger = find_ledger(folder, self.plan)
        model, tokenizer = load_checkpoint(folder)
        self.plan.check_tokenizer(tokenizer_digest(tokenizer))
        return LoadedCheckpoint(model, tokenizer, ledger)

    def prepare(self, tokenizer: Any) -> tuple[AuditRunner, Sources]:
        """References and records, made at the first call; what is raised is about the settings, whatever the checkpoint.

        Raises:
            InputError: a file of records that cannot be read.
        """
        if self._made is None:
            sources = load_sources(self.settings, tokenizer, data=self.data, held_out=self.held_out)
            runner = AuditRunner(self.plan, tokenizer, self.settings, dp=self.dp, defence=self.defence)
            self._made = runner, sources
        return self._made

    def measure(
        self,
        loaded: LoadedCheckpoint,
        *,
        subject: Subject,
        trend: Sequence[TrendPoint] = (),
        progress: Progress | None = None,
    ) -> AuditReport:
        """Audit a loaded checkpoint in full.

        Args:
            loaded: by `load`.
            subject: the checkpoint, with its digest.
            trend: earlier audits of the run.
            progress: called with rows done and rows in all.

        Raises:
            ScoringError: the model could not be scored.
        """
        runner, sources = self.prepare(loaded.tokenizer)
        if runner.start is None and self.start is not None:
            with contextlib.suppress(InputError):  # none there, or of another plan: nothing is calibrated then
                runner.start = load_start(self.start, runner.groups, self.plan)
        return runner.run(loaded.model, subject=subject, ledger=loaded.ledger, full=sources, trend=trend, progress=progress)


def checkpoint_subject(folder: Path, ledger: Ledger | None, *, digest: str | None, base_digest: str | None) -> Subject:
    """A checkpoint as the subject of a report, with its step and epoch as ledger, trainer or name tell them.

    Args:
        folder: the checkpoint.
        ledger: beside it, if any.
        digest: of its files, None when it has none to hash.
        base_digest: of the base of an adapter.
    """
    step, epoch = step_of_name(folder), None
    with contextlib.suppress(InputError, AttributeError):
        state = read_json(folder / STATE_NAME, what="trainer state")
        step = state["global_step"] if isinstance(state.get("global_step"), int) else step
        epoch = float(state["epoch"]) if isinstance(state.get("epoch"), (int, float)) else None
    step = ledger.global_step if ledger is not None else step
    return Subject(kind="checkpoint", digest=digest, global_step=step, epoch=epoch, base_digest=base_digest)
