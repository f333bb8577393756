"""Significance rules: family tests that share 0.6 of alpha by Holm, each with what it could and could not have seen.

A test that could never reach its share at this size is *insufficient evidence*, not a pass. Not rejecting shows no absence.
Source: statistics specification, sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memguard.audit.report import AuditReport, CanaryRow, RuleOutcome, RuleResult
from memguard.errors import EvidenceError
from memguard.gates.baseline import Baseline
from memguard.gates.evidence import Figures
from memguard.gates.judged import family_groups, sampled_bits, selected_canaries
from memguard.gates.measured import Measured, Unmeasured
from memguard.gates.policy import Policy, SignificanceRule
from memguard.gates.privacy_rule import measure_stated_epsilon
from memguard.gates.resolution import (
    max_detectable_bits,
    pooled_detectable_bits,
    references_needed,
    silent_formats,
    space_needed,
)
from memguard.gates.rise_rules import measure_rise
from memguard.gates.wording import count, quoted, sentence
from memguard.metrics.exposure import sampled_null_mean_bits
from memguard.metrics.family import FamilyGroup, holm_rejections, max_test, pooled_test

RULES_SHARE = 0.6  # of alpha, over all significance rules that can block
NAMED = 5


@dataclass(frozen=True)
class _Trial:
    """What every rule is measured on, and the level of the first step of Holm."""

    report: AuditReport
    policy: Policy
    baseline: Baseline | None
    share: float


def evaluate_significance(
    report: AuditReport, policy: Policy, baseline: Baseline | None, *, alpha: float
) -> dict[str, RuleResult]:
    """Evaluate every significance rule of a policy but the proof of an improvement, which takes no share of alpha.

    Args:
        report: the audit.
        policy: its rules; those that can block share the budget, those that warn are tested at one share each.
        baseline: what `exposure.against_baseline` compares with; None when there is none.
        alpha: family error rate in force, 0..1.

    Returns:
        One result a rule, by the rule's name.

    Source: statistics specification, section 3.
    """
    budget, num_tests = RULES_SHARE * alpha, max(1, len(policy.block_tests))
    trial = _Trial(report, policy, baseline, budget / num_tests)
    tests = [rule for rule in policy.rules if isinstance(rule, SignificanceRule)]
    rules = [rule for rule in tests if rule.test != "exposure.improves_on_baseline"]
    measured = {rule.name: _measure(rule, trial) for rule in rules}
    # A rule that was not measured stays in the count: it takes its share with it.
    p_values = [_p_of(measured[rule.name], trial.share) for rule in policy.block_tests]
    rejected = dict(zip((rule.name for rule in policy.block_tests), holm_rejections(p_values, alpha=budget), strict=True))
    return {rule.name: _result(rule, measured[rule.name], rejected.get(rule.name), trial.share) for rule in rules}


def _p_of(found: Measured | Unmeasured, share: float) -> float:
    return found.p_value if isinstance(found, Measured) and found.min_attainable_p <= share else 1.0


def _measure(rule: SignificanceRule, trial: _Trial) -> Measured | Unmeasured:
    if rule.test == "privacy.stated_epsilon":
        return measure_stated_epsilon(trial.report, share=trial.share)
    try:
        judged = selected_canaries(trial.report, trial.policy, rule.select)
        groups = family_groups(trial.report, judged)
    except EvidenceError as error:
        return Unmeasured("test", "invalid", str(error))
    if rule.test == "exposure.pooled":
        return _measure_pooled(groups, judged, trial.share)
    if rule.test == "exposure.max":
        return _measure_max(groups, judged, trial.share)
    return measure_rise(rule, trial.report, trial.policy, judged, trial.baseline, share=trial.share)


def _measure_pooled(groups: Sequence[FamilyGroup], judged: Sequence[CanaryRow], share: float) -> Measured:
    result, detectable = pooled_test(groups), pooled_detectable_bits(groups, share)
    by_chance = sum(len(group.num_above) * sampled_null_mean_bits(group.num_non_members) for group in groups) / result.n
    finding = (
        f"{count(result.n, 'judged canary', 'judged canaries')} have a mean exposure of {result.statistic / result.n:.2f} bits"
    )
    finding += f" among non-members, {by_chance:.2f} by chance"
    needed = references_needed(groups, share)
    return Measured(
        p_value=result.p_value,
        min_attainable_p=result.min_attainable_p,
        n=result.n,
        finding=finding,
        needed=None if needed is None else f"{needed} references behind each prefix",
        sees="at this size no mean shift" if detectable is None else f"a mean shift of {detectable:.2f} bits",
        detectable_bits=detectable,
        canaries=_most_exposed(judged),
        figures={"statistic": result.statistic, "mean_bits": result.statistic / result.n, "chance_bits": by_chance},
    )


def _measure_max(groups: Sequence[FamilyGroup], judged: Sequence[CanaryRow], share: float) -> Measured:
    result, detectable = max_test(groups), max_detectable_bits(groups, share)
    needed = space_needed(groups, share)
    names = list(dict.fromkeys(row.format for row in judged))
    silent = [names[index] for index in silent_formats(groups, share)]
    best = min(judged, key=_own_p).id
    of_all = count(result.n, "judged canary", "judged canaries")
    finding = f"the best of {of_all}, {quoted([best])}, has p = {result.statistic:.2g} alone"
    if silent and len(silent) < len(names):
        finding += f" (no canary of the format {quoted(silent)} could stand out: its space is too small)"
    return Measured(
        p_value=result.p_value,
        min_attainable_p=result.min_attainable_p,
        n=result.n,
        finding=finding,
        needed=None if needed is None else f"a secret space of {needed} candidates",
        sees=None if detectable is None else f"one canary with {detectable:.1f} certified bits",
        detectable_bits=detectable,
        canaries=_standing_out(judged, share),
        figures={"statistic": result.statistic},
    )


def _standing_out(judged: Sequence[CanaryRow], share: float) -> list[str]:
    """The canaries that would be found alone, by Bonferroni; the best one when none would."""
    rows = sorted(judged, key=_own_p)
    found = [row.id for row in rows if _own_p(row) * len(rows) <= share]
    return found or [row.id for row in rows[:1]]


def _own_p(row: CanaryRow) -> float:
    return 1.0 if row.exposure.p_value is None else row.exposure.p_value


def _most_exposed(judged: Sequence[CanaryRow]) -> list[str]:
    return [row.id for row in sorted(judged, key=sampled_bits, reverse=True)[:NAMED]]


def _result(rule: SignificanceRule, found: Measured | Unmeasured, rejected: bool | None, share: float) -> RuleResult:
    if isinstance(found, Unmeasured):
        outcome: RuleOutcome = "warn" if rule.severity == "warn" and found.outcome != "invalid" else found.outcome
        return RuleResult(name=rule.name, kind=found.kind, outcome=outcome, reason=sentence(found.reason))
    figures: Figures = {
        "p_value": found.p_value,
        "share": share,
        "n": found.n,
        "min_attainable_p": found.min_attainable_p,
        "detectable_bits": found.detectable_bits,
        **found.figures,
    }
    if found.min_attainable_p > share:
        outcome = "warn" if rule.severity == "warn" else "insufficient evidence"
        return RuleResult(
            name=rule.name, kind="test", outcome=outcome, reason=sentence(_too_small(found, share)), figures=figures
        )
    fired = found.p_value <= share if rejected is None else rejected
    outcome = "pass" if not fired else "warn" if rule.severity == "warn" else "block"
    reason = f"{found.finding}: p = {found.p_value:.2g}, share of alpha {share:.2g}"
    reason += f"; {found.sees} would be found 95 times in 100" if found.sees is not None and not fired else ""
    reason += f"; {found.note}" if found.note else ""
    canaries = found.canaries if fired else []
    return RuleResult(name=rule.name, kind="test", outcome=outcome, reason=sentence(reason), figures=figures, canaries=canaries)


def _too_small(found: Measured, share: float) -> str:
    least = f"its smallest p at this size is {found.min_attainable_p:.2g}, above its share of alpha {share:.2g}"
    if found.needed is None:
        return f"this rule cannot fire: {least}, and no size would do; raise alpha or count fewer attempts"
    return f"this rule cannot fire: {least}; {found.needed} would be needed"
