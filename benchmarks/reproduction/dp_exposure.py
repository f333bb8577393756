"""S4: with DP-SGD the highest exposure of K canaries stays where chance puts it; with plain Adam it passes that by far.

One canary in each of K models, once an epoch, as in the paper: several of one format teach a model which digits they have
in common, and as a family are exposed a little even where none is memorised. Under the null the maximum lies within
log2 K - 2.41 and log2 K + 7.64 bits with chance 0.99. Source: Carlini et al., The Secret Sharer, section 9: 1.1 to 3.6 bits
with DP, even without a meaningful epsilon, 31.0 without. Needs the extra `dp`.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

from dp_training import Privacy, train_adam
from tiny_runs import Cache, Finding, figure, mean_loss, planted_rows, text_rows, tiny_llama, tokenizer

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.settings import CanarySettings

CLAIM = "DP-SGD leaves the highest exposure of all canaries in the 99% null band; plain Adam passes the band by far."
BAND = (-2.41, 7.64)  # bits around log2 K
DELTA = 1e-3


@dataclass(frozen=True)
class Sizes:
    """Models of each kind, text rows, epochs, noise multipliers, references."""

    models: int
    rows: int
    epochs: int
    noises: tuple[float, ...]
    references: int


FULL = Sizes(4, 255, 20, (0.1, 1.0), 16_384)
SMOKE = Sizes(1, 31, 2, (0.5,), 512)


def one_run(sizes: Sizes, seed: int, noise: float | None) -> dict[str, Any]:
    """Train one model on one canary; its exposure, the epsilon spent, the loss on other text."""
    settings = CanarySettings(
        seed=seed,
        formats=(
            CanaryFormat(name="pin", template="The access number of the gate is {secret}.", secret=DigitsSpace(length=9)),
        ),
        tiers={1: 1},
        controls=0,
        positive_control=None,
    )
    plan = draw_plan(settings, tokenizer())
    model = tiny_llama(seed=seed, tied=False)
    rows = text_rows()
    spent = train_adam(
        model,
        [*rows[: sizes.rows], *planted_rows(plan)],
        epochs=sizes.epochs,
        batch=32,
        learning_rate=3e-3,
        seed=seed,
        privacy=None if noise is None else Privacy(noise, 1.0, DELTA),
    )
    exposure = ExposureSettings(references=sizes.references, node_budget=5000)
    report = AuditRunner(plan, tokenizer(), AuditSettings(exposure=exposure, prior_aware=None)).run(model)
    (canary,) = report.canaries
    return {"bits": canary.exposure.bits, "epsilon": spent, "loss": mean_loss(model, rows[-64:])}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Plain Adam and every noise, K models each."""
    centre = math.log2(sizes.models)
    low, high = centre + BAND[0], centre + BAND[1]
    has_opacus = importlib.util.find_spec("opacus") is not None
    rows: list[tuple[Any, ...]] = []
    highest: dict[str, float] = {}
    for noise in (None, *(sizes.noises if has_opacus else ())):
        found = [cache.get("S4", one_run, sizes, seed, noise) for seed in range(sizes.models)]
        name = "plain Adam" if noise is None else f"DP, noise {noise:g}"
        bits = [one["bits"] for one in found]
        highest[name] = max(bits)
        epsilon = "-" if noise is None else f"{found[0]['epsilon']:.3g}"
        loss = sum(one["loss"] for one in found) / len(found)
        rows.append((name, epsilon, ", ".join(f"{one:.1f}" for one in bits), figure(max(bits)), figure(loss)))
    private = [one for name, one in highest.items() if name != "plain Adam"]
    kept = sum(low <= one <= high for one in private)
    plain = highest["plain Adam"]
    figures = {"band": [low, high], "dp_highest": private, "plain_highest": plain}
    reason = (
        f"the highest of {sizes.models} exposures lies within {low:.1f} to {high:.1f} bits in {kept} of {len(private)} DP "
        f"settings; plain Adam reaches {plain:.1f} bits (paper: at most 3.6 bits with DP, 31.0 without)."
    )
    if not has_opacus:
        reason = f"the DP runs need opacus, which is missing; {reason}"
    columns = ("training", "epsilon", "bits", "highest", "loss on other text")
    passed = bool(private) and kept == len(private) and plain > high
    return Finding("S4", CLAIM, columns, tuple(rows), figures, passed, reason)
