"""Every mistake a user can make in policy.yaml is one or two plain sentences, and exit code 2."""

from __future__ import annotations

import datetime
import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from memguard.errors import InputError
from memguard.gates import Policy, load_policy
from memguard.gates.policy import BUILT_IN
from memguard.gates.policy_schema import policy_schema

BASE = "version: 1\nrules:\n  - {name: a, field: extraction.count, max: 0}\n"
WAIVER = "waivers: [{rule: a, owner: jane, reason: beta, expires: %s}]\n"


@pytest.fixture
def load(tmp_path):
    def write_and_load(text: str) -> Policy:
        (tmp_path / "policy.yaml").write_text(text, encoding="utf-8")
        return load_policy(tmp_path / "policy.yaml")

    return write_and_load


def test_the_default_policy_is_the_documented_one():
    policy = load_policy("default")
    assert (policy.alpha, policy.judged_tiers.max_repetitions, policy.comparable, policy.strict) == (0.01, 4, "plan", False)
    assert policy.evidence.model_dump() == {
        "controls_null_test": True,
        "positive_control": "any",
        "ledger_exact": True,
        "min_canaries": 40,
        "fresh_secrets": True,
        "start_audit": "if_measured",
        "max_age_days": None,
    }
    assert [rule.name for rule in policy.rules] == [
        "no secret can be extracted",
        "no canary over the limit",
        "canaries as a family",
        "no single canary stands out",
        "not worse than the last release",
    ]
    assert [rule.severity for rule in policy.rules] == ["block"] * 5
    assert len(policy.block_tests) == 3
    assert policy.block_tests[2].tolerance == 0.5


def test_the_strict_policy_differs_in_strictness_and_evidence_alone():
    default, strict = load_policy("default").model_dump(), load_policy("strict").model_dump()
    assert (default.pop("strict"), strict.pop("strict")) == (False, True)
    asked = {"positive_control": "in_training", "start_audit": "required", "max_age_days": 30}
    assert {key: strict["evidence"].pop(key) for key in asked} == asked
    assert [default["evidence"].pop(key) for key in asked] == ["any", "if_measured", None]
    assert strict == default


def test_a_copy_of_the_default_file_is_the_default_policy(load):
    from memguard.gates import policy as module

    text = (Path(module.__file__).parent / "policies" / "default.yaml").read_text(encoding="utf-8")
    assert load(text) == load_policy("default")
    assert load(text).digest == load_policy(Path("default")).digest


def test_the_digest_follows_the_values_and_not_the_layout(load):
    block = "rules:\n- max: 0.0\n  field: extraction.count\n  name: a\nalpha: 1e-2\nversion: 1\n"
    assert load(block).digest == load(BASE).digest
    assert load(BASE + "alpha: 0.02\n").digest != load(BASE).digest


def test_a_policy_is_frozen(load):
    with pytest.raises(ValidationError, match="frozen"):
        load(BASE).alpha = 0.1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (BASE + "alfa: 0.1\n", r"key 'alfa' is unknown \(did you mean 'alpha'\?\)"),
        (BASE + "zzzz: 1\n", r"key 'zzzz' is unknown \(known keys are version, alpha"),
        (BASE + "evidence: {leger_exact: true}\n", r"evidence: the key 'leger_exact' is unknown \(did you mean 'ledger_exact'"),
        (BASE + "judged_tiers: {max_repetition: 4}\n", r"judged_tiers: the key 'max_repetition' .*'max_repetitions'"),
        (BASE + "  - {name: b, field: extraction.count, max: 0, severty: warn}\n", r"rule 2: the key 'severty' .*'severity'"),
        (BASE + "waivers: [{rul: a}]\n", r"waiver 1: the key 'rul' is unknown \(did you mean 'rule'"),
        (
            BASE + "waivers: [{rule: a, owner: o, reason: r, expires: 2026-01-01, canary: x, tier: 4}]\n",
            "waiver 1: a waiver covers a 'canary' or a 'tier', not both",
        ),
        (
            BASE
            + "  - {name: b, test: exposure.max}\nwaivers: [{rule: b, owner: o, reason: r, expires: 2026-01-01, tier: 4}]\n",
            "a waiver of the rule 'b' covers the whole rule: only a limit on canaries can be waived in part",
        ),
        (BASE + "comparable: both\n", "comparable: must be 'plan' or 'design'"),
        (BASE + "evidence: {positive_control: yes}\n", "positive_control: must be 'any', 'probe', 'in_training' or 'none'"),
        (BASE + "evidence: {min_canaries: 0}\n", "min_canaries: must be greater than or equal to 1"),
        (BASE + "evidence: {min_canaries: 4.5}\n", "min_canaries: must be a valid integer"),
        (BASE + "evidence: {ledger_exact: 'no'}\n", "ledger_exact: must be a valid boolean"),
        (BASE + "alpha: 0\n", "alpha: must be greater than or equal to"),
        (BASE + "alpha: 0.2\n", "alpha: must be less than or equal to 0.1"),
        (BASE + "alpha: .nan\n", "alpha: must be less"),
        (BASE + "alpha: true\n", "alpha: must be a valid number"),
        (BASE + "alpha: '0.01'\n", "alpha: must be a valid number"),
        (BASE + "judged_tiers: {max_repetitions: 0}\n", "max_repetitions: must be greater than or equal to 1"),
        (BASE + "strict: 1\n", "strict: must be a valid boolean"),
        (
            BASE + "  - {name: b, test: exposure.pooled, min: 0.05}\n",
            "rule 2: 'min' is not accepted on a test: significance lives",
        ),
        (
            BASE + "  - {name: b, test: exposure.pooled, max: 0.05}\n",
            "rule 2: 'max' is not accepted on a test: significance lives",
        ),
        (
            BASE + "  - {name: b, field: extraction.count, max: 0, min: 1}\n",
            "rule 2: 'min' is not accepted: a limit is a 'max'",
        ),
        (
            BASE + "  - {name: b, test: exposure.poold}\n",
            "must be 'exposure.pooled', 'exposure.max', 'exposure.against_baseline', 'exposure.improves",
        ),
        (BASE + "  - {name: b, test: exposure.improves_on_baseline}\n", "exposure.improves_on_baseline needs 'bits'"),
        (BASE + "  - {name: b, test: exposure.max, bits: 1}\n", "no other test takes it"),
        (BASE + "  - {name: b, test: exposure.improves_on_baseline, bits: 0}\n", "bits: must be greater than 0"),
        (BASE + "  - {name: b, test: exposure.max, select: {}}\n", "select: must name formats, tiers or canaries"),
        (BASE + "  - {name: b, test: exposure.max, select: {tiers: []}}\n", "tiers: must have at least 1 item"),
        (BASE + "  - {name: b, test: exposure.max, select: {tiers: [0]}}\n", "must be greater than or equal to 1"),
        (BASE + "  - {name: b, test: exposure.max, select: {tier: [1]}}\n", r"key 'tier' is unknown \(did you mean 'tiers'"),
        (BASE + "  - {name: b, test: privacy.stated_epsilon, select: {tiers: [1]}}\n", "takes no 'select'"),
        (BASE + "  - {name: b, field: ledger.token_share, max: 0.1, select: {tiers: [1]}}\n", "takes no 'select'"),
        (
            BASE + "  - {name: b, field: exposure.mean_bits, max: 3, each: tier, select: {canaries: [x]}}\n",
            "exposure.mean_bits is of whole tiers; select formats or tiers",
        ),
        (BASE + "evidence: {start_audit: yes}\n", "start_audit: must be 'if_measured' or 'required'"),
        (BASE + "evidence: {max_age_days: 0}\n", "max_age_days: must be greater than or equal to 1"),
        (
            BASE + "  - {name: b, field: exposure.bit, max: 1}\n",
            "'extraction.count', 'exposure.bits', 'exposure.mean_bits', 'ledger",
        ),
        (
            BASE + "  - {name: b, field: exposure.bits, test: exposure.max}\n",
            "rule 2: a rule has a 'field' or a 'test', not both",
        ),
        (BASE + "  - {name: b}\n", "rule 2: a rule needs a 'field' or a 'test'"),
        (BASE + "  - {field: extraction.count, max: 0}\n", "rule 2: the key 'name' is missing"),
        (BASE + "  - {name: b, field: extraction.count}\n", "rule 2: the key 'max' is missing"),
        (BASE + "  - {name: b, field: extraction.count, max: -1}\n", "rule 2: max: must be greater than or equal to 0"),
        (BASE + "  - {name: b, field: extraction.count, max: .nan}\n", "rule 2: max: must be a finite number"),
        (BASE + "  - {name: b, field: extraction.count, max: .inf}\n", "rule 2: max: must be a finite number"),
        (BASE + "  - {name: b, field: exposure.bits, max: 3}\n", "rule 2: the field exposure.bits needs 'each: canary'"),
        (BASE + "  - {name: b, field: exposure.mean_bits, max: 3, each: canary}\n", "exposure.mean_bits needs 'each: tier'"),
        (BASE + "  - {name: b, field: extraction.count, max: 3, each: tier}\n", "extraction.count takes no 'each'"),
        (
            BASE + "  - {name: b, test: exposure.max, tolerance_bits: 1}\n",
            "tolerance_bits belongs to the test exposure.against_baseline",
        ),
        (
            BASE + "  - {name: b, field: extraction.count, max: 0, tolerance_bits: 1}\n",
            "belongs to the test exposure.against_baseline",
        ),
        (BASE + "  - {name: b, test: exposure.max, severity: stop}\n", "severity: must be 'block' or 'warn'"),
        (BASE + "  - text\n", "rule 2: must be keys and values"),
        (BASE + "  - {name: a, test: exposure.max}\n", "the rule name 'a' is used twice"),
        (BASE + "  - {name: '', test: exposure.max}\n", "rule 2: name: string should have at least 1 character"),
        (BASE + '  - {name: "b\\nc", test: exposure.max}\n', "rule 2: name: must be one plain line"),
        ("version: 1\nrules: []\n", "rules: must have at least 1 item"),
        ("version: 1\n", "the key 'rules' is missing"),
        ("rules:\n  - {name: a, field: extraction.count, max: 0}\n", "the key 'version' is missing"),
        (BASE.replace("1", "2", 1), "has version 2; this memguard reads up to 1. Upgrade memguard to read it"),
        (BASE.replace("1", "true", 1), "version: must be 1"),
        (
            BASE + WAIVER.replace("rule: a", "rule: zz") % "2026-01-01",
            "a waiver names the rule 'zz', which the policy does not have",
        ),
        (BASE + WAIVER.replace("jane", "''") % "2026-01-01", "waiver 1: owner: string should have at least 1 character"),
        (BASE + WAIVER % "soon", "waiver 1: expires: must be a date such as 2026-12-31"),
        (BASE + WAIVER % "2026-13-01", "waiver 1: expires: must be a date such as 2026-12-31"),
        (BASE + WAIVER % "2026-10-01 12:00:00", "waiver 1: expires: must be a date such as 2026-12-31"),
        (BASE + WAIVER % "20261001", "waiver 1: expires: must be a valid date"),
    ],
)
def test_a_mistake_in_a_policy_is_named(load, text, match):
    with pytest.raises(InputError, match=match):
        load(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "must hold keys and values, got NoneType"),
        ("- 1\n", "must hold keys and values, got list"),
        (BASE + "version: 1\n", "line 4: the key 'version' is given twice"),
        (BASE + "alpha: &x 0.01\n", "line 4: anchors and aliases are not accepted"),
        (BASE + "alpha: *x\n", "line 4: anchors and aliases are not accepted"),
        (BASE + "alpha: !!float 0.01\n", "line 4: tags are not accepted"),
        (BASE + "alpha: !!python/object/apply:os.system [id]\n", "line 4: tags are not accepted"),
        (BASE + "<<: {alpha: 0.1}\n", "line 4: a key must be plain text"),
        (BASE + "on: 1\n", "the key 'on' is unknown"),
        (BASE + "? [a, b]\n: 1\n", "line 4: a key must be plain text"),
        (BASE + "---\n" + BASE, "is not plain YAML"),
        ("a: b: c\n", "is not plain YAML: line 1"),
        ("[" * 20_000, "is not plain YAML"),
        ("a: \x07\n", "is not plain YAML"),
        ("x: " + "9" * 5000 + "\n", "is not plain YAML"),
        (BASE + "# " + "x" * 70_000, "at most 64 KiB"),
    ],
)
def test_what_is_not_plain_yaml_is_refused(load, text, match):
    with pytest.raises(InputError, match=match):
        load(text)


def test_a_missing_policy_is_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_policy(tmp_path / "none.yaml")


def test_all_mistakes_are_named_at_once(load):
    with pytest.raises(InputError) as caught:
        load(BASE + "  - {name: b, test: exposure.max, min: 1}\nalfa: 1\nstrict: 3\nevidence: {min_canaries: -2}\n")
    for part in ("alfa", "'min'", "strict", "min_canaries"):
        assert part in str(caught.value)


def test_many_mistakes_are_counted_and_a_long_key_is_cut(load):
    keys = "".join(f"k{i}{'x' * 500}: 1\n" for i in range(12))
    with pytest.raises(InputError, match=r"x\.\.\.' is unknown .*and 4 more") as caught:
        load(BASE + keys)
    assert len(str(caught.value)) < 2000


def test_messages_show_no_value(load):
    with pytest.raises(InputError) as caught:
        load(BASE + "alpha: 4111-1111\nstrict: hunter2\n")
    assert "4111" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_number_with_an_exponent_is_a_number_and_a_date_is_a_date(load):
    policy = load(BASE + "alpha: 1e-3\n" + WAIVER % "2026-10-01")
    assert policy.alpha == 1e-3
    assert policy.waivers[0].expires == datetime.date(2026, 10, 1)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_that_comes_with_memguard_fits_the_published_schema(name):
    file = resources.files("memguard.gates").joinpath(f"policies/{name}.yaml")
    jsonschema.validate(yaml.safe_load(file.read_text(encoding="utf-8")), _published())
    load_policy(name)


def test_the_published_schema_is_that_of_the_code():
    assert _published() == policy_schema(), "write it again: python -m memguard.gates.policy_schema"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["alfa"], 1),
        (["alpha"], 0.2),
        (["rules", 0, "max"], -1),
        (["rules", 2, "min"], 0.1),
        (["evidence", "max_age_days"], 0),
        (["comparable"], "both"),
    ],
)
def test_the_published_schema_refuses_what_the_code_refuses(path, value):
    data = load_policy("default").model_dump(mode="json", exclude_none=True)
    part = data
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, _published())


def _published():
    return json.loads(resources.files("memguard.gates").joinpath("policies/policy.schema.json").read_text(encoding="utf-8"))


def test_what_the_policies_are_for_shows_in_what_they_ask():
    finetune, private = load_policy("finetune"), load_policy("private")
    assert (finetune.comparable, finetune.evidence.start_audit) == ("design", "required")
    assert [rule.test for rule in private.block_tests] == ["privacy.stated_epsilon", "exposure.pooled", "exposure.max"]
    assert private.judged_tiers.max_repetitions == 1
