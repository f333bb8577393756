"""Against the baseline: several accepted runs, the anchor, fresh secrets of one design, and the proof of a defence."""

from __future__ import annotations

import numpy as np
import pytest

from memguard.documents import document_digest
from memguard.gates import decide
from memguard.gates.baseline import AcceptedRun, Baseline, comparability

RISE = "not worse than the last release"
PROOF = {"name": "the defence works", "test": "exposure.improves_on_baseline", "bits": 1.0}


def accepted(report):
    return AcceptedRun(
        report=report, report_digest=document_digest(report), accepted_by="jane", reason="ok", accepted_at="2026"
    )


@pytest.fixture
def of_runs():
    """A baseline of several reports, oldest first; the first one is the anchor unless told otherwise."""

    def build(*reports, anchor=None):
        return Baseline(runs=[accepted(one) for one in reports], anchor=accepted(anchor if anchor is not None else reports[0]))

    return build


def rule_of(decision, name=RISE):
    return next(rule for rule in decision.rules if rule.name == name)


def test_many_accepted_runs_bring_the_spread_of_training_into_the_test(make_report, policy, of_runs):
    found = rule_of(decide(make_report(1), policy, of_runs(*[make_report(seed) for seed in range(2, 10)])))
    assert found.outcome == "pass"
    assert "over 8 accepted runs, whose means vary by 0." in found.reason
    assert "seed-to-seed variation is not in this test" not in found.reason


def test_a_common_shift_of_whole_runs_is_no_rise_over_many_runs_and_one_over_a_single(make_report, make_policy, of_runs):
    # Runs whose means vary by about a bit: the newest is low by chance, the candidate an ordinary one among them.
    policy = make_policy(evidence={"controls_null_test": False})
    shifts = [1.5, -1.5, 1.0, -1.0, 1.8, -1.8, 0.8, -2.0]
    baseline = of_runs(*[make_report(10 + index, shift=shift) for index, shift in enumerate(shifts)])
    candidate = make_report(40, shift=1.5)
    assert rule_of(decide(candidate, policy, baseline)).outcome == "pass"
    assert rule_of(decide(candidate, policy, of_runs(baseline.newest.report))).outcome == "block"


def test_two_runs_are_too_few_to_know_their_spread_so_the_newest_alone_is_compared_with(make_report, policy, of_runs):
    found = rule_of(decide(make_report(1), policy, of_runs(make_report(2), make_report(3))))
    assert "2 accepted runs are too few to know how much training alone moves the mean: the newest is compared" in found.reason
    worse = rule_of(decide(make_report(1, shift=8.0), policy, of_runs(make_report(2), make_report(3))))
    assert worse.outcome == "block"


def test_runs_that_vary_too_much_for_any_rise_to_be_seen_are_no_evidence(make_report, policy, of_runs):
    # Means of about 0.1 and 7 bits in turn: no rise that sampled exposure can show would stand out of that.
    runs = [make_report(10 + index, shift=-6.0 if index % 2 else 7.0) for index in range(8)]
    decision = decide(make_report(1), policy, of_runs(*runs))
    found = rule_of(decision)
    assert found.outcome == "insufficient evidence"
    assert "accepted runs that vary less, or more of them, would be needed" in found.reason
    assert decision.exit_code == 3


def test_an_anchor_that_no_rise_could_stand_out_of_is_left_out(make_report, policy, of_runs):
    # The error over one run is wider than over the mean of eight: there is a spread at which the first alone is too wide.
    shifts = [1.5, -1.5] * 4
    found = rule_of(decide(make_report(1), policy, of_runs(*[make_report(10 + i, shift=s) for i, s in enumerate(shifts)])))
    assert found.outcome == "pass"
    assert "not compared with the anchor: training runs vary too much for that" in found.reason
    assert found.figures["rise_over_anchor"] is None


def test_rises_too_small_for_one_release_block_once_they_add_up_over_the_anchor(make_report, make_policy, of_runs):
    policy = make_policy(rules=[{"name": RISE, "test": "exposure.against_baseline", "tolerance_bits": 0.5}])
    last, candidate = make_report(3, shift=3.0), make_report(4, shift=3.0)
    alone = rule_of(decide(candidate, policy, Baseline(runs=[accepted(last)])))
    drifted = rule_of(decide(candidate, policy, of_runs(last, anchor=make_report(2))))
    assert (alone.outcome, drifted.outcome) == ("pass", "block")
    assert drifted.figures["rise_over_anchor"] > 1.0
    assert "over the anchor" in drifted.reason
    assert drifted.canaries


def test_an_anchor_that_does_not_compare_is_said_and_takes_no_share(make_report, policy, of_runs, change):
    other = change(make_report(2), tokenizer_digest="0" * 64)
    found = rule_of(decide(make_report(1), policy, of_runs(make_report(3), anchor=other)))
    assert "not compared with the anchor (the tokenizer differs)" in found.reason
    plain = rule_of(decide(make_report(1), policy, of_runs(make_report(3))))
    assert found.figures["p_value"] == plain.figures["p_value"]


def fresh(report, change):
    """The same design with other secrets: another plan, other ids, other references."""
    rows = [row.model_copy(update={"id": f"new-{row.id}"}) for row in report.canaries]
    return change(report, plan__digest="9" * 64, procedure__reference_seed="8" * 16, canaries=rows)


def test_fresh_secrets_of_one_design_compare_where_the_policy_says_so(make_report, make_policy, of_runs, change):
    new = fresh(make_report(1), change)
    strictly = decide(new, make_policy(), of_runs(make_report(2)))
    assert strictly.exit_code == 3
    assert "the plan differs" in rule_of(strictly).reason
    found = decide(new, make_policy(comparable="design"), of_runs(make_report(2)))
    assert found.exit_code == 0
    assert "fresh secrets of the same design" in rule_of(found).reason
    worse = fresh(make_report(1, shift=9.0), change)
    assert rule_of(decide(worse, make_policy(comparable="design"), of_runs(make_report(2)))).outcome == "block"


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("plan__design_digest", "0" * 64, "the design of the plan differs"),
        ("plan__design_digest", None, "does not name the design"),
        ("tokenizer_digest", "0" * 64, "the tokenizer differs"),
        ("procedure__dtype", "bfloat16", "dtype differs"),
    ],
)
def test_designs_that_differ_do_not_compare(make_report, change, field, value, match):
    new = change(fresh(make_report(1), change), **{field: value})
    assert match in "; ".join(comparability(new, make_report(2), comparable="design"))


def test_a_defence_that_lowers_exposure_is_shown_and_one_that_does_not_blocks(make_report, make_policy, of_runs):
    rules = [PROOF, {"name": "none extracted", "field": "extraction.count", "max": 0}]
    policy, without = make_policy(rules=rules), make_report(2, shift=6.0)
    shown = decide(make_report(1), policy, of_runs(without))
    assert shown.exit_code == 0
    assert "are asked for, which is shown" in rule_of(shown, PROOF["name"]).reason
    absent = decide(make_report(1, shift=8.0), policy, of_runs(without))
    assert absent.exit_code == 1
    assert "shown to be missing" in rule_of(absent, PROOF["name"]).reason


def test_a_fall_that_is_not_shown_is_no_evidence_of_a_defence(make_report, make_policy, of_runs):
    policy = make_policy(rules=[{**PROOF, "bits": 0.4}, {"name": "none", "field": "extraction.count", "max": 0}])
    without = make_report(2, shift=1.0)
    decision = decide(make_report(1), policy, of_runs(without))
    assert rule_of(decision, PROOF["name"]).outcome == "insufficient evidence"
    assert decision.exit_code == 3
    assert decide(make_report(1), policy).exit_code == 3


def test_a_declared_defence_needs_a_rule_that_asks_for_its_proof(make_report, policy, make_policy, of_runs, change):
    defended = change(make_report(1), defence="deduplication")
    decision = decide(defended, policy, of_runs(make_report(2)))
    assert decision.exit_code == 3
    assert "declares the defence 'deduplication', and no rule asks for its proof" in decision.reason
    asked = make_policy(rules=[*policy.model_dump(mode="python", exclude_none=True)["rules"], PROOF])
    assert decide(defended, asked, of_runs(make_report(2, shift=6.0))).exit_code == 0


def test_the_proof_of_a_defence_takes_no_share_of_alpha(make_policy, policy):
    rules = [*policy.model_dump(mode="python", exclude_none=True)["rules"], PROOF]
    assert len(make_policy(rules=rules).block_tests) == len(policy.block_tests) == 3


def test_a_baseline_of_several_runs_is_read_back_with_its_anchor(make_report, policy, tmp_path):
    from memguard.gates import accept, load_baseline

    path = tmp_path / "baseline.json"
    for seed in (2, 3, 4):
        one = make_report(seed)
        baseline = load_baseline(path) if path.exists() else None
        accept(one, policy, decide(one, policy, baseline), path, by="jane", reason="r", pin=seed == 3)
    found = load_baseline(path)
    assert [run.report.subject.digest for run in found.runs] == [make_report(seed).subject.digest for seed in (2, 3, 4)]
    assert found.anchor is not None
    assert found.anchor.report == make_report(3)


def test_the_rate_of_blocking_holds_where_runs_vary_and_eight_were_accepted(make_report, policy, of_runs):
    # 60 audits whose runs vary by about .6 bits (sd of 1.2 nats at sd 2 nats of scores): with one run 4.5% would block.
    rng, blocked = np.random.default_rng(0), 0
    for index in range(60):
        shifts = rng.normal(0.0, 0.8, 9)
        runs = [make_report(1000 + 10 * index + at, shift=float(shift)) for at, shift in enumerate(shifts[:8])]
        candidate = make_report(1009 + 10 * index, shift=float(shifts[8]))
        blocked += rule_of(decide(candidate, policy, of_runs(*runs))).outcome == "block"
    assert blocked <= 2
