"""Greedy continuations are those of `generate`, and of whole rows where nothing can be branched from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_family

from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.continuations import continue_greedily
from memguard.scoring.scorer import Scorer


def by_whole_rows(model: Any, prompt: tuple[int, ...], number: int) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(number):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "mamba"])
def test_what_is_written_is_the_argmax_of_whole_rows(name: str) -> None:
    model = tiny_family(name).eval()
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.integers(1, 500, size=length).tolist()) for length in (3, 5, 3, 1, 5, 3)]
    with audit_mode(model) as inner:
        got = continue_greedily(Scorer(inner, batch_size=2), prompts, num_tokens=6)
    assert got == [by_whole_rows(model, prompt, 6) for prompt in prompts]


def test_it_is_what_generate_writes(tiny_model: Any) -> None:
    prompt = (5, 6, 7)
    tiny_model.eval()
    wanted = tiny_model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    with audit_mode(tiny_model) as inner:
        got = continue_greedily(Scorer(inner), [prompt], num_tokens=8)
    assert got == [tuple(wanted[0, 3:].tolist())]


def test_a_model_without_more_positions_writes_less(tiny_model: Any) -> None:
    with audit_mode(tiny_model) as inner:
        got = continue_greedily(Scorer(inner), [(1,) * 126, (1,) * 128], num_tokens=9)
    assert [len(ids) for ids in got] == [2, 0]
    assert continue_greedily(Scorer(tiny_model), [], num_tokens=3) == []
    with pytest.raises(ValueError, match="at least one token each, got an empty one"):
        continue_greedily(Scorer(tiny_model), [()], num_tokens=3)
