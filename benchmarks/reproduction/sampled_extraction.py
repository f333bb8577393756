"""H1: the chance of extraction worked out from one forward pass against real samples of `generate`.

The sampler is top-k 40 at temperature 1; 1 - (1 - p_z)^n is compared with groups of n samples. Source: Hayes et al.,
Measuring memorization through probabilistic discoverable extraction, arXiv 2410.19482.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from tiny_runs import LEAD, Cache, Finding, Row, figure, text_rows, tiny_llama, train

from memguard.metrics.extraction import extraction_curve, log_discovery_probability
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.sampling import Sampler, score_under_sampler
from memguard.scoring.scorer import Scorer, Span

CLAIM = (
    "p_z of one forward pass lies in the binomial interval of real samples, and sampling extracts more than greedy decoding."
)
PREFIX, SUFFIX = 32, 6  # tokens
SAMPLER = Sampler(temperature=1.0, top_k=40)
BUDGETS = (1, 10, 100, 1000, 10**6)
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Sizes:
    """Strings of each number of copies, those numbers, samples of each string, queries a group, text rows, epochs."""

    each: int
    copies: tuple[int, ...]
    samples: int
    group: int
    rows: int
    epochs: int


FULL = Sizes(10, (1, 4, 8, 16, 32), 1000, 10, 300, 8)
SMOKE = Sizes(2, (8, 32), 100, 10, 16, 6)


def count_hits(model: Any, span: Span, samples: int) -> tuple[int, list[bool]]:
    """How many of `samples` continuations of the prefix are the string, and which."""
    prefix = torch.tensor([span.prefix_ids]).repeat(samples, 1)
    written = model.generate(
        input_ids=prefix,
        attention_mask=torch.ones_like(prefix),
        do_sample=True,
        temperature=SAMPLER.temperature,
        top_k=SAMPLER.top_k,
        top_p=1.0,
        max_new_tokens=SUFFIX,
        min_new_tokens=0,
        pad_token_id=LEAD,
    )
    written = torch.nn.functional.pad(written[:, PREFIX:], (0, SUFFIX))[:, :SUFFIX]  # shorter where all rows ended early
    hits = (written == torch.tensor(span.suffix_ids)).all(dim=1).tolist()
    return sum(hits), hits


def one_run(sizes: Sizes) -> dict[str, Any]:
    """Train one model; p_z, greedy match and hits of every string."""
    rows = text_rows()
    strings: list[Row] = list(rows[: sizes.each * len(sizes.copies)])
    planted = [row for place, row in enumerate(strings) for _ in range(sizes.copies[place // sizes.each])]
    model = tiny_llama()
    train(model, [*rows[1000 : 1000 + sizes.rows], *planted], epochs=sizes.epochs)
    spans = [Span(row, PREFIX, PREFIX + SUFFIX) for row in strings]
    found = []
    with audit_mode(model):
        scorer = Scorer(model)
        log_probs = score_under_sampler(scorer, spans, SAMPLER)
        greedy = scorer.score(spans).is_greedy
        for place, span in enumerate(spans):
            hits, which = count_hits(model, span, sizes.samples)
            groups = np.array(which).reshape(-1, sizes.group).any(axis=1)
            log_prob = float(log_probs[place])
            found.append(
                {
                    "copies": sizes.copies[place // sizes.each],
                    "log_prob": log_prob if math.isfinite(log_prob) else None,
                    "is_greedy": bool(greedy[place]),
                    "hits": hits,
                    "group_hits": int(groups.sum()),
                }
            )
    return {"strings": found}


def inside(hits: int, trials: int, chance: float) -> bool:
    """Whether a count lies in the central 95% of its binomial law."""
    low, high = stats.binom.interval(1 - SIGNIFICANCE, trials, chance)
    return bool(low <= hits <= high)


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Counts inside the interval, for single samples and for groups; rates of greedy decoding and of many queries."""
    strings = cache.get("H1", one_run, sizes)["strings"]
    log_probs = np.array([-math.inf if one["log_prob"] is None else one["log_prob"] for one in strings])
    groups = sizes.samples // sizes.group
    grouped = np.exp(log_discovery_probability(log_probs, sizes.group))
    singles_in = [inside(one["hits"], sizes.samples, p) for one, p in zip(strings, np.exp(log_probs), strict=True)]
    groups_in = [inside(one["group_hits"], groups, p) for one, p in zip(strings, grouped, strict=True)]
    rows = []
    for copies in sizes.copies:
        mine = [place for place, one in enumerate(strings) if one["copies"] == copies]
        rows.append(
            (
                copies,
                len(mine),
                f"{float(np.exp(log_probs[mine]).mean()):.3g}",
                f"{sum(strings[place]['hits'] for place in mine) / sizes.samples / len(mine):.3g}",
                f"{sum(singles_in[place] for place in mine)} of {len(mine)}",
                f"{sum(groups_in[place] for place in mine)} of {len(mine)}",
                sum(strings[place]["is_greedy"] for place in mine),
            )
        )
    points = extraction_curve(log_probs, BUDGETS)
    greedy_share = sum(one["is_greedy"] for one in strings) / len(strings)
    highest = max(point.num_discoverable for point in points) / len(strings)
    never = [one["hits"] for one in strings if one["log_prob"] is None]
    # Each count is inside with chance 0.95 or more (counts are whole numbers): fewer than this has chance below 0.01.
    enough = int(stats.binom.ppf(0.01, len(strings), 1 - SIGNIFICANCE))
    figures = {
        "num_strings": len(strings),
        "singles_inside": sum(singles_in),
        "groups_inside": sum(groups_in),
        "enough": enough,
        "hits_outside_top_k": sum(never),
        "num_outside_top_k": len(never),
        "num_informative": int(((log_probs > math.log(0.003)) & (log_probs < math.log(0.997))).sum()),
        "greedy_share": greedy_share,
        "discoverable": {str(point.num_queries): point.num_discoverable for point in points},
    }
    passed = sum(singles_in) >= enough and sum(groups_in) >= enough and sum(never) == 0 and highest > greedy_share
    reason = (
        f"{sum(singles_in)} of {len(strings)} counts and {sum(groups_in)} of {len(strings)} group counts lie in their 95% "
        f"interval (at least {enough} expected; {figures['num_informative']} strings have p_z in .003 to .997), "
        f"{sum(never)} hits of {len(never)} strings outside top-k; "
        f"greedy extracts {figure(greedy_share)}, a million queries {figure(highest)} (paper: 5 to 7 times as many)."
    )
    columns = ("copies", "strings", "mean p_z", "share of samples", "inside", "groups inside", "greedy")
    return Finding("H1", CLAIM, columns, tuple(rows), figures, passed, reason)
