"""Spans, counts and places are those of a plain search, on random corpora of every awkward shape."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memguard.errors import InputError
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_writer import IndexWriter
from memguard.tracing.manifest import IndexManifest
from memguard.tracing.suffix_array import pointer_bytes, sort_suffixes, write_table

Ids = list[int]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small indexes; what a power cut leaves is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write(folder: Path, documents: Sequence[Ids], *, vocabulary_size: int = 1000, **options: Any) -> IndexManifest:
    with IndexWriter(folder, vocabulary_size=vocabulary_size, **options) as writer:
        for number, document in enumerate(documents):
            writer.add(document, {"number": number})
    return writer.manifest


def count(documents: Sequence[Ids], pattern: Ids) -> int:
    size = len(pattern)
    return sum(document[at : at + size] == pattern for document in documents for at in range(len(document) - size + 1))


def spans_by_search(documents: Sequence[Ids], query: Ids) -> list[tuple[int, int, int]]:
    """Maximal spans by growing a match from every place, and counting it."""
    found, farthest = [], 0
    for start in range(len(query)):
        end = start
        while end < len(query) and count(documents, query[start : end + 1]):
            end += 1
        if end > max(start, farthest):
            found.append((start, end, count(documents, query[start:end])))
        farthest = max(farthest, end)
    return found


def random_case(rng: np.random.Generator) -> tuple[list[Ids], list[Ids], int]:
    """Documents, queries and a vocabulary: few letters or many, equal documents, one token, ids of two and four bytes."""
    letters = int(rng.choice([1, 2, 3, 8, 300]))
    vocabulary = int(rng.choice([301, 65_535, 65_536, 150_000]))
    stride = int(rng.choice([1, vocabulary // 301]))  # so that the bytes of an id are used, and order matters
    documents = [(rng.integers(0, letters, rng.integers(0, 30)) * stride).tolist() for _ in range(rng.choice([1, 1, 2, 5]))]
    shape = int(rng.integers(8))
    if shape == 0:
        documents = [documents[0]] * 4
    elif shape == 1:
        documents = [[stride] * int(rng.integers(1, 40))]
    elif shape == 2:
        documents = [[int(token) * stride] for token in rng.integers(0, letters, 2)]
    if not any(documents):
        documents[0] = [0]
    queries = [(rng.integers(0, letters + 1, rng.integers(0, 20)) * stride).tolist() for _ in range(3)]
    queries.append(documents[-1][len(documents[-1]) // 3 :] + documents[0][:4])
    return documents, [[min(token, vocabulary - 1) for token in query] for query in queries], vocabulary


@pytest.mark.parametrize("number_of_corpora", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_spans_of_random_corpora_are_those_of_a_plain_search(tmp_path: Path, number_of_corpora: int) -> None:
    rng = np.random.default_rng(number_of_corpora)
    for number in range(number_of_corpora):
        documents, queries, vocabulary = random_case(rng)
        folder = tmp_path / str(number)
        write(
            folder,
            documents,
            vocabulary_size=vocabulary,
            max_shard_tokens=int(rng.choice([1, 10, 10**6])),
            use_divsufsort=bool(number % 2),
        )
        found = CorpusIndex.open(folder).spans(queries).as_lists(len(queries))
        assert found == [spans_by_search(documents, query) for query in queries]


def test_a_query_before_the_first_row_keeps_its_match(tmp_path: Path) -> None:
    # infini-gram 2.6.0 answers only (1, 2) here: the place before the first row underflows.
    write(tmp_path, [[5, 9, 9, 9], [7, 8, 9]])
    assert CorpusIndex.open(tmp_path).spans([[5, 9, 1]]).as_lists(1) == [[(0, 2, 1)]]


def test_a_query_behind_the_last_row_keeps_its_match(tmp_path: Path) -> None:
    write(tmp_path, [[5, 9], [7, 3]])
    index = CorpusIndex.open(tmp_path)
    assert index.spans([[7, 3, 999], [7, 999]]).as_lists(2) == [[(0, 2, 1)], [(0, 1, 1)]]


def test_both_neighbours_of_an_absent_suffix_are_looked_at(tmp_path: Path) -> None:
    # [1, 2, 5] stands between [1, 2, 3, 4] and [1, 9]: the longer match is with the row before.
    write(tmp_path, [[1, 2, 3, 4], [1, 9]])
    assert CorpusIndex.open(tmp_path).match_lengths([[1, 2, 5]])[0].tolist() == [2, 1, 0]


def test_no_span_crosses_two_documents(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [4, 5, 6]])
    assert CorpusIndex.open(tmp_path).spans([[1, 2, 3, 4, 5, 6]]).as_lists(1) == [[(0, 3, 1), (3, 6, 1)]]


def test_a_span_is_kept_however_often_it_occurs(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3, 4]] * 5000)
    assert CorpusIndex.open(tmp_path).spans([[9, 1, 2, 3, 4]]).as_lists(1) == [[(1, 5, 5000)]]


def test_batches_and_shards_change_no_answer(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 12, 60).tolist() for _ in range(40)]
    queries = [rng.integers(0, 12, 50).tolist() for _ in range(20)]
    write(tmp_path / "one", documents)
    write(tmp_path / "many", documents, max_shard_tokens=100)
    write(tmp_path / "first", documents[:15])
    write(tmp_path / "second", documents[15:])
    one = CorpusIndex.open(tmp_path / "one")
    wanted = one.spans(queries, min_tokens=3).as_lists(20)
    many = CorpusIndex.open(tmp_path / "many")
    assert len(many.shards) > 10
    assert many.spans(queries, min_tokens=3).as_lists(20) == wanted
    assert CorpusIndex.open(tmp_path / "first", tmp_path / "second").spans(queries, min_tokens=3).as_lists(20) == wanted
    assert [one.spans([query], min_tokens=3).as_lists(1)[0] for query in queries] == wanted
    rows, others = one.find([[3, 4]]), many.find([[3, 4]])
    limit = int(rows.counts[0])
    places = [(place.document, *_place(one, place)) for place in one.occurrences(rows, [0], limit=limit)[0]]
    assert places == [(place.document, *_place(many, place)) for place in many.occurrences(others, [0], limit=limit)[0]]
    assert one.num_documents_with(rows, 0) == many.num_documents_with(others, 0) == len({place[0] for place in places})


def _place(index: CorpusIndex, place: Any) -> tuple[int, list[int]]:
    """Position inside its document, and the ids there."""
    _, start, _ = index.bounds(place.document)
    return place.position - start, index.ids(place.shard, place.position, place.position + 2).tolist()


def test_places_are_found_with_their_documents_and_metadata(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [9, 2, 3, 2, 3], [7]]
    write(tmp_path, documents, max_shard_tokens=5)
    index = CorpusIndex.open(tmp_path)
    rows = index.find([[2, 3]])
    (places,) = index.occurrences(rows, [0], limit=10)
    assert [(place.document, *_place(index, place)) for place in places] == [(0, 1, [2, 3]), (2, 1, [2, 3]), (2, 3, [2, 3])]
    assert index.num_documents_with(rows, 0) == 2
    assert [index.metadata(number) for number in range(4)] == [{"number": number} for number in range(4)]
    assert [index.ids(*index.bounds(number)).tolist() for number in range(4)] == documents


def test_a_sample_of_places_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, number] for number in range(3, 400)])
    index = CorpusIndex.open(tmp_path)
    alone, among = index.find([[1, 2]]), index.find([[5], [1, 2]])
    (first,) = index.occurrences(alone, [0], limit=10, seed=1)
    assert index.occurrences(among, [0, 1], limit=10, seed=1)[1] == first
    assert index.occurrences(alone, [0], limit=10, seed=2) != [first]
    assert len({place.document for place in first}) == 10


def test_log_unigrams_are_shares_of_the_corpus_without_separators(tmp_path: Path) -> None:
    write(tmp_path, [[1, 1, 1], [2]], vocabulary_size=4, max_shard_tokens=3)
    np.testing.assert_allclose(np.exp(CorpusIndex.open(tmp_path).log_unigrams()), [0, 0.75, 0.25, 0])


def test_a_text_without_tokens_has_no_span(tmp_path: Path) -> None:
    write(tmp_path, [[1]])
    index = CorpusIndex.open(tmp_path)
    assert len(index.spans([])) == 0
    assert index.spans([[], [1], []]).as_lists(3) == [[], [(0, 1, 1)], []]
    assert index.count([[1], [2], [1, 1]]).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ([1, 65_535], "query 1 holds the separator of the index, 65535, which no text has."),
        ([1, 1000], "query 1 holds id 1000; ids of this index lie in 0..999. Is it the tokenizer"),
        ([-1], "query 1 holds id -1; ids of this index lie in 0..999"),
        ([[1]], r"query 1 must be a list of token ids, got int64 of shape \(1, 1\)."),
        ([0.5], r"query 1 must be a list of token ids, got float64 of shape \(1,\)."),
    ],
)
def test_a_query_that_cannot_be_of_the_corpus_is_refused(tmp_path: Path, query: Any, sentence: str) -> None:
    write(tmp_path, [[1, 2]])
    with pytest.raises(InputError, match=sentence):
        CorpusIndex.open(tmp_path).spans([[1], query])


def test_an_empty_pattern_and_an_unknown_document_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2]])
    index = CorpusIndex.open(tmp_path)
    with pytest.raises(InputError, match="pattern 1 must hold at least one token, got none."):
        index.count([[1], []])
    with pytest.raises(ValueError, match="document must lie in 0..0, got 1."):
        index.metadata(1)
    with pytest.raises(ValueError, match="folders must name at least one index, got none."):
        CorpusIndex.open()


@pytest.mark.parametrize("use_divsufsort", [True, False])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_the_table_orders_suffixes_by_their_raw_bytes(tmp_path: Path, dtype: str, use_divsufsort: bool) -> None:
    rng = np.random.default_rng(0)
    for size in [1, 2, 3, 40, 128, 129, 400]:
        for letters in (1, 2, 5, 60_000, 90_000):
            tokens = rng.integers(0, min(letters, 65_534 if dtype == "<u2" else letters), size).astype(dtype)
            tokens[rng.random(size) < 0.1] = np.iinfo(dtype).max
            write_table(tokens, tmp_path / "table", use_divsufsort=use_divsufsort)
            width = pointer_bytes(tokens.nbytes)
            rows = np.fromfile(tmp_path / "table", np.uint8).reshape(-1, width).astype(np.int64)
            offsets = (rows << (8 * np.arange(width))).sum(axis=1)
            raw = tokens.tobytes()
            assert offsets.tolist() == sorted(range(0, len(raw), tokens.itemsize), key=lambda at, raw=raw: raw[at:])


def test_suffixes_of_repeating_texts_are_sorted() -> None:
    for text in ([0] * 300, [0, 1] * 150, [2, 0, 1] * 100 + [0] * 50):
        order = sort_suffixes(np.array(text)).tolist()
        assert order == sorted(range(len(text)), key=lambda at, text=text: text[at:])
    assert sort_suffixes(np.zeros(0, np.int64)).tolist() == []


def test_no_token_makes_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens must hold at least one token, got none."):
        write_table(np.zeros(0, "<u2"), tmp_path / "table")
