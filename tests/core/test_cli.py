"""The real executable: what it writes, its exit codes, and one plain sentence for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from memguard.audit.config import load_config
from memguard.audit.report import load_decision, load_report
from memguard.canaries.plan import load_plan

CONFIG = {
    "canaries": {
        "formats": [{"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}],
        "tiers": {1: 20, 4: 20},
        "controls": 40,
    },
    "audit": {"exposure": {"references": 64, "node_budget": 200}, "prior_aware": {"prefixes": 16}},
}


def memguard(*arguments: Any, cwd: Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the executable in a folder and check its exit code; a traceback is never right."""
    command = [str(Path(sys.executable).with_name("memguard")), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    if code is not None:
        assert done.returncode == code, done.stdout + done.stderr
    return done


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What was said on stderr, on one line."""
    return " ".join(done.stderr.split())


@pytest.fixture
def place(tmp_path: Path, tiny_model: Any, tokenizer: Any) -> Path:
    """A folder with a config, a checkpoint and a plan."""
    tiny_model.save_pretrained(tmp_path / "checkpoint-7")
    tokenizer.save_pretrained(tmp_path / "checkpoint-7")
    (tmp_path / "memguard.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return tmp_path


@pytest.fixture
def planned(place: Path, tokenizer: Any) -> Path:
    """The same with a plan drawn, by the library, to save a start of the executable."""
    from memguard.canaries.drawing import draw_plan

    draw_plan(load_config(place / "memguard.yaml").canaries, tokenizer).save(place / "_memguard" / "plan.json")
    return place


def test_init_writes_files_that_this_version_accepts_and_keeps_what_is_there(tmp_path: Path) -> None:
    memguard("init", cwd=tmp_path)
    assert load_config(tmp_path / "memguard.yaml").canaries.controls == 200
    from memguard.gates import load_policy

    assert load_policy(tmp_path / "policy.yaml").alpha == 0.01
    (tmp_path / "policy.yaml").unlink()
    refused = memguard("init", cwd=tmp_path, code=2)
    assert "memguard.yaml exist already; use --force" in sentence(refused)
    assert not (tmp_path / "policy.yaml").exists()


def test_plan_then_audit_then_report(place: Path) -> None:
    memguard("plan", "memguard.yaml", "--tokenizer", "checkpoint-7", cwd=place)
    plan = load_plan(place / "_memguard" / "plan.json")
    assert not plan.reproducible
    assert (place / "_memguard" / "plan.json").stat().st_mode & 0o777 == 0o600
    refused = memguard("plan", "memguard.yaml", "--tokenizer", "checkpoint-7", cwd=place, code=2)
    assert "exists already" in sentence(refused)
    (place / "members.jsonl").write_text('{"text": "Once upon a time there was a parser."}\n' * 3, encoding="utf-8")
    audited = memguard(
        "audit", "checkpoint-7", "--plan", "_memguard/plan.json", "--config", "memguard.yaml",
        "--data", "members.jsonl", "-o", "audit", "--json", cwd=place,
    )  # fmt: skip
    report = load_report(place / "audit" / "report.json")
    assert audited.stdout == (place / "audit" / "report.json").read_text(encoding="utf-8")  # sealed alike
    assert report.subject.kind == "checkpoint"
    assert report.prior_aware_settings is not None
    memguard("report", "audit/report.json", "--html", "page.html", "--markdown", "page.md", cwd=place)
    assert "<svg" in (place / "page.html").read_text(encoding="utf-8")
    assert (place / "page.md").read_text(encoding="utf-8").startswith("#")
    text = audited.stdout + audited.stderr + (place / "page.html").read_text(encoding="utf-8")
    assert not any(canary.secret in text for canary in plan.canaries)


def test_several_checkpoints_give_a_trend_and_a_report_each(planned: Path, tiny_model: Any, tokenizer: Any) -> None:
    import torch

    with torch.no_grad():
        tiny_model.model.norm.weight.mul_(1.5)
    tiny_model.save_pretrained(planned / "checkpoint-9")
    tokenizer.save_pretrained(planned / "checkpoint-9")
    memguard("audit", "checkpoint-7", "checkpoint-9", "--plan", "_memguard/plan.json", "-o", "audit", cwd=planned)
    first, last = (load_report(planned / "audit" / name / "report.json") for name in ("checkpoint-7", "checkpoint-9"))
    assert first.subject.digest != last.subject.digest
    assert load_report(planned / "audit" / "report.json") == last
    assert len((planned / "audit" / "history.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_an_untrained_checkpoint_without_a_ledger_is_no_evidence(planned: Path) -> None:
    memguard("audit", "checkpoint-7", "--plan", "_memguard/plan.json", "-o", "audit", cwd=planned)
    gated = memguard("gate", "audit/report.json", "--policy", "default", "--json", cwd=planned, code=3)
    decision = json.loads(gated.stdout)
    assert decision["outcome"] == "invalid"
    assert gated.stdout == (planned / "audit" / "decision.json").read_text(encoding="utf-8")
    assert load_decision(planned / "audit" / "decision.json").outcome == "invalid"
    assert any("ledger" in item["reason"] for item in decision["evidence"] if item["outcome"] == "invalid")


def test_a_model_with_nan_weights_is_reported_invalid_and_exits_three(planned: Path, tiny_model: Any) -> None:
    import torch

    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    tiny_model.save_pretrained(planned / "checkpoint-7")
    done = memguard("audit", "checkpoint-7", "--plan", "_memguard/plan.json", "-o", "audit", cwd=planned, code=3)
    assert "no evidence" in done.stdout
    assert load_report(planned / "audit" / "report.json").status == "invalid"
    memguard("gate", "audit/report.json", "--policy", "default", cwd=planned, code=3)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no config": (["plan", "none.yaml", "--tokenizer", "checkpoint-7"], "config 'none.yaml' does not exist"),
    "unknown key": (["plan", "unknown.yaml", "--tokenizer", "checkpoint-7"], "'canaries.teirs'. Did you mean 'tiers'?"),
    "later key": (["plan", "later.yaml", "--tokenizer", "checkpoint-7"], "does not implement: 'tracking.tensorboard'"),
    "no secret": (["plan", "template.yaml", "--tokenizer", "checkpoint-7"], "template must hold {secret} exactly once"),
    "not yaml": (["plan", "broken.yaml", "--tokenizer", "checkpoint-7"], "is not plain YAML: line"),
    "small space": (["plan", "small.yaml", "--tokenizer", "checkpoint-7"], "guessed by luck must be at most 0.0001"),
    "no tokenizer": (["plan", "memguard.yaml", "--tokenizer", "none"], "tokenizer 'none' is not a folder"),
    "no plan": (["audit", "checkpoint-7", "--plan", "none.json", "-o", "x"], "plan 'none.json' does not exist"),
    "foreign plan": (["audit", "checkpoint-7", "--plan", "memguard.yaml", "-o", "x"], "is not valid JSON"),
    "no checkpoint": (["audit", "none", "--plan", "_memguard/plan.json", "-o", "x"], "checkpoint 'none' is not a folder"),
    "no weights": (["audit", "_memguard", "--plan", "_memguard/plan.json", "-o", "x"], "holds no safetensors weights"),
    "no report": (["gate", "none.json", "--policy", "default"], "report 'none.json' does not exist"),
    "newer report": (["gate", "newer.json", "--policy", "default"], "schema version 99; this memguard reads up to"),
    "not a report": (["report", "list.json"], "must be a JSON object"),
    "no option": (["gate"], "Missing argument"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_mistake_exits_two_with_one_sentence_and_leaves_nothing(mistake: str, planned: Path) -> None:
    def write(name: str, **change: Any) -> None:
        text = yaml.safe_dump(CONFIG | change)
        (planned / name).write_text(text, encoding="utf-8")

    canaries: dict[str, Any] = dict(CONFIG["canaries"])
    write("unknown.yaml", canaries=canaries | {"teirs": {1: 1}})
    write("later.yaml", tracking={"tensorboard": "auto"})
    write("template.yaml", canaries=canaries | {"formats": [canaries["formats"][0] | {"template": "no place"}]})
    small = canaries["formats"][0] | {"secret": {"kind": "digits", "length": 4}}
    write("small.yaml", canaries=canaries | {"formats": [small]})
    (planned / "broken.yaml").write_text("canaries: [1,\n", encoding="utf-8")
    (planned / "newer.json").write_text('{"schema_version": 99}', encoding="utf-8")
    (planned / "list.json").write_text("[]", encoding="utf-8")
    if mistake in ("no config", "unknown key", "later key", "no secret", "not yaml", "small space", "no tokenizer"):
        (planned / "_memguard" / "plan.json").unlink()
    before = {path for path in planned.rglob("*") if path.is_file()}
    arguments, words = MISTAKES[mistake]
    done = memguard(*arguments, cwd=planned, code=2)
    assert words in sentence(done)
    assert {path for path in planned.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_tokenizer_exits_two(planned: Path) -> None:
    path = planned / "_memguard" / "plan.json"
    plan = load_plan(path)
    plan.model_copy(update={"tokenizer_digest": "0" * 64}).save(path, overwrite=True)
    done = memguard("audit", "checkpoint-7", "--plan", path, "-o", "audit", cwd=planned, code=2)
    assert "made for another tokenizer" in sentence(done)
    assert not (planned / "audit").exists()


def test_an_internal_error_exits_four_and_never_one(planned: Path) -> None:
    code = (
        "import sys, memguard.gates.commands as c, memguard.cli as cli\n"
        "def broken(*a, **k): raise ZeroDivisionError('281265017')\n"
        "c.gate_report = broken\n"
        "sys.argv = ['memguard', 'gate', 'x.json', '--policy', 'default']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=planned)
    assert done.returncode == 4
    assert "internal error (ZeroDivisionError)" in done.stderr
    assert "281265017" not in done.stderr


def test_doctor_names_what_is_there_and_how_to_get_what_is_not(tmp_path: Path) -> None:
    findings = json.loads(memguard("doctor", "--json", cwd=tmp_path).stdout)
    hf = next(item for item in findings if item["extra"] == "hf")
    assert hf["is_complete"]
    assert hf["install"] == "pip install 'memguard-audit[hf]'"


def test_a_page_is_never_written_over_what_it_was_made_from(planned: Path, tiny_model: Any, tokenizer: Any) -> None:
    from memguard.audit import run_audit

    config = load_config(planned / "memguard.yaml")
    report = run_audit(tiny_model, tokenizer, plan=load_plan(planned / "_memguard" / "plan.json"), config=config)
    report.save(planned / "report.json")
    for option in ("--html", "--markdown"):
        done = memguard("report", "report.json", option, "report.json", cwd=planned, code=2)
        assert "must not be written over the report" in sentence(done)
    assert load_report(planned / "report.json") == report
    folder = memguard("report", "report.json", "--html", "checkpoint-7", cwd=planned, code=2)
    assert "'checkpoint-7' cannot be written: it is a folder" in sentence(folder)
    quiet = memguard("-q", "gate", "report.json", "--policy", "default", cwd=planned, code=3)
    assert quiet.stdout == ""
    assert "Not evidence" in quiet.stderr


def test_a_plan_given_for_a_report_is_told_from_one(planned: Path) -> None:
    done = memguard("gate", "_memguard/plan.json", "--policy", "default", cwd=planned, code=2)
    assert "is a memguard canary plan, not a memguard audit report" in sentence(done)


def test_the_version_is_printed(tmp_path: Path) -> None:
    import memguard as package

    assert memguard("--version", cwd=tmp_path).stdout.strip() == f"memguard {package.__version__}"
