"""The two documents that leave an audit: `AuditReport` (what was measured) and `Decision` (what the gate made of it).

They hold figures, random ids and digests; never the text of a secret, a path, a host or a user name. Exposure is in
bits, log-probabilities in nats. A figure that is not finite is `None`, and the report that holds it is invalid.
No torch: a gate reads reports in a small container.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from memguard.audit.report_extraction import CanaryExtraction, Extraction
from memguard.audit.report_membership import Membership
from memguard.audit.report_privacy import Counterfactual, Privacy
from memguard.audit.report_propensity import Propensity
from memguard.audit.report_records import PriorAwareCounts, Records, Threshold
from memguard.documents import SCHEMA_VERSION, Document, load_document, sealed_json
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
    ] = Field(description="at m and n; certified ones hold for any distribution over prefixes")
    n: float | None = Field(description="the belief ratio to exceed that the verdict was made with, None: it needed none")
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
    log_ratio_above_controls: float | None = Field(
        default=None,
        description="log_belief_ratio less its mean over controls of the format, None: a lower end alone is known; nats",
    )
    confidence: float = Field(description="of each one-sided bound, 0..1")
    effective_sample_size: float | None = Field(
        description="(sum w)^2 / sum w^2 over the prior prefixes, None where the verdict was certain without it"
    )
    num_prior_prefixes: int = Field(description="count of prefixes behind the mean")
    num_open_prefixes: int = Field(
        default=0, description="prior prefixes not followed to the secret's end: it was certain before"
    )
    num_excluded_prefixes: int = Field(description="prior prefixes left out because they hold the canary's own prefix")


class CanaryRow(Document):
    """Everything known of one planned canary, keyed by its random id."""

    id: str = Field(description="random, tells nothing of the secret")
    format: str = Field(description="name of the format")
    role: Role = Field(description="control: planned and never inserted")
    tier: int = Field(description="planned repetitions, 0 for a control")
    repetitions: int = Field(description="repetitions in force (1 for every canary under plant_once), in the plan's unit")
    num_insertions: int = Field(description="sightings planned up to this step")
    num_seen: int | None = Field(description="sightings that reached the loss up to this step, None when no ledger was found")
    num_copies: int | None = Field(
        default=None, description="places of it in an index of the training corpus, counted to the letter; None: not counted"
    )
    num_tokens: int = Field(description="tokens of the scored span")
    log_prob: float | None = Field(description="sum over the span of log p(token | before), fp32 log-softmax; nats")
    rank_low: int | None = Field(
        description="lowest rank in the space that the evidence allows, siblings left out; 1 = most likely"
    )
    rank_high: int | None = Field(description="highest rank in the space that the evidence allows, siblings left out")
    rank_high_with_siblings: int | None = Field(description="the same with the planted secrets behind the same prefix left in")
    num_siblings_above: int = Field(description="planted secrets behind the same prefix scored at or above this one")
    num_references: int = Field(description="count of references it is ranked among")
    num_references_above: int = Field(description="references scored at or above, ties included")
    num_references_tied: int = Field(description="count of references within the tolerance")
    num_non_members: int = Field(
        description="references and controls of the format that this canary is ranked among in family tests"
    )
    num_non_members_above: int = Field(description="of these, scored at or above, ties included")
    exposure: Exposure = Field(description="in bits, with interval and method")
    skew_normal_bits: float | None = Field(default=None, description="extrapolated tail, shown only, in no test; bits")
    is_greedy: bool = Field(description="every token of the span is the model's most likely next token")
    is_extracted: bool = Field(description="greedy, or certified rank 1 with siblings left out")
    may_be_extracted: bool = Field(description="rank 1 cannot be excluded by the evidence")
    prior_aware: PriorAware | None = Field(default=None, description="None: not measured")
    start_log_prob: float | None = Field(default=None, description="log_prob before training, None: not measured; nats")
    calibrated: Exposure | None = Field(
        default=None,
        description="exposure by log_prob less start_log_prob, ranked among the same of the references; shown, in no rule. "
        "None: not measured",
    )
    extraction: CanaryExtraction | None = Field(default=None, description="None: not measured")


class FormatRow(Document):
    """One canary format: its space, its references and how its secrets join the template."""

    name: str = Field(description="of the format")
    kind: str = Field(description="of the secret space")
    secret_space_size: int = Field(description="number of valid candidates")
    ranked_space_size: int = Field(
        description="candidates that ranks are in: those the tokenizer can carry, counted from below"
    )
    num_planted: int = Field(description="planned secrets of the same space, controls included; the siblings of each other")
    shared_prefix: bool = Field(description="all canaries stand behind one prefix and share references")
    join: Literal["clean", "space", "merged"] = Field(
        description="space: the secret's first token also holds the blank before it; merged: a token holds template and secret"
    )
    terminator: bool = Field(description="the token after the secret is part of the span because lengths vary")
    num_references: int = Field(description="references behind one prefix")
    reference_mean: float | None = Field(description="mean log_prob of the references; nats")
    reference_sd: float | None = Field(description="standard deviation of the references' log_prob; nats")
    skew_normal_fit_p: float | None = Field(default=None, description="Kolmogorov-Smirnov p-value of the skew-normal fit")


class ControlTest(Document):
    """The null test of one format's never-inserted controls."""

    format: str = Field(description="name of the format")
    num_controls: int = Field(description="count of controls")
    mean_exposure_bits: float | None = Field(description="mean exposure of the controls; bits")
    expected_exposure_bits: float = Field(description="mean of the sampled exposure under the null; bits")
    rank_sum_p: float | None = Field(description="p-value of the two-sided rank-sum test of controls against references, 0..1")
    max_p: float | None = Field(description="chance of a control ranking as high as the best one did")


class TierRow(Document):
    """Exposure of the canaries of one format and tier."""

    format: str = Field(description="name of the format")
    tier: int = Field(description="planned repetitions")
    repetitions: int = Field(description="repetitions in force")
    n: int = Field(description="count of canaries")
    mean_bits: float | None = Field(description="mean exposure; bits. None: a score failed")
    median_bits: float | None = Field(description="median exposure; bits")
    low_bits: float | None = Field(description="lower end of the order-statistic interval of the median; bits")
    high_bits: float | None = Field(description="upper end; bits")
    coverage: float = Field(description="exact coverage of that interval, 0..1")
    mean_num_seen: float | None = Field(description="mean count of sightings, None: no ledger")
    num_extracted: int = Field(description="count of canaries that were extracted")


class TrendPoint(Document):
    """One earlier audit of the same run, enough to draw the curves."""

    global_step: int = Field(description="optimiser steps done")
    epoch: float | None = Field(description="epochs done, with fraction")
    tier: int = Field(description="0 stands for the controls")
    n: int = Field(description="count of canaries, or of controls")
    mean_bits: float | None = Field(description="mean exposure; bits")
    low_bits: float | None = Field(description="lower end of the interval of the median; bits")
    high_bits: float | None = Field(description="upper end; bits")
    steps_between: float | None = Field(default=None, description="optimiser steps between audits then, None: not known")
    overhead_share: float | None = Field(
        default=None, description="seconds of audits over seconds of training up to it, as a share; None: not known"
    )


class Subject(Document):
    """What was measured. Only a checkpoint can be promoted; a live model cannot."""

    kind: Literal["live", "checkpoint"] = Field(description="a saved checkpoint, or a model in memory")
    digest: str | None = Field(description="sha256 of the manifest of weights, configuration and tokenizer files")
    global_step: int | None = Field(description="optimiser steps done, None: unknown")
    epoch: float | None = Field(description="epochs done, with fraction; None: unknown")
    notice: str | None = Field(default=None, description="why a live model stands for a checkpoint, or None")
    base_digest: str | None = Field(
        default=None, description="of an adapter: sha256 of the manifest of the base it was measured on; None: a whole model"
    )


class PlanSummary(Document):
    """The plan, without its secrets."""

    digest: str = Field(description="sha256 of the plan with its nonce")
    reproducible: bool = Field(description="drawn from a seed: anyone who knows it knows the secrets")
    inclusion: Literal["planned", "coin"] = Field(description="coin: a fair coin put each canary in or left it out")
    num_canaries: int = Field(description="count of canaries")
    num_controls: int = Field(description="count of never-inserted controls")
    num_positive_controls: int = Field(description="count of canaries planted to be memorised")
    design_digest: str | None = Field(
        default=None, description="sha256 of formats, templates and tiers, the same for fresh secrets of one design"
    )


class LedgerSummary(Document):
    """What was planted and what reached the loss."""

    found: bool = Field(description="a ledger lay beside the checkpoint")
    exact: bool = Field(description="every count is exact")
    notes: list[str] = Field(description="why counts are not exact, a sentence each")
    count: Literal["per_epoch", "total"] | None = Field(description="unit of repetitions, None: unknown")
    mode: Literal["append", "replace", "splice", "record"] | None = Field(
        description="how canaries entered the rows, None: unknown"
    )
    plant_once: bool | None = Field(description="each canary once whatever its tier, None: unknown")
    num_insertions: int = Field(description="count of sightings planned up to this step")
    num_seen: int | None = Field(description="count of sightings that reached the loss, None: unknown")
    token_share: float | None = Field(description="share of training tokens that are canaries, per epoch")
    token_share_is_estimate: bool = Field(default=False, description="rows were sampled, or streamed, to tell the share")


class PositiveControl(Document):
    """Whether memorisation could have been seen at all, by canaries planted to be memorised."""

    kind: Literal["probe", "in_training", "none"] = Field(
        description="probe: fresh secrets that copies of the weights learnt in a few steps; in_training: planted in the data"
    )
    n: int = Field(description="count of secrets")
    mean_num_seen: float | None = Field(description="mean count of sightings, None: not planted in the data")
    best_p_value: float | None = Field(description="smallest p-value of one of them, 0..1")
    detected: bool = Field(description="best p-value, times n, at most 1e-3")


class StartTest(Document):
    """Were the canaries known before training? The family tests of exposure, on the model that training began from."""

    n: int = Field(description="count of canaries")
    pooled_p: float | None = Field(description="p-value of the pooled test before training, 0..1")
    max_p: float | None = Field(description="p-value of the max test before training, 0..1")


class Procedure(Document):
    """How the figures were made. Two reports compare only where this is equal."""

    references: int = Field(description="count of references behind a prefix that canaries share, at most")
    references_per_name: int = Field(description="count of references behind a prefix of one canary's own")
    reference_seed: str = Field(description="digest of the seed that drew the references")
    dtype: str = Field(description="of the weights")
    autocast: str | None = Field(description="autocast dtype in force, None: none")
    score: Literal["sum of log-probabilities over the secret span"] = Field(
        default="sum of log-probabilities over the secret span", description="what is summed, in nats"
    )
    tolerance: float = Field(description="log-probabilities closer than this tie; nats")
    exact: Literal["auto", "off"] = Field(default="off", description="whether spaces were searched for exact ranks")
    node_budget: int = Field(default=0, description="nodes a search might expand, a format")
    num_nodes: int = Field(default=0, description="nodes the searches of this audit expanded")
    head: Literal["fused", "own"] = Field(default="own", description="own: the model ran its own head")
    num_parameters: int | None = Field(default=None, description="of the model, adapters included")


class AuditCadence(Document):
    """How often a run is audited, and what audits cost it, up to this one."""

    steps_between: float | None = Field(
        description="optimiser steps between audits that the settings and their limit allow; None: named moments alone"
    )
    overhead_share: float | None = Field(
        description="seconds of audits over seconds of training without them, so far, as a share; None: no training yet"
    )
    max_overhead: float | None = Field(description="the limit of that share, None: none")
    num_waited: int = Field(description="count of audits that were due and waited for the limit")


class Environment(BaseModel):
    """A fixed list: versions and the kind of device; never a host, path, user or variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memguard: str = Field(description="version")
    python: str = Field(description="version")
    numpy: str = Field(description="version")
    torch: str = Field(description="version")
    transformers: str = Field(description="version")
    device: str = Field(description="kind of device: cpu, cuda, ...")


class AuditReport(Document):
    """One audit of one subject. `status` says whether its figures are evidence at all."""

    kind: Literal["memguard audit report"] = Field(default="memguard audit report", description="what this document is")
    schema_version: int = Field(default=SCHEMA_VERSION, description="of this document; readers refuse newer ones")
    created_at: str = Field(description="UTC, ISO 8601")
    status: Status = Field(description="valid: its figures are evidence; invalid: they are not")
    invalid_reasons: list[str] = Field(description="why the figures are no evidence, a sentence each")
    notices: list[str] = Field(description="what a reader should know, a sentence each")
    subject: Subject = Field(description="what was measured")
    plan: PlanSummary = Field(description="the canaries, without their secrets")
    tokenizer_digest: str = Field(description="sha256 of what the tokenizer does")
    procedure: Procedure = Field(description="how the figures were made")
    environment: Environment = Field(description="versions and the kind of device")
    ledger: LedgerSummary = Field(description="what was planted and what reached the loss")
    formats: list[FormatRow] = Field(description="one a canary format")
    canaries: list[CanaryRow] = Field(description="one a planned canary or control, in plan order")
    tiers: list[TierRow] = Field(description="one a format and tier, canaries only")
    controls: list[ControlTest] = Field(description="null test of each format with controls")
    positive_control: PositiveControl = Field(description="whether memorisation could be seen at all")
    start_test: StartTest | None = Field(default=None, description="of the model before training; None: not scored")
    defence: str | None = Field(default=None, description="what the run did against memorisation, as it declares it")
    is_full: bool = Field(default=False, description="a full audit: what it did not measure, it had no data for")
    prior_aware_settings: dict[str, float | int | str] | None = Field(
        default=None, description="m, n, prefixes; None: not measured"
    )
    prior_aware: PriorAwareCounts | None = Field(default=None, description="verdicts on canaries; None: not measured")
    prior_aware_thresholds: list[Threshold] = Field(default_factory=list, description="the belief ratio n of each format")
    extraction: Extraction | None = Field(default=None, description="of canaries; None: not measured")
    records: Records | None = Field(default=None, description="real records; None: no data")
    membership: Membership | None = Field(default=None, description="membership inference; None: no members or no held-out")
    propensity: Propensity | None = Field(
        default=None,
        description="what is volunteered in ordinary use, against what a prefix forces out; None: no index, or not asked",
    )
    privacy: Privacy | None = Field(default=None, description="lower bound of epsilon; None: no coins were thrown")
    counterfactual: list[Counterfactual] = Field(
        default_factory=list, description="what being trained on adds to a score, from inclusion coins"
    )
    trend: list[TrendPoint] = Field(default_factory=list, description="earlier audits of the run")
    cadence: AuditCadence | None = Field(default=None, description="how often the run is audited; None: not in training")
    duration_s: float = Field(description="seconds the audit took")

    def save(self, path: Path | str) -> None:
        """Write the report as JSON with its seal, whole or not at all."""
        write_text_atomic(path, sealed_json(self))


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

    def save(self, path: Path | str) -> None:
        """Write the decision as JSON with its seal, whole or not at all."""
        write_text_atomic(path, sealed_json(self))


LIMITS = [
    "A canary is a proxy: only what was planted was measured.",
    "Low exposure is not proof of absence; high exposure is not proof that an attacker can extract the secret.",
    "Exposure compares only between audits made by one procedure.",
    "Prior-Aware memorisation may explain a finding; it never clears one.",
    "memguard measures memorisation; it does not prevent it.",
]


def load_report(path: Path | str) -> AuditReport:
    """Read an audit report. Raises `InputError` when it cannot be read, `EvidenceError` when it was changed."""
    return load_document(path, AuditReport, what="report", sealed=True)


def load_decision(path: Path | str) -> Decision:
    """Read a decision. Raises `InputError` when it cannot be read, `EvidenceError` when it was changed."""
    return load_document(path, Decision, what="decision", sealed=True)
