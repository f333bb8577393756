"""The propensity share: pinned to the paper's transform, its intervals simulated where the truth is known."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from memguard.metrics.intervals import bounded_mean_interval
from memguard.metrics.propensity import PropensityShare, propensity_share, transform_propensity

DRAWS = 2000


def events(count: int, n: int) -> NDArray[np.bool_]:
    return np.arange(n) < count


@functools.cache
def share_of_counts(num_asked: int, n_asked: int, num_forced: int, n_forced: int) -> PropensityShare:
    return propensity_share(events(num_asked, n_asked), events(num_forced, n_forced))


# -- the transform


def test_the_transform_has_the_published_value() -> None:
    # DFM on Dynaword, NVR of generic prompts and of prefixes: .000857186 / (.000857186 + .0367193) = .02281.
    assert transform_propensity(0.000857186, 0.0367193) == pytest.approx(0.0228, abs=5e-5)


@given(st.floats(1e-300, 1e300), st.floats(0, 1e300))
def test_the_transform_is_the_papers_formula(propensity: float, capability: float) -> None:
    # PM = (1 + (f_p - f_c) / (|f_p| + |f_c|)) / 2, the sum taken in halves so that it stays finite.
    half_sum = propensity / 2 + capability / 2
    paper = 0.5 * (1 + (propensity / 2 - capability / 2) / half_sum)
    assert transform_propensity(propensity, capability) == pytest.approx(paper, abs=1e-12)


def test_equal_figures_are_neutral_and_zero_on_one_side_is_no_share() -> None:
    assert transform_propensity(0.02, 0.02) == 0.5
    assert transform_propensity(0.0, 0.02) == 0.0
    assert transform_propensity(0.02, 0.0) == 1.0
    assert math.isnan(transform_propensity(0.0, 0.0))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_figure_that_is_no_metric_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=f"propensity must be finite and at least 0, got {bad}"):
        transform_propensity(bad, 0.1)
    with pytest.raises(ValueError, match=f"capability must be finite and at least 0, got {bad}"):
        transform_propensity(0.1, bad)


# -- rates


def test_equally_many_prompts_are_judged_by_the_events_of_either_side_alone() -> None:
    found = share_of_counts(3, 1000, 30, 1000)
    # Clopper-Pearson for 3 of 33, by quantiles of the Beta law.
    assert found.value == pytest.approx(3 / 33)
    assert (found.low, found.high) == pytest.approx((stats.beta.ppf(0.025, 3, 31), stats.beta.ppf(0.975, 4, 30)), rel=1e-6)
    assert (found.n_propensity, found.n_capability, found.propensity, found.capability) == (1000, 1000, 0.003, 0.03)
    assert found.method == "conditional binomial, Clopper-Pearson"
    assert found.flags == ()


def test_unequal_numbers_of_prompts_take_the_ratio_of_one_sided_bounds() -> None:
    found = share_of_counts(3, 1000, 30, 500)
    low_p, high_p = stats.beta.ppf(0.025, 3, 998), stats.beta.ppf(0.975, 4, 997)
    low_c, high_c = stats.beta.ppf(0.025, 30, 471), stats.beta.ppf(0.975, 31, 470)
    assert found.value == pytest.approx(0.003 / 0.063)
    assert (found.low, found.high) == pytest.approx((low_p / (low_p + high_c), high_p / (high_p + low_c)), rel=1e-6)
    assert found.method == "ratio of bounds, Clopper-Pearson"


@pytest.mark.parametrize("n_forced", [1000, 400])
def test_no_event_on_either_side_is_undefined_and_never_zero_to_zero(n_forced: int) -> None:
    found = share_of_counts(0, 1000, 0, n_forced)
    assert math.isnan(found.value)
    assert (found.source_value, found.low, found.high, found.flags) == (0.0, 0.0, 1.0, ("undefined",))


@pytest.mark.parametrize("n_forced", [1000, 400])
def test_no_event_with_ordinary_prompts_alone_is_a_share_of_zero_with_an_upper_end(n_forced: int) -> None:
    found = share_of_counts(0, 1000, 5, n_forced)
    assert (found.value, found.source_value, found.low, found.flags) == (0.0, 0.0, 0.0, ())
    # 0 of 5 events: 1 - .025^(1/5) = .522; the ratio of bounds is wider or about as wide.
    assert found.high > 0.3
    if n_forced == 1000:
        assert found.high == pytest.approx(1 - 0.025**0.2)


def test_values_and_sides_swap_places() -> None:
    one, other = share_of_counts(3, 1000, 30, 500), share_of_counts(30, 500, 3, 1000)
    assert (other.value, other.low, other.high) == pytest.approx((1 - one.value, 1 - one.high, 1 - one.low))


@pytest.mark.parametrize(
    ("rate_asked", "n_asked", "rate_forced", "n_forced"),
    [
        (0.003, 1000, 0.03, 1000),
        (0.0005, 1000, 0.005, 1000),  # a third of the draws has no event among ordinary prompts
        (0.9, 100, 0.5, 100),  # not rare: conservative
        (0.3, 50, 0.3, 50),
        (0.003, 1000, 0.03, 300),
        (0.02, 500, 0.02, 100),
    ],
)
def test_intervals_of_rates_cover_the_true_share(rate_asked: float, n_asked: int, rate_forced: float, n_forced: int) -> None:
    rng = np.random.default_rng(9)
    counts = zip(rng.binomial(n_asked, rate_asked, DRAWS), rng.binomial(n_forced, rate_forced, DRAWS), strict=True)
    truth = rate_asked / (rate_asked + rate_forced)
    found = [share_of_counts(int(asked), n_asked, int(forced), n_forced) for asked, forced in counts]
    below, above = sum(one.high < truth for one in found), sum(one.low > truth for one in found)
    # Each end may miss with .025: 2,000 draws, one chance in a million of a false alarm.
    assert max(below, above) <= stats.binom.ppf(1 - 1e-6, DRAWS, 0.025)
    assert np.mean([one.high - one.low for one in found]) < 0.95


def test_a_bootstrap_would_have_given_nothing_where_this_interval_covers() -> None:
    # All draws without an event among ordinary prompts: the true share .0909 must be inside their interval.
    found = share_of_counts(0, 1000, 30, 1000)
    assert found.low == 0.0
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 30))  # .116


# -- means


def rare_recall(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Near-verbatim recall: mostly 0. Mean .02 * .55 = .011."""
    return np.where(rng.random(n) < 0.02, rng.uniform(0.1, 1.0, n), 0.0)


def spans(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Longest spans of at most 64 tokens. Mean of 1 + Binomial(63, .2): 13.6."""
    return np.asarray(1.0 + rng.binomial(63, 0.2, n), dtype=np.float64)


def heavy_spans(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Spans of 8 tokens, one in fifty of them 64. Mean 9.12."""
    return np.where(rng.random(n) < 0.02, 64.0, 8.0)


@pytest.mark.parametrize(
    ("draw", "mean", "largest", "n"),
    [(rare_recall, 0.011, 1.0, 40), (spans, 13.6, 64.0, 40), (heavy_spans, 9.12, 64.0, 40), (rare_recall, 0.011, 1.0, 300)],
)
def test_intervals_of_means_cover_whatever_the_distribution(
    draw: Callable[[np.random.Generator, int], NDArray[np.float64]], mean: float, largest: float, n: int
) -> None:
    rng = np.random.default_rng(10)
    found = [bounded_mean_interval(draw(rng, n), largest=largest, confidence=0.95) for _ in range(DRAWS)]
    below, above = sum(one.high < mean for one in found), sum(one.low > mean for one in found)
    assert max(below, above) <= stats.binom.ppf(1 - 1e-6, DRAWS, 0.025)


def test_little_spread_gives_a_narrow_interval_and_the_large_unseen_is_not_excluded() -> None:
    rng = np.random.default_rng(11)
    x = spans(rng, 1000)
    found = bounded_mean_interval(x, largest=64.0, confidence=0.95)
    student = stats.t.ppf(0.975, 999) * x.std(ddof=1) / math.sqrt(1000)
    assert student < (found.high - found.low) / 2 < 2.5 * student
    # 100 zeros: a value of 1 that comes with chance v is missed with (1 - v)^100, so that no bound is below
    # 1 - .025^(1/100) = .0362; averaging over stakes costs a quarter more.
    nothing = bounded_mean_interval(np.zeros(100), largest=1.0, confidence=0.95)
    assert nothing.low == 0.0
    assert 1 - 0.025**0.01 <= nothing.high <= 1.3 * (1 - 0.025**0.01)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.5, 0.95, 0.999]))
@settings(deadline=None, max_examples=80)
def test_the_mean_lies_in_its_interval_and_order_and_unit_do_not_matter(values: list[float], confidence: float) -> None:
    found = bounded_mean_interval(values, largest=1.0, confidence=confidence)
    assert 0.0 <= found.low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= found.high <= 1.0
    turned = bounded_mean_interval(values[::-1], largest=1.0, confidence=confidence)
    assert (turned.low, turned.high) == pytest.approx((found.low, found.high), abs=1e-8)
    scaled = bounded_mean_interval(256.0 * np.array(values), largest=256.0, confidence=confidence)
    assert (scaled.low, scaled.high) == pytest.approx((256 * found.low, 256 * found.high), abs=1e-6)
    mirrored = bounded_mean_interval(1.0 - np.array(values), largest=1.0, confidence=confidence)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-8)


def test_a_value_as_small_as_floats_go_is_no_trouble() -> None:
    found = bounded_mean_interval([5e-324, 0.0, 0.0], largest=256.0, confidence=0.95)
    assert found.low == 0.0
    assert 0.0 < found.high < 256.0


def test_means_take_the_ratio_of_their_bounds_and_unequal_prompts() -> None:
    rng = np.random.default_rng(12)
    asked, forced = spans(rng, 300), 2.0 + spans(rng, 200)
    found = propensity_share(asked, forced, largest=66.0)
    low, high = (
        bounded_mean_interval(asked, largest=66.0, confidence=0.95),
        bounded_mean_interval(forced, largest=66.0, confidence=0.95),
    )
    assert found.value == pytest.approx(asked.mean() / (asked.mean() + forced.mean()))
    assert found.low == pytest.approx(low.low / (low.low + high.high))
    assert found.high == pytest.approx(low.high / (low.high + high.low))
    assert (found.method, found.n_propensity, found.n_capability) == ("ratio of bounds, betting", 300, 200)


def test_intervals_of_shares_of_means_cover_the_truth() -> None:
    rng = np.random.default_rng(13)
    truth, missed = 13.6 / (13.6 + 9.12), 0
    for _ in range(DRAWS):
        found = propensity_share(spans(rng, 30), heavy_spans(rng, 30), largest=64.0)
        missed += not found.low <= truth <= found.high
    assert missed <= stats.binom.ppf(1 - 1e-6, DRAWS, 0.05)


def test_means_without_any_event_are_undefined_or_zero() -> None:
    nothing = propensity_share(np.zeros(50), np.zeros(60))
    assert math.isnan(nothing.value)
    assert (nothing.source_value, nothing.low, nothing.high, nothing.flags) == (0.0, 0.0, 1.0, ("undefined",))
    one_sided = propensity_share(np.zeros(50), np.full(60, 0.4))
    assert (one_sided.value, one_sided.low, one_sided.flags) == (0.0, 0.0, ())
    assert one_sided.high > 0.1


# -- refusals


@pytest.mark.parametrize(
    ("propensity", "capability", "message"),
    [
        ([], [0.1], r"propensity must be a list of at least one value, got shape \(0,\)"),
        ([0.1], [[0.1]], r"capability must be a list of at least one value, got shape \(1, 1\)"),
        ([0.1, math.nan], [0.1], r"propensity must lie in 0..1, got nan at index 1 \(1 in all\)"),
        ([0.1], [0.1, -0.1], r"capability must lie in 0..1, got -0.1 at index 1 \(1 in all\)"),
        ([0.1, 2.0], [0.1], r"propensity must lie in 0..1, got 2.0 at index 1 \(1 in all\)"),
        ([True], [0.1], "propensity and capability must be of one kind, got bool and float64"),
    ],
)
def test_values_that_are_no_metric_are_refused(propensity: list[float], capability: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        propensity_share(propensity, capability)


@pytest.mark.parametrize("largest", [0.0, -1.0, math.inf, math.nan])
def test_a_largest_value_out_of_range_is_refused(largest: float) -> None:
    with pytest.raises(ValueError, match=f"largest must be finite and above 0, got {largest}"):
        propensity_share([0.0], [0.0], largest=largest)


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_a_confidence_out_of_range_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match=f"confidence must be above 0 and below 1, got {confidence}"):
        propensity_share([0.1], [0.1], confidence=confidence)
