"""Audits of checkpoints on disk, as `memguard audit` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memguard.audit.config import AuditSettings, DpSettings
from memguard.audit.digest import checkpoint_digest
from memguard.audit.full import load_sources
from memguard.audit.offline import find_ledger, load_checkpoint
from memguard.audit.report import AuditReport, Subject
from memguard.audit.runner import AuditRunner, Progress
from memguard.audit.summaries import trend_points
from memguard.canaries.plan import CanaryPlan


def audit_checkpoints(
    folders: Sequence[Path],
    plan: CanaryPlan,
    settings: AuditSettings,
    *,
    dp: DpSettings | None = None,
    data: Path | None = None,
    held_out: Path | None = None,
    reference: Path | None = None,
    start: Path | None = None,
    progress: Progress | None = None,
) -> list[AuditReport]:
    """One full report per checkpoint, in order; each carries the trend of those before it.

    Args:
        folders: checkpoints.
        plan: the canaries.
        settings: the `audit` part of the configuration.
        dp: the guarantee that the run states, if any.
        data: records of the training data, for prior prefixes, extraction and membership; None: not measured.
        held_out: records of the same kind that were never trained on.
        reference: checkpoint of a model that never saw the members.
        start: checkpoint that training began from, to show what training added.
        progress: called with rows done and rows in all, for each checkpoint.
    """
    reports: list[AuditReport] = []
    for folder in folders:
        ledger = find_ledger(folder, plan)
        model, tokenizer = load_checkpoint(folder)
        runner = AuditRunner(plan, tokenizer, settings, dp=dp)
        if start is not None:
            runner.remember_start(load_checkpoint(start)[0])
        subject = Subject(
            kind="checkpoint",
            digest=checkpoint_digest(folder),
            global_step=ledger.global_step if ledger is not None else None,
            epoch=None,
        )
        reports.append(
            runner.run(
                model,
                subject=subject,
                ledger=ledger,
                full=load_sources(settings, tokenizer, data=data, held_out=held_out, reference=reference),
                trend=[point for report in reports for point in trend_points(report)],
                progress=progress,
            )
        )
    return reports
