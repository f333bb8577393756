"""The compiled triton kernels, and the torch path on a GPU, held to the float64 reference."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from kernel_cases import Case, assert_agree, assert_ranks_agree_with_greedy, draw_case, largest_error, plain_log_prob

from memguard.scoring.kernels import choose_path, describe_paths, logit_statistics, token_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the extra triton"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 64, 1000), (16, 576, 4097), (17, 100, 515), (64, 33, 131), (200, 256, 5000), (700, 1024, 3001)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", ["triton", "torch"])
def test_every_statistic_equals_the_reference(path: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, width, vocabulary = shape
    case = draw_case(num_rows, width, vocabulary, dtype=dtype, device="cuda", moments=True, ranks=True)
    assert_agree(case.run(path), case.run("reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 40, 300])
def test_bias_scale_cap_padding_and_ragged_targets_equal_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    case = draw_case(
        num_rows, 128, 2000, dtype=dtype, device="cuda", num_targets=3 * num_rows + 40, padding=48, with_bias=True,
        scale=0.5, soft_cap=10.0, moments=True, ranks=True,
    )  # fmt: skip
    assert_agree(case.run("triton"), case.run("reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [576, 4096])
def test_low_precision_is_no_worse_than_plain_torch_in_that_dtype(dtype: torch.dtype, width: int) -> None:
    case = draw_case(128, width, 20_000, dtype=dtype, device="cuda")
    exact = case.run("reference").log_prob
    error = largest_error(case.run("triton").log_prob, exact)
    assert error <= largest_error(plain_log_prob(case), exact)
    assert error < 5e-5  # products are kept in float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rank_interval_holds_the_true_rank_of_products_of_one_sign(dtype: torch.dtype) -> None:
    case = draw_case(64, 4096, 2000, dtype=dtype, device="cuda", ranks=True)
    coherent = Case(case.hidden.abs(), case.weight.abs(), case.targets, case.options)
    found, exact = coherent.run("triton"), coherent.run("reference")
    assert_ranks_agree_with_greedy(found)
    assert ((found.rank_low <= exact.rank_low) & (exact.rank_high <= found.rank_high)).all()


def test_equal_inputs_give_equal_bits() -> None:
    case = draw_case(33, 512, 10_000, dtype=torch.bfloat16, device="cuda", moments=True, ranks=True)
    one, other = case.run("triton"), case.run("triton")
    for name in ("log_prob", "logsumexp", "argmax", "variance_log_prob", "rank_high"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_equal_columns_tie_across_tiles_and_parts() -> None:
    weight = torch.zeros(50_000, 16, dtype=torch.bfloat16, device="cuda")
    weight[[129, 20_000, 49_999], 0] = 2.0
    hidden = torch.ones(3, 16, dtype=torch.bfloat16, device="cuda")
    found = token_statistics(hidden, weight, torch.tensor([129, 20_000, 0], device="cuda"), ranks=True, path="triton")
    assert found.argmax.tolist() == [129] * 3
    assert found.num_top_ties.tolist() == [3] * 3
    assert found.is_greedy.tolist() == [True, False, False]
    assert (found.rank_low.tolist(), found.rank_high.tolist()) == ([1, 1, 4], [3, 3, 50_000])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_gives_no_plausible_number(value: float) -> None:
    case = draw_case(20, 64, 3000, dtype=torch.bfloat16, device="cuda", moments=True, ranks=True)
    case.hidden[7, 3] = value
    found, exact = case.run("triton"), case.run("reference")
    assert found.log_prob.isnan().nonzero().tolist() == [[7]]
    assert_agree(found, exact)


def test_logits_never_stand_in_memory() -> None:
    case = draw_case(4096, 64, 50_000, dtype=torch.bfloat16, device="cuda", moments=True, ranks=True)
    case.run("triton")  # tuning has its own buffers
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.run("triton")
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # the logits would take 400 MB in bf16


def test_a_weight_of_more_than_two_to_the_31_entries_is_read_to_its_end() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GB")
    weight = torch.zeros(270_000, 8192, dtype=torch.bfloat16, device="cuda")
    weight[-1, 0] = 3.0
    hidden = torch.ones(2, 8192, dtype=torch.bfloat16, device="cuda")
    found = token_statistics(hidden, weight, torch.tensor([269_999, 0], device="cuda"), path="triton")
    assert found.argmax.tolist() == [269_999] * 2
    total = torch.tensor(269_999.0).log1p()  # log(e^3 + 269,999) differs from this by 7e-5
    assert found.log_prob.tolist() == pytest.approx([3.0 - total.item(), -total.item()], abs=1e-4)


def test_half_precision_takes_the_kernels_and_float32_the_blocks() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    assert choose_path(torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda")) == "triton"
    assert choose_path(torch.zeros(1, 1, device="cuda")) == "torch"
    assert describe_paths()[1].startswith("cuda: triton kernels")


def test_given_logits_on_a_gpu_equal_those_on_a_cpu() -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(50)
    here, there = (logit_statistics(logits.to(place), targets.to(place), ranks=True) for place in ("cpu", "cuda"))
    torch.testing.assert_close(there.log_prob.cpu(), here.log_prob)
    assert torch.equal(there.rank_high.cpu(), here.rank_high)
    assert torch.equal(there.argmax.cpu(), here.argmax)
