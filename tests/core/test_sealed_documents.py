"""A report on disk carries its digest: what was changed after it was written is no evidence, whatever the change."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_reports import build_report

from memguard.audit.report import AuditReport, load_report
from memguard.documents import document_digest, json_digest, sealed_json
from memguard.errors import EvidenceError, InputError


@pytest.fixture(scope="module")
def report() -> AuditReport:
    return build_report(1)


@pytest.fixture
def path(report: AuditReport, tmp_path: Path) -> Path:
    report.save(tmp_path / "report.json")
    return tmp_path / "report.json"


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def write(path: Path, data: Any, **options: Any) -> None:
    path.write_text(json.dumps(data, **options), encoding="utf-8")


def test_the_digest_in_the_file_is_the_one_that_decisions_quote(report: AuditReport, path: Path) -> None:
    assert load_report(path) == report
    assert read(path)["digest"] == document_digest(report) == document_digest(load_report(path))


def test_only_what_a_file_says_is_sealed_not_how_it_is_laid_out(report: AuditReport, path: Path) -> None:
    data = read(path)
    write(path, dict(reversed(data.items())), indent=7, ensure_ascii=True)
    assert load_report(path) == report


def leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value that holds no other."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, one in inner for leaf in leaves(one, (*place, key))] or [place]


def changed(data: Any, place: tuple[Any, ...]) -> Any:
    """A copy with the value at one place changed to another of its kind where it has one."""
    data = copy.deepcopy(data)
    *way, last = place
    holder = data
    for key in way:
        holder = holder[key]
    old = holder[last]
    if isinstance(old, bool):
        holder[last] = not old
    elif isinstance(old, (int, float)):
        holder[last] = old + 1
    else:
        holder[last] = f"{old}x" if isinstance(old, str) else 1.0
    return data


def test_no_value_can_be_changed_unnoticed(path: Path) -> None:
    data = read(path)
    places = leaves(data)
    chosen = np.random.default_rng(0).choice(len(places), size=300, replace=False)
    outcomes = set()
    for place in [("status",), ("digest",), *(places[number] for number in chosen)]:
        write(path, changed(data, place))
        with pytest.raises((EvidenceError, InputError)) as refused:
            load_report(path)
        outcomes.add(refused.type)
    assert outcomes == {EvidenceError, InputError}  # the seal, and what is not even well-formed, such as a status "validx"


def test_what_is_left_out_or_added_is_noticed(path: Path) -> None:
    data = read(path)
    write(path, {**data, "notices": [*data["notices"], "all is well"]})
    with pytest.raises(
        EvidenceError, match=r"^report 'report\.json' was changed after it was written: its digest does not match\.$"
    ):
        load_report(path)
    write(path, {key: value for key, value in data.items() if key != "trend"})  # has a default
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        load_report(path)


@pytest.mark.parametrize("digest", ["", "0" * 64, 5, {"a": 1}, False])
def test_a_digest_of_something_else_is_noticed(path: Path, digest: Any) -> None:
    write(path, {**read(path), "digest": digest})
    with pytest.raises(EvidenceError, match="its digest does not match"):
        load_report(path)


@pytest.mark.parametrize("digest", [{}, {"digest": None}])
def test_a_report_without_a_digest_is_no_evidence(report: AuditReport, path: Path, digest: dict[str, None]) -> None:
    write(path, {**report.model_dump(mode="json"), **digest})
    with pytest.raises(EvidenceError, match=r"report 'report\.json' has no digest to show that it is as it was written"):
        load_report(path)


def test_a_report_from_before_a_field_was_added_keeps_its_seal(report: AuditReport, path: Path) -> None:
    data = {key: value for key, value in report.model_dump(mode="json").items() if key not in ("defence", "cadence", "trend")}
    write(path, {**data, "digest": json_digest(data)})
    assert load_report(path) == report


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema_version": 2}, "schema version 2; this memguard reads up to 1"),
        ({"kind": "memguard decision"}, "is a memguard decision, not a memguard audit report"),
        ({"status": "fine"}, "is not readable: status"),
        ({"canaries": [{}]}, r"is not readable: canaries\.0"),
        ({"secret": 1}, "a key that is not known"),
    ],
)
def test_what_cannot_be_read_comes_before_what_was_changed(path: Path, change: dict[str, Any], match: str) -> None:
    write(path, {**read(path), **change})
    with pytest.raises(InputError, match=match):
        load_report(path)


def test_a_figure_that_is_not_finite_is_sealed_as_it_is_written(report: AuditReport) -> None:
    data = json.loads(sealed_json(report.model_copy(update={"duration_s": math.nan})))
    assert data["duration_s"] is None
    assert data.pop("digest") == json_digest(data)


@pytest.mark.parametrize(("spoil", "code"), [("edit", 3), ("unseal", 3), ("cut", 2)])
def test_the_gate_answers_three_for_a_changed_report_and_two_for_a_broken_one(path: Path, spoil: str, code: int) -> None:
    data = read(path)
    if spoil == "edit":
        data["canaries"][0]["num_seen"] += 1
    elif spoil == "unseal":
        del data["digest"]
    text = json.dumps(data)
    path.write_text(text[:-1] if spoil == "cut" else text, encoding="utf-8")
    command = [sys.executable, "-m", "memguard", "gate", "report.json", "--policy", "default"]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("memguard: report 'report.json' ")
    assert "Traceback" not in done.stderr
    assert not (path.parent / "decision.json").exists()
