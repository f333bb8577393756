"""The report of an audit that failed: no figures, and the reason. It stands where the last good report would go stale."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from memguard.audit.config import ExposureSettings
from memguard.audit.items import reference_seed_digest
from memguard.audit.report import AuditReport, PositiveControl, Procedure, Subject, TrendPoint
from memguard.audit.summaries import summarise_environment, summarise_ledger, summarise_plan
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan


def failed_report(
    plan: CanaryPlan,
    exposure: ExposureSettings,
    *,
    reason: str,
    subject: Subject,
    ledger: Ledger | None = None,
    trend: Sequence[TrendPoint] = (),
    autocast: str | None = None,
    is_full: bool = False,
    duration_s: float = 0.0,
) -> AuditReport:
    """An *invalid* report that holds no row and no figure; a gate answers exit code 3.

    Args:
        plan: the canaries.
        exposure: settings of the audit that failed.
        reason: one sentence; it is shown, so it must hold no text of a secret.
        subject: what was to be measured.
        ledger: counts of the run at this step, None when unknown.
        trend: earlier audits of the run.
        autocast: autocast dtype in force.
        is_full: whether a full audit was asked for.
        duration_s: seconds until it failed.

    Returns:
        The report; nothing was scored, so dtype and device are *unknown*.
    """
    counts = summarise_ledger(ledger, [])
    if ledger is not None:
        seen = sum(entry.num_seen for entry in ledger.canaries.values())
        planned = sum(entry.num_insertions for entry in ledger.canaries.values())
        counts = counts.model_copy(update={"num_insertions": planned, "num_seen": seen})
    return AuditReport(
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        status="invalid",
        invalid_reasons=[reason],
        notices=[],
        subject=subject,
        plan=summarise_plan(plan),
        tokenizer_digest=plan.tokenizer_digest,
        procedure=Procedure(
            references=exposure.references,
            references_per_name=exposure.references_per_name,
            reference_seed=reference_seed_digest(plan),
            dtype="unknown",
            autocast=autocast,
            tolerance=0.0,
            exact=exposure.exact,
            node_budget=exposure.node_budget,
        ),
        environment=summarise_environment("unknown"),
        ledger=counts,
        formats=[],
        canaries=[],
        tiers=[],
        controls=[],
        positive_control=PositiveControl(kind="none", n=0, mean_num_seen=None, best_p_value=None, detected=False),
        is_full=is_full,
        trend=list(trend),
        duration_s=duration_s,
    )
