"""Log-probabilities of targets from hidden states: log-softmax of all logits, or memguard's blocks without them.

Time, and the memory each way takes above its inputs: by torch's allocator, and as the largest resident size of a process
that does nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from measuring import alternate, extra_max_rss, in_child, peak_extra_bytes, report
from torch import Tensor

from memguard.scoring.kernels import token_statistics

TARGET = ["ratio >= 1.2", "memory_ratio >= 8", "max_abs_err <= 1e-5"]
Inputs = tuple[Tensor, Tensor, Tensor]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits, their log-softmax, one column of each row."""
    logits = hidden @ weight.T
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same and the argmax, a block of rows and vocabulary at a time."""
    return token_statistics(hidden, weight, targets).log_prob


WAYS = {"naive": naive, "ours": ours}


def draw_inputs(quick: bool) -> Inputs:
    """Hidden states (N, D) of unit variance, a head (V, D) of a trained model's size, targets (N,)."""
    rows, width, vocabulary = (512, 64, 32_768) if quick else (2048, 576, 49_152)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(0.05)
    return torch.randn(rows, width, generator=generator), weight, torch.randint(vocabulary, (rows,), generator=generator)


def in_float64(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What both ways should give."""
    columns = weight.double()
    parts = zip(hidden.double().split(128), targets.split(128), strict=True)
    return torch.cat([naive(part, columns, wanted) for part, wanted in parts])


def run(quick: bool) -> dict[str, Any]:
    """Time, memory and error of both ways."""
    inputs = draw_inputs(quick)
    with torch.no_grad():
        pair = alternate(lambda: naive(*inputs), lambda: ours(*inputs), runs=3 if quick else 5)
        peaks = {name: peak_extra_bytes(lambda way=way: way(*inputs)) for name, way in WAYS.items()}
        exact = in_float64(*inputs)
    resident = {name: in_child(Path(__file__), name, *(["quick"] if quick else [])) for name in WAYS}
    hidden, weight, _ = inputs
    return report(
        "fused_head",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=float((pair.ours - exact).abs().max()),
        model="an output head alone, float32",
        template=None,
        lengths={"rows": len(hidden), "width": hidden.shape[1], "vocabulary": len(weight)},
        runs=pair.runs,
        target=TARGET,
        baseline_max_abs_err=float((pair.baseline - exact).abs().max()),
        memory_ratio=peaks["naive"] / peaks["ours"],
        baseline_peak_mb=peaks["naive"] / 1e6,
        ours_peak_mb=peaks["ours"] / 1e6,
        rss_ratio=resident["naive"] / max(1, resident["ours"]),
        baseline_rss_mb=resident["naive"] / 1e6,
        ours_rss_mb=resident["ours"] / 1e6,
    )


def main(way: str, *options: str) -> None:
    """Print how much one way raises this process's resident size, libraries loaded by a small call before; bytes."""
    torch.set_num_threads(1)
    inputs = draw_inputs(quick="quick" in options)
    with torch.no_grad():
        WAYS[way](inputs[0][:2], inputs[1][:64], inputs[2][:2] % 64)
        print(extra_max_rss(lambda: WAYS[way](*inputs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
