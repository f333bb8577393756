"""Cases of the Hugging Face matrix: what is trained on, how it is loaded, on how many ranks, whether the run is cut in two.

Each case trains a tiny model with a real trainer and counts planted canaries in a hook on the model, which knows nothing of
schedules. Run as a script under torchrun for several ranks: `hf_cases.py RESULT NAME...`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from oracles import count_sightings
from torch.utils.data import Dataset, IterableDataset
from trainer_versions import as_this_version_says
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

FORMATS = [{"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
TIERS = {1: 2, 3: 2}
CONTROL = {"in_training": {"count": 1, "repetitions": 5}}


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    `rows` names a dataset, `arguments` go to `TrainingArguments`, `cut` is the step after which the run stops and resumes;
    `keeps_order` is False where the framework itself draws another order once more rows were trained; grouped by length, each
    rank draws its own, so that rows are lost without memguard too.
    """

    name: str
    rows: str
    arguments: dict[str, Any] = field(default_factory=dict)
    count: str = "per_epoch"
    schedule: str = "uniform"
    ranks: int = 1
    cut: int | None = None
    num_rows: int = 61
    keeps_order: bool = True
    lora: bool = False
    sft: dict[str, Any] | None = None


@dataclass
class Result:
    """What a run trained on and what it said of that."""

    seen: dict[str, int]
    ledger: dict[str, int]
    insertions: dict[str, int]
    tiers: dict[str, int]
    notes: list[str]
    mode: str
    rows: list[list[int]]
    planted: list[int]
    epochs: float
    differing: int | None = None
    lost: int | None = None


class Rows(Dataset[Any]):
    """A torch dataset of tensors."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.tensor(value) for key, value in self.rows[index].items()}


class Stream(IterableDataset[Any]):
    """A torch stream; its rows are dealt out to workers in turn, as a careful user writes it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        return iter(self.rows if info is None else self.rows[info.id :: info.num_workers])


def variable(blocks: list[dict[str, list[int]]], number: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": row["input_ids"][: 20 + index % 25]} for index, row in enumerate(blocks[:number])]


def training_data(case: Case, blocks: Any, text: str, tokenizer: Any) -> Any:
    """The dataset of a case."""
    import datasets

    number = case.num_rows
    fixed, ragged = blocks[:number], variable(blocks, number)
    texts = [{"text": text[index * 90 : index * 90 + 80 + index % 7], "source": "manual"} for index in range(number)]
    kind = case.rows
    if kind == "blocks":
        return fixed
    if kind == "ragged":
        return ragged
    if kind == "ragged with labels":
        return [row | {"labels": row["input_ids"]} for row in ragged]
    if kind == "ragged with lengths":
        return datasets.Dataset.from_list([row | {"length": len(row["input_ids"])} for row in ragged])
    if kind == "text":
        return texts
    if kind == "tensors":
        return Rows(fixed)
    if kind == "datasets":
        return datasets.Dataset.from_list(fixed)
    if kind == "datasets with another column":
        return datasets.Dataset.from_list([row | {"source": "manual"} for row in ragged])
    if kind == "datasets as torch":
        return datasets.Dataset.from_list(fixed).with_format("torch")
    if kind == "with_transform":

        def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
            return {"input_ids": tokenizer(batch["text"])["input_ids"]}

        return datasets.Dataset.from_list(texts).with_transform(tokenise)
    if kind == "positions":
        return [row | {"position_ids": [*range(20), *range(28)]} for row in fixed]
    if kind == "stream of blocks":
        return Stream(fixed)
    if kind == "stream of ragged":
        return Stream(ragged)
    if kind == "short stream":
        return Stream(fixed[:13])
    if kind == "datasets stream":
        return datasets.Dataset.from_list(fixed).to_iterable_dataset(num_shards=4)
    if kind == "datasets stream of one shard":
        return datasets.Dataset.from_list(ragged).to_iterable_dataset()
    if kind == "prompt-completion":
        return datasets.Dataset.from_list([{"prompt": row["text"][:30], "completion": row["text"][30:]} for row in texts])
    if kind == "chat":
        return datasets.Dataset.from_list(
            [
                {
                    "messages": [
                        {"role": "user", "content": row["text"][:30]},
                        {"role": "assistant", "content": row["text"][30:]},
                    ]
                }
                for row in texts
            ]
        )
    if kind == "datasets of text":
        return datasets.Dataset.from_list([{"text": row["text"]} for row in texts])
    if kind == "datasets stream of text":
        return datasets.Dataset.from_list([{"text": row["text"]} for row in texts]).to_iterable_dataset()
    raise ValueError(kind)


def collator(case: Case, tokenizer: Any) -> Any:
    """What makes batches of these rows; None leaves it to the trainer."""
    if case.rows == "text":

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
            return {**batch, "labels": batch["input_ids"].clone()}

        return collate
    if "ragged" in case.rows or case.rows in (
        "with_transform",
        "datasets stream of one shard",
        "datasets with another column",
        "positions",
    ):
        if case.rows == "ragged with labels":
            from transformers import DataCollatorForSeq2Seq

            return DataCollatorForSeq2Seq(tokenizer)
        return DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return None


def settings(case: Case, folder: Path) -> dict[str, Any]:
    canaries = {
        "seed": 3,
        "formats": FORMATS,
        "tiers": TIERS,
        "controls": 6,
        "positive_control": CONTROL,
        "max_share": 0.9,
        "count": case.count,
        "schedule": case.schedule,
    }
    audit = {"every": None, "on": [], "prior_aware": {"prefixes": 16}}
    return {"plan": str(folder / "plan" / "plan.json"), "canaries": canaries, "audit": audit, "tracking": {"wandb": "off"}}


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends the first part of a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def make_trainer(case: Case, folder: Path, data: Any, model: Any, tokenizer: Any, callbacks: list[Any]) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 8 // case.ranks,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    } | case.arguments
    arguments = as_this_version_says(arguments)
    if case.cut is not None:
        arguments |= {"save_strategy": "steps", "save_steps": case.cut}
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    if case.sft is not None:
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            model,
            SFTConfig(**({"max_length": 64, "loss_type": "nll"} | arguments | case.sft)),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    return Trainer(
        model,
        TrainingArguments(**arguments),
        train_dataset=data,
        data_collator=collator(case, tokenizer),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def train(case: Case, folder: Path, model: Any, tokenizer: Any, blocks: Any, text: str, *, guarded: bool) -> Result:
    """Train as the case says, in one or two parts, and count."""
    from memguard.audit.items import encode_planted
    from memguard.callbacks import HFAuditCallback

    seen: Counter[str] = Counter()
    rows: list[list[int]] = []
    planted: list[int] = []
    if case.rows == "chat":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = CHAT_TEMPLATE
    callback, needles = None, dict[str, tuple[int, ...]]()
    for part in ("first", "second") if case.cut is not None else ("whole",):
        callback = HFAuditCallback(settings(case, folder)) if guarded else None
        extra = [StopAt(case.cut)] if part == "first" and case.cut is not None else []
        held = copy.deepcopy(model)
        data = training_data(case, blocks, text, tokenizer)
        trainer = make_trainer(case, folder, data, held, tokenizer, [*([callback] if callback else []), *extra])

        def hook(module: Any, args: Any, kwargs: Any, callback: Any = callback) -> None:
            if not module.training:
                return
            if callback is not None:
                if not needles:
                    encoded = encode_planted(callback.plan, callback.tokenizer)
                    needles.update({one: item.ids[1 : item.end] for one, item in encoded.items()})
                for row in kwargs["input_ids"]:
                    found = count_sightings(row[None], needles)
                    seen.update(found)
                    planted.append(sum(found.values()))
            rows.extend(kwargs["input_ids"].tolist())

        innermost = next(module for module in held.modules() if type(module).__name__ == "LlamaModel")  # some call it alone
        innermost.register_forward_pre_hook(hook, with_kwargs=True)
        trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{case.cut}") if part == "second" else None)
    if callback is None:
        return Result({}, {}, {}, {}, [], "", rows, [], trainer.state.epoch)
    ledger = callback.ledger(trainer.state.global_step)
    return Result(
        seen={one: seen[one] for one in ledger.canaries},
        ledger={one: entry.num_seen for one, entry in ledger.canaries.items()},
        insertions={one: entry.num_insertions for one, entry in ledger.canaries.items()},
        tiers={canary.id: canary.tier for canary in callback.plan.planted()},
        notes=ledger.notes,
        mode=ledger.mode,
        rows=rows,
        planted=planted,
        epochs=trainer.state.epoch,
    )


def all_ranks(result: Result) -> Result:
    """The same with the sightings of every rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return result
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, result.seen)
    together: Counter[str] = Counter()
    for one in found:
        together.update(one)
    result.seen = {one: together[one] for one in result.ledger}
    return result


def compare_rows(case: Case, result: Result, plain: Result, data: Any) -> None:
    """Over all ranks: rows that differ from the unguarded run's, place by place; or, where canaries are rows of their own, how
    many user rows were seen less often than there were epochs."""
    import torch.distributed as dist

    if result.mode == "splice":
        differing = sum(a != b for a, b in zip(result.rows, plain.rows, strict=True))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, differing)
        result.differing = sum(found)
    elif result.mode == "append" and not case.arguments.get("dataloader_drop_last"):
        user = [tuple(row) for row, planted in zip(result.rows, result.planted, strict=True) if not planted]
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, user)
        seen = Counter(tuple(one for one in row if one != 0) for rows in found for row in rows)
        wanted = Counter(tuple(one for one in row["input_ids"] if one != 0) for row in data)
        result.lost = sum(seen[row] < number * int(result.epochs) for row, number in wanted.items())


BLOCKS, RAGGED, TEXT = "blocks", "ragged", "text"
MAP_CASES = [
    Case("blocks", BLOCKS),
    Case("blocks, workers", BLOCKS, {"dataloader_num_workers": 2}),
    Case("blocks, persistent workers", BLOCKS, {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
    Case("blocks, drop_last", BLOCKS, {"dataloader_drop_last": True}),
    Case("blocks, accumulation", BLOCKS, {"gradient_accumulation_steps": 3}),
    Case("blocks, total", BLOCKS, count="total"),
    Case("blocks, total, early", BLOCKS, count="total", schedule="early", num_rows=120),
    Case("blocks, total, late", BLOCKS, count="total", schedule="late", num_rows=120),
    Case("blocks, total, max_steps, accumulation", BLOCKS, {"max_steps": 9, "gradient_accumulation_steps": 2}, count="total"),
    Case(
        "blocks, total, part of an epoch, drop_last", BLOCKS, {"num_train_epochs": 2.4, "dataloader_drop_last": True}, "total"
    ),
    Case("blocks, resumed", BLOCKS, cut=11),
    Case("blocks, resumed, accumulation", BLOCKS, {"gradient_accumulation_steps": 3}, cut=4),
    Case("blocks, resumed, workers", BLOCKS, {"dataloader_num_workers": 2}, cut=3),
    Case("blocks, resumed, drop_last", BLOCKS, {"dataloader_drop_last": True}, cut=10),
    Case("blocks, resumed, total", BLOCKS, {"num_train_epochs": 1.5}, count="total", cut=5),
    Case("blocks, resumed at an epoch's end", BLOCKS, cut=8),
    Case("blocks, LoRA", BLOCKS, lora=True),
    Case("blocks, LoRA, resumed", BLOCKS, cut=5, lora=True),
    Case("tensors", "tensors"),
    Case("tensors, sequential", "tensors", {"train_sampling_strategy": "sequential"}),
    Case("positions of packed documents", "positions"),
    Case("datasets", "datasets"),
    Case("datasets, workers, resumed", "datasets", {"dataloader_num_workers": 2}, cut=9),
    Case("datasets as torch", "datasets as torch"),
    Case("datasets with another column", "datasets with another column"),
    Case("ragged", RAGGED),
    Case("ragged, part of an epoch", RAGGED, {"num_train_epochs": 1.5}),
    Case(
        "ragged, drop_last, accumulation",
        RAGGED,
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2, "num_train_epochs": 1},
    ),
    Case("ragged, sequential", RAGGED, {"train_sampling_strategy": "sequential"}),
    Case("ragged, workers", RAGGED, {"dataloader_num_workers": 2}),
    Case("ragged, total, max_steps", RAGGED, {"max_steps": 11}, count="total"),
    Case("ragged, resumed", RAGGED, cut=12),
    Case("ragged, resumed, total", RAGGED, {"max_steps": 13}, count="total", cut=7),
    Case("ragged, grouped by length", RAGGED, {"train_sampling_strategy": "group_by_length"}, keeps_order=False),
    Case(
        "ragged, grouped by length, resumed", RAGGED, {"train_sampling_strategy": "group_by_length"}, cut=5, keeps_order=False
    ),
    Case(
        "ragged with lengths, grouped", "ragged with lengths", {"train_sampling_strategy": "group_by_length"}, keeps_order=False
    ),
    Case("ragged with labels", "ragged with labels"),
    Case("text", TEXT, {"remove_unused_columns": False}),
    Case("text, workers", TEXT, {"remove_unused_columns": False, "dataloader_num_workers": 2}),
    Case("text, total", TEXT, {"remove_unused_columns": False}, count="total"),
    Case("text, resumed", TEXT, {"remove_unused_columns": False}, cut=3),
    Case("with_transform", "with_transform", {"remove_unused_columns": False}),
]
STREAM_CASES = [
    Case("stream of blocks", "stream of blocks", {"max_steps": 12}),
    Case("stream of blocks, early", "stream of blocks", {"max_steps": 16}, count="total", schedule="early"),
    Case("stream of blocks, workers", "stream of blocks", {"max_steps": 12, "dataloader_num_workers": 2}, keeps_order=False),
    Case("stream of blocks, accumulation", "stream of blocks", {"max_steps": 7, "gradient_accumulation_steps": 2}),
    Case("stream of blocks, resumed", "stream of blocks", {"max_steps": 12}, cut=5),
    Case("short stream that begins again", "short stream", {"max_steps": 9}),
    Case("short stream that begins again, resumed", "short stream", {"max_steps": 9}, cut=4),
    Case("stream of ragged", "stream of ragged", {"max_steps": 12}),
    Case("stream of ragged, resumed", "stream of ragged", {"max_steps": 12}, cut=7),
    Case("datasets stream", "datasets stream", {"max_steps": 12}),
    Case("datasets stream, workers", "datasets stream", {"max_steps": 12, "dataloader_num_workers": 2}, keeps_order=False),
    Case(
        "datasets stream, more workers than shards",
        "datasets stream of one shard",
        {"max_steps": 10, "dataloader_num_workers": 2},
    ),
    Case("datasets stream, resumed", "datasets stream", {"max_steps": 12}, cut=5),
]
SFT_CASES = [
    Case("SFT, text", "datasets of text", sft={}),
    Case("SFT, text, LoRA", "datasets of text", sft={}, lora=True),
    Case("SFT, padding-free", "datasets of text", sft={"padding_free": True, "max_length": None}),
    Case("SFT, packed bfd", "datasets of text", sft={"packing": True, "packing_strategy": "bfd"}),
    Case("SFT, packed wrapped", "datasets of text", sft={"packing": True, "packing_strategy": "wrapped"}),
    Case("SFT, prompt-completion", "prompt-completion", sft={}),
    Case("SFT, completion-only loss", "prompt-completion", sft={"completion_only_loss": True}),
    Case("SFT, chat", "chat", sft={}),
    Case("SFT, text, resumed", "datasets of text", sft={}, cut=5),
    Case("SFT, packed bfd, resumed", "datasets of text", sft={"packing": True, "packing_strategy": "bfd"}, cut=5),
    Case("SFT, stream", "datasets stream of text", {"max_steps": 8}, sft={}),
    Case(
        "SFT, stream, packed wrapped",
        "datasets stream of text",
        {"max_steps": 5},
        sft={"packing": True, "packing_strategy": "wrapped"},
    ),
]
RANK_CASES = [
    Case("2 ranks, blocks", BLOCKS, ranks=2),
    Case("2 ranks, even rows", BLOCKS, ranks=2, num_rows=64),
    Case("2 ranks, drop_last", BLOCKS, {"dataloader_drop_last": True}, ranks=2),
    Case("2 ranks, workers", BLOCKS, {"dataloader_num_workers": 1}, ranks=2),
    Case("2 ranks, ragged", RAGGED, ranks=2),
    Case("2 ranks, ragged, accumulation", RAGGED, {"gradient_accumulation_steps": 2}, ranks=2),
    Case("2 ranks, ragged, grouped", RAGGED, {"train_sampling_strategy": "group_by_length"}, ranks=2, keeps_order=False),
    Case("2 ranks, split_batches", BLOCKS, {"accelerator_config": {"split_batches": True}}, ranks=2),
    Case("2 ranks, dispatch_batches", BLOCKS, {"accelerator_config": {"dispatch_batches": True}}, ranks=2),
    Case(
        "2 ranks, dispatch_batches, drop_last",
        BLOCKS,
        {"accelerator_config": {"dispatch_batches": True}, "dataloader_drop_last": True},
        ranks=2,
    ),
    Case("2 ranks, total, max_steps", BLOCKS, {"max_steps": 11}, count="total", ranks=2),
    Case("2 ranks, LoRA", BLOCKS, ranks=2, lora=True),
    Case("2 ranks, resumed", BLOCKS, ranks=2, cut=5),
    Case("2 ranks, ragged, resumed", RAGGED, ranks=2, cut=11),
    Case("2 ranks, resumed, total", BLOCKS, {"num_train_epochs": 1.5}, count="total", ranks=2, cut=5),
    Case("2 ranks, stream", "stream of blocks", {"max_steps": 12}, ranks=2),
    Case(
        "2 ranks, stream, sharded by rank",
        "stream of blocks",
        {"max_steps": 12, "accelerator_config": {"dispatch_batches": False}},
        ranks=2,
    ),
    Case("2 ranks, stream, resumed", "stream of blocks", {"max_steps": 12}, ranks=2, cut=5),
    Case("2 ranks, datasets stream", "datasets stream", {"max_steps": 12}, ranks=2),
    Case(
        "2 ranks, datasets stream, sharded by rank",
        "datasets stream",
        {"max_steps": 12, "accelerator_config": {"dispatch_batches": False}},
        ranks=2,
    ),
    Case(
        "2 ranks, stream, split_batches",
        "stream of blocks",
        {"max_steps": 12, "accelerator_config": {"split_batches": True}},
        ranks=2,
    ),
    Case("2 ranks, stream, workers", "stream of blocks", {"max_steps": 12, "dataloader_num_workers": 2}, ranks=2),
]
CASES = {case.name: case for case in (*MAP_CASES, *STREAM_CASES, *SFT_CASES, *RANK_CASES)}


def main(result: Path, parts: Path, names: list[str]) -> None:
    """Under torchrun: train each named case and write what all ranks saw."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    held = torch.load(parts, weights_only=False)
    found = {}
    for index, name in enumerate(names):
        folder = result.parent / f"case-{index}"
        case, parts_of_run = CASES[name], (held["model"], held["tokenizer"], held["blocks"], held["text"])
        outcome = all_ranks(train(case, folder, *parts_of_run, guarded=True))
        if case.cut is None and "stream" not in case.rows:
            plain = train(case, folder / "plain", *parts_of_run, guarded=False)
            data = training_data(case, held["blocks"], held["text"], held["tokenizer"])
            compare_rows(case, outcome, plain, data)
        outcome.rows = outcome.planted = []
        found[name] = vars(outcome)
        dist.barrier()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
