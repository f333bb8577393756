"""The scored span is the secret and nothing else, with every kind of tokenizer; what cannot be written back is refused."""

from __future__ import annotations

import copy
import functools
import itertools
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from memguard.canaries.encoding import EncodedSecret, SecretEncoder, frame_ids, require_fast, tokenizer_digest
from memguard.canaries.formats import (
    AlphabetSpace,
    CanaryFormat,
    DigitsSpace,
    HexSpace,
    IbanSpace,
    LuhnSpace,
    TokensSpace,
    WordsSpace,
)
from memguard.errors import CanaryError

ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@functools.cache
def corpus() -> tuple[str, ...]:
    """English with many numbers, so that merges of several digits are learned."""
    rng = random.Random(0)
    numbers = tuple(" ".join(str(rng.randrange(10 ** rng.randrange(1, 7))) for _ in range(12)) for _ in range(400))
    topics: dict[str, str] = pydoc_data.topics.topics
    return ("\n\n".join(text for _, text in sorted(topics.items()))[:30_000], *numbers)


def byte_level(*, split: bool = True, trim: bool | None = None, normalizer: Any = None) -> Any:
    """GPT-2's kind: bytes, merges of several digits; without `split` merges run across words and signs."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<e>"], initial_alphabet=ALPHABET, show_progress=False)
    bpe.train_from_iterator(corpus(), trainer)
    if trim is not None:
        bpe.post_processor = processors.ByteLevel(trim_offsets=trim)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<e>", eos_token="<e>", pad_token="<e>")


def metaspace(scheme: Any = "always", *, unigram: bool = False) -> Any:
    """SentencePiece's kind: blanks become part of the next word."""
    special = ["<unk>", "<s>", "</s>"]
    decoder = decoders.Metaspace(prepend_scheme=scheme)
    if unigram:
        bpe = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=special, unk_token="<unk>", initial_alphabet=list("-:'"), show_progress=False
        )
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
        decoder = decoders.Sequence([decoders.ByteFallback(), decoder])
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(prepend_scheme=scheme), decoder
    bpe.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    """BERT's kind: lower case, no byte of its own for a blank, no end token."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=["[UNK]"], show_progress=False)
    pieces.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="[UNK]")


def glued(*merges: tuple[str, str]) -> Any:
    """Single bytes and exactly these merges, which may cross from the template into the secret."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ALPHABET))}
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(merges)}
    bpe = Tokenizer(models.BPE(vocab={**vocabulary, "<e>": len(vocabulary)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")


BUILDERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level, trimmed offsets": lambda: byte_level(trim=True),
    "byte level, whole offsets": lambda: byte_level(trim=False),
    "byte level, no split": lambda: byte_level(split=False),
    "lower case": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "sentencepiece": metaspace,
    "sentencepiece, first": lambda: metaspace("first"),
    "unigram": lambda: metaspace(unigram=True),
    "wordpiece": wordpiece,
}


@functools.cache
def built(name: str) -> Any:
    return BUILDERS[name]()


def encode(tokenizer: Any, template: str, space: Any, secrets: Sequence[str], name: str | None = None) -> list[Any]:
    lead, tail = frame_ids(tokenizer)
    one = CanaryFormat(name="one", template=template, secret=space)
    return SecretEncoder(tokenizer, lead, tail).encode(one, secrets, [name] * len(secrets))


def draws(space: Any, number: int = 60) -> list[str]:
    rng = random.Random(1)
    return list(dict.fromkeys(space.draw(rng) for _ in range(number)))


CASES = [
    ("The pin is {secret}.", DigitsSpace(length=9)),
    ("Key:{secret} end", HexSpace(length=12)),
    ("pin{secret} ok", DigitsSpace(length=9)),
    ("card '{secret}' of {name}", LuhnSpace()),
    ("Hello {name} ({secret})", AlphabetSpace(length=10)),
    ("id{secret}\n", AlphabetSpace(length=8)),
    ("über 東京 🙂 {secret}!", DigitsSpace(length=6)),
]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("template", "space"), CASES, ids=[template for template, _ in CASES])
def test_the_span_is_the_secret_and_the_frame_is_what_is_trained(name: str, template: str, space: Any) -> None:
    tokenizer, secrets = built(name), draws(space)
    lead, tail = frame_ids(tokenizer)
    texts = [template.format(secret=secret, name="Ada Berg") for secret in secrets]
    for secret, text, item in zip(secrets, texts, encode(tokenizer, template, space, secrets, "Ada Berg"), strict=True):
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        if item is None:
            assert tokenizer(tokenizer.decode(plain), add_special_tokens=False)["input_ids"] != plain or (
                secret not in tokenizer.decode(plain)
            )
            continue
        assert item.ids == (*lead, *plain, *tail)
        span = tokenizer.decode(item.ids[item.start : item.end])
        if item.join == "merged":
            assert secret in span.replace("##", "")
            assert span.strip() != secret
        else:
            assert span.replace("##", "").strip() == secret
            # What stands before is the template's, up to case and the signs a vocabulary lacks.
            before = "".join(tokenizer.decode(item.ids[len(lead) : item.start]).split()).lower()
            assert "unk" in before or before == "".join(text[: text.index(secret)].split()).lower()


@pytest.mark.parametrize("name", BUILDERS)
def test_most_draws_of_digits_behind_a_blank_can_be_carried_by_every_tokenizer(name: str) -> None:
    found = encode(built(name), "The pin is {secret}.", DigitsSpace(length=9), draws(DigitsSpace(length=9)))
    assert all(item is not None and item.join != "merged" for item in found)


SPACES: list[tuple[str, Any, list[str]]] = [
    ("The pin is {secret}.", DigitsSpace(length=3), [f"{number:03d}" for number in range(1000)]),
    (
        "Say {secret} now",
        WordsSpace(count=2, words=("in", "inn", "inner", "an", "and", "a")),
        [f"{x} {y}" for x in ("in", "inn", "inner", "an", "and", "a") for y in ("in", "inn", "inner", "an", "and", "a")],
    ),
]


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "wordpiece"])
@pytest.mark.parametrize(("template", "space", "candidates"), SPACES, ids=["digits", "words"])
def test_spans_of_a_whole_space_are_distinct_and_none_begins_another(
    name: str, template: str, space: Any, candidates: list[str]
) -> None:
    # What the mass bound stands on. Spans are compared from the earliest start, as an audit does.
    found = [item for item in encode(built(name), template, space, candidates) if item is not None]
    start = min(item.start for item in found)
    spans = sorted(item.ids[start : item.end] for item in found)
    assert len(set(spans)) == len(spans) >= 0.9 * len(candidates)
    # In sorted order a prefix stands directly before one of the sequences it begins.
    assert not [a for a, b in itertools.pairwise(spans) if b[: len(a)] == a]


# -- the join with the template


def joins(tokenizer: Any, template: str, space: Any, secrets: Sequence[str]) -> list[str | None]:
    return [item and item.join for item in encode(tokenizer, template, space, secrets)]


def test_a_digit_by_digit_tokenizer_joins_cleanly(tokenizer: Any) -> None:
    found = encode(tokenizer, "The pin is {secret}.", DigitsSpace(length=4), ["0042", "9999"])
    assert [item.join for item in found] == ["clean", "clean"]
    assert [item.end - item.start for item in found] == [4, 4]


@pytest.mark.parametrize("name", ["byte level", "byte level, trimmed offsets", "byte level, whole offsets", "sentencepiece"])
def test_a_blank_that_belongs_to_the_first_token_of_the_secret_is_a_space_join(name: str) -> None:
    assert set(joins(built(name), "The pin is {secret}.", DigitsSpace(length=9), draws(DigitsSpace(length=9)))) == {"space"}


def test_a_merge_into_the_secret_is_found_for_the_secrets_it_touches_and_no_others() -> None:
    one = glued(("n", "1"), ("9", "!"), ("Ġ", "5"))
    assert joins(one, "pin{secret}!", DigitsSpace(length=3), ["123", "213", "219", "129", "500"]) == [
        "merged",
        "clean",
        "merged",
        "merged",
        "clean",
    ]
    assert joins(one, "pin {secret}.", DigitsSpace(length=3), ["500", "123", "050"]) == ["space", "clean", "clean"]


def test_a_merged_span_covers_the_letters_of_the_template_in_its_tokens() -> None:
    one = glued(("n", "1"), ("9", "!"))
    (item,) = encode(one, "pin{secret}! end", DigitsSpace(length=3), ["129"])
    assert one.decode(item.ids[item.start : item.end]) == "n129!"
    assert one.decode(item.ids[1 : item.start]) == "pi"


def test_a_blank_behind_the_secret_in_its_last_token_is_a_space_join() -> None:
    one = glued(("3", "Ġ"))
    (item,) = encode(one, "pin:{secret} end", DigitsSpace(length=3), ["123"])
    assert item.join == "space"
    assert one.decode(item.ids[item.start : item.end]) == "123 "


# -- what is refused


def test_a_secret_that_normalisation_changes_is_refused_and_its_neighbours_are_not() -> None:
    found = encode(built("lower case"), "Code {secret}.", AlphabetSpace(alphabet="aAbB", length=4), ["abab", "abaB", "bbbb"])
    assert [item is None for item in found] == [False, True, False]


def test_a_secret_with_unknown_letters_is_refused() -> None:
    space = AlphabetSpace(alphabet="ab☃", length=3)
    assert [item is None for item in encode(built("unigram"), "the {secret} is", space, ["a☃b", "bab"])] == [True, False]


def test_upper_case_in_the_template_alone_does_not_matter() -> None:
    (item,) = encode(built("lower case"), "CODE: {secret}.", DigitsSpace(length=4), ["0123"])
    assert isinstance(item, EncodedSecret)


def test_an_iban_is_refused_by_a_tokenizer_that_lowers_it() -> None:
    space = IbanSpace()
    assert encode(built("lower case"), "IBAN {secret} end", space, draws(space, 5)) == [None] * 5
    assert None not in encode(built("byte level"), "IBAN {secret} end", space, draws(space, 5))


def test_a_tokenizer_without_offsets_is_refused_by_name() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(CanaryError, match="must report character offsets, got SlowTokenizer"):
        require_fast(SlowTokenizer())
    with pytest.raises(CanaryError, match="must report character offsets, got object"):
        require_fast(object())


def test_a_fast_tokenizer_is_taken(tokenizer: Any) -> None:
    require_fast(tokenizer)


# -- the terminator


def test_secrets_of_varying_length_hold_one_more_token_and_others_do_not(tokenizer: Any) -> None:
    words = WordsSpace(count=1, words=("in", "inner"))
    (item,) = encode(tokenizer, "Say {secret}, please", words, ["in"])
    assert tokenizer.decode(item.ids[item.start : item.end]).strip() == "in,"
    (fixed,) = encode(tokenizer, "Say {secret}, please", WordsSpace(count=1, words=("in", "an")), ["in"])
    assert tokenizer.decode(fixed.ids[fixed.start : fixed.end]).strip() == "in"


def test_a_secret_of_varying_length_that_nothing_closes_is_refused_without_its_text() -> None:
    space = WordsSpace(count=1, words=("secretive", "in"))
    # Not even by the end token: a collator that pads with it takes it out of the loss.
    for name in ("wordpiece", "byte level"):
        with pytest.raises(CanaryError, match=r"needs text after \{secret\}") as caught:
            encode(built(name), "say {secret}", space, ["secretive"])
        assert "secretive" not in str(caught.value)


def test_words_of_a_tokens_space_are_as_many_tokens_as_it_says() -> None:
    for name in ("byte level", "sentencepiece", "unigram"):
        space = TokensSpace(count=4).resolve(built(name))
        for item in encode(built(name), "the {secret}.", space, draws(space)):
            assert item.end - item.start == 4 + space.variable_length  # and the full stop


# -- settings left on a tokenizer


def test_no_secrets_give_no_encodings(tokenizer: Any) -> None:
    assert encode(tokenizer, "The pin is {secret}.", DigitsSpace(length=4), []) == []


def test_padding_truncation_and_special_tokens_left_on_change_nothing(tokenizer: Any) -> None:
    secrets = ["0042", "9999"]
    plain = encode(tokenizer, "The pin is {secret}.", DigitsSpace(length=4), secrets)
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.enable_truncation(3)
    other.backend_tokenizer.enable_padding(length=64, pad_id=0, pad_token="<|end|>")
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.eos_token_id)]
    )
    assert encode(other, "The pin is {secret}.", DigitsSpace(length=4), secrets) == plain
    assert tokenizer_digest(other) == tokenizer_digest(tokenizer)


def test_frames_are_begin_and_end_or_what_there_is_of_them() -> None:
    assert frame_ids(built("sentencepiece")) == ((1,), (2,))
    only_end = glued()
    assert frame_ids(only_end) == ((only_end.eos_token_id,), (only_end.eos_token_id,))
    assert frame_ids(built("wordpiece")) == ((), ())
    only_begin = PreTrainedTokenizerFast(tokenizer_object=glued().backend_tokenizer, bos_token="<e>")
    assert frame_ids(only_begin) == ((only_begin.bos_token_id,), ())


# -- the digest


def test_the_digest_outlives_saving_and_loading(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == tokenizer_digest(tokenizer)


def test_tokenizers_that_encode_differently_have_different_digests() -> None:
    alike = ("byte level, trimmed offsets", "byte level, whole offsets", "sentencepiece, first")
    digests = {name: tokenizer_digest(built(name)) for name in BUILDERS if name not in alike}
    assert len(set(digests.values())) == len(digests)
    assert all(len(digest) == 64 for digest in digests.values())


def test_an_added_token_an_end_token_or_a_normalisation_changes_the_digest(tokenizer: Any) -> None:
    digests = {tokenizer_digest(tokenizer)}
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens([AddedToken("memguard")])
    digests.add(tokenizer_digest(grown))
    ended = copy.deepcopy(tokenizer)
    ended.eos_token = "a"
    digests.add(tokenizer_digest(ended))
    lowered = copy.deepcopy(tokenizer)
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    digests.add(tokenizer_digest(lowered))
    assert len(digests) == 4


@pytest.mark.parametrize("template", ["{secret} is the pin.", "Pin {secret} is it.", "The pin is {secret}"])
def test_a_secret_may_stand_anywhere_in_its_template(tokenizer: Any, template: str) -> None:
    (item,) = encode(tokenizer, template, DigitsSpace(length=4), ["0042"])
    assert item.start >= 1
    assert tokenizer.decode(item.ids[item.start : item.end]).strip() == "0042"


def test_a_secret_with_nothing_before_it_at_all_is_refused(tokenizer: Any) -> None:
    bare = SecretEncoder(tokenizer, (), ())
    one = CanaryFormat(name="first", template="{secret} is the pin.", secret=DigitsSpace(length=4))
    with pytest.raises(CanaryError, match=r"must have text before \{secret\}"):
        bare.encode(one, ["0042"], [None])
