"""Building an index: every kind of source, going on after a stop, appending, and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import built

from memguard.canaries.encoding import tokenizer_digest
from memguard.errors import InputError
from memguard.tracing import index_writer
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_build import build_index, estimate_build, guess_num_tokens
from memguard.tracing.index_writer import IndexWriter, count_unigrams
from memguard.tracing.manifest import MANIFEST_NAME
from memguard.tracing.sources import read_corpus

TEXTS = ["Once upon a time there was a parser.", "Æblegrød med fløde, tak.", "東京は夜 🙂", ""]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    with IndexWriter(tmp_path / "index", vocabulary_size=50, tokenizer_digest="a" * 64, max_shard_tokens=4) as writer:
        for document in ([1, 2, 3], [4, 5], [6, 7]):
            writer.add(document)
    return tmp_path / "index"


def texts_of(folder: Path, tokenizer: Any) -> list[str]:
    """What was indexed, decoded."""
    opened = CorpusIndex.open(folder, tokenizer_digest=tokenizer_digest(tokenizer))
    return [tokenizer.decode(opened.ids(*opened.bounds(number)).tolist()) for number in range(opened.num_documents)]


def write_kinds(folder: Path) -> dict[str, Path]:
    """The same documents in every form that is read."""
    rows = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    paths = {name: folder / f"rows{name}" for name in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")}
    paths[".jsonl"].write_text(lines, encoding="utf-8")
    paths[".jsonl.gz"].write_bytes(gzip.compress(lines.encode()))
    paths[".jsonl.zst"].write_bytes(pytest.importorskip("zstandard").compress(lines.encode()))
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, paths[".parquet"])
    paths["text"] = folder / "texts"
    paths["text"].mkdir()
    for number, text in enumerate(TEXTS):
        (paths["text"] / f"{number}.txt").write_text(text, encoding="utf-8")
    return paths


def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path) -> None:
    tokenizer = built("merged digits")
    for kind, path in write_kinds(tmp_path).items():
        build_index([path], tmp_path / f"index{kind}", tokenizer)
        assert texts_of(tmp_path / f"index{kind}", tokenizer) == TEXTS
        metadata = CorpusIndex.open(tmp_path / f"index{kind}").metadata(1)
        if kind == "text":
            assert metadata == {"path": "1.txt"}
        else:
            assert metadata == {"path": path.name, "linenum": 2, "metadata": {"id": 1}}


def test_rows_and_datasets_are_indexed_as_files_are(tmp_path: Path) -> None:
    tokenizer = built("merged digits")
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(str(tmp_path / "saved"))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    sources: dict[str, Any] = {
        "texts": TEXTS,
        "ids": ids,
        "arrays": [np.array(one, dtype=np.int64) for one in ids],
        "rows": [{"input_ids": one} for one in ids],
        "dataset": dataset,
        "generator": iter(TEXTS),
        "saved": tmp_path / "saved",
    }
    for name, source in sources.items():
        build_index(source, tmp_path / name, tokenizer)
        assert texts_of(tmp_path / name, tokenizer) == TEXTS, name


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path) -> None:
    text = "one\u2028two\x0cthree\x85four"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [document.text for document in read_corpus([tmp_path / "rows.jsonl"])] == [text]


def test_a_stopped_build_goes_on_behind_its_last_whole_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = built("merged digits")
    texts = [f"Document {number} says {number * number}." for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    wanted = build_index([tmp_path / "rows.jsonl"], tmp_path / "whole", tokenizer, max_shard_tokens=60)
    sort, calls = index_writer.write_table, iter(range(100))

    def stopped(*arguments: Any, **options: Any) -> str:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return sort(*arguments, **options)

    monkeypatch.setattr(index_writer, "write_table", stopped)
    with pytest.raises(KeyboardInterrupt):
        build_index([tmp_path / "rows.jsonl"], tmp_path / "index", tokenizer, max_shard_tokens=60)
    with pytest.raises(InputError, match="has no manifest.json: it is not an index, or its build did not end"):
        CorpusIndex.open(tmp_path / "index")
    with pytest.raises(InputError, match="holds a build of another corpus that did not end"):
        build_index(TEXTS, tmp_path / "index", tokenizer)
    found = build_index([tmp_path / "rows.jsonl"], tmp_path / "index", tokenizer, max_shard_tokens=60)
    assert found == wanted
    assert len(found.shards) > 4
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    CorpusIndex.open(tmp_path / "index", verify=True)
    assert texts_of(tmp_path / "index", tokenizer) == texts


def test_an_index_grows_by_shards_and_is_never_overwritten(tmp_path: Path) -> None:
    tokenizer = built("merged digits")
    build_index(TEXTS[:2], tmp_path / "index", tokenizer)
    with pytest.raises(InputError, match="exists already; append to it, or choose another folder."):
        build_index(TEXTS, tmp_path / "index", tokenizer)
    build_index(TEXTS[2:], tmp_path / "index", tokenizer, append=True)
    assert texts_of(tmp_path / "index", tokenizer) == TEXTS
    with pytest.raises(InputError, match="was built with another tokenizer"):
        build_index(TEXTS, tmp_path / "index", built("metaspace"), append=True)


def test_rows_of_a_training_batch_lose_their_padding_and_are_split_at_end_tokens(tmp_path: Path) -> None:
    with IndexWriter(tmp_path, vocabulary_size=10, split_at=[9]) as writer:
        writer.add_rows(np.array([[1, 2, 9, 3, 4], [5, 9, 9, 0, 0]]), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    index = CorpusIndex.open(tmp_path)
    found = [index.ids(*index.bounds(number)).tolist() for number in range(index.num_documents)]
    assert found == [[1, 2], [3, 4], [5]]
    with pytest.raises(ValueError, match=r"input_ids and attention_mask must share a shape \(B, T\), got \(2,\) and \(2,\)."):
        writer.add_rows(np.array([1, 2]))


def test_both_builders_write_the_same_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 40_000, 200).tolist() for _ in range(20)] * 3
    for name, use in (("divided", True), ("doubled", False)):
        with IndexWriter(tmp_path / name, vocabulary_size=49_152, use_divsufsort=use) as writer:
            for document in documents:
                writer.add(document)
    first, second = (CorpusIndex.open(tmp_path / name).manifest.shards[0] for name in ("divided", "doubled"))
    assert first.files == second.files
    assert first.suffix_array.startswith("pydivsufsort")
    assert second.suffix_array.startswith("numpy")


def test_unigrams_are_counted_over_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_writer, "CHUNK", 7)
    rng = np.random.default_rng(0)
    for dtype in ("<u2", "<u4"):
        tokens = rng.integers(0, 50, 100).astype(dtype)
        ids, counts = count_unigrams(tokens)
        wanted = np.unique(tokens, return_counts=True)
        assert ids.tolist() == wanted[0].tolist()
        assert counts.tolist() == wanted[1].tolist()


def damage_missing(folder: Path) -> None:
    (folder / "table.1").unlink()


def damage_truncated(folder: Path) -> None:
    path = folder / "tokenized.0"
    path.write_bytes(path.read_bytes()[:-2])


def damage_emptied(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**manifest, "shards": []}))


def damage_repeated(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**manifest, "shards": manifest["shards"][:1] * 2}))


def damage_separator(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    (folder / MANIFEST_NAME).write_text(json.dumps({**manifest, "separator": 7}))


def damage_file_list(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    del manifest["shards"][0]["files"]["table.0"]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def damage_gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_missing, "index 'index' is damaged: 'table.1' is missing. Build it again."),
        (damage_truncated, "index 'index' is damaged: 'tokenized.0' has 12 bytes instead of 14. Build it again."),
        (damage_emptied, "index 'index' is empty: nothing would be found in it."),
        (damage_repeated, "index 'index' lists a shard twice."),
        (damage_separator, "index 'index' has separator 7, which does not fit u16."),
        (damage_file_list, "a shard must list its 6 files"),
        (damage_gone, "is not a folder."),
    ],
)
def test_an_index_that_is_not_whole_is_refused(index: Path, damage: Any, sentence: str) -> None:
    assert CorpusIndex.open(index).num_tokens == 7
    damage(index)
    with pytest.raises(InputError, match=sentence):
        CorpusIndex.open(index)


def test_a_changed_byte_is_found_when_asked_for(index: Path) -> None:
    path = index / "tokenized.1"
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    CorpusIndex.open(index)
    with pytest.raises(InputError, match="'tokenized.1' of index 'index' is not the file that was built"):
        CorpusIndex.open(index, verify=True)


def test_another_tokenizer_is_refused(index: Path, tmp_path: Path) -> None:
    CorpusIndex.open(index, tokenizer_digest="a" * 64)
    with pytest.raises(InputError, match="was built with another tokenizer .* nothing would be found"):
        CorpusIndex.open(index, tokenizer_digest="b" * 64)
    with IndexWriter(tmp_path / "other", vocabulary_size=51) as writer:
        writer.add([1])
    with pytest.raises(InputError, match=r"index 'other' has another tokenizer than the first \(vocabulary size differs\)."):
        CorpusIndex.open(index, tmp_path / "other")


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ([1, 50], "document 2 holds id 50; ids must lie in 0..49."),
        ([-1], "document 2 holds id -1; ids must lie in 0..49."),
        ([0.5], r"document 2 must be a list of token ids, got float64 of shape \(1,\)."),
        ([[1]], r"document 2 must be a list of token ids, got int64 of shape \(1, 1\)."),
    ],
)
def test_ids_that_no_token_has_are_refused_by_document(tmp_path: Path, document: Any, sentence: str) -> None:
    with IndexWriter(tmp_path, vocabulary_size=50) as writer:
        writer.add([1])
        with pytest.raises(InputError, match=sentence):
            writer.add(document)
    assert CorpusIndex.open(tmp_path).num_tokens == 1


def test_an_error_inside_the_block_leaves_no_file(tmp_path: Path) -> None:
    def stopped() -> None:
        with IndexWriter(tmp_path, vocabulary_size=50) as writer:
            writer.add([1])
            raise RuntimeError("the disk went away")

    with pytest.raises(RuntimeError, match="the disk went away"):
        stopped()
    assert not list(tmp_path.iterdir())


def rows_with(row: str) -> Iterator[Any]:
    yield {"text": "fine"}
    yield json.loads(row)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{}", "row 2 must hold 'text' or 'input_ids'."),
        ('{"input_ids": "ids"}', "row 2 must hold 'text' or 'input_ids'."),
        ("5", "row 2 must be a text, token ids or a mapping, got int."),
    ],
)
def test_a_row_that_holds_no_text_is_named(tmp_path: Path, row: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        build_index(rows_with(row), tmp_path / "index", built("merged digits"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    tokenizer = built("merged digits")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{broken\n', encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "c.jsonl.gz").write_bytes(b"not packed")
    (tmp_path / "d.parquet").write_bytes(b"no table")
    (tmp_path / "e.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "none").mkdir()
    for name, sentence in {
        "a.jsonl": "'a.jsonl' line 2 is not JSON.",
        "b.txt": "'b.txt' is not UTF-8 text.",
        "c.jsonl.gz": r"'c.jsonl.gz' cannot be read \(BadGzipFile\).",
        "d.parquet": r"'d.parquet' cannot be read \(ArrowInvalid\).",
        "e.jsonl": "'e.jsonl' is not UTF-8 text.",
        "f.txt": "corpus '.*f.txt' does not exist.",
        "none": "the corpus holds no file.",
    }.items():
        with pytest.raises(InputError, match=sentence):
            build_index([tmp_path / name], tmp_path / "index" / name, tokenizer)
    with pytest.raises(InputError, match="a corpus must be paths alone or rows alone."):
        build_index([tmp_path, "text"], tmp_path / "index" / "mixed", tokenizer)


def test_a_corpus_without_a_token_makes_no_index(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the corpus holds no token: nothing would be found in its index."):
        build_index(["", ""], tmp_path, built("merged digits"))
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_what_a_build_takes_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3000)
    assert guess_num_tokens([tmp_path]) == 1000
    wide = estimate_build(10**9, vocabulary_size=150_000, max_shard_tokens=10**8, builder="numpy 2")
    assert (wide.num_shards, wide.memory_bytes, wide.disk_bytes) == (10, 7_500_000_000, 8 * 10**9)
    with pytest.raises(ValueError, match="num_tokens and max_shard_tokens must be at least 1, got 0 and 5."):
        estimate_build(0, vocabulary_size=5, max_shard_tokens=5)
    with pytest.raises(ValueError, match="vocabulary_size must lie in 1..4294967295, got 0."):
        estimate_build(1, vocabulary_size=0)
    with pytest.raises(ValueError, match="max_shard_tokens must be at least 1, got 0."):
        IndexWriter(tmp_path, vocabulary_size=5, max_shard_tokens=0)
