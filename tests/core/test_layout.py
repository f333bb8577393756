"""The house rules that a reader relies on: who may import whom, and where the packages lie."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
HOMES = {"memguard": ROOT / "memguard", "memguard.callbacks": ROOT / "callbacks", "memguard.gates": ROOT / "gates"}

# package -> packages of ours that it must not import
FORBIDDEN = {
    "metrics": "audit canaries scoring reporting gates callbacks",
    "scoring": "metrics audit canaries reporting gates callbacks",
    "canaries": "metrics audit scoring reporting gates callbacks",
    "tracing": "metrics audit scoring reporting gates callbacks",
    "audit": "gates callbacks",
    "reporting": "metrics canaries scoring gates callbacks",
    "gates": "callbacks canaries scoring reporting",
}
ASKED_OF_GATES = {"memguard.gates", *(f"memguard.gates.{name}" for name in ("decide", "load_baseline", "load_policy"))}
LIGHT = [
    "memguard",
    "memguard.gates",
    "memguard.cli",
    "memguard.audit.report",
    "memguard.reporting",
    "memguard.tracing",
    "memguard.tracing.simpletrace",
    "memguard.callbacks",
]

pytestmark = pytest.mark.skipif(not (ROOT / "memguard").exists(), reason="runs in a checkout")


def modules() -> dict[str, Path]:
    """Import name -> file of every module."""
    found = {}
    for package, folder in HOMES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts])
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_only_what_the_house_allows(package: str) -> None:
    offences = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if under(name, f"memguard.{package}")
        for imported in imports_of(path)
        for forbidden in FORBIDDEN[package].split()
        if under(imported, f"memguard.{forbidden}")
    ]
    assert not offences


def test_a_callback_asks_the_gate_to_decide_and_nothing_else_of_it() -> None:
    asked = {
        imported
        for name, path in modules().items()
        if under(name, "memguard.callbacks")
        for imported in imports_of(path)
        if under(imported, "memguard.gates")
    }
    assert asked == ASKED_OF_GATES


def test_gates_and_metrics_never_name_torch() -> None:
    heavy = ("torch", "transformers", "accelerate")
    offences = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if under(name, "memguard.gates") or under(name, "memguard.metrics") or under(name, "memguard.reporting")
        for imported in imports_of(path)
        if imported.split(".")[0] in heavy
    ]
    assert not offences


def test_the_import_rule_check_finds_a_planted_offence(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from memguard.gates import decide\n    import torch.nn\n", encoding="utf-8")
    assert {"memguard.gates", "memguard.gates.decide", "torch.nn"} <= imports_of(planted)


def test_the_package_list_equals_the_folders() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = [name for name, path in modules().items() if path.name == "__init__.py"]
    assert sorted(listed) == sorted(folders)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_no_torch(module: str) -> None:
    heavy = "('torch', 'transformers', 'wandb')"
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_torch_check_itself_can_fail() -> None:
    code = "import sys, memguard.scoring.scorer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1


@pytest.mark.parametrize("name", ["callbacks", "gates"])
def test_a_package_refuses_to_be_imported_from_the_root(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"memguard.{name}" in done.stderr


def test_no_file_is_longer_than_six_hundred_lines() -> None:
    long = [name for name, path in modules().items() if len(path.read_text(encoding="utf-8").splitlines()) > 600]
    assert not long
