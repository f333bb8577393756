"""Real Lightning trainers on the tiny model: modules, rows of every kind, and a count of what really reached the model."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from oracles import count_sightings
from small_run import SETTINGS
from tiny_models import tiny_family
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from memguard.audit.items import encode_planted
from memguard.callbacks import LightningAuditCallback

PAD = 0
QUIET = [
    "ignore:.*does not have many workers.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*ended before the epoch ended.*",
    "ignore:.*module.s. in eval mode.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*LeafSpec.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*was called without a model.*",
    "ignore:.*there is no last checkpoint available.*",
    "ignore:'set_vital' is deprecated.*",
    "ignore:You are using the `dataloader_iter` step flavor.*",
    "ignore:Trying to infer the `batch_size`.*",
    "ignore:.*seems to be shuffled.*",
    "ignore:.*sampler has shuffling enabled.*",
]


# for processes that have no fixtures
SMALL: dict[str, Any] = SETTINGS | {"audit": SETTINGS["audit"] | {"full_on": [], "on_error": "raise"}}


def small_model() -> Any:
    """A Llama like the fixture's, for the same tokenizer."""
    return tiny_family("llama", vocab_size=512, max_position_embeddings=128, attention_dropout=0.1)


def module_class(namespace: str = "pytorch_lightning") -> Any:
    """A module of one of Lightning's two namespaces, around the tiny model."""

    class Module(importlib.import_module(namespace).LightningModule):  # type: ignore[misc]
        def __init__(self, model: Any, *, asks_for_steps: bool = False, loader: Any = None) -> None:
            super().__init__()
            self.model, self.asks_for_steps, self._loader = model, asks_for_steps, loader
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss_of(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss_of(batch), batch_size=8)

        def loss_of(self, batch: Any) -> Any:
            if isinstance(batch, dict) and "input_ids" not in batch:
                return sum(self.loss_of(one) for one in batch.values())
            if isinstance(batch, list) and isinstance(batch[0], dict):
                return sum(self.loss_of(one) for one in batch)
            if isinstance(batch, list) and len(batch) == 2:
                logits = self.model(batch[0]).logits
                return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
            ids = batch["input_ids"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
            return self.model(input_ids=ids, labels=ids).loss

        def configure_optimizers(self) -> Any:
            if self.asks_for_steps:
                assert self.trainer.estimated_stepping_batches > 0
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> Any:
            return self._loader() if callable(self._loader) else self._loader

    return Module


def make_trainer(folder: Path, callbacks: list[Any], *, namespace: str = "pytorch_lightning", **options: Any) -> Any:
    """A quiet trainer on one process; `options` go to `Trainer`."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(folder / "run"),
    }
    if "max_steps" not in options:
        defaults["max_epochs"] = 2
    return importlib.import_module(namespace).Trainer(callbacks=callbacks, **(defaults | options))


class Watch:
    """Counts planted secrets in the rows that a model trains on, and keeps the rows."""

    def __init__(self, model: Any, callback: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: list[list[int]] = []
        self._callback = callback
        self._needles: dict[str, tuple[int, ...]] = {}
        self.handle = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.rows.extend(ids.tolist())
        if self._callback is None:
            return
        if not self._needles:
            encoded = encode_planted(self._callback.plan, self._callback.tokenizer)
            self._needles = {one: item.ids[1 : item.end] for one, item in encoded.items()}
        self.counts.update(count_sightings(ids, self._needles))


# -- rows


class Stream(IterableDataset[Any]):
    """Rows in turn, dealt out to workers as a careful user would."""

    def __init__(self, rows: Any, repeats: int = 1) -> None:
        self.rows, self.repeats = rows, repeats

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, of = (info.id, info.num_workers) if info is not None else (0, 1)
        for _ in range(self.repeats):
            yield from self.rows[number::of]


class PlainLoader(DataLoader[Any]):
    """A user's loader with a signature of its own."""

    def __init__(self, rows: Any, how_many: int) -> None:
        super().__init__(rows, batch_size=how_many, shuffle=True, collate_fn=pad)


def pad(rows: list[Any]) -> dict[str, Any]:
    """Rows of any length as one table."""
    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)}


def to_tensors(rows: list[Any]) -> dict[str, Any]:
    """Rows of one length as a table."""
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


def rows_of(blocks: Any, kind: str, *, number: int = 61) -> list[Any]:
    """User rows: variable, fixed, tensors, pairs."""
    ids = [row["input_ids"] for row in blocks[:number]]
    if kind == "variable":
        return [{"input_ids": row[: 20 + index % 25]} for index, row in enumerate(ids)]
    if kind == "fixed":
        return [{"input_ids": row} for row in ids]
    if kind == "tensors":
        return [torch.tensor(row) for row in ids]
    return [(torch.tensor(row[:-1]), torch.tensor(row[1:])) for row in ids]


def loader_of(blocks: Any, kind: str, *, number: int = 61, of: Any = DataLoader, **options: Any) -> Any:
    """A loader over rows of a kind, shuffled unless told otherwise."""
    collate = {"variable": pad, "fixed": to_tensors}.get(kind)
    rows = rows_of(blocks, kind, number=number)
    return of(rows, **({"batch_size": 8, "shuffle": True, "collate_fn": collate} | options))


def run(
    folder: Path,
    model: Any,
    loader: Any,
    config: dict[str, Any],
    tokenizer: Any,
    *,
    target: Any = None,
    ckpt: Any = None,
    module: dict[str, Any] | None = None,
    namespace: str = "pytorch_lightning",
    extra: list[Any] | None = None,
    **options: Any,
) -> tuple[Any, Watch, Any]:
    """Train once, guarded; gives the callback, what the model saw, and the trainer."""
    pl.seed_everything(5, verbose=False)
    callback = LightningAuditCallback(config, tokenizer=tokenizer, target=target)
    trainer = make_trainer(folder, [callback, *(extra or [])], namespace=namespace, **options)
    watch = Watch(model, callback)
    given = {} if module and "loader" in module else {"train_dataloaders": loader}
    trainer.fit(module_class(namespace)(model, **(module or {})), **given, ckpt_path=ckpt)
    watch.handle.remove()
    return callback, watch, trainer


def stop_at(step: int, path: Path, namespace: str = "pytorch_lightning") -> Any:
    """A callback that saves a checkpoint after a step and ends the run there."""

    class Stop(importlib.import_module(namespace).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step and not path.exists():
                trainer.save_checkpoint(path)
                trainer.should_stop = True

    return Stop()


def seen_in(ledger: Any) -> dict[str, int]:
    """Sightings of the ledger."""
    return {one: entry.num_seen for one, entry in ledger.canaries.items() if entry.num_seen}
