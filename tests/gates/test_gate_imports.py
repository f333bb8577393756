"""The gate runs in a small container: no torch, no transformers, one copy of every class."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import memguard.gates

CHECK = """
import sys
import memguard.gates as gates
from memguard.gates import Policy, accept, decide, load_baseline, load_policy
import memguard.gates.commands
heavy = sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'wandb', 'matplotlib'})
assert not heavy, heavy
assert gates.__all__ == sorted(gates.__all__) == dir(gates)
"""


def test_importing_the_gate_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_folder_refuses_to_be_a_second_package():
    root = Path(memguard.gates.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import gates"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: the folder 'gates' must be imported as 'memguard.gates', got 'gates'." in done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'decided'"):
        memguard.gates.decided  # noqa: B018


def test_the_examples_in_the_docstrings_hold():
    names = [found.name for found in pkgutil.iter_modules(memguard.gates.__path__) if not found.ispkg]
    results = [doctest.testmod(importlib.import_module(f"memguard.gates.{name}")) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 2
