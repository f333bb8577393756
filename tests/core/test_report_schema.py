"""Whoever reads a report finds, in its schema, what every field is and in which unit."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from pydantic import BaseModel

from memguard.audit.comparison import Comparison
from memguard.audit.report import AuditReport
from memguard.audit.scaling import Scaling


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in models_in(inner)]


def reachable(model: type[BaseModel], found: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    if model.__name__ not in found:
        found[model.__name__] = model
        for field in model.model_fields.values():
            for inner in models_in(field.annotation):
                reachable(inner, found)
    return found


@pytest.mark.parametrize("document", [AuditReport, Comparison, Scaling])
def test_every_field_says_what_it_is(document: type[BaseModel]) -> None:
    models = reachable(document, {})
    bare = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, info in model.model_fields.items()
        if not info.description
    ]
    assert not bare


@pytest.mark.parametrize("document", [AuditReport, Comparison, Scaling])
def test_every_part_says_what_it_is(document: type[BaseModel]) -> None:
    assert not [name for name, model in reachable(document, {}).items() if not (model.__doc__ or "").strip()]


def test_figures_name_their_unit() -> None:
    """Bits, nats, tokens, a share of 0..1, a p-value or a count: words that tell a reader how to read the figure."""
    units = ("bits", "nats", "0..1", "tokens", "count", "share", "chance", "p-value", "seconds", "ratio", "edits", "queries")
    for name, model in reachable(AuditReport, {}).items():
        for field, info in model.model_fields.items():
            if any(field.endswith(end) for end in ("_bits", "log_prob", "_share", "_p", "p_value", "coverage")):
                assert any(unit in (info.description or "") for unit in units), f"{name}.{field}: {info.description}"
