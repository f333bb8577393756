"""How far the scoring paths of one model differ on the same candidates: the width of a tie, in nats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memguard.audit.items import Group
from memguard.audit.rows import GroupScores
from memguard.scoring.scorer import Scorer
from memguard.scoring.trees import ExplicitTree
from memguard.scoring.walk import TreeWalk

NUM_RESCORED = 4  # references of a format
ROUNDING = 1e-5  # nats that float32 sums leave open even where no path moves a score


def measure_tolerance(scorer: Scorer, scored: Sequence[GroupScores]) -> float:
    """Twice the largest move of a reference's score when it is scored alone or along a tree, a few of each format; nats.

    Source: statistics specification, section 1.
    """
    moves = [0.0]
    for item in {item.group.format.name: item for item in scored}.values():
        given = item.reference_log_probs[:NUM_RESCORED].tolist()
        for log_probs in (_alone(scorer, item.group), _along_a_tree(scorer, item.group)):
            moves += [abs(one - other) for one, other in zip(log_probs, given, strict=True)]
    return 2.0 * max(moves) + ROUNDING


def _alone(scorer: Scorer, group: Group) -> list[float]:
    return [float(scorer.score([span]).log_probs[0]) for span in group.reference_spans[:NUM_RESCORED]]


def _along_a_tree(scorer: Scorer, group: Group) -> list[float]:
    spans = group.reference_spans[:NUM_RESCORED]
    tree = ExplicitTree([span.suffix_ids for span in spans])
    walk = TreeWalk(scorer.model, scorer.batches, group.prefix_ids, tree, label=f"references of format '{group.format.name}'")
    walk.advance(-math.inf)
    by_candidate = {tree.candidate_of(state): log_prob for _, state, log_prob in walk.found()}
    return [by_candidate[index] for index in range(len(spans))]
