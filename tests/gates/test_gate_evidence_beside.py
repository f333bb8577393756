"""Evidence beside the figures: the canaries before training, the age of the audit, a policy that could block."""

from __future__ import annotations

import datetime

import pytest

from memguard.audit.report import StartTest
from memguard.gates import decide

MADE = datetime.date(2026, 1, 1)


def evidence(decision, name):
    return next(one for one in decision.evidence if one.name == name)


@pytest.mark.parametrize(("pooled", "largest"), [(1e-4, 0.5), (0.5, 1e-4)])
def test_canaries_that_the_model_knew_before_training_are_no_evidence(report, policy, baseline, change, pooled, largest):
    known = change(report, start_test=StartTest(n=56, pooled_p=pooled, max_p=largest))
    decision = decide(known, policy, baseline)
    assert decision.exit_code == 3
    assert "these canaries were trained before; draw a fresh plan" in decision.reason


@pytest.mark.parametrize(("pooled", "outcome"), [(5.1e-4, "pass"), (4.9e-4, "invalid")])
def test_the_level_before_training_is_a_twentieth_of_alpha(report, policy, change, pooled, outcome):
    found = decide(change(report, start_test=StartTest(n=56, pooled_p=pooled, max_p=1.0)), policy)
    assert evidence(found, "the canaries were new to the model").outcome == outcome


@pytest.mark.parametrize("p_value", [None, float("nan"), -0.1, 1.5])
def test_a_start_without_a_p_value_is_no_evidence(report, policy, change, p_value):
    broken = change(report, start_test=StartTest.model_construct(n=56, pooled_p=p_value, max_p=0.5))
    assert evidence(decide(broken, policy), "the canaries were new to the model").outcome == "invalid"


def test_a_start_that_was_not_audited_is_a_warning_or_where_required_no_evidence(report, policy, make_policy, change):
    bare = change(report, start_test=None)
    assert evidence(decide(bare, policy), "the canaries were new to the model").outcome == "warn"
    required = decide(bare, make_policy(evidence={"start_audit": "required"}))
    assert evidence(required, "the canaries were new to the model").outcome == "invalid"
    assert "memguard audit --start" in required.reason


@pytest.mark.parametrize(("days", "outcome"), [(0, "pass"), (30, "pass"), (31, "invalid"), (-1, "pass"), (-2, "invalid")])
def test_a_stale_audit_and_one_from_the_future_are_no_evidence(report, make_policy, days, outcome):
    today = MADE + datetime.timedelta(days=days)
    found = decide(report, make_policy(evidence={"max_age_days": 30}), today=today)
    assert evidence(found, "the audit is recent").outcome == outcome


def test_without_a_limit_no_audit_is_stale(report, policy):
    assert evidence(decide(report, policy, today=datetime.date(2036, 1, 1)), "the audit is recent").outcome == "pass"


@pytest.mark.parametrize("text", ["", "yesterday", "2026"])
def test_an_audit_without_a_date_is_no_evidence(report, policy, change, text):
    assert evidence(decide(change(report, created_at=text), policy), "the audit is recent").outcome == "invalid"


def test_a_policy_without_a_blocking_rule_is_no_gate(report, make_policy):
    rules = [{"name": "none", "field": "extraction.count", "max": 0, "severity": "warn"}]
    decision = decide(report, make_policy(rules=rules))
    assert decision.exit_code == 3
    assert "no rule of the policy has the severity block" in decision.reason
