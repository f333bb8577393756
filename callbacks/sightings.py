"""Counts, in a hook on the model itself, how often each canary is trained on (`canaries.verify`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from memguard.audit.planting import Planting
from memguard.scoring.audit_mode import innermost
from memguard.scoring.team import Team


class SightingCounter:
    """Counts the planted canaries in every batch the model is trained on.

    Args:
        planting: what is looked for.
        model: wrapped or not; the hook sits on the innermost module and reads `input_ids`.
    """

    def __init__(self, planting: Planting, model: Any) -> None:
        # without the framing ids, which a tokenizing collator may put elsewhere
        self._needles = {
            canary.id: np.asarray(ids[min(start, 1) : end], dtype=np.int64).tobytes()
            for canary, ids, (start, end) in zip(planting.canaries, planting.ids, planting.spans, strict=True)
        }
        self._counts: Counter[str] = Counter()
        self._marked: Counter[str] = Counter()
        self._handle = innermost(model).register_forward_pre_hook(self._count, with_kwargs=True)

    def total(self) -> dict[str, int]:
        """Sightings up to the last mark, over all ranks; every rank must ask."""
        together: Counter[str] = Counter()
        for counts in Team.current().gather("sightings", dict(self._marked)):
            together.update(counts)
        return {one: together[one] for one in self._needles}

    def mark(self) -> None:
        """Take what was counted so far as complete: micro-batches of an unfinished step are not."""
        self._marked = self._counts.copy()

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()

    def _count(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor):
            return
        for row in ids.detach().to("cpu", torch.int64).numpy().reshape(-1, ids.shape[-1]):
            hay = np.ascontiguousarray(row).tobytes()
            for one, needle in self._needles.items():
                self._counts[one] += _occurrences(hay, needle)


def _occurrences(hay: bytes, needle: bytes) -> int:
    """How often a run of 8-byte ids occurs, at whole ids."""
    count, at = 0, hay.find(needle)
    while at >= 0:
        count += at % 8 == 0
        at = hay.find(needle, at + 1)
    return count
