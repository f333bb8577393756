"""Rules on what a full audit measures: real records, membership, a stated epsilon, and what the model wrote of controls."""

from __future__ import annotations

import math

import pytest

from memguard.audit.report_extraction import Extraction, SamplerSettings
from memguard.audit.report_membership import Membership, MembershipScore, ShiftCheck
from memguard.audit.report_privacy import Privacy
from memguard.audit.report_records import Records, RecordSet
from memguard.gates import Policy, decide
from memguard.gates.judged import judged_canaries
from memguard.gates.limit_rules import evaluate_limit
from memguard.metrics.intervals import share_interval
from memguard.metrics.privacy import audit_one_run


def with_records(report, *, num_greedy: int, n: int):
    ends = share_interval(num_greedy, n, confidence=0.95)
    found = RecordSet(
        n=n,
        num_too_short=0,
        num_greedy=num_greedy,
        greedy_share=num_greedy / n,
        greedy_low=ends.low,
        greedy_high=ends.high,
        confidence=0.95,
        curve=[],
        rows=[],
    )
    return report.model_copy(update={"records": Records(prefix_tokens=50, suffix_tokens=50, max_edits=0, members=found)})


def with_membership(report, ends: list[tuple[float | None, float | None]], *, label: str = "membership"):
    scores = [
        MembershipScore(
            name=name, auroc=0.5, low=low, high=high, confidence=0.95, p_value=0.5, n_members=100, n_non_members=100, tpr=[]
        )
        for name, (low, high) in zip(("loss", "zlib"), ends, strict=False)
    ]
    shift = ShiftCheck.model_construct(is_shift=label != "membership")
    found = Membership(
        label=label, scores=scores, shift=shift, reference=False, max_tokens=64, num_tokens=10_000, num_undefined_tokens=0
    )
    return report.model_copy(update={"membership": found})


def with_privacy(
    report, *, num_correct: int, num_guesses: int, stated: float | None, is_comparable: bool = True, tied: int = 0
):
    scores = [float(index) for index in range(2 * num_guesses)]
    half = num_guesses // 2
    wrong = num_guesses - num_correct
    is_in = [index >= num_guesses for index in range(2 * num_guesses)]
    for index in range(wrong):  # the most confident guesses of either side are the wrong ones
        place = len(is_in) - 1 - index if index < half else index - half
        is_in[place] = not is_in[place]
    bound = audit_one_run(scores, is_in, num_guesses=num_guesses, stated_epsilon=stated)
    found = Privacy(
        **{name: getattr(bound, name) for name in bound.__dataclass_fields__ if name != "flags"},
        score="log p, standardised within format",
        is_comparable=is_comparable,
    )
    return report.model_copy(update={"privacy": found})


@pytest.fixture
def evaluate(policy):
    def run(report, **rule):
        one = Policy.model_validate({"version": 1, "rules": [{"name": "limit", **rule}, {"name": "x", "test": "exposure.max"}]})
        return evaluate_limit(one.rules[0], report, judged_canaries(report, policy))

    return run


GREEDY = {"field": "records.greedy_share", "max": 0.05}
AUROC = {"field": "membership.auroc", "max": 0.6}


@pytest.mark.parametrize(("num_greedy", "outcome"), [(20, "block"), (6, "not shown"), (0, "pass")])
def test_the_share_of_written_records_has_three_outcomes(report, evaluate, num_greedy, outcome):
    # Clopper-Pearson at 95%: 20 of 100 is [.127, .292], 6 of 100 [.022, .126], 0 of 100 [0, .036]
    result = evaluate(with_records(report, num_greedy=num_greedy, n=100), **GREEDY)
    assert result.outcome == outcome
    assert "the share of 100 real records that greedy decoding writes" in result.reason.lower()


@pytest.mark.parametrize("field", ["records.greedy_share", "membership.auroc", "ledger.token_share"])
@pytest.mark.parametrize("limit", [1.0, 2.0])
def test_a_limit_on_a_share_that_could_never_block_is_refused(field, limit):
    with pytest.raises(ValueError, match=f"the field {field} lies in 0..1, so a max of {limit:g} could never block"):
        Policy.model_validate({"version": 1, "rules": [{"name": "limit", "field": field, "max": limit}]})


def test_records_that_were_not_measured_are_no_pass(report, evaluate):
    result = evaluate(report, **GREEDY)
    assert result.outcome == "invalid"
    assert "audit with --data" in result.reason


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([(0.45, 0.55), (0.61, 0.7)], "block"),
        ([(0.45, 0.55), (0.5, 0.61)], "not shown"),
        ([(0.45, 0.55), (0.5, 0.6)], "pass"),
        ([(0.45, 0.55), (None, None)], "invalid"),
        ([], "invalid"),
    ],
)
def test_every_membership_score_must_be_within_the_limit(report, evaluate, ends, outcome):
    assert evaluate(with_membership(report, ends), **AUROC).outcome == outcome


def test_a_distribution_shift_or_no_membership_is_no_pass(report, evaluate):
    shifted = with_membership(report, [(0.4, 0.5)], label="distribution shift, not membership")
    assert "differ without any model" in evaluate(shifted, **AUROC).reason
    assert evaluate(shifted, **AUROC).outcome == evaluate(report, **AUROC).outcome == "invalid"


STATED = [{"name": "the stated guarantee", "test": "privacy.stated_epsilon"}]


def outcome_of(report, make_policy):
    decision = decide(report, make_policy(rules=STATED))
    return decision, decision.rules[0]


def test_a_refuted_guarantee_blocks_and_one_that_holds_passes(report, make_policy):
    # 100 of 100 right under epsilon 1: (e / (1 + e))^100 = 2e-14; 60 of 100 right is what epsilon 1 allows (73 expected).
    decision, rule = outcome_of(with_privacy(report, num_correct=100, num_guesses=100, stated=1.0), make_policy)
    assert (decision.exit_code, rule.outcome) == (1, "block")
    assert rule.figures["p_value"] == pytest.approx((math.e / (1 + math.e)) ** 100, rel=1e-6)
    decision, rule = outcome_of(with_privacy(report, num_correct=60, num_guesses=100, stated=1.0), make_policy)
    assert (decision.exit_code, rule.outcome) == (0, "pass")
    assert "60 of 100 guesses were right; epsilon 1 is stated" in rule.reason


def test_a_guarantee_beyond_the_cap_is_no_pass_and_says_how_many_guesses_it_takes(report, make_policy):
    decision, rule = outcome_of(with_privacy(report, num_correct=100, num_guesses=100, stated=8.0), make_policy)
    assert (decision.exit_code, rule.outcome) == (3, "insufficient evidence")
    # All r right has p = (e^8 / (1 + e^8))^r <= .006 from r = ln .006 / -ln(1 + e^-8) = 15,253.3 on, and r is even.
    assert "15254 guesses would be needed" in rule.reason


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stated": None}, "The run states no epsilon"),
        ({"is_comparable": False}, "canaries did not enter as records before the DP sampler"),
    ],
)
def test_a_guarantee_that_cannot_be_compared_is_no_evidence(report, make_policy, changes, match):
    options = {"num_correct": 100, "num_guesses": 100, "stated": 1.0} | changes
    decision, rule = outcome_of(with_privacy(report, **options), make_policy)
    assert (decision.exit_code, rule.outcome) == (3, "invalid")
    assert match in rule.reason


def test_without_coins_there_is_nothing_to_hold_a_guarantee_against(report, make_policy):
    decision, rule = outcome_of(report, make_policy)
    assert decision.exit_code == 3
    assert "No coins were thrown" in rule.reason


@pytest.mark.parametrize(("num_found", "is_evidence"), [(1, False), (0, True)])
def test_a_control_that_the_model_wrote_is_a_leak(report, policy, num_found, is_evidence):
    found = Extraction(
        sampler=SamplerSettings(), curves=[], num_prompts=3, num_found=0, num_controls_found=num_found, chance_of_match=1e-6
    )
    evidence = decide(report.model_copy(update={"extraction": found}), policy).evidence
    result = next(one for one in evidence if one.name == "controls look like chance")
    assert (result.outcome == "pass") is is_evidence
    assert is_evidence or "the model wrote the secrets of 1 control" in result.reason.lower()
