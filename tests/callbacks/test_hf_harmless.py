"""Training with audits on is training with audits off, bit for bit; and a failing audit kills nothing unless asked to."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_wandb import OfflineRun
from trainer_versions import evaluates_at_the_end
from transformers import TrainerCallback

from memguard.audit.report import load_report
from memguard.callbacks import HFAuditCallback
from memguard.callbacks.saved_weights import saved_weights_match
from memguard.canaries.ledger import load_ledger
from memguard.errors import CanaryError, ScoringError

EVERYWHERE = {"every": {"steps": 2}, "on": ["start", "save", "evaluate", "end"], "full_on": ["end"], "batch_size": 5}


def fingerprint(trainer: Any) -> tuple[list[float], str, str]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.float().numpy().tobytes())
    return losses, digest.hexdigest(), hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2, "activation_checkpointing": True},
        {"bf16": True},
    ],
)
def test_losses_weights_and_random_state_are_bit_identical_with_audits_on_and_off(
    arguments: dict[str, Any], settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any
) -> None:
    assert tiny_model.config.attention_dropout > 0
    found = []
    for audit in (EVERYWHERE, {}):
        config = settings(audit=audit)
        options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 4} | arguments
        callback = HFAuditCallback(config)
        trainer = trainer_of(
            blocks[:40], [callback], model=copy.deepcopy(tiny_model), trainer={"eval_dataset": blocks[40:48]}, **options
        )
        trainer.train()
        found.append(fingerprint(trainer))
        assert (callback.auditor.last is not None) == bool(audit)
    assert found[0] == found[1]
    assert len(found[0][0]) == trainer.state.max_steps


@pytest.mark.parametrize("arguments", [{"gradient_accumulation_steps": 2, "activation_checkpointing": True}, {"bf16": True}])
def test_full_audits_in_the_middle_of_training_change_nothing_either(
    arguments: dict[str, Any], settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """The probe steps copies of the weights, records and membership score rows: all between two steps of the run."""
    for name, rows in (("members", blocks[:12]), ("held_out", blocks[40:52])):
        text = "\n".join(json.dumps({"input_ids": row["input_ids"]}) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    records = {"file": tmp_path / "members.jsonl", "held_out": tmp_path / "held_out.jsonl", "prefix_tokens": 8}
    records |= {"suffix_tokens": 6, "max_edits": 1}
    full = {"every": {"steps": 2}, "on": ["save"], "full_on": ["save"], "records": records, "on_error": "raise"}
    found = []
    for audit in (full, {}):
        config = settings(canaries={"positive_control": "probe", "tiers": {1: 2, 20: 1}}, audit=audit)
        callback = HFAuditCallback(config)
        trainer = trainer_of(
            blocks[:40], [callback], model=copy.deepcopy(tiny_model), save_strategy="steps", save_steps=4, **arguments
        )
        trainer.train()
        found.append(fingerprint(trainer))
    assert found[0] == found[1]
    report = load_report(tmp_path / "out" / "checkpoint-4" / "memguard_audit" / "report.json")
    assert report.is_full
    assert report.positive_control.kind == "probe"
    assert report.records is not None
    assert report.membership is not None
    assert report.extraction is not None


def test_reports_are_written_at_start_cadence_save_and_end(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    callback = HFAuditCallback(settings(audit=EVERYWHERE))
    trainer = trainer_of(blocks[:40], [callback], save_strategy="steps", save_steps=3)
    trainer.train()
    output = tmp_path / "out" / "memguard_audit"
    assert [path.name for path in sorted((output / "reports").iterdir())] == [
        f"step-{step:08d}.json" for step in (0, 2, 3, 4, 6, 8, 9, 10)
    ]
    history = [json.loads(line) for line in (output / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {entry["global_step"] for entry in history} == {0, 2, 3, 4, 6, 8, 9, 10}
    last = load_report(output / "report.json")
    assert last.subject.global_step == 10
    assert last.prior_aware_settings is not None
    assert {point.global_step for point in last.trend} == {0, 2, 3, 4, 6, 8, 9}
    assert "<svg" in (output / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("audit", "options", "full_steps"),
    [
        ({"on": ["save"], "full_on": ["save"]}, {"save_strategy": "steps", "save_steps": 5}, {5, 10}),
        ({"on": ["save", "end"], "full_on": ["save"]}, {"save_strategy": "steps", "save_steps": 5}, {5, 10}),
        ({"on": ["save", "end"], "full_on": ["end"]}, {"save_strategy": "steps", "save_steps": 5}, {10}),
        (
            {"every": {"steps": 2}, "on": ["evaluate"], "full_on": ["evaluate"]},
            {"eval_strategy": "steps", "eval_steps": 4},
            {4, 8, 10},
        ),
    ],
)
def test_every_moment_that_is_to_be_full_is(
    audit: dict[str, Any],
    options: dict[str, Any],
    full_steps: set[int],
    settings: Any,
    trainer_of: Any,
    blocks: Any,
    tmp_path: Path,
) -> None:
    callback = HFAuditCallback(settings(audit=audit))
    trainer_of(blocks[:40], [callback], trainer={"eval_dataset": blocks[40:48]}, **options).train()
    reports = [load_report(path) for path in sorted((tmp_path / "out" / "memguard_audit" / "reports").iterdir())]
    expected = full_steps if evaluates_at_the_end() or "save_steps" in options else full_steps - {10}
    assert {report.subject.global_step for report in reports if report.is_full} == expected


def test_a_report_beside_a_checkpoint_is_bound_to_its_bytes_and_its_ledger(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    from memguard.audit.digest import checkpoint_digest

    callback = HFAuditCallback(settings(audit=EVERYWHERE))
    trainer_of(blocks[:40], [callback], save_strategy="steps", save_steps=5).train()
    for step in (5, 10):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        report = load_report(folder / "memguard_audit" / "report.json")
        assert report.subject.kind == "checkpoint"
        assert report.subject.digest == checkpoint_digest(folder)
        ledger = load_ledger(folder / "memguard_ledger.json")
        assert ledger.global_step == step
        assert ledger.plan_digest == report.plan.digest
        assert {row.id: row.num_seen for row in report.canaries if row.role != "control"} == {
            one: entry.num_seen for one, entry in ledger.canaries.items()
        }


class LeavesALink(TrainerCallback):
    """Leaves a link that leads nowhere in every checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "notes.txt").symlink_to("nowhere")


def test_a_checkpoint_without_a_digest_leaves_the_figures_standing(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["save"]}))
    trainer_of(blocks[:40], [LeavesALink(), callback], save_strategy="steps", save_steps=10).train()
    report = load_report(tmp_path / "out" / "checkpoint-10" / "memguard_audit" / "report.json")
    assert (report.subject.kind, report.subject.digest) == ("live", None)
    assert report.subject.notice == "what was saved has no digest: audit the checkpoint to see why."
    assert all(row.exposure.bits is not None for row in report.canaries)


def test_the_offline_audit_of_a_checkpoint_gives_the_same_figures(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    from memguard.audit.checkpoints import audit_checkpoints
    from memguard.audit.config import parse_config

    config = settings(audit={"on": ["save"]})
    callback = HFAuditCallback(config)
    trainer_of(blocks[:40], [callback], save_strategy="epoch").train()
    folder = tmp_path / "out" / "checkpoint-10"
    beside = load_report(folder / "memguard_audit" / "report.json")
    (offline,) = audit_checkpoints([folder], callback.plan, parse_config(config).audit)
    assert offline.subject.digest == beside.subject.digest
    assert offline.procedure.model_copy(update={"tolerance": 0.0}) == beside.procedure.model_copy(update={"tolerance": 0.0})
    for one, other in zip(offline.canaries, beside.canaries, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5)
        assert one.num_seen == other.num_seen


def test_a_file_with_other_weights_is_not_taken_for_the_model(tiny_model: Any, tmp_path: Path) -> None:
    assert not saved_weights_match(tmp_path, tiny_model)
    tiny_model.save_pretrained(tmp_path)
    assert saved_weights_match(tmp_path, tiny_model)
    with torch.no_grad():
        tiny_model.model.norm.weight[0] += 1e-3
    assert not saved_weights_match(tmp_path, tiny_model)


class Breaks(TrainerCallback):
    """Makes the model unscorable at one step, in eval mode only."""

    def __init__(self, guard: HFAuditCallback) -> None:
        self.guard = guard

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise ScoringError("the model could not be scored.")

        self.guard.auditor.runner.run = refuse


@pytest.mark.parametrize("on_error", ["continue", "raise"])
def test_a_failed_audit_warns_and_training_goes_on_unless_told_to_stop(
    on_error: str, settings: Any, trainer_of: Any, blocks: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    guard = HFAuditCallback(settings(audit={"every": {"steps": 2}, "on_error": on_error}))
    trainer = trainer_of(blocks[:40], [guard, Breaks(guard)], num_train_epochs=1)
    if on_error == "raise":
        with pytest.raises(ScoringError, match="could not be scored"):
            trainer.train()
        return
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 5
    assert "the audit at step 2 failed and training goes on: the model could not be scored." in caplog.text
    report = load_report(tmp_path / "out" / "memguard_audit" / "report.json")
    assert (report.status, report.subject.global_step) == ("invalid", 4)
    assert report.invalid_reasons == ["the audit failed: the model could not be scored."]


def test_a_model_with_nan_weights_gives_an_invalid_report_and_trains_on(
    settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        tiny_model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(CanaryError, match="with a gradient that is not finite"):
        trainer_of(blocks[:40], [HFAuditCallback(settings(audit={"on": ["end"]}))], num_train_epochs=1).train()
    warns = settings(audit={"on": ["end"]}, canaries={"on_preflight_failure": "warn"})
    trainer_of(blocks[:40], [HFAuditCallback(warns)], num_train_epochs=1).train()
    report = load_report(tmp_path / "out" / "memguard_audit" / "report.json")
    assert report.status == "invalid"


def test_two_guards_on_two_trainers_do_not_meet(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    first, second = HFAuditCallback(settings()), HFAuditCallback(settings(plan=str(tmp_path / "other" / "plan.json")))
    one = trainer_of(blocks[:40], [first], num_train_epochs=1)
    other = trainer_of(blocks[:40], [second], num_train_epochs=1)
    one.train()
    other.train()
    assert first._built is not second._built
    assert first._trainer() is one
    assert second._trainer() is other


def test_audits_stand_in_the_wandb_run_beside_every_loss(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    options = wandb.Settings(mode="offline", silent=True, console="off", disable_git=True)
    callback = HFAuditCallback(settings(audit=EVERYWHERE, tracking={"wandb": "auto"}))
    with wandb.init(project="memguard-test", dir=str(tmp_path), settings=options):
        trainer_of(blocks[:40], [callback], report_to=["wandb"], save_strategy="steps", save_steps=3).train()
    written = OfflineRun(tmp_path)
    losses = [row["train/global_step"] for row in written.history if "train/loss" in row]
    audits = [row["train/global_step"] for row in written.history if "memguard/exposure_max" in row]
    assert losses == list(range(1, 11))
    assert audits[:-1] == [0, 2, 3, 4, 6, 8, 9]
    assert audits[-1] == 10
    assert written.metrics["memguard/exposure_mean/tier_3"] == {"step": "train/global_step", "summary": ["max", "last"]}


def test_a_save_at_the_last_step_gets_the_report_of_the_end(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["end"], "full_on": ["end"]}))
    trainer_of(blocks[:40], [callback], save_strategy="epoch", num_train_epochs=1).train()
    beside = load_report(tmp_path / "out" / "checkpoint-5" / "memguard_audit" / "report.json")
    assert beside.subject.kind == "checkpoint"
    assert beside.prior_aware_settings is not None
    assert load_report(tmp_path / "out" / "memguard_audit" / "report.json") == beside


def test_best_weights_put_back_at_the_end_are_measured_anew(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["save", "end"]}))
    trainer = trainer_of(
        blocks[:40],
        [callback],
        trainer={"eval_dataset": blocks[40:48]},
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first checkpoint is kept as the best
        num_train_epochs=2,
    )
    trainer.train()
    last = load_report(tmp_path / "out" / "memguard_audit" / "report.json")
    first = load_report(tmp_path / "out" / "checkpoint-2" / "memguard_audit" / "report.json")
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert last == first  # measured in full, under the step of these weights, beside their checkpoint
    assert (last.subject.kind, last.subject.global_step, last.subject.epoch, last.is_full) == ("checkpoint", 2, 0.4, True)
    saved = load_ledger(tmp_path / "out" / "checkpoint-2" / "memguard_ledger.json")
    assert {row.id: row.num_seen for row in last.canaries if row.role != "control"} == {
        one: entry.num_seen for one, entry in saved.canaries.items()
    }
    earlier = load_report(tmp_path / "out" / "checkpoint-4" / "memguard_audit" / "report.json")
    assert [row.log_prob for row in earlier.canaries] != [row.log_prob for row in last.canaries]
