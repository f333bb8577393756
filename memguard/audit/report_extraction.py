"""The part of a report on extraction: what a sampler writes, what greedy decoding wrote, and in how many tries."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memguard.documents import Document

HAYES = "Hayes et al., NAACL 2025, 2410.19482"
FoundBy = Literal["trained tokens", "text", "another prompt"]


class SamplerSettings(Document):
    """How an attacker samples; tokens outside top-k or top-p are never drawn."""

    temperature: float = Field(default=1.0, ge=1e-3, le=1e3, description="divides the logits")
    top_k: int | None = Field(default=40, ge=1, description="tokens kept; null keeps all")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="mass that the tokens kept must hold")


class ExtractionPointRow(Document):
    """What a budget of queries gets out of a set of targets. Source: Hayes et al., NAACL 2025, 2410.19482."""

    num_queries: int = Field(description="independent queries a target")
    n: int = Field(description="targets")
    expected_share: float = Field(description="mean chance of a target being written at least once, 0..1")
    expected_low: float = Field(description="lower end of the interval of that mean (Chernoff-KL, any distribution)")
    expected_high: float = Field(description="upper end of it")
    num_discoverable: int = Field(description="targets written with a chance of at least `likely`")
    discoverable_low: float = Field(description="lower end of the interval of their share (Clopper-Pearson)")
    discoverable_high: float = Field(description="upper end of it")
    likely: float = Field(description="the chance that makes a target discoverable, 0..1")
    confidence: float = Field(description="of the intervals, 0..1")


class CanaryExtraction(Document):
    """Whether one canary is written, and in how many tries."""

    log_prob_sampled: float | None = Field(
        description="log of the chance that one query behind its own prefix writes the secret under the sampler; nats, None: a "
        f"token of it is never drawn. Source: {HAYES}"
    )
    log10_expected_tries: float | None = Field(
        description="log10 of the mean number of such queries; None: it is never written"
    )
    found_by: list[FoundBy] = Field(
        description="greedy continuations that hold the secret: of its own prefix as trained, of its text, of another's prompt"
    )


class TierCurve(Document):
    """Extraction of the canaries of one tier against the budget of queries."""

    tier: int = Field(description="planned repetitions")
    points: list[ExtractionPointRow] = Field(description="one a budget")


class Extraction(Document):
    """Extraction of canaries. A match counts as extraction only where chance would hardly ever give one."""

    sampler: SamplerSettings = Field(description="how an attacker samples")
    curves: list[TierCurve] = Field(description="by tier, canaries only")
    num_prompts: int = Field(description="greedy continuations, each searched for every planned secret")
    num_found: int = Field(description="canaries whose secret stands in one of them")
    num_controls_found: int = Field(
        description="controls whose secret stands in one where chance is ruled out: they leaked, and the audit is no evidence"
    )
    chance_of_match: float = Field(
        description="bound of the chance that a match counts though the model never saw a secret, 0..1. Matches of formats and "
        "prompts where chance may give one are shown and count for nothing"
    )
