"""Files that somebody changed: whatever value of a report or a baseline moves, no traceback and no pass."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memguard.cli import main
from memguard.documents import json_digest

# What a value is changed into: near it, far from it, of another kind.
STRANGE = [None, True, False, "", "x", "1", [], {}, [1], 0, -1, 1, 2**70, 0.5, -0.5, 1e308, "\ud7ff", "[red]"]


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document that holds a plain value."""
    if isinstance(value, dict):
        return [one for key, part in value.items() for one in paths(part, (*at, key))]
    if isinstance(value, list):
        return [one for index, part in enumerate(value) for one in paths(part, (*at, index))]
    return [at]


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    part = changed
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    return changed


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_report):
    """A folder where the gate passes: report.json against baseline.json."""
    folder = tmp_path_factory.mktemp("gate")
    make_report(1).save(folder / "report.json")
    make_report(2).save(folder / "baseline.json")
    return folder


@pytest.fixture
def gate(monkeypatch, capsys):
    """The command in this process: its exit code, with what it printed checked for tracebacks."""

    def run(folder, report="report.json", baseline="baseline.json", *more):
        arguments = ["gate", report, "--policy", "default", "--baseline", baseline, "-o", "decided.json", *more]
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["memguard", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert "internal error" not in said.err
        return int(ended.value.code or 0)

    return run


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_the_files_pass_before_they_are_changed(place, gate):
    assert gate(place) == 0


@pytest.mark.parametrize("name", ["report.json", "baseline.json"])
@FUZZ
@given(data=st.data())
def test_a_changed_value_is_never_a_pass(place, gate, name, data):
    document = json.loads((place / name).read_text(encoding="utf-8"))
    path = data.draw(st.sampled_from(paths(document)))
    old = document
    for step in path:
        old = old[step]
    near = [old * (1 + 1e-9), old + 1, -old - 1] if isinstance(old, (int, float)) and not isinstance(old, bool) else [f"{old}x"]
    new = data.draw(st.sampled_from([*near, *STRANGE]).filter(lambda one: json.dumps(one) != json.dumps(old)))
    (place / "changed.json").write_text(json.dumps(put(document, path, new)), encoding="utf-8")
    other = {"report.json": ("changed.json", "baseline.json"), "baseline.json": ("report.json", "changed.json")}[name]
    assert gate(place, *other) in (2, 3)


@FUZZ
@given(data=st.data())
def test_a_key_that_is_lost_added_or_moved_is_never_a_pass(place, gate, data):
    document = json.loads((place / "report.json").read_text(encoding="utf-8"))
    path = data.draw(st.sampled_from([one for one in paths(document) if one]))
    changed = copy.deepcopy(document)
    part = changed
    for step in path[:-1]:
        part = part[step]
    kind = data.draw(st.sampled_from(["lost", "added", "doubled"]))
    if kind == "lost":
        del part[path[-1]]
    elif isinstance(part, dict):
        part[f"{path[-1]}2" if kind == "added" else path[0]] = part[path[-1]]
    else:
        part.append(part[path[-1]])
    if json.dumps(changed) == json.dumps(document):
        return
    (place / "changed.json").write_text(json.dumps(changed), encoding="utf-8")
    assert gate(place, "changed.json") in (2, 3)


@FUZZ
@given(data=st.data())
def test_changed_bytes_are_never_a_pass(place, gate, data):
    raw = bytearray((place / "report.json").read_bytes())
    position = data.draw(st.integers(0, len(raw) - 2))
    cut = data.draw(st.booleans())
    if cut:
        raw = raw[:position]
    else:
        raw[position] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[position]))
    (place / "changed.json").write_bytes(bytes(raw))
    try:
        same = json.loads(bytes(raw)) == json.loads((place / "report.json").read_bytes())
    except ValueError:
        same = False
    code = gate(place, "changed.json")
    assert code == 0 if same else code in (2, 3)  # a blank may become another blank


@FUZZ
@given(data=st.data())
def test_a_forged_digest_hides_no_figure_that_cannot_be_and_crashes_nothing(place, gate, data):
    # An editor of files can seal them again: signatures stand against that. What cannot be true is still no evidence.
    document = json.loads((place / "report.json").read_text(encoding="utf-8"))
    del document["digest"]
    path = data.draw(st.sampled_from(paths(document)))
    changed = put(document, path, data.draw(st.sampled_from(STRANGE)))
    (place / "forged.json").write_text(json.dumps({**changed, "digest": json_digest(changed)}), encoding="utf-8")
    assert gate(place, "forged.json") in (0, 1, 2, 3)


@pytest.mark.parametrize("row", range(0, 90, 9))
@pytest.mark.parametrize("field", ["log_prob", "rank_low", "rank_high"])
def test_a_forged_digest_over_a_lost_figure_is_no_evidence(place, gate, row, field):
    document = json.loads((place / "report.json").read_text(encoding="utf-8"))
    del document["digest"]
    document["canaries"][row][field] = None
    (place / "forged.json").write_text(json.dumps({**document, "digest": json_digest(document)}), encoding="utf-8")
    assert gate(place, "forged.json") == 3
