"""Decides on characters what tokens only suggest: is a generation in a document, verbatim or but for spelling.

A copy that begins or ends inside a token is encoded otherwise at its ends, so that token ids find all of it in about 4% of
cases. A match of tokens is therefore taken as a place, and grown to both sides on the bytes that tokens write, then on
normalised text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.corpus_index import CorpusIndex, Occurrence
from memguard.tracing.normalised import normalise, normalise_with_offsets
from memguard.tracing.token_text import TokenText, trimmed

FIRST_TOKENS = 4  # read beside a match at first; most end there
SHARED = 6  # tokens of a match that are read on with what lies beside it
NEARBY = 32  # bytes beside a match that must agree before a whole window is looked at
SLACK = 8  # characters of them that a cut cluster or a run of blanks may take
LOWER = bytes(range(256)).lower().replace(b"`", b"'")
IS_PLAIN = tuple(0x20 < byte < 0x7F for byte in range(256))  # ASCII that no spelling drops or makes of something else
SPELLING_SLACK = 64  # tokens more that another spelling of the same text may take, besides half as many again


@dataclass(frozen=True)
class PlainGeneration:
    """A generation as tokens and as the bytes they write.

    Args:
        ids: without prompt and special tokens, shape (T,).
        raw: UTF-8, whole characters.
        offsets: the byte where each token begins in `raw`, and the end, clipped to it; shape (T + 1,).
    """

    ids: NDArray[np.int64]
    raw: bytes
    offsets: NDArray[np.int64]

    @property
    def text(self) -> str:
        return self.raw.decode(errors="replace")


@dataclass(frozen=True)
class TextMatch:
    """Bytes [start, end) of a generation that a document has too."""

    start: int
    end: int


class DocumentReader:
    """Reads documents around places, as bytes."""

    def __init__(self, index: CorpusIndex, token_text: TokenText) -> None:
        self._index, self._token_text = index, token_text

    def tokens(self, place: Occurrence, first: int, last: int) -> NDArray[Any]:
        """Ids of the tokens [first, last) of a place's shard, inside its document."""
        first, last = max(place.start, first), min(place.end, last)
        return self._index.ids(place.shard, first, max(first, last))

    def text(self, ids: NDArray[Any]) -> str:
        """What ids write, without the parts of characters at either end."""
        return trimmed(self._token_text.bytes_of(ids.tolist())).decode(errors="replace")

    def window(self, place: Occurrence, before: int, after: int) -> bytes:
        """Bytes of the tokens from `before` ahead of a place to `after` behind it, inside its document."""
        return trimmed(self._stretch(place, place.position - before, place.position + after))

    def grow(self, one: PlainGeneration, span: tuple[int, int], place: Occurrence) -> TextMatch:
        """The longest verbatim stretch of a generation around a span of tokens that a document has at a place.

        Args:
            one: the generation.
            span: its tokens [start, end) that stand at the place.
            place: an occurrence of the span.
        """
        begin, end = int(one.offsets[span[0]]), int(one.offsets[span[1]])
        left = self._shared(one.raw[:begin][::-1], place.shard, place.position, place.start)
        right = self._shared(one.raw[end:], place.shard, place.position + span[1] - span[0], place.end)
        return TextMatch(begin - left, end + right)

    def _shared(self, wanted: bytes, shard: int, position: int, limit: int) -> int:
        """Bytes of `wanted` that a document goes on with; backwards where the limit lies before the position."""
        count = FIRST_TOKENS
        while True:
            if limit < position:
                ids = self._index.ids(shard, max(limit, position - count), position)
                there = self._token_text.bytes_of(ids.tolist())[::-1]
            else:
                there = self._token_text.bytes_of(self._index.ids(shard, position, min(limit, position + count)).tolist())
            shared = len(os.path.commonprefix([wanted, there]))  # noqa: RUF071
            if shared < len(there) or shared == len(wanted) or count >= abs(position - limit):
                return shared
            count *= 4

    def find_normalised(
        self, one: PlainGeneration, wanted: str, span: tuple[int, int], places: Sequence[Occurrence]
    ) -> Occurrence | None:
        """The first of some places around which a document has the normalised generation.

        Args:
            one: the generation.
            wanted: `normalise(one.text).strip()`.
            span: its tokens that stand at the places.
            places: occurrences of the span.
        """
        first, last = int(one.offsets[span[0]]), int(one.offsets[span[1]])
        left, right = one.raw[max(0, first - NEARBY) : first][::-1], one.raw[last : last + NEARBY]
        before, after = span[0], len(one.ids) - span[0]
        for place in places:
            behind = place.position + span[1] - span[0]
            if _certainly_differ(right, self._stretch(place, behind, behind + FIRST_TOKENS)):
                continue
            if _certainly_differ(left, self._stretch(place, place.position - FIRST_TOKENS, place.position)[::-1]):
                continue
            if self._agrees_nearby(one, span, place):
                window = self.window(place, before + before // 2 + SPELLING_SLACK, after + after // 2 + SPELLING_SLACK)
                if wanted in normalise(window.decode(errors="replace")):
                    return place
        return None

    def _agrees_nearby(self, one: PlainGeneration, span: tuple[int, int], place: Occurrence) -> bool:
        """Whether both texts go on alike beside a match, as far as can be said from a few characters."""
        inside = min((span[1] - span[0] + 1) // 2, SHARED)  # tokens of the match that are read with what lies beside it
        first, last = int(one.offsets[span[0]]), int(one.offsets[span[1]])
        behind = place.position + span[1] - span[0]
        cut = int(one.offsets[span[1] - inside])
        if not _alike(one.raw[cut : last + NEARBY], self._stretch(place, behind - inside, behind + NEARBY), forward=True):
            return False
        cut = int(one.offsets[span[0] + inside])
        there = self._stretch(place, place.position - NEARBY, place.position + inside)
        return _alike(one.raw[max(0, first - NEARBY) : cut], there, forward=False)

    def _stretch(self, place: Occurrence, first: int, last: int) -> bytes:
        return self._token_text.bytes_of(self.tokens(place, first, last).tolist())


def locate_normalised(wanted: str, text: str) -> tuple[int, int] | None:
    """Characters [start, end) of a text that hold `wanted`, which is normalised; None where none do.

    Example:
        >>> locate_normalised("it's here", "Look:  It’s\\u00a0 here.")
        (7, 17)
    """
    found = normalise_with_offsets(text)
    start = found.text.find(wanted) if wanted else -1
    return found.original(start, start + len(wanted)) if start >= 0 else None


def _certainly_differ(mine: bytes, theirs: bytes) -> bool:
    """Whether two texts that go on from a match part at ASCII that no spelling makes equal; cheap, and often true."""
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return IS_PLAIN[one] and IS_PLAIN[other] and LOWER[one] != LOWER[other]
    return False


def _alike(mine: bytes, theirs: bytes, *, forward: bool) -> bool:
    """Whether the shorter of two stretches, normalised, is the beginning (or the end) of the other, but for a few letters."""
    pair = [normalise(raw.decode(errors="ignore")).strip() for raw in (mine, theirs)]
    if not forward:
        pair = [text[::-1] for text in pair]
    shared = len(os.path.commonprefix(pair))  # noqa: RUF071
    return shared >= min(len(pair[0]), len(pair[1])) - SLACK
