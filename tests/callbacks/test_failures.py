"""Failures around an audit: training ends with the weights it has without audits, no half file, and the trend goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_runs import CASE, STEPS, STORIES
from harmless_cases import first_difference, settings, train, write_records
from transformers import TrainerCallback

from memguard.audit.digest import checkpoint_digest
from memguard.audit.report import AuditReport, load_report
from memguard.errors import ScoringError
from memguard.reporting.jsonl_tracker import read_history

QUICK = ("killed in an audit of the cadence", "disk full in the middle")
ONCE = ("rows", "loss", "gradients", "weights", "optimiser", "schedule", "last weights", "last optimiser")

# audits that a story leaves valid: one of a step that a kill cut off is made again where the run goes on from before it
VALID = {
    "killed in the audit of a save": {0, 1, 2, 4, 5, 6},
    "killed in the probe of a full audit": {0, 1, 2, 4, 5, 6},
    "killed writing a ledger": {0, 1, 2, 4, 5, 6},
    "disk full in the middle": {0, 1, 4, 5, 6},
    "disk full at the end": {0, 1, 2, 3, 4},
    "disk full throughout": {0},
}


@pytest.fixture
def parts(tiny_model: Any, tokenizer: Any, blocks: Any) -> dict[str, Any]:
    return {"model": tiny_model, "tokenizer": tokenizer, "blocks": blocks}


def check_files(output: Path, valid: set[int]) -> None:
    """Every file is whole; every step stands once in the history; the valid ones make the trend."""
    for path in output.parent.rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
    rows = read_history(output / "history.jsonl")
    assert len(rows) == len((output / "history.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [row["global_step"] for row in rows]
    assert len(set(steps)) == len(steps)
    assert {row["global_step"] for row in rows if row["status"] == "valid"} == valid
    reports = {path: load_report(path) for path in sorted((output / "reports").iterdir())}
    assert {one.subject.global_step for one in reports.values() if one.status == "valid"} == valid
    for report in reports.values():
        check_trend(report, valid)
    if (output / "report.json").exists():
        assert (output / "report.json").read_bytes() == list(reports)[-1].read_bytes()


def check_trend(report: AuditReport, valid: set[int]) -> None:
    points = [(point.global_step, point.tier) for point in report.trend]
    assert len(set(points)) == len(points)
    assert {step for step, _ in points} == {step for step in valid if step < (report.subject.global_step or 0)}


def left_behind(folder: Path) -> list[str]:
    """Names of files that a write left under their temporary name."""
    return sorted(path.name.rsplit(".", 1)[0] for path in folder.rglob(".*.*") if path.is_file())


# -- a process that dies, and a disk that is full


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="some"),
        pytest.param(tuple(one for one in STORIES if one not in (*QUICK, "whole")), id="the rest", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_in_an_audit_or_met_a_full_disk_ends_as_one_that_was_not(
    names: tuple[str, ...], parts: dict[str, Any], tmp_path: Path
) -> None:
    torch.save(parts, tmp_path / "parts.pt")
    script = Path(__file__).with_name("failing_runs.py")
    command = [sys.executable, str(script), str(tmp_path / "parts.pt"), str(tmp_path), "whole", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    whole = found.pop("whole")[-1][1]
    assert list(found) == list(names)
    for name, runs in found.items():
        kills = name.startswith("killed")
        assert [ended for ended, _ in runs] == [-9] * (len(runs) - 1) * kills + [0], name
        check_story(name, tmp_path / name, runs[-1][1], whole)


def check_story(name: str, folder: Path, last: dict[str, Any], whole: dict[str, Any]) -> None:
    """Events of the last run are those of the whole one, as far as it went on from a checkpoint."""
    happened = {what: value for what, value in last["events"] if what.split(": ")[1] in ONCE}
    expected = {what: value for what, value in whole["events"] if what.split(": ")[1] in ONCE}
    assert happened.items() <= expected.items(), name
    assert {f"step {STEPS}: last weights", f"step {STEPS}: last optimiser"} <= set(happened)
    assert len(happened) in (len(expected), 3 * 6 + 2), name  # from the start, or three steps of six events and the last two
    if name == "killed writing a ledger":
        assert last["notes"][0] == "resumed from a checkpoint without a ledger: what was planted before it is not known."
    else:
        assert (last["notes"], last["seen"]) == ([], whole["seen"]), name
    output = folder / "out" / "memguard_audit"
    check_files(output, VALID.get(name, set(range(STEPS + 1))))
    assert left_behind(folder) == ([f".{DIED_WRITING[name]}"] if name in DIED_WRITING else []), name
    for path in folder.glob("out/checkpoint-*/memguard_audit/report.json"):
        assert load_report(path).subject.digest == checkpoint_digest(path.parents[1])


DIED_WRITING = {
    "killed writing a report": "report.json",
    "killed writing a report of a checkpoint": "report.json",
    "killed writing the history": "history.jsonl",
    "killed writing a ledger": "memguard_ledger.json",
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


class Fills(TrainerCallback):  # type: ignore[misc]
    """Takes all room of a disk at one step and gives it back at a later one; stands before the callback that audits."""

    def __init__(self, place: Path, first: int, last: int) -> None:
        self.file, self.first, self.last = place / "filler", first, last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.first:
            with contextlib.suppress(OSError), self.file.open("wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(4096))
        elif state.global_step == self.last:
            self.file.unlink()


def test_a_file_system_without_room_costs_the_audits_of_that_time_and_no_more(
    parts: dict[str, Any], small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = every_step(tmp_path) | {"output": str(small_disk / "audits")}
    with caplog.at_level(logging.WARNING):
        audited, _ = train(CASE, tmp_path / "audited", parts, config, before=(Fills(small_disk, 2, 4),))
    assert "the audit at step 2 was not written everywhere: OSError: No space left on device." in caplog.text
    check_files(small_disk / "audits", {0, 1, 4, 5, 6})
    assert left_behind(small_disk) == []
    assert first_difference(audited.events, unaudited(parts, tmp_path).events) is None


# -- failures inside the process


def every_step(folder: Path) -> dict[str, Any]:
    config = settings(folder, audits=True, full=False)
    config["audit"] |= {"every": {"steps": 1}, "on_error": "continue"}
    return config


def unaudited(parts: dict[str, Any], folder: Path) -> Any:
    return train(CASE, folder / "plain", parts, settings(folder, audits=False, full=False))[0]


class Spoils(TrainerCallback):  # type: ignore[misc]
    """Spoils the audits at some steps, from their n-th forward pass on (the first ones look whether a fast path agrees)."""

    def __init__(self, steps: tuple[int, ...], number: int, spoil: Callable[[Any], Any]) -> None:
        self.steps, self.number, self.spoil = steps, number, spoil
        self.done: dict[int, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            step = state.global_step
            if module.training or step not in self.steps:
                return None
            self.done[step] = self.done.get(step, 0) + 1
            return self.spoil(output) if self.done[step] >= self.number else None

        # on the body, whose output the audit's fused paths read too
        (model.base_model if hasattr(model, "base_model") else model).register_forward_hook(hook)


def raise_foreign(output: Any) -> Any:
    raise RuntimeError("the kernel failed, and quotes what it was given")


def make_nan(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * float("nan")
    return output


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(raise_foreign, "failed with RuntimeError."), (make_nan, "must be finite, got nan")],
    ids=["exception", "NaN scores"],
)
def test_an_audit_that_fails_half_way_is_invalid_and_training_ends_as_without_it(
    spoil: Any, reason: str, parts: dict[str, Any], tmp_path: Path
) -> None:
    spoils = Spoils((2, 3), 4, spoil)
    audited, _ = train(CASE, tmp_path / "audited", parts, every_step(tmp_path), before=(spoils,))
    assert all(spoils.done[step] >= 4 for step in (2, 3))
    output = tmp_path / "audited" / "memguard_audit"
    check_files(output, {0, 1, 4, 5, 6})
    for folder in (output / "reports" / "step-00000002.json", tmp_path / "audited" / "checkpoint-3" / "memguard_audit"):
        report = load_report(folder if folder.suffix else folder / "report.json")
        assert report.status == "invalid"
        assert reason in " ".join(report.invalid_reasons)
    assert first_difference(audited.events, unaudited(parts, tmp_path).events) is None


class Ruins(TrainerCallback):  # type: ignore[misc]
    """Training itself goes wrong: a weight becomes NaN after one step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")


def test_weights_that_become_nan_give_invalid_reports_from_there_and_training_goes_on(
    parts: dict[str, Any], tmp_path: Path
) -> None:
    config = every_step(tmp_path)
    write_records(tmp_path, parts["blocks"])
    audited, _ = train(CASE, tmp_path / "audited", parts, config, before=(Ruins(),))
    plain, _ = train(CASE, tmp_path / "plain", parts, settings(tmp_path, audits=False, full=False), before=(Ruins(),))
    assert audited.trainer.state.global_step == STEPS
    assert first_difference(audited.events, plain.events) is None
    output = tmp_path / "audited" / "memguard_audit"
    check_files(output, {0, 1, 2})
    assert load_report(output / "report.json").status == "invalid"


class InTheWay(TrainerCallback):  # type: ignore[misc]
    """Somebody puts a file where the folder of audits was."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        output = Path(args.output_dir) / "memguard_audit"
        if state.global_step == 2:
            output.rename(output.with_name("moved"))
            output.write_text("mine", encoding="utf-8")


def test_a_folder_of_audits_that_is_gone_costs_the_files_and_nothing_else(
    parts: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        audited, guard = train(CASE, tmp_path / "audited", parts, every_step(tmp_path), before=(InTheWay(),))
    assert "cannot be written" in caplog.text
    assert (tmp_path / "audited" / "memguard_audit").read_text(encoding="utf-8") == "mine"
    check_files(tmp_path / "audited" / "moved", {0, 1})
    assert guard.auditor.last.status == "invalid"
    assert guard.auditor.last.invalid_reasons[0].startswith("the report of this audit could not be written")
    assert first_difference(audited.events, unaudited(parts, tmp_path).events) is None


def test_a_failure_is_raised_where_the_settings_say_so_and_the_model_is_as_it_was(
    parts: dict[str, Any], tmp_path: Path
) -> None:
    config = every_step(tmp_path)
    config["audit"]["on_error"] = "raise"
    kept: dict[str, Any] = {}

    def remember(output: Any) -> Any:
        kept["draws"] = torch.random.get_rng_state()
        return raise_foreign(output)

    class Before(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kept.update(model=model, flags=[one.training for one in model.modules()], state=torch.random.get_rng_state())

    with pytest.raises(ScoringError, match="failed with RuntimeError"):
        train(CASE, tmp_path / "audited", parts, config, before=(Before(), Spoils((2,), 4, remember)))
    assert [one.training for one in kept["model"].modules()] == kept["flags"]
    assert torch.equal(torch.random.get_rng_state(), kept["state"])
    assert not torch.equal(kept["draws"], kept["state"])
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    report = load_report(tmp_path / "audited" / "memguard_audit" / "report.json")
    assert (report.status, report.subject.global_step) == ("invalid", 2)
