"""Indexes without a manifest, as infini-gram builds them: read as they are, or refused where its engine would crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memguard.errors import InputError
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_writer import IndexWriter
from memguard.tracing.infinigram_index import open_infinigram
from memguard.tracing.manifest import MANIFEST_NAME

VOCABULARY = 500


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, without what memguard adds to them."""
    rng = np.random.default_rng(0)
    with IndexWriter(tmp_path / "index", vocabulary_size=VOCABULARY, max_shard_tokens=200) as writer:
        for number in range(20):
            writer.add(rng.integers(0, 30, 20), {"path": f"{number}.txt"})
    (tmp_path / "index" / MANIFEST_NAME).rename(tmp_path / "manifest.json")
    return tmp_path / "index"


def queries() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 30, 40).tolist() for _ in range(20)]


def test_it_answers_as_with_a_manifest(folder: Path) -> None:
    found = open_infinigram(folder, vocabulary_size=VOCABULARY)
    (folder.parent / "manifest.json").rename(folder / MANIFEST_NAME)
    wanted = CorpusIndex.open(folder)
    assert found.spans(queries()).as_lists(20) == wanted.spans(queries()).as_lists(20)
    assert (found.num_tokens, found.num_documents) == (wanted.num_tokens, wanted.num_documents)
    assert found.metadata(13) == {"path": "13.txt"}


def test_what_is_left_out_is_counted_or_empty(folder: Path) -> None:
    wanted = open_infinigram(folder, vocabulary_size=VOCABULARY).log_unigrams()
    for stem in ("unigram", "metadata", "metaoff"):
        (folder / f"{stem}.0").unlink()
    found = open_infinigram(folder, vocabulary_size=VOCABULARY)
    np.testing.assert_array_equal(found.log_unigrams(), wanted)
    assert found.metadata(0) == {}


def test_infini_gram_gives_the_same_spans_from_the_same_files(folder: Path) -> None:
    engine_module = pytest.importorskip("infini_gram.engine")
    engine = engine_module.InfiniGramEngine(str(folder), eos_token_id=0, vocab_size=VOCABULARY, ds_prefetch_depth=0)
    index = open_infinigram(folder, vocabulary_size=VOCABULARY)
    for query, spans in zip(queries(), index.spans(queries()).as_lists(20), strict=True):
        given = engine.attribute(query, delim_ids=[], min_len=1, max_cnt=2**40, enforce_bow=False)["spans"]
        assert [(span["l"], span["r"], span["count"]) for span in given] == spans


def change(path: Path, edit: Callable[[Any], Any], dtype: str = "u1") -> None:
    edit_of = np.fromfile(path, dtype=dtype)
    edit(edit_of).tofile(path)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "table.1").unlink(), "'table.1' is missing from index 'index'."),
        (lambda folder: (folder / "tokenized.0").unlink(), "index 'index' lacks shard 0."),
        (lambda folder: change(folder / "table.0", lambda rows: rows[:-2]), "'table.0' holds 418 bytes, which do not fit 210"),
        (lambda folder: change(folder / "tokenized.0", lambda rows: rows[:-1]), "'tokenized.0' holds 419 bytes, which is no"),
        (lambda folder: change(folder / "table.0", lambda rows: np.roll(rows, 40)), "'table.0' is not the sorted table"),
        (lambda folder: change(folder / "table.0", lambda rows: rows * 0), "'table.0' is not the sorted table"),
        (lambda folder: change(folder / "table.0", lambda rows: rows | 0x80), "'table.0' is not the sorted table"),
        (lambda folder: change(folder / "offset.0", lambda rows: rows[:-1], "<u8"), "'metaoff.0' does not fit 'metadata.0'."),
        (lambda folder: change(folder / "offset.0", lambda rows: rows + 2, "<u8"), "'offset.0' does not fit 'tokenized.0'"),
        (lambda folder: change(folder / "metaoff.0", lambda rows: rows[:-1], "<u8"), "'metaoff.0' does not fit 'metadata.0'."),
        (lambda folder: (folder / "unigram.0").write_text("1 2\n"), "'unigram.0' counts 2 tokens instead of 210."),
        (lambda folder: (folder / "unigram.0").write_text("one\n"), "'unigram.0' does not hold an id and a count a line."),
    ],
)
def test_files_that_do_not_fit_are_refused(folder: Path, damage: Any, sentence: str) -> None:
    damage(folder)
    with pytest.raises(InputError, match=sentence):
        open_infinigram(folder, vocabulary_size=VOCABULARY)


def test_another_dtype_vocabulary_or_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'table.0' holds .* bytes, which do not fit|'offset.0' does not fit 'tokenized.0'"):
        open_infinigram(folder, vocabulary_size=VOCABULARY, token_dtype="u32")
    with pytest.raises(InputError, match="shard 0 holds id 29, above a vocabulary of 20: is it u16?"):
        open_infinigram(folder, vocabulary_size=20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no shard \(tokenized.0\)."):
        open_infinigram(tmp_path / "empty", vocabulary_size=20)
    with pytest.raises(InputError, match="is not a folder."):
        open_infinigram(tmp_path / "absent", vocabulary_size=20)


def test_unreadable_metadata_is_named(folder: Path) -> None:
    change(folder / "metadata.1", lambda rows: rows * 0 + 65)
    with pytest.raises(InputError, match="metadata of document 2 in shard 1 is not readable."):
        open_infinigram(folder, vocabulary_size=VOCABULARY).metadata(12)


def test_documents_are_as_many_as_separators(folder: Path) -> None:
    for stem in ("metadata", "metaoff"):
        (folder / f"{stem}.0").unlink()
    change(folder / "offset.0", lambda rows: rows[:-1], "<u8")
    with pytest.raises(InputError, match="'offset.0' lists 9 documents, 'tokenized.0' has 10."):
        open_infinigram(folder, vocabulary_size=VOCABULARY)
