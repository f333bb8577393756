"""Finds a short text in the corpus letter by letter, wherever tokens cut it: exact where token matches are too short to lead.

A document that holds the text has a token that ends with its beginning, tokens that are parts of it, and one that begins with
its end. The parts in between are looked up as they grow; the tokens at both ends are compared in the rows found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.pieces import Pieces
from memguard.tracing.spans import Rows
from memguard.tracing.token_text import TokenText

Ints = NDArray[np.int64]
MAX_BYTES = 64  # of a text; longer ones are led to by the tokens inside them
MAX_ROWS = 1 << 20  # compared for one text
MAX_PATTERNS = 1 << 13  # looked up at a time for one text


@dataclass(frozen=True)
class ShortMatch:
    """The document that holds a text; None where none does. `is_capped`: too common a text to look at every place."""

    document: int | None
    is_capped: bool


@dataclass(frozen=True)
class _Part:
    """Tokens that write bytes [start, end) of the text."""

    start: int
    end: int
    ids: tuple[int, ...]


class ShortTextFinder:
    """Looks for texts in one index, with the pieces of its vocabulary."""

    def __init__(self, index: CorpusIndex, token_text: TokenText) -> None:
        self._index, self._pieces = index, Pieces(index, token_text)

    def find(self, raw: bytes) -> ShortMatch:
        """The first document found that holds the bytes.

        Args:
            raw: whole characters, at most `MAX_BYTES`.
        """
        if not 0 < len(raw) <= MAX_BYTES:
            raise ValueError(f"raw must hold 1..{MAX_BYTES} bytes, got {len(raw)}.")
        budget = _Budget(MAX_ROWS)
        found = self._inside_one(raw)
        if found is None:
            found = self._across_two(raw, budget)
        if found is None:
            found = self._over_more(raw, budget)
        return ShortMatch(found, budget.is_spent and found is None)

    def _inside_one(self, raw: bytes) -> int | None:
        """In a document that has a token which holds all of the text."""
        if len(raw) > self._pieces.longest:
            return None
        return self._first_document([(id_,) for piece, id_ in self._pieces.by_begin if raw in piece])

    def _across_two(self, raw: bytes, budget: _Budget) -> int | None:
        """In a document that has a token which ends with the text's beginning, and next one that begins with its end."""
        for cut in range(1, len(raw)):
            first, second = self._pieces.ending(raw[:cut]), self._pieces.beginning(raw[cut:])
            if len(first) * len(second) > MAX_PATTERNS:
                budget.is_spent = True
                continue
            found = self._first_document([(one, other) for one in first for other in second])
            if found is not None:
                return found
        return None

    def _over_more(self, raw: bytes, budget: _Budget) -> int | None:
        """In a document that has whole tokens of the text, and at both ends what is left of it."""
        begins = range(min(len(raw), self._pieces.longest))
        parts = [_Part(start, start, ()) for start in begins]
        while parts:
            grown = [part for part in self._grown(parts, raw) if part.end - part.start]
            if len(grown) > MAX_PATTERNS:
                budget.is_spent = True
                return None
            if not grown:
                return None
            rows = self._index.find([part.ids for part in grown])
            alive = np.flatnonzero(rows.counts)
            for place in alive.tolist():
                part = grown[place]
                if len(raw) - part.end <= self._pieces.longest:
                    found = self._between(part, raw, rows, place, budget)
                    if found is not None:
                        return found
            parts = [grown[place] for place in alive.tolist()]
        return None

    def _grown(self, parts: Sequence[_Part], raw: bytes) -> Iterator[_Part]:
        for part in parts:
            for end in range(part.end + 1, min(len(raw), part.end + self._pieces.longest) + 1):
                for id_ in self._pieces.equal(raw[part.end : end]):
                    yield _Part(part.start, end, (*part.ids, id_))

    def _between(self, part: _Part, raw: bytes, rows: Rows, place: int, budget: _Budget) -> int | None:
        """The document of a row whose neighbours hold the rest of the text."""
        before = self._pieces.ending(raw[: part.start]) if part.start else None
        after = self._pieces.beginning(raw[part.end :]) if part.end < len(raw) else None
        if (before is not None and not before) or (after is not None and not after):
            return None
        for number, shard in enumerate(self._index.shards):
            low, high = int(rows.low[number, place]), int(rows.high[number, place])
            high = low + budget.take(high - low)
            if high == low:
                continue
            positions = shard.table.positions(np.arange(low, high))
            tokens = shard.table.tokens
            if before is not None:
                positions = positions[np.isin(tokens[positions - 1], before)]
            if after is not None:
                behind = np.minimum(positions + len(part.ids), tokens.size - 1)
                positions = positions[np.isin(tokens[behind], after) & (positions + len(part.ids) < tokens.size)]
            if positions.size:
                return self._index.document_of(number, int(positions.min()))
        return None

    def _first_document(self, patterns: Sequence[tuple[int, ...]]) -> int | None:
        if not patterns:
            return None
        rows = self._index.find(patterns)
        places = np.flatnonzero(rows.counts)
        if not places.size:
            return None
        return self._index.occurrences(rows, [int(places[0])], limit=1)[0][0].document


class _Budget:
    """Rows that may still be looked at."""

    def __init__(self, rows: int) -> None:
        self._rows, self.is_spent = rows, False

    def take(self, wanted: int) -> int:
        given = min(wanted, self._rows)
        self._rows -= given
        self.is_spent |= given < wanted
        return given
