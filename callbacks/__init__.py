"""Training-time callbacks, imported as `memguard.callbacks`: when to plant, when to measure.

A lazy table of contents: each name imports its framework only when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "memguard.callbacks":
    raise ImportError("import this package as memguard.callbacks: a second copy of its classes would not be recognised.")

if TYPE_CHECKING:
    from memguard.callbacks.hf_trainer import HFAuditCallback, attach

__all__ = ["HFAuditCallback", "attach"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'memguard.callbacks' has no attribute '{name}'")
    try:
        from memguard.callbacks import hf_trainer
    except ModuleNotFoundError as error:
        if error.name in ("torch", "transformers", "accelerate"):
            from memguard.errors import MissingExtraError

            raise MissingExtraError("the Hugging Face callback", "hf") from None
        raise
    return getattr(hf_trainer, name)
