"""How many rows go into a forward pass: from a memory budget, halved when memory runs out, and failures that name an item.

With several ranks, `run` gives each a batch of its own, so many at a time as there are ranks, and every rank stores what all
of them found. Batches are cut as one process cuts them: the number of ranks changes no shape, and so no score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from memguard.scoring.failures import as_scoring_error, is_out_of_memory
from memguard.scoring.forward import CausalModel
from memguard.scoring.team import Outcome

T = TypeVar("T")
Found = TypeVar("Found")
CPU_BUDGET = 512 * 2**20  # bytes
CUDA_SHARE = 16  # of a device's memory: of the whole, not of what is free, so that runs meet the same batch shapes
MAX_ROWS = 256


class Batches:
    """Cuts work into batches.

    Args:
        model: what is run.
        max_rows: rows a batch at most; None leaves it to the memory budget.
        memory_budget: bytes for one forward pass; None takes 512 MiB on the CPU, 1/16 of the device elsewhere.
    """

    def __init__(self, model: CausalModel, *, max_rows: int | None, memory_budget: int | None) -> None:
        self.model = model
        own = memory_budget if memory_budget is not None else _default_budget(model.device)
        self.memory_budget = min(model.team.gather("memory budget", own))
        self.max_rows = max_rows or MAX_ROWS

    def rows(self, width: int) -> int:
        """Rows of `width` tokens that fit the budget, at least 1."""
        return max(1, min(self.max_rows, self.memory_budget // (max(1, width) * self.model.bytes_per_token())))

    def run(
        self,
        items: Sequence[T],
        work: Callable[[Sequence[T]], Found],
        store: Callable[[Sequence[T], Found], None],
        *,
        width: Callable[[T], int],
        label: Callable[[T], str],
        num_forwards: int = 1,
    ) -> None:
        """Run `work` over all items in batches, each as wide as its widest item allows; halve and repeat when memory runs out.

        Args:
            items: what to work on; alike on all ranks.
            work: gives what was found for a batch, as plain values: it runs on one rank, and all of them are sent the result.
            store: keeps what was found; called for every batch, in order, on every rank.
            width: tokens of an item.
            label: names an item in errors.
            num_forwards: forward passes of a batch, at most.

        Raises:
            ScoringError: one row does not fit, or the model fails; names the first item of the batch.
        """
        first = 0
        while first < len(items):
            batches = self._cut(items, first, width)
            outcomes = self._round(batches, work, label, num_forwards)
            if not self._have_room(batches, outcomes):
                release(self.model.device)
                continue
            for batch, outcome in zip(batches, outcomes, strict=False):
                store(batch, outcome.value)  # type: ignore[arg-type]
                first += len(batch)

    def each(
        self, items: Sequence[T], work: Callable[[Sequence[T]], None], *, width: Callable[[T], int], label: Callable[[T], str]
    ) -> None:
        """As `run`, but every rank runs every batch: for work that keeps in step itself."""
        first = 0
        while first < len(items):
            batch = items[first : first + self._size(items, first, width)]
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

    def _size(self, items: Sequence[T], first: int, width: Callable[[T], int]) -> int:
        return self.rows(max(width(item) for item in items[first : first + self.max_rows]))

    def _cut(self, items: Sequence[T], first: int, width: Callable[[T], int]) -> list[Sequence[T]]:
        """The next batches: one a rank, or one for all of them."""
        batches: list[Sequence[T]] = []
        while first < len(items) and len(batches) < (self.model.team.size if self.model.is_split else 1):
            batches.append(items[first : first + self._size(items, first, width)])
            first += len(batches[-1])
        return batches

    def _round(
        self,
        batches: Sequence[Sequence[T]],
        work: Callable[[Sequence[T]], Found],
        label: Callable[[T], str],
        num_forwards: int,
    ) -> list[Outcome[Found]]:
        mine = self.model.team.rank if self.model.is_split else 0
        batch = batches[mine] if mine < len(batches) else None
        return self.model.in_step(
            f"a batch of {len(batches[0])} rows",
            (lambda: work(batch)) if batch is not None else None,
            num_forwards=num_forwards,
            label=label(batch[0]) if batch is not None else "",
            num_rows=len(batch) if batch is not None else 0,
        )

    def _have_room(self, batches: Sequence[Sequence[T]], outcomes: Sequence[Outcome[Found]]) -> bool:
        """Whether every batch fitted; if not, the next ones are half as large. Raises what is no lack of room."""
        short = []
        for rank, outcome in enumerate(outcomes):
            size = len(batches[rank if self.model.is_split else 0]) if outcome.error is not None else 0
            if outcome.error is not None and not (is_out_of_memory(outcome.error) and size > 1):
                raise outcome.error from None
            short += [size] if outcome.error is not None else []
        if short:
            self.max_rows = math.ceil(min(short) / 2)
        return not short


def _default_budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // CUDA_SHARE
    return CPU_BUDGET


def release(device: torch.device) -> None:
    """Give freed blocks of an accelerator back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
