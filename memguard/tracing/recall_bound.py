"""Tells from tokens alone which windows of documents cannot have near-verbatim recall, so that their text is not read.

Never says no where `near_verbatim_recall` is above 0: words are compared by a sum over their letters, which equal words share,
and a word that folding could change in other ways than ASCII letters counts as if it were in the generation.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.recall import RecallLimits, adaptive_limits

Ints = NDArray[np.int64]
BUCKETS = 1 << 16  # of letter sums; a hundred words fill 0.15%
OPENS, CLOSES, HAS_LETTERS, IS_UNREADABLE = 1, 2, 4, 8  # a token begins with a blank; ends with one; holds more than blanks
CUT_CHARACTER = 8  # words at most that a token with parts of characters can end or begin; a ligature may hold three blanks
APART = 1 << 40  # words between windows
ASCII_BLANKS = "".join(chr(code) for code in range(128) if chr(code).isspace())
INNER_BLANKS = re.compile(f"[{re.escape(ASCII_BLANKS)}]+")


@dataclass(frozen=True)
class _Words:
    """Words of texts one behind the other: those alone that the other side may have, too.

    Args:
        weights: how many words each may be.
        places: readable words before each, far more between texts.
        ends: `places` behind each; the same for an unreadable word, which folding may leave nothing of.
        texts: which each lies in.
    """

    weights: Ints
    places: Ints
    ends: Ints
    texts: Ints


class RecallBound:
    """What the tokens of a vocabulary do to words.

    Args:
        pieces: bytes that each id writes.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._letters = _letter_values()
        self._sums = _letter_sums(self._letters, pieces)
        self._unreadable = np.array([_unreadable_words(piece) for piece in pieces], dtype=np.int64)
        self._flags = np.array([_flags(piece) for piece in pieces], dtype=np.uint8)
        self._flags[self._unreadable > 0] |= HAS_LETTERS | IS_UNREADABLE

    def may_be_above_zero(self, words: Sequence[str], windows: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
        """Whether each window may have recall above 0; where not, it is 0.

        Args:
            words: of the generation, normalised.
            windows: token ids, each shape (T,).

        Returns:
            shape (len(windows),).
        """
        found = np.zeros(len(windows), dtype=np.bool_)
        limits = adaptive_limits(len(words))
        asked = self._sums_of(words)
        shared, sums = self._shared_words(asked[asked < BUCKETS], windows)
        for window in set(_long_runs(shared, limits).texts.tolist()):
            part = slice(*np.searchsorted(shared.texts, [window, window + 1]).tolist())
            # The generation's words, too, must stand in such runs; what is unreadable may be any of them.
            is_readable = bool((shared.ends[part] > shared.places[part]).all())
            found[window] = not is_readable or _long_runs(_chosen(_holding(sums[part])[asked]), limits).texts.size > 0
        return found

    def _sums_of(self, words: Sequence[str]) -> Ints:
        """Letter sums; `BUCKETS` for other words than ASCII ones, which match unreadable ones alone."""
        sums = _letter_sums(self._letters, [word.encode() for word in words]).astype(np.int64)
        sums[[place for place, word in enumerate(words) if not word.isascii()]] = BUCKETS
        return sums

    def _shared_words(self, asked: Ints, windows: Sequence[NDArray[Any]]) -> tuple[_Words, Ints]:
        """Words of the windows whose letter sum is asked for, or that are unreadable, and their sums."""
        none = np.zeros(0, dtype=np.int64)
        bounds = np.cumsum([0, *map(len, windows)])
        ids = np.concatenate(windows) if windows else none
        flags = self._flags[ids]
        begins = flags & OPENS
        begins[1:] |= flags[:-1] & CLOSES
        begins[bounds[:-1][bounds[:-1] < ids.size]] = OPENS
        starts = np.flatnonzero((begins != 0) & (flags & HAS_LETTERS != 0))
        if not starts.size:
            return _Words(none, none, none, none), none
        # Tokens between words are blanks, which add nothing; no word reaches into the next window.
        sums = np.add.reduceat(self._sums[ids], starts, dtype=np.uint16)
        weights = _holding(asked)[sums].astype(np.int64)
        is_readable = np.ones(starts.size, dtype=np.bool_)
        tokens = np.flatnonzero(flags & IS_UNREADABLE != 0)
        if tokens.size:
            word = np.searchsorted(starts, tokens, side="right") - 1
            is_readable[word] = False
            weights[word] = 0
            np.add.at(weights, word, self._unreadable[ids[tokens]])
        kept = np.flatnonzero(weights)
        texts = np.searchsorted(bounds, starts[kept], side="right") - 1
        ends = np.cumsum(is_readable)[kept] + texts * APART
        return _Words(weights[kept], ends - is_readable[kept], ends, texts), sums[kept].astype(np.int64)


def _holding(sums: Ints) -> NDArray[np.bool_]:
    """By letter sum, whether it is one of some; False for `BUCKETS`."""
    is_held = np.zeros(BUCKETS + 1, dtype=np.bool_)
    is_held[sums] = True
    return is_held


def _chosen(is_chosen: NDArray[np.bool_]) -> _Words:
    """Some words of one text, all of it readable."""
    places = np.flatnonzero(is_chosen)
    return _Words(np.ones_like(places), places, places + 1, np.zeros_like(places))


def _long_runs(words: _Words, limits: RecallLimits) -> _Words:
    """What `near_verbatim_recall` could at most keep of words: runs joined twice, the short ones left out."""
    words = _runs(words, limits.first_gap, limits.first_length)
    return _runs(words, limits.second_gap, limits.second_length)


def _runs(words: _Words, gap: float, shortest: float) -> _Words:
    """Joined words that at most `gap` readable ones part, where together they are at least `shortest`."""
    if not words.weights.size:
        return words
    firsts = np.flatnonzero(np.concatenate([[True], words.places[1:] - words.ends[:-1] > gap]))
    lasts = np.append(firsts[1:], words.weights.size) - 1
    weights = np.add.reduceat(words.weights, firsts)
    kept = weights >= shortest
    firsts, lasts = firsts[kept], lasts[kept]
    return _Words(weights[kept], words.places[firsts], words.ends[lasts], words.texts[firsts])


def _letter_values() -> NDArray[np.uint16]:
    """A random number for every byte, one for those that folding makes equal, 0 for blanks; sums of them wrap."""
    values = np.random.default_rng(0).integers(1, BUCKETS, size=256).astype(np.uint16)
    values[ord("A") : ord("Z") + 1] = values[ord("a") : ord("z") + 1]
    values[ord("`")] = values[ord("'")]
    values[[ord(blank) for blank in ASCII_BLANKS]] = 0
    return values


def _letter_sums(values: NDArray[np.uint16], pieces: Sequence[bytes]) -> NDArray[np.uint16]:
    each = values[np.frombuffer(b"".join(pieces), dtype=np.uint8)]
    ends = np.cumsum([0, *map(len, pieces)])
    sums = np.concatenate([np.zeros(1, dtype=np.uint16), np.cumsum(each, dtype=np.uint16)])
    found: NDArray[np.uint16] = sums[ends[1:]] - sums[ends[:-1]]
    return found


def _flags(piece: bytes) -> int:
    text = piece.decode("latin-1")  # a letter a byte; of blanks only ASCII ones are looked for
    if not text:
        return 0
    return (
        OPENS * (text[0] in ASCII_BLANKS) | CLOSES * (text[-1] in ASCII_BLANKS) | HAS_LETTERS * bool(text.strip(ASCII_BLANKS))
    )


def _unreadable_words(piece: bytes) -> int:
    """True words that a token may be part of which its letters do not tell; 0 for ASCII letters without a blank between."""
    if not piece:
        return 1
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return CUT_CHARACTER + len(piece)
    inner = text.strip(ASCII_BLANKS)
    if text.isascii():
        parts = len(INNER_BLANKS.split(inner))
        return parts if parts > 1 else 0
    return 1 + sum(letter.isspace() for letter in unicodedata.normalize("NFKD", text))
