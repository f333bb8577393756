"""Ranks are bounded and never flattered: checked against full enumeration of small secret spaces."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.metrics.exposure import (
    MASS_ERROR,
    SkewNormalTail,
    certified_rank_high,
    estimate_calibrated_exposure,
    estimate_exposure,
    fit_skew_normal,
    sampled_null_mean_bits,
)


@dataclass(frozen=True)
class ToySpace:
    """Log-probabilities of every valid secret behind one prefix, from a random autoregressive table; nats."""

    log_probs: NDArray[np.float64]
    planted: tuple[int, ...]

    @property
    def target(self) -> int:
        return self.planted[0]

    @property
    def siblings(self) -> tuple[int, ...]:
        return self.planted[1:]

    def rank(self, *, with_siblings: bool) -> int:
        """True rank of the target, ties counted against it."""
        rivals = [i for i in range(self.log_probs.size) if with_siblings or i not in self.siblings]
        return int((self.log_probs[rivals] >= self.log_probs[self.target]).sum())


@st.composite
def toy_spaces(draw: st.DrawFn) -> ToySpace:
    """Three or fewer letters, secrets of varying length closed by an end letter: prefix-free, some of them not valid."""
    letters, depth = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    sharpness = draw(st.sampled_from([0.0, 1.0, 5.0, 30.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sequences = [word for length in range(1, depth + 1) for word in itertools.product(range(letters), repeat=length)]
    tables = {
        word: _log_softmax(sharpness * rng.standard_normal(letters + 1))
        for length in range(depth + 1)
        for word in itertools.product(range(letters), repeat=length)
    }
    ended = [sum(tables[word[:i]][c] for i, c in enumerate(word)) + tables[word][letters] for word in sequences]
    valid = np.array(ended)[rng.random(len(ended)) < draw(st.sampled_from([0.5, 1.0]))]
    assume(valid.size >= 2)
    number = draw(st.integers(1, min(4, valid.size)))
    # Planted secrets are often the likeliest ones: they were trained on.
    order = np.argsort(-valid) if draw(st.booleans()) else rng.permutation(valid.size)
    planted = [int(i) for i in order[:number]]
    draw(st.randoms(use_true_random=False)).shuffle(planted)
    return ToySpace(valid, tuple(planted))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@given(toy_spaces())
@settings(max_examples=400, deadline=None)
def test_the_certified_bound_is_never_below_the_true_rank(space: ToySpace) -> None:
    log_prob, size = float(space.log_probs[space.target]), space.log_probs.size
    assert certified_rank_high(log_prob, size) >= space.rank(with_siblings=True)
    bound = certified_rank_high(log_prob, size - len(space.siblings), sibling_log_probs=space.log_probs[list(space.siblings)])
    assert space.rank(with_siblings=False) <= bound <= size - len(space.siblings)


@given(toy_spaces(), st.sampled_from([1e-6, 1e-3, 0.1]), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_the_certified_bound_holds_for_scores_that_are_off_by_the_tolerance(
    space: ToySpace, tolerance: float, seed: int
) -> None:
    noise = np.random.default_rng(seed).uniform(-tolerance, tolerance, size=space.log_probs.size)
    scored = np.minimum(space.log_probs + noise, 0.0)
    bound = certified_rank_high(
        float(scored[space.target]),
        space.log_probs.size - len(space.siblings),
        sibling_log_probs=scored[list(space.siblings)],
        tolerance=tolerance,
    )
    assert bound >= space.rank(with_siblings=False)


def test_the_tolerance_covers_a_score_that_is_too_high_by_as_much() -> None:
    # 100 equal candidates: the true rank is 100 with all ties counted, and the canary's own score flatters it by 10%.
    assert certified_rank_high(math.log(0.01) + 0.1, 10**6) == 90
    assert certified_rank_high(math.log(0.01) + 0.1, 10**6, tolerance=0.1) == 100


@pytest.mark.parametrize("left", [1e-3, 1e-6, 1e-9, 1e-14])
@pytest.mark.parametrize("num_siblings", [1, 8])
def test_siblings_whose_float32_scores_hold_all_of_the_mass_certify_nothing(left: float, num_siblings: int) -> None:
    # The siblings truly hold 1 - left, and float32 rounds that to 1 or above. A secret the model does not know holds one
    # thousandth of what is left: its true rank is 1,000 of 1,000 and must not become 1.
    siblings = np.full(num_siblings, np.log1p(-left) - math.log(num_siblings)).astype(np.float32).astype(np.float64) + 1e-6
    assert certified_rank_high(math.log(left / 1000), 1000, sibling_log_probs=siblings) == 1000


def test_a_sibling_lowers_the_bound_by_the_mass_it_holds() -> None:
    # Half of the mass is left and the canary holds 0.02 of it: rank at most 25; without the sibling 50.
    assert certified_rank_high(math.log(0.02), 10**9) == 50
    assert certified_rank_high(math.log(0.02), 10**9, sibling_log_probs=[math.log(0.5)]) == 25


@pytest.mark.parametrize("number", [1, 2, 3, 7, 10, 1000, 10**9])
def test_equal_shares_are_not_rounded_below_their_number(number: int) -> None:
    assert certified_rank_high(-math.log(number), 10**12) >= number
    assert certified_rank_high(math.log(1 / number), 10**12) >= number


@given(st.floats(-3000, 0), st.integers(1, 10**40))
@settings(deadline=None)
def test_the_certified_bound_is_a_rank_of_the_space(log_prob: float, size: int) -> None:
    bound = certified_rank_high(log_prob, size)
    assert isinstance(bound, int)
    assert 1 <= bound <= size


def test_the_mass_error_covers_a_float32_sum_of_a_long_secret() -> None:
    # 32 tokens, logits of size 50 in float32: half a unit in the last place of 50 is 1.9e-6 a token.
    assert 32 * float(np.spacing(np.float32(50.0))) / 2 < MASS_ERROR


# -- the estimate


@given(toy_spaces())
@settings(max_examples=300, deadline=None)
def test_all_other_candidates_as_references_give_the_exact_rank(space: ToySpace) -> None:
    others = np.delete(space.log_probs, list(space.planted))
    assume(others.size >= 1)
    estimate = estimate_exposure(
        float(space.log_probs[space.target]),
        others,
        secret_space_size=others.size + 1,
        sibling_log_probs=space.log_probs[list(space.siblings)],
    )
    rank = space.rank(with_siblings=False)
    assert estimate.p_value == rank / (others.size + 1)
    assert estimate.rank_low <= rank <= estimate.rank_high
    assert estimate.rank_low == rank or estimate.num_tied > 0


@given(
    log_prob=st.floats(-60, 0),
    references=st.lists(st.floats(-60, 0), min_size=1, max_size=40),
    spare=st.integers(0, 10**12),
    tolerance=st.sampled_from([0.0, 1e-6, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_exposure_lies_between_zero_and_its_cap_and_inside_its_interval(
    log_prob: float, references: list[float], spare: int, tolerance: float
) -> None:
    size = len(references) + 1 + spare
    estimate = estimate_exposure(log_prob, references, secret_space_size=size, tolerance=tolerance)
    assert 0.0 <= estimate.low_bits <= estimate.bits <= estimate.high_bits
    assert math.copysign(1.0, estimate.bits) == 1.0  # not -0.0
    assert estimate.bits <= estimate.cap_bits + 1e-12
    assert estimate.high_bits <= math.log2(size) + 1e-12
    assert 1 <= estimate.rank_low <= estimate.rank_high <= size
    assert 0.0 < estimate.p_value <= 1.0
    assert estimate.bits == pytest.approx(-math.log2(estimate.p_value), abs=1e-12)


def test_the_sampled_p_value_is_b_plus_one_over_n_plus_one() -> None:
    estimate = estimate_exposure(-20.0, [-19.0, -18.0, -25.0, -26.0], secret_space_size=10**9)
    assert (estimate.num_above, estimate.p_value, estimate.method) == (2, 3 / 5, "sampled")
    assert estimate.cap_bits == math.log2(5)
    assert estimate.flags == ()


def test_a_tie_counts_against_the_canary_in_the_p_value_and_widens_the_ranks() -> None:
    estimate = estimate_exposure(-20.0, [-20.0, -20.4, -19.6, -21.0], secret_space_size=10**9, tolerance=0.5)
    # Three references within half a nat: tied, none clearly above.
    assert (estimate.num_above, estimate.num_tied, estimate.rank_low) == (3, 3, 1)
    assert estimate.p_value == 4 / 5
    assert estimate.flags == ("ties",)


def test_a_score_tied_with_every_reference_has_no_exposure() -> None:
    estimate = estimate_exposure(-20.0, [-20.0] * 99, secret_space_size=10**9)
    assert estimate.p_value == 1.0
    assert estimate.bits == 0.0
    assert estimate.rank_low == 1


def test_no_reference_above_is_capped_where_the_mass_bound_says_less() -> None:
    estimate = estimate_exposure(-20.0, [-21.0] * 99, secret_space_size=10**9)
    # exp(20) = 4.9e8 of 1e9 candidates: p = 0.49, more than 1 / 100.
    assert (estimate.method, estimate.flags, estimate.p_value) == ("sampled", ("capped",), 0.01)
    assert estimate.bits == estimate.cap_bits == math.log2(100)
    assert estimate.high_bits == math.log2(10**9)


def test_a_memorised_secret_is_certified_far_beyond_its_references() -> None:
    estimate = estimate_exposure(math.log(0.9), [-21.0] * 99, secret_space_size=10**9)
    assert (estimate.method, estimate.rank_low, estimate.rank_high) == ("certified", 1, 1)
    assert estimate.p_value == 1e-9
    assert estimate.bits == estimate.low_bits == estimate.high_bits == estimate.cap_bits == math.log2(10**9)


def test_the_mass_bound_never_overrules_a_reference_that_is_above() -> None:
    estimate = estimate_exposure(-3.0, [-2.0, -30.0], secret_space_size=10**9)
    # exp(3) = 20.08: rank at most 20. One of two references is above: the sampled p-value stands.
    assert (estimate.method, estimate.p_value, estimate.rank_low, estimate.rank_high) == ("sampled", 2 / 3, 2, 20)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["canary", "reference", "sibling"])
def test_a_score_that_is_not_finite_fails_the_estimate_and_is_never_a_rank(bad: float, place: str) -> None:
    references = [-20.0] * 20 + ([bad] if place == "reference" else [])
    estimate = estimate_exposure(
        bad if place == "canary" else -3.0,
        references,
        secret_space_size=10**6,
        sibling_log_probs=[bad] if place == "sibling" else [],
    )
    assert estimate.method == "failed"
    assert all(math.isnan(value) for value in (estimate.bits, estimate.low_bits, estimate.high_bits, estimate.p_value))
    assert (estimate.rank_low, estimate.rank_high) == (1, 10**6)


def test_an_estimate_without_references_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one score, got none"):
        estimate_exposure(-3.0, [], secret_space_size=10)


def test_a_space_smaller_than_its_references_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the number of references 3, got 2"):
        estimate_exposure(-3.0, [-1.0, -2.0, -3.0], secret_space_size=2)


def test_p_values_are_valid_when_the_secret_is_independent_of_the_model() -> None:
    # One peaked space of 1,000 candidates, the likeliest with half of the mass: the canary is any of them, equally likely.
    rng = np.random.default_rng(1)
    log_probs = _log_softmax(4.0 * rng.standard_normal(1000))
    draws, p_values = 4000, []
    for _ in range(draws):
        chosen = rng.choice(1000, size=51, replace=False)
        estimate = estimate_exposure(float(log_probs[chosen[0]]), log_probs[chosen[1:]], secret_space_size=1000)
        p_values.append(estimate.p_value)
    for level in (0.001, 0.002, 0.01, 0.05, 0.2):
        # One chance in a million of a false alarm at each level.
        assert sum(p <= level for p in p_values) <= stats.binom.ppf(1 - 1e-6, draws, level)
    assert min(p_values) < 1 / 51  # the mass bound did fire


def test_the_interval_covers_the_true_exposure_as_often_as_it_says() -> None:
    # References are a large sample of a continuous law: the true tail chance of a score at its 0.9 quantile is 0.1.
    rng = np.random.default_rng(2)
    draws, score = 2000, float(stats.norm.ppf(0.9))
    covered = 0
    for references in rng.standard_normal((draws, 60)):
        estimate = estimate_exposure(score - 25.0, references - 25.0, secret_space_size=10**9, confidence=0.9)
        covered += estimate.low_bits <= -math.log2(0.1) <= estimate.high_bits
    assert covered >= stats.binom.ppf(1e-6, draws, 0.9)


@pytest.mark.parametrize("num_references", [1, 2, 10, 128, 512, 2048])
def test_the_null_mean_equals_a_direct_enumeration(num_references: int) -> None:
    direct = math.fsum(math.log2((num_references + 1) / (1 + above)) for above in range(num_references + 1))
    assert sampled_null_mean_bits(num_references) == pytest.approx(direct / (num_references + 1), rel=1e-11)


# -- the tail that is only shown


def test_the_fitted_tail_agrees_with_a_normal_law_that_it_can_fit() -> None:
    references = -20.0 + np.random.default_rng(3).standard_normal(2000)
    tail = fit_skew_normal(references)
    assert tail is not None
    assert tail.bits(-20.0, cap_bits=30.0) == pytest.approx(1.0, abs=0.15)
    # P(Z >= 2) = 0.0228: 5.46 bits.
    assert tail.bits(-18.0, cap_bits=30.0) == pytest.approx(5.46, abs=0.8)
    assert tail.fit_p_value > 1e-3


def test_the_fitted_tail_is_capped_and_never_negative() -> None:
    tail = SkewNormalTail(shape=0.0, location=20.0, scale=1.0, fit_p_value=1.0)
    assert tail.bits(0.0, cap_bits=29.9) == 29.9
    assert tail.bits(-400.0, cap_bits=29.9) == 0.0
    assert tail.bits(-math.inf, cap_bits=29.9) == 0.0


def test_the_fitted_tail_of_a_nan_is_nan_and_not_the_cap() -> None:
    tail = SkewNormalTail(shape=0.0, location=20.0, scale=1.0, fit_p_value=1.0)
    assert math.isnan(tail.bits(math.nan, cap_bits=29.9))


@pytest.mark.parametrize(
    "references",
    [[-20.0, -21.0] * 14, [-20.0] * 100, [math.nan, *range(-100, -50)], [-math.inf, *range(-100, -50)]],
    ids=["too few", "all alike", "NaN", "infinite"],
)
def test_references_that_no_tail_can_be_fitted_to_give_none(references: list[float]) -> None:
    assert fit_skew_normal(references) is None


@pytest.mark.parametrize("grid", [None, 1.0])
def test_calibrated_exposure_has_an_exact_null_also_with_ties(grid: float | None) -> None:
    """Gains of canary and references from one law: P(p <= t) <= t, with equality at the steps of 1 / (N + 1) without ties."""
    rng, draws, n = np.random.default_rng(8), 2000, 63
    p_values = np.empty(draws)
    for index in range(draws):
        gains = rng.gumbel(3.0, 2.0, n + 1)
        gains = gains if grid is None else np.round(gains / grid) * grid
        found = estimate_calibrated_exposure(gains[0], gains[1:], secret_space_size=10**9)
        p_values[index] = found.p_value
        assert found.bits == pytest.approx(-math.log2(found.p_value))
        assert found.low_bits <= found.bits <= found.high_bits
        assert found.method == "sampled"
    for level in (1 / 64, 4 / 64, 16 / 64, 32 / 64):
        rate = float((p_values <= level + 1e-12).mean())
        slack = 4 * math.sqrt(level * (1 - level) / draws)
        assert rate <= level + slack
        assert grid is not None or rate >= level - slack


def test_calibrated_exposure_finds_what_raw_exposure_cannot() -> None:
    """A secret that was unlikely before training and gained 6 nats ranks in the middle by its score and first by its gain."""
    rng = np.random.default_rng(2)
    start = rng.normal(-40.0, 8.0, 512)
    gain = rng.normal(0.0, 0.5, 512)
    raw = estimate_exposure(-48.0 + 6.0, start + gain, secret_space_size=10**9)
    calibrated = estimate_calibrated_exposure(6.0, gain, secret_space_size=10**9)
    assert raw.bits < 2.0
    assert calibrated.bits == pytest.approx(math.log2(513))
    assert "capped" in calibrated.flags


def test_calibrated_exposure_refuses_and_fails_as_exposure_does() -> None:
    with pytest.raises(ValueError, match="at least one score, got none"):
        estimate_calibrated_exposure(1.0, [], secret_space_size=10)
    with pytest.raises(ValueError, match="at least the number of references 2, got 1"):
        estimate_calibrated_exposure(1.0, [0.0, 0.0], secret_space_size=1)
    for gain, references in ((math.nan, [0.0]), (0.0, [math.inf])):
        found = estimate_calibrated_exposure(gain, references, secret_space_size=10)
        assert found.method == "failed"
        assert math.isnan(found.bits)
    tied = estimate_calibrated_exposure(1.0, [1.0 + 1e-9, 0.0], secret_space_size=10, tolerance=1e-6)
    assert (tied.num_above, tied.num_tied, tied.flags) == (1, 1, ("ties",))


@pytest.mark.parametrize("estimate", ["raw", "calibrated"])
@pytest.mark.parametrize("references", [[-20.0], [-20.0] * 40])
def test_one_reference_and_identical_references_give_what_ranks_allow_and_no_more(
    estimate: str, references: list[float]
) -> None:
    function = estimate_exposure if estimate == "raw" else estimate_calibrated_exposure
    n = len(references)
    above = function(-10.0, references, secret_space_size=10**9)
    tied = function(-20.0, references, secret_space_size=10**9)
    below = function(-30.0, references, secret_space_size=10**9)
    if estimate == "calibrated":  # no mass bounds its rank
        assert above.bits == pytest.approx(math.log2(n + 1))
    assert (tied.p_value, tied.num_tied, "ties" in tied.flags) == (1.0, n, True)
    assert (below.p_value, below.bits, below.num_above) == (1.0, 0.0, n)
    assert all(math.isfinite(one.low_bits) and one.low_bits <= one.bits <= one.high_bits for one in (above, tied, below))
    assert fit_skew_normal(references) is None
