"""Tokenizers of the kinds in use, built on the spot, and the walk that compares a token tree with its whole space."""

from __future__ import annotations

import functools
import itertools
import pydoc_data.topics
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from memguard.canaries.automata import iterate_secrets
from memguard.canaries.encoding import SecretEncoder, frame_ids
from memguard.canaries.formats import CanaryFormat
from memguard.canaries.token_tree import TokenTree, Unfactorised, build_token_tree

ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@functools.cache
def corpus() -> tuple[str, ...]:
    """English, and numbers of which merges of several digits are learned."""
    rng = random.Random(0)
    numbers = tuple(" ".join(str(rng.randrange(10 ** rng.randrange(1, 7))) for _ in range(12)) for _ in range(400))
    topics: dict[str, str] = pydoc_data.topics.topics
    return ("\n\n".join(text for _, text in sorted(topics.items()))[:30_000], *numbers)


def byte_level(*before: Any, size: int = 900, more: Sequence[str] = ()) -> Any:
    """GPT-2's kind, behind other pre-tokenizers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<e>"], initial_alphabet=ALPHABET, show_progress=False)
    bpe.train_from_iterator([*corpus(), *more], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<e>", eos_token="<e>")


def three_digits() -> Any:
    """Llama 3's kind: digits in threes from the left, every such number a token."""
    numbers = " ".join(f"{number:0{width}d}" for width in (2, 3) for number in range(10**width))
    return byte_level(pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"), size=2500, more=[numbers] * 20)


def glued(*merges: tuple[str, str], trim: bool = False) -> Any:
    """Single bytes and exactly these merges; with `trim` offsets leave blanks out."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ALPHABET))}
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(merges)}
    bpe = Tokenizer(models.BPE(vocab={**vocabulary, "<e>": len(vocabulary)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    if trim:
        bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")


def metaspace() -> Any:
    """Llama 2's kind: blanks go with the next word, digits stand alone, bytes for what is missing."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()]
    )
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    bpe.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    """BERT's kind: lower case, no token for a blank."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=["[UNK]"], show_progress=False)
    pieces.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")


def unigram(*pieces: str) -> Any:
    """Single characters, and these longer pieces, which win wherever they fit."""
    vocabulary = [("<unk>", -50.0), *((letter, -5.0) for letter in "▁." + string.ascii_letters + string.digits)]
    model = models.Unigram([*vocabulary, *((piece, -1.0) for piece in pieces)], unk_id=0)
    plain = Tokenizer(model)
    plain.normalizer, plain.decoder = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<unk>")


BUILDERS: dict[str, Callable[[], Any]] = {
    "single digits": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "three digits": three_digits,
    "merged digits": byte_level,
    "blank and digit": lambda: glued(*(("Ġ", digit) for digit in string.digits)),
    "blank and some digits": lambda: glued(*(("Ġ", digit) for digit in "1379")),
    "trimmed offsets": lambda: glued(("Ġ", "a"), ("Ġ", "1"), trim=True),
    "metaspace": metaspace,
    "characters": glued,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@functools.cache
def built(name: str) -> Any:
    return BUILDERS[name]()


def encoder_of(tokenizer: Any) -> SecretEncoder:
    lead, tail = frame_ids(tokenizer)
    return SecretEncoder(tokenizer, lead or (0,), tail)


def format_of(space: Any, template: str = "The pin is {secret}.") -> CanaryFormat:
    return CanaryFormat(name="one", template=template, secret=space)


def tree_of(tokenizer: Any, space: Any, template: str = "The pin is {secret}.") -> TokenTree:
    found = build_token_tree(format_of(space, template), encoder_of(tokenizer), name=None)
    assert isinstance(found, TokenTree), found
    return found


def reason_of(tokenizer: Any, space: Any, template: str = "The pin is {secret}.") -> str:
    found = build_token_tree(format_of(space, template), encoder_of(tokenizer), name=None)
    assert isinstance(found, Unfactorised)
    return found.reason


def spans_of(tree: TokenTree, tokenizer: Any, space: Any, template: str, secrets: Sequence[str]) -> dict[tuple[int, ...], str]:
    """Tokens behind the tree's prefix up to the end of the span, and the secret they are of."""
    found = {}
    start = len(tree.prefix_ids)
    items = encoder_of(tokenizer).encode(format_of(space, template), secrets, [None] * len(secrets))
    for item, secret in zip(items, secrets, strict=True):
        assert item is not None
        assert item.ids[:start] == tree.prefix_ids
        assert item.start >= start
        found[item.ids[start : item.end]] = secret
    return found


def paths_of(tree: TokenTree) -> Iterator[tuple[int, ...]]:
    """Every path from the root to a leaf."""
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while waiting:
        state, path = waiting.pop()
        tokens, states = tree.children(state)
        if not tokens.size:
            yield path
        waiting += [(below, (*path, token)) for token, below in zip(tokens.tolist(), states.tolist(), strict=True)]


def leaves_by_walking(tree: TokenTree) -> dict[int, int]:
    """State -> leaves below it, from the children alone."""
    found: dict[int, int] = {}

    def count(state: int) -> int:
        if state not in found:
            below = tree.children(state)[1].tolist()
            found[state] = sum(map(count, below)) if below else 1
        return found[state]

    count(0)
    return found


def follow(tree: TokenTree, path: Sequence[int]) -> int | None:
    """The state behind a path; None where it leaves the tree."""
    state = 0
    for token in path:
        tokens, states = tree.children(state)
        place = np.flatnonzero(tokens == token)
        if not place.size:
            return None
        state = int(states[place[0]])
    return state


def check_whole_space(tokenizer: Any, space: Any, template: str = "The pin is {secret}.") -> None:
    """Paths are the encodings of the enumerated space; leaves are counted as they are walked."""
    tree = tree_of(tokenizer, space, template)
    wanted = spans_of(tree, tokenizer, space, template, list(iterate_secrets(space)))
    paths = list(paths_of(tree))
    assert len(paths) == len(wanted) == space.size
    assert set(paths) == set(wanted)
    assert all(tree.secret_of(path) == wanted[path] for path in paths[:: max(1, len(paths) // 500)])
    assert tree.num_leaves(0) == space.size
    assert all(tree.num_leaves(state) == number for state, number in leaves_by_walking(tree).items())
    assert max(map(len, paths)) == tree.max_depth
    ordered = sorted(paths)
    # In sorted order a path stands directly before one that it begins.
    assert not [one for one, other in itertools.pairwise(ordered) if other[: len(one)] == one]
