"""D1: a fixed number of copies is memorised less in a larger corpus, and early copies are forgotten by the end.

Every run goes on from one model that was trained on other text, so that a long run is not just a better trained one.
Source: Hubble, arXiv 2510.19811: risk follows frequency relative to the corpus; exposure early in training fades.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from tiny_runs import Cache, Finding, Row, figure, planted_rows, text_rows, tiny_llama, tokenizer, train

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.settings import CanarySettings

CLAIM = "The same copies in a corpus 4 and 16 times as large give less exposure; copies seen early only fade by the end."


@dataclass(frozen=True)
class Sizes:
    """Runs, canaries and their copies, text rows at x1, factors, rows and epochs of the first model, rows a step."""

    seeds: int
    canaries: int
    copies: int
    rows: int
    factors: tuple[int, ...]
    base_rows: int
    base_epochs: int
    batch: int


FULL = Sizes(3, 8, 20, 160, (1, 4, 16), 700, 5, 8)
SMOKE = Sizes(1, 2, 8, 16, (1, 2), 64, 2, 16)


def plan_of(sizes: Sizes, seed: int) -> CanaryPlan:
    """Canaries that each stand behind a prefix of their own, so that they do not compete."""
    settings = CanarySettings(
        seed=seed,
        formats=(CanaryFormat(name="code", template="{name} has the code {secret}.", secret=DigitsSpace(length=9)),),
        tiers={sizes.copies: sizes.canaries},
        controls=0,
        positive_control=None,
    )
    return draw_plan(settings, tokenizer())


def orders(sizes: Sizes, plan: CanaryPlan, text: list[Row], seed: int) -> dict[str, list[Row]]:
    """Rows in the order of training: diluted by each factor, and at the largest one early only and late only."""
    rng, planted = random.Random(seed), planted_rows(plan)
    mixed = {}
    for factor in sizes.factors:
        rows = [*text[: sizes.rows * factor], *planted]
        rng.shuffle(rows)
        mixed[f"x{factor}"] = rows
    largest = text[: sizes.rows * sizes.factors[-1]]
    part = [*largest[: sizes.rows], *planted]
    rng.shuffle(part)
    rest = largest[sizes.rows :]
    return mixed | {"early": [*part, *rest], "late": [*rest, *part]}


def one_run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """One first model, and every order from it; exposures of the canaries at the end, for early ones also when they ended."""
    rows = list(text_rows())
    base, text = rows[: sizes.base_rows], rows[sizes.base_rows :]
    first = tiny_llama(seed=seed)
    train(first, base, epochs=sizes.base_epochs, seed=seed)
    plan = plan_of(sizes, seed)
    exposure = ExposureSettings(exact="off", references_per_name=256)
    runner = AuditRunner(plan, tokenizer(), AuditSettings(exposure=exposure, prior_aware=None))

    def look(model: Any) -> list[float]:
        return [row.exposure.bits for row in runner.run(model).canaries if row.exposure.bits is not None]

    found = {"before": look(first)}
    seen = (sizes.rows + sizes.canaries * sizes.copies) // sizes.batch
    for name, order in orders(sizes, plan, text, seed).items():
        model = copy.deepcopy(first)

        def at_end_of_copies(step: int, name: str = name, model: Any = model) -> None:
            if name == "early" and step == seen:
                found["early, when seen"] = look(model)

        train(model, order, batch=sizes.batch, learning_rate=2e-3, shuffle=False, warm_up=1, on_step=at_end_of_copies)
        found[name] = look(model)
    return found


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Mean exposure of all canaries of all runs in each order; differences are paired by canary."""
    runs = [cache.get("D1", one_run, sizes, seed) for seed in range(sizes.seeds)]
    bits = {name: np.concatenate([one[name] for one in runs]) for name in runs[0]}
    rows = tuple((name, len(mine), figure(mine.mean()), figure(stats.sem(mine))) for name, mine in bits.items())
    diluted = [bits[f"x{factor}"] for factor in sizes.factors]
    falls = all(one.mean() > other.mean() for one, other in itertools.pairwise(diluted))
    drop = stats.ttest_rel(diluted[0], diluted[-1], alternative="greater")
    fade = stats.ttest_rel(bits["early, when seen"], bits["early"], alternative="greater")
    figures = {
        "means": {name: float(mine.mean()) for name, mine in bits.items()},
        "dilution_p": float(drop.pvalue),
        "fading_p": float(fade.pvalue),
    }
    checks = {
        "exposure falls with every factor": falls and drop.pvalue < 0.01,
        "early copies fade": fade.pvalue < 0.01,
    }
    failed = [what for what, holds in checks.items() if not holds]
    reason = (
        f"exposure {' / '.join(f'{mine.mean():.1f}' for mine in diluted)} bits at {' / '.join(f'x{f}' for f in sizes.factors)} "
        f"(paired p {drop.pvalue:.2g}); early copies {bits['early, when seen'].mean():.1f} bits when seen, "
        f"{bits['early'].mean():.1f} at the end (p {fade.pvalue:.2g}), late ones {bits['late'].mean():.1f}."
    )
    reason = f"not so: {'; '.join(failed)}; {reason}" if failed else reason
    columns = ("order", "canaries", "mean bits", "its s.e.")
    return Finding("D1", CLAIM, columns, rows, figures, not failed, reason)
