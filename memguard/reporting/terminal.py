"""The exposure table of a report, its notices and one line for each further part, for a terminal or a pipe."""

from __future__ import annotations

from collections import Counter

from rich.table import Table

from memguard.audit.decoding import SETTING_NAMES
from memguard.audit.report import AuditReport, CanaryRow, Role
from memguard.audit.report_extraction import Extraction
from memguard.audit.report_membership import Membership
from memguard.audit.report_privacy import Privacy
from memguard.audit.report_propensity import PropensitySettingRow
from memguard.audit.report_records import CopiesRow, PriorAwareCounts, RecordSet
from memguard.reporting.formatting import show_count, show_level, show_number, show_percent, show_share_interval
from memguard.reporting.wording import SCORE_NAMES, describe_copies, describe_not_testable, describe_sampler


def exposure_table(report: AuditReport, *, title: str) -> Table:
    """Exposure by format and planned tier with realised counts; controls last. Bits.

    *not excluded*, where there are any: canaries that were not extracted, though rank 1 cannot be excluded.
    """
    table = Table(title=f"{title}: exposure in bits ({report.status}, {report.subject.kind})", title_justify="left")
    possible = Counter((row.format, row.tier) for row in _not_excluded(report))
    more = ["not excluded"] if possible else []
    for column in ("format", "tier", "n", "seen", "mean", "median", "interval of the median", "extracted", *more):
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
            *(str(possible[row.format, row.tier]) for _ in more),
        )
    for control in report.controls:
        expected = f"chance {control.expected_exposure_bits:.2f}"
        mean = _figure(control.mean_exposure_bits)
        table.add_row(control.format, "control", str(control.num_controls), "0", mean, "", expected, "", *("" for _ in more))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def findings_lines(report: AuditReport) -> list[str]:
    """Every notice of the report, then the headline of every part that was measured beside exposure, a line each.

    Args:
        report: an audit report, valid or not.

    Returns:
        Plain text, shares in percent, intervals with their confidence. Notices are the only text of a report, on one line each.
    """
    lines = [f"notice: {_one_line(notice)}" for notice in report.notices]
    lines += _extracted_lines(report)
    if report.extraction is not None:
        lines += _extraction_lines(report.extraction, report)
    if report.prior_aware is not None:
        lines.append(f"Prior-Aware, canaries: {_verdicts(report.prior_aware)}")
    if report.records is not None:
        records = report.records
        lines.append(f"records, members: {_greedy(records.members)}")
        lines += [f"records, held out: {_greedy(records.held_out)}"] if records.held_out is not None else []
        lines += [f"records that stand {row.copies} in the corpus: {_greedy_of(row)}" for row in records.by_copies]
        lines += [f"Prior-Aware, records: {_verdicts(records.prior_aware)}"] if records.prior_aware is not None else []
    if report.membership is not None:
        lines.append(_membership_line(report.membership))
    if report.propensity is not None:
        lines += [_propensity_line(row) for row in report.propensity.settings if row.estimates]
    if report.privacy is not None:
        lines.append(_privacy_line(report.privacy))
    return lines


def _one_line(text: str) -> str:
    """Text that cannot move the cursor or begin a line of its own."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def _not_excluded(report: AuditReport) -> list[CanaryRow]:
    rows = [row for row in report.canaries if row.role == "canary"]
    return [row for row in rows if row.may_be_extracted and not row.is_extracted]


def _count(report: AuditReport, role: Role) -> str:
    return show_count(sum(row.role == role for row in report.canaries))


def _extracted_lines(report: AuditReport) -> list[str]:
    """How many canaries may be extracted though none shows it; nothing where all are known."""
    possible = len(_not_excluded(report))
    if not possible:
        return []
    found = sum(row.is_extracted for row in report.canaries if row.role == "canary")
    return [
        f"extracted: {show_count(found)} of {_count(report, 'canary')} canaries; {show_count(possible)} more cannot be excluded"
    ]


def _extraction_lines(found: Extraction, report: AuditReport) -> list[str]:
    sampler = describe_sampler(found.sampler)
    lines = [f"extraction: {sampler[0].lower()}{sampler[1:-1]}"] if found.curves else []
    for curve in found.curves:
        ends = [f"{show_percent(point.expected_share)} (up to {show_percent(point.expected_high)})" for point in curve.points]
        shares = [f"{one} in {show_count(point.num_queries)}" for one, point in zip(ends, curve.points, strict=True)]
        n, level = curve.points[0].n, show_level(curve.points[0].confidence)
        head = f"extraction, tier {curve.tier}, n = {show_count(n)}"
        lines.append(f"{head}: expected share by queries (upper end of the {level} interval) {', '.join(shares)}")
    canaries = f"{show_count(found.num_found)} of {_count(report, 'canary')} canaries"
    controls = f"{show_count(found.num_controls_found)} of {_count(report, 'control')} controls"
    prompts = f"greedy continuations of {show_count(found.num_prompts)} prompts"
    return [*lines, f"{prompts}: {canaries}, {controls} found; chance of a match at most {show_number(found.chance_of_match)}"]


def _verdicts(counts: PriorAwareCounts) -> str:
    verdicts = f"{counts.num_pa} PA, {counts.num_common} common, {counts.num_undecided} undecided of {counts.num_extractable}"
    if counts.common_share is None:
        return f"none of {counts.n} is extractable"
    ends = _share_ends(counts.common_low, counts.common_high, counts.confidence)
    return f"{verdicts} extractable, n = {show_count(counts.n)}; common share {show_percent(counts.common_share)} ({ends})"


def _greedy(found: RecordSet) -> str:
    ends = _share_ends(found.greedy_low, found.greedy_high, found.confidence)
    return f"{found.num_greedy} of {found.n} written by greedy decoding, {show_percent(found.greedy_share)} ({ends})"


def _greedy_of(row: CopiesRow) -> str:
    ends = _share_ends(row.greedy_low, row.greedy_high, row.confidence)
    return f"{row.num_greedy} of {row.n} written by greedy decoding, {show_percent(row.greedy_share)} ({ends})"


def _share_ends(low: float | None, high: float | None, confidence: float) -> str:
    return f"{show_level(confidence)} interval {show_share_interval(low, high)}"


def _membership_line(found: Membership) -> str:
    scored = [score for score in found.scores if score.auroc is not None]
    if not scored:
        return f"{found.label}: no score is defined for every sample"
    best = max(scored, key=lambda score: score.auroc or 0.0)
    of = f"the best of {len(scored)} scores, not corrected for that" if len(scored) > 1 else "the only score"
    undefined = len(found.scores) - len(scored)
    of += f"; {undefined} more undefined" if undefined else ""
    ends = f"{show_level(best.confidence)} interval {show_number(best.low)} to {show_number(best.high)}"
    n = f"{show_count(best.n_members)} members, {show_count(best.n_non_members)} non-members"
    return f"{found.label}: AUROC {show_number(best.auroc)} ({ends}; {n}) by {SCORE_NAMES[best.name]}, {of}"


def _propensity_line(found: PropensitySettingRow) -> str:
    by_metric = {one.metric: one for one in found.estimates}
    span, full = by_metric["average_longest_span"], by_metric["full_match_rate"]
    ends = f"{show_level(span.confidence)} interval {show_number(span.low)} to {show_number(span.high)}"
    matched = f"{show_percent(full.value)} ({_share_ends(full.low, full.high, full.confidence)}) full matches"
    prompts = show_count(found.num_prompts)
    return f"{SETTING_NAMES[found.setting]}: longest span {show_number(span.value)} tokens ({ends}), {matched}, n = {prompts}"


def _privacy_line(found: Privacy) -> str:
    guesses = f"{found.num_correct} of {found.num_guesses} guesses right"
    cap = f"at most {show_number(found.cap)} could be shown"
    at = f"at {show_level(1 - found.significance)} confidence and delta {show_number(found.delta)}"
    line = f"privacy: epsilon at least {show_number(found.epsilon_lower_bound)} {at} ({cap}), {guesses}"
    copies = describe_copies(found)
    line += f"; {copies}" if copies else ""
    if found.stated_epsilon is None:
        return line
    limits = [f"p {show_number(found.p_value)}"]
    limits += [] if found.is_testable else [f"not testable ({describe_not_testable(found)})"]
    limits += [] if found.is_comparable else ["not comparable"]
    return f"{line}; stated {show_number(found.stated_epsilon)}: {', '.join(limits)}"
