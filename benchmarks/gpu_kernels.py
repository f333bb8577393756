"""The fused output head on a GPU against other ways to the same log-probabilities, over vocabularies, widths and rows.

python benchmarks/gpu_kernels.py              36 shapes, bf16; writes results/gpu_kernels.md and .json
python benchmarks/gpu_kernels.py --quick      2 shapes: shows that it runs, not how fast

Ways that are not installed are left out; one that runs out of memory says so. `product` is the bf16 matrix product of the
same shape alone, written to memory: what a head costs at least when its logits are kept. Times are medians by CUDA events,
the ways in turns, launches included; memory is the largest above the inputs; errors are nats from float64 on sampled rows.

Letters: N rows, V vocabulary, D width.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from itertools import product as combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memguard.scoring.kernels import choose_path, token_statistics

RESULTS = Path(__file__).parent / "results"
VOCABULARIES, WIDTHS, ROWS = (32_768, 131_072, 262_144), (2048, 4096, 8192), (1, 64, 4096, 32_768)
SAMPLED = 16
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """memguard's log-probabilities and argmax."""
    return token_statistics(hidden, weight, targets).log_prob


def ours_in_full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same with ranks and moments."""
    return token_statistics(hidden, weight, targets, ranks=True, moments=True).log_prob


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits in bf16, their log-softmax in float32, one column of each row."""
    return torch.log_softmax((hidden @ weight.T).float(), dim=-1).gather(1, targets[:, None]).squeeze(1)


def torch_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own head and loss."""
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none")


def torch_head_in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same with its memory-saving options."""
    options = torch.nn.LinearCrossEntropyOptions()
    return -torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's fused head."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Apple's cut cross-entropy."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none")


def ways() -> dict[str, Way]:
    """Every way that is installed, memguard's first."""
    found: dict[str, Way] = {"memguard": ours, "memguard, ranks and moments": ours_in_full, "log_softmax": plain}
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        found["linear_cross_entropy"] = torch_head
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["linear_cross_entropy, chunked"] = torch_head_in_chunks
    if importlib.util.find_spec("liger_kernel"):
        found["Liger-Kernel"] = liger
    if importlib.util.find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = cut_cross_entropy
    return found


def draw_inputs(num_rows: int, width: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of unit variance, a head of a trained model's size, targets."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[str, Any] = {"generator": generator, "device": device}
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
    hidden = torch.randn(num_rows, width, **made).bfloat16()
    return hidden, weight, torch.randint(vocabulary, (num_rows,), **made)


def exact_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """In float64, a slice of the vocabulary at a time."""
    logits = torch.cat([hidden.double() @ part.double().T for part in torch.split(weight, 16_384)], dim=1)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def largest_error(found: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """Largest absolute difference from float64 on sampled rows, nats."""
    hidden, weight, targets = inputs
    chosen = torch.linspace(0, len(hidden) - 1, min(SAMPLED, len(hidden))).long().to(hidden.device)
    exact = exact_log_probs(hidden[chosen], weight, targets[chosen])
    return float((found[chosen].double() - exact).abs().max())


def milliseconds(call: Callable[[], Any]) -> float:
    """One call on the device."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def first_run(way: Way, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Memory and error of a way, once it is compiled and tuned; or why it has none."""
    try:
        way(*inputs)
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = way(*inputs)
        peak = torch.cuda.max_memory_allocated() - before
        return {"peak_mb": round(peak / 2**20, 1), "max_abs_err": largest_error(found, inputs)}
    except torch.cuda.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # one way that refuses a shape must not end the others
        return {"failed": type(error).__name__}
    finally:
        torch.cuda.empty_cache()


def measure(num_rows: int, width: int, vocabulary: int, runs: int) -> Iterator[dict[str, Any]]:
    """Every way at one shape."""
    inputs = draw_inputs(num_rows, width, vocabulary, "cuda")
    hidden, weight, _ = inputs
    facts = {name: first_run(way, inputs) for name, way in ways().items()}
    calls = {name: (lambda way=way: way(*inputs)) for name, way in ways().items() if "failed" not in facts[name]}
    kept = torch.empty(num_rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    calls["product"] = lambda: torch.mm(hidden, weight.T, out=kept)
    calls["product"]()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            taken[name].append(milliseconds(call))
    floor = statistics.median(taken["product"])
    for name in [*facts, "product"]:
        line: dict[str, Any] = {"N": num_rows, "D": width, "V": vocabulary, "way": name, **facts.get(name, {})}
        if name in taken:
            median = statistics.median(taken[name])
            line |= {"ms": round(median, 4), "times_product": round(median / floor, 3)}
        yield line


def environment() -> dict[str, str]:
    """The device, and the versions of what was measured."""
    versions = {}
    for package in ("torch", "triton", "liger-kernel", "cut-cross-entropy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    half = torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda")
    cuda = str(torch.version.cuda)
    return {"device": torch.cuda.get_device_name(), "cuda": cuda, "python": platform.python_version()} | versions | {
        "path": choose_path(half)
    }  # fmt: skip


def as_markdown(facts: dict[str, str], lines: list[dict[str, Any]]) -> str:
    """The environment and one row a way and shape."""
    head = ", ".join(f"{name} {value}" for name, value in facts.items())
    rows = ["| N | D | V | way | ms | x product | peak MB | max error, nats |", "|--:|--:|--:|:--|--:|--:|--:|--:|"]
    for line in lines:
        error = f"{line['max_abs_err']:.1e}" if "max_abs_err" in line else ""
        cells = [line["N"], line["D"], line["V"], line["way"], line.get("ms", line.get("failed", ""))]
        cells += [line.get("times_product", ""), line.get("peak_mb", ""), error]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(["# The fused head on a GPU", "", f"bf16; {head}.", "", *rows, ""])


def main() -> int:
    """Measure every shape and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small shapes, three runs")
    parser.add_argument("--runs", type=int, default=15, help="runs of each way, in turns")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the two files go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_kernels measures a CUDA device, and torch sees none here.")
    shapes = [(1, 2048, 32_768), (512, 2048, 32_768)] if options.quick else [
        (rows, width, vocabulary) for vocabulary, width, rows in combinations(VOCABULARIES, WIDTHS, ROWS)
    ]  # fmt: skip
    facts, lines = environment(), []
    options.out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for shape in shapes:
            lines += list(measure(*shape, runs=3 if options.quick else options.runs))
            torch.cuda.empty_cache()
            # written after every shape, so that a run cut short keeps what it has
            document = json.dumps({"environment": facts, "quick": options.quick, "lines": lines}, indent=1)
            (options.out / "gpu_kernels.json").write_text(document + "\n", encoding="utf-8")
            (options.out / "gpu_kernels.md").write_text(as_markdown(facts, lines), encoding="utf-8")
            print(f"N {shape[0]}, D {shape[1]}, V {shape[2]}: done", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
