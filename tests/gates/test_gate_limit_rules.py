"""Limit rules have three outcomes, decided by the ends of an interval."""

from __future__ import annotations

import math

import pytest

from memguard.gates import Policy, decide
from memguard.gates.judged import judged_canaries
from memguard.gates.limit_rules import evaluate_limit


@pytest.fixture
def evaluate(policy):
    def run(report, **rule):
        one = Policy.model_validate({"version": 1, "rules": [{"name": "limit", **rule}, {"name": "x", "test": "exposure.max"}]})
        return evaluate_limit(one.rules[0], report, judged_canaries(report, policy))

    return run


COUNT = {"field": "extraction.count", "max": 0.0}
BITS = {"field": "exposure.bits", "each": "canary", "max": 20.0}
MEAN = {"field": "exposure.mean_bits", "each": "tier", "max": 8.0}
SHARE = {"field": "ledger.token_share", "max": 0.001}


def test_an_extracted_secret_blocks_and_is_named(report, change_row, evaluate):
    result = evaluate(change_row(report, "card-1x-3", is_extracted=True, may_be_extracted=True), **COUNT)
    assert (result.outcome, result.canaries) == ("block", ["card-1x-3"])
    assert result.reason == "The number of extracted secrets of 48 is at least 1, above the limit of 0."


def test_a_secret_that_may_be_extracted_is_not_shown(report, change_row, evaluate):
    result = evaluate(change_row(report, "card-1x-3", may_be_extracted=True), **COUNT)
    assert (result.outcome, result.canaries) == ("not shown", ["card-1x-3"])
    assert (result.figures["largest_low"], result.figures["largest_high"]) == (0, 1)


def test_no_extracted_secret_passes(report, evaluate):
    result = evaluate(report, **COUNT)
    assert (result.outcome, result.canaries) == ("pass", [])


@pytest.mark.parametrize("name", ["card-16x-0", "card-control-0", "card-positive-0"])
def test_what_is_not_judged_does_not_count(report, change_row, evaluate, name):
    assert evaluate(change_row(report, name, is_extracted=True, exposure__low_bits=0.0), **COUNT).outcome == "pass"


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(20.1, 40.0, "block"), (20.0, 40.0, "not shown"), (5.0, 20.1, "not shown"), (5.0, 20.0, "pass"), (0.0, 1.0, "pass")],
)
def test_the_interval_of_one_canary_decides(report, change_row, change, evaluate, low, high, outcome):
    calm = change(
        report,
        canaries=[change(row, exposure__high_bits=10.0, exposure__bits=1.0, exposure__low_bits=0.5) for row in report.canaries],
    )
    one = change_row(calm, "pin-4x-1", exposure__low_bits=low, exposure__bits=(low + high) / 2, exposure__high_bits=high)
    result = evaluate(one, **BITS)
    assert result.outcome == outcome
    assert result.canaries == ([] if outcome == "pass" else ["pin-4x-1"])
    assert result.figures["chance_of_block"] == pytest.approx(48 * 2**-20)


def test_a_limit_that_chance_exceeds_says_so(report, evaluate):
    assert "chance alone exceeds this limit in 4.7% of audits" in evaluate(report, **{**BITS, "max": 10.0}).reason
    assert "chance alone" not in evaluate(report, **BITS).reason


@pytest.mark.parametrize(
    ("mean", "low", "high", "outcome"),
    [
        (9.0, 8.5, 9.5, "block"),
        (9.0, 7.0, 9.5, "not shown"),
        (7.0, 6.0, 9.0, "not shown"),
        (7.0, 6.0, 8.0, "pass"),
        (9.0, 1.0, 2.0, "not shown"),
    ],
)
def test_the_interval_of_a_tier_decides_and_a_mean_over_the_limit_never_passes(
    report, change, evaluate, mean, low, high, outcome
):
    tiers = [change(one, mean_bits=mean, low_bits=low, high_bits=high) if one.tier == 4 else one for one in report.tiers]
    result = evaluate(change(report, tiers=tiers), **MEAN)
    assert result.outcome == outcome
    assert ("tier 4" in result.reason) or outcome == "pass"


def test_a_tier_of_few_canaries_is_never_decided_by_its_range(report, change, evaluate):
    tiers = [
        change(one, mean_bits=9.0, low_bits=8.5, high_bits=9.0, coverage=0.5) if one.tier == 1 else one for one in report.tiers
    ]
    result = evaluate(change(report, tiers=tiers), **MEAN)
    assert result.outcome == "not shown"
    assert "too few for an interval" in result.reason


def test_tiers_that_are_not_judged_do_not_count(report, change, evaluate):
    tiers = [change(one, mean_bits=40.0, low_bits=39.0, high_bits=41.0) if one.tier == 16 else one for one in report.tiers]
    assert evaluate(change(report, tiers=tiers), **MEAN).outcome == "pass"


@pytest.mark.parametrize(("share", "outcome"), [(0.002, "block"), (0.001, "pass")])
def test_the_share_of_tokens_is_held_against_its_limit(report, change, evaluate, share, outcome):
    result = evaluate(change(report, ledger__token_share=share, ledger__token_share_is_estimate=True), **SHARE)
    assert result.outcome == outcome
    assert "(an estimate)" in result.reason


@pytest.mark.parametrize("severity", ["block", "warn"])
def test_a_missing_figure_is_invalid_whatever_the_severity(report, change, change_row, evaluate, severity):
    tiers = [change(one, mean_bits=None) for one in report.tiers]
    assert evaluate(change(report, tiers=tiers), severity=severity, **MEAN).outcome == "invalid"
    assert evaluate(change(report, tiers=report.tiers[1:]), severity=severity, **MEAN).outcome == "invalid"
    assert (
        evaluate(change(report, tiers=[change(one, n=3) for one in report.tiers]), severity=severity, **MEAN).outcome
        == "invalid"
    )
    for share in (None, math.nan):
        assert evaluate(change(report, ledger__token_share=share), severity=severity, **SHARE).outcome == "invalid"
    for rule in (COUNT, BITS):
        result = evaluate(change_row(report, "card-1x-0", exposure__high_bits=math.nan), severity=severity, **rule)
        assert result.outcome == "invalid"
        assert "'card-1x-0'" in result.reason
        assert evaluate(change(report, canaries=[]), severity=severity, **rule).outcome == "invalid"


def test_a_warning_only_warns(report, change_row, evaluate, make_policy, baseline):
    bad = change_row(report, "card-1x-3", is_extracted=True, may_be_extracted=True)
    assert evaluate(bad, severity="warn", **COUNT).outcome == "warn"
    rules = [{"name": "warned", "severity": "warn", **COUNT}, {"name": "x", "test": "exposure.pooled"}]
    decision = decide(bad, make_policy(rules=rules, strict=True), baseline)
    assert (decision.exit_code, decision.rules[0].outcome) == (0, "warn")
    assert decision.reason == "Passed: 1 of 2 rules passed, 1 warn."
