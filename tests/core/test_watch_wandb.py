"""Audits that a watcher logs to the training's own W&B run: never beside a writer at work, each once, read back offline."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import OfflineRun
from test_reporting_samples import make_report

from memguard.audit.completeness import step_metric_of
from memguard.audit.report import AuditReport, Subject
from memguard.errors import InputError, MissingExtraError, RegistryError
from memguard.reporting.trackers import flatten_metrics
from memguard.reporting.wandb_run import WandbRunLog


def at_step(step: int | None, digest: str = "aa") -> AuditReport:
    return make_report(subject=Subject(kind="checkpoint", digest=digest * 32, global_step=step, epoch=None))


class FakeWandb(types.ModuleType):
    """W&B with one run on its server; keeps how runs were opened, what was logged, and how they ended."""

    def __init__(self, state: str, mode: str = "online") -> None:
        super().__init__("wandb")
        self.state, self.mode = state, mode
        self.opened: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.ended: list[int] = []
        self.run: Any = None
        self.breaks_after: int | None = None
        self.ends = True

    def setup(self) -> Any:
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def Api(self) -> Any:  # noqa: N802  # W&B's name
        def run(path: str) -> Any:
            if self.state == "away":
                raise ConnectionError("no route")
            return types.SimpleNamespace(state=self.state)

        return types.SimpleNamespace(run=run)

    def Settings(self, **settings: Any) -> Any:  # noqa: N802
        return settings

    def init(self, **options: Any) -> Any:
        self.opened.append(options)

        def log(row: dict[str, Any]) -> None:
            if self.state == "breaks" or len(self.rows) == self.breaks_after:
                raise OSError("the pipe is closed")
            self.rows.append(row)

        def finish(exit_code: int) -> None:
            if not self.ends:
                raise TimeoutError("it does not end")
            self.ended.append(exit_code)

        self.run = types.SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=finish)
        return self.run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeWandb]:
    def start(state: str, mode: str = "online") -> FakeWandb:
        fake = FakeWandb(state, mode)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return start


def test_audits_wait_while_the_training_run_goes_on_and_are_logged_once_when_it_has_ended(
    server: Callable[..., FakeWandb], tmp_path: Path
) -> None:
    fake = server("running")
    log = WandbRunLog("team/llm/a1b2", tmp_path / "wandb.json")
    audits = [at_step(20), at_step(10)]
    waiting = log.log(audits, step_metric="train/global_step")
    assert waiting is not None
    assert waiting.startswith("2 audits wait for the W&B run to end")
    assert fake.opened == []

    fake.state = "finished"
    assert log.log(audits, step_metric="train/global_step") is None
    (opened,) = fake.opened
    assert (opened["entity"], opened["project"], opened["id"], opened["resume"]) == ("team", "llm", "a1b2", "must")
    assert [row["train/global_step"] for row in fake.rows] == [10, 20]
    assert flatten_metrics(at_step(10)).items() <= fake.rows[0].items()

    another = WandbRunLog("team/llm/a1b2", tmp_path / "wandb.json")  # another watcher, or this one after a restart
    assert another.log(audits, step_metric="train/global_step") is None
    assert another.log([*audits, at_step(30, "bb")], step_metric="train/global_step") is None
    assert [row["train/global_step"] for row in fake.rows] == [10, 20, 30]


@pytest.mark.parametrize(("state", "exit_code"), [("finished", 0), ("crashed", 1), ("failed", 1), ("killed", 1)])
def test_a_run_keeps_the_state_that_it_ended_with(
    server: Callable[..., FakeWandb], tmp_path: Path, state: str, exit_code: int
) -> None:
    fake = server(state)
    WandbRunLog("llm/a1b2", tmp_path / "wandb.json").log([at_step(1)], step_metric="train/global_step")
    assert fake.ended == [exit_code]
    assert "entity" not in fake.opened[0]


@pytest.mark.parametrize("state", ["away", "breaks"])
def test_a_run_that_cannot_be_logged_to_is_an_error_and_nothing_counts_as_logged(
    server: Callable[..., FakeWandb], tmp_path: Path, state: str
) -> None:
    fake = server(state)
    log = WandbRunLog("llm/a1b2", tmp_path / "wandb.json")
    with pytest.raises(RegistryError, match=r"the W&B run 'llm/a1b2' cannot be logged to \((ConnectionError|OSError)\)"):
        log.log([at_step(1)], step_metric="train/global_step")
    assert len(fake.ended) == len(fake.opened)
    fake.state = "finished"
    assert log.log([at_step(1)], step_metric="train/global_step") is None
    assert len(fake.rows) == 1


def test_a_failure_part_way_has_no_audit_logged_twice(server: Callable[..., FakeWandb], tmp_path: Path) -> None:
    fake = server("finished")
    fake.breaks_after = 2
    audits = [at_step(1), at_step(2, "bb"), at_step(3, "cc")]
    log = WandbRunLog("llm/a1b2", tmp_path / "wandb.json")
    with pytest.raises(RegistryError, match="cannot be logged to"):
        log.log(audits, step_metric="train/global_step")
    fake.breaks_after = None
    assert log.log(audits, step_metric="train/global_step") is None
    assert [row["train/global_step"] for row in fake.rows] == [1, 2, 3]
    assert len(fake.ended) == len(fake.opened) == 2


def test_an_audit_counts_as_logged_though_its_run_does_not_end(server: Callable[..., FakeWandb], tmp_path: Path) -> None:
    fake = server("finished")
    fake.ends = False
    log = WandbRunLog("llm/a1b2", tmp_path / "wandb.json")
    with pytest.raises(RegistryError, match="cannot be logged to"):
        log.log([at_step(1)], step_metric="train/global_step")
    fake.ends = True
    assert log.log([at_step(1)], step_metric="train/global_step") is None
    assert [row["train/global_step"] for row in fake.rows] == [1]


@pytest.mark.parametrize("path", ["a1b2", "a/b/c/d", "a//b", " /b"])
def test_the_run_must_be_named_with_its_project(server: Callable[..., FakeWandb], tmp_path: Path, path: str) -> None:
    server("finished")
    with pytest.raises(InputError, match=r"must be ENTITY/PROJECT/ID or PROJECT/ID, got another form"):
        WandbRunLog(path, tmp_path / "wandb.json")


def test_a_run_to_log_to_needs_wandb_and_wandb_switched_on(
    server: Callable[..., FakeWandb], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server("finished", mode="disabled")
    with pytest.raises(InputError, match=r"W&B must not be switched off"):
        WandbRunLog("llm/a1b2", tmp_path / "wandb.json")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"logging to W&B needs the extra 'wandb'"):
        WandbRunLog("llm/a1b2", tmp_path / "wandb.json")


def test_the_axis_is_that_of_the_trainer_which_made_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "config.json").write_text("{}", encoding="utf-8")
    assert step_metric_of(tmp_path) == "trainer/global_step"
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert step_metric_of(tmp_path) == "train/global_step"


def test_a_real_offline_run_holds_the_audits_under_the_trainings_id_with_their_step_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for step in (5, 9):
        at_step(step).save(tmp_path / f"{step}.json")
    code = (
        "import sys; from memguard.audit.report import load_report; from memguard.reporting.wandb_run import WandbRunLog\n"
        "log = WandbRunLog('team/llm/a1b2', __import__('pathlib').Path('wandb.json'))\n"
        "for _ in range(2): assert log.log([load_report(p) for p in sys.argv[1:]], step_metric='train/global_step') is None"
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    done = subprocess.run([sys.executable, "-c", code, "9.json", "5.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    written = OfflineRun(tmp_path)
    assert written.folder.name.endswith("-a1b2")
    audits = [row for row in written.history if "memguard/exposure_max" in row]
    assert [row["train/global_step"] for row in audits] == [5, 9]
    assert flatten_metrics(at_step(5)).items() <= audits[0].items()
    assert written.metrics["memguard/exposure_max"]["step"] == "train/global_step"
