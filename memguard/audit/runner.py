"""`run_audit`: score canaries, controls and references with a model, and write down what that shows.

The one place that joins plan, scorer and metrics. The model is left exactly as it was found (`audit_mode`).
"""

from __future__ import annotations

import datetime as dt
import math
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memguard.audit.config import AuditConfig, AuditSettings
from memguard.audit.items import Group, build_groups, reference_seed_digest
from memguard.audit.prior import PrefixSource, measure_prior_aware
from memguard.audit.report import (
    AuditReport,
    CanaryRow,
    Environment,
    LedgerSummary,
    PlanSummary,
    PriorAware,
    Procedure,
    Subject,
    TrendPoint,
)
from memguard.audit.rows import (
    GroupScores,
    canary_rows,
    control_tests,
    format_rows,
    positive_control,
    summarise_bits,
    tier_rows,
)
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import EvidenceError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, SpanScores

Progress = Callable[[int, int], None]
NUM_RESCORED = 4  # references scored alone, to learn how far batch shape moves a score


class AuditRunner:
    """Audits many checkpoints of one plan: encodes and draws references once.

    Args:
        plan: the canaries.
        tokenizer: the one the plan was drawn for.
        settings: the `audit` part of the configuration.

    Raises:
        InputError: the plan was made for another tokenizer.
    """

    def __init__(self, plan: CanaryPlan, tokenizer: Any, settings: AuditSettings) -> None:
        self.digest = tokenizer_digest(tokenizer)
        plan.check_tokenizer(self.digest)
        self.plan, self.settings = plan, settings
        self.groups = build_groups(plan, tokenizer, settings.exposure)

    def run(
        self,
        model: Any,
        *,
        subject: Subject | None = None,
        ledger: Ledger | None = None,
        prior: PrefixSource | None = None,
        trend: Sequence[TrendPoint] = (),
        autocast: str | None = None,
        progress: Progress | None = None,
    ) -> AuditReport:
        """Audit one model as it stands.

        Args:
            model: a causal language model, wrapped or not; left as it was found.
            subject: what is measured; a live model when None.
            ledger: counts of the run at this step; None marks sightings unknown.
            prior: training rows for Prior-Aware memorisation; None leaves it *not measured*.
            trend: earlier audits of the same run.
            autocast: the autocast dtype in force, recorded.
            progress: called with rows done and rows in all.

        Returns:
            An `AuditReport`; `status` is *invalid*, with reasons, when its figures are no evidence.

        Raises:
            ScoringError: the model could not be scored.
        """
        began = time.monotonic()
        with audit_mode(model) as inner:
            scorer = Scorer(inner, batch_size=self.settings.batch_size)
            scored, tolerance = self._score(scorer, progress)
            rows = [row for item in scored for row in self._rows(item, ledger, tolerance)]
            annotated = self._prior_aware(scored, rows, scorer, prior) if prior is not None else None
            dtype, device = scorer.dtype, scorer.device.type
        if annotated is not None:
            rows = [row.model_copy(update={"prior_aware": annotated.get(row.id)}) for row in rows]
        formats = format_rows(self.plan, scored)
        controls = control_tests(formats, rows)
        return AuditReport(
            created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            **_status(rows, scored),
            notices=self._notices(),
            subject=subject or Subject(kind="live", digest=None, global_step=None, epoch=None),
            plan=self._plan_summary(),
            tokenizer_digest=self.digest,
            procedure=self._procedure(dtype, autocast, tolerance),
            environment=_environment(device),
            ledger=_ledger_summary(ledger, rows),
            formats=formats,
            canaries=rows,
            tiers=tier_rows(rows),
            controls=controls,
            positive_control=positive_control(rows),
            prior_aware_settings=self._prior_settings() if annotated is not None else None,
            trend=list(trend),
            duration_s=time.monotonic() - began,
        )

    def _score(self, scorer: Scorer, progress: Progress | None) -> tuple[list[GroupScores], float]:
        spans = [span for group in self.groups for span in (*group.canary_spans, *group.reference_spans)]
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(done, len(spans))

        scores = scorer.score(spans, seed=self.plan.placement_seed, progress=advance)
        scored, first = [], 0
        for group in self.groups:
            middle, last = first + len(group.canary_spans), first + len(group.canary_spans) + len(group.reference_spans)
            scored.append(_slice(group, scores, first, middle, last))
            first = last
        return scored, self._tolerance(scorer, scored)

    def _tolerance(self, scorer: Scorer, scored: Sequence[GroupScores]) -> float:
        """Twice the largest move of a reference's score when it is scored alone, a few of each format; nats."""
        moves = [0.0]
        for item in {item.group.format.name: item for item in scored}.values():
            for index, span in enumerate(item.group.reference_spans[:NUM_RESCORED]):
                alone = float(scorer.score([span]).log_probs[0])
                moves.append(abs(alone - float(item.reference_log_probs[index])))
        finite = [move for move in moves if math.isfinite(move)]
        return 2.0 * max(finite) + 1e-9

    def _rows(self, item: GroupScores, ledger: Ledger | None, tolerance: float) -> list[CanaryRow]:
        with_tail = not item.group.format.has_name and not item.group.format.positive_control
        return canary_rows(item, ledger, tolerance=tolerance, with_tail=with_tail)

    def _prior_aware(
        self, scored: Sequence[GroupScores], rows: Sequence[CanaryRow], scorer: Scorer, prior: PrefixSource
    ) -> dict[str, PriorAware] | None:
        settings = self.settings.prior_aware
        if settings is None:
            return None
        if prior.num_rows == 0:
            raise EvidenceError("prior prefixes must come from at least one training row, got none.")
        spans = {
            canary.id: span
            for item in scored
            for canary, span in zip(item.group.canaries, item.group.canary_spans, strict=True)
        }
        found = {}
        for row in rows:
            if row.role != "control" and row.log_prob is not None:
                found[row.id] = measure_prior_aware(
                    spans[row.id],
                    row.log_prob,
                    scorer,
                    prior,
                    settings,
                    lead_ids=self.plan.lead_ids,
                    seed=self.plan.placement_seed,
                )
        return found

    def _prior_settings(self) -> dict[str, float | int | str]:
        settings = self.settings.prior_aware
        assert settings is not None
        return {"m": settings.m, "n": settings.n, "prefixes": settings.prefixes, "estimator": "full"}

    def _notices(self) -> list[str]:
        notices = []
        for one in self.plan.formats:
            if one.join == "merged":
                notices.append(
                    f"format '{one.name}': a token holds letters of the template and of the secret; the span covers it."
                )
            if one.carried_share < 1.0:
                notices.append(
                    f"format '{one.name}': the tokenizer cannot carry every candidate; ranks are taken in at least "
                    f"{one.carried_share:.0%} of the space."
                )
        if self.plan.reproducible:
            notices.append("the plan was drawn from a seed: whoever knows the seed knows the secrets.")
        return notices

    def _plan_summary(self) -> PlanSummary:
        roles = [canary.role for canary in self.plan.canaries]
        return PlanSummary(
            digest=self.plan.digest,
            reproducible=self.plan.reproducible,
            inclusion=self.plan.inclusion,
            num_canaries=roles.count("canary"),
            num_controls=roles.count("control"),
            num_positive_controls=roles.count("positive_control"),
        )

    def _procedure(self, dtype: str, autocast: str | None, tolerance: float) -> Procedure:
        return Procedure(
            references=self.settings.exposure.references,
            references_per_name=self.settings.exposure.references_per_name,
            reference_seed=reference_seed_digest(self.plan),
            dtype=dtype,
            autocast=autocast,
            tolerance=tolerance,
        )


def run_audit(model: Any, tokenizer: Any, *, plan: CanaryPlan, config: AuditConfig, **options: Any) -> AuditReport:
    """Audit one model once; `options` are those of `AuditRunner.run`.

    Args:
        model: a causal language model; left exactly as it was found.
        tokenizer: the fast tokenizer the plan was drawn for.
        plan: the canaries.
        config: settings.

    Returns:
        An `AuditReport` on what was measured; it holds ids and figures, no secret.

    Raises:
        InputError: the plan was made for another tokenizer.
        ScoringError: the model could not be scored.
    """
    return AuditRunner(plan, tokenizer, config.audit).run(model, **options)


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
            points.append(TrendPoint(global_step=step, epoch=report.subject.epoch, tier=tier, n=len(members), **figures))
    return points


def _slice(group: Group, scores: SpanScores, first: int, middle: int, last: int) -> GroupScores:
    return GroupScores(group, scores.log_probs[first:middle], scores.is_greedy[first:middle], scores.log_probs[middle:last])


def _status(rows: Sequence[CanaryRow], scored: Sequence[GroupScores]) -> dict[str, Any]:
    """Invalid when a score is not finite: a NaN is never left out of a figure."""
    reasons = []
    failed = [row.id for row in rows if row.log_prob is None]
    if failed:
        reasons.append(f"{len(failed)} of {len(rows)} canaries and controls have no finite score, first '{failed[0]}'.")
    broken = sum(int((~np.isfinite(item.reference_log_probs)).sum()) for item in scored)
    if broken:
        reasons.append(f"{broken} references have no finite score.")
    if any((row.log_prob or 0.0) > 1e-3 for row in rows):
        reasons.append("a log-probability is above 0: the model's logits are not a distribution.")
    return {"status": "invalid" if reasons else "valid", "invalid_reasons": reasons}


def _ledger_summary(ledger: Ledger | None, rows: Sequence[CanaryRow]) -> LedgerSummary:
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


def _environment(device: str) -> Environment:
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
