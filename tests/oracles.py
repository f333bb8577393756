"""Slow and obvious ways to the same numbers, for tests to compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch


def span_log_prob(model: Any, ids: tuple[int, ...], start: int, end: int) -> float:
    """log P(ids[start:end] | ids[:start]) in float64, one row alone, token by token; nats."""
    exact = copy.deepcopy(model).double().eval()
    total = 0.0
    with torch.no_grad():
        for place in range(start, end):
            logits = exact(input_ids=torch.tensor([ids[:place]])).logits[0, -1]
            total += float(torch.log_softmax(logits, dim=-1)[ids[place]])
    return total


def count_sightings(rows: torch.Tensor, needles: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """How often each id sequence stands in the rows of a batch, shape (batch, length)."""
    counts = dict.fromkeys(needles, 0)
    for row in rows.tolist():
        text = "," + ",".join(map(str, row)) + ","
        for name, needle in needles.items():
            counts[name] += text.count("," + ",".join(map(str, needle)) + ",")
    return counts
