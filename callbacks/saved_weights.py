"""Does a checkpoint on disk hold the weights that are in memory? Decides whether a report may speak for the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def saved_weights_match(folder: Path, model: Any) -> bool:
    """Compare every tensor of the folder's safetensors files with the model's, bit for bit.

    Tensors that share memory with a saved one (tied weights are saved once) count as saved. Files in other formats are
    never opened: the answer is then False.

    Args:
        folder: a checkpoint.
        model: the model in memory.

    Returns:
        Whether the file and the model are the same weights.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    state = model.state_dict()
    matched: set[int] = set()
    for path in files:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # not a dict
                held = state.get(name)
                if held is None or not _equal(stored.get_tensor(name), held):
                    return False
                matched.add(held.data_ptr())
    return bool(files) and all(tensor.data_ptr() in matched for tensor in state.values())


def _equal(stored: torch.Tensor, held: torch.Tensor) -> bool:
    held = held.detach().cpu()
    return stored.dtype == held.dtype and stored.shape == held.shape and torch.equal(stored, held)
