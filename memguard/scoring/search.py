"""How many candidates of a space are likelier than a canary: exact where the search ends, bounded where its budget does.

Only nodes at or above the canary's own log-probability can lead to a likelier candidate, so only those are expanded; their
number grows with exp(-log_prob), which makes memorised canaries cheap. One walk serves every canary behind a prefix, and
finds the likeliest secrets on its way. Source: Carlini et al., The Secret Sharer, section 5; statistics specification, 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memguard.scoring.walk import Floats, TreeWalk

ROUND = 1.0  # nats: canaries this close are served by one round of the walk
PROBE = 4.0  # nats above a floor at which its cost is foretold
HOPE = 4.0  # times the budget: growth may be slower than foretold
LEAVES_PER_CHECK = 4  # candidates a walk may find for each that is checked: planted ones and duplicates leave room
UNBOUNDED = 2**1023  # an upper bound that says nothing
Path = tuple[int, ...]
Standing = Literal["counts", "left out", "refused"]


@dataclass(frozen=True)
class Found:
    """A candidate that the walk reached: its tokens and its log-probability in nats."""

    path: Path
    log_prob: float


@dataclass(frozen=True)
class RankBounds:
    """Rank of one canary among the candidates that are not left out.

    Args:
        log_prob: by the walk, the same arithmetic as its competitors; what was given where the walk did not reach it.
        rank_low: 1 + candidates above by more than the tolerance.
        rank_high: the same with ties counted as above; an upper bound when the budget ended, which may exceed the space.
        num_tied: candidates within the tolerance.
        is_exact: every candidate above is known; low and high then differ by ties alone.
    """

    log_prob: float
    rank_low: int
    rank_high: int
    num_tied: int
    is_exact: bool


@dataclass(frozen=True)
class SearchResult:
    """Ranks in the order of the canaries, and what the walk cost and found.

    Args:
        ranks: one a canary.
        likeliest: candidates found, likeliest first, those left out among them; complete down to `floor`.
        floor: nats; every candidate at or above it was found.
        num_nodes: nodes expanded.
        num_refused: candidates found whose text the tokenizer writes otherwise; ranks behind them are bounds.
        num_unsettled: canaries that the walk scored otherwise than they were given; nothing is said of their rank.
    """

    ranks: list[RankBounds]
    likeliest: list[Found]
    floor: float
    num_nodes: int
    num_refused: int
    num_unsettled: int


def count_above(
    walk: TreeWalk,
    canaries: Sequence[Path],
    log_probs: Sequence[float],
    *,
    left_out: frozenset[Path],
    tolerance: float,
    node_budget: int,
    judge: Callable[[Sequence[Path]], Sequence[Standing]] | None = None,
    max_checked: int = 10_000,
    whole: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SearchResult:
    """Exact ranks, or certified bounds of them, of canaries behind one prefix.

    Args:
        walk: behind that prefix; its `keep` must lie below every canary by `tolerance` at least.
        canaries: token paths of the tree.
        log_probs: their scores by another path; nats.
        left_out: paths that do not count: the planted secrets, the canaries themselves among them.
        tolerance: scores closer than this tie; nats.
        node_budget: nodes the walk may expand in all.
        judge: asked of what would be counted: is it a sibling, does the tokenizer write its text as that path? One that it
            writes otherwise is scored by another path, which may lie outside the tree: ranks behind it are not exact.
        max_checked: candidates to ask that of, the likeliest first; beyond, a rank is bounded and not exact.
        whole: walk the whole tree, whatever the scores.
        progress: called with nodes expanded after each chunk.

    Returns:
        `SearchResult`. Sources of error are the arithmetic alone: no candidate is sampled.
    """
    limits = {"max_nodes": node_budget, "max_leaves": None if whole else LEAVES_PER_CHECK * max_checked}
    reached = _walk_down(walk, [-math.inf] if whole else _floors(log_probs, tolerance), limits, progress)
    found = [Found(path, log_prob) for path, _, log_prob in walk.found()]
    by_path = {one.path: one.log_prob for one in found}
    scores = [
        _settle(by_path.get(tuple(path)), given, reached, tolerance) for path, given in zip(canaries, log_probs, strict=True)
    ]
    least = min((score for score in scores if score is not None), default=0.0) - tolerance
    candidates = [one for one in found if one.log_prob >= least and one.path not in left_out]
    counted, refused, unsure = _check(candidates, judge, max_checked)
    ranks = [
        RankBounds(given, 1, UNBOUNDED, 0, False)
        if score is None
        else _bounds(walk, score, counted, unsure, tolerance, is_complete=reached <= score - tolerance)
        for score, given in zip(scores, log_probs, strict=True)
    ]
    return SearchResult(ranks, found, reached, walk.num_nodes, refused, scores.count(None))


def _settle(walked: float | None, given: float, reached: float, tolerance: float) -> float | None:
    """The score to rank a canary by; None where walk and rows disagree by more than the tolerance, so that neither is right."""
    if walked is None:
        return given if reached > given - tolerance else None
    return walked if abs(walked - given) <= tolerance else None


def _walk_down(
    walk: TreeWalk, floors: Sequence[float], limits: dict[str, int | None], progress: Callable[[int], None] | None
) -> float:
    """Lower the floor canary by canary, the likeliest first; the floor that was reached whole.

    Nodes grow with exp(-floor) at most. A few nats above a low floor their number tells, for a fiftieth of the cost, whether
    the budget could ever be enough.
    """
    reached, budget = math.inf, limits["max_nodes"] or 0
    for floor in floors:
        if -math.inf < floor < -2 * PROBE and floor + PROBE < reached:
            if not walk.advance(floor + PROBE, progress=progress, **limits):
                break
            reached = floor + PROBE
            if walk.num_nodes * math.exp(PROBE) > HOPE * budget:
                break
        if not walk.advance(floor, progress=progress, **limits):
            break
        reached = floor
    return reached


def _floors(log_probs: Sequence[float], tolerance: float) -> list[float]:
    """Floors of the rounds: below each canary by twice the tolerance, since the walk may score it otherwise."""
    floors: list[float] = []
    for log_prob in sorted(log_probs):
        floor = log_prob - 2 * tolerance
        if not floors or floor > floors[-1] + ROUND:
            floors.append(floor)
    return floors[::-1]


def _check(
    candidates: Sequence[Found], judge: Callable[[Sequence[Path]], Sequence[Standing]] | None, max_checked: int
) -> tuple[Floats, int, Floats]:
    """Scores of what counts, how many were refused, and scores of what may count: refused, or not asked for."""
    scores = np.array([one.log_prob for one in candidates])
    if judge is None or not candidates:
        return scores, 0, scores[:0]
    standing = np.array(judge([one.path for one in candidates[:max_checked]]))
    asked, refused = scores[:max_checked], standing == "refused"
    return asked[standing == "counts"], int(refused.sum()), np.concatenate([asked[refused], scores[max_checked:]])


def _bounds(
    walk: TreeWalk, score: float, counted: Floats, unsure: Floats, tolerance: float, *, is_complete: bool
) -> RankBounds:
    above = int((counted > score + tolerance).sum())
    with_ties = int((counted >= score - tolerance).sum())
    may_be_above = int((unsure >= score - tolerance).sum())
    high = 1 + with_ties + may_be_above + (0 if is_complete else _hidden(walk, score, tolerance))
    return RankBounds(score, 1 + above, high, with_ties - above, is_complete and may_be_above == 0)


def _hidden(walk: TreeWalk, score: float, tolerance: float) -> int:
    """At most this many candidates below unexpanded nodes are as likely: each holds at least the canary's probability."""
    total = 0.0
    for nodes in walk.frontier:
        distinct, inverse = np.unique(nodes.states, return_inverse=True)
        leaves = np.array([float(walk.tree.num_leaves(state)) for state in distinct.tolist()])[inverse]
        room = np.minimum(nodes.log_probs - score + tolerance, 700.0)
        total += float(np.minimum(leaves, np.floor(np.exp(room) * (1 + 1e-12))).sum())
    return math.ceil(total * (1 + 1e-9))
