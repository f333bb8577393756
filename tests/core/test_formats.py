"""Spaces hold exactly as many secrets as they say, and draw each of them alike; templates hold one secret and nothing odd."""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from memguard.canaries.formats import (
    AlphabetSpace,
    CanaryFormat,
    DigitsSpace,
    HexSpace,
    IbanSpace,
    LuhnSpace,
    SecretSpace,
    TokensSpace,
    WordsSpace,
    iban_check_digits,
    log2_size,
    luhn_check_digit,
)
from memguard.errors import CanaryError


def passes_luhn(number: str) -> bool:
    """The check as card readers do it: double every second digit from the right, add the digits of the products."""
    doubled = [int(d) * (2 if place % 2 else 1) for place, d in enumerate(reversed(number))]
    return sum(sum(map(int, str(value))) for value in doubled) % 10 == 0


def passes_iban(text: str) -> bool:
    """ISO 7064 mod 97-10 with check digits 02..98, letter by letter."""
    if not 2 <= int(text[2:4]) <= 98:
        return False
    remainder = 0
    for character in text[4:] + text[:4]:
        remainder = int(str(remainder) + str(int(character, 36))) % 97
    return remainder == 1


def strings(alphabet: str, length: int) -> list[str]:
    return ["".join(one) for one in itertools.product(alphabet, repeat=length)]


SMALL: list[tuple[Any, list[str]]] = [
    (DigitsSpace(length=2), strings(string.digits, 2)),
    (HexSpace(length=2), strings("0123456789abcdef", 2)),
    (AlphabetSpace(alphabet="xyz", length=4), strings("xyz", 4)),
    (LuhnSpace(digits=2), [one for one in strings(string.digits, 2) if passes_luhn(one)]),
    (LuhnSpace(digits=3), [one for one in strings(string.digits, 3) if passes_luhn(one)]),
    (LuhnSpace(digits=4), [one for one in strings(string.digits, 4) if passes_luhn(one)]),
    (IbanSpace(country="DK", digits=1), [f"DK{one}" for one in strings(string.digits, 3) if passes_iban(f"DK{one}")]),
    (IbanSpace(country="ZZ", digits=2), [f"ZZ{one}" for one in strings(string.digits, 4) if passes_iban(f"ZZ{one}")]),
    (WordsSpace(count=2, words=("a", "b", "ab")), [f"{x} {y}" for x in ("a", "b", "ab") for y in ("a", "b", "ab")]),
    (TokensSpace(count=3, words=("on", "in")), [" ".join(one) for one in itertools.product(("on", "in"), repeat=3)]),
]
IDS = [f"{space.kind}-{len(valid)}" for space, valid in SMALL]


@pytest.mark.parametrize(("space", "valid"), SMALL, ids=IDS)
def test_the_size_is_the_number_of_valid_candidates(space: Any, valid: list[str]) -> None:
    assert space.size == len(valid) == len(set(valid))


@pytest.mark.parametrize(("space", "valid"), SMALL, ids=IDS)
def test_draws_are_valid_candidates_each_as_likely_as_the_others(space: Any, valid: list[str]) -> None:
    draws = 20 * len(valid)
    counts = Counter(space.draw(rng) for rng in [random.Random(5)] for _ in range(draws))
    assert set(counts) == set(valid)  # a candidate is missed with chance exp(-20)
    assert stats.chisquare([counts[one] for one in valid]).pvalue > 1e-6


@pytest.mark.parametrize(("space", "valid"), SMALL, ids=IDS)
def test_a_space_says_whether_its_candidates_differ_in_length(space: Any, valid: list[str]) -> None:
    assert space.variable_length == (len({len(one) for one in valid}) > 1)


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (DigitsSpace(length=64), 10**64),
        (HexSpace(length=128), 16**128),
        (LuhnSpace(), 10**15),
        (IbanSpace(), 10**14),
        (AlphabetSpace(length=128), 26**128),
        (WordsSpace(count=4), len(WordsSpace(count=1).words) ** 4),
    ],
)
def test_large_sizes_are_exact_integers_with_a_logarithm(space: Any, size: int) -> None:
    assert space.size == size
    assert isinstance(space.size, int)
    assert log2_size(space.size) == pytest.approx(math.log(size) / math.log(2), rel=1e-12)


@given(st.text(string.digits, min_size=1, max_size=31))
@settings(deadline=None)
def test_luhn_check_digits_pass_and_no_other_digit_does(body: str) -> None:
    assert [d for d in string.digits if passes_luhn(body + d)] == [luhn_check_digit(body)]


@given(st.text(string.ascii_uppercase, min_size=2, max_size=2), st.text(string.digits, min_size=1, max_size=30))
@settings(deadline=None)
def test_iban_check_digits_pass_and_no_others_do(country: str, account: str) -> None:
    passing = [f"{check:02d}" for check in range(100) if passes_iban(f"{country}{check:02d}{account}")]
    assert passing == [iban_check_digits(country, account)]


def test_check_digits_agree_with_published_examples() -> None:
    assert passes_luhn("4111111111111111")
    assert luhn_check_digit("411111111111111") == "1"
    # The examples of the IBAN registry for Denmark and Germany.
    assert iban_check_digits("DK", "00400440116243") == "50"
    assert iban_check_digits("DE", "370400440532013000") == "89"


def test_spaces_are_told_apart_by_kind() -> None:
    for space, _ in SMALL:
        assert TypeAdapter(SecretSpace).validate_json(space.model_dump_json()) == space


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "digits", "length": 0}, "greater than or equal to 1"),
        ({"kind": "digits", "length": 65}, "less than or equal to 64"),
        ({"kind": "hex", "length": 129}, "less than or equal to 128"),
        ({"kind": "luhn", "digits": 1}, "greater than or equal to 2"),
        ({"kind": "iban", "country": "dk"}, "should match pattern"),
        ({"kind": "iban", "digits": 31}, "less than or equal to 30"),
        ({"kind": "alphabet", "alphabet": "a", "length": 3}, "at least two distinct characters and no blanks"),
        ({"kind": "alphabet", "alphabet": "aba", "length": 3}, "at least two distinct characters and no blanks"),
        ({"kind": "alphabet", "alphabet": "a b", "length": 3}, "at least two distinct characters and no blanks"),
        ({"kind": "words", "count": 2, "words": ["a", "a"]}, "at least two distinct words without blanks"),
        ({"kind": "words", "count": 2, "words": ["a"]}, "at least two distinct words without blanks"),
        ({"kind": "words", "count": 2, "words": ["a b", "c"]}, "at least two distinct words without blanks"),
        ({"kind": "words", "count": 2, "words": ["", "c"]}, "at least two distinct words without blanks"),
        ({"kind": "tokens", "count": 2, "words": ["a", "a"]}, "at least two distinct words without blanks"),
        ({"kind": "tokens", "count": 2, "words": ["a b", "c"]}, "at least two distinct words without blanks"),
        ({"kind": "letters", "length": 3}, "does not match any of the expected tags"),
        ({"kind": "digits", "length": 3, "lenght": 3}, "Extra inputs are not permitted"),
    ],
)
def test_a_space_that_could_not_be_counted_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(SecretSpace).validate_python(fields)


# -- templates


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("Card {secret}.", ("Card ", "123", ".")),
        ("Card {secret}", ("Card ", "123", "")),
        ("{name}: {secret}.", ("Ada: ", "123", ".")),
        ("Of {name}: {secret} for {name}", ("Of Ada: ", "123", " for Ada")),
        ("{{{{x}}}} {{{secret}}}", ("{{x}} {", "123", "}")),
        ("ключ «{secret}»", ("ключ «", "123", "»")),
        ("two\nlines\t{secret}\n", ("two\nlines\t", "123", "\n")),
    ],
)
def test_a_template_is_split_at_its_secret(template: str, parts: tuple[str, str, str]) -> None:
    one = CanaryFormat(name="a", template=template, secret=DigitsSpace(length=3))
    assert one.split("123", name="Ada") == parts


@given(st.text(max_size=40), st.text(max_size=40), st.text(min_size=1, max_size=10), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_can_stand_around_a_secret_and_any_secret_inside(before: str, after: str, secret: str, named: bool) -> None:
    def escaped(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    template = "x" + escaped(before) + ("{name}" if named else "") + "{secret}" + escaped(after)
    one = CanaryFormat(name="a", template=template, secret=DigitsSpace(length=3))
    assert one.split(secret, name="{n}") == ("x" + before + ("{n}" if named else ""), secret, after)
    assert one.has_name == named


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{secret}{{secret}}", ("", "1", "{secret}")),
        ("{{secret}}{secret}", ("{secret}", "1", "")),
        ("{{{secret}}}", ("{", "1", "}")),
        ("{{name}} {secret}", ("{name} ", "1", "")),
        ("{{{name}}} {secret}{name}", ("{n} ", "1", "n")),
    ],
)
def test_a_placeholder_between_doubled_braces_is_text(template: str, parts: tuple[str, str, str]) -> None:
    one = CanaryFormat(name="a", template=template, secret=DigitsSpace(length=3))
    assert one.split("1", name="n") == parts
    assert one.takes_name == ("{name}" in template.replace("{{name}} ", ""))


def test_a_name_behind_the_secret_leaves_the_prefix_shared() -> None:
    assert not CanaryFormat(name="a", template="Key {secret} of {name}", secret=DigitsSpace(length=3)).has_name
    assert CanaryFormat(name="a", template="Of {name}: {secret}", secret=DigitsSpace(length=3)).has_name


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Card.", "must hold {secret} exactly once"),
        ("", "must hold {secret} exactly once"),
        ("Card {secret} {secret}", "must hold {secret} exactly once"),
        ("Card {{secret}}", "must hold {secret} exactly once"),
        ("Card {secret!r}", "must hold {secret} exactly once"),
        ("Card {secret:>20}", "must hold {secret} exactly once"),
        ("Card {secret.real}", "must hold {secret} exactly once"),
        ("Card {secret} {other}", "no other placeholder"),
        ("Card {secret} {}", "no other placeholder"),
        ("Card {secret} {0}", "no other placeholder"),
        ("Card {secret} {name.upper}", "no other placeholder"),
        ("Card {secret} {name[0]}", "no other placeholder"),
        ("Card {secret} {name!r}", "no other placeholder"),
        ("Card {secret} {name:>20}", "no other placeholder"),
        ("Card {secret} {name:{width}}", "no other placeholder"),
        ("Card {secret", "must have balanced braces"),
        ("Card secret}", "must have balanced braces"),
    ],
)
def test_a_template_without_one_plain_secret_behind_a_text_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        CanaryFormat(name="a", template=template, secret=DigitsSpace(length=3))


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "x" * 65, "ä"])
def test_a_format_name_that_could_not_be_a_key_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        CanaryFormat(name=name, template="Card {secret}", secret=DigitsSpace(length=3))


def test_a_template_longer_than_a_page_is_refused() -> None:
    with pytest.raises(ValidationError, match="at most 4096 characters"):
        CanaryFormat(name="a", template="x" * 4096 + "{secret}", secret=DigitsSpace(length=3))


# -- random token ids


def test_a_tokens_space_is_the_product_of_tokens_that_stay_themselves(tokenizer: Any) -> None:
    space = TokensSpace(count=3).resolve(tokenizer)
    assert space.size == len(space.words) ** 3
    assert len(set(space.words)) == len(space.words) >= 16
    rng = random.Random(0)
    for _ in range(100):
        secret = space.draw(rng)
        ids = tokenizer(f"the {secret}", add_special_tokens=False)["input_ids"]
        assert len(ids) == len(tokenizer("the", add_special_tokens=False)["input_ids"]) + 3
        assert tokenizer.decode(ids) == f"the {secret}"


def test_every_word_of_a_tokens_space_is_one_token(tokenizer: Any) -> None:
    alone = tokenizer("is", add_special_tokens=False)["input_ids"]
    ids = {
        word: tokenizer(f"is {word}", add_special_tokens=False)["input_ids"]
        for word in TokensSpace(count=1).resolve(tokenizer).words
    }
    assert all(len(one) == len(alone) + 1 for one in ids.values())
    assert len({one[-1] for one in ids.values()}) == len(ids)


def test_a_vocabulary_without_whole_words_cannot_carry_a_tokens_space() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    with pytest.raises(CanaryError, match="at least 16 whole-word tokens in the vocabulary, got 0"):
        TokensSpace(count=3).resolve(PreTrainedTokenizerFast(tokenizer_object=letters))
