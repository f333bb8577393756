"""What older releases of the trainers call otherwise, or do not have."""

from __future__ import annotations

import inspect
from typing import Any

import pytest


def as_this_version_says(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the trainer under the names that older releases give them; what they have not got is skipped."""
    from transformers import TrainingArguments

    known, found = inspect.signature(TrainingArguments).parameters, dict(arguments)
    if "train_sampling_strategy" not in known and (strategy := found.pop("train_sampling_strategy", None)) is not None:
        if strategy != "group_by_length":
            pytest.skip(f"this transformers has no sampling strategy '{strategy}'")
        found["group_by_length"] = True
    if "activation_checkpointing" in found and "activation_checkpointing" not in known:
        found["gradient_checkpointing"] = found.pop("activation_checkpointing")
    return found


def evaluates_at_the_end() -> bool:
    """Whether this transformers evaluates at the last step, whatever the cadence."""
    from transformers import TrainingArguments

    return "train_sampling_strategy" in inspect.signature(TrainingArguments).parameters  # both came with version 5
