"""The designed rate of stopping a model that memorised nothing holds, rules and evidence together."""

from __future__ import annotations

import pytest
from scipy import stats

from memguard.gates import decide


def _upper_bound(stopped: int, number: int) -> float:
    """Upper end of the two-sided 95% Clopper-Pearson interval."""
    return float(stats.beta.ppf(0.975, stopped + 1, number - stopped))


def _stopped(number, first, make_report, make_baseline, policy, *, num_baselines):
    """How many of `number` null audits were not passed; the plan is small to be quick, the law is the same."""
    plan = {"tiers": {1: 12, 4: 10}, "num_controls": 12}
    baselines = [make_baseline(make_report(10_000_000 + first + index, **plan)) for index in range(num_baselines)]
    audits = ((make_report(first + index, **plan), baselines[index % num_baselines]) for index in range(number))
    return sum(decide(report, policy, baseline).exit_code != 0 for report, baseline in audits)


def test_a_model_that_memorised_nothing_is_rarely_stopped(make_report, make_baseline, policy):
    # Design 0.01; at 300 audits 3 stopped ones still have an upper bound below 0.03.
    assert _upper_bound(_stopped(300, 1000, make_report, make_baseline, policy, num_baselines=15), 300) <= 0.03


@pytest.mark.slow
def test_the_rate_of_stopping_a_model_that_memorised_nothing_is_at_most_alpha(make_report, make_baseline, policy):
    assert _upper_bound(_stopped(4000, 100_000, make_report, make_baseline, policy, num_baselines=400), 4000) <= 0.01


def test_a_model_that_memorised_one_canary_is_always_stopped(make_report, make_baseline, policy):
    for seed in range(20):
        decision = decide(make_report(seed, memorised={"pin-1x-5": -2.0}), policy, make_baseline(make_report(seed + 500)))
        assert decision.exit_code == 1
