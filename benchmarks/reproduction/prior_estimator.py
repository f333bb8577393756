"""P4: the prior of Prior-Aware memorisation is unbiased with little variance, and its logarithm is biased low.

A sampled prior is compared with the mean over a whole small set of prefixes, and the bias of its logarithm with
log-normal likelihoods, whose mean is known. Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733, theorems 1 and 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_runs import LEAD, Cache, Finding, figure, text_rows, tiny_llama, train

from memguard.metrics.prior_aware import estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer

CLAIM = (
    "The sampled prior is unbiased with variance at most 1 / (4c); its logarithm is biased low, less with more prefixes "
    "and far more with a wider spread of likelihoods."
)
# Bias of the log prior in nats for (sigma, prefixes), worked out apart from this code.
EXPECTED = {
    (1, 64): 0.0,
    (1, 500): 0.0,
    (1, 5000): 0.0,
    (3, 64): 0.77,
    (3, 500): 0.32,
    (3, 5000): 0.08,
    (6, 64): 7.7,
    (6, 500): 5.5,
    (6, 5000): 3.8,
}


@dataclass(frozen=True)
class Sizes:
    """Prefixes of the whole set, suffixes, their tokens, draws of a prior, prefixes of a drawn prior; text rows."""

    prefixes: int
    suffixes: int
    suffix_tokens: int
    draws: int
    drawn: int
    rows: int
    log_normal_draws: int


FULL = Sizes(128, 16, 1, 2000, 16, 800, 1000)
SMOKE = Sizes(32, 4, 2, 200, 16, 96, 60)


def prior(log_probs: NDArray[np.float64]) -> float:
    """log of the mean of P(s | q), as an audit estimates it; nats."""
    return estimate_prior_aware(-1.0, log_probs, m=1e-4, n=10.0).prior_log_prob


def against_enumeration(sizes: Sizes) -> dict[str, Any]:
    """For each suffix: the mean over all prefixes, and mean and variance of priors drawn from them with replacement."""
    rows = text_rows(32)
    model = tiny_llama()
    train(model, rows[: sizes.rows], epochs=2)
    prefixes = [row[:16] for row in rows[sizes.rows : sizes.rows + sizes.prefixes]]
    counts: dict[tuple[int, ...], int] = {}
    for row in rows:  # the commonest stretches: a prior that is not all but zero
        for start in range(1, len(row) - sizes.suffix_tokens):
            piece = row[start : start + sizes.suffix_tokens]
            counts[piece] = counts.get(piece, 0) + (LEAD not in piece)
    suffixes = sorted(counts, key=lambda piece: -counts[piece])[: sizes.suffixes]
    with audit_mode(model):
        grid = np.minimum(Scorer(model).grid(prefixes, suffixes), 0.0)
    rng, found = np.random.default_rng(0), []
    for column in grid.T:
        drawn = rng.integers(0, len(column), size=(sizes.draws, sizes.drawn))
        estimates = np.exp([prior(column[chosen]) for chosen in drawn])
        error = estimates.std() / math.sqrt(sizes.draws)
        whole = math.exp(prior(column))
        found.append({"whole": whole, "z": (estimates.mean() - whole) / error, "variance": float(estimates.var())})
    return {"suffixes": found}


def log_bias(sizes: Sizes) -> dict[str, Any]:
    """How far the log prior lies below the log of the true mean, for log-normal likelihoods; nats, with standard errors."""
    rng, found = np.random.default_rng(1), []
    for sigma, count in EXPECTED:
        location = -20.0 - 6.0 * sigma  # far enough down that no likelihood exceeds 1
        truth = location + sigma**2 / 2
        errors = [truth - prior(rng.normal(location, sigma, count)) for _ in range(sizes.log_normal_draws)]
        found.append([sigma, count, float(np.mean(errors)), float(np.std(errors) / math.sqrt(len(errors)))])
    return {"bias": found}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """Both halves; the enumeration needs one short training."""
    suffixes = cache.get("P4 enumeration", against_enumeration, sizes)["suffixes"]
    biases = cache.get("P4 bias", log_bias, sizes)["bias"]
    rows, off = [], []
    for sigma, count, bias, error in biases:
        expected = EXPECTED[sigma, count]
        rows.append((sigma, count, figure(bias), figure(error), expected))
        if abs(bias - expected) > 4 * error + 0.05 + 0.02 * expected:  # what was rounded and simulated there
            off.append(f"sigma {sigma} with {count} prefixes gives {bias:.2f}, not {expected}")
    largest = max(abs(one["z"]) for one in suffixes)
    # The largest of S standard normals stays below this with chance 0.999.
    limit = math.sqrt(2 * math.log(len(suffixes) / 0.0005))
    bound = 1 / (4 * sizes.drawn)
    variance = max(one["variance"] for one in suffixes)
    if largest > limit:
        off.append(f"the sampled prior is off by {largest:.1f} standard errors")
    # Bhatia-Davis: the variance of a mean of c values in 0..1 is at most v (1 - v) / c, which bites for small v.
    share = max(one["variance"] / (one["whole"] * (1 - one["whole"]) / sizes.drawn) for one in suffixes)
    if variance > bound or share > 1.0:
        off.append(f"its variance {variance:.2g} exceeds {bound:.2g}, or is {share:.2f} of v (1 - v) / c")
    figures = {"largest_z": largest, "limit_z": limit, "largest_variance": variance, "variance_bound": bound}
    figures |= {"largest_share_of_tight_bound": share, "bias": biases}
    agreeing = len(biases) - sum("sigma" in what for what in off)
    reason = (
        f"largest error of {len(suffixes)} sampled priors {largest:.1f} standard errors (limit {limit:.1f}), variance "
        f"{variance:.2g} of at most {bound:.2g} and {share:.2f} of v (1 - v) / c; log bias as worked out in {agreeing} of "
        f"{len(biases)} cases."
    )
    columns = ("sigma", "prefixes", "bias, nats", "its s.e.", "expected")
    return Finding("P4", CLAIM, columns, tuple(rows), figures, not off, reason if not off else f"{'; '.join(off)}; {reason}")
