"""Lines through log10 x: the algebra against an independent solution, the intervals against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memguard.metrics.scaling import LogLinearFit, fit_log_linear, forecast_held_back

DRAWS = 2_000
SD_LEVEL = math.sqrt(0.05 * 0.95 / DRAWS)  # .0049
SIZES = [1.25e8, 1.3e9, 2.7e9, 6e9]


def test_four_points_are_fitted_by_hand() -> None:
    # log10 x = 0, 1, 2, 3 and y = 1, 2, 2, 4: mean 1.5 and 2.25, Sxx 5, Sxy 4.5: slope .9, intercept .9. Residuals .1, .2,
    # -.7, .4: squares .7, over 2 degrees of freedom .35. Syy 4.75: R squared 1 - .7/4.75. t(.975; 2) = 4.302653.
    fit = fit_log_linear([1, 10, 100, 1000], [1.0, 2.0, 2.0, 4.0])
    assert (fit.slope, fit.intercept, fit.n) == pytest.approx((0.9, 0.9, 4))
    assert fit.r_squared == pytest.approx(1 - 0.7 / 4.75)
    reach = 4.302653 * math.sqrt(0.35 / 5)
    assert (fit.low, fit.high) == pytest.approx((0.9 - reach, 0.9 + reach), abs=1e-5)
    # At log10 x = 4 the line is at 4.5; variance of a new value .35 (1 + 1/4 + 2.5^2 / 5) = .875.
    forecast = fit.predict(10_000)
    reach = 4.302653 * math.sqrt(0.875)
    assert (forecast.value, forecast.low, forecast.high) == pytest.approx((4.5, 4.5 - reach, 4.5 + reach), abs=1e-5)
    assert forecast.flags == ("extrapolated",)
    assert fit.predict(50).flags == ()


def test_the_slope_and_its_interval_are_those_of_a_least_squares_solution() -> None:
    rng = np.random.default_rng(2)
    x, y = 10 ** rng.uniform(0, 4, size=12), rng.normal(size=12)
    design = np.column_stack([np.ones(12), np.log10(x)])
    solution, (squares,), _, _ = np.linalg.lstsq(design, y, rcond=None)
    covariance = np.linalg.inv(design.T @ design) * squares / 10
    fit = fit_log_linear(x, y, confidence=0.9)
    reach = stats.t.ppf(0.95, 10) * math.sqrt(covariance[1, 1])
    assert (fit.intercept, fit.slope) == pytest.approx(tuple(solution))
    assert (fit.low, fit.high) == pytest.approx((solution[1] - reach, solution[1] + reach))
    place = np.array([1.0, 5.5])
    forecast = fit.predict(10**5.5)
    reach = stats.t.ppf(0.95, 10) * math.sqrt(squares / 10 + place @ covariance @ place)
    assert (forecast.low, forecast.high) == pytest.approx((place @ solution - reach, place @ solution + reach))


@given(st.floats(0.01, 100), st.floats(-5, 5), st.floats(0.1, 10), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_another_unit_of_x_moves_no_slope_and_one_of_y_scales_it(unit: float, add: float, scale: float, seed: int) -> None:
    y = np.random.default_rng(seed).normal(size=4)
    plain, other = fit_log_linear(SIZES, y), fit_log_linear(unit * np.array(SIZES), add + scale * y)
    for name in ("slope", "low", "high"):
        assert getattr(other, name) == pytest.approx(scale * getattr(plain, name), rel=1e-6, abs=1e-6)
    assert other.predict(unit * 2e10).high == pytest.approx(add + scale * plain.predict(2e10).high, rel=1e-6, abs=1e-6)


def test_a_forecast_of_a_share_stays_between_nothing_and_all_and_says_that_it_was_clipped() -> None:
    fit = fit_log_linear([1, 10, 100, 1000], [0.1, 0.42, 0.68, 0.99])
    free, clipped = fit.predict(10_000), fit.predict(10_000, limits=(0.0, 1.0))
    assert free.value > 1.0
    assert (clipped.value, clipped.high) == (1.0, 1.0)
    assert clipped.low == pytest.approx(min(1.0, free.low))
    assert clipped.flags == ("extrapolated", "clipped")
    assert fit.predict(10, limits=(0.0, 1.0)).flags == ()


def test_a_quantity_that_does_not_vary_has_no_r_squared() -> None:
    fit = fit_log_linear([1, 4, 16], [0.0, 0.0, 0.0])
    assert (fit.slope, fit.low, fit.high, fit.intercept) == (0.0, 0.0, 0.0, 0.0)
    assert math.isnan(fit.r_squared)
    assert fit.flags == ("no spread",)


def test_points_on_a_line_are_flagged_since_their_interval_has_no_width() -> None:
    fit = fit_log_linear([1, 10, 100], [0.1, 0.2, 0.3])
    assert (fit.low, fit.high, fit.r_squared) == (fit.slope, fit.slope, 1.0)
    assert fit.flags == ("exact fit",)
    held = forecast_held_back([1, 10, 100, 1000], [0.1, 0.2, 0.3, 0.4])
    assert held.is_inside
    assert held.error == pytest.approx(0.0, abs=1e-12)
    assert not forecast_held_back([1, 10, 100, 1000], [0.1, 0.2, 0.3, 0.41]).is_inside


def test_the_held_back_point_is_forecast_from_the_others_alone() -> None:
    x, y = [1.0, 4.0, 16.0, 64.0], [1.5, 3.1, 4.4, 6.2]
    held = forecast_held_back(x, y)
    others: LogLinearFit = fit_log_linear(x[:3], y[:3])
    assert held.fit == others
    assert held.forecast == others.predict(64.0)
    assert held.error == held.observed - held.forecast.value
    assert held.is_inside
    assert forecast_held_back(x, [*y[:3], 60.0]).forecast == held.forecast  # what was observed moves nothing
    assert not forecast_held_back(x, [*y[:3], 60.0]).is_inside
    assert forecast_held_back(x, [0.2, 0.5, 0.9, 1.0], limits=(0.0, 1.0)).forecast.high == 1.0


# -- simulated


@pytest.mark.parametrize("x", [[1, 4, 16], SIZES, list(2.0 ** np.arange(10))])
def test_slope_and_forecast_are_covered_as_often_as_they_say(x: list[float]) -> None:
    # Normal residuals of one spread: the t law is exact. Seen .945 to .958.
    rng, beyond = np.random.default_rng(3), 4.0 * x[-1]
    slopes, forecasts = 0, 0
    for _ in range(DRAWS):
        fit = fit_log_linear(x, 1.4 + 2.0 * np.log10(x) + 0.5 * rng.normal(size=len(x)))
        slopes += fit.low <= 2.0 <= fit.high
        one = fit.predict(beyond)
        forecasts += one.low <= 1.4 + 2.0 * math.log10(beyond) + 0.5 * rng.normal() <= one.high
    assert abs(slopes / DRAWS - 0.95) <= 3 * SD_LEVEL
    assert abs(forecasts / DRAWS - 0.95) <= 3 * SD_LEVEL


def test_held_back_points_of_a_true_line_lie_inside_as_often_as_they_should() -> None:
    rng, inside = np.random.default_rng(4), 0
    for _ in range(DRAWS):
        inside += forecast_held_back([1, 4, 16, 64, 256], np.arange(5.0) + rng.normal(size=5)).is_inside
    assert abs(inside / DRAWS - 0.95) <= 3 * SD_LEVEL


@pytest.mark.parametrize(("number", "slope_low"), [(16, 0.935), (1000, 0.935)])
def test_shares_of_canaries_keep_their_intervals_nearly(number: int, slope_low: float) -> None:
    # 20% at the smallest size, 19 points for each tenfold; binomial counts. Seen: slope .970 and .954, forecast .945, .943.
    rng, slopes, forecasts = np.random.default_rng(5), 0, 0
    truth = 0.2 + 0.19 * (np.log10([*SIZES, 2e10]) - math.log10(SIZES[0]))
    for _ in range(DRAWS):
        shares = rng.binomial(number, truth) / number
        if np.ptp(shares[:-1]) == 0.0:
            continue
        fit = fit_log_linear(SIZES, shares[:-1])
        slopes += fit.low <= 0.19 <= fit.high
        one = fit.predict(2e10, limits=(0.0, 1.0))
        forecasts += one.low <= shares[-1] <= one.high
    assert slopes / DRAWS >= slope_low
    assert forecasts / DRAWS >= 0.925


def test_a_forecast_of_exposure_that_varies_with_its_height_falls_short_as_the_head_says() -> None:
    # Tier means of 16 exponential exposures, 1.44 bits at one repetition and 2 more for each tenfold: seen .889.
    rng, inside = np.random.default_rng(6), 0
    means = 1.44 + 2.0 * np.log10([1, 4, 16, 64, 256])
    for _ in range(DRAWS):
        tiers = rng.exponential(means[:, None], size=(5, 16)).mean(axis=1)
        inside += forecast_held_back([1, 4, 16, 64, 256], tiers).is_inside
    assert 0.86 <= inside / DRAWS <= 0.93


# -- refusals


def test_fewer_than_three_sizes_are_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match="x must hold at least 3 distinct values to fit a line with an interval, got 2"):
        fit_log_linear([1, 4, 4], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"lists of one length, 4 at least, got shapes \(3,\) and \(3,\)"):
        forecast_held_back([1, 4, 16], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="at least 3 distinct values"):
        forecast_held_back([1, 4, 4, 16], [1.0, 2.0, 3.0, 4.0])


def test_what_has_no_logarithm_or_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x must be above 0 to have a logarithm, got 0\.0"):
        fit_log_linear([0, 1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="x and y must be finite"):
        fit_log_linear([1, 2, 3], [1.0, math.nan, 3.0])
    with pytest.raises(ValueError, match=r"lists of one length, got shapes \(3,\) and \(2,\)"):
        fit_log_linear([1, 2, 3], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"confidence must be between 0 and 1, got 1\.5"):
        fit_log_linear([1, 2, 3], [1.0, 2.0, 4.0], confidence=1.5)
    for x in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="x must be a positive number"):
            fit_log_linear([1, 2, 3], [1.0, 2.0, 4.0]).predict(x)


@pytest.mark.parametrize("x", [[1, 4, 16, 16], [1, 4, 64, 16]])
def test_only_a_point_beyond_all_others_is_held_back(x: list[float]) -> None:
    with pytest.raises(ValueError, match="the last x must be larger than the others"):
        forecast_held_back(x, [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(ValueError, match="and its y finite"):
        forecast_held_back([1, 4, 16, 64], [1.0, 2.0, 3.0, math.nan])
