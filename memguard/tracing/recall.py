"""Near-verbatim recall: the share of a generation's words that a document has in long, well aligned runs; 0..1.

Source: Barmina, Schneider-Kamp, Galke Poech (2606.06286), the adaptive form. Differs: case is folded, not lowered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memguard.tracing.normalised import fold


@dataclass(frozen=True)
class RecallLimits:
    """Words: how far runs may lie apart and still merge, how far they may shift, and what is too short to count, twice."""

    first_gap: float
    first_shift: float
    first_length: float
    second_gap: float
    second_shift: float
    second_length: float


def adaptive_limits(num_words: int) -> RecallLimits:
    """The limits for a generation of so many words.

    Example:
        >>> adaptive_limits(100)
        RecallLimits(first_gap=2.0, first_shift=1.0, first_length=15.0, second_gap=8.0, second_shift=3.0, second_length=35.0)
    """
    n = num_words
    return RecallLimits(
        first_gap=_clamped(0.02 * n, 1, 6),
        first_shift=_clamped(0.01 * n, 1, 3),
        first_length=_clamped(round(0.15 * n), 2, 20),
        second_gap=_clamped(0.08 * n, 2, 12),
        second_shift=_clamped(0.03 * n, 1, 5),
        second_length=_clamped(round(0.35 * n), 4, 100),
    )


def near_verbatim_recall(generation: str | Sequence[str], document: str | Sequence[str]) -> float:
    """Share of the generation's words in runs that the document has too, small changes allowed; 0..1.

    Args:
        generation: a text, or its normalised words.
        document: likewise: a window of the document around a match.

    Example:
        >>> text = "the quick brown fox jumps over the lazy dog and runs into the dark wood"
        >>> near_verbatim_recall(text, text.replace("lazy", "old")), near_verbatim_recall(text, "nothing of it")
        (0.9333333333333333, 0.0)
    """
    return Recall(words_of(generation)).of(words_of(document))


class Recall:
    """Recall of one generation by many documents.

    Args:
        words: of the generation, normalised.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words, self._limits, self._counts = words, adaptive_limits(len(words)), Counter(words)

    def of(self, candidate: Sequence[str]) -> float:
        """Its recall by the normalised words of a document, 0..1."""
        limits = self._limits
        if not self._words or not self._may_reach(candidate, limits.second_length):
            return 0.0
        matcher = _difflib().SequenceMatcher(None, self._words, candidate, autojunk=False)
        # (first in the generation, behind the last, first in candidate, behind the last, matched words)
        runs = [(a, a + size, b, b + size, size) for a, b, size in matcher.get_matching_blocks() if size]
        runs = [run for run in _merged(runs, limits.first_gap, limits.first_shift) if run[4] >= limits.first_length]
        runs = [run for run in _merged(runs, limits.second_gap, limits.second_shift) if run[4] >= limits.second_length]
        return float(sum(run[4] for run in runs) / len(self._words))

    def _may_reach(self, candidate: Sequence[str], least: float) -> bool:
        """Whether as many words are shared, in any order."""
        shared = list(filter(self._counts.__contains__, candidate))
        if len(shared) < least:
            return False
        return sum(min(number, self._counts[word]) for word, number in Counter(shared).items()) >= least


@functools.cache
def _difflib() -> Any:
    """`cydifflib` of the extra `tracing`, which gives the same blocks some 17 times faster; `difflib` without it."""
    return importlib.import_module("cydifflib" if importlib.util.find_spec("cydifflib") else "difflib")


def words_of(text: str | Sequence[str]) -> list[str]:
    """Words of a normalised text."""
    return fold(text).split() if isinstance(text, str) else list(text)


Run = tuple[int, int, int, int, int]


def _merged(runs: Sequence[Run], gap: float, shift: float) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        if found:
            last = found[-1]
            apart = run[0] - last[1], run[2] - last[3]
            if max(apart) <= gap and abs(apart[0] - apart[1]) <= shift:
                found[-1] = (last[0], run[1], last[2], run[3], last[4] + run[4])
                continue
        found.append(run)
    return found


def _clamped(value: float, low: float, high: float) -> float:
    return float(max(low, min(high, value)))
