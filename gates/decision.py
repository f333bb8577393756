"""The decision on one report by one policy: pass, block or invalid, never a bool. Deterministic; reads no clock but the date.

Precedence of exit codes: 3 the figures are not evidence; 1 a rule failed; 3 a baseline is missing or does not compare, or a
strict policy was not shown what it asks for; 0 pass. Source: statistics specification, section 3.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

from memguard.audit.report import LIMITS, AuditReport, Decision, RuleOutcome, RuleResult
from memguard.documents import document_digest
from memguard.errors import EvidenceError
from memguard.gates.baseline import Baseline
from memguard.gates.evidence import check_evidence
from memguard.gates.judged import selected_canaries
from memguard.gates.limit_rules import evaluate_limit
from memguard.gates.policy import Policy, Rule, SignificanceRule, Waiver
from memguard.gates.significance_rules import evaluate_significance
from memguard.gates.wording import count, sentence

Outcome = Literal["pass", "block", "invalid"]


def decide(
    report: AuditReport,
    policy: Policy,
    baseline: Baseline | None = None,
    *,
    attempts: int = 1,
    today: datetime.date | None = None,
) -> Decision:
    """Decide whether the audited checkpoint may be released.

    Not rejecting is not proof of absence: the smallest effect each test would have found stands in its result.

    Args:
        report: the audit of the one checkpoint to be released.
        policy: rules, evidence asked for, family alpha.
        baseline: what the candidate must not be worse than; None when there is none.
        attempts: how often this plan met the gate; a strict policy divides alpha by it, others ignore it.
        today: the day on which waivers must not have expired; the current UTC day when None.

    Returns:
        The decision, with every evidence requirement and every rule in the policy's order. `baseline_digest` is the
        digest of the accepted report it was compared with.

    Raises:
        ValueError: `attempts` is below 1.

    Source: statistics specification, section 3.
    """
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}.")
    alpha = policy.alpha / attempts if policy.strict else policy.alpha
    day = today or datetime.datetime.now(datetime.timezone.utc).date()
    evidence = check_evidence(report, policy, alpha=alpha, today=day)
    tested = evaluate_significance(report, policy, baseline, alpha=alpha)
    rules = []
    for rule in policy.rules:
        result = tested.get(rule.name) or _evaluate(rule, report, policy, baseline)
        waivers = [waiver for waiver in policy.waivers if waiver.rule == rule.name]
        rest = _without_waived(rule, report, policy, [one for one in waivers if one.expires >= day])
        rules.append(_apply_waivers(result, waivers, day, rest))
    outcome, exit_code, reason = _conclude(evidence, rules, strict=policy.strict)
    return Decision(
        outcome=outcome,
        exit_code=exit_code,
        reason=reason,
        evidence=evidence,
        rules=rules,
        alpha=alpha,
        strict=policy.strict,
        report_digest=document_digest(report),
        policy_digest=policy.digest,
        baseline_digest=document_digest(baseline.newest.report) if baseline is not None else None,
        subject=report.subject,
        limits=LIMITS,
    )


def _evaluate(rule: Rule, report: AuditReport, policy: Policy, baseline: Baseline | None) -> RuleResult:
    """A limit, or the proof of an improvement: the rules that stand outside of the error budget."""
    kind: Literal["limit", "test"] = "test" if isinstance(rule, SignificanceRule) else "limit"
    try:
        chosen = selected_canaries(report, policy, rule.select)
    except EvidenceError as error:
        return RuleResult(name=rule.name, kind=kind, outcome="invalid", reason=sentence(str(error)))
    if isinstance(rule, SignificanceRule):
        # Loaded here alone: its intervals need scipy.stats, and few policies have this rule.
        from memguard.gates.improvement_rule import evaluate_improvement

        return evaluate_improvement(rule, report, policy, chosen, baseline)
    return evaluate_limit(rule, report, chosen)


def _without_waived(rule: Rule, report: AuditReport, policy: Policy, live: Sequence[Waiver]) -> RuleOutcome | None:
    """What the rule says of all that live waivers do not cover; None where nothing is left."""
    if any(not waiver.scope for waiver in live):
        return None
    canaries, tiers = {waiver.canary for waiver in live}, {waiver.tier for waiver in live}
    try:
        chosen = selected_canaries(report, policy, rule.select)
    except EvidenceError:
        return "invalid"
    rest = [row for row in chosen if row.id not in canaries and row.repetitions not in tiers]
    if not rest:
        return None
    if isinstance(rule, SignificanceRule) or not live:
        return "block"
    return evaluate_limit(rule, report, rest).outcome


def _apply_waivers(result: RuleResult, waivers: Sequence[Waiver], day: datetime.date, rest: RuleOutcome | None) -> RuleResult:
    """A block becomes *waived*, or what the rest of it is, under live waivers that cover it; each is mentioned, used or not."""
    if not waivers:
        return result
    is_waived = result.outcome == "block" and rest in (None, "pass", "not shown", "insufficient evidence")
    parts = [result.reason.rstrip(".")]
    for waiver in waivers:
        who = f"{waiver.scope}of {waiver.owner}"
        if waiver.expires < day:
            parts.append(f"the waiver {who} expired on {waiver.expires}")
        elif is_waived:
            parts.append(f"waived {waiver.scope}by {waiver.owner} until {waiver.expires}: {waiver.reason}")
        elif result.outcome == "block":
            parts.append(f"the waiver {who} until {waiver.expires} does not cover all that failed")
        else:
            parts.append(f"the waiver {who} until {waiver.expires} was not used")
    outcome: RuleOutcome = result.outcome
    if is_waived:
        outcome = "not shown" if rest == "not shown" else "waived"
    return result.model_copy(update={"outcome": outcome, "reason": sentence("; ".join(parts))})


def _is_no_evidence(result: RuleResult) -> bool:
    return result.outcome == "invalid" or (result.outcome == "insufficient evidence" and result.kind != "baseline")


def _conclude(
    evidence: Sequence[RuleResult], rules: Sequence[RuleResult], *, strict: bool
) -> tuple[Outcome, Literal[0, 1, 3], str]:
    no_evidence = [result for result in [*evidence, *rules] if _is_no_evidence(result)]
    failed = [result for result in rules if result.outcome == "block"]
    no_baseline = [result for result in rules if result.kind == "baseline" and result.outcome == "insufficient evidence"]
    unshown = [result for result in rules if result.outcome == "not shown"]
    if no_evidence:
        also = [f"{count(len(failed), 'rule')} failed besides"] if failed else []
        return "invalid", 3, _sentence("Not evidence", no_evidence, also)
    if failed:
        return "block", 1, _sentence(f"Blocked: {len(failed)} of {count(len(rules), 'rule')} failed", failed)
    if no_baseline:
        return "invalid", 3, _sentence("No comparable baseline", no_baseline)
    if strict and unshown:
        return "invalid", 3, _sentence("Not shown, and the policy is strict", unshown)
    return "pass", 0, _passed(rules)


def _sentence(head: str, results: Sequence[RuleResult], also: Sequence[str] = ()) -> str:
    parts = [f"{_named(result)} ({_uncapitalised(result.reason)})" for result in results[:3]]
    more = [f"and {len(results) - 3} more"] if len(results) > 3 else []
    return sentence(f"{head}: {'; '.join([*parts, *more, *also])}")


def _named(result: RuleResult) -> str:
    """A rule by its name; evidence, whose name says what should hold, as what does not."""
    return f"'{result.name}' does not hold" if result.kind == "evidence" else result.name


def _uncapitalised(reason: str) -> str:
    return reason[:1].lower() + reason[1:].rstrip(".")


def _passed(rules: Sequence[RuleResult]) -> str:
    passed = sum(result.outcome == "pass" for result in rules)
    rest = [f"{number} {what}" for what in ("not shown", "warn", "waived") if (number := sum(r.outcome == what for r in rules))]
    return sentence(f"Passed: {passed} of {count(len(rules), 'rule')} passed" + "".join(f", {part}" for part in rest))
