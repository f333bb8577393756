"""What a user writes about canaries in `memguard.yaml`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from memguard.canaries.formats import CanaryFormat
from memguard.canaries.schedule import Count, When
from memguard.documents import Document


class InTrainingControl(Document):
    """Canaries planted so often that they must be memorised; outside every rule."""

    count: int = Field(default=2, ge=1, le=64, description="per secret space")
    repetitions: int = Field(default=64, ge=1)


class PositiveControlSettings(Document):
    """How an audit shows that it could have seen memorisation; `probe` in a file stands for one without `in_training`."""

    in_training: InTrainingControl | None = Field(
        default=None, description="null: copies of the weights learn two fresh secrets a format in each full audit"
    )


class CanarySettings(Document):
    """The `canaries` part of `memguard.yaml`; every key has a default but `formats`."""

    seed: int | None = Field(default=None, description="tests and demos only: marks the plan reproducible")
    formats: tuple[CanaryFormat, ...] = Field(min_length=1)
    tiers: dict[int, int] = Field(default={1: 16, 4: 16, 16: 8}, description="repetitions: canaries of each format")
    controls: int = Field(default=200, ge=0, description="never inserted, split evenly over the formats")
    positive_control: PositiveControlSettings | None = Field(
        default=PositiveControlSettings(), description="probe, or in_training with its numbers; null: none"
    )
    max_share: float = Field(default=0.01, gt=0.0, lt=1.0, description="of training tokens")
    plant_once: bool = False
    inclusion: Literal["planned", "coin"] = "planned"
    count: Count = "per_epoch"
    schedule: When = Field(default="uniform", description="early, late: in the first or last quarter of the run")
    verify: bool = Field(default=False, description="count sightings in the model's forward and compare with the ledger")
    on_preflight_failure: Literal["stop", "warn"] = Field(
        default="stop", description="where a planned canary will not reach the loss"
    )

    @property
    def planted_control(self) -> InTrainingControl | None:
        """The positive controls that go into the training data; None where there are none."""
        return self.positive_control.in_training if self.positive_control is not None else None

    @property
    def has_probe(self) -> bool:
        """Whether full audits make a probe."""
        return self.positive_control is not None and self.positive_control.in_training is None

    @field_validator("positive_control", mode="before")
    @classmethod
    def _probe_is_a_word(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value != "probe":
            raise ValueError("positive_control must be probe, in_training with its numbers, or null")
        return {}

    @field_validator("formats")
    @classmethod
    def _distinct_names(cls, value: tuple[CanaryFormat, ...]) -> tuple[CanaryFormat, ...]:
        names = [one.name for one in value]
        if len(set(names)) != len(names):
            raise ValueError("formats must have distinct names")
        return value

    @field_validator("tiers")
    @classmethod
    def _positive(cls, value: dict[int, int]) -> dict[int, int]:
        if not value or any(repetitions < 1 or number < 1 for repetitions, number in value.items()):
            raise ValueError("tiers must map repetitions of at least 1 to at least 1 canary")
        return dict(sorted(value.items()))

    @model_validator(mode="after")
    def _window_of_a_run(self) -> CanarySettings:
        if self.schedule != "uniform" and self.count != "total":
            raise ValueError(f"schedule '{self.schedule}' speaks of the whole run and needs count: total, got {self.count}")
        return self

    @model_validator(mode="after")
    def _room_for_controls(self) -> CanarySettings:
        if 0 < self.controls < len(self.formats):
            raise ValueError(f"controls must be at least one a format ({len(self.formats)}), got {self.controls}")
        return self
