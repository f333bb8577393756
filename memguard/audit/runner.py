"""`run_audit`: score canaries, controls and references with a model, and write down what that shows.

The one place that joins plan, scorer and metrics. The model is left exactly as it was found (`audit_mode`).
"""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memguard.audit.config import AuditConfig, AuditSettings
from memguard.audit.items import Group, build_groups, reference_seed_digest
from memguard.audit.prior import PrefixSource, PriorMeasurement
from memguard.audit.ranks import RankSearch
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
from memguard.audit.tolerance import measure_tolerance
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import NonFiniteScoreError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, SpanScores

Progress = Callable[[int, int], None]


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
        self.ranks = RankSearch(plan, tokenizer, settings.exposure)

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
            scored, tolerance, failure = self._measure(scorer, progress)
            rows = [row for item in scored for row in self._rows(item, ledger, tolerance)]
            annotated = None
            if prior is not None:
                try:
                    annotated = self._prior_aware(scored, rows, scorer, prior, tolerance)
                except NonFiniteScoreError as error:
                    failure = failure or str(error)
        if annotated is not None:
            rows = [row.model_copy(update={"prior_aware": annotated.get(row.id)}) for row in rows]
        formats = format_rows(self.plan, scored)
        controls = control_tests(formats, rows)
        return AuditReport(
            created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            **_status(rows, failure),
            notices=self._notices(scorer),
            subject=subject or Subject(kind="live", digest=None, global_step=None, epoch=None),
            plan=self._plan_summary(),
            tokenizer_digest=self.digest,
            procedure=self._procedure(scorer, autocast, tolerance),
            environment=_environment(scorer.device.type),
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

    def _measure(self, scorer: Scorer, progress: Progress | None) -> tuple[list[GroupScores], float, str | None]:
        """Scores and known ranks of every group, and how wide a tie is.

        All NaN, with the reason, when one score is not finite: evidence is whole or none.
        """
        try:
            scored = self._score(scorer, progress)
            tolerance = measure_tolerance(scorer, scored)
            known = self.ranks.search(scored, scorer, tolerance=tolerance)
        except NonFiniteScoreError as error:
            return [_unscored(group) for group in self.groups], 0.0, str(error)
        return [replace(item, known_ranks=ranks) for item, ranks in zip(scored, known, strict=True)], tolerance, None

    def _score(self, scorer: Scorer, progress: Progress | None) -> list[GroupScores]:
        spans = [span for group in self.groups for span in (*group.canary_spans, *group.reference_spans)]
        done = 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            if progress is not None:
                progress(min(done, len(spans)), len(spans))

        scores = scorer.score(spans, seed=self.plan.placement_seed, progress=advance)
        scored, first = [], 0
        for group in self.groups:
            middle, last = first + len(group.canary_spans), first + len(group.canary_spans) + len(group.reference_spans)
            scored.append(_slice(group, scores, first, middle, last))
            first = last
        return scored

    def _rows(self, item: GroupScores, ledger: Ledger | None, tolerance: float) -> list[CanaryRow]:
        with_tail = not item.group.format.has_name and not item.group.format.positive_control
        return canary_rows(item, ledger, tolerance=tolerance, with_tail=with_tail)

    def _prior_aware(
        self,
        scored: Sequence[GroupScores],
        rows: Sequence[CanaryRow],
        scorer: Scorer,
        prior: PrefixSource,
        tolerance: float,
    ) -> dict[str, PriorAware] | None:
        settings = self.settings.prior_aware
        if settings is None:
            return None
        measurement = PriorMeasurement(
            scorer, prior, settings, lead_ids=self.plan.lead_ids, seed=self.plan.placement_seed, tolerance=tolerance
        )
        spans = {
            canary.id: span
            for item in scored
            for canary, span in zip(item.group.canaries, item.group.canary_spans, strict=True)
        }
        return {
            row.id: measurement.measure(spans[row.id], row.log_prob)
            for row in rows
            if row.role != "control" and row.log_prob is not None
        }

    def _prior_settings(self) -> dict[str, float | int | str]:
        settings = self.settings.prior_aware
        assert settings is not None
        return {"m": settings.m, "n": settings.n, "prefixes": settings.prefixes, "estimator": settings.mode}

    def _notices(self, scorer: Scorer) -> list[str]:
        notices = [*scorer.notices, *self.ranks.notices]
        if scorer.model.is_fused and scorer.dtype in ("bfloat16", "float16"):
            notices.append(
                f"greedy matches are those of float32 logits; `generate` rounds its logits to {scorer.dtype} and may write "
                "another token where two are that close."
            )
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

    def _procedure(self, scorer: Scorer, autocast: str | None, tolerance: float) -> Procedure:
        exposure = self.settings.exposure
        return Procedure(
            references=exposure.references,
            references_per_name=exposure.references_per_name,
            reference_seed=reference_seed_digest(self.plan),
            dtype=scorer.dtype,
            autocast=autocast,
            tolerance=tolerance,
            exact=exposure.exact,
            node_budget=exposure.node_budget,
            num_nodes=self.ranks.num_nodes,
            head="fused" if scorer.model.is_fused else "own",
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


def _unscored(group: Group) -> GroupScores:
    canaries, references = len(group.canary_spans), len(group.reference_spans)
    return GroupScores(group, np.full(canaries, np.nan), np.zeros(canaries, dtype=bool), np.full(references, np.nan))


def _status(rows: Sequence[CanaryRow], failure: str | None) -> dict[str, Any]:
    """Invalid when a score is not finite: a NaN is never left out of a figure."""
    reasons = [failure] if failure is not None else []
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
