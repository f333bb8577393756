"""A lower bound of the chance that a sampler writes a span up to a few edits, by a beam that the edit distance prunes.

Outputs that differ are disjoint events, so the probabilities of any distinct outputs within the distance add up to a bound
that holds without sampling; beams wide enough make it tight. The distance is Levenshtein's over tokens, between the span
and as many tokens of output.

Source: Cooper et al., near-verbatim extraction by decoding-constrained beam search (2603.24917). Differs: a beam is dropped as
soon as no continuation of it can come back within the distance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.scoring.branching import Branch
from memguard.scoring.sampling import Sampler
from memguard.scoring.scorer import Scorer, Span

Ints = NDArray[np.int64]
MAX_BEAMS_TOGETHER = 256  # rows a forward pass


@dataclass
class _Beams:
    """The beams of one span: tokens written, their log-probability, and the last row of the distance table, (B, T + 1)."""

    span: Span
    tokens: list[tuple[int, ...]]
    log_probs: NDArray[np.float64]
    distances: Ints

    @property
    def target(self) -> Ints:
        return np.array(self.span.suffix_ids)


def near_verbatim_log_probs(
    scorer: Scorer, spans: Sequence[Span], sampler: Sampler, *, max_edits: int, num_beams: int = 20
) -> NDArray[np.float64]:
    """At least this likely, one query writes a span up to `max_edits` edits; log, nats, -inf where no beam got there.

    Args:
        scorer: of the model, which must be able to go on from an encoded prefix.
        spans: what is to be written, behind what.
        sampler: how tokens are drawn.
        max_edits: insertions, deletions and substitutions of tokens that still count; 0 is the verbatim chance.
        num_beams: outputs followed at a time for each span; the span itself is always among them.

    Returns:
        float64, shape (len(spans),), in order. At `max_edits` 0 it equals `score_under_sampler`.

    Raises:
        ValueError: a negative distance or no beam.
        ScoringError: a span the model cannot take; names it.
    """
    if max_edits < 0 or num_beams < 1:
        raise ValueError(f"max_edits must be at least 0 and num_beams at least 1, got {max_edits} and {num_beams}.")
    scorer.check(spans)
    found = np.full(len(spans), -np.inf)
    if not spans:
        return found
    scorer.prepare(spans)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        alike[span.start, span.end].append(index)
    size = max(1, MAX_BEAMS_TOGETHER // num_beams)

    def store(part: Sequence[int], log_probs: NDArray[np.float64]) -> None:
        found[list(part)] = log_probs

    for (start, end), members in alike.items():
        for first in range(0, len(members), size):
            some = members[first : first + size]
            scorer.batches.run(
                some,
                lambda part: _search([spans[index] for index in part], scorer, sampler, max_edits, num_beams),
                store,
                width=lambda index: num_beams * spans[index].end,
                label=lambda index: spans[index].label,
                num_forwards=end - start,
            )
    return found


def _search(spans: Sequence[Span], scorer: Scorer, sampler: Sampler, max_edits: int, num_beams: int) -> NDArray[np.float64]:
    """Spans of one prefix length and one length, token by token together."""
    length = len(spans[0].suffix_ids)
    beams = [_Beams(span, [()], np.zeros(1), np.arange(length + 1)[None, :]) for span in spans]
    states, branch = _begin(spans, scorer)
    for place in range(length):
        log_probs = sampler.log_probs(scorer.model.logits(states)).double().cpu().numpy()
        parents: list[int] = []
        first = 0
        for one in beams:
            rows = log_probs[first : first + len(one.tokens)]
            parents += [first + parent for parent in _grow(one, rows, place, max_edits, num_beams)]
            first += len(rows)
        if not parents or place == length - 1:
            break
        last = torch.tensor([[tokens[-1]] for one in beams for tokens in one.tokens])
        states, branch = _go_on(beams, scorer, branch, torch.tensor(parents), last)
    return np.array([_total(one, max_edits) for one in beams])


def _begin(spans: Sequence[Span], scorer: Scorer) -> tuple[Tensor, Branch | None]:
    prefixes = [span.prefix_ids for span in spans]
    if scorer.model.can_branch():
        return scorer.model.encode(prefixes)
    return scorer.model.whole(prefixes)[:, -1], None


def _go_on(
    beams: Sequence[_Beams], scorer: Scorer, branch: Branch | None, parents: Tensor, last: Tensor
) -> tuple[Tensor, Branch | None]:
    """What stands at the last token of every beam: from the caches of their parents, or by whole rows."""
    if branch is not None:
        states, grown = scorer.model.extend(branch, parents, last)
        return states[:, -1], grown
    rows = [(*one.span.prefix_ids, *tokens) for one in beams for tokens in one.tokens]
    return scorer.model.whole(rows)[:, -1], None


def _grow(one: _Beams, log_probs: NDArray[np.float64], place: int, max_edits: int, num_beams: int) -> list[int]:
    """Replace the beams of a span by their likeliest children that can still end within the distance; their parents.

    A child is one of the `num_beams` likeliest tokens, or a token of the span near this place.
    """
    if not len(log_probs):
        return []
    target, width = one.target, min(num_beams, log_probs.shape[1])
    near = np.unique(target[max(0, place - max_edits) : place + max_edits + 1])
    likely = np.argpartition(-log_probs, width - 1, axis=1)[:, :width]
    rows = np.concatenate([np.repeat(np.arange(len(log_probs)), width), np.repeat(np.arange(len(log_probs)), near.size)])
    tokens = np.concatenate([likely.ravel(), np.tile(near, len(log_probs))])
    rows, tokens = np.unique(np.stack([rows, tokens]), axis=1)
    scores = one.log_probs[rows] + log_probs[rows, tokens]
    alive = np.isfinite(scores)
    rows, tokens, scores = rows[alive], tokens[alive], scores[alive]
    distances = _next_distances(one.distances[rows], tokens, target)
    # What is left of output and span differs in length by |t - j| at column j: that many edits are still to come at least.
    to_come = np.abs(place + 1 - np.arange(target.size + 1))
    reachable = (distances + to_come[None, :]).min(axis=1) <= max_edits
    rows, tokens, scores, distances = rows[reachable], tokens[reachable], scores[reachable], distances[reachable]
    verbatim = _verbatim(one, rows, tokens, place)
    order = np.lexsort((-scores, ~verbatim))[:num_beams]
    one.tokens = [(*one.tokens[int(rows[index])], int(tokens[index])) for index in order]
    one.log_probs, one.distances = scores[order], distances[order]
    return [int(row) for row in rows[order]]


def _verbatim(one: _Beams, rows: Ints, tokens: Ints, place: int) -> NDArray[np.bool_]:
    """Which child is the span so far: it is kept, whatever its rank, so that the bound is never below the verbatim chance."""
    is_span = np.array([parent == one.span.suffix_ids[:place] for parent in one.tokens], dtype=bool)
    kept: NDArray[np.bool_] = is_span[rows] & (tokens == one.span.suffix_ids[place])
    return kept


def _next_distances(before: Ints, tokens: Ints, target: Ints) -> Ints:
    """One more row of the table of Levenshtein distances for every child, (children, T + 1)."""
    after = np.empty_like(before)
    after[:, 0] = before[:, 0] + 1
    for column in range(1, before.shape[1]):
        changed = before[:, column - 1] + (tokens != target[column - 1])
        after[:, column] = np.minimum(np.minimum(before[:, column] + 1, after[:, column - 1] + 1), changed)
    return after


def _total(one: _Beams, max_edits: int) -> float:
    """log of the summed probabilities of the finished beams within the distance."""
    if not one.tokens or len(one.tokens[0]) < len(one.span.suffix_ids):
        return -math.inf
    within = one.log_probs[one.distances[:, -1] <= max_edits]
    return min(0.0, float(np.logaddexp.reduce(within))) if within.size else -math.inf
