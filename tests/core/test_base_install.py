"""The base install, in an environment without torch, reads and gates a report made elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memguard.audit import run_audit
from memguard.audit.config import parse_config
from memguard.canaries.drawing import draw_plan

ROOT = Path(__file__).parents[2]


def run(*command: Any, code: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_gate_and_report_run_without_torch_and_an_audit_names_its_extra(
    tmp_path: Path, tiny_model: Any, tokenizer: Any
) -> None:
    pin = {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}
    config = parse_config({"canaries": {"formats": [pin], "tiers": {1: 40}, "controls": 20}})
    report = run_audit(tiny_model, tokenizer, plan=draw_plan(config.canaries, tokenizer), config=config)
    report.save(tmp_path / "report.json")

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    source = tmp_path / "source"  # built from a copy: pip would leave a build folder in the checkout
    for name in ("memguard", "callbacks", "gates"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", source)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    outside: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    run(python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)", **outside)
    executable = tmp_path / "venv" / "bin" / "memguard"

    gated = run(executable, "gate", "report.json", "--policy", "default", "--json", code=3, **outside)
    assert json.loads(gated.stdout)["outcome"] == "invalid"
    run(executable, "report", "report.json", "--html", "page.html", "--decision", "decision.json", **outside)
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
    run(executable, "init", **outside)
    refused = run(executable, "plan", "memguard.yaml", "--tokenizer", ".", code=4, **outside)
    assert "pip install 'memguard-audit[hf]'" in refused.stderr
    needs = run(python, "-c", "from memguard.callbacks import HFAuditCallback", code=1, **outside)
    assert "needs the extra 'hf'" in needs.stderr
    assert "missing" in run(executable, "doctor", **outside).stdout
