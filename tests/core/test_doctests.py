"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

PACKAGES = ["memguard", "memguard.callbacks", "memguard.gates"]


def modules_with_examples() -> list[str]:
    """Import names of every module whose text holds an example that can be run."""
    names = set()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        folder = Path(str(spec.origin)).parent
        for path in folder.rglob("*.py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            if any(line.lstrip().startswith(">>> ") and "+SKIP" not in line for line in lines):
                parts = path.relative_to(folder).with_suffix("").parts
                names.add(".".join([package, *parts]).removesuffix(".__init__"))
    return sorted(names)


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_hold(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
