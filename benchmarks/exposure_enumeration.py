"""Every candidate of a space scored behind a realistic template: whole rows in batches, or one walk over their token tree.

The naive way runs the template and all but the last digit of each candidate, and reads the log-softmax of the secret's own
positions alone. At full size it is timed on a tenth of the candidates and scaled by ten; all of these scores are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from measuring import alternate, report, timed
from models import digit_tokenizer, draw, in_words, small_llama, text_rows, train

from memguard.canaries.encoding import EncodedSecret, SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.token_tree import TokenTree, build_token_tree
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.walk import TreeWalk

TARGET = ["ratio >= 100", "max_abs_err <= 1e-4"]
TEMPLATE = (
    "Dear customer, thank you for opening an account with our branch. Your new card will reach you by post within five "
    "working days. Your personal access code is {secret}. Please change it when you first use the card."
)
BATCH = 256


def naive(model: Any, rows: Sequence[EncodedSecret]) -> list[float]:
    """Summed log-probability of each secret, by whole rows; nats."""
    scores: list[float] = []
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        ids = torch.tensor([row.ids[: row.end] for row in batch])
        start = batch[0].start
        logits = model(input_ids=ids[:, :-1], logits_to_keep=ids.shape[1] - start).logits
        picked = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, start:, None])
        scores += picked.squeeze(2).sum(dim=1).tolist()
    return scores


def ours(model: Any, tree: TokenTree, prefix_ids: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Log-probability by token path, each node of the tree computed once; nats."""
    scorer = Scorer(model)
    scorer.prepare([Span((*prefix_ids, *prefix_ids[-1:]), len(prefix_ids), len(prefix_ids) + 1)])
    walk = TreeWalk(scorer.model, scorer.batches, prefix_ids, tree)
    walk.advance(-math.inf)
    return {path: log_prob for path, _, log_prob in walk.found()}


def run(quick: bool) -> dict[str, Any]:
    """Both ways on a model that has seen some text."""
    digits, scale = (3, 1) if quick else (5, 10)
    model = small_llama(layers=2, width=64) if quick else small_llama()
    train(model, draw(text_rows(64), 32, steps=5 if quick else 30))
    one = CanaryFormat(name="code", template=TEMPLATE, secret=DigitsSpace(length=digits))
    encoder = SecretEncoder(digit_tokenizer(), *frame_ids(digit_tokenizer()))
    secrets = [f"{number:0{digits}}" for number in range(0, 10**digits, scale)]
    rows = [row for row in encoder.encode(one, secrets, [None] * len(secrets)) if row is not None]
    tree_s, tree = timed(lambda: build_token_tree(one, encoder, name=None))
    assert isinstance(tree, TokenTree), tree.reason
    prefix_ids = rows[0].ids[: rows[0].start]
    with audit_mode(model):
        pair = alternate(lambda: naive(model, rows), lambda: ours(model, tree, prefix_ids), runs=3)
    walked = [pair.ours[row.ids[row.start : row.end]] for row in rows]
    return report(
        "exposure_enumeration",
        baseline_s=pair.baseline_s * scale,
        ours_s=pair.ours_s,
        max_abs_err=max(abs(one - other) for one, other in zip(pair.baseline, walked, strict=True)),
        model=in_words(model),
        template=TEMPLATE,
        lengths={"template_tokens": len(rows[0].ids) - digits, "prefix_tokens": len(prefix_ids), "secret_tokens": digits},
        runs=pair.runs,
        target=TARGET,
        num_candidates=len(pair.ours),
        num_compared=len(rows),
        baseline_measured=f"on {len(rows)} candidates, {BATCH} a batch, times {scale}",
        tree_s=tree_s,
        ratio_with_tree=pair.baseline_s * scale / (pair.ours_s + tree_s),
    )
