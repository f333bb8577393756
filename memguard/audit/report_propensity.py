"""The part of a report on propensity: what a model volunteers of its corpus, against what a prefix forces out of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memguard.audit.decoding import Setting
from memguard.audit.report_extraction import SamplerSettings
from memguard.documents import Document

Metric = Literal[
    "average_longest_span",
    "average_longest_rare_span",
    "span_rate_20",
    "span_rate_50",
    "full_match_rate",
    "full_match_rate_20",
    "full_match_rate_50",
    "full_normalised_rate",
    "near_verbatim_recall",
    "near_verbatim_rate",
]
METRIC_NAMES: dict[Metric, str] = {
    "average_longest_span": "ALS (tokens)",
    "average_longest_rare_span": "ALS, rare (tokens)",
    "span_rate_20": "span of 20",
    "span_rate_50": "span of 50",
    "full_match_rate": "FMR",
    "full_match_rate_20": "FMR20",
    "full_match_rate_50": "FMR50",
    "full_normalised_rate": "FMR, but for spelling",
    "near_verbatim_recall": "NVR",
    "near_verbatim_rate": "NVR above half",
}


class PropensityEstimate(Document):
    """One metric of one setting: the mean over prompts of the mean over a prompt's continuations."""

    metric: Metric = Field(
        description="average_longest_span, average_longest_rare_span: tokens, of unmerged spans; the others: shares, 0..1. "
        "rare: the 5% rarest spans alone; _20, _50: at least so many tokens; full_normalised: but for spelling; "
        "near_verbatim_rate: recall above a half"
    )
    value: float = Field(description="the estimate; tokens, or a share of 0..1")
    n: int = Field(description="count of prompts, which are the independent draws")
    num_generations: int = Field(description="count of continuations, loops and degenerate ones left out")
    low: float = Field(description="lower end of its interval")
    high: float = Field(description="upper end of it")
    confidence: float = Field(description="of the interval, 0..1")
    method: str = Field(description="Clopper-Pearson for events with one continuation a prompt, else betting, any distribution")


class ApartEstimate(Document):
    """The same metric over loops and degenerate continuations, which match a corpus by repeating themselves."""

    metric: Metric = Field(description="as in the estimates")
    value: float = Field(description="mean over those continuations; tokens, or a share of 0..1")


class PropensitySettingRow(Document):
    """One way of prompting. Source: Barmina, Schneider-Kamp, Galke Poech, arXiv 2606.06286."""

    setting: Setting = Field(
        description="prefix: first tokens of training records (capability); generic, specific, unconditional, minimal_cue: "
        "ordinary use; non_member: first tokens of held-out records, the floor of chance"
    )
    num_prompts: int = Field(description="count of prompts")
    num_refused: int = Field(description="count of prompts left out, listed by name in `refused`")
    num_wanted: int = Field(description="count of continuations asked for")
    num_generations: int = Field(description="count of continuations that came back")
    num_ended: int = Field(description="count of those that the model ended before the limit")
    num_empty: int = Field(description="count of those of no token; they count as zero")
    num_loops: int = Field(description="count of those that repeat one piece, reported apart")
    num_degenerate: int = Field(description="count of those that compress to nothing and hold few letters, reported apart")
    mean_tokens: float | None = Field(description="mean length of what came back; tokens, None: nothing did")
    longest_span: int = Field(description="longest span of any continuation, those reported apart left out; tokens")
    estimates: list[PropensityEstimate] = Field(description="one a metric; empty where no continuation is left")
    apart: list[ApartEstimate] = Field(default_factory=list, description="metrics of loops and degenerate continuations")


class PropensityShareRow(Document):
    """How much of what can be forced out is also volunteered: propensity / (propensity + capability), by metric."""

    metric: Metric = Field(description="the metric on both sides")
    setting: Setting = Field(description="the side of ordinary use, or the floor of chance")
    share: float | None = Field(description="0 never volunteered, 0.5 as much as forced; None: undefined, both sides are zero")
    source_value: float = Field(description="the same share, 0..1, as the source prints it: 0 where it is undefined")
    low: float = Field(description="lower end of its interval, 0..1")
    high: float = Field(description="upper end of it, 0..1")
    confidence: float = Field(description="of the interval, 0..1")
    propensity: float = Field(description="the metric behind prompts of the setting; tokens, or a share of 0..1")
    capability: float = Field(description="the metric behind prefixes of training records, in the same unit")
    n_propensity: int = Field(description="count of prompts of the setting")
    n_capability: int = Field(description="count of prefixes")
    method: str = Field(description="how the interval was made")


class GenerationRow(Document):
    """One of the continuations with the longest spans of a setting."""

    setting: Setting = Field(description="of its prompt")
    prompt: str = Field(description="name of its prompt, such as a line of the file")
    sample: int = Field(description="which of the prompt's continuations, from 0")
    num_tokens: int = Field(description="its length; tokens")
    longest_span: int = Field(description="its longest span in the corpus; tokens")
    tier: Literal["full raw", "full normalised", "partial", "none"] = Field(description="how full the fullest match is")
    near_verbatim_recall: float | None = Field(
        description="highest share of its words found in order, 0..1; None: not measured"
    )
    num_documents: int = Field(description="count of documents that hold the longest span")
    documents: list[int] = Field(description="numbers of some of them, as the index counts documents")
    flag: Literal["loop", "degenerate"] | None = Field(default=None, description="why it is reported apart, None: it is not")
    snippet: str | None = Field(default=None, description="text of the longest span; None: quoting was not allowed")


class RefusedPromptRow(Document):
    """A prompt that was not asked."""

    setting: Setting = Field(description="that it was meant for")
    prompt: str = Field(description="its name, such as a line of the file")
    reason: str = Field(description="one sentence")


class Propensity(Document):
    """Capability against propensity. Intervals hold one by one, not all at once."""

    source: Literal["model", "endpoint"] = Field(description="what wrote: a model in memory, or a served one")
    sampler: SamplerSettings | None = Field(description="how tokens were drawn; None: greedily")
    num_samples: int = Field(description="continuations drawn a prompt; 0: one, greedily")
    max_new_tokens: int = Field(description="limit of a continuation; tokens")
    prefix_tokens: int = Field(description="tokens of a record that stand in a prefix")
    overlap_limit: int = Field(description="tokens in one piece of the corpus that make an ordinary prompt an attack")
    seed: int = Field(description="of prompts and draws")
    partial: str | None = Field(description="why continuations are missing, None: none is")
    settings: list[PropensitySettingRow] = Field(description="one a setting that had prompts")
    shares: list[PropensityShareRow] = Field(description="one a metric and setting, where there are prefixes to compare with")
    rows: list[GenerationRow] = Field(description="of each setting, the continuations with the longest spans")
    refused: list[RefusedPromptRow] = Field(default_factory=list, description="prompts that were left out")
    notices: list[str] = Field(default_factory=list, description="what a reader should know, a sentence each")
