"""The report on one page of markdown, for a pull request comment or a step summary; the HTML page holds the rest."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

from memguard.audit.report import LIMITS, AuditReport, Decision
from memguard.markdown import escape_markdown
from memguard.reporting.view import check_same_subject, environment, facts, most_exposed_first

LARGEST_LIST = 10


def render_markdown(report: AuditReport, decision: Decision | None = None) -> str:
    """The report, and where given the gate's decision on it, as one page of markdown.

    Lists the ten most exposed canaries and says how many more there are.

    Args:
        report: any audit report.
        decision: the gate's decision on this very report.

    Returns:
        GitHub-flavoured markdown in UTF-8.

    Raises:
        InputError: the decision was made on another subject.
    """
    check_same_subject(report, decision)
    template = environment(autoescape=False, finalize=_literal).get_template("report.md.j2")
    rows = [row for row in most_exposed_first(report) if row.role == "canary"]
    text = template.render(
        report=report, decision=decision, facts=facts(report), rows=rows[:LARGEST_LIST], num_rows=len(rows), limits=LIMITS
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _literal(value: Any) -> Any:
    """What a template prints, escaped; `Markup` passes as it is."""
    return value if isinstance(value, Markup) else escape_markdown(str(value))
