"""P3: which extractable sequences fail Prior-Aware memorisation: entities of four tokens, or passages of 32.

Reads the largest model of P5 behind its longest prefix. Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733: about 10% of
extractable entities and 45% of extractable passages are PA-memorised, so 55-90% fail.
"""

from __future__ import annotations

import math
from typing import Any

from prior_by_size import FULL as FULL
from prior_by_size import SMOKE as SMOKE
from prior_by_size import Sizes, runs_of
from prior_shares import CELLS, RATIO, STRATA, as_cells, summary
from scipy import stats
from tiny_runs import Cache, Finding

CLAIM = "Extractable entities fail PA more often than extractable passages do, and the more often the commoner they are."


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Shares by kind, entities also by how often they occur."""
    cells = {
        one["kind"]: one for one in runs_of(sizes, cache)[sizes.widths[-1]]["cells"] if one["prefix"] == sizes.prefixes[-1]
    }
    entity, passage = cells["entity"]["found"], cells["passage"]["found"]
    rows = []
    for low, high in STRATA:
        mine = [one for one in entity if low <= one["occurrences"] <= high]
        rows.append(_row(f"entity, {_range(low, high)}", mine, cells["entity"]["log_quantile"]))
    rows.append(_row("entity, all", entity, cells["entity"]["log_quantile"]))
    rows.append(_row("passage", passage, cells["passage"]["log_quantile"]))
    both = [summary(one["found"], one["log_quantile"]) for one in cells.values()]
    rate = [one["failing"] / one["extractable"] if one["extractable"] else 0.0 for one in both]
    table = [[one["failing"], one["extractable"] - one["failing"]] for one in both]
    differs = float(stats.fisher_exact(table).pvalue) if all(map(sum, table)) else 1.0
    occurrences, ratios = [one["occurrences"] for one in entity], [one["ratio"] for one in entity]
    varied = len(set(occurrences)) > 1 and len(entity) > 2
    trend = float(stats.spearmanr(occurrences, ratios).statistic) if varied else 0.0
    figures = {"entity_failing": rate[0], "passage_failing": rate[1], "p_value": differs, "trend": trend}
    figures |= {"held_out_n": {kind: math.exp(one["log_quantile"]) for kind, one in cells.items()}, "fixed_n": RATIO}
    fixed = sum(one["failing_fixed"] for one in both)
    reason = (
        f"{rate[0]:.0%} of {len(entity)} extractable entities and {rate[1]:.0%} of {len(passage)} extractable passages fail PA "
        f"(paper: about 90% and 55%; Fisher p {differs:.2g}), {fixed} of them all at a fixed n = 10; rank correlation of the "
        f"ratio with occurrences {trend:.2f}."
    )
    passed = rate[0] > rate[1] and differs < 0.05 and trend < 0
    return Finding("P3", CLAIM, ("sequences", "extractable", *CELLS), tuple(rows), figures, passed, reason)


def _row(name: str, found: list[dict[str, Any]], log_quantile: float) -> tuple[Any, ...]:
    figures = summary(found, log_quantile)
    return (name, figures["extractable"], *as_cells(figures))


def _range(low: int, high: int) -> str:
    return f"{low}x" if low == high else f"{low}-{high}x" if high < 10**9 else f"from {low}x"
