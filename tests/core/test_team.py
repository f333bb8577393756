"""Several ranks: the figures of one, alike on all, in equally many forward calls; a failure of one is one of all."""

from __future__ import annotations

import contextlib
import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import count_forwards, sharded, team_of_threads, two_processes

from memguard.errors import InputError, MissingExtraError, NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.certified import PriorPrefixes
from memguard.scoring.continuations import continue_greedily
from memguard.scoring.failures import NoRoomError
from memguard.scoring.heads import is_sharded, is_tensor_parallel
from memguard.scoring.near_verbatim import near_verbatim_log_probs
from memguard.scoring.sampling import Sampler, score_under_sampler
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.team import Team
from memguard.scoring.token_scores import score_tokens
from memguard.scoring.trees import ExplicitTree
from memguard.scoring.walk import TreeWalk


def spans_of(number: int, *, shared: int = 0, seed: int = 0) -> list[Span]:
    """Spans of 3 to 6 tokens behind prefixes of 4 to 9, and some of 4 tokens behind one prefix."""
    draw = np.random.default_rng(seed)
    spans = []
    for index in range(number):
        start, length = int(draw.integers(4, 10)), int(draw.integers(3, 7))
        spans.append(Span(tuple(draw.integers(1, 512, start + length).tolist()), start, start + length, f"span {index}"))
    prefix = tuple(draw.integers(1, 512, 5).tolist())
    tails = [tuple(draw.integers(1, 512, 4).tolist()) for _ in range(shared)]
    return [*spans, *(Span((*prefix, *tail), 5, 9, f"tail {index}") for index, tail in enumerate(tails))]


def everything(scorer: Scorer, spans: list[Span]) -> dict[str, Any]:
    """Every kind of score there is, as plain values."""
    scores = scorer.score(spans)
    tokens = score_tokens(scorer, spans, moments=True)
    walk = TreeWalk(scorer.model, scorer.batches, spans[0].prefix_ids, ExplicitTree([(1, 2, 3), (1, 4), (2, 2), (7, 8, 9)]))
    walk.advance(-math.inf)
    prefixes = PriorPrefixes(scorer, [span.prefix_ids for span in spans])
    state = prefixes.begin((3, 4, 5))
    prefixes.decide(state, lambda _: None)
    return {
        "spans": scores.log_probs.tolist(),
        "greedy": scores.is_greedy.tolist(),
        "tokens": [one.log_probs.tolist() for one in tokens],
        "variances": [one.variance_log_probs.tolist() for one in tokens],  # type: ignore[union-attr]
        "sampler": score_under_sampler(scorer, spans, Sampler(top_p=0.99)).tolist(),
        "near": near_verbatim_log_probs(scorer, spans[:3], Sampler(top_k=40), max_edits=1, num_beams=4).tolist(),
        "dead": near_verbatim_log_probs(scorer, spans[:3], Sampler(top_k=1), max_edits=0, num_beams=4).tolist(),
        "written": continue_greedily(scorer, [span.prefix_ids for span in spans], num_tokens=5),
        "walked": walk.found(),
        "prior": state.log_products.tolist(),
        "notices": scorer.notices,
        "max_rows": scorer.batches.max_rows,
    }


def on_threads(model: Any, spans: list[Span], *, size: int = 2, spoil: Any = None, **options: Any) -> list[Any]:
    """`everything` on some ranks, each with a copy of the model; what it gave, and the forward calls it took."""

    def work(team: Team) -> tuple[dict[str, Any], int]:
        mine = copy.deepcopy(model).eval()
        if spoil is not None:
            spoil(mine, team.rank)
        calls = count_forwards(mine)
        with team.guarded():
            return everything(Scorer(mine, team=team, **options), spans), len(calls)

    return team_of_threads(size, work)


class Plain(torch.nn.Module):
    """A model that names neither a head nor a cache: whole rows, its own logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(("number", "shared", "size"), [(1, 0, 3), (7, 5, 2), (4, 1, 3), (9, 11, 3)])
def test_ranks_find_exactly_what_one_process_finds_in_equally_many_forward_calls(
    tiny_model: Any, number: int, shared: int, size: int, is_plain: bool
) -> None:
    spans, model = spans_of(number, shared=shared), Plain(tiny_model) if is_plain else tiny_model
    with audit_mode(model) as inner:
        alone = everything(Scorer(inner, batch_size=2), spans)
    results = on_threads(model, spans, size=size, batch_size=2)
    # Batches are cut as one process cuts them and each is run whole on one rank: no figure differs in its last bit.
    assert [found for found, _ in results] == [alone] * size
    assert len({calls for _, calls in results}) == 1


def test_the_work_is_split(tiny_model: Any) -> None:
    spans = spans_of(40)
    sent: dict[int, int] = {}

    def work(team: Team) -> None:
        scorer = Scorer(copy.deepcopy(tiny_model).eval(), batch_size=4, team=team)
        scorer.score(spans)
        sent[team.rank] = scorer.model.num_token_forwards

    assert team_of_threads(2, work) == [None, None]
    with audit_mode(tiny_model) as inner:
        alone = Scorer(inner, batch_size=4)
        alone.score(spans)
    # 40 rows, four a batch, five batches a rank: half of the tokens, but for the check that every rank makes.
    assert max(sent.values()) < 0.65 * alone.model.num_token_forwards


def test_ranks_whose_arithmetic_differs_hold_the_same_scores_and_walk_by_those_of_rank_0(tiny_model: Any) -> None:
    def spoil(model: Any, rank: int) -> None:
        model.model.norm.weight.mul_(1.0 + 1e-3 * rank)

    spans = spans_of(6, shared=4)
    (first, _), (second, _) = on_threads(tiny_model, spans, spoil=spoil, batch_size=2)
    assert first == second
    with audit_mode(tiny_model) as inner:
        alone = everything(Scorer(inner, batch_size=2), spans)
    assert first["walked"] == alone["walked"]
    assert first["spans"] != alone["spans"]


def test_a_tensor_parallel_model_is_given_the_same_rows_on_every_rank(tiny_model: Any) -> None:
    seen: dict[int, list[list[list[int]]]] = {0: [], 1: []}

    def spoil(model: Any, rank: int) -> None:
        model._tp_size = 2
        model.register_forward_pre_hook(lambda _, __, given: seen[rank].append(given["input_ids"].tolist()), with_kwargs=True)

    spans = spans_of(7, shared=5)
    with audit_mode(tiny_model) as inner:
        alone = everything(Scorer(inner, batch_size=2), spans)
    assert [found for found, _ in on_threads(tiny_model, spans, spoil=spoil, batch_size=2)] == [alone, alone]
    assert seen[0] == seen[1]


Cut, Whole = (SimpleNamespace(is_replicate=lambda answer=answer: answer) for answer in (False, True))


@pytest.mark.parametrize(
    ("kind", "placements", "expected"),
    [
        ("Linear", None, (False, False)),
        ("Linear", (Cut,), (True, True)),
        ("Linear", (Whole,), (False, True)),
        ("FSDPModule", (Cut,), (False, True)),  # FSDP2
        ("FSDPModule", (Whole, Cut), (False, True)),  # the same within each of several copies
        ("FSDPModule", (Cut, Cut), (True, True)),  # FSDP2 over a tensor-parallel model
        ("DeepSpeedEngine", None, (False, True)),
    ],
)
def test_models_whose_ranks_need_the_same_rows_and_models_that_are_sharded_are_told(
    kind: str, placements: Any, expected: tuple[bool, bool]
) -> None:
    model = type(kind, (torch.nn.Linear,), {})(2, 2)
    if placements is not None:
        model.weight.placements = placements
    assert (is_tensor_parallel(model), is_sharded(model)) == expected


def test_weights_that_deepspeed_holds_elsewhere_are_sharded() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[attr-defined]
    assert is_sharded(model)


def test_nan_on_one_rank_is_the_same_error_on_all(tiny_model: Any) -> None:
    def spoil(model: Any, rank: int) -> None:
        if rank == 1:
            model.model.norm.weight.fill_(math.nan)

    first, second = on_threads(tiny_model, spans_of(7), spoil=spoil, batch_size=2)
    assert type(first) is type(second) is NonFiniteScoreError
    assert str(first) == str(second)
    assert "the score of span" in str(first)


@pytest.mark.parametrize("call", [1, 9, 12, 30])
def test_an_exception_in_the_forward_of_one_rank_is_the_same_error_on_all(tiny_model: Any, call: int) -> None:
    def spoil(model: Any, rank: int) -> None:
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if rank == 1 and len(calls) == call:
                raise KeyError("4000 1234")

        model.register_forward_pre_hook(fail)

    first, second = on_threads(tiny_model, spans_of(7, shared=3), spoil=spoil, batch_size=2)
    if call == 9:  # within the check of branching, a failure is a road not taken, by nobody
        assert first == second
        assert "prefixes are not shared: branching from a cache raised KeyError." in first[0]["notices"]
        return
    assert type(first) is type(second) is ScoringError
    assert str(first) == str(second)
    assert "failed with KeyError. The model itself raised it." in str(first)
    assert "4000" not in str(first)


def test_memory_that_ends_on_one_rank_halves_the_batches_of_all_and_scores_stay(tiny_model: Any) -> None:
    def spoil(model: Any, rank: int) -> None:
        def refuse(_: Any, __: Any, options: dict[str, Any]) -> None:
            if rank == 1 and len(options["input_ids"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(refuse, with_kwargs=True)

    spans = spans_of(20, shared=9)

    def work(team: Team) -> tuple[list[float], int, int]:
        mine = copy.deepcopy(tiny_model).eval()
        spoil(mine, team.rank)
        scorer = Scorer(mine, batch_size=8, team=team)
        return scorer.score(spans).log_probs.tolist(), scorer.batches.max_rows, scorer.model.num_forwards

    first, second = team_of_threads(2, work)
    with audit_mode(tiny_model) as inner:
        alone = Scorer(inner, batch_size=8).score(spans).log_probs
    assert first[:2] == second[:2]
    assert first[1] <= 3
    assert first[0] == pytest.approx(alone, abs=1e-4)


def test_a_row_that_does_not_fit_on_one_rank_is_an_error_on_all(tiny_model: Any) -> None:
    def spoil(model: Any, rank: int) -> None:
        def refuse(_: Any, __: Any, options: dict[str, Any]) -> None:
            if rank == 1 and options["input_ids"].shape[1] > 13:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_pre_hook(refuse, with_kwargs=True)

    spans = [*spans_of(3), Span(tuple(range(1, 20)), 15, 19, "a long one"), Span(tuple(range(2, 21)), 15, 19, "another")]
    for error in on_threads(tiny_model, spans, spoil=spoil, batch_size=1):
        assert type(error) is NoRoomError
        assert "One row alone needs more memory than there is" in str(error)


def test_ranks_that_ask_for_different_things_are_told(tiny_model: Any) -> None:
    def work(team: Team) -> None:
        team.gather(f"step {team.rank}", 1)

    for error in team_of_threads(2, work):
        assert isinstance(error, ScoringError)
        assert str(error) == "all ranks must audit the same things in the same order, got 'step 0', 'step 1'."


@pytest.mark.parametrize(
    ("failure", "of_the_others"),
    [
        (InputError("plan 'x' must exist."), "plan 'x' must exist."),
        (KeyError("4000 1234"), "rank 1 failed with KeyError."),
        (MissingExtraError("zlib", "hf"), "rank 1 failed with MissingExtraError."),
    ],
)
def test_a_rank_that_leaves_takes_the_others_with_it(failure: Exception, of_the_others: str) -> None:
    def work(team: Team) -> None:
        with team.guarded():
            if team.rank == 1:
                raise failure
            with contextlib.suppress(ScoringError):  # a part of the audit that swallows what goes wrong in it
                team.gather("something", 1)
            team.gather("something else", 1)

    first, second, third = team_of_threads(3, work)
    assert second is failure
    assert str(first) == str(third) == of_the_others


def test_ranks_that_all_fail_raise_their_own_errors_and_can_go_on() -> None:
    def work(team: Team) -> list[int]:
        with pytest.raises(ValueError, match=f"bad {team.rank}"), team.guarded():
            raise ValueError(f"bad {team.rank}")
        return team.gather("afterwards", team.rank)

    assert team_of_threads(2, work) == [[0, 1], [0, 1]]


def test_a_group_that_broke_is_one_sentence() -> None:
    def broken(_: Any) -> list[Any]:
        raise RuntimeError("Connection closed by peer [10.0.0.1]")

    team = Team(0, 2, broken)
    with pytest.raises(ScoringError, match=r"the other ranks could not be reached: RuntimeError\."), team.guarded():
        team.gather("something", 1)


def test_without_a_process_group_there_is_no_team() -> None:
    assert Team.current().is_alone
    assert Team.alone().agreed("anything", 5) == 5


def scored_under_fsdp2(model: Any, spans: list[Span]) -> tuple[dict[str, Any], int, bool, bool]:
    """On one of two ranks: all scores, forward calls, whether the head was lifted, whether all weights are cut again."""
    from torch.distributed.tensor import DTensor

    whole = sharded(model)
    calls = count_forwards(whole)
    with audit_mode(whole) as inner:
        scorer = Scorer(inner, batch_size=2, team=Team.current())
        found = everything(scorer, spans)
    is_cut = all(isinstance(one, DTensor) and one.requires_grad for one in whole.parameters())
    return found, len(calls), scorer.model.is_fused, is_cut


def test_fsdp2_on_two_ranks_gives_the_scores_of_one_process(tiny_model: Any, tmp_path: Any) -> None:
    spans = spans_of(5, shared=4)
    with audit_mode(tiny_model) as inner:
        alone = everything(Scorer(inner, batch_size=2), spans)
    (first, calls, is_fused, is_cut), second = two_processes(tmp_path, scored_under_fsdp2, tiny_model, spans)
    assert second == (first, calls, is_fused, is_cut)
    assert (is_fused, is_cut) == (False, True)
    for name in ("spans", "sampler", "prior"):
        assert first[name] == pytest.approx(alone[name], abs=1e-5), name
    assert first["written"] == alone["written"]
    assert "the head is run by the model itself: the model is sharded." in first["notices"]
