"""D2: de-duplication, DP-SGD and early stopping on one plan: what each takes off the exposure of the same canaries, in bits.

Differences are paired by canary. Sources: Carlini et al., The Secret Sharer (DP ends memorisation, early stopping does not)
and Quantifying Memorization (de-duplication helps what is repeated). The DP run needs the extra `dp`.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_training import Privacy, train_adam
from tiny_runs import Cache, Finding, figure, mean_loss, pins, planted_rows, text_rows, tiny_llama

from memguard.audit.runner import AuditRunner
from memguard.metrics.differences import DifferenceEstimate, estimate_paired_difference

CLAIM = "De-duplication and DP-SGD each lower the exposure of repeated canaries; early stopping lowers it without ending it."
WAYS = ("plain", "deduplicated", "early stopping", "DP")
PRIVACY = Privacy(noise=0.5, clip=1.0, delta=1e-3)


@dataclass(frozen=True)
class Sizes:
    """Runs, canaries and their copies, text and validation rows, epochs, references."""

    seeds: int
    canaries: int
    copies: int
    rows: int
    validation: int
    epochs: int
    references: int


FULL = Sizes(2, 20, 6, 256, 64, 12, 4096)
SMOKE = Sizes(1, 4, 4, 16, 8, 4, 256)


def one_run(sizes: Sizes, seed: int, ways: tuple[str, ...]) -> dict[str, Any]:
    """Every way of training on one plan; exposures of its canaries and the loss on other text."""
    plan, runner = pins(seed, copies=sizes.copies, canaries=sizes.canaries, references=sizes.references)
    rows = text_rows()
    text, validation = rows[: sizes.rows], rows[-sizes.validation :]
    planted = {"deduplicated": planted_rows(plan, {canary.id: 1 for canary in plan.planted()})}
    found: dict[str, Any] = {}
    for way in ways:
        if way == "early stopping":
            continue  # the best epoch of the plain run
        model = tiny_llama(seed=seed, tied=False)
        losses: list[float] = []
        best: list[dict[str, Any]] = []

        def keep_best(model: Any = model, losses: list[float] = losses, best: list[dict[str, Any]] = best) -> None:
            losses.append(mean_loss(model, validation))
            if losses[-1] == min(losses):
                best[:] = [copy.deepcopy(model.state_dict())]

        train_adam(
            model,
            [*text, *planted.get(way, planted_rows(plan))],
            epochs=sizes.epochs,
            batch=32,
            learning_rate=3e-3,
            seed=seed,
            privacy=PRIVACY if way == "DP" else None,
            on_epoch=keep_best if way == "plain" else None,
        )
        found[way] = _look(runner, model, mean_loss(model, validation))
        if way == "plain":
            model.load_state_dict(best[0])
            found["early stopping"] = _look(runner, model, min(losses)) | {"epoch": losses.index(min(losses)) + 1}
    return found


def _look(runner: AuditRunner, model: Any, loss: float) -> dict[str, Any]:
    bits = [row.exposure.bits for row in runner.run(model).canaries if row.exposure.bits is not None]
    return {"bits": bits, "loss": loss}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Differences from the plain run over the canaries of all runs."""
    ways = WAYS if importlib.util.find_spec("opacus") is not None else WAYS[:-1]
    runs = [cache.get("D2", one_run, sizes, seed, ways) for seed in range(sizes.seeds)]
    bits = {way: np.concatenate([one[way]["bits"] for one in runs]) for way in ways}
    rows: list[tuple[Any, ...]] = []
    drops: dict[str, DifferenceEstimate] = {}
    for way in ways:
        loss = float(np.mean([one[way]["loss"] for one in runs]))
        if way == "plain":
            rows.append((way, figure(bits[way].mean()), "-", "-", figure(loss)))
            continue
        change = estimate_paired_difference(bits[way], bits["plain"])
        drops[way] = change
        interval = f"{change.low:.2f} to {change.high:.2f}"
        rows.append((way, figure(bits[way].mean()), figure(change.value), interval, figure(loss)))
    left = float(bits["early stopping"].mean())
    epochs = [one["early stopping"]["epoch"] for one in runs]
    figures = {
        "means": {way: float(mine.mean()) for way, mine in bits.items()},
        "changes": {way: [change.value, change.low, change.high] for way, change in drops.items()},
        "best_epochs": epochs,
    }
    lower = [way for way, change in drops.items() if change.high < 0]
    missing = [way for way in WAYS if way not in ways]
    reason = (
        f"lower with an interval below 0: {', '.join(lower) or 'none'}"
        f"{f'; not run: {missing[0]}, opacus is missing' if missing else ''}; early stopping (epochs "
        f"{', '.join(map(str, epochs))} of {sizes.epochs}) leaves {left:.1f} bits of {bits['plain'].mean():.1f}."
    )
    passed = {"deduplicated", "DP", "early stopping"} <= set(lower) and left > 3.0
    columns = ("way", "mean bits", "change, bits", "95% interval", "loss on other text")
    return Finding("D2", CLAIM, columns, tuple(rows), figures, passed, reason)
