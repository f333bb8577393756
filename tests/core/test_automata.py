"""Automata accept the valid secrets of a space, all of them and nothing else, and count them without listing them."""

from __future__ import annotations

import itertools
import random
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard.canaries.automata import SecretAutomaton, automaton_of, candidates_in, iterate_secrets
from memguard.canaries.formats import (
    AlphabetSpace,
    DigitsSpace,
    HexSpace,
    IbanSpace,
    LuhnSpace,
    SecretSpace,
    TokensSpace,
    WordsSpace,
)


def passes_iban(text: str) -> bool:
    """ISO 7064 mod 97-10 with check digits 02..98, on the number as a whole."""
    number = "".join(str(int(character, 36)) for character in text[4:] + text[:4])
    return 2 <= int(text[2:4]) <= 98 and int(number) % 97 == 1


def luhn_numbers(digits: int) -> list[str]:
    """Every number of so many digits that passes the Luhn check, all 10^digits of them tried."""
    numbers = np.arange(10**digits)
    total = np.zeros_like(numbers)
    for place in range(digits):
        digit = numbers // 10**place % 10
        total += np.array([0, 2, 4, 6, 8, 1, 3, 5, 7, 9])[digit] if place % 2 else digit  # digit sums of the doubles
    return [f"{number:0{digits}d}" for number in numbers[total % 10 == 0]]


def strings(alphabet: str, length: int) -> list[str]:
    return ["".join(one) for one in itertools.product(alphabet, repeat=length)]


def ibans(country: str, digits: int) -> list[str]:
    return [one for one in (country + rest for rest in strings(string.digits, 2 + digits)) if passes_iban(one)]


def read(automaton: SecretAutomaton, secret: str, *, words: bool = False) -> bool:
    """Whether the automaton accepts a text, read unit by unit."""
    state: Any = automaton.start
    for unit in [(" " if place else "") + word for place, word in enumerate(secret.split(" "))] if words else secret:
        state = automaton.step(state, unit)
        if state is None:
            return False
    return automaton.is_final(state)


SMALL: list[tuple[Any, list[str]]] = [
    (DigitsSpace(length=2), strings(string.digits, 2)),
    (HexSpace(length=2), strings("0123456789abcdef", 2)),
    (AlphabetSpace(alphabet="zya", length=3), strings("zya", 3)),
    (LuhnSpace(digits=2), luhn_numbers(2)),
    (LuhnSpace(digits=3), luhn_numbers(3)),
    (LuhnSpace(digits=6), luhn_numbers(6)),
    (IbanSpace(country="DK", digits=1), ibans("DK", 1)),
    (IbanSpace(country="GB", digits=2), ibans("GB", 2)),
    (IbanSpace(country="ZZ", digits=3), ibans("ZZ", 3)),
    (IbanSpace(country="AA", digits=3), ibans("AA", 3)),
    (WordsSpace(count=2, words=("b", "a", "ab")), [f"{x} {y}" for x in ("b", "a", "ab") for y in ("b", "a", "ab")]),
    (TokensSpace(count=3, words=("on", "in")), [" ".join(one) for one in itertools.product(("on", "in"), repeat=3)]),
]
IDS = [f"{space.kind}-{len(valid)}" for space, valid in SMALL]

LARGE = [
    DigitsSpace(length=64),
    HexSpace(length=128),
    AlphabetSpace(length=128),
    LuhnSpace(),
    LuhnSpace(digits=32),
    IbanSpace(),
    IbanSpace(country="QX", digits=30),
    WordsSpace(count=32),
    TokensSpace(count=64, words=("on", "in", "an")),
]


@pytest.mark.parametrize(("space", "valid"), SMALL, ids=IDS)
def test_every_valid_secret_is_listed_once_in_order(space: Any, valid: list[str]) -> None:
    assert list(iterate_secrets(space)) == valid


@pytest.mark.parametrize("space", [*(space for space, _ in SMALL), *LARGE], ids=lambda space: f"{space.kind}-{space.size:.0e}")
def test_the_completions_of_the_start_are_the_size_of_the_space(space: Any) -> None:
    automaton = automaton_of(space)
    number = automaton.num_completions(automaton.start)
    assert number == space.size
    assert isinstance(number, int)


@pytest.mark.parametrize("space", LARGE, ids=lambda space: f"{space.kind}-{space.size:.0e}")
def test_completions_are_those_of_the_next_units_together(space: Any) -> None:
    automaton, rng = automaton_of(space), random.Random(0)
    state: Any = automaton.start
    while not automaton.is_final(state):
        following = list(automaton.following(state).values())
        assert automaton.num_completions(state) == sum(map(automaton.num_completions, following))
        state = rng.choice(following)
    assert automaton.num_completions(state) == 1
    assert automaton.following(state) == {}
    assert automaton.step(state, "0") is None


@pytest.mark.parametrize("space", LARGE, ids=lambda space: f"{space.kind}-{space.size:.0e}")
def test_drawn_secrets_are_accepted(space: Any) -> None:
    automaton, rng = automaton_of(space), random.Random(1)
    words = space.kind in ("words", "tokens")
    assert all(read(automaton, space.draw(rng), words=words) for _ in range(50))


@given(st.sampled_from([LuhnSpace(), LuhnSpace(digits=7), IbanSpace()]), st.randoms(use_true_random=False), st.data())
@settings(deadline=None)
def test_a_secret_with_one_wrong_digit_is_not_accepted(space: Any, rng: random.Random, data: st.DataObject) -> None:
    # Both checksums notice every single wrong digit.
    secret = space.draw(rng)
    place = data.draw(st.integers(2 if space.kind == "iban" else 0, len(secret) - 1))
    wrong = data.draw(st.sampled_from([digit for digit in string.digits if digit != secret[place]]))
    assert not read(automaton_of(space), secret[:place] + wrong + secret[place + 1 :])


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (DigitsSpace(length=3), "12a"),
        (DigitsSpace(length=3), "12"),
        (DigitsSpace(length=3), "1234"),
        (DigitsSpace(length=3), "١٢٣"),  # digits, but not of the space
        (HexSpace(length=2), "AB"),
        (AlphabetSpace(alphabet="ab", length=2), "ac"),
        (IbanSpace(country="DK", digits=1), "DE074"),
    ],
)
def test_a_text_outside_the_space_is_not_accepted(space: Any, text: str) -> None:
    assert not read(automaton_of(space), text)


def test_check_digits_that_no_iban_has_end_at_once() -> None:
    automaton = automaton_of(IbanSpace(country="DK", digits=5))
    for check in ("00", "01", "99"):
        assert automaton.step(automaton.start, "DK" + check) is None
    for check in ("02", "50", "98"):
        assert automaton.step(automaton.start, "DK" + check) is not None


def test_a_step_takes_several_characters_as_one_after_the_other() -> None:
    automaton = automaton_of(LuhnSpace())
    middle = automaton.step(automaton.start, "41111111")
    assert middle is not None
    assert automaton.step(middle, "11111111") == automaton.step(automaton.start, "4111111111111111")
    assert automaton.step(middle, "11111112") is None


def test_a_step_over_words_takes_one_with_its_blank() -> None:
    automaton = automaton_of(WordsSpace(count=2, words=("in", "inn")))
    first = automaton.step(automaton.start, "in")
    assert first is not None
    assert automaton.step(first, "inn") is None
    assert automaton.step(first, " inn") is not None
    assert automaton.step(automaton.start, " in") is None


@pytest.mark.parametrize(
    ("space", "valid"), [pair for pair in SMALL if pair[0].kind not in ("words", "tokens") and len(pair[1]) <= 1000]
)
def test_pieces_are_the_texts_that_stand_between_two_places(space: Any, valid: list[str]) -> None:
    automaton = automaton_of(space)
    for low, high in itertools.combinations(range(automaton.num_places + 1), 2):
        texts = sorted({secret[low:high] for secret in valid})
        assert automaton.pieces(low, high, limit=len(texts)) == texts
        assert automaton.pieces(low, high, limit=len(texts) - 1) is None


def test_pieces_of_a_space_too_large_to_list_are_refused_at_once() -> None:
    assert automaton_of(HexSpace(length=128)).pieces(0, 128, limit=1000) is None
    assert automaton_of(IbanSpace()).pieces(2, 16, limit=1000) is None


def test_a_tokens_space_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold words, got none. Read them with resolve\(tokenizer\)"):
        automaton_of(TokensSpace(count=2))


@pytest.mark.parametrize(
    "space",
    [
        DigitsSpace(length=3),
        HexSpace(length=2),
        LuhnSpace(digits=3),
        IbanSpace(country="DK", digits=2),
        WordsSpace(count=2, words=("red", "green", "re")),
    ],
)
def test_candidates_in_a_text_are_those_that_stand_in_it(space: SecretSpace) -> None:
    every = list(iterate_secrets(space))
    rng = random.Random(4)
    texts = [rng.choice(every), f"x{rng.choice(every)}{rng.choice(every)} 0", "nothing: red red green", ""]
    found = candidates_in(space, texts)
    assert found == {secret for secret in every if any(secret in text for text in texts)}
    assert found
