"""One of two processes of a Lightning run, `python lightning_two_ranks.py FOLDER CASE...`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_cases import (
    Stream,
    loader_of,
    rows_of,
    run,
    seen_in,
    stop_at,
    to_tensors,
)
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

CASES: dict[str, dict[str, Any]] = {
    "an odd tail": {"kind": "variable"},
    "fixed blocks": {"kind": "fixed"},
    "an even number": {"kind": "variable", "number": 62},
    "drop_last": {"kind": "variable", "loader": {"drop_last": True}},
    "workers": {"kind": "fixed", "loader": {"num_workers": 2}},
    "accumulation": {"kind": "variable", "trainer": {"accumulate_grad_batches": 2}},
    "an exact total": {"kind": "variable", "count": "total", "trainer": {"max_steps": 7}},
    "some batches": {"kind": "variable", "trainer": {"limit_train_batches": 3}},
    "a sampler of the user's own": {"kind": "fixed", "build": "weighted"},
    "dealt by torch's own sampler": {"kind": "variable", "build": "dealt", "trainer": {"use_distributed_sampler": False}},
    "a stream": {"kind": "fixed", "build": "stream", "trainer": {"max_steps": 7}},
    "a stream with workers": {"kind": "fixed", "build": "stream", "loader": {"num_workers": 2}, "trainer": {"max_steps": 7}},
    "passes over a stream": {"kind": "fixed", "build": "stream", "trainer": {"limit_train_batches": 3}},
    "resumed": {"kind": "variable", "stop": 3},
    "resumed with workers": {"kind": "variable", "stop": 6, "loader": {"num_workers": 2}},
    "resumed with steps asked for": {
        "kind": "variable",
        "stop": 3,
        "loader": {"num_workers": 2},
        "module": {"asks_for_steps": True},
    },
    "resumed stateful": {"kind": "fixed", "stop": 3, "build": "stateful"},
    "audited": {"kind": "variable", "audit": {"every": {"steps": 3}, "on": ["start", "end"]}},
    "a resumed stream": {"kind": "fixed", "build": "stream", "trainer": {"max_steps": 7}, "stop": 3},
}


def build_loader(blocks: Any, case: dict[str, Any]) -> Any:
    """The loader of a case, on this rank."""
    build, options, number = case.get("build"), case.get("loader", {}), case.get("number", 61)
    if build == "stream":
        return DataLoader(Stream(rows_of(blocks, "fixed"), 50), batch_size=4, collate_fn=to_tensors, **options)
    if build == "weighted":
        sampler = WeightedRandomSampler([1.0] * 61, 45, generator=torch.Generator().manual_seed(1))
        return loader_of(blocks, "fixed", shuffle=None, sampler=sampler)
    if build == "dealt":
        import os

        rank = int(os.environ.get("LOCAL_RANK", "0"))
        return loader_of(blocks, case["kind"], shuffle=None, sampler=DistributedSampler(range(61), 2, rank))
    if build == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return loader_of(blocks, case["kind"], of=StatefulDataLoader, shuffle=False)
    return loader_of(blocks, case["kind"], number=number, **options)


def main(folder: Path, names: list[str]) -> None:
    """Train as each case says and write what this rank saw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for index, name in enumerate(names):
        given = torch.load(folder / "given.pt", weights_only=False)
        found = train(folder / str(index), CASES[name], **given)
        path = folder / f"{name}.rank{found.pop('rank')}.json"
        path.write_text(json.dumps(found), encoding="utf-8")


def train(
    folder: Path, case: dict[str, Any], settings: dict[str, Any], tokenizer: Any, blocks: Any, model: Any
) -> dict[str, Any]:
    """One case on this rank, from its start or stopped and resumed."""
    settings = settings | {"plan": str(folder / "plan.json")}
    settings["canaries"] = settings["canaries"] | {"count": case.get("count", "per_epoch")}
    settings["audit"] = settings["audit"] | case.get("audit", {})
    options = {"strategy": "ddp", "devices": 2, "module": case.get("module"), **case.get("trainer", {})}
    seen: list[dict[str, int]] = []
    checkpoint = None
    if case.get("stop"):
        checkpoint = folder / "stopped.ckpt"
        extra = [stop_at(case["stop"], checkpoint)]
        _, watch, _ = run(folder, model, build_loader(blocks, case), settings, tokenizer, extra=extra, **options)
        seen.append(dict(watch.counts))
    callback, watch, trainer = run(folder, model, build_loader(blocks, case), settings, tokenizer, ckpt=checkpoint, **options)
    seen.append(dict(watch.counts))
    ledger = callback.ledger(trainer.global_step)
    return {
        "rank": trainer.global_rank,
        "seen": seen,
        "ledger": seen_in(ledger),
        "notes": ledger.notes,
        "count": ledger.count,
        "steps": trainer.global_step,
        "planned_steps": ledger.max_steps,
        "epochs": trainer.max_epochs,
        "tiers": {one.id: one.tier for one in callback.plan.planted()},
        "rows": watch.rows,
        "weights": [float(part.double().sum()) for part in model.parameters()],
        "losses": trainer.lightning_module.losses,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
