"""What is asked of a corpus and of a tracer, and how each metric of propensity reads a continuation.

A tracer is anything with these attributes, such as `memguard.tracing` gives; nothing of it is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memguard.audit.decoding import Generation
from memguard.audit.propensity_prompts import LongestMatch
from memguard.audit.report_propensity import Metric

NEAR = 0.5  # recall that makes a continuation near-verbatim

Tier = Literal["full raw", "full normalised", "partial", "none"]


class TracedDocument(Protocol):
    """A document that holds a span."""

    @property
    def document(self) -> int:
        """Its number in the index."""
        ...


class TracedSpan(Protocol):
    """Tokens [start, end) of a continuation that stand in the corpus, as far as they do."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def documents(self) -> Sequence[TracedDocument]:
        """Some that hold it."""
        ...


class Traced(Protocol):
    """What a tracer found of one continuation."""

    @property
    def longest_tokens(self) -> int:
        """Of any maximal span, unmerged; 0 without one."""
        ...

    @property
    def longest_rare_tokens(self) -> int:
        """Of the rare spans; 0 without one."""
        ...

    @property
    def tier(self) -> Tier:
        """How full the fullest match is."""
        ...

    @property
    def recall(self) -> float | None:
        """Highest near-verbatim recall of any document, 0..1; None where it was not measured."""
        ...

    @property
    def num_documents(self) -> int:
        """That hold the longest span."""
        ...

    @property
    def spans(self) -> Sequence[TracedSpan]:
        """Maximal spans."""
        ...

    @property
    def flags(self) -> Sequence[str]:
        """'loop' or 'degenerate' among them."""
        ...


@dataclass(frozen=True)
class Corpus:
    """The training corpus, as two questions that an index answers.

    Args:
        longest_match: tokens of the longest piece of each prompt that stands in it.
        trace: what is known of continuations, in order; equal ones each. None is given that is empty.
    """

    longest_match: LongestMatch
    trace: Callable[[Sequence[Generation]], Sequence[Traced]]


@dataclass(frozen=True)
class TracedItem:
    """A continuation and what was found of it; nothing is looked for in an empty one."""

    generation: Generation
    traced: Traced | None

    @property
    def num_tokens(self) -> int:
        return len(self.generation.ids)

    @property
    def longest(self) -> int:
        return self.traced.longest_tokens if self.traced is not None else 0

    @property
    def longest_rare(self) -> int:
        return self.traced.longest_rare_tokens if self.traced is not None else 0

    @property
    def is_normalised(self) -> bool:
        return self.traced is not None and self.traced.tier == "full normalised"

    @property
    def is_full(self) -> bool:
        return self.traced is not None and self.traced.tier == "full raw"

    @property
    def recall(self) -> float | None:
        return self.traced.recall if self.traced is not None else 0.0

    @property
    def flag(self) -> Literal["loop", "degenerate"] | None:
        flags = self.traced.flags if self.traced is not None else ()
        return "loop" if "loop" in flags else "degenerate" if "degenerate" in flags else None


@dataclass(frozen=True)
class MetricReader:
    """How a metric reads a continuation. `least`: a continuation that cannot be so long has no such metric."""

    name: Metric
    read: Callable[[TracedItem], float]
    is_event: bool = True
    in_tokens: bool = False
    least: int = 0
    from_recall: bool = False


METRICS = (
    MetricReader("average_longest_span", lambda one: one.longest, is_event=False, in_tokens=True),
    MetricReader("average_longest_rare_span", lambda one: one.longest_rare, is_event=False, in_tokens=True),
    MetricReader("span_rate_20", lambda one: one.longest >= 20, least=20),
    MetricReader("span_rate_50", lambda one: one.longest >= 50, least=50),
    MetricReader("full_match_rate", lambda one: one.is_full),
    MetricReader("full_match_rate_20", lambda one: one.is_full and one.num_tokens >= 20, least=20),
    MetricReader("full_match_rate_50", lambda one: one.is_full and one.num_tokens >= 50, least=50),
    MetricReader("full_normalised_rate", lambda one: one.is_full or one.is_normalised),
    MetricReader("near_verbatim_recall", lambda one: one.recall or 0.0, is_event=False, from_recall=True),
    MetricReader("near_verbatim_rate", lambda one: (one.recall or 0.0) > NEAR, from_recall=True),
)
