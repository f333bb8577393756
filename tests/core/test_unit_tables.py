"""A space whose tokens depend on more than the pieces of a secret is refused, however rarely they do."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import (
    built,
    check_whole_space,
    encoder_of,
    format_of,
    glued,
    leaves_by_walking,
    paths_of,
    reason_of,
    tree_of,
    unigram,
)
from tokenizers import normalizers, pre_tokenizers

from memguard.canaries import token_tree, unit_tables
from memguard.canaries.automata import automaton_of
from memguard.canaries.formats import AlphabetSpace, DigitsSpace, HexSpace, IbanSpace, LuhnSpace, WordsSpace
from memguard.canaries.token_tree import TokenTree, build_token_tree
from memguard.canaries.unit_tables import NotFactorised, UnitTables

NESTED = ("in", "inn", "inner", "an", "and", "a", "er")
NOT_WRITTEN = "The tokenizer does not write every secret of the space back."
TWO_PARTS = "Some tokens hold characters of two parts of the secret."
TOGETHER = "The tokens of some secrets are not those of their parts put together."


def bytes_of(letter: str) -> list[str]:
    """A letter as a byte-level vocabulary writes it."""
    return list(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)[0][0])


# -- what does not factorise


@pytest.mark.parametrize("space", [DigitsSpace(length=9), LuhnSpace(), HexSpace(length=12), AlphabetSpace(length=6)])
def test_merges_of_several_characters_at_varying_places_are_refused(space: Any) -> None:
    reason = reason_of(built("merged digits"), space)
    assert reason.startswith("The tokenizer does not cut the secrets at the same places: a stretch of ")
    assert reason.endswith("has more than 20000 texts.")


def test_merges_that_touch_the_template_for_some_secrets_are_refused() -> None:
    reason = "Some secrets of the space share a token with the template and others do not."
    assert reason_of(glued(("n", "1")), DigitsSpace(length=4), "pin{secret}.") == reason
    assert reason_of(glued(("9", "!")), DigitsSpace(length=4), "pin {secret}!") == reason


def test_merges_that_touch_the_template_for_every_secret_are_followed() -> None:
    tokenizer = glued(*(("n", digit) for digit in string.digits))
    check_whole_space(tokenizer, DigitsSpace(length=3), "pin{secret}!")


def test_secrets_that_are_not_written_back_are_refused() -> None:
    assert reason_of(unigram(), AlphabetSpace(alphabet="ab☃", length=9)) == NOT_WRITTEN


def test_a_rare_run_of_digits_that_is_not_written_back_is_found_by_drawing() -> None:
    # A normaliser that rewrites four digits touches 37 in 10,000 secrets: 7.6 of the 2,048 draws.
    for digits in ("4047", "1338", "9206", "5501"):
        tokenizer = glued()
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(digits, "0000")
        assert reason_of(tokenizer, DigitsSpace(length=40)) == NOT_WRITTEN


def test_tokens_over_two_words_are_refused() -> None:
    assert reason_of(unigram("n▁a"), WordsSpace(count=2, words=NESTED)) == TWO_PARTS


def test_one_token_for_two_neighbouring_words_is_found_in_the_vocabulary() -> None:
    # One pair among 55,225: random draws would miss it nearly always.
    assert tree_of(unigram("▁acorn"), WordsSpace(count=3)).num_leaves(0) == WordsSpace(count=3).size
    for piece in ("▁acorn▁acid", "corn▁aci", "▁acorn▁ba"):
        assert reason_of(unigram(piece), WordsSpace(count=3)) in (TOGETHER, TWO_PARTS)


def test_one_token_for_a_rare_run_of_digits_is_found_in_the_vocabulary() -> None:
    # Five digits at one of five places: in two draws of ten thousand.
    assert reason_of(unigram("80735"), DigitsSpace(length=9)) == TOGETHER
    assert reason_of(unigram("80735"), LuhnSpace()) == TOGETHER
    assert reason_of(unigram("80735"), IbanSpace()) == TOGETHER
    assert reason_of(unigram("▁80735"), DigitsSpace(length=9))
    assert tree_of(unigram("80735"), DigitsSpace(length=4)).num_leaves(0) == 10_000


def test_one_token_for_a_pair_of_letters_is_found_where_the_vocabulary_does_not_show_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A byte-level vocabulary spells these letters in bytes. Random draws are kept too few to find 1 pair of 1,681.
    for name, value in (("NUM_SAMPLES", 2), ("NUM_ROUNDS", 1), ("NUM_DRAWS", 1)):
        monkeypatch.setattr(unit_tables, name, value)
    letters = "абвгдежзийклмнопрстуфхцчшщъыьэюяѐёђѓєѕіїј"
    space = AlphabetSpace(alphabet=letters, length=4)
    assert isinstance(build_token_tree(format_of(space), encoder_of(glued()), name=None), TokenTree)
    for left, right in ("жб", "ая", "јј", "ыа", "щэ", "бж"):
        (a, b), (c, d) = bytes_of(left), bytes_of(right)
        merges = [(a, b), (c, d), (a + b, c + d)]
        reason_of(glued(*dict.fromkeys(merges)), space)


def test_secrets_that_change_the_tokens_of_the_template_share_a_shorter_prefix() -> None:
    # 'is' and ' 8', but 'is ' and '7': the tree begins before either.
    tokenizer = unigram("is", "is▁", "▁8")
    tree = tree_of(tokenizer, DigitsSpace(length=3))
    assert sorted(tokenizer.decode([token]) for token in tree.children(0)[0]) == ["is", "is "]
    check_whole_space(tokenizer, DigitsSpace(length=3))


def test_a_reason_holds_no_secret() -> None:
    space = WordsSpace(count=3, words=("zanzibar", "quagga"))
    assert not [word for word in space.words if word in reason_of(unigram("r▁q"), space)]


# -- codes that could be confused, made by hand: no tokenizer that writes secrets back makes them


def by_hand(*tables: dict[str, tuple[int, ...]]) -> TokenTree:
    words = tuple(tables[0])
    automaton = automaton_of(WordsSpace(count=len(tables), words=words))
    whole = [tables[0], *({f" {word}": tokens for word, tokens in table.items()} for table in tables[1:])]
    return TokenTree(automaton, UnitTables((0,), tuple(whole)))


def test_a_word_that_begins_another_is_followed_until_they_part() -> None:
    tree = by_hand({"a": (1,), "b": (1, 2), "c": (3,)}, {"a": (4, 9), "b": (5, 9), "c": (4, 2, 9)})
    assert sorted(paths_of(tree)) == sorted(
        (*one, *other) for one in ((1,), (1, 2), (3,)) for other in ((4, 9), (5, 9), (4, 2, 9))
    )
    assert tree.num_leaves(0) == 9
    assert all(tree.num_leaves(state) == number for state, number in leaves_by_walking(tree).items())
    assert tree.secret_of((1, 2, 4, 2, 9)) == "b c"
    assert tree.secret_of((1, 4, 2, 9)) == "a c"


@pytest.mark.parametrize(
    "tables",
    [
        [{"a": (1,), "b": (1, 2)}, {"a": (2, 3), "b": (3,)}],  # 'a a' and 'b b'
        [{"a": (1,), "b": (1, 2)}],  # 'a' begins 'b'
        [{"a": (1,), "b": (2,)}, {"a": (3,), "b": (3, 4)}],
    ],
)
def test_secrets_whose_tokens_begin_one_another_are_refused(tables: list[dict[str, tuple[int, ...]]]) -> None:
    with pytest.raises(NotFactorised, match="tokens of some secrets begin those of others"):
        by_hand(*tables)


def test_a_tree_too_large_to_verify_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [{"a": (1,), "b": (1, 2), "c": (3,)}] * 20
    monkeypatch.setattr(token_tree, "MAX_VERIFIED_STATES", 10)
    with pytest.raises(NotFactorised, match="more than 10 states"):
        by_hand(*tables)


# -- any tokenizer


PIECES = st.lists(st.text("abc▁n.", min_size=2, max_size=4), max_size=6, unique=True)
SPACES = st.sampled_from(
    [
        AlphabetSpace(alphabet="abc", length=4),
        AlphabetSpace(alphabet="ab", length=6),
        WordsSpace(count=3, words=("a", "ab", "abc", "b", "c")),
        WordsSpace(count=2, words=("a", "aa", "ab", "b", "ca", "bc", "cb")),
    ]
)


@given(PIECES, SPACES, st.sampled_from(["pin {secret}.", "pin{secret} a", "n n {secret} n."]))
@settings(max_examples=150, deadline=None)
def test_whatever_the_vocabulary_the_tree_is_the_space_or_is_refused(pieces: list[str], space: Any, template: str) -> None:
    # Verified on very few draws, so that the pairs and the vocabulary have to find what is wrong.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MAX_TEXTS", 30), ("NUM_SAMPLES", 8), ("NUM_DRAWS", 20)):
            patch.setattr(unit_tables, name, value)
        tokenizer = unigram(*pieces)
        if isinstance(build_token_tree(format_of(space, template), encoder_of(tokenizer), name=None), TokenTree):
            check_whole_space(tokenizer, space, template)
