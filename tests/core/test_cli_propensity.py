"""`memguard propensity` and its stages by `memguard compare`: a memorising model, a served one, and every wrong input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_endpoint import Server, failed, said

from memguard import cli
from memguard.audit import endpoint as endpoint_module
from memguard.audit.config import parse_config
from memguard.audit.full import Sources
from memguard.audit.propensity_report import load_propensity_report
from memguard.audit.runner import run_audit
from memguard.canaries.drawing import draw_plan
from memguard.errors import EvidenceError

Run = Callable[..., tuple[int, str, str]]
PIN = {"name": "pin", "template": "The number is {secret}.", "secret": {"kind": "digits", "length": 5}}
CONFIG = {
    "canaries": {"formats": [PIN], "tiers": {1: 2}, "controls": 4, "positive_control": None},
    "audit": {
        "exposure": {"references": 32, "exact": "off"},
        "prior_aware": None,
        "extraction": None,
        "propensity": {"prefix_tokens": 16, "num_prompts": 6, "max_new_tokens": 24, "num_samples": 0},
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, corpus_text: str) -> Path:
    """A model that saw 24 documents again and again, their index, and documents that it never saw."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from memguard.tracing.index_build import build_index

    folder = tmp_path_factory.mktemp("propensity")
    documents = [corpus_text[start : start + 160] for start in range(0, 24 * 160, 160)]
    others = [corpus_text[-start - 160 : -start] for start in range(200, 200 + 12 * 160, 160)]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    )
    ids = [tokenizer(text)["input_ids"] for text in documents]
    rows = torch.tensor([row[: min(map(len, ids))] for row in ids])
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(input_ids=rows, labels=rows).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.eval().save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.0)
    model.save_pretrained(folder / "forgot")
    tokenizer.save_pretrained(folder / "forgot")
    for name, texts in (("data", documents), ("held", others)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    build_index(documents, folder / "index", tokenizer)
    (folder / "memguard.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the executable's own entry in this process; gives exit code, stdout, stderr."""
    monkeypatch.chdir(place)

    def called(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memguard", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return int(stopped.value.code or 0), printed.out, " ".join(printed.err.split())

    return called


LEAST = ("propensity", "checkpoint", "--index", "index", "--config", "memguard.yaml")


def test_a_model_that_memorised_gives_its_corpus_up_behind_prefixes_and_hardly_behind_prompts(run: Run, tmp_path: Path) -> None:
    code, out, error = run(*LEAST, "--held-out", "held.jsonl", "-o", tmp_path)
    assert code == 0, error
    report = load_propensity_report(tmp_path / "propensity.json")
    by_setting = {row.setting: {one.metric: one for one in row.estimates} for row in report.propensity.settings}
    assert set(by_setting) == {"prefix", "generic", "specific", "unconditional", "minimal_cue", "non_member"}
    prefix, generic, chance = (by_setting[name]["average_longest_span"] for name in ("prefix", "generic", "non_member"))
    assert prefix.low > generic.value
    assert prefix.low > chance.value
    assert by_setting["prefix"]["full_match_rate"].value > 0.5
    assert report.prefixes_from == "documents of the index"
    assert (report.corpus.name, report.corpus.num_documents) == ("index", 24)
    assert "setting=training prefix  prompts=6" in out
    page = (tmp_path / "propensity.html").read_text(encoding="utf-8")
    assert "What checkpoint volunteers of corpus index" in page
    assert all(row.snippet is None for row in report.propensity.rows)


def test_snippets_of_the_corpus_stand_in_the_report_only_where_they_are_asked_for(
    run: Run, place: Path, tmp_path: Path
) -> None:
    assert run(*LEAST, "--snippets", "-o", tmp_path)[0] == 0
    documents = [json.loads(line)["text"] for line in (place / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = load_propensity_report(tmp_path / "propensity.json").propensity.rows
    quoted = [row.snippet for row in rows if row.setting == "prefix" and row.snippet]
    assert quoted
    assert all(any(snippet.strip("\ufffd") in text for text in documents) for snippet in quoted)


def test_json_on_stdout_is_the_sealed_report_alone(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*LEAST, "--json", "-o", tmp_path, "--data", "data.jsonl", "--corpus-name", "tales")
    assert code == 0
    assert out == (tmp_path / "propensity.json").read_text(encoding="utf-8")
    report = load_propensity_report(tmp_path / "propensity.json")
    assert (report.prefixes_from, report.corpus.name) == ("records", "tales")
    (tmp_path / "propensity.json").write_text(out.replace('"seed": 0', '"seed": 1'), encoding="utf-8")
    with pytest.raises(EvidenceError, match="changed"):
        load_propensity_report(tmp_path / "propensity.json")


def test_stages_of_a_training_are_compared_and_what_moved_is_named(run: Run, tmp_path: Path) -> None:
    for stage in ("checkpoint", "forgot"):
        assert run("propensity", stage, *LEAST[2:], "--num-prompts", 24, "-o", tmp_path / stage)[0] == 0
    paths = [tmp_path / stage / "propensity.json" for stage in ("checkpoint", "forgot")]
    code, out, error = run("compare", *paths, "--json", "-o", tmp_path / "stages.json")
    assert code == 0, error
    found = json.loads(out)
    assert (found["stages"], found["corpora"], found["is_comparable"]) == (["checkpoint", "forgot"], ["index"], True)
    movement = next(
        one
        for one in found["movements"]
        if (one["setting"], one["metric"], one["what"]) == ("prefix", "average_longest_span", "first to last stage")
    )
    assert movement["direction"] == "fell"
    assert json.loads((tmp_path / "stages.json").read_text(encoding="utf-8")) == found
    assert run("compare", paths[0])[0] == 2
    (tmp_path / "report.json").write_text("{}", encoding="utf-8")
    assert run("compare", paths[0], tmp_path / "report.json")[0] == 2


def test_a_full_audit_measures_propensity_where_an_index_is_given(place: Path, tokenizer: Any) -> None:
    from memguard.audit.corpus import open_index
    from memguard.audit.offline import load_checkpoint

    config = parse_config(CONFIG)
    plan = draw_plan(config.canaries, tokenizer)
    model, _ = load_checkpoint(place / "checkpoint")
    report = run_audit(model, tokenizer, plan=plan, config=config, full=Sources(index=open_index(place / "index", tokenizer)))
    assert report.propensity is not None
    assert [row.setting for row in report.propensity.settings][:2] == ["prefix", "generic"]
    without = run_audit(model, tokenizer, plan=plan, config=config, full=Sources())
    assert without.propensity is None
    assert "propensity was not measured: it needs an index of the training corpus" in " ".join(without.notices)


def test_a_full_audit_counts_the_copies_of_each_record_and_splits_extraction_by_them(
    place: Path, tokenizer: Any, tmp_path: Path
) -> None:
    from memguard.audit.corpus import open_index
    from memguard.audit.offline import load_checkpoint
    from memguard.audit.records import load_records
    from memguard.reporting.html import render_html
    from memguard.reporting.terminal import findings_lines
    from memguard.tracing.index_build import build_index

    texts = [json.loads(line)["text"] for line in (place / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    near = texts[7][:40] + "ZZ" + texts[7][42:]
    build_index(
        [*texts[1:], texts[5], f"again: {texts[6]}", *[texts[8]] * 14, f"or else {near}!"], tmp_path / "index", tokenizer
    )
    lengths = {"prefix_tokens": 12, "suffix_tokens": 10}
    config = parse_config({**CONFIG, "audit": CONFIG["audit"] | {"propensity": None, "records": lengths}})
    model, _ = load_checkpoint(place / "checkpoint")
    members = load_records(place / "data.jsonl", tokenizer)
    sources = Sources(members=members, index=open_index(tmp_path / "index", tokenizer))
    report = run_audit(model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config, full=sources)
    assert report.records is not None
    rows = {row.line: row for row in report.records.members.rows}
    assert {line: rows[line].num_copies for line in (1, 2, 6, 7, 8, 9)} == {1: 0, 2: 1, 6: 2, 7: 2, 8: 1, 9: 15}
    assert (rows[8].num_near_copies, rows[2].num_near_copies) == (1, 0)
    by_copies = {row.copies: row for row in report.records.by_copies}
    assert {name: row.n for name, row in by_copies.items()} == {
        "not found": 1,
        "once": 19,
        "once, near-duplicates besides": 1,
        "2 to 10": 2,
        "above 10": 1,
    }
    assert sum(row.num_greedy for row in by_copies.values()) == report.records.members.num_greedy
    once = by_copies["once"]
    assert once.greedy_low <= once.greedy_share <= once.greedy_high
    assert "Members by their copies in the corpus" in render_html(report)
    assert any(line.startswith("records that stand once in the corpus: ") for line in findings_lines(report))


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "nothing": (("propensity", "--index", "index"), "give a checkpoint, or a served model by --endpoint"),
    "both": ((*LEAST, "--endpoint", "http://localhost:1/v1"), "give a checkpoint, or a served model by --endpoint"),
    "no index": (("propensity", "checkpoint"), "give the index of the training corpus by --index"),
    "missing index": (("propensity", "checkpoint", "--index", "nowhere"), "nowhere"),
    "no checkpoint": (("propensity", "nowhere", "--index", "index"), "checkpoint 'nowhere' is not a folder"),
    "no prompts": ((*LEAST, "--prompts", "nowhere.txt"), "prompt file 'nowhere.txt' does not exist"),
    "empty prompts": ((*LEAST, "--prompts", "empty.txt"), "prompt file 'empty.txt' holds no prompt"),
    "no records": ((*LEAST, "--data", "nowhere.jsonl"), "data 'nowhere.jsonl' does not exist"),
    "no model name": (("propensity", "--endpoint", "http://localhost:1/v1", "--index", "index"), "--endpoint needs --model"),
    "no key": (
        (*("propensity", "--endpoint", "http://localhost:1/v1", "--index", "index", "--model", "small"),
         *("--tokenizer", "checkpoint", "--api-key-env", "NOT_SET_HERE")),
        "variable 'NOT_SET_HERE' must hold the key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(WRONG))
def test_a_mistake_is_exit_2_and_one_sentence(case: str, run: Run, place: Path, tmp_path: Path) -> None:
    (place / "empty.txt").write_text("\n", encoding="utf-8")
    arguments, words = WRONG[case]
    code, out, error = run(*arguments, "-o", tmp_path / "out")
    assert (code, out) == (2, "")
    assert words in error
    assert not (tmp_path / "out").exists()


def test_an_index_of_another_tokenizer_or_cut_short_is_refused(run: Run, place: Path, tmp_path: Path) -> None:
    import shutil

    from tokenizer_kinds import built

    from memguard.tracing.index_build import build_index

    build_index(["Words of another tokenizer, as many as it takes."], tmp_path / "other", built("metaspace"))
    code, _, error = run("propensity", "checkpoint", "--index", tmp_path / "other", "-o", tmp_path / "out")
    assert code == 2
    assert "tokenizer" in error
    shutil.copytree(place / "index", tmp_path / "cut")
    table = next((tmp_path / "cut").glob("table.*"))
    table.write_bytes(table.read_bytes()[:-8])
    assert run("propensity", "checkpoint", "--index", tmp_path / "cut", "-o", tmp_path / "out")[0] == 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoint_module, "FIRST_WAIT", 0.0)
    one = Server()
    yield one
    one.close()


def served(server: Server, tmp_path: Path) -> tuple[Any, ...]:
    asked = ("propensity", "--endpoint", server.url, "--model", "small", "--tokenizer", "checkpoint")
    return (*asked, "--index", "index", "--config", "memguard.yaml", "-o", tmp_path)


def test_a_served_model_is_measured_and_nothing_binds_it_to_weights(run: Run, server: Server, tmp_path: Path) -> None:
    server.script = lambda number, _: said(f" and then number {number} came by", reason="stop")
    code, _, error = run(*served(server, tmp_path))
    assert code == 0, error
    report = load_propensity_report(tmp_path / "propensity.json")
    assert (report.subject, report.served_model, report.propensity.source) == (None, "small", "endpoint")


def test_an_endpoint_that_stays_away_half_way_is_exit_4_with_a_part_marked_as_one(
    run: Run, server: Server, tmp_path: Path
) -> None:
    server.script = lambda number, _: said(" words") if number < 9 else failed(503)
    code, _, error = run(*served(server, tmp_path))
    assert code == 4
    assert "marked as a part" in error
    report = load_propensity_report(tmp_path / "propensity.json")
    assert report.propensity.partial is not None
    assert "A part only." in (tmp_path / "propensity.html").read_text(encoding="utf-8")


def test_an_endpoint_that_is_down_is_exit_4_and_writes_nothing(run: Run, server: Server, tmp_path: Path) -> None:
    server.script = lambda number, _: failed(503)
    code, _, _ = run(*served(server, tmp_path / "out"))
    assert code == 4
    assert not (tmp_path / "out").exists()
