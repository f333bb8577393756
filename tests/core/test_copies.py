"""Copies of a text in a corpus are counted: planted ones exactly, near ones by edit distance, and against brute force."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import built

from memguard.tracing.copies import Copies, count_copies, fewest_edits
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_build import build_index
from memguard.tracing.simpletrace import Tracer, TraceSettings
from memguard.tracing.token_text import TokenText


def tracer_of(documents: list[str], folder: Path, **options: Any) -> Tracer:
    build_index(documents, folder, built("merged digits"), **options)
    return Tracer(CorpusIndex.open(folder), TokenText(built("merged digits")), TraceSettings())


def edited(text: str, number: int, seed: int) -> str:
    """The text with so many letters replaced by others."""
    letters, rng = list(text), random.Random(seed)
    for place in rng.sample([at for at, one in enumerate(text) if one.isalpha()], number):
        letters[place] = "x" if letters[place] != "x" else "y"
    return "".join(letters)


def plain_edits(pattern: str, text: str) -> int:
    """The textbook table, its first row zero: a stretch of the text may begin anywhere."""
    row = list(range(len(pattern) + 1))
    best = row[-1]
    for letter in text:
        last, row[0] = row[0], 0
        for place, one in enumerate(pattern, start=1):
            last, row[place] = row[place], min(last + (one != letter), row[place] + 1, row[place - 1] + 1)
        best = min(best, row[-1])
    return best


def test_the_fewest_edits_are_those_of_the_textbook_table() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        pattern, text = ("".join(rng.choices("abc", k=rng.randrange(top))) for top in (12, 30))
        assert fewest_edits(pattern, text) == (plain_edits(pattern, text) if pattern else 0)
    long = "".join(rng.choices("abcdefgh ", k=400))
    assert fewest_edits(long, long[:200] + "zz" + long[201:]) == plain_edits(long, long[:200] + "zz" + long[201:])


def test_planted_copies_and_near_copies_are_counted(corpus_text: str, tmp_path: Path) -> None:
    wanted = corpus_text[46_000:46_400]
    others = [corpus_text[start : start + 1500] for start in range(0, 45_000, 1500)]
    for number in range(7):  # inside other text, so that tokens are cut elsewhere each time
        others[number] = others[number][: 300 + number] + wanted + others[number][300 + number :]
    for number in range(7, 10):
        others[number] = others[number][:500] + edited(wanted, 25, number) + others[number][500:]
    for number in range(10, 13):  # a fifth is changed: no near-duplicate
        others[number] = others[number][:500] + edited(wanted, 80, number) + others[number][500:]
    others[13] = f"{wanted} {wanted} {others[13]}"
    tracer = tracer_of(others, tmp_path / "index", max_shard_tokens=4000)
    (found,) = count_copies(tracer, [wanted])
    assert found == Copies(num_occurrences=9, num_documents=8, num_near_documents=3, is_capped=False)
    assert not found.is_once


def test_what_stands_once_is_known_to_and_what_does_not_is_counted_as_none(corpus_text: str, tmp_path: Path) -> None:
    documents = [corpus_text[start : start + 1000] for start in range(0, 30_000, 1000)]
    tracer = tracer_of(documents, tmp_path / "index")
    texts = [documents[3], documents[5][100:400], "Nothing like this stands in any of these pages.", ""]
    found = count_copies(tracer, texts)
    assert [one.is_once for one in found] == [True, True, False, False]
    assert found[2:] == [Copies(0, 0, 0, False), Copies(0, 0, 0, False)]


def test_a_text_that_stands_everywhere_is_counted_without_listing_every_place(tmp_path: Path) -> None:
    text = "All rights are reserved, and that is that, as everybody knows by now."
    tracer = tracer_of([text] * 3000, tmp_path / "index")
    (found,) = count_copies(tracer, [text])
    assert (found.num_occurrences, found.num_documents, found.is_capped) == (3000, 3000, True)


def test_exact_counts_are_those_of_a_search_through_all_text(tmp_path: Path) -> None:
    words = ["anchor", "Rope", "chain ", "æble", "12", " kettle", "of", "the "]
    for seed in range(25):
        rng = random.Random(seed)
        documents = [" ".join(rng.choices(words, k=rng.randrange(1, 40))) for _ in range(rng.randrange(1, 12))]
        tracer = tracer_of(documents, tmp_path / str(seed), max_shard_tokens=60)
        texts = [" ".join(rng.choices(words, k=12)) for _ in range(4)]
        texts += [one[rng.randrange(5) :].strip() for one in documents if len(one) > 30]
        for text, found in zip(texts, count_copies(tracer, texts), strict=True):
            places = [sum(one.startswith(text, at) for at in range(len(one))) for one in documents]
            if not found.is_capped or found.num_occurrences <= 256:
                assert found.num_occurrences == sum(places), (seed, text)
                assert found.num_documents == sum(number > 0 for number in places)


@pytest.mark.parametrize("share", [0.04, 0.08])
def test_near_copies_below_a_tenth_of_edits_are_found_wherever_their_edits_fall(
    corpus_text: str, tmp_path: Path, share: float
) -> None:
    texts = [corpus_text[start : start + 300] for start in range(0, 9000, 300)]
    copies = [f"Preface {seed}. {edited(text, int(share * 300), seed)} End." for seed, text in enumerate(texts)]
    found = count_copies(tracer_of(copies, tmp_path / "index"), texts)
    assert sum(one.num_near_documents >= 1 for one in found) >= 0.95 * len(texts)
    assert all(one.num_occurrences == 0 for one in found)
