"""From files to a decision file; what is shown on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memguard.audit.report import load_decision
from memguard.errors import EvidenceError, InputError
from memguard.gates import load_baseline
from memguard.gates.commands import format_decision, gate_report


@pytest.fixture
def report_path(report, tmp_path):
    report.save(tmp_path / "report.json")
    return tmp_path / "report.json"


def test_a_decision_is_written_beside_the_report(report_path):
    decision = gate_report(report_path, policy="default")
    assert load_decision(report_path.with_name("decision.json")) == decision
    assert decision.exit_code == 3


def test_a_decision_that_was_changed_after_it_was_written_is_noticed(report_path):
    gate_report(report_path, policy="default")
    path = report_path.with_name("decision.json")
    text = path.read_text()
    assert text.count('"outcome": "invalid",\n "exit_code": 3') == 1
    path.write_text(text.replace('"outcome": "invalid",\n "exit_code": 3', '"outcome": "pass",\n "exit_code": 0'))
    with pytest.raises(EvidenceError, match=r"decision 'decision\.json' was changed after it was written"):
        load_decision(path)


def test_a_decision_is_written_elsewhere(report_path, tmp_path):
    gate_report(report_path, policy="default", output=tmp_path / "deep" / "d.json")
    assert (tmp_path / "deep" / "d.json").exists()
    assert not report_path.with_name("decision.json").exists()


def test_accept_then_gate_is_the_road_of_a_first_release(report_path, make_report, tmp_path):
    baseline, later = tmp_path / "baseline.json", tmp_path / "later.json"
    gate_report(report_path, policy="default", accept=baseline, by="jane", reason="first release")
    assert load_baseline(baseline).newest.accepted_by == "jane"
    make_report(2).save(later)
    assert gate_report(later, policy="default", baseline=baseline).exit_code == 0
    assert gate_report(later, policy="default", accept=baseline, by="jane", reason="second").exit_code == 0
    assert len(load_baseline(baseline).runs) == 2


def test_accept_into_an_existing_baseline_compares_with_it(report_path, make_report, make_baseline, tmp_path):
    # Without that, a release could join a baseline that it is worse than by leaving --baseline out.
    path, worse = tmp_path / "baseline.json", tmp_path / "worse.json"
    gate_report(report_path, policy="default", accept=path, by="jane", reason="first release")
    make_report(2, shift=12.0).save(worse)
    with pytest.raises(EvidenceError, match="not worse than the last release"):
        gate_report(worse, policy="default", accept=path, by="jane", reason="worse")
    assert len(load_baseline(path).runs) == 1
    assert load_decision(worse.with_name("decision.json")).outcome == "block"


@pytest.mark.parametrize("who", [{}, {"by": "jane"}, {"reason": "x"}, {"by": " ", "reason": "x"}, {"by": "jane", "reason": ""}])
def test_accept_needs_who_and_why_before_anything_is_written(report_path, tmp_path, who):
    with pytest.raises(InputError, match="--accept needs --by NAME and --reason TEXT"):
        gate_report(report_path, policy="default", accept=tmp_path / "baseline.json", **who)
    assert not report_path.with_name("decision.json").exists()


def test_who_without_accept_is_a_mistake(report_path):
    with pytest.raises(InputError, match="belong to --accept"):
        gate_report(report_path, policy="default", by="jane")


def test_nothing_is_written_over_its_own_input(report_path, tmp_path):
    with pytest.raises(InputError, match="must not be written over the report"):
        gate_report(report_path, policy="default", output=report_path)
    with pytest.raises(InputError, match="a file of its own"):
        gate_report(report_path, policy="default", accept=report_path, by="jane", reason="x")


@pytest.mark.parametrize("text", ["{}", "[]", '{"kind": "memguard decision"}', '{"schema_version": 9}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(InputError, match=r"report 'report\.json'"):
        gate_report(tmp_path / "report.json", policy="default")


def _shown(decision) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(format_decision(decision))
    return console.file.getvalue()


def test_a_pass_shows_what_it_does_not_mean(report_path, make_report, tmp_path):
    make_report(2).save(tmp_path / "old.json")
    text = _shown(gate_report(report_path, policy="default", baseline=tmp_path / "old.json"))
    assert "PASS (exit code 0)" in text
    assert "A canary is a proxy" in text
    assert "no single canary stands out" in text


def test_a_block_names_its_canaries_and_reads_no_markup(make_report, change_row, tmp_path):
    path = tmp_path / "report.json"
    change_row(make_report(1, memorised={"card-1x-3": -0.1}), "card-1x-3", id="[red]x[/red]").save(path)
    text = _shown(gate_report(path, policy="default"))
    assert "BLOCK (exit code 1)" in text
    assert "Canaries: [red]x[/red]." in text
    assert "A pass does not mean" not in text
