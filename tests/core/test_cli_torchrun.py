"""`memguard audit` on two ranks: one report, one voice, one exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_cli import CONFIG, memguard

from memguard.audit.config import load_config
from memguard.audit.offline import joined_ranks
from memguard.audit.report import load_report
from memguard.canaries.drawing import draw_plan
from memguard.errors import ScoringError

AUDIT = ("audit", "checkpoint-7", "--plan", "plan.json", "--config", "memguard.yaml", "--data", "members.jsonl")


@pytest.fixture
def place(tmp_path: Path, tiny_model: Any, tokenizer: Any, blocks: Any) -> Path:
    """A checkpoint, one whose weights hold NaN, a plan and records."""
    for name in ("checkpoint-7", "broken"):
        tiny_model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with torch.no_grad():
            tiny_model.model.norm.weight.fill_(float("nan"))
    lines = [json.dumps({"text": tokenizer.decode(row["input_ids"])}) for row in blocks[:16]]
    (tmp_path / "members.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings: Any = CONFIG["audit"]
    audit = settings | {"records": {"prefix_tokens": 8, "suffix_tokens": 6}, "batch_size": 16}
    (tmp_path / "memguard.yaml").write_text(yaml.safe_dump({"canaries": CONFIG["canaries"], "audit": audit}), encoding="utf-8")
    draw_plan(load_config(tmp_path / "memguard.yaml").canaries, tokenizer).save(tmp_path / "plan.json")
    return tmp_path


def on_two_ranks(place: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """The command on both ranks, started as torchrun starts them; it would hide the exit code of the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "memguard", *arguments],
            cwd=place,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate() for rank in ranks]
    assert not any("Traceback" in err for _, err in said)
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, out, err) for rank, (out, err) in zip(ranks, said, strict=True)
    ]


@pytest.mark.slow
def test_torchrun_writes_the_report_of_one_process_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what torchrun gives a rank; sums over more threads differ in the last bits
    memguard(*AUDIT, "-o", "alone", cwd=place)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "memguard", *AUDIT]
    done = subprocess.run([*command, "-o", "audit", "--json"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = load_report(place / "audit" / "report.json")
    assert done.stdout == (place / "audit" / "report.json").read_text(encoding="utf-8")  # of one rank alone
    alone = load_report(place / "alone" / "report.json")
    varying = {"created_at": "", "duration_s": 0.0}
    assert report.model_copy(update=varying) == alone.model_copy(update=varying)
    assert len((place / "audit" / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("audit", "broken", *AUDIT[2:], "-o", "audit"), 3, "no evidence: the score of"),
        ((*AUDIT[:-1], "none.jsonl", "-o", "audit"), 2, "data 'none.jsonl' does not exist"),
        ((*AUDIT, "-o", "members.jsonl"), 2, "cannot be written"),  # only the first rank writes, and only it fails of its own
    ],
)
def test_both_ranks_end_with_one_exit_code_and_the_first_one_speaks(
    place: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    first, second = on_two_ranks(place, *arguments)
    assert (first.returncode, second.returncode) == (code, code), first.stderr + second.stderr
    assert words in " ".join((first.stdout + first.stderr).split())
    assert second.stdout == ""
    assert "memguard:" not in second.stderr


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "x"}, {"WORLD_SIZE": "2"}])
def test_a_process_that_torchrun_did_not_start_with_others_is_alone(environment: dict[str, str]) -> None:
    with joined_ranks(environment) as team:
        assert team.is_alone
    assert not torch.distributed.is_initialized()


def test_ranks_that_do_not_find_each_other_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("The client socket has timed out")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    with (
        pytest.raises(ScoringError, match=r"the ranks that torchrun started do not find each other \(RuntimeError\)\."),
        joined_ranks({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}),
    ):
        pass
