"""What `memguard gate` takes cold: from an empty process to its exit code, decision and file, against a baseline.

The plain way is the same command in an interpreter that imports scipy.stats first, as tests written with its distributions do.
`libraries_s` is the floor under both: a process that only imports what the command line, the documents and the draws rest on.
Bytecode is kept in a folder of its own, as it is of an installed package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import alternate, repeated, report

from memguard.audit.report import Decision, load_decision

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the reports of the tests
from made_reports import build_report

TARGET = ["ratio >= 1.5", "identical_decisions == true", "max_abs_err <= 0"]
OURS = ["-m", "memguard"]
PLAIN = ["-c", "import scipy.stats; from memguard.cli import main; main()"]
LIBRARIES = ["-c", "import numpy.random, pydantic, rich.console, typer, yaml"]


def environment(folder: Path) -> dict[str, str]:
    """That of this process, with bytecode written where no other process writes it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def start(arguments: list[str], folder: Path) -> None:
    """One process, from nothing to exit code 0."""
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment(folder), capture_output=True, check=True)


def decide_cold(way: list[str], folder: Path) -> Decision:
    """The decision that one process wrote."""
    start([*way, "gate", "report.json", "--policy", "default", "--baseline", "old.json", "-o", "decision.json"], folder)
    return load_decision(folder / "decision.json")


def p_values(decision: Decision) -> list[float]:
    """The p-value of every test that has one, in the order of the policy."""
    found = [rule.figures.get("p_value") for rule in decision.rules]
    return [value for value in found if isinstance(value, float)]


def run(quick: bool) -> dict[str, Any]:
    """Both ways in turns, after one start of each that compiles."""
    runs = 1 if quick else 15
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = build_report(1)
        new.save(folder / "report.json")
        build_report(2).save(folder / "old.json")
        for arguments in (OURS, PLAIN):
            decide_cold(arguments, folder)
        start(LIBRARIES, folder)
        pair = alternate(lambda: decide_cold(PLAIN, folder), lambda: decide_cold(OURS, folder), runs=runs)
        libraries_s, _ = repeated(lambda: start(LIBRARIES, folder), runs=runs)
    found = zip(p_values(pair.baseline), p_values(pair.ours), strict=True)
    return report(
        "gate_cold_start",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=max(abs(one - other) for one, other in found),
        model="none: a report and a baseline of 90 canaries and controls each, in two formats",
        template=None,
        lengths={"canaries": len(new.canaries), "formats": len(new.formats), "rules": len(pair.ours.rules)},
        runs=runs,
        target=TARGET,
        cold_s=pair.ours_s,
        libraries_s=libraries_s,
        identical_decisions=pair.baseline == pair.ours,
    )
