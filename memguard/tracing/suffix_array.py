"""The table of a shard: the byte offsets of all its tokens, ordered by the text that begins there.

The order is that of the raw little-endian bytes, compared at whole tokens, a text before its continuations: infini-gram's.
`pydivsufsort` builds it in about 8 (u16) or 16 (u32, many tokens) bytes of memory a token over the tokens themselves;
without it numpy's prefix doubling gives the same table in about 5 times the time and 60 bytes a token. Neither is slowed by
copies of long texts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
CHUNK = 1 << 20
SMALL_IDS = 1 << 24  # ids below this are counted, not sorted


def pointer_bytes(size: int) -> int:
    """Bytes of one pointer into a token file of `size` bytes: the fewest that hold every offset.

    Example:
        >>> [pointer_bytes(size) for size in (2, 256, 258, 65_536, 65_538, 1 << 24)]
        [1, 1, 2, 2, 3, 3]
    """
    return max(1, ((size - 1).bit_length() + 7) // 8)


def builder_name() -> str:
    """What builds suffix arrays here, with its version."""
    if importlib.util.find_spec("pydivsufsort") is None:
        return f"numpy {np.__version__}"
    from importlib.metadata import version

    return f"pydivsufsort {version('pydivsufsort')}"


def write_table(tokens: Tokens, path: Path, *, use_divsufsort: bool | None = None) -> str:
    """Write the table of a shard and name what built it.

    Args:
        tokens: little-endian ids with separators, shape (N,).
        path: of the table.
        use_divsufsort: None takes it where it is installed.

    Raises:
        ValueError: no token.
    """
    if tokens.size == 0:
        raise ValueError("tokens must hold at least one token, got none.")
    if use_divsufsort is None:
        use_divsufsort = importlib.util.find_spec("pydivsufsort") is not None
    width = pointer_bytes(tokens.nbytes)
    parts = _divided(tokens) if use_divsufsort else _doubled(tokens)
    with path.open("wb") as stream:
        for positions in parts:
            offsets = positions.astype("<i8") * tokens.itemsize
            stream.write(offsets.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return builder_name() if use_divsufsort else f"numpy {np.__version__}"


def _divided(tokens: Tokens) -> Iterator[NDArray[np.int64]]:
    """Positions in order by divsufsort, which sorts bytes: suffixes that begin inside a token are left out as they come.

    Tokens become ranks of as few bytes as there are different ones, the high byte first: that order is the raw bytes'.
    """
    from pydivsufsort import divsufsort

    packed, width = _packed_ranks(tokens)
    order = divsufsort(packed)
    for start in range(0, len(order), CHUNK):
        part = order[start : start + CHUNK].astype(np.int64)
        yield part[part % width == 0] // width


def _packed_ranks(tokens: Tokens) -> tuple[NDArray[np.uint8], int]:
    """Ranks of tokens as big-endian bytes, and the bytes of each."""
    distinct = _distinct(tokens)
    width = pointer_bytes(len(distinct))
    if width == tokens.itemsize:
        return np.array(tokens.view(np.uint8)), width
    packed = np.empty((tokens.size, width), dtype=np.uint8)
    for start in range(0, tokens.size, CHUNK):
        ranks = _ranks(tokens[start : start + CHUNK], distinct)
        packed[start : start + CHUNK] = ranks.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    return packed.reshape(-1), width


def _distinct(tokens: Tokens) -> NDArray[np.uint32]:
    """The different ids, byte-swapped, ascending."""
    separator = np.iinfo(tokens.dtype).max
    if tokens.dtype == np.uint16:
        seen = np.flatnonzero(np.bincount(tokens, minlength=1))
    else:
        highest = int(np.max(tokens, where=tokens != separator, initial=0))
        if highest < SMALL_IDS:
            marks = np.zeros(highest + 2, dtype=bool)
            for start in range(0, tokens.size, CHUNK):
                marks[np.minimum(tokens[start : start + CHUNK], highest + 1)] = True
            seen = np.flatnonzero(marks[:-1])
            seen = np.append(seen, separator) if marks[-1] else seen
        else:
            seen = np.unique(tokens)
    swapped = seen.astype(tokens.dtype).byteswap().astype(np.uint32)
    return np.sort(swapped)


def _ranks(tokens: Tokens, distinct: NDArray[np.uint32]) -> NDArray[np.int64]:
    ranks: NDArray[np.int64] = np.searchsorted(distinct, tokens.byteswap().astype(np.uint32))
    return ranks


def _doubled(tokens: Tokens) -> Iterator[NDArray[np.int64]]:
    order = sort_suffixes(_ranks(tokens, _distinct(tokens)))
    for start in range(0, len(order), CHUNK):
        yield order[start : start + CHUNK]


def sort_suffixes(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of a text in the order of the suffixes that begin there, a suffix before its continuations; shape (N,).

    Prefix doubling in which only suffixes that are not yet told apart are sorted again.

    Args:
        ranks: int64, at least 0, below 2**32 - 1, shape (N,).

    Example:
        >>> sort_suffixes(np.array([1, 0, 1, 0, 1])).tolist()
        [3, 1, 4, 2, 0]
    """
    n = len(ranks)
    depth, key = _first_key(ranks)
    order = np.argsort(key, kind="stable")
    new = np.concatenate([[True], np.diff(key[order]) != 0]) if n else np.zeros(0, bool)
    del key
    place = np.empty(n, dtype=np.int64)  # of a suffix: the first row of those that it equals so far
    rows = np.arange(n)
    starts = np.maximum.accumulate(np.where(new, rows, 0)) if n else rows
    place[order] = starts
    open_rows = _not_told_apart(rows, new)
    while open_rows.size:
        members = order[open_rows]
        beyond = members + depth
        second = np.where(beyond < n, place[np.minimum(beyond, n - 1)] + 1, 0)
        first = place[members]
        arranged = np.lexsort((second, first))
        members, first, second = members[arranged], first[arranged], second[arranged]
        order[open_rows] = members
        new = np.concatenate([[True], (np.diff(first) != 0) | (np.diff(second) != 0)])
        place[members] = np.maximum.accumulate(np.where(new, open_rows, 0))
        open_rows = _not_told_apart(open_rows, new)
        depth *= 2
    return order


def _first_key(ranks: NDArray[np.int64]) -> tuple[int, NDArray[np.uint64]]:
    """As many ranks as fit into 64 bits, one up so that the end of the text is lowest; and how many those are."""
    bits = max(1, (int(ranks.max(initial=0)) + 1).bit_length())
    depth = min(64 // bits, 8)
    key = np.zeros(len(ranks), dtype=np.uint64)
    for ahead in range(depth):
        key <<= np.uint64(bits)
        key[: max(0, len(ranks) - ahead)] |= (ranks[ahead:] + 1).astype(np.uint64)
    return depth, key


def _not_told_apart(rows: NDArray[np.int64], new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rows whose suffix equals the one before or after it so far."""
    if not rows.size:
        return rows
    alone = new & np.append(new[1:], True)
    found: NDArray[np.int64] = rows[~alone]
    return found
