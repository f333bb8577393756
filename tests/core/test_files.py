"""Small files are read strictly, written whole, and refused in one sentence."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard import files
from memguard.errors import InputError
from memguard.files import read_json, read_text, read_yaml, write_text_atomic


def yaml_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "memguard.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path, what="config")


def json_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    return read_json(path, what="plan")


# -- YAML


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "On", "OFF", "y", "n", "True", "FALSE"])
def test_words_that_older_yaml_reads_as_booleans_stay_words(tmp_path: Path, word: str) -> None:
    assert yaml_of(tmp_path, f"{word}: {word}") == {word: word}


def test_true_and_false_are_booleans_and_other_plain_values_keep_their_types(tmp_path: Path) -> None:
    text = "a: true\nb: false\nc: 3\nd: 0.5\ne:\nf: [1, x]\ng: {1: 16, 4: 8}\nh: '1'\ni: 2024-01-02\nj: tale\nk: false start"
    assert yaml_of(tmp_path, text) == {
        "a": True,
        "b": False,
        "c": 3,
        "d": 0.5,
        "e": None,
        "f": [1, "x"],
        "g": {1: 16, 4: 8},
        "h": "1",
        "i": "2024-01-02",
        "j": "tale",
        "k": "false start",
    }


def test_a_date_that_does_not_exist_is_text_and_no_error(tmp_path: Path) -> None:
    assert yaml_of(tmp_path, "a: 2024-13-45") == {"a": "2024-13-45"}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "a\n", "[1]\n"])
def test_a_yaml_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="must hold keys and values"):
        yaml_of(tmp_path, text)


def test_numbers_in_short_scientific_form_are_numbers(tmp_path: Path) -> None:
    assert yaml_of(tmp_path, "a: 1e-4\nb: 1.5E3\nc: -2.e+1\nd: 1e\n") == {"a": 1e-4, "b": 1500.0, "c": -20.0, "d": "1e"}


def test_a_settings_file_larger_than_64_kib_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 64 KiB"):
        yaml_of(tmp_path, "# " + "x" * 70_000)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    assert yaml_of(tmp_path, "\ufeffa: 1\r\nb: 2\r\n") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "anchors and aliases are not accepted"),
        ("a: &x [*x]", "anchors and aliases are not accepted"),
        ("a: !!python/object/apply:os.getcwd []", "tags are not accepted"),
        ("a: !<tag:yaml.org,2002:python/name:os.system> ''", "tags are not accepted"),
        ("a: !!set {x}", "tags are not accepted"),
        ("a: !!binary aGk=", "tags are not accepted"),
        ("a: !!map [1, 2]", "tags are not accepted"),
        ("a: !!int x", "tags are not accepted"),
        ("a: !!bool x", "tags are not accepted"),
        ("a: !!timestamp x", "tags are not accepted"),
        ("a: !mine {x: 1}", "tags are not accepted"),
        ("!!str a: 1", "tags are not accepted"),
        ("a: 1\nb: 2\na: 3", "is given twice"),
        ("a: {b: 1, b: 1}", "is given twice"),
        ("'a': 1\na: 2", "is given twice"),
        ("a: {8: 1, 0x8: 2}", "line 1: a key is given twice"),
        ("true: 1", "a key must be plain text"),
        ("a: &x 1", "line 1: anchors and aliases are not accepted"),
        ("? [a, b]\n: 1", "a key must be plain text"),
        ("? {a: 1}\n: 1", "a key must be plain text"),
        ("~: 1", "a key must be plain text"),
        ("<<: {a: 1}\nb: 2", "a key must be plain text"),
        ("a: [1", "line 1: expected ',' or ']'"),
        ("a: 1\n\tb: 2", "line 2: found character"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: 1\n---\na: 2", "line 2: but found another document"),
        ("a: \x07", "is not plain YAML"),
        ("a: " + "9" * 5000, "is not plain YAML"),
        ("a: 0x_", "is not plain YAML"),
        ("[" * 20_000, "is not plain YAML"),
        ("a: " + "{a: " * 5000, "is not plain YAML"),
        ("- " * 5000 + "x", "is not plain YAML"),
    ],
)
def test_yaml_that_a_settings_file_has_no_use_for_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        yaml_of(tmp_path, text)
    assert "config 'memguard.yaml'" in str(caught.value)


@given(st.text(st.sampled_from("a:1-[]{}&*!|>'\"%@#?,~. \n<=0x\t"), max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused_as_an_input_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(InputError):
        assert isinstance(read_yaml(path, what="config"), dict)


# -- JSON


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        "[1e999]",
        "[-1e999]",
        '{"a": 1, "a": 1}',
        '[{"b": {"a": 1, "a": 2}}]',
        "",
        "{",
        "[1,]",
        "{'a': 1}",
        "\ufeff{}",
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=range(15),
)
def test_json_that_is_not_strict_is_refused_without_echoing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        json_of(tmp_path, text)
    assert str(caught.value) == "plan 'plan.json' is not valid JSON."


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
NESTED = st.lists(PLAIN, max_size=4) | st.dictionaries(st.text(), PLAIN, max_size=4)


@given(PLAIN | NESTED | st.lists(NESTED, max_size=4) | st.dictionaries(st.text(), NESTED, max_size=4))
@settings(max_examples=100, deadline=None)
def test_strict_json_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "round.json"
    write_text_atomic(path, json.dumps(value))
    assert read_json(path, what="plan") == value


def test_floats_at_the_ends_of_their_range_are_read(tmp_path: Path) -> None:
    assert json_of(tmp_path, "[1.7976931348623157e308, 5e-324, 1e-999, -0.0]") == [1.7976931348623157e308, 5e-324, 0.0, 0.0]
    assert math.isfinite(json_of(tmp_path, "1e308"))


# -- reading text


def test_a_missing_file_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan '.*/nowhere/plan.json' does not exist\.$"):
        read_text(tmp_path / "nowhere" / "plan.json", what="plan")


def test_a_folder_cannot_be_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_text(tmp_path, what="plan")


def test_a_path_through_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be read: Not a directory"):
        read_text(tmp_path / "file" / "plan.json", what="plan")


def test_bytes_that_are_no_text_are_refused_without_showing_them(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"secret": "hunter2\xff"}')
    with pytest.raises(InputError, match="is not UTF-8 text") as caught:
        read_text(tmp_path / "plan.json", what="plan")
    assert "hunter2" not in repr(caught.value)


def test_a_file_beyond_the_size_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("x" * 11)
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(InputError, match=r"plan 'plan\.json' is larger than 0 MiB"):
        read_text(tmp_path / "plan.json", what="plan")
    monkeypatch.setattr(files, "MAX_BYTES", 11)
    assert read_text(tmp_path / "plan.json", what="plan") == "x" * 11


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no file here tells a size of nothing and holds a text")
def test_a_file_that_holds_more_than_its_size_says_is_not_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(InputError, match="plan 'version' is larger than 0 MiB"):
        read_text(Path("/proc/version"), what="plan")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match=f"plan '{path.name}' must be a regular file"):
            read_text(path, what="plan")


# -- writing


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_or_a_link_to_one_is_never_replaced_by_a_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with pytest.raises(InputError, match=f"{name}' cannot be written: it is a pipe or a device, and no file"):
        write_text_atomic(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_folders_are_made_and_nothing_else_is_left_beside_the_file(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a" / "b" / "c.txt", "één 🙂\n")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "één 🙂\n".encode()
    assert [entry.name for entry in (tmp_path / "a" / "b").iterdir()] == ["c.txt"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_gets_the_mode_it_is_written_with_whatever_stood_there(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "c.txt"
    path.write_text("old")
    path.chmod(0o666)
    write_text_atomic(path, "new", mode=mode)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "new"


@pytest.mark.parametrize("where", ["replace", "fsync", "chmod"])
def test_a_crash_while_writing_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "c.txt"
    path.write_text("old")

    def crash(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, where, crash)
    with pytest.raises(OSError, match="disk full"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.txt"]


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        write_text_atomic(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.txt"]
