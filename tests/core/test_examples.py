"""Each example as a newcomer runs it: it ends well, shows what it says, and no file or line but the plan holds a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from secret_search import files_under, leaks

from memguard.audit.report import AuditReport, load_report
from memguard.canaries.plan import load_plan

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="runs in a checkout")


@dataclass(frozen=True)
class Example:
    """A file, where its last report lies, what it must print, and the packages beside transformers that it needs."""

    name: str
    report: str
    says: tuple[str, ...]
    needs: tuple[str, ...] = ()
    ranks: int = 1


BLOCKED = "gate: block, exit code 1"
TRAINED = [
    Example("hf_finetune", "run/checkpoint-*/memguard_audit/report.json", (BLOCKED,)),
    Example("trl_sft_lora", "audit/report.json", (BLOCKED, "the subject is a checkpoint"), ("trl", "peft", "datasets")),
    Example("lightning_pretrain", "audit/report.json", (BLOCKED,), ("lightning.pytorch",)),
    Example("streaming", "run/checkpoint-*/memguard_audit/report.json", (BLOCKED,), ("datasets",)),
    Example(
        "torchrun_two_processes",
        "run/checkpoint-*/memguard_audit/report.json",
        (BLOCKED, "2 ranks: 40 of 40 canaries seen as often as planned"),
        ranks=2,
    ),
]


def ran(example: Example, folder: Path) -> str:
    """What the example printed, having ended well."""
    for package in example.needs:
        pytest.importorskip(package)
    spread = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(example.ranks)]
    command = [sys.executable, *(spread if example.ranks > 1 else []), str(EXAMPLES / f"{example.name}.py")]
    done = subprocess.run(
        [*command, "--output", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [said for said in example.says if said not in done.stdout], done.stdout
    refuse_leaks(folder, done.stdout + done.stderr)
    return done.stdout


def refuse_leaks(folder: Path, printed: str) -> None:
    """No secret of the plan in any file but the plan, nor in anything that was said."""
    tokenizer = the_tokenizer()
    plan_path = folder / "_memguard" / "plan.json"
    plan = load_plan(plan_path)
    told = {path: leaks(path.read_bytes(), plan, tokenizer) for path in files_under(folder) if path != plan_path}
    assert len(told) > 5
    assert not {path: found for path, found in told.items() if found}
    assert not leaks(printed.encode(), plan, tokenizer)
    assert leaks(plan_path.read_bytes(), plan, tokenizer)


def the_tokenizer() -> Any:
    sys.path.insert(0, str(EXAMPLES / "demo"))
    try:
        from corpus import language_reference, train_tokenizer
    finally:
        sys.path.remove(str(EXAMPLES / "demo"))
    return train_tokenizer(language_reference())


def read(folder: Path, pattern: str) -> AuditReport:
    (path,) = folder.glob(pattern)
    return load_report(path)


@pytest.mark.slow
@pytest.mark.parametrize("example", TRAINED, ids=lambda one: one.name)
def test_an_example_shows_what_was_repeated_and_nothing_of_what_was_not(example: Example, tmp_path: Path) -> None:
    ran(example, tmp_path / "out")
    report = read(tmp_path / "out", example.report)
    assert (report.status, report.subject.kind) == ("valid", "checkpoint")
    assert report.ledger.exact
    highest = max(report.tiers, key=lambda tier: tier.tier)
    assert (highest.mean_bits or 0.0) > 4.0  # mean of 8: 1.43 by chance, with a standard error of 0.7
    assert all(abs((one.mean_exposure_bits or 9.0) - one.expected_exposure_bits) < 0.7 for one in report.controls)  # 5 errors


@pytest.mark.slow
def test_a_stated_guarantee_is_refuted_without_its_noise_alone(tmp_path: Path) -> None:
    says = ("gate: pass, exit code 0", BLOCKED)
    printed = ran(Example("dp_opacus", "", says, ("opacus",)), tmp_path / "out")
    assert printed.index(says[0]) < printed.index(says[1])
    reports = [read(tmp_path / "out", f"{name}_noise/checkpoint-*/memguard_audit/report.json") for name in ("with", "without")]
    for report in reports:
        assert (report.ledger.mode, report.ledger.exact) == ("record", True)
        assert report.privacy is not None
        assert report.privacy.is_comparable
        assert report.privacy.is_testable
    honest, lost = (report.privacy for report in reports)
    assert honest is not None
    assert lost is not None
    assert honest.epsilon_lower_bound < 1.0 < lost.epsilon_lower_bound


def test_every_example_is_run_by_a_test_and_listed() -> None:
    files = {path.stem for path in EXAMPLES.glob("*.py")} - {"common"}
    assert files == {example.name for example in TRAINED} | {"dp_opacus"}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert not [name for name in files if f"`{name}.py`" not in listed]
