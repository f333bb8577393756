"""Prior-Aware verdicts of 40 memorised sequences behind 500 prefixes: every pair to its end, or only as far as needed.

Some suffixes were trained behind one prefix, some behind many, so both verdicts occur. The naive way gives every verdict
once, for the comparison; its time is measured on a few sequences of each kind and scaled to all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measuring import alternate, report
from models import in_words, small_llama, text_rows, train

from memguard.audit.config import PriorAwareSettings
from memguard.audit.prior import PrefixSource, PriorMeasurement
from memguard.audit.report import PriorAware
from memguard.metrics.prior_aware import PriorAwareEstimate, estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

TARGET = ["ratio >= 10", "token_ratio >= 20", "identical_verdicts == true", "max_abs_err <= 1e-3"]
LENGTH = 50  # tokens of a prefix, and of a suffix
BATCH = 64
Row = tuple[int, ...]


N = 10.0  # belief ratio that makes a sequence PA


@dataclass(frozen=True)
class Sizes:
    """Sequences of either kind, prior prefixes, training steps, sequences whose naive time is measured."""

    own: int
    common: int
    prefixes: int
    steps: int
    timed: int


@dataclass(frozen=True)
class Task:
    """Sequences to judge, and text that no sequence was cut from."""

    sequences: list[Row]
    text: list[Row]
    settings: PriorAwareSettings


def naive(
    model: Any, sequences: Sequence[Row], windows: Sequence[Row], settings: PriorAwareSettings
) -> list[PriorAwareEstimate]:
    """Every suffix behind every prefix, whole rows in batches."""
    verdicts = []
    for sequence in sequences:
        suffix = sequence[LENGTH:]
        log_prob = _scores(model, [sequence])[0]
        priors = _scores(model, [(*window, *suffix) for window in windows])
        verdicts.append(estimate_prior_aware(log_prob, priors, m=settings.m, n=N))
    return verdicts


def _scores(model: Any, rows: Sequence[Row]) -> list[float]:
    """Summed log-probability of what stands behind the prefixes; nats."""
    scores: list[float] = []
    for first in range(0, len(rows), BATCH):
        ids = torch.tensor(rows[first : first + BATCH])
        logits = model(input_ids=ids[:, :-1], logits_to_keep=LENGTH).logits
        picked = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, LENGTH:, None])
        scores += picked.squeeze(2).double().sum(dim=1).clamp(max=0.0).tolist()
    return scores


def ours(model: Any, task: Task) -> tuple[list[PriorAware], int]:
    """As an audit does it; verdicts with their bounds, and tokens sent through the model."""
    scorer = Scorer(model)
    spans = [Span(sequence, LENGTH, 2 * LENGTH) for sequence in task.sequences]
    log_probs = scorer.score(spans).log_probs.tolist()
    measurement = PriorMeasurement(scorer, _source(task), task.settings, lead_ids=(), seed=0, tolerance=1e-3)
    found = [measurement.measure(span, log_prob, n=N) for span, log_prob in zip(spans, log_probs, strict=True)]
    return found, scorer.model.num_token_forwards


def _source(task: Task) -> PrefixSource:
    return PrefixSource(len(task.text), task.text.__getitem__)


def windows_of(task: Task) -> list[Row]:
    """The prior prefixes that `PriorMeasurement` cuts."""
    return _source(task).windows(task.settings.prefixes, length=LENGTH, lead_ids=(), seed=f"memguard/prior/0/{LENGTH}")


def draw_task(sizes: Sizes) -> Task:
    """Half of the text for sequences, half for prior prefixes; common suffixes are one passage behind many prefixes."""
    rows = [tuple(row) for row in text_rows(2 * LENGTH)]
    random.Random(0).shuffle(rows)
    own, rest = rows[: sizes.own], rows[sizes.own :]
    passage = rest[0][LENGTH:]
    common = [(*row[:LENGTH], *passage) for row in rest[1 : 1 + sizes.common]]
    return Task(own + common, rest[1 + sizes.common :], PriorAwareSettings(prefixes=sizes.prefixes))


def batches(task: Task, sizes: Sizes) -> Iterable[list[Row]]:
    """All sequences each step, and text as it goes on behind 2 windows, as the common passage behind 14."""
    rng = random.Random(1)
    passage = task.sequences[-1][LENGTH:]
    for _ in range(sizes.steps):
        plain = rng.sample(task.text, 16)
        yield [*task.sequences, *plain[:2], *((*row[:LENGTH], *passage) for row in plain[2:])]


def errors(estimates: Sequence[PriorAwareEstimate], found: Sequence[PriorAware]) -> float:
    """Largest difference of P(s|p), and how far the full mean lies outside the bounds that were stopped at; nats."""
    worst = 0.0
    for estimate, one in zip(estimates, found, strict=True):
        worst = max(worst, abs(estimate.log_prob - one.log_prob))
        if one.prior_log_prob is not None:
            low = one.prior_log_prob_low if one.prior_log_prob_low is not None else -math.inf
            worst = max(worst, low - estimate.prior_log_prob, estimate.prior_log_prob - one.prior_log_prob)
    return worst


def run(quick: bool) -> dict[str, Any]:
    """Both ways on a model that has learnt the sequences."""
    sizes = Sizes(own=6, common=2, prefixes=200, steps=160, timed=2) if quick else Sizes(34, 6, 500, 120, 4)
    task = draw_task(sizes)
    model = small_llama(layers=2, width=64) if quick else small_llama()
    train(model, batches(task, sizes), start=LENGTH, learning_rate=5e-3 if quick else 3e-3)
    few = [*task.sequences[: sizes.timed // 2], *task.sequences[-sizes.timed // 2 :]]
    windows, scale = windows_of(task), len(task.sequences) / len(few)
    with audit_mode(model):
        estimates = naive(model, task.sequences, windows, task.settings)
        pair = alternate(lambda: naive(model, few, windows, task.settings), lambda: ours(model, task), runs=3)
    found, tokens = pair.ours
    verdicts = [estimate.verdict for estimate in estimates]
    naive_tokens = len(verdicts) * (len(windows) + 1) * (2 * LENGTH - 1)
    return report(
        "pa_verdict",
        baseline_s=pair.baseline_s * scale,
        ours_s=pair.ours_s,
        max_abs_err=errors(estimates, found),
        model=in_words(model),
        template=None,
        lengths={"prefix_tokens": LENGTH, "suffix_tokens": LENGTH, "prior_prefixes": len(windows), "sequences": len(verdicts)},
        runs=pair.runs,
        target=TARGET,
        baseline_measured=f"on {len(few)} sequences, {BATCH} rows a batch, times {scale:g}",
        identical_verdicts=verdicts == [one.verdict for one in found],
        verdicts={verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        token_forwards=tokens,
        token_ratio=naive_tokens / tokens,
    )
