"""The triton kernels in triton's interpreter, held to the float64 reference; run by `test_kernels_triton.py`.

The interpreter must be chosen before triton is imported, so these cases have a process of their own. It is slow: every
case is small, and still has several tiles and several parts of the vocabulary (32 and 64 columns here).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, assert_agree, assert_ranks_agree_with_greedy, draw_case, largest_error, plain_log_prob

from memguard.scoring.kernels import token_statistics
from memguard.scoring.kernels.triton_kernels import is_interpreted, lay_out

# numpy stands in for the GPU, and tells of the NaN and infinities that a GPU computes without a word
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_this_process_interprets() -> None:
    assert is_interpreted()


@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_odd_shapes_equal_the_reference(data: Any) -> None:
    draw = data.draw
    case = draw_case(
        draw(st.integers(1, 18)),
        draw(st.integers(1, 20)),
        draw(st.sampled_from([1, 31, 64, 65, 130])),
        seed=draw(st.integers(0, 2**20)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        num_targets=draw(st.none() | st.integers(0, 25)),
        padding=draw(st.sampled_from([0, 5])),
        with_bias=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.0625])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
        moments=draw(st.booleans()),
        ranks=draw(st.booleans()),
    )
    assert_agree(case.run("triton"), case.run("reference"))


@pytest.mark.parametrize("num_targets", [1, 17, 40])
def test_more_targets_than_slots_keep_their_order(num_targets: int) -> None:
    case = draw_case(2, 8, 70, num_targets=num_targets, moments=True, ranks=True)
    assert_agree(case.run("triton"), case.run("reference"))


def test_targets_are_laid_out_by_row_and_found_again() -> None:
    targets, rows = torch.arange(40), torch.tensor([3] * 37 + [1, 0, 3])
    slots = lay_out(targets, rows, 5)
    assert slots.targets.shape == (7, 16)  # rows 0, 1, 2, three of row 3, row 4
    assert slots.row_map.tolist() == [0, 1, 2, 3, 3, 3, 4]
    assert slots.firsts is not None
    assert slots.firsts.tolist() == [0, 1, 2, 3, 6]
    assert torch.equal(slots.targets.view(-1)[slots.places].long(), targets)
    assert (slots.targets >= 0).sum() == 40


def test_no_row_gives_empty_statistics() -> None:
    case = draw_case(0, 8, 70, num_targets=0, ranks=True)
    assert_agree(case.run("triton"), case.run("reference"))


def test_the_lowest_of_equal_columns_wins_across_tiles_and_parts() -> None:
    weight = torch.zeros(150, 1)
    weight[[40, 70, 140]] = 2.0
    case = Case(torch.ones(1, 1), weight, torch.tensor([70]), {"ranks": True})
    found = case.run("triton")
    assert (found.argmax.item(), found.num_top_ties.item(), found.is_greedy.item()) == (40, 3, False)
    assert (found.rank_low.item(), found.rank_high.item()) == (1, 3)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_logits_of_ten_thousand_lose_nothing(offset: float) -> None:
    weight = torch.zeros(70, 1)
    weight[3], weight[66] = 0.5, 2.0
    case = Case(torch.ones(1, 1), weight + offset, torch.tensor([66]), {"moments": True})
    found, exact = case.run("triton"), case.run("reference")
    assert largest_error(found.log_prob, exact.log_prob) < 5e-7
    assert_agree(found, exact, tolerance=1e-6)


@pytest.mark.parametrize("poisoned", ["hidden", "weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_gives_no_plausible_number(poisoned: str, value: float) -> None:
    case = draw_case(3, 4, 100, moments=True, ranks=True)
    getattr(case, poisoned)[1, 2] = value
    found, exact = case.run("triton"), case.run("reference")
    assert found.log_prob.isnan().any()
    assert_agree(found, exact)


def test_a_row_without_any_finite_logit_is_no_distribution() -> None:
    case = draw_case(2, 4, 70, moments=True, ranks=True, bias=torch.full((70,), -torch.inf))
    assert case.run("triton").log_prob.isnan().all()
    assert_agree(case.run("triton"), case.run("reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_torch_in_that_dtype(dtype: torch.dtype) -> None:
    case = draw_case(6, 40, 130, dtype=dtype)
    exact = case.run("reference").log_prob
    assert largest_error(case.run("triton").log_prob, exact) <= largest_error(plain_log_prob(case), exact)


def test_identities_hold_among_near_ties() -> None:
    case = draw_case(4, 11, 40, num_targets=30, ranks=True)
    weight = torch.cat([case.weight, case.weight + case.weight.roll(1, 0) * 1e-7])
    found = token_statistics(case.hidden, weight, case.targets, path="triton", **case.options)
    exact = token_statistics(case.hidden, weight, case.targets, path="reference", **case.options)
    assert_ranks_agree_with_greedy(found)
    assert ((found.rank_low <= exact.rank_low) & (exact.rank_high <= found.rank_high)).all()


def test_tensors_that_are_not_contiguous_give_the_same() -> None:
    case = draw_case(5, 6, 70)
    turned = Case(case.hidden.T.contiguous().T, case.weight.T.contiguous().T, case.targets, {})
    assert not turned.weight.is_contiguous()
    assert torch.equal(turned.run("triton").log_prob, case.run("triton").log_prob)
