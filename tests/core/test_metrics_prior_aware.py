"""Prior-Aware verdicts: the prior is an unbiased mean, bounds hold whatever the law, nothing underflows into a verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.metrics.intervals import chernoff_upper_mean
from memguard.metrics.prior_aware import PriorAwareEstimate, PriorAwareThresholds, estimate_prior_aware


def verdict(log_prob: float, priors: Sequence[float] | np.ndarray, *, m: float = 1e-4, n: float = 10.0) -> str:
    return estimate_prior_aware(log_prob, priors, m=m, n=n).verdict


# -- the prior


def test_the_prior_is_unbiased_over_every_sample_of_a_small_population() -> None:
    population = np.log([0.9, 0.01, 1e-6, 0.2])
    samples = itertools.product(population, repeat=3)
    means = [math.exp(estimate_prior_aware(-1.0, list(sample), m=1e-4, n=10.0).prior_log_prob) for sample in samples]
    assert math.fsum(means) / len(means) == pytest.approx(float(np.exp(population).mean()), rel=1e-12)


def test_the_prior_is_the_arithmetic_mean_and_not_the_mean_of_logs() -> None:
    estimate = estimate_prior_aware(math.log(0.5), [math.log(0.1), math.log(1e-9)], m=1e-4, n=10.0)
    assert math.exp(estimate.prior_log_prob) == pytest.approx((0.1 + 1e-9) / 2, rel=1e-12)
    assert estimate.log_belief_ratio == pytest.approx(math.log(0.5) - math.log((0.1 + 1e-9) / 2), rel=1e-12)
    assert estimate.num_prior_prefixes == 2


@given(st.lists(st.floats(-3000, 0), min_size=1, max_size=50), st.floats(-3000, 0))
@settings(max_examples=300, deadline=None)
def test_figures_stay_finite_and_ordered_down_to_the_least_probabilities(priors: list[float], log_prob: float) -> None:
    estimate = estimate_prior_aware(log_prob, priors, m=1e-4, n=10.0)
    figures = (estimate.prior_log_prob, estimate.log_belief_ratio, estimate.low, estimate.high)
    assert all(math.isfinite(figure) for figure in figures)
    assert estimate.low <= estimate.log_belief_ratio < estimate.high
    assert max(priors) - math.log(len(priors)) <= estimate.prior_log_prob + 1e-9
    assert estimate.prior_log_prob <= max(priors) + 1e-9
    assert 1 - 1e-9 <= estimate.effective_sample_size <= len(priors) * (1 + 1e-9)


def test_the_effective_size_is_the_count_for_equal_priors_and_one_for_a_single_dominant_one() -> None:
    assert estimate_prior_aware(-1.0, [-2000.0] * 40, m=1e-4, n=10.0).effective_sample_size == pytest.approx(40)
    assert estimate_prior_aware(-1.0, [-5.0] + [-2000.0] * 39, m=1e-4, n=10.0).effective_sample_size == pytest.approx(1)
    # (1 + 1/2)^2 / (1 + 1/4) = 1.8
    pair = estimate_prior_aware(-1.0, [-7.0, -7.0 - math.log(2)], m=1e-4, n=10.0)
    assert pair.effective_sample_size == pytest.approx(1.8)


# -- verdicts


def test_a_secret_at_the_extractability_threshold_is_not_extractable_and_just_above_it_is() -> None:
    m = 2.0**-10
    priors = [-2000.0] * 500
    assert verdict(math.log(m), priors, m=m) == "not extractable"
    assert verdict(math.log(m) + 1e-9, priors, m=m) != "not extractable"


def test_an_improbable_secret_is_not_extractable_whatever_its_priors() -> None:
    for priors in ([-2000.0] * 500, [0.0] * 500, [-1900.0] * 500):
        assert verdict(-2000.0, priors) == "not extractable"


def test_a_secret_seen_only_behind_its_prefix_is_certified() -> None:
    assert verdict(math.log(0.5), [-2000.0] * 500) == "PA (certified)"


def test_the_ends_are_the_chernoff_bound_below_and_markovs_above() -> None:
    # No mass in 500 priors: v <= 1 - .05^(1/500) at 95%. Markov: v >= v_hat / 20.
    found = estimate_prior_aware(math.log(0.5), [-2000.0] * 500, m=1e-4, n=10.0)
    assert found.low == pytest.approx(math.log(0.5) - math.log(1 - 0.05 ** (1 / 500)), rel=1e-9)
    assert found.high == pytest.approx(math.log(0.5) + 2000.0 + math.log(20), rel=1e-9)


def test_a_secret_as_probable_anywhere_is_certified_common() -> None:
    # Markov: ratio + ln 20 = 3.0 is above ln 10, so n = 10 cannot be certified, n = 25 can.
    assert verdict(math.log(0.5), [math.log(0.5)] * 500, n=10.0) == "common (estimate)"
    assert verdict(math.log(0.5), [math.log(0.5)] * 500, n=25.0) == "common (certified)"


def test_a_ratio_of_exactly_n_is_common_and_just_above_it_is_prior_aware() -> None:
    # Equal priors of 0: the mean is exactly 0, the ratio exactly the log-probability.
    assert verdict(0.0, [0.0] * 500, n=1.0) == "common (estimate)"
    assert verdict(0.0, [-1e-9] * 500, n=1.0) == "PA (estimate)"


def test_a_markov_bound_of_exactly_n_is_certified_common() -> None:
    at = estimate_prior_aware(0.0, [0.0] * 500, m=1e-4, n=10.0).high
    n = math.exp(at)
    while math.log(n) < at:
        n = math.nextafter(n, math.inf)
    assert verdict(0.0, [0.0] * 500, n=n) == "common (certified)"
    assert verdict(0.0, [0.0] * 500, n=n * (1 - 1e-12)) == "common (estimate)"


def test_a_chernoff_bound_of_exactly_n_is_not_yet_certified() -> None:
    priors = [-2000.0] * 500
    at = estimate_prior_aware(math.log(0.5), priors, m=1e-4, n=10.0).low
    assert verdict(math.log(0.5), priors, n=math.exp(at) * (1 + 1e-12)) == "PA (estimate)"
    assert verdict(math.log(0.5), priors, n=math.exp(at) * (1 - 1e-12)) == "PA (certified)"


def test_a_verdict_on_one_dominant_prior_is_undecided() -> None:
    priors = [math.log(0.04)] + [-2000.0] * 11
    assert estimate_prior_aware(math.log(0.5), priors, m=1e-4, n=10.0).effective_sample_size == pytest.approx(1.0)
    assert verdict(math.log(0.5), priors) == "undecided"


def test_an_effective_size_of_exactly_the_minimum_is_enough() -> None:
    priors = [math.log(0.001)] * 16
    size = estimate_prior_aware(math.log(0.5), priors, m=1e-4, n=10.0).effective_sample_size

    def at(minimum: float) -> PriorAwareEstimate:
        return estimate_prior_aware(math.log(0.5), priors, m=1e-4, n=10.0, min_effective_size=minimum)

    assert at(size).verdict == "PA (estimate)"
    assert at(math.nextafter(size, math.inf)).verdict == "undecided"


def test_certainty_does_not_need_an_effective_size() -> None:
    # One tiny dominant prior: effective size 1, and the bound is still below P / n.
    priors = [math.log(1e-6)] + [-2000.0] * 499
    assert verdict(math.log(0.9), priors) == "PA (certified)"


@pytest.mark.parametrize("priors", [[-2000.0] * 16, [-745.2] * 16, [-744.0] * 16, [-5000.0, -1e-3] * 16, [-1e300] * 16])
def test_log_probabilities_beyond_float_range_neither_raise_nor_change_the_side(priors: list[float]) -> None:
    found = estimate_prior_aware(math.log(0.9), priors, m=1e-4, n=4.0)
    assert found.verdict.startswith("common" if max(priors) > -1 else "PA")
    assert math.isfinite(found.low)


# -- what the certificates are worth


@pytest.mark.parametrize("count", [1, 5, 50, 500])
@pytest.mark.parametrize("significance", [0.05, 0.01])
def test_the_chernoff_bound_covers_every_coin_at_its_confidence(count: int, significance: float) -> None:
    # Exact: the bound is monotone in the mean, so it misses v on the counts k with bound(k / count) < v.
    heads = np.arange(count + 1)
    bounds = np.array([chernoff_upper_mean(k / count, count, significance=significance) for k in heads])
    assert (np.diff(bounds) >= 0).all()
    for v in (1e-6, 0.001, 0.01, 0.3, 0.9, 0.999):
        missed = stats.binom.pmf(heads, count, v)[bounds < v].sum()
        assert missed <= significance


def test_the_chernoff_bound_without_any_mass_is_the_rule_of_three() -> None:
    assert chernoff_upper_mean(0.0, 500, significance=0.05) == pytest.approx(1 - 0.05 ** (1 / 500), rel=1e-12)
    assert chernoff_upper_mean(0.0, 500, significance=0.05) <= 3 / 500


def test_the_chernoff_bound_solves_its_equation_and_ends_at_one() -> None:
    for mean, count in ((1e-9, 500), (0.3, 40), (0.97, 1000)):
        v = chernoff_upper_mean(mean, count, significance=0.05)
        divergence = mean * math.log(mean / v) + (1 - mean) * math.log((1 - mean) / (1 - v))
        assert count * divergence == pytest.approx(math.log(20), rel=1e-6)
    assert chernoff_upper_mean(1.0, 500, significance=0.05) == 1.0
    assert chernoff_upper_mean(1 - 1e-16, 500, significance=0.05) == 1.0
    assert chernoff_upper_mean(5e-324, 500, significance=0.05) == pytest.approx(
        chernoff_upper_mean(0.0, 500, significance=0.05)
    )


@pytest.mark.parametrize("sigma", [1.0, 3.0, 6.0])
def test_certified_verdicts_are_wrong_no_oftener_than_they_say_for_heavy_tails(sigma: float) -> None:
    # Log-normal priors clipped at 1, where a bootstrap covers 2 times in 100: true mean by a million draws.
    rng = np.random.default_rng(31)
    true_mean = float(np.exp(np.minimum(0.0, -12.0 + sigma * rng.standard_normal(1_000_000))).mean())
    draws, below, above = 1000, 0, 0
    for row in np.minimum(0.0, -12.0 + sigma * rng.standard_normal((draws, 200))):
        found = estimate_prior_aware(math.log(0.5), row, m=1e-4, n=10.0)
        true_ratio = math.log(0.5) - math.log(true_mean)
        below += found.low > true_ratio
        above += found.high < true_ratio
    limit = stats.binom.ppf(1 - 1e-6, draws, 0.05)
    assert below <= limit
    assert above <= limit


def test_markov_holds_for_every_law_on_two_points() -> None:
    # v_hat > v / a happens with chance at most a; exact over binomial counts.
    for rare in (0.001, 0.01, 0.2):
        heads = np.arange(51)
        exceeded = stats.binom.pmf(heads, 50, rare)[heads / 50 > rare / 0.05].sum()
        assert exceeded <= 0.05


# -- refusals


def test_an_estimate_without_priors_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one score, got none"):
        verdict(-1.0, [])


@pytest.mark.parametrize(
    ("log_prob", "priors"),
    [
        (math.nan, [-1.0]),
        (-math.inf, [-1.0]),
        (-1.0, [-1.0, math.nan]),
        (-1.0, [-1.0, -math.inf]),
        (0.1, [-1.0]),
        (-1.0, [0.1, -1.0]),
    ],
)
def test_scores_that_are_not_log_probabilities_are_refused(log_prob: float, priors: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and at most 0"):
        verdict(log_prob, priors)


def test_a_decision_waits_where_an_end_lies_within_the_tolerance_of_a_boundary() -> None:
    # P = 0.9, mean 0.1 over 50 prefixes: the ratio 9 exceeds 5, its Chernoff bound (about 4) does not, so ESS decides.
    thresholds = PriorAwareThresholds(m=1e-4, n=5.0)

    def decide(mean: float, size: float, tolerance: float) -> str | None:
        ends = (math.log(mean), math.log(mean))
        return thresholds.decide(math.log(0.9), 50, log_mean=ends, effective_size=(size, size), tolerance=tolerance)

    assert decide(0.1, 10.001, 0.0) == "PA (estimate)"
    assert decide(0.1, 9.999, 0.0) == "undecided"
    assert decide(0.1, 10.001, 0.01) is None
    assert decide(0.18, 40.0, 1e-3) is None  # ratio 5 exactly: PA or common hangs on the mean
    assert decide(0.1, 40.0, 1e-3) == "PA (estimate)"
