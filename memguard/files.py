"""Reading and writing small files: whole or not at all, with one plain sentence when it fails."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from memguard.errors import InputError

MAX_BYTES = 512 * 2**20
MAX_YAML_CHARACTERS = 64 * 2**10


def write_text_atomic(path: Path | str, text: str, *, mode: int = 0o644) -> None:
    """Write `text` under a temporary name and rename: a crash leaves the old file or the new one.

    Raises:
        InputError: the place cannot be written to.
        OSError: the disk is full, or fails.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # a rename would put a file in the place of /dev/stdout, or of a link to it
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_text(path: Path, *, what: str) -> str:
    """Read a UTF-8 text file; `InputError` names `what` it was meant to be."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe or device has no end to wait for
            raise InputError(f"{what} '{path.name}' must be a regular file.")
        if found.st_size > MAX_BYTES:
            raise InputError(_too_large(path, what))
        with path.open(encoding="utf-8") as stream:
            text = stream.read(MAX_BYTES + 1)  # a file that grows, or that tells no size, is not read for ever
    except FileNotFoundError:
        raise InputError(f"{what} '{path}' does not exist.") from None
    except UnicodeDecodeError:
        raise InputError(f"{what} '{path.name}' is not UTF-8 text.") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}.") from None
    if len(text) > MAX_BYTES:
        raise InputError(_too_large(path, what))
    return text


def _too_large(path: Path, what: str) -> str:
    return f"{what} '{path.name}' is larger than {MAX_BYTES // 2**20} MiB."


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def read_json(path: Path, *, what: str) -> Any:
    """Read strict JSON: no NaN, no infinity, no duplicate keys."""
    text = read_text(path, what=what)
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_refuse_duplicates
        )
    except (ValueError, RecursionError):
        raise InputError(f"{what} '{path.name}' is not valid JSON.") from None


class _PlainLoader(yaml.SafeLoader):
    """YAML without what a settings file has no need of and attacks are made of: tags, anchors, aliases, duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not accepted", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags are not accepted", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int"):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key '{key.value[:40]}' is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):  # one number in two spellings, such as 8 and 0x8
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return mapping


# YAML 1.1 reads `on` and `off` as booleans, some texts as dates, and 1e-3 as text; a settings file means none of these.
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path, *, what: str) -> dict[str, Any]:
    """Read a small file of plain YAML whose top level is a mapping.

    A file of settings holds no secret, so the line and the key that are wrong are named.

    Raises:
        InputError: missing, larger than 64 KiB, not a mapping, or with tags, anchors, aliases or duplicate keys.
    """
    text = read_text(path, what=what)
    if len(text) > MAX_YAML_CHARACTERS:
        raise InputError(f"{what} '{path.name}' must be at most {MAX_YAML_CHARACTERS // 1024} KiB of text.")
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{what} '{path.name}' is not plain YAML: {line}{error.problem or 'not readable'}.") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"{what} '{path.name}' is not plain YAML.") from None
    if not isinstance(data, dict):
        raise InputError(f"{what} '{path.name}' must hold keys and values, got {type(data).__name__}.")
    return data
