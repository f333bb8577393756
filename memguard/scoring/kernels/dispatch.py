"""The front of the kernels: checks what it is given and takes the fastest path that is there.

Paths: `torch` runs everywhere, `triton` on CUDA for bf16 and fp16 (fp32 only when named: cuBLAS multiplies fp32 better),
`reference` is the float64 oracle. They differ in rounding only.

Letters: N rows, V vocabulary, D width, T targets.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from memguard.errors import MissingExtraError
from memguard.scoring.kernels import checks
from memguard.scoring.kernels.reference import reference_statistics
from memguard.scoring.kernels.results import TokenStatistics
from memguard.scoring.kernels.torch_blocks import HeadBlocks, LogitBlocks, block_statistics

PATHS = ("auto", "torch", "triton", "reference")
OLDEST_CAPABILITY = (8, 0)  # bf16 products in hardware


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    vocabulary_size: int | None = None,
    moments: bool = False,
    ranks: bool = False,
    block_size: int | None = None,
    path: str = "auto",
) -> TokenStatistics:
    """Log-probabilities in nats, ranks and moments of next tokens, from hidden states, without the matrix of logits.

    Logits are `(hidden @ weight.T + bias) * scale`, then `soft_cap * tanh(logits / soft_cap)`: the order in which models
    apply them. Products are accumulated and kept in float32 (float64 for float64 inputs). A model that rounds its logits
    to bf16 has other ties and, in a few percent of rows, another argmax: ask `logit_statistics` what `generate` would do.
    No gradient flows.

    Args:
        hidden: (N, D) bf16, fp16, fp32 or float64; what the output head is given.
        weight: (V, D) of the same dtype.
        targets: (T,) int64 columns.
        rows: (T,) int64, the row each target belongs to, in any order, several targets a row or none. None: one each.
        bias: (V,) of any float dtype; -inf takes a column out.
        scale: factor of the logits, above 0.
        soft_cap: bound of the logits, above 0.
        vocabulary_size: columns at or past it are left out of the normaliser, the argmax, the ranks and the moments. None
            keeps the padded rows of a weight, as the model's own softmax and `generate` do.
        moments: also entropy, mean and variance of the log-probability.
        ranks: also the interval of each target's rank, in the same pass.
        block_size: columns of a block of the torch path, for tests; results differ by rounding only.
        path: "auto", "torch", "triton" or "reference".

    Returns:
        `TokenStatistics`, targets in the order they came in.

    Raises:
        ValueError: a shape, dtype, device or range that does not fit; names every one.
        MissingExtraError: path "triton" without triton.

    Example:
        >>> import torch
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> found = token_statistics(hidden, weight, torch.tensor([1]))
        >>> round(found.log_prob.item(), 4), found.is_greedy.item()  # 2 - ln(1 + e^2)
        (-0.1269, True)
    """
    checks.check_head(hidden, weight, bias, scale, soft_cap)
    checks.check_sizes(vocabulary_size, block_size, len(weight))
    num_columns = vocabulary_size or len(weight)
    checks.check_targets(targets, rows, like=hidden, num_columns=num_columns)
    taken = _settle(path, hidden)
    if taken == "triton" and len(hidden) == 0:  # a grid has no empty side
        taken = "torch"
    with torch.no_grad():
        if taken == "reference":
            return reference_statistics(
                hidden, weight, targets, rows=rows, bias=bias, scale=scale, soft_cap=soft_cap,
                vocabulary_size=num_columns, moments=moments, ranks=ranks,
            )  # fmt: skip
        if taken == "triton":
            from memguard.scoring.kernels.triton_kernels import fused_statistics

            return fused_statistics(
                hidden, weight[:num_columns], targets, rows=rows, bias=bias, scale=scale, soft_cap=soft_cap,
                moments=moments, ranks=ranks,
            )  # fmt: skip
        blocks = HeadBlocks(hidden, weight, bias=bias, scale=scale, soft_cap=soft_cap, num_columns=num_columns)
        return block_statistics(blocks, targets, rows=rows, moments=moments, ranks=ranks, block_size=block_size)


def logit_statistics(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    vocabulary_size: int | None = None,
    moments: bool = False,
    ranks: bool = False,
    block_size: int | None = None,
) -> TokenStatistics:
    """The same from logits (N, V) that a model computed: argmax and ranks are those of these very logits, ties included.

    Reduced in float32 (float64 for float64 logits) block by block, without a float32 copy of all of them. Ranks are
    exact: `rank_low` counts columns above the target, `rank_high` those equal to it as well.

    Args:
        logits: (N, V) bf16, fp16, fp32 or float64; left as they are.
        targets, rows, vocabulary_size, moments, ranks, block_size: as for `token_statistics`.

    Returns:
        `TokenStatistics`, targets in the order they came in.

    Raises:
        ValueError: a shape, dtype, device or range that does not fit; names every one.
    """
    checks.check_logits(logits)
    checks.check_sizes(vocabulary_size, block_size, logits.shape[1])
    num_columns = vocabulary_size or logits.shape[1]
    checks.check_targets(targets, rows, like=logits, num_columns=num_columns)
    with torch.no_grad():
        blocks = LogitBlocks(logits, num_columns=num_columns)
        return block_statistics(blocks, targets, rows=rows, moments=moments, ranks=ranks, block_size=block_size)


def choose_path(hidden_or_device: Tensor | torch.device | str) -> str:
    """The path that "auto" takes: "torch" or "triton". A device alone is asked about bf16 hidden states."""
    if isinstance(hidden_or_device, Tensor):
        is_half = hidden_or_device.dtype in (torch.bfloat16, torch.float16)
        return "triton" if is_half and why_not_triton(hidden_or_device.device) is None else "torch"
    return "triton" if why_not_triton(torch.device(hidden_or_device)) is None else "torch"


def describe_paths() -> list[str]:
    """What each device would take, in words, for `memguard doctor`."""
    lines = [f"cpu: vocabulary blocks in torch, float32 accumulation ({torch.get_num_threads()} threads)"]
    if not torch.cuda.is_available():
        return [*lines, "cuda: none here"]
    name = torch.cuda.get_device_name()
    reason = why_not_triton(torch.device("cuda"))
    if reason is None:
        return [*lines, f"cuda: triton kernels for bf16 and fp16, vocabulary blocks in torch for fp32 ({name})"]
    return [*lines, f"cuda: vocabulary blocks in torch ({name}); no triton kernels, because {reason}"]


def why_not_triton(device: torch.device) -> str | None:
    """Why a device cannot run the triton kernels, or None if it can."""
    if device.type != "cuda":
        return f"they run on cuda, not {device.type}"
    if torch.version.hip is not None:
        return "they were never tried on ROCm"
    if not _has_triton():
        return "triton is missing: pip install 'memguard-audit[triton]'"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"they need compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None


def _settle(path: str, hidden: Tensor) -> str:
    """The path to take, once "auto" is settled and a named path has been looked at."""
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    if path == "auto":
        return choose_path(hidden)
    if path == "triton":
        if not _has_triton():
            raise MissingExtraError("path 'triton'", "triton")
        from memguard.scoring.kernels.triton_kernels import is_interpreted

        reason = None if is_interpreted() else why_not_triton(hidden.device)
        if hidden.dtype == torch.float64:
            reason = "they hold no float64"
        if reason is not None:
            raise ValueError(f"path must be one that this device has, got 'triton', but {reason}. Take 'auto'.")
    return path


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
