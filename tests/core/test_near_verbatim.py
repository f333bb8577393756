"""The near-verbatim bound against enumeration of every output, and its identities."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_family

from memguard.errors import ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.near_verbatim import near_verbatim_log_probs
from memguard.scoring.sampling import Sampler, score_under_sampler
from memguard.scoring.scorer import Scorer, Span

VOCABULARY = 6


def levenshtein(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """By the recursion of its definition."""
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return levenshtein(a[:-1], b[:-1])
    return 1 + min(levenshtein(a[:-1], b), levenshtein(a, b[:-1]), levenshtein(a[:-1], b[:-1]))


@pytest.fixture(scope="module")
def small_model() -> Any:
    return tiny_family("llama", vocab_size=VOCABULARY)


def enumerated(scorer: Scorer, span: Span, sampler: Sampler, max_edits: int) -> float:
    """The chance of every output within the distance, one by one."""
    outputs = [
        output
        for output in itertools.product(range(VOCABULARY), repeat=len(span.suffix_ids))
        if levenshtein(output, span.suffix_ids) <= max_edits
    ]
    spans = [Span((*span.prefix_ids, *output), span.start, span.end) for output in outputs]
    return float(np.logaddexp.reduce(score_under_sampler(scorer, spans, sampler)))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7, 3, 0.95)])
@pytest.mark.parametrize("max_edits", [0, 1, 2])
def test_with_beams_for_every_output_the_bound_is_the_enumerated_chance(
    small_model: Any, sampler: Sampler, max_edits: int
) -> None:
    spans = [Span((1, 2, 3, 4, 5, 0), 2, 6), Span((4, 4, 1, 1, 2, 3), 2, 6), Span((0, 3, 5), 1, 3)]
    with audit_mode(small_model) as inner:
        scorer = Scorer(inner)
        got = near_verbatim_log_probs(scorer, spans, sampler, max_edits=max_edits, num_beams=VOCABULARY**4)
        expected = [enumerated(scorer, span, sampler, max_edits) for span in spans]
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3, 8])
def test_fewer_beams_never_say_more_and_never_less_than_the_verbatim_chance(small_model: Any, num_beams: int) -> None:
    rng = np.random.default_rng(2)
    spans = [Span(tuple(rng.integers(0, VOCABULARY, size=8).tolist()), 3, 8) for _ in range(6)]
    with audit_mode(small_model) as inner:
        scorer = Scorer(inner)
        got = near_verbatim_log_probs(scorer, spans, Sampler(), max_edits=1, num_beams=num_beams)
        whole = [enumerated(scorer, span, Sampler(), 1) for span in spans]
        verbatim = score_under_sampler(scorer, spans, Sampler())
    assert (got <= np.array(whole) + 1e-4).all()
    assert (got >= verbatim - 1e-4).all()


def test_no_edit_is_the_verbatim_chance_also_without_a_cache() -> None:
    rng = np.random.default_rng(3)
    spans = [Span(tuple(rng.integers(1, 500, size=10).tolist()), 4, 10) for _ in range(5)]
    for name in ("gpt2", "mamba"):  # mamba keeps no keys: rows are run whole
        with audit_mode(tiny_family(name)) as inner:
            scorer = Scorer(inner)
            got = near_verbatim_log_probs(scorer, spans, Sampler(top_k=400), max_edits=0, num_beams=4)
            np.testing.assert_allclose(got, score_under_sampler(scorer, spans, Sampler(top_k=400)), atol=1e-3)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_the_distance_rows_are_levenshtein(a: list[int], b: list[int]) -> None:
    from memguard.scoring.near_verbatim import _next_distances

    row = np.arange(len(b) + 1)[None, :]
    for token in a:
        row = _next_distances(row, np.array([token]), np.array(b))
    assert row[0, -1] == levenshtein(tuple(a), tuple(b))


def test_an_output_the_sampler_never_writes_has_no_chance(small_model: Any) -> None:
    with audit_mode(small_model) as inner:
        scorer = Scorer(inner)
        span = Span((1, 2, 3, 4), 1, 4)
        likeliest = int(inner(input_ids=torch.tensor([[1]])).logits[0, -1].argmax())
        other = Span((1, (likeliest + 1) % VOCABULARY, 3, 4), 1, 4)
        assert near_verbatim_log_probs(scorer, [other], Sampler(top_k=1), max_edits=0)[0] == -math.inf
        assert near_verbatim_log_probs(scorer, [span], Sampler(top_k=1), max_edits=3)[0] == 0.0
        assert near_verbatim_log_probs(scorer, [], Sampler(), max_edits=1).shape == (0,)


def test_bad_arguments_are_refused(small_model: Any) -> None:
    with pytest.raises(ValueError, match="max_edits must be at least 0"):
        near_verbatim_log_probs(Scorer(small_model), [], Sampler(), max_edits=-1)
    with pytest.raises(ScoringError, match="'x' must satisfy"):
        near_verbatim_log_probs(Scorer(small_model), [Span((1,), 0, 1, "'x'")], Sampler(), max_edits=1)
