"""`memguard audit` with records, held-out records, a start and a reference: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from secret_search import files_under, leaks
from test_cli import CONFIG, memguard, sentence

from memguard.audit.config import load_config
from memguard.audit.report import load_report
from memguard.canaries.drawing import draw_plan
from memguard.canaries.ledger import LEDGER_NAME, Ledger, LedgerEntry
from memguard.canaries.plan import load_plan


@pytest.fixture
def place(tmp_path: Path, tiny_model: Any, tokenizer: Any, blocks: Any) -> Path:
    """A checkpoint, the one it began from, members, held-out records, and a plan with coins."""
    import torch

    for name in ("start", "checkpoint-7"):
        tiny_model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with torch.no_grad():
            tiny_model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    for name, rows in (("members", blocks[:16]), ("held_out", blocks[20:36])):
        lines = [json.dumps({"text": tokenizer.decode(row["input_ids"])}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    canaries = CONFIG["canaries"] | {"inclusion": "coin", "controls": 20, "positive_control": None}
    audit = CONFIG["audit"] | {"records": {"prefix_tokens": 8, "suffix_tokens": 6}, "membership": {"scores": ["loss"]}}
    config = {"canaries": canaries, "audit": audit, "dp": {"epsilon": 1.0, "delta": 1e-6}}
    (tmp_path / "memguard.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    draw_plan(load_config(tmp_path / "memguard.yaml").canaries, tokenizer).save(tmp_path / "_memguard" / "plan.json")
    return tmp_path


AUDIT = ("audit", "checkpoint-7", "--plan", "_memguard/plan.json", "--config", "memguard.yaml", "-o", "audit")
DATA = ("--data", "members.jsonl", "--held-out", "held_out.jsonl")


def test_everything_that_there_is_data_for_is_measured_printed_and_written(place: Path, tokenizer: Any) -> None:
    done = memguard(*AUDIT, *DATA, "--start", "start", "--reference", "start", cwd=place)
    report = load_report(place / "audit" / "report.json")
    assert report.is_full
    assert report.records is not None
    assert report.records.held_out is not None
    assert (report.records.members.n, report.records.held_out.n) == (16, 16)
    assert report.membership is not None
    assert [score.name for score in report.membership.scores] == ["loss", "reference"]
    assert all(row.calibrated is not None for row in report.canaries)
    assert report.privacy is not None
    assert (report.privacy.stated_epsilon, report.privacy.score[:20]) == (1.0, "log p - log p at ste")
    assert report.counterfactual
    text = " ".join(done.stdout.split())
    for word in ("extraction", "records", "membership", "epsilon"):
        assert word in text.lower()
    page = (place / "audit" / "report.html").read_text(encoding="utf-8")
    assert "Real records" in page
    plan = load_plan(place / "_memguard" / "plan.json")
    for path in files_under(place / "audit"):
        assert leaks(path.read_bytes(), plan, tokenizer) == []
    record = json.loads((place / "members.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"]
    assert record[:30] not in page + done.stdout + (place / "audit" / "report.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "none.jsonl"), "data 'none.jsonl' does not exist"),
        (("--data", "bad.jsonl"), "data 'bad.jsonl' line 2 must be an object with 'text' or 'input_ids'"),
        ((*DATA[:2], "--held-out", "bad.jsonl"), "held-out data 'bad.jsonl' line 2 must be an object"),
        (("--start", "nowhere"), "checkpoint 'nowhere' is not a folder"),
        ((*DATA, "--reference", "nowhere"), "checkpoint 'nowhere' is not a folder"),
        ((*DATA, "--reference", "other"), "reference 'other' must have the vocabulary of the audited model"),
        (("--start", "other"), "the plan was made for another tokenizer"),
        (("--start", "checkpoint-7"), "start 'checkpoint-7' must be the model that training began from"),
        (("--start", "taught"), "got one that was trained on this plan"),
        (("checkpoint-7",), "checkpoints must be given once each"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(place: Path, arguments: tuple[str, ...], words: str) -> None:
    shutil.copytree(place / "start", place / "other")
    vocabulary = (place / "other" / "tokenizer.json").read_text(encoding="utf-8")
    (place / "other" / "tokenizer.json").write_text(vocabulary.replace('"<|end|>"', '"<|stop|>"'), encoding="utf-8")
    shutil.copytree(place / "start", place / "taught")
    plan = load_plan(place / "_memguard" / "plan.json")
    entry = LedgerEntry(repetitions=1, num_insertions=1, num_seen=1)
    one = next(canary for canary in plan.canaries if canary.role == "canary")
    ledger = {"plan_digest": plan.digest, "global_step": 5, "max_steps": 5, "exact": True, "notes": [], "count": "total"}
    ledger |= {"mode": "append", "plant_once": False, "token_share": 0.01, "token_share_is_estimate": False}
    Ledger(**ledger, canaries={one.id: entry}).save(place / "taught" / LEDGER_NAME)
    (place / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 7, "note": "a private note"}\n', encoding="utf-8")
    done = memguard(*AUDIT, *arguments, cwd=place, code=2)
    assert words in sentence(done)
    assert "private" not in done.stderr
    assert not (place / "audit").exists()


def test_two_runs_whose_checkpoints_have_one_name_keep_both_reports_and_their_own_trends(place: Path) -> None:
    for run in ("A", "B"):
        shutil.copytree(place / "checkpoint-7", place / run / "checkpoint-7")
    memguard("audit", "A/checkpoint-7", "B/checkpoint-7", *AUDIT[2:], cwd=place)
    reports = [load_report(place / "audit" / f"{run}-checkpoint-7" / "report.json") for run in ("A", "B")]
    assert [report.trend for report in reports] == [[], []]


def test_members_among_the_held_out_records_are_left_out_and_said(place: Path) -> None:
    members = (place / "members.jsonl").read_text(encoding="utf-8")
    (place / "mixed.jsonl").write_text(
        members + "\n" + (place / "held_out.jsonl").read_text(encoding="utf-8"), encoding="utf-8"
    )
    memguard(*AUDIT, "--data", "members.jsonl", "--held-out", "mixed.jsonl", cwd=place)
    report = load_report(place / "audit" / "report.json")
    assert "16 of 32 held-out records are members too, and were left out." in report.notices
    assert report.membership is not None
    assert report.membership.scores[0].n_non_members == 16
    memguard(*AUDIT, "--data", "members.jsonl", "--held-out", "members.jsonl", cwd=place)
    same = load_report(place / "audit" / "report.json")
    assert same.membership is None
    assert any(one.startswith("membership was not measured: it needs 10 records of each kind") for one in same.notices)


def test_few_or_short_records_are_said_and_the_canaries_are_audited_all_the_same(place: Path) -> None:
    (place / "few.jsonl").write_text('{"text": "too short"}\n', encoding="utf-8")
    memguard(*AUDIT, "--data", "few.jsonl", "--held-out", "held_out.jsonl", cwd=place)
    report = load_report(place / "audit" / "report.json")
    assert report.status == "valid"
    assert (report.records, report.membership) == (None, None)
    assert any(one.startswith("records were not measured: ") for one in report.notices)
    assert any(one.startswith("membership was not measured: ") for one in report.notices)
