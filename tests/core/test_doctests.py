"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "memguard.canaries.formats",
    "memguard.metrics.exposure",
    "memguard.metrics.family",
    "memguard.metrics.prior_aware",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
