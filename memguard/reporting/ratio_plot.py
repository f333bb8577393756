"""Histogram of the log belief ratio over real records, in nats, as self-contained SVG text."""

from __future__ import annotations

import math
import statistics
from typing import Any

from memguard.audit.report_records import Records
from memguard.reporting.formatting import show_count, show_number
from memguard.reporting.svg import INK, drawing_settings, new_axes, tier_colour, write_svg

KINDS = ("common", "undecided", "PA")
PLACES = (0, 1, 2)  # drawn in the colours of tiers: common grey, as controls are
NUM_BINS = 30


def draw_ratios(records: Records) -> str | None:
    """Records by their log belief ratio in nats, stacked by verdict, with log n dashed; as SVG text.

    Where a verdict was certain before every prior prefix was followed, the ratio drawn is a lower end.

    Args:
        records: its members that have a ratio; those that are not extractable have none.

    Returns:
        An `<svg>` element as `draw_curves` gives; None when no record has a ratio.
    """
    rows = records.members.rows
    ratios = {
        kind: [
            row.log_belief_ratio for row in rows if row.log_belief_ratio is not None and (row.verdict or "").startswith(kind)
        ]
        for kind in KINDS
    }
    drawn = [
        (kind, tier_colour(place, PLACES), ratios[kind]) for kind, place in zip(KINDS, PLACES, strict=True) if ratios[kind]
    ]
    if not drawn:
        return None
    with drawing_settings():
        axes = new_axes(ylabel="records")
        axes.hist([found for _, _, found in drawn], bins=NUM_BINS, stacked=True, color=[colour for _, colour, _ in drawn])
        axes.set_xlabel("log belief ratio (nats)")
        _set_counts(axes)
        _name_kinds(axes, drawn)
        _draw_threshold(axes, records)
        return write_svg(axes, name="ratios", tiers=PLACES, description=_describe(ratios, records))


def _set_counts(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _name_kinds(axes: Any, drawn: list[tuple[str, str, list[float]]]) -> None:
    """The verdicts on the right, in the order of the stack."""
    for place, (kind, colour, found) in enumerate(reversed(drawn)):
        text = f"{kind}\n{show_count(len(found))}"
        axes.annotate(
            text, (1.0, 0.9 - 0.16 * place), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
            va="center", color=colour, weight="bold",
        )  # fmt: skip


def _draw_threshold(axes: Any, records: Records) -> None:
    if records.threshold is None:
        return
    place = math.log(records.threshold.n)
    axes.axvline(place, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        f"n = {show_number(records.threshold.n)}", (place, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -2),
        textcoords="offset points", va="top", color=INK, weight="bold", annotation_clip=False,
    )  # fmt: skip


def _describe(ratios: dict[str, list[float]], records: Records) -> str:
    """The text alternative: how many records of each verdict, and the middle and the ends of their ratios."""
    values = [ratio for found in ratios.values() for ratio in found]
    counts = ", ".join(f"{show_count(len(found))} {kind}" for kind, found in ratios.items())
    ends = f"median {show_number(statistics.median(values))}, from {show_number(min(values))} to {show_number(max(values))}"
    threshold = f" The dashed line is the threshold n {show_number(records.threshold.n)}." if records.threshold else ""
    return f"Log belief ratio in nats of {show_count(len(values))} records: {counts}; {ends}.{threshold}"
