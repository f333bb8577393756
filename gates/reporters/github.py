"""What a GitHub Actions step says: annotations on its output, a page in its summary, and outputs for later steps.

A runner takes any line that starts with two colons for a command and every line of the output file for a name, so whatever
comes from a file is escaped in the first and fenced by a random word in the second.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from memguard.audit.report import Decision
from memguard.gates.reporters.findings import REASON_CHARACTERS, findings, relative_path
from memguard.gates.wording import clip

COMMANDS = {"failure": "error", "no evidence": "error", "warning": "warning", "note": "notice"}


def workflow_commands(decision: Decision, report_name: str) -> list[str]:
    """Workflow commands to print: the verdict first, then errors, warnings and notices in the decision's order.

    A runner shows ten of each kind a step, so what matters most comes first.

    Args:
        decision: any decision.
        report_name: the report's path in the repository.

    Returns:
        One line each.
    """
    path = relative_path(report_name)
    verdict = f"memguard gate: {decision.outcome} (exit code {decision.exit_code})"
    lines = [annotation("error" if decision.exit_code else "notice", path, verdict, _reason(decision))]
    found = [one for one in findings(decision) if one.level != "pass"]
    for one in sorted(found, key=lambda one: list(COMMANDS).index(one.level)):
        lines.append(annotation(COMMANDS[one.level], path, f"{one.result.outcome}: {one.name}", one.reason))
    return lines


def annotation(command: str, path: str, title: str, message: str) -> str:
    """One annotation.

    Example:
        >>> annotation("error", "a,b.json", "50%: rise", "two\\nlines :: here")
        '::error file=a%2Cb.json,line=1,title=50%25%3A rise::two%0Alines :: here'
    """
    return f"::{command} file={_property(path)},line=1,title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def append_to_files(decision: Decision, summary: str, environment: Mapping[str, str]) -> None:
    """Add the page and the outputs to the files that the runner names; without them nothing is written.

    Args:
        decision: its `outcome`, `exit_code`, `reason` and `report_digest` become outputs of the step.
        summary: markdown.
        environment: holds GITHUB_STEP_SUMMARY and GITHUB_OUTPUT on a runner.

    Raises:
        OSError: a file that the runner names cannot be written.
    """
    outputs = {
        "outcome": decision.outcome,
        "exit_code": str(decision.exit_code),
        "reason": _reason(decision),
        "report_digest": clip(decision.report_digest),
    }
    for variable, text in (
        ("GITHUB_STEP_SUMMARY", summary),
        ("GITHUB_OUTPUT", "".join(_output(name, value) for name, value in outputs.items())),
    ):
        if environment.get(variable):
            with open(environment[variable], "a", encoding="utf-8") as stream:
                stream.write(text)


def _output(name: str, value: str) -> str:
    fence = f"memguard_{secrets.token_hex(16)}"
    return f"{name}<<{fence}\n{value}\n{fence}\n"


def _reason(decision: Decision) -> str:
    return clip(decision.reason, REASON_CHARACTERS)
