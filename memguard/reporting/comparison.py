"""A comparison and a scaling document for people: tables on a terminal, one plain line a row where the output is piped."""

from __future__ import annotations

from rich.console import Group, RenderableType

from memguard.audit.comparison import Comparison, DifferenceRow, Side
from memguard.audit.scaling import WORDS, Scaling, ScalingFit
from memguard.reporting.formatting import show_number
from memguard.reporting.tables import lines, plain_rows, table

HIDDEN_FLAGS = ("identical",)


def comparison_view(comparison: Comparison, *, is_plain: bool) -> RenderableType:
    """Sentences, every difference with its interval, and what to mind; text from files is never read as markup.

    Args:
        comparison: any comparison.
        is_plain: one line a row, for a pipe, in place of a table.

    Returns:
        A rich renderable.
    """
    a, b = comparison.a.label, comparison.b.label
    means = (f"mean {a}", f"mean {b}")
    columns = ("tier", "format", "metric", "n", *means, f"{b} - {a}", "interval of the difference", "p", "method")
    how = "the same canaries, pair by pair" if comparison.is_paired else "groups of canaries, not pairs"
    cells = [_difference_cells(row) for row in comparison.rows]
    reasons = [f"Not paired: {reason}." for reason in comparison.not_paired]
    return Group(
        *lines([f"{_name(comparison.a)} against {_name(comparison.b)}: {how}, {b} minus {a}.", *reasons]),
        *lines(comparison.sentences, style="bold"),
        *(plain_rows(columns, cells) if is_plain else [table(columns, cells)]),
        *lines(comparison.notes, style="dim"),
    )


def scaling_view(scaling: Scaling, *, is_plain: bool) -> RenderableType:
    """Every fitted curve with its slope, forecast and held-back score, and what was not fitted.

    Args:
        scaling: any scaling document.
        is_plain: one sentence a curve, for a pipe, in place of a table.

    Returns:
        A rich renderable.
    """
    columns = ("quantity", "against", "of", "points", "slope per tenfold", "interval", "R2", "forecast", "held back")
    fits = [table(columns, [_fit_cells(fit) for fit in scaling.fits])] if scaling.fits else []
    return Group(
        *(lines(scaling.sentences) if is_plain else fits),
        *lines([f"Not fitted: {text}" for text in scaling.missing]),
        *lines(scaling.notes, style="dim"),
    )


def _name(side: Side) -> str:
    """Label, step and the beginning of the digest of what was measured."""
    step = "" if side.subject.global_step is None else f", step {side.subject.global_step:,}"
    return f"{side.label} ({(side.subject.digest or side.subject.kind)[:12]}{step})"


def _difference_cells(row: DifferenceRow) -> list[str]:
    flags = [flag for flag in row.flags if flag not in HIDDEN_FLAGS]
    return [
        str(row.tier),
        row.format or "all",
        f"{row.metric} ({row.unit})" if row.unit != "share" else row.metric,
        str(row.n_a) if row.n_a == row.n_b else f"{row.n_a}, {row.n_b}",
        show_number(row.mean_a),
        show_number(row.mean_b),
        f"{show_number(row.difference)}{_kind(row)}",
        f"{_span(row.low, row.high)} ({_percent(row.confidence)})",
        "-" if row.p_value is None else f"{row.p_value:.2g}",
        "; ".join([row.method, *flags]),
    ]


def _kind(row: DifferenceRow) -> str:
    """What a difference is of, where it is not that of the two means beside it."""
    if row.method.startswith("paired order statistics"):
        return " (median of pairs)"
    return " (median shift)" if row.method.startswith("Hodges-Lehmann") else ""


def _fit_cells(fit: ScalingFit) -> list[str]:
    of = [] if fit.tier is None else [f"tier {fit.tier}"]
    of += [] if fit.num_parameters is None else [f"{fit.num_parameters:,} parameters"]
    forecast, held = "-", "-"
    if fit.forecast is not None:
        one = fit.forecast
        forecast = f"{show_number(one.value)} at {one.x:,.6g} ({_span(one.low, one.high)}, {_percent(fit.confidence)})"
    if fit.held_back is not None:
        back = fit.held_back
        verdict = "inside" if back.is_inside else "outside"
        forecast_range = _span(back.low, back.high)
        held = f"{show_number(back.observed)} for {show_number(back.forecast)} ({forecast_range}), {verdict}"
    return [
        f"{fit.quantity} ({fit.unit})" if fit.unit != "share" else fit.quantity,
        WORDS[fit.against],
        ", ".join([*of, fit.report or "all reports"]),
        str(fit.n),
        show_number(fit.slope),
        f"{_span(fit.low, fit.high)} ({_percent(fit.confidence)})",
        "-" if fit.r_squared is None else f"{fit.r_squared:.3f}",
        forecast,
        "; ".join([held, *fit.flags]),
    ]


def _span(low: float, high: float) -> str:
    return f"{show_number(low)} to {show_number(high)}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
