"""Generations that say nothing of memorisation: loops, and texts that compress to nothing and hold few letters.

They match a corpus through repetition alone and are reported apart.
"""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np

MAX_UNIT = 200  # characters
MIN_REPEATS = 3
PIECE = 4  # characters
MIN_PERIODIC = 0.9
MAX_RATIO, MAX_LETTERS = 0.1, 0.5
LOOP_RATIO = 0.75  # three repeats of anything longer than this share of its size would compress further
SHORT = 300  # characters: zlib's own bytes count there

Kind = Literal["loop", "degenerate"]


def degenerate_kind(text: str) -> Kind | None:
    """What is wrong with a generation, if anything.

    A loop repeats a unit of at most 200 characters three times or more over at least 90% of the text; a degenerate text
    compresses below a tenth and holds fewer than half letters.

    Example:
        >>> degenerate_kind("no no no no no no"), degenerate_kind("=" * 1000 + "end"), degenerate_kind("A sentence.")
        ('loop', 'loop', None)

    Source: the re-run of Propensity for Memorization (2606.06286).
    """
    raw = text.encode(errors="replace")
    if not raw:
        return None
    ratio = len(zlib.compress(raw)) / len(raw)
    if (len(raw) < SHORT or ratio < LOOP_RATIO) and _is_loop(text):
        return "loop"
    if ratio < MAX_RATIO and sum(map(str.isalpha, text)) < MAX_LETTERS * len(text):
        return "degenerate"
    return None


def _is_loop(text: str) -> bool:
    letters = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    n = letters.size
    for unit in sorted(_distances(text)):
        if unit * MIN_REPEATS > n:
            break
        equal = letters[unit:] == letters[:-unit]
        # Of a text that repeats, every character behind the first unit equals the one a unit before it.
        if int(np.count_nonzero(equal)) + unit >= MIN_PERIODIC * n and _longest_run(equal) >= (MIN_REPEATS - 1) * unit:
            return True
    return False


def _distances(text: str) -> set[int]:
    """How far on a few short pieces of a text come again: the units it could repeat, whatever its first and last tenth."""
    found = set()
    for tenth in (2, 5):
        start = len(text) * tenth // 10
        piece = text[start : start + PIECE]
        at = text.find(piece, start + 1, start + MAX_UNIT + PIECE)
        while at >= 0:
            found.add(at - start)
            at = text.find(piece, at + 1, start + MAX_UNIT + PIECE)
    return found


def _longest_run(equal: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
