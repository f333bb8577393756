"""Rows of the training data with a canary in them: a row of its own that looks like the user's, or one written into.

Knows the columns that trainers and packers use. Of a column of the user's own, a canary's row takes numbers as they are in the
user's row, a value a token as the largest there, and something empty for the rest. Targets may be the ids themselves or the
next ones. A row may also be plain: a text, a sequence of ids, or inputs with their targets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from memguard.errors import CanaryError

ONES = ("attention_mask", "completion_mask", "assistant_masks", "loss_mask")
ZEROS = ("token_type_ids", "special_tokens_mask")
UNSUPERVISED = -100
LENGTHS = ("length", "num_tokens", "seq_len")
KNOWN = (*ONES, *ZEROS, *LENGTHS, "position_ids", "seq_lengths")


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
    wanted = target_columns(sample)
    shift = max(wanted.values(), default=0)
    targets = list(ids)[shift:]
    ids = list(ids)[: len(ids) - shift]
    rest = max(0, pad_to - len(ids))
    size = len(ids) + rest
    values: dict[str, Any] = {
        "input_ids": ids + [pad_id] * rest,
        **{column: (targets if by else ids) + [UNSUPERVISED] * rest for column, by in wanted.items()},
        "position_ids": list(range(size)),
        "seq_lengths": [size],
        "text": text,
        **{column: [1] * len(ids) + [0] * rest for column in ONES},
        **{column: [0] * size for column in ZEROS},
        **dict.fromkeys(LENGTHS, size),
    }
    length = len(sample["input_ids"]) if "input_ids" in sample else 0
    own = {key: _of_a_user(value, length, size) for key, value in _unknown(sample, values).items()}
    return {key: _like(value, values[key]) if key in values else own[key] for key, value in sample.items()}


def made_up_columns(sample: Any) -> list[str]:
    """Columns of the user's own, of whose values a canary's own row can only take a likely one.

    Example:
        >>> made_up_columns({"input_ids": [5, 6], "labels": [5, 6], "weight": 0.5})
        ['weight']
    """
    if not hasattr(sample, "keys") or "input_ids" not in sample:
        return []
    known = canary_row(sample, [1, 2], "")
    return [key for key in _unknown(sample, {}) if key in known and not isinstance(sample[key], str)]


def target_columns(row: Any) -> dict[str, int]:
    """Columns that hold what is to be predicted, and by how many tokens they are ahead of `input_ids`: 0 or 1.

    `labels` always; any other of ids where it is the inputs or the next ids.

    Example:
        >>> target_columns({"input_ids": [5, 6, 7], "targets": [6, 7, 8], "labels": [-100, 6, 7]})
        {'targets': 1, 'labels': 0}
    """
    found: dict[str, int] = {}
    inputs = row.get("input_ids")
    for key, value in row.items():
        if key == "input_ids" or key in KNOWN or not _is_sequence(value):
            continue
        shift = None
        if _is_ids(inputs) and _is_ids(value) and any(int(one) != UNSUPERVISED for one in value):
            shift = next((by for by in (0, 1) if _is_ahead(inputs, value, by)), None)
        if shift is not None or key == "labels":
            found[key] = shift or 0
    return found


def _unknown(sample: Any, values: Any) -> dict[str, Any]:
    """Columns that neither trainers nor packers know."""
    known = {"input_ids", "labels", "text", *KNOWN, *values, *target_columns(sample)}
    return {key: value for key, value in sample.items() if key not in known}


def _of_a_user(value: Any, row_length: int, size: int) -> Any:
    """What a column of the user's own holds for a canary: its number, its largest value a token, or something empty."""
    is_number = isinstance(value, (bool, int, float)) or (hasattr(value, "ndim") and value.ndim == 0)
    if is_number:
        return value
    if _is_sequence(value) and getattr(value, "ndim", 1) == 1 and len(value) == row_length > 0:
        listed = value.tolist() if hasattr(value, "tolist") else list(value)
        if all(isinstance(one, (bool, int, float)) for one in listed):
            return _like(value, [max(listed)] * size)
    return _empty_like(value)


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
    for key, fill in (("input_ids", ids), *((column, [1] * len(ids)) for column in ONES)):
        if key in row and _is_sequence(row[key]):
            spliced[key] = _overwrite(row[key], start, fill)
    for key, shift in target_columns(row).items():
        if _is_sequence(row[key]):
            skipped = max(0, shift - start)  # nothing predicts the first token of a row
            spliced[key] = _overwrite(row[key], start + skipped - shift, ids[skipped:])
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
    return next((shift for shift in (1, 0) if _is_ahead(inputs, targets, shift)), None)


def _is_ahead(inputs: Any, targets: Any, shift: int) -> bool:
    """Whether targets are the inputs `shift` tokens further on, where they are not masked."""
    ids, wanted = ([int(one) for one in part] for part in (inputs, targets))
    pairs = zip(ids[shift:], wanted, strict=False)
    return len(ids) == len(wanted) and all(target in (one, UNSUPERVISED) for one, target in pairs)


def _segment(positions: Any, start: int, length: int) -> Any:
    """Position ids of a packed row in which the canary is a document of its own; others stay as they are."""
    values = [int(value) for value in positions]
    heads = [at for at, value in enumerate(values) if value == 0]
    if len(heads) < 2:
        return positions
    end = start + length
    rest = next((at for at in heads if at >= end), len(values)) - end
    return _overwrite(positions, start, [*range(length), *range(rest)])


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (hasattr(value, "ndim") and value.ndim > 0)


def _like(example: Any, value: Any) -> Any:
    """`value` in the type of `example`; something empty of that type where it is of another shape."""
    if _is_sequence(example) != _is_sequence(value):
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
