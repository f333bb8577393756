"""Which folder of what a registry served is the checkpoint. Names are looked at, files are never opened."""

from __future__ import annotations

from pathlib import Path

from memguard.audit.digest import WEIGHTS, is_beside
from memguard.errors import RegistryError

CONFIGS = {"config.json", "adapter_config.json"}


def find_checkpoint(folder: Path, *, cure: str) -> Path:
    """The one folder, `folder` itself or below it, that holds weights beside their configuration.

    What lies inside a checkpoint belongs to it, and is for its digest to judge.

    Raises:
        RegistryError: none, or several side by side: it would be a guess which of them is loaded. Ends with `cure`.
    """
    found = _checkpoints(folder)
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} folders with weights and a configuration" if found else "no weights beside a configuration"
    raise RegistryError(f"the registry serves {what}, so there is no saying what would be loaded. {cure}")


def holds_checkpoint(folder: Path) -> bool:
    """Whether weights and a configuration lie side by side here."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return bool(names & CONFIGS) and any(name.endswith(WEIGHTS) and not is_beside(name) for name in names)


def _checkpoints(folder: Path) -> list[Path]:
    if holds_checkpoint(folder):
        return [folder]
    return [found for inside in sorted(folder.iterdir()) if inside.is_dir() for found in _checkpoints(inside)]
