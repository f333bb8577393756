"""The same records behind other prompts: shorter prefixes, and prefixes further into the window.

Memorised text is given away more readily behind more of its own context, and less where it stands further from the window's
start than it did in training. Only targets that every length allows are asked for, so that the rows compare.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from memguard.audit.config import RecordSettings
from memguard.audit.prior import CONFIDENCE
from memguard.audit.records import Target
from memguard.audit.report_records import PromptRow, PromptSlope
from memguard.metrics.intervals import share_interval
from memguard.metrics.scaling import fit_log_linear
from memguard.scoring.scorer import Scorer, Span, SpanScores


def prompt_rows(
    scorer: Scorer,
    targets: Sequence[Target],
    scores: SpanScores,
    settings: RecordSettings,
    *,
    lead_ids: tuple[int, ...],
    seed: int,
) -> list[PromptRow]:
    """Greedy extraction by length of the prefix and by its offset in the window; empty where neither is asked for.

    Args:
        scorer: of the model.
        targets: records with their whole prefix.
        scores: of the targets behind it.
        settings: `contexts` and `offsets`.
        lead_ids: what a prefix begins with, where a record is not cut out of another.
        seed: of the text before a prefix.
    """
    if not settings.contexts and not settings.offsets:
        return []
    longest = max(settings.offsets, default=0)
    limit = scorer.model.max_length
    kept = [
        place
        for place, target in enumerate(targets)
        if target.span.start >= settings.prefix_tokens and (limit is None or target.span.end + longest <= limit)
    ]
    if not kept:
        return []
    spans = [targets[place].span for place in kept]
    whole = SpanScores(scores.log_probs[kept], scores.is_greedy[kept])
    rows = []
    for length in sorted(settings.contexts):
        shorter = [_cut(span, length, lead_ids) for span in spans]
        rows.append(_row(scorer.score(shorter, seed=seed), prefix_tokens=length, offset=0))
    rows.append(_row(whole, prefix_tokens=settings.prefix_tokens, offset=0))
    for offset in sorted(settings.offsets):
        moved = [_moved(span, spans, offset, f"memguard/offset/{seed}/{place}") for place, span in enumerate(spans)]
        rows.append(_row(scorer.score(moved, seed=seed), prefix_tokens=settings.prefix_tokens, offset=offset))
    return rows


def prompt_slopes(rows: Sequence[PromptRow]) -> list[PromptSlope]:
    """Slopes of the greedy share against the prefix length, and against the offset where above 0; none where it is flat."""
    by_length = [(row.prefix_tokens, row.share) for row in rows if row.offset == 0]
    by_offset = [(row.offset, row.share) for row in rows if row.offset > 0]
    found = []
    for against, points in (("prefix_tokens", by_length), ("offset", by_offset)):
        if len({x for x, _ in points}) < 3 or len({y for _, y in points}) < 2:
            continue  # no line, or a flat one whose interval would have no width
        fit = fit_log_linear([x for x, _ in points], [y for _, y in points], confidence=CONFIDENCE)
        found.append(
            PromptSlope(
                against=against,
                slope=fit.slope,
                low=fit.low,
                high=fit.high,
                confidence=CONFIDENCE,
                r_squared=fit.r_squared,
                n=fit.n,
            )
        )
    return found


def _cut(span: Span, length: int, lead_ids: tuple[int, ...]) -> Span:
    """The same target behind the last `length` tokens of its prefix, and the lead where the whole prefix has it."""
    lead = lead_ids if span.ids[: len(lead_ids)] == lead_ids else ()
    ids = (*lead, *span.ids[span.start - length :])
    start = len(lead) + length
    return Span(ids, start, start + span.end - span.start, span.label)


def _moved(span: Span, others: Sequence[Span], offset: int, seed: str) -> Span:
    """The same prefix and target behind `offset` tokens of other records."""
    stream, filler = random.Random(seed), list[int]()
    pool = [other for other in others if other is not span] or list(others)
    while len(filler) < offset:
        filler += stream.choice(pool).ids
    return Span((*filler[:offset], *span.ids), span.start + offset, span.end + offset, span.label)


def _row(scores: SpanScores, *, prefix_tokens: int, offset: int) -> PromptRow:
    greedy, n = int(scores.is_greedy.sum()), len(scores.is_greedy)
    interval = share_interval(greedy, n, confidence=CONFIDENCE)
    return PromptRow(
        prefix_tokens=prefix_tokens,
        offset=offset,
        n=n,
        num_greedy=greedy,
        share=greedy / n,
        low=interval.low,
        high=interval.high,
        mean_log_prob=float(np.mean(scores.log_probs)),
    )
