"""How a figure grows with the logarithm of size, repetitions or training: a fitted line and a forecast with an interval.

Slopes are in the unit of y for every tenfold x. The intervals take the residuals as independent, normal and of one spread:
shares keep 93 to 97% of 95%, while exposure that varies more the higher it is has forecasts that keep 89%. At a cap, or near
0 or 1, the line bends. Three points give a very wide interval. `forecast_held_back` says how well a forecast did so far.

Source: Carlini et al., Quantifying Memorization (ICLR 2023): extractable share against log model size, copies and context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

MIN_DISTINCT = 3
EXACT_FIT = 1e-12  # share of the spread of y that residuals may keep and still be called none
ROUNDING = 1e-9


@dataclass(frozen=True)
class Prediction:
    """A forecast of one new value at `x`, with the interval that would hold it.

    Flags: *clipped* (the line, or an end of the interval, leaves the limits), *extrapolated* (`x` lies outside the data).
    """

    x: float
    value: float
    low: float
    high: float
    confidence: float
    flags: tuple[str, ...]


@dataclass(frozen=True)
class LogLinearFit:
    """y = intercept + slope * log10 x. `r_squared` is NaN where y does not vary.

    Flags: *exact fit* (no residual is left, so the intervals have no width), *no spread* (all y are equal).
    """

    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float
    n: int
    confidence: float
    residual_sd: float
    x_range: tuple[float, float]
    mean_log_x: float
    spread_log_x: float
    flags: tuple[str, ...]

    def predict(self, x: float, *, limits: tuple[float, float] = (-math.inf, math.inf)) -> Prediction:
        """Forecast of one new y at `x`, in the unit of y, with its prediction interval.

        Args:
            x: where; > 0.
            limits: the least and the largest y there can be; value and interval are clipped to them, and flagged.

        Returns:
            `Prediction` at the confidence of the fit.

        Raises:
            ValueError: `x` is not a positive number.

        Example:
            >>> fit = fit_log_linear([1, 10, 100], [0.1, 0.5, 0.9])
            >>> round(fit.predict(1000).value, 3), fit.predict(1000, limits=(0, 1)).value
            (1.3, 1.0)
        """
        if not (math.isfinite(x) and x > 0.0):
            raise ValueError(f"x must be a positive number, got {x}.")
        place = math.log10(x)
        centre = self.intercept + self.slope * place
        error = self.residual_sd * math.sqrt(1.0 + 1.0 / self.n + (place - self.mean_log_x) ** 2 / self.spread_log_x)
        reach = _quantile(self.confidence, self.n) * error
        ends = np.array([centre, centre - reach, centre + reach])
        value, low, high = (float(end) for end in np.clip(ends, *limits))
        flags: tuple[str, ...] = () if self.x_range[0] <= x <= self.x_range[1] else ("extrapolated",)
        if not np.array_equal(ends, [value, low, high]):
            flags += ("clipped",)
        return Prediction(x=x, value=value, low=low, high=high, confidence=self.confidence, flags=flags)


@dataclass(frozen=True)
class HeldBack:
    """A forecast of a point that the fit did not see, beside what was observed; `error` is observed minus forecast."""

    forecast: Prediction
    observed: float
    error: float
    is_inside: bool
    fit: LogLinearFit


def fit_log_linear(x: ArrayLike, y: ArrayLike, *, confidence: float = 0.95) -> LogLinearFit:
    """Slope of y for every tenfold x, with its t interval; in the unit of y (bits, or share 0..1).

    Do not trust it where the points bend: look at R squared, and at how the held-back point was forecast.

    Args:
        x: sizes, counts or steps; > 0, shape (n,), at least three distinct ones.
        y: shape (n,).
        confidence: of the interval of the slope and of predictions, 0..1.

    Returns:
        `LogLinearFit`, which predicts.

    Raises:
        ValueError: fewer than three distinct x, x that is not positive, shapes that differ, or a value that is not finite.

    Example:
        >>> fit = fit_log_linear([1.25e8, 1.3e9, 2.7e9, 6e9], [0.20, 0.40, 0.45, 0.52])
        >>> round(fit.slope, 3), round(fit.low, 3), round(fit.high, 3), round(fit.r_squared, 3)
        (0.19, 0.172, 0.207, 0.999)

    Source: ordinary least squares on log10 x, by scipy.stats.linregress.
    """
    sizes, values = _checked(x, y)
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}.")
    logs = np.log10(sizes)
    spread = float(((logs - logs.mean()) ** 2).sum())
    flags: tuple[str, ...]
    if np.ptp(values) == 0.0:
        slope, intercept, r_squared, residual_sd, flags = 0.0, float(values[0]), math.nan, 0.0, ("no spread",)
    else:
        line = stats.linregress(logs, values)
        slope, intercept = float(line.slope), float(line.intercept)
        squares = float(((values - intercept - slope * logs) ** 2).sum())
        total = float(((values - values.mean()) ** 2).sum())
        flags = ("exact fit",) if squares <= EXACT_FIT * total else ()
        r_squared = 1.0 if flags else 1.0 - squares / total
        residual_sd = 0.0 if flags else math.sqrt(squares / (values.size - 2))
    reach = _quantile(confidence, values.size) * residual_sd / math.sqrt(spread)
    return LogLinearFit(
        slope=slope,
        low=slope - reach,
        high=slope + reach,
        intercept=intercept,
        r_squared=r_squared,
        n=values.size,
        confidence=confidence,
        residual_sd=residual_sd,
        x_range=(float(sizes.min()), float(sizes.max())),
        mean_log_x=float(logs.mean()),
        spread_log_x=spread,
        flags=flags,
    )


def forecast_held_back(
    x: ArrayLike, y: ArrayLike, *, confidence: float = 0.95, limits: tuple[float, float] = (-math.inf, math.inf)
) -> HeldBack:
    """Forecast the last point from the others and say how far off it was, in the unit of y.

    Args:
        x: > 0, shape (n,); the last one larger than all others, of which at least three are distinct.
        y: shape (n,).
        confidence: of the prediction interval, 0..1.
        limits: the least and the largest y there can be.

    Returns:
        `HeldBack`; one point inside its interval is no proof that the line holds, one outside speaks against it.

    Raises:
        ValueError: the last x is not the largest, or the rest cannot be fitted.

    Example:
        >>> held = forecast_held_back([1, 4, 16, 64], [1.5, 3.1, 4.4, 6.2])
        >>> round(held.forecast.value, 2), held.observed, round(held.error, 2), held.is_inside
        (5.9, 6.2, 0.3, True)
    """
    sizes, values = (np.asarray(one, dtype=np.float64) for one in (x, y))
    if sizes.shape != values.shape or sizes.ndim != 1 or sizes.size < MIN_DISTINCT + 1:
        raise ValueError(
            f"x and y must be lists of one length, {MIN_DISTINCT + 1} at least, got shapes {sizes.shape} and {values.shape}."
        )
    if not (np.isfinite(values[-1]) and sizes[-1] > sizes[:-1].max()):
        raise ValueError(f"the last x must be larger than the others and its y finite, got {sizes[-1]} and {values[-1]}.")
    fit = fit_log_linear(sizes[:-1], values[:-1], confidence=confidence)
    forecast, observed = fit.predict(float(sizes[-1]), limits=limits), float(values[-1])
    slack = ROUNDING * max(1.0, abs(observed))  # an exact fit has an interval without width
    return HeldBack(
        forecast=forecast,
        observed=observed,
        error=observed - forecast.value,
        is_inside=forecast.low - slack <= observed <= forecast.high + slack,
        fit=fit,
    )


def _quantile(confidence: float, n: int) -> float:
    return float(stats.t.ppf((1.0 + confidence) / 2.0, n - 2))


def _checked(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes, values = (np.asarray(one, dtype=np.float64) for one in (x, y))
    if sizes.shape != values.shape or sizes.ndim != 1:
        raise ValueError(f"x and y must be lists of one length, got shapes {sizes.shape} and {values.shape}.")
    if not (np.isfinite(sizes).all() and np.isfinite(values).all()):
        raise ValueError("x and y must be finite, got NaN or infinity.")
    if (sizes <= 0.0).any():
        raise ValueError(f"x must be above 0 to have a logarithm, got {sizes.min()}.")
    distinct = np.unique(sizes).size
    if distinct < MIN_DISTINCT:
        raise ValueError(f"x must hold at least {MIN_DISTINCT} distinct values to fit a line with an interval, got {distinct}.")
    return sizes, values
