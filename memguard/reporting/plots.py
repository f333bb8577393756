"""Figures of a report as self-contained SVG text: curves over training steps, and one dot a canary; exposure in bits.

matplotlib's SVG writer through `Figure` objects: no pyplot and no display. matplotlib loads on first use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memguard.audit.report import RANK_METHODS, AuditReport, CanaryRow, TrendPoint
from memguard.reporting.curves import CONTROLS_TIER, expected_control_bits, tier_of, trend_points
from memguard.reporting.formatting import show_number
from memguard.reporting.svg import INK, drawing_settings, new_axes, tier_colour, write_svg

MARKERS = "os^Dvp*hX"
Label = tuple[float, str, str]
"""Height in bits, text, colour."""


def draw_curves(report: AuditReport) -> str | None:
    """Mean exposure by tier over training steps, in bits, as SVG text.

    The band is the interval that the report gives a tier (of its median, see `curves`), a bar where there is one step.
    Controls are grey; the dashed line is the mean of a secret that the model never saw. A gap means that a canary of the
    tier had no finite score.

    Args:
        report: its trend, and its own tiers where its step is known.

    Returns:
        An `<svg>` element with its own style and a text alternative; None when no step is known.
    """
    points = trend_points(report)
    if not any(point.mean_bits is not None for point in points):
        return None
    with drawing_settings():
        axes = new_axes()
        tiers = sorted({point.tier for point in points})
        labels = [_draw_tier(axes, [point for point in points if point.tier == tier], tiers) for tier in tiers]
        _set_steps(axes)
        _label_ends(axes, [*labels, _draw_chance(axes, report)], top=1.06 * float(axes.dataLim.y1))
        return write_svg(axes, name="curves", tiers=tiers, description=_describe_curves(points))


def draw_dots(report: AuditReport) -> str | None:
    """One dot a canary by tier, with the interval of its exposure; bits, as SVG text.

    Dots of a tier are spread from least to most exposed. Circles are sampled, diamonds certified. Controls have no bars.

    Args:
        report: its canaries and controls; positive controls are left out.

    Returns:
        An `<svg>` element as `draw_curves` gives; None when no canary has a finite score.
    """
    rows = [row for row in report.canaries if row.role != "positive_control" and row.exposure.bits is not None]
    if not rows:
        return None
    tiers = sorted({tier_of(row) for row in rows})
    with drawing_settings():
        axes = new_axes()
        for place, tier in enumerate(tiers):
            _draw_column(axes, [row for row in rows if tier_of(row) == tier], place, tier_colour(tier, tiers))
        axes.set_xlim(-0.5, len(tiers) - 0.5)
        axes.set_xticks(range(len(tiers)), [_tier_name(tier) for tier in tiers])
        axes.set_xlabel("planned repetitions")
        # Intervals may reach the size of the space, far above every dot: they are cut off at the top.
        _label_ends(axes, [_draw_chance(axes, report)], top=1.2 * max(_or_nan(row.exposure.bits) for row in rows))
        description = f"Exposure in bits of {len(rows)} canaries and controls, one dot each, by tier."
        return write_svg(axes, name="dots", tiers=tiers, description=description)


def _tier_name(tier: int) -> str:
    return "controls" if tier == CONTROLS_TIER else f"tier {tier}"


def _set_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_tier(axes: Any, points: Sequence[TrendPoint], tiers: Sequence[int]) -> Label | None:
    """Line, markers and band of one tier; labelled at its last figure."""
    tier = points[0].tier
    colour = tier_colour(tier, tiers)
    steps = [point.global_step for point in points]
    means = [_or_nan(point.mean_bits) for point in points]
    lows, highs = [_or_nan(point.low_bits) for point in points], [_or_nan(point.high_bits) for point in points]
    if len(points) > 1:
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.16, linewidth=0)
    else:
        axes.vlines(steps, lows, highs, color=colour, alpha=0.5, linewidth=2)
    axes.plot(steps, means, color=colour, linewidth=2, marker=MARKERS[tiers.index(tier) % len(MARKERS)], markersize=5)
    finite = [mean for mean in means if math.isfinite(mean)]
    return (finite[-1], _tier_name(tier), colour) if finite else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _draw_chance(axes: Any, report: AuditReport) -> Label | None:
    chance = expected_control_bits(report)
    if chance is None:
        return None
    axes.axhline(chance, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    return chance, f"chance {show_number(chance)}", INK


def _draw_column(axes: Any, rows: Sequence[CanaryRow], place: int, colour: str) -> None:
    """The canaries of one tier, least exposed on the left."""
    ordered = sorted(rows, key=lambda row: (_or_nan(row.exposure.bits), row.id))
    spread = 0.7 if len(rows) > 1 else 0.0
    xs = {row.id: place - spread / 2 + spread * index / max(1, len(rows) - 1) for index, row in enumerate(ordered)}
    barred = [row for row in ordered if row.role == "canary"]
    lows, highs = [_or_nan(row.exposure.low_bits) for row in barred], [_or_nan(row.exposure.high_bits) for row in barred]
    axes.vlines([xs[row.id] for row in barred], lows, highs, color=colour, alpha=0.35, linewidth=1.5)
    size = 4.5 if len(rows) <= 30 else 3.0
    for marker, is_certified in (("o", False), ("D", True)):
        drawn = [row for row in ordered if (row.exposure.method in RANK_METHODS) == is_certified]
        bits = [_or_nan(row.exposure.bits) for row in drawn]
        axes.plot(
            [xs[row.id] for row in drawn], bits, color=colour, marker=marker, markersize=size, linestyle="none", clip_on=False
        )


def _label_ends(axes: Any, labels: Sequence[Label | None], *, top: float) -> None:
    """Scale from 0 to `top` bits and name the lines at their right ends, pushed apart where they would overlap."""
    top = max(top, 4.0)
    axes.set_ylim(0.0, top)
    drawn = sorted(label for label in labels if label is not None)
    heights = spread_apart([value for value, _, _ in drawn], gap=0.052 * top)
    place = {"xycoords": ("axes fraction", "data"), "xytext": (8, 0), "textcoords": "offset points", "va": "center"}
    for height, (_, text, colour) in zip(heights, drawn, strict=True):
        axes.annotate(text, (1.0, height), color=colour, weight="bold", annotation_clip=False, **place)


def spread_apart(values: Sequence[float], *, gap: float) -> list[float]:
    """Ascending heights at least `gap` apart and none below 0, each cluster centred on its values.

    Example:
        >>> spread_apart([5.0, 5.0, 9.0], gap=1.0)
        [4.5, 5.5, 9.0]
    """
    clusters: list[tuple[float, int]] = []  # mean of (value - gap * place), size: pooled until they ascend
    for place, value in enumerate(values):
        mean, size = value - gap * place, 1
        while clusters and clusters[-1][0] > mean:
            other, count = clusters.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        clusters.append((mean, size))
    shifted = [max(mean, 0.0) for mean, size in clusters for _ in range(size)]
    return [mean + gap * place for place, mean in enumerate(shifted)]


def _describe_curves(points: Sequence[TrendPoint]) -> str:
    """The text alternative: the steps, and the last mean of each tier."""
    last = {point.tier: point for point in points if point.mean_bits is not None}
    parts = [f"{_tier_name(tier)} {show_number(point.mean_bits)}" for tier, point in sorted(last.items())]
    steps = [point.global_step for point in points]
    return f"Mean exposure in bits over training steps {min(steps):,} to {max(steps):,}. Last values: {', '.join(parts)}."
