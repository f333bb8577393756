"""A folder as a model registry: for a shared disk, and for trying the gate without a server.

    ROOT/MODEL/versions/VERSION/          one checkpoint folder each
    ROOT/MODEL/aliases/ALIAS              a text file that holds the version's name and is replaced whole
    ROOT/MODEL/annotations/VERSION.json   the last verdict on a version

Nothing here is a symbolic link: one that leads out of the folder would let files change that were never hashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from memguard.errors import InputError, RegistryError
from memguard.files import write_text_atomic
from memguard.gates.registries.protocol import Annotation, ModelVersion

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,126}[A-Za-z0-9_+-]|[A-Za-z0-9]", re.ASCII)
DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # no file of that name can be on Windows
MAX_ALIAS_BYTES = 1024


class DirectoryRegistry:
    """One alias of one model in a folder; a `Registry`.

    Args:
        root: the folder.
        model: name of the model's folder in it.
        alias: the alias that the gate guards.

    Raises:
        InputError: a name that is no plain name of a file.

    Example:
        >>> DirectoryRegistry(Path("models"), "../tiny", "champion")
        Traceback (most recent call last):
        ...
        memguard.errors.InputError: model must be a plain name of letters, digits, '.', '_', '+' and '-', got '../tiny'.
    """

    kind = "directory"

    def __init__(self, root: Path, model: str, alias: str) -> None:
        _check_name("model", model)
        _check_name("alias", alias)
        self.model = model
        self.alias = alias
        self._home = root / model
        self._pointer = self._home / "aliases" / alias

    def resolve(self, version: str) -> ModelVersion:
        """The version of a name, or of `@alias`. See `Registry.resolve`."""
        name: str | None = version
        if version.startswith("@"):
            _check_name("alias", version[1:])
            name = self._named_by(self._home / "aliases" / version[1:])
            if name is None:
                raise RegistryError(f"'{self.model}' has no alias '{version[1:]}'.")
        _check_name("version", name or "")
        found = ModelVersion(self.model, name or "")
        self._folder(found)
        return found

    @contextlib.contextmanager
    def served_files(self, version: ModelVersion) -> Iterator[Path]:
        """The folder itself: what is hashed is what is loaded from there. See `Registry.served_files`."""
        folder = self._folder(version)
        empty = True
        for place, folders, files in os.walk(folder, onerror=_raise):
            for path in (Path(place, name) for name in (*folders, *files)):
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise RegistryError(f"{version} must hold plain files and folders only, got '{path.relative_to(folder)}'.")
            empty = empty and not files
        if empty:
            raise RegistryError(f"{version} holds no files.")
        yield folder

    def current(self) -> ModelVersion | None:
        """The version that the alias names now. See `Registry.current`."""
        self._check_home()
        name = self._named_by(self._pointer)
        return None if name is None else ModelVersion(self.model, name)

    def move_alias(self, to: ModelVersion | None) -> None:
        """Replace the alias by rename, so that a reader finds the old version or the new one. See `Registry.move_alias`."""
        self.current()  # refuses what is no plain file
        if to is not None:
            self._folder(to)
            self._write(self._pointer, f"{to.version}\n")
            return
        try:
            self._pointer.unlink(missing_ok=True)
        except OSError as error:
            raise RegistryError(f"alias '{self.alias}' of '{self.model}' cannot be removed: {error.strerror}.") from None

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        """Write the verdict beside the version, whose own files stay as they are. See `Registry.annotate`."""
        self._folder(version)
        fields = {"outcome": note.outcome, "reason": note.reason, **note.tags}
        self._write(self._home / "annotations" / f"{version.version}.json", json.dumps(fields, indent=1) + "\n")

    def _check_home(self) -> None:
        _check_folder(self._home, f"model '{self.model}'")

    def _folder(self, version: ModelVersion) -> Path:
        self._check_home()
        _check_folder(self._home / "versions", f"the versions of '{self.model}'")
        folder = self._home / "versions" / version.version
        _check_folder(folder, str(version))
        return folder

    def _named_by(self, pointer: Path) -> str | None:
        """The name in an alias; None where there is no such alias."""
        what = f"alias '{pointer.name}' of '{self.model}'"
        try:
            if pointer.parent.is_symlink() or pointer.is_symlink() or (pointer.exists() and not pointer.is_file()):
                raise RegistryError(f"{what} must be a plain file.")
            with pointer.open("rb") as stream:
                name = stream.read(MAX_ALIAS_BYTES).decode("ascii", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegistryError(f"{what} cannot be read: {error.strerror}.") from None
        if not _is_name(name):
            raise RegistryError(f"{what} does not hold the name of a version.")
        return name

    def _write(self, path: Path, text: str) -> None:
        if path.parent.is_symlink() or path.is_symlink():
            raise RegistryError(f"'{path.parent.name}/{path.name}' of '{self.model}' must not be a symbolic link.")
        try:
            write_text_atomic(path, text)
        except (InputError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else "the folder does not allow it"
            raise RegistryError(f"'{path.parent.name}/{path.name}' of '{self.model}' cannot be written: {why}.") from None


def _is_name(name: str) -> bool:
    return NAME.fullmatch(name) is not None and DEVICES.fullmatch(name) is None


def _check_name(what: str, name: str) -> None:
    if not _is_name(name):
        raise InputError(f"{what} must be a plain name of letters, digits, '.', '_', '+' and '-', got '{name[:200]}'.")


def _check_folder(folder: Path, what: str) -> None:
    if folder.is_symlink():
        raise RegistryError(f"{what} must not be a symbolic link.")
    if not folder.is_dir():
        raise RegistryError(f"{what} does not exist in the directory registry.")


def _raise(error: OSError) -> None:
    raise RegistryError(f"a folder of the directory registry cannot be read: {error.strerror}.")
