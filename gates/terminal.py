"""A decision on a terminal: the verdict in one sentence, then every requirement and rule with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memguard.audit.report import Decision, RuleResult

STYLES = {
    "pass": "green",
    "warn": "yellow",
    "not shown": "yellow",
    "waived": "yellow",
    "block": "bold red",
    "invalid": "bold magenta",
    "insufficient evidence": "bold magenta",
}
NAMED = 5


def format_decision(decision: Decision) -> RenderableType:
    """A decision as a rich renderable; text from files is shown as it is, never read as markup.

    Args:
        decision: any decision.

    Returns:
        The verdict, a table of evidence and rules, and what a pass does not mean.
    """
    verdict = Text(f"{decision.outcome.upper()} (exit code {decision.exit_code})", style=STYLES[decision.outcome])
    parts: list[RenderableType] = [
        verdict,
        Text(decision.reason),
        _table("evidence", decision.evidence),
        _table("rule", decision.rules),
    ]
    if decision.outcome == "pass":
        parts.append(Text("A pass does not mean more than this:", style="dim"))
        parts += [Text(f"- {limit}", style="dim") for limit in decision.limits]
    return Group(*parts)


def _table(title: str, results: Sequence[RuleResult]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("outcome", no_wrap=True)
    table.add_column(title)
    table.add_column("why")
    for result in results:
        table.add_row(
            Text(result.outcome, style=STYLES[result.outcome]), Text(result.name), Text(result.reason + _names(result))
        )
    return table


def _names(result: RuleResult) -> str:
    """Ids of the canaries behind an outcome that is no pass."""
    if result.outcome == "pass" or not result.canaries:
        return ""
    more = f" and {len(result.canaries) - NAMED} more" if len(result.canaries) > NAMED else ""
    return f" Canaries: {', '.join(result.canaries[:NAMED])}{more}."
