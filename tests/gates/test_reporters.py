"""Outputs of a decision, each read back by a reader that is not ours where there is one, with names that mean harm."""

from __future__ import annotations

import datetime
import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt
from sarif.loader import load_sarif_file

from memguard.audit.report import LIMITS, Decision, RuleResult, Subject
from memguard.errors import InputError
from memguard.gates import decide
from memguard.gates.decision import _conclude
from memguard.gates.reporters import write_outputs
from memguard.gates.reporters.findings import findings, relative_path
from memguard.gates.reporters.github import append_to_files, workflow_commands
from memguard.gates.reporters.gitlab import render_gitlab
from memguard.gates.reporters.junit import render_junit
from memguard.gates.reporters.markdown import render_decision
from memguard.gates.reporters.sarif import render_sarif
from memguard.gates.wording import clip

TODAY = datetime.date(2026, 1, 2)
PATH = "memguard_audit/report.json"
OUTCOMES = ["pass", "block", "warn", "not shown", "waived", "insufficient evidence", "invalid"]
HOSTILE = [
    "<b>&\"'</b>",
    "]]></failure>",
    "a\nb\r\n::error::x",
    "100%0A%25",
    "::set-output name=outcome::pass",
    "\x00\x1b[31m\ufffe\u202e",
    "a|b|c",
    "[x](javascript:alert(1)) ![i](http://a) `c` *b* _i_ ~~s~~",
    "<script>alert(1)</script><!-- -->",
    "name, with: everything",
    "🙂 Ünïcode",
    "x" * 5000,
]


def made(rules, *, evidence=(), strict=False, **changes) -> Decision:
    """A decision on results given by hand, concluded as the gate concludes."""
    outcome, exit_code, reason = _conclude(evidence, rules, strict=strict)
    fields = {
        "outcome": outcome,
        "exit_code": exit_code,
        "reason": reason,
        "evidence": list(evidence),
        "rules": list(rules),
        "alpha": 0.01,
        "strict": strict,
        "report_digest": "a" * 64,
        "policy_digest": "b" * 64,
        "baseline_digest": None,
        "subject": Subject(kind="checkpoint", digest="c" * 64, global_step=1, epoch=1.0),
        "limits": LIMITS,
    }
    return Decision(**{**fields, **changes})


def result(outcome, name="a rule", *, kind="limit", reason="Because.", **fields) -> RuleResult:
    return RuleResult(name=name, kind=kind, outcome=outcome, reason=reason, **fields)


@pytest.fixture(scope="module")
def every_outcome() -> Decision:
    """Blocked, and every outcome that leaves it so beside it."""
    waived = result("waived", "waived rule", reason="Too much; waived by jane until 2026-12-31: beta.")
    rules = [result(one, f"{one} rule") for one in ("pass", "block", "warn", "not shown")]
    return made([*rules, waived], evidence=[result("pass", "scored", kind="evidence"), result("warn", "old", kind="evidence")])


@pytest.fixture(scope="module")
def decisions(make_report, baseline, policy) -> dict[str, Decision]:
    """Of real reports: a pass, a block, and no evidence since there is no baseline."""
    memorised = make_report(3, memorised={"card-1x-0": -1.0})
    return {
        "pass": decide(make_report(1), policy, baseline, today=TODAY),
        "block": decide(memorised, policy, baseline, today=TODAY),
        "invalid": decide(make_report(1), policy, today=TODAY),
    }


def junit_of(decision: Decision):
    return next(iter(JUnitXml.fromstring(render_junit(decision).encode())))


def sarif_of(decision: Decision, tmp_path, path=PATH):
    (tmp_path / "out.sarif").write_text(render_sarif(decision, path), encoding="utf-8")
    return load_sarif_file(str(tmp_path / "out.sarif"))


# --- what every format agrees on ---


@given(
    rules=st.lists(
        st.tuples(st.sampled_from(OUTCOMES), st.sampled_from(["limit", "test", "baseline"])), min_size=1, max_size=6
    ),
    evidence=st.lists(st.sampled_from(["pass", "warn", "invalid"]), max_size=3),
    strict=st.booleans(),
)
def test_an_output_is_red_exactly_when_the_exit_code_is_not_0(rules, evidence, strict):
    decision = made(
        [result(outcome, f"r{index}", kind=kind) for index, (outcome, kind) in enumerate(rules)],
        evidence=[result(outcome, f"e{index}", kind="evidence") for index, outcome in enumerate(evidence)],
        strict=strict,
    )
    is_red = decision.exit_code != 0
    suite = junit_of(decision)
    assert (suite.failures + suite.errors > 0) == is_red
    levels = {one["level"] for one in json.loads(render_sarif(decision, PATH))["runs"][0]["results"]}
    assert ("error" in levels) == is_red
    severities = {one["severity"] for one in json.loads(render_gitlab(decision, PATH))}
    assert bool(severities & {"blocker", "critical"}) == is_red
    assert any(line.startswith("::error ") for line in workflow_commands(decision, PATH)) == is_red


@pytest.mark.parametrize(("exit_code", "outcome", "level"), [(1, "block", "failure"), (3, "invalid", "no evidence")])
def test_a_decision_that_no_rule_explains_is_a_finding_of_its_own(exit_code, outcome, level):
    decision = made([result("pass")], exit_code=exit_code, outcome=outcome, reason="The signature is missing.")
    last = findings(decision)[-1]
    assert (last.name, last.level, last.reason) == ("the decision", level, "The signature is missing.")
    assert len(findings(made([result("pass")]))) == 1


def test_an_id_depends_on_the_name_alone_and_on_all_of_it():
    same = [findings(made([result(outcome, "Ünder the limit!", kind=kind)]))[0].id for outcome, kind in
            (("pass", "limit"), ("block", "test"), ("insufficient evidence", "baseline"))]  # fmt: skip
    assert set(same) == {same[0]}
    assert re.fullmatch(r"under-the-limit-[0-9a-f]{8}", same[0])
    names = ["a rule", "a-rule", "a rule.", "🙂", "🙃", "x" * 300, "x" * 301]
    ids = [one.id for one in findings(made([result("pass", name) for name in names], evidence=[result("pass", "a rule")]))]
    assert len(set(ids)) == len(ids) == 8
    assert all(re.fullmatch(r"[a-z0-9-]{1,57}", one) for one in ids)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("memguard_audit/report.json", "memguard_audit/report.json"),
        ("./a/b.json", "a/b.json"),
        ("a\\b.json", "a/b.json"),
        ("/home/jane/secret/report.json", "report.json"),
        ("C:\\Users\\jane\\report.json", "report.json"),
        ("../other/report.json", "report.json"),
        ("", "report.json"),
    ],
)
def test_a_path_never_leads_out_of_the_repository(written, path):
    assert relative_path(written) == path


# --- JUnit, read by junitparser ---


def test_junit_has_a_case_for_every_requirement_and_rule(decisions):
    for name, decision in decisions.items():
        suite = junit_of(decision)
        cases = [(case.classname, case.name) for case in suite]
        expected = [("memguard.evidence", one.name) for one in decision.evidence]
        assert cases == [*expected, *(("memguard.rule", one.name) for one in decision.rules)]
        assert (suite.failures > 0, suite.errors > 0) == (name == "block", name == "invalid")
        assert suite.tests == len(cases)


def test_junit_fails_what_blocks_and_skips_what_only_wants_to_be_seen(every_outcome):
    found = {case.name: case.result for case in junit_of(every_outcome)}
    assert [type(one) for one in found["block rule"]] == [Failure]
    assert found["pass rule"] == found["scored"] == []
    for name in ("warn rule", "not shown rule", "waived rule", "old"):
        assert [type(one) for one in found[name]] == [Skipped]
    assert found["waived rule"][0].message == "waived: Too much; waived by jane until 2026-12-31: beta."
    strict = junit_of(made([result("not shown", "unshown"), result("invalid", "bad"), result("warn", "warned")], strict=True))
    assert [type(case.result[0]) for case in strict] == [Error, Error, Skipped]


def test_junit_holds_figures_canaries_and_digests(decisions):
    suite = junit_of(decisions["block"])
    properties = {one.name: one.value for one in suite.properties()}
    assert properties["exit_code"] == "1"
    assert properties["alpha"] == "0.01"
    assert properties["report_digest"] == decisions["block"].report_digest
    assert properties["subject_digest"] == decisions["block"].subject.digest
    failed = next(case.result[0] for case in suite if case.name == "no canary over the limit")
    assert "card-1x-0" in failed.message
    # 2^-20 a canary, over 48 judged ones: 4.578e-05.
    assert {"max = 20", "n = 48", "chance_of_block = 4.578e-05"} <= set(failed.text.splitlines())


@pytest.mark.parametrize("name", HOSTILE)
def test_junit_takes_any_name_literally(name):
    decision = made([result("block", name, reason=name, canaries=[name])])
    (case,) = junit_of(decision)
    assert case.name == clip(name)
    assert case.result[0].message.startswith(f"block: {clip(name, 1000)}")


# --- SARIF, read by sarif-tools ---


def test_sarif_has_a_result_for_everything_that_did_not_pass(every_outcome, tmp_path):
    records = sarif_of(every_outcome, tmp_path).get_records()
    assert [(one["Severity"], one["Location"], one["Line"]) for one in records] == [
        ("note", PATH, 1),
        ("error", PATH, 1),
        ("warning", PATH, 1),
        ("warning", PATH, 1),
        ("note", PATH, 1),
    ]
    assert {one["Tool"] for one in records} == {"memguard"}
    run = sarif_of(every_outcome, tmp_path).data["runs"][0]
    assert [rule["shortDescription"]["text"] for rule in run["tool"]["driver"]["rules"]] == [
        one.name for one in findings(every_outcome)
    ]
    for one in run["results"]:
        assert run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]
    assert [one["suppressions"][0]["justification"] for one in run["results"] if "suppressions" in one] == [
        "Too much; waived by jane until 2026-12-31: beta."
    ]


def test_sarif_says_how_the_gate_ended(decisions):
    for outcome, exit_code, successful in (("pass", 0, True), ("block", 1, True), ("invalid", 3, False)):
        run = json.loads(render_sarif(decisions[outcome], PATH))["runs"][0]
        (invocation,) = run["invocations"]
        assert (invocation["exitCode"], invocation["executionSuccessful"]) == (exit_code, successful)
        assert invocation["exitCodeDescription"] == decisions[outcome].reason
        assert run["automationDetails"]["id"] == f"memguard-gate/{decisions[outcome].report_digest[:16]}"
        assert run["properties"]["policy_digest"] == decisions[outcome].policy_digest


def test_sarif_names_a_finding_alike_over_audits_and_apart_over_rules_and_reports(decisions, make_report, policy, baseline):
    again = decide(make_report(5, memorised={"pin-4x-3": -1.0}), policy, baseline, today=TODAY)

    def fingerprints(decision, path):
        results = json.loads(render_sarif(decision, path))["runs"][0]["results"]
        return {one["ruleId"]: one["partialFingerprints"] for one in results if one["level"] == "error"}

    first, second = fingerprints(decisions["block"], PATH), fingerprints(again, PATH)
    shared = set(first) & set(second)
    assert len(shared) == 2
    assert all(first[one] == second[one] for one in shared)
    assert len({one["primaryLocationLineHash"] for one in first.values()}) == len(first)
    assert not set(map(str, first.values())) & set(map(str, fingerprints(decisions["block"], "b/report.json").values()))


def test_sarif_percent_encodes_the_place_and_leaves_out_figures_that_json_lacks(tmp_path):
    decision = made([result("block", figures={"margin": float("inf"), "n": 10**30}, canaries=["a1"])])
    (one,) = json.loads(render_sarif(decision, "a b/ü:1.json"))["runs"][0]["results"]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/%C3%BC%3A1.json"
    assert one["properties"] == {"outcome": "block", "figures": {"margin": None, "n": 10**30}, "canaries": ["a1"]}


@pytest.mark.parametrize("name", HOSTILE)
def test_sarif_takes_any_name_literally(name, tmp_path):
    (record,) = sarif_of(made([result("block", name, reason=name)]), tmp_path).get_records()
    assert clip(name) in record["Description"]
    assert len(record["Description"]) < 1500


# --- GitLab ---

CODE_QUALITY = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "pattern": "^[a-z0-9-]+$"},
            "fingerprint": {"type": "string", "minLength": 32},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "required": ["path", "lines"],
                "properties": {"lines": {"required": ["begin"], "properties": {"begin": {"type": "integer", "minimum": 1}}}},
            },
        },
    },
}


def test_gitlab_ranks_what_did_not_pass_by_its_weight(every_outcome, decisions):
    entries = json.loads(render_gitlab(every_outcome, PATH))
    jsonschema.validate(entries, CODE_QUALITY)
    assert [one["severity"] for one in entries] == ["info", "blocker", "minor", "minor", "info"]
    assert len({one["fingerprint"] for one in entries}) == len(entries)
    assert {one["location"]["path"] for one in entries} == {PATH}
    no_baseline = json.loads(render_gitlab(decisions["invalid"], PATH))
    assert [one["severity"] for one in no_baseline if "last release" in one["description"]] == ["critical"]
    assert json.loads(render_gitlab(made([result("pass")]), PATH)) == []


# --- markdown, read by markdown-it ---


def tables_of(text: str) -> list[list[list[str]]]:
    """The cells of every table, as text; fails on anything that a reader would take for HTML or a link."""
    tokens = MarkdownIt("commonmark", {"linkify": False}).enable(["table", "strikethrough"]).parse(text)
    tables: list[list[list[str]]] = []
    for token in tokens:
        kinds = {child.type for child in token.children or []}
        assert token.type != "html_block"
        assert kinds <= {"text", "softbreak"}, kinds
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type == "inline" and tables and token.level >= 4:
            tables[-1][-1].append("".join(child.content for child in token.children or []))
    return tables


def test_the_page_holds_the_verdict_figures_canaries_digests_and_limits(decisions):
    text = render_decision(decisions["block"])
    assert text.startswith("## memguard gate: block (exit code 1)\n")
    rules, evidence, decided = tables_of(text)
    assert [row[:2] for row in rules[1:]] == [[one.name, one.outcome] for one in decisions["block"].rules]
    assert [row[0] for row in evidence[1:]] == [one.name for one in decisions["block"].evidence]
    rows = {row[0]: row for row in rules}
    # 20 bits allowed; a canary of rank 1 among 10^15 less its siblings has log2 of that, 49.83: margin -29.83.
    assert rows["no canary over the limit"][4] == "-29.83"
    assert rows["no single canary stands out"][5].endswith(" bits")
    assert "share = 0.002" in rows["canaries as a family"][3]
    assert "- no canary over the limit: card-1x-0." in text
    assert ["report digest", decisions["block"].report_digest] in decided
    assert all(limit in text for limit in LIMITS)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_page_takes_any_name_literally(name):
    decision = made(
        [result("block", name, reason=name, figures={"which": name}, canaries=[name])],
        evidence=[result("pass", name, kind="evidence", reason=name)],
    )
    rules, evidence, _ = tables_of(render_decision(decision))
    assert rules[1][0] == evidence[1][0] == clip(name)
    assert rules[1][2] == clip(name, 1000)
    assert [len(row) for row in [*rules, *evidence]] == [6, 6, 3, 3]


def test_the_page_names_ten_canaries_and_counts_the_rest():
    text = render_decision(made([result("block", canaries=[f"id{index}" for index in range(13)])]))
    assert "id0, id1, id2, id3, id4, id5, id6, id7, id8, id9 and 3 more." in text
    assert "id10" not in text


# --- GitHub ---


def read_annotation(line: str) -> tuple[str, dict[str, str], str]:
    """As a runner reads a workflow command: command, properties, message."""

    def plain(text: str) -> str:
        for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    command, _, rest = line.removeprefix("::").partition(" ")
    head, _, message = rest.partition("::")
    properties = dict(one.split("=", 1) for one in head.split(","))
    return command, {name: plain(value) for name, value in properties.items()}, plain(message)


def read_outputs(text: str) -> dict[str, str]:
    """As a runner reads GITHUB_OUTPUT: NAME=VALUE, or NAME<<FENCE up to a line that is the fence."""
    outputs, lines = {}, iter(text.splitlines())
    for line in lines:
        if "<<" in line and ("=" not in line or line.index("<<") < line.index("=")):
            name, fence = line.split("<<", 1)
            outputs[name] = "\n".join(iter(lambda fence=fence: next(lines), fence))
        elif line:
            name, value = line.split("=", 1)
            outputs[name] = value
    return outputs


def test_annotations_start_with_the_verdict_and_go_on_by_weight(every_outcome):
    found = [read_annotation(line) for line in workflow_commands(every_outcome, PATH)]
    assert [(command, properties["title"]) for command, properties, _ in found] == [
        ("error", "memguard gate: block (exit code 1)"),
        ("error", "block: block rule"),
        ("warning", "warn: warn rule"),
        ("warning", "not shown: not shown rule"),
        ("notice", "warn: old"),
        ("notice", "waived: waived rule"),
    ]
    assert {properties["file"] for _, properties, _ in found} == {PATH}
    assert found[0][2] == every_outcome.reason
    assert read_annotation(workflow_commands(made([result("pass")]), PATH)[0])[0] == "notice"


@pytest.mark.parametrize("name", HOSTILE)
def test_an_annotation_takes_any_name_literally(name):
    lines = workflow_commands(made([result("block", name, reason=name)]), f"{name[:50]}.json")
    assert all(line.startswith("::error ") and len(line.splitlines()) == 1 for line in lines)
    _, properties, message = read_annotation(lines[1])
    assert set(properties) == {"file", "line", "title"}
    assert properties["title"] == f"block: {clip(name)}"
    assert message == clip(name, 1000)


def test_outputs_cannot_be_forged_by_a_reason(tmp_path):
    reason = "x\nmemguard\noutcome=pass\nexit_code<<EOF\n0\nEOF\n"
    decision = made([result("block")], reason=reason, report_digest="d\noutcome=pass")
    files = {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    append_to_files(decision, "page\n", files)
    text = (tmp_path / "output").read_text()
    assert read_outputs(text) == {
        "outcome": "block",
        "exit_code": "1",
        "reason": "x memguard outcome=pass exit_code<<EOF 0 EOF",
        "report_digest": "d outcome=pass",
    }
    append_to_files(decision, "page\n", files)
    fences = re.findall("<<(memguard_[0-9a-f]{32})$", (tmp_path / "output").read_text(), re.M)
    assert len(set(fences)) == 8
    assert (tmp_path / "summary").read_text() == "page\npage\n"


# --- all of them at once ---


def test_outputs_are_written_where_asked_and_the_same_for_the_same_decision(decisions, tmp_path):
    def write(folder):
        paths = {kind: tmp_path / folder / f"out.{kind}" for kind in ("junit", "sarif", "markdown", "gitlab")}
        lines = write_outputs(decisions["block"], PATH, **paths, environment={"GITHUB_OUTPUT": str(tmp_path / "not asked for")})
        assert lines == []
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    first = write("one")
    assert sorted(first) == ["out.gitlab", "out.junit", "out.markdown", "out.sarif"]
    assert write("two") == first
    assert not (tmp_path / "not asked for").exists()


def test_github_gets_the_page_the_outputs_and_the_annotations(decisions, tmp_path):
    files = {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    for name in ("output", "summary"):
        (tmp_path / name).write_text("before=1\n")
    lines = write_outputs(decisions["invalid"], PATH, github=True, environment=files)
    assert lines == workflow_commands(decisions["invalid"], PATH)
    assert read_outputs((tmp_path / "output").read_text()) == {
        "before": "1",
        "outcome": "invalid",
        "exit_code": "3",
        "reason": decisions["invalid"].reason,
        "report_digest": decisions["invalid"].report_digest,
    }
    assert (tmp_path / "summary").read_text() == "before=1\n" + render_decision(decisions["invalid"])
    assert write_outputs(decisions["pass"], PATH, github=True, environment={}) == workflow_commands(decisions["pass"], PATH)


def test_two_outputs_for_one_file_are_refused_before_either_is_written(decisions, tmp_path):
    path = tmp_path / "out"
    with pytest.raises(InputError, match="each output must go to a file of its own, got one file for two"):
        write_outputs(decisions["pass"], PATH, junit=path, sarif=path, environment={})
    assert not path.exists()


def test_a_place_that_cannot_be_written_is_the_users_mistake(decisions, tmp_path):
    with pytest.raises(InputError, match="cannot be written: it is a folder"):
        write_outputs(decisions["pass"], PATH, junit=tmp_path, environment={})
