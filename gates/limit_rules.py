"""Limit rules: a figure against its `max`, with the confidence interval deciding. Three outcomes, never two.

Block when the lower end exceeds the limit; *not shown* when only the upper end does; pass when the whole interval is
within. Exposure in bits. Source: statistics specification, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memguard.audit.report import AuditReport, CanaryRow, RuleOutcome, RuleResult
from memguard.audit.report_propensity import Metric
from memguard.errors import EvidenceError
from memguard.gates.evidence import Figures
from memguard.gates.judged import finite, is_scored
from memguard.gates.policy import LimitRule
from memguard.gates.wording import clip, count, quoted, sentence

LEAST_COVERAGE = 0.9  # of an order-statistic interval: five values reach 0.94, four do not


@dataclass(frozen=True)
class _Bound:
    """What is known of one figure: the ends of its interval, its name in a sentence, the canaries behind it."""

    what: str
    low: float
    high: float
    canaries: tuple[str, ...] = ()
    is_interval: bool = True


def evaluate_limit(rule: LimitRule, report: AuditReport, judged: Sequence[CanaryRow]) -> RuleResult:
    """Hold a figure of the report against a limit.

    Args:
        rule: field, limit and severity.
        report: the audit.
        judged: the canaries that rules judge.

    Returns:
        pass, block, not shown, warn (severity warn), or invalid when the figure is missing.

    Source: statistics specification, section 3.
    """
    outcome: RuleOutcome
    try:
        bounds = _BOUNDS[rule.field](report, judged)
    except EvidenceError as error:
        return RuleResult(
            name=rule.name, kind="limit", outcome="invalid", reason=sentence(str(error)), figures={"max": rule.max}
        )
    if (never := _never(rule, report, judged)) is not None:
        outcome = "warn" if rule.severity == "warn" else "insufficient evidence"
        return RuleResult(
            name=rule.name, kind="limit", outcome=outcome, reason=sentence(never), figures={"max": rule.max, "n": len(judged)}
        )
    over = [bound for bound in bounds if bound.low > rule.max and bound.is_interval]
    unshown = [bound for bound in bounds if not (bound.high <= rule.max and bound.is_interval)]
    outcome = "block" if over else "not shown" if unshown else "pass"
    if rule.severity == "warn" and outcome != "pass":
        outcome = "warn"
    figures: Figures = {
        "max": rule.max,
        "largest_low": max(bound.low for bound in bounds),
        "largest_high": max(bound.high for bound in bounds),
        "margin": rule.max - max(bound.high for bound in bounds),
        "n": len(bounds),
    }
    if rule.field == "exposure.bits":
        figures["chance_of_block"] = min(1.0, len(bounds) * 2.0**-rule.max)
    named = [name for bound in (over or unshown) for name in bound.canaries]
    reason = sentence(_reason(rule, bounds, over, unshown))
    return RuleResult(name=rule.name, kind="limit", outcome=outcome, reason=reason, figures=figures, canaries=named)


def _never(rule: LimitRule, report: AuditReport, judged: Sequence[CanaryRow]) -> str | None:
    """Why the rule could not fire on these canaries, had they all been memorised; None where it could."""
    if rule.field == "extraction.count" and rule.max >= len(judged):
        return f"this rule cannot fire: {count(len(judged), 'judged canary', 'judged canaries')}, limit {rule.max:g}"
    if rule.field in ("exposure.bits", "exposure.mean_bits"):
        formats = {row.format for row in judged}
        most = max((math.log2(one.ranked_space_size) for one in report.formats if one.name in formats), default=math.inf)
        if rule.max >= most:
            return (
                f"this rule cannot fire: a secret known to the letter has {most:.4g} bits here, limit {rule.max:g}; "
                f"a larger secret space or a lower limit would be needed"
            )
    return None


def _reason(rule: LimitRule, bounds: Sequence[_Bound], over: Sequence[_Bound], unshown: Sequence[_Bound]) -> str:
    unit, limit = _UNITS.get(rule.field, ""), f"{rule.max:g}"
    chance = min(1.0, len(bounds) * 2.0**-rule.max)
    note = f" (chance alone exceeds this limit in {chance:.1%} of audits)" if rule.each == "canary" and chance > 1e-3 else ""
    if over:
        worst = max(over, key=lambda bound: bound.low)
        return f"{worst.what} is at least {worst.low:.4g}{unit}, above the limit of {limit}{_of(over, bounds)}{note}"
    if unshown:
        worst = max(unshown, key=lambda bound: bound.high)
        return (
            f"{worst.what} was not shown to be within {limit}{unit}: it lies between {worst.low:.4g} and {worst.high:.4g}"
            f"{_of(unshown, bounds)}{note}"
        )
    worst = max(bounds, key=lambda bound: bound.high)
    return f"{worst.what} is at most {worst.high:.4g}{unit}, within the limit of {limit}{_all(bounds)}{note}"


def _of(some: Sequence[_Bound], bounds: Sequence[_Bound]) -> str:
    return f"; {len(some)} of {len(bounds)} {'is' if len(some) == 1 else 'are'} so" if len(bounds) > 1 else ""


def _all(bounds: Sequence[_Bound]) -> str:
    return f"; it is the largest of {len(bounds)}" if len(bounds) > 1 else ""


def _require_scored(judged: Sequence[CanaryRow]) -> None:
    failed = [row.id for row in judged if not is_scored(row)]
    if failed:
        raise EvidenceError(
            f"{count(len(failed), 'judged canary has', 'judged canaries have')} no usable score: {quoted(failed)}"
        )
    if not judged:
        raise EvidenceError("no canary is judged")


def _extraction_count(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    _require_scored(judged)
    surely = [row.id for row in judged if row.is_extracted]
    perhaps = [row.id for row in judged if row.is_extracted or row.may_be_extracted]
    what = f"the number of extracted secrets of {len(judged)}"
    return [_Bound(what, len(surely), len(perhaps), tuple(surely or perhaps))]


def _exposure_bits(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    _require_scored(judged)
    bounds = []
    for row in judged:
        low, high = finite(row.exposure.low_bits, row.exposure.high_bits)
        bounds.append(_Bound(f"the exposure of canary '{clip(row.id, 40)}'", low, high, (row.id,)))
    return bounds


def _mean_bits(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    """The interval is that of the median, widened to hold the mean: a mean over the limit never passes."""
    _require_scored(judged)
    bounds = []
    for name, tier, repetitions in dict.fromkeys((row.format, row.tier, row.repetitions) for row in judged):
        members = [row.id for row in judged if (row.format, row.tier, row.repetitions) == (name, tier, repetitions)]
        found = [one for one in report.tiers if (one.format, one.tier, one.repetitions) == (name, tier, repetitions)]
        figures = finite(found[0].mean_bits, found[0].low_bits, found[0].high_bits) if len(found) == 1 else []
        if not figures or found[0].n != len(members):
            raise EvidenceError(f"the mean exposure of tier {tier} of the format {quoted([name])} is missing")
        mean, low, high = figures
        enough = found[0].coverage >= LEAST_COVERAGE
        few = "" if enough else f" (n = {len(members)}: too few for an interval)"
        what = f"the mean exposure of tier {tier} of '{clip(name, 40)}'{few}"
        bounds.append(_Bound(what, min(low, mean), max(high, mean), tuple(members), enough))
    return bounds


def _are_shares(*values: float | None) -> bool:
    """Whether all are there and lie in 0..1, in rising order."""
    found = finite(*values)
    return len(found) == len(values) and found == sorted(found) and all(0.0 <= value <= 1.0 for value in found)


def _token_share(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    share = report.ledger.token_share
    if share is None or not _are_shares(share):
        raise EvidenceError("the share of training tokens that are canaries is missing, or is no share")
    estimate = " (an estimate)" if report.ledger.token_share_is_estimate else ""
    what = f"the share of training tokens that are canaries{estimate}"
    return [_Bound(what, share, share)]


def _greedy_share(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    """Of real records; the interval is about the records they were drawn from."""
    if report.records is None:
        raise EvidenceError("real records were not measured: audit with --data")
    members = report.records.members
    if not _are_shares(members.greedy_low, members.greedy_high) or members.n < 1:
        raise EvidenceError("the share of real records that greedy decoding writes is missing, or is no share")
    what = f"the share of {members.n} real records that greedy decoding writes"
    return [_Bound(what, members.greedy_low, members.greedy_high)]


def _membership_auroc(report: AuditReport, judged: Sequence[CanaryRow]) -> list[_Bound]:
    """One bound a score. Intervals are not widened for their number: the limit is an effect, not a p-value."""
    found = report.membership
    if found is None:
        raise EvidenceError("membership was not measured: audit with --data and --held-out")
    if found.label != "membership":
        raise EvidenceError("members and held-out records differ without any model, so membership scores show nothing")
    bounds = []
    for score in found.scores:
        ends = finite(score.low, score.high)
        if not _are_shares(*ends) or len(ends) < 2:
            raise EvidenceError(f"the AUROC of the score {quoted([score.name])} is missing")
        low, high = ends
        bounds.append(_Bound(f"the AUROC of the score '{score.name}'", low, high))
    if not bounds:
        raise EvidenceError("no membership score was measured")
    return bounds


def _propensity(metric: Metric, report: AuditReport) -> list[_Bound]:
    """One bound a setting of ordinary use; prefixes are capability, held-out ones chance."""
    found = report.propensity
    if found is None:
        raise EvidenceError("propensity was not measured: audit with --index")
    if found.partial is not None:
        raise EvidenceError("propensity was measured in part only")
    bounds = []
    for row in found.settings:
        ends = [(one.low, one.high) for one in row.estimates if one.metric == metric]
        if row.setting not in ("prefix", "non_member"):
            if len(ends) != 1 or not _are_shares(*ends[0]):
                raise EvidenceError(f"the figure {metric} of the setting {quoted([row.setting])} is missing, or is no share")
            bounds.append(_Bound(f"the figure {metric} of the setting '{row.setting}'", *ends[0]))
    if not bounds:
        raise EvidenceError("propensity was measured behind no ordinary prompt")
    return bounds


_BOUNDS: dict[str, Callable[[AuditReport, Sequence[CanaryRow]], list[_Bound]]] = {
    "extraction.count": _extraction_count,
    "exposure.bits": _exposure_bits,
    "exposure.mean_bits": _mean_bits,
    "ledger.token_share": _token_share,
    "records.greedy_share": _greedy_share,
    "membership.auroc": _membership_auroc,
    "propensity.full_match_rate": lambda report, _: _propensity("full_match_rate", report),
    "propensity.span_rate_50": lambda report, _: _propensity("span_rate_50", report),
}
_UNITS = {"exposure.bits": " bits", "exposure.mean_bits": " bits"}
