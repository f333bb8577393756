"""Windows of which tokens tell that they have no near-verbatim recall have none, whatever the tokens write."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizer_kinds import BUILDERS, built

from memguard.tracing.recall import near_verbatim_recall, words_of
from memguard.tracing.recall_bound import RecallBound
from memguard.tracing.token_text import TokenText, trimmed

ODD = "\u0301éﷺ¨\u00a0\u200bßﬁ“’…\u2028\x1c\x85ＷİſÅ각ᄀ\u1161🙂´`'-–½\u0338ﾞ"
WORDS = "the of and to in is it was for on are with as his they at be this from have or by one had not but what all were"
ENGLISH = WORDS.split()


def recall(pieces: Sequence[bytes], words: Sequence[str], window: Sequence[int]) -> float:
    raw = trimmed(b"".join(pieces[id_] for id_ in window))
    return near_verbatim_recall(words, words_of(raw.decode(errors="replace")))


def odd_pieces(rng: random.Random, number: int) -> list[bytes]:
    """Tokens of all kinds: parts of characters, blanks inside, letters that folding joins, drops or takes apart, nothing."""
    found = []
    for _ in range(number):
        letters = "".join(rng.choices("abcABC`'", k=rng.randint(1, 2)))
        odd = rng.choice(ODD)
        kinds = [f" {letters}", letters, letters + odd, odd, f"{letters} {letters}", f"{letters}\n", " ", "\t\x1f", ""]
        (kind,) = rng.choices(kinds, weights=[12, 8, 2, 2, 1, 2, 2, 1, 1])
        piece = kind.encode()
        found.append(piece[: rng.randint(1, len(piece))] if piece and rng.random() < 0.1 else piece)
    return found


def near(rng: random.Random, ids: Sequence[int], size: int) -> list[int]:
    """A window with stretches of `ids` in it, a few tokens changed."""
    window = [rng.randrange(size) for _ in range(rng.randrange(2 * len(ids)))]
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(ids))
        place = rng.randrange(len(window) + 1)
        window[place:place] = ids[start : start + rng.randint(1, len(ids))]
    for place in rng.sample(range(len(window)), len(window) // 10):
        window[place] = rng.randrange(size)
    return window


@pytest.mark.parametrize("is_plain", [True, False])
def test_no_window_with_recall_is_left_out_whatever_the_tokens_write(is_plain: bool) -> None:
    rng = random.Random(int(is_plain))
    outcomes = []
    for _ in range(150):
        pieces = odd_pieces(rng, rng.randint(5, 60))
        if is_plain:
            pieces = [piece for piece in pieces if piece and piece.isascii() and b" " not in piece[1:]] or [b" a"]
        bound = RecallBound(pieces)
        for _ in range(10):
            ids = [rng.randrange(len(pieces)) for _ in range(rng.randint(1, 100))]
            words = words_of(b"".join(pieces[id_] for id_ in ids).decode(errors="replace"))
            windows = [near(rng, ids, len(pieces)) for _ in range(3)]
            if words:
                may_be = bound.may_be_above_zero(words, [np.array(one, dtype=np.int64) for one in windows])
                outcomes += [
                    (bool(one), recall(pieces, words, window) > 0) for one, window in zip(may_be, windows, strict=True)
                ]
    assert (False, True) not in outcomes
    assert min(outcomes.count(one) for one in [(False, False), (True, False), (True, True)]) >= 100


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_most_windows_of_other_texts_are_left_out_by_every_tokenizer(name: str, corpus_text: str) -> None:
    token_text = TokenText(built(name))
    bound, pieces = RecallBound(token_text.pieces), token_text.pieces
    rng = random.Random(name)
    texts = [corpus_text[start : start + 1500] for start in range(0, 30_000, 1500)]
    windows = [token_text.encode(text) for text in texts]
    left_out, above = 0, 0
    for text in texts:
        copied = [rng.choice(ENGLISH) if rng.random() < 0.1 else word for word in text[300:900].split(" ")]
        ids = token_text.encode(" ".join(copied))
        words = words_of(token_text.bytes_of(ids).decode(errors="replace"))
        may_be = bound.may_be_above_zero(words, [np.array(one) for one in windows])
        found = np.array([recall(pieces, words, window) > 0 for window in windows])
        assert not (found & ~may_be).any()
        left_out, above = left_out + int((~may_be).sum()), above + int(found.sum())
    assert left_out > 0.5 * (len(texts) ** 2 - above)  # prose shares its common words; 56% by the coarsest vocabulary


@pytest.mark.parametrize(
    ("pieces", "generation", "window"),
    [
        # Each holds four words of four, told by no word of the window on its own.
        ([b"a b", b" c", b" d"], "a b c d", [0, 1, 2]),  # a blank inside a token
        ([b"x", b"", b"y", b" p", b" q", b" r"], "xy p q r", [0, 1, 2, 3, 4, 5]),  # a token that writes nothing
        ([b"", b" p", b" q", b" r", b" s"], "p q r s", [0, 1, 0, 2, 0, 3, 0, 4]),
        ([b"a\n", b"b\t", b"c ", b"d"], "a b c d", [0, 1, 2, 3]),  # blanks at the end
        ([b" \xc3", b"\xa9", b" b", b" c", b" d"], "é b c d", [0, 1, 2, 3, 4]),  # a character in two tokens
        (["ﷺ".encode()], "صلى الله عليه وسلم", [0]),  # a character of four words
        ([b"e", "\u0301 b".encode(), b" c", b" d"], "é b c d", [0, 1, 2, 3]),  # a mark in the next token
        ([b" A", b" B`s", b" C", b" D"], "a b's c d", [0, 1, 2, 3]),
        (["ａ ｂ ｃ ｄ".encode()], "a b c d", [0]),
        ([b"a", b"\x1c", b"b", b"c", b"d"], "a b c d", [0, 1, 2, 1, 3, 1, 4]),
    ],
)
def test_words_that_tokens_hide_may_be_those_of_the_generation(pieces: list[bytes], generation: str, window: list[int]) -> None:
    words = words_of(generation)
    assert recall(pieces, words, window) == 1.0
    assert RecallBound(pieces).may_be_above_zero(words, [np.array(window)]).tolist() == [True]


def test_words_of_different_windows_make_no_run() -> None:
    pieces = [f" {word}".encode() for word in ENGLISH]
    bound, words = RecallBound(pieces), ENGLISH[:6]
    halves = [np.array([0, 1, 2]), np.array([3, 4, 5])]
    assert bound.may_be_above_zero(words, halves).tolist() == [False, False]
    assert bound.may_be_above_zero(words, [np.concatenate(halves)]).tolist() == [True]
    # Spread over the window, or over the generation, they are no run either.
    spread = np.array([0, 20, 21, 22, 23, 24, 1, 20, 21, 22, 23, 24, 2, 20, 21, 22, 23, 24, 3])
    assert bound.may_be_above_zero(words, [spread]).tolist() == [False]
    assert bound.may_be_above_zero([ENGLISH[id_] for id_ in spread.tolist()][:6], [np.array([0, 1, 2, 3])]).tolist() == [False]


def test_nothing_to_look_at_has_no_recall() -> None:
    bound = RecallBound([b" a", b" "])
    assert bound.may_be_above_zero(["a"], []).tolist() == []
    assert bound.may_be_above_zero(["a"], [np.zeros(0, dtype=np.int64), np.array([1, 1])]).tolist() == [False, False]
