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
