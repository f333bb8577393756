"""The reason on one page of markdown, for a step summary, a pull request or a model card: no report is needed to read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memguard.audit.report import Decision
from memguard.gates.reporters.findings import REASON_CHARACTERS, Finding, facts, findings, show_figure
from memguard.gates.wording import clip
from memguard.markdown import escape_markdown

OWN_COLUMNS = ("margin", "detectable_bits")


def render_decision(decision: Decision) -> str:
    """The verdict, every rule with its figures, the evidence, the canaries by id, the digests and what a pass does not mean.

    Args:
        decision: any decision.

    Returns:
        GitHub-flavoured markdown; whatever comes from a file is escaped.
    """
    found = findings(decision)
    rules = [one for one in found if one.group != "evidence"]
    evidence = [one for one in found if one.group == "evidence"]
    parts = [
        f"## memguard gate: {decision.outcome} (exit code {decision.exit_code})",
        escape_markdown(clip(decision.reason, REASON_CHARACTERS)),
        _table(["rule", "outcome", "why", "figures", "margin", "smallest effect it finds"], map(_rule_row, rules)),
        "### Evidence",
        _table(
            ["requirement", "outcome", "why"],
            (
                [escape_markdown(one.name), one.result.outcome, escape_markdown(clip(one.result.reason, REASON_CHARACTERS))]
                for one in evidence
            ),
        ),
        *_canaries(found),
        "### What was decided on",
        _table(
            ["", ""],
            (
                [escape_markdown(name.replace("_", " ")), escape_markdown(show_figure(value))]
                for name, value in facts(decision).items()
            ),
        ),
        "### What a pass does not mean",
        "\n".join(f"- {escape_markdown(clip(limit, REASON_CHARACTERS))}" for limit in decision.limits),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _rule_row(one: Finding) -> list[str]:
    figures = one.result.figures
    rest = ", ".join(f"{name} = {show_figure(value)}" for name, value in figures.items() if name not in OWN_COLUMNS)
    margin = show_figure(figures["margin"]) if "margin" in figures else ""
    smallest = figures.get("detectable_bits")
    return [
        escape_markdown(one.name),
        one.result.outcome,
        escape_markdown(clip(one.result.reason, REASON_CHARACTERS)),
        escape_markdown(rest),
        margin,
        "" if smallest is None else f"{show_figure(smallest)} bits",
    ]


def _canaries(found: Sequence[Finding]) -> list[str]:
    lines = [
        f"- {escape_markdown(one.name)}: {escape_markdown(one.canaries.removeprefix('Canaries: '))}"
        for one in found
        if _names_canaries(one)
    ]
    return ["### Canaries behind what did not pass", "\n".join(lines)] if lines else []


def _names_canaries(one: Finding) -> bool:
    return one.level != "pass" and bool(one.result.canaries)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
