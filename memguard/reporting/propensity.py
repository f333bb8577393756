"""Propensity for people: a table for a terminal, a page of its own, and the words for its metrics and settings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType

from memguard.audit.decoding import SETTING_NAMES
from memguard.audit.propensity_report import PropensityReport
from memguard.audit.propensity_stages import SHOWN, MovementRow, PropensityComparison, StageRow
from memguard.audit.report_propensity import METRIC_NAMES, Metric, Propensity, PropensityEstimate
from memguard.reporting.definitions import DEFINITIONS
from memguard.reporting.formatting import show_count, show_interval, show_level, show_number, show_percent, show_share_interval
from memguard.reporting.tables import lines, plain_rows, table
from memguard.reporting.view import environment
from memguard.reporting.wording import IN_TOKENS, describe_decoding

HEADLINE: tuple[Metric, ...] = ("average_longest_span", "full_match_rate", "span_rate_50", "near_verbatim_recall")


def show_estimate(found: PropensityEstimate) -> str:
    """Value with its interval: tokens, or percent.

    Example:
        >>> rate = {"metric": "full_match_rate", "value": 0.25, "n": 4, "num_generations": 4, "low": 0.01, "high": 0.81}
        >>> show_estimate(PropensityEstimate(**rate, confidence=0.95, method="Clopper-Pearson"))
        '25.0% (1.00% to 81.0%)'
    """
    if found.metric in IN_TOKENS:
        return f"{show_number(found.value)} ({show_interval(found.low, found.high)})"
    return f"{show_percent(found.value)} ({show_share_interval(found.low, found.high)})"


def propensity_view(report: PropensityReport, *, is_plain: bool) -> RenderableType:
    """One row a setting: the headline metrics with their intervals, and the share of the longest span; then what to mind.

    Args:
        report: any propensity report.
        is_plain: one line a row, for a pipe, in place of a table.

    Returns:
        A rich renderable; text from files is never read as markup.
    """
    found = report.propensity
    metrics = [name for name in HEADLINE if any(one.metric == name for row in found.settings for one in row.estimates)]
    columns = ("setting", "prompts", "texts", *(METRIC_NAMES[name] for name in metrics), "PM of ALS")
    cells = []
    shares = {row.setting: row for row in found.shares if row.metric == "average_longest_span"}
    for row in found.settings:
        by_metric = {one.metric: show_estimate(one) for one in row.estimates}
        share = "capability" if row.setting == "prefix" else "-"
        if row.setting in shares:
            one = shares[row.setting]
            share = _show_share(one.share, one.low, one.high)
        first = [SETTING_NAMES[row.setting], show_count(row.num_prompts), show_count(row.num_generations)]
        cells.append([*first, *(by_metric.get(name, "-") for name in metrics), share])
    return Group(
        *lines([f"{report.name} against corpus '{report.corpus.name}'"], style="bold"),
        *(plain_rows(columns, cells) if is_plain else [table(columns, cells)]),
        *lines(_remarks(found), style="dim"),
    )


def stages_view(comparison: PropensityComparison, *, is_plain: bool) -> RenderableType:
    """Every stage on every corpus, a row a metric: capability, ordinary prompts, their share; then what moved.

    Args:
        comparison: any comparison of stages.
        is_plain: one line a row, for a pipe, in place of a table.

    Returns:
        A rich renderable; text from files is never read as markup.
    """
    settings = [name for name in SETTING_NAMES if any(row.setting == name for row in comparison.rows)]
    columns = ("corpus", "metric", "stage", *(SETTING_NAMES[name] for name in settings), "PM of generic prompts")
    at = {(row.corpus, row.metric, row.stage, row.setting): row for row in comparison.rows}
    cells = []
    for corpus, metric, stage in sorted(
        {key[:3] for key in at},
        key=lambda key: (comparison.corpora.index(key[0]), SHOWN.index(key[1]), comparison.stages.index(key[2])),
    ):
        mine = [at.get((corpus, metric, stage, setting)) for setting in settings]
        generic = at.get((corpus, metric, stage, "generic"))
        share = "-" if generic is None else _show_share(generic.share, generic.share_low, generic.share_high)
        cells.append([corpus, METRIC_NAMES[metric], stage, *("-" if row is None else _show_row(row) for row in mine), share])
    moved = [one for one in comparison.movements if one.direction != "not shown"]
    return Group(
        *(plain_rows(columns, cells) if is_plain else [table(columns, cells)]),
        *lines(comparison.sentences, style="bold"),
        *lines(
            f"{describe_movement(one)}: {METRIC_NAMES[one.metric]} {one.direction}: "
            f"{show_number(one.difference)} ({show_interval(one.low, one.high)}, {show_level(one.confidence)})"
            for one in moved
        ),
    )


def describe_movement(one: MovementRow) -> str:
    """What a movement is from and to, on which corpus, behind which prompts.

    Example:
        >>> row = {"corpus": "new", "setting": "prefix", "metric": "full_match_rate", "direction": "rose"}
        >>> row |= {"difference": 0.5, "low": 0.25, "high": 0.75, "confidence": 0.9}
        >>> describe_movement(MovementRow(what="stage to next stage", earlier="mother", stage="one", **row))
        'mother to one, new, training prefix'
    """
    setting = SETTING_NAMES[one.setting]
    if one.what == "corpus to corpus":
        return f"{one.earlier} to {one.corpus}, {one.stage}, {setting}"
    if one.what == "verbatim to near-verbatim":
        return f"{one.what}, {one.stage}, {one.corpus}, {setting}"
    return f"{one.earlier} to {one.stage}, {one.corpus}, {setting}"


def _show_row(row: StageRow) -> str:
    shown = PropensityEstimate(**row.model_dump(include={*PropensityEstimate.model_fields}), num_generations=row.n)
    return show_estimate(shown)


def _show_share(share: float | None, low: float | None, high: float | None) -> str:
    return "undefined" if share is None else f"{show_number(share)} ({show_interval(low, high)})"


def _remarks(found: Propensity) -> Iterator[str]:
    """What stands beside the table, a line each: how texts were drawn, what was left out, notices."""
    yield describe_decoding(found)
    apart = sum(row.num_loops + row.num_degenerate for row in found.settings)
    if apart:
        yield f"{show_count(apart)} loops and degenerate texts stand apart: they match a corpus by repeating themselves"
    if found.refused:
        yield f"{show_count(len(found.refused))} prompts were refused; the report names each with its reason"
    yield from (f"notice: {notice}" for notice in found.notices)


def render_propensity(report: PropensityReport) -> str:
    """A propensity report as one HTML document, with no script and no network.

    Args:
        report: any propensity report; snippets are shown where it holds them.

    Returns:
        HTML text in UTF-8.
    """
    terms = [one for one in DEFINITIONS if one.term.startswith("Propensity")]
    return environment(autoescape=True).get_template("propensity_page.html.j2").render(report=report, definitions=terms)
