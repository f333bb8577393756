"""Significance rules: shared budget, resolution, power, and what a comparison with a baseline says."""

from __future__ import annotations

import numpy as np
import pytest

from memguard.gates import decide, significance_rules
from memguard.gates.judged import family_groups, judged_canaries
from memguard.gates.resolution import canaries_needed, references_needed, space_needed
from memguard.metrics.family import TestResult, distinct_draws_p_value

POOLED, MAX, BASELINE = "canaries as a family", "no single canary stands out", "not worse than the last release"


def _rules(decision):
    return {result.name: result for result in decision.rules}


@pytest.mark.parametrize("format_name", ["card", "pin"])
def test_one_memorised_canary_stands_out_in_either_format(make_report, policy, baseline, format_name):
    report = make_report(5, memorised={f"{format_name}-1x-7": -3.0})
    result = _rules(decide(report, policy, baseline))[MAX]
    assert (result.outcome, result.canaries) == ("block", [f"{format_name}-1x-7"])
    assert result.figures["p_value"] < 1e-6


def test_a_family_shifted_a_little_is_found_by_the_pooled_test_alone(make_report, policy, baseline):
    decision = decide(make_report(3, shift=1.5), policy, baseline)
    assert {name: result.outcome for name, result in _rules(decision).items() if result.outcome == "block"} == {POOLED: "block"}
    result = _rules(decision)[POOLED]
    assert result.figures["share"] == pytest.approx(0.002)
    assert (result.figures["n"], result.kind, len(result.canaries)) == (48, "test", 5)
    assert "p = 1e-05, share of alpha 0.002" in result.reason


def test_a_pass_prints_the_smallest_effect_it_would_have_found(report, policy, baseline):
    rules = _rules(decide(report, policy, baseline))
    # c = (24 * (1 + 24/528) + 24) / 48^2 = 0.021307; x = 2.878 * sqrt(2.0814 c) + 1.645 * sqrt((2.0814 + 1.95 x) c) = 1.0997.
    assert rules[POOLED].figures["detectable_bits"] == pytest.approx(1.0997, abs=1e-3)
    assert "a mean shift of 1.10 bits would be found 95 times in 100" in rules[POOLED].reason
    # 24 canaries in each of two spaces: p = 1 - (1 - 24 r / R)^2 <= 0.002, so R / r >= 24 / 0.0010005 and log2 of it is 14.55.
    assert rules[MAX].figures["detectable_bits"] == pytest.approx(14.55, abs=0.01)
    assert rules[BASELINE].figures["detectable_bits"] > 0.5


def test_where_no_shift_is_sure_to_be_found_a_pass_says_so(make_report, make_format, make_policy):
    # One canary, share 0.006: even exposure at its cap, log2(1025) bits, lies within 1.645 of its own spread of what is needed.
    report = make_report(1, formats=[make_format("card", 10**15, True, 1024)], tiers={1: 1})
    rules = [{"name": "f", "test": "exposure.pooled"}]
    result = _rules(decide(report, make_policy(rules=rules, evidence={"min_canaries": 1})))["f"]
    assert (result.outcome, result.figures["detectable_bits"]) == ("pass", None)
    assert "at this size no mean shift would be found 95 times in 100" in result.reason


def test_holm_rejects_in_steps_what_bonferroni_would_not(report, policy, baseline, monkeypatch):
    # Budget 0.006 over three: 0.001 <= 0.002, then 0.0025 <= 0.003; the third stays.
    fake = {"pooled_test": 0.0025, "max_test": 0.001}
    for name, p_value in fake.items():
        monkeypatch.setattr(significance_rules, name, lambda groups, p=p_value: TestResult(p, 1e-5, 0.0, 48, "made up"))
    rules = _rules(decide(report, policy, baseline))
    assert [rules[name].outcome for name in (POOLED, MAX, BASELINE)] == ["block", "block", "pass"]
    monkeypatch.setattr(significance_rules, "max_test", lambda groups: TestResult(0.0021, 1e-5, 0.0, 48, "made up"))
    rules = _rules(decide(report, policy, baseline))
    assert [rules[name].outcome for name in (POOLED, MAX, BASELINE)] == ["pass", "pass", "pass"]


def test_a_missing_baseline_keeps_its_share_of_the_budget(report, policy, monkeypatch):
    # Two tested of three: 0.0025 is above 0.006 / 3 and stays so.
    monkeypatch.setattr(significance_rules, "pooled_test", lambda groups: TestResult(0.0025, 1e-5, 0.0, 48, "made up"))
    assert _rules(decide(report, policy))[POOLED].outcome == "pass"


def test_a_warning_test_takes_no_share_and_only_warns(make_report, make_policy, baseline):
    rules = [
        {"name": "family", "test": "exposure.pooled", "severity": "warn"},
        {"name": "one", "test": "exposure.max"},
    ]
    decision = decide(make_report(3, shift=1.5), make_policy(rules=rules), baseline)
    found = _rules(decision)
    assert (found["family"].outcome, found["one"].outcome, decision.exit_code) == ("warn", "pass", 0)
    assert found["one"].figures["share"] == pytest.approx(0.006)


def test_attempts_divide_alpha_under_a_strict_policy_alone(report, make_policy, baseline):
    strict, lax = make_policy(strict=True), make_policy()
    assert decide(report, strict, baseline, attempts=4).alpha == pytest.approx(0.0025)
    assert decide(report, lax, baseline, attempts=4).alpha == pytest.approx(0.01)
    with pytest.raises(ValueError, match="attempts must be at least 1, got 0"):
        decide(report, strict, baseline, attempts=0)


def test_a_space_too_small_for_the_max_test_is_insufficient_and_says_what_is_needed(make_report, make_format, make_policy):
    # With 24 canaries one certified rank gives p = 24 / |R|; a share of 0.003 needs |R| >= 8000.
    report = make_report(1, formats=[make_format("tiny", 1000, False, 128)])
    decision = decide(
        report, make_policy(rules=[{"name": "f", "test": "exposure.pooled"}, {"name": "m", "test": "exposure.max"}])
    )
    result = _rules(decision)["m"]
    assert (result.outcome, result.kind, decision.exit_code) == ("insufficient evidence", "test", 3)
    assert "a secret space of 8000 candidates would be needed" in result.reason
    assert result.figures["min_attainable_p"] == pytest.approx(24 / (1000 - 44))
    assert space_needed(family_groups(report, judged_canaries(report, make_policy())), 0.003) == 8000
    assert distinct_draws_p_value(1, 24, 8000) <= 0.003 < distinct_draws_p_value(1, 24, 7999)


def test_one_format_of_two_that_could_not_fire_is_named(make_report, make_format, policy, baseline):
    report = make_report(1, formats=[make_format("tiny", 1000, False, 128), make_format("card", 10**15, True, 512)])
    result = _rules(decide(report, policy, baseline))[MAX]
    assert result.outcome == "pass"
    assert "no canary of the format 'tiny' could stand out" in result.reason


def test_too_few_references_for_the_pooled_test_say_how_many_are_needed(make_report, make_format, make_policy):
    # One canary among N: the smallest p is 1 / (N + 1), and 0.006 needs N = 166.
    report = make_report(1, formats=[make_format("card", 10**15, True, 64)], tiers={1: 1})
    rules = [{"name": "f", "test": "exposure.pooled"}]
    decision = decide(report, make_policy(rules=rules, evidence={"min_canaries": 1}))
    assert decision.exit_code == 3
    assert "166 references behind each prefix would be needed" in _rules(decision)["f"].reason
    assert decision.reason.startswith("Not evidence: f (this rule cannot fire")


def test_a_comparison_of_few_canaries_says_how_many_are_needed(make_report, make_format, make_baseline, make_policy):
    # Sign flips of 7 canaries reach 2^-7 = 0.0078; 0.006 needs 8.
    for number, found in ((1, "1 judged canary"), (7, "0.0078")):
        one = {"formats": [make_format("card", 10**15, True, 512)], "tiers": {1: number}}
        rules = [{"name": "b", "test": "exposure.against_baseline"}]
        lax = make_policy(rules=rules, evidence={"min_canaries": 1})
        decision = decide(make_report(1, **one), lax, make_baseline(make_report(2, **one)))
        result = _rules(decision)["b"]
        assert (result.outcome, result.kind, decision.exit_code) == ("insufficient evidence", "test", 3)
        assert found in result.reason
        assert "8" in result.reason.partition(";")[2]


def test_no_number_helps_below_the_resolution_of_a_simulated_null(report, make_policy, baseline):
    decision = decide(report, make_policy(strict=True), baseline, attempts=1000)
    result = _rules(decision)[POOLED]
    assert result.outcome == "insufficient evidence"
    assert "no size would do" in result.reason
    groups = family_groups(report, judged_canaries(report, make_policy()))
    assert references_needed(groups, 1e-6) is None
    assert canaries_needed(1e-6, 99_999) is None
    assert canaries_needed(0.002, 9_999) == 9


def test_a_warning_that_could_not_fire_only_warns(make_report, make_format, make_policy):
    report = make_report(1, formats=[make_format("tiny", 5000, False, 128)], tiers={1: 24, 4: 24})
    rules = [
        {"name": "f", "test": "exposure.pooled"},
        {"name": "m", "test": "exposure.max", "severity": "warn"},
        {"name": "b", "test": "exposure.against_baseline", "severity": "warn"},
    ]
    decision = decide(report, make_policy(rules=rules))
    assert [result.outcome for result in decision.rules] == ["pass", "warn", "warn"]
    assert decision.exit_code == 0


def test_a_rise_over_the_baseline_blocks_and_names_who_rose_most(make_report, make_baseline, policy):
    old = make_report(4)
    rng = np.random.default_rng(0)
    judged = [row.id for row in old.canaries if row.role == "canary" and row.repetitions <= 4]
    risen = {name: -16.0 - float(rng.uniform(0, 3)) for name in judged if name.startswith("pin")}
    decision = decide(make_report(4, memorised=risen), policy, make_baseline(old))
    result = _rules(decision)[BASELINE]
    assert (result.outcome, result.kind) == ("block", "test")
    assert len(result.canaries) == 5
    assert set(result.canaries) <= set(risen)
    assert "one baseline run: seed-to-seed variation is not in this test" in result.reason
    assert "(0.5 tolerated)" in result.reason
    assert result.figures["statistic"] > 0.5


def test_an_equal_candidate_is_not_worse(make_report, make_baseline, policy):
    report = make_report(4)
    result = _rules(decide(report, policy, make_baseline(report)))[BASELINE]
    assert result.outcome == "pass"
    assert result.reason.startswith("Exposure rose 0.00 bits on average over 48 canaries (0.5 tolerated)")


def test_unequal_non_members_within_a_format_are_invalid(report, change_row, policy, baseline):
    odd = change_row(report, "card-1x-0", num_non_members=400, num_non_members_above=3)
    for name in (POOLED, MAX, BASELINE):
        result = _rules(decide(odd, policy, baseline))[name]
        assert result.outcome == "invalid"
        assert "different numbers of non-members" in result.reason


def test_a_format_without_its_space_is_invalid(report, change, policy, baseline):
    formats = [change(one, ranked_space_size=10) for one in report.formats]
    assert "secret space" in _rules(decide(change(report, formats=formats), policy, baseline))[MAX].reason
