"""Plain YAML, read safely: no tags, no anchors, no aliases, no duplicate or non-text keys, small files only."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from memguard.errors import InputError
from memguard.files import read_text

MAX_CHARACTERS = 64 * 1024


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader without what a short settings file has no need of, and what attacks are made of."""

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
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key '{key.value[:40]}' is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# Dates stay text, so that the model can say what is wrong with one.
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 1e-3 as text; a policy means the number.
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml_mapping(path: Path, *, what: str) -> dict[str, Any]:
    """Read a small YAML file whose top level is a mapping; `InputError` names the line that is wrong."""
    text = read_text(path, what=what)
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{what} '{path.name}' must be at most {MAX_CHARACTERS // 1024} KiB of text.")
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{what} '{path.name}' is not plain YAML: {line}{error.problem or 'not readable'}.") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"{what} '{path.name}' is not plain YAML.") from None
    if not isinstance(data, dict):
        raise InputError(f"{what} '{path.name}' must be a list of keys and values, got {type(data).__name__}.")
    return data
