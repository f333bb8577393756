"""Every evidence requirement alone: what fails it is exit code 3, with the reason in one sentence."""

from __future__ import annotations

import math

import pytest

from memguard.gates import decide


@pytest.fixture
def failing(policy, baseline):
    """The one evidence requirement that fails for a report."""

    def find(report, rules=policy):
        decision = decide(report, rules, baseline)
        assert (decision.outcome, decision.exit_code) == ("invalid", 3)
        assert decision.reason.startswith("Not evidence: ")
        failed = [result for result in decision.evidence if result.outcome == "invalid"]
        assert len(failed) == 1, failed
        assert failed[0].reason.endswith(".")
        return failed[0]

    return find


def test_the_made_up_report_passes_every_requirement(report, policy, baseline):
    decision = decide(report, policy, baseline)
    assert (decision.outcome, decision.exit_code) == ("pass", 0)
    assert {result.outcome for result in decision.evidence} == {"pass"}


def test_an_invalid_report_is_quoted(report, change, failing):
    result = failing(change(report, status="invalid", invalid_reasons=["3 references have no finite score."]))
    assert result.name == "the audit is valid"
    assert result.reason == "3 references have no finite score."


def test_a_report_that_contradicts_its_status_is_invalid(report, change, failing):
    assert failing(change(report, invalid_reasons=["something"])).reason == "Something."
    assert "without a reason" in failing(change(report, status="invalid")).reason


def test_a_live_model_is_refused(report, change, failing):
    assert "live model" in failing(change(report, subject__kind="live")).reason


@pytest.mark.parametrize("digest", [None, ""])
def test_a_checkpoint_without_digest_is_refused(report, change, failing, digest):
    assert "the digest is missing" in failing(change(report, subject__digest=digest)).reason


def test_a_lost_row_is_noticed(report, change, policy, baseline):
    decision = decide(change(report, canaries=report.canaries[1:]), policy, baseline)
    result = next(result for result in decision.evidence if result.name == "every planned canary is in the report")
    assert decision.exit_code == 3
    assert "the plan has 56 of the role canary and the report has 55" in result.reason.lower()


def test_a_doubled_or_unknown_row_is_noticed(report, change, change_row, failing):
    first, second = report.canaries[0], report.canaries[1]
    assert "twice" in failing(change(report, canaries=[first, first, *report.canaries[2:]])).reason
    assert (
        "does not describe" in failing(change_row(report, "card-control-0", format=second.format + "x"), _no_controls()).reason
    )


def _no_controls():
    from memguard.gates import Policy, load_policy

    data = load_policy("default").model_dump(exclude_none=True)
    data["evidence"]["controls_null_test"] = False
    return Policy.model_validate(data)


@pytest.mark.parametrize("name", ["card-1x-0", "card-16x-0", "pin-control-3", "card-positive-0"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_a_canary_without_finite_score_is_named(report, change_row, failing, name, value):
    result = failing(change_row(report, name, log_prob=value))
    assert result.name == "every canary was scored"
    assert result.canaries == [name]
    assert f"'{name}'" in result.reason


@pytest.mark.parametrize(
    "updates",
    [
        {"exposure__method": "failed"},
        {"exposure__p_value": 0.0},
        {"exposure__p_value": 1.5},
        {"exposure__low_bits": 40.0},
        {"rank_low": 0},
        {"rank_high": 0},
        {"num_references_above": 10_000},
        {"num_references": 0},
        {"num_non_members_above": -1},
    ],
)
def test_figures_that_contradict_each_other_are_no_evidence(report, change_row, policy, baseline, updates):
    assert decide(change_row(report, "card-1x-0", **updates), policy, baseline).exit_code == 3


def _with_control_test(report, change, **updates):
    return change(report, controls=[change(report.controls[0], **updates), *report.controls[1:]])


@pytest.mark.parametrize("field", ["rank_sum_p", "max_p"])
def test_controls_that_do_not_look_like_chance_are_no_evidence(report, change, failing, policy, baseline, field):
    # 0.1 * 0.01 / (2 * 2 formats) = 2.5e-4 for each test.
    result = failing(_with_control_test(report, change, **{field: 2.4e-4}))
    assert "the controls of the format 'card' do not" in result.reason.lower()
    assert result.figures["level"] == pytest.approx(2.5e-4)
    assert decide(_with_control_test(report, change, **{field: 2.5e-4}), policy, baseline).exit_code == 0


@pytest.mark.parametrize("field", ["rank_sum_p", "max_p"])
@pytest.mark.parametrize("value", [None, math.nan, -0.1, 1.2])
def test_a_missing_p_value_of_the_controls_is_no_evidence(report, change, failing, field, value):
    assert "a p-value is missing" in failing(_with_control_test(report, change, **{field: value})).reason


def test_a_missing_null_test_is_no_evidence(report, change, failing):
    assert "have no null test over all 16" in failing(change(report, controls=report.controls[1:])).reason
    assert "have no null test over all 16" in failing(_with_control_test(report, change, num_controls=3)).reason
    assert "two null tests" in failing(change(report, controls=[*report.controls, report.controls[0]])).reason


def test_no_controls_at_all_is_no_evidence(make_report, failing):
    assert "there is no control" in failing(make_report(1, num_controls=0)).reason.lower()


def test_a_judged_format_without_controls_is_no_evidence(report, make_report, change, failing):
    bare = make_report(1, num_controls=0)
    rows = [row for row in report.canaries if row.format == "card"] + [row for row in bare.canaries if row.format == "pin"]
    mixed = change(report, canaries=rows, controls=report.controls[:1], plan__num_controls=16)
    assert "the format 'pin' has no control" in failing(mixed).reason.lower()


@pytest.mark.parametrize(
    ("updates", "match"),
    [
        ({"positive_control__kind": "none"}, "nothing was learnt or planted to be memorised"),
        ({"positive_control__n": 0}, "nothing was learnt or planted to be memorised"),
        ({"positive_control__best_p_value": None}, "no finite p-value"),
        ({"positive_control__best_p_value": math.nan}, "no finite p-value"),
        ({"positive_control__detected": False}, "were not seen"),
        ({"positive_control__best_p_value": 6e-4}, "were not seen: best p = 0.0006 of 2, needed 0.0005"),
    ],
)
def test_a_positive_control_that_was_not_seen_is_no_evidence(report, change, failing, updates, match):
    assert match in failing(change(report, **updates)).reason.lower()


def test_an_audit_that_was_not_full_has_no_probe_and_says_what_to_do(report, change, failing):
    short = change(report, positive_control__kind="none", plan__num_positive_controls=0)
    bare = short.model_copy(update={"canaries": [row for row in short.canaries if row.role != "positive_control"]})
    assert "not a full audit: audit the checkpoint with `memguard audit`" in failing(bare).reason


@pytest.mark.parametrize(("kind", "wanted"), [("probe", "in_training"), ("in_training", "probe")])
def test_the_other_kind_of_positive_control_is_not_what_the_policy_asks_for(report, change, make_policy, kind, wanted):
    other = change(report, positive_control__kind=kind)
    result = next(
        one for one in decide(other, make_policy(evidence={"positive_control": wanted})).evidence if "seen" in one.name
    )
    assert result.outcome == "invalid"
    assert f"of the kind {kind}, and the policy asks for {wanted}" in result.reason
    same = next(one for one in decide(other, make_policy(evidence={"positive_control": kind})).evidence if "seen" in one.name)
    assert same.outcome == "pass"


def test_the_positive_control_says_how_it_was_seen(report, policy):
    result = next(one for one in decide(report, policy).evidence if one.name == "memorisation could be seen")
    assert result.figures == {"best_p_value": report.positive_control.best_p_value, "n": 2, "level": 1e-3}
    assert "best p = " in result.reason


@pytest.mark.parametrize(
    ("updates", "match"),
    [
        ({"ledger__exact": False, "ledger__notes": ["packing was on."]}, "The ledger is not exact (packing was on)."),
        ({"ledger__num_seen": 0}, "the canaries were not trained on"),
        ({"ledger__num_seen": None}, "the canaries were not trained on"),
    ],
)
def test_a_ledger_that_proves_no_training_is_no_evidence(report, change, failing, updates, match):
    assert match in failing(change(report, **updates)).reason


def test_a_missing_ledger_is_no_evidence(report, change, failing):
    assert "no ledger was found" in failing(change(report, ledger__found=False)).reason.lower()


@pytest.mark.parametrize("num_seen", [0, None])
def test_a_canary_that_never_reached_the_loss_is_named(report, change_row, failing, num_seen):
    result = failing(change_row(report, "pin-4x-2", num_seen=num_seen))
    assert result.canaries == ["pin-4x-2"]
    assert "1 of 48 judged canaries that were due never reached the loss" in result.reason


def test_an_audit_before_any_canary_was_due_is_no_evidence(report, change, policy, baseline):
    rows = [change(row, num_insertions=0, num_seen=0) for row in report.canaries]
    decision = decide(change(report, canaries=rows), policy, baseline)
    failed = {result.name: result.reason for result in decision.evidence if result.outcome == "invalid"}
    assert decision.exit_code == 3
    assert "no judged canary was due" in failed["the canaries were trained on"].lower()
    assert "0 judged canaries that reached the loss" in failed["enough canaries"]


def test_canaries_that_were_not_yet_due_do_not_count(report, change_row, failing):
    early = report
    for index in range(10):
        early = change_row(early, f"card-4x-{index}", num_insertions=0, num_seen=0)
    assert failing(early).reason == "38 judged canaries that reached the loss, and the policy asks for 40."


def test_too_few_canaries_are_no_evidence(report, make_policy, failing):
    result = failing(report, make_policy(evidence={"min_canaries": 49}))
    assert result.figures == {"n": 48, "min": 49}


def test_secrets_from_a_seed_are_refused_unless_the_policy_takes_them(report, change, failing, make_policy, baseline):
    seeded = change(report, plan__reproducible=True)
    assert "drawn from a seed" in failing(seeded).reason
    assert decide(seeded, make_policy(evidence={"fresh_secrets": False}), baseline).exit_code == 0


def test_what_the_policy_does_not_ask_for_is_said_to_be_unchecked(report, change, make_policy, baseline):
    lax = {"controls_null_test": False, "positive_control": "none", "ledger_exact": False, "fresh_secrets": False}
    bare = change(report, controls=[], positive_control__kind="none", ledger__found=False, plan__reproducible=True)
    decision = decide(bare, make_policy(evidence=lax), baseline)
    assert decision.exit_code == 0
    unchecked = [result for result in decision.evidence if result.outcome == "warn"]
    assert len(unchecked) == 4
    assert all(result.reason.startswith("Not checked: the policy does not ask for it") for result in unchecked)


def test_a_ledger_against_training_counts_even_where_exactness_is_not_asked(
    report, change, change_row, make_policy, policy, baseline, failing
):
    lax = make_policy(evidence={"ledger_exact": False})
    assert decide(change(report, ledger__exact=False), lax, baseline).exit_code == 0
    assert decide(change(report, ledger__exact=False), policy, baseline).exit_code == 3
    assert "not trained on" in failing(change(report, ledger__exact=False, ledger__num_seen=0), lax).reason
