"""Q1: the share of passages that greedy decoding continues, against model size, copies and length of context.

Passages stand in the training data 1 to 64 times; extracted means that every one of the next 16 tokens is the likeliest.
Source: Carlini et al., Quantifying Memorization, arXiv 2202.07646: three log-linear slopes, all positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tiny_runs import LENGTH, Cache, Finding, figure, num_parameters, text_rows, tiny_llama, train

from memguard.metrics.scaling import LogLinearFit, fit_log_linear
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

CLAIM = "The extracted share rises with the logarithm of model size, of copies and of context; passages never trained on: none."
NEXT = 16  # tokens to be continued


@dataclass(frozen=True)
class Sizes:
    """Widths of the models, copies, lengths of context in tokens, passages of each number of copies, text rows, epochs."""

    widths: tuple[int, ...]
    copies: tuple[int, ...]
    contexts: tuple[int, ...]
    each: int
    rows: int
    epochs: int
    seeds: int


FULL = Sizes((32, 64, 128), (0, 1, 2, 4, 8, 16, 32, 64), (8, 16, 32, 48), 12, 500, 3, 1)
SMOKE = Sizes((16, 32, 64), (0, 4, 8, 16), (8, 16, 32), 1, 16, 6, 1)


def one_run(sizes: Sizes, width: int, seed: int) -> dict[str, Any]:
    """Train one model; the extracted share for every number of copies and length of context."""
    rows = text_rows()
    first = seed * len(sizes.copies) * sizes.each
    passages = {
        copies: rows[first + place * sizes.each : first + (place + 1) * sizes.each] for place, copies in enumerate(sizes.copies)
    }
    planted = [row for copies, mine in passages.items() for row in mine for _ in range(copies)]
    background = rows[1000 : 1000 + sizes.rows]
    model = tiny_llama(width=width, seed=seed)
    train(model, [*background, *planted], epochs=sizes.epochs, seed=seed)
    cells = []
    with audit_mode(model):
        scorer = Scorer(model)
        for context in sizes.contexts:
            start = LENGTH - NEXT - context
            for copies, mine in passages.items():
                greedy = scorer.score([Span(row[start:], context, context + NEXT) for row in mine]).is_greedy
                cells.append([context, copies, int(greedy.sum()), len(mine)])
    return {"parameters": num_parameters(model), "cells": cells}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Shares over all other factors, by each factor in turn, and a line through them."""
    cells = []
    for width in sizes.widths:
        for seed in range(sizes.seeds):
            found = cache.get("Q1", one_run, sizes, width, seed)
            cells += [(found["parameters"], *cell) for cell in found["cells"]]
    rows: list[tuple[Any, ...]] = []
    fits: dict[str, LogLinearFit] = {}
    for name, place in (("parameters", 0), ("context", 1), ("copies", 2)):
        points = []
        for level in sorted({cell[place] for cell in cells if cell[2] > 0}):
            mine = [cell for cell in cells if cell[place] == level and cell[2] > 0]
            points.append((level, sum(cell[3] for cell in mine) / sum(cell[4] for cell in mine)))
        fits[name] = fit_log_linear([level for level, _ in points], [share for _, share in points])
        shares = ", ".join(f"{level:g}: {share:.0%}" for level, share in points)
        fit = fits[name]
        r_squared = "-" if math.isnan(fit.r_squared) else figure(fit.r_squared)
        rows.append((name, shares, figure(fit.slope), f"{fit.low:.2f} to {fit.high:.2f}", r_squared))
    never = [cell for cell in cells if cell[2] == 0]
    control = sum(cell[3] for cell in never) / sum(cell[4] for cell in never)
    rows.append(("never trained on", f"{control:.1%}", "-", "-", "-"))
    figures = {
        "slopes": {name: fit.slope for name, fit in fits.items()},
        "low": {name: fit.low for name, fit in fits.items()},
        "r_squared": {name: None if math.isnan(fit.r_squared) else fit.r_squared for name, fit in fits.items()},
        "control_share": control,
    }
    rising = [name for name, fit in fits.items() if fit.slope > 0]
    slopes = ", ".join(f"{name} {fit.slope:+.2f} (R^2 {fit.r_squared:.2f})" for name, fit in fits.items())
    reason = f"slopes a tenfold: {slopes}; {control:.1%} of passages never trained on (paper: +.19 a tenfold of parameters)."
    columns = ("factor", "extracted share by level", "slope a tenfold", "95% interval", "R^2")
    return Finding("Q1", CLAIM, columns, tuple(rows), figures, len(rising) == 3 and control <= 0.02, reason)
