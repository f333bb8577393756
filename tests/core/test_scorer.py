"""Scores equal a float64 one-row oracle, whatever stands beside a row; the model is left as it was found."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import span_log_prob

from memguard.errors import NonFiniteScoreError, ScoringError
from memguard.scoring.audit_mode import audit_mode, innermost
from memguard.scoring.scorer import Scorer, Span


def random_spans(number: int, *, seed: int = 0, longest: int = 40) -> list[Span]:
    rng = random.Random(seed)
    spans = []
    for _ in range(number):
        length = rng.randrange(2, longest)
        ids = tuple(rng.randrange(512) for _ in range(length))
        start = rng.randrange(1, length)
        spans.append(Span(ids, start, rng.randrange(start + 1, length + 1)))
    return spans


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_equal_the_one_row_oracle_at_any_batch_size(tiny_model: Any, batch_size: int) -> None:
    spans = random_spans(25)
    with audit_mode(tiny_model) as model:
        scores = Scorer(model, batch_size=batch_size).score(spans)
    expected = [span_log_prob(tiny_model, span.ids, span.start, span.end) for span in spans]
    assert scores.log_probs == pytest.approx(expected, abs=1e-4)


def tiny(name: str) -> Any:
    """Models that differ in head: learned positions, biased head, scaled and soft-capped logits, padded vocabulary."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(1)
    shape = {"vocab_size": 517, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    extra = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
        "gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
        "cohere": {"logit_scale": 0.25},
        "granite": {"logits_scaling": 4.0},
        "phi": {},
    }[name]
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**(shape | extra)))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "granite", "phi"])
def test_scores_equal_the_oracle_for_capped_scaled_biased_and_padded_heads(name: str) -> None:
    model = tiny(name)
    if name == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    spans = random_spans(12, seed=2)
    with audit_mode(model) as inner:
        scores = Scorer(inner, batch_size=5).score(spans)
    expected = [span_log_prob(model, span.ids, span.start, span.end) for span in spans]
    assert scores.log_probs == pytest.approx(expected, abs=2e-4)


def test_a_bf16_model_is_scored_no_worse_than_plain_torch_does(tiny_model: Any) -> None:
    model = tiny_model.to(torch.bfloat16)
    spans = random_spans(20, seed=3)
    expected = np.array([span_log_prob(model, span.ids, span.start, span.end) for span in spans])
    plain = []
    with audit_mode(model) as inner:
        scores = Scorer(inner, batch_size=8).score(spans)
        for span in spans:
            logits = inner(input_ids=torch.tensor([span.ids])).logits[0].float().log_softmax(-1)
            plain.append(float(sum(logits[place - 1, span.ids[place]] for place in range(span.start, span.end))))
    assert Scorer(model).dtype == "bfloat16"
    assert np.abs(scores.log_probs - expected).max() <= 2 * np.abs(np.array(plain) - expected).max() + 1e-3


def test_greedy_is_true_exactly_where_generate_would_write_the_span(tiny_model: Any) -> None:
    with audit_mode(tiny_model) as model:
        prompt = (5, 9, 70)
        written = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, use_cache=True, eos_token_id=None)
        ids = tuple(written[0].tolist())
        other = (*ids[:-1], (ids[-1] + 1) % 512)
        scores = Scorer(model).score([Span(ids, 3, 9), Span(other, 3, 9)])
    assert scores.is_greedy.tolist() == [True, False]


def test_order_in_is_order_out_and_the_seed_moves_nothing_else(tiny_model: Any) -> None:
    spans = random_spans(30, seed=4)
    with audit_mode(tiny_model) as model:
        scorer = Scorer(model, batch_size=7)
        one, other = scorer.score(spans, seed=1), scorer.score(spans[::-1], seed=2)
    assert one.log_probs == pytest.approx(other.log_probs[::-1], abs=1e-4)


def test_no_span_gives_empty_arrays(tiny_model: Any) -> None:
    assert Scorer(tiny_model).score([]).log_probs.shape == (0,)


def test_a_score_that_is_not_finite_names_its_item_and_gives_no_array(tiny_model: Any) -> None:
    with torch.no_grad():
        next(tiny_model.parameters()).fill_(float("nan"))
    named = [Span(span.ids, span.start, span.end, f"canary '{index}'") for index, span in enumerate(random_spans(3))]
    with audit_mode(tiny_model) as model, pytest.raises(NonFiniteScoreError, match="canary '.' must be finite, got nan"):
        Scorer(model).score(named)


def test_a_span_without_context_or_too_long_is_refused_by_name(tiny_model: Any) -> None:
    scorer = Scorer(tiny_model)
    with pytest.raises(ScoringError, match="canary 'a' must satisfy 1 <= start < end <= length, got 0, 1, 2"):
        scorer.score([Span((1, 2), 0, 1, "canary 'a'")])
    with pytest.raises(ScoringError, match="must fit the model's 128 positions, got 200"):
        scorer.score([Span((1,) * 200, 1, 200)])


def test_a_failing_forward_becomes_a_scoring_error_without_its_text(tiny_model: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("281265017 would be told here")

    tiny_model.forward = broken
    with pytest.raises(ScoringError, match="failed with RuntimeError") as caught:
        Scorer(tiny_model).score([Span((1, 2), 1, 2, "canary 'a'")])
    assert "281265017" not in str(caught.value)
    tiny_model.forward = lambda *args, **kwargs: SimpleNamespace(logits=None)
    with pytest.raises(ScoringError, match="returned no logits"):
        Scorer(tiny_model).score([Span((1, 2), 1, 2)])


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ScoringError, match="must have parameters"):
        Scorer(torch.nn.Identity())


def state_of(model: Any) -> tuple[Any, ...]:
    return (
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # type: ignore[union-attr]
        torch.random.get_rng_state().numpy().tobytes(),
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        model.config.use_cache,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_audit_mode_puts_everything_back_also_after_an_exception(tiny_model: Any, fails: bool) -> None:
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    tiny_model.lm_head.weight.requires_grad_(False)
    before = state_of(tiny_model)
    try:
        with audit_mode(tiny_model, seed=5) as model:
            assert not model.training
            assert not torch.is_grad_enabled()
            random.random(), np.random.rand(), torch.rand(3)
            model.config.use_cache = False
            next(model.model.parameters()).requires_grad_(False)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state_of(tiny_model) == before


def test_audit_mode_takes_wrappers_off(tiny_model: Any) -> None:
    wrapped = torch.nn.DataParallel(tiny_model)
    assert innermost(SimpleNamespace(_orig_mod=wrapped)) is tiny_model
