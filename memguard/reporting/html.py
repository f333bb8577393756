"""The page of a report: one self-contained HTML document for screens, phones and paper. No script, no network.

Everything that a report or decision holds is escaped; the figures are the only markup passed through, and we made them.
"""

from __future__ import annotations

from markupsafe import Markup

from memguard.audit.report import LIMITS, AuditReport, Decision
from memguard.reporting.definitions import DEFINITIONS
from memguard.reporting.parts import count_found_by, count_uncounted, describe_extent, why_not_measured
from memguard.reporting.plots import draw_curves, draw_dots
from memguard.reporting.ratio_plot import draw_ratios
from memguard.reporting.view import check_same_subject, environment, facts, most_exposed_first


def render_html(report: AuditReport, decision: Decision | None = None) -> str:
    """The report, and where given the gate's decision on it, as one HTML document.

    Figures are rounded to three significant digits; the JSON holds them in full. What was not measured says so and is
    never 0. An invalid report is shown with its reasons on top, since its figures are not evidence.

    Args:
        report: any audit report.
        decision: the gate's decision on this very report.

    Returns:
        HTML text in UTF-8.

    Raises:
        InputError: the decision was made on another subject.
    """
    check_same_subject(report, decision)
    template = environment(autoescape=True).get_template("report.html.j2")
    curves, dots = draw_curves(report), draw_dots(report)
    ratios = draw_ratios(report.records) if report.records is not None else None
    return template.render(
        report=report,
        decision=decision,
        facts=facts(report),
        rows=most_exposed_first(report),
        curves=Markup(curves) if curves else None,
        dots=Markup(dots) if dots else None,
        ratios=Markup(ratios) if ratios else None,
        extent=describe_extent(report),
        reasons=why_not_measured(report),
        found_by=count_found_by(report),
        num_uncounted=count_uncounted(report),
        definitions=DEFINITIONS,
        limits=LIMITS,
    )
