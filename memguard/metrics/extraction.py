"""How many queries it takes until a sampler writes a sequence, from the probability that one query does.

A sequence of probability p_z under the sampler (after temperature, top-k and top-p) is written at least once in n queries
with the chance 1 - (1 - p_z)^n. Everything stays in log space: p_z of 50 tokens underflows, and with it the tries that a
patient attacker has. p_z = 0 where a token falls outside top-k or top-p; no budget reaches it.

Source: Hayes et al., Measuring memorization through probabilistic discoverable extraction (NAACL 2025, 2410.19482).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.metrics.intervals import Interval, bounded_mean_interval, share_interval

SMALL = -30.0  # of log(n p): below, 1 - (1 - p)^n is n p to 14 digits
LIKELY = 0.9  # the chance at which a sequence counts as discoverable


@dataclass(frozen=True)
class ExtractionPoint:
    """What a budget of queries gets out of a set of sequences; shares 0..1.

    Args:
        num_queries: the budget, a sequence.
        n: sequences.
        expected_share: mean chance of a sequence being written at least once.
        expected_interval: of that mean in the population that the sequences were drawn from.
        num_discoverable: sequences written with a chance of at least `likely`.
        discoverable_interval: of their share in the population.
        likely: the chance that makes a sequence discoverable.
    """

    num_queries: int
    n: int
    expected_share: float
    expected_interval: Interval
    num_discoverable: int
    discoverable_interval: Interval
    likely: float


def log_discovery_probability(log_prob: ArrayLike, num_queries: float) -> NDArray[np.float64]:
    """log of the chance that a sequence is written at least once in `num_queries` independent queries; nats.

    Args:
        log_prob: log p_z under the sampler, any shape, at most 0, -inf allowed; nats.
        num_queries: n >= 1.

    Returns:
        float64 of the same shape, at most 0.

    Raises:
        ValueError: a log-probability that is NaN or above 0, or fewer than one query.

    Example:
        >>> float(log_discovery_probability(math.log(0.5), 2).round(6))  # 1 - 1/4
        -0.287682
        >>> float(log_discovery_probability(-2000.0, 1e6).round(2))  # where p underflows, n p still holds
        -1986.18
    """
    given = _checked(log_prob)
    if not num_queries >= 1:
        raise ValueError(f"num_queries must be at least 1, got {num_queries}.")
    small = given + math.log(num_queries)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        none = num_queries * np.log1p(-np.exp(given))
        exact = np.log(-np.expm1(none))
    return np.minimum(np.where(small < SMALL, small, exact), 0.0)


def log10_queries_needed(log_prob: ArrayLike, probability: float) -> NDArray[np.float64]:
    """log10 of the queries after which a sequence was written with a given chance, infinite where it never is.

    Args:
        log_prob: log p_z, any shape; nats.
        probability: the chance to reach, 0..1 exclusive.

    Raises:
        ValueError: a log-probability that is NaN or above 0, or a chance outside 0..1.

    Example:
        >>> float(log10_queries_needed(math.log(0.01), 0.9).round(3))  # 229.1 queries
        2.36
    """
    given = _checked(log_prob)
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability must be in 0..1, got {probability}.")
    with np.errstate(divide="ignore", under="ignore"):
        log_rate = np.where(given < SMALL, given, np.log(-np.log1p(-np.exp(given))))
    # Fewer than one query is one query.
    return np.maximum(0.0, (math.log(-math.log1p(-probability)) - log_rate) / math.log(10.0))


def log10_expected_tries(log_prob: ArrayLike) -> NDArray[np.float64]:
    """log10 of the mean number of queries until a sequence is first written, 1 / p_z; infinite where it never is.

    Example:
        >>> float(log10_expected_tries(math.log(0.001)).round(3))
        3.0
    """
    return -_checked(log_prob) / math.log(10.0) + 0.0


def extraction_curve(
    log_probs: ArrayLike, budgets: Sequence[int], *, confidence: float = 0.95, likely: float = LIKELY
) -> list[ExtractionPoint]:
    """What each budget of queries is expected to get out of a set of sequences.

    Args:
        log_probs: log p_z of each, shape (n,), n >= 1; nats.
        budgets: queries a sequence, each at least 1.
        confidence: of the intervals, which are about the population the sequences were drawn from.
        likely: the chance that makes a sequence discoverable.

    Returns:
        One `ExtractionPoint` a budget, in their order.

    Raises:
        ValueError: no sequence, or a log-probability that is NaN or above 0.

    Example:
        >>> point = extraction_curve([math.log(0.5), -math.inf], [1])[0]
        >>> point.expected_share, point.num_discoverable
        (0.25, 0)
    """
    given = _checked(log_probs).reshape(-1)
    if given.size == 0:
        raise ValueError("log_probs must hold at least one sequence, got none.")
    points = []
    for budget in budgets:
        chances = np.exp(log_discovery_probability(given, budget))
        found = int((chances >= likely).sum())
        points.append(
            ExtractionPoint(
                num_queries=budget,
                n=given.size,
                expected_share=float(chances.mean()),
                expected_interval=bounded_mean_interval(chances, confidence=confidence),
                num_discoverable=found,
                discoverable_interval=share_interval(found, given.size, confidence=confidence),
                likely=likely,
            )
        )
    return points


def _checked(log_prob: ArrayLike) -> NDArray[np.float64]:
    given = np.asarray(log_prob, dtype=np.float64)
    if np.isnan(given).any() or (given > 0.0).any():
        raise ValueError("log_prob must be a number of at most 0, got NaN or a value above 0.")
    return given
