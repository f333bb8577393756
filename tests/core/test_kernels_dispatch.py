"""What the kernels refuse, and which path a device gets."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memguard.errors import MissingExtraError
from memguard.scoring.kernels import choose_path, describe_paths, dispatch, logit_statistics, token_statistics

HIDDEN, WEIGHT, TARGETS = torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3)}, r"hidden must have shape \(N, D\), got \(3,\)\."),
        ({"weight": torch.zeros(0, 4)}, r"weight must have shape \(V, D\) with no empty side, got \(0, 4\)\."),
        ({"weight": torch.zeros(7, 5)}, r"hidden and weight must have the same width, got \(3, 4\) and \(7, 5\)\."),
        ({"weight": WEIGHT.bfloat16()}, "must have one dtype of .*, got float32 and bfloat16"),
        ({"hidden": HIDDEN.long(), "weight": WEIGHT.long()}, "must have one dtype of .*, got int64 and int64"),
        ({"bias": torch.zeros(6)}, r"bias must be a float of shape \(7,\), got float32 \(6,\)\."),
        ({"bias": torch.zeros(7, dtype=torch.long)}, r"bias must be a float of shape \(7,\), got int64 \(7,\)\."),
        ({"scale": 0.0}, "scale must be finite and above 0, got 0.0"),
        ({"scale": math.inf}, "scale must be finite and above 0, got inf"),
        ({"soft_cap": -1.0}, "soft_cap must be finite and above 0, got -1.0"),
        ({"hidden": torch.zeros(3, 4, device="meta")}, "all tensors must be on one device, got hidden on meta, weight on cpu"),
        ({"vocabulary_size": 0}, "vocabulary_size must be from 1 to the 7 columns, got 0"),
        ({"vocabulary_size": 8}, "vocabulary_size must be from 1 to the 7 columns, got 8"),
        ({"block_size": 0}, "block_size must be 1 or more, got 0"),
        ({"targets": TARGETS.int()}, r"targets must be int64 of shape \(T,\), got int32 \(3,\)\."),
        ({"targets": TARGETS[:2]}, r"targets must be one a row where rows is None, got \(2,\) for 3 rows\."),
        ({"rows": TARGETS[:2]}, r"rows must have the shape of targets, got \(2,\) and \(3,\)\."),
        ({"rows": TARGETS.float()}, r"rows must be int64 of shape \(T,\), got float32 \(3,\)\."),
        ({"rows": TARGETS + 3}, r"rows must lie in 0\.\.2, got 3\.\.3\."),
        ({"targets": TARGETS + 7}, r"targets must lie in 0\.\.6, got 7\.\.7\."),
        ({"targets": TARGETS - 100}, r"targets must lie in 0\.\.6, got -100\.\.-100\."),
        ({"targets": TARGETS + 5, "vocabulary_size": 5}, r"targets must lie in 0\.\.4, got 5\.\.5\."),
        ({"path": "cuda"}, "path must be one of auto, torch, triton, reference, got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS} | changes
    with pytest.raises(ValueError, match=message):
        token_statistics(**arguments)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"scale must .* soft_cap must "):
        token_statistics(HIDDEN, WEIGHT, TARGETS, scale=-1.0, soft_cap=0.0)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3), r"logits must have shape \(N, V\) with V above 0, got \(3,\)\."),
        (torch.zeros(3, 0), r"logits must have shape \(N, V\) with V above 0, got \(3, 0\)\."),
        (torch.zeros(3, 7, dtype=torch.long), "logits must be bfloat16, float16, float32 or float64, got int64"),
    ],
)
def test_logits_that_do_not_fit_are_refused_by_name(logits: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logit_statistics(logits, TARGETS)
    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.4"):
        logit_statistics(torch.zeros(3, 7), TARGETS + 5, vocabulary_size=5)


def test_the_triton_path_is_refused_on_a_cpu_and_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    with pytest.raises(MissingExtraError, match="path 'triton' needs the extra 'triton'"):
        token_statistics(HIDDEN, WEIGHT, TARGETS, path="triton")
    monkeypatch.undo()
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="got 'triton', but they run on cuda, not cpu"):
        token_statistics(HIDDEN, WEIGHT, TARGETS, path="triton")
    with pytest.raises(ValueError, match="got 'triton', but they hold no float64"):
        token_statistics(HIDDEN.double(), WEIGHT.double(), TARGETS, path="triton")


def test_a_cpu_takes_the_torch_path() -> None:
    assert choose_path(HIDDEN) == choose_path("cpu") == choose_path(torch.device("cpu")) == "torch"
    assert choose_path(HIDDEN.bfloat16()) == "torch"
    assert describe_paths()[0].startswith("cpu: vocabulary blocks in torch, float32 accumulation")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    return monkeypatch


def test_the_doctor_says_what_a_gpu_would_take_and_why_not_more(pretended_gpu: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert choose_path(cuda) == "triton"
    assert describe_paths()[1] == "cuda: triton kernels for bf16 and fp16, vocabulary blocks in torch for fp32 (a card)"
    pretended_gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert choose_path(cuda) == "torch"
    assert "because they need compute capability 8.0, not 7.5" in describe_paths()[1]
    pretended_gpu.setattr(dispatch, "_has_triton", lambda: False)
    assert "triton is missing: pip install 'memguard-audit[triton]'" in describe_paths()[1]
    pretended_gpu.setattr(torch.version, "hip", "6")
    assert "never tried on ROCm" in describe_paths()[1]


GPU_BENCH = Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.skipif(not GPU_BENCH.exists(), reason="benchmarks are not part of an installed wheel")
def test_the_gpu_bench_says_in_a_sentence_that_there_is_no_gpu() -> None:
    done = subprocess.run([sys.executable, str(GPU_BENCH), "--quick"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "gpu_kernels measures a CUDA device, and torch sees none here.\n"
