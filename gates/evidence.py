"""Are the figures evidence at all? Every requirement by itself, each with its figures; one that fails ends in exit code 3.

The controls' null test proves the plumbing, not sensitivity; the positive control shows that memorisation could be seen;
the ledger shows that the canaries were trained on. Source: statistics specification, sections 2 and 3.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from memguard.audit.report import AuditReport, CanaryRow, ControlTest, RuleOutcome, RuleResult
from memguard.gates.judged import finite, is_scored, judged_canaries, ruled_canaries
from memguard.gates.policy import Policy
from memguard.gates.wording import clip, count, quoted, sentence

CONTROLS_SHARE = 0.1  # of alpha, over both tests of every format
START_SHARE = 0.1  # of alpha, over both tests before training
POSITIVE_CONTROL_P = 1e-3

Figures = dict[str, float | int | str | None]


def check_evidence(report: AuditReport, policy: Policy, *, alpha: float, today: datetime.date) -> list[RuleResult]:
    """Every evidence requirement with its outcome: pass, invalid, or warn where the policy does not ask for it.

    Args:
        report: the audit.
        policy: says which requirements hold.
        alpha: family error rate in force, 0..1.
        today: the day on which the audit must not be stale, UTC.

    Returns:
        One result a requirement, always in the same order.

    Source: statistics specification, sections 2 and 3.
    """
    judged, needs = judged_canaries(report, policy), policy.evidence
    controls_needed = needs.controls_null_test
    return [
        _report_is_valid(report),
        _subject_is_checkpoint(report),
        _rows_are_complete(report),
        _scores_are_finite(report),
        _controls(report, judged, alpha) if controls_needed else _not_asked("controls look like chance", "controls_null_test"),
        _positive_control(report, needs.positive_control)
        if needs.positive_control != "none"
        else _not_asked("memorisation could be seen", "positive_control"),
        _ledger(report, ruled_canaries(report, policy), exact=needs.ledger_exact),
        _enough_canaries(report, judged, needs.min_canaries),
        _secrets_are_fresh(report) if needs.fresh_secrets else _not_asked("secrets are fresh", "fresh_secrets"),
        _unknown_before_training(report, alpha, is_required=needs.start_audit == "required"),
        _is_recent(report, needs.max_age_days, today),
        _defence_is_tested(report, policy),
        _policy_can_block(policy),
    ]


def _result(
    name: str, problems: Sequence[str], fine: str, figures: Figures | None = None, canaries: Sequence[str] = ()
) -> RuleResult:
    outcome: RuleOutcome = "invalid" if problems else "pass"
    reason = sentence("; ".join(problems) if problems else fine)
    return RuleResult(
        name=name, kind="evidence", outcome=outcome, reason=reason, figures=figures or {}, canaries=list(canaries)
    )


def _not_asked(name: str, key: str) -> RuleResult:
    reason = f"Not checked: the policy does not ask for it (evidence.{key})."
    return RuleResult(name=name, kind="evidence", outcome="warn", reason=reason)


def _report_is_valid(report: AuditReport) -> RuleResult:
    problems = [clip(reason).rstrip(".") for reason in report.invalid_reasons]
    if report.status != "valid" and not problems:
        problems = ["the audit calls itself invalid without a reason"]
    return _result("the audit is valid", problems, "the audit found nothing wrong with its own figures")


def _subject_is_checkpoint(report: AuditReport) -> RuleResult:
    problems = []
    if report.subject.kind != "checkpoint":
        problems = ["the audit measured a live model; only a saved checkpoint can be released, so audit the checkpoint"]
    elif not report.subject.digest:
        problems = ["the audit is not bound to its checkpoint: the digest is missing"]
    return _result("the subject is a checkpoint", problems, "the audit is bound to the digest of a saved checkpoint")


def _rows_are_complete(report: AuditReport) -> RuleResult:
    """No row may be lost between the plan and the gate, or the worst canary could be."""
    problems, plan = [], report.plan
    planned = {"canary": plan.num_canaries, "control": plan.num_controls, "positive_control": plan.num_positive_controls}
    for role, number in planned.items():
        rows = sum(row.role == role for row in report.canaries)
        if rows != number:
            problems.append(f"the plan has {number} of the role {role} and the report has {rows}")
    ids = [row.id for row in report.canaries]
    names = [one.name for one in report.formats]
    if len(set(ids)) != len(ids) or len(set(names)) != len(names):
        problems.append("an id or a format is in the report twice")
    if any(row.format not in names for row in report.canaries):
        problems.append("a canary belongs to a format that the report does not describe")
    return _result(
        "every planned canary is in the report", problems, f"all {len(ids)} planned canaries and controls are in the report"
    )


def _scores_are_finite(report: AuditReport) -> RuleResult:
    failed = [row.id for row in report.canaries if not is_scored(row)]
    problems = (
        [f"{len(failed)} of {len(report.canaries)} canaries and controls have no usable score: {quoted(failed)}"]
        if failed
        else []
    )
    fine = f"all {len(report.canaries)} canaries and controls have finite scores"
    return _result("every canary was scored", problems, fine, {"failed": len(failed)}, failed)


def _controls(report: AuditReport, judged: Sequence[CanaryRow], alpha: float) -> RuleResult:
    """Two tests a format at 0.1 alpha / (2 F) each; a missing p-value is no proof."""
    sizes: dict[str, int] = {}
    for row in report.canaries:
        if row.role == "control":
            sizes[row.format] = sizes.get(row.format, 0) + 1
    bare = [name for name in dict.fromkeys(row.format for row in judged) if name not in sizes]
    problems = [f"the format {quoted([name])} has no control" for name in bare]
    if not sizes:
        problems = ["there is no control, so nothing shows that a secret the model never saw looks like chance"]
    level = CONTROLS_SHARE * alpha / (2 * max(1, len(sizes)))
    found = {test.format: test for test in report.controls}
    for name, number in sizes.items():
        problems += _control_problems(name, number, found.get(name), level)
    if len(found) != len(report.controls):
        problems.append("a format has two null tests")
    extraction = report.extraction
    if extraction is not None and extraction.num_controls_found:
        problems.append(f"the model wrote the secrets of {count(extraction.num_controls_found, 'control')}")
    least = [p for test in report.controls for p in (test.rank_sum_p, test.max_p) if p is not None and finite(p)]
    figures: Figures = {
        "smallest_p": min(least, default=None),
        "level": level,
        "controls": sum(sizes.values()),
        "formats": len(sizes),
    }
    fine = f"{count(sum(sizes.values()), 'control')} in {count(len(sizes), 'format')} look like chance"
    fine += f": smallest p {_p(least)}, level {level:.2g}"
    return _result("controls look like chance", problems, fine, figures)


def _p(p_values: Sequence[float]) -> str:
    return f"{min(p_values):.2g}" if p_values else "missing"


def _control_problems(name: str, number: int, test: ControlTest | None, level: float) -> list[str]:
    if test is None or test.num_controls != number:
        return [f"the controls of the format {quoted([name])} have no null test over all {number} of them"]
    problems = []
    for what, p_value in (("rank like references", test.rank_sum_p), ("have no member that stands out", test.max_p)):
        if p_value is None or not 0.0 <= p_value <= 1.0:
            problems.append(f"the controls of the format {quoted([name])} were not tested: a p-value is missing")
        elif p_value < level:
            problems.append(f"the controls of the format {quoted([name])} do not {what}: p = {p_value:.2g}, below {level:.2g}")
    return list(dict.fromkeys(problems))


_LEARNT = {
    "probe": "fresh secrets that copies of the weights learnt",
    "in_training": "canaries planted to be memorised",
    "none": "canaries",
}


def _positive_control(report: AuditReport, wanted: str) -> RuleResult:
    one, problems = report.positive_control, []
    best = one.best_p_value
    figures: Figures = {"best_p_value": best if finite(best) else None, "n": one.n, "level": POSITIVE_CONTROL_P}
    if one.kind == "none" and not report.is_full and not report.plan.num_positive_controls:
        problems = ["no positive control was made, since this was not a full audit: audit the checkpoint with `memguard audit`"]
    elif one.kind == "none" or one.n < 1:
        problems = ["nothing was learnt or planted to be memorised, so nothing shows that memorisation could be seen"]
    elif wanted not in ("any", one.kind):
        problems = [f"the positive control is of the kind {one.kind}, and the policy asks for {wanted}"]
    elif best is None or not 0.0 <= best <= 1.0:
        problems = ["the positive controls have no finite p-value"]
    elif not one.detected or best * one.n > POSITIVE_CONTROL_P:
        problems = [
            f"{_LEARNT[one.kind]} were not seen: best p = {best:.2g} of {one.n}, needed {POSITIVE_CONTROL_P / one.n:.2g}"
        ]
    seen = f", seen {one.mean_num_seen:g} times on average" if one.mean_num_seen is not None else ""
    fine = f"{one.n} {_LEARNT[one.kind]}{seen}: best p = {best or 0.0:.2g}"
    return _result("memorisation could be seen", problems, fine, figures)


def _ledger(report: AuditReport, judged: Sequence[CanaryRow], *, exact: bool) -> RuleResult:
    name, ledger = "the canaries were trained on", report.ledger
    if not ledger.found and not exact:
        return _not_asked(name, "ledger_exact")
    problems, unseen = _sightings(report, judged)
    if not ledger.found:
        problems, unseen = ["no ledger was found beside the checkpoint, so nothing says that the canaries were trained on"], []
    elif exact and not ledger.exact:
        notes = "; ".join(clip(note, 100).rstrip(".") for note in ledger.notes[:3])
        problems.append("the ledger is not exact" + (f" ({notes})" if notes else ""))
    figures: Figures = {"num_seen": ledger.num_seen, "num_insertions": ledger.num_insertions}
    sightings = sum(row.num_seen or 0 for row in judged)
    fine = f"the ledger counts {count(sightings, 'sighting')} of {count(len(judged), 'judged canary', 'judged canaries')}"
    return _result(name, problems, fine, figures, unseen)


def _sightings(report: AuditReport, judged: Sequence[CanaryRow]) -> tuple[list[str], list[str]]:
    """What the ledger says against the canaries having been trained on, and the ids it says so of."""
    due = [row for row in judged if row.num_insertions >= 1]
    unseen = [row.id for row in due if row.num_seen is None or row.num_seen < 1]
    if not due:
        return ["no judged canary was due by this step"], []
    if not report.ledger.num_seen or len(unseen) == len(due):
        return ["the ledger says that the canaries were not trained on"], unseen
    if unseen:
        return [f"{len(unseen)} of {len(due)} judged canaries that were due never reached the loss: {quoted(unseen)}"], unseen
    return [], []


def _enough_canaries(report: AuditReport, judged: Sequence[CanaryRow], least: int) -> RuleResult:
    """A canary that was not trained on passes every rule, so it does not count."""
    counted = [row for row in judged if not report.ledger.found or (row.num_seen or 0) >= 1]
    what = "judged canaries that reached the loss" if report.ledger.found else "judged canaries"
    problems = [f"{len(counted)} {what}, and the policy asks for {least}"] if len(counted) < least else []
    return _result(
        "enough canaries", problems, f"{len(counted)} {what}, at least {least} asked for", {"n": len(counted), "min": least}
    )


def _secrets_are_fresh(report: AuditReport) -> RuleResult:
    problems = (
        ["the plan was drawn from a seed, so its secrets can be drawn again by anyone"] if report.plan.reproducible else []
    )
    return _result("secrets are fresh", problems, "the secrets were drawn from the operating system's randomness")


def _unknown_before_training(report: AuditReport, alpha: float, *, is_required: bool) -> RuleResult:
    """A model that was trained on the plan before knows its canaries at step 0: nothing it shows then is this run's doing."""
    name, found = "the canaries were new to the model", report.start_test
    if found is None and not is_required:
        reason = "Not checked: the model was not audited before training (audit.on: [start], or memguard audit --start)."
        return RuleResult(name=name, kind="evidence", outcome="warn", reason=reason)
    if found is None:
        return _result(
            name, ["the model was not audited before training: set audit.on: [start], or memguard audit --start"], ""
        )
    level = START_SHARE * alpha / 2
    p_values = finite(found.pooled_p, found.max_p)
    figures: Figures = {"pooled_p": found.pooled_p, "max_p": found.max_p, "level": level, "n": found.n}
    if len(p_values) < 2 or not all(0.0 <= p <= 1.0 for p in p_values) or found.n < 1:
        return _result(
            name, ["the test before training has no finite p-value, or was of no canary"], "", {"level": level, "n": found.n}
        )
    known = min(p_values) < level
    problems = (
        ["these canaries were trained before; draw a fresh plan" + f" (p = {min(p_values):.2g} at step 0)"] if known else []
    )
    fine = f"{found.n} canaries look like chance before training: smallest p {min(p_values):.2g}, level {level:.2g}"
    return _result(name, problems, fine, figures)


def _is_recent(report: AuditReport, max_age_days: int | None, today: datetime.date) -> RuleResult:
    name = "the audit is recent"
    try:
        made = datetime.datetime.fromisoformat(report.created_at.replace("Z", "+00:00"))
    except ValueError:
        return _result(name, ["the audit does not say when it was made"], "")
    age = (today - made.date()).days
    problems = []
    if age < -1:  # clocks of two machines may disagree by a day's edge
        problems = [f"the audit is dated {-age} days in the future"]
    elif max_age_days is not None and age > max_age_days:
        problems = [f"the audit is stale: it was made {age} days ago, and the policy takes {max_age_days}; audit again"]
    limit = f"at most {max_age_days} asked for" if max_age_days is not None else "the policy sets no limit"
    return _result(name, problems, f"made {count(max(age, 0), 'day')} ago, {limit}", {"age_days": age})


def _defence_is_tested(report: AuditReport, policy: Policy) -> RuleResult:
    name = "a declared defence is put to the test"
    if report.defence is None:
        return _result(name, [], "the run declares no defence")
    tested = any(getattr(rule, "test", None) == "exposure.improves_on_baseline" for rule in policy.rules)
    what = clip(report.defence, 60)
    problems = (
        []
        if tested
        else [
            f"the run declares the defence '{what}', and no rule asks for its proof: add the test exposure.improves_on_baseline"
        ]
    )
    return _result(name, problems, f"the run declares the defence '{what}', and a rule asks for its proof")


def _policy_can_block(policy: Policy) -> RuleResult:
    """A gate that could never stop a release shows nothing by letting one pass."""
    blocking = [rule.name for rule in policy.rules if rule.severity == "block"]
    problems = [] if blocking else ["no rule of the policy has the severity block, so nothing could stop a release"]
    return _result("the policy can block", problems, f"{count(len(blocking), 'rule')} can block")
