"""What can go wrong while a model is scored, as errors that name an item and hold nothing of what was scored."""

from __future__ import annotations

import torch

from memguard.errors import ScoringError

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


class NoRoomError(ScoringError):
    """One row of a batch does not fit: where it stood within another batch, the outer one is to be halved."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | NoRoomError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def as_scoring_error(error: Exception, label: str, rows: int) -> ScoringError:
    """The same failure as a `ScoringError` that names an item; a message of the model's own may hold token ids."""
    if isinstance(error, ScoringError):
        return error
    cure = "One row alone needs more memory than there is." if is_out_of_memory(error) else "The model itself raised it."
    kind = NoRoomError if is_out_of_memory(error) else ScoringError
    return kind(f"scoring {label or 'a batch'} and {rows - 1} rows beside it failed with {type(error).__name__}. {cure}")
