"""What every output format shares: how much each result weighs, a name for it that stays, and text that is safe on one line.

A result weighs as much as it does in the exit code: what made the gate answer 1 or 3 is an error in every format, and
nothing else is.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import PureWindowsPath
from typing import Literal

from memguard.audit.report import Decision, RuleResult
from memguard.gates.wording import clip

Level = Literal["failure", "no evidence", "warning", "note", "pass"]
Scalar = float | int | str | None

NAME_CHARACTERS, REASON_CHARACTERS = 200, 1000
SHOWN_CANARIES = 10
NO_EVIDENCE = ("invalid", "insufficient evidence")


@dataclass(frozen=True)
class Finding:
    """One requirement or rule: its result, its weight, and an id that only its name decides."""

    id: str
    group: Literal["evidence", "rule", "decision"]
    level: Level
    result: RuleResult

    @property
    def name(self) -> str:
        """On one line, at most 200 characters."""
        return clip(self.result.name, NAME_CHARACTERS)

    @property
    def reason(self) -> str:
        """On one line; the canaries by id where the result is no pass."""
        text = clip(self.result.reason, REASON_CHARACTERS)
        return text if self.level == "pass" else " ".join(filter(None, (text, self.canaries)))

    @property
    def canaries(self) -> str:
        """The first ids, and how many more there are; empty when the result rests on none."""
        ids = self.result.canaries
        shown = ", ".join(clip(one, 40) for one in ids[:SHOWN_CANARIES])
        more = f" and {len(ids) - SHOWN_CANARIES} more" if len(ids) > SHOWN_CANARIES else ""
        return f"Canaries: {shown}{more}." if ids else ""

    def fingerprint(self, path: str) -> str:
        """The same over all audits written to `path`, and another for every rule; hex."""
        return hashlib.sha256(f"{path}\n{self.id}".encode()).hexdigest()


def findings(decision: Decision) -> list[Finding]:
    """Evidence requirements, then rules, in the decision's order.

    A decision that does not pass although none of them stopped it is itself added as a finding, so that no reader of an
    output ever sees a green list under a red exit code.
    """
    found = [_finding(result, "evidence", decision) for result in decision.evidence]
    found += [_finding(result, "rule", decision) for result in decision.rules]
    if decision.exit_code and not any(one.level in ("failure", "no evidence") for one in found):
        outcome: Literal["block", "invalid"] = "block" if decision.exit_code == 1 else "invalid"
        verdict = RuleResult(name="the decision", kind="evidence", outcome=outcome, reason=decision.reason)
        found.append(_finding(verdict, "decision", decision))
    return found


def _finding(result: RuleResult, group: Literal["evidence", "rule", "decision"], decision: Decision) -> Finding:
    plain = unicodedata.normalize("NFKD", result.name).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain)[:48].strip("-") or group
    digest = hashlib.sha256(f"{group}\n{result.name}".encode()).hexdigest()
    return Finding(f"{slug}-{digest[:8]}", group, _level(result, decision), result)


def _level(result: RuleResult, decision: Decision) -> Level:
    if result.outcome in NO_EVIDENCE or (decision.strict and result.outcome == "not shown"):
        return "no evidence"
    if result.outcome == "block":
        return "failure"
    if result.outcome == "pass":
        return "pass"
    # Somebody answers for what is waived, and the policy did not ask for evidence that was not checked.
    return "note" if result.outcome == "waived" or result.kind == "evidence" else "warning"


def facts(decision: Decision) -> dict[str, Scalar]:
    """What the decision rests on: exit code, alpha, digests of report, policy, baseline and checkpoint."""
    shown = {
        name: value for name, value in decision.model_dump(mode="json", exclude={"kind", "reason"}).items() if _is_fact(value)
    }
    return {**shown, "subject": decision.subject.kind, "subject_digest": decision.subject.digest}


def _is_fact(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def show_figure(value: Scalar) -> str:
    """A figure as people read it: four digits of a float, whole numbers whole, words where there is none.

    Example:
        >>> show_figure(0.123456), show_figure(10**16), show_figure(True), show_figure(None)
        ('0.1235', '10000000000000000', 'yes', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else clip(str(value))


def relative_path(report_name: str) -> str:
    """The report's path as it stands in the repository; its name alone where the path leads out of it.

    Example:
        >>> relative_path("runs/a/report.json"), relative_path("/home/jane/report.json"), relative_path("../report.json")
        ('runs/a/report.json', 'report.json', 'report.json')
    """
    path = PureWindowsPath(report_name)
    inside = path.name if path.anchor or ".." in path.parts else path.as_posix()
    return clip(inside) if path.name else "report.json"
