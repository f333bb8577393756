"""Every place of a text in a corpus, letter by letter, however its tokens are cut there: exact unless it says it is capped.

The token over the text's first byte ends somewhere in it. From each such end all ways to go on in tokens that write the text
are followed as long as they occur, so that every place is met once, by its own tokens. Few places left are compared as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.characters import DocumentReader, PlainGeneration
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.pieces import Pieces
from memguard.tracing.spans import Rows
from memguard.tracing.token_text import TokenText

Ints = NDArray[np.int64]
FEW = 64  # places that are compared as bytes at once
MAX_ROWS = 1 << 18  # looked at for one text; some 50 ms
MAX_PATTERNS = 1 << 13  # looked up at a time for one text
STRETCH = 64  # tokens read at a time where all rows may go on alike


@dataclass(frozen=True)
class TextPlaces:
    """The document of every place found, a number each, and whether there may be more than were looked at."""

    documents: Ints
    is_capped: bool


@dataclass(frozen=True)
class _Path:
    """Tokens that write bytes [start, end) of the text; the token before them writes those ahead of it."""

    start: int
    end: int
    ids: tuple[int, ...]


@dataclass
class _Found:
    """Documents so far, and the rows that may still be looked at."""

    documents: list[Ints] = field(default_factory=list)
    rows_left: int = MAX_ROWS
    is_capped: bool = False

    def take(self, wanted: int) -> int:
        given = min(wanted, self.rows_left)
        self.rows_left -= given
        self.is_capped |= given < wanted
        return given


class PlaceFinder:
    """Finds texts in one index."""

    def __init__(self, index: CorpusIndex, token_text: TokenText) -> None:
        self._index, self._token_text = index, token_text
        self._pieces, self._reader = Pieces(index, token_text), DocumentReader(index, token_text)

    def find(self, raw: bytes) -> TextPlaces:
        """Every place that holds the bytes; places that overlap are counted each.

        Args:
            raw: whole characters.
        """
        found = _Found()
        if raw:
            self._inside_one(raw, found)
            ends = range(1, min(len(raw) - 1, self._pieces.longest) + 1)
            heads = {end: np.array(self._pieces.ending(raw[:end]), dtype=np.int64) for end in ends}
            heads = {end: ids for end, ids in heads.items() if ids.size}
            for end, before in heads.items():
                if len(raw) - end <= self._pieces.longest:
                    self._across_two(before, np.array(self._pieces.beginning(raw[end:]), dtype=np.int64), found)
            self._over_more(raw, heads, found)
        return TextPlaces(np.concatenate([np.zeros(0, dtype=np.int64), *found.documents]), found.is_capped)

    def _inside_one(self, raw: bytes, found: _Found) -> None:
        """Places inside a single token, which may hold the text more than once."""
        if len(raw) > self._pieces.longest:
            return
        holding = [(id_, _times(raw, piece)) for piece, id_ in self._pieces.by_begin if raw in piece]
        if not holding:
            return
        rows = self._index.find([[id_] for id_, _ in holding])
        for place, (_, times) in enumerate(holding):
            for number, positions in self._positions(rows, place, found):
                found.documents.append(np.repeat(self._documents(number, positions), times))

    def _across_two(self, heads: Ints, tails: Ints, found: _Found) -> None:
        """Places of a head with a tail right behind it; the rarer side is read."""
        if not heads.size or not tails.size:
            return
        rows = [self._index.find([[id_] for id_ in side.tolist()]) for side in (heads, tails)]
        side = int(rows[1].counts.sum() < rows[0].counts.sum())
        for place in range((heads, tails)[side].size):
            for number, positions in self._positions(rows[side], place, found):
                tokens = self._index.shards[number].table.tokens
                beside = positions - 1 if side else positions + 1
                inside = beside < tokens.size
                kept = positions[inside][np.isin(tokens[beside[inside]], heads if side else tails)]
                found.documents.append(self._documents(number, kept))

    def _over_more(self, raw: bytes, heads: dict[int, Ints], found: _Found) -> None:
        """Places with at least one whole token of the text between its first and its last."""
        paths = [_Path(end, end, ()) for end in heads]
        while paths:
            grown = [one for path in paths for one in self._grown(path, raw)]
            if not grown:
                return
            if len(grown) > MAX_PATTERNS:
                found.is_capped = True
                return
            rows = self._index.find([path.ids for path in grown])
            alive = np.flatnonzero(rows.counts).tolist()
            if int(rows.counts.sum()) <= FEW:
                self._compare(raw, heads, grown, rows, alive, found)
                return
            paths = []
            for place in alive:
                path = self._forced(grown[place], raw, rows, place)
                if path is not None:
                    if len(raw) - path.end <= self._pieces.longest:
                        self._between(path, raw, heads[path.start], rows, place, found)
                    paths.append(path)

    def _grown(self, path: _Path, raw: bytes) -> list[_Path]:
        """One whole token of the text more, which is not its last."""
        ends = range(path.end + 1, min(len(raw) - 1, path.end + self._pieces.longest) + 1)
        return [_Path(path.start, end, (*path.ids, id_)) for end in ends for id_ in self._pieces.equal(raw[path.end : end])]

    def _forced(self, path: _Path, raw: bytes, rows: Rows, place: int) -> _Path | None:
        """As far as all rows go on alike; None where that is no more the text. Rows are sorted: the outermost tell."""
        pieces, end, ids = self._token_text.pieces, path.end, list(path.ids)
        ends_of_rows = []
        for number, shard in enumerate(self._index.shards):
            low, high = int(rows.low[number, place]), int(rows.high[number, place])
            if low < high:
                ends_of_rows += [(shard.table.tokens, int(at)) for at in shard.table.positions(np.array([low, high - 1]))]
        while True:
            at = len(ids)
            ahead = [tokens[position + at : position + at + STRETCH] for tokens, position in ends_of_rows]
            size = min(map(len, ahead))
            differs = [np.flatnonzero(one[:size] != ahead[0][:size]) for one in ahead]
            shared = min((int(one[0]) for one in differs if one.size), default=size)
            for id_ in ahead[0][:shared].tolist():
                piece = pieces[id_] if id_ < len(pieces) else b""
                if not piece or not raw.startswith(piece, end) or end + len(piece) >= len(raw):
                    # Either the token holds the text's end, which is looked at beside, or no place goes on as the text.
                    holds_end = bool(piece) and piece.startswith(raw[end:])
                    return _Path(path.start, end, tuple(ids)) if holds_end else None
                ids.append(id_)
                end += len(piece)
            if shared < STRETCH:
                return _Path(path.start, end, tuple(ids))

    def _between(self, path: _Path, raw: bytes, heads: Ints, rows: Rows, place: int, found: _Found) -> None:
        """Places of a path with a head before it and a tail behind it."""
        tails = self._pieces.beginning(raw[path.end :])
        if not tails:
            return
        for number, positions in self._positions(rows, place, found):
            tokens = self._index.shards[number].table.tokens
            positions = positions[positions + len(path.ids) < tokens.size]
            is_whole = np.isin(tokens[positions - 1], heads) & np.isin(tokens[positions + len(path.ids)], tails)
            found.documents.append(self._documents(number, positions[is_whole]))

    def _compare(
        self, raw: bytes, heads: dict[int, Ints], paths: Sequence[_Path], rows: Rows, alive: Sequence[int], found: _Found
    ) -> None:
        """The places of some paths that have a head before them and hold all of the text, as bytes."""
        found.take(sum(int(rows.counts[place]) for place in alive))
        for place, some in zip(alive, self._index.occurrences(rows, alive, limit=FEW), strict=True):
            path = paths[place]
            ids = np.array(path.ids, dtype=np.int64)
            one = PlainGeneration(ids, raw, path.start + self._token_text.offsets(ids))
            matches = [self._reader.grow(one, (0, ids.size), where) for where in some]
            whole = [
                where.document
                for where, match in zip(some, matches, strict=True)
                if match.end - match.start == len(raw)
                and self._index.ids(where.shard, where.position - 1, where.position)[0] in heads[path.start]
            ]
            found.documents.append(np.array(whole, dtype=np.int64))

    def _positions(self, rows: Rows, place: int, found: _Found) -> list[tuple[int, Ints]]:
        """Shards and the positions of a pattern there, as far as rows are left."""
        listed = []
        for number, shard in enumerate(self._index.shards):
            low, high = int(rows.low[number, place]), int(rows.high[number, place])
            high = low + found.take(high - low)
            if low < high:
                listed.append((number, shard.table.positions(np.arange(low, high))))
        return listed

    def _documents(self, number: int, positions: Ints) -> Ints:
        return self._index.documents_of(number, positions)


def _times(raw: bytes, piece: bytes) -> int:
    return sum(piece.startswith(raw, at) for at in range(len(piece) - len(raw) + 1))
