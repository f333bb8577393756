"""Run as a program by `test_heads`: a one-process gloo group, so that wrappers of torch.distributed are the real ones.

Prints one JSON object: per wrapper, the largest difference from the bare model's scores, whether the head is fused, notices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_models import tiny_family

from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

SPANS = [Span((9, 4, 200, 31, last, 7, last + 3), 4, 7) for last in range(6)]


def sharded(model: Any) -> Any:
    """FSDP2 as trainers apply it: each layer, then the root."""
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    """Score the same rows under every wrapper; twice, since a first forward leaves a sharded root whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    with audit_mode(tiny_family("llama")) as bare:
        expected = Scorer(bare).score(SPANS).log_probs
    found = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": sharded}.items():
        with audit_mode(wrap(tiny_family("llama"))) as model:
            Scorer(model).score(SPANS)
            scorer = Scorer(model)
            difference = float(abs(scorer.score(SPANS).log_probs - expected).max())
        found[name] = {"difference": difference, "is_fused": scorer.model.is_fused, "notices": scorer.notices}
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
