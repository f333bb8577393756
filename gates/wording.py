"""Small helpers for the one-sentence reasons: lists of ids, figures and quoted text that stay short and on one line."""

from __future__ import annotations

from collections.abc import Sequence

MAX_QUOTE = 200


def clip(text: str, limit: int = MAX_QUOTE) -> str:
    """`text` on one line without control characters, cut at `limit` characters."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def quoted(names: Sequence[str], *, show: int = 3) -> str:
    """The first names in quotes, and how many more there are: 'a', 'b', 'c' and 4 more."""
    shown = [f"'{clip(name, 40)}'" for name in names[:show]]
    if len(names) > show:
        return ", ".join(shown) + f" and {len(names) - show} more"
    return ", ".join(shown)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 canary`, `3 canaries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {plural or noun + 's'}"


def sentence(text: str) -> str:
    """`text` with a capital first letter and one full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."
