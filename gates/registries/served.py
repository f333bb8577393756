"""Which folder of what a registry served is the checkpoint. Names are looked at, files are never opened."""

from __future__ import annotations

from pathlib import Path

from memguard.audit.digest import WEIGHTS, is_beside
from memguard.errors import RegistryError

LOADER = "MLmodel"  # says by what flavour MLflow loads a model
CONFIGS = {"config.json", "adapter_config.json"}


def find_checkpoint(folder: Path, *, cure: str) -> Path:
    """The one folder, `folder` itself or below it, that holds weights beside their configuration.

    What lies inside a checkpoint belongs to it, and is for its digest to judge. Around it may lie texts alone: code or a
    description of how to load it (`MLmodel`) would be served with it, and no digest knows them.

    Raises:
        RegistryError: none, or several side by side: it would be a guess which of them is loaded; or files around it. Ends
            with `cure`.
    """
    found = _checkpoints(folder)
    if len(found) == 1:
        _refuse_around(folder, found[0], cure)
        return found[0]
    what = f"{len(found)} folders with weights and a configuration" if found else "no weights beside a configuration"
    raise RegistryError(f"the registry serves {what}, so there is no saying what would be loaded. {cure}")


def _refuse_around(folder: Path, checkpoint: Path, cure: str) -> None:
    every = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    around = [path for path in every if checkpoint not in path.parents and not _is_text(path.name)]
    around += [path for path in every if path.name == LOADER and path not in around]
    if around:
        names = ", ".join(sorted(repr(path.relative_to(folder).as_posix()) for path in around)[:3])
        more = f" and {len(around) - 3} more" if len(around) > 3 else ""
        raise RegistryError(f"the registry serves files with the checkpoint that no audit was of: {names}{more}. {cure}")


def _is_text(name: str) -> bool:
    return is_beside(name) and not name.endswith((*WEIGHTS, ".pkl"))


def holds_checkpoint(folder: Path) -> bool:
    """Whether weights and a configuration lie side by side here."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    return bool(names & CONFIGS) and any(name.endswith(WEIGHTS) and not is_beside(name) for name in names)


def _checkpoints(folder: Path) -> list[Path]:
    if holds_checkpoint(folder):
        return [folder]
    return [found for inside in sorted(folder.iterdir()) if inside.is_dir() for found in _checkpoints(inside)]
