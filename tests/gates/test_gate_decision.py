"""Outcomes, exit codes and their precedence; waivers; determinism."""

from __future__ import annotations

import datetime

import pytest

from memguard.audit.report import LIMITS
from memguard.documents import document_digest
from memguard.gates import decide

TODAY = datetime.date(2026, 6, 1)
EXTRACTED = {"card-1x-3": -0.1}


@pytest.fixture
def leaky(make_report):
    """An audit of a model that memorised one canary."""
    return make_report(1, memorised=EXTRACTED)


def _waiver(rule, expires="2026-12-31"):
    return {"rule": rule, "owner": "jane", "reason": "accepted for the beta", "expires": expires}


def test_a_clean_model_passes(report, policy, baseline):
    decision = decide(report, policy, baseline)
    assert (decision.outcome, decision.exit_code) == ("pass", 0)
    assert decision.reason.startswith("Passed: ")
    assert decision.limits == LIMITS
    assert decision.subject == report.subject
    assert decision.report_digest == document_digest(report)
    assert decision.policy_digest == policy.digest
    assert decision.baseline_digest == baseline.newest.report_digest
    assert [result.name for result in decision.rules] == [rule.name for rule in policy.rules]


def test_a_memorised_canary_blocks(leaky, policy, baseline):
    decision = decide(leaky, policy, baseline)
    assert (decision.outcome, decision.exit_code) == ("block", 1)
    assert decision.reason.startswith("Blocked: 3 of 5 rules failed: no secret can be extracted (the number")


def test_a_missing_baseline_alone_is_exit_code_3(report, policy):
    decision = decide(report, policy)
    assert (decision.outcome, decision.exit_code, decision.baseline_digest) == ("invalid", 3, None)
    assert decision.reason.startswith("No comparable baseline: not worse than the last release")
    assert (decision.rules[-1].kind, decision.rules[-1].outcome) == ("baseline", "insufficient evidence")


def test_a_baseline_of_another_plan_is_exit_code_3(report, policy, make_baseline, change):
    decision = decide(report, policy, make_baseline(change(report, plan__digest="0" * 64)))
    assert (decision.outcome, decision.exit_code) == ("invalid", 3)
    assert "does not compare: the plan differs" in decision.rules[-1].reason


def test_a_failed_rule_comes_before_a_missing_baseline(leaky, policy):
    assert decide(leaky, policy).exit_code == 1


def test_missing_evidence_comes_before_a_failed_rule(leaky, policy, baseline, change):
    decision = decide(change(leaky, subject__kind="live"), policy, baseline)
    assert (decision.outcome, decision.exit_code) == ("invalid", 3)
    assert decision.reason.startswith(
        "Not evidence: 'the subject is a checkpoint' does not hold (the audit measured a live model"
    )
    assert "3 rules failed besides" in decision.reason
    assert [result.outcome for result in decision.rules].count("block") == 3


def test_what_was_not_shown_is_exit_code_3_under_a_strict_policy_alone(report, change_row, make_policy, baseline):
    unsure = change_row(report, "card-1x-3", may_be_extracted=True)
    lax, strict = decide(unsure, make_policy(), baseline), decide(unsure, make_policy(strict=True), baseline)
    assert (lax.outcome, lax.exit_code) == ("pass", 0)
    assert "not shown" in lax.reason
    assert (strict.outcome, strict.exit_code, strict.strict) == ("invalid", 3, True)
    assert strict.reason.startswith("Not shown, and the policy is strict: ")


def test_a_failed_rule_comes_before_what_was_not_shown(leaky, make_policy, baseline):
    assert decide(leaky, make_policy(strict=True), baseline).exit_code == 1


def test_no_baseline_rule_needs_no_baseline(report, make_policy):
    rules = [{"name": "none", "field": "extraction.count", "max": 0.0}]
    assert decide(report, make_policy(rules=rules)).exit_code == 0


def test_waivers_for_every_failing_rule_let_a_model_pass_and_are_shown(leaky, policy, make_policy, baseline):
    failing = [result.name for result in decide(leaky, policy, baseline).rules if result.outcome == "block"]
    decision = decide(leaky, make_policy(waivers=[_waiver(name) for name in failing]), baseline, today=TODAY)
    assert (decision.outcome, decision.exit_code) == ("pass", 0)
    waived = [result for result in decision.rules if result.outcome == "waived"]
    assert [result.name for result in waived] == failing
    assert all("waived by jane until 2026-12-31: accepted for the beta." in result.reason for result in waived)
    assert "3 waived" in decision.reason


def test_a_waiver_of_one_rule_leaves_the_others(leaky, make_policy, baseline):
    decision = decide(leaky, make_policy(waivers=[_waiver("no secret can be extracted")]), baseline, today=TODAY)
    assert (decision.exit_code, decision.rules[0].outcome) == (1, "waived")
    assert decision.reason.startswith("Blocked: 2 of 5 rules failed")


def test_an_expired_waiver_does_not_count_and_is_mentioned(leaky, make_policy, baseline):
    rules = make_policy(waivers=[_waiver("no secret can be extracted", "2026-05-31")])
    result = decide(leaky, rules, baseline, today=TODAY).rules[0]
    assert result.outcome == "block"
    assert "the waiver of jane expired on 2026-05-31" in result.reason
    assert decide(leaky, rules, baseline, today=datetime.date(2026, 5, 31)).rules[0].outcome == "waived"


def test_a_waiver_without_use_is_mentioned(report, make_policy, baseline):
    result = decide(report, make_policy(waivers=[_waiver("no secret can be extracted")]), baseline, today=TODAY).rules[0]
    assert result.outcome == "pass"
    assert "the waiver of jane until 2026-12-31 was not used" in result.reason


def test_a_waiver_heals_no_evidence_and_no_missing_baseline(report, change, change_row, make_policy):
    rules = make_policy(waivers=[_waiver("not worse than the last release"), _waiver("no secret can be extracted")])
    assert decide(report, rules, today=TODAY).exit_code == 3
    assert decide(change_row(report, "card-1x-0", log_prob=None), rules, today=TODAY).exit_code == 3


def test_a_bare_report_as_baseline_is_said_to_be_one(report, policy, make_report, tmp_path):
    from memguard.gates import load_baseline

    make_report(2).save(tmp_path / "report.json")
    bare = load_baseline(tmp_path / "report.json")
    decision = decide(report, policy, bare)
    assert decision.exit_code == 0
    assert "a bare report that nobody accepted" in decision.rules[-1].reason


def test_a_decision_is_the_same_twice_and_after_a_round_trip(report, policy, baseline, tmp_path):
    from memguard.audit.report import load_decision, load_report

    first = decide(report, policy, baseline, today=TODAY)
    report.save(tmp_path / "report.json")
    assert decide(load_report(tmp_path / "report.json"), policy, baseline, today=TODAY) == first
    first.save(tmp_path / "decision.json")
    assert load_decision(tmp_path / "decision.json") == first


def test_every_reason_is_one_sentence(leaky, report, policy, baseline, change):
    for one in (leaky, report, change(report, canaries=[], controls=[], formats=[])):
        decision = decide(one, policy, baseline)
        for result in [*decision.evidence, *decision.rules]:
            assert "\n" not in result.reason
            assert result.reason.endswith(".")
            assert result.reason[0] == result.reason[0].upper()
