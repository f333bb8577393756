"""Token scores and their moments equal a float64 one-row oracle, whatever stands beside a row."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import FAMILIES, tiny_family

from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span
from memguard.scoring.token_scores import TokenScores, score_tokens


def random_spans(number: int, *, seed: int = 0, longest: int = 40) -> list[Span]:
    rng = random.Random(seed)
    spans = []
    for index in range(number):
        length = rng.randrange(2, longest)
        start = rng.randrange(1, length)
        ids = tuple(rng.randrange(512) for _ in range(length))
        spans.append(Span(ids, start, rng.randrange(start + 1, length + 1), f"sample {index}"))
    return spans


def oracle(model: Any, span: Span) -> NDArray[np.float64]:
    """log p, its mean and its variance over the vocabulary at each token of one row alone, shape (3, T); nats."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        rows = exact(input_ids=torch.tensor([span.ids[: span.end]])).logits[0, span.start - 1 : -1].log_softmax(-1)
    picked = rows.gather(1, torch.tensor(span.suffix_ids)[:, None])[:, 0]
    mean = (rows.exp() * rows).sum(-1)
    variance = (rows.exp() * (rows - mean[:, None]).square()).sum(-1)
    return torch.stack([picked, mean, variance]).numpy()


def figures(scores: TokenScores) -> NDArray[np.float64]:
    assert scores.mean_log_probs is not None
    assert scores.variance_log_probs is not None
    return np.stack([scores.log_probs, scores.mean_log_probs, scores.variance_log_probs])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_and_moments_equal_the_one_row_oracle_for_every_family(family: str) -> None:
    model, spans = tiny_family(family), random_spans(9, seed=2)
    with audit_mode(model) as inner:
        scores = score_tokens(Scorer(inner, batch_size=4), spans, moments=True)
    for span, one in zip(spans, scores, strict=True):
        assert figures(one) == pytest.approx(oracle(model, span), rel=2e-4, abs=2e-4)
        assert figures(one).dtype == np.float64


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_size_moves_nothing(tiny_model: Any, batch_size: int) -> None:
    spans = random_spans(25)
    with audit_mode(tiny_model) as model:
        scores = score_tokens(Scorer(model, batch_size=batch_size), spans, moments=True, seed=batch_size)
    for span, one in zip(spans, scores, strict=True):
        assert figures(one) == pytest.approx(oracle(tiny_model, span), rel=1e-4, abs=1e-4)


def test_padded_vocabulary_rows_count_as_they_do_in_the_models_own_softmax() -> None:
    # 640 columns of which the ids use 512: leaving the others out would raise every log-probability by about .2 nats.
    model, spans = tiny_family("llama", vocab_size=640), random_spans(6, seed=3)
    with audit_mode(model) as inner:
        scores = score_tokens(Scorer(inner), spans, moments=True)
    for span, one in zip(spans, scores, strict=True):
        assert figures(one) == pytest.approx(oracle(model, span), rel=2e-4, abs=2e-4)


def test_a_bf16_model_is_scored_no_worse_than_plain_torch_does() -> None:
    model, spans = tiny_family("llama").to(torch.bfloat16), random_spans(20, seed=3)
    exact = [oracle(model, span) for span in spans]
    plain, found = [], []
    with audit_mode(model) as inner:
        scores = score_tokens(Scorer(inner, batch_size=8), spans, moments=True)
        for span, one, wanted in zip(spans, scores, exact, strict=True):
            rows = inner(input_ids=torch.tensor([span.ids[: span.end]])).logits[0, span.start - 1 : -1].float().log_softmax(-1)
            picked = rows.gather(1, torch.tensor(span.suffix_ids)[:, None])[:, 0]
            plain.append(np.abs(picked.double().numpy() - wanted[0]).max())
            found.append(np.abs(figures(one) - wanted).max(axis=1))
    assert max(plain) > 1e-3  # rounding that a test could miss by being too wide
    log_prob, mean, variance = np.max(found, axis=0)
    assert log_prob <= 2 * max(plain) + 1e-3
    # The mean is an average of such errors; the variance moves by twice the spread times one of them.
    assert mean <= 2 * max(plain) + 1e-3
    assert variance <= 2 * np.sqrt(max(one[2].max() for one in exact)) * 2 * max(plain) + 1e-3


def test_tokens_sum_to_the_scores_of_spans_in_the_order_they_came_in(tiny_model: Any) -> None:
    spans = random_spans(30, seed=4)
    with audit_mode(tiny_model) as model:
        scorer = Scorer(model, batch_size=7)
        sums = scorer.score(spans).log_probs
        tokens, reversed_tokens = score_tokens(scorer, spans, moments=False), score_tokens(scorer, spans[::-1], moments=False)
    assert [one.log_probs.sum() for one in tokens] == pytest.approx(sums, abs=1e-4)
    assert [one.log_probs.size for one in tokens] == [span.end - span.start for span in spans]
    assert [one.log_probs.sum() for one in reversed_tokens] == pytest.approx(sums[::-1], abs=1e-4)


def test_no_moments_are_given_unless_asked_for(tiny_model: Any) -> None:
    with audit_mode(tiny_model) as model:
        (one,) = score_tokens(Scorer(model), random_spans(1), moments=False)
    assert one.mean_log_probs is None
    assert one.variance_log_probs is None


def test_batches_mix_neighbours_and_tell_their_progress(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twenty rows of one length in batches of five: the first five in the list must not be a batch of their own.
    spans = [Span((index, *range(9)), 1, 10) for index in range(20)]
    done: list[int] = []
    batches: list[set[int]] = []
    with audit_mode(tiny_model) as model:
        scorer = Scorer(model, batch_size=5)
        whole = scorer.model.whole

        def spy(rows: Sequence[Sequence[int]]) -> torch.Tensor:
            batches.append({row[0] for row in rows})
            return whole(rows)

        monkeypatch.setattr(scorer.model, "whole", spy)
        score_tokens(scorer, spans, moments=False, progress=done.append)
    assert done == [5, 5, 5, 5]
    assert set().union(*batches) == set(range(20))
    assert all(len({index // 5 for index in batch}) > 1 for batch in batches)


def test_no_span_gives_an_empty_list(tiny_model: Any) -> None:
    assert score_tokens(Scorer(tiny_model), [], moments=True) == []


def test_a_span_without_context_or_too_long_is_refused_by_name(tiny_model: Any) -> None:
    scorer = Scorer(tiny_model)
    with pytest.raises(ScoringError, match="member 3 must satisfy 1 <= start < end <= length, got 0, 1, 2"):
        score_tokens(scorer, [Span((1, 2), 0, 1, "member 3")], moments=False)
    with pytest.raises(ScoringError, match="member 4 must fit the model's 128 positions, got 200"):
        score_tokens(scorer, [Span((1,) * 200, 1, 200, "member 4")], moments=False)


@pytest.mark.parametrize("moments", [False, True])
def test_a_figure_that_is_not_finite_names_its_sample(tiny_model: Any, moments: bool) -> None:
    with torch.no_grad():
        next(tiny_model.parameters()).fill_(float("nan"))
    with audit_mode(tiny_model) as model, pytest.raises(NonFiniteScoreError, match="sample . must be finite, got nan"):
        score_tokens(Scorer(model), random_spans(3), moments=moments)


def test_one_sample_that_is_not_finite_is_the_one_that_is_named() -> None:
    # Token 77 alone has no embedding; the head is untied, so that the other rows stay finite.
    model = tiny_family("gpt2", tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.wte.weight[77] = float("nan")
    spans = [Span((1, 2, 3, 4), 1, 4, "member 0"), Span((1, 77, 3, 4), 1, 4, "member 1"), Span((5, 6, 3), 1, 3, "member 2")]
    with audit_mode(model) as inner, pytest.raises(NonFiniteScoreError, match="member 1 must be finite"):
        score_tokens(Scorer(inner), spans, moments=False)
