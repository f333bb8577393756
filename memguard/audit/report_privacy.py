"""The parts of a report that rest on inclusion coins: the bound of epsilon, and what inclusion did on average. Schemas only.

Epsilon has no unit (natural logarithm); differences are in nats. No torch: a gate reads reports in a small container.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memguard.documents import Document

PrivacyScore = Literal["log p - log p at step 0, standardised within format", "log p, standardised within format"]


class Privacy(Document):
    """Lower bound of a record's epsilon from one run. Source: Steinke et al., arXiv 2305.08846; 0 proves no privacy."""

    epsilon_lower_bound: float = Field(
        description="of one record, at confidence 1 - significance and at delta; by group privacy where it has copies; no unit"
    )
    cap: float = Field(description="what the bound would be with every guess right: no attack shows more; no unit")
    significance: float = Field(description="1 - confidence of the bound, 0..1")
    delta: float = Field(description="delta of one record that the bound is for, 0..1")
    num_coins: int = Field(description="coins thrown for canaries of this tier, guessed or not")
    num_guesses: int = Field(description="fixed in advance: the largest even number up to half of the coins")
    num_correct: int = Field(description="guesses that were right")
    num_tied: int = Field(description="guesses not made because of ties; they count as wrong")
    repetitions: int = Field(
        description="copies of each canary that one coin moved; they divide what can be shown, and one tier is in a bound"
    )
    stated_epsilon: float | None = Field(description="the guarantee to be tested, None: none was stated; no unit")
    p_value: float | None = Field(
        description="largest chance of as many right guesses if the stated epsilon held at delta, 0..1; None: none was stated"
    )
    min_attainable_p: float | None = Field(description="that p-value if every guess were right, 0..1; None: none was stated")
    is_testable: bool | None = Field(
        description="cap reaches the stated epsilon, or else copies, guesses or delta forbid it; None: none was stated"
    )
    num_guesses_needed: int | None = Field(
        description="smallest even number of guesses, all right, that would refute the stated epsilon at so many copies; None: "
        "none was stated, or no number is enough at this delta"
    )
    method: str = Field(description="how right guesses were turned into a bound")
    flags: list[str] = Field(default_factory=list, description="ties")
    score: PrivacyScore = Field(description="what canaries were ranked by, before standardising in nats; higher: guessed in")
    is_comparable: bool = Field(
        description="canaries entered training as records, before the sampler of a DP run: the bound may be held against the "
        "stated epsilon"
    )
    notes: list[str] = Field(default_factory=list, description="what limits the bound, a sentence each")


class Counterfactual(Document):
    """What inclusion did to the average canary of one format and tier. Source: Zhang et al., arXiv 2112.12938, section 2."""

    format: str = Field(description="name of the canary format")
    tier: int = Field(description="planned repetitions when the coins were thrown")
    n_in: int = Field(description="canaries that their coin put in")
    n_out: int = Field(description="canaries that their coin left out")
    difference: float | None = Field(
        description="mean log-probability in less mean out, each less its own at step 0 where measured; nats. None: undefined"
    )
    low: float | None = Field(description="lower end of the interval of the difference (Welch); nats. None: undefined")
    high: float | None = Field(description="upper end of the interval of the difference (Welch); nats. None: undefined")
    confidence: float = Field(description="of the interval, 0..1, two-sided")
    p_value: float | None = Field(
        description="chance that coins thrown anew give a difference this large, 0..1, one-sided. None: undefined"
    )
    min_attainable_p: float | None = Field(description="smallest p-value that so many canaries allow, 0..1. None: undefined")
    method: str = Field(description="score, interval and test, or why there is no estimate")
