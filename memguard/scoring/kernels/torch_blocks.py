"""The statistics on any device, one block of rows and vocabulary at a time, in plain torch.

Logits of a block go into a buffer that every block uses again, so extra memory is a few blocks whatever N and V are: about
13 MB where a CPU's plain log-softmax of 2,048 rows and 49,152 columns takes 800. bf16 and fp16 weights are taken to float32
a block at a time, so products are accumulated and kept in float32. No gradient flows.

Letters: N rows, V vocabulary, D width, T targets; R rows and B columns of one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memguard.scoring.kernels.results import (
    FLOOR,
    NO_COLUMN,
    Moments,
    Partial,
    TargetCounts,
    TokenStatistics,
    finish,
    finite_anchor,
    merge,
)

# By one CPU thread at N 2,048, D 576, V 49,152: 6 MB of logits, 768 columns of as many rows as there are, and 4 MB of
# upcast weights. With 512 rows a block the weights are laid out again for each chunk of rows, and a tenth of the speed goes.
CPU_ROWS, CPU_BLOCK, CPU_UPCAST = 2048, 2048 * 768, 2**20
# An accelerator wants blocks that fill it: 128 MB of logits, 256 MB of upcast weights.
DEVICE_ROWS, DEVICE_BLOCK, DEVICE_UPCAST = 4096, 2**25, 2**26
# float32 counts ones exactly up to here.
WIDEST = 2**24


class Blocks(Protocol):
    """Where logits come from."""

    num_rows: int
    num_columns: int
    upcast_width: int
    dtype: torch.dtype
    device: torch.device

    def open(self, first: int, last: int) -> None:
        """Make columns first..last ready."""

    def write(self, out: Tensor, start: int, stop: int) -> None:
        """Logits of rows start..stop in the open columns."""

    def thresholds(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's logit less and plus the rounding band."""


class HeadBlocks:
    """Logits computed from hidden states (N, D) and the output weight (V, D)."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        scale: float,
        soft_cap: float | None,
        num_columns: int,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight[:num_columns], bias
        self.scale, self.soft_cap = scale, soft_cap
        self.num_rows, self.num_columns, self.device = len(hidden), num_columns, hidden.device
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.upcast_width = 0 if weight.dtype == self.dtype else weight.shape[1]

    def open(self, first: int, last: int) -> None:
        self._columns = self.weight[first:last].to(self.dtype).T
        self._bias = None if self.bias is None else self.bias[first:last].to(self.dtype)

    def write(self, out: Tensor, start: int, stop: int) -> None:
        rows = self.hidden[start:stop].to(self.dtype)
        if self._bias is None:
            torch.mm(rows, self._columns, out=out)
        else:
            torch.addmm(self._bias, rows, self._columns, out=out)
        adjust_(out, self.scale, self.soft_cap)

    def thresholds(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return product_thresholds(
            self.hidden, self.weight, rows, targets, bias=self.bias, scale=self.scale, soft_cap=self.soft_cap
        )


class LogitBlocks:
    """Logits (N, V) that the model computed: copied a block at a time; their order is exact, so the band is empty."""

    def __init__(self, logits: Tensor, *, num_columns: int) -> None:
        self.logits, self.num_rows, self.num_columns, self.device = logits, len(logits), num_columns, logits.device
        self.dtype, self.upcast_width = torch.promote_types(logits.dtype, torch.float32), 0

    def open(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def write(self, out: Tensor, start: int, stop: int) -> None:
        out.copy_(self.logits[start:stop, self._first : self._last])

    def thresholds(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        exact = self.logits[rows, targets].to(self.dtype)
        return exact, exact


def adjust_(logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """Scale, then cap, in place and in the model's own order."""
    if scale != 1.0:
        logits.mul_(scale)
    if soft_cap is not None:
        logits.div_(soft_cap).tanh_().mul_(soft_cap)
    return logits


def rounding_unit(dtype: torch.dtype) -> float:
    """The spacing of products: the dtype's epsilon, or that of the shorter format torch may use inside float32 products."""
    if dtype == torch.float64:
        return torch.finfo(torch.float64).eps
    inside = {"high": 2.0**-10, "medium": 2.0**-7}
    return inside.get(torch.get_float32_matmul_precision(), torch.finfo(torch.float32).eps)


def product_thresholds(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Each target's logit t, by a dot of its own, less and plus a band that two roundings cannot cross; (T,) each.

    band = eps * (2 * sqrt(D) * scale * |h| * max |w| + 8 * max(|t|, cap)), with Euclidean norms and the largest over the
    vocabulary. Roundings of random sign give a product that is summed one by one an error of sqrt(D) * eps/2 * |h| |w|:
    the first term is twice that of two products, the second covers bias, scale and cap. At D 576 and unit norms the band
    is 6e-6.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    step = _slice_rows(hidden)
    exact = torch.empty(len(targets), dtype=dtype, device=hidden.device)
    norms = torch.empty_like(exact)
    for first in range(0, len(targets), step):
        part = slice(first, first + step)
        own = hidden[rows[part]].to(dtype)
        torch.linalg.vector_norm(own, dim=1, out=norms[part])
        torch.sum(own.mul_(weight[targets[part]]), dim=1, out=exact[part])
    if bias is not None:
        exact += bias[targets].to(dtype)
    adjust_(exact, scale, soft_cap)
    size = exact.abs().nan_to_num(nan=0.0, posinf=0.0).clamp(min=soft_cap or 0.0)
    band = rounding_unit(dtype) * (2 * math.sqrt(hidden.shape[1]) * scale * norms * longest_row(weight) + 8 * size)
    return exact - band, exact + band


def longest_row(weight: Tensor) -> Tensor:
    """The largest Euclidean norm of a row, a slice at a time: a norm in another dtype may copy its input."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    parts = torch.split(weight, _slice_rows(weight))
    return torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=dtype).amax() for part in parts]).amax()


def _slice_rows(wide: Tensor) -> int:
    """Rows of a matrix that may be taken to another dtype at once."""
    return max(1, (CPU_UPCAST if wide.device.type == "cpu" else DEVICE_UPCAST) // wide.shape[1])


@dataclass(frozen=True)
class Chunk:
    """Rows start..stop, and their targets: columns, owning rows counted from `start`, rank thresholds."""

    start: int
    stop: int
    targets: Tensor
    owners: Tensor
    is_one_each: bool
    low: Tensor | None
    high: Tensor | None


class Running:
    """What is known of a chunk's rows and targets after the blocks seen so far."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype, *, ranks: bool) -> None:
        self.whole: Partial | None = None
        self.logits = torch.full(chunk.targets.shape, torch.nan, dtype=dtype, device=chunk.targets.device)
        self.above = torch.zeros_like(chunk.targets) if ranks else None
        self.not_below = torch.zeros_like(chunk.targets) if ranks else None

    def add(self, part: Partial) -> None:
        self.whole = part if self.whole is None else merge(self.whole, part)


def block_statistics(
    blocks: Blocks, targets: Tensor, *, rows: Tensor | None, moments: bool, ranks: bool, block_size: int | None
) -> TokenStatistics:
    """The statistics of every row and target; `rows` None means one target a row, in order."""
    num_rows, width = block_shape(blocks, block_size)
    order, chunks = _chunks(blocks, targets, rows, num_rows, ranks=ranks)
    running = [Running(chunk, blocks.dtype, ranks=ranks) for chunk in chunks]
    buffers = torch.empty(3 if moments else 2, num_rows * width, dtype=blocks.dtype, device=blocks.device)
    falling = torch.arange(width, 0, -1, dtype=blocks.dtype, device=blocks.device)
    for first in range(0, blocks.num_columns, width):
        last = min(first + width, blocks.num_columns)
        blocks.open(first, last)
        for chunk, state in zip(chunks, running, strict=True):
            shape = (chunk.stop - chunk.start, last - first)
            views = [buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers]
            blocks.write(views[0], chunk.start, chunk.stop)
            _read_targets(views[0], views[1], chunk, state, first, is_whole=width == blocks.num_columns)
            state.add(_reduce(views, falling[width - shape[1] :], first, state.whole))
    return _gather(running, targets, rows, order)


def block_shape(blocks: Blocks, block_size: int | None) -> tuple[int, int]:
    """Rows and columns of a block: few rows get wide blocks, wide weights that must be upcast get narrow ones."""
    is_cpu = blocks.device.type == "cpu"
    most_rows, most_logits, most_upcast = (
        (CPU_ROWS, CPU_BLOCK, CPU_UPCAST) if is_cpu else (DEVICE_ROWS, DEVICE_BLOCK, DEVICE_UPCAST)
    )
    num_rows = max(1, min(blocks.num_rows, most_rows))
    width = most_logits // num_rows
    if blocks.upcast_width:
        width = min(width, max(256, most_upcast // blocks.upcast_width))
    return num_rows, min(blocks.num_columns, WIDEST, block_size or max(64, width // 64 * 64))


def _chunks(
    blocks: Blocks, targets: Tensor, rows: Tensor | None, most_rows: int, *, ranks: bool
) -> tuple[Tensor | None, list[Chunk]]:
    """The rows in chunks, each with its own targets; and the order that put the targets by row, None if they stay."""
    order = None
    starts = range(0, max(1, blocks.num_rows), most_rows)
    bounds = [*starts, blocks.num_rows]
    edges = bounds
    if rows is not None:
        edges = [0, len(targets)]
        if len(starts) > 1:
            order = rows.argsort(stable=True)
            rows, targets = rows[order], targets[order]
            edges = torch.searchsorted(rows, torch.tensor(bounds, device=rows.device)).tolist()
    owners = torch.arange(len(targets), device=targets.device) if rows is None else rows
    low, high = blocks.thresholds(owners, targets) if ranks else (None, None)
    chunks = []
    for number, start in enumerate(starts):
        part = slice(edges[number], edges[number + 1])
        within = (None, None) if low is None or high is None else (low[part], high[part])
        chunks.append(Chunk(start, bounds[number + 1], targets[part], owners[part] - start, rows is None, *within))
    return order, chunks


def _read_targets(logits: Tensor, scratch: Tensor, chunk: Chunk, state: Running, first: int, *, is_whole: bool) -> None:
    """The targets' logits out of a block, and how many of its columns are above and not below each target."""
    width = logits.shape[1]
    if is_whole:
        inside: Tensor | bool = True
        own = state.logits = logits[chunk.owners, chunk.targets]
    else:
        places = chunk.targets - first
        inside = (places >= 0) & (places < width)
        own = logits[chunk.owners, places.clamp(0, width - 1)]
        state.logits = torch.where(inside, own, state.logits)
    if chunk.low is None or chunk.high is None or state.above is None or state.not_below is None:
        return
    owners = None if chunk.is_one_each else chunk.owners
    state.above += _count(logits, scratch, owners, chunk.high, strict=True) - (inside & (own > chunk.high)).long()
    state.not_below += _count(logits, scratch, owners, chunk.low, strict=False) - (inside & (own >= chunk.low)).long()


def _count(logits: Tensor, scratch: Tensor, owners: Tensor | None, thresholds: Tensor, *, strict: bool) -> Tensor:
    """For each target, columns above a threshold, or at it as well. Sums of float ones are ten times faster than of bools."""
    if owners is None:
        compare = torch.gt if strict else torch.ge
        return compare(logits, thresholds[:, None], out=scratch).sum(dim=1).long()
    counts = []
    for part, bound in zip(torch.split(owners, len(scratch)), torch.split(thresholds, len(scratch)), strict=True):
        picked = torch.index_select(logits, 0, part, out=scratch[: len(part)])
        picked = picked.gt_(bound[:, None]) if strict else picked.ge_(bound[:, None])
        counts.append(picked.sum(dim=1))
    return torch.cat(counts).long()


def _reduce(views: list[Tensor], falling: Tensor, first: int, before: Partial | None) -> Partial:
    """Statistics of one block of logits, which are overwritten."""
    logits, scratch = views[0], views[1]
    maximum = logits.amax(dim=1)
    argmax, num_ties = _find_tops(logits, maximum, scratch, falling, first, before)
    logits.sub_(finite_anchor(maximum)[:, None])
    if len(views) == 2:
        return Partial(maximum, logits.exp_().sum(dim=1), argmax, num_ties)
    weights = torch.exp(logits.clamp_(min=FLOOR), out=scratch)
    total = weights.sum(dim=1)
    mean = torch.mul(weights, logits, out=views[2]).sum(dim=1) / total.clamp(min=1)
    spread = logits.sub_(mean[:, None]).square_().mul_(weights).sum(dim=1)
    return Partial(maximum, total, argmax, num_ties, Moments(mean, spread))


def _find_tops(
    logits: Tensor, maximum: Tensor, scratch: Tensor, falling: Tensor, first: int, before: Partial | None
) -> tuple[Tensor, Tensor]:
    """Column of each row's first maximum and how many equal it, for rows whose maximum reaches the one before.

    The others' are never read; of B blocks a row reaches it in about ln B. `falling` counts down to 1: its largest entry
    at a maximum marks the first, at a tenth of what an argmax of float32 costs.
    """
    rows = None if before is None else (maximum >= before.maximum).nonzero().squeeze(1)
    if rows is None:
        is_top = torch.eq(logits, maximum[:, None], out=scratch)
    else:
        is_top = torch.index_select(logits, 0, rows, out=scratch[: len(rows)]).eq_(maximum[rows][:, None])
    num_ties = is_top.sum(dim=1).long()
    argmax = first + logits.shape[1] - is_top.mul_(falling).amax(dim=1).long()
    if rows is None:
        return argmax, num_ties
    unread = torch.full_like(maximum, NO_COLUMN, dtype=torch.long)
    return unread.index_copy(0, rows, argmax), unread.index_copy(0, rows, num_ties)


def _gather(running: list[Running], targets: Tensor, rows: Tensor | None, order: Tensor | None) -> TokenStatistics:
    """The chunks side by side, targets back in the order they came in."""

    def join(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def in_order(parts: list[Tensor]) -> Tensor:
        joined = join(parts)
        return joined if order is None else torch.empty_like(joined).index_copy_(0, order, joined)

    wholes = [state.whole for state in running if state.whole is not None]
    pairs = [part.moments for part in wholes if part.moments is not None]
    whole = Partial(
        maximum=join([part.maximum for part in wholes]),
        total=join([part.total for part in wholes]),
        argmax=join([part.argmax for part in wholes]),
        num_ties=join([part.num_ties for part in wholes]),
        moments=Moments(join([pair.mean for pair in pairs]), join([pair.spread for pair in pairs])) if pairs else None,
    )
    above = [state.above for state in running if state.above is not None]
    not_below = [state.not_below for state in running if state.not_below is not None]
    counts = TargetCounts(in_order(above), in_order(not_below)) if above else None
    return finish(whole, in_order([state.logits for state in running]), targets, rows=rows, counts=counts)
