"""Audits of checkpoints on disk, as `memguard audit` runs them. Weights come from safetensors only; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memguard.audit.config import AuditSettings
from memguard.audit.digest import checkpoint_digest
from memguard.audit.prior import PrefixSource
from memguard.audit.report import AuditReport, Subject
from memguard.audit.runner import AuditRunner, Progress, trend_points
from memguard.canaries.ledger import LEDGER_NAME, Ledger, load_ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError, ScoringError
from memguard.files import read_text


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint folder, offline, without code or pickles from it.

    Raises:
        InputError: not a folder, no safetensors weights, or no tokenizer.
        ScoringError: weights that do not load.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not folder.is_dir():
        raise InputError(f"checkpoint '{folder}' is not a folder.")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"checkpoint '{folder}' holds no safetensors weights; pickled weights are not opened.")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:
        raise InputError(f"checkpoint '{folder}' has no tokenizer that loads ({type(error).__name__}).") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype="auto", **options)
    except Exception as error:
        raise ScoringError(
            f"checkpoint '{folder}' does not load as a causal language model ({type(error).__name__})."
        ) from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_members(path: Path, tokenizer: Any) -> PrefixSource:
    """Training rows from a file, for prior prefixes: JSON lines with `text` or `input_ids`, or one text a line.

    Raises:
        InputError: an unreadable file, a line that is neither, or no line at all.
    """
    rows: list[list[int]] = []
    for number, line in enumerate(read_text(path, what="data").splitlines(), start=1):
        if line.strip():
            rows.append(_member_ids(line, tokenizer, path, number) if path.suffix == ".jsonl" else tokenizer(line)["input_ids"])
    if not rows:
        raise InputError(f"data '{path.name}' holds no row.")
    return PrefixSource(len(rows), rows.__getitem__)


def _member_ids(line: str, tokenizer: Any, path: Path, number: int) -> list[int]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict) and isinstance(row.get("input_ids"), list) and all(isinstance(i, int) for i in row["input_ids"]):
        return list(row["input_ids"])
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return list(tokenizer(row["text"])["input_ids"])
    raise InputError(f"data '{path.name}' line {number} must be an object with 'text' or 'input_ids'.")


def find_ledger(folder: Path, plan: CanaryPlan) -> Ledger | None:
    """The ledger beside a checkpoint, None when there is none.

    Raises:
        InputError: unreadable, or written for another plan.
    """
    path = folder / LEDGER_NAME
    if not path.exists():
        return None
    ledger = load_ledger(path)
    if ledger.plan_digest != plan.digest:
        raise InputError(f"the ledger of '{folder}' was written for another plan: these canaries are not the ones trained on.")
    return ledger


def audit_checkpoints(
    folders: Sequence[Path],
    plan: CanaryPlan,
    settings: AuditSettings,
    *,
    data: Path | None = None,
    progress: Progress | None = None,
) -> list[AuditReport]:
    """One report per checkpoint, in order; each carries the trend of those before it.

    Args:
        folders: checkpoints.
        plan: the canaries.
        settings: the `audit` part of the configuration.
        data: training rows for prior prefixes; None leaves Prior-Aware memorisation *not measured*.
        progress: called with rows done and rows in all, for each checkpoint.
    """
    reports: list[AuditReport] = []
    for folder in folders:
        ledger = find_ledger(folder, plan)
        model, tokenizer = load_checkpoint(folder)
        subject = Subject(
            kind="checkpoint",
            digest=checkpoint_digest(folder),
            global_step=ledger.global_step if ledger is not None else None,
            epoch=None,
        )
        reports.append(
            AuditRunner(plan, tokenizer, settings).run(
                model,
                subject=subject,
                ledger=ledger,
                prior=load_members(data, tokenizer) if data is not None else None,
                trend=[point for report in reports for point in trend_points(report)],
                progress=progress,
            )
        )
    return reports
