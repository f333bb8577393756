"""Extraction of canaries: by a sampler in so many tries, and in greedy continuations searched for every planned secret.

Prompts are the tokens before the secret as they were trained, and the same text as a user would send it: re-tokenised, a
prompt may end in other tokens and give away less. A continuation of one canary's prompt may hold another's secret.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
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
MAX_CHANCE = 1e-4  # of any match that means nothing, over all formats: above its share a match is shown and counts for nothing

Ids = tuple[int, ...]


@dataclass(frozen=True)
class _Prompt:
    """Tokens to go on from, and the group of canaries whose prompt it is."""

    ids: Ids
    group: int
    kind: FoundBy


@dataclass(frozen=True)
class _Written:
    """What a prompt was continued with."""

    prompt: _Prompt
    text: str


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
) -> tuple[Extraction, dict[str, CanaryExtraction], set[str]]:
    """How canaries come out of a model.

    Args:
        scorer: of the model.
        plan: the canaries.
        groups: candidates behind one prefix each.
        tokenizer: of the plan.
        settings: the sampler and the budgets.

    Returns:
        The summary; by canary id what is known of each; and the ids whose match chance is ruled out for.
    """
    canaries = [canary for group in groups for canary in group.canaries]
    spans = [span for group in groups for span in group.canary_spans]
    sampled = score_under_sampler(scorer, spans, make_sampler(settings), seed=plan.placement_seed)
    longest = max(span.end - span.start for span in spans)
    written = _continue(scorer, list(_prompts(plan, groups, tokenizer)), tokenizer, num_tokens=longest + SPARE_TOKENS)
    found = _find(groups, written)
    chances = _chances(plan, groups, written)
    limit = MAX_CHANCE / max(1, len(chances))
    counted = {
        canary.id
        for canary in canaries
        for kind in found[canary.id]
        if chances.get((canary.format, _is_own(kind)), 0.0) <= limit
    }
    rows = {
        canary.id: CanaryExtraction(
            log_prob_sampled=finite(log_prob),
            log10_expected_tries=finite(float(log10_expected_tries(log_prob))),
            found_by=found[canary.id],
        )
        for canary, log_prob in zip(canaries, sampled.tolist(), strict=True)
    }
    summary = Extraction(
        sampler=SamplerSettings(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p),
        curves=_curves(canaries, sampled, settings.budgets),
        num_prompts=len(written),
        num_found=sum(bool(found[canary.id]) for canary in canaries if canary.role == "canary"),
        num_controls_found=sum(canary.id in counted for canary in canaries if canary.role == "control"),
        chance_of_match=min(1.0, sum(chance for chance in chances.values() if chance <= limit)),
    )
    return summary, rows, counted


def with_extraction(
    rows: Sequence[CanaryRow], found: dict[str, CanaryExtraction], *, counted: Collection[str]
) -> list[CanaryRow]:
    """Rows with what is known of their extraction; of the `counted` ones a continuation held the secret, and not by chance."""
    updated = []
    for row in rows:
        one = found[row.id]
        changes = {
            "extraction": one,
            "is_extracted": row.is_extracted or row.id in counted,
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


def _continue(scorer: Scorer, prompts: Sequence[_Prompt], tokenizer: Any, *, num_tokens: int) -> list[_Written]:
    """Continuations of the prompts; those of the same ids are written once."""
    distinct = list(dict.fromkeys(prompt.ids for prompt in prompts))
    ids = dict(zip(distinct, continue_greedily(scorer, distinct, num_tokens=num_tokens), strict=True))
    return [
        _Written(prompt, tokenizer.decode(ids[prompt.ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        for prompt in prompts
    ]


def _find(groups: Sequence[Group], written: Sequence[_Written]) -> dict[str, list[FoundBy]]:
    """By canary, which kinds of prompt were continued with its secret."""
    found: dict[str, list[FoundBy]] = {}
    for number, group in enumerate(groups):
        for canary in group.canaries:
            kinds: list[FoundBy] = [
                one.prompt.kind if one.prompt.group == number else "another prompt"
                for one in written
                if canary.secret in one.text
            ]
            found[canary.id] = list(dict.fromkeys(kinds))
    return found


def _chances(plan: CanaryPlan, groups: Sequence[Group], written: Sequence[_Written]) -> dict[tuple[str, bool], float]:
    """By format, and by whether the prompts are a canary's own: how likely any match is if the model never saw a secret.

    Union bound: the secret of a canary is one of the candidates that some texts hold with a chance of their share.
    """
    chances: dict[tuple[str, bool], float] = {}
    for one in plan.formats:
        mine = [(number, group) for number, group in enumerate(groups) if group.format.name == one.name]
        if one.positive_control or not mine:
            continue
        everywhere = len(candidates_in(one.secret, (item.text for item in written)))
        num_canaries = sum(len(group.canaries) for _, group in mine)
        own = sum(
            len(group.canaries) * len(candidates_in(one.secret, (item.text for item in written if item.prompt.group == number)))
            for number, group in mine
        )
        chances[one.name, True] = own / one.ranked_space_size
        chances[one.name, False] = num_canaries * everywhere / one.ranked_space_size
    return chances


def _is_own(kind: FoundBy) -> bool:
    return kind != "another prompt"


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
