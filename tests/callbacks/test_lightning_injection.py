"""Under Lightning every planted canary reaches the model as often as the ledger says, counted by a hook on the model itself."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_cases import (
    QUIET,
    SMALL,
    PlainLoader,
    Stream,
    loader_of,
    make_trainer,
    module_class,
    pad,
    rows_of,
    run,
    seen_in,
    small_model,
    stop_at,
    to_tensors,
)
from lightning_two_ranks import CASES as TWO_RANK_CASES
from packaging.version import Version
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

from memguard.callbacks import LightningAuditCallback

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]

WORKERS = {"num_workers": 2}
LASTING = {"num_workers": 2, "persistent_workers": True}


@dataclass(frozen=True)
class Case:
    """One way to train: rows, loader, trainer, and where to stop and resume."""

    kind: str = "variable"
    count: str = "per_epoch"
    loader: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    build: str = "plain"
    namespace: str = "pytorch_lightning"
    target: Any = None
    stop: int | None = None
    quick: bool = False


def stateful(blocks: Any, case: Case) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return loader_of(blocks, case.kind, of=module.StatefulDataLoader, **case.loader)


def stateful_stream(blocks: Any, case: Case) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Stream(rows_of(blocks, "fixed"), 50), batch_size=4, collate_fn=to_tensors, **case.loader)


def stream(blocks: Any, case: Case) -> Any:
    rows = rows_of(blocks, case.kind)
    return DataLoader(
        Stream(rows, 50), batch_size=4, collate_fn={"variable": pad, "fixed": to_tensors}[case.kind], **case.loader
    )


def short_stream(blocks: Any, case: Case) -> Any:
    return DataLoader(Stream(rows_of(blocks, "fixed", number=13)), batch_size=4, collate_fn=to_tensors, **case.loader)


def combined(mode: str) -> Callable[[Any, Case], Any]:
    def build(blocks: Any, case: Case) -> Any:
        loaders = {"text": loader_of(blocks, "variable"), "other": loader_of(blocks, "fixed", number=30)}
        return pl.utilities.CombinedLoader(loaders, mode)

    return build


def weighted(blocks: Any, case: Case) -> Any:
    sampler = WeightedRandomSampler([1.0] * 61, 45, replacement=True)
    return loader_of(blocks, case.kind, shuffle=None, sampler=sampler)


def explicit_batches(blocks: Any, case: Case) -> Any:
    rows = rows_of(blocks, case.kind)
    return DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 8, drop_last=True), collate_fn=pad)


def texts(blocks: Any, case: Case) -> Any:
    tokenizer = case.module["tokenizer"]
    rows = [tokenizer.decode(row["input_ids"][:30]) for row in blocks[:61]]
    collate = lambda batch: {"input_ids": tokenizer(batch, return_tensors="pt", padding=True)["input_ids"]}  # noqa: E731
    return DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)


BUILDS: dict[str, Callable[[Any, Case], Any]] = {
    "plain": lambda blocks, case: loader_of(blocks, case.kind, **case.loader),
    "subclass": lambda blocks, case: PlainLoader(rows_of(blocks, case.kind), 8),
    "table": lambda blocks, case: DataLoader(
        TensorDataset(torch.stack(rows_of(blocks, "tensors"))), batch_size=8, shuffle=True
    ),
    "texts": texts,
    "weighted": weighted,
    "batches": explicit_batches,
    "dict": lambda blocks, case: {"text": loader_of(blocks, "variable"), "other": loader_of(blocks, "fixed", number=30)},
    "list": lambda blocks, case: [loader_of(blocks, "fixed", number=30), loader_of(blocks, "variable")],
    "min_size": combined("min_size"),
    "stateful": stateful,
    "stream": stream,
    "short stream": short_stream,
    "stateful stream": stateful_stream,
}
CASES = {
    "rows of any length": Case(quick=True),
    "fixed blocks": Case("fixed", quick=True),
    "tensors": Case("tensors", quick=True),
    "a table of tensors": Case("tensors", build="table"),
    "inputs with the next tokens": Case("pairs", quick=True),
    "raw texts": Case(build="texts", quick=True),
    "an exact total": Case("fixed", "total"),
    "an exact total in place of rows": Case("variable", "total", trainer={"max_steps": 11}),
    "half an epoch": Case("fixed", "total", trainer={"max_steps": 5, "accumulate_grad_batches": 2}),
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}, quick=True),
    "accumulation and a horizon": Case(trainer={"accumulate_grad_batches": 3, "max_steps": 5}),
    "drop_last": Case(loader={"drop_last": True}, trainer={"accumulate_grad_batches": 2}),
    "in order": Case("fixed", loader={"shuffle": False}),
    "workers": Case(loader=WORKERS, quick=True),
    "lasting workers": Case("fixed", loader=LASTING, trainer={"max_epochs": 3}),
    "a loader of the user's own class": Case(build="subclass"),
    "a sampler of the user's own": Case("fixed", build="weighted"),
    "batches cut by hand": Case(build="batches"),
    "loaders by name": Case(build="dict", target="text", quick=True),
    "loaders by number": Case(build="list", target=1),
    "the shortest of two": Case(build="min_size", target="text"),
    "some batches": Case(trainer={"limit_train_batches": 7}, quick=True),
    "some batches of fixed rows": Case("fixed", "total", trainer={"limit_train_batches": 5, "accumulate_grad_batches": 2}),
    "part of the batches": Case(trainer={"limit_train_batches": 0.7}),
    "asked for its steps": Case(module={"asks_for_steps": True}),
    "reloaded": Case("fixed", trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, module={"loader": True}),
    "reloaded with workers": Case(
        loader=WORKERS, trainer={"reload_dataloaders_every_n_epochs": 1}, module={"loader": True, "asks_for_steps": True}
    ),
    "the other namespace": Case(namespace="lightning.pytorch", quick=True),
    "a stateful loader": Case(build="stateful"),
    "a stateful loader with workers": Case("fixed", build="stateful", loader=WORKERS),
    "a stream": Case("fixed", build="stream", trainer={"max_steps": 12}, quick=True),
    "a stream of rows of any length": Case(build="stream", trainer={"max_steps": 12, "accumulate_grad_batches": 2}),
    "a stream with workers": Case("fixed", build="stream", loader=WORKERS, trainer={"max_steps": 12}),
    "a stream that ends before the run": Case("fixed", build="short stream", trainer={"max_steps": 12}),
    "passes over a stream": Case("fixed", build="stream", trainer={"limit_train_batches": 4, "max_epochs": 3}, quick=True),
    "passes with lasting workers": Case(
        "fixed", build="stream", loader=LASTING, trainer={"limit_train_batches": 4, "max_epochs": 3}
    ),
    "resumed": Case(stop=5, quick=True),
    "resumed with an exact total": Case("fixed", "total", stop=5),
    "resumed with accumulation": Case(trainer={"accumulate_grad_batches": 2}, stop=3),
    "resumed with workers": Case(loader=WORKERS, stop=4),
    "resumed with lasting workers": Case("fixed", loader=LASTING, stop=11),
    "resumed in the second epoch": Case(stop=13),
    "resumed with drop_last": Case("fixed", loader={"drop_last": True}, stop=10),
    "resumed under max_steps": Case("fixed", "total", trainer={"max_steps": 13}, stop=10),
    "resumed with steps asked for": Case(module={"asks_for_steps": True}, stop=4),
    "resumed with steps asked for and workers": Case(loader=WORKERS, module={"asks_for_steps": True}, stop=4, quick=True),
    "resumed with some batches": Case(trainer={"limit_train_batches": 7}, stop=9),
    "resumed stateful": Case(build="stateful", stop=5, quick=True),
    "resumed stateful in order": Case("fixed", build="stateful", loader={"shuffle": False}, stop=10),
    "resumed stateful with workers": Case(build="stateful", loader=WORKERS, stop=5),
    "resumed stateful with steps asked for": Case(build="stateful", module={"asks_for_steps": True}, stop=5),
    "a resumed stream": Case("fixed", build="stream", trainer={"max_steps": 12}, stop=5),
    "a resumed stream with workers": Case("fixed", build="stream", loader=WORKERS, trainer={"max_steps": 12}, stop=5),
    "resumed passes over a stream": Case("fixed", build="stream", trainer={"limit_train_batches": 4, "max_epochs": 3}, stop=6),
    "a resumed stateful stream": Case("fixed", build="stateful stream", trainer={"max_steps": 12}, stop=5),
    "a resumed stateful stream with workers": Case(
        "fixed", build="stateful stream", loader=WORKERS, trainer={"max_steps": 12}, stop=5
    ),
    "resumed passes over a stateful stream": Case(
        "fixed", build="stateful stream", trainer={"limit_train_batches": 4, "max_epochs": 3}, stop=6
    ),
}


def lightning_is_strict() -> bool:
    """Whether the two namespaces of Lightning do not know each other's callbacks: before 2.6."""
    return Version(metadata.version("lightning")) < Version("2.6")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[] if case.quick else [pytest.mark.slow]) for name, case in CASES.items()]
)
def test_sightings_equal_the_ledger(
    case: Case, blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    if case.namespace == "lightning.pytorch" and lightning_is_strict():
        pytest.skip("this Lightning takes no callback that was made for its other namespace in the same process")
    if case.build == "texts":
        case = Case(**{**vars(case), "module": {"tokenizer": tokenizer}})
    module = {key: value for key, value in case.module.items() if key != "tokenizer"}
    loader = BUILDS[case.build](blocks, case)
    if "loader" in module:
        module["loader"] = lambda: BUILDS[case.build](blocks, case)
    config = settings(canaries={"count": case.count})
    options = {"target": case.target, "module": module, "namespace": case.namespace, **case.trainer}
    seen: Counter[str] = Counter()
    checkpoint = None
    if case.stop is not None:
        checkpoint = tmp_path / "stopped.ckpt"
        extra = [stop_at(case.stop, checkpoint, case.namespace)]
        callback, watch, trainer = run(tmp_path, tiny_model, loader, config, tokenizer, extra=extra, **options)
        assert trainer.global_step == case.stop
        seen += watch.counts
        loader = BUILDS[case.build](blocks, case)
    callback, watch, trainer = run(tmp_path, tiny_model, loader, config, tokenizer, ckpt=checkpoint, **options)
    seen += watch.counts
    ledger = callback.ledger(trainer.global_step)
    assert seen_in(ledger) == dict(seen)
    assert ledger.notes == []
    assert trainer.global_step == ledger.max_steps
    tiers = {canary.id: canary.tier for canary in callback.plan.planted()}
    if ledger.count == "total":
        assert dict(seen) == tiers
    elif "max_steps" not in case.trainer:
        assert dict(seen) == {one: trainer.max_epochs * tier for one, tier in tiers.items()}


# -- the user's rows


def rows_trained(case: Case, guarded: bool, blocks: Any, model: Any, tokenizer: Any, config: Any, folder: Path) -> list[Any]:
    """Rows that the model saw, from a fresh start or stopped and resumed; padding taken off."""
    pl.seed_everything(5, verbose=False)
    rows: list[list[int]] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            rows.extend(kwargs["input_ids"].tolist())

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    checkpoint = folder / f"{guarded}.ckpt" if case.stop is not None else None
    for part in [None] if checkpoint is None else [None, checkpoint]:
        callbacks: list[Any] = [LightningAuditCallback(config, tokenizer=tokenizer)] if guarded else []
        callbacks += [stop_at(case.stop, checkpoint)] if checkpoint is not None and case.stop is not None else []
        trainer = make_trainer(folder, callbacks, **case.trainer)
        trainer.fit(module_class()(model), train_dataloaders=BUILDS[case.build](blocks, case), ckpt_path=part)
    handle.remove()
    return [[token for token in row if token != tokenizer.pad_token_id] for row in rows]


ORDERED = {
    "shuffled": Case(quick=True),
    "shuffled with workers": Case(loader=WORKERS),
    "in order": Case(loader={"shuffle": False}),
    "a sampler of the user's own": Case("variable", build="weighted"),
    "a stream": Case("variable", build="stream", trainer={"max_steps": 9}, quick=True),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[] if case.quick else [pytest.mark.slow]) for name, case in ORDERED.items()]
)
def test_user_rows_keep_the_order_of_the_unguarded_run_and_none_is_lost(
    case: Case, blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    for layer in tiny_model.model.layers:  # torch's sampler and dropout draw from one generator, and canaries make more batches
        layer.self_attn.attention_dropout = 0.0
    plain, guarded = (
        rows_trained(case, on, blocks, copy.deepcopy(tiny_model), tokenizer, settings(), tmp_path) for on in (False, True)
    )
    users = [row["input_ids"] for row in rows_of(blocks, "variable")]
    kept = [row for row in guarded if row in users]
    sightings = 2 * 1 + 2 * 3 + 5  # two canaries of tier 1, two of tier 3, the positive control: an epoch, or the stream's run
    assert len(guarded) - len(kept) == (sightings if "max_steps" in case.trainer else 2 * sightings)
    assert kept == plain[: len(kept)]
    assert "max_steps" in case.trainer or len(kept) == len(plain)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_gives_each_user_row_once_an_epoch_also_when_it_is_resumed(
    shuffle: bool, blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    case = Case(build="stateful", loader={"shuffle": shuffle}, stop=5)
    plain, guarded = (
        rows_trained(case, on, blocks, copy.deepcopy(tiny_model), tokenizer, settings(), tmp_path) for on in (False, True)
    )
    users = [row["input_ids"] for row in rows_of(blocks, "variable")]
    kept = [row for row in guarded if row in users]
    assert kept == plain
    assert sorted(kept) == sorted(users * 2)


# -- two processes

TWO_RANKS = Path(__file__).parent / "lightning_two_ranks.py"
BY_LIGHTNING = [sys.executable]
BY_TORCH = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29533"]


def on_two_ranks(folder: Path, launcher: list[str], names: list[str], blocks: Any, tokenizer: Any) -> None:
    """Run cases on two gloo processes; what each saw lies in the folder."""
    given = {"settings": SMALL, "tokenizer": tokenizer, "blocks": blocks, "model": small_model()}
    torch.save(given, folder / "given.pt")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    command = [*launcher, str(TWO_RANKS), str(folder), *names]
    done = subprocess.run(
        command,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TWO_RANKS.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def check_two_ranks(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sightings over both ranks are those of the ledger and of the plan."""
    first, second = (json.loads((folder / f"{name}.rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    seen: Counter[str] = Counter()
    for part in [*first["seen"], *second["seen"]]:
        seen.update(part)
    assert first["ledger"] == second["ledger"] == dict(seen)
    assert first["notes"] == second["notes"] == []
    assert first["steps"] == second["steps"] == first["planned_steps"]
    epochs = first["epochs"] if first["count"] == "per_epoch" else 1
    assert dict(seen) == {one: epochs * tier for one, tier in first["tiers"].items()}
    assert first["weights"] == second["weights"]
    return first, second


def test_sightings_over_two_ranks_that_lightning_starts_equal_the_ledger(blocks: Any, tokenizer: Any, tmp_path: Path) -> None:
    on_two_ranks(tmp_path, BY_LIGHTNING, ["an odd tail"], blocks, tokenizer)
    first, second = check_two_ranks(tmp_path, "an odd tail")
    users = [row["input_ids"] for row in rows_of(blocks, "variable")]
    rows = [[token for token in row if token != tokenizer.pad_token_id] for row in [*first["rows"], *second["rows"]]]
    assert {tuple(row) for row in users} <= {tuple(row) for row in rows}


@pytest.fixture(scope="module")
def matrix_on_two_ranks(blocks: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, in one launch: starting processes takes longer than a case."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(folder, BY_TORCH, list(TWO_RANK_CASES), blocks, tokenizer)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANK_CASES)
def test_sightings_over_two_ranks_equal_the_ledger(name: str, matrix_on_two_ranks: Path) -> None:
    check_two_ranks(matrix_on_two_ranks, name)


@pytest.mark.slow
def test_audits_on_two_ranks_change_no_loss_and_no_weight(matrix_on_two_ranks: Path) -> None:
    plain, audited = (check_two_ranks(matrix_on_two_ranks, name) for name in ("an odd tail", "audited"))
    for one, other in zip(plain, audited, strict=True):
        assert (one["losses"], one["weights"], one["rows"]) == (other["losses"], other["weights"], other["rows"])
