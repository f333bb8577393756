"""Rises over several runs and over fresh secrets: pinned values, and levels that hold where nothing rose."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from memguard.metrics.rises import distance_for_power, runs_rise_test, unpaired_rise_test


def test_over_runs_the_error_joins_the_spread_of_canaries_and_of_runs():
    # Rises over the mean of the runs (1.5, 2.5): 1.5 and 2.5, sd^2 = 0.5, so sd^2 / K = 0.25. Means 1.5, 2.5, 2: s_run = 0.5,
    # s_run^2 (1 + 1/3) = 1/3. SE = sqrt(0.25 + 1/3); t = (2 - 0.5) / SE on 2 degrees of freedom.
    found = runs_rise_test([3.0, 5.0], [[1.0, 2.0], [2.0, 3.0], [1.5, 2.5]], ["a", "a"], tolerance_bits=0.5)
    error = np.sqrt(0.25 + 1 / 3)
    assert found.rise == 2.0
    assert found.error == pytest.approx(error, rel=1e-14)
    assert found.run_sd == pytest.approx(0.5, rel=1e-14)
    assert found.p_value == pytest.approx(float(stats.t.sf(1.5 / error, 2)), rel=1e-12)


def test_strata_take_their_own_means_out_of_the_spread():
    new, runs = [3.0, 3.2, 9.0, 9.2], [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    apart = runs_rise_test(new, runs, ["a", "a", "b", "b"], tolerance_bits=0.5)
    # Within each stratum the sd^2 is 0.02: (2 x 0.02 + 2 x 0.02) / 16.
    assert apart.error == pytest.approx(np.sqrt(0.08 / 16), rel=1e-12)
    assert runs_rise_test(new, runs, ["a"] * 4, tolerance_bits=0.5).error > 10 * apart.error


def test_over_one_pinned_run_the_others_tell_the_spread_of_training_alone():
    # Rises over the pinned run: 2 and 3, sd^2 = 0.5, so sd^2 / K = 0.25; s_run = 0.5 as above, times 1 + 1: 0.5.
    runs = [[1.0, 2.0], [2.0, 3.0], [1.5, 2.5]]
    found = runs_rise_test([3.0, 5.0], runs, ["a", "a"], tolerance_bits=0.5, over=[1.0, 2.0])
    assert found.rise == 2.5
    assert found.error == pytest.approx(np.sqrt(0.25 + 0.5), rel=1e-14)
    assert found.degrees_of_freedom == 2.0
    assert found.p_value == pytest.approx(float(stats.t.sf(2.0 / np.sqrt(0.75), 2)), rel=1e-12)


def test_fresh_canaries_in_every_run_leave_the_spread_to_the_runs():
    found = runs_rise_test([3.0, 5.0], [[1.0, 2.0, 3.0], [2.0, 3.0]], ["a", "a"], tolerance_bits=0.0, paired=False)
    assert found.rise == 4.0 - 2.25
    assert found.error == pytest.approx(np.sqrt(np.var([2.0, 2.5], ddof=1) * 1.5), rel=1e-12)


def test_unpaired_equals_welch_of_scipy_in_one_stratum():
    rng = np.random.default_rng(1)
    new, old = rng.exponential(1.4, 30), rng.exponential(1.4, 22)
    found = unpaired_rise_test(new, old, ["a"] * 30, ["a"] * 22, tolerance_bits=0.25)
    reference = stats.ttest_ind(new, old + 0.25, equal_var=False, alternative="greater")
    assert found.p_value == pytest.approx(float(reference.pvalue), rel=1e-10)
    assert found.degrees_of_freedom == pytest.approx(float(reference.df), rel=1e-12)


def test_a_lone_canary_of_its_stratum_is_left_out_of_the_difference():
    with_lone = unpaired_rise_test([3.0, 5.0, 99.0], [1.0, 2.0, 0.0], ["a", "a", "b"], ["a", "a", "b"], tolerance_bits=0.0)
    without = unpaired_rise_test([3.0, 5.0], [1.0, 2.0], ["a", "a"], ["a", "a"], tolerance_bits=0.0)
    assert (with_lone.rise, with_lone.p_value) == (without.rise, without.p_value)


def test_equal_figures_without_spread_are_no_rise_and_a_clear_rise_is_certain():
    runs = [[1.0, 1.0], [1.0, 1.0]]
    assert runs_rise_test([1.5, 1.5], runs, ["a", "a"], tolerance_bits=0.5).p_value == 1.0
    assert runs_rise_test([1.6, 1.6], runs, ["a", "a"], tolerance_bits=0.5).p_value == 0.0


@pytest.mark.parametrize("run_sd", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_runs", [2, 3, 8])
def test_the_level_holds_whatever_training_runs_vary_by(run_sd, num_runs):
    # Level 0.05 at the edge of the null; 2,000 draws have sd 0.0049. Above 0.065 is three of them.
    rng, hits = np.random.default_rng([7, num_runs]), 0
    for _ in range(2000):
        canaries = rng.exponential(1.44, 40)
        runs = [canaries + rng.normal(0, run_sd) + rng.normal(0, 1, 40) for _ in range(num_runs)]
        new = canaries + 0.5 + rng.normal(0, run_sd) + rng.normal(0, 1, 40)
        hits += runs_rise_test(new, runs, ["a"] * 20 + ["b"] * 20, tolerance_bits=0.5).p_value <= 0.05
    assert hits / 2000 <= 0.065


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_the_level_of_fresh_secrets_holds_for_skewed_exposures(level):
    rng, strata = np.random.default_rng(3), ["a"] * 22 + ["b"] * 18
    p_values = np.array(
        [
            unpaired_rise_test(
                rng.exponential(1.44, 40) + 0.5, rng.exponential(1.44, 40), strata, strata, tolerance_bits=0.5
            ).p_value
            for _ in range(2000)
        ]
    )
    assert (p_values <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) / 2000)


@pytest.mark.parametrize("freedom", [3.0, 19.0, 20.0, 43.0, 84.0, 500.0])
@pytest.mark.parametrize("significance", [0.05, 0.01, 0.002, 0.0005])
def test_the_distance_for_power_is_that_of_the_noncentral_t(freedom: float, significance: float) -> None:
    critical = stats.t.isf(significance, freedom)
    distance = distance_for_power(freedom, significance)
    assert stats.nct.sf(critical, freedom, distance) == pytest.approx(0.95, abs=0.004)


def test_the_detectable_rise_is_found_about_95_times_in_100():
    rng, strata = np.random.default_rng(5), ["a"] * 40
    base = [rng.normal(1.4, 1.0, 40) for _ in range(8)]
    one = runs_rise_test(base[0], base[1:], strata, tolerance_bits=0.5)
    shift = one.detectable(tolerance_bits=0.5, significance=0.01)
    found = sum(
        runs_rise_test(
            rng.normal(1.4, 1.0, 40) + shift, [rng.normal(1.4, 1.0, 40) for _ in range(7)], strata, tolerance_bits=0.5
        ).p_value
        <= 0.01
        for _ in range(400)
    )
    assert found / 400 >= 0.85


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: runs_rise_test([1.0, 2.0], [[1.0, 2.0]], ["a", "a"], tolerance_bits=0.5), "at least two runs, got 1"),
        (lambda: runs_rise_test([1.0, 2.0], [[1.0], [2.0]], ["a", "a"], tolerance_bits=0.5), "one figure for each canary"),
        (
            lambda: runs_rise_test([np.nan, 2.0], [[1.0, 2.0]] * 2, ["a", "a"], tolerance_bits=0.5),
            "new must be a list of finite",
        ),
        (lambda: runs_rise_test([1.0, 2.0], [[1.0, 2.0]] * 2, ["a"], tolerance_bits=0.5), "one label for each canary"),
        (
            lambda: runs_rise_test([1.0, 2.0], [[1.0, 2.0]] * 2, ["a", "a"], tolerance_bits=0.5, over=[1.0]),
            "over must hold one figure",
        ),
        (lambda: unpaired_rise_test([1.0], [1.0], ["a"], ["a"], tolerance_bits=0.5), "at least two canaries"),
        (lambda: unpaired_rise_test([1.0, 2.0], [1.0, 2.0], ["a", "b"], ["a", "a"], tolerance_bits=0.5), "same strata"),
        (lambda: unpaired_rise_test([1.0, 2.0], [1.0, 2.0], ["a"], ["a", "a"], tolerance_bits=0.5), "one label for each"),
    ],
)
def test_a_wrong_argument_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
