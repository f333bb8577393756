"""Ways of training that are neither plain nor in the matrix: each is supported, flagged in the ledger or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from memguard.callbacks import HFAuditCallback
from memguard.canaries.ledger import load_ledger
from memguard.errors import CanaryError

trl_warns = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def saved(model: Any, folder: Path) -> Any:
    """The model as loaded from a folder: these trainers load its reference from the same place."""
    model.save_pretrained(folder / "model")
    return type(model).from_pretrained(folder / "model")


@trl_warns
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_that_sample_their_own_texts_are_refused(
    name: str, settings: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    config = getattr(trl, f"{name}Config")(**arguments(tmp_path), num_generations=2, max_completion_length=8)
    trainer = getattr(trl, f"{name}Trainer")(
        model=saved(tiny_model, tmp_path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "The access"}] * 8),
        processing_class=tokenizer,
        callbacks=[HFAuditCallback(settings())],
    )
    with pytest.raises(CanaryError, match=f"{name}Trainer trains on completions it samples itself"):
        trainer.train()


@trl_warns
def test_trainers_that_compare_answers_are_refused(settings: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "The access", "chosen": " number", "rejected": " code"}] * 8
    trainer = trl.DPOTrainer(
        model=saved(tiny_model, tmp_path),
        args=trl.DPOConfig(**arguments(tmp_path)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[HFAuditCallback(settings())],
    )
    with pytest.raises(CanaryError, match="DPOTrainer trains on pairs or ratings of answers"):
        trainer.train()


def test_a_sampler_that_repeats_rows_is_refused(settings: Any, trainer_of: Any, blocks: Any) -> None:
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings())])
    trainer._get_train_sampler = lambda *_: SequentialSampler(range(80))
    with pytest.raises(CanaryError, match="must give every row once an epoch, got 80 indices for 40 rows"):
        trainer.train()


def test_a_second_callback_on_one_trainer_is_refused(settings: Any, trainer_of: Any, blocks: Any) -> None:
    with pytest.raises(CanaryError, match="a trainer takes one HFAuditCallback, got two"):
        trainer_of(blocks[:40], [HFAuditCallback(settings()), HFAuditCallback(settings())])


def test_two_trainers_with_a_callback_each_do_not_meet(settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any) -> None:
    plans = [settings(), settings(canaries={"seed": 4})]
    plans[1]["plan"] = plans[1]["plan"].replace("plan.json", "other.json")
    callbacks = [HFAuditCallback(one) for one in plans]
    trainers = [trainer_of(blocks[:40], [one], model=copy.deepcopy(tiny_model), num_train_epochs=1) for one in callbacks]
    for trainer in trainers:
        trainer.train()
    assert callbacks[0].plan != callbacks[1].plan
    assert all(one.ledger(5).exact for one in callbacks)


class AsksForALoader(TrainerCallback):  # type: ignore[misc]
    """Looks at the training loader in the middle of a run."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            next(iter(self.trainer.get_train_dataloader()))


@pytest.mark.parametrize("count", ["per_epoch", "total"])
def test_a_loader_that_somebody_asks_for_in_training_ends_nothing(
    count: str, settings: Any, trainer_of: Any, blocks: Any, seen_by: Any, tmp_path: Path
) -> None:
    asks = AsksForALoader()
    callback = HFAuditCallback(settings(canaries={"count": count}, audit={"every": {"steps": 2}, "on": ["end"]}))
    trainer = trainer_of(blocks[:61], [callback, asks], save_strategy="steps", save_steps=4)
    asks.trainer = trainer
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    ledger = callback.ledger(trainer.state.global_step)
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == {one: seen[one] for one in ledger.canaries}
    assert ledger.exact
    reports = sorted((tmp_path / "out" / "memguard_audit" / "reports").iterdir())
    assert [int(path.stem.removeprefix("step-")) for path in reports] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert (tmp_path / "out" / "checkpoint-16" / "memguard_ledger.json").exists()
    last = callback.auditor.last
    next(iter(trainer.get_train_dataloader()))  # nor one after it
    assert callback.auditor.last is last
    assert callback.ledger(trainer.state.global_step) == ledger


def test_a_row_too_short_to_write_into_costs_no_run(settings: Any, trainer_of: Any, blocks: Any, seen_by: Any) -> None:
    rows = [row if index != 9001 else {key: ids[:6] for key, ids in row.items()} for index, row in enumerate(blocks * 60)]
    rows = rows[:9100]
    assert len({len(row["input_ids"]) for row in rows}) == 2
    callback = HFAuditCallback(settings(canaries={"tiers": {1: 2, 3: 2}}))
    trainer = trainer_of(rows, [callback], max_steps=1, per_device_train_batch_size=1, train_sampling_strategy="sequential")
    trainer.get_train_dataloader()
    assert callback.guard.planting.mode == "splice"
    dataset = callback._built.dataset
    row = dataset[len(rows) + 9001]  # the first canary in the short row
    assert len(row["input_ids"]) == len(callback.guard.planting.ids[0])


class StopEarly(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize(("count", "exact"), [("per_epoch", True), ("total", False)])
def test_a_run_that_stops_early_says_so_where_totals_were_promised(
    count: str, exact: bool, settings: Any, trainer_of: Any, blocks: Any, seen_by: Any
) -> None:
    callback = HFAuditCallback(settings(canaries={"count": count}))
    trainer = trainer_of(blocks[:40], [callback, StopEarly()])
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    ledger = callback.ledger(trainer.state.global_step)
    assert trainer.state.global_step == 3
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == {one: seen[one] for one in ledger.canaries}
    assert ledger.exact == exact
    assert ledger.notes == ([] if exact else ["the run stopped at step 3 of 10: the planned totals were not reached."])


def test_a_plan_whose_every_coin_said_out_trains_on_as_it_is(settings: Any, trainer_of: Any, blocks: Any) -> None:
    for seed in range(200):
        coins = {"inclusion": "coin", "tiers": {1: 2}, "positive_control": None, "seed": seed}
        callback = HFAuditCallback(settings(canaries=coins, audit={"on": ["end"]}))
        trainer = trainer_of(blocks[:40], [callback], max_steps=1)
        loader = trainer.get_train_dataloader()
        if not callback.plan.planted():
            break
    trainer.train()
    assert len(loader) == 5
    assert callback.ledger(1).canaries == {}
    assert callback.auditor.last is not None


def test_a_batch_size_that_is_searched_for_is_flagged(settings: Any, trainer_of: Any, blocks: Any) -> None:
    callback = HFAuditCallback(settings())
    trainer = trainer_of(blocks[:40], [callback], num_train_epochs=1, auto_find_batch_size=True)
    trainer.train()
    assert callback.ledger(1).notes == ["auto_find_batch_size may train some rows twice."]


def test_data_that_are_not_skipped_on_resume_are_flagged(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    trainer_of(blocks[:40], [HFAuditCallback(settings())], **options).train()
    callback = HFAuditCallback(settings())
    trainer = trainer_of(blocks[:40], [callback], ignore_data_skip=True, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert "ignore_data_skip" in callback.ledger(5).notes[0]


def test_sightings_are_counted_in_the_model_where_asked_for_and_disagreement_is_told(
    settings: Any, trainer_of: Any, blocks: Any, seen_by: Any, tmp_path: Path
) -> None:
    callback = HFAuditCallback(settings(canaries={"verify": True}))
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    trainer = trainer_of(blocks[:40], [callback], **options)
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    ledger = callback.ledger(5)
    assert (ledger.verified, ledger.exact) == (True, True)
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == dict(seen)
    again = HFAuditCallback(settings(canaries={"verify": True}))
    trainer = trainer_of(blocks[:40], [again], **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    resumed = again.ledger(5)
    assert (resumed.verified, resumed.exact) == (True, True)
    assert resumed.canaries == ledger.canaries
    saved = load_ledger(tmp_path / "out" / "checkpoint-3" / "memguard_ledger.json")
    assert 0 < sum(entry.num_seen for entry in saved.canaries.values()) < sum(seen.values())

    forgetful = HFAuditCallback(settings(canaries={"verify": True}))
    trainer = trainer_of(
        blocks[:40],
        [forgetful],
        num_train_epochs=1,
        trainer={"data_collator": Forgetful()},
    )
    trainer.train()
    wrong = forgetful.ledger(5)
    assert not wrong.exact
    assert "canaries were seen another number of times than planned" in wrong.notes[0]


class Forgetful:
    """A collator that loses half of the rows of a whole batch."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        kept = rows[: max(1, len(rows) // 2)]
        ids = torch.tensor([row["input_ids"] for row in kept])
        return {"input_ids": ids, "labels": ids.clone()}


@trl_warns
def test_a_transform_under_supervised_fine_tuning_is_the_trainers_own_refusal(
    settings: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "The access number."}] * 8)
    rows = rows.with_transform(lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]})
    with pytest.raises(ValueError, match="transform"):
        trl.SFTTrainer(
            tiny_model,
            trl.SFTConfig(**arguments(tmp_path)),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[HFAuditCallback(settings())],
        )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_on_a_quantised_base_is_planted_for_and_audited(
    bits: int, settings: Any, trainer_of: Any, blocks: Any, seen_by: Any, tiny_model: Any, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_model.save_pretrained(tmp_path / "model")
    wanted = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trained = []
    for audit in ({"on": ["start", "end"], "every": {"steps": 2}, "full_on": ["end"]}, {}):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=wanted, device_map="cpu")
        callback = HFAuditCallback(settings(audit=audit))
        torch.manual_seed(1)
        trainer = trainer_of(blocks[:40], [callback], model=peft.get_peft_model(base, adapter), num_train_epochs=1)
        seen, _ = seen_by(base, callback)
        trainer.train()
        assert dict(seen) == {one.id: one.tier for one in callback.plan.planted()}
        assert callback.ledger(5).exact
        assert (callback.auditor.last is not None) == bool(audit)
        trained.append({name: value.clone() for name, value in trainer.model.named_parameters() if value.requires_grad})
        if audit:
            assert (callback.auditor.last.status, callback.auditor.last.subject.global_step) == ("valid", 5)
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
