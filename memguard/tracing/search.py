"""Binary searches in the table of one shard, all patterns of a batch a step at a time, on memory-mapped files.

A comparison reads eight raw bytes as one big-endian number, which orders them as the table is ordered; the tokens that a row
is known to share with its pattern from either side are skipped. About 20 probes a pattern in a shard of 10 M tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
BLOCK = 8  # bytes compared first, which tell most rows from their pattern
STRETCH = 64  # tokens compared at a time behind them


class Text:
    """Tokens to be compared as raw bytes from any place on; places behind the end read as zeros."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self.tokens, self.size = np.asarray(tokens), tokens.size
        self.block = BLOCK // tokens.itemsize  # tokens in a key
        self._keys = _block_keys(self.tokens)
        tail = self.tokens[max(0, self.size - self.block + 1) :]
        self._tail = _block_keys(np.concatenate([tail, np.zeros(self.block, tokens.dtype)])).astype(np.uint64)

    def keys(self, positions: Ints) -> Keys:
        """Eight bytes from each position on as one number, which orders them."""
        last = self._keys.size - 1
        if last < 0:
            return self._tail[np.minimum(positions, self._tail.size - 1)]
        found = self._keys[np.minimum(positions, last)].astype(np.uint64)
        late = np.flatnonzero(positions > last)
        if late.size:
            found[late] = self._tail[np.minimum(positions[late] - last - 1, self._tail.size - 1)]
        return found

    def stretches(self, positions: Ints) -> NDArray[Any]:
        """`STRETCH` tokens from each position on, (P, STRETCH); the last token again behind the end."""
        found: NDArray[Any] = self.tokens[np.minimum(positions[:, None] + np.arange(STRETCH), self.size - 1)]
        return found


@dataclass(frozen=True)
class Patterns:
    """Stretches of one text: pattern i is `text.tokens[starts[i]:ends[i]]`, never empty."""

    text: Text
    starts: Ints
    ends: Ints


@dataclass(frozen=True)
class Neighbours:
    """Where patterns stand in a table: the row after each, and the tokens shared with the rows before and after it."""

    rows: Ints
    before: Ints
    after: Ints


class Table:
    """The sorted rows of a shard, the text they point into, and where each first token begins.

    Args:
        tokens: little-endian ids with separators, memory-mapped, shape (N,).
        table: pointers, memory-mapped bytes, shape (N * width,).
        ids: the ids that occur, ascending.
        counts: how often each occurs.
    """

    def __init__(self, tokens: NDArray[Any], table: NDArray[np.uint8], ids: Ints, counts: Ints) -> None:
        self.text = Text(tokens)
        self.tokens, self.size = self.text.tokens, tokens.size
        self._width = table.size // tokens.size
        rows = np.asarray(table)
        self._table = rows.view(f"<u{self._width}") if self._width in (1, 2, 4, 8) else rows.reshape(-1, self._width)
        order = np.argsort(ids.astype(tokens.dtype).byteswap(), kind="stable")
        ends = np.cumsum(counts[order])
        self._ids = ids
        self._low, self._high = np.empty_like(ends), np.empty_like(ends)
        self._low[order], self._high[order] = ends - counts[order], ends

    def positions(self, rows: Ints) -> Ints:
        """The token positions that rows point to."""
        found = self._table[rows]
        if found.ndim == 1:
            return found.astype(np.int64) // self.tokens.itemsize
        offsets = found[:, 0].astype(np.int64)
        for byte in range(1, self._width):
            offsets |= found[:, byte].astype(np.int64) << (8 * byte)
        return offsets // self.tokens.itemsize

    def neighbours(self, patterns: Patterns) -> Neighbours:
        """Where each pattern would be inserted, and what it shares with either neighbour; tokens.

        Both are looked at: the longest match of a pattern that does not occur may be with the row before it or after it.
        """
        return self._search(patterns, past_equal=False)

    def interval(self, patterns: Patterns) -> tuple[Ints, Ints]:
        """Rows [low, high) that begin with each pattern."""
        return self._search(patterns, past_equal=False).rows, self._search(patterns, past_equal=True).rows

    def _search(self, patterns: Patterns, *, past_equal: bool) -> Neighbours:
        """Rows before `high` are below their pattern; with `past_equal` those that begin with it are below it, too."""
        starts, lengths = patterns.starts, patterns.ends - patterns.starts
        low, high = self._bucket(patterns.text.tokens[starts].astype(np.int64))
        low = low - 1
        with_low, with_high = np.zeros_like(starts), np.zeros_like(starts)  # tokens shared with these rows
        active = np.flatnonzero(high - low > 1)
        while active.size:
            middle = (low[active] + high[active]) >> 1
            skip = np.maximum(np.minimum(with_low[active], with_high[active]), 1)  # rows of a bucket share their first token
            shared, is_below = self._compare(self.positions(middle), patterns.text, starts[active], lengths[active], skip)
            if past_equal:
                is_below |= shared == lengths[active]
            up, down = active[is_below], active[~is_below]
            low[up], high[down] = middle[is_below], middle[~is_below]
            with_low[up], with_high[down] = shared[is_below], shared[~is_below]
            active = active[high[active] - low[active] > 1]
        return Neighbours(high, with_low, with_high)

    def _bucket(self, first: Ints) -> tuple[Ints, Ints]:
        """Rows that begin with a token; none, and not where it would stand, if it does not occur."""
        place = np.minimum(np.searchsorted(self._ids, first), self._ids.size - 1)
        is_there = self._ids[place] == first
        return np.where(is_there, self._low[place], 0), np.where(is_there, self._high[place], 0)

    def _compare(self, positions: Ints, asked: Text, starts: Ints, lengths: Ints, skip: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Tokens shared by rows and patterns that share `skip` for certain, and whether a row is below its pattern."""
        limit = np.minimum(lengths, self.size - positions)
        mine, theirs = asked.keys(starts + skip), self.text.keys(positions + skip)
        equal = _equal_tokens(mine ^ theirs, asked.block)
        shared, is_below = skip + equal, theirs < mine
        left = np.flatnonzero((equal == asked.block) & (shared < limit))
        while left.size:
            at = shared[left]
            equal, is_below[left] = _compare_stretches(
                asked.stretches(starts[left] + at), self.text.stretches(positions[left] + at)
            )
            shared[left] += equal
            left = left[(equal == STRETCH) & (shared[left] < limit[left])]
        # A row that ends inside its pattern is below it; one that goes on behind the pattern is not.
        return np.minimum(shared, limit), np.where(shared >= limit, limit < lengths, is_below)


def _block_keys(tokens: NDArray[Any]) -> NDArray[Any]:
    """Eight bytes from every token on as a big-endian number, over the same memory; shape (N - 8 / itemsize + 1,)."""
    count = tokens.size - BLOCK // tokens.itemsize + 1
    if count <= 0:
        return np.zeros(0, dtype=">u8")
    keys: NDArray[Any] = np.ndarray(shape=(count,), dtype=">u8", buffer=tokens.data, strides=(tokens.itemsize,))
    return keys


def _equal_tokens(different: Keys, block: int) -> Ints:
    """Leading tokens without a difference in blocks of eight bytes."""
    bits = 64 // block
    equal: Ints = (different == 0).astype(np.int64)
    for tokens in range(1, block):
        equal += different < np.uint64(1 << (64 - bits * tokens))
    return equal


def _compare_stretches(mine: NDArray[Any], theirs: NDArray[Any]) -> tuple[Ints, NDArray[np.bool_]]:
    """Leading tokens that are equal in each row, and whether theirs is below at the first that differs."""
    differs = mine != theirs
    rows, first = np.arange(len(mine)), differs.argmax(axis=1)
    is_below = theirs[rows, first].byteswap() < mine[rows, first].byteswap()
    return np.where(differs[rows, first], first, STRETCH), is_below
