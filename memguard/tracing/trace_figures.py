"""Figures of many traces: longest spans, full matches, near-verbatim recall, how common the matched text is.

Every figure is a mean over generations, loops and degenerate texts left out and counted. Intervals are not made here: the
values by generation are kept for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.simpletrace import Trace

MIN_LENGTHS = (20, 50)  # tokens: a shorter complete match is most often a common sentence
EIDETIC = (1, 10, 100, 1000)  # documents
BINS = (1, 4, 8, 16, 32, 64, 128, 256)  # tokens
APART = ("loop", "degenerate", "empty")


@dataclass(frozen=True)
class TraceFigures:
    """Figures over `n` generations; tokens and shares 0..1, nan where n is 0.

    Args:
        n: generations counted.
        num_apart: left out, by flag.
        average_longest_span: mean of the longest maximal span, unmerged; 0 where there is none; tokens.
        average_longest_rare_span: likewise, of rare spans alone.
        full_match_rate: share whose text a document holds.
        full_match_rate_at: by length: share that is at least so many tokens and full raw.
        span_rate_at: by length: share with a span of at least so many tokens.
        full_normalised_rate: share whose text a document holds at least but for spelling.
        near_verbatim_recall: mean of the highest recall of any document; None where it was not measured.
        near_verbatim_recall_by_document: mean over all documents of all generations, the source's form.
        eidetic: by k: generations whose longest span stands in at most k documents, and in at least one.
        span_histogram: by the lower end of a bin of lengths: maximal spans.
        longest_spans: by generation, shape (n,).
        is_full_match: by generation, shape (n,).
        recalls: by generation, nan where not measured, shape (n,).
    """

    n: int
    num_apart: dict[str, int]
    average_longest_span: float
    average_longest_rare_span: float
    full_match_rate: float
    full_match_rate_at: dict[int, float]
    span_rate_at: dict[int, float]
    full_normalised_rate: float
    near_verbatim_recall: float | None
    near_verbatim_recall_by_document: float | None
    eidetic: dict[int, int]
    span_histogram: dict[int, int]
    longest_spans: NDArray[np.int64]
    is_full_match: NDArray[np.bool_]
    recalls: NDArray[np.float64]


def summarise_traces(traces: Sequence[Trace]) -> TraceFigures:
    """The figures of traces, one value a generation, equal generations counted each.

    Args:
        traces: of one setting.

    Raises:
        ValueError: no trace.

    Example:
        >>> from memguard.tracing.simpletrace import Trace
        >>> full = Trace("a", 30, "full raw", 3, (), (), 90, 1, None, ())
        >>> none = Trace("b", 10, "none", None, (), (), 0, 0, None, ())
        >>> loop = Trace("c", 10, "full raw", 3, (), (), 9, 1, None, ("loop",))
        >>> figures = summarise_traces([full, none, loop])
        >>> figures.full_match_rate, figures.full_match_rate_at, figures.num_apart
        (0.5, {20: 0.5, 50: 0.0}, {'loop': 1})

    Source: SimpleTrace (2606.06286). Differs: unmerged spans; recall a generation beside recall a document.
    """
    if not traces:
        raise ValueError("traces must hold at least one generation, got none.")
    apart = Counter(flag for trace in traces for flag in trace.flags if flag in APART)
    kept = [trace for trace in traces if not set(trace.flags) & set(APART)]
    longest = np.array([trace.longest_tokens for trace in kept], dtype=np.int64)
    is_full = np.array([trace.tier == "full raw" for trace in kept], dtype=bool)
    tokens = np.array([trace.num_tokens for trace in kept], dtype=np.int64)
    recalls = np.array([np.nan if trace.recall is None else trace.recall for trace in kept], dtype=np.float64)
    each = [place.recall for trace in kept for span in trace.spans for place in span.documents if place.recall is not None]
    is_measured = bool(kept) and not np.isnan(recalls).any()
    return TraceFigures(
        n=len(kept),
        num_apart=dict(apart),
        average_longest_span=_mean(longest),
        average_longest_rare_span=_mean([trace.longest_rare_tokens for trace in kept]),
        full_match_rate=_mean(is_full),
        full_match_rate_at={least: _mean(is_full & (tokens >= least)) for least in MIN_LENGTHS},
        span_rate_at={least: _mean(longest >= least) for least in MIN_LENGTHS},
        full_normalised_rate=_mean([trace.tier in ("full raw", "full normalised") for trace in kept]),
        near_verbatim_recall=_mean(recalls) if is_measured else None,
        near_verbatim_recall_by_document=(float(np.mean(each)) if each else 0.0) if is_measured else None,
        eidetic={k: sum(1 <= trace.num_documents <= k for trace in kept) for k in EIDETIC},
        span_histogram=_histogram(kept),
        longest_spans=longest,
        is_full_match=is_full,
        recalls=recalls,
    )


def _histogram(traces: Sequence[Trace]) -> dict[int, int]:
    lengths = [span.end - span.start for trace in traces for span in trace.spans]
    counts = Counter((np.searchsorted(BINS, lengths, side="right") - 1).tolist())
    return {least: counts.get(place, 0) for place, least in enumerate(BINS)}


def _mean(values: Sequence[float] | NDArray[np.number[Any]] | NDArray[np.bool_]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
