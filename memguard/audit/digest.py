"""The digest of a checkpoint: sha256 over the manifest of its weights, configuration and tokenizer files. No torch.

Optimiser state, logs and memguard's own files do not count. Files are hashed, never opened by a loader.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from memguard.documents import json_digest
from memguard.errors import InputError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
TEXTS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)


def checkpoint_manifest(folder: Path) -> dict[str, str]:
    """File name -> sha256 of every file that decides what the model says.

    Raises:
        InputError: no such folder, or no weights in it.
    """
    if not folder.is_dir():
        raise InputError(f"checkpoint '{folder}' is not a folder.")
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _counts(path.name)]
    if not any(path.name.endswith(WEIGHTS) for path in files):
        raise InputError(f"checkpoint '{folder}' holds no weights ({', '.join(WEIGHTS)}).")
    return {path.name: _sha256(path) for path in files}


def checkpoint_digest(folder: Path) -> str:
    """sha256 of the manifest, as hex."""
    return json_digest(checkpoint_manifest(folder))


def _counts(name: str) -> bool:
    if name in NOT_WEIGHTS or name.startswith("rng_state"):
        return False
    return name in TEXTS or name.endswith((*WEIGHTS, ".safetensors.index.json", ".bin.index.json"))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
