"""The roads into a baseline: a first release, a later one, a waived one; and every refusal."""

from __future__ import annotations

import datetime
import json

import pytest

from memguard.documents import json_digest
from memguard.errors import EvidenceError, InputError
from memguard.gates import accept, decide, load_baseline
from memguard.gates.baseline import KEPT_RUNS

NOW = datetime.datetime(2026, 6, 1, 14, 0, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
WHO = {"by": "jane", "reason": "first release"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "baseline.json"


@pytest.fixture
def first(report, policy, path):
    """A baseline file that holds the first release."""
    accept(report, policy, decide(report, policy), path, now=NOW, **WHO)
    return path


def write_sealed(path, data):
    """Write a baseline as an editor does who renews the seal."""
    data.pop("digest", None)
    path.write_text(json.dumps({**data, "digest": json_digest(data)}))


def test_a_first_release_is_accepted_without_a_baseline(report, first):
    run = load_baseline(first).newest
    assert (run.accepted_by, run.reason, run.accepted_at, run.waived) == (
        "jane",
        "first release",
        "2026-06-01T12:00:00+00:00",
        [],
    )
    assert run.report == report
    assert load_baseline(first).accepted
    assert load_baseline(first).notice is None


def test_a_later_release_is_added_and_compared_with_the_newest(report, policy, first, make_report):
    later = make_report(2)
    decision = decide(later, policy, load_baseline(first))
    accept(later, policy, decision, first, **WHO)
    assert [run.report.subject.digest for run in load_baseline(first).runs] == [report.subject.digest, later.subject.digest]
    assert decide(report, policy, load_baseline(first)).baseline_digest == load_baseline(first).newest.report_digest


def test_the_last_eight_are_kept_and_the_first_stays_the_anchor(policy, first, make_report):
    anchor = load_baseline(first).newest
    for seed in range(20, 30):
        one = make_report(seed)
        accept(one, policy, decide(one, policy, load_baseline(first)), first, **WHO)
    found = load_baseline(first)
    assert len(found.runs) == KEPT_RUNS
    assert [run.report for run in found.runs] == [make_report(seed) for seed in range(22, 30)]
    assert found.anchor == anchor
    assert found.anchor not in found.runs


def test_an_existing_baseline_cannot_be_passed_by(report, policy, first, make_report):
    later = make_report(2)
    with pytest.raises(EvidenceError, match="the baseline exists already"):
        accept(later, policy, decide(later, policy), first, **WHO)


def test_a_report_is_not_accepted_twice_running(report, policy, first):
    with pytest.raises(InputError, match="holds this report already"):
        accept(report, policy, decide(report, policy, load_baseline(first)), first, **WHO)


def test_a_report_that_is_no_evidence_is_refused(report, policy, change, path):
    live = change(report, subject__kind="live")
    with pytest.raises(
        EvidenceError, match=r"no evidence cannot be accepted\. Not evidence: 'the subject is a checkpoint' does not"
    ):
        accept(live, policy, decide(live, policy), path, **WHO)
    assert not path.exists()


def test_a_report_of_another_plan_is_refused_by_an_existing_baseline(report, policy, first, change):
    other = change(report, plan__digest="0" * 64)
    with pytest.raises(EvidenceError, match="No comparable baseline"):
        accept(other, policy, decide(other, policy, load_baseline(first)), first, **WHO)


def test_a_strict_policy_accepts_nothing_that_was_not_shown(report, change_row, make_policy, path):
    strict = make_policy(strict=True)
    unsure = change_row(report, "card-1x-0", may_be_extracted=True)
    with pytest.raises(EvidenceError, match="no evidence cannot be accepted"):
        accept(unsure, strict, decide(unsure, strict), path, **WHO)


def test_what_was_not_shown_is_accepted_by_a_lax_policy(report, change_row, policy, path):
    unsure = change_row(report, "card-1x-0", may_be_extracted=True)
    accept(unsure, policy, decide(unsure, policy), path, **WHO)
    assert path.exists()


def test_a_blocked_report_needs_a_waiver_for_each_failing_rule(make_report, policy, make_policy, path):
    leaky = make_report(1, memorised={"card-1x-3": -0.1})
    blocked = decide(leaky, policy)
    failing = [result.name for result in blocked.rules if result.outcome == "block"]
    with pytest.raises(EvidenceError, match="a waiver in the policy for each failing rule: 'no secret can be extracted'"):
        accept(leaky, policy, blocked, path, **WHO)
    day = datetime.date(2026, 6, 1)
    some = [{"rule": name, "owner": "jane", "reason": "beta", "expires": "2026-12-31"} for name in failing]
    partly = make_policy(waivers=some[:1])
    with pytest.raises(EvidenceError, match="for each failing rule"):
        accept(leaky, partly, decide(leaky, partly, today=day), path, **WHO)
    waived = make_policy(waivers=some)
    accept(leaky, waived, decide(leaky, waived, today=day), path, **WHO)
    assert load_baseline(path).newest.waived == failing


@pytest.mark.parametrize("key", ["by", "reason"])
@pytest.mark.parametrize("text", ["", "  ", "two\nlines", "x" * 201])
def test_who_and_why_are_one_line_each(report, policy, path, key, text):
    with pytest.raises(InputError, match=f"'{key}' must be one line of 1 to 200 characters"):
        accept(report, policy, decide(report, policy), path, **{**WHO, key: text})


def test_a_decision_on_another_report_or_policy_is_refused(report, policy, make_policy, make_report, path):
    with pytest.raises(EvidenceError, match="on another report or by another policy"):
        accept(make_report(2), policy, decide(report, policy), path, **WHO)
    with pytest.raises(EvidenceError, match="on another report or by another policy"):
        accept(report, make_policy(alpha=0.02), decide(report, policy), path, **WHO)


def test_a_bare_report_is_a_baseline_that_nobody_accepted(report, policy, make_report, tmp_path):
    report.save(tmp_path / "report.json")
    bare = load_baseline(tmp_path / "report.json")
    assert (bare.accepted, bare.notice) == (False, "the baseline is a bare report that nobody accepted")
    later = make_report(2)
    with pytest.raises(InputError, match="not a baseline"):
        accept(later, policy, decide(later, policy, bare), tmp_path / "report.json", **WHO)


def test_a_changed_report_in_a_baseline_is_noticed(first):
    data = json.loads(first.read_text())
    data["runs"][0]["report"]["canaries"][0]["log_prob"] = -3.0
    first.write_text(json.dumps(data))
    with pytest.raises(EvidenceError, match=r"^baseline 'baseline\.json' was changed after it was written"):
        load_baseline(first)
    write_sealed(first, data)
    with pytest.raises(EvidenceError, match="was changed after it was accepted"):
        load_baseline(first)


@pytest.mark.parametrize(
    ("updates", "match"),
    [
        ({"schema_version": 2}, "schema version 2; this memguard reads up to 1"),
        ({"runs": []}, "is not readable: runs"),
        ({"kind": "memguard decision"}, "not a memguard baseline"),
        ({"extra": 1}, "is not readable: "),
    ],
)
def test_a_foreign_or_newer_baseline_is_refused(first, updates, match):
    first.write_text(json.dumps({**json.loads(first.read_text()), **updates}))
    with pytest.raises(InputError, match=match):
        load_baseline(first)


def test_a_run_that_nobody_accepted_is_refused_in_a_baseline(first):
    data = json.loads(first.read_text())
    data["runs"][0]["accepted_by"] = None
    write_sealed(first, data)
    with pytest.raises(InputError, match="a run that nobody accepted"):
        load_baseline(first)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": NaN}'])
def test_a_broken_baseline_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(InputError, match=r"baseline 'baseline\.json'"):
        load_baseline(path)


def test_a_missing_baseline_file_is_named(path):
    with pytest.raises(InputError, match="does not exist"):
        load_baseline(path)
