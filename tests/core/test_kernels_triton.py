"""The triton kernels without a GPU: interpreted against the reference, and compiled for one as far as machine code."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra triton")


def test_the_package_is_imported_without_triton() -> None:
    code = "import sys, memguard.scoring.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_interpreted_kernels_equal_the_reference() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(INTERPRETED)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


def compile_for_hopper(dtype: str, config: Any, **flags: Any) -> Any:
    """The kernel in one configuration, compiled for compute capability 9.0 as torch would launch it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memguard.scoring.kernels import triton_kernels

    kernel = triton_kernels._fused_kernel
    pointers = {
        "hidden": dtype,
        "weight": dtype,
        "bias": "fp32",
        "row_map": "i64",
        "targets": "i32",
        "low": "fp32",
        "high": "fp32",
    }
    whole = ("out_argmax", "out_ties", "out_above", "out_not_below")
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in pointers:
            signature[name] = "*" + pointers[name]
        elif name.startswith("out_"):
            signature[name] = "*i32" if name in whole else "*fp32"
        elif name.isupper() or name in ("width_stride", "weight_stride"):
            signature[name] = "constexpr"
        else:
            signature[name] = "fp32" if name in ("scale", "soft_cap") else "i32"
    constants = {"width_stride": 1, "weight_stride": 1, "WIDEN": False, **config.kwargs, **flags}
    aligned = [
        name for name in signature if signature[name].startswith("*") or name in ("width", "row_stride", "column_stride")
    ]
    attributes = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_for_a_gpu_with_every_statistic_on(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard.scoring.kernels.triton_kernels import _configs, _fitting

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    named = {"row_bucket": 128, "hidden": torch.zeros(1, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])}
    config = _fitting(_configs(), named)[0]
    flags = {"HAS_BIAS": True, "HAS_CAP": True, "MOMENTS": True, "RANKS": True, "SLOTS": 4}
    compiled = compile_for_hopper(dtype, config, **flags)
    assert compiled.metadata.shared <= 227 * 1024  # what a multiprocessor of that generation has
    assert ("wgmma" in compiled.asm["ptx"]) == (dtype == "bf16")  # float32 products take no shorter format
    assert "tf32" not in compiled.asm["ptx"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bucket", [16, 64, 128])
def test_every_kind_of_shape_has_tiles_to_choose_from(bucket: int, dtype: torch.dtype) -> None:
    from memguard.scoring.kernels.triton_kernels import _configs, _fitting

    chosen = _fitting(_configs(), {"row_bucket": bucket, "hidden": torch.zeros(1, dtype=dtype)})
    assert chosen
    assert all(config.kwargs["BLOCK_N"] <= bucket for config in chosen)
