"""What a collated batch says of each stretch of tokens that belongs together: ids, labels, and what a token may attend to.

Reads dictionaries with `input_ids` and maybe `labels`, `attention_mask` (flat, or a mask of queries by keys), `position_ids`,
`seq_lengths`, `seq_idx` or `cu_seq_lens_q`; of a tuple its first table of ids. Changes nothing, needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IGNORED_LABEL = -100


@dataclass(frozen=True)
class BatchRow:
    """One segment of a row, padding left out: a stretch whose tokens see each other and nothing before it.

    Args:
        row: index in the batch.
        positions: place of each token in the row.
        ids: its tokens.
        labels: their labels, None where the batch has none of that shape.
        is_shifted: `labels[i]` belongs to `ids[i + 1]`: the collator shifted them, not the model.
        mask: queries by keys of the row, read a line at a time since it is large; None: a token sees all before it.
    """

    row: int
    positions: tuple[int, ...]
    ids: tuple[int, ...] = field(repr=False)
    labels: tuple[int, ...] | None = field(repr=False)
    is_shifted: bool
    mask: Any = field(default=None, compare=False, repr=False)

    def sees_before(self, at: int, begin: int, *, ignored: int) -> bool:
        """Whether the token at `at` may attend to text before `begin`, BOS-like `ignored` tokens apart."""
        text = [place for place, one in zip(self.positions[:begin], self.ids[:begin], strict=True) if one != ignored]
        if self.mask is None or not text:
            return bool(text)
        own = self.positions[at]
        line = _plain(self.mask[own])
        is_additive = not line[own]  # a token always sees itself: 0 is what is added there, or 1 what is allowed
        return any(line[place] >= 0 if is_additive else line[place] for place in text)


def view_rows(batch: Any) -> list[BatchRow]:
    """Every segment of a batch, in order; empty where it holds no `input_ids`.

    Args:
        batch: what a collator gave.

    Example:
        >>> packed = {"input_ids": [[1, 7, 1, 8]], "position_ids": [[0, 1, 0, 1]]}
        >>> [one.ids for one in view_rows(packed)]
        [(1, 7), (1, 8)]
    """
    if not hasattr(batch, "keys"):
        batch = _from_tuple(batch)
    table = _table(batch.get("input_ids"), 2) if "input_ids" in batch else None
    if not table:
        return []
    labels = _table(batch.get("labels"), 2)
    masks = batch.get("attention_mask")
    flat_masks = _table(masks, 2)
    found: list[BatchRow] = []
    for row, ids in enumerate(table):
        own = labels[row] if labels is not None and row < len(labels) and len(labels[row]) == len(ids) else None
        flat = flat_masks[row] if flat_masks and row < len(flat_masks) and len(flat_masks[row]) == len(ids) else [1] * len(ids)
        mask = _square(masks, row, len(ids))
        starts = _starts(batch, row, len(ids), only=len(table) == 1)
        shifted = own is not None and _is_shifted(ids, own)
        for low, high in zip(starts, [*starts[1:], len(ids)], strict=True):
            places = tuple(at for at in range(low, high) if flat[at])
            if places:
                found.append(
                    BatchRow(
                        row=row,
                        positions=places,
                        ids=tuple(ids[at] for at in places),
                        labels=tuple(own[at] for at in places) if own is not None else None,
                        is_shifted=shifted,
                        mask=mask,
                    )
                )
    return found


def _from_tuple(batch: Any) -> dict[str, Any]:
    """The first table of whole numbers as `input_ids`: what else a tuple holds has no name to go by."""
    for one in batch if isinstance(batch, (list, tuple)) else ():
        table = _plain(one)
        if _depth(table) == 2 and table[0] and isinstance(table[0][0], int):
            return {"input_ids": table}
    return {}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _depth(value: Any) -> int:
    """How many levels of lists `value` has; -1 for None."""
    if value is None:
        return -1
    depth = 0
    while isinstance(value, (list, tuple)):
        depth, value = depth + 1, value[0] if value else None
    return depth + int(getattr(value, "ndim", 0))


def _table(value: Any, depth: int) -> list[list[Any]] | None:
    """`value` as a list of rows; a flat list is one row, and None stands for what has another shape."""
    found = _depth(value)
    if found == depth - 1:
        return [list(_plain(value))]
    return [list(_plain(row)) for row in _plain(value)] if found == depth else None


def _is_shifted(ids: Sequence[int], labels: Sequence[int]) -> bool:
    used = [at for at, label in enumerate(labels) if label != IGNORED_LABEL]
    same = sum(labels[at] == ids[at] for at in used)
    return sum(labels[at] == ids[at + 1] for at in used if at + 1 < len(ids)) > same


def _starts(batch: Mapping[str, Any], row: int, length: int, *, only: bool) -> list[int]:
    """Where segments of a row begin, 0 among them."""
    starts = {0}
    positions = _plain(batch.get("position_ids"))
    if _depth(positions) == 3:  # one table for each axis of a multi-axis rotary embedding
        positions = positions[0]
    table = _table(positions, 2)
    if table:
        starts |= {at for at, position in enumerate(table[min(row, len(table) - 1)]) if position == 0 and at < length}
    for key in ("attention_mask", "seq_idx"):  # some packing numbers the texts of a row, in place of a mask of ones
        table = _table(batch.get(key), 2)
        if table and row < len(table):
            line = table[row]
            starts |= {at for at in range(1, min(length, len(line))) if line[at] != line[at - 1]}
    lengths = _table(batch.get("seq_lengths"), 2)
    if lengths and row < len(lengths):
        ends = [sum(lengths[row][: number + 1]) for number in range(len(lengths[row]))]
        starts |= {end for end in ends if end < length}
    bounds = _plain(batch.get("cu_seq_lens_q"))
    if only and _depth(bounds) == 1:
        starts |= {at for at in bounds if at < length}
    return sorted(starts)


def _square(masks: Any, row: int, length: int) -> Any:
    """The mask of queries by keys of a row; None for a flat one."""
    depth = _depth(masks)
    if depth not in (3, 4) or row >= len(masks):
        return None
    mask = masks[row][0] if depth == 4 else masks[row]  # one table for all heads
    return mask if len(mask) == length else None
