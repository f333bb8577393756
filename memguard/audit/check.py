"""`memguard check`: the pre-flight on a file of rows, without training. Nothing is written, and no secret is in the result.

Rows are made and packed as a trainer would, and planted into as a run would; a canary that is longer than a row may be is
found before that. Says nothing of a collator or a filter of the user's own: those are checked at the start of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from memguard.audit.config import AuditConfig
from memguard.audit.gradient import gradient_probe
from memguard.audit.planting import (
    WARN_SHARE,
    Planting,
    canary_dataset,
    check_share,
    plan_planting,
    planted_ids,
    resolve_plan,
    sample_rows,
)
from memguard.audit.training_rows import IGNORED_LABEL, Packing, Row, load_training_rows
from memguard.canaries.preflight import CanaryFinding, PlantedIds, Preflight, failure_lines, run_preflight
from memguard.canaries.schedule import Mode
from memguard.documents import SCHEMA_VERSION, Document
from memguard.errors import CanaryError
from memguard.scoring.audit_mode import preserved_rng


class FormatCheck(Document):
    """What became of the canaries of one format. `num_checked` of them went the whole way; the others are like them."""

    format: str
    num_canaries: int
    num_checked: int
    num_reached: int
    num_contaminated: int
    num_unseen: int
    failed_at: dict[str, int]
    tokens_per_canary: float
    token_share: float


class CheckedCanary(Document):
    """How far one canary came."""

    id: str
    format: str
    num_tokens: int
    reached: str | None
    failed: str | None
    reason: str | None
    flags: tuple[str, ...]


class CheckResult(Document):
    """A pre-flight without training; shares are of the tokens of an epoch, 0..1."""

    kind: Literal["memguard pre-flight"] = "memguard pre-flight"
    schema_version: int = SCHEMA_VERSION
    is_plan_drawn: bool
    packing: str
    max_length: int | None
    num_rows: int
    mean_row_tokens: float
    mode: Mode | None
    token_share: float
    max_share: float
    formats: tuple[FormatCheck, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    canaries: tuple[CheckedCanary, ...]

    @property
    def reaches_loss(self) -> bool:
        """Whether training would start, with every canary that was checked in its loss."""
        return not self.failures


def check_plan(
    config: AuditConfig,
    data: Path,
    tokenizer: Any,
    *,
    packing: Packing = "none",
    max_length: int | None = None,
    completion_only: bool = False,
    model: Any | None = None,
) -> CheckResult:
    """Whether every canary of a configuration will reach the loss on a file of rows; shares of tokens, 0..1.

    Args:
        config: the plan at `config.plan` is used where it exists; else one is drawn in memory.
        data: see `load_training_rows`.
        tokenizer: of the run.
        packing: how texts share rows.
        max_length: tokens a row; None: what the model takes, where one is given.
        completion_only: prompts are masked out of the labels.
        model: to prove that gradients reach its parameters; None: that step is left out.

    Raises:
        InputError: unreadable data, or a plan that does not fit the settings or the tokenizer.
        CanaryError: canaries that cannot be drawn, or none that is planted.
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    plan, is_new = resolve_plan(config.plan, config.canaries, tokenizer)
    rows = load_training_rows(data, tokenizer, packing=packing, max_length=max_length, completion_only=completion_only)
    planted = planted_ids(plan, tokenizer)
    if not planted:
        raise CanaryError("the plan must hold at least one canary that is planted, got none: every coin fell on out.")
    limit = _row_limit(rows, [max_length, positions])
    fitting = [one for one in planted if limit is None or len(one.ids) <= limit]
    findings = {
        one.id: CanaryFinding(one.id, one.format, len(one.ids), "stream", failed="tokens", reason="cut") for one in planted
    }
    notes: list[str] = []
    share_failure, planting = None, None
    if fitting:
        names = {one.id for one in fitting}
        part = plan.model_copy(update={"canaries": tuple(one for one in plan.canaries if one.id in names)})
        planting = plan_planting(part, config.canaries, sample_rows(rows), tokenizer, max_positions=limit)
        dataset = canary_dataset(part, planting, rows)
        probe = gradient_probe(model) if model is not None else None
        with preserved_rng(0):
            done = run_preflight(fitting, lambda j: [dataset.example(j)], padding_collator(tokenizer), gradient=probe)
        findings = {key: value for key, value in findings.items() if key not in names} | {one.id: one for one in done.findings}
        notes += done.notes
        try:
            check_share(planting, config.canaries, num_rows=len(rows))
        except CanaryError as error:
            share_failure = str(error)
    if config.canaries.count == "total":
        notes.append("count is 'total': the share of tokens is that of a run of one epoch; a longer run has a smaller one.")
    ordered = Preflight(tuple(findings[one.id] for one in planted if one.id in findings), len(planted), tuple(notes))
    return _result(config, rows, planted, ordered, planting, share_failure, is_new=is_new, packing=packing, limit=limit)


def padding_collator(tokenizer: Any) -> Callable[[list[Any]], dict[str, Any]]:
    """What trainers do by default: pad to the longest row, or lay packed texts end to end with positions that begin anew."""
    pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)

    def collate(rows: list[Row]) -> dict[str, Any]:
        labels = [row.get("labels", row["input_ids"]) for row in rows]
        if "seq_lengths" in rows[0]:
            positions = [at for row in rows for length in row["seq_lengths"] for at in range(length)]
            flat = [label for line in labels for label in line]
            masked = [IGNORED_LABEL if at == 0 else label for at, label in zip(positions, flat, strict=True)]
            ids = [one for row in rows for one in row["input_ids"]]
            return {
                key: torch.tensor([one]) for key, one in (("input_ids", ids), ("labels", masked), ("position_ids", positions))
            }
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            "input_ids": _padded([row["input_ids"] for row in rows], longest, pad),
            "labels": _padded(labels, longest, IGNORED_LABEL),
            "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], longest, 0),
        }

    return collate


def _padded(lines: Sequence[Sequence[int]], length: int, fill: int) -> torch.Tensor:
    return torch.tensor([[*line, *[fill] * (length - len(line))] for line in lines])


def _row_limit(rows: Sequence[Row], limits: list[int | None]) -> int | None:
    """Tokens that a canary may have: the smallest limit stated, and a block where all rows are of one length."""
    lengths = {len(row["input_ids"]) for row in rows}
    block = lengths.pop() if len(lengths) == 1 and "seq_lengths" not in rows[0] else None
    return min((one for one in (*limits, block) if one is not None), default=None)


def _result(
    config: AuditConfig,
    rows: Sequence[Row],
    planted: Sequence[PlantedIds],
    done: Preflight,
    planting: Planting | None,
    share_failure: str | None,
    *,
    is_new: bool,
    packing: Packing,
    limit: int | None,
) -> CheckResult:
    share = planting.share(num_rows=len(rows)) if planting is not None else 0.0
    repeated = (
        dict(zip((one.id for one in planting.canaries), planting.repetitions, strict=True)) if planting is not None else {}
    )
    inserted = planting.tokens if planting is not None else 0
    formats = []
    for name in dict.fromkeys(one.format for one in planted):
        members = [one for one in planted if one.format == name]
        tokens = sum(len(one.ids) * repeated.get(one.id, 0) for one in members)
        own_share = share * tokens / inserted if inserted else 0.0
        formats.append(_format_check(name, members, [one for one in done.findings if one.format == name], own_share))
    notes = list(done.notes)
    if share_failure is None and share > WARN_SHARE:
        notes.append(f"canaries are more than {WARN_SHARE:.1%} of the training tokens, enough to shift what is learnt.")
    return CheckResult(
        is_plan_drawn=is_new,
        packing=packing,
        max_length=limit,
        num_rows=len(rows),
        mean_row_tokens=sum(len(row["input_ids"]) for row in rows) / len(rows),
        mode=planting.mode if planting is not None else None,
        token_share=share,
        max_share=config.canaries.max_share,
        formats=tuple(formats),
        failures=(*failure_lines(done.failures()), *([share_failure] if share_failure is not None else [])),
        notes=tuple(notes),
        canaries=tuple(CheckedCanary.model_validate(dataclasses.asdict(one)) for one in done.findings),
    )


def _format_check(name: str, members: Sequence[PlantedIds], findings: Sequence[CanaryFinding], share: float) -> FormatCheck:
    failed = [one.failed for one in findings if one.failed is not None]
    return FormatCheck(
        format=name,
        num_canaries=len(members),
        num_checked=len(findings),
        num_reached=sum(one.failed is None and one.reached in ("supervised", "gradient") for one in findings),
        num_contaminated=sum("contaminated" in one.flags for one in findings),
        num_unseen=sum("unseen" in one.flags for one in findings),
        failed_at={step: failed.count(step) for step in dict.fromkeys(failed)},
        tokens_per_canary=sum(len(one.ids) for one in members) / len(members),
        token_share=share,
    )
