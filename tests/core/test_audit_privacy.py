"""Coins and rows of a report become a bound of epsilon and counterfactual memorisation, or no evidence at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pytest

from memguard.audit.privacy import Inclusion, measure_counterfactual, measure_privacy
from memguard.audit.report import CanaryRow, Exposure, Role
from memguard.audit.report_privacy import Counterfactual, Privacy
from memguard.errors import EvidenceError
from memguard.metrics.counterfactual import estimate_population_counterfactual
from memguard.metrics.privacy import PrivacyBound, audit_one_run, standardise_within


@dataclass(frozen=True)
class Tossed:
    """A canary as a plan knows it, with its scores."""

    id: str
    is_in: bool
    log_prob: float | None
    start: float | None = None
    tier: int = 1
    format: str = "pin"


def row(one: Tossed, role: Role | None = None) -> CanaryRow:
    return CanaryRow(
        id=one.id,
        format=one.format,
        role=role or ("canary" if one.is_in else "control"),
        tier=one.tier if one.is_in else 0,
        repetitions=one.tier if one.is_in else 0,
        num_insertions=0,
        num_seen=None,
        num_tokens=4,
        log_prob=one.log_prob,
        rank_low=None,
        rank_high=None,
        rank_high_with_siblings=None,
        num_siblings_above=0,
        num_references=9,
        num_references_above=0,
        num_references_tied=0,
        num_non_members=9,
        num_non_members_above=0,
        exposure=Exposure(
            bits=None, low_bits=None, high_bits=None, confidence=0.95, method="failed", cap_bits=1.0, p_value=None
        ),
        is_greedy=False,
        is_extracted=False,
        may_be_extracted=False,
        start_log_prob=one.start,
    )


def plain_control(number: int) -> CanaryRow:
    """A control that never had a coin."""
    return row(Tossed(f"plain-{number}", False, -1.0))


@dataclass(frozen=True)
class Case:
    tossed: Sequence[Tossed]
    inclusion: Inclusion = "coin"

    @property
    def shared(self) -> dict[str, object]:
        return {
            "inclusion": self.inclusion,
            "coins": {one.id: one.is_in for one in self.tossed},
            "tiers": {one.id: one.tier for one in self.tossed},
        }

    @property
    def rows(self) -> list[CanaryRow]:
        return [*(row(one) for one in self.tossed), plain_control(0), row(Tossed("fixed", True, -0.1), "positive_control")]

    def privacy(self, **keywords: object) -> Privacy | None:
        return measure_privacy(self.rows, **self.shared, **keywords)  # type: ignore[arg-type]

    def counterfactual(self) -> list[Counterfactual]:
        return measure_counterfactual(self.rows, **self.shared)  # type: ignore[arg-type]


def sixteen(**changes: object) -> list[Tossed]:
    """Alternating coins; the included score 10 nats above the others, and everything differs."""
    tossed = [Tossed(f"c{i:02d}", i % 2 == 0, -20.0 + 10.0 * (i % 2 == 0) - 0.1 * i) for i in range(16)]
    return [replace(one, **changes) for one in tossed]  # type: ignore[arg-type]


def test_a_plan_without_coins_has_neither_section() -> None:
    case = Case(sixteen(), inclusion="planned")
    assert case.privacy() is None
    assert case.counterfactual() == []
    assert measure_privacy([plain_control(0)], inclusion="coin", coins={}, tiers={}) is None


def test_half_of_the_coins_are_guessed_and_controls_without_a_coin_are_not() -> None:
    privacy = Case(sixteen()).privacy()
    assert privacy is not None
    assert (privacy.num_coins, privacy.num_guesses, privacy.num_correct, privacy.repetitions) == (16, 8, 8, 1)
    # All right: ln(q / (1 - q)) at q = .05^(1/8).
    q = 0.05 ** (1 / 8)
    assert privacy.epsilon_lower_bound == privacy.cap == pytest.approx(math.log(q / (1 - q)))
    assert privacy.score == "log p, standardised within format"
    assert (privacy.p_value, privacy.is_testable) == (None, None)


@pytest.mark.parametrize(("num_coins", "num_guesses"), [(4, 2), (7, 2), (8, 4), (11, 4), (15, 6), (16, 8)])
def test_the_number_of_guesses_is_the_largest_even_one_up_to_half_of_the_coins(num_coins: int, num_guesses: int) -> None:
    privacy = Case(sixteen()[:num_coins]).privacy()
    assert privacy is not None
    assert privacy.num_guesses == num_guesses


def test_too_few_coins_say_so_and_bound_nothing() -> None:
    privacy = Case(sixteen()[:3]).privacy(stated_epsilon=1.0)
    assert privacy is not None
    assert (privacy.num_guesses, privacy.epsilon_lower_bound, privacy.cap) == (0, 0.0, 0.0)
    assert (privacy.p_value, privacy.is_testable, privacy.num_guesses_needed) == (1.0, False, 10)
    assert any("Fewer than four coins (3)" in note for note in privacy.notes)


def test_the_section_holds_every_figure_of_the_metric() -> None:
    case = Case(sixteen())
    privacy = case.privacy(stated_epsilon=0.5, delta=1e-6, significance=0.1)
    assert privacy is not None
    scores = [one.log_prob for one in case.tossed if one.log_prob is not None]
    bound = audit_one_run(
        standardise_within(scores, ["pin"] * 16),
        [one.is_in for one in case.tossed],
        num_guesses=8,
        significance=0.1,
        delta=1e-6,
        stated_epsilon=0.5,
    )
    dumped = privacy.model_dump()
    assert {field.name: dumped[field.name] for field in fields(PrivacyBound)} == {**asdict(bound), "flags": list(bound.flags)}
    assert Privacy.model_validate_json(privacy.model_dump_json()) == privacy


def test_scores_at_step_zero_are_taken_off() -> None:
    # The final scores say nothing: what is left of them after step 0 does.
    tossed = [replace(one, log_prob=-20.0 - (i * 7) % 16, start=-30.0 - (i * 7) % 16) for i, one in enumerate(sixteen())]
    tossed = [replace(one, start=(one.start or 0.0) - 0.01 * i - 5.0 * one.is_in) for i, one in enumerate(tossed)]
    privacy = Case(tossed).privacy()
    assert privacy is not None
    assert privacy.score == "log p - log p at step 0, standardised within format"
    assert privacy.num_correct == 8
    assert [one.difference for one in Case(tossed).counterfactual()] == [pytest.approx(5.0 - 0.01)]


def test_formats_are_standardised_apart_before_they_are_ranked_together() -> None:
    # Raw, every canary of the long format is below every one of the short one: the top four are its two included and two that
    # are not, the bottom four likewise, and 4 of 8 guesses would be right.
    short = [Tossed(f"p{i}", i < 2, -20.0 + 10.0 * (i < 2) - 0.1 * i) for i in range(8)]
    long = [Tossed(f"k{i}", i < 6, -200.0 + 10.0 * (i < 6) - 0.1 * i, format="key") for i in range(8)]
    raw = audit_one_run([one.log_prob or 0.0 for one in (*short, *long)], [one.is_in for one in (*short, *long)], num_guesses=8)
    privacy = Case([*short, *long]).privacy()
    assert privacy is not None
    assert (raw.num_correct, privacy.num_correct, privacy.num_coins) == (4, 8, 16)


def test_other_tiers_are_left_out_of_the_bound_of_a_record_and_named() -> None:
    more = [replace(one, id="t4" + one.id, tier=4) for one in sixteen()] + [Tossed("t16", False, -9.0, tier=16)]
    privacy = Case([*more, *sixteen()]).privacy()
    assert privacy is not None
    assert (privacy.repetitions, privacy.num_coins) == (1, 16)
    assert "Canaries of tiers 4, 16 are left out: tiers are never pooled." in privacy.notes


def test_copies_bound_a_record_by_group_privacy() -> None:
    one, four = Case(sixteen()).privacy(), Case(sixteen(tier=4)).privacy()
    assert one is not None
    assert four is not None
    assert four.repetitions == 4
    assert four.epsilon_lower_bound == pytest.approx(one.epsilon_lower_bound / 4)
    assert any("4 copies" in note for note in four.notes)


def test_canaries_that_enter_as_records_alone_compare_with_a_guarantee() -> None:
    by_position, as_records = Case(sixteen()).privacy(), Case(sixteen()).privacy(enters_as_record=True)
    assert by_position is not None
    assert as_records is not None
    assert not by_position.is_comparable
    assert any("did not enter as records" in note for note in by_position.notes)
    assert as_records.is_comparable
    assert as_records.notes == []


@pytest.mark.parametrize(("delta", "cure"), [(0.0, "8932 are needed"), (1e-4, "no number is enough at this delta")])
def test_a_guarantee_beyond_the_guesses_is_said_to_be_untestable(delta: float, cure: str) -> None:
    privacy = Case(sixteen()).privacy(stated_epsilon=8.0, delta=delta, enters_as_record=True)
    assert privacy is not None
    assert privacy.is_testable is False
    assert len(privacy.notes) == 1
    assert "The stated epsilon 8 cannot be tested with 8 guesses" in privacy.notes[0]
    assert cure in privacy.notes[0]


# -- counterfactual memorisation


def test_each_format_and_tier_has_its_own_difference_in_the_order_of_the_rows() -> None:
    rng = np.random.default_rng(8)
    tossed = [
        Tossed(f"{name}{tier}-{i}", i % 2 == 0, float(rng.normal(-20.0, 1.0)) + tier * (i % 2 == 0), tier=tier, format=name)
        for name in ("pin", "key")
        for tier in (1, 8)
        for i in range(10)
    ]
    found = Case(tossed).counterfactual()
    assert [(one.format, one.tier) for one in found] == [("pin", 1), ("pin", 8), ("key", 1), ("key", 8)]
    for one in found:
        members = [item for item in tossed if (item.format, item.tier) == (one.format, one.tier)]
        scores = [item.log_prob for item in members if item.log_prob is not None]
        expected = estimate_population_counterfactual(scores, [item.is_in for item in members])
        assert (one.difference, one.low, one.high) == (expected.value, expected.low, expected.high)
        assert (one.p_value, one.min_attainable_p) == (expected.p_value, expected.min_attainable_p)
        assert (one.n_in, one.n_out, one.confidence) == (5, 5, 0.95)
        assert one.method == "log p; Welch interval, one-sided permutation test"


def test_a_side_of_one_canary_is_undefined_and_says_so() -> None:
    tossed = [Tossed("a", True, -1.0), Tossed("b", False, -2.0), Tossed("c", False, -3.0)]
    (found,) = Case(tossed).counterfactual()
    assert (found.difference, found.low, found.high, found.p_value, found.min_attainable_p) == (None,) * 5
    assert (found.n_in, found.n_out, found.method) == (1, 2, "undefined: fewer than two canaries on a side")


def test_scores_that_do_not_differ_have_a_difference_and_no_interval() -> None:
    tossed = [replace(one, log_prob=-20.0 + 10.0 * one.is_in) for one in sixteen()]
    (found,) = Case(tossed).counterfactual()
    assert (found.difference, found.low, found.high) == (10.0, None, None)
    assert found.p_value == found.min_attainable_p == 1 / 10_000  # C(16, 8) = 12,870 ways: dealt at random
    assert Counterfactual.model_validate_json(found.model_dump_json()) == found


# -- no evidence


def broken(place: int, **changes: object) -> Case:
    tossed = sixteen(start=-30.0)
    tossed[place] = replace(tossed[place], **changes)  # type: ignore[arg-type]
    return Case(tossed)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (broken(3, log_prob=None), "no score: canary 'c03'"),
        (broken(3, log_prob=math.nan), "no score: canary 'c03'"),
        (broken(0, start=None), "no score at step 0, which others have: canary 'c00'"),
        (broken(5, id="c06"), "more than one row: canary 'c06'"),
    ],
)
def test_a_failed_score_makes_both_sections_no_evidence(case: Case, message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        case.privacy()
    with pytest.raises(EvidenceError, match=message):
        case.counterfactual()


def test_a_failed_score_of_another_tier_counts_as_well() -> None:
    with pytest.raises(EvidenceError, match="no score: canary 'four'"):
        Case([*sixteen(), Tossed("four", True, None, tier=4)]).privacy()


def test_rows_that_contradict_the_coins_are_no_evidence_and_all_are_named_at_once() -> None:
    case = Case(sixteen())
    rows = [row(one) for one in case.tossed[:8]]
    rows[0] = row(case.tossed[0], "control")
    with pytest.raises(EvidenceError) as caught:
        measure_privacy(rows, **case.shared)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "no row: canary 'c08', 'c09', 'c10', 'c11', 'c12' and 3 more" in message
    assert "a role that its coin contradicts: canary 'c00'" in message


def test_a_control_without_a_coin_may_fail() -> None:
    case = Case(sixteen())
    rows = [*case.rows, row(Tossed("plain", False, None))]
    assert measure_privacy(rows, **case.shared) == case.privacy()  # type: ignore[arg-type]


def test_a_coin_without_a_tier_is_refused() -> None:
    case = Case(sixteen())
    with pytest.raises(ValueError, match="tiers must give at least 1 for every canary with a coin, got none for canary 'c00'"):
        measure_privacy(case.rows, inclusion="coin", coins={"c00": True}, tiers={})
