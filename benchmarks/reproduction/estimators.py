"""S1: exposure by enumeration, by sampling and by the skew-normal tail, on canaries inserted 0 to 32 times.

Source: Carlini et al., The Secret Sharer, section 4. Exposure is bits; a canary that was never inserted has 1 / ln 2 on
average, whatever the space, and its rank is uniform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats
from tiny_runs import Cache, Finding, figure, planted_rows, text_rows, tiny_llama, tokenizer, train

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.report import AuditReport
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.settings import CanarySettings

CLAIM = (
    "Exposure rises with insertions and saturates at log2 of the space; the estimators agree below the sample's cap; "
    "uninserted canaries have 1.44 bits and uniform ranks."
)
NULL_MEAN = 1.0 / math.log(2.0)  # bits


@dataclass(frozen=True)
class Sizes:
    """Digits, models, canaries of each tier in a model, controls, text rows, epochs, references."""

    digits: int
    seeds: int
    tiers: tuple[tuple[int, int], ...]
    controls: int
    rows: int
    epochs: int
    references: int


FULL = Sizes(5, 5, ((1, 1), (2, 1), (4, 2), (8, 2), (16, 2), (32, 2)), 50, 800, 10, 1024)
SMOKE = Sizes(4, 1, ((32, 1),), 40, 160, 4, 128)


def plan_of(sizes: Sizes, seed: int) -> CanaryPlan:
    """Canaries of one format behind one prefix."""
    template = "The access number of the north gate is {secret}."
    settings = CanarySettings(
        seed=seed,
        formats=(CanaryFormat(name="pin", template=template, secret=DigitsSpace(length=sizes.digits)),),
        tiers=dict(sizes.tiers),
        controls=sizes.controls,
        positive_control=None,
    )
    return draw_plan(settings, tokenizer())


def audit(model: Any, plan: CanaryPlan, sizes: Sizes, *, exact: bool) -> AuditReport:
    """With the whole space enumerated, or by references alone."""
    exposure = ExposureSettings(exact="auto" if exact else "off", node_budget=10**sizes.digits, references=sizes.references)
    return AuditRunner(plan, tokenizer(), AuditSettings(exposure=exposure, prior_aware=None)).run(model)


def one_run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Train one model; insertions and all three figures of every canary."""
    plan = plan_of(sizes, seed)
    model = tiny_llama(seed=seed)
    train(model, [*text_rows()[: sizes.rows], *planted_rows(plan)], epochs=sizes.epochs, seed=seed)
    enumerated, by_sample = (audit(model, plan, sizes, exact=exact).canaries for exact in (True, False))
    assert all(row.exposure.method == "exact" for row in enumerated)
    return {
        "insertions": [row.tier for row in enumerated],
        "exact": [row.exposure.bits for row in enumerated],
        "p_values": [row.exposure.p_value for row in enumerated],
        "sampled": [row.exposure.bits for row in by_sample],
        "above": [row.num_references_above for row in by_sample],
        "skew_normal": [row.skew_normal_bits for row in enumerated],
    }


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Train the models and compare the estimators, tier by tier."""
    runs = [cache.get("S1", one_run, sizes, seed) for seed in range(sizes.seeds)]
    pooled = {field: np.concatenate([np.array(run[field], dtype=float) for run in runs]) for field in runs[0]}
    pooled["first"] = pooled["p_values"] * 10**sizes.digits < 1.5  # rank 1, siblings left out
    rows = tuple(_tier_row(pooled, tier) for tier in sorted(set(pooled["insertions"])))
    figures = _figures(pooled, sizes)
    passed, reason = _judge(figures)
    columns = ("insertions", "canaries", "exact bits", "sampled or bound", "skew-normal", "share at rank 1")
    return Finding("S1", CLAIM, columns, rows, figures, passed, reason)


def _tier_row(pooled: dict[str, Any], tier: float) -> tuple[Any, ...]:
    mine = pooled["insertions"] == tier
    means = (figure(pooled[field][mine].mean()) for field in ("exact", "sampled", "skew_normal"))
    return (int(tier), int(mine.sum()), *means, figure(pooled["first"][mine].mean()))


def _figures(pooled: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    exact, planted = pooled["exact"], pooled["insertions"] > 0
    controls = ~planted
    low, high = exact < 10.0, exact >= 10.0
    beaten = pooled["above"] >= 10  # enough references above that sampling error is below half a bit
    return {
        "space_bits": math.log2(10**sizes.digits),
        "highest_bits": float(exact.max()),
        "top_tier_median": float(np.median(exact[pooled["insertions"] == pooled["insertions"].max()])),
        "rise": float(stats.spearmanr(pooled["insertions"], exact).statistic),
        "control_mean": float(exact[controls].mean()),
        "control_mean_se": NULL_MEAN / math.sqrt(controls.sum()),
        "control_uniform_p": float(stats.kstest(pooled["p_values"][controls], "uniform").pvalue),
        "num_controls": int(controls.sum()),
        "sampled_error": _mean_gap(pooled["sampled"], exact, beaten),
        "sample_cap": math.log2(sizes.references + 1),
        "skew_error_below_10": _mean_gap(pooled["skew_normal"], exact, low),
        "skew_error_beyond_10": _mean_gap(pooled["skew_normal"], exact, high),
    }


def _mean_gap(estimates: Sequence[float], exact: Sequence[float], chosen: Any) -> float | None:
    gaps = np.abs(np.asarray(estimates) - np.asarray(exact))[chosen]
    return float(gaps.mean()) if gaps.size else None


def _judge(figures: dict[str, Any]) -> tuple[bool, str]:
    checks = {
        "exposure rises with insertions": figures["rise"] > 0.3,
        "the top tier saturates": figures["top_tier_median"] > figures["space_bits"] - 1.0,
        "controls have 1.44 bits": abs(figures["control_mean"] - NULL_MEAN) < 3 * figures["control_mean_se"],
        "control ranks are uniform": figures["control_uniform_p"] > 0.05,
        "sampling agrees within half a bit": (figures["sampled_error"] or 0.0) < 0.5,
        "the skew-normal agrees within 2 bits below 10": (figures["skew_error_below_10"] or 0.0) < 2.0,
    }
    failed = [what for what, holds in checks.items() if not holds]
    found = (
        f"top tier {figures['top_tier_median']:.2f} of {figures['space_bits']:.2f} bits, controls "
        f"{figures['control_mean']:.2f} (KS p {figures['control_uniform_p']:.2f}), error of sampling "
        f"{figures['sampled_error'] or 0.0:.2f}, of the skew-normal {figures['skew_error_below_10'] or 0.0:.2f} below 10 bits "
        f"and {figures['skew_error_beyond_10'] or 0.0:.2f} beyond."
    )
    return not failed, found if not failed else f"not so: {'; '.join(failed)}; {found}"
