"""The parts of a report that say what was measured and how: plan, ledger, procedure, environment, status, trend."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from memguard.audit.config import ExposureSettings
from memguard.audit.items import reference_seed_digest
from memguard.audit.report import (
    AuditReport,
    CanaryRow,
    Environment,
    LedgerSummary,
    PlanSummary,
    Procedure,
    TrendPoint,
)
from memguard.audit.rows import summarise_bits
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.documents import json_digest
from memguard.scoring.scorer import Scorer


def summarise_plan(plan: CanaryPlan) -> PlanSummary:
    """The plan, without its secrets."""
    roles = [canary.role for canary in plan.canaries]
    return PlanSummary(
        digest=plan.digest,
        reproducible=plan.reproducible,
        inclusion=plan.inclusion,
        num_canaries=roles.count("canary"),
        num_controls=roles.count("control"),
        num_positive_controls=roles.count("positive_control"),
        design_digest=_design_digest(plan),
    )


def _design_digest(plan: CanaryPlan) -> str:
    """The same for two plans that differ in their secrets, names and ids alone."""
    formats = [one.model_dump(mode="json", exclude={"carried_share"}) for one in plan.formats]
    planned = Counter((canary.format, canary.role, canary.tier) for canary in plan.canaries)
    return json_digest({"formats": formats, "planned": sorted([*key, number] for key, number in planned.items())})


def summarise_procedure(
    plan: CanaryPlan, exposure: ExposureSettings, scorer: Scorer, *, autocast: str | None, tolerance: float, num_nodes: int
) -> Procedure:
    """How the figures were made."""
    return Procedure(
        references=exposure.references,
        references_per_name=exposure.references_per_name,
        reference_seed=reference_seed_digest(plan),
        dtype=scorer.dtype,
        autocast=autocast,
        tolerance=tolerance,
        exact=exposure.exact,
        node_budget=exposure.node_budget,
        num_nodes=num_nodes,
        head="fused" if scorer.model.is_fused else "own",
        num_parameters=sum(parameter.numel() for parameter in scorer.model.model.parameters()),
    )


def summarise_ledger(ledger: Ledger | None, rows: Sequence[CanaryRow]) -> LedgerSummary:
    """What was planted and what reached the loss."""
    if ledger is None:
        return LedgerSummary(
            found=False,
            exact=False,
            notes=["no ledger: what was trained on is unknown."],
            count=None,
            mode=None,
            plant_once=None,
            num_insertions=0,
            num_seen=None,
            token_share=None,
        )
    return LedgerSummary(
        found=True,
        exact=ledger.exact,
        notes=ledger.notes,
        count=ledger.count,
        mode=ledger.mode,
        plant_once=ledger.plant_once,
        num_insertions=sum(row.num_insertions for row in rows),
        num_seen=sum(row.num_seen or 0 for row in rows),
        token_share=ledger.token_share,
        token_share_is_estimate=ledger.token_share_is_estimate,
    )


def summarise_environment(device: str) -> Environment:
    """Versions and the kind of device."""
    import torch
    import transformers

    import memguard

    return Environment(
        memguard=memguard.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        torch=torch.__version__,
        transformers=transformers.__version__,
        device=device,
    )


def summarise_status(rows: Sequence[CanaryRow], failure: str | None) -> dict[str, Any]:
    """Invalid when a score is not finite: a NaN is never left out of a figure."""
    reasons = [failure] if failure is not None else []
    if any((row.log_prob or 0.0) > 1e-3 for row in rows):
        reasons.append("a log-probability is above 0: the model's logits are not a distribution.")
    return {"status": "invalid" if reasons else "valid", "invalid_reasons": reasons}


def trend_points(report: AuditReport) -> list[TrendPoint]:
    """What later reports of the run keep of this one: exposure by tier, tier 0 for the controls."""
    step = report.subject.global_step
    if step is None or report.status != "valid":
        return []
    points = []
    for tier in sorted({row.tier for row in report.canaries if row.role == "canary"} | {0}):
        role = "control" if tier == 0 else "canary"
        members = [row for row in report.canaries if row.role == role and (tier == 0 or row.tier == tier)]
        if members:
            bits = summarise_bits(members)
            figures = {key: bits[key] for key in ("mean_bits", "low_bits", "high_bits")}
            if report.cadence is not None:
                figures |= {key: getattr(report.cadence, key) for key in ("steps_between", "overhead_share")}
            points.append(TrendPoint(global_step=step, epoch=report.subject.epoch, tier=tier, n=len(members), **figures))
    return points
