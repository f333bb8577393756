"""Every planted canary reaches the model exactly as often as the ledger says, counted by a hook on the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorForLanguageModeling

from memguard.callbacks import HFAuditCallback, attach

VARIABLE, FIXED, TEXT = "variable-length rows", "fixed blocks", "raw text"


@pytest.fixture
def rows_of(blocks: Any, tokenizer: Any, corpus_text: str) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        if kind == FIXED:
            return blocks[:61]
        if kind == VARIABLE:
            return [{"input_ids": row["input_ids"][: 20 + index % 25]} for index, row in enumerate(blocks[:61])]
        return [{"text": corpus_text[index * 90 : index * 90 + 80], "source": "manual"} for index in range(61)]

    return make


def collator_for(kind: str, tokenizer: Any) -> dict[str, Any]:
    if kind == FIXED:
        return {}
    if kind == VARIABLE:
        return {"data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False)}

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
        return {**batch, "labels": batch["input_ids"].clone()}

    return {"data_collator": collate}


CASES = [
    (FIXED, "per_epoch", {}),
    (FIXED, "total", {}),
    (FIXED, "per_epoch", {"gradient_accumulation_steps": 3}),
    (FIXED, "total", {"max_steps": 9, "gradient_accumulation_steps": 2}),
    (FIXED, "total", {"num_train_epochs": 2.4, "dataloader_drop_last": True}),
    (FIXED, "per_epoch", {"dataloader_num_workers": 2}),
    (VARIABLE, "per_epoch", {}),
    (VARIABLE, "per_epoch", {"num_train_epochs": 1.5}),
    (VARIABLE, "per_epoch", {"dataloader_drop_last": True, "gradient_accumulation_steps": 2}),
    (VARIABLE, "per_epoch", {"train_sampling_strategy": "sequential"}),
    (VARIABLE, "total", {"max_steps": 11}),
    (TEXT, "per_epoch", {"remove_unused_columns": False}),
    (TEXT, "total", {"remove_unused_columns": False, "num_train_epochs": 3}),
]


@pytest.mark.parametrize(("kind", "count", "arguments"), CASES)
def test_sightings_equal_the_ledger(
    kind: str,
    count: str,
    arguments: dict[str, Any],
    rows_of: Callable[[str], Any],
    settings: Any,
    trainer_of: Any,
    seen_by: Any,
    tokenizer: Any,
) -> None:
    callback = HFAuditCallback(settings(canaries={"count": count}))
    trainer = trainer_of(rows_of(kind), [callback], trainer=collator_for(kind, tokenizer), **arguments)
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    ledger = callback.ledger(trainer.state.global_step)
    assert {one: entry.num_seen for one, entry in ledger.canaries.items()} == dict(seen)
    assert ledger.exact
    tiers = {canary.id: canary.tier for canary in callback.plan.planted()}
    if count == "total":
        assert dict(seen) == tiers
    elif "num_train_epochs" not in arguments:
        assert dict(seen) == {one: 2 * tier for one, tier in tiers.items()}


def test_plant_once_plants_canaries_once_and_positive_controls_as_often_as_ever(
    rows_of: Callable[[str], Any], settings: Any, trainer_of: Any, seen_by: Any
) -> None:
    callback = HFAuditCallback(settings(canaries={"plant_once": True}))
    trainer = trainer_of(rows_of(FIXED), [callback])
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    wanted = {one.id: 2 * (one.tier if one.role == "positive_control" else 1) for one in callback.plan.planted()}
    assert dict(seen) == wanted


def test_controls_and_coins_that_fell_out_are_never_seen(rows_of: Any, settings: Any, trainer_of: Any, seen_by: Any) -> None:
    callback = HFAuditCallback(settings(canaries={"inclusion": "coin", "tiers": {1: 12}}))
    trainer = trainer_of(rows_of(FIXED), [callback], num_train_epochs=1)
    seen, rows = seen_by(trainer.model, callback)
    trainer.train()
    out = [one for one in callback.plan.canaries if one.role == "control" and one.tier > 0]
    assert 0 < len(out) < 12
    texts = [callback.tokenizer.decode(row) for row in rows]
    assert not any(one.secret in text for one in callback.plan.canaries if one.role == "control" for text in texts)
    assert set(seen) == {one.id for one in callback.plan.planted()}


@pytest.mark.parametrize("kind", [FIXED, VARIABLE])
def test_user_rows_keep_the_order_of_the_unguarded_run_and_none_is_lost(
    kind: str, rows_of: Callable[[str], Any], settings: Any, trainer_of: Any, tokenizer: Any, tiny_model: Any
) -> None:
    def trained_rows(callbacks: list[Any]) -> list[list[int]]:
        rows: list[list[int]] = []

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if module.training:  # the pre-flight looks at the model before step 1
                rows.extend(kwargs["input_ids"].tolist())

        trainer = trainer_of(rows_of(kind), callbacks, trainer=collator_for(kind, tokenizer))
        handle = tiny_model.register_forward_pre_hook(hook, with_kwargs=True)
        trainer.train()
        handle.remove()
        return rows

    plain = trained_rows([])
    callback = HFAuditCallback(settings())
    guarded = trained_rows([callback])
    cells = [callback.guard.current.cells(epoch) for epoch in range(2)]
    length = len(callback.guard.current)
    if kind == FIXED:
        same = [a == b for a, b in zip(plain, guarded, strict=True)]
        assert [index for index, equal in enumerate(same) if not equal] == sorted(
            epoch * length + position for epoch in range(2) for position in cells[epoch]
        )
    else:
        strip = [[token for token in row if token != tokenizer.pad_token_id] for row in guarded]
        kept = [row for index, row in enumerate(strip) if index % length not in cells[index // length]]
        assert kept == [[token for token in row if token != tokenizer.pad_token_id] for row in plain]


def test_attach_is_the_same_as_the_callback_argument(rows_of: Any, settings: Any, trainer_of: Any, seen_by: Any) -> None:
    trainer = trainer_of(rows_of(FIXED), [])
    callback = attach(trainer, settings())
    assert callback.attach(trainer) is callback
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    assert callback in trainer.callback_handler.callbacks
    assert dict(seen) == {one.id: 2 * one.tier for one in callback.plan.planted()}


def test_a_config_file_is_all_a_user_needs(
    rows_of: Any, settings: Any, trainer_of: Any, tmp_path: Path, tokenizer: Any
) -> None:
    import yaml

    path = tmp_path / "memguard.yaml"
    path.write_text(yaml.safe_dump(settings(audit={"on": ["end"], "full_on": ["end"]})), encoding="utf-8")
    trainer = trainer_of(rows_of(FIXED), [HFAuditCallback(path)], num_train_epochs=1)
    trainer.train()
    plan = tmp_path / "_memguard" / "plan.json"
    assert plan.stat().st_mode & 0o777 == 0o600
    assert (plan.parent / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert (tmp_path / "out" / "memguard_audit" / "report.json").exists()


def test_a_datasets_dataset_is_taken_as_it_is(blocks: Any, settings: Any, trainer_of: Any, seen_by: Any) -> None:
    datasets = pytest.importorskip("datasets")
    for rows in (datasets.Dataset.from_list(blocks[:40]), datasets.Dataset.from_list(blocks[:40]).with_format("torch")):
        callback = HFAuditCallback(settings())
        trainer = trainer_of(rows, [callback], num_train_epochs=1)
        seen, _ = seen_by(trainer.model, callback)
        trainer.train()
        assert dict(seen) == {one.id: one.tier for one in callback.plan.planted()}


def test_one_short_last_row_makes_rows_of_their_own_and_no_crash(
    blocks: Any, settings: Any, trainer_of: Any, seen_by: Any, tokenizer: Any
) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in blocks[:40]] + [{"input_ids": blocks[40]["input_ids"][:7]}]
    callback = HFAuditCallback(settings())
    trainer = trainer_of(rows, [callback], trainer=collator_for(VARIABLE, tokenizer), num_train_epochs=1)
    seen, _ = seen_by(trainer.model, callback)
    trainer.train()
    assert callback.ledger(trainer.state.global_step).mode == "append"
    assert dict(seen) == {one.id: one.tier for one in callback.plan.planted()}


@pytest.mark.parametrize("kind", [FIXED, VARIABLE])
def test_the_trainer_logs_the_rows_of_an_epoch(kind: str, rows_of: Any, settings: Any, trainer_of: Any, tokenizer: Any) -> None:
    callback = HFAuditCallback(settings())
    trainer = trainer_of(rows_of(kind), [callback], trainer=collator_for(kind, tokenizer))
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == len(callback.guard.current)


def test_a_second_train_says_that_its_counts_begin_anew(rows_of: Any, settings: Any, trainer_of: Any) -> None:
    callback = HFAuditCallback(settings())
    trainer = trainer_of(rows_of(FIXED), [callback], num_train_epochs=1)
    trainer.train()
    assert callback.ledger(1).exact
    trainer.train()
    ledger = callback.ledger(1)
    assert not ledger.exact
    assert "an earlier train()" in ledger.notes[0]
