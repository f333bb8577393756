"""The vocabulary of an index by the beginnings and ends of what its tokens write: which tokens can stand where in a text."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np

from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.token_text import TokenText


class Pieces:
    """What the tokens of a corpus write, those that occur in it; sorted when first asked.

    Args:
        index: of the corpus.
        token_text: of its tokenizer.
    """

    def __init__(self, index: CorpusIndex, token_text: TokenText) -> None:
        self._index, self._token_text = index, token_text

    @cached_property
    def by_begin(self) -> list[tuple[bytes, int]]:
        """Bytes and id of each, ascending."""
        occurs = np.isfinite(self._index.log_unigrams())
        return sorted((piece, id_) for id_, piece in enumerate(self._token_text.pieces) if piece and occurs[id_])

    @cached_property
    def _by_end(self) -> list[tuple[bytes, int]]:
        return sorted((piece[::-1], id_) for piece, id_ in self.by_begin)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest."""
        return max((len(piece) for piece, _ in self.by_begin), default=0)

    def equal(self, raw: bytes) -> list[int]:
        """Ids that write exactly these bytes."""
        low = bisect_left(self.by_begin, (raw, -1))
        found = []
        while low < len(self.by_begin) and self.by_begin[low][0] == raw:
            found.append(self.by_begin[low][1])
            low += 1
        return found

    def beginning(self, raw: bytes) -> list[int]:
        """Ids that write these bytes and maybe more behind them."""
        return _in_range(self.by_begin, raw, self.longest)

    def ending(self, raw: bytes) -> list[int]:
        """Ids that write these bytes and maybe more before them."""
        return _in_range(self._by_end, raw[::-1], self.longest)


def _in_range(pieces: list[tuple[bytes, int]], start: bytes, longest: int) -> list[int]:
    """Ids of the pieces that begin with `start`."""
    low = bisect_left(pieces, (start, -1))
    high = bisect_left(pieces, (start + b"\xff" * (longest + 1), -1))
    return [id_ for _, id_ in pieces[low:high]]
