"""Paths of a token tree are the encodings of the valid secrets of its space, each once, with every kind of tokenizer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizer_kinds import (
    BUILDERS,
    built,
    check_whole_space,
    encoder_of,
    follow,
    format_of,
    leaves_by_walking,
    paths_of,
    reason_of,
    spans_of,
    tree_of,
)

from memguard.canaries.formats import (
    AlphabetSpace,
    DigitsSpace,
    HexSpace,
    IbanSpace,
    LuhnSpace,
    TokensSpace,
    WordsSpace,
    luhn_check_digit,
)
from memguard.canaries.token_tree import TokenTree, build_token_tree
from memguard.errors import CanaryError

NESTED = ("in", "inn", "inner", "an", "and", "a", "er")
SMALL: dict[str, Any] = {
    "digits": DigitsSpace(length=3),
    "hex": HexSpace(length=2),
    "alphabet": AlphabetSpace(alphabet="abcxyz", length=4),
    "luhn": LuhnSpace(digits=4),
    "iban, 1": IbanSpace(country="DK", digits=1),
    "iban, 2": IbanSpace(country="ZZ", digits=2),
    "one word": WordsSpace(count=1),
    "two words": WordsSpace(count=2, words=NESTED),
    "three words": WordsSpace(count=3, words=NESTED),
}
UPPER_CASE_LOST = {("wordpiece", "iban, 1"), ("wordpiece", "iban, 2")}


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("name", BUILDERS)
def test_paths_are_the_encodings_of_the_whole_space(name: str, kind: str) -> None:
    if (name, kind) in UPPER_CASE_LOST:
        assert reason_of(built(name), SMALL[kind]) == "The tokenizer does not write every secret of the space back."
        return
    check_whole_space(built(name), SMALL[kind])


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (template, kind)
        for template in ("pin:{secret} end", "{secret} is it", "The pin is {secret}", "pin\n{secret}\n")
        for kind in ("luhn", "two words")
    ],
)
@pytest.mark.parametrize("name", ["single digits", "three digits", "metaspace", "characters"])
def test_the_template_may_be_any_text(name: str, template: str, kind: str) -> None:
    if kind == "two words" and template.endswith("{secret}"):
        with pytest.raises(CanaryError, match=r"needs text after \{secret\}"):
            build_token_tree(format_of(SMALL[kind], template), encoder_of(built(name)), name=None)
        return
    check_whole_space(built(name), SMALL[kind], template)


@pytest.mark.parametrize("name", ["single digits", "three digits", "metaspace", "wordpiece"])
def test_paths_of_random_token_ids_are_their_encodings(name: str) -> None:
    space = TokensSpace(count=2).resolve(built(name))
    check_whole_space(built(name), space.model_copy(update={"words": space.words[:40]}))


@pytest.mark.parametrize("name", ["single digits", "three digits"])
def test_all_six_digit_numbers_with_a_luhn_digit_are_paths(name: str) -> None:
    tokenizer, space = built(name), LuhnSpace(digits=6)
    tree = tree_of(tokenizer, space)
    secrets = [body + luhn_check_digit(body) for body in (f"{number:05d}" for number in range(10**5))]
    # The tokenizer itself, all at once: one token before the text, one for the full stop behind the number.
    rows = tokenizer([f"The pin is {secret}." for secret in secrets], add_special_tokens=False)["input_ids"]
    wanted = {tuple(row[len(tree.prefix_ids) - 1 : -1]) for row in rows}
    paths = list(paths_of(tree))
    assert len(paths) == tree.num_leaves(0) == 10**5
    assert set(paths) == wanted
    assert {tree.secret_of(path) for path in paths[::100]} <= set(secrets)


@pytest.mark.parametrize("name", ["single digits", "three digits", "merged digits"])
def test_all_ibans_of_three_account_digits_are_paths(name: str) -> None:
    check_whole_space(built(name), IbanSpace(country="GB", digits=3))


# -- spaces too large to list


LARGE: list[tuple[str, Any]] = [
    ("single digits", DigitsSpace(length=64)),
    ("single digits", LuhnSpace()),
    ("single digits", IbanSpace(digits=30)),
    ("single digits", WordsSpace(count=8)),
    ("three digits", DigitsSpace(length=9)),
    ("three digits", LuhnSpace()),
    ("three digits", IbanSpace()),
    ("three digits", WordsSpace(count=4)),
    ("metaspace", LuhnSpace()),
    ("metaspace", WordsSpace(count=2)),
    ("blank and digit", DigitsSpace(length=9)),
    ("blank and some digits", LuhnSpace()),
    ("characters", HexSpace(length=128)),
    ("characters", AlphabetSpace(length=12)),
    ("characters", AlphabetSpace(alphabet="æøå☃", length=10)),  # several tokens a letter
    ("wordpiece", WordsSpace(count=4)),
    ("merged digits", WordsSpace(count=4)),
    ("merged digits", TokensSpace(count=6)),
]


@pytest.mark.parametrize(("name", "space"), LARGE, ids=[f"{name}-{space.kind}" for name, space in LARGE])
def test_drawn_secrets_of_a_large_space_are_paths_and_leaves_add_up(name: str, space: Any) -> None:
    tokenizer = built(name)
    space = space.resolve(tokenizer) if isinstance(space, TokensSpace) else space
    tree = tree_of(tokenizer, space)
    assert tree.num_leaves(0) == space.size
    rng = random.Random("other draws than those of the build")
    spans = spans_of(tree, tokenizer, space, "The pin is {secret}.", [space.draw(rng) for _ in range(100)])
    for path, secret in spans.items():
        leaf = follow(tree, path)
        assert leaf is not None
        assert tree.children(leaf)[0].size == 0
        assert tree.num_leaves(leaf) == 1
        assert tree.secret_of(path) == secret
        assert len(path) <= tree.max_depth
    for state in {follow(tree, path[:length]) for path in list(spans)[:5] for length in range(len(path))}:
        assert state is not None
        assert tree.num_leaves(state) == sum(map(tree.num_leaves, tree.children(state)[1].tolist()))


def test_a_number_with_a_wrong_check_digit_is_no_path() -> None:
    for name in ("single digits", "three digits"):
        tree = tree_of(built(name), LuhnSpace())
        wrong = [secret[:-1] + str((int(secret[-1]) + 1) % 10) for secret in draws(LuhnSpace(), 50)]
        spans = spans_of(tree, built(name), DigitsSpace(length=16), "The pin is {secret}.", wrong)
        assert [follow(tree, path) for path in spans] == [None] * len(spans)


def draws(space: Any, number: int) -> list[str]:
    rng = random.Random(3)
    return list(dict.fromkeys(space.draw(rng) for _ in range(number)))


def test_a_number_has_one_token_for_three_digits_where_the_tokenizer_cuts_so() -> None:
    tree = tree_of(built("three digits"), LuhnSpace())
    assert tree.max_depth == 6
    assert [len(tree.children(state)[0]) for state in (0, 1)] == [1000, 1000]
    assert tree.num_leaves(1) == 10**12


def test_sixteen_single_digits_share_states_by_place_and_checksum() -> None:
    tree = tree_of(built("single digits"), LuhnSpace())
    found = leaves_by_walking(tree)
    assert found[0] == 10**15
    # Ten sums at places 1 to 15, of which the first has ten as well; then one digit is left, and one leaf.
    assert len(found) == 1 + 15 * 10 + 1


def test_a_blank_before_some_first_digits_is_a_token_of_the_tree() -> None:
    tokenizer = built("blank and some digits")
    tree = tree_of(tokenizer, DigitsSpace(length=4))
    first = [tokenizer.decode([token]) for token in tree.children(0)[0]]
    assert sorted(first) == [" ", " 1", " 3", " 7", " 9"]
    assert tokenizer.decode(tree.prefix_ids).endswith("The pin is")
    blank = tree.children(0)[1][first.index(" ")]
    assert tree.num_leaves(int(blank)) == 6_000
    assert tree.max_depth == 5


# -- the interface


def test_children_are_distinct_ascending_read_only_and_remembered() -> None:
    tree = tree_of(built("single digits"), WordsSpace(count=2, words=NESTED))
    for state in leaves_by_walking(tree):
        tokens, states = tree.children(state)
        assert tokens.dtype == states.dtype == np.int64
        assert tokens.tolist() == sorted(set(tokens.tolist()))
        assert tree.children(state)[0] is tokens
        with pytest.raises(ValueError, match="read-only"):
            tokens[:] = 0


def test_the_prefix_is_what_stands_before_the_secret() -> None:
    tokenizer, one = built("single digits"), format_of(LuhnSpace(), "Card of {name}: {secret}.")
    encoder = encoder_of(tokenizer)
    prefixes = {}
    for name in ("Ada Berg", "Omar Cruz"):
        tree = build_token_tree(one, encoder, name=name)
        assert isinstance(tree, TokenTree)
        (item,) = encoder.encode(one, ["4111111111111111"], [name])
        assert item is not None
        assert tree.prefix_ids == item.ids[: item.start]
        prefixes[name] = tree.prefix_ids
    assert len(set(prefixes.values())) == 2


def test_the_terminator_is_the_last_token_of_every_path_of_varying_length() -> None:
    tokenizer = built("single digits")
    tree = tree_of(tokenizer, WordsSpace(count=2, words=NESTED), "Say {secret}, please")
    assert {tokenizer.decode([path[-1]]) for path in paths_of(tree)} == {","}
    fixed = tree_of(tokenizer, WordsSpace(count=2, words=("in", "an")), "Say {secret}, please")
    assert "," not in {tokenizer.decode([path[-1]]) for path in paths_of(fixed)}


def test_a_path_that_is_not_one_has_no_secret_and_the_error_shows_no_token() -> None:
    tree = tree_of(built("single digits"), LuhnSpace(digits=4))
    path = next(iter(paths_of(tree)))
    for wrong in (path[:-1], (*path, path[0]), (*path[:-1], path[-1] + 1), ()):
        with pytest.raises(ValueError, match=f"got {len(wrong)} tokens that do not") as caught:
            tree.secret_of(wrong)
        assert str(path[0]) not in str(caught.value).replace(f"got {len(wrong)}", "")


def test_two_builds_number_their_states_alike() -> None:
    first, second = (tree_of(built("three digits"), IbanSpace(digits=4)) for _ in range(2))
    for state in range(30):
        for one, other in zip(first.children(state), second.children(state), strict=True):
            assert one.tolist() == other.tolist()


def test_a_tokens_space_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold words"):
        build_token_tree(format_of(TokensSpace(count=2)), encoder_of(built("single digits")), name=None)
