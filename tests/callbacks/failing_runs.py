"""Runs that are killed in an audit or meet a full disk, and runs that go on after that, each in a process of its own.

Run as a script: `failing_runs.py PARTS FOLDER NAME...` tells each named story in `FOLDER/NAME` and writes `FOLDER/result.json`:
name -> a list of (how the process ended, what the run did). A fork starts each run: torch is imported once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harmless_cases import Case, Recorder, make_trainer, settings, write_records
from transformers import TrainerCallback

STEPS = 6
CASE = Case("short", {"max_steps": STEPS, "save_steps": 3, "eval_strategy": "no"})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesScoring(TrainerCallback):  # type: ignore[misc]
    """Kills the process at the n-th forward pass of the audits at one step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.left = step, number

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def count(module: Any, *_: Any) -> None:
            if state.global_step == self.step and not module.training:
                self.left -= 1
                if self.left == 0:
                    die()

        model.register_forward_pre_hook(count)


class DiesWriting(TrainerCallback):  # type: ignore[misc]
    """Kills the process when a file (the end of its path) was written under a temporary name, before it gets its own."""

    def __init__(self, step: int, name: str) -> None:
        self.step, self.name = step, name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        original = os.replace

        def replace(source: Any, target: Any, **options: Any) -> None:
            if state.global_step == self.step and Path(target).as_posix().endswith(f"/{self.name}"):
                die()
            original(source, target, **options)

        os.replace = replace  # type: ignore[assignment]


class FileSizes(TrainerCallback):  # type: ignore[misc]
    """Sets the largest size of a file at some steps, around the callback that audits; the trainer's own files are not met."""

    def __init__(self, limit: int, steps: tuple[int, ...] | None) -> None:
        self.limit, self.steps = limit, steps

    def set(self, state: Any) -> None:
        if self.steps is None or state.global_step in self.steps:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set(state)


def full_disk(*steps: int) -> Callable[[], dict[str, Any]]:
    """Files end after 64 bytes while the callback that audits works at these steps."""
    return lambda: {"before": [FileSizes(64, steps)], "after": [FileSizes(resource.RLIM_INFINITY, None)]}


def dies(kind: Callable[..., Any], *arguments: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"before": [kind(*arguments)]}


def plainly() -> dict[str, Any]:
    return {}


# name -> the runs of one folder, one after another; each goes on from the last checkpoint that is there
STORIES: dict[str, tuple[Callable[[], dict[str, Any]], ...]] = {
    "whole": (plainly,),
    "killed in an audit of the cadence": (dies(DiesScoring, 5, 3), plainly),
    "killed in the audit of a save": (dies(DiesScoring, 3, 3), plainly),
    "killed in the audit at the start": (dies(DiesScoring, 0, 2), plainly),
    "killed in the probe of a full audit": (dies(DiesScoring, 3, 200), plainly),
    "killed writing a report": (dies(DiesWriting, 4, "memguard_audit/report.json"), plainly),
    "killed writing a report of a checkpoint": (dies(DiesWriting, 3, "checkpoint-3/memguard_audit/report.json"), plainly),
    "killed writing the history": (dies(DiesWriting, 4, "history.jsonl"), plainly),
    "killed writing a ledger": (dies(DiesWriting, 3, "memguard_ledger.json"), plainly),
    "killed twice": (dies(DiesScoring, 2, 1), dies(DiesScoring, 5, 2), plainly),
    "disk full in the middle": (full_disk(2, 3),),
    "disk full at the end": (full_disk(5, 6),),
    "disk full throughout": (full_disk(1, 2, 3, 4, 5, 6),),
}


def run(folder: Path, parts: dict[str, Any], *, full: bool, before: Any = (), after: Any = ()) -> dict[str, Any]:
    """One run, from the last checkpoint that is there."""
    from transformers.trainer_utils import get_last_checkpoint

    from memguard.callbacks import HFAuditCallback

    config = settings(folder, audits=True, full=full)
    config["canaries"]["positive_control"] = "probe"  # made by a full audit alone; the plan is the same without
    config["audit"] |= {"every": {"steps": 1}, "on_error": "continue"}
    guard, recorder = HFAuditCallback(config), Recorder()
    trainer = make_trainer(CASE, folder / "out", parts, [*before, guard, recorder, *after])
    recorder.watch(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder / "out") if (folder / "out").is_dir() else None)
    ledger = guard.ledger(STEPS)
    return {"events": recorder.events, "notes": ledger.notes, "seen": {one: e.num_seen for one, e in ledger.canaries.items()}}


def in_a_fork(work: Callable[[], dict[str, Any]], place: Path) -> tuple[int, dict[str, Any] | None]:
    """How a process ended that did this work (minus the signal that killed it), and what the work gave."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            place.write_text(json.dumps(work()), encoding="utf-8")
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ended, json.loads(place.read_text(encoding="utf-8")) if ended == 0 else None


def main(parts_path: Path, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    parts = torch.load(parts_path, weights_only=False)
    found: dict[str, Any] = {}
    for name in names:
        place = folder / name
        place.mkdir(parents=True)
        write_records(place, parts["blocks"])
        found[name] = []
        for number, prepare in enumerate(STORIES[name]):

            def work(place: Path = place, full: bool = "full audit" in name, prepare: Any = prepare) -> dict[str, Any]:
                return run(place, parts, full=full, **prepare())

            found[name].append(in_a_fork(work, folder / f"{name} {number}.txt"))
    (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
