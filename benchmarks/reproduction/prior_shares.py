"""What P3 and P5 share: the share of extractable sequences that fail Prior-Aware memorisation, and how sequences are found.

Entities are stretches of four tokens at words' edges, by how often they occur in rows seen once an epoch; passages are the
last 32 tokens of repeated rows. The prior is taken over prefixes of the same kind. As for records in an audit, the belief
ratio n to exceed is a quantile of text that was never trained on, of the same kind and model; the paper calibrates n for
each model, too, on text that is easy for all of them. A fixed 10 stands beside it.
Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny_runs import Row, tokenizer

from memguard.metrics.prior_aware import estimate_prior_aware
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

ROW_LENGTH = 96
ENTITY, PASSAGE = 4, 32  # tokens
THRESHOLD = {ENTITY: 0.01, PASSAGE: 1e-4}  # m, by the tokens of a suffix
RATIO = 10.0  # the fixed n
QUANTILE = 0.95  # of the ratios of held-out text: n
STRATA = ((1, 1), (2, 4), (5, 19), (20, 10**9))  # occurrences in the training rows


@dataclass(frozen=True)
class Place:
    """A suffix in its row: `row[start:end]`, and how often it occurs in rows that are trained on once an epoch."""

    row: Row
    start: int
    end: int
    occurrences: int


@functools.cache
def word_edges() -> tuple[frozenset[int], frozenset[int]]:
    """Tokens that begin with a blank, and those of them that are letters behind it."""
    words = tokenizer()
    begins = frozenset(token for token in range(len(words)) if words.decode([token])[:1].isspace())
    return begins, frozenset(token for token in begins if words.decode([token]).strip().isalpha())


def sites(rows: Sequence[Row], size: int, *, first: int) -> list[tuple[Row, int]]:
    """Every place, in random order, where a sequence of the kind may begin; no earlier in a row than `first`."""
    begins, plain = word_edges()
    if size == PASSAGE:
        return [(row, len(row) - PASSAGE) for row in rows]
    order = [
        (row, at) for row in rows for at in range(first, len(row) - ENTITY) if row[at] in plain and row[at + ENTITY] in begins
    ]
    random.Random("sites").shuffle(order)
    return order


def entities(rows: Sequence[Row], *, each: int, first: int) -> list[Place]:
    """`each` distinct entities in every stratum of occurrences; rows must be distinct, or copies would pass for frequency."""
    counts = Counter(row[at : at + ENTITY] for row in rows for at in range(1, len(row) - ENTITY + 1))
    where: dict[Row, tuple[Row, int]] = {}
    for row, at in sites(rows, ENTITY, first=first):
        where.setdefault(row[at : at + ENTITY], (row, at))
    chosen = []
    for low, high in STRATA:
        mine = [(piece, place) for piece, place in where.items() if low <= counts[piece] <= high][:each]
        chosen += [Place(row, at, at + ENTITY, counts[piece]) for piece, (row, at) in mine]
    return chosen


def places(rows: Sequence[Row], size: int, *, first: int, number: int, occurrences: int = 0) -> list[Place]:
    """Some sequences of a kind, whatever they hold."""
    return [Place(row, at, at + size, occurrences) for row, at in sites(rows, size, first=first)[:number]]


def judge(
    model: Any, sequences: Sequence[Place], others: Sequence[Place], *, prefix: int, extractable: bool
) -> list[dict[str, Any]]:
    """Occurrences, log belief ratio and verdict of sequences behind `prefix` tokens of their own rows.

    Args:
        model: trained.
        sequences: all of one kind.
        others: sequences of that kind whose prefixes the prior is taken over; a sequence's own is left out.
        prefix: tokens.
        extractable: keep only those whose probability exceeds m.
    """
    size = sequences[0].end - sequences[0].start
    spans = [Span(one.row[one.start - prefix : one.end], prefix, prefix + size) for one in sequences]
    windows = list(dict.fromkeys(one.row[one.start - prefix : one.start] for one in others))
    found: list[dict[str, Any]] = []
    with audit_mode(model):
        scorer = Scorer(model)
        log_probs = np.minimum(scorer.score(spans).log_probs, 0.0)
        kept = [index for index, one in enumerate(log_probs) if not extractable or one > math.log(THRESHOLD[size])]
        grid = scorer.grid(windows, [spans[index].suffix_ids for index in kept]) if kept else np.zeros((0, 0))
    for place, index in enumerate(kept):
        chosen = [row for row, window in enumerate(windows) if window != spans[index].prefix_ids]
        priors = np.minimum(grid[chosen, place], 0.0)
        estimate = estimate_prior_aware(float(log_probs[index]), priors, m=THRESHOLD[size], n=RATIO)
        found.append(
            {
                "occurrences": sequences[index].occurrences,
                "ratio": estimate.log_belief_ratio,
                "is_undecided": estimate.verdict == "undecided",
            }
        )
    return found


def summary(found: Sequence[dict[str, Any]], log_quantile: float) -> dict[str, Any]:
    """Extractable sequences and how many of them fail PA: at n from held-out text, and at n = 10; median log ratio.

    The paper's rule looks at the point estimate; how many the sample of prefixes leaves undecided stands beside it.
    """
    ratios = np.array([one["ratio"] for one in found])
    count = len(found)
    return {
        "extractable": count,
        "failing": int((ratios <= log_quantile).sum()),
        "failing_fixed": int((ratios <= math.log(RATIO)).sum()),
        "undecided": sum(one["is_undecided"] for one in found),
        "median_ratio": float(np.median(ratios)) if count else None,
    }


def as_cells(figures: dict[str, Any]) -> tuple[Any, ...]:
    """The end of a table's row: shares that fail PA by either n, undecided ones, median log ratio."""
    count = figures["extractable"]
    if not count:
        return ("-", "-", 0, "-")
    shares = (f"{figures[name] / count:.0%}" for name in ("failing", "failing_fixed"))
    return (*shares, figures["undecided"], round(figures["median_ratio"], 2))


CELLS = ("fail PA, n held out", "fail PA, n = 10", "undecided", "median log ratio, nats")
