"""Trees are walked to the same scores as whole rows; ranks by search equal ranks by enumeration, with no tolerance."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import span_log_prob
from tiny_models import FAMILIES, tiny_family

from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.search import SearchResult, Standing, count_above
from memguard.scoring.trees import ExplicitTree, is_path
from memguard.scoring.walk import TreeWalk

CHECK = 9 * 6  # tokens of the self-check at most
PREFIX = (9, 4, 200, 31, 77)


def candidates_of(seed: int, *, number: int = 60, width: int = 6, depth: int = 4) -> list[tuple[int, ...]]:
    """Prefix-free candidates of one length, small alphabet: many share their first tokens."""
    rng = random.Random(seed)
    return sorted({tuple(rng.randrange(width) for _ in range(depth)) for _ in range(number)})


def varied(seed: int) -> list[tuple[int, ...]]:
    """Candidates of several lengths, closed by a token of their own so that none begins another."""
    rng = random.Random(seed)
    return sorted({(*(rng.randrange(5) for _ in range(rng.randrange(1, 5))), 500) for _ in range(40)})


def walked(scorer: Scorer, tree: ExplicitTree, number: int, **options: Any) -> np.ndarray:
    walk = TreeWalk(scorer.model, scorer.batches, PREFIX, tree, **options)
    assert walk.advance(-math.inf)
    scores = np.full(number, np.nan)
    for _, state, log_prob in walk.found():
        scores[tree.candidate_of(state)] = log_prob
    return scores


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_rows_shared_prefixes_and_trees_agree_with_the_oracle_on_every_family(name: str) -> None:
    model = tiny_family(name)
    candidates = [*candidates_of(0), *((7, *one) for one in varied(1))]
    spans = [Span((*PREFIX, *one, 3), len(PREFIX), len(PREFIX) + len(one)) for one in candidates]
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        shared = scorer.score(spans).log_probs
        whole = np.array([scorer.score([span]).log_probs[0] for span in spans])
        tree = walked(scorer, ExplicitTree(candidates), len(candidates))
    assert scorer.model.can_branch()
    expected = [span_log_prob(model, span.ids, span.start, span.end) for span in spans[::6]]
    assert whole[::6] == pytest.approx(expected, abs=1e-4)
    assert shared == pytest.approx(whole, abs=1e-4)
    assert tree == pytest.approx(whole, abs=1e-4)


def test_a_model_whose_state_cannot_be_branched_takes_the_plain_road_and_says_so() -> None:
    model = tiny_family("mamba")
    candidates = candidates_of(3, number=20)
    spans = [Span((*PREFIX, *one), len(PREFIX), len(PREFIX) + len(one)) for one in candidates]
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = scorer.score(spans).log_probs
        tree = walked(scorer, ExplicitTree(candidates), len(candidates))
    assert not scorer.model.can_branch()
    assert any("prefixes are not shared" in notice for notice in scorer.notices)
    expected = [span_log_prob(model, span.ids, span.start, span.end) for span in spans]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert tree == pytest.approx(expected, abs=1e-4)


class ForgetsItsCache(torch.nn.Module):
    """Takes a cache, and ignores it: what a wrong branch would look like."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_family("llama")
        self.config = self.inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.lm_head

    def forward(self, input_ids: Any, attention_mask: Any, cache: Any = None, use_cache: bool = False) -> Any:
        out = self.inner(input_ids, attention_mask=attention_mask[:, -input_ids.shape[1] :], use_cache=False)
        if cache is not None:
            for layer in range(2):
                cache.update(torch.zeros(len(input_ids), 2, input_ids.shape[1], 16), torch.zeros(1), layer)
        return out


def test_a_cache_that_is_not_honoured_is_noticed() -> None:
    model = ForgetsItsCache()
    spans = [Span((*PREFIX, one, 3), len(PREFIX), len(PREFIX) + 2) for one in range(5)]
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = scorer.score(spans).log_probs
    assert not scorer.model.can_branch()
    expected = [span_log_prob(model.inner, span.ids, span.start, span.end) for span in spans]
    assert scores == pytest.approx(expected, abs=1e-4)


@given(seed=st.integers(0, 999), batch=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_chunks_budgets_and_resumes_change_no_leaf(seed: int, batch: int) -> None:
    model = tiny_family("llama")
    candidates = candidates_of(seed)
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        plain = walked(Scorer(inner), tree, len(candidates))
        scorer = Scorer(inner, batch_size=batch)
        scorer.prepare([Span((*PREFIX, *candidates[0]), len(PREFIX), len(PREFIX) + 4)])
        walk = TreeWalk(scorer.model, scorer.batches, PREFIX, tree)
        budget, floors = 0, [-4.0, -9.0, -math.inf]
        while floors:
            budget += 7
            if walk.advance(floors[0], max_nodes=budget):
                found = {state for _, state, log_prob in walk.found() if log_prob >= floors[0]}
                likely = [index for index in range(len(candidates)) if plain[index] >= floors[0] + 1e-3]
                assert {tree.candidate_of(state) for state in found} >= set(likely)
                floors.pop(0)
            assert walk.num_nodes <= budget
    got = {tree.candidate_of(state): log_prob for _, state, log_prob in walk.found()}
    assert sorted(got) == list(range(len(candidates)))
    assert np.array([got[index] for index in range(len(candidates))]) == pytest.approx(plain, abs=1e-4)
    internal = {one[:depth] for one in candidates for depth in range(4)}
    assert walk.num_nodes == len(internal)  # every node once, whatever was resumed


def test_nodes_of_a_walk_do_not_grow_with_the_candidates_behind_them() -> None:
    model = tiny_family("llama")
    candidates = list(itertools.product(range(4), repeat=4))
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        walk = TreeWalk(scorer.model, scorer.batches, PREFIX, ExplicitTree(candidates))
        walk.advance(-math.inf)
    assert walk.num_nodes == 1 + 4 + 16 + 64
    assert scorer.model.num_token_forwards <= len(PREFIX) + 4 + 16 + 64 + CHECK


def searched(
    scorer: Scorer, tree: ExplicitTree, canaries: list[tuple[int, ...]], scores: list[float], **options: Any
) -> SearchResult:
    tolerance = options.pop("tolerance", 1e-4)
    keep = min(scores) - 3 * tolerance
    walk = TreeWalk(scorer.model, scorer.batches, PREFIX, tree, keep=keep)
    settings_ = {"left_out": frozenset(canaries), "tolerance": tolerance, "node_budget": 10**6} | options
    return count_above(walk, canaries, scores, **settings_)


def no_near_ties(scores: np.ndarray) -> bool:
    """Whether scores lie further apart than the tolerance: ties are another test's."""
    return float(np.diff(np.sort(scores)).min()) > 5e-4


@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_ranks_by_search_equal_ranks_by_enumeration_and_the_best_comes_first(seed: int) -> None:
    model = tiny_family("llama")
    candidates = candidates_of(seed)
    rng = random.Random(seed)
    planted = rng.sample(range(len(candidates)), 4)
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = walked(scorer, tree, len(candidates))
        assume(no_near_ties(scores))
        result = searched(scorer, tree, [candidates[one] for one in planted], [float(scores[one]) for one in planted])
    others = np.delete(scores, planted)
    for one, rank in zip(planted, result.ranks, strict=True):
        assert rank.is_exact
        assert rank.rank_low == rank.rank_high == 1 + int((others > scores[one]).sum())
    order = [one.path for one in result.likeliest]
    assert order == [candidates[index] for index in np.argsort(-scores, kind="stable")[: len(order)]]
    outsiders = [path for path in order if path not in {candidates[one] for one in planted}]
    for one, rank in zip(planted, result.ranks, strict=True):
        comes_first = not outsiders or order.index(candidates[one]) < order.index(outsiders[0])
        assert comes_first == (rank.rank_low == 1)


@given(seed=st.integers(0, 999), budget=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_bounds_hold_whatever_the_budget(seed: int, budget: int) -> None:
    model = tiny_family("llama")
    candidates = candidates_of(seed)
    tree = ExplicitTree(candidates)
    planted = random.Random(seed).sample(range(len(candidates)), 3)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = walked(scorer, tree, len(candidates))
        assume(no_near_ties(scores))
        result = searched(
            scorer,
            tree,
            [candidates[one] for one in planted],
            [float(scores[one]) for one in planted],
            node_budget=budget,
        )
    assert result.num_nodes <= budget
    others = np.delete(scores, planted)
    for one, rank in zip(planted, result.ranks, strict=True):
        true = 1 + int((others > scores[one]).sum())
        assert rank.rank_low <= true <= rank.rank_high
        if rank.is_exact:
            assert rank.rank_low == rank.rank_high == true


def test_ties_count_against_the_canary_and_are_told_apart() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        for token in (1, 2):
            model.lm_head.weight[token] = model.lm_head.weight[0]
    candidates = [(token,) for token in range(6)]
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = walked(scorer, tree, 6)
        (rank,) = searched(scorer, tree, [(1,)], [float(scores[1])]).ranks
    above = int((scores[3:] > scores[1]).sum())
    assert (rank.rank_low, rank.rank_high, rank.num_tied) == (1 + above, 3 + above, 2)


STANDINGS: dict[int, Standing] = {2: "refused", 3: "left out"}


def test_candidates_that_the_tokenizer_writes_otherwise_are_not_counted() -> None:
    model = tiny_family("llama")
    candidates = candidates_of(5)
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = walked(scorer, tree, len(candidates))
        worst = int(np.argmin(scores))
        result = searched(
            scorer,
            tree,
            [candidates[worst]],
            [float(scores[worst])],
            judge=lambda paths: [STANDINGS.get(path[0], "counts") for path in paths],
        )
    others = [one for index, one in enumerate(candidates) if index != worst]
    refused, left_out = sum(one[0] == 2 for one in others), sum(one[0] == 3 for one in others)
    assert refused > 0
    assert result.num_refused == refused
    (rank,) = result.ranks
    assert not rank.is_exact  # the text of a refused path is scored by another path, which nobody walked
    assert rank.rank_low == len(candidates) - refused - left_out
    assert rank.rank_high == len(candidates) - left_out


def test_a_canary_that_the_walk_scores_otherwise_gets_no_rank() -> None:
    model = tiny_family("llama")
    candidates = list(itertools.product(range(6), repeat=3))
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        scores = walked(scorer, tree, len(candidates))
        one = int(np.argsort(-scores)[150])
        for wrong in (0.3, -0.3, 4e-4):
            result = searched(scorer, tree, [candidates[one]], [float(scores[one]) + wrong])
            assert result.num_unsettled == 1
            assert not result.ranks[0].is_exact
            assert result.ranks[0].rank_low <= 151 <= result.ranks[0].rank_high


def test_a_walk_with_nan_weights_names_what_it_walked() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        walk = TreeWalk(scorer.model, scorer.batches, PREFIX, ExplicitTree([(1, 2)]), label="the pin space")
        with pytest.raises(NonFiniteScoreError, match="the scores of the pin space must be finite"):
            walk.advance(-1.0)


def test_a_walk_halves_its_chunks_when_memory_runs_out_and_finds_the_same() -> None:
    model = tiny_family("llama")
    candidates = candidates_of(8)
    tree = ExplicitTree(candidates)
    with audit_mode(model) as inner:
        plain = walked(Scorer(inner), tree, len(candidates))
        scorer = Scorer(inner)
        scorer.prepare([Span((*PREFIX, 1), 5, 6)])
        extend = scorer.model.extend

        def short_of_memory(branch: Any, parents: Any, rows: Any) -> Any:
            if len(rows) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return extend(branch, parents, rows)

        scorer.model.extend = short_of_memory  # type: ignore[method-assign]
        assert walked(scorer, tree, len(candidates)) == pytest.approx(plain, abs=1e-4)
        scorer.model.extend = lambda *_: (_ for _ in ()).throw(MemoryError())  # type: ignore[method-assign]
        with pytest.raises(ScoringError, match="the pin space"):
            walked(scorer, tree, len(candidates), label="the pin space")


@pytest.mark.parametrize("candidates", [[], [()], [(1,), (1,)], [(1,), (1, 2)], [(1, 2), (1,)]])
def test_candidates_must_be_distinct_and_prefix_free(candidates: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="candidates must be"):
        ExplicitTree(candidates)


def test_paths_of_a_tree_are_its_candidates_alone() -> None:
    tree = ExplicitTree([(1, 2), (1, 3)])
    assert is_path(tree, (1, 3))
    assert not any(is_path(tree, path) for path in [(1,), (2,), (1, 4), ()])
