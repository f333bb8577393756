"""The two documents that leave an audit: `AuditReport` (what was measured) and `Decision` (what the gate made of it).

They hold figures, random ids and digests; never the text of a secret, a path, a host or a user name. Exposure is in
bits, log-probabilities in nats. A figure that is not finite is `None`, and the report that holds it is invalid.
No torch: a gate reads reports in a small container.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.documents import describe_validation_error as describe_validation_error
from memguard.files import write_text_atomic

Role = Literal["canary", "control", "positive_control"]
Status = Literal["valid", "invalid"]


RANK_METHODS = ("exact", "certified")  # those whose rank in the space is known, or bounded


class Exposure(Document):
    """Exposure of one canary. Source: Secret Sharer (USENIX Security 2019), section 4."""

    bits: float | None = Field(description="log2 of the space minus log2 of the rank, or -log2 of the sampled p-value; bits")
    low_bits: float | None = Field(description="lower end of the interval; bits")
    high_bits: float | None = Field(description="upper end of the interval; bits")
    confidence: float = Field(description="confidence of the interval, 0..1")
    method: Literal["exact", "certified", "sampled", "failed"] = Field(
        description="exact: a search counted every candidate above; certified: a bound of the rank beats the references; "
        "sampled: rank among references; failed: no finite score"
    )
    cap_bits: float = Field(description="the largest value this method could print; bits")
    p_value: float | None = Field(description="chance that a secret independent of the model ranks this high")
    flags: list[str] = Field(default_factory=list, description="capped, ties")


class PriorAware(Document):
    """Prior-Aware memorisation of one canary. Source: arXiv 2602.18733; it annotates and never clears a finding."""

    verdict: Literal[
        "not extractable", "PA (certified)", "PA (estimate)", "common (certified)", "common (estimate)", "undecided"
    ]
    log_prob: float = Field(description="log P(secret | own prefix); nats")
    prior_log_prob: float | None = Field(
        description="log of the mean of P(secret | q) over the prior prefixes, or its certified upper end; nats"
    )
    prior_log_prob_low: float | None = Field(
        default=None, description="certified lower end of the same, None: zero so far; nats"
    )
    log_belief_ratio: float | None = Field(
        description="log_prob - prior_log_prob: a lower end where that is an upper one; nats"
    )
    low: float | None = Field(description="lower end of log_belief_ratio (Chernoff-KL on the prior); nats")
    high: float | None = Field(
        description="upper end of log_belief_ratio (Markov on the prior), None: open, since no more was needed; nats"
    )
    confidence: float
    effective_sample_size: float | None = Field(
        description="(sum w)^2 / sum w^2 over the prior prefixes, None where the verdict was certain without it"
    )
    num_prior_prefixes: int
    num_open_prefixes: int = Field(
        default=0, description="prior prefixes not followed to the secret's end: it was certain before"
    )
    num_excluded_prefixes: int = Field(description="prior prefixes left out because they hold the canary's own prefix")


class CanaryRow(Document):
    """Everything known of one planned canary, keyed by its random id."""

    id: str
    format: str
    role: Role
    tier: int = Field(description="planned repetitions, 0 for a control")
    repetitions: int = Field(description="repetitions in force (1 for every canary under plant_once), in the plan's unit")
    num_insertions: int = Field(description="sightings planned up to this step")
    num_seen: int | None = Field(description="sightings that reached the loss up to this step, None when no ledger was found")
    num_tokens: int = Field(description="tokens of the scored span")
    log_prob: float | None = Field(description="sum over the span of log p(token | before), fp32 log-softmax; nats")
    rank_low: int | None = Field(
        description="lowest rank in the space that the evidence allows, siblings left out; 1 = most likely"
    )
    rank_high: int | None = Field(description="highest rank in the space that the evidence allows, siblings left out")
    rank_high_with_siblings: int | None = Field(description="the same with the planted secrets behind the same prefix left in")
    num_siblings_above: int = Field(description="planted secrets behind the same prefix scored at or above this one")
    num_references: int
    num_references_above: int = Field(description="references scored at or above, ties included")
    num_references_tied: int
    num_non_members: int = Field(
        description="references and controls of the format that this canary is ranked among in family tests"
    )
    num_non_members_above: int = Field(description="of these, scored at or above, ties included")
    exposure: Exposure
    skew_normal_bits: float | None = Field(default=None, description="extrapolated tail, shown only, in no test; bits")
    is_greedy: bool = Field(description="every token of the span is the model's most likely next token")
    is_extracted: bool = Field(description="greedy, or certified rank 1 with siblings left out")
    may_be_extracted: bool = Field(description="rank 1 cannot be excluded by the evidence")
    prior_aware: PriorAware | None = Field(default=None, description="None: not measured")


class FormatRow(Document):
    """One canary format: its space, its references and how its secrets join the template."""

    name: str
    kind: str
    secret_space_size: int = Field(description="number of valid candidates")
    ranked_space_size: int = Field(
        description="candidates that ranks are in: those the tokenizer can carry, counted from below"
    )
    num_planted: int = Field(description="planned secrets of the same space, controls included; the siblings of each other")
    shared_prefix: bool
    join: Literal["clean", "space", "merged"] = Field(
        description="space: the secret's first token also holds the blank before it; merged: a token holds template and secret"
    )
    terminator: bool = Field(description="the token after the secret is part of the span because lengths vary")
    num_references: int = Field(description="references behind one prefix")
    reference_mean: float | None = Field(description="mean log_prob of the references; nats")
    reference_sd: float | None
    skew_normal_fit_p: float | None = Field(default=None, description="Kolmogorov-Smirnov p-value of the skew-normal fit")


class ControlTest(Document):
    """The null test of one format's never-inserted controls."""

    format: str
    num_controls: int
    mean_exposure_bits: float | None
    expected_exposure_bits: float = Field(description="mean of the sampled exposure under the null; bits")
    rank_sum_p: float | None = Field(description="two-sided rank-sum test of controls against references")
    max_p: float | None = Field(description="chance of a control ranking as high as the best one did")


class TierRow(Document):
    """Exposure of the canaries of one format and tier."""

    format: str
    tier: int
    repetitions: int
    n: int
    mean_bits: float | None
    median_bits: float | None
    low_bits: float | None = Field(description="lower end of the order-statistic interval of the median; bits")
    high_bits: float | None
    coverage: float = Field(description="exact coverage of that interval, 0..1")
    mean_num_seen: float | None
    num_extracted: int


class TrendPoint(Document):
    """One earlier audit of the same run, enough to draw the curves."""

    global_step: int
    epoch: float | None
    tier: int = Field(description="0 stands for the controls")
    n: int
    mean_bits: float | None
    low_bits: float | None
    high_bits: float | None


class Subject(Document):
    """What was measured. Only a checkpoint can be promoted; a live model cannot."""

    kind: Literal["live", "checkpoint"]
    digest: str | None = Field(description="sha256 of the manifest of weights, configuration and tokenizer files")
    global_step: int | None
    epoch: float | None
    notice: str | None = None


class PlanSummary(Document):
    """The plan, without its secrets."""

    digest: str
    reproducible: bool = Field(description="drawn from a seed: anyone who knows it knows the secrets")
    inclusion: Literal["planned", "coin"]
    num_canaries: int
    num_controls: int
    num_positive_controls: int


class LedgerSummary(Document):
    """What was planted and what reached the loss."""

    found: bool
    exact: bool
    notes: list[str]
    count: Literal["per_epoch", "total"] | None
    mode: Literal["append", "replace", "splice"] | None
    plant_once: bool | None
    num_insertions: int
    num_seen: int | None
    token_share: float | None = Field(description="share of training tokens that are canaries, per epoch")
    token_share_is_estimate: bool = False


class PositiveControl(Document):
    """Whether memorisation could have been seen at all, by canaries planted to be memorised."""

    kind: Literal["in_training", "none"]
    n: int
    mean_num_seen: float | None
    best_p_value: float | None
    detected: bool = Field(description="best p-value, times n, at most 1e-3")


class Procedure(Document):
    """How the figures were made. Two reports compare only where this is equal."""

    references: int
    references_per_name: int
    reference_seed: str = Field(description="digest of the seed that drew the references")
    dtype: str
    autocast: str | None
    score: Literal["sum of log-probabilities over the secret span"] = "sum of log-probabilities over the secret span"
    tolerance: float = Field(description="log-probabilities closer than this tie; nats")
    exact: Literal["auto", "off"] = Field(default="off", description="whether spaces were searched for exact ranks")
    node_budget: int = Field(default=0, description="nodes a search might expand, a format")
    num_nodes: int = Field(default=0, description="nodes the searches of this audit expanded")
    head: Literal["fused", "own"] = Field(default="own", description="own: the model ran its own head")


class Environment(BaseModel):
    """A fixed list: versions and the kind of device; never a host, path, user or variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memguard: str
    python: str
    numpy: str
    torch: str
    transformers: str
    device: str


class AuditReport(Document):
    """One audit of one subject. `status` says whether its figures are evidence at all."""

    kind: Literal["memguard audit report"] = "memguard audit report"
    schema_version: int = SCHEMA_VERSION
    created_at: str = Field(description="UTC, ISO 8601")
    status: Status
    invalid_reasons: list[str]
    notices: list[str]
    subject: Subject
    plan: PlanSummary
    tokenizer_digest: str
    procedure: Procedure
    environment: Environment
    ledger: LedgerSummary
    formats: list[FormatRow]
    canaries: list[CanaryRow]
    tiers: list[TierRow]
    controls: list[ControlTest]
    positive_control: PositiveControl
    prior_aware_settings: dict[str, float | int | str] | None = Field(
        default=None, description="m, n, prefixes; None: not measured"
    )
    trend: list[TrendPoint] = Field(default_factory=list)
    duration_s: float

    def save(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


RuleOutcome = Literal["pass", "block", "warn", "not shown", "waived", "insufficient evidence", "invalid"]


class RuleResult(Document):
    """One rule or evidence requirement, with the figures behind its outcome."""

    name: str
    kind: Literal["evidence", "limit", "test", "baseline"]
    outcome: RuleOutcome
    reason: str = Field(description="one sentence with the figures")
    figures: dict[str, float | int | str | None] = Field(default_factory=dict)
    canaries: list[str] = Field(default_factory=list, description="ids of the canaries the outcome rests on")


class Decision(Document):
    """What the gate decided. Only `pass` (exit code 0) may move an alias."""

    kind: Literal["memguard decision"] = "memguard decision"
    schema_version: int = SCHEMA_VERSION
    outcome: Literal["pass", "block", "invalid"]
    exit_code: Literal[0, 1, 3]
    reason: str
    evidence: list[RuleResult]
    rules: list[RuleResult]
    alpha: float
    strict: bool
    report_digest: str
    policy_digest: str
    baseline_digest: str | None
    subject: Subject
    limits: list[str] = Field(description="what a pass does not mean")

    def save(self, path: Path) -> None:
        """Write the decision as JSON, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


LIMITS = [
    "A canary is a proxy: only what was planted was measured.",
    "Low exposure is not proof of absence; high exposure is not proof that an attacker can extract the secret.",
    "Exposure compares only between audits made by one procedure.",
    "Prior-Aware memorisation may explain a finding; it never clears one.",
    "memguard measures memorisation; it does not prevent it.",
]


def load_report(path: Path) -> AuditReport:
    """Read an audit report. Raises `InputError` when it cannot be read."""
    return load_document(path, AuditReport, what="report")


def load_decision(path: Path) -> Decision:
    """Read a decision. Raises `InputError` when it cannot be read."""
    return load_document(path, Decision, what="decision")
