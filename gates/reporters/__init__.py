"""Outputs of a decision for continuous integration: files in the formats that CI systems read, and lines for a runner.

A decision is rendered and never judged again: the exit code stays the gate's. The same decision gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memguard.audit.report import Decision
from memguard.errors import InputError
from memguard.files import write_text_atomic
from memguard.gates.reporters.github import append_to_files, workflow_commands
from memguard.gates.reporters.gitlab import render_gitlab
from memguard.gates.reporters.junit import render_junit
from memguard.gates.reporters.markdown import render_decision
from memguard.gates.reporters.sarif import render_sarif

__all__ = ["write_outputs"]


def write_outputs(
    decision: Decision,
    report_name: str,
    *,
    junit: Path | None = None,
    sarif: Path | None = None,
    markdown: Path | None = None,
    gitlab: Path | None = None,
    github: bool = False,
    environment: Mapping[str, str],
) -> list[str]:
    """Write what was asked for, whole or not at all, and return the lines that a GitHub runner is to read.

    Args:
        decision: any decision.
        report_name: the report's path as the user gave it; a path out of the repository is cut to its name.
        junit: where JUnit XML goes.
        sarif: where SARIF 2.1.0 goes.
        markdown: where the reason goes, as one page.
        gitlab: where GitLab's code quality report goes.
        github: also add to the step's summary and outputs, and return annotations.
        environment: where GITHUB_STEP_SUMMARY and GITHUB_OUTPUT are looked up.

    Returns:
        Workflow commands, to be printed on lines of their own; none without `github`.

    Raises:
        InputError: a place cannot be written to, or two outputs are to go to one file.
        OSError: the disk is full, or a file of the runner cannot be written.
    """
    page = render_decision(decision)
    texts = [
        (path, text)
        for path, text in (
            (junit, render_junit(decision)),
            (sarif, render_sarif(decision, report_name)),
            (markdown, page),
            (gitlab, render_gitlab(decision, report_name)),
        )
        if path is not None
    ]
    if len({path.absolute() for path, _ in texts}) < len(texts):
        raise InputError("each output must go to a file of its own, got one file for two; give another name.")
    for path, text in texts:
        write_text_atomic(path, text)
    if not github:
        return []
    append_to_files(decision, page, environment)
    return workflow_commands(decision, report_name)
