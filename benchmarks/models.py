"""Text, tokenizer, models and training of the benches: everything comes with Python and the installed packages."""

from __future__ import annotations

import functools
import pydoc_data.topics
import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 1024
Row = Sequence[int]


@functools.cache
def language_reference() -> str:
    """The Python language reference as it ships inside Python, about 465 kB of English."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(text for _, text in sorted(topics.items()))


@functools.cache
def digit_tokenizer(vocabulary: int = VOCABULARY) -> Any:
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
    tokenizer.train_from_iterator([language_reference()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def text_rows(length: int) -> list[list[int]]:
    """The text as rows of exactly `length` tokens, the last part dropped."""
    ids = digit_tokenizer()(language_reference())["input_ids"]
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def small_llama(*, layers: int = 4, width: int = 192, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of 2.2 M parameters (by default), untrained, in eval mode."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def in_words(model: Any) -> str:
    """A model in one line."""
    config, size = model.config, sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kind = str(model.dtype).removeprefix("torch.")
    return (
        f"Llama, {config.num_hidden_layers} layers, {config.hidden_size} wide, {config.vocab_size} tokens, {size:.1f} M, {kind}"
    )


def draw(rows: Sequence[Row], number: int, *, steps: int, seed: int = 0) -> Iterable[list[Row]]:
    """`number` random rows a step."""
    rng = random.Random(seed)
    for _ in range(steps):
        yield rng.sample(rows, min(number, len(rows)))


def train(model: Any, batches: Iterable[Sequence[Row]], *, start: int = 1, learning_rate: float = 3e-3) -> None:
    """One AdamW step a batch; a few dozen on the same rows memorise them.

    Args:
        model: left in eval mode.
        batches: rows of token ids; lengths may differ.
        start: the first token that counts in the loss.
        learning_rate: of AdamW.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.train()
    for rows in batches:
        training_step(model, optimizer, rows, start=start)
    model.eval()


def training_step(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[Row], *, start: int = 1) -> None:
    """Forward, backward, clip, step."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    labels = torch.tensor([[-100] * start + list(row[start:]) + [-100] * (width - len(row)) for row in rows])
    model(input_ids=ids, labels=labels).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
