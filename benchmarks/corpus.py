"""The corpus of the tracing benches: Python source as it lies in the installed packages, encoded by a BPE made on the spot."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Ids = NDArray[np.int64]
VOCABULARY = 16_384
TRAINED_ON = 4_000_000  # characters
TOGETHER = 200  # files encoded at a time


def source_files() -> Iterator[str]:
    """Text of the installed packages' modules, in a fixed order of folders and names."""
    for path in sorted(Path(np.__file__).parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200:
            yield text


@functools.cache
def source_tokenizer() -> Any:
    """A byte-level BPE of 16,384 entries."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<e>"], show_progress=False
    )
    texts, size = [], 0
    for number, text in enumerate(source_files()):
        if number % 10 == 0:
            texts.append(text)
            size += len(text)
        if size > TRAINED_ON:
            break
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")


def documents(num_tokens: int, *, skip: int = 0) -> list[Ids]:
    """Files as ids, until there are `num_tokens`, the first `skip` files left out."""
    backend = source_tokenizer().backend_tokenizer
    found: list[Ids] = []
    size, texts = 0, []
    for number, text in enumerate(source_files()):
        if number < skip:
            continue
        texts.append(text)
        if len(texts) == TOGETHER:
            found += [np.array(one.ids) for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
            texts = []
            size = sum(map(len, found))
        if size >= num_tokens:
            break
    found += [np.array(one.ids) for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
    return found


def generations(corpus: list[Ids], held_out: list[Ids], number: int, length: int) -> list[Ids]:
    """Texts of `length` tokens: pieces of 8 to 64 tokens, half of them from the corpus, half from texts held out."""
    rng = np.random.default_rng(0)
    pools = [np.concatenate(held_out), np.concatenate(corpus)]
    found = []
    for _ in range(number):
        pieces: list[Ids] = []
        while sum(map(len, pieces)) < length:
            pool, size = pools[int(rng.integers(2))], int(rng.integers(8, 65))
            start = int(rng.integers(len(pool) - size))
            pieces.append(pool[start : start + size])
        found.append(np.concatenate(pieces)[:length])
    return found
