"""Rules that look at some canaries alone, and waivers that cover some of what failed."""

from __future__ import annotations

import datetime

import pytest

from memguard.gates import decide

DAY = datetime.date(2026, 6, 1)
LIMIT = {"name": "limit", "field": "exposure.bits", "each": "canary", "max": 20}


def limit(make_policy, select=None, waivers=()):
    rules = [{**LIMIT, "select": select} if select else LIMIT]
    return make_policy(rules=rules, waivers=[{"rule": "limit", "owner": "jane", "reason": "beta", **one} for one in waivers])


@pytest.mark.parametrize(
    ("select", "outcome"),
    [
        ({"formats": ["pin"]}, "block"),
        ({"formats": ["card"]}, "pass"),
        ({"tiers": [1]}, "block"),
        ({"tiers": [4]}, "not shown"),
        ({"canaries": ["pin-1x-5"]}, "block"),
        ({"canaries": ["pin-1x-6", "card-1x-0"]}, "pass"),
        ({"formats": ["pin"], "tiers": [4]}, "not shown"),
    ],
)
def test_a_rule_looks_at_what_it_selects(make_report, make_policy, select, outcome):
    report = make_report(1, memorised={"pin-1x-5": -0.1})
    decision = decide(report, limit(make_policy, select), today=DAY)
    assert decision.rules[0].outcome == outcome


def test_a_tier_named_by_a_rule_is_judged_however_high(make_report, make_policy):
    report = make_report(1, memorised={"card-16x-1": -0.1})
    assert decide(report, limit(make_policy), today=DAY).rules[0].outcome != "block"
    assert decide(report, limit(make_policy, {"tiers": [16]}), today=DAY).rules[0].canaries == ["card-16x-1"]
    family = make_policy(rules=[{"name": "f", "test": "exposure.max", "select": {"tiers": [16]}}])
    assert decide(report, family, today=DAY).rules[0].outcome == "block"


@pytest.mark.parametrize("rule", [LIMIT, {"name": "family", "test": "exposure.pooled"}])
@pytest.mark.parametrize(
    ("select", "match"),
    [
        ({"formats": ["pim"]}, "selects the format 'pim', which no canary of the report has"),
        ({"tiers": [3]}, "selects the tier '3'"),
        ({"canaries": ["pin-control-0"]}, "selects the canary 'pin-control-0'"),
        ({"canaries": ["pin-1x-0"], "tiers": [4]}, "that no canary has together"),
    ],
)
def test_a_selection_that_finds_nothing_is_no_pass(report, make_policy, rule, select, match):
    decision = decide(report, make_policy(rules=[{**rule, "select": select}]), today=DAY)
    assert decision.exit_code == 3
    assert match in decision.rules[0].reason


def test_a_family_of_one_format_is_tested_by_itself(make_report, make_policy):
    shifted = make_report(1, memorised={f"pin-4x-{index}": -12.0 for index in range(12)})
    rules = [{"name": name, "test": "exposure.pooled", "select": {"formats": [name]}} for name in ("card", "pin")]
    assert [rule.outcome for rule in decide(shifted, make_policy(rules=rules), today=DAY).rules] == ["pass", "block"]


@pytest.mark.parametrize(
    ("waivers", "outcome"),
    [
        ([{"expires": datetime.date(2026, 7, 1)}], "waived"),
        ([{"canary": "pin-1x-5", "expires": datetime.date(2026, 7, 1)}], "block"),
        ([{"tier": 1, "expires": datetime.date(2026, 7, 1)}], "block"),
        # What is not covered may lie above the limit too: references alone cannot rule that out.
        ([{"canary": "pin-1x-5", "expires": DAY}, {"canary": "card-4x-2", "expires": DAY}], "not shown"),
        ([{"tier": 1, "expires": DAY}, {"canary": "card-4x-2", "expires": DAY}], "not shown"),
        ([{"tier": 1, "expires": DAY}, {"tier": 4, "expires": DAY}], "waived"),
        ([{"tier": 1, "expires": DAY}, {"canary": "card-4x-2", "expires": datetime.date(2026, 5, 31)}], "block"),
        ([{"tier": 16, "expires": DAY}], "block"),
    ],
)
def test_a_rule_is_waived_only_if_everything_that_failed_is_covered(make_report, make_policy, waivers, outcome):
    report = make_report(1, memorised={"pin-1x-5": -0.1, "card-4x-2": -0.1})
    result = decide(report, limit(make_policy, waivers=waivers), today=DAY).rules[0]
    assert result.outcome == outcome
    assert result.reason.count("of jane") + result.reason.count("by jane") == len(waivers)


def test_a_partial_waiver_that_is_not_enough_says_so(make_report, make_policy):
    report = make_report(1, memorised={"pin-1x-5": -0.1, "card-4x-2": -0.1})
    result = decide(report, limit(make_policy, waivers=[{"tier": 1, "expires": DAY}]), today=DAY).rules[0]
    assert "the waiver for tier 1 of jane until 2026-06-01 does not cover all that failed" in result.reason
