"""Audits of a Lightning run come at their moments, say what they measured, and leave ledgers with the checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_cases import QUIET, loader_of, make_trainer, module_class, rows_of, run, stop_at, to_tensors
from torch.utils.data import DataLoader

from memguard.audit.report import load_report
from memguard.callbacks import LightningAuditCallback
from memguard.canaries.ledger import load_ledger
from memguard.errors import InputError
from memguard.scoring.team import Team

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]


def steps_of(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in sorted((folder / "run" / "memguard_audit" / "reports").iterdir())]


def saver(folder: Path, every: int) -> Any:
    return pl.callbacks.ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1)


def test_audits_come_at_start_cadence_validation_save_and_end_but_not_at_the_sanity_check(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    audit = {"every": {"steps": 4}, "on": ["start", "evaluate", "save", "end"], "full_on": [], "on_error": "raise"}
    callback = LightningAuditCallback(settings(audit=audit), tokenizer=tokenizer)
    held_out = DataLoader(rows_of(blocks, "fixed", number=16), batch_size=8, collate_fn=to_tensors)
    trainer = make_trainer(
        tmp_path, [callback, saver(tmp_path, 3)], enable_checkpointing=True, num_sanity_val_steps=1, accumulate_grad_batches=2
    )
    # 61 rows in batches of 8 and steps of 2 batches: 4 steps an epoch, 8 in all
    trainer.fit(module_class()(tiny_model), loader_of(blocks, "fixed"), held_out)
    assert steps_of(tmp_path) == [0, 3, 4, 6, 8]
    last = load_report(tmp_path / "run" / "memguard_audit" / "report.json")
    assert (last.subject.kind, last.subject.global_step, last.subject.epoch, last.status) == ("live", 8, 2.0, "valid")
    assert (last.procedure.autocast, last.subject.digest) == (None, None)
    assert {row.num_seen for row in last.canaries if row.tier == 3} == {6}
    history = (tmp_path / "run" / "memguard_audit" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["global_step"] for line in history] == [0, 3, 4, 6, 8]


def test_a_full_audit_at_the_end_and_none_after_training(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    audit = {"on": ["end", "evaluate"], "full_on": ["end"], "on_error": "raise"}
    callback, _, trainer = run(tmp_path, tiny_model, loader_of(blocks, "variable"), settings(audit=audit), tokenizer)
    assert callback.auditor.last.is_full
    assert (tmp_path / "run" / "memguard_audit" / "report.html").exists()
    assert callback.auditor.last.subject.global_step == trainer.global_step
    before = callback.auditor.last
    trainer.validate(trainer.lightning_module, DataLoader(rows_of(blocks, "fixed")[:8], collate_fn=to_tensors), verbose=False)
    assert callback.auditor.last is before


def test_each_checkpoint_holds_counts_and_has_a_ledger_beside_it_and_no_secret(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    extra = [saver(tmp_path, 3)]
    options = {"extra": extra, "enable_checkpointing": True}
    callback, _, trainer = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), settings(), tokenizer, **options)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert load_ledger(tmp_path / "weights.ckpt.memguard_ledger.json").global_step == trainer.global_step
    found = sorted((tmp_path / "saved").glob("*.ckpt"))
    assert len(found) == 5
    for path in [*found, tmp_path / "by_hand.ckpt"]:
        inside = torch.load(path, weights_only=True)
        ledger = load_ledger(path.with_name(f"{path.name}.memguard_ledger.json"))
        assert ledger.global_step == inside["global_step"]
        assert inside["memguard"] == {"plan_digest": callback.plan.digest, "ledger": ledger.model_dump(mode="json")}
        text = json.dumps(inside["memguard"])
        assert not any(one.secret in text for one in callback.plan.canaries)


def test_a_resumed_run_goes_on_with_counts_and_trend(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    audit = {"every": {"steps": 2}, "on": ["start", "end"], "full_on": [], "on_error": "raise"}
    config = settings(audit=audit, canaries={"verify": True})
    checkpoint = tmp_path / "stopped.ckpt"
    run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, extra=[stop_at(5, checkpoint)])
    callback, _, trainer = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, ckpt=checkpoint)
    ledger = callback.ledger(trainer.global_step)
    assert ledger.verified
    assert ledger.notes == []
    assert {entry.num_seen for entry in ledger.canaries.values()} == {2, 6, 10}
    assert steps_of(tmp_path) == [0, 2, 4, 5, 6, 8, 10, 12, 14, 16]


@pytest.mark.slow
def test_mixed_precision_is_recorded(blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> None:
    config = settings(audit={"on": ["start", "end"], "full_on": ["end"], "on_error": "raise"})
    callback, _, _ = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, precision="bf16-mixed")
    report = callback.auditor.last
    assert (report.procedure.autocast, report.status) == ("bf16", "valid")


def test_a_failing_audit_or_ledger_is_said_and_training_goes_on(
    blocks: Any,
    tiny_model: Any,
    tokenizer: Any,
    settings: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memguard.callbacks.auditor.AuditRunner.run", fails)
    monkeypatch.setattr("memguard.canaries.ledger.Ledger.save", fails)
    config = settings(audit={"every": {"steps": 4}, "on": ["save", "end"], "full_on": []})
    options = {"extra": [saver(tmp_path, 3)], "enable_checkpointing": True}
    with caplog.at_level(logging.WARNING, logger="memguard"):
        callback, watch, trainer = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, **options)
    assert trainer.global_step == 16
    assert dict(watch.counts) == {one.id: 2 * one.tier for one in callback.plan.planted()}
    assert "the ledger at step 3 was not written: OSError: No space left on device." in caplog.messages
    assert any("the audit at step 4 failed and training goes on" in text for text in caplog.messages)
    assert callback.auditor.last.status == "invalid"
    monkeypatch.undo()
    monkeypatch.setattr("memguard.canaries.ledger.Ledger.save", fails)
    config = settings(audit={"on": [], "full_on": [], "on_error": "raise"})
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, **options)


def test_a_blocked_audit_stops_the_run_where_the_gate_says_so(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memguard.callbacks.gating.RunGate.stops", lambda self, report: "a rule failed")
    gate = {"policy": "default", "stop_when": "blocked"}
    config = settings(audit={"every": {"steps": 3}, "on": ["end"], "full_on": []}, gate=gate)
    callback, _, trainer = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer)
    assert trainer.global_step == 3
    assert callback.auditor.should_stop


def test_a_gated_push_is_refused_since_lightning_does_not_ask(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    config = settings(gate={"policy": "default", "push": "gated"})
    with pytest.raises(InputError, match=r"gate.push must be always where the trainer does not ask"):
        run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer)


def test_the_trainer_is_left_as_it_was_also_when_a_run_breaks(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    class Breaks(module_class()):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("out of memory")
            return super().training_step(batch, batch_idx)

    callback = LightningAuditCallback(settings(canaries={"verify": True}), tokenizer=tokenizer)
    loader = loader_of(blocks, "fixed")
    held = dict(vars(loader))
    rescue = pl.callbacks.OnExceptionCheckpoint(tmp_path, "broken")
    trainer = make_trainer(tmp_path, [callback, rescue], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fit(Breaks(tiny_model), loader)
    rescued = torch.load(tmp_path / "broken.ckpt", weights_only=True)
    assert rescued["global_step"] == rescued["memguard"]["ledger"]["global_step"] == 2
    assert load_ledger(tmp_path / "broken.ckpt.memguard_ledger.json").global_step == 2
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    assert vars(loader) == held
    assert not tiny_model._forward_pre_hooks
    trainer = make_trainer(tmp_path, [callback], max_epochs=1)  # the same callback serves again
    trainer.fit(module_class()(tiny_model), loader)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    assert callback.ledger(trainer.global_step).notes == [
        "an earlier train() of this callback planted the same canaries: counts begin anew here."
    ]


@pytest.mark.slow
@pytest.mark.parametrize("finder", ["rate", "batch"])
def test_the_tuner_tries_batches_without_canaries_and_the_run_has_them_all(
    finder: str, blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    class Tuned(module_class()):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.lr, self.batch_size = 1e-3, 4

        def train_dataloader(self) -> Any:
            return loader_of(blocks, "fixed", batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return loader_of(blocks, "fixed", number=8, shuffle=False)

    found = pl.callbacks.LearningRateFinder(num_training_steps=5, early_stop_threshold=None, update_attr=True)
    if finder == "batch":
        found = pl.callbacks.BatchSizeFinder(mode="power", steps_per_trial=2, init_val=4, max_trials=2)
    callback = LightningAuditCallback(settings(canaries={"verify": True}), tokenizer=tokenizer)
    trainer = make_trainer(tmp_path, [found, callback])
    trainer.fit(Tuned(tiny_model))
    ledger = callback.ledger(trainer.global_step)
    assert (ledger.exact, ledger.verified) == (True, True)
    assert {entry.num_seen for entry in ledger.canaries.values()} == {2, 6, 10}


class AsksForStop(pl.Callback):
    """Asks for a stop early on, as early stopping does, before the trainer may obey."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.should_stop = True


def test_a_stop_that_must_wait_for_min_epochs_costs_no_audit_and_makes_no_save_the_end(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    config = settings(audit={"every": {"steps": 3}, "on": ["end"], "full_on": [], "on_error": "raise"})
    options = {"extra": [AsksForStop(), saver(tmp_path, 5)], "enable_checkpointing": True}
    run(tmp_path, tiny_model, loader_of(blocks, "fixed"), config, tokenizer, min_epochs=2, max_epochs=3, **options)
    # 8 steps an epoch: the stop of step 2 is obeyed at 16; saves at 5, 10 and 15 are no end
    assert steps_of(tmp_path) == [3, 6, 9, 12, 15, 16]


class Averages(pl.callbacks.WeightAveraging):
    """A user's subclass under a name of its own."""


def weights_of(model: Any) -> float:
    return sum(float(part.detach().double().abs().sum()) for part in model.parameters())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Any]]:
    """What each audit was given: the sum of the weights, and the ledger."""
    from memguard.audit.runner import AuditRunner

    seen: list[tuple[float, Any]] = []
    original = AuditRunner.run

    def run_and_note(self: Any, model: Any, **given: Any) -> Any:
        seen.append((weights_of(model), given["ledger"]))
        return original(self, model, **given)

    monkeypatch.setattr(AuditRunner, "run", run_and_note)
    return seen


@pytest.mark.parametrize("kind", ["averages", "stochastic"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_last_audit_is_of_the_averaged_weights_that_training_leaves(
    kind: str,
    is_first: bool,
    blocks: Any,
    tiny_model: Any,
    tokenizer: Any,
    settings: Any,
    tmp_path: Path,
    measured: list[tuple[float, Any]],
) -> None:
    config = settings(audit={"every": {"steps": 4}, "on": ["save", "end"], "full_on": [], "on_error": "raise"})
    callback = LightningAuditCallback(config, tokenizer=tokenizer)
    average = Averages() if kind == "averages" else pl.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    ordered = [callback, average] if is_first else [average, callback]
    trainer = make_trainer(tmp_path, [*ordered, saver(tmp_path, 8)], enable_checkpointing=True)
    trainer.fit(module_class()(tiny_model), loader_of(blocks, "fixed"))
    assert measured[-1][0] == weights_of(tiny_model)
    assert measured[-2][0] != measured[-1][0]  # the last save, at the same step, was of the weights in training
    assert callback.auditor.last.subject.global_step == 16
    assert "on_train_end" not in vars(trainer.strategy)


def test_counts_of_an_audit_within_a_step_are_those_of_the_last_whole_step(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, measured: list[tuple[float, Any]]
) -> None:
    config = settings(
        canaries={"verify": True}, audit={"every": {"steps": 1}, "on": ["evaluate", "end"], "full_on": [], "on_error": "raise"}
    )
    callback = LightningAuditCallback(config, tokenizer=tokenizer)
    held_out = DataLoader(rows_of(blocks, "fixed", number=8), batch_size=8, collate_fn=to_tensors)
    trainer = make_trainer(tmp_path, [callback], accumulate_grad_batches=4, val_check_interval=3, num_sanity_val_steps=0)
    trainer.fit(module_class()(tiny_model), loader_of(blocks, "fixed"), held_out)
    # the first validation comes after 3 of the 4 batches of step 1
    assert [ledger.global_step for _, ledger in measured][:2] == [0, 1]
    assert [ledger.notes for _, ledger in measured if not ledger.exact] == []
    assert not any(entry.num_seen for entry in measured[0][1].canaries.values())


def test_ledgers_of_deleted_checkpoints_go_and_other_files_stay(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    kept = tmp_path / "saved" / "mine.memguard_ledger.json"
    kept.parent.mkdir()
    kept.write_text("{}", encoding="utf-8")
    best = pl.callbacks.ModelCheckpoint(kept.parent, every_n_train_steps=3, save_top_k=1)
    run(tmp_path, tiny_model, loader_of(blocks, "fixed"), settings(), tokenizer, extra=[best], enable_checkpointing=True)
    # a saver deletes the earlier file after it has written the next: the last deletion alone is not followed
    assert [path.name for path in kept.parent.glob("*.ckpt")] == ["epoch=1-step=15.ckpt"]
    assert sorted(path.name for path in kept.parent.glob("*.json")) == [
        "epoch=1-step=12.ckpt.memguard_ledger.json",
        "epoch=1-step=15.ckpt.memguard_ledger.json",
        kept.name,
    ]


def test_a_later_run_without_the_callback_writes_no_ledger(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    callback, _, trainer = run(tmp_path, tiny_model, loader_of(blocks, "fixed"), settings(), tokenizer, max_epochs=1)
    trainer.callbacks.remove(callback)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader_of(blocks, "fixed"))
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    assert trainer.global_step == 16
    assert (tmp_path / "bare.ckpt").exists()
    assert not list(tmp_path.glob("*.memguard_ledger.json"))


def test_a_plan_that_cannot_be_written_is_told_to_all_ranks(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    agreed = Team.agreed

    def note(self: Any, what: str, value: Any) -> Any:
        told.append((what, value))
        return agreed(self, what, value)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Team, "agreed", note)
    monkeypatch.setattr("memguard.canaries.plan.CanaryPlan.save", fails)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, tiny_model, loader_of(blocks, "fixed"), settings(), tokenizer)
    assert ("plan", (None, "OSError: No space left on device.")) in told
