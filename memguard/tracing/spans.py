"""Maximal spans of queries from their longest matches, which of them are rare, and spans that merge. Tokens throughout.

A span is maximal when no longer stretch around it occurs in the corpus. Every figure is taken on unmerged spans: merging
glues copies of different documents and changes the longest span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Rows [low, high) of every shard's table that begin with each of P patterns; shapes (shards, P)."""

    low: Ints
    high: Ints

    @property
    def counts(self) -> Ints:
        """Occurrences, every shard together; shape (P,)."""
        total: Ints = (self.high - self.low).sum(axis=0)
        return total


@dataclass(frozen=True)
class SpanTable:
    """The maximal spans of a batch, by query and then by place.

    Args:
        query: which query each belongs to, ascending, shape (S,).
        start: first token in its query, shape (S,).
        end: behind the last, shape (S,).
        rows: where they stand in the tables.
    """

    query: Ints
    start: Ints
    end: Ints
    rows: Rows

    @property
    def count(self) -> Ints:
        """Occurrences of each in the corpus; shape (S,)."""
        return self.rows.counts

    def __len__(self) -> int:
        return len(self.query)

    def of(self, query: int) -> slice:
        """Where the spans of one query stand."""
        low, high = np.searchsorted(self.query, [query, query + 1])
        return slice(int(low), int(high))

    def as_lists(self, num_queries: int) -> list[list[tuple[int, int, int]]]:
        """(start, end, count) of every span, query by query."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(num_queries)]
        for query, *span in zip(*(part.tolist() for part in (self.query, self.start, self.end, self.count)), strict=True):
            found[query].append(tuple(span))
        return found


def maximal_spans(lengths: Ints, bounds: Ints, *, min_tokens: int) -> tuple[Ints, Ints, Ints]:
    """Query, start and end of the longest matches that no other match contains.

    Args:
        lengths: tokens of the longest match from every place of the queries, one behind the other, shape (M,).
        bounds: where each query begins in them, and the end of the last, shape (Q + 1,).
        min_tokens: shorter ones are left out, after the others were compared.

    Example:
        >>> query, start, end = maximal_spans(np.array([3, 2, 2, 0]), np.array([0, 4]), min_tokens=1)
        >>> list(zip(start.tolist(), end.tolist()))
        [(0, 3), (2, 4)]
    """
    places = np.arange(lengths.size)
    ends = places + lengths
    query = np.repeat(np.arange(bounds.size - 1), np.diff(bounds))
    # Queries stand one behind the other, so the farthest end of an earlier one lies before the start of the next.
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if lengths.size else ends
    kept = (lengths >= max(1, min_tokens)) & (ends > np.maximum(before, bounds[query]))
    offset = bounds[query[kept]]
    return query[kept], places[kept] - offset, ends[kept] - offset


def rarest(
    log_unigrams: NDArray[np.float64], table: SpanTable, num_tokens: Sequence[int], *, share: float
) -> NDArray[np.bool_]:
    """The spans of each query with the lowest summed log unigram: ceil(share * tokens) of them, at least one.

    Args:
        log_unigrams: summed log-probability of each span; nats, shape (S,).
        table: the spans.
        num_tokens: of each query.
        share: of a query's tokens.

    Source: OLMoTrace (2504.07096), as SimpleTrace (2606.06286) takes it over.
    """
    kept = np.zeros(len(table), dtype=bool)
    for query, tokens in enumerate(num_tokens):
        part = table.of(query)
        number = max(1, math.ceil(share * tokens))
        order = np.lexsort((table.start[part], log_unigrams[part]))
        kept[part.start + order[:number]] = True
    return kept


def merge_spans(spans: Sequence[tuple[int, int]], occurs: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Spans of one query for display: strictly overlapping neighbours become one where their union occurs.

    Maximal spans have no union that occurs token by token; it can occur in other spelling. Spans that only touch are left.

    Args:
        spans: (start, end), ascending.
        occurs: asked for the union of what was merged so far and the next span.

    Example:
        >>> merge_spans([(0, 5), (4, 9), (9, 12)], lambda start, end: True)
        [(0, 9), (9, 12)]
        >>> merge_spans([(0, 5), (4, 9)], lambda start, end: False)
        [(0, 5), (4, 9)]
    """
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start < merged[-1][1] and occurs(merged[-1][0], max(end, merged[-1][1])):
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
