"""What every file of memguard has in common: frozen, versioned, strict, and errors that never echo a value.

A value in an error message may be a secret, so messages name keys and rules only.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from memguard.errors import EvidenceError, InputError
from memguard.files import read_json

SCHEMA_VERSION = 1
MAX_FINDINGS = 6


class Document(BaseModel):
    """Base of everything written to disk: frozen, no unknown keys, and errors that never echo the input."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


DocumentType = TypeVar("DocumentType", bound=Document)


def document_digest(document: BaseModel) -> str:
    """sha256 over the canonical JSON of a document, as hex."""
    return json_digest(document.model_dump(mode="json"))


def json_digest(value: Any) -> str:
    """sha256 over canonical JSON (sorted keys, no blanks), as hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_json(document: Document) -> str:
    """JSON text of a document with its seal: `digest`, the sha256 over all the rest, as hex.

    A seal shows that a file was changed by accident or by hand. Who can compute it can renew it: a signature stops that one.
    """
    data = json.loads(document.model_dump_json())  # as written: a NaN is null there
    return json.dumps({**data, "digest": json_digest(data)}, indent=1, ensure_ascii=False) + "\n"


def nearest(word: str, choices: Iterable[str]) -> str:
    """' Did you mean ...?' when a choice is close to `word`, else the list of choices."""
    options = sorted(choices)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else f" Known: {', '.join(options)}."


# Rules of pydantic whose own message repeats what stands in the file.
TELLING = {"extra_forbidden": "a key that is not known", "union_tag_invalid": "a kind that is not known"}


def describe_validation_error(error: ValidationError) -> str:
    """Name every wrong key of a document with its rule, and never a value or an unknown key (either may be a secret)."""
    parts = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        unknown = item["type"] == "extra_forbidden"
        where = ".".join(str(part) for part in item["loc"][: -1 if unknown else None]) or "document"
        parts.append(f"{where}: {TELLING.get(item['type'], item['msg'])}")
    more = [f"and {len(parts) - MAX_FINDINGS} more"] if len(parts) > MAX_FINDINGS else []
    return "; ".join(parts[:MAX_FINDINGS] + more)


def load_document(path: Path | str, model: type[DocumentType], *, what: str, sealed: bool = False) -> DocumentType:
    """Read a JSON document of memguard.

    Args:
        path: the file.
        model: what it should hold.
        what: how the file is called in messages.
        sealed: whether it was written by `sealed_json`.

    Raises:
        InputError: a missing, broken, foreign or newer file.
        EvidenceError: a seal that is missing or broken, on a file that is well-formed otherwise.
    """
    path = Path(path)
    data = read_json(path, what=what)
    if not isinstance(data, dict):
        raise InputError(f"{what} '{path.name}' must be a JSON object, got {type(data).__name__}.")
    kind = model.model_fields["kind"].default if "kind" in model.model_fields else None
    if isinstance(data.get("kind"), str) and data["kind"].startswith("memguard ") and data["kind"] != kind:
        raise InputError(f"{what} '{path.name}' is a {data['kind'][:40]}, not a {kind}.")
    _refuse_newer(data.get("schema_version"), path, what)
    seal = data.pop("digest", None) if sealed else None
    try:
        document = model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise InputError(f"{what} '{path.name}' is not readable: {describe_validation_error(error)}.") from None
    _refuse_newer(getattr(document, "schema_version", None), path, what)  # read from text, such as "2"
    if sealed:
        _check_seal(seal, data, f"{what} '{path.name}'")
    return document


def _check_seal(seal: object, data: Any, name: str) -> None:
    """Over what stands in the file, so that one from before a field was added keeps its seal."""
    if seal is None:
        raise EvidenceError(f"{name} has no digest to show that it is as it was written. Use the file that memguard wrote.")
    if seal != json_digest(data):
        raise EvidenceError(f"{name} was changed after it was written: its digest does not match.")


def _refuse_newer(version: object, path: Path, what: str) -> None:
    if isinstance(version, (int, float)) and version > SCHEMA_VERSION:
        raise InputError(
            f"{what} '{path.name}' has schema version {version}; this memguard reads up to {SCHEMA_VERSION}. "
            "Upgrade memguard to read it."
        )


def parse_settings(
    data: Any, model: type[DocumentType], *, what: str, not_implemented: Mapping[str, str] | None = None
) -> DocumentType:
    """Turn a user's settings into a model; `InputError` names every wrong key, with the nearest valid one.

    Args:
        data: what the file holds; a mapping.
        model: the settings model.
        what: how the file is called in messages, such as `config 'memguard.yaml'`.
        not_implemented: dotted keys that a later version takes, with what they will do.
    """
    if not isinstance(data, dict):
        raise InputError(f"{what} must hold keys and values, got {type(data).__name__}.")
    later = [f"'{key}' ({what_for})" for key, what_for in (not_implemented or {}).items() if _holds_key(data, key.split("."))]
    if later:
        raise InputError(f"{what} uses keys that this version does not implement: {', '.join(later)}. Remove them.")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        text = "; ".join(_explain(error, model))
        raise InputError(f"{what} is not valid: {text}{'' if text.endswith('?') else '.'}") from None


def _holds_key(data: Any, path: list[str]) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True


def _explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    parts = []
    items = error.errors(include_input=False, include_url=False, include_context=False)
    for item in items:
        loc = [str(part) for part in item["loc"]]
        if item["type"] == "too_short" and any(
            other["loc"][: len(loc)] == item["loc"] and other is not item for other in items
        ):
            continue  # entries that are themselves wrong count as missing
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key '{'.'.join(loc)}'.{nearest(loc[-1], _keys_beside(model, loc[:-1]))}".rstrip("."))
        else:
            parts.append(f"'{'.'.join(loc) or 'document'}': {item['msg'].removeprefix('Value error, ')}")
    return parts


def _keys_beside(model: Any, path: list[str]) -> list[str]:
    """Valid keys at a place in nested settings; every key of every model reachable there when a union is on the way."""
    reached = [model]
    for part in path:
        tagged = [one for one in reached if _tag_of(one) == part]
        if tagged:
            reached = tagged
            continue
        found: list[Any] = []
        for one in reached:
            fields = getattr(one, "model_fields", {})
            if part in fields:
                found.extend(_models_in(fields[part].annotation))
            elif part.isdigit() or not any(part in getattr(m, "model_fields", {}) for m in reached):
                found.append(one)
        reached = found
    return sorted({name for one in reached for name in getattr(one, "model_fields", {})})


def _tag_of(model: Any) -> object:
    """The value of `kind` that picks this model in a union, if it has one."""
    kind = getattr(model, "model_fields", {}).get("kind")
    return kind.default if kind is not None else None


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models_in(inner)]
