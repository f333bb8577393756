"""Shared fixtures: a tokenizer, a tiny model and a corpus, built on the spot; nothing is downloaded."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models run several times faster on one thread; torch is left alone where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus_text() -> str:
    """About 60 kB of English that ships inside Python."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(text for _, text in sorted(topics.items()))[:60_000]


@pytest.fixture(scope="session")
def tokenizer(corpus_text: str) -> Any:
    """A byte-level BPE of 512 entries, every digit a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([corpus_text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>")


@pytest.fixture
def tiny_model() -> Any:
    """An untrained Llama of two layers, 32 wide, with dropout in its attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attention_dropout=0.1,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@pytest.fixture(scope="session")
def blocks(corpus_text: str, tokenizer: Any) -> list[dict[str, list[int]]]:
    """The corpus as rows of exactly 48 tokens."""
    ids = tokenizer(corpus_text)["input_ids"]
    rows = [ids[start : start + 48] for start in range(0, len(ids) - 47, 48)]
    return [{"input_ids": row, "labels": row} for row in rows]
