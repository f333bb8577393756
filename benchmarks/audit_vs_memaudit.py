"""The audit of 132 canaries by memaudit 0.2.0, a peer tool on the package index, and memguard's pass over the same secrets.

memaudit runs every canary alone: one forward pass for its log-probabilities, and greedy completions behind a quarter and
half of the secret. memguard scores all secrets in batches, which says of each whether greedy decoding would write it. To
compare outcomes it also answers memaudit's own prompts, as spans; `same_prompts_ratio` has the time of that in it.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from measuring import alternate, report
from models import digit_tokenizer, draw, in_words, small_llama, text_rows, train

from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

TARGET = ["ratio >= 20", "identical_outcomes == true", "max_abs_err <= 1e-3"]
MISSING = "audit_vs_memaudit needs the package memaudit: install memguard's extra 'bench'."


@dataclass(frozen=True)
class Task:
    """A model, canaries with their rows, and spans of what is scored and of what is completed."""

    model: Any
    canaries: list[Any]
    rows: list[tuple[list[int], tuple[int, int]]]
    scored: list[Span]
    completed: list[Span]


def memaudit_scores(task: Task) -> list[float]:
    """Its own scorer, canary by canary; summed log-probabilities, nats."""
    from memaudit.scorers import SignalsCache, resolve_scorer
    from memaudit.scoring import extract_token_signals, scores_from_signals

    cache, scorer, sums = SignalsCache(), resolve_scorer(None), []
    for ids, span in task.rows:
        signals = extract_token_signals(task.model, ids, span=span, cache=cache, cache_tag="target")
        scores_from_signals(signals)
        scorer.score(signals, None)
        sums.append(float(signals.gold_logprob.sum()))
    return sums


def memaudit_completions(task: Task) -> list[bool]:
    """Its own completions: whether the rest of the secret came out, behind each share of it."""
    from memaudit.scoring import generate_canary_completions

    exact = []
    for canary in task.canaries:
        found = generate_canary_completions(task.model, digit_tokenizer(), canary.secret, canary.secret_token_ids)
        exact += [bool(one["exact"]) for one in found["by_prefix"]]
    return exact


def our_scores(task: Task) -> list[float]:
    """All canaries at once, greedy matches too; nats."""
    return Scorer(task.model).score(task.scored).log_probs.tolist()


def our_completions(task: Task) -> list[bool]:
    """The same by scoring what should come out."""
    return Scorer(task.model).score(task.completed).is_greedy.tolist()


def draw_task(quick: bool) -> Task:
    """memaudit's own canaries in the default numbers, of which a model has learnt sixteen."""
    from memaudit.canaries import generate_canaries
    from memaudit.injection import canary_record
    from memaudit.scoring import locate_secret_span

    tokenizer = digit_tokenizer()
    members, controls = (4, 8) if quick else (32, 100)
    canaries = generate_canaries(tokenizer, n=members, n_controls=controls, family="structured", secret_len=32)
    rows = []
    for canary in canaries:
        ids, span = locate_secret_span(tokenizer, canary_record(canary, "text")["text"], canary.secret, canary.secret_token_ids)
        assert span is not None
        rows.append((ids, span))
    scored = [Span(tuple(ids), start, min(end, len(ids))) for ids, (start, end) in rows]  # its ends may stand past the row
    model = small_llama(layers=2, width=64) if quick else small_llama()
    learnt = [*(ids for ids, _ in rows[: members // 2]), *(canary.secret_token_ids for canary in canaries[: members // 2])]
    mixed = draw(text_rows(48), 8, steps=120)
    train(model, ([*learnt, *text] for text in mixed), learning_rate=5e-3 if quick else 3e-3)
    return Task(model, canaries, rows, scored, [span for canary in canaries for span in completions_of(canary)])


def completions_of(canary: Any, fractions: Sequence[float] = (0.25, 0.5)) -> list[Span]:
    """What memaudit asks the model to complete: the rest of a secret behind its own beginning, written and read again."""
    tokenizer, ids, spans = digit_tokenizer(), list(canary.secret_token_ids), []
    for fraction in fractions:
        cut = max(1, min(len(ids) - 1, math.floor(len(ids) * fraction)))
        prefix = tokenizer.encode(tokenizer.decode(ids[:cut], skip_special_tokens=True), add_special_tokens=False)
        spans.append(Span((*prefix, *ids[cut:]), len(prefix), len(prefix) + len(ids) - cut))
    return spans


def run(quick: bool) -> dict[str, Any]:
    """Scores, completions, and both together."""
    if importlib.util.find_spec("memaudit") is None:
        raise SystemExit(MISSING)
    task = draw_task(quick)
    with audit_mode(task.model):
        scoring = alternate(lambda: memaudit_scores(task), lambda: our_scores(task), runs=3)
        completing = alternate(lambda: memaudit_completions(task), lambda: our_completions(task), runs=3)
    start, end = task.rows[0][1]
    return report(
        "audit_vs_memaudit",
        baseline_s=scoring.baseline_s + completing.baseline_s,
        ours_s=scoring.ours_s,
        max_abs_err=max(abs(one - other) for one, other in zip(scoring.baseline, scoring.ours, strict=True)),
        model=in_words(task.model),
        template=None,
        lengths={"canaries": len(task.canaries), "row_tokens": len(task.rows[0][0]), "secret_tokens": end - start},
        runs=3,
        target=TARGET,
        scoring_baseline_s=scoring.baseline_s,
        scoring_ratio=scoring.baseline_s / scoring.ours_s,
        completions_baseline_s=completing.baseline_s,
        completions_ours_s=completing.ours_s,
        same_prompts_ratio=(scoring.baseline_s + completing.baseline_s) / (scoring.ours_s + completing.ours_s),
        identical_outcomes=completing.baseline == completing.ours,
        num_completed=sum(completing.ours),
    )
