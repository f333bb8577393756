"""What a command answers when nobody listens, when it is cancelled, and when it is given what is no file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from test_promotion_command import Place
from typer.testing import CliRunner

from memguard import cli
from memguard.errors import InputError


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def unheard(place: Place, *arguments: str, errors: int = subprocess.PIPE, **environment: str) -> int:
    """The exit code of a command whose reader went away before it wrote; `errors=subprocess.STDOUT`: that of stderr as well."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "memguard", *arguments]
    told = {**os.environ, "GITHUB_ACTIONS": "", **environment}
    done = subprocess.run(command, cwd=place.folder, stdout=writer, stderr=errors, text=True, env=told)
    os.close(writer)
    assert "Traceback" not in (done.stderr or "")
    assert "Exception ignored" not in (done.stderr or "")
    return done.returncode


OPTIONS = ("--policy", "default", "--baseline", "baseline.json")
TINY = ("promote", "directory", "models", "tiny", "--version", "v1", "--alias", "champion")


def test_a_pass_that_nobody_reads_is_not_called_a_failed_rule(place) -> None:
    report = place.add(1)
    assert unheard(place, "gate", report, *OPTIONS) == 4
    decided = (place.folder / report).with_name("decision.json").read_text(encoding="utf-8")
    assert '"outcome": "pass"' in decided


def test_a_promotion_that_nobody_reads_says_what_became_of_the_alias(place) -> None:
    assert unheard(place, *TINY, "--report", place.add(1), *OPTIONS) == 0
    assert place.alias == "v1"


def test_what_nobody_reads_on_both_streams_is_no_failed_rule_either(place) -> None:
    report = place.add(1)
    assert unheard(place, "gate", report, *OPTIONS, "--json", errors=subprocess.STDOUT) == 4
    assert unheard(place, "gate", "missing.json", *OPTIONS, errors=subprocess.STDOUT) == 2
    assert unheard(place, *TINY, "--report", report, *OPTIONS, "--json", errors=subprocess.STDOUT) == 0
    assert place.alias == "v1"


def test_an_encoding_that_goes_past_the_text_layer_makes_no_difference(place) -> None:
    assert unheard(place, "gate", place.add(1), *OPTIONS, "--json", PYTHONIOENCODING="ascii") == 4


def test_streams_that_were_closed_before_are_no_fault_of_the_model(place) -> None:
    report = place.add(1)
    for arguments in (["gate", report, *OPTIONS], [*TINY, "--report", report, *OPTIONS]):
        command = shlex.join([sys.executable, "-m", "memguard", *arguments])
        assert subprocess.run(["sh", "-c", f"exec {command} >&- 2>&-"], cwd=place.folder).returncode == 0
    assert place.alias == "v1"


def test_what_cannot_be_printed_of_a_move_does_not_deny_it(place, monkeypatch) -> None:
    def fail(*_: object) -> str:
        raise UnicodeEncodeError("ascii", "\u00e9", 0, 1, "no such letter")

    report = place.add(1)
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr("memguard.cli_promote._sentence", fail)
    done = CliRunner().invoke(cli.app, [*TINY, "--report", report, *OPTIONS])
    assert (done.exit_code, place.alias) == (0, "v1")


@pytest.mark.parametrize("name", ["x" * 300, "pipe", "/dev/zero"])
def test_what_is_no_file_is_exit_2_at_once(place, name) -> None:
    if name == "pipe":
        os.mkfifo(place.folder / name)
    command = [sys.executable, "-m", "memguard", "gate", name, "--policy", "default"]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


def test_a_pipe_is_no_file_to_sign(place) -> None:
    pytest.importorskip("cryptography")
    from memguard.gates.signing import new_key, sign_file

    new_key(place.folder / "key.pem")
    os.mkfifo(place.folder / "pipe")
    for name in ("pipe", "/dev/zero"):
        with pytest.raises(InputError, match="must be a regular file"):
            sign_file(place.folder / name, place.folder / "key.pem")


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_key_needs_a_file_to_lie_in(place, name) -> None:
    pytest.importorskip("cryptography")
    command = [sys.executable, "-m", "memguard", "keys", "new", name]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the private key must be a file" in " ".join(done.stderr.split())


SLOW_MOVE = """
import sys, time
from memguard.gates.registries.directory_registry import DirectoryRegistry
move = DirectoryRegistry.move_alias
first = []
def slow(self, to):
    move(self, to)
    if not first:
        first.append(to)
        print("moved", file=sys.stderr, flush=True)
        time.sleep(60)
DirectoryRegistry.move_alias = slow
from memguard.cli import main
main()
"""


def test_a_job_that_is_cancelled_in_the_middle_puts_the_alias_back(place) -> None:
    place.promote(1, place.add(1))
    script = place.folder / "slow.py"
    script.write_text(SLOW_MOVE, encoding="utf-8")
    where = ["promote", "directory", "models", "tiny", "--version", "v2", "--alias", "champion", "--report", place.add(2)]
    command = [sys.executable, str(script), *where, "--policy", "default", "--baseline", "baseline.json"]
    running = subprocess.Popen(command, cwd=place.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    assert any("moved" in line for line in iter(running.stderr.readline, ""))
    running.terminate()
    running.communicate()
    assert running.returncode == 130
    assert place.alias == "v1"
    assert [entry.action for entry in place.logged()][-1] == "rolled back"
