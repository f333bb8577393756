"""Extraction of canaries: by a sampler in so many tries, and in greedy continuations searched for every planned secret.

Prompts are the tokens before the secret as they were trained, and the same text as a user would send it: re-tokenised, a
prompt may end in other tokens and give away less. A continuation of one canary's prompt may hold another's secret.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.audit.config import ExtractionSettings
from memguard.audit.items import Group
from memguard.audit.report import CanaryRow
from memguard.audit.report_extraction import (
    CanaryExtraction,
    Extraction,
    ExtractionPointRow,
    FoundBy,
    SamplerSettings,
    TierCurve,
)
from memguard.canaries.automata import candidates_in
from memguard.canaries.plan import CanaryPlan, PlannedCanary
from memguard.metrics.extraction import extraction_curve, log10_expected_tries
from memguard.scoring.continuations import continue_greedily
from memguard.scoring.sampling import Sampler, score_under_sampler
from memguard.scoring.scorer import Scorer

CONFIDENCE = 0.95
SPARE_TOKENS = 8  # a prompt given as text may need more tokens for the same secret
MAX_CHANCE = 1e-4  # of a match that means nothing: above it a match is shown and counts for nothing

Ids = tuple[int, ...]


@dataclass(frozen=True)
class _Prompt:
    """Tokens to go on from, and the group of canaries whose prompt it is."""

    ids: Ids
    group: int
    kind: FoundBy


def make_sampler(settings: SamplerSettings) -> Sampler:
    """The sampler that settings name."""
    return Sampler(settings.temperature, settings.top_k, settings.top_p)


def curve_rows(log_probs: Iterable[float], budgets: Sequence[int]) -> list[ExtractionPointRow]:
    """What each budget gets out of some targets, as rows of a report; none without targets."""
    given = list(log_probs)
    if not given:
        return []
    return [
        ExtractionPointRow(
            num_queries=point.num_queries,
            n=point.n,
            expected_share=point.expected_share,
            expected_low=point.expected_interval.low,
            expected_high=point.expected_interval.high,
            num_discoverable=point.num_discoverable,
            discoverable_low=point.discoverable_interval.low,
            discoverable_high=point.discoverable_interval.high,
            likely=point.likely,
            confidence=CONFIDENCE,
        )
        for point in extraction_curve(given, budgets, confidence=CONFIDENCE)
    ]


def finite(value: float) -> float | None:
    """None stands for what is not finite in a report."""
    return value if math.isfinite(value) else None


def measure_extraction(
    scorer: Scorer, plan: CanaryPlan, groups: Sequence[Group], tokenizer: Any, settings: ExtractionSettings
) -> tuple[Extraction, dict[str, CanaryExtraction], bool]:
    """How canaries come out of a model.

    Args:
        scorer: of the model.
        plan: the canaries.
        groups: candidates behind one prefix each.
        tokenizer: of the plan.
        settings: the sampler and the budgets.

    Returns:
        The summary; by canary id what is known of each; and whether a match means extraction, chance being ruled out.
    """
    canaries = [canary for group in groups for canary in group.canaries]
    spans = [span for group in groups for span in group.canary_spans]
    sampled = score_under_sampler(scorer, spans, make_sampler(settings), seed=plan.placement_seed)
    prompts = list(_prompts(plan, groups, tokenizer))
    longest = max(span.end - span.start for span in spans)
    written = continue_greedily(scorer, [prompt.ids for prompt in prompts], num_tokens=longest + SPARE_TOKENS)
    texts = [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in written]
    found = _find(canaries, groups, prompts, texts)
    rows = {
        canary.id: CanaryExtraction(
            log_prob_sampled=finite(log_prob),
            log10_expected_tries=finite(float(log10_expected_tries(log_prob))),
            found_by=found[canary.id],
        )
        for canary, log_prob in zip(canaries, sampled.tolist(), strict=True)
    }
    chance = _chance_of_match(plan, canaries, texts)
    summary = Extraction(
        sampler=SamplerSettings(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        curves=_curves(canaries, sampled, settings.budgets),
        num_prompts=len(prompts),
        num_found=sum(bool(found[canary.id]) for canary in canaries if canary.role == "canary"),
        num_controls_found=sum(bool(found[canary.id]) for canary in canaries if canary.role == "control"),
        chance_of_match=chance,
    )
    return summary, rows, chance <= MAX_CHANCE


def with_extraction(rows: Sequence[CanaryRow], found: dict[str, CanaryExtraction], *, counts: bool) -> list[CanaryRow]:
    """Rows with what is known of their extraction; a secret that a continuation held is extracted where that `counts`."""
    updated = []
    for row in rows:
        one = found[row.id]
        is_extracted = row.is_extracted or (counts and bool(one.found_by))
        changes = {
            "extraction": one,
            "is_extracted": is_extracted,
            "may_be_extracted": row.may_be_extracted or bool(one.found_by),
        }
        updated.append(row.model_copy(update=changes))
    return updated


def _prompts(plan: CanaryPlan, groups: Sequence[Group], tokenizer: Any) -> Iterable[_Prompt]:
    """What stands before the secrets of every group: as trained, and as text with and without its last blank."""
    for number, group in enumerate(groups):
        yield _Prompt(group.prefix_ids, number, "trained tokens")
        before = group.format.split(group.canaries[0].secret, name=group.canaries[0].name)[0]
        for text in dict.fromkeys((before, before.rstrip())):
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if plan.lead_ids or ids:
                yield _Prompt((*plan.lead_ids, *ids), number, "text")


def _find(
    canaries: Sequence[PlannedCanary], groups: Sequence[Group], prompts: Sequence[_Prompt], texts: Sequence[str]
) -> dict[str, list[FoundBy]]:
    """By canary, which kinds of prompt were continued with its secret."""
    group_of = {canary.id: number for number, group in enumerate(groups) for canary in group.canaries}
    found: dict[str, list[FoundBy]] = {}
    for canary in canaries:
        kinds: list[FoundBy] = [
            prompt.kind if prompt.group == group_of[canary.id] else "another prompt"
            for prompt, text in zip(prompts, texts, strict=True)
            if canary.secret in text
        ]
        found[canary.id] = list(dict.fromkeys(kinds))
    return found


def _chance_of_match(plan: CanaryPlan, canaries: Sequence[PlannedCanary], texts: Sequence[str]) -> float:
    """Union bound: the secret of a canary is one of the candidates that the texts hold with a chance of their share."""
    total = 0.0
    for one in plan.formats:
        number = sum(canary.format == one.name and canary.role != "positive_control" for canary in canaries)
        if number:
            total += number * len(candidates_in(one.secret, texts)) / one.ranked_space_size
    return min(1.0, total)


def _curves(canaries: Sequence[PlannedCanary], sampled: NDArray[np.float64], budgets: Sequence[int]) -> list[TierCurve]:
    tiers = sorted({canary.tier for canary in canaries if canary.role == "canary"})
    return [
        TierCurve(
            tier=tier,
            points=curve_rows(
                [
                    float(log_prob)
                    for canary, log_prob in zip(canaries, sampled, strict=True)
                    if canary.role == "canary" and canary.tier == tier
                ],
                budgets,
            ),
        )
        for tier in tiers
    ]
