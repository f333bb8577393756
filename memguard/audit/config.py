"""`memguard.yaml` as a model. A version refuses, by name, the keys it does not implement."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from memguard.audit.decoding import PropensitySettings
from memguard.audit.report_extraction import SamplerSettings
from memguard.audit.report_membership import ScoreName
from memguard.canaries.settings import CanarySettings
from memguard.documents import Document, json_digest, parse_settings
from memguard.files import read_yaml

Moment = Literal["start", "save", "evaluate", "end"]

NOT_IMPLEMENTED = {
    "tracking.tensorboard": "TensorBoard",
}


class Cadence(Document):
    """How often an audit runs between the named moments: in optimiser steps or in epochs, one of the two."""

    steps: int | None = Field(default=None, ge=1, description="optimiser steps")
    epochs: float | None = Field(default=None, gt=0.0, allow_inf_nan=False, description="epochs, such as 0.25 of one")

    @model_validator(mode="after")
    def _one_of_two(self) -> Cadence:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("every must hold steps or epochs, one of the two")
        return self


class ExposureSettings(Document):
    """How many candidates a canary is ranked among, and how far a search for its exact rank goes."""

    exact: Literal["auto", "off"] = Field(default="auto", description="auto: search the space of canaries that stand out")
    node_budget: int = Field(default=50_000, ge=100, description="prefixes of candidates a search may expand, a format")
    references: int = Field(default=16_384, ge=16, description="behind a prefix that a format's canaries share")
    references_per_name: int = Field(default=128, ge=16, description="behind a prefix of one canary's own")


class PriorAwareSettings(Document):
    """Thresholds and size of the Prior-Aware measurement."""

    prefixes: int = Field(default=500, ge=16, description="prior prefixes from the training data")
    m: float = Field(default=1e-4, gt=0.0, lt=1.0, description="P(secret | prefix) must exceed it")
    n: Literal["calibrated"] | Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = Field(
        default="calibrated",
        description="belief ratio that a PA target must exceed; calibrated: the 95% quantile of never-trained ones",
    )
    mode: Literal["certified", "full"] = Field(
        default="certified", description="certified: no further than the verdict needs; full: every prefix to the end"
    )


class ExtractionSettings(SamplerSettings):
    """The sampler an attacker is given, and how often it may be asked."""

    budgets: tuple[Annotated[int, Field(ge=1, le=10**18)], ...] = Field(
        default=(1, 100, 10_000), description="queries a target"
    )


class RecordSettings(Document):
    """Real samples of the training data, and held-out ones of the same kind."""

    file: Path | None = Field(default=None, description="members: JSON lines with text or input_ids, or one text a line")
    held_out: Path | None = Field(default=None, description="the same kind of text, never trained on")
    prefix_tokens: int = Field(default=50, ge=1)
    suffix_tokens: int = Field(default=50, ge=1, description="tokens asked for where a record names no span")
    max_records: int = Field(default=1000, ge=1, description="a random sample of so many, of each file")
    contexts: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="also ask for the same tokens behind shorter prefixes, of so many tokens"
    )
    offsets: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="also ask with so many tokens of other records before the prefix"
    )
    max_edits: int = Field(default=0, ge=0, description="near-verbatim extraction up to so many edits; 0: not measured")

    @model_validator(mode="after")
    def _contexts_are_shorter(self) -> RecordSettings:
        if any(one >= self.prefix_tokens for one in self.contexts):
            raise ValueError(f"contexts must be shorter than prefix_tokens, {self.prefix_tokens}")
        return self


class MembershipSettings(Document):
    """Membership inference on the records, where held-out ones are given."""

    scores: tuple[ScoreName, ...] = Field(default=("loss", "zlib", "min_k_plus_plus"), min_length=1)
    reference: Path | None = Field(default=None, description="checkpoint of a model that never saw the members")

    @model_validator(mode="after")
    def _reference_is_used(self) -> MembershipSettings:
        if (self.reference is not None) != ("reference" in self.scores):
            raise ValueError("the score 'reference' and the checkpoint 'reference' need each other")
        return self


class AuditSettings(Document):
    """The `audit` part of `memguard.yaml`."""

    every: Cadence | None = Cadence(steps=500)
    on: tuple[Moment, ...] = ("start", "save", "end")
    full_on: tuple[Moment, ...] = Field(
        default=("end",),
        description="moments that also measure extraction, Prior-Aware memorisation, records, membership, propensity",
    )
    max_overhead: float | None = Field(
        default=0.02,
        gt=0.0,
        allow_inf_nan=False,
        description="audits of the cadence wait while all audits exceed this share of the training time; null: they never do",
    )
    exposure: ExposureSettings = ExposureSettings()
    prior_aware: PriorAwareSettings | None = PriorAwareSettings()
    extraction: ExtractionSettings | None = ExtractionSettings()
    records: RecordSettings = RecordSettings()
    membership: MembershipSettings | None = MembershipSettings()
    propensity: PropensitySettings | None = Field(
        default=None, description="what the model volunteers in ordinary use, traced to an index of the corpus; null: not asked"
    )
    batch_size: int | None = Field(default=None, ge=1, description="rows a forward pass at most; null: what memory allows")
    on_error: Literal["continue", "raise"] = "continue"

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> AuditSettings:
        never = [moment for moment in self.full_on if moment not in self.on]
        if "full_on" in self.model_fields_set and never:
            raise ValueError(f"full_on must hold moments of 'on', got {', '.join(never)} besides")
        if self.records.max_edits and self.extraction is None:
            raise ValueError("records.max_edits needs the sampler of 'extraction', got null")
        return self

    @field_validator("on", "full_on")
    @classmethod
    def _distinct(cls, value: tuple[Moment, ...]) -> tuple[Moment, ...]:
        return tuple(dict.fromkeys(value))


class DpSettings(Document):
    """The guarantee that a run states, to be tested."""

    epsilon: float = Field(gt=0.0, allow_inf_nan=False)
    delta: float = Field(ge=0.0, lt=1.0)


class TrackingSettings(Document):
    """Where trends go; the JSON lines of `history.jsonl` are always written."""

    wandb: Literal["auto", "off"] = "auto"


class GateSettings(Document):
    """The gate inside training. Paths are taken from the working directory."""

    policy: Path = Field(description="a policy file, or default or strict")
    baseline: Path | None = Field(default=None, description="what a checkpoint must not be worse than")
    stop_when: Literal["never", "blocked"] = Field(default="never", description="blocked: training stops when a rule fails")
    push: Literal["always", "gated"] = Field(
        default="always", description="gated: only weights that passed the gate go to the hub"
    )


class AuditConfig(Document):
    """A whole `memguard.yaml`. Relative `plan` is taken from the working directory, relative `output` from the run's folder."""

    plan: Path = Path("_memguard/plan.json")
    canaries: CanarySettings
    audit: AuditSettings = AuditSettings()
    dp: DpSettings | None = Field(default=None, description="the stated guarantee, checked against where coins were thrown")
    defence: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=80)] | None = Field(
        default=None, description="what this run does against memorisation, such as deduplication: the gate asks for its proof"
    )
    tracking: TrackingSettings = TrackingSettings()
    output: Path = Path("memguard_audit")
    gate: GateSettings | None = None

    @model_validator(mode="after")
    def _records_have_no_schedule(self) -> AuditConfig:
        if self.dp is not None and (self.canaries.count != "per_epoch" or self.canaries.schedule != "uniform"):
            raise ValueError(
                "dp puts canaries among the rows to draw from, so canaries.count must be per_epoch, schedule uniform"
            )
        return self

    @property
    def digest(self) -> str:
        """sha256 over the settings."""
        return json_digest(self.model_dump(mode="json"))


def load_config(path: Path | str) -> AuditConfig:
    """Read `memguard.yaml`.

    Raises:
        InputError: missing file, broken YAML, unknown keys (with the nearest valid one), keys of a later version.
    """
    path = Path(path)
    return parse_config(read_yaml(path, what="config"), what=f"config '{path.name}'")


def parse_config(data: object, *, what: str = "config") -> AuditConfig:
    """A configuration from plain dictionaries, as YAML would give them."""
    return parse_settings(data, AuditConfig, what=what, not_implemented=NOT_IMPLEMENTED)
