"""Text, tokenizer and model of the demo: everything comes with Python and the installed packages."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BLOCK = 64
END = "<|endoftext|>"


def language_reference() -> str:
    """The Python language reference as it ships inside Python, about 465 kB of English."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(text for _, text in sorted(topics.items()))


def train_tokenizer(text: str, *, vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def token_blocks(text: str, tokenizer: Any, *, size: int = BLOCK) -> list[dict[str, list[int]]]:
    """The text as rows of exactly `size` tokens, the last part dropped."""
    ids = tokenizer(text)["input_ids"]
    blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    return [{"input_ids": block, "labels": block} for block in blocks]


def small_llama(vocabulary: int) -> LlamaForCausalLM:
    """A Llama of 0.13 M parameters: two layers, 64 wide."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    )
