"""`memguard index build` and `memguard trace`: what they print, and exit 2 wherever nothing would be found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import built

from memguard import cli
from memguard.tracing.manifest import MANIFEST_NAME

TEXTS = ["The parser reads the whole input twice, said nobody.", "Æblegrød med fløde, tak, sagde Åge til værten."]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers, a corpus and its index of two shards."""
    folder = tmp_path_factory.mktemp("cli")
    built("merged digits").save_pretrained(folder / "tokenizer")
    built("metaspace").save_pretrained(folder / "other")
    lines = "".join(json.dumps({"text": text, "id": number}, ensure_ascii=False) + "\n" for number, text in enumerate(TEXTS))
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
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


@pytest.fixture
def index(run: Run, tmp_path: Path) -> Path:
    code, _, error = run(
        "index", "build", "corpus.jsonl", "--tokenizer", "tokenizer", "-o", tmp_path / "index", "--max-shard-tokens", 5
    )
    assert code == 0, error
    return tmp_path / "index"


def test_build_says_what_it_takes_and_what_it_wrote(run: Run, tmp_path: Path) -> None:
    command = ("index", "build", "corpus.jsonl", "--tokenizer", "tokenizer", "-o", tmp_path / "index")
    code, out, _ = run(*command, "--json")
    assert code == 0
    assert json.loads(out)["shards"][0]["num_documents"] == 2
    code, _, error = run(*command)
    assert code == 2
    assert "exists already; append to it, or choose another folder." in error
    code, out, _ = run(*command, "--append")
    assert code == 0
    assert "M tokens in 1 shard(s)" in out
    assert "of 4 documents in 2 shard(s), u16" in " ".join(out.split())


def test_trace_prints_spans_with_their_documents(run: Run, index: Path, place: Path) -> None:
    code, out, _ = run("trace", index, "--tokenizer", "tokenizer", "--text", TEXTS[1][2:-3], "--json")
    assert code == 0
    document = json.loads(out)
    # One of one: Clopper-Pearson from 0.025 on.
    assert document["full_match_rate"] == {
        "value": 1.0,
        "low": pytest.approx(0.025),
        "high": 1.0,
        "confidence": 0.95,
        "method": "Clopper-Pearson",
    }
    (row,) = document["traces"]
    assert (row["tier"], row["document"]) == ("full raw", 1)
    assert row["sources"]["1"] == {"path": "corpus.jsonl", "linenum": 2, "metadata": {"id": 1}}
    assert TEXTS[1][5:20] not in out
    (place / "texts.jsonl").write_text('{"prompt": "Well: ", "text": "Well: The parser reads", "id": "a"}\n{"ids": [70, 71]}\n')
    code, out, _ = run("trace", index, "--tokenizer", "tokenizer", "--file", "texts.jsonl")
    assert code == 0
    assert "a: full raw, longest span 9 of 9 tokens" in out
    assert "prompt_stripped" in out
    code, out, _ = run("trace", index, "--tokenizer", "tokenizer", "--file", "corpus.jsonl", "--json", "--verify")
    assert [row["tier"] for row in json.loads(out)["traces"]] == ["full raw"] * 2


def empty(index: Path) -> None:
    manifest = json.loads((index / MANIFEST_NAME).read_text())
    (index / MANIFEST_NAME).write_text(json.dumps({**manifest, "shards": []}))


def missing(index: Path) -> None:
    (index / "tokenized.1").unlink()


def truncated(index: Path) -> None:
    (index / "table.0").write_bytes((index / "table.0").read_bytes()[:-1])


def nothing(index: Path) -> None:
    """Leaves the index as it is."""


@pytest.mark.parametrize(
    ("damage", "options", "sentence"),
    [
        (empty, ["--text", "parser"], "is empty: nothing would be found in it."),
        (missing, ["--text", "parser"], "'tokenized.1' is missing"),
        (truncated, ["--text", "parser"], "is damaged: 'table.0' has"),
        (nothing, ["--text", "parser", "--tokenizer", "other"], "was built with another tokenizer"),
        (nothing, ["--file", "separator.jsonl"], "generation 0 holds id 65535, the separator of the index."),
        (nothing, ["--file", "over.jsonl"], "generation 0 holds id 70000, outside 0..899."),
        (nothing, ["--file", "broken.jsonl"], "'broken.jsonl' line 1 is not JSON."),
        (nothing, ["--file", "foreign.jsonl"], "'foreign.jsonl' line 1 must hold 'text', or 'ids' as a list of whole numbers"),
        (nothing, ["--file", "list.jsonl"], "'list.jsonl' line 1 must be an object with 'text' or 'ids'."),
        (nothing, ["--file", "none.jsonl"], "'none.jsonl' holds no text."),
        (nothing, ["--file", "absent.txt"], "text 'absent.txt' does not exist."),
        (nothing, ["--file", "binary.txt"], "text 'binary.txt' is not UTF-8 text."),
        (nothing, ["--text", " "], "--text must hold a text, got an empty one."),
        (nothing, [], "give the text to trace by --text or by --file, one of them."),
    ],
)
def test_what_would_find_nothing_is_refused_with_one_sentence(
    run: Run, index: Path, place: Path, damage: Any, options: list[str], sentence: str
) -> None:
    (place / "separator.jsonl").write_text('{"ids": [1, 65535]}\n')
    (place / "over.jsonl").write_text('{"ids": [1, 70000]}\n')
    (place / "broken.jsonl").write_text("{broken\n")
    (place / "foreign.jsonl").write_text('{"ids": "1 2"}\n')
    (place / "list.jsonl").write_text("[1, 2]\n")
    (place / "none.jsonl").write_text("\n")
    (place / "binary.txt").write_bytes(b"\xff\xfe")
    damage(index)
    tokenizer = [] if "--tokenizer" in options else ["--tokenizer", "tokenizer"]
    code, out, error = run("trace", index, *tokenizer, *options, "--json")
    assert (code, out) == (2, "")
    assert sentence in error
    assert "Traceback" not in error


def test_figures_over_several_texts_come_with_intervals_and_those_apart_are_counted(
    run: Run, index: Path, tmp_path: Path
) -> None:
    lines = [TEXTS[0], "Nothing of this stands anywhere at all.", "again and " * 30, TEXTS[1]]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in lines), encoding="utf-8")
    code, out, error = run("trace", index, "--tokenizer", "tokenizer", "--file", path, "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["n"], document["num_apart"]) == (3, {"loop": 1})
    rate, span = document["full_match_rate"], document["average_longest_span"]
    # 2 of 3: Clopper-Pearson 0.094 to 0.992.
    assert (rate["value"], rate["low"], rate["high"]) == pytest.approx((2 / 3, 0.0943, 0.9916), abs=1e-3)
    assert 0.0 <= span["low"] < span["value"] < span["high"]
    assert sum(document["span_histogram"].values()) >= 2
    assert "3 texts; longest span" in error
    assert "full match rate 0.667 (0.0943 to 0.992, 95%)" in error
