"""`memguard watch` as processes: exit codes, kill -9 in mid-audit, several watchers on one folder, an end when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from offline_wandb import OfflineRun
from watch_cases import QUICK, Run, quick_config

from memguard.audit.report import load_report
from memguard.canaries.drawing import draw_plan
from memguard.reporting.jsonl_tracker import read_history


@pytest.fixture
def run(tmp_path: Path, tiny_model: Any, tokenizer: Any) -> Run:
    (tmp_path / "run").mkdir()
    made = Run(tmp_path / "run", draw_plan(quick_config().canaries, tokenizer), tiny_model, tokenizer)
    made.plan.save(tmp_path / "plan.json")
    (tmp_path / "memguard.yaml").write_text(yaml.safe_dump(QUICK), encoding="utf-8")
    return made


PROCESS = str(Path(__file__).parents[1] / "watch_process.py")


def start(run: Run, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    options = ["--plan", "plan.json", "--config", "memguard.yaml", "--interval", "0.1"]
    command = [sys.executable, PROCESS, "watch", "run", *options, *arguments]
    return subprocess.Popen(
        command,
        cwd=run.folder.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def ended(watcher: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """What it said until it ended, with the exit code that it must have; a traceback is never right."""
    out, err = watcher.communicate(timeout=300)
    assert "Traceback" not in err
    assert watcher.returncode == code, out + err
    return out, " ".join(err.split())


def held(watcher: subprocess.Popen[str]) -> str:
    """The checkpoint that a watcher is in the middle of."""
    assert watcher.stderr is not None
    for line in watcher.stderr:
        if line.startswith("in the middle of "):
            return line.split()[-1]
    raise AssertionError("it ended before it began an audit")


def let_go(watcher: subprocess.Popen[str]) -> None:
    assert watcher.stdin is not None
    watcher.stdin.write("\n")
    watcher.stdin.flush()


def audited_by(out: str) -> list[str]:
    return [one["checkpoint"] for one in json.loads(out)["checkpoints"] if one["is_new"]]


def assert_all_audited_once(run: Run, *names: str) -> None:
    reports = [load_report(run.folder / name / "memguard_audit" / "report.json") for name in names]
    assert all(report.status == "valid" and report.is_full for report in reports)
    rows = read_history(run.folder / "memguard_audit" / "history.jsonl")
    assert [(row["digest"], row["created_at"]) for row in rows] == [(one.subject.digest, one.created_at) for one in reports]


@pytest.mark.slow
def test_the_exit_code_tells_whether_all_is_evidence(run: Run) -> None:
    out, err = ended(start(run, "--once", "--json"), 3)
    assert json.loads(out)["checkpoints"] == []
    assert "the run holds no checkpoint: nothing was audited." in err

    run.save(1)
    run.save(2, ledger=False)
    out, _ = ended(start(run, "--once", "--json", "--wandb-run", "llm/a1b2", WANDB_MODE="offline"), 0)
    assert audited_by(out) == ["checkpoint-1", "checkpoint-2"]
    written = OfflineRun(run.folder.parent)
    steps = [row["trainer/global_step"] for row in written.history if "memguard/valid" in row]
    assert (steps, written.folder.name[-5:]) == ([1, 2], "-a1b2")

    folder = run.save(3)
    (folder / "model.safetensors").write_bytes(b"0123")
    out, _ = ended(start(run, "--once"), 3)
    assert "checkpoint-1: audited before, valid; highest exposure" in out
    assert "checkpoint-3: the checkpoint could not be audited: checkpoint 'checkpoint-3' does not load" in " ".join(out.split())


@pytest.mark.slow
def test_what_cannot_be_used_is_one_sentence_and_exit_two(run: Run) -> None:
    run.save(1)
    for arguments, words in {
        ("--plan", "none.json"): "plan 'none.json' does not exist",
        ("--data", "none.jsonl"): "data 'none.jsonl' does not exist",
        ("--wandb-run", "a1b2"): "must be ENTITY/PROJECT/ID",
    }.items():
        _, err = ended(start(run, "--once", *arguments), 2)
        assert words in err
    assert not (run.folder / "checkpoint-1" / "memguard_audit").exists()


@pytest.mark.slow
def test_a_watcher_killed_in_mid_audit_is_started_again_and_goes_on(run: Run) -> None:
    names = [run.save(step).name for step in (1, 2)]
    killed = start(run, "--once", HOLD="1")
    assert held(killed) == "checkpoint-1"
    killed.kill()
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (run.folder / "checkpoint-1" / "memguard_audit").exists()
    out, _ = ended(start(run, "--once", "--json"), 0)
    assert audited_by(out) == names
    assert_all_audited_once(run, *names)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_after_the_audit_in_hand(run: Run, number: int) -> None:
    run.save(1)
    run.save(2)
    watcher = start(run, HOLD="1")
    assert held(watcher) == "checkpoint-1"
    watcher.send_signal(number)
    let_go(watcher)
    out, _ = ended(watcher, 0)
    assert "checkpoint-1: valid" in out
    assert_all_audited_once(run, "checkpoint-1")
    assert not (run.folder / "checkpoint-2" / "memguard_audit").exists()


@pytest.mark.slow
def test_two_watchers_share_six_checkpoints_and_audit_each_once(run: Run) -> None:
    names = [run.save(step).name for step in range(1, 7)]
    watchers = [start(run, "--once", "--json", HOLD="1") for _ in range(2)]
    assert {held(watcher) for watcher in watchers} == {"checkpoint-1", "checkpoint-2"}
    for watcher in watchers:
        let_go(watcher)
    shares = [audited_by(ended(watcher, 0)[0]) for watcher in watchers]
    assert Counter(name for share in shares for name in share) == Counter(names)
    assert_all_audited_once(run, *names)
