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
from memguard.audit.report_privacy import Privacy
from memguard.metrics.privacy import audit_one_run

# scipy.stats alone takes half a second to import: as long as the whole command may take.
HEAVY = {"scipy.stats", "scipy.optimize", "matplotlib", "torch", "transformers", "jinja2", "wandb", "mlflow", "huggingface_hub"}

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


COMMAND = """
import sys
from memguard.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def modules_of_gate(*arguments: object) -> tuple[int, set[str]]:
    """The exit code of `memguard gate` in a process of its own, and every module that it loaded."""
    command = [sys.executable, "-c", COMMAND, "gate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, set(done.stderr.splitlines()[-1].split())


@pytest.fixture
def report_path(report, tmp_path):
    report.save(tmp_path / "report.json")
    return tmp_path / "report.json"


@pytest.mark.parametrize("policy", ["default", "strict", "finetune"])
def test_a_decision_against_a_baseline_loads_nothing_heavy(policy, report_path, make_report, tmp_path):
    make_report(2).save(tmp_path / "old.json")
    code, modules = modules_of_gate(report_path, "--policy", policy, "--baseline", tmp_path / "old.json")
    assert code in (0, 1, 3)
    assert "memguard.metrics.family" in modules
    assert not HEAVY & modules
    assert (tmp_path / "decision.json").exists()


def test_a_stated_epsilon_is_judged_without_anything_heavy(report, tmp_path):
    bound = audit_one_run([2.0, 1.0, 0.0, -1.0], [True, True, False, False], num_guesses=4, delta=1e-5, stated_epsilon=0.5)
    fields = {name: value for name, value in vars(bound).items() if name != "flags"}
    privacy = Privacy(**fields, score="log p, standardised within format", is_comparable=True)
    report.model_copy(update={"privacy": privacy}).save(tmp_path / "report.json")
    code, modules = modules_of_gate(tmp_path / "report.json", "--policy", "private")
    assert code == 3
    assert "guesses would be needed" in (tmp_path / "decision.json").read_text()
    assert "scipy.special" in modules
    assert not HEAVY & modules
