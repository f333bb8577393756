"""However a model is trained: audits of every kind at every moment leave training as it is without them, bit for bit.

One way of each kind is unmarked, the rest slow; every hazard is also let loose on purpose, so that the record is seen to tell.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harmless_cases import CASES, Case, Recorder, compare, first_difference, settings, train, with_adapter
from torch.utils.data import DataLoader

from memguard.audit.report import load_report
from memguard.audit.runner import AuditRunner

QUICK = {"dropout", "LoRA", "frozen part", "resumed", "stream"}
SHORT = Case("short", {"max_steps": 4, "save_strategy": "no", "eval_strategy": "no"})
IN_ONE = [case for case in CASES.values() if case.ranks == 1]
OVER_RANKS = [case for case in CASES.values() if case.ranks == 2]

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for the old name


@pytest.fixture
def parts(tiny_model: Any, tokenizer: Any, blocks: Any) -> dict[str, Any]:
    return {"model": tiny_model, "tokenizer": tokenizer, "blocks": blocks}


def audited_steps(folder: Path) -> dict[int, bool]:
    """Step -> whether its audit was full, of the reports of a run."""
    reports = [load_report(path) for path in sorted((folder / "memguard_audit" / "reports").glob("step-*.json"))]
    return {report.subject.global_step or 0: report.is_full for report in reports if report.status == "valid"}


def logged_losses(recorder: Recorder) -> list[int]:
    return [row["step"] for row in recorder.trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft, of a base that has no folder
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in IN_ONE]
)
def test_training_is_the_same_bit_for_bit_with_audits_everywhere_and_with_none(
    case: Case, parts: dict[str, Any], tmp_path: Path
) -> None:
    audited, plain, guard = compare(case, tmp_path, parts)
    assert first_difference(audited.events, plain.events) is None
    assert logged_losses(audited) == logged_losses(plain) == [1, 2, 3, 4, 5, 6]
    assert len(audited.events) > 100
    assert audited_steps(tmp_path / "audited") == {0: False, 2: False, 3: True, 4: False, 6: True}
    assert audited_steps(tmp_path / "plain") == {}
    report = load_report(tmp_path / "audited" / "checkpoint-3" / "memguard_audit" / "report.json")
    assert report.positive_control.kind == "probe"
    assert None not in (report.records, report.membership, report.extraction, report.prior_aware)
    ledger = guard.ledger(6)
    assert (ledger.verified, ledger.notes) == (True, [])


@pytest.mark.slow
def test_training_over_two_ranks_is_the_same_bit_for_bit(parts: dict[str, Any], tmp_path: Path) -> None:
    """DDP and FSDP2; and where every audit fails on one of the ranks, on either."""
    parts["model"].save_pretrained(tmp_path / "model")
    parts["model"].name_or_path = str(tmp_path / "model")
    torch.save(parts, tmp_path / "parts.pt")
    script = Path(__file__).with_name("harmless_cases.py")
    names = [case.name for case in OVER_RANKS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    command += [str(tmp_path / "result.json"), str(tmp_path / "parts.pt"), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert list(found) == names
    for case in OVER_RANKS:
        first, second = found[case.name]
        assert (first["difference"], second["difference"]) == (None, None), case.name
        assert min(first["events"], second["events"]) > 100
        ended = ("valid", True) if case.breaks is None else ("invalid", False)
        assert [(one["status"], one["is_full"]) for one in (first, second)] == [ended] * 2, case.name


# -- the record tells


def leave_gradient(model: Any, trainer: Any) -> None:
    parameter = next(iter(model.parameters()))
    parameter.grad = torch.ones_like(parameter)


def move_weight(model: Any, trainer: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3


def freeze(model: Any, trainer: Any) -> None:
    model.model.norm.weight.requires_grad_(False)


def train_all(model: Any, trainer: Any) -> None:
    for module in model.modules():
        module.training = True


def move_moment(model: Any, trainer: Any) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"] *= 1.0001


def flip_cache(model: Any, trainer: Any) -> None:
    model.config.use_cache = not model.config.use_cache


def lose_log(model: Any, trainer: Any) -> None:
    trainer.control.should_log = False


HARMS: dict[str, tuple[str | None, Callable[[Any, Any], Any]]] = {
    "nothing": (None, lambda model, trainer: None),
    "torch draws": ("step 0: random state of torch", lambda model, trainer: torch.rand(1)),
    "numpy draws": ("step 0: random state of numpy", lambda model, trainer: np.random.rand()),
    "python draws": ("step 0: random state of python", lambda model, trainer: random.random()),
    "a loader is iterated": ("step 0: random state of torch", lambda model, trainer: list(DataLoader(range(1)))),
    "a generator is seeded": ("step 0: random state of torch", lambda model, trainer: torch.manual_seed(7)),
    "a gradient is left": ("step 0: gradients left", leave_gradient),
    "eval mode is left": ("step 0: train flags", lambda model, trainer: model.eval()),
    "a frozen part is trained": ("step 0: train flags", train_all),
    "a parameter is frozen": ("step 0: requires_grad", freeze),
    "a weight is moved": ("step 0: loss", move_weight),
    "a moment of Adam is moved": ("step 2: optimiser", move_moment),
    "the cache is switched": ("step 0: use_cache", flip_cache),
    "a row is lost": ("step 0: rows", lambda model, trainer: trainer.train_dataset.reverse()),
    "a line of the log is lost": ("step 2: log", lose_log),
}


@pytest.fixture(scope="module")
def remembered() -> dict[str, Any]:
    """The unaudited run, made once for all harms."""
    return {}


@pytest.mark.parametrize("harm", list(HARMS))
def test_an_audit_that_harms_training_is_caught_by_the_record(
    harm: str, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: dict[str, Any]
) -> None:
    expected, act = HARMS[harm]
    case = dataclasses.replace(SHORT, change=CASES["frozen part"].change)
    if not remembered:
        remembered["plain"], _ = train(case, tmp_path / "plain", parts, settings(tmp_path, audits=False, full=False))
    original = AuditRunner.run
    recorder = Recorder()

    def run(runner: Any, model: Any, **options: Any) -> Any:
        report = original(runner, model, **options)
        act(model, recorder.trainer)
        return report

    monkeypatch.setattr(AuditRunner, "run", run)
    train(case, tmp_path / "audited", parts, settings(tmp_path, audits=True, full=False), recorder=recorder)
    found = first_difference(recorder.events, remembered["plain"].events)
    assert found is None if expected is None else str(found).startswith(expected)


# -- what an audit may do inside its context


def rummage(model: Any) -> None:
    """All hazards at once: draws, a loader, seeds, a forward pass with dropout, flags."""
    torch.rand(3), random.random(), np.random.rand()
    list(DataLoader(range(2)))
    torch.manual_seed(7)
    model.train()
    model(input_ids=torch.arange(8)[None])
    flip_cache(model, None)
    for parameter in model.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


@pytest.mark.parametrize("change", [CASES["frozen part"].change, with_adapter], ids=["frozen part", "LoRA"])
def test_what_an_audit_does_inside_its_context_is_undone(
    change: Any, parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is also switched off and on, which sets its flags."""
    case = dataclasses.replace(SHORT, change=change)
    plain, _ = train(case, tmp_path / "plain", parts, settings(tmp_path, audits=False, full=False))
    original, calls = AuditRunner._score, []

    def score(runner: Any, scorer: Any, progress: Any) -> Any:
        model = scorer.model.model
        found = original(runner, scorer, progress)
        rummage(model)
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                model(input_ids=torch.arange(8)[None])
        calls.append([one.requires_grad for one in model.parameters()])
        return found

    monkeypatch.setattr(AuditRunner, "_score", score)
    audited, _ = train(case, tmp_path / "audited", parts, settings(tmp_path, audits=True, full=False))
    assert len(calls) == 3
    wanted = [one.requires_grad for one in audited.trainer.model.parameters()]
    assert all(call != wanted for call in calls)
    assert first_difference(audited.events, plain.events) is None


# -- planting draws nothing either


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seeds of their own", {"seed": 5, "data_seed": 11}),
        pytest.param("workers", {"dataloader_num_workers": 2}, marks=pytest.mark.slow),
        pytest.param("accumulation", {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_guarded_and_audited_run_draws_what_the_unguarded_run_draws(
    name: str, arguments: dict[str, Any], parts: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of one length, into which canaries are put: as many draws of dropout, so that all states must agree."""
    case = dataclasses.replace(SHORT, arguments=SHORT.arguments | arguments)
    guarded, _ = train(case, tmp_path / "guarded", parts, settings(tmp_path, audits=True, full=False))
    plain, _ = train(case, tmp_path / "plain", parts, None)

    def drawn(recorder: Recorder) -> list[Any]:
        return [event for event in recorder.events if "random state" in event[0] or "draws" in event[0]]

    assert drawn(guarded) == drawn(plain)
    assert len(drawn(guarded)) > 20
    assert first_difference(guarded.events, plain.events) is not None
