"""The digest of a checkpoint: sha256 over the manifest of the files that decide what the model says. No torch.

Every file counts, in sub-folders too, except what training, a registry or memguard is known to leave beside a model. Content
is hashed through links to files, as a loader reads it, and is opened by no loader. Out of reach: code that a configuration
takes from another repository, and which file a server opens of those that all count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memguard.documents import json_digest
from memguard.errors import InputError
from memguard.files import read_json

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
STATE_FILES = (  # of training
    *("training_args.bin", "trainer_state.json", "optimizer*.bin", "optimizer*.pt", "scheduler*.bin", "scheduler*.pt"),
    *("scaler*.pt", "rng_state*.pth", "random_states_*.pkl", "*_results.json", "trainer_log.jsonl", "events.out.tfevents*"),
    "memguard_ledger.json",
)
# texts for people, and what a registry or a file system adds: never one that could be read as weights
OTHER_FILES = ("*.md", "LICENSE*", "*.log", "*.lock", ".*", "registered_model_meta")
BESIDE_FOLDERS = (
    *(".*", "__pycache__", "checkpoint-*", "global_step*", "optimizer_*", "pytorch_model_fsdp_*"),
    *("runs", "wandb", "mlruns", "lightning_logs", "memguard_audit", "_memguard"),
)
INDEXES = (".safetensors.index.json", ".bin.index.json")
SHARD = re.compile(r"-\d{5}-of-\d{5}\b.*\.(safetensors|bin)$")
CODE = re.compile(r"(.+--)?\w+\.\w+")  # module.Class, or REPOSITORY--module.Class


def checkpoint_manifest(folder: Path) -> dict[str, str]:
    """File -> sha256 of every file that decides what the model says; sub-folders with a slash.

    Args:
        folder: a checkpoint. It may be a link, and its files may be; a sub-folder may not.

    Returns:
        The manifest, the same whatever order the file system lists in.

    Raises:
        InputError: no such folder or no weights in it; shards that are not those of the index; a link that leads nowhere, a
            linked sub-folder or something that is no file; code named by a path; a file that cannot be read, or changes.
    """
    if not folder.is_dir():
        raise InputError(f"checkpoint '{folder}' is not a folder.")
    try:
        for _ in range(2):
            manifest = _read(folder)
            if manifest is not None:
                return manifest
    except OSError as error:
        raise InputError(f"checkpoint '{folder}' cannot be read: {error.strerror}.") from None
    raise InputError(f"checkpoint '{folder}' changes while it is read. Wait until it is written, then try again.")


def checkpoint_digest(folder: Path) -> str:
    """sha256 of the manifest, as hex."""
    return json_digest(checkpoint_manifest(folder))


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Hold the files of a checkpoint to be the same at the end of a block as at its start: what was hashed is what was loaded.

    Raises:
        InputError: a file came, went or changed meanwhile.
    """
    before = _stamps(folder)
    yield
    if _stamps(folder) != before:
        raise InputError(f"checkpoint '{folder}' changed while it was loaded. Wait until it is written, then try again.")


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]] | None:
    try:
        return dict(_listed(folder)) if folder.is_dir() else None
    except OSError:
        return None


def adapter_base(folder: Path) -> str | None:
    """The base model of an adapter, as its configuration names it; empty: it names none; None: a whole model.

    Raises:
        InputError: the configuration of the adapter cannot be read.
    """
    path = folder / "adapter_config.json"
    if not path.exists():
        return None
    data = read_json(path, what="adapter configuration")
    name = data.get("base_model_name_or_path") if isinstance(data, dict) else None
    return name if isinstance(name, str) else ""


def base_digest(folder: Path) -> str | None:
    """sha256 of the manifest of an adapter's base, as hex. None: a whole model, or a base that is not here.

    The name is resolved as a loader does: a folder, a relative one from the working directory, or else the snapshot that the
    Hub's cache holds of it.

    Raises:
        InputError: the configuration of the adapter or the base cannot be read.
    """
    name = adapter_base(folder)
    base = _base_folder(name) if name else None
    return checkpoint_digest(base) if base is not None else None


def _base_folder(name: str) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed, or no name that a repository can have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read(folder: Path) -> dict[str, str] | None:
    """The manifest; None where a file came, went or changed meanwhile."""
    try:
        before = dict(sorted(_listed(folder)))
        _check_weights(folder, before)
        _check_code(folder, before)
        manifest = {name: _sha256(folder / name) for name in before}
        return manifest if dict(_listed(folder)) == before else None
    except FileNotFoundError:
        return None


def _listed(folder: Path) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Name and what changes with content (size, times) of every file that counts."""
    for root, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not _matches(name, BESIDE_FOLDERS)]
        for name in [name for name in folders if os.path.islink(os.path.join(root, name))]:
            raise InputError(f"checkpoint '{folder}' must hold no link to a folder, got {name!r}. Put the files in its place.")
        for name in names:
            if not is_beside(name):
                path = Path(root, name)
                yield path.relative_to(folder).as_posix(), _stamp(path, folder)


def _stamp(path: Path, folder: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        if not path.is_symlink():
            raise
        raise InputError(f"checkpoint '{folder}' holds a link that leads nowhere: {path.name!r}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"checkpoint '{folder}' holds {path.name!r}, which is neither a file nor a folder.")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _fail(error: OSError) -> None:
    raise error


def is_beside(name: str) -> bool:
    """Whether training, a registry or memguard leaves such a file beside a model, and no loader takes it for a part of it."""
    is_weights = name.endswith((*WEIGHTS, *INDEXES))
    return _matches(name, STATE_FILES) or (not is_weights and _matches(name, OTHER_FILES))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_weights(folder: Path, names: Collection[str]) -> None:
    """There are weights, and the shards are those that an index names: no other is served, and none is missing."""
    if not any(name.endswith(WEIGHTS) for name in names):
        raise InputError(f"checkpoint '{folder}' holds no weights ({', '.join(WEIGHTS)}).")
    named: set[str] = set()
    for index in (name for name in names if name.endswith(INDEXES) and "/" not in name):
        if index.removesuffix(".index.json") in names:
            raise InputError(f"checkpoint '{folder}' holds whole weights beside '{index}': which of them count? Remove one.")
        named |= _shards_of(folder / index)
    found = {name for name in names if SHARD.search(name) and "/" not in name}
    if missing := named - set(names):
        raise InputError(f"checkpoint '{folder}' lacks shards that its index names: {_some(missing)}.")
    if extra := found - named:
        raise InputError(f"checkpoint '{folder}' holds shards that no index names: {_some(extra)}. Remove them.")


def _shards_of(path: Path) -> set[str]:
    data = read_json(path, what="index of shards")
    shards = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise InputError(f"index of shards '{path.name}' must map tensors to files under 'weight_map'.")
    if not all(re.fullmatch(r"\w[\w.-]*", name) for name in shards.values()):
        raise InputError(f"index of shards '{path.name}' must name files of its own folder, got a path or no plain name.")
    return set(shards.values())


def _some(names: Collection[str]) -> str:
    rest = [f"and {len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*(repr(name) for name in sorted(names)[:3]), *rest])


def _check_code(folder: Path, names: Collection[str]) -> None:
    """Custom code, and weights that a configuration names, lie where they count: a path could lead to where nothing does."""
    for name in (name for name in names if name.endswith("config.json") and "/" not in name):
        try:
            data = json.loads((folder / name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue  # no loader reads it either; its content counts all the same
        named = data.get("transformers_weights") if isinstance(data, dict) else None
        if named is not None and named not in names:
            raise InputError(
                f"transformers_weights in '{name}' of checkpoint '{folder}' must name a file of its own folder that counts."
            )
        targets = _targets(data.get("auto_map")) if isinstance(data, dict) else []
        if not all(isinstance(target, str) and CODE.fullmatch(target) for target in targets):
            raise InputError(
                f"auto_map in '{name}' of checkpoint '{folder}' must name code as module.Class, got something else."
            )


def _targets(auto_map: Any) -> list[Any]:
    """What auto_map names: a mapping, or one entry of it; an entry is one name or a list (slow and fast tokenizer)."""
    entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    return [name for entry in entries for name in (entry if isinstance(entry, list) else [entry]) if name is not None]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
