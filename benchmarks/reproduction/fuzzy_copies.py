"""F1: copies with some tokens replaced still teach the original: the loss drop falls smoothly with the tokens replaced.

Each canary is 32 random tokens; only its altered copies are trained on, every copy altered anew. Source: Shilov et al.,
Mosaic memory, arXiv 2405.15523, where 10 of 100 tokens replaced leave .60 to .65 of the effect.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from tiny_runs import Cache, Finding, Row, figure, text_rows, tiny_llama, tokenizer, train

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.items import encode_planted
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.formats import CanaryFormat, TokensSpace
from memguard.canaries.settings import CanarySettings

CLAIM = "The loss drop of a canary falls smoothly with the tokens replaced in its copies, and stays above 0 at 10% replaced."
TOKENS = 32


@dataclass(frozen=True)
class Sizes:
    """Runs, tokens replaced of 32, canaries of each, copies, text rows, epochs, controls, references."""

    seeds: int
    replaced: tuple[int, ...]
    each: int
    copies: int
    rows: int
    epochs: int
    controls: int
    references: int


FULL = Sizes(3, (0, 1, 3, 6, 12, 16, 24, 32), 6, 10, 600, 6, 48, 256)
SMOKE = Sizes(1, (0, 3, 32), 2, 6, 24, 4, 8, 32)


def altered(ids: Row, span: tuple[int, int], number: int, pool: list[int], rng: random.Random) -> Row:
    """The row with `number` tokens of the span, but for the full stop behind the secret, replaced at random."""
    changed = list(ids)
    for place in rng.sample(range(span[0], span[0] + TOKENS), number):
        changed[place] = rng.choice(pool)
    return tuple(changed)


def one_run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Train one model on altered copies; score and exposure of every original, and scores of controls."""
    settings = CanarySettings(
        seed=seed,
        formats=(CanaryFormat(name="words", template="List: {secret}.", secret=TokensSpace(count=TOKENS)),),
        tiers={sizes.copies: sizes.each * len(sizes.replaced)},
        controls=sizes.controls,
        positive_control=None,
    )
    plan = draw_plan(settings, tokenizer())
    encoded = encode_planted(plan, tokenizer())
    level = {canary.id: sizes.replaced[place % len(sizes.replaced)] for place, canary in enumerate(plan.planted())}
    pool = [ids for item in encoded.values() for ids in item.ids[item.start : item.start + TOKENS]]
    rng, rows = random.Random(seed), []
    for name, item in encoded.items():
        rows += [altered(item.ids, (item.start, item.end), level[name], pool, rng) for _ in range(sizes.copies)]
    model = tiny_llama(seed=seed)
    train(model, [*text_rows()[: sizes.rows], *rows], epochs=sizes.epochs, seed=seed)
    exposure = ExposureSettings(exact="off", references=sizes.references)
    report = AuditRunner(plan, tokenizer(), AuditSettings(exposure=exposure, prior_aware=None)).run(model)
    canaries = [row for row in report.canaries if row.role == "canary"]
    controls = [row.log_prob for row in report.canaries if row.role == "control" and row.log_prob is not None]
    return {
        "replaced": [level[row.id] for row in canaries],
        "log_prob": [row.log_prob for row in canaries],
        "bits": [row.exposure.bits for row in canaries],
        "control_mean": float(np.mean(controls)),
        "control_sd": float(np.std(controls)),
    }


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Loss drop against the controls of the same model, by tokens replaced."""
    drops: dict[int, list[float]] = {number: [] for number in sizes.replaced}
    bits: dict[int, list[float]] = {number: [] for number in sizes.replaced}
    for seed in range(sizes.seeds):
        found = cache.get("F1", one_run, sizes, seed)
        for number, log_prob, exposure in zip(found["replaced"], found["log_prob"], found["bits"], strict=True):
            drops[number].append(log_prob - found["control_mean"])
            bits[number].append(exposure)
    exact = float(np.mean(drops[sizes.replaced[0]]))
    rows = [
        (
            number,
            len(mine),
            figure(np.mean(mine)),
            figure(stats.sem(mine)),
            figure(np.mean(mine) / exact),
            figure(np.mean(bits[number])),
        )
        for number, mine in drops.items()
    ]
    few = next(number for number in sizes.replaced if number >= 0.09 * TOKENS)
    test = stats.ttest_1samp(drops[few], 0.0, alternative="greater")
    levels = [number for number, mine in drops.items() for _ in mine]
    trend = stats.spearmanr(levels, [one for mine in drops.values() for one in mine])
    figures: dict[str, Any] = {
        "ratio_at_few": float(np.mean(drops[few])) / exact,
        "replaced_few": few,
        "p_value_at_few": float(test.pvalue),
        "trend": float(trend.statistic),
        "ratios": {str(row[0]): row[4] for row in rows},
    }
    steps = np.diff([np.mean(mine) for mine in drops.values()])
    largest = float(-steps.min() / exact) if exact > 0 else float("nan")
    passed = exact > 0 and figures["trend"] < -0.5 and figures["p_value_at_few"] < 0.01
    reason = (
        f"{few} of {TOKENS} tokens replaced leave {figures['ratio_at_few']:.2f} of the loss drop (p "
        f"{figures['p_value_at_few']:.2g}; the paper's scale, in copies, is .60 to .65 at 10%); rank correlation with tokens "
        f"replaced {figures['trend']:.2f}, largest step {largest:.2f} of the whole."
    )
    columns = ("replaced of 32", "canaries", "loss drop, nats", "its s.e.", "of exact copies", "exposure bits")
    return Finding("F1", CLAIM, columns, tuple(rows), figures, passed, reason)
