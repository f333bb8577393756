"""The promotion log: append-only, chained, one writer at a time, and whole again after a crash."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from memguard.errors import EvidenceError, InputError, RegistryError
from memguard.gates.promotion_log import FIRST, PromotionLog, open_log

FIELDS: dict[str, Any] = {
    "action": "refused",
    "registry": "directory",
    "model": "tiny",
    "alias": "champion",
    "version": "1",
    "subject_digest": "5" * 64,
    "plan_digest": "f" * 64,
    "report_digest": "a" * 64,
    "policy_digest": "b" * 64,
    "baseline_digest": None,
    "audited_at": "2026-01-01T00:00:00+00:00",
    "audit_outcome": "block",
    "outcome": "block",
    "exit_code": 1,
    "reason": "Blocked: é of 5 rules failed.",
    "attempt": 1,
    "alias_before": None,
    "alias_after": None,
}


@pytest.fixture
def path(tmp_path):
    """A log of three refusals, of versions 1 to 3."""
    path = tmp_path / "promotions.jsonl"
    with open_log(path) as log:
        for version in "123":
            log.append(**{**FIELDS, "version": version})
    return path


def _versions(path) -> list[str]:
    with open_log(path) as log:
        return [entry.version for entry in log.entries]


def test_entries_are_read_back_in_order_and_each_names_the_line_before(path):
    lines = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    assert [line["version"] for line in lines] == _versions(path) == ["1", "2", "3"]
    assert [line["previous"] for line in lines] == [FIRST, lines[0]["digest"], lines[1]["digest"]]
    assert lines[0]["reason"] == FIELDS["reason"]


def _swap(lines):
    lines[0], lines[1] = lines[1], lines[0]


def _edit(number, old, new):
    def change(lines):
        assert old in lines[number]
        lines[number] = lines[number].replace(old, new)

    return change


CHANGES = {
    "edited first": (_edit(0, b'"outcome":"block"', b'"outcome":"pass"'), 1),
    "edited last": (_edit(2, b'"exit_code":1', b'"exit_code":0'), 3),
    "blank added": (_edit(1, b'{"schema', b'{ "schema'), 2),
    "carriage return": (_edit(2, b"}\n", b"}\r\n"), 3),
    "key twice": (_edit(1, b'"model":"tiny"', b'"model":"tiny","model":"tiny"'), 2),
    "digest gone": (_edit(0, b',"digest"', b',"digits"'), 1),
    "wrong type": (_edit(1, b'"attempt":1', b'"attempt":"x"'), 2),
    "not ASCII": (_edit(1, rb"\u00e9", "é".encode()), 2),
    "no JSON in the middle": (lambda lines: lines.__setitem__(1, b"half of a li\n"), 2),
    "no object": (lambda lines: lines.__setitem__(2, b"[]\n"), 3),
    "first line gone": (lambda lines: lines.pop(0), 1),
    "middle line gone": (lambda lines: lines.pop(1), 2),
    "line twice": (lambda lines: lines.append(lines[-1]), 4),
    "lines swapped": (_swap, 1),
    "blank line": (lambda lines: lines.insert(1, b"\n"), 2),
    "whole line without its end, edited": (_edit(2, b'"exit_code":1', b'"exit_code":0'), 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_log_that_was_changed_is_refused_and_the_line_is_named(path, name):
    change, number = CHANGES[name]
    lines = path.read_bytes().splitlines(keepends=True)
    change(lines)
    data = b"".join(lines)
    path.write_bytes(data.rstrip(b"\n") if "without its end" in name else data)
    with pytest.raises(EvidenceError, match=rf"'promotions\.jsonl' was changed: line {number} is not the one"), open_log(path):
        pass


def test_a_line_cut_short_anywhere_is_no_entry_and_is_replaced(path, caplog):
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in (*range(start + 1, len(whole) - 2, 23), len(whole) - 2):
        path.write_bytes(whole[:cut])
        assert _versions(path) == ["1", "2"]
    assert "was cut short while it was written" in caplog.text
    with open_log(path) as log:
        log.append(**{**FIELDS, "version": "4"})
    assert _versions(path) == ["1", "2", "4"]
    assert path.read_bytes().endswith(b"}\n")


def test_a_whole_line_that_lacks_its_end_counts_and_gets_it_back(path, caplog):
    path.write_bytes(path.read_bytes()[:-1])
    with open_log(path) as log:
        log.append(**{**FIELDS, "version": "4"})
    assert _versions(path) == ["1", "2", "3", "4"]
    assert not caplog.text


def test_what_an_append_left_half_done_is_replaced_by_the_next(path, monkeypatch):
    real, calls = os.fsync, iter([OSError(28, "No space left on device")])

    def full_once(number):
        for error in calls:
            raise error
        real(number)

    with open_log(path) as log:
        monkeypatch.setattr(os, "fsync", full_once)
        with pytest.raises(OSError, match="No space left"):
            log.append(**{**FIELDS, "version": "lost"})
        log.append(**{**FIELDS, "version": "4"})
    assert _versions(path) == ["1", "2", "3", "4"]


def test_an_entry_of_a_newer_memguard_is_named_as_such(path):
    with path.open("ab") as stream:
        stream.write(b'{"schema_version":9,"something":"new"}\n')
    with pytest.raises(InputError, match="entries of a newer memguard. Upgrade"), open_log(path):
        pass


def test_a_log_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="must be a regular file"), open_log(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used: "), open_log(tmp_path / "file" / "log.jsonl"):
        pass


def test_a_second_promotion_waits_and_then_gives_up(path):
    held, free = threading.Event(), threading.Event()

    def hold():
        with open_log(path):
            held.set()
            free.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(30)
    try:
        with (
            pytest.raises(RegistryError, match="has held 'promotions.jsonl' for 0 seconds; nothing was moved"),
            open_log(path, lock_seconds=0),
        ):
            pass
    finally:
        free.set()
        other.join()
    assert _versions(path) == ["1", "2", "3"]


def _log(tmp_path, *entries) -> PromotionLog:
    with open_log(tmp_path / "log.jsonl") as log:
        for changes in entries:
            log.append(**{**FIELDS, **changes})
    return log


def test_attempts_are_distinct_reports_of_one_plan_and_model(tmp_path):
    log = _log(
        tmp_path,
        {"report_digest": "1"},
        {"report_digest": "1"},
        {"report_digest": "2", "registry": "mlflow"},
        {"report_digest": "3", "model": "other"},
        {"report_digest": "4", "plan_digest": "another"},
    )
    count = lambda report: log.attempts(model="tiny", plan_digest="f" * 64, report_digest=report)  # noqa: E731
    assert [count("1"), count("2"), count("new")] == [2, 2, 3]
    assert log.attempts(model="fresh", plan_digest="f" * 64, report_digest="new") == 1


def test_the_last_change_of_an_alias_passes_over_what_changed_nothing(tmp_path):
    log = _log(
        tmp_path,
        {"action": "moved", "version": "1"},
        {"action": "moved", "version": "2", "alias": "other"},
        {"action": "moved", "version": "3", "model": "other"},
        {"action": "moved", "version": "4", "registry": "mlflow"},
        {"action": "refused", "version": "5"},
        {"action": "already promoted", "version": "6"},
    )
    assert log.last_change(registry="directory", model="tiny", alias="champion").version == "1"
    assert log.last_change(registry="directory", model="tiny", alias="fresh") is None


LATER = "2026-01-02T00:00:00+00:00"


@pytest.mark.parametrize(
    ("entries", "stops"),
    [
        ([{"report_digest": "new", "audited_at": LATER}], True),
        ([{"report_digest": "new", "audited_at": LATER, "audit_outcome": "invalid"}], True),
        ([{"report_digest": "new", "audited_at": "2026-01-01T01:30:00+01:00"}], True),  # half past midnight UTC
        ([{"report_digest": "new", "audited_at": "2026-01-01T00:30:00+01:00"}], False),  # the evening before
        ([{"report_digest": "new", "audited_at": "2026-01-01T00:00:00"}], False),  # the same moment
        ([{"report_digest": "new", "audited_at": "no time"}], False),
        ([{"report_digest": "new", "audited_at": LATER, "audit_outcome": "pass", "outcome": "invalid"}], False),
        ([{"report_digest": "new", "audited_at": LATER, "subject_digest": "another"}], False),
        ([{"report_digest": "mine", "audited_at": LATER}], False),
        ([{"report_digest": "new", "audited_at": LATER}] * 2 + [{"report_digest": "newer", "audit_outcome": "pass"}], True),
        # Waived since: its own last verdict counts.
        ([{"report_digest": "new", "audited_at": LATER}, {"report_digest": "new", "audit_outcome": "pass"}], False),
    ],
)
def test_a_younger_audit_of_the_same_checkpoint_that_failed_is_found(tmp_path, entries, stops):
    log = _log(tmp_path, *entries)
    found = log.later_failure(subject_digest="5" * 64, report_digest="mine", audited_at="2026-01-01T00:00:00+00:00")
    assert (found is not None) == stops


def test_the_youngest_of_several_failures_is_told(tmp_path):
    dates = ["2026-01-03T00:00:00Z", "2026-01-05T00:00:00Z", "2026-01-04T00:00:00Z"]
    log = _log(tmp_path, *({"report_digest": date, "audited_at": date} for date in dates))
    found = log.later_failure(subject_digest="5" * 64, report_digest="mine", audited_at="2026-01-01T00:00:00+00:00")
    assert found.audited_at == dates[1]
