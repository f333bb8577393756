"""The demo as a newcomer runs it: four gate calls come out as they should, and nothing it writes holds a secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from secret_search import files_under, leaks

from memguard.audit.report import load_report
from memguard.canaries.plan import load_plan

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_ends_well_and_tells_no_secret(tmp_path: Path) -> None:
    script = ROOT / "examples" / "demo" / "run.py"
    done = subprocess.run([sys.executable, str(script), "--output", str(tmp_path / "demo")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 gate calls as they should be" in done.stdout

    sys.path.insert(0, str(script.parent))
    try:
        from corpus import language_reference, train_tokenizer
    finally:
        sys.path.remove(str(script.parent))
    tokenizer = train_tokenizer(language_reference())
    plan_path = tmp_path / "demo" / "_memguard" / "plan.json"
    plan = load_plan(plan_path)
    written = [path for path in files_under(tmp_path / "demo") if path != plan_path]
    assert len(written) > 30
    told = {path.name: leaks(path.read_bytes(), plan, tokenizer) for path in written}
    assert not {name: found for name, found in told.items() if found}
    assert not leaks((done.stdout + done.stderr).encode(), plan, tokenizer)
    assert leaks(plan_path.read_bytes(), plan, tokenizer)

    finals = {run: next((tmp_path / "demo" / run).glob("checkpoint-*/memguard_audit/report.json")) for run in ("A", "B")}
    reports = {run: load_report(path) for run, path in finals.items()}
    for run, report in reports.items():
        assert report.ledger.exact
        assert all(row.num_seen == 3 * (row.tier if run == "A" else 1) for row in report.canaries if row.role == "canary")
    highest = {run: max(report.tiers, key=lambda tier: tier.tier) for run, report in reports.items()}
    assert (highest["A"].mean_bits or 0) > 8
    assert (highest["B"].mean_bits or 9) < 4

    policy = script.parent / "policy.yaml"
    baseline = tmp_path / "baseline.json"
    accept = ["--accept", str(baseline), "--by", "Ada", "--reason", "first release"]
    assert gate(finals["A"], policy, *accept) == 3  # a blocked report joins no baseline
    assert not baseline.exists()
    assert gate(finals["B"], policy) == 3  # nothing is wrong but that there is no baseline
    assert gate(finals["B"], policy, *accept) == 0
    assert gate(finals["B"], policy, "--baseline", str(baseline)) == 0
    assert gate(finals["A"], policy, "--baseline", str(baseline)) == 1


def gate(report: Path, policy: Path, *options: str) -> int:
    """Exit code of the real executable."""
    command = [sys.executable, "-m", "memguard", "-q", "gate", str(report), "--policy", str(policy), *options]
    return subprocess.run(command, capture_output=True).returncode
