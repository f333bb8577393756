"""Text in a form in which spelling does not matter (NFKC, case, blanks, quotes, dashes), with the way back to the original.

Offsets are kept for whole clusters, that is letters with their marks: what was joined or taken apart on the way has the
place of its cluster.
"""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass

FOLDED = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u0060\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", None),
    }
)
MANY = 0.3
NO_CAPITALS = dict.fromkeys(map(ord, string.ascii_uppercase))
NO_LETTERS = dict.fromkeys(map(ord, string.ascii_letters))
BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class NormalisedText:
    """A normalised text; its character i came from `[starts[i], ends[i])` of the original."""

    text: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def original(self, start: int, end: int) -> tuple[int, int]:
        """The stretch of the original that normalised characters [start, end) came from."""
        if not 0 <= start < end <= len(self.text):
            raise ValueError(f"start and end must span characters of 0..{len(self.text)}, got {start} and {end}.")
        return self.starts[start], self.ends[end - 1]


def normalise(text: str) -> str:
    """NFKC, case folded, quotes and dashes made plain, invisible characters left out, runs of blanks made one space.

    Example:
        >>> normalise("“Straße”\\n\\tno.\u00a05 — ﬁn…")
        '"strasse" no. 5 - fin...'
    """
    return BLANKS.sub(" ", fold(text))


def fold(text: str) -> str:
    """`normalise`, with blanks left as they are."""
    return text.lower().replace("`", "'") if text.isascii() else _folded(text)


def is_respelt(text: str) -> bool:
    """Whether so much of a text is spelt unusually that its tokens are not those of the same words in plain spelling.

    Capitals, wide letters and letters taken apart, doubled blanks. Cheap, for most texts are not.

    Example:
        >>> is_respelt("THE PARSER READS IT"), is_respelt("The parser reads it for NASA.")
        (True, False)
    """
    letters = len(text) - len(text.translate(NO_LETTERS))
    if len(text) - len(text.translate(NO_CAPITALS)) > MANY * letters or text.count("  ") > MANY * text.count(" ") / 3:
        return True
    return (
        not text.isascii() and sum(letter >= "\u0300" and _folded(letter) != letter for letter in text) > len(text) * MANY / 3
    )


def normalise_with_offsets(text: str) -> NormalisedText:
    """`normalise`, and where each of its characters came from.

    Example:
        >>> found = normalise_with_offsets("a  ﬁt")
        >>> found.text, found.original(2, 4)
        ('a fit', (3, 4))
    """
    letters: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for start, end in _clusters(text):
        for letter in _folded(text[start:end]):
            if letter.isspace():
                if letters and letters[-1] == " ":
                    ends[-1] = end
                    continue
                letters.append(" ")
            else:
                letters.append(letter)
            starts.append(start)
            ends.append(end)
    return NormalisedText("".join(letters), tuple(starts), tuple(ends))


def _folded(text: str) -> str:
    # A lone quote or dash must be folded before NFKC takes some of them apart; invisible characters part no cluster.
    plain = unicodedata.normalize("NFKC", text.translate(FOLDED))
    return unicodedata.normalize("NFKC", plain.casefold()).translate(FOLDED)


def _clusters(text: str) -> list[tuple[int, int]]:
    """Stretches that are normalised on their own: what follows neither joins them nor is moved into them."""
    found: list[tuple[int, int]] = []
    start = 0
    for place in range(1, len(text) + 1):
        if place == len(text) or text[place].isascii() or not _joins(text[start:place], text[place]):
            found.append((start, place))
            start = place
    return found


def _joins(cluster: str, letter: str) -> bool:
    """Whether a letter changes with, or may move past, what stands before it."""
    if unicodedata.combining(unicodedata.normalize("NFKD", letter)[0]):
        return True
    alone = _folded(letter)
    return not alone or _folded(cluster + letter) != _folded(cluster) + alone
