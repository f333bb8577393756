"""`memguard promote directory` through the real executable: outputs, signatures, eight at once, and kill -9 in the middle."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_reports import build_report

from memguard import cli_promote
from memguard.audit.digest import checkpoint_digest
from memguard.gates.promotion_log import LOCK_SECONDS, open_log


class Place:
    """A directory registry of versions v1 to v8, a passing report of each, and a baseline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        build_report(2).save(folder / "baseline.json")

    def add(self, number: int, **memorised: Any) -> str:
        """A version with its report; the report's path."""
        version = self.folder / "models" / "tiny" / "versions" / f"v{number}"
        version.mkdir(parents=True)
        (version / "config.json").write_text("{}")
        (version / "model.safetensors").write_bytes(bytes([number]))
        report = build_report(number + 2, **memorised)
        subject = report.subject.model_copy(update={"digest": checkpoint_digest(version)})
        path = self.folder / f"audit-{number}" / "report.json"
        path.parent.mkdir()
        report.model_copy(update={"subject": subject}).save(path)
        return str(path.relative_to(self.folder))

    def start(self, number: int, report: str, *more: str) -> subprocess.Popen[str]:
        where = ["directory", "models", "tiny", "--version", f"v{number}", "--alias", "champion"]
        what = ["--report", report, "--policy", "default", "--baseline", "baseline.json", *more]
        command = [sys.executable, "-m", "memguard", "promote", *where, *what]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GITHUB_ACTIONS": ""},
        )

    def promote(self, number: int, report: str, *more: str, code: int = 0) -> tuple[str, str]:
        out, err = (running := self.start(number, report, *more)).communicate()
        assert running.returncode == code, out + err
        assert "Traceback" not in err
        return out, " ".join(err.split())

    @property
    def alias(self) -> str | None:
        pointer = self.folder / "models" / "tiny" / "aliases" / "champion"
        return pointer.read_text().strip() if pointer.exists() else None

    def logged(self) -> list[Any]:
        with open_log(self.folder / "promotions.jsonl") as log:
            return log.entries


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_promotion_is_told_in_one_document_and_its_outputs_are_written(place):
    outputs = ["--junit", "j.xml", "--sarif", "s.json", "--markdown", "m.md", "--gitlab", "g.json", "--github"]
    out, err = place.promote(1, place.add(1), "--json", *outputs)
    told = json.loads(out)
    assert told.pop("decision")["outcome"] == "pass"
    assert told == {
        "action": "moved",
        "registry": "directory",
        "model": "tiny",
        "alias": "champion",
        "version": "v1",
        "previous": None,
        "attempt": 1,
    }
    assert "the registry serves what was audited" in (place.folder / "j.xml").read_text()
    assert all((place.folder / name).stat().st_size for name in ("s.json", "m.md", "g.json"))
    assert "alias 'champion' of tiny named nothing and names version v1 now (attempt 1 of this plan)" in err
    assert place.alias == "v1"
    assert json.loads((place.folder / "audit-1" / "decision.json").read_text())["exit_code"] == 0


def test_a_refusal_says_what_the_alias_still_names(place):
    place.promote(1, place.add(1))
    out, _ = place.promote(2, place.add(2, memorised={"card-1x-3": -0.1}), code=1)
    assert "refused: alias 'champion' of tiny still names version v1 (attempt 2 of this plan)" in out
    assert place.alias == "v1"


def test_an_output_that_cannot_be_written_is_a_mistake_and_moves_nothing(place):
    report = place.add(1)
    _, err = place.promote(1, report, "--junit", "baseline.json/j.xml", code=2)
    assert "'baseline.json/j.xml' cannot be written" in err
    _, err = place.promote(1, report, "--markdown", "promotions.jsonl", code=2)
    assert "'promotions.jsonl' must not be written over" in err
    assert (place.alias, place.logged()) == (None, [])


def test_what_is_asked_to_be_signed_must_be(place):
    pytest.importorskip("cryptography")
    from memguard.gates.signing import new_key, sign_file

    report = place.add(1)
    (public, _), keys = new_key(place.folder / "key.pem"), place.folder / "keys"
    keys.mkdir()
    public.rename(keys / public.name)
    _, err = place.promote(1, report, "--require-signature", "keys", code=3)
    assert "'report.json' is not signed" in err
    sign_file(place.folder / report, place.folder / "key.pem")
    _, err = place.promote(1, report, "--require-signature", "keys", code=3)
    assert "'baseline.json' is not signed" in err
    assert (place.alias, (place.folder / "promotions.jsonl").exists()) == (None, False)
    sign_file(place.folder / "baseline.json", place.folder / "key.pem")
    place.promote(1, report, "--require-signature", "keys")
    assert place.alias == "v1"


def test_the_hub_takes_a_revision_or_a_pull_request(place):
    command = [sys.executable, "-m", "memguard", "promote", "hub", "acme/tiny", "--alias", "ok", "--policy", "default"]
    for more in ([], ["--revision", "main", "--pull-request", "3"]):
        done = subprocess.run(
            [*command, "--report", place.add(len(more) + 1), *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "give either --revision REVISION or --pull-request NUMBER" in " ".join(done.stderr.split())


def test_the_command_waits_as_long_for_the_lock_as_the_function():
    assert inspect.signature(cli_promote._options).parameters["lock_seconds"].default == LOCK_SECONDS


def _run_together(running: list[subprocess.Popen[str]]) -> list[str]:
    told = [one.communicate() for one in running]
    assert [one.returncode for one in running] == [0] * len(running), told
    return [json.loads(out)["action"] for out, _ in told]


def test_eight_different_versions_at_once_move_once_each_in_the_order_of_the_log(place):
    reports = {number: place.add(number) for number in range(1, 9)}
    running = [place.start(number, report, "--json") for number, report in reports.items()]
    assert _run_together(running) == ["moved"] * 8
    entries = place.logged()
    assert [entry.action for entry in entries] == ["moving", "moved"] * 8
    moved = entries[1::2]
    assert sorted(entry.version for entry in moved) == [f"v{number}" for number in range(1, 9)]
    assert [entry.attempt for entry in moved] == list(range(1, 9))
    assert [entry.alias_before for entry in moved] == [None, *(entry.alias_after for entry in moved[:-1])]
    assert place.alias == moved[-1].version


def test_the_same_decision_eight_times_at_once_moves_once(place):
    report = place.add(1)
    actions = _run_together([place.start(1, report, "--json") for _ in range(8)])
    assert sorted(actions) == ["already promoted"] * 7 + ["moved"]
    assert [entry.action for entry in place.logged()] == ["moving", "moved"] + ["already promoted"] * 7
    assert {entry.attempt for entry in place.logged()} == {1}


KILLED = """
import os, signal, sys
from pathlib import Path
from memguard.gates.promotion import promote
from memguard.gates.registries.directory_registry import DirectoryRegistry

class Killed(DirectoryRegistry):
    def move_alias(self, to):
        super().move_alias(to)
        os.kill(os.getpid(), signal.SIGKILL)

registry, report = Killed(Path("models"), "tiny", "champion"), Path(sys.argv[1])
promote(registry, report, version="v2", policy="default", baseline=Path("baseline.json"))
"""


@pytest.fixture
def killed(place):
    """Version v1 was promoted; the promotion of v2 was killed right after it moved the alias. The report of v2."""
    place.promote(1, place.add(1))
    report = place.add(2)
    done = subprocess.run([sys.executable, "-c", KILLED, report], cwd=place.folder, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (place.alias, place.logged()[-1].action) == ("v2", "moving")
    return report


def test_a_promotion_that_was_killed_is_finished_by_the_next_one(place, killed):
    out, err = place.promote(2, killed)
    assert "was cut off while it moved the alias 'champion' of tiny from version v1 to version v2" in err
    assert "named version v1 and names version v2 now" in out
    assert [entry.action for entry in place.logged()] == ["moving", "moved", "moving", "moving", "moved"]
    assert {entry.alias_before for entry in place.logged()[2:]} == {"v1"}
    out, _ = place.promote(2, killed)
    assert "already promoted" in out


def test_another_version_after_a_kill_knows_the_version_that_was_checked_last(place, killed):
    out, _ = place.promote(3, place.add(3))
    assert "named version v1 and names version v3 now" in out
    assert (place.alias, place.logged()[-1].alias_before) == ("v3", "v1")
