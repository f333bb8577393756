"""Which folders of a run are checkpoints, and whether one is written to its end. Looks at names, sizes and times; no torch.

A checkpoint is complete when the ledger, which the callback writes after all else, is its newest file, or when two looks a
while apart find the same files. Until then a part that is known to be missing is named.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from memguard.audit.digest import WEIGHTS, is_beside
from memguard.canaries.ledger import LEDGER_NAME
from memguard.errors import InputError
from memguard.files import read_json

Files = dict[str, tuple[int, int, int]]

BESIDE = "memguard_audit"
STATE_NAME = "trainer_state.json"
NUMBERED = re.compile(r"checkpoint-(\d+)")
SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
INDEX = ".safetensors.index.json"


def files_of(folder: Path) -> Files:
    """Size in bytes and times of change in ns, of content and of the entry, by file, sub-folders too; empty: it is gone.

    The second time also moves when a file is put in the place of another with its old time of content, as copies are.
    memguard's own files are left out.
    """
    found: Files = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != BESIDE]
        for path in (Path(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # deleted while it was looked at
                status = path.stat()
                found[path.relative_to(folder).as_posix()] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def checkpoint_folders(run: Path) -> list[Path]:
    """Folders of a run that are checkpoints or will be, by step, then name; a link to one of them is not a second one.

    Args:
        run: the folder that a trainer saves in.

    Returns:
        Every `checkpoint-N` with a file in it, and every other folder that holds safetensors weights and a configuration.
    """
    inside = run.resolve()
    found = []
    for folder in sorted(path for path in run.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))):
        names = {path.name for path in folder.glob("*") if path.is_file()}
        is_saved = {"config.json", "adapter_config.json"} & names and any(name.endswith(".safetensors") for name in names)
        is_link = folder.is_symlink() and folder.resolve().parent == inside
        if not is_link and (is_saved or (names and NUMBERED.fullmatch(folder.name))):
            found.append(folder)
    return sorted(found, key=lambda folder: (step_of_name(folder) is None, step_of_name(folder) or 0, folder.name))


def step_of_name(folder: Path) -> int | None:
    """Optimiser steps by the name that a trainer gives, None for another name."""
    match = NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_metric_of(run: Path) -> str:
    """The step axis of the tracker that the run's trainer logs to, told by what it leaves in a checkpoint."""
    is_hf = any((folder / STATE_NAME).exists() for folder in checkpoint_folders(run))
    return "train/global_step" if is_hf else "trainer/global_step"


class Looks:
    """Looks at checkpoints again and again, and tells which are complete."""

    def __init__(self) -> None:
        self._last: dict[Path, Files] = {}

    def missing(self, folder: Path, files: Files) -> str | None:
        """Why a checkpoint is not complete yet, as half a sentence; None when it is.

        Args:
            folder: the checkpoint.
            files: of this look.
        """
        part = _missing_part(folder, files)
        before, self._last[folder] = self._last.get(folder), files
        if part is not None or before == files or _ends_with_ledger(files):
            return part
        return "it is still being written"


def _ends_with_ledger(files: Files) -> bool:
    """Whether weights are there and nothing was written after the ledger.

    It also lies in a folder whose weights a resumed run writes anew; a copy of a checkpoint may bring it before them.
    """
    has_weights = any(name.endswith(WEIGHTS) and not is_beside(name) for name in files if "/" not in name)
    return has_weights and LEDGER_NAME in files and files[LEDGER_NAME][1] >= max(written for _, written, _ in files.values())


def _missing_part(folder: Path, files: Files) -> str | None:
    indices = [name for name in files if name.endswith(INDEX) and "/" not in name]
    for index in indices:
        try:
            shards = set(read_json(folder / index, what="index")["weight_map"].values())
        except (InputError, KeyError, TypeError, AttributeError):
            return f"{index} is not whole"
        absent = sorted(str(shard) for shard in shards - files.keys())
        if absent:
            return f"{absent[0]} is missing, {len(absent)} of {len(shards)} shards in all"
    if not indices and any(SHARD.fullmatch(name) for name in files):
        return "the index of its shards is missing"
    # the optimiser's state is gathered between the two: minutes, with no file changing
    if NUMBERED.fullmatch(folder.name) and "training_args.bin" in files and STATE_NAME not in files:
        return f"{STATE_NAME}, which the trainer writes last, is missing"
    return None
