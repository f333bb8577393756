"""Text in a form in which spelling does not matter (NFKC, case, blanks, quotes, dashes), with the way back to the original.

Offsets are kept for whole clusters, that is letters with their marks: what was joined or taken apart on the way has the
place of its cluster.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

FOLDED = {
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u0060\u00b4", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033", '"'),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", ""),
}
MOST, SOME = 0.5, 0.1  # of words; of characters
LETTERS = re.compile(r"[A-Za-z]+")
UNUSUAL_BLANKS = re.compile(r"\s\s+|[^\S ]")
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

    Capitals, a capital a word, wide letters and letters taken apart, doubled blanks, a word a line. Cheap, for most texts are
    not; blanks that begin a line of source code are few among all.

    Example:
        >>> is_respelt("THE PARSER READS IT"), is_respelt("The parser reads it for NASA."), is_respelt("if a:\\n    return 1")
        (True, False, False)
    """
    words = LETTERS.findall(text)
    if sum(word[0].isupper() for word in words) > MOST * len(words):
        return True
    if len(UNUSUAL_BLANKS.findall(text)) > MOST * len(text.split()):
        return True
    return not text.isascii() and sum(letter >= "\u0300" and _folded(letter) != letter for letter in text) > SOME * len(text)


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
    plain = unicodedata.normalize("NFKC", _made_plain(text))
    return _made_plain(unicodedata.normalize("NFKC", plain.casefold()))


def _made_plain(text: str) -> str:
    # Many times faster than one `translate`; no letter becomes another one of the table.
    for letter, plain in FOLDED.items():
        text = text.replace(letter, plain)
    return text


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
