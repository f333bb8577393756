"""`run_audit`: score canaries, controls and references with a model, and write down what that shows.

The one place that joins plan, scorer and metrics. The model is left exactly as it was found (`audit_mode`). Where torch's
default process group has several ranks, all of them must call it at the same time: see `memguard.scoring.team`.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from memguard.audit.config import AuditConfig, AuditSettings, DpSettings
from memguard.audit.full import FullFigures, FullMeasurement, Sources
from memguard.audit.items import Group, build_groups
from memguard.audit.privacy import measure_counterfactual, measure_privacy
from memguard.audit.ranks import RankSearch
from memguard.audit.report import AuditReport, CanaryRow, FormatRow, StartTest, Subject, TrendPoint
from memguard.audit.rows import (
    GroupScores,
    canary_rows,
    control_tests,
    format_rows,
    positive_control,
    start_test,
    tier_rows,
)
from memguard.audit.summaries import (
    summarise_environment,
    summarise_ledger,
    summarise_plan,
    summarise_procedure,
    summarise_status,
)
from memguard.audit.tolerance import measure_tolerance
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import NonFiniteScoreError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, SpanScores
from memguard.scoring.team import Team

Progress = Callable[[int, int], None]


class AuditRunner:
    """Audits many checkpoints of one plan: encodes and draws references once.

    Args:
        plan: the canaries.
        tokenizer: the one the plan was drawn for.
        settings: the `audit` part of the configuration.
        dp: the guarantee that the run states, if any.
        defence: what the run did against memorisation, as it declares it.

    Raises:
        InputError: the plan was made for another tokenizer.
    """

    def __init__(
        self,
        plan: CanaryPlan,
        tokenizer: Any,
        settings: AuditSettings,
        *,
        dp: DpSettings | None = None,
        defence: str | None = None,
    ) -> None:
        self.digest = tokenizer_digest(tokenizer)
        plan.check_tokenizer(self.digest)
        self.plan, self.tokenizer, self.settings, self.dp, self.defence = plan, tokenizer, settings, dp, defence
        self.groups = build_groups(plan, tokenizer, settings.exposure)
        self.ranks = RankSearch(plan, tokenizer, settings.exposure)
        self.start: list[GroupScores] | None = None
        self._start_test: tuple[list[GroupScores], StartTest | None] | None = None

    def run(
        self,
        model: Any,
        *,
        subject: Subject | None = None,
        ledger: Ledger | None = None,
        full: Sources | None = None,
        trend: Sequence[TrendPoint] = (),
        autocast: str | None = None,
        progress: Progress | None = None,
        team: Team | None = None,
    ) -> AuditReport:
        """Audit one model as it stands; with several ranks, all call this together and get the same report.

        Args:
            model: a causal language model, wrapped or not; left as it was found.
            subject: what is measured; a live model when None.
            ledger: counts of the run at this step; None marks sightings unknown.
            full: data for all that a full audit measures; None measures exposure alone.
            trend: earlier audits of the same run.
            autocast: the autocast dtype in force, recorded.
            progress: called with rows done and rows in all.
            team: ranks that share the work; those of torch's default process group when None.

        Returns:
            An `AuditReport`; `status` is *invalid*, with reasons, when its figures are no evidence.

        Raises:
            ScoringError: the model could not be scored, on this rank or another.
        """
        team = team or Team.current()
        with team.guarded():
            team.gather(f"audit of plan {self.plan.digest[:16]}, {'full' if full is not None else 'exposure'}", None)
            report = self._run(model, team, subject, ledger, full, trend, autocast, progress)
            return team.agreed("report", report)

    def _run(
        self,
        model: Any,
        team: Team,
        subject: Subject | None,
        ledger: Ledger | None,
        full: Sources | None,
        trend: Sequence[TrendPoint],
        autocast: str | None,
        progress: Progress | None,
    ) -> AuditReport:
        began = time.monotonic()
        with audit_mode(model) as inner:
            scorer = Scorer(inner, batch_size=self.settings.batch_size, team=team)
            scored, tolerance, failure = self._measure(scorer, progress)
            if failure is None and subject is not None and subject.global_step == 0:
                self.start = scored
            rows = [row for item in scored for row in self._rows(item, ledger, tolerance)]
            found = FullFigures(rows)
            if full is not None and failure is None:
                measurement = FullMeasurement(scorer, self.plan, self.tokenizer, self.settings, full, tolerance)
                try:
                    found = measurement.measure(scored, rows)
                except NonFiniteScoreError as error:
                    failure = str(error)
        rows = list(found.rows)
        formats = format_rows(self.plan, scored)
        return AuditReport(
            created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            **summarise_status(rows, failure),
            notices=[*self._notices(scorer), *found.notices],
            subject=subject or Subject(kind="live", digest=None, global_step=None, epoch=None),
            plan=summarise_plan(self.plan),
            tokenizer_digest=self.digest,
            procedure=summarise_procedure(
                self.plan,
                self.settings.exposure,
                scorer,
                autocast=autocast,
                tolerance=tolerance,
                num_nodes=self.ranks.num_nodes,
            ),
            environment=summarise_environment(scorer.device.type),
            ledger=summarise_ledger(ledger, rows),
            formats=formats,
            canaries=rows,
            tiers=tier_rows(rows),
            controls=control_tests(formats, rows),
            positive_control=found.positive_control or positive_control(rows),
            prior_aware_settings=self._prior_settings() if found.prior_aware is not None else None,
            prior_aware=found.prior_aware,
            prior_aware_thresholds=found.thresholds,
            start_test=self._test_start(formats, tolerance),
            defence=self.defence,
            is_full=full is not None,
            extraction=found.extraction,
            records=found.records,
            membership=found.membership,
            propensity=found.propensity,
            trend=list(trend),
            duration_s=time.monotonic() - began,
            **self._coins(rows, ledger, failure),
        )

    def remember_start(self, model: Any, *, team: Team | None = None) -> None:
        """Score the model that training began from, so that later audits show what training added.

        Args:
            model: as training found it.
            team: as in `run`.

        Raises:
            ScoringError: the model could not be scored.
        """
        team = team or Team.current()
        with team.guarded(), audit_mode(model) as inner:
            self.start = self._score(Scorer(inner, batch_size=self.settings.batch_size, team=team), None)

    def _coins(self, rows: Sequence[CanaryRow], ledger: Ledger | None, failure: str | None) -> dict[str, Any]:
        """What follows from coins that put each canary in or left it out; nothing where none were thrown."""
        if self.plan.inclusion != "coin" or failure is not None:
            return {}
        thrown = [canary for canary in self.plan.canaries if canary.role != "positive_control" and canary.tier > 0]
        coins = {canary.id: canary.role == "canary" for canary in thrown}
        once = ledger is not None and ledger.plant_once
        tiers = {canary.id: 1 if once else canary.tier for canary in thrown}
        privacy = measure_privacy(
            rows,
            inclusion=self.plan.inclusion,
            coins=coins,
            tiers=tiers,
            stated_epsilon=self.dp.epsilon if self.dp is not None else None,
            delta=self.dp.delta if self.dp is not None else 0.0,
            enters_as_record=ledger is not None and ledger.mode == "record",
        )
        counterfactual = measure_counterfactual(rows, inclusion=self.plan.inclusion, coins=coins, tiers=tiers)
        return {"privacy": privacy, "counterfactual": counterfactual}

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
        start = self._start_of(item)
        return canary_rows(item, ledger, tolerance=tolerance, with_tail=with_tail, start=start)

    def _test_start(self, formats: Sequence[FormatRow], tolerance: float) -> StartTest | None:
        """Whether the canaries were known before training; computed once, None where that was not scored."""
        if self.start is None or not formats:
            return None
        if self._start_test is None or self._start_test[0] is not self.start:
            rows = [row for one in self.start for row in canary_rows(one, None, tolerance=tolerance, with_tail=False)]
            self._start_test = self.start, start_test(formats, [row for row in rows if row.role == "canary"])
        return self._start_test[1]

    def _start_of(self, item: GroupScores) -> GroupScores | None:
        """The same group before training, None where that was not scored."""
        same = [one for one in self.start or () if one.group is item.group]
        return same[0] if same else None

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
    return AuditRunner(plan, tokenizer, config.audit, dp=config.dp, defence=config.defence).run(model, **options)


def _slice(group: Group, scores: SpanScores, first: int, middle: int, last: int) -> GroupScores:
    return GroupScores(group, scores.log_probs[first:middle], scores.is_greedy[first:middle], scores.log_probs[middle:last])


def _unscored(group: Group) -> GroupScores:
    canaries, references = len(group.canary_spans), len(group.reference_spans)
    return GroupScores(group, np.full(canaries, np.nan), np.zeros(canaries, dtype=bool), np.full(references, np.nan))
