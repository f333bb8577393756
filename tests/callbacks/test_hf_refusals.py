"""What cannot work stops before step 1, in one sentence, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from memguard.callbacks import HFAuditCallback
from memguard.canaries.ledger import LEDGER_NAME
from memguard.canaries.plan import load_plan
from memguard.errors import CanaryError, InputError


def steps_done(trainer: Any) -> int:
    return int(trainer.state.global_step)


def refuse(trainer: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        trainer.train()
    assert steps_done(trainer) == 0
    assert not (tmp_path / "_memguard").exists()
    assert not (tmp_path / "out" / "memguard_audit").exists()


def test_a_canary_longer_than_the_block(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    rows = [{key: ids[:12] for key, ids in row.items()} for row in blocks[:20]]
    trainer = trainer_of(rows, [HFAuditCallback(settings())])
    refuse(trainer, CanaryError, "must fit in the block of 12 tokens; 5 of 5 do not", tmp_path)


def test_a_canary_longer_than_the_model_takes(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"][: 3 + index % 2]} for index, row in enumerate(blocks[:20])]
    template = "word " * 120 + "{secret}."
    formats = [{"name": "pin", "template": template, "secret": {"kind": "digits", "length": 9}}]
    trainer = trainer_of(rows, [HFAuditCallback(settings(canaries={"formats": formats}))])
    refuse(trainer, CanaryError, "must fit in the longest row the model takes of 128 tokens", tmp_path)


def test_an_empty_dataset(settings: Any, trainer_of: Any, tmp_path: Path) -> None:
    refuse(trainer_of([], [HFAuditCallback(settings())]), CanaryError, "must hold at least one row, got none", tmp_path)


def test_a_share_above_the_limit_names_a_smaller_plan(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [HFAuditCallback(settings(canaries={"max_share": 0.01, "tiers": {1: 4, 50: 8}}))])
    refuse(trainer, CanaryError, r"at most 1.00% of the training tokens.*A plan that fits: tiers \{1: 4\}", tmp_path)


def test_a_plan_inside_the_output_dir(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [HFAuditCallback(settings(plan=str(tmp_path / "out" / "plan.json")))])
    refuse(trainer, InputError, "push_to_hub would upload its secrets", tmp_path)


def test_a_plan_under_memguard_in_the_output_dir_is_let_through(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    path = tmp_path / "out" / "_memguard" / "plan.json"
    trainer_of(blocks[:20], [HFAuditCallback(settings(plan=str(path)))], num_train_epochs=1).train()
    assert load_plan(path).reproducible


def test_a_plan_for_another_tokenizer(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    guard = HFAuditCallback(settings())
    trainer_of(blocks[:20], [guard], num_train_epochs=1).train()
    other = guard.plan.model_copy(update={"tokenizer_digest": "0" * 64})
    other.save(tmp_path / "_memguard" / "plan.json", overwrite=True)
    trainer = trainer_of(blocks[:20], [HFAuditCallback(settings())])
    with pytest.raises(InputError, match="made for another tokenizer"):
        trainer.train()
    assert steps_done(trainer) == 0


PIN = {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tiers": {2: 2}}, "numbers of canaries, controls or repetitions"),
        ({"tiers": {1: 2, 3: 3}}, "numbers of canaries, controls or repetitions"),
        ({"controls": 7}, "numbers of canaries, controls or repetitions"),
        ({"positive_control": None}, "numbers of canaries, controls or repetitions"),
        ({"inclusion": "coin"}, "inclusion"),
        ({"seed": None}, "seed"),
        ({"formats": [PIN | {"name": "other"}]}, "formats"),
        ({"formats": [PIN | {"secret": {"kind": "digits", "length": 10}}]}, "format 'pin'"),
        ({"formats": [PIN | {"template": "Another number is {secret}."}]}, "format 'pin'"),
    ],
)
def test_a_plan_drawn_from_other_settings_is_never_used_in_silence(
    change: dict[str, Any], what: str, settings: Any, trainer_of: Any, blocks: Any
) -> None:
    trainer_of(blocks[:40], [HFAuditCallback(settings())], num_train_epochs=1, max_steps=1).train()
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(canaries=change))])
    with pytest.raises(InputError, match=f"drawn from other settings than the config holds: {what}"):
        trainer.train()
    trainer_of(blocks[:40], [HFAuditCallback(settings())], num_train_epochs=1, max_steps=1).train()


def cutting(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that truncates, as a maximum length does."""
    ids = torch.tensor([row["input_ids"][:8] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def masking(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that keeps only the last label, as training on completions may."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = torch.full_like(ids, -100)
    labels[:, -1] = ids[:, -1]
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("collator", "match"),
    [
        (cutting, "5 of 5 checked will not.\n5 at step '(stream|tokens)'"),
        (masking, "5 at step 'supervised', masked out of the labels"),
    ],
)
def test_a_collator_that_keeps_canaries_from_the_loss(
    collator: Any, match: str, settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings())], trainer={"data_collator": collator})
    refuse(trainer, CanaryError, match, tmp_path)
    warned = HFAuditCallback(settings(canaries={"on_preflight_failure": "warn"}))
    trainer_of(blocks[:40], [warned], trainer={"data_collator": collator}, max_steps=1).train()
    assert warned.ledger(1).notes == ["5 of 5 canaries will not reach the loss."]


def test_a_model_with_nothing_to_train(settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path) -> None:
    for parameter in tiny_model.parameters():
        parameter.requires_grad_(False)
    refuse(trainer_of(blocks[:40], [HFAuditCallback(settings())]), CanaryError, "5 at step 'gradient'", tmp_path)


def test_a_place_that_cannot_be_written_to_is_named_before_step_one(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(plan=str(tmp_path / "file" / "plan.json")))])
    with pytest.raises(InputError, match="plan.json' cannot be written|plan.json' cannot be read"):
        trainer.train()
    assert steps_done(trainer) == 0


def test_a_config_that_is_none_of_the_three_kinds() -> None:
    with pytest.raises(TypeError, match="config must be a path, a dictionary or an AuditConfig, got NoneType"):
        HFAuditCallback(None)  # type: ignore[arg-type]


def test_a_callback_added_after_the_trainer_was_built(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [])
    trainer.add_callback(HFAuditCallback(settings()))
    refuse(trainer, CanaryError, "built without memguard, so no canary would be planted", tmp_path)


def test_a_trainer_with_a_loader_of_its_own(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [])
    trainer.get_train_dataloader = lambda: DataLoader(blocks, batch_size=4)  # type: ignore[arg-type]
    HFAuditCallback(settings()).attach(trainer)
    refuse(trainer, CanaryError, "builds its training loader from something else than train_dataset", tmp_path)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield {"input_ids": [1, 2, 3]}


class GoesOn(Stream):
    """Stored iterators, told apart by nothing but what they give next."""

    def __init__(self, *, through_a_generator: bool) -> None:
        self.rows = iter([{"input_ids": [1, 2, number]} for number in range(600)])
        self.through_a_generator = through_a_generator

    def __iter__(self) -> Any:
        return (row for row in self.rows) if self.through_a_generator else self.rows


class OnlyOnce(Stream):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return {"input_ids": [1, 2, 3]}


def test_batches_without_an_index_sampler(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [HFAuditCallback(settings())], train_sampling_strategy="batch_rebalance")
    refuse(trainer, CanaryError, "'batch_rebalance' makes batches without an index sampler", tmp_path)


def test_streams_that_cannot_be_planned_for(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    trainer = trainer_of(OnlyOnce(), [HFAuditCallback(settings())], max_steps=3)
    refuse(trainer, CanaryError, "got one that goes on", tmp_path)
    for through in (False, True):
        trainer = trainer_of(GoesOn(through_a_generator=through), [HFAuditCallback(settings())], max_steps=3)
        refuse(trainer, CanaryError, "got one that goes on", tmp_path)
    trainer = trainer_of(blocks[:3], [HFAuditCallback(settings())])
    trainer.train_dataset = Stream()
    refuse(trainer, CanaryError, "a stream needs max_steps", tmp_path)
    split = split_dataset_by_node(datasets.Dataset.from_list(blocks).to_iterable_dataset(), 0, 2)
    trainer = trainer_of(split, [HFAuditCallback(settings())], max_steps=3)
    refuse(trainer, CanaryError, "the stream is split over ranks already", tmp_path)


def test_rows_without_ids(settings: Any, trainer_of: Any, tmp_path: Path) -> None:
    strange = [{"pixels": [1.0]} for _ in range(8)]
    refuse(
        trainer_of(strange, [HFAuditCallback(settings())]),
        CanaryError,
        "must hold 'input_ids' or raw 'text', got pixels",
        tmp_path,
    )


def test_a_trainer_without_a_tokenizer(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer = trainer_of(blocks, [HFAuditCallback(settings())], trainer={"processing_class": None})
    refuse(trainer, InputError, "memguard needs the tokenizer", tmp_path)


def test_a_resumed_run_whose_plan_is_gone(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer_of(blocks[:40], [HFAuditCallback(settings())], save_strategy="steps", save_steps=3, num_train_epochs=1).train()
    (tmp_path / "_memguard" / "plan.json").unlink()
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings())], save_strategy="steps", save_steps=3)
    with pytest.raises(InputError, match="is missing, but the run resumes at step 3"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert not (tmp_path / "_memguard" / "plan.json").exists()


def test_a_resumed_run_whose_first_part_has_no_ledger_says_so(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    trainer_of(blocks[:40], [HFAuditCallback(settings())], save_strategy="steps", save_steps=3, num_train_epochs=1).train()
    (tmp_path / "out" / "checkpoint-3" / LEDGER_NAME).unlink()
    guard = HFAuditCallback(settings())
    trainer = trainer_of(blocks[:40], [guard], num_train_epochs=1)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    ledger = guard.ledger(trainer.state.global_step)
    assert not ledger.exact
    assert "without a ledger" in ledger.notes[0]


@pytest.mark.parametrize(
    ("count", "change", "what"),
    [
        ("per_epoch", {"per_device_train_batch_size": 4}, "rows_per_batch"),
        ("per_epoch", {"gradient_accumulation_steps": 2}, "accumulation"),
        ("per_epoch", {"num_train_epochs": 2}, None),
        ("per_epoch", {"dataloader_drop_last": True}, "drop_last"),
        ("total", {"num_train_epochs": 2}, "max_steps"),
    ],
)
def test_a_resumed_run_with_another_clock_says_so(
    count: str, change: dict[str, Any], what: str | None, settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    chosen = settings(canaries={"count": count})
    first = trainer_of(blocks[:40], [HFAuditCallback(chosen)], save_strategy="steps", save_steps=3, num_train_epochs=1)
    first.train()
    guard = HFAuditCallback(chosen)
    trainer = trainer_of(blocks[:40], [guard], **({"num_train_epochs": 1} | change))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    ledger = guard.ledger(trainer.state.global_step)
    if what == "rows_per_batch" and ledger.rows_per_batch == 8:
        pytest.skip("this transformers resumes with the batch size of the checkpoint")
    assert ledger.notes == ([f"the run resumed with another {what}: cells moved."] if what else [])
    assert ledger.exact == (what is None)
