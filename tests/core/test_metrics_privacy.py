"""The one-run bound on epsilon: pinned to closed forms and to jax_privacy, and simulated where privacy is known."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.metrics import privacy as privacy_module
from memguard.metrics.privacy import (
    SMALLEST_P,
    audit_one_run,
    epsilon_cap,
    epsilon_lower_bound,
    group_delta,
    guess_membership,
    num_guesses_needed,
    one_run_p_value,
    standardise_within,
)

# -- the p-value


def plain_p_value(num_correct: int, num_guesses: int, epsilon: float, delta: float, num_coins: int) -> float:
    """beta + 2 m delta alpha, summed term by term in rational arithmetic."""
    q = Fraction(math.exp(epsilon) / (1 + math.exp(epsilon)))
    mass = [math.comb(num_guesses, k) * q**k * (1 - q) ** (num_guesses - k) for k in range(num_guesses + 1)]
    beta = sum(mass[num_correct:], Fraction(0))
    alpha = max((sum(mass[num_correct - i : num_correct], Fraction(0)) / i for i in range(1, num_correct + 1)), default=0)
    return min(1.0, float(beta + 2 * num_coins * Fraction(delta) * alpha))


@given(
    num_guesses=st.integers(1, 30),
    share=st.floats(0, 1),
    epsilon=st.floats(0, 6),
    delta=st.sampled_from([0.0, 1e-6, 1e-3, 0.2]),
    more=st.integers(0, 30),
)
@settings(deadline=None)
def test_the_p_value_equals_a_sum_in_rational_arithmetic(
    num_guesses: int, share: float, epsilon: float, delta: float, more: int
) -> None:
    num_correct = round(share * num_guesses)
    p_value = one_run_p_value(num_correct, num_guesses, epsilon=epsilon, delta=delta, num_coins=num_guesses + more)
    assert p_value == pytest.approx(plain_p_value(num_correct, num_guesses, epsilon, delta, num_guesses + more), rel=1e-9)


@pytest.mark.parametrize(
    ("num_coins", "num_guesses", "num_correct", "epsilon", "delta", "expected"),
    [
        # jax_privacy 2.0.0, auditing._one_run_p_value(m, r, v, eps, delta), scipy 1.17.1.
        (200, 100, 90, 1.5, 1e-5, 0.017622051182929685),
        (1000, 400, 300, 0.8, 1e-4, 0.00998692992824534),
        (1000, 200, 180, 2.0, 1e-3, 0.40245999755148787),
        (88, 44, 44, 0.0, 1e-6, 6.20516767206475e-06),
        (5000, 1000, 900, 2.0, 1e-5, 0.03448718651989373),
        (400, 200, 150, 0.5, 0.0, 8.918182920516091e-05),
    ],
)
def test_p_values_agree_with_jax_privacy(
    num_coins: int, num_guesses: int, num_correct: int, epsilon: float, delta: float, expected: float
) -> None:
    p_value = one_run_p_value(num_correct, num_guesses, epsilon=epsilon, delta=delta, num_coins=num_coins)
    assert p_value == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("trials", [0, 1, 32, 100, 2000])
@pytest.mark.parametrize("chance", [0.5, 0.2689414213699951, 3.3e-4])
def test_the_binomial_is_that_of_scipy_stats(trials: int, chance: float) -> None:
    counts = np.arange(max(0, trials // 2 - 50), trials + 1)
    expected = stats.binom.cdf(counts, trials, chance)
    assert privacy_module._binomial_cdf(counts, trials, chance) == pytest.approx(expected, rel=1e-12)


def test_a_p_value_far_out_keeps_its_digits() -> None:
    # P[X <= 20] of Binomial(1123, q) in rational arithmetic. It is no float's underflow, which stands for less than it.
    q = Fraction(1 / (1 + math.exp(0.0316)))
    exact = sum(math.comb(1123, k) * q**k * (1 - q) ** (1123 - k) for k in range(21))
    assert one_run_p_value(1103, 1123, epsilon=0.0316) == pytest.approx(float(exact), rel=1e-9)


def test_what_delta_adds_is_found_beyond_the_first_block_of_terms() -> None:
    # P[X >= 11,500] is nil at eps 0 and 12,000 guesses: the best mean runs over more than 5,000 terms, down to the bulk.
    terms = np.arange(1, 11_501)
    direct = (stats.binom.sf(11_500 - terms - 1, 12_000, 0.5) / terms).max()
    assert np.argmax(stats.binom.sf(11_500 - terms - 1, 12_000, 0.5) / terms) > 5000
    p_value = one_run_p_value(11_500, 12_000, epsilon=0.0, delta=1e-5, num_coins=12_000)
    assert p_value == pytest.approx(2 * 12_000 * 1e-5 * direct, rel=1e-9)


def test_a_p_value_that_underflows_is_bounded_from_above_and_never_zero() -> None:
    assert one_run_p_value(10_000, 10_000, epsilon=0.0) == SMALLEST_P > 0.0


def test_large_claims_keep_their_precision() -> None:
    # 1 - p = r e^-30 up to its square, 9.4e-8 for a million guesses; 1 - e^-30 itself keeps three digits in floats.
    p_value = one_run_p_value(10**6, 10**6, epsilon=30.0)
    assert 1.0 - p_value == pytest.approx(1e6 * math.exp(-30), rel=1e-6)
    assert one_run_p_value(9, 10, epsilon=700.0) == 1.0


def test_no_guess_refutes_nothing() -> None:
    assert one_run_p_value(0, 0, epsilon=0.0) == 1.0
    assert epsilon_cap(0, significance=0.05) == 0.0


# -- the bound and its cap


@pytest.mark.parametrize(
    ("num_guesses", "cap"), [(32, 2.32), (88, 3.36), (100, 3.49), (200, 4.19), (1000, 5.81)]
)  # ln(q / (1 - q)) at q = 0.05^(1/r)
def test_the_cap_is_the_closed_form(num_guesses: int, cap: float) -> None:
    assert epsilon_cap(num_guesses, significance=0.05) == pytest.approx(cap, abs=0.005)
    assert one_run_p_value(num_guesses, num_guesses, epsilon=epsilon_cap(num_guesses, significance=0.05)) == pytest.approx(0.05)


@pytest.mark.parametrize(("num_correct", "num_guesses", "bound"), [(150, 200, 0.82), (600, 1000, 0.30)])
def test_the_bound_has_the_specified_values(num_correct: int, num_guesses: int, bound: float) -> None:
    assert epsilon_lower_bound(num_correct, num_guesses, significance=0.05) == pytest.approx(bound, abs=0.005)


@pytest.mark.parametrize(
    ("num_coins", "num_guesses", "num_correct", "significance", "delta", "expected", "without_delta"),
    [
        # jax_privacy 2.0.0: CanaryScoreAuditor.epsilon_one_run with an explicit threshold that num_guesses canaries pass.
        # Without delta: its _epsilon_one_run, since the public function refuses 0. Both search to 1e-6.
        (200, 100, 90, 0.05, 1e-5, 1.6298922318258207, 1.6308231927421464),
        (1000, 400, 300, 0.05, 1e-5, 0.9035143928157686, 0.9042452215171771),
        (1000, 200, 180, 0.01, 1e-4, 1.5375903507091258, 1.65763046872978),
        (88, 44, 44, 0.05, 1e-6, 2.652513601079109, 2.6527653791510435),
        (5000, 1000, 900, 0.05, 1e-5, 2.0182591871476006, 2.0212332312548718),
        (400, 200, 150, 0.05, 1e-3, 0.7493085238556173, 0.8213961378933643),
        (2000, 1000, 600, 0.05, 1e-6, 0.29741981009880736, 0.2974679266766),
        (400, 200, 120, 0.05, 1e-2, 0.0, 0.1590697274746963),
    ],
)
def test_bounds_agree_with_jax_privacy(
    num_coins: int,
    num_guesses: int,
    num_correct: int,
    significance: float,
    delta: float,
    expected: float,
    without_delta: float,
) -> None:
    bound = epsilon_lower_bound(num_correct, num_guesses, significance=significance, delta=delta, num_coins=num_coins)
    assert bound == pytest.approx(expected, abs=2e-6)
    assert epsilon_lower_bound(num_correct, num_guesses, significance=significance) == pytest.approx(without_delta, abs=2e-6)


@given(
    num_guesses=st.integers(1, 400),
    share=st.floats(0, 1),
    significance=st.sampled_from([0.001, 0.05, 0.2]),
    delta=st.sampled_from([0.0, 1e-6, 1e-4]),
)
@settings(deadline=None, max_examples=60)
def test_the_bound_is_where_the_p_value_crosses_the_significance(
    num_guesses: int, share: float, significance: float, delta: float
) -> None:
    num_correct, coins = round(share * num_guesses), 2 * num_guesses
    bound = epsilon_lower_bound(num_correct, num_guesses, significance=significance, delta=delta, num_coins=coins)
    assert 0.0 <= bound <= epsilon_cap(num_guesses, significance=significance, delta=delta, num_coins=coins)

    def p_value(epsilon: float) -> float:
        return one_run_p_value(num_correct, num_guesses, epsilon=epsilon, delta=delta, num_coins=coins)

    if bound > 0.0:
        assert p_value(max(0.0, bound - 1e-6)) <= significance < p_value(bound + 1e-6)
    else:
        assert p_value(1e-6) > significance


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3, 0.1, 1.0])
def test_claims_that_are_refuted_lie_in_one_piece(delta: float) -> None:
    # The search for the bound rests on it: once above the significance, the p-value stays there.
    for num_correct in (60, 80, 99, 100):
        grid = np.linspace(0.0, 8.0, 200)
        p_values = [one_run_p_value(num_correct, 100, epsilon=float(e), delta=delta, num_coins=300) for e in grid]
        assert np.abs(np.diff(np.array(p_values) <= 0.4999)).sum() <= 1


def test_half_right_guesses_bound_nothing() -> None:
    assert epsilon_lower_bound(500, 1000, significance=0.05) == 0.0


def test_few_guesses_bound_nothing_even_if_all_are_right() -> None:
    # 2^-4 = 0.0625 is above 0.05, 2^-5 below.
    assert epsilon_cap(4, significance=0.05) == 0.0
    assert epsilon_cap(5, significance=0.05) > 0.0


# -- how many guesses it takes


def test_epsilon_eight_needs_8932_right_guesses() -> None:
    # ln 0.05 / ln(e^8 / (1 + e^8)) = 8,931.7
    assert num_guesses_needed(8.0, significance=0.05) == 8932


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 2.0, 4.0, 7.0])
@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-5])
def test_the_number_needed_is_the_smallest_even_one(epsilon: float, delta: float) -> None:
    needed = num_guesses_needed(epsilon, significance=0.05, delta=delta, coins_per_guess=2.0)
    assert needed is not None
    assert needed % 2 == 0

    def p_value(number: int) -> float:
        return one_run_p_value(number, number, epsilon=epsilon, delta=delta, num_coins=2 * number)

    assert p_value(needed) <= 0.05 < p_value(needed - 2)


def test_with_delta_some_claims_are_beyond_any_number_of_guesses() -> None:
    # With every guess right the p-value tends to 2 delta (1 + e^eps) coins_per_guess: 0.24 for eps 8, delta 1e-5, 4 coins a
    # guess. The cap of far more guesses than delta 0 asks for stays below the claim.
    assert num_guesses_needed(8.0, significance=0.05, delta=1e-5, coins_per_guess=4.0) is None
    for number in (8932, 20_000, 100_000, 1_000_000):
        assert one_run_p_value(number, number, epsilon=8.0, delta=1e-5, num_coins=4 * number) > 0.05


def test_a_claim_that_promises_nothing_needs_more_guesses_than_there_can_be() -> None:
    assert num_guesses_needed(1000.0, significance=0.05) is None


# -- copies


def test_copies_divide_the_bound_of_the_group() -> None:
    single = epsilon_lower_bound(150, 200, significance=0.05)
    assert epsilon_lower_bound(150, 200, significance=0.05, repetitions=4) == pytest.approx(single / 4, abs=1e-9)
    assert epsilon_cap(200, significance=0.05, repetitions=4) == epsilon_cap(200, significance=0.05) / 4
    assert num_guesses_needed(2.0, significance=0.05, repetitions=4) == num_guesses_needed(8.0, significance=0.05)


@given(st.floats(0, 3), st.integers(1, 20), st.sampled_from([0.0, 1e-9, 1e-3]))
def test_the_delta_of_a_group_is_a_geometric_sum(epsilon: float, repetitions: int, delta: float) -> None:
    direct = min(1.0, delta * math.fsum(math.exp(i * epsilon) for i in range(repetitions)))
    assert group_delta(delta, epsilon=epsilon, repetitions=repetitions) == pytest.approx(direct, rel=1e-9)


def test_a_group_with_delta_is_tested_at_the_delta_of_the_group() -> None:
    bound = epsilon_lower_bound(190, 200, significance=0.05, delta=1e-6, num_coins=400, repetitions=3)
    grown = group_delta(1e-6, epsilon=bound, repetitions=3)
    assert grown > 3e-6
    assert one_run_p_value(190, 200, epsilon=3 * bound, delta=grown, num_coins=400) == pytest.approx(0.05, rel=1e-6)
    assert bound < epsilon_lower_bound(190, 200, significance=0.05, delta=1e-6, num_coins=400) / 3


def test_an_enormous_group_delta_stops_at_one() -> None:
    assert group_delta(0.5, epsilon=100.0, repetitions=64) == 1.0


# -- guesses


def test_the_top_is_guessed_in_and_the_bottom_out() -> None:
    assert guess_membership([5.0, 1.0, 3.0, 2.0, 4.0, 0.0], num_guesses=4).tolist() == [1, -1, 0, 0, 1, -1]


def test_a_tie_past_the_last_guess_is_not_broken() -> None:
    # Two guesses a side. The top tie of three does not fit into two places; the bottom tie of two does.
    assert guess_membership([9.0, 9.0, 9.0, 4.0, 1.0, 1.0], num_guesses=4).tolist() == [0, 0, 0, 0, -1, -1]
    assert guess_membership([1.0] * 6, num_guesses=6).tolist() == [0] * 6


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(0, 10))
def test_guesses_never_exceed_their_number_and_follow_the_order(values: list[int], half: int) -> None:
    half = min(half, len(values) // 2)
    scores = np.array(values, dtype=np.float64)
    guesses = guess_membership(scores, num_guesses=2 * half)
    for side in (1, -1):
        assert (guesses == side).sum() <= half
        inside, outside = side * scores[guesses == side], side * scores[guesses != side]
        assert not inside.size or not outside.size or inside.min() > outside.max()
    if len(set(values)) == len(values):
        assert np.abs(guesses).sum() == 2 * half
    order = np.random.default_rng(0).permutation(len(values))
    assert guess_membership(scores[order], num_guesses=2 * half).tolist() == guesses[order].tolist()


def test_tied_scores_count_as_wrong_guesses_even_where_members_come_first() -> None:
    bound = audit_one_run([0.0] * 100, [True] * 50 + [False] * 50, num_guesses=50)
    assert (bound.num_correct, bound.num_tied, bound.epsilon_lower_bound, bound.flags) == (0, 50, 0.0, ("ties",))


# -- standardising


def test_formats_are_standardised_apart_and_in_order() -> None:
    scores = np.array([-1.0, -50.0, -2.0, -70.0, -3.0, -90.0])
    standard = standardise_within(scores, ["pin", "key"] * 3)
    # (x - mean) / sd with sd = sqrt(2/3) of the spacing.
    assert standard == pytest.approx(np.sqrt(1.5) * np.array([1, 1, 0, 0, -1, -1]))


def test_a_lone_score_and_scores_without_spread_become_zero() -> None:
    tenth = [0.1, 0.1, 0.1]  # their mean is not 0.1 in floats
    assert standardise_within([*tenth, -7.0], ["a", "a", "a", "b"]).tolist() == [0.0] * 4
    # Rounding of a float64 sum is no spread.
    assert standardise_within([-20.0, -20.0 + 1e-12], ["a", "a"]).tolist() == [0.0] * 2


# -- the audit


def test_a_perfect_attack_reaches_the_cap_and_tests_what_it_can() -> None:
    scores = np.arange(400.0)
    is_in = scores >= 200
    bound = audit_one_run(scores, is_in, num_guesses=200, stated_epsilon=4.0)
    assert (bound.num_coins, bound.num_guesses, bound.num_correct, bound.num_tied) == (400, 200, 200, 0)
    assert bound.epsilon_lower_bound == bound.cap == pytest.approx(4.19, abs=0.005)
    # (e^4 / (1 + e^4))^200
    assert bound.p_value == bound.min_attainable_p == pytest.approx((math.exp(4) / (1 + math.exp(4))) ** 200, rel=1e-9)
    assert (bound.is_testable, bound.num_guesses_needed) == (True, 166)
    assert bound.flags == ()


def test_a_claim_beyond_the_cap_is_not_testable() -> None:
    scores = np.arange(200.0)
    bound = audit_one_run(scores, scores >= 100, num_guesses=100, stated_epsilon=8.0)
    assert (bound.is_testable, bound.num_guesses_needed) == (False, 8932)
    assert bound.min_attainable_p is not None
    assert bound.min_attainable_p > 0.05


def test_whether_a_claim_is_testable_does_not_depend_on_what_the_attack_found() -> None:
    scores = np.arange(200.0)
    blind = audit_one_run(scores, np.arange(200) % 2 == 0, num_guesses=100, stated_epsilon=3.0)
    assert (blind.epsilon_lower_bound, blind.num_correct, blind.is_testable) == (0.0, 50, True)


def test_the_number_needed_supposes_as_many_coins_a_guess_as_now() -> None:
    scores = np.arange(200.0)
    bound = audit_one_run(scores, scores >= 100, num_guesses=50, stated_epsilon=6.0, delta=1e-5)
    assert bound.num_guesses_needed == num_guesses_needed(6.0, significance=0.05, delta=1e-5, coins_per_guess=4.0)
    assert bound.num_guesses_needed != num_guesses_needed(6.0, significance=0.05, delta=1e-5)


def test_without_a_claim_nothing_is_tested() -> None:
    bound = audit_one_run(np.arange(8.0), np.arange(8) >= 4, num_guesses=4)
    assert (bound.p_value, bound.min_attainable_p, bound.is_testable, bound.num_guesses_needed) == (None,) * 4


def test_the_audit_counts_all_coins_against_delta() -> None:
    scores, is_in = np.arange(1000.0), np.arange(1000) >= 500
    few = audit_one_run(scores[400:600], is_in[400:600], num_guesses=100, delta=1e-4)
    many = audit_one_run(scores, is_in, num_guesses=100, delta=1e-4)
    assert many.epsilon_lower_bound < few.epsilon_lower_bound < epsilon_cap(100, significance=0.05)
    assert many.epsilon_lower_bound == many.cap


@pytest.mark.parametrize("num_coins", [40, 200])
def test_chance_scores_bound_nothing_in_95_runs_of_100(num_coins: int) -> None:
    rng = np.random.default_rng(4)
    draws, num_guesses = 2000, 2 * (num_coins // 4)
    positive = 0
    for _ in range(draws):
        bound = audit_one_run(rng.standard_normal(num_coins), rng.random(num_coins) < 0.5, num_guesses=num_guesses)
        positive += bound.epsilon_lower_bound > 0.0
    # Guesses are fair coins: a bound above 0 has the chance that Binomial(r, 1/2) lies in its 5% tail, below .05.
    counts = np.arange(num_guesses + 1)
    tails = stats.binom.sf(counts - 1, num_guesses, 0.5)
    level = tails[tails <= 0.05].max()
    assert stats.binom.ppf(1e-6, draws, level) <= positive <= stats.binom.ppf(1 - 1e-6, draws, level)


def responses(
    rng: np.random.Generator, num_coins: int, *, epsilon: float, leak: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Randomised response with its coins: each is told truly with chance e^eps / (1 + e^eps), or leaked outright."""
    is_in = rng.random(num_coins) < 0.5
    leaked = rng.random(num_coins) < leak
    told = np.where(leaked | (rng.random(num_coins) < 1 / (1 + math.exp(-epsilon))), is_in, ~is_in)
    # What leaked is what an attacker guesses first; the rest of the order is noise.
    return np.where(told, 1.0, -1.0) * (1.0 + leaked + 0.5 * rng.random(num_coins)), is_in


@pytest.mark.parametrize(("epsilon", "leak"), [(1.0, 0.0), (0.3, 0.0), (1.0, 0.005)])
def test_randomised_response_is_seldom_bounded_above_its_true_epsilon(epsilon: float, leak: float) -> None:
    rng = np.random.default_rng(5)
    draws = 2000

    @functools.cache
    def bound_of(num_correct: int) -> float:
        return epsilon_lower_bound(num_correct, 100, significance=0.05, delta=leak, num_coins=200)

    bounds = []
    for draw in range(draws):
        scores, is_in = responses(rng, 200, epsilon=epsilon, leak=leak)
        bounds.append(bound_of(int((guess_membership(scores, num_guesses=100) == np.where(is_in, 1, -1)).sum())))
        if draw < 50:
            audit = audit_one_run(scores, is_in, num_guesses=100, delta=leak, stated_epsilon=epsilon)
            assert audit.epsilon_lower_bound == bounds[-1]
            assert audit.p_value is not None
            assert (audit.p_value <= 0.05) == (bounds[-1] >= epsilon)
    exceeded = sum(bound > epsilon for bound in bounds)
    assert exceeded <= stats.binom.ppf(1 - 1e-6, draws, 0.05)
    if leak == 0.0:  # the count of right guesses is exactly the binomial of the bound: it is not idle
        assert exceeded >= stats.binom.ppf(1e-6, draws, 0.02)
    if epsilon == 1.0 and leak == 0.0:  # 73 of 100 guesses are right as a rule
        assert np.median(bounds) == bound_of(73) > 0.5


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_correct": 5, "num_guesses": 4}, "num_correct must be from 0 to num_guesses 4, got 5"),
        ({"num_correct": -1, "num_guesses": 4}, "num_correct must be from 0 to num_guesses 4, got -1"),
        ({"delta": -0.1}, "delta must be from 0 to 1, got -0.1"),
        ({"delta": math.nan}, "delta must be from 0 to 1, got nan"),
        ({"delta": 1e-5}, "num_coins must be given when delta is above 0 .* got None"),
        ({"num_coins": 3}, "num_coins must be at least num_guesses 4, got 3"),
        ({"epsilon": -1.0}, "epsilon must be finite and at least 0, got -1.0"),
        ({"epsilon": math.inf}, "epsilon must be finite and at least 0, got inf"),
        ({"epsilon": math.nan}, "epsilon must be finite and at least 0, got nan"),
    ],
)
def test_claims_and_counts_that_make_no_sense_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_run_p_value(**{"num_correct": 2, "num_guesses": 4, "epsilon": 1.0, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("significance", [0.0, 0.5, 1.0, -0.1, math.nan])
def test_a_significance_out_of_range_is_refused(significance: float) -> None:
    with pytest.raises(ValueError, match=f"significance must be above 0 and below 0.5, got {significance}"):
        epsilon_lower_bound(5, 10, significance=significance)
    with pytest.raises(ValueError, match=f"significance must be above 0 and below 0.5, got {significance}"):
        num_guesses_needed(1.0, significance=significance)


def test_fewer_than_one_copy_is_refused() -> None:
    for refused in (
        lambda: epsilon_lower_bound(5, 10, significance=0.05, repetitions=0),
        lambda: group_delta(1e-5, epsilon=1.0, repetitions=0),
        lambda: num_guesses_needed(1.0, significance=0.05, repetitions=0),
    ):
        with pytest.raises(ValueError, match="repetitions must be at least 1, got 0"):
            refused()


def test_a_delta_out_of_range_and_fewer_coins_than_guesses_are_refused() -> None:
    with pytest.raises(ValueError, match="delta must be from 0 to 1, got -1.0"):
        group_delta(-1.0, epsilon=1.0, repetitions=2)
    with pytest.raises(ValueError, match="coins_per_guess must be at least 1, got 0.5"):
        num_guesses_needed(1.0, significance=0.05, coins_per_guess=0.5)


@pytest.mark.parametrize("num_guesses", [3, 8, -2])
def test_a_number_of_guesses_that_is_odd_or_too_large_is_refused(num_guesses: int) -> None:
    with pytest.raises(ValueError, match=f"num_guesses must be even, from 0 to the number of scores 6, got {num_guesses}"):
        guess_membership(np.arange(6.0), num_guesses=num_guesses)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused_and_named(bad: float) -> None:
    with pytest.raises(ValueError, match=rf"scores must be finite, got {bad} at index 2 \(1 in all\)"):
        audit_one_run([0.0, 1.0, bad, 2.0], [True, False, True, False], num_guesses=2)
    with pytest.raises(ValueError, match="scores must be finite"):
        standardise_within([0.0, bad], ["a", "a"])


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is_in must have the shape of scores \(4,\), got \(3,\)"):
        audit_one_run(np.arange(4.0), [True, False, True], num_guesses=2)
    with pytest.raises(ValueError, match="is_in must hold booleans, got int64"):
        audit_one_run(np.arange(4.0), np.array([1, 0, 1, 0]), num_guesses=2)
    with pytest.raises(ValueError, match=r"scores must be a list of at least one number, got shape \(0,\)"):
        audit_one_run([], np.array([], dtype=bool), num_guesses=0)
    with pytest.raises(ValueError, match=r"scores must be a list of at least one number, got shape \(2, 2\)"):
        guess_membership(np.eye(2), num_guesses=2)
    with pytest.raises(ValueError, match="groups must have one label a score, got 1 for 2"):
        standardise_within([0.0, 1.0], ["a"])
