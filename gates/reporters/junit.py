"""JUnit XML, as Jenkins, GitLab and others read it: a test case for every evidence requirement and every rule.

A rule that failed is a failure, missing evidence an error. What is waived, only warned of or not shown is skipped with its
reason: it can be seen and turns no pipeline red.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from memguard.audit.report import Decision
from memguard.gates.reporters.findings import Finding, facts, findings, show_figure

TAGS = {"failure": "failure", "no evidence": "error", "warning": "skipped", "note": "skipped"}


def render_junit(decision: Decision) -> str:
    """The decision as JUnit XML; times are 0, since a decision takes none worth telling.

    Args:
        decision: any decision.

    Returns:
        An XML document in UTF-8.
    """
    found = findings(decision)
    tags = [TAGS.get(one.level) for one in found]
    counts: dict[str, Any] = {
        "tests": str(len(found)),
        "failures": str(tags.count("failure")),
        "errors": str(tags.count("error")),
        "skipped": str(tags.count("skipped")),
        "time": "0",
    }
    root = ElementTree.Element("testsuites", name="memguard", **counts)
    suite = ElementTree.SubElement(root, "testsuite", name="memguard gate", **counts)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in facts(decision).items():
        ElementTree.SubElement(properties, "property", name=name, value=show_figure(value))
    for one in found:
        _add_case(suite, one)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, one: Finding) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"memguard.{one.group}", name=one.name, time="0")
    tag = TAGS.get(one.level)
    if tag is None:
        ElementTree.SubElement(case, "system-out").text = one.reason
        return
    result = ElementTree.SubElement(case, tag, message=f"{one.result.outcome}: {one.reason}", type=one.result.outcome)
    result.text = "\n".join(f"{name} = {show_figure(value)}" for name, value in one.result.figures.items())
