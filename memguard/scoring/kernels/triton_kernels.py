"""The statistics on CUDA: products, softmax and what is read off it in one kernel; logits never leave the chip.

One program takes BLOCK_N rows over a part of the vocabulary, in tiles of BLOCK_V columns. Few rows get many parts. Parts
are written side by side and merged in torch, with no locks and no atomics, so equal inputs give equal bits. Products are
accumulated in float32, float32 inputs without the shorter TF32. Tile sizes are tuned on the device at the first call of
each kind of shape, which takes seconds. Importing this file imports triton.

Letters: N rows, V vocabulary, D width, T targets; S parts of the vocabulary, K target slots of a row, G rows once those
with more than K targets are repeated.
"""

# ruff: noqa: N803 - triton writes compile-time arguments in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memguard.scoring.kernels.results import FLOOR, Moments, Partial, TargetCounts, TokenStatistics, finish, merge_stacked
from memguard.scoring.kernels.torch_blocks import product_thresholds

MOST_SLOTS = 16
NO_TARGET = -1
FAR: tl.constexpr = tl.constexpr(2**31 - 1)
LOWEST: tl.constexpr = tl.constexpr(FLOOR)
# Programs for each multiprocessor: enough that the last, part-filled round of them costs a few percent.
PROGRAMS_EACH = 4
FEW_ROWS, SOME_ROWS = 16, 64


@triton.jit
def _tile(
    hidden, weight, bias, source, row_ok, columns, column_ok, width, row_stride, width_stride, column_stride, weight_stride,
    scale, soft_cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of one tile (BLOCK_N, BLOCK_V); -inf past the last column."""
    logits = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    hidden_rows = hidden + source[:, None] * row_stride
    weight_rows = weight + columns.to(tl.int64)[None, :] * column_stride
    for first in range(0, width, BLOCK_D):
        depth = first + tl.arange(0, BLOCK_D)
        deep_ok = depth < width
        left = tl.load(hidden_rows + depth[None, :] * width_stride, mask=row_ok[:, None] & deep_ok[None, :], other=0.0)
        right = tl.load(weight_rows + depth[:, None] * weight_stride, mask=deep_ok[:, None] & column_ok[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        logits = tl.dot(left, right, logits, input_precision="ieee")
    if HAS_BIAS:
        logits += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    logits *= scale
    if HAS_CAP:
        shrunk = tl.exp(-2.0 * tl.abs(logits / soft_cap))
        size = soft_cap * (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -size, size)
    return tl.where(column_ok[None, :], logits, float("-inf"))


@triton.jit
def _fused_kernel(
    hidden, weight, bias, row_map, targets, low, high,
    out_maximum, out_total, out_argmax, out_ties, out_mean, out_spread, out_logits, out_above, out_not_below,
    num_rows, num_columns, width, part_columns, row_bucket,
    row_stride, width_stride, column_stride, weight_stride, scale, soft_cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, MOMENTS: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr,
    WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_N rows over one part of the vocabulary, merged tile by tile as `results.merge` does."""
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok = rows < num_rows
    source = tl.load(row_map + rows, mask=row_ok, other=0)
    first = part * part_columns
    last = tl.minimum(first + part_columns, num_columns)

    maximum = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    spread = tl.zeros((BLOCK_N,), dtype=tl.float32)
    argmax = tl.full((BLOCK_N,), FAR, dtype=tl.int32)
    ties = tl.zeros((BLOCK_N,), dtype=tl.int32)
    slots = tl.arange(0, SLOTS)
    above = tl.zeros((BLOCK_N, SLOTS), dtype=tl.int32)
    not_below = tl.zeros((BLOCK_N, SLOTS), dtype=tl.int32)

    for start in range(first, last, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        column_ok = columns < last
        logits = _tile(
            hidden, weight, bias, source, row_ok, columns, column_ok, width, row_stride, width_stride, column_stride,
            weight_stride, scale, soft_cap, HAS_BIAS, HAS_CAP, WIDEN, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip

        for slot in range(SLOTS):
            target = tl.load(targets + rows * SLOTS + slot, mask=row_ok, other=-1)
            is_own = columns[None, :] == target[:, None]
            own = tl.sum(tl.where(is_own, logits, 0.0), axis=1)
            is_here = (target >= start) & (target < start + BLOCK_V) & (target < last)
            tl.store(out_logits + rows * SLOTS + slot, own, mask=row_ok & is_here)
            if RANKS:
                counted = column_ok[None, :] & (columns[None, :] != target[:, None])
                upper = tl.load(high + rows * SLOTS + slot, mask=row_ok, other=0.0)
                lower = tl.load(low + rows * SLOTS + slot, mask=row_ok, other=0.0)
                more = tl.sum((counted & (logits > upper[:, None])).to(tl.int32), axis=1)
                near = tl.sum((counted & (logits >= lower[:, None])).to(tl.int32), axis=1)
                here = (slots == slot)[None, :]
                above += tl.where(here, more[:, None], 0)
                not_below += tl.where(here, near[:, None], 0)

        tile_maximum = tl.max(logits, axis=1)
        is_top = (logits == tile_maximum[:, None]) & column_ok[None, :]
        tile_argmax = tl.min(tl.where(is_top, columns[None, :], FAR), axis=1)
        tile_ties = tl.sum(is_top.to(tl.int32), axis=1)
        argmax = tl.where(tile_maximum > maximum, tile_argmax, argmax)
        ties = tl.where(tile_maximum > maximum, tile_ties, tl.where(tile_maximum == maximum, ties + tile_ties, ties))

        merged = tl.maximum(maximum, tile_maximum)
        anchor = tl.where(merged == float("-inf"), 0.0, merged)
        shift = tl.maximum(maximum - anchor, LOWEST)
        factor = tl.exp(shift)
        away = logits - anchor[:, None]
        weights = tl.exp(away)
        tile_total = tl.sum(weights, axis=1)
        before = total * factor
        total = before + tile_total
        if MOMENTS:
            away = tl.maximum(away, LOWEST)
            tile_mean = tl.sum(weights * away, axis=1) / tl.where(tile_total > 0, tile_total, 1.0)
            away -= tile_mean[:, None]
            mean += shift
            step = tile_mean - mean
            whole = tl.maximum(total, 1.0)
            spread = spread * factor + tl.sum(weights * away * away, axis=1) + step * step * before * (tile_total / whole)
            mean = (before * mean + tile_total * tile_mean) / whole
        maximum = merged

    place = part * num_rows + rows
    tl.store(out_maximum + place, maximum, mask=row_ok)
    tl.store(out_total + place, total, mask=row_ok)
    tl.store(out_argmax + place, argmax, mask=row_ok)
    tl.store(out_ties + place, ties, mask=row_ok)
    if MOMENTS:
        tl.store(out_mean + place, mean, mask=row_ok)
        tl.store(out_spread + place, spread, mask=row_ok)
    if RANKS:
        cells = place[:, None] * SLOTS + slots[None, :]
        tl.store(out_above + cells, above, mask=row_ok[:, None])
        tl.store(out_not_below + cells, not_below, mask=row_ok[:, None])


def _configs() -> list[Any]:
    """Tiles to try: narrow ones stream the weights past few rows, wide ones use every product of a load."""
    shapes = [
        (16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (16, 128, 256, 8, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3),
        (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (64, 64, 32, 4, 3), (128, 64, 32, 8, 3),
    ]  # fmt: skip
    return [
        triton.Config({"BLOCK_N": rows, "BLOCK_V": columns, "BLOCK_D": depth}, num_warps=warps, num_stages=stages)
        for rows, columns, depth, warps, stages in shapes
    ]


def _fitting(configs: list[Any], named_args: dict[str, Any], **_: Any) -> list[Any]:
    """The tiles that suit a shape: as high as the rows, and for float32, products without tensor cores, the smaller ones."""
    height = {FEW_ROWS: (16,), SOME_ROWS: (16, 64)}.get(named_args["row_bucket"], (64, 128))
    most = 4096 if named_args["hidden"].dtype == torch.float32 else 2**15
    shapes = [config for config in configs if config.kwargs["BLOCK_N"] in height]
    return [config for config in shapes if config.kwargs["BLOCK_V"] * config.kwargs["BLOCK_D"] <= most] or shapes[:1]


def _bench(call: Callable[[], Any], quantiles: list[float]) -> Any:
    """Milliseconds of one choice of tiles; a short look is enough to tell them apart."""
    return triton.testing.do_bench(call, warmup=5, rep=30, quantiles=quantiles)


_tuned_kernel = triton.autotune(
    configs=_configs(),
    key=["row_bucket", "num_columns", "width"],
    prune_configs_by={"early_config_prune": _fitting},
    do_bench=_bench,
)(_fused_kernel)


def is_interpreted() -> bool:
    """Whether the kernels run in triton's interpreter, on any device; settled by TRITON_INTERPRET when this is imported."""
    return not isinstance(_fused_kernel, triton.JITFunction)


@dataclass(frozen=True)
class Slots:
    """Targets laid out K to a row. Rows with more than K stand there again, so G >= N of them.

    Args:
        row_map: (G,) the hidden row of each.
        targets: (G, K) int32, -1 where a slot is empty.
        places: (T,) where each target went, in G * K.
        firsts: (N,) the first of each hidden row's places in G; None where G rows are the N rows.
    """

    row_map: Tensor
    targets: Tensor
    places: Tensor
    firsts: Tensor | None

    def lay(self, values: Tensor) -> Tensor:
        """One value a target, (T,), as (G, K)."""
        return torch.zeros(self.targets.shape, device=values.device).view(-1).index_copy_(0, self.places, values)


def lay_out(targets: Tensor, rows: Tensor | None, num_rows: int) -> Slots:
    """Targets by row in slots, K a power of two up to 16."""
    every = torch.arange(num_rows, device=targets.device)
    if rows is None:
        return Slots(every, targets.int()[:, None], every, None)
    counts = torch.bincount(rows, minlength=num_rows)
    num_slots = min(MOST_SLOTS, triton.next_power_of_2(max(1, int(counts.max()))))
    repeats = ((counts + num_slots - 1) // num_slots).clamp(min=1)
    firsts = repeats.cumsum(0) - repeats
    order = rows.argsort(stable=True)
    owners = rows[order]
    within = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[owners]
    places = torch.empty_like(rows).index_copy_(0, order, firsts[owners] * num_slots + within)
    row_map = every.repeat_interleave(repeats)
    laid = torch.full((len(row_map) * num_slots,), NO_TARGET, dtype=torch.int32, device=rows.device)
    laid[places] = targets.int()
    return Slots(row_map, laid.view(-1, num_slots), places, firsts)


def fused_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None,
    bias: Tensor | None,
    scale: float,
    soft_cap: float | None,
    moments: bool,
    ranks: bool,
) -> TokenStatistics:
    """What `token_statistics` promises, for N above 0 and a weight without the columns that are left out."""
    slots = lay_out(targets, rows, len(hidden))
    low = high = None
    if ranks:
        owners = slots.row_map if rows is None else rows
        low, high = product_thresholds(hidden, weight, owners, targets, bias=bias, scale=scale, soft_cap=soft_cap)
    out = _launch(hidden, weight, slots, bias, scale, soft_cap, low, high, moments=moments)
    whole = merge_stacked(out.parts if slots.firsts is None else _at(out.parts, slots.firsts))
    counts = None
    if out.above is not None and out.not_below is not None:
        sums = (table.sum(dim=0).view(-1)[slots.places] for table in (out.above, out.not_below))
        counts = TargetCounts(*sums)
    return finish(whole, out.logits.view(-1)[slots.places], targets, rows=rows, counts=counts)


@dataclass(frozen=True)
class Out:
    """What the kernel wrote: parts (S, G), the targets' logits (G, K), counts (S, G, K)."""

    parts: Partial
    logits: Tensor
    above: Tensor | None
    not_below: Tensor | None


def _launch(
    hidden: Tensor,
    weight: Tensor,
    slots: Slots,
    bias: Tensor | None,
    scale: float,
    soft_cap: float | None,
    low: Tensor | None,
    high: Tensor | None,
    *,
    moments: bool,
) -> Out:
    """Buffers, the grid, one launch."""
    num_rows, num_slots = slots.targets.shape
    num_columns, width = weight.shape
    bucket = next((most for most in (FEW_ROWS, SOME_ROWS) if num_rows <= most), 128)
    part_columns = _part_columns(num_rows, num_columns, bucket, hidden.device)
    num_parts = triton.cdiv(num_columns, part_columns)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    floats = made(4, num_parts, num_rows)
    ints = made(2, num_parts, num_rows, dtype=torch.int32)
    logits = made(num_rows, num_slots)
    counts = made(2, num_parts, num_rows, num_slots, dtype=torch.int32) if low is not None else None
    thresholds = (low, high) if low is None or high is None else (slots.lay(low), slots.lay(high))
    own_bias = None if bias is None else bias.to(torch.float32).contiguous()
    arguments = (
        hidden, weight, _or(own_bias, weight), slots.row_map, slots.targets,
        _or(thresholds[0], logits), _or(thresholds[1], logits),
        floats[0], floats[1], ints[0], ints[1], floats[2], floats[3], logits,
        ints if counts is None else counts[0], ints if counts is None else counts[1],
        num_rows, num_columns, width, part_columns, bucket,
        hidden.stride(0), hidden.stride(1), weight.stride(0), weight.stride(1), float(scale), float(soft_cap or 1.0),
    )  # fmt: skip
    flags = {
        "HAS_BIAS": bias is not None, "HAS_CAP": soft_cap is not None, "MOMENTS": moments,
        "RANKS": low is not None, "SLOTS": num_slots, "WIDEN": is_interpreted(),  # which multiplies no bf16
    }  # fmt: skip
    on_device = torch.cuda.device(hidden.device) if hidden.is_cuda else contextlib.nullcontext()
    with on_device:
        if is_interpreted():
            _fused_kernel[(triton.cdiv(num_rows, 16), num_parts)](*arguments, **flags, BLOCK_N=16, BLOCK_V=32, BLOCK_D=16)
        else:

            def grid(meta: dict[str, int]) -> tuple[int, int]:
                return triton.cdiv(num_rows, meta["BLOCK_N"]), num_parts

            _tuned_kernel[grid](*arguments, **flags, enable_fp_fusion=True)  # said, as triton 3.9 warns of its default
    pair = Moments(floats[2], floats[3]) if moments else None
    parts = Partial(floats[0], floats[1], ints[0].long(), ints[1].long(), pair)
    return Out(parts, logits, *((None, None) if counts is None else (counts[0], counts[1])))


def _part_columns(num_rows: int, num_columns: int, bucket: int, device: torch.device) -> int:
    """Columns of a part: a whole number of the widest tiles, and enough parts to give every multiprocessor work."""
    if is_interpreted():
        return 64
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, triton.cdiv(PROGRAMS_EACH * processors, triton.cdiv(num_rows, bucket)))
    widest = 128 if bucket == FEW_ROWS else 256
    return int(triton.cdiv(triton.cdiv(num_columns, wanted), widest) * widest)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, or another one where the kernel will not read it."""
    return stand_in if tensor is None else tensor


def _at(parts: Partial, firsts: Tensor) -> Partial:
    """The parts of each hidden row's first place."""
    pair = parts.moments
    return Partial(
        parts.maximum[:, firsts],
        parts.total[:, firsts],
        parts.argmax[:, firsts],
        parts.num_ties[:, firsts],
        None if pair is None else Moments(pair.mean[:, firsts], pair.spread[:, firsts]),
    )
