"""The exact rank of a memorised card number among all 10^15: impossible by enumeration, a few thousand nodes by search.

Two moments of one training: when the canary's log-probability first comes near -9 nats, and when it is memorised. The
naive seconds are extrapolated: a batched forward pass a candidate, measured, times the size of the space.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import repeated, report, timed
from models import digit_tokenizer, in_words, small_llama, text_rows, training_step

from memguard.canaries.encoding import EncodedSecret, SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat, LuhnSpace
from memguard.canaries.token_tree import TokenTree, build_token_tree
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.search import SearchResult, count_above
from memguard.scoring.walk import TreeWalk

TARGET = ["is_exact == true", "is_exact_near == true", "nodes_expanded_near <= 10000", "log_prob >= -9", "max_abs_err <= 1e-3"]
TEMPLATE = "The order was paid by card, number {secret}, and shipped the next day."
TOLERANCE = 1e-3  # nats
NEAR = -9.0  # nats
MEMORISED = -1.5  # nats: other customers' numbers stand in the text as well
BUDGET = 1_000_000
BATCH = 256
RUNS = 3


@dataclass(frozen=True)
class Moments:
    """One model at two moments of its training, and the canary in it."""

    near: Any
    memorised: Any
    canary: EncodedSecret


def naive(model: Any, rows: Sequence[tuple[int, ...]], start: int) -> list[float]:
    """Summed log-probability of what stands from `start` on, by whole rows; nats."""
    scores: list[float] = []
    for first in range(0, len(rows), BATCH):
        ids = torch.tensor(rows[first : first + BATCH])
        logits = model(input_ids=ids[:, :-1], logits_to_keep=ids.shape[1] - start).logits
        picked = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, start:, None])
        scores += picked.squeeze(2).sum(dim=1).tolist()
    return scores


def ours(model: Any, tree: TokenTree, canary: EncodedSecret) -> SearchResult:
    """Rank of the canary, without and with ties."""
    prefix, path = canary.ids[: canary.start], canary.ids[canary.start : canary.end]
    scorer = Scorer(model)
    log_prob = float(scorer.score([Span(canary.ids, canary.start, canary.end)]).log_probs[0])
    walk = TreeWalk(scorer.model, scorer.batches, prefix, tree, keep=log_prob - 3 * TOLERANCE)
    return count_above(walk, [path], [log_prob], left_out=frozenset({path}), tolerance=TOLERANCE, node_budget=BUDGET)


def train_twice(one: CanaryFormat, encoder: SecretEncoder, *, quick: bool) -> Moments:
    """Train on text, other customers' numbers and four copies of the canary a step, until it is memorised."""
    model = small_llama(layers=2, width=64) if quick else small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3 if quick else 2e-3, weight_decay=0.0)
    rng, text = random.Random(0), text_rows(48)
    canary = encoder.encode(one, [one.secret.draw(rng)], [None])[0]
    assert canary is not None
    near: Any = None
    for _ in range(1000):
        secrets = [one.secret.draw(rng) for _ in range(4)]
        others = [row.ids for row in encoder.encode(one, secrets, [None] * 4) if row is not None]
        training_step(model, optimizer, [*rng.sample(text, 8), *others, *[canary.ids] * 4])
        with audit_mode(model):
            (log_prob,) = naive(model, [canary.ids[: canary.end]], canary.start)
        if near is None and log_prob > NEAR:
            near = copy.deepcopy(model)
        if log_prob > MEMORISED:
            return Moments(near, model, canary)
    raise SystemExit(f"exact_rank: the canary must be memorised within 1,000 steps, got {log_prob:.1f} nats.")


def seconds_a_candidate(model: Any, one: CanaryFormat, encoder: SecretEncoder, number: int) -> float:
    """What the naive way takes, by a sample."""
    rng = random.Random(1)
    secrets = [one.secret.draw(rng) for _ in range(number)]
    rows = [row for row in encoder.encode(one, secrets, [None] * number) if row is not None]
    return timed(lambda: naive(model, [row.ids[: row.end] for row in rows], rows[0].start))[0] / number


def search_error(model: Any, result: SearchResult, canary: EncodedSecret) -> float:
    """Largest difference of the likeliest candidates' scores from those of whole rows; nats."""
    found = result.likeliest[:1024]
    scores = naive(model, [(*canary.ids[: canary.start], *one.path) for one in found], canary.start)
    return max(abs(one.log_prob - score) for one, score in zip(found, scores, strict=True))


def run(quick: bool) -> dict[str, Any]:
    """Ranks at both moments, and what one candidate costs the naive way."""
    one = CanaryFormat(name="card", template=TEMPLATE, secret=LuhnSpace(digits=16))
    encoder = SecretEncoder(digit_tokenizer(), *frame_ids(digit_tokenizer()))
    moments = train_twice(one, encoder, quick=quick)
    canary = moments.canary
    tree_s, tree = timed(lambda: build_token_tree(one, encoder, name=None))
    assert isinstance(tree, TokenTree), tree.reason
    fields: dict[str, Any] = {}
    errors = []
    for suffix, model in (("", moments.memorised), ("_near", moments.near)):
        with audit_mode(model):
            seconds, result = repeated(lambda model=model: ours(model, tree, canary), runs=RUNS)
            errors.append(search_error(model, result, canary))
        rank = result.ranks[0]
        fields |= {f"log_prob{suffix}": rank.log_prob, f"rank{suffix}": rank.rank_high, f"is_exact{suffix}": rank.is_exact}
        fields |= {f"nodes_expanded{suffix}": result.num_nodes, f"seconds{suffix}": seconds}
    with audit_mode(moments.memorised):
        each = seconds_a_candidate(moments.memorised, one, encoder, 256 if quick else 2048)
    return report(
        "exact_rank",
        baseline_s=each * one.secret.size,
        ours_s=fields["seconds"],
        max_abs_err=max(errors),
        model=in_words(moments.memorised),
        template=TEMPLATE,
        lengths={"prefix_tokens": canary.start, "secret_tokens": canary.end - canary.start, "row_tokens": len(canary.ids)},
        runs=RUNS,
        target=TARGET,
        baseline_measured=f"extrapolated: {each:.2g} s a candidate, {BATCH} a batch, times the space",
        secret_space_size=one.secret.size,
        tree_s=tree_s,
        **fields,
    )
