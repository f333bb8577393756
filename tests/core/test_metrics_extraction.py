"""Tries to leak: log-space identities, underflow, and the intervals that the curve carries."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard.metrics.extraction import (
    extraction_curve,
    log10_expected_tries,
    log10_queries_needed,
    log_discovery_probability,
)


@given(st.floats(-2000.0, 0.0), st.integers(1, 10**9))
def test_the_discovery_probability_equals_fifty_digit_arithmetic(log_prob: float, num_queries: int) -> None:
    with mpmath.workdps(1000):
        exact = mpmath.log(1 - (1 - mpmath.exp(mpmath.mpf(log_prob))) ** num_queries)
    assert float(log_discovery_probability(log_prob, num_queries)) == pytest.approx(float(exact), rel=1e-9, abs=1e-12)


def test_a_certain_sequence_is_always_found_and_an_impossible_one_never() -> None:
    assert log_discovery_probability([0.0, -math.inf], 1000).tolist() == [0.0, -math.inf]
    assert log10_expected_tries([0.0, -math.inf]).tolist() == [0.0, math.inf]
    assert log10_queries_needed([0.0, -math.inf], 0.9).tolist() == [0.0, math.inf]


@given(st.floats(-1000.0, -1e-6), st.sampled_from([0.1, 0.5, 0.9, 0.999]))
def test_the_queries_needed_reach_the_chance_asked_for(log_prob: float, probability: float) -> None:
    queries = 10.0 ** min(300.0, float(log10_queries_needed(log_prob, probability)))
    reached = math.exp(float(log_discovery_probability(log_prob, queries)))
    if 1.0 < queries < 1e299:
        assert reached == pytest.approx(probability, rel=1e-6)
    elif queries == 1.0:
        assert reached >= probability * (1 - 1e-12)


def test_queries_by_hand() -> None:
    # (1 - .01)^n <= .1 at n = ln .1 / ln .99 = 229.1
    assert 10 ** float(log10_queries_needed(math.log(0.01), 0.9)) == pytest.approx(229.1053, rel=1e-6)
    # the smallest probability that a peer's 1 - (1 - p)^n rounds to zero
    assert math.exp(float(log_discovery_probability(math.log(1e-18), 10**6))) == pytest.approx(1e-12, rel=1e-9)


def test_the_curve_counts_and_means_by_hand() -> None:
    # chances at 10 queries: 1 - .5^10 = .99902, 1 - .99^10 = .09562, 0
    low, high = extraction_curve([math.log(0.5), math.log(0.01), -math.inf], [1, 10])
    assert low.expected_share == pytest.approx((0.5 + 0.01) / 3)
    assert high.expected_share == pytest.approx((0.9990234 + 0.0956179) / 3, rel=1e-6)
    assert (low.num_discoverable, high.num_discoverable, high.n) == (0, 1, 3)
    assert low.expected_share <= high.expected_share
    assert high.expected_interval.low <= high.expected_share <= high.expected_interval.high
    # Clopper-Pearson of 1 in 3: Beta(.025; 1, 3) = 1 - .975^(1/3)
    assert high.discoverable_interval.low == pytest.approx(1 - 0.975 ** (1 / 3), rel=1e-9)


def test_the_interval_of_the_expected_share_holds_where_few_sequences_carry_it() -> None:
    # One record in fifty leaks for sure, the rest never: a bootstrap of 100 records misses .02 in 13% of samples at least.
    rng = np.random.default_rng(5)
    draws, misses = 2000, 0
    for _ in range(draws):
        log_probs = np.where(rng.random(100) < 0.02, 0.0, -math.inf)
        interval = extraction_curve(log_probs, [1])[0].expected_interval
        misses += not interval.low <= 0.02 <= interval.high
    assert misses / draws <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize("bad", [math.nan, 0.1])
def test_scores_that_are_no_log_probabilities_are_refused(bad: float) -> None:
    for function in (log10_expected_tries, lambda x: log_discovery_probability(x, 2), lambda x: log10_queries_needed(x, 0.5)):
        with pytest.raises(ValueError, match="at most 0, got NaN or a value above 0"):
            function([-1.0, bad])


def test_other_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_queries must be at least 1, got 0"):
        log_discovery_probability(-1.0, 0)
    with pytest.raises(ValueError, match=r"probability must be in 0..1, got 1.0"):
        log10_queries_needed(-1.0, 1.0)
    with pytest.raises(ValueError, match="must hold at least one sequence, got none"):
        extraction_curve([], [1])
