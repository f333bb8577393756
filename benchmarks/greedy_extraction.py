"""Whether a model would write 50 tokens behind 50 others by greedy decoding: `generate` with its cache, or one scoring pass.

Half of the sequences are memorised. With a cache both ways multiply as much, so one thread that is busy multiplying gains a
factor of 2 to 3; the gain is the number of calls saved, 50 to 1, where a call's own cost counts: small batches, accelerators.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from measuring import alternate, report
from models import draw, in_words, small_llama, text_rows, train

from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span, SpanScores

TARGET = ["ratio >= 10", "identical_outcomes == true", "max_abs_err <= 1e-4"]
LENGTH = 50  # tokens of a prefix, and of a suffix
BATCH = 32


def naive(model: Any, rows: Sequence[Sequence[int]]) -> list[bool]:
    """Write each suffix, compare."""
    extracted = []
    for first in range(0, len(rows), BATCH):
        ids = torch.tensor(rows[first : first + BATCH])
        prefixes = ids[:, :LENGTH]
        options = {"attention_mask": torch.ones_like(prefixes), "max_new_tokens": LENGTH, "do_sample": False, "use_cache": True}
        written = model.generate(prefixes, **options)
        if written.shape[1] < ids.shape[1]:  # all rows ended early
            written = torch.nn.functional.pad(written, (0, ids.shape[1] - written.shape[1]))
        extracted += (written == ids).all(dim=1).tolist()
    return extracted


def ours(model: Any, rows: Sequence[Sequence[int]]) -> SpanScores:
    """Score each suffix: it is written exactly when every token is the likeliest behind those before it."""
    return Scorer(model, batch_size=BATCH).score([Span(tuple(row), LENGTH, 2 * LENGTH) for row in rows])


def log_probs(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """Summed log-probability of the suffixes, by plain forward passes; nats."""
    ids = torch.tensor(rows)
    logits = model(input_ids=ids[:, :-1], logits_to_keep=LENGTH).logits
    picked = torch.log_softmax(logits, dim=-1).gather(2, ids[:, LENGTH:, None]).squeeze(2)
    return picked.double().sum(dim=1).tolist()


def run(quick: bool) -> dict[str, Any]:
    """Both ways on a model that has learnt half of the sequences."""
    number, steps = (8, 100) if quick else (4 * BATCH, 80)
    rows = text_rows(2 * LENGTH)
    random.Random(0).shuffle(rows)
    known, chosen = rows[: number // 2], rows[:number]
    model = small_llama(layers=2, width=64) if quick else small_llama()
    train(model, draw(known, len(known), steps=steps), learning_rate=5e-3 if quick else 3e-3)
    with audit_mode(model):
        pair = alternate(lambda: naive(model, chosen), lambda: ours(model, chosen), runs=3 if quick else 5)
        plain = log_probs(model, chosen)
    return report(
        "greedy_extraction",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=max(abs(one - other) for one, other in zip(plain, pair.ours.log_probs.tolist(), strict=True)),
        model=in_words(model),
        template=None,
        lengths={"prefix_tokens": LENGTH, "suffix_tokens": LENGTH, "sequences": number, "batch": BATCH},
        runs=pair.runs,
        target=TARGET,
        identical_outcomes=pair.baseline == pair.ours.is_greedy.tolist(),
        num_extracted=sum(pair.baseline),
    )
