"""`memguard.yaml` as a model. A version refuses, by name, the keys it does not implement."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from memguard.canaries.settings import CanarySettings
from memguard.documents import Document, json_digest, parse_settings
from memguard.files import read_yaml

Moment = Literal["start", "save", "evaluate", "end"]

NOT_IMPLEMENTED = {
    "canaries.positive_control.probe": "a clone trained on fresh secrets",
    "canaries.schedule": "early and late planting",
    "canaries.on_preflight_failure": "the pre-flight",
    "canaries.verify": "counting in a forward hook",
    "audit.every.epochs": "a cadence in epochs",
    "audit.max_overhead": "an adaptive cadence",
    "audit.records": "real records",
    "audit.extraction": "sampled extraction",
    "audit.membership": "membership inference",
    "audit.propensity": "capability against propensity",
    "dp": "testing a stated guarantee",
    "tracking.tensorboard": "TensorBoard",
    "gate": "the gate inside training; use `memguard gate`",
}


class Cadence(Document):
    """How often an audit runs between the named moments."""

    steps: int = Field(ge=1, description="optimiser steps")


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
    n: float = Field(default=10.0, gt=1.0, allow_inf_nan=False, description="belief ratio a PA secret must exceed")
    mode: Literal["certified", "full"] = Field(
        default="certified", description="certified: no further than the verdict needs; full: every prefix to the end"
    )


class AuditSettings(Document):
    """The `audit` part of `memguard.yaml`."""

    every: Cadence | None = Cadence(steps=500)
    on: tuple[Moment, ...] = ("start", "save", "end")
    full_on: tuple[Moment, ...] = Field(default=("end",), description="moments that also measure Prior-Aware memorisation")
    exposure: ExposureSettings = ExposureSettings()
    prior_aware: PriorAwareSettings | None = PriorAwareSettings()
    batch_size: int | None = Field(default=None, ge=1, description="rows a forward pass at most; null: what memory allows")
    on_error: Literal["continue", "raise"] = "continue"

    @field_validator("on", "full_on")
    @classmethod
    def _distinct(cls, value: tuple[Moment, ...]) -> tuple[Moment, ...]:
        return tuple(dict.fromkeys(value))


class TrackingSettings(Document):
    """Where trends go; the JSON lines of `history.jsonl` are always written."""

    wandb: Literal["auto", "off"] = "auto"


class AuditConfig(Document):
    """A whole `memguard.yaml`. Relative `plan` is taken from the working directory, relative `output` from the run's folder."""

    plan: Path = Path("_memguard/plan.json")
    canaries: CanarySettings
    audit: AuditSettings = AuditSettings()
    tracking: TrackingSettings = TrackingSettings()
    output: Path = Path("memguard_audit")

    @property
    def digest(self) -> str:
        """sha256 over the settings."""
        return json_digest(self.model_dump(mode="json"))


def load_config(path: Path) -> AuditConfig:
    """Read `memguard.yaml`.

    Raises:
        InputError: missing file, broken YAML, unknown keys (with the nearest valid one), keys of a later version.
    """
    return parse_config(read_yaml(path, what="config"), what=f"config '{path.name}'")


def parse_config(data: object, *, what: str = "config") -> AuditConfig:
    """A configuration from plain dictionaries, as YAML would give them."""
    return parse_settings(data, AuditConfig, what=what, not_implemented=NOT_IMPLEMENTED)
