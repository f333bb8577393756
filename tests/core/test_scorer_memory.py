"""Scoring needs no more memory for more candidates or a larger vocabulary, and gives the same when memory runs out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_family
from torch.utils._python_dispatch import TorchDispatchMode

from memguard.errors import ScoringError
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.size = max(self.size, out.numel())
        return out


def spans_behind_one_prefix(number: int, *, vocabulary: int, length: int = 9) -> list[Span]:
    rng = random.Random(0)
    prefix = tuple(rng.randrange(vocabulary) for _ in range(12))
    rows = [tuple(rng.randrange(vocabulary) for _ in range(length)) for _ in range(number)]
    return [Span((*prefix, *row), 12, 12 + length, f"canary '{index}'") for index, row in enumerate(rows)]


def largest_of(number: int, vocabulary: int) -> int:
    model = tiny_family("llama", vocab_size=vocabulary, tie_word_embeddings=True)
    with audit_mode(model) as inner, LargestTensor() as largest:
        Scorer(inner, memory_budget=2**22).score(spans_behind_one_prefix(number, vocabulary=vocabulary))
    return largest.size


def test_the_largest_tensor_grows_neither_with_candidates_nor_with_the_vocabulary() -> None:
    few, many, wide = largest_of(300, 6_000), largest_of(1200, 6_000), largest_of(300, 48_000)
    assert many <= 1.1 * few  # blocks are cut to even sizes
    # The self-check takes the model's own logits of three rows; nothing else may hold a row of the vocabulary for each token.
    assert wide <= max(1.1 * few, 3 * 21 * 48_000)
    assert wide < 300 * 8 * 48_000 / 20


def scored_with_memory_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    model = tiny_family("llama")
    plain = model.forward

    def short_of_memory(*args: Any, **options: Any) -> Any:
        if len(options["input_ids"]) > rows:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return plain(*args, **options)

    with audit_mode(model) as inner:
        scorer = Scorer(inner)
        spans = spans_behind_one_prefix(40, vocabulary=517)
        spans += [Span(span.ids[3:], 9, 18, span.label) for span in spans[:5]]
        scorer.prepare(spans)
        monkeypatch.setattr(model, "forward", short_of_memory)
        return scorer.score(spans).log_probs


def test_batches_are_halved_when_memory_runs_out_and_scores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty = scored_with_memory_for(1000, monkeypatch)
    assert scored_with_memory_for(3, monkeypatch) == pytest.approx(plenty, abs=1e-4)
    with pytest.raises(ScoringError, match=r"scoring canary '\d+' and 0 rows beside it failed with RuntimeError"):
        scored_with_memory_for(0, monkeypatch)


def test_a_batch_of_prefixes_is_halved_when_one_row_behind_it_does_not_fit() -> None:
    model = tiny_family("llama")
    rng = random.Random(1)
    prefixes = [tuple(rng.randrange(517) for _ in range(6)) for _ in range(8)]
    suffixes = [(5, 6, 7), (8, 9, 10)]
    with audit_mode(model) as inner:
        plain = Scorer(inner).grid(prefixes, suffixes)
        scorer = Scorer(inner)
        scorer.prepare([Span((*prefixes[0], 5, 6, 7), 6, 9)])
        extend = scorer.model.extend

        def short_of_memory(branch: Any, parents: Any, rows: Any) -> Any:
            if len(branch.cache.layers[0].keys) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return extend(branch, parents, rows)

        scorer.model.extend = short_of_memory  # type: ignore[method-assign]
        assert scorer.grid(prefixes, suffixes) == pytest.approx(plain, abs=1e-4)


def test_an_interrupt_is_not_swallowed_and_the_model_is_put_back() -> None:
    model = tiny_family("llama").train()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model.forward = interrupted
    scorer = Scorer(model)
    with pytest.raises(KeyboardInterrupt), audit_mode(model):
        scorer.score(spans_behind_one_prefix(3, vocabulary=517))
    assert model.training
    assert "forward" not in model.lm_head.__dict__
