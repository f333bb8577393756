"""The file of a plan: who may read it, what its digest covers, what its errors never say, and what is refused."""

from __future__ import annotations

import copy
import json
import logging
import os
import stat
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_plan import POSIX, glued, holds_a_secret, settings

from memguard.canaries.drawing import draw_plan
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.plan import CanaryPlan, PlannedCanary, load_plan
from memguard.documents import json_digest
from memguard.errors import InputError


@pytest.fixture(scope="module")
def plan(tokenizer: Any) -> CanaryPlan:
    return draw_plan(settings(), tokenizer)


# -- the file


@POSIX
def test_a_saved_plan_is_for_its_owner_alone_whatever_the_umask(plan: CanaryPlan, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    before = os.umask(0)
    try:
        plan.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    plan.save(path, overwrite=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_plan_comes_back_as_it_was_saved(plan: CanaryPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = load_plan(path)
    assert loaded == plan
    assert loaded.digest == plan.digest


def test_a_saved_plan_is_not_overwritten_unless_told_to(tokenizer: Any, plan: CanaryPlan, tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", draw_plan(settings(seed=8), tokenizer)
    plan.save(path)
    with pytest.raises(InputError, match=r"exists already. A trained plan cannot be drawn again"):
        other.save(path)
    assert load_plan(path) == plan
    other.save(path, overwrite=True)
    assert load_plan(path) == other


def test_nothing_but_the_plan_and_its_ignore_file_is_left_in_the_folder(plan: CanaryPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "new" / "plan.json")
    assert sorted(entry.name for entry in (tmp_path / "new").iterdir()) == [".gitignore", "plan.json"]


def test_a_folder_of_the_plan_alone_is_ignored_whole(plan: CanaryPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "new" / "plan.json")
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"


def test_in_a_folder_with_other_files_only_the_plan_is_ignored(plan: CanaryPlan, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".gitignore").write_text("*.pyc\nbuild")
    plan.save(tmp_path / "plan.json")
    plan.save(tmp_path / "plan.json", overwrite=True)
    assert (tmp_path / ".gitignore").read_text() == "*.pyc\nbuild\n/plan.json\n"


def test_an_ignore_file_that_ignores_everything_is_left_alone(plan: CanaryPlan, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("")
    (tmp_path / ".gitignore").write_text("# all\n*\n")
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / ".gitignore").read_text() == "# all\n*\n"


@POSIX
def test_a_plan_that_others_can_read_is_loaded_with_a_warning(
    plan: CanaryPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    with caplog.at_level(logging.WARNING):
        load_plan(path)
        assert caplog.messages == []
        path.chmod(0o640)
        load_plan(path)
    assert "can be read by other users" in caplog.text
    assert not holds_a_secret(caplog.text, plan)


# -- the digest


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `document` with one value replaced; `...` removes it."""
    other = copy.deepcopy(document)
    inner = other
    for part in path[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return other


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def test_the_digest_changes_with_every_single_value(plan: CanaryPlan) -> None:
    document = plan.model_dump(mode="json")
    digests, tried = {plan.digest}, 1
    for path in leaves(document):
        value = at(document, path)
        other = value + 1 if type(value) is int else not value if type(value) is bool else f"{value}x"
        try:
            digest = CanaryPlan.model_validate(changed(document, path, other)).digest
        except ValidationError:
            continue
        digests.add(digest)
        tried += 1
    assert len(digests) == tried > 80


def test_the_digest_covers_the_nonce_so_that_a_guessed_plan_cannot_be_checked_by_it(plan: CanaryPlan) -> None:
    assert plan.model_copy(update={"nonce": "0" * 64}).digest != plan.digest
    assert len(plan.digest) == 64


# -- secrets stay inside


def test_no_representation_of_a_plan_holds_a_secret_or_the_nonce(plan: CanaryPlan) -> None:
    for text in (repr(plan), str(plan), f"{plan}", repr(plan.canaries), repr(plan.formats), repr(plan.canaries[0])):
        assert not holds_a_secret(text, plan)
        assert plan.nonce not in text
    assert plan.canaries[0].id in repr(plan.canaries[0])


def test_a_broken_canary_does_not_show_its_secret() -> None:
    with pytest.raises(ValidationError) as caught:
        PlannedCanary(id="a", format="pin", role="canary", tier=-1, secret="hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        PlannedCanary.model_validate({"id": "a", "format": "pin", "role": "canary", "tier": 1, "secret": ["hunter2"]})
    assert "hunter2" not in str(caught.value)


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    path.chmod(0o600)
    return path


def refusal(path: Path) -> str:
    """Everything a user could be shown about a plan that cannot be read."""
    with pytest.raises(InputError) as caught:
        load_plan(path)
    return "".join(traceback.format_exception(caught.value)) + repr(caught.value)


def test_no_broken_field_makes_a_message_tell_a_secret(plan: CanaryPlan, tmp_path: Path) -> None:
    document = plan.model_dump(mode="json")
    paths = [path for path in leaves(document) if path[0] != "canaries" or path[1] < 3]
    secret = plan.canaries[0].secret
    for path in paths:
        for value in ([secret], {secret: secret}, {"x": [secret]}):
            assert not holds_a_secret(refusal(write(tmp_path / "plan.json", changed(document, path, value))), plan)


def test_no_cut_or_spoiled_file_makes_a_message_tell_a_secret(plan: CanaryPlan, tmp_path: Path) -> None:
    text = plan.model_dump_json(indent=1)
    for end in range(1, len(text) - 2, 97):
        assert not holds_a_secret(refusal(write(tmp_path / "plan.json", text[:end])), plan)
        assert not holds_a_secret(refusal(write(tmp_path / "plan.json", text[:end] + "\x00" + text[end:])), plan)


def test_a_secret_that_stands_as_a_key_is_not_told_either(plan: CanaryPlan, tmp_path: Path) -> None:
    document = plan.model_dump(mode="json")
    document["canaries"][0][plan.canaries[0].secret] = 1
    message = refusal(write(tmp_path / "plan.json", document))
    assert not holds_a_secret(message, plan)
    assert "canaries.0" in message


# -- what cannot be read


def test_a_missing_field_is_named(plan: CanaryPlan, tmp_path: Path) -> None:
    document = plan.model_dump(mode="json")
    path = write(tmp_path / "plan.json", changed(document, ("canaries", 1, "secret"), ...))
    with pytest.raises(InputError, match=r"plan 'plan.json' is not readable: canaries.1.secret: Field required"):
        load_plan(path)


@pytest.mark.parametrize("version", [2, 99, 2.0, 1.5, "2", 10**400])
def test_a_plan_of_a_newer_memguard_is_refused_by_its_version(plan: CanaryPlan, tmp_path: Path, version: Any) -> None:
    path = write(tmp_path / "plan.json", plan.model_dump(mode="json") | {"schema_version": version})
    with pytest.raises(InputError, match=r"has schema version .* this memguard reads up to 1. Upgrade memguard"):
        load_plan(path)


def test_a_newer_version_is_named_before_its_unknown_fields(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has schema version 2"):
        load_plan(write(tmp_path / "plan.json", {"schema_version": 2, "shards": []}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "memguard audit report"}, "is a memguard audit report, not a memguard canary plan"),
        ({"kind": "another"}, "kind: Input should be 'memguard canary plan'"),
        ({"colour": "red"}, "a key that is not known"),
        ({"inclusion": "dice"}, "inclusion: Input should be 'planned' or 'coin'"),
        ({"placement_seed": 0.5}, "placement_seed: Input should be a valid integer"),
    ],
)
def test_a_foreign_or_changed_plan_is_refused(plan: CanaryPlan, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_plan(write(tmp_path / "plan.json", plan.model_dump(mode="json") | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("doubled canary", "must have distinct names and ids"),
        ("doubled format", "must have distinct names and ids"),
        ("lost format", "every canary must be of a format of the plan, got another for canary '"),
    ],
)
def test_a_plan_whose_parts_do_not_fit_together_is_refused(plan: CanaryPlan, tmp_path: Path, change: str, message: str) -> None:
    document = plan.model_dump(mode="json")
    if change == "doubled canary":
        document["canaries"].append(document["canaries"][0])
    elif change == "doubled format":
        document["formats"].append(document["formats"][0])
    else:
        document["formats"].pop(0)
    assert not holds_a_secret(refusal(write(tmp_path / "plan.json", document)), plan)
    with pytest.raises(InputError, match=message):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object, got list"),
        ('"plan"', "must be a JSON object, got str"),
        ("null", "must be a JSON object, got NoneType"),
        ('{"nonce": NaN}', "is not valid JSON"),
        ('{"nonce": "a", "nonce": "b"}', "is not valid JSON"),
        ('{"nonce": "\\ud800"}', "is not readable"),
        ('{"formats": ' + "[" * 900 + "]" * 900 + "}", "is not readable"),
        ("{}", "is not readable"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_plan(write(tmp_path / "plan.json", text))


def test_a_plan_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan '.*nowhere.json' does not exist"):
        load_plan(tmp_path / "nowhere.json")


def test_a_plan_for_another_tokenizer_is_refused(plan: CanaryPlan, tokenizer: Any) -> None:
    plan.check_tokenizer(tokenizer_digest(tokenizer))
    with pytest.raises(InputError, match=r"made for another tokenizer.*Draw a new plan"):
        plan.check_tokenizer(tokenizer_digest(glued()))


def test_a_plan_cannot_be_changed_in_place(plan: CanaryPlan) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        plan.nonce = "0"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        plan.canaries[0].secret = "0"  # type: ignore[misc]


def test_a_plan_without_a_probe_keeps_the_digest_it_had_before_plans_could_have_one(plan: CanaryPlan) -> None:
    before = json_digest({key: value for key, value in plan.model_dump(mode="json").items() if key != "probe"})
    assert (plan.probe, plan.digest) == (False, before)
    assert plan.model_copy(update={"probe": True}).digest != before
