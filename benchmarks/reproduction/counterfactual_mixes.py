"""P1: Prior-Aware against counterfactual memorisation over seven mixes of exact copies and near-duplicates.

CF is the mean log P(s|p) of models trained on the mix less that of models trained without its exact copies; PA is the log
belief ratio in the former alone. Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733, validation; the mixes are a tenth of
the paper's (0, 180) to (60, 0). Near-duplicates share 20% of their tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_runs import Cache, Finding, Row, figure, text_rows, tiny_llama, train

from memguard.metrics.counterfactual import correlation_interval
from memguard.metrics.prior_aware import estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

CLAIM = "PA and counterfactual memorisation rise together over the mixes; the counterfactual's range is far the wider."
HALF = 16  # tokens of prefix, and of suffix
SHARED = 0.2
THRESHOLD, RATIO = 1e-4, 10.0  # m and n


@dataclass(frozen=True)
class Sizes:
    """Mixes of (exact copies, near-duplicates), sequences, rows of a training set, runs, epochs, prior prefixes."""

    mixes: tuple[tuple[int, int], ...]
    targets: int
    rows: int
    seeds: int
    epochs: int
    prefixes: int


FULL = Sizes(((0, 18), (1, 15), (2, 12), (3, 9), (4, 6), (5, 3), (6, 0)), 8, 400, 3, 12, 128)
SMOKE = Sizes(((0, 3), (3, 0)), 4, 32, 1, 12, 8)


def near_duplicate(row: Row, pool: list[int], rng: random.Random) -> Row:
    """The row with 80% of its tokens replaced by tokens of the text, the first one apart."""
    kept = set(rng.sample(range(1, len(row)), round(SHARED * (len(row) - 1))))
    return tuple(token if place == 0 or place in kept else rng.choice(pool) for place, token in enumerate(row))


def one_run(sizes: Sizes, mix: tuple[int, int], seed: int, with_copies: bool) -> dict[str, Any]:
    """Train one model on one mix; log P(s|p) and the log of the mean over other prefixes for every sequence."""
    length, copies = 1 + 2 * HALF, mix[0] if with_copies else 0
    rows = text_rows(length)
    targets, text = rows[: sizes.targets], rows[sizes.targets :]
    rng = random.Random(seed)
    pool = [token for row in text[:2000] for token in row[1:]]
    duplicates = [near_duplicate(row, pool, rng) for row in targets for _ in range(mix[1])]
    planted = [*duplicates, *(row for row in targets for _ in range(copies))]
    background = text[: sizes.rows - sizes.targets * sum(mix)]  # the same with and without the copies
    model = tiny_llama(seed=seed if with_copies else 100 + seed)
    train(model, [*background, *planted], epochs=sizes.epochs, seed=seed)
    spans = [Span(row, 1 + HALF, length) for row in targets]
    prefixes = [row[: 1 + HALF] for row in background[: sizes.prefixes]]
    with audit_mode(model):
        scorer = Scorer(model)
        log_probs = np.minimum(scorer.score(spans).log_probs, 0.0)
        grid = np.minimum(scorer.grid(prefixes, [span.suffix_ids for span in spans]), 0.0)
    estimates = [estimate_prior_aware(float(one), grid[:, place], m=THRESHOLD, n=RATIO) for place, one in enumerate(log_probs)]
    return {
        "log_prob": log_probs.tolist(),
        "prior": [one.prior_log_prob for one in estimates],
        "ratio": [one.log_belief_ratio for one in estimates],
    }


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Both measures of every sequence in every mix, averaged over runs, and their correlation."""
    rows, pa, cf, priors, failing, extractable = [], [], [], [], 0, 0
    for mix in sizes.mixes:
        found = {
            with_copies: [cache.get("P1", one_run, sizes, mix, seed, with_copies) for seed in range(sizes.seeds)]
            for with_copies in (True, False)
        }
        own = {name: np.mean([one[name] for one in found[True]], axis=0) for name in ("log_prob", "prior", "ratio")}
        without = np.mean([one["log_prob"] for one in found[False]], axis=0)
        pa.append(own["ratio"])
        cf.append(own["log_prob"] - without)
        priors.append(own["prior"].mean())
        ratios = [
            ratio
            for one in found[True]
            for log_prob, ratio in zip(one["log_prob"], one["ratio"], strict=True)
            if log_prob > math.log(THRESHOLD)
        ]
        extractable += len(ratios)
        failing += sum(ratio <= math.log(RATIO) for ratio in ratios)  # the paper's rule: the point estimate
        means = (own["log_prob"].mean(), own["prior"].mean(), cf[-1].mean(), pa[-1].mean())
        rows.append((f"{mix[0]} exact, {mix[1]} near", *map(figure, means), len(ratios)))
    by_pair = correlation_interval(np.concatenate(cf), np.concatenate(pa))
    spans = [float(np.ptp([one.mean() for one in side])) for side in (cf, pa)]
    figures = {
        "r": by_pair.value,
        "r_low": by_pair.low,
        "r_high": by_pair.high,
        "num_pairs": by_pair.n,
        "cf_range": spans[0],
        "pa_range": spans[1],
        "prior_rise": float(priors[-1] - priors[0]),
        "extractable": extractable,
        "failing": failing,
    }
    share = f"{failing / extractable:.0%}" if extractable else "none"
    reason = (
        f"r = {by_pair.value:.2f} ({by_pair.low:.2f} to {by_pair.high:.2f}) over {by_pair.n} pairs of sequence and mix (paper: "
        f"0.71); range {spans[0]:.1f} nats of CF, {spans[1]:.1f} of PA (paper: 50 and 3); log P(s) changes by "
        f"{figures['prior_rise']:+.1f} from the first mix to the last; {share} of {extractable} extractable "
        "fail PA (paper: 55-90%)."
    )
    columns = ("mix", "log P(s|p)", "log P(s)", "CF, nats", "PA, nats", "extractable")
    passed = by_pair.low > 0 and spans[0] > 2 * spans[1]
    return Finding("P1", CLAIM, columns, tuple(rows), figures, passed, reason)
