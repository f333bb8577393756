"""S3: exposure against validation loss, step by step, on a run that overfits.

Exposure is the mean over the canaries, in bits, by references; it is above chance once the family test of all canaries
stays at or below 0.001. Source: Carlini et al., The Secret Sharer: memorisation begins early and peaks
about where validation loss bottoms out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_runs import Cache, Finding, figure, mean_loss, pins, planted_rows, text_rows, tiny_llama, train

from memguard.metrics.family import FamilyGroup, pooled_test

CLAIM = "Exposure is above chance before validation loss turns: memorisation begins before overfitting."

SIGNIFICANCE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """Runs, training and validation rows, canaries and their copies an epoch, epochs, steps between looks, references."""

    seeds: int
    rows: int
    validation: int
    canaries: int
    copies: int
    epochs: int
    every: int
    references: int


FULL = Sizes(4, 320, 160, 8, 2, 24, 6, 512)
SMOKE = Sizes(1, 48, 16, 4, 4, 8, 4, 64)


def one_run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Train one model and look at it every few steps."""
    plan, runner = pins(seed, copies=sizes.copies, canaries=sizes.canaries, references=sizes.references)
    rows = text_rows()
    validation = rows[-sizes.validation :]
    model, curve = tiny_llama(seed=seed), []

    def look(step: int) -> None:
        if step % sizes.every == 0:
            found = runner.run(model).canaries
            bits = [row.exposure.bits for row in found if row.exposure.bits is not None]
            p_value = chance([row.num_references_above for row in found], sizes)
            curve.append([step, float(np.mean(bits)), mean_loss(model, validation), p_value])

    start = 600 * seed
    train(model, [*rows[start : start + sizes.rows], *planted_rows(plan)], epochs=sizes.epochs, seed=seed, on_step=look)
    return {"curve": curve}


def chance(num_above: list[int], sizes: Sizes) -> float:
    """p-value of the canaries as a family."""
    family = FamilyGroup(
        num_above=np.array(num_above),
        num_non_members=sizes.references,
        shared=True,
        p_values=np.ones(len(num_above)),
        rank_high=[10**9] * len(num_above),
        secret_space_size=10**9,
        is_certified=np.zeros(len(num_above), dtype=bool),
    )
    return pooled_test([family]).p_value


def run(sizes: Sizes, cache: Cache) -> Finding:
    """The step of the first exposure above chance, and that of the lowest validation loss, in every run."""
    rows, early = [], 0
    for seed in range(sizes.seeds):
        curve = cache.get("S3", one_run, sizes, seed)["curve"]
        best = min(curve, key=lambda point: point[2])
        quiet = [place for place, point in enumerate(curve) if point[3] > SIGNIFICANCE]
        first = quiet[-1] + 1 if quiet else 0
        above = curve[first][0] if first < len(curve) else None
        highest, last = max(point[1] for point in curve), curve[-1]
        early += above is not None and above < best[0]
        rows.append(
            (
                seed,
                "-" if above is None else above,
                best[0],
                figure(best[1]),
                figure(highest),
                f"{best[2]:.3f}",
                f"{last[2]:.3f}",
            )
        )
    turned = sum(float(row[5]) < float(row[6]) - 0.05 for row in rows)
    figures = {"num_early": early, "num_turned": turned, "num_runs": len(rows)}
    reason = (
        f"exposure is above chance for good before the lowest validation loss in {early} of {len(rows)} runs; validation loss "
        f"turned in {turned} of them."
    )
    columns = ("run", "above chance at step", "lowest loss at step", "bits there", "most bits", "lowest loss", "last loss")
    return Finding("S3", CLAIM, columns, tuple(rows), figures, early == turned == len(rows), reason)
