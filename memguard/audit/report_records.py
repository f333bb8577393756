"""The part of a report on real records: extractable or not, and how much of that is this text rather than common text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memguard.audit.report_extraction import ExtractionPointRow
from memguard.documents import Document

TIWARI = "Tiwari, Trachtenberg, Suh, arXiv 2602.18733"


class Threshold(Document):
    """The belief ratio n that makes a target PA, and where it comes from. Fixed before any target is judged."""

    targets: str = Field(description="the format of the canaries, or 'records'")
    n: float = Field(description="ratio of P(target | own prefix) to P(target) that must be exceeded")
    method: Literal["given", "quantile"] = Field(
        description="quantile: of the ratio over never-trained targets of the same kind, every prefix followed to the end"
    )
    quantile: float | None = Field(default=None, description="which, 0..1")
    low: float | None = Field(default=None, description="lower end of its order-statistic interval; None: beyond the sample")
    high: float | None = Field(default=None, description="upper end; None: beyond the sample")
    confidence: float | None = Field(default=None, description="of the interval, 0..1")
    num_targets: int = Field(default=0, description="never-trained targets behind the quantile")
    mean_log_ratio: float | None = Field(
        default=None, description="mean log belief ratio of these: what the template's cue alone gives; nats"
    )


class PriorAwareCounts(Document):
    """How many targets met which verdict. Source: arXiv 2602.18733; the shares are of the extractable ones."""

    n: int = Field(description="targets")
    num_extractable: int = Field(description="P(target | own prefix) above m")
    num_pa: int = Field(description="PA, certified or by estimate")
    num_common: int = Field(description="common, certified or by estimate")
    num_undecided: int = Field(description="the sample alone says so and rests on too few prefixes")
    num_not_measured: int = Field(description="targets without a verdict")
    common_share: float | None = Field(
        description="share of the extractable that fail PA (paper: .55 to .90 in large models); None: none is extractable"
    )
    common_low: float | None = Field(description="lower end of its interval (Clopper-Pearson), undecided ones counted as PA")
    common_high: float | None = Field(description="upper end, undecided ones counted as common")
    confidence: float = Field(description="of the interval, 0..1")


class RecordRow(Document):
    """One real record, by its line in the file."""

    line: int = Field(description="of the file")
    num_prefix_tokens: int = Field(description="count of tokens before the part asked for")
    num_tokens: int = Field(description="tokens asked for")
    log_prob: float = Field(description="log P(target | own prefix), summed; nats")
    is_greedy: bool = Field(description="greedy decoding behind its own prefix writes it: k-extractable")
    log_prob_sampled: float | None = Field(default=None, description="the same chance under the sampler; nats, None: 0")
    log_prob_near: float | None = Field(
        default=None,
        description="lower bound of the chance of writing it up to `max_edits` edits; nats, None: not measured or 0",
    )
    verdict: str | None = Field(default=None, description="Prior-Aware verdict, None: not measured")
    log_belief_ratio: float | None = Field(default=None, description="log P(target | own prefix) - log P(target); nats")
    low: float | None = Field(default=None, description="lower end of log_belief_ratio (Chernoff-KL on the prior); nats")
    high: float | None = Field(default=None, description="upper end (Markov on the prior), None: open; nats")
    num_copies: int | None = Field(
        default=None,
        description="places of the indexed corpus that hold the span it names, else its first 512 tokens; None: no index",
    )
    num_near_copies: int | None = Field(
        default=None, description="other documents that hold it up to a tenth of its characters edited; None: no index"
    )
    copies_capped: bool = Field(default=False, description="there are more places than were looked at: counts are lower ends")


CopiesBucket = Literal[
    "not found",
    "near-duplicates alone",
    "once",
    "once, near-duplicates besides",
    "once, near-duplicates not known",
    "2 to 10",
    "above 10",
    "not known",
]


class CopiesRow(Document):
    """Members that stand so often in the corpus. Copies explain a finding and never clear one."""

    copies: CopiesBucket = Field(description="how often they stand there, counted in an index of the training corpus")
    n: int = Field(description="members")
    num_greedy: int = Field(description="members that greedy decoding writes")
    greedy_share: float = Field(description="share of those, 0..1")
    greedy_low: float = Field(description="lower end of its interval (Clopper-Pearson)")
    greedy_high: float = Field(description="upper end of it")
    confidence: float = Field(description="of the interval, 0..1")
    mean_log_prob: float = Field(description="mean of their summed log-probabilities; nats")
    num_pa: int = Field(description="members that are PA; 0 also where that was not measured")
    num_common: int = Field(description="members that are common; 0 also where that was not measured")
    num_undecided: int = Field(default=0, description="members whose verdict rests on too few prefixes")
    pa_share: float | None = Field(
        default=None, description="share of the members with a verdict that are PA, 0..1; None: not measured"
    )
    pa_low: float | None = Field(default=None, description="lower end of its interval (Clopper-Pearson), none undecided is PA")
    pa_high: float | None = Field(default=None, description="upper end, every undecided one counted as PA")


class PromptRow(Document):
    """Greedy extraction of the same targets behind another prompt."""

    prefix_tokens: int = Field(description="tokens of the record before the target")
    offset: int = Field(description="tokens of other records before those")
    n: int = Field(description="count of targets")
    num_greedy: int = Field(description="count of targets that greedy decoding writes")
    share: float = Field(description="share of those, 0..1")
    low: float = Field(description="lower end of its interval (Clopper-Pearson), 0..1")
    high: float = Field(description="upper end of it, 0..1")
    mean_log_prob: float = Field(description="mean over the targets of their summed log-probability; nats")


class PromptSlope(Document):
    """How greedy extraction grows with the length of the prompt, or falls with its place. Source: 2202.07646, 2505.13171."""

    against: Literal["prefix_tokens", "offset"] = Field(description="the variable, on a log10 axis")
    slope: float = Field(description="of the greedy share, a factor of ten in the variable; share, 0..1")
    low: float = Field(description="lower end of its interval (t)")
    high: float = Field(description="upper end of it")
    confidence: float = Field(description="of the interval, 0..1")
    r_squared: float = Field(description="share of the variance that the line explains, 0..1")
    n: int = Field(description="count of points")


class RecordSet(Document):
    """Records of one kind: members of the training data, or held out."""

    n: int = Field(description="records measured")
    num_too_short: int = Field(description="records that hold no target of the wanted length, or none that fits the model")
    num_greedy: int = Field(description="records that greedy decoding writes")
    greedy_share: float = Field(description="share of those, 0..1. Source: Carlini et al., ICLR 2023, 2202.07646")
    greedy_low: float = Field(description="lower end of its interval (Clopper-Pearson)")
    greedy_high: float = Field(description="upper end of it")
    confidence: float = Field(description="of every interval, 0..1")
    curve: list[ExtractionPointRow] = Field(description="by budget of queries, under the sampler")
    num_near: int | None = Field(default=None, description="records with a near-verbatim chance of at least one in a thousand")
    rows: list[RecordRow] = Field(description="one a record, in the order of its line")


class Records(Document):
    """Real records behind their own prefixes, with held-out records beside them as the floor."""

    prefix_tokens: int = Field(description="tokens before the part asked for, at most")
    suffix_tokens: int = Field(description="tokens asked for where a record names no span")
    max_edits: int = Field(description="edits that near-verbatim allows; 0: not measured")
    prompts: list[PromptRow] = Field(
        default_factory=list, description="members behind shorter prefixes, and further into the window"
    )
    prompt_slopes: list[PromptSlope] = Field(
        default_factory=list, description="fitted where three points or more differ and the share varies"
    )
    members: RecordSet = Field(description="records of the training data")
    held_out: RecordSet | None = Field(default=None, description="None: none were given")
    prior_aware: PriorAwareCounts | None = Field(default=None, description="of the members; None: not measured")
    threshold: Threshold | None = Field(
        default=None, description="the belief ratio n of these records, None: none was extractable"
    )
    by_copies: list[CopiesRow] = Field(
        default_factory=list, description="members by how often they stand in the indexed corpus; empty: no index was given"
    )
    num_excluded_prefixes: int = Field(
        default=0, description="prior prefixes left out, over all records, because they equal the record's own prefix"
    )
