"""GitLab's code quality report: one entry for everything that did not pass, shown in the merge request."""

from __future__ import annotations

import json

from memguard.audit.report import Decision
from memguard.gates.reporters.findings import findings, relative_path

SEVERITIES = {"failure": "blocker", "no evidence": "critical", "warning": "minor", "note": "info"}


def render_gitlab(decision: Decision, report_name: str) -> str:
    """The decision as the JSON list that `artifacts: reports: codequality` takes.

    Args:
        decision: any decision.
        report_name: the report's path in the repository.

    Returns:
        JSON in ASCII; an empty list when everything passed.
    """
    path = relative_path(report_name)
    entries = [
        {
            "description": f"{one.name} ({one.result.outcome}): {one.reason}",
            "check_name": one.id,
            "fingerprint": one.fingerprint(path),
            "severity": SEVERITIES[one.level],
            "location": {"path": path, "lines": {"begin": 1}},
        }
        for one in findings(decision)
        if one.level != "pass"
    ]
    return json.dumps(entries, indent=1) + "\n"
