"""Shapes, dtypes, devices and ranges of what the kernels are given: everything is looked at, and raised once.

Letters: N rows, V vocabulary, D width, T targets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, soft_cap: float | None) -> None:
    """Raise `ValueError` unless hidden (N, D), weight (V, D) and bias (V,) make an output head."""
    faults = []
    if hidden.ndim != 2:
        faults.append(f"hidden must have shape (N, D), got {tuple(hidden.shape)}.")
    if weight.ndim != 2 or 0 in weight.shape:
        faults.append(f"weight must have shape (V, D) with no empty side, got {tuple(weight.shape)}.")
    elif hidden.ndim == 2 and hidden.shape[1] != weight.shape[1]:
        faults.append(f"hidden and weight must have the same width, got {tuple(hidden.shape)} and {tuple(weight.shape)}.")
    if hidden.dtype not in FLOATS or hidden.dtype != weight.dtype:
        faults.append(
            "hidden and weight must have one dtype of bfloat16, float16, float32 and float64, "
            f"got {_name(hidden)} and {_name(weight)}. Convert the smaller one."
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in FLOATS):
        faults.append(f"bias must be a float of shape ({len(weight)},), got {_name(bias)} {tuple(bias.shape)}.")
    if not (math.isfinite(scale) and scale > 0):
        faults.append(f"scale must be finite and above 0, got {scale}. A model that divides its logits has scale 1 / divisor.")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        faults.append(f"soft_cap must be finite and above 0, got {soft_cap}. None leaves logits uncapped.")
    faults += _devices(hidden=hidden, weight=weight, bias=bias)
    _raise(faults)


def check_logits(logits: Tensor) -> None:
    """Raise `ValueError` unless logits have shape (N, V) and a float dtype."""
    faults = []
    if logits.ndim != 2 or logits.shape[1] == 0:
        faults.append(f"logits must have shape (N, V) with V above 0, got {tuple(logits.shape)}.")
    if logits.dtype not in FLOATS:
        faults.append(f"logits must be bfloat16, float16, float32 or float64, got {_name(logits)}.")
    _raise(faults)


def check_sizes(vocabulary_size: int | None, block_size: int | None, num_columns: int) -> None:
    """Raise `ValueError` unless the vocabulary lies within the columns and a block holds one at least."""
    faults = []
    if vocabulary_size is not None and not 1 <= vocabulary_size <= num_columns:
        faults.append(f"vocabulary_size must be from 1 to the {num_columns} columns, got {vocabulary_size}.")
    if block_size is not None and block_size < 1:
        faults.append(f"block_size must be 1 or more, got {block_size}. None lets the shape choose.")
    _raise(faults)


def check_targets(targets: Tensor, rows: Tensor | None, *, like: Tensor, num_columns: int) -> None:
    """Raise `ValueError` unless targets and rows are int64, of one length, in range, and on the device of `like`."""
    faults = []
    for name, ids in (("targets", targets), ("rows", rows)):
        if ids is not None and (ids.ndim != 1 or ids.dtype != torch.int64):
            faults.append(f"{name} must be int64 of shape (T,), got {_name(ids)} {tuple(ids.shape)}.")
    if rows is None and targets.shape[:1] != like.shape[:1]:
        faults.append(
            f"targets must be one a row where rows is None, got {tuple(targets.shape)} for {len(like)} rows. "
            "Say in rows which row each belongs to."
        )
    if rows is not None and rows.shape != targets.shape:
        faults.append(f"rows must have the shape of targets, got {tuple(rows.shape)} and {tuple(targets.shape)}.")
    faults += _devices(hidden=like, targets=targets, rows=rows)
    _raise(faults)
    _raise(_ranges(targets, rows, num_rows=len(like), num_columns=num_columns))


def _ranges(targets: Tensor, rows: Tensor | None, *, num_rows: int, num_columns: int) -> list[str]:
    """What lies outside; one transfer from the device for all four ends."""
    if len(targets) == 0:
        return []
    ends = [*torch.aminmax(targets), *(() if rows is None else torch.aminmax(rows))]
    low, high, *of_rows = torch.stack(ends).tolist()
    faults = []
    if low < 0 or high >= num_columns:
        faults.append(
            f"targets must lie in 0..{num_columns - 1}, got {low}..{high}. "
            "Padded columns past vocabulary_size are no targets, and an ignored position is left out, not marked."
        )
    if of_rows and (of_rows[0] < 0 or of_rows[1] >= num_rows):
        faults.append(f"rows must lie in 0..{num_rows - 1}, got {of_rows[0]}..{of_rows[1]}.")
    return faults


def _devices(**tensors: Tensor | None) -> list[str]:
    places = {name: str(tensor.device) for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) <= 1:
        return []
    told = ", ".join(f"{name} on {place}" for name, place in places.items())
    return [f"all tensors must be on one device, got {told}."]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _raise(faults: list[str]) -> None:
    if faults:
        raise ValueError(" ".join(faults))
