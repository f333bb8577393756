"""What an audit costs a training run: 132 canaries and 512 references behind one prefix, against one training step.

The step is forward, backward and AdamW on 4,096 tokens, 32 rows of 128. The audit makes its scorer anew, checks included,
and takes log-probabilities and greedy matches of all 644 secrets.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from measuring import alternate, report
from models import digit_tokenizer, draw, in_words, small_llama, text_rows, train, training_step

from memguard.canaries.encoding import SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

TARGET = ["audit_over_step <= 0.6", "max_abs_err <= 1e-4"]
TEMPLATE = "The new access number is {secret}."
STEP_ROWS, STEP_LENGTH = 32, 128


def audit(model: Any, spans: Sequence[Span]) -> list[float]:
    """Summed log-probability of every secret; nats."""
    with audit_mode(model) as inner:
        return Scorer(inner).score(spans).log_probs.tolist()


def plain(model: Any, spans: Sequence[Span]) -> list[float]:
    """The same by whole rows."""
    ids = torch.tensor([span.ids[: span.end] for span in spans])
    start = spans[0].start
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], logits_to_keep=ids.shape[1] - start).logits
    picked = torch.log_softmax(logits, dim=-1).gather(2, ids[:, start:, None]).squeeze(2)
    return picked.double().sum(dim=1).tolist()


def draw_spans(number: int) -> list[Span]:
    """Secrets of nine digits behind the template's beginning."""
    one = CanaryFormat(name="access", template=TEMPLATE, secret=DigitsSpace(length=9))
    encoder, rng = SecretEncoder(digit_tokenizer(), *frame_ids(digit_tokenizer())), random.Random(0)
    secrets = [one.secret.draw(rng) for _ in range(number)]
    rows = encoder.encode(one, secrets, [None] * number)
    return [Span(row.ids, row.start, row.end) for row in rows if row is not None]


def run(quick: bool) -> dict[str, Any]:
    """Steps and audits in turns; the steps train a copy, so that every audit meets the same weights."""
    canaries, references = (8, 24) if quick else (132, 512)
    model = small_llama(layers=2, width=64) if quick else small_llama()
    train(model, draw(text_rows(STEP_LENGTH), STEP_ROWS, steps=2 if quick else 10))
    spans = draw_spans(canaries + references)
    trained = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    rows = text_rows(STEP_LENGTH)[: 4 if quick else STEP_ROWS]
    pair = alternate(lambda: training_step(trained, optimizer, rows), lambda: audit(model, spans), runs=3 if quick else 15)
    return report(
        "audit_vs_step",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=max(abs(one - other) for one, other in zip(plain(model, spans), pair.ours, strict=True)),
        model=in_words(model),
        template=TEMPLATE,
        lengths={
            "canaries": canaries,
            "references": references,
            "prefix_tokens": spans[0].start,
            "secret_tokens": spans[0].end - spans[0].start,
            "step_tokens": sum(map(len, rows)),
        },
        runs=pair.runs,
        target=TARGET,
        audit_over_step=pair.ours_s / pair.baseline_s,
    )
