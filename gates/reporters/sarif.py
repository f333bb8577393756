"""SARIF 2.1.0, as code scanning reads it: a rule for everything that was checked, a result for everything that did not pass.

Each result lies in the report's file. A waiver is a suppression with its owner and reason. Source: OASIS SARIF 2.1.0.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import memguard
from memguard.audit.report import Decision
from memguard.gates.reporters.findings import REASON_CHARACTERS, Finding, facts, findings, relative_path
from memguard.gates.wording import clip

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"failure": "error", "no evidence": "error", "warning": "warning", "note": "note"}
GROUPS = {"evidence": "What the policy asks to see", "rule": "A rule of the policy", "decision": "The decision as a whole"}


def render_sarif(decision: Decision, report_name: str) -> str:
    """The decision as a SARIF log of one run.

    Args:
        decision: any decision.
        report_name: the report's path in the repository.

    Returns:
        JSON in ASCII.
    """
    found, path = findings(decision), relative_path(report_name)
    run = {
        "tool": {"driver": {"name": "memguard", "version": memguard.__version__, "rules": [_rule(one) for one in found]}},
        "automationDetails": {"id": f"memguard-gate/{decision.report_digest[:16]}"},
        "invocations": [
            {
                # False tells a reader that the results are not all there is to know, which is what exit code 3 says.
                "executionSuccessful": decision.outcome != "invalid",
                "exitCode": decision.exit_code,
                "exitCodeDescription": clip(decision.reason, REASON_CHARACTERS),
            }
        ],
        "columnKind": "unicodeCodePoints",
        "results": [_result(one, index, path) for index, one in enumerate(found) if one.level != "pass"],
        "properties": facts(decision),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _rule(one: Finding) -> dict[str, Any]:
    return {
        "id": one.id,
        "shortDescription": {"text": one.name},
        "fullDescription": {"text": f"{GROUPS[one.group]}: {one.name}."},
        "help": {"text": "The reason of each result holds its figures; decision.json holds all of them."},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["memorisation", "privacy"]},
    }


def _result(one: Finding, index: int, path: str) -> dict[str, Any]:
    fingerprint = one.fingerprint(path)
    location = {"artifactLocation": {"uri": quote(path)}, "region": {"startLine": 1}}
    result = {
        "ruleId": one.id,
        "ruleIndex": index,
        "level": LEVELS[one.level],
        "message": {"text": f"{one.name} ({one.result.outcome}): {one.reason}"},
        "locations": [{"physicalLocation": location}],
        # The second name is the one that GitHub looks at; the line stands behind it in its own format.
        "partialFingerprints": {"memguardRule/v1": fingerprint, "primaryLocationLineHash": f"{fingerprint[:16]}:1"},
        "properties": json.loads(one.result.model_dump_json(include={"outcome", "figures", "canaries"})),
    }
    if one.result.outcome == "waived":
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": one.reason}]
    return result
