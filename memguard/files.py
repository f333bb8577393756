"""Reading and writing small files: whole or not at all, with one plain sentence when it fails."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from memguard.errors import InputError

MAX_BYTES = 512 * 2**20


def write_text_atomic(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` under a temporary name and rename: a crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{what} '{path.name}' is larger than {MAX_BYTES // 2**20} MiB.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{what} '{path}' does not exist.") from None
    except UnicodeDecodeError:
        raise InputError(f"{what} '{path.name}' is not UTF-8 text.") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}.") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("duplicate key")
    return dict(pairs)


def read_json(path: Path, *, what: str) -> Any:
    """Read strict JSON: no NaN, no infinity, no duplicate keys."""
    text = read_text(path, what=what)
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError):
        raise InputError(f"{what} '{path.name}' is not valid JSON.") from None


class _PlainLoader(yaml.SafeLoader):
    """YAML without what a settings file has no use for: tags of other types, aliases, duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if any(not isinstance(key, (str, int, float, bool)) for key in keys):
            raise yaml.YAMLError("keys must be plain")
        if len(set(keys)) != len(keys):
            raise yaml.YAMLError("a key is given twice")
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 reads the keys `on` and `off` as booleans; here only true and false are.
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


def read_yaml(path: Path, *, what: str) -> Any:
    """Read plain YAML: no aliases, no tags, no duplicate keys. A file of settings holds no secret, so its line is named."""
    text = read_text(path, what=what)
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(f"{what} '{path.name}' is not readable YAML{where}: {problem}.") from None
    except RecursionError:
        raise InputError(f"{what} '{path.name}' is nested too deeply.") from None
