"""Copies of a text in a corpus are counted: every place to the letter, near ones by edit distance, and against brute force."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import built, glued

from memguard.tracing import text_places
from memguard.tracing.copies import MAX_EDIT_SHARE, Copies, count_copies
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.edits import fewest_edits, needs_more_edits
from memguard.tracing.index_build import build_index
from memguard.tracing.index_writer import IndexWriter
from memguard.tracing.normalised import normalise
from memguard.tracing.simpletrace import Generation, Tracer, TraceSettings
from memguard.tracing.text_places import MAX_ROWS
from memguard.tracing.token_text import TokenText

KINDS = ("merged digits", "three digits", "metaspace", "characters", "unigram", "wordpiece")


def tracer_of(documents: list[str], folder: Path, *, kind: str = "merged digits", **options: Any) -> Tracer:
    build_index(documents, folder, built(kind), **options)
    return Tracer(CorpusIndex.open(folder), TokenText(built(kind)), TraceSettings())


def edited(text: str, number: int, seed: int) -> str:
    """The text with so many letters replaced by others."""
    letters, rng = list(text), random.Random(seed)
    for place in rng.sample([at for at, one in enumerate(text) if one.isalpha()], number):
        letters[place] = "x" if letters[place] != "x" else "y"
    return "".join(letters)


def respoken(text: str, number: int, seed: int) -> str:
    """The text with so many words left out or put in, each of at most five letters."""
    words, rng = text.split(" "), random.Random(seed)
    for _ in range(number):
        short = [at for at, one in enumerate(words) if 0 < len(one) <= 4]
        if rng.random() < 0.5 and short:
            del words[rng.choice(short)]
        else:
            words.insert(rng.randrange(len(words)), "and")
    return " ".join(words)


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


def places_in(tracer: Tracer, text: str) -> list[int]:
    """Places in each document, by a search through the bytes that its tokens write."""
    index, raw = tracer.index, tracer.plain(Generation(text=text)).raw
    found = []
    for number in range(index.num_documents):
        shard, start, end = index.bounds(number)
        there = tracer.token_text.bytes_of(index.ids(shard, start, end).tolist())
        found.append(sum(there.startswith(raw, at) for at in range(len(there))))
    return found


def test_the_fewest_edits_are_those_of_the_textbook_table() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        pattern, text = ("".join(rng.choices("abc", k=rng.randrange(top))) for top in (12, 30))
        assert fewest_edits(pattern, text) == (plain_edits(pattern, text) if pattern else 0)
    long = "".join(rng.choices("abcdefgh ", k=400))
    assert fewest_edits(long, long[:200] + "zz" + long[201:]) == plain_edits(long, long[:200] + "zz" + long[201:])


def test_texts_that_are_left_out_unread_do_need_more_edits() -> None:
    rng, left_out = random.Random(1), 0
    for _ in range(3000):
        pattern = "".join(rng.choices("abcd", k=rng.randrange(1, 40)))
        text = edited(pattern, rng.randrange(len(pattern) + 1), rng.randrange(99))
        most = rng.randrange(4)
        if needs_more_edits(pattern, text, most):
            left_out += 1
            assert plain_edits(pattern, text) > most, (pattern, text, most)
    assert left_out > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_exact_counts_are_those_of_a_search_through_all_bytes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One to three letters overlap themselves; words in several scripts are cut inside tokens; 60 tokens make several shards.
    alphabets = ["ab", "a ", "the of", " anchor,Rope chain æble 12 of kettle 漢字 👍🏽 e\u0301 "]
    for seed in range(40):
        monkeypatch.setattr(text_places, "FEW", (0, 3, 64)[seed % 3])  # by rows alone, by bytes late, and as it is
        rng = random.Random(f"{kind}/{seed}")
        letters = alphabets[seed % len(alphabets)]
        units = letters.split() if len(letters) > 8 else list(letters)
        glue = " " if len(letters) > 8 else ""
        documents = [
            glue.join(rng.choices(units, k=rng.randrange(1, 40))).strip() or units[0] for _ in range(rng.randrange(1, 9))
        ]
        documents += rng.choices(documents, k=rng.randrange(3))
        tracer = tracer_of(documents, tmp_path / str(seed), kind=kind, max_shard_tokens=60)
        texts = []
        for _ in range(12):
            whole = rng.choice(documents)
            start = rng.randrange(len(whole))
            texts.append(whole[start : start + rng.choice([1, 2, 3, 5, 8, 13, 40])])
        texts += [glue.join(rng.choices(units, k=rng.randrange(1, 6))) for _ in range(4)]
        for text, found in zip(texts, count_copies(tracer, texts), strict=True):
            expected = places_in(tracer, text) if tracer.plain(Generation(text=text)).raw else [0]
            assert found.num_occurrences == sum(expected), (kind, seed, text)
            assert found.num_documents == sum(number > 0 for number in expected), (kind, seed, text)
            assert not found.is_capped


def test_exact_counts_hold_for_tokens_that_no_encoder_would_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # "a" and "b" side by side although "ab" is a token: each place is met by the tokens it has, and once.
    tokenizer = glued(("a", "b"), ("b", "a"), ("ab", "a"), ("b", "b"))
    token_text = TokenText(tokenizer)
    ids = [id_ for id_, piece in enumerate(token_text.pieces) if piece and set(piece) <= set(b"ab")]
    assert len(ids) == 6
    for seed in range(60):
        monkeypatch.setattr(text_places, "FEW", (0, 3, 64)[seed % 3])
        rng = random.Random(seed)
        with IndexWriter(tmp_path / str(seed), vocabulary_size=len(token_text.pieces), max_shard_tokens=40) as writer:
            for _ in range(rng.randrange(1, 8)):
                writer.add(rng.choices(ids, k=rng.randrange(1, 15)))
        tracer = Tracer(CorpusIndex.open(tmp_path / str(seed)), token_text, TraceSettings())
        texts = ["".join(rng.choices("ab", k=rng.randrange(1, 9))) for _ in range(20)]
        for text, found in zip(texts, count_copies(tracer, texts, near=False), strict=True):
            expected = places_in(tracer, text)
            assert (found.num_occurrences, found.num_documents) == (sum(expected), sum(map(bool, expected))), (seed, text)


def test_near_documents_are_near_and_nearly_all_of_those_that_are(corpus_text: str, tmp_path: Path) -> None:
    true = found = 0
    for seed in range(60):
        rng = random.Random(seed)
        wanted = corpus_text[(start := rng.randrange(30_000)) : start + rng.choice([80, 200, 600])].strip()
        documents = [corpus_text[at : at + 800] for at in range(40_000, 48_000, 800)]
        for number in range(rng.randrange(8)):
            copy = edited(wanted, int(len(wanted) * rng.choice([0.02, 0.06, 0.09, 0.14])), number)
            documents[number] = documents[number][:200] + copy + documents[number][200:]
        documents += [wanted] * rng.randrange(3)
        tracer = tracer_of(documents, tmp_path / str(seed), max_shard_tokens=2000)
        (one,) = count_copies(tracer, [wanted])
        plain = normalise(wanted).strip()
        most = int(MAX_EDIT_SHARE * len(plain))
        near = sum(wanted not in other and fewest_edits(plain, normalise(other)) <= most for other in documents)
        assert one.num_near_documents <= near, seed
        true, found = true + near, found + one.num_near_documents
    assert true > 100
    assert found >= 0.97 * true


@pytest.mark.parametrize("share", [0.01, 0.04, 0.08])
@pytest.mark.parametrize("length", [300, 1500])
def test_what_has_one_near_copy_is_not_taken_for_unique(corpus_text: str, tmp_path: Path, share: float, length: int) -> None:
    # An edit makes the pieces of the text rare: the rarest ones lead to the text's own place and to nothing else.
    texts = [corpus_text[start : start + length] for start in range(0, 20 * length, length)]
    copies = [f"Preface {seed}. {edited(text, int(share * length), seed)} End." for seed, text in enumerate(texts)]
    found = count_copies(tracer_of([*texts, *copies], tmp_path / "index"), texts)
    assert [one.num_occurrences for one in found] == [1] * len(texts)
    assert sum(one.is_once for one in found) <= 1


def test_planted_copies_and_near_copies_are_counted(tmp_path: Path) -> None:
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    wanted = source[46_000:46_400]
    others = [source[start : start + 1500] for start in range(0, 45_000, 1500)]
    for number in range(7):  # inside other text, so that tokens are cut elsewhere each time
        others[number] = others[number][: 300 + number] + wanted + others[number][300 + number :]
    for number in range(7, 10):
        others[number] = others[number][:500] + edited(wanted, 25, number) + others[number][500:]
    others[10] = others[10][:500] + respoken(wanted, 6, 10) + others[10][500:]
    others[11] = others[11][:500] + wanted.replace(" ", "  ") + others[11][500:]
    for number in range(12, 15):  # a fifth is changed: no near-duplicate
        others[number] = others[number][:500] + edited(wanted, 80, number) + others[number][500:]
    others[15] = f"{wanted} {wanted} {others[15]}"
    tracer = tracer_of(others, tmp_path / "index", max_shard_tokens=4000)
    (found,) = count_copies(tracer, [wanted])
    assert found == Copies(num_occurrences=9, num_documents=8, num_near_documents=5, is_capped=False)
    assert not found.is_once
    assert count_copies(tracer, [wanted], near=False) == [Copies(9, 8, 0, is_capped=False)]


def test_what_stands_once_is_known_to_and_what_does_not_is_counted_as_none(corpus_text: str, tmp_path: Path) -> None:
    documents = [corpus_text[start : start + 1000] for start in range(0, 30_000, 1000)]
    tracer = tracer_of(documents, tmp_path / "index")
    texts = [documents[3], documents[5][100:400], "Nothing like this stands in any of these pages.", "", documents[7] * 3]
    found = count_copies(tracer, texts)
    assert [one.is_once for one in found] == [True, True, False, False, False]
    assert found[2:] == [Copies(0, 0, 0, False)] * 3


def test_a_text_that_stands_everywhere_is_counted_by_its_rows(tmp_path: Path) -> None:
    text = "All rights are reserved, and that is that, as everybody knows by now."
    tracer = tracer_of([text] * 3000, tmp_path / "index")
    assert count_copies(tracer, [text]) == [Copies(3000, 3000, 0, is_capped=False)]


def test_more_places_than_are_looked_at_are_a_lower_end_and_said_to_be(tmp_path: Path) -> None:
    tracer = tracer_of(["ab" * (MAX_ROWS + 10)], tmp_path / "index", kind="characters")
    (found,) = count_copies(tracer, ["aba"])
    assert found.is_capped
    assert not found.is_once
    assert MAX_ROWS <= found.num_occurrences <= MAX_ROWS + 10


def test_a_family_of_more_near_copies_than_are_compared_is_said_to_be_larger(corpus_text: str, tmp_path: Path) -> None:
    text = corpus_text[:200]
    tracer = tracer_of([text, *(edited(text, 8, seed) for seed in range(300))], tmp_path / "index")
    (found,) = count_copies(tracer, [text])
    assert (found.num_occurrences, found.is_capped, found.is_near_capped) == (1, False, True)
    assert found.num_near_documents >= 100
    assert not found.is_once
