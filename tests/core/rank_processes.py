"""Two ranks for tests: threads that talk through a barrier, and processes that talk through gloo."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from memguard.scoring.team import Team

PATIENCE = 60.0  # seconds until a rank that waits for one that left is a failure, not a hang


def team_of_threads(size: int, work: Callable[[Team], Any]) -> list[Any]:
    """What `work` gave on every rank, or the exception it raised; values travel pickled, as between processes."""
    barrier, slots = threading.Barrier(size, timeout=PATIENCE), [b""] * size
    results: list[Any] = [None] * size

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            slots[rank] = pickle.dumps(value)
            barrier.wait()
            said = [pickle.loads(one) for one in slots]
            barrier.wait()
            return said

        return exchange

    def run(rank: int) -> None:
        with torch.no_grad():
            try:
                results[rank] = work(Team(rank, size, exchange_of(rank)))
            except Exception as error:
                results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def two_processes(place: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)`, a function of a module, gave on two gloo ranks."""
    spawn(_process, args=(str(place), work, arguments), nprocs=2)  # type: ignore[no-untyped-call]
    return [pickle.loads((place / f"rank-{rank}").read_bytes()) for rank in range(2)]


def _process(rank: int, place: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import datetime as dt

    from torch import distributed

    torch.set_num_threads(1)
    store = f"file://{place}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=PATIENCE))
    result = work(*copy.deepcopy(arguments))  # tensors arrive in memory that the ranks share
    (Path(place) / f"rank-{rank}").write_bytes(pickle.dumps(result))
    distributed.barrier()
    os._exit(0)  # torch's threads may abort a process that ends while they still run


def count_forwards(model: Any) -> list[int]:
    """One entry a forward call of the model, from now on."""
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def sharded(model: Any) -> Any:
    """The model with FSDP2 over all ranks, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
