"""Tables on a terminal, and one plain line a row where the output is piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

LEFT = ("format", "metric", "method", "quantity", "against", "of", "held back", "stage", "corpus", "setting")


def plain_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Text]:
    """One line a row, for a pipe: every cell behind the name of its column."""
    return lines("  ".join(f"{name}={cell}" for name, cell in zip(columns, cells, strict=True)) for cells in rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal; text from files is never read as markup."""
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(Text(name), justify="left" if name in LEFT else "right")
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    return table


def lines(texts: Iterable[str], *, style: str = "") -> list[Text]:
    """Texts that are never read as markup."""
    return [Text(text, style=style) for text in texts]
