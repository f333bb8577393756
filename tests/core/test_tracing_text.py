"""Normalised text and its way back, near-verbatim recall, loops, merged spans: by hand and by property."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.tracing.degenerate import degenerate_kind
from memguard.tracing.normalised import is_respelt, normalise, normalise_with_offsets
from memguard.tracing.recall import adaptive_limits, near_verbatim_recall
from memguard.tracing.spans import merge_spans
from memguard.tracing.token_text import character_offsets, trimmed

AWKWARD = st.text(
    alphabet="aZ ßﬁﬀİıſ\u0301\u0323\u0302é각ᄀ\u1161\u11a8ｶﾞ“”’—…\u00ad\u200b\n\t\u00a0\u2028Ω½🙂👩\u200d👩東٣`´", max_size=25
)


@settings(deadline=None)
@given(AWKWARD)
def test_offsets_cover_the_same_text_as_the_plain_form(text: str) -> None:
    found = normalise_with_offsets(text)
    assert found.text == normalise(text)
    assert len(found.starts) == len(found.ends) == len(found.text)
    assert list(found.starts) == sorted(found.starts)
    assert all(0 <= start < end <= len(text) for start, end in zip(found.starts, found.ends, strict=True))


@settings(deadline=None)
@given(AWKWARD)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@settings(deadline=None)
@given(AWKWARD)
def test_composed_and_decomposed_letters_are_the_same(text: str) -> None:
    assert normalise(unicodedata.normalize("NFD", text)) == normalise(unicodedata.normalize("NFC", text))


@settings(deadline=None)
@given(AWKWARD, st.data())
def test_the_stretch_of_the_original_normalises_to_what_was_found(text: str, data: st.DataObject) -> None:
    found = normalise_with_offsets(text)
    if not found.text:
        return
    start = data.draw(st.integers(0, len(found.text) - 1))
    end = data.draw(st.integers(start + 1, len(found.text)))
    low, high = found.original(start, end)
    assert found.text[start:end].strip() in normalise(text[low:high])


def test_a_stretch_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start and end must span characters of 0\.\.2, got 1 and 1."):
        normalise_with_offsets("ab").original(1, 1)


@settings(deadline=None)
@given(st.text(max_size=20), st.integers(0, 3), st.integers(0, 3))
def test_cut_characters_are_trimmed_and_whole_ones_kept(text: str, head: int, tail: int) -> None:
    raw = text.encode(errors="replace")
    assert trimmed(raw) == raw
    cut = raw[head : len(raw) - tail]
    assert trimmed(cut).decode() == cut.decode(errors="ignore")


def test_a_piece_inside_a_character_has_all_of_it() -> None:
    raw = "a🙂b".encode()
    assert character_offsets(raw, np.array([0, 1, 3, 5, 6])) == [(0, 1), (1, 2), (1, 2), (2, 3)]


def test_recall_counts_long_aligned_runs_alone() -> None:
    words = [f"w{number}" for number in range(100)]
    # Limits for 100 words: runs of 15, then of 35; 40 of 100 words in one run count, 30 do not.
    assert near_verbatim_recall(words, words[:40] + ["x"] * 60) == 0.4
    assert near_verbatim_recall(words, words[:30] + ["x"] * 70) == 0.0
    # Two runs of 20 words: 5 apart they merge (second gap 8), 20 apart neither reaches 35.
    assert near_verbatim_recall(words, words[:20] + ["x"] * 5 + words[25:45]) == 0.4
    assert near_verbatim_recall(words, words[:20] + ["x"] * 20 + words[40:60]) == 0.0
    # The same words in other order are no copy.
    assert near_verbatim_recall(words, words[::-1]) == 0.0


def test_recall_ignores_case_quotes_and_blanks() -> None:
    text = "She said 'we leave at nine' and closed the heavy door behind her at once"
    assert near_verbatim_recall(text, "X " + text.upper().replace("'", "’").replace(" ", "\n ") + " y") == 1.0


@pytest.mark.parametrize(
    ("text", "is_unusual"),
    [
        ("The parser reads it, and NASA's \u201cteam\u201d knows.", False),
        ("def read(path):\n    with open(path) as stream:\n        return stream.read()  # all of it\n", False),
        ("Æblerne på øen blev høstet sent i år, sagde gårdejeren Åge Sørensen.", False),
        ("THE PARSER READS IT, AND THE TEAM KNOWS.", True),
        ("The Parser Reads It, And The Team Knows.", True),
        ("the  parser  reads  it,  and  the  team  knows.", True),
        ("the\nparser\nreads\nit,\nand\nthe\nteam\nknows.", True),
        ("the\tparser\treads\tit,\tand\tthe\tteam\tknows.", True),
        ("\uff54\uff48\uff45 \uff50\uff41\uff52\uff53\uff45\uff52", True),
        ("_QUADRATICS", True),
        ('FUNCTION", "', True),
        ("", False),
    ],
)
def test_texts_in_unusual_spelling_are_told_from_others(text: str, is_unusual: bool) -> None:
    assert is_respelt(text) == is_unusual


def test_limits_of_short_and_long_generations_are_clamped() -> None:
    short, long = adaptive_limits(3), adaptive_limits(10_000)
    assert (short.first_length, short.second_length, short.first_gap, short.second_shift) == (2, 4, 1, 1)
    assert (long.first_length, long.second_length, long.first_gap, long.second_shift) == (20, 100, 6, 5)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", None),
        ("A sentence that says something once, and ends.", None),
        ("and then and then and then and then", "loop"),
        ("start of it " + "round and round it goes, " * 20, "loop"),
        ("a unit of two hundred characters, " * 6 * 3, "loop"),
        ("".join(str(number * number % 9973) for number in range(75)) * 40, "degenerate"),
        ("twice the same, twice the same, but no more than that", None),
        ("".join(chr(97 + number * number % 23) for number in range(400)), "loop"),
        (" ".join(str(number * 7919 % 1009) for number in range(300)), None),
    ],
)
def test_loops_and_degenerate_texts_are_told_from_others(text: str, kind: str | None) -> None:
    assert degenerate_kind(text) == kind


def test_spans_that_touch_are_not_merged() -> None:
    assert merge_spans([(0, 5), (5, 9)], lambda start, end: True) == [(0, 5), (5, 9)]
    assert merge_spans([(0, 5), (3, 9), (8, 12)], lambda start, end: True) == [(0, 12)]
    assert merge_spans([(0, 5), (3, 9), (8, 12)], lambda start, end: end == 9) == [(0, 9), (8, 12)]
    assert merge_spans([], lambda start, end: True) == []
