"""Training-time callbacks, imported as `memguard.callbacks`: when to plant, when to measure.

A lazy table of contents: each name imports its framework only when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "memguard.callbacks":
    raise ImportError("import this package as memguard.callbacks: a second copy of its classes would not be recognised.")

if TYPE_CHECKING:
    from memguard.callbacks.hf_trainer import HFAuditCallback, attach
    from memguard.callbacks.lightning_trainer import LightningAuditCallback
    from memguard.callbacks.records import plant_records

__all__ = ["HFAuditCallback", "LightningAuditCallback", "attach", "plant_records"]

_HOMES = {
    "HFAuditCallback": "hf_trainer",
    "LightningAuditCallback": "lightning_trainer",
    "attach": "hf_trainer",
    "plant_records": "records",
}
_NEEDS = {
    "hf_trainer": ("the Hugging Face callback", "hf"),
    "lightning_trainer": ("the Lightning callback", "lightning"),
    "records": ("planting records", "hf"),
}
_PARTS = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memguard.callbacks' has no attribute '{name}'")
    home = _HOMES[name]
    try:
        module = importlib.import_module(f"memguard.callbacks.{home}")
    except ModuleNotFoundError as error:
        if error.name in _PARTS:
            from memguard.errors import MissingExtraError

            raise MissingExtraError(*_NEEDS[home]) from None
        raise
    return getattr(module, name)
