"""Audits of checkpoints on disk, as `memguard audit` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memguard.audit.config import AuditSettings, DpSettings
from memguard.audit.digest import base_digest, checkpoint_digest, unchanged
from memguard.audit.full import Sources, load_sources
from memguard.audit.offline import find_ledger, load_checkpoint
from memguard.audit.report import AuditReport, Subject
from memguard.audit.runner import AuditRunner, Progress
from memguard.audit.summaries import trend_points
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError


def audit_checkpoints(
    folders: Sequence[Path],
    plan: CanaryPlan,
    settings: AuditSettings,
    *,
    dp: DpSettings | None = None,
    defence: str | None = None,
    data: Path | None = None,
    held_out: Path | None = None,
    reference: Path | None = None,
    index: Path | None = None,
    start: Path | None = None,
    progress: Progress | None = None,
) -> list[AuditReport]:
    """One full report per checkpoint, in order; each carries the trend of those before it in the same run's folder.

    Args:
        folders: checkpoints, each once.
        plan: the canaries.
        settings: the `audit` part of the configuration.
        dp: the guarantee that the run states, if any.
        defence: what the run did against memorisation, as it declares it.
        data: records of the training data, for prior prefixes, extraction and membership; None: not measured.
        held_out: records of the same kind that were never trained on.
        reference: checkpoint of a model that never saw the members.
        index: of the training corpus, for propensity.
        start: checkpoint that training began from, to show what training added.
        progress: called with rows done and rows in all, for each checkpoint.

    Raises:
        InputError: a checkpoint given twice, a start that was trained on this plan, or a file that cannot be read.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("checkpoints must be given once each, got one of them twice.")
    reports: list[AuditReport] = []
    made: tuple[AuditRunner, Sources] | None = None
    for folder in folders:
        ledger = find_ledger(folder, plan)
        with unchanged(folder):
            model, tokenizer = load_checkpoint(folder)
            digest, base = checkpoint_digest(folder), base_digest(folder)
        if made is None or made[0].digest != tokenizer_digest(tokenizer):  # the plan has one tokenizer: made once
            sources = load_sources(settings, tokenizer, data=data, held_out=held_out, reference=reference, index=index)
            made = AuditRunner(plan, tokenizer, settings, dp=dp, defence=defence), sources
            if start is not None:
                made[0].remember_start(_load_start(start, folders, plan))
        runner, sources = made
        subject = Subject(
            kind="checkpoint",
            digest=digest,
            global_step=ledger.global_step if ledger is not None else None,
            epoch=None,
            base_digest=base,
        )
        earlier = [report for report, other in zip(reports, folders, strict=False) if _same_run(other, folder)]
        reports.append(
            runner.run(
                model,
                subject=subject,
                ledger=ledger,
                full=sources,
                trend=[point for report in earlier for point in trend_points(report)],
                progress=progress,
            )
        )
    return reports


def _same_run(first: Path, second: Path) -> bool:
    return first.resolve().parent == second.resolve().parent


def _load_start(start: Path, folders: Sequence[Path], plan: CanaryPlan) -> Any:
    """The model that training began from: not one that saw the canaries, or what training added would be hidden."""
    if start.resolve() in {folder.resolve() for folder in folders}:
        raise InputError(f"start '{start}' must be the model that training began from, got a checkpoint that is audited.")
    ledger = find_ledger(start, plan)
    if ledger is not None and any(entry.num_seen for entry in ledger.canaries.values()):
        raise InputError(f"start '{start}' must be the model that training began from, got one that was trained on this plan.")
    model, tokenizer = load_checkpoint(start)
    plan.check_tokenizer(tokenizer_digest(tokenizer))
    return model
