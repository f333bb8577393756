"""The exposure table of a report and one line for each further part, for a terminal or a pipe."""

from __future__ import annotations

from rich.table import Table

from memguard.audit.report import AuditReport
from memguard.audit.report_extraction import Extraction
from memguard.audit.report_membership import Membership
from memguard.audit.report_privacy import Privacy
from memguard.audit.report_records import PriorAwareCounts, RecordSet
from memguard.reporting.formatting import show_count, show_number, show_percent, show_share_interval
from memguard.reporting.wording import SCORE_NAMES


def exposure_table(report: AuditReport, *, title: str) -> Table:
    """Exposure by format and planned tier with realised counts; controls last. Bits."""
    table = Table(title=f"{title}: exposure in bits ({report.status}, {report.subject.kind})", title_justify="left")
    for column in ("format", "tier", "n", "seen", "mean", "median", "interval of the median", "extracted"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in report.tiers:
        table.add_row(
            row.format,
            str(row.tier),
            str(row.n),
            _figure(row.mean_num_seen),
            _figure(row.mean_bits),
            _figure(row.median_bits),
            f"{_figure(row.low_bits)} .. {_figure(row.high_bits)} ({row.coverage:.0%})",
            str(row.num_extracted),
        )
    for control in report.controls:
        expected = f"chance {control.expected_exposure_bits:.2f}"
        table.add_row(
            control.format, "control", str(control.num_controls), "0", _figure(control.mean_exposure_bits), "", expected, ""
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def findings_lines(report: AuditReport) -> list[str]:
    """The headline of every part that was measured beside exposure, a line each, as plain text.

    Args:
        report: an audit report, valid or not.

    Returns:
        Lines with shares in percent and intervals in parentheses; they hold figures and fixed words, no text of a report.
    """
    lines: list[str] = []
    if report.extraction is not None:
        lines += _extraction_lines(report.extraction)
    if report.prior_aware is not None:
        lines.append(f"Prior-Aware, canaries: {_verdicts(report.prior_aware)}")
    if report.records is not None:
        records = report.records
        lines.append(f"records, members: {_greedy(records.members)}")
        lines += [f"records, held out: {_greedy(records.held_out)}"] if records.held_out is not None else []
        lines += [f"Prior-Aware, records: {_verdicts(records.prior_aware)}"] if records.prior_aware is not None else []
    if report.membership is not None:
        lines.append(_membership_line(report.membership))
    if report.privacy is not None:
        lines.append(_privacy_line(report.privacy))
    return lines


def _extraction_lines(found: Extraction) -> list[str]:
    lines = []
    for curve in found.curves:
        shares = [f"{show_percent(point.expected_share)} in {show_count(point.num_queries)}" for point in curve.points]
        lines.append(f"extraction, tier {curve.tier}: expected share by queries {', '.join(shares)}")
    chance = f"chance of a match at most {show_number(found.chance_of_match)}"
    lines.append(f"greedy continuations: {found.num_found} canaries and {found.num_controls_found} controls found, {chance}")
    return lines


def _verdicts(counts: PriorAwareCounts) -> str:
    verdicts = f"{counts.num_pa} PA, {counts.num_common} common, {counts.num_undecided} undecided of {counts.num_extractable}"
    if counts.common_share is None:
        return f"none of {counts.n} is extractable"
    ends = show_share_interval(counts.common_low, counts.common_high)
    return f"{verdicts} extractable; common share {show_percent(counts.common_share)} ({ends})"


def _greedy(found: RecordSet) -> str:
    ends = show_share_interval(found.greedy_low, found.greedy_high)
    return f"{found.num_greedy} of {found.n} written by greedy decoding, {show_percent(found.greedy_share)} ({ends})"


def _membership_line(found: Membership) -> str:
    scored = [score for score in found.scores if score.auroc is not None]
    if not scored:
        return f"{found.label}: no score is defined for every sample"
    best = max(scored, key=lambda score: score.auroc or 0.0)
    of = f"the best of {len(scored)} scores" if len(scored) > 1 else "the only score"
    ends = f"{show_number(best.low)} to {show_number(best.high)}"
    return f"{found.label}: AUROC {show_number(best.auroc)} ({ends}) by {SCORE_NAMES[best.name]}, {of}"


def _privacy_line(found: Privacy) -> str:
    guesses = f"{found.num_correct} of {found.num_guesses} guesses right"
    cap = f"at most {show_number(found.cap)} could be shown"
    line = f"privacy: epsilon at least {show_number(found.epsilon_lower_bound)} ({cap}), {guesses}"
    if found.stated_epsilon is None:
        return line
    limits = [] if found.is_testable else ["not testable"]
    limits += [] if found.is_comparable else ["not comparable"]
    return f"{line}; stated {show_number(found.stated_epsilon)}: {', '.join(limits) or f'p {show_number(found.p_value)}'}"
