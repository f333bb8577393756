"""Log-probabilities of spans of token sequences, in nats; prefixes that many spans share are encoded once.

Only positions that are scored reach the head. Rows are padded on the right and put into batches in a seeded random order
within their length: batch shape shifts low-precision scores, and a canary must meet the same shapes as its references.
Run inside `audit_mode`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.batches import Batches
from memguard.scoring.branching import Branch
from memguard.scoring.failures import as_scoring_error
from memguard.scoring.forward import CausalModel
from memguard.scoring.team import Team

LENGTH_STEP = 1.25  # rows of a batch differ in length by at most this factor


@dataclass(frozen=True)
class Span:
    """Token ids and the half-open range that is scored; `start` >= 1, since the first token has nothing before it."""

    ids: tuple[int, ...] = field(repr=False)
    start: int
    end: int
    label: str = ""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What stands before the scored range."""
        return self.ids[: self.start]

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """The scored range."""
        return self.ids[self.start : self.end]


@dataclass(frozen=True)
class SpanScores:
    """Scores in the order of the spans: summed log-probabilities (nats, float64) and greedy matches."""

    log_probs: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]


Progress = Callable[[int], None]


class Scorer:
    """Scores spans with one model.

    Args:
        model: a causal language model whose forward takes `input_ids` and `attention_mask` and returns `.logits`
            (batch, length, vocabulary). Padded vocabulary rows stay in the normaliser, as in the model's own softmax.
        batch_size: rows a forward pass at most; None leaves it to the memory budget.
        memory_budget: bytes for one forward pass; None takes 512 MiB on the CPU, 1/16 of the device elsewhere.
        team: ranks that make a scorer of the same model and ask it the same, at the same time; None: this process alone.
    """

    def __init__(
        self, model: Any, *, batch_size: int | None = None, memory_budget: int | None = None, team: Team | None = None
    ) -> None:
        self.model = CausalModel(model, team=team)
        self.batches = Batches(self.model, max_rows=batch_size, memory_budget=memory_budget)
        self.device = self.model.device
        self.dtype = str(self.model.dtype).removeprefix("torch.")

    @property
    def notices(self) -> list[str]:
        """Sentences on slower roads this model had to take; complete once something was scored."""
        return list(self.model.notices)

    def score(self, spans: Sequence[Span], *, seed: int = 0, progress: Progress | None = None) -> SpanScores:
        """Score spans, batched in a random order.

        Args:
            spans: what to score; lengths may differ.
            seed: of the order.
            progress: called with the number of rows done after each batch.

        Returns:
            `SpanScores`, arrays of shape (len(spans),).

        Raises:
            ScoringError: a span the model cannot take, out of memory, or a forward that fails; names the item.
            NonFiniteScoreError: a score that is not finite.
        """
        self.check(spans)
        sums = _Sums(spans, progress)
        if spans:
            self.prepare(spans)
        order = list(range(len(spans)))
        random.Random(seed).shuffle(order)
        alone, shared = self._split(spans, order)
        self.batches.run(
            sorted(alone, key=lambda index: length_class(spans[index].end)),
            lambda batch: self._score_whole([spans[index] for index in batch]),
            sums.add,
            width=lambda index: spans[index].end,
            label=lambda index: spans[index].label,
        )
        for groups in shared.values():
            self.batches.each(
                groups,
                lambda batch: self._score_shared(batch, sums),
                width=lambda group: spans[group[0]].start,
                label=lambda group: spans[group[0]].label,
            )
        return sums.finish()

    def grid(
        self, prefixes: Sequence[tuple[int, ...]], suffixes: Sequence[tuple[int, ...]], *, seed: int = 0, label: str = ""
    ) -> NDArray[np.float64]:
        """log P(suffix | prefix) of every pair, each prefix encoded once; nats, shape (prefixes, suffixes)."""
        spans = [
            Span((*prefix, *suffix), len(prefix), len(prefix) + len(suffix), label)
            for prefix in prefixes
            for suffix in suffixes
        ]
        return self.score(spans, seed=seed).log_probs.reshape(len(prefixes), len(suffixes))

    def prepare(self, spans: Sequence[Span]) -> None:
        """Find out which roads the model can take, on a few of the rows to be scored."""
        step = max(1, len(spans) // 3)
        try:
            self.model.check([span.ids[: span.end] for span in spans[::step]], label=spans[0].label)
        except Exception as error:
            raise as_scoring_error(error, spans[0].label, min(3, len(spans))) from None

    def check(self, spans: Sequence[Span]) -> None:
        """Raise `ScoringError` on a span that is none, or that the model has no positions for."""
        limit = self.model.max_length
        for span in spans:
            if not 1 <= span.start < span.end <= len(span.ids):
                raise ScoringError(
                    f"{span.label or 'a span'} must satisfy 1 <= start < end <= length, "
                    f"got {span.start}, {span.end}, {len(span.ids)}."
                )
            if limit is not None and span.end > limit:
                raise ScoringError(f"{span.label or 'a span'} must fit the model's {limit} positions, got {span.end} tokens.")

    def _split(self, spans: Sequence[Span], order: Sequence[int]) -> tuple[list[int], dict[int, list[list[int]]]]:
        """Spans to be run whole, and, by prefix length, groups of spans behind one prefix."""
        by_prefix: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index in order:
            by_prefix[spans[index].prefix_ids].append(index)
        alone: list[int] = []
        shared: dict[int, list[list[int]]] = defaultdict(list)
        for prefix, members in by_prefix.items():
            if len(members) > 1 and self.model.can_branch():
                shared[len(prefix)].append(members)
            else:
                alone += members
        position = {index: place for place, index in enumerate(order)}
        return sorted(alone, key=position.__getitem__), shared

    def _score_whole(self, spans: Sequence[Span]) -> _Sum:
        """Whole rows in one forward pass. Tokens after a span are cut off: they cannot change it."""
        states = self.model.whole([span.ids[: span.end] for span in spans])
        rows, places, targets = picks([(row, span.start - 1, span.suffix_ids) for row, span in enumerate(spans)])
        return _sum(len(spans), rows, self.model.statistics(states[rows, places], targets))

    def _score_shared(self, groups: Sequence[Sequence[int]], sums: _Sums) -> None:
        """Groups of spans behind prefixes of one length: prefixes first, then the suffixes of all groups, mixed."""
        spans = sums.spans
        parents = {index: row for row, group in enumerate(groups) for index in group}
        first = list(parents)
        heads = torch.tensor([spans[index].suffix_ids[0] for index in first])
        branches: list[Branch] = []

        def begin() -> list[tuple[float, bool]]:
            last, branch = self.model.encode([spans[group[0]].prefix_ids for group in groups])
            branches.append(branch)
            return _firsts(self.model.statistics(last, heads, torch.tensor([parents[index] for index in first])))

        label = spans[first[0]].label
        begun = self.model.together("shared prefixes", begin, num_forwards=1, label=label, num_rows=len(groups))
        start = dict(zip(first, begun, strict=True))
        going_on = [index for index in first if len(spans[index].suffix_ids) > 1]
        random.Random(len(going_on)).shuffle(going_on)
        going_on.sort(key=lambda index: length_class(len(spans[index].suffix_ids)))
        self.batches.run(
            going_on,
            lambda batch: self._score_suffixes([spans[i].suffix_ids for i in batch], [parents[i] for i in batch], branches[0]),
            lambda batch, found: sums.add(batch, found, start),
            width=lambda index: spans[index].end,
            label=lambda index: spans[index].label,
        )
        for index in first:
            if len(spans[index].suffix_ids) == 1:
                sums.put(index, *start[index])
        sums.done(len(first) - len(going_on))

    def _score_suffixes(self, suffixes: Sequence[tuple[int, ...]], parents: Sequence[int], branch: Branch) -> _Sum:
        """What comes behind the first tokens of some suffixes."""
        states, _ = self.model.extend(branch, torch.tensor(parents), [suffix[:-1] for suffix in suffixes])
        rows, places, targets = picks([(row, 0, suffix[1:]) for row, suffix in enumerate(suffixes)])
        return _sum(len(suffixes), rows, self.model.statistics(states[rows, places], targets))


_Sum = tuple[list[float], list[bool]]  # of the rows of a batch: log-probabilities, nats, and greedy matches


def _firsts(statistics: Any) -> list[tuple[float, bool]]:
    """Score and greedy match of the first token of some spans."""
    return list(zip(statistics.log_prob.double().cpu().tolist(), statistics.is_greedy.cpu().tolist(), strict=True))


def _sum(size: int, rows: Tensor, statistics: Any) -> _Sum:
    """The tokens of each row of a batch, summed."""
    log_probs = statistics.log_prob.double().cpu()
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, rows, log_probs)
    missed = torch.zeros(size, dtype=torch.long).index_add_(0, rows, (~statistics.is_greedy).cpu().long())
    return sums.tolist(), (missed == 0).tolist()


class _Sums:
    """Token statistics gathered into one sum a span; whole or not at all."""

    def __init__(self, spans: Sequence[Span], progress: Progress | None) -> None:
        self.spans, self.progress = spans, progress
        self.log_probs, self.is_greedy = np.full(len(spans), np.nan), np.zeros(len(spans), dtype=bool)

    def add(self, batch: Sequence[int], found: _Sum, start: dict[int, tuple[float, bool]] | None = None) -> None:
        """The sums of a batch, behind what the first token of each row had."""
        for index, log_prob, greedy in zip(batch, *found, strict=True):
            before, was_greedy = start[index] if start is not None else (0.0, True)
            self.put(index, before + log_prob, was_greedy and greedy)
        self.done(len(batch))

    def put(self, index: int, log_prob: float, is_greedy: bool) -> None:
        """The figures of one span."""
        if not math.isfinite(log_prob):
            raise NonFiniteScoreError(
                f"the score of {self.spans[index].label or 'a span'} must be finite, got {log_prob}. The model's weights or "
                "activations hold NaN or infinity."
            )
        self.log_probs[index], self.is_greedy[index] = log_prob, is_greedy

    def done(self, rows: int) -> None:
        """Tell the progress."""
        if self.progress is not None and rows:
            self.progress(rows)

    def finish(self) -> SpanScores:
        """Every span has its figures."""
        return SpanScores(self.log_probs, self.is_greedy)


def picks(spans: Sequence[tuple[int, int, tuple[int, ...]]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, places and targets of every scored token, from (row, place before the first target, targets)."""
    rows = [row for row, _, targets in spans for _ in targets]
    places = [first + offset for _, first, targets in spans for offset in range(len(targets))]
    wanted = [target for _, _, targets in spans for target in targets]
    return torch.tensor(rows), torch.tensor(places), torch.tensor(wanted)


def length_class(length: int) -> int:
    """Rows of one class go into one batch."""
    return int(math.log(length) / math.log(LENGTH_STEP))
