"""The torch path equals the float64 reference over odd shapes; identities hold exactly; memory is bounded."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, assert_agree, assert_ranks_agree_with_greedy, draw_case, largest_error, plain_log_prob
from torch import Tensor

from memguard.scoring.kernels import logit_statistics, token_statistics, torch_blocks
from memguard.scoring.kernels.reference import reference_from_logits
from memguard.scoring.kernels.results import Moments, Partial, merge, merge_stacked

LN2 = math.log(2)


@st.composite
def cases(draw: Any) -> Any:
    num_rows, num_targets = draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 20))
    return draw_case(
        num_rows,
        draw(st.integers(1, 20)),
        draw(st.integers(1, 70)),
        seed=draw(st.integers(0, 2**20)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        num_targets=num_targets if num_rows else draw(st.sampled_from([None, 0])),
        padding=draw(st.sampled_from([0, 5])),
        with_bias=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.0625, 3.0])),
        soft_cap=draw(st.sampled_from([None, 2.0, 30.0])),
        moments=draw(st.booleans()),
        ranks=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(cases(), st.none() | st.integers(1, 80))
def test_the_torch_path_equals_the_reference(case: Any, block_size: int | None) -> None:
    assert_agree(case.run(block_size=block_size), case.run("reference"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.integers(0, 2**20), st.sampled_from([None, 1, 7, 64]), st.data())
def test_statistics_of_given_logits_equal_the_reference_with_exact_ranks(
    num_rows: int, width: int, seed: int, block_size: int | None, data: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    logits = torch.randn(num_rows, width, generator=generator).mul(3).round(decimals=1).to(dtype)  # ties are common
    number = data.draw(st.integers(0, 12)) if num_rows else 0
    rows = torch.randint(max(1, num_rows), (number,), generator=generator)
    kept = data.draw(st.integers(1, width))
    targets = torch.randint(kept, (number,), generator=generator)
    options: dict[str, Any] = {"rows": rows, "vocabulary_size": kept, "moments": True, "ranks": True}
    before = logits.clone()
    found, exact = (
        logit_statistics(logits, targets, block_size=block_size, **options),
        reference_from_logits(logits, targets, **options),
    )
    assert_agree(found, exact)
    assert torch.equal(found.rank_low, exact.rank_low)
    assert torch.equal(found.rank_high, exact.rank_high)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_rows", [513, 1030])
def test_rows_in_several_chunks_equal_the_reference_with_targets_in_any_order(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_blocks, "CPU_ROWS", 512)
    case = draw_case(num_rows, 7, 300, num_targets=1500, moments=True, ranks=True, soft_cap=5.0, with_bias=True)
    assert_agree(case.run(block_size=128), case.run("reference"))


def test_many_targets_of_one_row_keep_their_order() -> None:
    case = draw_case(1, 16, 1000, num_targets=0, ranks=True)
    targets = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    found = token_statistics(case.hidden, case.weight, targets, rows=torch.zeros(1000, dtype=torch.long), ranks=True)
    logits = case.weight.double() @ case.hidden[0].double()
    assert found.log_prob.double().exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    ranks = 1 + logits.argsort(descending=True).argsort()[targets]
    assert ((found.rank_low <= ranks) & (ranks <= found.rank_high)).all()
    assert found.is_greedy.sum() == 1


def test_entropy_mean_and_variance_are_those_worked_out_by_hand() -> None:
    # p = (1/2, 1/4, 1/4): log p = -ln 2 * (1, 2, 2), so the mean is -ln 2 * (1/2 + 1/2 + 1/2) = -1.5 ln 2 and the entropy
    # 1.5 ln 2; the mean square is ln^2 2 * (1/2 + 1 + 1) = 2.5 ln^2 2, so the variance is (2.5 - 2.25) ln^2 2.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log() + 3
    for block_size in (None, 1, 2):
        found = logit_statistics(logits, torch.tensor([1]), moments=True, block_size=block_size)
        assert found.entropy.item() == pytest.approx(1.5 * LN2, abs=1e-6)
        assert found.mean_log_prob.item() == pytest.approx(-1.5 * LN2, abs=1e-6)
        assert found.variance_log_prob.item() == pytest.approx(0.25 * LN2**2, abs=1e-6)
        assert found.logsumexp.item() == pytest.approx(3, abs=1e-6)
        assert found.log_prob.item() == pytest.approx(-2 * LN2, abs=1e-6)


@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("block_size", [None, 1])
def test_logits_of_ten_thousand_lose_nothing(offset: float, block_size: int | None) -> None:
    # offset + (0, 0.5, 2) are exact in float32, where z - logsumexp would be wrong by up to 5e-4
    logits = torch.tensor([[0.0, 0.5, 2.0]]) + offset
    options: dict[str, Any] = {"rows": torch.tensor([0, 0, 0]), "moments": True}
    found = logit_statistics(logits, torch.tensor([0, 1, 2]), block_size=block_size, **options)
    exact = reference_from_logits(logits, torch.tensor([0, 1, 2]), **options)
    assert largest_error(found.log_prob, exact.log_prob) < 5e-7
    assert found.variance_log_prob.item() == pytest.approx(exact.variance_log_prob.item(), abs=1e-6)
    far = logit_statistics(torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([1]), moments=True, block_size=block_size)
    assert far.log_prob.item() == -2e4
    assert far.entropy.item() == 0


@pytest.mark.parametrize("block_size", [None, 2, 4])
def test_moments_survive_blocks_far_below_the_maximum(block_size: int | None) -> None:
    # p = (1/2, 1/2) in the last block: the entropy is ln 2 and the variance 0, wherever the other blocks lie
    logits = torch.tensor([[-torch.inf, -torch.inf, -900.0, -150.0, 0.0, 0.0]])
    found = logit_statistics(logits, torch.tensor([4]), moments=True, block_size=block_size)
    assert found.entropy.item() == pytest.approx(LN2, abs=1e-7)
    assert found.variance_log_prob.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 1, 2, 3])
def test_the_lowest_of_equal_columns_is_the_argmax_and_all_are_counted(block_size: int | None) -> None:
    weight = torch.tensor([[1.0], [3.0], [0.0], [3.0], [3.0]])  # duplicates, exact products
    found = token_statistics(
        torch.tensor([[1.0], [-1.0]]),
        weight,
        torch.tensor([1, 3, 0, 2]),
        rows=torch.tensor([0, 0, 0, 1]),
        ranks=True,
        block_size=block_size,
    )
    assert found.argmax.tolist() == [1, 2]
    assert found.num_top_ties.tolist() == [3, 1]
    assert found.is_greedy.tolist() == [True, False, False, True]
    assert found.rank_low.tolist() == [1, 1, 4, 1]
    assert found.rank_high.tolist() == [3, 3, 4, 1]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([None, 1, 3, 8]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_identities_hold_among_near_ties(seed: int, block_size: int | None, dtype: torch.dtype) -> None:
    case = draw_case(6, 11, 24, seed=seed, dtype=dtype, num_targets=40, ranks=True)
    nudged = case.weight + case.weight.roll(1, 0) * 1e-7  # neighbours closer than a product's rounding
    weight = torch.cat([case.weight, nudged])
    found = token_statistics(case.hidden, weight, case.targets, block_size=block_size, **case.options)
    exact = token_statistics(case.hidden, weight, case.targets, path="reference", **case.options)
    assert_ranks_agree_with_greedy(found)
    assert ((found.rank_low <= exact.rank_low) & (exact.rank_high <= found.rank_high)).all()


@pytest.mark.parametrize("width", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rank_interval_holds_the_true_rank_of_products_of_one_sign(dtype: torch.dtype, width: int) -> None:
    case = draw_case(16, width, 800, dtype=dtype, num_targets=200)
    coherent = Case(case.hidden.abs(), case.weight.abs(), case.targets, case.options | {"ranks": True})
    found, exact = coherent.run(), coherent.run("reference")
    assert_ranks_agree_with_greedy(found)
    assert ((found.rank_low <= exact.rank_low) & (exact.rank_high <= found.rank_high)).all()


def test_the_rounding_band_is_narrow() -> None:
    case = draw_case(200, 256, 4096, ranks=True)
    found = case.run()
    assert (found.rank_high - found.rank_low).float().mean() < 0.5  # among 4,096 columns


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_band_widens_where_torch_may_shorten_float32_products(precision: str) -> None:
    case = draw_case(20, 64, 500, ranks=True)
    exact, before = case.run("reference"), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        found = case.run()
    finally:
        torch.set_float32_matmul_precision(before)
    assert_ranks_agree_with_greedy(found)
    assert ((found.rank_low <= exact.rank_low) & (exact.rank_high <= found.rank_high)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 576])
def test_low_precision_is_no_worse_than_plain_torch_in_that_dtype(dtype: torch.dtype, width: int) -> None:
    case = draw_case(50, width, 2000, dtype=dtype)
    exact = case.run("reference").log_prob
    error, plain = largest_error(case.run().log_prob, exact), largest_error(plain_log_prob(case), exact)
    assert error <= plain
    assert error < 1e-5  # products are kept in float32


def test_given_bf16_logits_are_reduced_as_plain_torch_reduces_them() -> None:
    case = draw_case(40, 32, 1500, dtype=torch.bfloat16)
    logits = case.hidden @ case.weight.T
    found = logit_statistics(logits, case.targets)
    plain, exact = plain_log_prob(case), reference_from_logits(logits, case.targets)
    assert largest_error(found.log_prob, exact.log_prob) <= largest_error(plain, exact.log_prob) + 1e-6
    assert torch.equal(found.argmax, logits.argmax(dim=-1))  # what generate writes, ties and all


@pytest.mark.parametrize("block_size", [None, 2])
@pytest.mark.parametrize("poison", ["nan", "inf", "all -inf"])
def test_a_row_that_is_no_distribution_gives_no_plausible_number(poison: str, block_size: int | None) -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    if poison == "all -inf":
        logits[1] = -torch.inf
    else:
        logits[1, 3] = float(poison)
    options: dict[str, Any] = {"moments": True, "ranks": True}
    found = logit_statistics(logits, torch.tensor([0, 1, 2]), block_size=block_size, **options)
    assert_agree(found, reference_from_logits(logits, torch.tensor([0, 1, 2]), **options))
    for name in ("log_prob", "logsumexp", "entropy", "mean_log_prob", "variance_log_prob"):
        assert getattr(found, name).isnan().tolist() == [False, True, False]
    assert found.argmax[1] == found.rank_low[1] == found.rank_high[1] == -1
    assert found.num_top_ties[1] == 0
    assert not found.is_greedy[1]


@pytest.mark.parametrize("poisoned", ["hidden", "weight", "bias"])
def test_a_nan_anywhere_in_the_head_is_not_hidden(poisoned: str) -> None:
    case = draw_case(4, 6, 30, with_bias=True, ranks=True)
    {"hidden": case.hidden[2], "weight": case.weight[7], "bias": case.options["bias"]}[poisoned][3] = torch.nan
    wanted = [False, False, True, False] if poisoned == "hidden" else [True] * 4
    for block_size in (None, 8):
        assert case.run(block_size=block_size).log_prob.isnan().tolist() == wanted


def test_a_nan_in_a_padded_row_is_left_out_with_the_row() -> None:
    case = draw_case(4, 6, 30, padding=2, ranks=True, moments=True)
    clean = case.run()
    case.weight[31] = torch.nan
    assert_agree(case.run(), case.run("reference"))
    assert torch.equal(case.run().log_prob, clean.log_prob)


def test_padded_columns_stay_in_the_normaliser_unless_the_vocabulary_is_named() -> None:
    case = draw_case(5, 8, 40)
    padded = torch.cat([case.weight, torch.zeros(24, 8)])
    kept = token_statistics(case.hidden, padded, case.targets)
    left_out = token_statistics(case.hidden, padded, case.targets, vocabulary_size=40)
    torch.testing.assert_close(left_out.log_prob, case.run().log_prob)
    assert (kept.log_prob < left_out.log_prob).all()


def test_a_column_of_minus_infinity_contributes_nothing_and_can_be_asked_for() -> None:
    case = draw_case(3, 8, 20, moments=True, ranks=True)
    bias = torch.zeros(20)
    bias[5:10] = -torch.inf
    targets = torch.tensor([5, 6, 0])
    found = token_statistics(case.hidden, case.weight, targets, bias=bias, moments=True, ranks=True, block_size=5)
    rest = token_statistics(case.hidden, case.weight[[*range(5), *range(10, 20)]], torch.tensor([0, 0, 0]), moments=True)
    assert found.log_prob[:2].tolist() == [-torch.inf, -torch.inf]
    torch.testing.assert_close(found.logsumexp, rest.logsumexp)
    torch.testing.assert_close(found.entropy, rest.entropy)
    torch.testing.assert_close(found.variance_log_prob, rest.variance_log_prob)
    assert found.rank_low[:2].tolist() == [16, 16]
    assert found.rank_high[:2].tolist() == [20, 20]


def test_tensors_that_are_not_contiguous_give_the_same() -> None:
    case = draw_case(6, 10, 50, ranks=True, with_bias=True)
    wide = torch.stack([case.weight, case.weight], dim=-1)[..., 0]
    tall = torch.stack([case.hidden.T, case.hidden.T], dim=0)[1].T
    every_other = torch.stack([case.targets, case.targets], dim=1)[:, 0]
    bias = torch.stack([case.options["bias"]] * 2, dim=1)[:, 1]
    assert not any(tensor.is_contiguous() for tensor in (wide, tall, every_other, bias))
    found = token_statistics(tall, wide, every_other, ranks=True, bias=bias, block_size=16)
    assert_agree(found, case.run("reference"))
    logits = case.hidden @ case.weight.T
    turned = logits.T.contiguous().T
    assert torch.equal(logit_statistics(turned, case.targets).log_prob, logit_statistics(logits, case.targets).log_prob)


def test_equal_rows_and_targets_give_equal_statistics() -> None:
    case = draw_case(1, 12, 60)
    hidden, targets = case.hidden.expand(40, -1), case.targets.expand(40)
    found = token_statistics(hidden, case.weight, targets, moments=True, ranks=True)
    for name in ("log_prob", "logsumexp", "argmax", "entropy", "rank_low"):
        values = getattr(found, name)
        torch.testing.assert_close(values, values[:1].expand(40))
    ragged = token_statistics(case.hidden, case.weight, targets, rows=torch.zeros(40, dtype=torch.long))
    assert ragged.log_prob.unique().numel() == 1


def test_hidden_states_that_need_a_gradient_are_read_without_one() -> None:
    case = draw_case(3, 8, 20, with_bias=True)
    found = token_statistics(case.hidden.requires_grad_(), case.weight.requires_grad_(), case.targets, **case.options)
    assert not found.log_prob.requires_grad


def partial_of(logits: Tensor, first: int) -> Partial:
    """The definition of a part, in the dtype of its logits."""
    maximum = logits.amax(dim=1)
    weights = (logits - maximum[:, None]).exp()
    total = weights.sum(dim=1)
    away = logits - maximum[:, None]
    mean = (weights * away).sum(dim=1) / total
    spread = (weights * (away - mean[:, None]).square()).sum(dim=1)
    ties = (logits == maximum[:, None]).sum(dim=1)
    return Partial(maximum, total, first + logits.argmax(dim=1), ties, Moments(mean, spread))


def assert_same_partial(one: Partial, other: Partial) -> None:
    pairs = [(one.maximum, other.maximum), (one.total, other.total), (one.argmax, other.argmax), (one.num_ties, other.num_ties)]
    pairs += [(one.moments.mean, other.moments.mean), (one.moments.spread, other.moments.spread)]
    for left, right in pairs:
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 2**20), st.sampled_from([1.0, 100.0]))
def test_merged_parts_are_the_whole_in_pairs_and_all_at_once(widths: list[int], seed: int, size: float) -> None:
    logits = torch.randn(4, sum(widths), dtype=torch.double, generator=torch.Generator().manual_seed(seed)) * size
    logits = logits.round(decimals=1)
    starts = [0, *accumulate(widths)]
    parts = [partial_of(logits[:, first : first + width], first) for first, width in zip(starts, widths, strict=False)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge(merged, part)
    assert_same_partial(merged, partial_of(logits, 0))

    def stack(values: list[Tensor]) -> Tensor:
        return torch.stack(values)

    stacked = Partial(
        stack([part.maximum for part in parts]),
        stack([part.total for part in parts]),
        stack([part.argmax for part in parts]),
        stack([part.num_ties for part in parts]),
        Moments(
            stack([part.moments.mean for part in parts if part.moments]),
            stack([part.moments.spread for part in parts if part.moments]),
        ),
    )
    assert_same_partial(merge_stacked(stacked), merged)


def extra_bytes(num_rows: int, vocabulary: int, dtype: torch.dtype, **options: Any) -> int:
    """The most that tensors made inside one call held at a time."""
    case = draw_case(num_rows, 8, vocabulary, dtype=dtype, ranks=True, moments=True, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        case.run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extra_memory_does_not_grow_with_the_rows_or_the_vocabulary(dtype: torch.dtype) -> None:
    small = extra_bytes(2048, 4096, dtype)
    assert small < 32 * 2**20  # three blocks of 6 MB, and a block of weights
    per_row = 200  # the statistics themselves, and what sorts targets
    assert extra_bytes(8192, 4096, dtype, num_targets=8192) < small + (8192 - 2048) * per_row + 2**20
    assert extra_bytes(2048, 20_000, dtype) < small + 2**20


def test_given_low_precision_logits_are_never_copied_as_a_whole() -> None:
    logits = torch.zeros(2048, 20_000, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        logit_statistics(logits, torch.zeros(2048, dtype=torch.long), ranks=True)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))) < 16 * 2**20
