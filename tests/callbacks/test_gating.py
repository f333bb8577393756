"""The gate inside training: a decision beside every report, a stop, and pushes of weights that passed and no others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from memguard.audit.report import load_decision, load_report
from memguard.callbacks import HFAuditCallback
from memguard.callbacks.gating import weights_digest
from memguard.errors import EvidenceError, InputError
from memguard.gates import decide, load_policy

# Lower ends of exposure lie above 0 bits for some canary of any model; above 29 of the 29.9 bits of 9 digits for none that is
# not memorised to the letter.
NOTHING_PASSES, ALL_PASSES = 0, 29
needs_push_events = pytest.mark.skipif(
    not hasattr(TrainerCallback, "on_push_begin"), reason="this transformers does not ask before a push"
)


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    def make(limit: int) -> str:
        path = tmp_path / "policy.yaml"
        evidence = {"positive_control": "none", "min_canaries": 1, "fresh_secrets": False}
        rules = [{"name": "no canary over the limit", "field": "exposure.bits", "each": "canary", "max": limit}]
        path.write_text(json.dumps({"version": 1, "evidence": evidence, "rules": rules}), encoding="utf-8")
        return str(path)

    return make


def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "memguard_audit"


def test_a_decision_on_the_very_report_stands_beside_each_report(
    settings: Any, policy: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    path = policy(ALL_PASSES)
    callback = HFAuditCallback(settings(audit={"on": ["save", "end"]}, gate={"policy": path}))
    trainer_of(blocks[:40], [callback], save_strategy="steps", save_steps=5).train()
    for folder in (tmp_path / "out" / "checkpoint-5" / "memguard_audit", output(tmp_path)):
        report, decision = load_report(folder / "report.json"), load_decision(folder / "decision.json")
        assert decision.outcome == "pass"
        assert decision == decide(report, load_policy(path))
    assert "Gate decision: pass" in (output(tmp_path) / "report.html").read_text(encoding="utf-8")


def test_a_live_model_never_passes(settings: Any, policy: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    callback = HFAuditCallback(settings(audit={"every": {"steps": 2}}, gate={"policy": policy(ALL_PASSES)}))
    trainer_of(blocks[:40], [callback], num_train_epochs=1).train()
    decision = load_decision(output(tmp_path) / "decision.json")
    assert decision.outcome == "invalid"
    assert "live model" in decision.reason
    assert callback.auditor.decision == decision


@pytest.mark.parametrize(("limit", "stop_when", "steps"), [(0, "blocked", 4), (0, "never", 10), (60, "blocked", 10)])
def test_a_rule_that_fails_stops_the_run_where_asked_to(
    limit: int,
    stop_when: str,
    steps: int,
    settings: Any,
    policy: Any,
    trainer_of: Any,
    blocks: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = {"policy": policy(limit), "stop_when": stop_when}
    callback = HFAuditCallback(settings(audit={"every": {"steps": 4}, "on": ["end"]}, gate=gate))
    trainer = trainer_of(blocks[:40], [callback])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == steps
    said = [record.message for record in caplog.records if "training stops" in record.message]
    assert len(said) == (steps == 4)
    assert all("after step 4 (gate.stop_when: blocked): no canary over the limit" in text for text in said)
    assert callback.auditor.last.subject.global_step == steps  # the audit of the end is made all the same


class Diverges(TrainerCallback):
    """Weights that are no numbers from the first step on."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))


def test_an_invalid_report_stops_nothing(settings: Any, policy: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    gate = {"policy": policy(NOTHING_PASSES), "stop_when": "blocked"}
    callbacks = [Diverges(), HFAuditCallback(settings(audit={"every": {"steps": 2}}, gate=gate))]
    trainer = trainer_of(blocks[:40], callbacks, num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == 5
    assert load_report(output(tmp_path) / "report.json").status == "invalid"


def test_a_missing_policy_or_baseline_is_named_before_step_one(
    settings: Any, policy: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    for gate in ({"policy": "nowhere.yaml"}, {"policy": policy(ALL_PASSES), "baseline": "nowhere.yaml"}):
        trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(gate=gate))])
        with pytest.raises(InputError, match=r"nowhere\.yaml' does not exist"):
            trainer.train()
        assert trainer.state.global_step == 0
        assert not (tmp_path / "_memguard").exists()


# -- pushes


def push(trainer: Any) -> None:
    """What the trainer does before it uploads anything."""
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)


@needs_push_events
def test_only_weights_whose_checkpoint_passed_are_pushed(settings: Any, policy: Any, trainer_of: Any, blocks: Any) -> None:
    gate = {"policy": policy(ALL_PASSES), "push": "gated"}
    trainer = trainer_of(
        blocks[:40], [HFAuditCallback(settings(audit={"on": ["save"]}, gate=gate))], save_strategy="steps", save_steps=5
    )
    with pytest.raises(EvidenceError, match="vetoed .*not audited in this process"):
        trainer.push_to_hub()
    trainer.train()
    push(trainer)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] += 1e-3
    with pytest.raises(EvidenceError, match="these weights passed no gate as a checkpoint, the last decision was 'pass'"):
        trainer.push_to_hub()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] -= 1e-3


@needs_push_events
@pytest.mark.parametrize(("limit", "on", "last"), [(0, "save", "block"), (60, "end", "invalid")])
def test_weights_that_are_blocked_or_were_only_measured_live_are_not_pushed(
    limit: int, on: str, last: str, settings: Any, policy: Any, trainer_of: Any, blocks: Any
) -> None:
    gate = {"policy": policy(limit), "push": "gated"}
    strategy = {"save_strategy": "epoch"} if on == "save" else {}
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(audit={"on": [on]}, gate=gate))], **strategy)
    trainer.train()
    with pytest.raises(EvidenceError, match=f"the last decision was '{last}'"):
        trainer.push_to_hub()


@needs_push_events
def test_pushes_are_not_asked_about_unless_gated(settings: Any, policy: Any, trainer_of: Any, blocks: Any) -> None:
    gate = {"policy": policy(NOTHING_PASSES)}
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(audit={"on": ["end"]}, gate=gate))], num_train_epochs=1)
    trainer.train()
    push(trainer)


@needs_push_events
def test_a_trainer_that_pushes_each_checkpoint_before_its_audit_is_refused(
    settings: Any, policy: Any, trainer_of: Any, blocks: Any
) -> None:
    gate = {"policy": policy(ALL_PASSES), "push": "gated"}
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(gate=gate))])
    trainer.args.push_to_hub = True  # set late, so that nothing is looked up
    with pytest.raises(InputError, match=r"hub_strategy must be end under gate\.push: gated"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_transformers_that_does_not_ask_before_a_push_is_refused(
    settings: Any, policy: Any, trainer_of: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TrainerCallback, "on_push_begin", raising=False)
    gate = {"policy": policy(ALL_PASSES), "push": "gated"}
    callback = HFAuditCallback(settings(gate=gate))
    trainer = trainer_of(blocks[:40], [callback])
    with pytest.raises(InputError, match=r"gate\.push must be always where the trainer does not ask before it pushes"):
        trainer.train()


def test_a_digest_of_weights_tells_one_changed_number(tiny_model: Any) -> None:
    before = weights_digest(tiny_model)
    assert before == weights_digest(tiny_model)
    with torch.no_grad():
        tiny_model.model.norm.weight[0] += 1e-6
    assert weights_digest(tiny_model) != before
    tiny_model.bfloat16()
    assert weights_digest(tiny_model) is not None
