"""A configuration says what is wrong with it: every wrong key by name, the nearest right one, and what comes later."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from memguard.audit.config import NOT_IMPLEMENTED, AuditConfig, load_config, parse_config
from memguard.canaries.settings import CanarySettings
from memguard.documents import json_digest, nearest
from memguard.errors import InputError

FORMAT = {"name": "pin", "template": "The pin is {secret}.", "secret": {"kind": "digits", "length": 9}}
LEAST: dict[str, Any] = {"canaries": {"formats": [FORMAT]}}

FULL = """
plan: _memguard/plan.json
canaries:
  formats:
    - name: pin
      template: "The pin of {name} is {secret}."
      secret: {kind: digits, length: 9}
    - name: card
      template: "Card {secret}."
      secret: {kind: luhn}
  tiers: {16: 2, 1: 4}
  controls: 20
  positive_control:
    in_training: {count: 3, repetitions: 32}
  max_share: 0.02
  plant_once: yes
  inclusion: coin
  count: per_epoch
audit:
  every: {steps: 100}
  on: [start, save, end, save]
  full_on: [end]
  exposure: {references: 512, references_per_name: 64}
  prior_aware: {prefixes: 100, m: 1e-3, n: 20}
  extraction: {budgets: [1, 100, 10000], temperature: 0.7, top_k: null, top_p: 0.9}
  records: {file: sample.jsonl, held_out: held_out.jsonl, prefix_tokens: 32, suffix_tokens: 16, max_records: 50, max_edits: 3,
    contexts: [8, 16], offsets: [64]}
  membership: {scores: [loss, zlib, reference], reference: base}
  batch_size: 8
  on_error: raise
dp: {epsilon: 8, delta: 1e-6}
tracking: {wandb: off}
output: memguard_audit
"""


def set_at(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `document` with the value at a dotted path set; numbers index lists."""
    other = copy.deepcopy(document)
    inner: Any = other
    *parents, last = path.split(".")
    for part in parents:
        inner = inner[int(part)] if isinstance(inner, list) else inner.setdefault(part, {})
    inner[last] = value
    return other


def refusal(data: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse_config(data)
    return str(caught.value)


# -- what is read


def test_a_whole_file_is_read_with_every_key(tmp_path: Path) -> None:
    path = tmp_path / "memguard.yaml"
    path.write_text(FULL)
    config = load_config(path)
    assert list(config.canaries.tiers.items()) == [(1, 4), (16, 2)]
    assert config.canaries.plant_once is True
    assert (config.canaries.inclusion, config.canaries.count) == ("coin", "per_epoch")
    assert config.canaries.positive_control is not None
    assert config.canaries.positive_control.in_training.repetitions == 32
    assert config.audit.on == ("start", "save", "end")
    assert config.audit.every is not None
    assert config.audit.every.steps == 100
    assert config.audit.prior_aware is not None
    assert (config.audit.prior_aware.m, config.audit.prior_aware.n) == (1e-3, 20.0)
    assert config.audit.extraction is not None
    assert (config.audit.extraction.budgets, config.audit.extraction.top_k) == ((1, 100, 10_000), None)
    assert (config.audit.records.file, config.audit.records.suffix_tokens) == (Path("sample.jsonl"), 16)
    assert config.audit.membership is not None
    assert config.audit.membership.reference == Path("base")
    assert config.dp is not None
    assert (config.dp.epsilon, config.dp.delta) == (8.0, 1e-6)
    assert config.tracking.wandb == "off"
    assert config.canaries.formats[1].secret.size == 10**15


def test_formats_alone_are_enough_and_the_rest_has_its_defaults() -> None:
    config = parse_config(LEAST)
    assert config.canaries.tiers == {1: 16, 4: 16, 16: 8}
    assert config.canaries.controls == 200
    assert config.audit.exposure.references == 16_384
    assert config.audit.on == ("start", "save", "end")
    assert config.plan == Path("_memguard/plan.json")
    assert config.canaries.has_probe
    assert config.canaries.planted_control is None
    assert config.audit.prior_aware is not None
    assert config.audit.prior_aware.n == "calibrated"


def test_a_positive_control_is_a_probe_planted_or_none() -> None:
    probe = parse_config(set_at(LEAST, "canaries.positive_control", "probe")).canaries
    planted = parse_config(set_at(LEAST, "canaries.positive_control", {"in_training": {}})).canaries
    none = parse_config(set_at(LEAST, "canaries.positive_control", None)).canaries
    assert [one.has_probe for one in (probe, planted, none)] == [True, False, False]
    assert [one.planted_control is not None for one in (probe, planted, none)] == [False, True, False]
    message = refusal(set_at(LEAST, "canaries.positive_control", "prob"))
    assert "positive_control must be probe, in_training with its numbers, or null" in message


def test_a_reference_score_and_a_reference_model_need_each_other() -> None:
    for membership in ({"scores": ["reference"]}, {"scores": ["loss"], "reference": "base"}):
        message = refusal(LEAST | {"audit": {"membership": membership}})
        assert "the score 'reference' and the checkpoint 'reference' need each other" in message


def test_parts_that_may_be_absent_can_be_switched_off() -> None:
    off = parse_config(LEAST | {"audit": {"every": None, "prior_aware": None}})
    assert off.audit.every is None
    assert off.audit.prior_aware is None
    assert parse_config(set_at(LEAST, "canaries.positive_control", None)).canaries.positive_control is None


def test_the_digest_follows_the_settings_and_not_how_they_were_written() -> None:
    one = parse_config(LEAST)
    assert parse_config(copy.deepcopy(LEAST)).digest == one.digest
    spelled_out = set_at(LEAST, "canaries.tiers", {16: 8, 4: 16, 1: 16}) | {"audit": {"batch_size": None}}
    assert parse_config(spelled_out).digest == one.digest
    assert parse_config(set_at(LEAST, "canaries.controls", 201)).digest != one.digest
    assert parse_config(set_at(LEAST, "audit.batch_size", 65)).digest != one.digest
    assert json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})


# -- unknown keys


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("audti", "audit"),
        ("canaries.plant_onc", "plant_once"),
        ("canaries.control", "controls"),
        ("canaries.formats.0.tempalte", "template"),
        ("canaries.positive_control.in_trainin", "in_training"),
        ("canaries.positive_control.in_training.repetition", "repetitions"),
        ("audit.batchsize", "batch_size"),
        ("audit.every.step", "steps"),
        ("audit.exposure.reference", "references"),
        ("audit.prior_aware.prefix", "prefixes"),
        ("tracking.wandbb", "wandb"),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_nearest_valid_one(path: str, known: str) -> None:
    document = set_at(LEAST, path, 1) if "every" not in path else LEAST | {"audit": {"every": {"steps": 1, "step": 1}}}
    message = refusal(document)
    assert f"unknown key '{path}'" in message
    assert f"Did you mean '{known}'?" in message


def test_an_unknown_key_inside_a_secret_is_answered_from_its_own_kind() -> None:
    message = refusal(set_at(LEAST, "canaries.formats.0.secret", {"kind": "iban", "county": "DK"}))
    assert "unknown key 'canaries.formats.0.secret.iban.county'. Did you mean 'country'?" in message
    message = refusal(set_at(LEAST, "canaries.formats.0.secret", {"kind": "digits", "length": 9, "zzz": 1}))
    assert "Known: kind, length" in message


def test_an_unknown_key_unlike_any_other_gets_the_list() -> None:
    assert "unknown key 'tracking.xyz'. Known: wandb" in refusal(LEAST | {"tracking": {"xyz": 1}})


def test_every_wrong_key_is_named_at_once_and_nothing_else() -> None:
    document = set_at(set_at(LEAST, "canaries.formats.0.secret", {"kind": "digits", "lenght": 9}), "audit.batch_size", 0)
    message = refusal(document | {"outptu": "x"})
    assert "'canaries.formats.0.secret.digits.length': Field required" in message
    assert "unknown key 'canaries.formats.0.secret.digits.lenght'. Did you mean 'length'?" in message
    assert "'audit.batch_size': Input should be greater than or equal to 1" in message
    assert "unknown key 'outptu'. Did you mean 'output'?" in message
    assert "at least 1 item" not in message  # the one format that is wrong is not also a missing one


def test_no_formats_at_all_is_said_so() -> None:
    assert "'canaries.formats': Tuple should have at least 1 item" in refusal({"canaries": {"formats": []}})
    assert "'canaries': Field required" in refusal({})


@pytest.mark.parametrize(
    ("word", "choices", "answer"),
    [
        ("pln", ["plan", "audit"], " Did you mean 'plan'?"),
        ("xyz", ["plan", "audit"], " Known: audit, plan."),
        ("xyz", [], " Known: ."),
    ],
)
def test_the_nearest_choice_is_offered_or_else_all_of_them(word: str, choices: list[str], answer: str) -> None:
    assert nearest(word, choices) == answer


# -- keys of a later version


@pytest.mark.parametrize("path", NOT_IMPLEMENTED)
def test_a_key_of_a_later_version_is_refused_by_name(path: str) -> None:
    message = refusal(set_at(LEAST, path, {}))
    assert f"'{path}' ({NOT_IMPLEMENTED[path]})" in message
    assert "this version does not implement" in message


@pytest.mark.parametrize("change", [{"count": "total"}, {"count": "total", "schedule": "early"}])
def test_records_of_a_dp_run_have_no_schedule(change: dict[str, Any]) -> None:
    data = copy.deepcopy(LEAST) | {"dp": {"epsilon": 8.0, "delta": 1e-6}}
    data["canaries"] |= change
    assert "canaries.count must be per_epoch" in refusal(data)


def test_a_key_of_a_later_version_is_named() -> None:
    assert "'tracking.tensorboard'" in refusal(LEAST | {"tracking": {"tensorboard": True}})


def test_no_key_of_a_later_version_is_one_that_is_read() -> None:
    def reads(model: Any, path: list[str]) -> bool:
        field = model.model_fields.get(path[0])
        if field is None or len(path) == 1:
            return field is not None
        inner = [one for one in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(one, type)]
        return any(reads(one, path[1:]) for one in inner if issubclass(one, BaseModel))

    assert reads(AuditConfig, ["audit", "every", "steps"])
    assert not [path for path in NOT_IMPLEMENTED if reads(AuditConfig, path.split("."))]


# -- values


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("canaries.tiers", {}, "tiers must map repetitions of at least 1"),
        ("canaries.tiers", {0: 4}, "tiers must map repetitions of at least 1"),
        ("canaries.tiers", {4: 0}, "tiers must map repetitions of at least 1"),
        ("canaries.tiers", {4: -1}, "tiers must map repetitions of at least 1"),
        ("canaries.controls", -1, "greater than or equal to 0"),
        ("audit.prior_aware.n", "calibrate", "calibrated"),
        ("audit.extraction.top_p", 0.0, "greater than 0"),
        ("audit.extraction.top_k", 0, "greater than or equal to 1"),
        ("audit.extraction.temperature", 1e-39, "greater than or equal to 0.001"),
        ("audit.extraction.budgets", [10**400], "less than or equal to"),
        ("audit", {"extraction": None, "records": {"max_edits": 2}}, "records.max_edits needs the sampler of 'extraction'"),
        ("audit", {"on": ["save"], "full_on": ["save", "end"]}, "full_on must hold moments of 'on', got end besides"),
        ("audit.extraction.budgets", [0], "greater than or equal to 1"),
        ("audit.records.max_edits", -1, "greater than or equal to 0"),
        ("audit.records", {"contexts": [50]}, "contexts must be shorter than prefix_tokens, 50"),
        ("audit.membership.scores", [], "at least 1"),
        ("audit.membership.scores", ["min-k"], "min_k"),
        ("dp.epsilon", 0.0, "greater than 0"),
        ("canaries.max_share", 0.0, "greater than 0"),
        ("canaries.max_share", 1.0, "less than 1"),
        ("canaries.max_share", float("nan"), "less than 1"),
        ("canaries.inclusion", "dice", "'planned' or 'coin'"),
        ("canaries.count", "per_run", "'per_epoch' or 'total'"),
        ("canaries.positive_control.in_training.count", 0, "greater than or equal to 1"),
        ("canaries.positive_control.in_training.repetitions", 0, "greater than or equal to 1"),
        ("canaries.formats.0.template", "no place for it", "must hold {secret} exactly once"),
        ("canaries.formats.0.template", "x {secret} {name:{y}}", "no other placeholder"),
        ("canaries.formats.0.secret", {"kind": "digts", "length": 9}, "'digits', 'hex', 'alphabet'"),
        ("canaries.formats.0.secret", {"length": 9}, "Unable to extract tag using discriminator 'kind'"),
        ("audit.on", ["never"], "'start', 'save', 'evaluate' or 'end'"),
        ("audit.every", {"steps": 0}, "greater than or equal to 1"),
        ("audit.every", {"epochs": 0}, "greater than 0"),
        ("audit.every", {"epochs": 0.5, "steps": 5}, "every must hold steps or epochs, one of the two"),
        ("audit.every", {}, "every must hold steps or epochs, one of the two"),
        ("audit.max_overhead", 0.0, "greater than 0"),
        ("audit.max_overhead", float("inf"), "finite number"),
        ("gate", {}, "Field required"),
        ("gate", {"policy": "default", "stop_when": "block"}, "'never' or 'blocked'"),
        ("gate", {"policy": "default", "push": "never"}, "'always' or 'gated'"),
        ("audit.exposure.references", 15, "greater than or equal to 16"),
        ("audit.exposure.references_per_name", 1, "greater than or equal to 16"),
        ("audit.prior_aware.prefixes", 15, "greater than or equal to 16"),
        ("audit.prior_aware.m", 0.0, "greater than 0"),
        ("audit.prior_aware.m", 1.0, "less than 1"),
        ("audit.prior_aware.n", 1.0, "greater than 1"),
        ("audit.prior_aware.n", float("nan"), "finite number"),
        ("audit.prior_aware.n", float("inf"), "finite number"),
        ("audit.on_error", "ignore", "'continue' or 'raise'"),
        ("audit", None, "valid dictionary"),
        ("tracking.wandb", True, "'auto' or 'off'"),
    ],
)
def test_a_value_outside_its_rule_is_named_with_the_rule(path: str, value: Any, message: str) -> None:
    found = refusal(set_at(LEAST, path, value))
    assert path.split(".")[-1] in found
    assert message in found


def test_formats_need_distinct_names() -> None:
    assert "formats must have distinct names" in refusal({"canaries": {"formats": [FORMAT, FORMAT]}})


def test_controls_must_reach_every_format_or_be_none() -> None:
    formats = [FORMAT | {"name": name} for name in ("a", "b", "c")]
    assert "controls must be at least one a format (3), got 2" in refusal({"canaries": {"formats": formats, "controls": 2}})
    for controls in (0, 3):
        assert parse_config({"canaries": {"formats": formats, "controls": controls}}).canaries.controls == controls


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_a_file_that_holds_no_keys_is_refused(data: Any) -> None:
    assert f"config must hold keys and values, got {type(data).__name__}." in refusal(data)


def test_a_key_that_is_no_text_is_refused() -> None:
    assert "'5': Keys should be strings" in refusal({**LEAST, 5: 3})


def test_an_empty_file_and_a_missing_one_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "memguard.yaml").write_text("")
    with pytest.raises(InputError, match=r"config 'memguard\.yaml' must hold keys and values, got NoneType"):
        load_config(tmp_path / "memguard.yaml")
    with pytest.raises(InputError, match=r"config '.*other\.yaml' does not exist"):
        load_config(tmp_path / "other.yaml")


def test_settings_cannot_be_changed_after_they_were_read() -> None:
    config = parse_config(LEAST)
    with pytest.raises(ValidationError, match="frozen"):
        config.canaries.controls = 3  # type: ignore[misc]
    assert CanarySettings(formats=config.canaries.formats) == config.canaries
