"""S2: best-first search returns the canary first exactly when its rank is 1, and then looks at few nodes.

The search knows nothing of the canary: it lowers a floor until a whole candidate stands above it. The rank comes from
another path: every candidate of the space scored as a row. Source: Carlini et al., The Secret Sharer, section 5.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from tiny_runs import Cache, Finding, text_rows, tiny_llama, tokenizer, train

from memguard.canaries.automata import iterate_secrets
from memguard.canaries.encoding import EncodedSecret, SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.token_tree import TokenTree, build_token_tree
from memguard.metrics.exposure import KnownRank, estimate_exposure
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.walk import TreeWalk

CLAIM = "The first candidate of a best-first search is the canary exactly when its rank is 1; a memorised one takes few nodes."
TIE = 1e-4  # nats: closer than this, either candidate may come first
STEP = 0.25  # nats by which the floor is lowered
CUES = ("north gate", "south gate", "old vault", "new vault", "front desk", "back door", "main server", "spare server")


@dataclass(frozen=True)
class Sizes:
    """Digits of a secret, models, copies of the canaries of each model (one a cue), text rows, epochs."""

    digits: int
    seeds: int
    copies: tuple[int, ...]
    rows: int
    epochs: int


FULL = Sizes(4, 4, (0, 2, 4, 8, 12, 16, 24, 32), 400, 8)
SMOKE = Sizes(3, 1, (0, 32), 120, 6)


def first_leaf(walk: TreeWalk) -> tuple[int, ...]:
    """The likeliest candidate, found without knowing any: lower the floor until a candidate stands at or above it."""
    floor = 0.0
    while True:
        floor -= STEP
        walk.advance(floor)
        found = walk.found()
        if found and found[0][2] >= floor:
            return found[0][0]


def look(scorer: Scorer, tree: TokenTree, canary: EncodedSecret, every: list[EncodedSecret]) -> dict[str, Any]:
    """Rank by scoring the whole space as rows, and what the search returns."""
    spans = [Span(item.ids, item.start, item.end) for item in (canary, *every)]
    log_probs = scorer.score(spans).log_probs
    own, others = float(log_probs[0]), log_probs[1:]
    higher, tied = int((others > own + TIE).sum()), int((abs(others - own) <= TIE).sum()) - 1
    known = KnownRank(1 + higher, 1 + higher + tied, True)
    exposure = estimate_exposure(own, others, secret_space_size=len(others), tolerance=TIE, known=known)
    walk = TreeWalk(scorer.model, scorer.batches, canary.ids[: canary.start], tree)
    is_first = first_leaf(walk) == canary.ids[canary.start : canary.end]
    return {"rank": 1 + higher, "tied": tied, "is_first": is_first, "nodes": walk.num_nodes, "bits": exposure.bits}


def one_run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Train on one canary a cue, and look at each."""
    encoder = SecretEncoder(tokenizer(), *frame_ids(tokenizer()))
    space, rng = DigitsSpace(length=sizes.digits), random.Random(seed)
    formats = [CanaryFormat(name="code", template=f"The code of the {cue} is {{secret}}.", secret=space) for cue in CUES]
    planted: list[EncodedSecret] = []
    for one, _ in zip(formats, sizes.copies, strict=False):
        (item,) = encoder.encode(one, [space.draw(rng)], [None])
        assert item is not None
        planted.append(item)
    rows = [item.ids for item, copies in zip(planted, sizes.copies, strict=True) for _ in range(copies)]
    model = tiny_llama(seed=seed)
    train(model, [*text_rows()[: sizes.rows], *rows], epochs=sizes.epochs, seed=seed)
    secrets = list(iterate_secrets(space))
    looks = []
    with audit_mode(model):
        scorer = Scorer(model)
        for one, item, copies in zip(formats, planted, sizes.copies, strict=False):
            every = [other for other in encoder.encode(one, secrets, [None] * len(secrets)) if other is not None]
            tree = build_token_tree(one, encoder, name=None)
            assert isinstance(tree, TokenTree)
            looks.append({"copies": copies, **look(scorer, tree, item, every)})
    return {"looks": looks}


def run(sizes: Sizes, cache: Cache) -> Finding:
    """All canaries of all models; the identity has no tolerance but ties."""
    looks = [one for seed in range(sizes.seeds) for one in cache.get("S2", one_run, sizes, seed)["looks"]]
    rows = []
    for copies in sizes.copies:
        mine = [one for one in looks if one["copies"] == copies]
        mean_bits = sum(one["bits"] for one in mine) / len(mine)
        first = sum(one["rank"] == 1 for one in mine)
        found = sum(one["is_first"] for one in mine)
        rows.append((copies, len(mine), round(mean_bits, 2), first, found, max(one["nodes"] for one in mine)))
    clear = [one for one in looks if one["tied"] == 0]
    agreeing = sum((one["rank"] == 1) == one["is_first"] for one in clear)
    memorised = [one["nodes"] for one in looks if one["rank"] == 1]
    size = 10**sizes.digits
    figures = {
        "num_canaries": len(looks),
        "num_without_ties": len(clear),
        "num_agreeing": agreeing,
        "num_first": len(memorised),
        "num_not_first": len(clear) - sum(one["rank"] == 1 for one in clear),
        "most_nodes_when_first": max(memorised, default=None),
        "secret_space_size": size,
    }
    both = bool(memorised) and figures["num_not_first"] > 0
    few = bool(memorised) and max(memorised) <= size / 10
    reason = (
        f"{agreeing} of {len(clear)} canaries without ties agree, {len(memorised)} of them at rank 1; at most "
        f"{max(memorised, default=math.nan)} nodes for those, in a space of {size}."
    )
    columns = ("copies", "canaries", "mean bits", "at rank 1", "found first", "most nodes")
    return Finding("S2", CLAIM, columns, tuple(rows), figures, agreeing == len(clear) and both and few, reason)
