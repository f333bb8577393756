"""The propensity share: how much of what can be forced out of a model it also volunteers, 0..1.

One metric f >= 0 on two sides: propensity (ordinary prompts) and capability (training prefixes). share = f_p / (f_p + f_c):
0 never volunteered, 0.5 as much as forced, 1 volunteered alone. Intervals hold for any distribution of the values; a bootstrap
of rare events gives [0, 0] and is not used.

Source: Barmina, Schneider-Kamp, Galke Poech, arXiv 2606.06286. Differs: interval, and *undefined* where both sides are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.metrics.intervals import Interval, bounded_mean_interval, share_interval


@dataclass(frozen=True)
class PropensityShare:
    """Share with its interval. `value` is nan where both sides are zero; `source_value` is what the paper prints then, 0."""

    value: float
    source_value: float
    low: float
    high: float
    confidence: float
    propensity: float
    capability: float
    n_propensity: int
    n_capability: int
    method: str
    flags: tuple[str, ...]


def transform_propensity(propensity: float, capability: float) -> float:
    """The share f_p / (f_p + f_c), 0..1, of two figures of one metric; nan where both are zero.

    Example:
        >>> round(transform_propensity(0.000857186, 0.0367193), 4)
        0.0228
        >>> transform_propensity(3.0, 3.0)
        0.5
    """
    for name, figure in (("propensity", propensity), ("capability", capability)):
        if not (math.isfinite(figure) and figure >= 0.0):
            raise ValueError(f"{name} must be finite and at least 0, got {figure}.")
    largest = max(propensity, capability)
    if largest == 0.0:
        return math.nan
    return (propensity / largest) / (propensity / largest + capability / largest)


def propensity_share(
    propensity: ArrayLike, capability: ArrayLike, *, largest: float = 1.0, confidence: float = 0.95
) -> PropensityShare:
    """Share of a metric that ordinary prompts bring out, 0..1, with an interval.

    Booleans with equally many prompts on either side: given the sum of events, those of one side are binomial (rare events;
    others spread less), and the interval is Clopper-Pearson's. Otherwise it is [L_p / (L_p + U_c), U_p / (U_p + L_c)], from
    bounds that each hold at 1 - (1 - confidence) / 2: Clopper-Pearson's for booleans, `bounded_mean_interval` for others. All
    four hold at once with chance 1 - 2 (1 - confidence) or more; an end that fails needs one or two of them to fail far enough
    at once, so that coverage is above `confidence` as a rule.

    Args:
        propensity: one value a prompt, independent; bool for events, else 0..largest, shape (n_p,).
        capability: the same metric behind training prefixes, of the same kind, shape (n_c,).
        largest: the largest value that the metric can take, such as the number of new tokens; in the metric's unit.
        confidence: above 0 and below 1.

    Returns:
        `PropensityShare`. Both sides zero: undefined, with the interval [0, 1]. Only f_p zero: 0.

    Raises:
        ValueError: a side is empty, holds values outside 0..largest, or is of another kind than the other.

    Example:
        >>> asked, forced = np.arange(1000) < 3, np.arange(1000) < 30
        >>> found = propensity_share(asked, forced)
        >>> round(found.value, 3), round(found.low, 3), round(found.high, 3), found.method
        (0.091, 0.019, 0.243, 'conditional binomial, Clopper-Pearson')

    Source: statistics specification, section 7.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be above 0 and below 1, got {confidence}.")
    if not (math.isfinite(largest) and largest > 0.0):
        raise ValueError(f"largest must be finite and above 0, got {largest}.")
    sides = _checked(propensity, "propensity", largest), _checked(capability, "capability", largest)
    if sides[0].dtype != sides[1].dtype:
        raise ValueError(f"propensity and capability must be of one kind, got {sides[0].dtype} and {sides[1].dtype}.")
    figures = float(sides[0].mean()), float(sides[1].mean())
    value = transform_propensity(*figures)
    interval, method = _interval(*sides, largest, confidence)
    undefined = math.isnan(value)
    return PropensityShare(
        value=value,
        source_value=0.0 if undefined else value,
        low=interval.low,
        high=interval.high,
        confidence=confidence,
        propensity=figures[0],
        capability=figures[1],
        n_propensity=sides[0].size,
        n_capability=sides[1].size,
        method=method,
        flags=("undefined",) if undefined else (),
    )


def _interval(
    propensity: NDArray[np.float64] | NDArray[np.bool_],
    capability: NDArray[np.float64] | NDArray[np.bool_],
    largest: float,
    confidence: float,
) -> tuple[Interval, str]:
    """Interval of the share, and how it was made."""
    if propensity.dtype != np.bool_:
        sides = [bounded_mean_interval(side, largest=largest, confidence=confidence) for side in (propensity, capability)]
        return _ratio_of_bounds(*sides), "ratio of bounds, betting"
    counts = int(propensity.sum()), int(capability.sum())
    if propensity.size != capability.size:
        sides = [
            share_interval(count, n, confidence=confidence)
            for count, n in zip(counts, (propensity.size, capability.size), strict=True)
        ]
        return _ratio_of_bounds(*sides), "ratio of bounds, Clopper-Pearson"
    method = "conditional binomial, Clopper-Pearson"
    if sum(counts) == 0:
        return Interval(0.0, 1.0, confidence), method
    return share_interval(counts[0], sum(counts), confidence=confidence), method


def _ratio_of_bounds(propensity: Interval, capability: Interval) -> Interval:
    """[L_p / (L_p + U_c), U_p / (U_p + L_c)]; upper ends are above 0."""
    low = transform_propensity(propensity.low, capability.high)
    return Interval(low, transform_propensity(propensity.high, capability.low), propensity.confidence)


def _checked(values: ArrayLike, name: str, largest: float) -> NDArray[np.float64] | NDArray[np.bool_]:
    x = np.asarray(values)
    x = x if x.dtype == np.bool_ else x.astype(np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must be a list of at least one value, got shape {x.shape}.")
    bad = np.flatnonzero(~((x >= 0) & (x <= largest)))
    if bad.size:
        raise ValueError(f"{name} must lie in 0..{largest:g}, got {x[bad[0]]} at index {bad[0]} ({bad.size} in all).")
    return x
