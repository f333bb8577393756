"""What canaries cannot be planted or counted in is refused at the start of a Lightning run, in a sentence with the way out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_cases import (
    QUIET,
    Stream,
    Watch,
    loader_of,
    make_trainer,
    module_class,
    pad,
    rows_of,
    run,
    stop_at,
    to_tensors,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import memguard.callbacks
from memguard.callbacks import LightningAuditCallback
from memguard.callbacks.lightning_loader import read_facts
from memguard.callbacks.lightning_passes import LoaderFacts, order_of_rows
from memguard.callbacks.lightning_trainer import find_model
from memguard.errors import CanaryError, InputError, MissingExtraError

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]


class ByLength(BatchSampler):
    """A batch sampler that places rows itself."""


@pytest.fixture
def train(tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path) -> Callable[..., Any]:
    def start(loader: Any, **options: Any) -> Any:
        config = options.pop("config", None) or settings()
        return run(tmp_path, tiny_model, loader, config, tokenizer, **options)

    return start


def batched_by_hand(blocks: Any) -> Any:
    rows = rows_of(blocks, "variable")
    return DataLoader(rows, batch_sampler=ByLength(SequentialSampler(rows), 8, False), collate_fn=pad)


class Tables(Stream):
    """A stream of whole batches."""


LOADERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "a list of batches": (lambda blocks: iter([1]), {}, "must be a torch DataLoader, got .*iterator"),
    "no batches": (
        lambda blocks: DataLoader([to_tensors(rows_of(blocks, "fixed")[:8])] * 4, batch_size=None),
        {},
        r"must make batches of the user's rows, got one that makes no batches of rows \(batch_size=None\)",
    ),
    "a batch sampler": (
        batched_by_hand,
        {},
        "must cut batches from an index sampler, got batch_sampler ByLength, which places",
    ),
    "overfitting": (lambda blocks: loader_of(blocks, "fixed"), {"overfit_batches": 2}, "overfit_batches repeats a few batches"),
    "an accumulation that changes": (
        lambda blocks: loader_of(blocks, "fixed"),
        {"extra": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]},
        "accumulate_grad_batches must be one number for the run",
    ),
    "several loaders": (
        lambda blocks: {"a": loader_of(blocks, "fixed"), "b": loader_of(blocks, "fixed")},
        {},
        "target must name the loader to plant in, of 'a', 'b', got None",
    ),
    "an unknown target": (
        lambda blocks: {"a": loader_of(blocks, "fixed")},
        {"target": "b"},
        "target must name the loader to plant in, of 'a', got 'b'",
    ),
    "a target without names": (
        lambda blocks: loader_of(blocks, "fixed"),
        {"target": 0},
        "of one loader without a name, got 0",
    ),
    "a loader that would begin again": (
        lambda blocks: [loader_of(blocks, "fixed", number=30), loader_of(blocks, "fixed")],
        {"target": 0},
        "must be the longest of those that are combined, got 4 batches where another has 8",
    ),
    "a stream without an end": (
        lambda blocks: DataLoader(Stream(rows_of(blocks, "fixed")), batch_size=4, collate_fn=to_tensors),
        {"max_epochs": -1},
        "a stream needs max_steps, or limit_train_batches and max_epochs",
    ),
    "epochs of a stream": (
        lambda blocks: DataLoader(Stream(rows_of(blocks, "fixed")), batch_size=4, collate_fn=to_tensors),
        {"max_epochs": 2},
        "one epoch as long as the run, so that max_epochs=2 does not say where it ends",
    ),
    "passes that cut a step": (
        lambda blocks: DataLoader(Stream(rows_of(blocks, "fixed")), batch_size=4, collate_fn=to_tensors),
        {"limit_train_batches": 3, "accumulate_grad_batches": 2},
        "limit_train_batches of a stream must be a multiple of accumulate_grad_batches, 2, got 3",
    ),
    "a run without an end": (
        lambda blocks: loader_of(blocks, "fixed"),
        {"max_epochs": -1},
        "the run must have max_steps or max_epochs",
    ),
    "too few batches": (
        lambda blocks: loader_of(blocks, "variable"),
        {"limit_train_batches": 1},
        "13 canary sightings must fit in the 8 usable rows",
    ),
    "rows of something else": (
        lambda blocks: DataLoader([(torch.ones(3), 1)] * 9, batch_size=4),
        {},
        "training rows without columns must be a text, one sequence of token ids, or .*, got tuple",
    ),
}


@pytest.mark.parametrize(("build", "options", "sentence"), LOADERS.values(), ids=LOADERS)
def test_loaders_and_settings_that_cannot_be_counted_in_are_refused(
    build: Callable[[Any], Any], options: dict[str, Any], sentence: str, blocks: Any, train: Callable[..., Any]
) -> None:
    with pytest.raises(CanaryError, match=sentence):
        train(build(blocks), **options)


def test_manual_optimisation_and_iterators_given_to_the_step_are_refused(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    class Manual(module_class()):  # type: ignore[misc]
        automatic_optimization = False

    class Iterating(module_class()):  # type: ignore[misc]
        def training_step(self, dataloader_iter: Any) -> Any: ...

    for kind, sentence in ((Manual, "must leave optimisation to Lightning"), (Iterating, "got one that takes dataloader_iter")):
        trainer = make_trainer(tmp_path, [LightningAuditCallback(settings(), tokenizer=tokenizer)])
        with pytest.raises(CanaryError, match=sentence):
            trainer.fit(kind(tiny_model), loader_of(blocks, "fixed"))


def test_a_stated_guarantee_is_refused(blocks: Any, settings: Any, train: Callable[..., Any]) -> None:
    with pytest.raises(CanaryError, match=r"a stated DP guarantee \(dp\) is not tested in Lightning runs"):
        train(loader_of(blocks, "fixed"), config=settings(dp={"epsilon": 8.0, "delta": 1e-6}))


def test_a_reload_of_another_length_is_refused(blocks: Any, train: Callable[..., Any]) -> None:
    lengths = iter([40, 30])
    options = {
        "reload_dataloaders_every_n_epochs": 1,
        "module": {"loader": lambda: loader_of(blocks, "fixed", number=next(lengths))},
    }
    with pytest.raises(
        CanaryError,
        match="a reloaded training loader must read as many rows as before, 40 in batches of 8, got 30 in batches of 8:",
    ):
        train(None, **options)


def test_two_callbacks_are_refused_and_so_is_a_loader_that_holds_canaries(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, train: Callable[..., Any]
) -> None:
    two = [LightningAuditCallback(settings(), tokenizer=tokenizer) for _ in range(2)]
    with pytest.raises(CanaryError, match="a trainer takes one LightningAuditCallback, got two"):
        make_trainer(tmp_path, two).fit(module_class()(tiny_model), loader_of(blocks, "fixed"))
    callback, _, _ = train(loader_of(blocks, "fixed"), max_epochs=1)
    with pytest.raises(CanaryError, match="got one that holds canaries already"):
        read_facts(callback._built.loader, rank=0, num_ranks=1)


def test_a_loader_that_was_built_without_memguard_is_said_so(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    class Swaps(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.fit_loop._combined_loader = pl.utilities.CombinedLoader(loader_of(blocks, "fixed"))

    trainer = make_trainer(tmp_path, [Swaps(), LightningAuditCallback(settings(), tokenizer=tokenizer)])
    with pytest.raises(CanaryError, match="the training loader was built without memguard"):
        trainer.fit(module_class()(tiny_model), loader_of(blocks, "fixed"))


def test_a_missing_tokenizer_is_asked_for_and_one_of_the_module_is_found(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    module = module_class()(tiny_model)
    with pytest.raises(InputError, match="memguard needs the tokenizer"):
        make_trainer(tmp_path, [LightningAuditCallback(settings())]).fit(module, loader_of(blocks, "fixed"))
    module.tokenizer = tokenizer
    callback = LightningAuditCallback(settings())
    make_trainer(tmp_path, [callback], max_epochs=1).fit(module, loader_of(blocks, "fixed"))
    assert callback.tokenizer is tokenizer


def test_the_one_language_model_in_a_module_is_found(tiny_model: Any) -> None:
    module = module_class()(tiny_model)
    assert find_model(module) is tiny_model
    module.encoder = type(tiny_model.model)(tiny_model.config)  # a transformers model that predicts no tokens
    assert find_model(module) is tiny_model
    module.teacher = type(tiny_model)(tiny_model.config)
    with pytest.raises(CanaryError, match="got LlamaForCausalLM, LlamaForCausalLM: pass LightningAuditCallback"):
        find_model(module)
    assert find_model(module, lambda module: module.model) is tiny_model
    with pytest.raises(CanaryError, match="one transformers model that predicts tokens, got none"):
        find_model(torch.nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated.*")
def test_an_adapter_is_found_with_the_model_in_it(tiny_model: Any) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model, peft.LoraConfig(target_modules=["q_proj"]))
    assert find_model(module_class()(adapted)) is adapted


# -- samplers on several ranks


class OwnOrder(DistributedSampler[int]):
    """Deals rows out in a way of its own."""


def test_samplers_that_deal_rows_out_themselves_are_refused_but_torchs_own() -> None:
    rows = range(10)

    def order(sampler: Any, *, distributes: bool = True) -> Any:
        return order_of_rows(LoaderFacts(4, False, 1, 2, sampler), rows, lightning_distributes=distributes)

    plain = DistributedSampler(rows, 2, 1, shuffle=False)
    assert list(order(plain)) == list(order(plain, distributes=False)) == list(range(10))
    assert (plain.num_replicas, plain.rank) == (2, 1)
    for sampler, distributes in (
        (OwnOrder(rows, 2, 1), True),
        (DistributedSampler(rows, 2, 1, drop_last=True), True),
        (DistributedSampler(rows, 3, 1), True),
        (SequentialSampler(rows), False),
    ):
        with pytest.raises(CanaryError, match="rows must be dealt out to ranks by Lightning, or by torch's own"):
            order(sampler, distributes=distributes)
    with pytest.raises(CanaryError, match="the sampler of the training loader must have a length, got generator"):
        order(one for one in rows)


# -- what is not refused


def test_a_quick_try_plants_nothing_and_says_so(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, watch = LightningAuditCallback(settings(), tokenizer=tokenizer), Watch(tiny_model, None)
    with caplog.at_level(logging.WARNING, logger="memguard"):
        make_trainer(tmp_path, [callback], fast_dev_run=2).fit(module_class()(tiny_model), loader_of(blocks, "fixed"))
    assert callback.plan is None
    assert len(watch.rows) == 16
    assert "fast_dev_run tries a few batches: memguard plants nothing and audits nothing." in caplog.messages


def test_batches_in_any_order_and_epochs_cut_short_are_noted(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    class Skips(module_class()):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 and self.current_epoch == 0 else None

    callback = LightningAuditCallback(settings(), tokenizer=tokenizer)
    watch = Watch(tiny_model, callback)
    trainer = make_trainer(tmp_path, [callback])
    trainer.fit(Skips(tiny_model), loader_of(blocks, "fixed", in_order=False))
    assert [note[:20] for note in callback.ledger(trainer.global_step).notes] == [
        "in_order=False: batc",
        "an epoch ended befor",
    ]
    assert len(watch.rows) == 3 * 8 + 61  # the second epoch is whole all the same


def test_a_checkpoint_of_another_plan_is_refused_and_one_of_an_unguarded_run_is_noted(
    blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path, train: Callable[..., Any]
) -> None:
    guarded, bare = tmp_path / "guarded.ckpt", tmp_path / "bare.ckpt"
    train(loader_of(blocks, "fixed"), extra=[stop_at(3, guarded)])
    make_trainer(tmp_path, [stop_at(3, bare)]).fit(module_class()(tiny_model), loader_of(blocks, "fixed"))
    callback, _, trainer = train(loader_of(blocks, "fixed"), ckpt=bare)
    assert callback.ledger(trainer.global_step).notes == [
        "resumed from a checkpoint without a ledger: what was planted before it is not known."
    ]
    other = settings(plan=str(tmp_path / "_memguard" / "other.json"), canaries={"seed": 4})
    train(loader_of(blocks, "fixed"), config=other, max_epochs=1)
    with pytest.raises(InputError, match="the checkpoint was trained with another plan than"):
        train(loader_of(blocks, "fixed"), config=other, ckpt=guarded)
    with pytest.raises(InputError, match="is missing, but the run resumes at step 3"):
        train(loader_of(blocks, "fixed"), config=settings(plan=str(tmp_path / "_memguard" / "new.json")), ckpt=bare)


def test_a_state_that_cannot_be_read_is_said_so(settings: Any, tokenizer: Any) -> None:
    callback = LightningAuditCallback(settings(), tokenizer=tokenizer)
    callback.on_load_checkpoint(None, None, {"state_dict": {}})
    with pytest.raises(InputError, match="the checkpoint's memguard state cannot be read"):
        callback.on_load_checkpoint(None, None, {"memguard": {"ledger": {"kind": "memguard ledger"}}})


def test_a_lightning_without_its_source_of_data_is_said_so(settings: Any, tokenizer: Any) -> None:
    trainer = SimpleNamespace(callbacks=[], fast_dev_run=False, fit_loop=SimpleNamespace())
    with pytest.raises(CanaryError, match="this version of Lightning is not known"):
        LightningAuditCallback(settings(), tokenizer=tokenizer).setup(trainer, None, "fit")


def test_a_missing_lightning_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]
    for name in [*kept, "memguard.callbacks.lightning_trainer"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="the Lightning callback.*lightning"):
        _ = memguard.callbacks.LightningAuditCallback


@pytest.mark.parametrize(
    ("beside", "notes"),
    [
        ("targets", ["the collator makes no labels of the shape of input_ids: whether a canary is supervised is not seen."]),
        ("attention_mask", []),
        ("sample_weight", []),
    ],
)
def test_labels_are_taken_for_the_inputs_only_where_no_other_table_may_hold_targets(
    beside: str, notes: list[str], blocks: Any, train: Callable[..., Any]
) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        ids = to_tensors(rows)["input_ids"]
        tables = {
            "targets": torch.roll(ids, -1, dims=1),
            "attention_mask": torch.ones_like(ids),
            "sample_weight": torch.ones(ids.shape),
        }
        return {"input_ids": ids, beside: tables[beside]}

    callback, _, trainer = train(loader_of(blocks, "fixed", collate_fn=collate), max_epochs=1)
    ledger = callback.ledger(trainer.global_step)
    assert (ledger.notes, ledger.exact) == (notes, not notes)
