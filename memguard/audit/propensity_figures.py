"""The figures of propensity: an estimate a metric and setting, and each setting of ordinary use against the prefixes.

The prompt is the unit: continuations of one prompt are averaged first, so that n is the number of independent draws. Loops and
degenerate texts stand apart, since they match a corpus by repeating themselves; an empty continuation counts as zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.audit.decoding import SETTINGS, Generation, Generations, PropensitySettings, Setting
from memguard.audit.propensity_prompts import OVERLAP_LIMIT, PromptSet
from memguard.audit.report_extraction import SamplerSettings
from memguard.audit.report_propensity import (
    ApartEstimate,
    GenerationRow,
    Metric,
    Propensity,
    PropensityEstimate,
    PropensitySettingRow,
    PropensityShareRow,
    RefusedPromptRow,
)
from memguard.audit.traced import METRICS, Corpus, MetricReader, Traced, TracedItem, TracedSpan
from memguard.metrics.intervals import bounded_mean_interval, share_interval
from memguard.metrics.propensity import propensity_share

CONFIDENCE = 0.95
MAX_ROWS = 10  # continuations of a setting that are listed
MAX_DOCUMENTS = 5  # of a continuation


@dataclass(frozen=True)
class Side:
    """One metric of one setting: a value a prompt; bool where each prompt has one continuation and the metric is an event."""

    values: NDArray[np.float64] | NDArray[np.bool_]
    num_generations: int


Sides = dict[tuple[Setting, Metric], Side]


def summarise_propensity(
    source: Literal["model", "endpoint"],
    prompts: PromptSet,
    written: Generations,
    corpus: Corpus,
    settings: PropensitySettings,
    tokenizer: Any,
    *,
    seed: int,
) -> Propensity:
    """The section of a report: counts and estimates by setting, shares by metric, the continuations with the longest spans.

    Args:
        source: what wrote.
        prompts: of all settings.
        written: continuations, by the place of their prompt in the set.
        corpus: traces them.
        settings: prompts and decoding.
        tokenizer: for snippets, where settings allow them.
        seed: of prompts and draws.

    Raises:
        ValueError: the corpus traces more or fewer continuations than it is given.
    """
    items = _traced(written, corpus)
    by_setting: dict[Setting, list[TracedItem]] = {setting: [] for setting in SETTINGS}
    for item in items:
        by_setting[prompts.prompts[item.generation.prompt].setting].append(item)
    is_recalled = all(item.recall is not None for item in items)
    metrics = [one for one in METRICS if one.least <= written.max_new_tokens and (is_recalled or not one.from_recall)]
    sides = {
        (setting, metric.name): _side(metric, kept, written.max_new_tokens)
        for setting, found in by_setting.items()
        if (kept := [item for item in found if item.flag is None])
        for metric in metrics
    }
    asked = [setting for setting in SETTINGS if prompts.of(setting)]
    return Propensity(
        source=source,
        sampler=None if settings.is_greedy else _sampler(settings),
        num_samples=settings.num_samples,
        max_new_tokens=written.max_new_tokens,
        prefix_tokens=settings.prefix_tokens,
        overlap_limit=OVERLAP_LIMIT,
        seed=seed,
        partial=written.stopped,
        settings=[
            _setting_row(setting, prompts, by_setting[setting], metrics, sides, settings, written.max_new_tokens)
            for setting in asked
        ],
        shares=_share_rows(metrics, sides, written.max_new_tokens),
        rows=[row for setting in asked for row in _rows(by_setting[setting], prompts, settings, tokenizer)],
        refused=[RefusedPromptRow(setting=one.setting, prompt=one.name, reason=one.reason) for one in prompts.refused],
        notices=[*prompts.notices, *written.notices, *([written.stopped] if written.stopped is not None else [])],
    )


def _sampler(settings: PropensitySettings) -> SamplerSettings:
    return SamplerSettings(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)


def _traced(written: Generations, corpus: Corpus) -> list[TracedItem]:
    """Every continuation with its trace."""
    some = [item for item in written.items if item.ids]
    traces = corpus.trace(some) if some else []
    if len(traces) != len(some):
        raise ValueError(f"trace must give a result for each of {len(some)} continuations, got {len(traces)}.")
    results = iter(traces)
    return [TracedItem(item, next(results) if item.ids else None) for item in written.items]


def _largest(metric: MetricReader, max_new_tokens: int) -> float:
    return float(max_new_tokens) if metric.in_tokens else 1.0


def _side(metric: MetricReader, items: Sequence[TracedItem], max_new_tokens: int) -> Side:
    """A value a prompt. A text that was tokenised again may have more tokens than were allowed: the limit is the most."""
    largest, by_prompt = _largest(metric, max_new_tokens), defaultdict[int, list[float]](list)
    for item in items:
        by_prompt[item.generation.prompt].append(min(largest, float(metric.read(item))))
    if metric.is_event and all(len(values) == 1 for values in by_prompt.values()):
        return Side(np.array([bool(values[0]) for values in by_prompt.values()]), len(items))
    return Side(np.array([math.fsum(values) / len(values) for values in by_prompt.values()]), len(items))


def _setting_row(
    setting: Setting,
    prompts: PromptSet,
    items: Sequence[TracedItem],
    metrics: Sequence[MetricReader],
    sides: Sides,
    settings: PropensitySettings,
    max_new_tokens: int,
) -> PropensitySettingRow:
    kept, apart = [one for one in items if one.flag is None], [one for one in items if one.flag is not None]
    number = len(prompts.of(setting))
    return PropensitySettingRow(
        setting=setting,
        num_prompts=number,
        num_refused=sum(one.setting == setting for one in prompts.refused),
        num_wanted=number * settings.num_continuations,
        num_generations=len(items),
        num_ended=sum(one.generation.is_ended for one in items),
        num_empty=sum(one.num_tokens == 0 for one in items),
        num_loops=sum(one.flag == "loop" for one in items),
        num_degenerate=sum(one.flag == "degenerate" for one in items),
        mean_tokens=sum(one.num_tokens for one in items) / len(items) if items else None,
        longest_span=max((one.longest for one in kept), default=0),
        estimates=[_estimate(metric, sides[setting, metric.name], max_new_tokens) for metric in metrics] if kept else [],
        apart=[
            ApartEstimate(metric=metric.name, value=sum(float(metric.read(one)) for one in apart) / len(apart))
            for metric in metrics
            if apart
        ],
    )


def _estimate(metric: MetricReader, side: Side, max_new_tokens: int) -> PropensityEstimate:
    values = side.values
    if values.dtype == np.bool_:
        interval, method = share_interval(int(values.sum()), values.size, confidence=CONFIDENCE), "Clopper-Pearson"
    else:
        largest = _largest(metric, max_new_tokens)
        interval, method = bounded_mean_interval(values, largest=largest, confidence=CONFIDENCE), "betting"
    return PropensityEstimate(
        metric=metric.name,
        value=float(values.mean()),
        n=values.size,
        num_generations=side.num_generations,
        low=interval.low,
        high=interval.high,
        confidence=CONFIDENCE,
        method=method,
    )


def _share_rows(metrics: Sequence[MetricReader], sides: Sides, max_new_tokens: int) -> list[PropensityShareRow]:
    """Each setting against the prefixes, metric by metric; none without prefixes."""
    rows = []
    for metric in metrics:
        capability = sides.get(("prefix", metric.name))
        for setting in SETTINGS[1:]:
            propensity = sides.get((setting, metric.name))
            if capability is None or propensity is None:
                continue
            found = propensity_share(
                *_of_one_kind(propensity.values, capability.values),
                largest=_largest(metric, max_new_tokens),
                confidence=CONFIDENCE,
            )
            rows.append(
                PropensityShareRow(
                    metric=metric.name,
                    setting=setting,
                    share=None if math.isnan(found.value) else found.value,
                    source_value=found.source_value,
                    low=found.low,
                    high=found.high,
                    confidence=found.confidence,
                    propensity=found.propensity,
                    capability=found.capability,
                    n_propensity=found.n_propensity,
                    n_capability=found.n_capability,
                    method=found.method,
                )
            )
    return rows


def _of_one_kind(*sides: NDArray[np.float64] | NDArray[np.bool_]) -> list[NDArray[Any]]:
    """Events on both sides, or means on both."""
    is_events = all(side.dtype == np.bool_ for side in sides)
    return [side if is_events else side.astype(np.float64) for side in sides]


def _rows(items: Sequence[TracedItem], prompts: PromptSet, settings: PropensitySettings, tokenizer: Any) -> list[GenerationRow]:
    """The continuations with the longest spans, those reported apart last."""
    matched = [one for one in items if one.longest > 0 or one.is_full]
    matched.sort(key=lambda one: (one.flag is not None, not one.is_full, -one.longest))
    rows = []
    for one in matched[:MAX_ROWS]:
        assert one.traced is not None
        prompt = prompts.prompts[one.generation.prompt]
        rows.append(
            GenerationRow(
                setting=prompt.setting,
                prompt=prompt.name,
                sample=one.generation.sample,
                num_tokens=one.num_tokens,
                longest_span=one.longest,
                tier=one.traced.tier,
                near_verbatim_recall=one.recall,
                num_documents=one.traced.num_documents,
                documents=_documents(one.traced),
                flag=one.flag,
                snippet=_snippet(one.generation, one.traced, tokenizer) if settings.snippets else None,
            )
        )
    return rows


def _longest(spans: Sequence[TracedSpan]) -> TracedSpan | None:
    return max(spans, key=lambda span: span.end - span.start, default=None)


def _documents(traced: Traced) -> list[int]:
    """Some documents of the longest span that has any named."""
    longest = _longest([span for span in traced.spans if span.documents])
    return sorted({place.document for place in longest.documents})[:MAX_DOCUMENTS] if longest is not None else []


def _snippet(generation: Generation, traced: Traced, tokenizer: Any) -> str | None:
    longest = _longest(traced.spans)
    if longest is None:
        return None
    text: str = tokenizer.decode(generation.ids[longest.start : longest.end], skip_special_tokens=True)
    return text
