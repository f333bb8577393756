"""The sampler's distribution equals what `generate` draws from, and scores under it equal a row-by-row float64 oracle."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_family
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.sampling import Sampler, sampler_log_probs, score_under_sampler
from memguard.scoring.scorer import Scorer, Span

SAMPLERS = [
    Sampler(),
    Sampler(temperature=0.7),
    Sampler(top_k=40),
    Sampler(top_k=1),
    Sampler(top_p=0.8),
    Sampler(temperature=1.6, top_k=25, top_p=0.9),
    Sampler(top_k=10_000),
    Sampler(top_p=1e-6),
]


def as_generate_does(logits: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """The warpers of transformers, in its own order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampler.temperature))])
    if sampler.top_k is not None:
        warpers.append(TopKLogitsWarper(sampler.top_k))
    if sampler.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampler.top_p))
    return warpers(torch.zeros((len(logits), 1), dtype=torch.long), logits.clone()).log_softmax(-1)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("ties", [False, True])
def test_the_distribution_is_the_one_that_generate_draws_from(sampler: Sampler, ties: bool) -> None:
    logits = 3 * torch.randn((64, 517), generator=torch.Generator().manual_seed(1))
    logits = logits.round() if ties else logits  # many logits equal the last that top-k keeps
    expected = as_generate_does(logits, sampler)
    got = sampler.log_probs(logits)
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(got, expected)


def oracle(model: Any, span: Span, sampler: Sampler) -> float:
    """One row, one token at a time, float64."""
    exact, total = copy.deepcopy(model).double().eval(), 0.0
    with torch.no_grad():
        for place in range(span.start, span.end):
            scores = exact(input_ids=torch.tensor([span.ids[:place]])).logits[0, -1] / sampler.temperature
            order = scores.argsort(descending=True)
            kept = order[: sampler.top_k] if sampler.top_k is not None else order
            mass = scores[kept].softmax(-1).cumsum(-1)
            number = int((mass < sampler.top_p).sum()) + 1 if sampler.top_p < 1 else len(kept)
            kept = kept[:number]
            chosen = (kept == span.ids[place]).nonzero()
            if not len(chosen):
                return -math.inf
            total += float(scores[kept].log_softmax(-1)[chosen[0, 0]])
    return total


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere", "opt"])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.8, 300, 0.97)])
def test_scores_under_a_sampler_equal_the_oracle(name: str, sampler: Sampler) -> None:
    model = tiny_family(name)
    rng = np.random.default_rng(3)
    spans = [Span(tuple(rng.integers(1, 500, size=9).tolist()), 4, 4 + 1 + index % 5, f"span {index}") for index in range(12)]
    spans.append(Span((5, 6), 1, 2, "the shortest"))
    with audit_mode(model) as inner:
        got = score_under_sampler(Scorer(inner, batch_size=5), spans, sampler)
    np.testing.assert_allclose(got, [oracle(model, span, sampler) for span in spans], atol=2e-4)
    if sampler.top_k is None:
        with audit_mode(model) as inner:
            np.testing.assert_allclose(got, Scorer(inner).score(spans).log_probs, atol=1e-4)


def test_order_and_blocks_of_rows_do_not_matter(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    spans = [Span(tuple(rng.integers(1, 500, size=12).tolist()), 3, 12) for _ in range(7)]
    with audit_mode(tiny_model) as inner:
        whole = score_under_sampler(Scorer(inner), spans, Sampler(top_k=400))
        monkeypatch.setattr("memguard.scoring.sampling.BLOCK_LOGITS", 1100)
        blocks = score_under_sampler(Scorer(inner), spans[::-1], Sampler(top_k=400), seed=9)[::-1]
    np.testing.assert_allclose(whole, blocks, atol=1e-5)
    assert score_under_sampler(Scorer(tiny_model), [], Sampler()).shape == (0,)


def test_bad_settings_and_spans_are_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        Sampler(temperature=0.0)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        Sampler(top_k=0)
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got 1.5"):
        Sampler(top_p=1.5)
    with pytest.raises(ScoringError, match="'x' must satisfy 1 <= start"):
        score_under_sampler(Scorer(tiny_model), [Span((1, 2), 0, 1, "'x'")], Sampler())
    with torch.no_grad():
        tiny_model.model.norm.weight[0] = torch.nan
    with audit_mode(tiny_model) as inner, pytest.raises(NonFiniteScoreError, match="'x' must be a number, got NaN"):
        score_under_sampler(Scorer(inner), [Span((1, 2), 1, 2, "'x'")], Sampler())


def test_a_target_outside_top_k_has_probability_zero() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert sampler_log_probs(logits, torch.tensor([3]), top_k=3).item() == -math.inf
    assert sampler_log_probs(logits, torch.tensor([0]), top_k=1).item() == 0.0
