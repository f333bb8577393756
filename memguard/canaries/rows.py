"""Rows of the training data with a canary in them: a row of its own that looks like the user's, or one written into.

Knows the columns that trainers and packers use; a column of the user's own gets something empty of its type. A row may also
be plain: a text, a sequence of ids, or inputs with their targets, which are the same ids or those shifted by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from memguard.errors import CanaryError

ONES = ("attention_mask", "completion_mask", "assistant_masks")
ZEROS = ("token_type_ids", "special_tokens_mask")
UNSUPERVISED = -100
LENGTHS = ("length", "num_tokens", "seq_len")


def ids_of(row: Any) -> Any:
    """The token ids a row holds, as they are in it; None where it holds none.

    Example:
        >>> ids_of({"input_ids": [5, 6]}), ids_of((torch.tensor([5, 6, 7]), torch.tensor([6, 7, 8]))), ids_of("text")
        ([5, 6], tensor([5, 6, 7]), None)
    """
    if hasattr(row, "keys"):
        return row.get("input_ids")
    parts = _parts(row)
    return parts[0] if parts is not None else None


def canary_row(sample: Any, ids: Sequence[int], text: str, *, pad_to: int = 0, pad_id: int = 0) -> Any:
    """A row of its own, with the columns and value types of a user row.

    Args:
        sample: a row of the user.
        ids: token ids of the canary.
        text: its text, for raw-text rows.
        pad_to: fill up to so many tokens, which no label and no attention covers.
        pad_id: the token to fill with.
    """
    if not hasattr(sample, "keys"):
        return _plain_row(sample, list(ids), text)
    ids, rest = list(ids), max(0, pad_to - len(ids))
    size = len(ids) + rest
    values: dict[str, Any] = {
        "input_ids": ids + [pad_id] * rest,
        "labels": ids + [UNSUPERVISED] * rest,
        "position_ids": list(range(size)),
        "seq_lengths": [size],
        "text": text,
        **{column: [1] * len(ids) + [0] * rest for column in ONES},
        **{column: [0] * size for column in ZEROS},
        **dict.fromkeys(LENGTHS, size),
    }
    return {key: _like(value, values.get(key, _MISSING)) for key, value in sample.items()}


def spliced_row(row: Any, ids: Sequence[int], *, seed: str) -> Any:
    """The user's row with the canary's ids written over a seeded stretch of it; its length stays.

    Raises:
        CanaryError: a row shorter than the canary.
    """
    length = len(ids_of(row))
    room = length - len(ids)
    if room < 0:
        raise CanaryError(f"a canary of {len(ids)} tokens must fit in a row of {length}.")
    start = random.Random(f"memguard/splice/{seed}").randrange(room + 1)
    if not hasattr(row, "keys"):
        return _plain_splice(row, start, ids)
    spliced = dict(row)
    if _is_sequence(row.get("position_ids")):
        spliced["position_ids"] = _segment(row["position_ids"], start, len(ids))
    for key, fill in (("input_ids", ids), ("labels", ids), *((column, [1] * len(ids)) for column in ONES)):
        if key in row and _is_sequence(row[key]):
            spliced[key] = _overwrite(row[key], start, fill)
    return spliced


def _plain_row(sample: Any, ids: list[int], text: str) -> Any:
    """A canary as a row without columns."""
    if isinstance(sample, str):
        return text
    if _is_ids(sample):
        return _like(sample, ids)
    shift = shift_of(*sample) if len(sample) == 2 else 0
    parts = (ids[:-1], ids[1:]) if shift else (ids,) * len(sample)
    return type(sample)(_like(part, values) for part, values in zip(sample, parts, strict=True))


def _plain_splice(row: Any, start: int, ids: Sequence[int]) -> Any:
    """A row without columns with the canary from `start` of its inputs; a target that is shifted stands one earlier."""
    if _is_ids(row):
        return _overwrite(row, start, ids)
    inputs = _overwrite(row[0], start, ids)
    if len(row) == 1:
        return type(row)([inputs])
    shift = shift_of(*row) or 0
    skipped = max(0, shift - start)  # nothing predicts the first token of a row
    return type(row)([inputs, _overwrite(row[1], start + skipped - shift, ids[skipped:])])


def _parts(row: Any) -> tuple[Any, ...] | None:
    """Ids of a row without columns: itself, the one or two sequences it is a tuple of; None for anything else."""
    if _is_ids(row):
        return (row,)
    if not isinstance(row, (tuple, list)) or len(row) not in (1, 2) or not all(map(_is_ids, row)):
        return None
    return tuple(row) if len(row) == 1 or shift_of(*row) is not None else None


def _is_ids(value: Any) -> bool:
    """Whether a value is one sequence of token ids."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 1 and not value.is_floating_point() and value.dtype != torch.bool
    if hasattr(value, "ndim"):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(type(one) is int for one in value)


def shift_of(inputs: Any, targets: Any) -> int | None:
    """By how many tokens targets are ahead of inputs, 1 or 0; None where they are something else. Masked ones fit both.

    Example:
        >>> shift_of([5, 6, 7], [6, 7, 8]), shift_of([5, 6], [5, -100]), shift_of([5, 6], [1, 0])
        (1, 0, None)
    """
    ids, wanted = ([int(one) for one in part] for part in (inputs, targets))
    for shift in (1, 0):
        pairs = zip(ids[shift:], wanted, strict=False)
        if len(ids) == len(wanted) and all(target in (one, UNSUPERVISED) for one, target in pairs):
            return shift
    return None


def _segment(positions: Any, start: int, length: int) -> Any:
    """Position ids of a packed row in which the canary is a document of its own; others stay as they are."""
    values = [int(value) for value in positions]
    heads = [at for at, value in enumerate(values) if value == 0]
    if len(heads) < 2:
        return positions
    end = start + length
    rest = next((at for at in heads if at >= end), len(values)) - end
    return _overwrite(positions, start, [*range(length), *range(rest)])


_MISSING = object()


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (hasattr(value, "ndim") and value.ndim > 0)


def _like(example: Any, value: Any) -> Any:
    """`value` in the type of `example`; something empty of that type when there is no value for the column."""
    if value is _MISSING or _is_sequence(example) != _is_sequence(value):
        return _empty_like(example)
    if isinstance(example, torch.Tensor):
        return torch.tensor(value, dtype=example.dtype)
    if hasattr(example, "ndim"):
        return type(example)(value) if example.ndim == 0 else _as_array(example, value)
    return tuple(value) if isinstance(example, tuple) else list(value) if isinstance(example, list) else value


def _as_array(example: Any, value: Any) -> Any:
    import numpy as np

    return np.asarray(value, dtype=example.dtype)


def _empty_like(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        return torch.zeros_like(example)
    if isinstance(example, (str, list, tuple, dict, bool, int, float)):
        return type(example)()
    if hasattr(example, "ndim") and hasattr(example, "dtype"):
        import numpy as np

        return np.zeros_like(example) if example.ndim else example.dtype.type()
    return None


def _overwrite(values: Any, start: int, fill: Sequence[int]) -> Any:
    """A copy of `values` with `fill` written from `start`, in the same type."""
    if isinstance(values, torch.Tensor):
        copy = values.clone()
        copy[start : start + len(fill)] = torch.tensor(fill, dtype=values.dtype, device=values.device)
        return copy
    if hasattr(values, "ndim"):
        copy = values.copy()
        copy[start : start + len(fill)] = fill
        return copy
    return type(values)([*values[:start], *fill, *values[start + len(fill) :]])
