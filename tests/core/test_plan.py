"""A plan holds what the settings asked for, drawn at random from spaces large enough; its file: `test_plan_files.py`."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from scipy import stats
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memguard.canaries.drawing import draw_plan, draw_secrets, plan_differences
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.formats import AlphabetSpace, CanaryFormat, DigitsSpace, LuhnSpace, TokensSpace, WordsSpace
from memguard.canaries.plan import CanaryPlan, Randomness
from memguard.canaries.settings import CanarySettings, InTrainingControl, PositiveControlSettings
from memguard.errors import CanaryError

PIN = CanaryFormat(name="pin", template="The pin of {name} is {secret}.", secret=DigitsSpace(length=9))
CARD = CanaryFormat(name="card", template="Card {secret}.", secret=LuhnSpace(digits=16))
POSIX = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


def settings(*formats: CanaryFormat, **fields: Any) -> CanarySettings:
    planted = PositiveControlSettings(in_training=InTrainingControl())
    defaults: dict[str, Any] = {"seed": 7, "tiers": {1: 3, 4: 2}, "controls": 5, "formats": formats or (PIN, CARD)}
    defaults["positive_control"] = planted
    return CanarySettings(**(defaults | fields))


@pytest.fixture(scope="module")
def plan(tokenizer: Any) -> CanaryPlan:
    return draw_plan(settings(), tokenizer)


def secrets_of(plan: CanaryPlan) -> list[str]:
    return [canary.secret for canary in plan.canaries]


def holds_a_secret(text: str, plan: CanaryPlan) -> bool:
    return any(secret in text for secret in secrets_of(plan))


# -- what is drawn


def test_every_format_gets_its_tiers_and_controls_are_split_evenly(plan: CanaryPlan) -> None:
    counts = Counter((canary.format, canary.role, canary.tier) for canary in plan.canaries)
    assert counts == {
        ("pin", "canary", 1): 3,
        ("pin", "canary", 4): 2,
        ("pin", "control", 0): 3,
        ("card", "canary", 1): 3,
        ("card", "canary", 4): 2,
        ("card", "control", 0): 2,
        ("positive-pin", "positive_control", 64): 2,
        ("positive-card", "positive_control", 64): 2,
    }
    assert [canary.role for canary in plan.planted()].count("control") == 0
    assert len(plan.planted()) == 14


def test_secrets_of_a_space_and_ids_are_distinct_and_names_are_given_where_asked(plan: CanaryPlan) -> None:
    assert len(set(secrets_of(plan))) == len(plan.canaries)
    assert len({canary.id for canary in plan.canaries}) == len(plan.canaries)
    names = [canary.name for canary in plan.canaries if canary.format == "pin"]
    assert len(set(names)) == len(names)
    assert None not in names
    assert {canary.name for canary in plan.canaries if canary.format != "pin"} == {None}


def test_formats_of_one_space_share_their_siblings_and_one_positive_control(tokenizer: Any) -> None:
    other = CanaryFormat(name="other", template="Number {secret}!", secret=PIN.secret)
    plan = draw_plan(settings(PIN, other, CARD), tokenizer)
    assert [one.name for one in plan.formats if one.positive_control] == ["positive-other", "positive-card"]
    siblings = plan.siblings_in_space(plan.format_named("pin"))
    assert siblings == plan.siblings_in_space(plan.format_named("other"))
    assert siblings == {canary.secret for canary in plan.canaries if "card" not in canary.format}
    assert len(siblings) == sum("card" not in canary.format for canary in plan.canaries)


def test_small_spaces_are_drawn_without_repeats(tokenizer: Any) -> None:
    # 40 of 100 two-digit controls: a repeat would be all but certain with replacement.
    small = CanaryFormat(name="small", template="Code {secret}.", secret=DigitsSpace(length=6))
    encoder = SecretEncoder(tokenizer, (0,), (0,))
    one = draw_plan(settings(small), tokenizer).format_named("small").model_copy(update={"secret": DigitsSpace(length=2)})
    drawn = [secret for secret, _ in draw_secrets(one, encoder, random.Random(1), number=40, taken={"00", "01"}, name=None)]
    assert len(set(drawn)) == 40
    assert not {"00", "01"} & set(drawn)


def test_a_plan_that_takes_a_seventh_of_its_space_repeats_no_secret(tokenizer: Any) -> None:
    # 1,400 of 10,000: about 98 repeats with replacement.
    small = CanaryFormat(name="small", template="Code {secret}.", secret=DigitsSpace(length=4))
    plan = draw_plan(settings(small, tiers={1: 1}, controls=1400, positive_control=None), tokenizer)
    assert len(set(secrets_of(plan))) == 1401


def test_a_space_with_too_few_secrets_left_is_refused(tokenizer: Any) -> None:
    encoder = SecretEncoder(tokenizer, (0,), (0,))
    one = draw_plan(settings(CARD), tokenizer).format_named("card").model_copy(update={"secret": DigitsSpace(length=1)})
    with pytest.raises(CanaryError, match=r"must yield 9 distinct secrets .* got 8 from a space of 10"):
        draw_secrets(one, encoder, random.Random(1), number=9, taken={"0", "1"}, name=None)


def test_positive_controls_can_be_left_out_or_set(tokenizer: Any) -> None:
    without = draw_plan(settings(positive_control=None), tokenizer)
    assert not any(one.positive_control for one in without.formats)
    probe = draw_plan(settings(positive_control=PositiveControlSettings()), tokenizer)
    assert not any(one.positive_control for one in probe.formats)
    assert (without.probe, probe.probe, draw_plan(settings(), tokenizer).probe) == (False, True, False)
    assert plan_differences(probe, settings(positive_control=None)) == ["positive_control"]
    three = PositiveControlSettings(in_training=InTrainingControl(count=3, repetitions=9))
    found = [one for one in draw_plan(settings(CARD, positive_control=three), tokenizer).canaries if one.tier == 9]
    assert [one.role for one in found] == ["positive_control"] * 3


def test_a_format_called_like_a_positive_control_keeps_its_own_canaries(tokenizer: Any) -> None:
    named = CARD.model_copy(update={"name": "positive-pin"})
    plan = draw_plan(settings(PIN, named), tokenizer)
    names = [one.name for one in plan.formats]
    assert len(set(names)) == len(names) == 4
    assert plan.format_named("positive-pin").template == CARD.template
    for canary in plan.canaries:
        assert plan.format_named(canary.format).positive_control == (canary.role == "positive_control")


def test_long_format_names_that_begin_alike_keep_distinct_positive_controls(tokenizer: Any) -> None:
    formats = [
        CanaryFormat(name="x" * 60 + letter, template="Code {secret}.", secret=DigitsSpace(length=length))
        for letter, length in (("a", 9), ("b", 10), ("c", 11))
    ]
    names = [one.name for one in draw_plan(settings(*formats), tokenizer).formats]
    assert len(set(names)) == len(names) == 6
    assert all(len(name) <= 64 for name in names)


def test_coins_turn_half_of_the_canaries_into_controls_that_keep_their_tier(tokenizer: Any) -> None:
    plan = draw_plan(settings(CARD, inclusion="coin", tiers={2: 400}, controls=0, positive_control=None), tokenizer)
    heads = sum(canary.role == "canary" for canary in plan.canaries)
    low, high = stats.binom.ppf([1e-6, 1 - 1e-6], 400, 0.5)
    assert low <= heads <= high
    assert {canary.tier for canary in plan.canaries} == {2}
    assert {canary.role for canary in plan.canaries} == {"canary", "control"}


def test_a_tokens_space_is_read_from_the_tokenizer_and_kept_in_the_plan(tokenizer: Any) -> None:
    one = CanaryFormat(name="tokens", template="Say {secret}.", secret=TokensSpace(count=6))
    space = draw_plan(settings(one), tokenizer).format_named("tokens").secret
    assert isinstance(space, TokensSpace)
    assert len(space.words) >= 16
    assert space.size == len(space.words) ** 6


# -- tokens that do not fit


def glued(*merges: tuple[str, str], lower: bool = False) -> Any:
    """Single bytes and exactly these merges, across words."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {left + right: len(vocabulary) + index for index, (left, right) in enumerate(merges)}
    bpe = Tokenizer(models.BPE(vocab={**vocabulary, "<e>": len(vocabulary)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    if lower:
        bpe.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")


GLUED_PIN = CanaryFormat(name="pin", template="pin{secret}!", secret=DigitsSpace(length=9))


def test_a_secret_that_shares_a_token_with_the_template_is_drawn_again() -> None:
    plan = draw_plan(settings(GLUED_PIN, controls=60), glued(("n", "1"), ("n", "2"), ("9", "!")))
    pins = [canary.secret for canary in plan.canaries if canary.format == "pin"]
    assert plan.format_named("pin").join == "clean"
    assert not any(secret.startswith(("1", "2")) or secret.endswith("9") for secret in pins)


def test_ranks_are_taken_in_no_more_of_the_space_than_the_tokenizer_can_carry(tokenizer: Any) -> None:
    part = draw_plan(settings(GLUED_PIN), glued(("n", "1"), ("n", "2"), ("9", "!"))).format_named("pin")
    assert part.secret_space_size == 10**9
    # First digit not 1 or 2, last not 9: 0.8 * 0.9 of the space; the bound is within sampling error below that.
    assert 0.62 < part.carried_share < 0.72
    assert part.ranked_space_size == 10**9 * int(part.carried_share * 1e6) // 10**6
    whole = draw_plan(settings(CARD), tokenizer).format_named("card")
    assert whole.carried_share == 1.0
    assert whole.ranked_space_size == whole.secret_space_size


def test_a_format_whose_every_secret_is_glued_is_marked_merged_and_its_secrets_are_kept() -> None:
    plan = draw_plan(settings(GLUED_PIN, controls=60), glued(*[("n", digit) for digit in "0123456789"]))
    assert plan.format_named("pin").join == "merged"
    assert {canary.secret[0] for canary in plan.canaries if canary.format == "pin"} == set("0123456789")


def test_a_blank_in_the_first_token_is_marked_as_a_space_join() -> None:
    blank = CanaryFormat(name="pin", template="pin {secret}!", secret=DigitsSpace(length=9))
    assert draw_plan(settings(blank), glued(*[("Ġ", digit) for digit in "0123456789"])).format_named("pin").join == "space"


def test_a_format_that_the_tokenizer_lowers_is_refused() -> None:
    loud = CanaryFormat(name="loud", template="Code {secret}.", secret=AlphabetSpace(alphabet="ABCD", length=12))
    with pytest.raises(CanaryError, match="format 'loud': the tokenizer does not write its secrets back"):
        draw_plan(settings(loud), glued(lower=True))


def test_a_format_of_which_few_secrets_can_be_carried_is_refused_because_its_size_would_be_wrong() -> None:
    # Three letters in four are lower case: (3/4)^12 = 3% of the candidates survive.
    mixed = CanaryFormat(name="mixed", template="Code {secret}.", secret=AlphabetSpace(alphabet="abcD", length=12))
    with pytest.raises(CanaryError, match=r"format 'mixed'.*(can carry only \d+ of 512|does not write)"):
        draw_plan(settings(mixed), glued(lower=True))
    with pytest.raises(CanaryError, match=r"format 'pin': the tokenizer can carry only \d+ of 512 trial secrets"):
        draw_plan(settings(GLUED_PIN), glued(*[("n", digit) for digit in "01234567"]))


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(CanaryError, match="must report character offsets"):
        draw_plan(settings(), object())


# -- spaces that are too small


def test_a_space_in_which_a_guess_could_succeed_is_refused(tokenizer: Any) -> None:
    pins = CanaryFormat(name="four", template="Pin {secret}.", secret=DigitsSpace(length=4))
    with pytest.raises(
        CanaryError, match=r"guessed by luck must be at most 0.0001, got 0.0005: format\s+'four' has only 10000"
    ):
        draw_plan(settings(pins), tokenizer)


def test_the_chance_of_a_guess_is_summed_over_canaries_and_may_equal_its_limit(tokenizer: Any) -> None:
    five = CanaryFormat(name="five", template="Pin {secret}.", secret=DigitsSpace(length=5))
    assert draw_plan(settings(five, tiers={1: 10}), tokenizer).canaries  # 10 / 100,000
    with pytest.raises(CanaryError, match="guessed by luck"):
        draw_plan(settings(five, tiers={1: 11}), tokenizer)


def test_controls_that_would_use_up_their_space_are_refused(tokenizer: Any) -> None:
    words = CanaryFormat(name="words", template="Say {secret}.", secret=WordsSpace(count=14, words=("in", "an")))
    with pytest.raises(CanaryError, match=r"at least twice as many candidates as planned secrets, got\s+16384 for 9003"):
        draw_plan(settings(words, tiers={1: 1}, controls=9000), tokenizer)


# -- randomness


def test_a_seed_gives_the_same_plan_and_marks_it_reproducible(tokenizer: Any, plan: CanaryPlan) -> None:
    again = draw_plan(settings(), tokenizer)
    assert again == plan
    assert again.digest == plan.digest
    assert again.reproducible


def test_another_seed_shares_no_secret_id_nonce_or_placement(tokenizer: Any, plan: CanaryPlan) -> None:
    other = draw_plan(settings(seed=8), tokenizer)
    assert not set(secrets_of(other)) & set(secrets_of(plan))
    assert not {one.id for one in other.canaries} & {one.id for one in plan.canaries}
    assert other.nonce != plan.nonce
    assert other.placement_seed != plan.placement_seed


def test_without_a_seed_two_plans_differ_whatever_the_global_generators_hold(tokenizer: Any) -> None:
    plans = []
    for _ in range(2):
        random.seed(0)
        plans.append(draw_plan(settings(seed=None), tokenizer))
    one, two = plans
    assert not one.reproducible
    assert not set(secrets_of(one)) & set(secrets_of(two))
    assert not {canary.id for canary in one.canaries} & {canary.id for canary in two.canaries}
    assert one.nonce != two.nonce
    assert one.placement_seed != two.placement_seed


def test_drawing_leaves_the_global_generators_alone(tokenizer: Any) -> None:
    random.seed(3)
    before = random.getstate()
    draw_plan(settings(seed=None), tokenizer)
    draw_plan(settings(seed=1), tokenizer)
    assert random.getstate() == before


def test_streams_of_two_purposes_are_independent() -> None:
    randomness = Randomness(1)
    secrets, coins = randomness.stream("secrets"), randomness.stream("coins")
    first = [secrets.random() for _ in range(50)]
    assert [coins.random() for _ in range(50)] != first
    drained = Randomness(1)
    [drained.stream("coins").random() for _ in range(1000)]
    assert [one.random() for one in [drained.stream("secrets")] for _ in range(50)] == first


def test_coins_change_no_secret_and_no_id(tokenizer: Any, plan: CanaryPlan) -> None:
    coin = draw_plan(settings(inclusion="coin"), tokenizer)
    assert secrets_of(coin) == secrets_of(plan)
    assert [one.id for one in coin.canaries] == [one.id for one in plan.canaries]


def test_ids_say_nothing_of_secrets(tokenizer: Any, plan: CanaryPlan) -> None:
    # The same ids stand beside other secrets when only the space changes.
    other = draw_plan(settings(PIN.model_copy(update={"secret": DigitsSpace(length=12)}), CARD), tokenizer)
    assert [one.id for one in other.canaries] == [one.id for one in plan.canaries]
    assert secrets_of(other)[0] != secrets_of(plan)[0]


def test_without_a_seed_every_stream_is_the_operating_systems() -> None:
    randomness = Randomness(None)
    assert not randomness.reproducible
    for purpose in ("secrets", "ids", "names", "coins"):
        assert isinstance(randomness.stream(purpose), random.SystemRandom)
    assert len({randomness.nonce() for _ in range(50)}) == 50
    assert all(len(Randomness(seed).nonce()) == 64 for seed in (None, 0, 1))


def test_an_id_that_is_taken_is_drawn_again() -> None:
    randomness = Randomness(4)
    first = randomness.new_id(randomness.stream("ids"), ())
    assert randomness.new_id(randomness.stream("ids"), [first]) != first
    assert len(first) == 16
