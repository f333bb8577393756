"""Fixtures of the gate's tests: reports made at score level, baselines, policies, and ways to change one thing in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_reports import Format, build_report

from memguard.audit.report import AuditReport
from memguard.documents import document_digest
from memguard.gates import Policy, load_policy
from memguard.gates.baseline import AcceptedRun, Baseline


@pytest.fixture(scope="session")
def make_report() -> Callable[..., AuditReport]:
    """`build_report`: a seed and what was memorised in, a report out."""
    return build_report


@pytest.fixture(scope="session")
def make_format() -> type[Format]:
    """`Format(name, space, shared, num_references)`."""
    return Format


@pytest.fixture(scope="session")
def report() -> AuditReport:
    """An audit of a model that memorised nothing."""
    return build_report(1)


@pytest.fixture(scope="session")
def make_baseline() -> Callable[..., Baseline]:
    """A baseline that somebody accepted, of one report."""

    def build(report: AuditReport) -> Baseline:
        run = AcceptedRun(
            report=report, report_digest=document_digest(report), accepted_by="jane", reason="first", accepted_at="2026"
        )
        return Baseline(runs=[run])

    return build


@pytest.fixture(scope="session")
def baseline(make_baseline: Callable[..., Baseline]) -> Baseline:
    """The accepted audit of another model that memorised nothing, of the same plan."""
    return make_baseline(build_report(2))


@pytest.fixture(scope="session")
def policy() -> Policy:
    """The default policy."""
    return load_policy("default")


@pytest.fixture(scope="session")
def change() -> Callable[..., Any]:
    """`change(document, dotted__path=value)`: a copy with nested fields replaced, unvalidated, so that NaN can be put in."""

    def build(document: Any, **updates: Any) -> Any:
        for path, value in updates.items():
            document = _replaced(document, path.split("__"), value)
        return document

    return build


def _replaced(document: Any, path: list[str], value: Any) -> Any:
    old = getattr(document, path[0])
    return document.model_copy(update={path[0]: value if len(path) == 1 else _replaced(old, path[1:], value)})


@pytest.fixture(scope="session")
def change_row(change: Callable[..., Any]) -> Callable[..., AuditReport]:
    """`change_row(report, id, field=value)`: a copy of the report with one canary's row changed."""

    def build(report: AuditReport, name: str, **updates: Any) -> AuditReport:
        rows = [change(row, **updates) if row.id == name else row for row in report.canaries]
        return report.model_copy(update={"canaries": rows})

    return build


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """The default policy with top-level keys replaced, as plain values."""

    def build(**changes: Any) -> Policy:
        data = load_policy("default").model_dump(mode="python", exclude_none=True)
        data["evidence"] = {**data["evidence"], **changes.pop("evidence", {})}
        return Policy.model_validate({**data, **changes})

    return build
