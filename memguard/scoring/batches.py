"""How many rows go into a forward pass: from a memory budget, halved when memory runs out, and failures that name an item."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from memguard.errors import ScoringError
from memguard.scoring.forward import CausalModel

T = TypeVar("T")
CPU_BUDGET = 512 * 2**20  # bytes
CUDA_SHARE = 16  # of a device's memory: of the whole, not of what is free, so that runs meet the same batch shapes
MAX_ROWS = 256
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


class _NoRoomError(ScoringError):
    """One row of a batch within a batch does not fit: the outer one is to be halved."""


class Batches:
    """Cuts work into batches.

    Args:
        model: what is run.
        max_rows: rows a batch at most; None leaves it to the memory budget.
        memory_budget: bytes for one forward pass; None takes 512 MiB on the CPU, 1/16 of the device elsewhere.
    """

    def __init__(self, model: CausalModel, *, max_rows: int | None, memory_budget: int | None) -> None:
        self.model = model
        self.memory_budget = memory_budget if memory_budget is not None else _default_budget(model.device)
        self.max_rows = max_rows or MAX_ROWS

    def rows(self, width: int) -> int:
        """Rows of `width` tokens that fit the budget, at least 1."""
        return max(1, min(self.max_rows, self.memory_budget // (max(1, width) * self.model.bytes_per_token())))

    def run(
        self, items: Sequence[T], work: Callable[[Sequence[T]], None], *, width: Callable[[T], int], label: Callable[[T], str]
    ) -> None:
        """Run `work` over all items in batches, each as wide as its widest item allows; halve and repeat when memory runs out.

        Raises:
            ScoringError: one row does not fit, or the model fails; names the first item of the batch.
        """
        first = 0
        while first < len(items):
            size = self.rows(max(width(item) for item in items[first : first + self.max_rows]))
            batch = items[first : first + size]
            try:
                work(batch)
                first += len(batch)
            except Exception as error:
                if not (is_out_of_memory(error) and len(batch) > 1):
                    raise as_scoring_error(error, label(batch[0]), len(batch)) from None
                self.max_rows = math.ceil(len(batch) / 2)
            else:
                continue
            release(self.model.device)  # outside the handler, whose traceback holds the tensors


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | _NoRoomError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def as_scoring_error(error: Exception, label: str, rows: int) -> ScoringError:
    """The same failure as a `ScoringError` that names an item; a message of the model's own may hold token ids."""
    if isinstance(error, ScoringError):
        return error
    cure = "One row alone needs more memory than there is." if is_out_of_memory(error) else "The model itself raised it."
    kind = _NoRoomError if is_out_of_memory(error) else ScoringError
    return kind(f"scoring {label or 'a batch'} and {rows - 1} rows beside it failed with {type(error).__name__}. {cure}")


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // CUDA_SHARE
    return CPU_BUDGET


def release(device: torch.device) -> None:
    """Give freed blocks of an accelerator back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
