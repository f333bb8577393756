"""The whole chain on a real MLflow registry, through the executable: audit, gate, alias, over several releases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_reports import build_report

from memguard.audit.digest import checkpoint_digest
from memguard.audit.report import load_report

pytestmark = [
    pytest.mark.slow,
    # MLflow 3.17 on SQLAlchemy 2.1
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]


class Registry:
    """A real registry with sqlite and file artifacts, and the reports of what was registered in it."""

    def __init__(self, folder: Path) -> None:
        import mlflow

        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client: Any = mlflow.MlflowClient(tracking_uri=self.uri)
        self.client.create_registered_model("tiny")
        self.experiment = self.client.create_experiment("e", artifact_location=(folder / "artifacts").as_uri())

    def release(self, number: int, **options: Any) -> Path:
        """Train version `number` (three small files), log it as it is, register it, and write the report of its audit."""
        checkpoint = self.folder / f"checkpoint-{number}"
        checkpoint.mkdir()
        for name, text in (("config.json", "{}"), ("model.safetensors", f"weights {number}"), ("tokenizer.json", "{}")):
            (checkpoint / name).write_text(text, encoding="utf-8")
        run = self.client.create_run(self.experiment)
        self.client.log_artifacts(run.info.run_id, str(checkpoint), "model")
        self.client.create_model_version("tiny", f"{run.info.artifact_uri}/model", run.info.run_id)
        report = build_report(number, **options)
        subject = report.subject.model_copy(update={"digest": checkpoint_digest(checkpoint)})
        path = self.folder / f"report-{number}" / "report.json"
        report.model_copy(update={"subject": subject}).save(path)
        return path

    def memguard(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memguard", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, check=False)

    def promote(self, version: int, report: Path, *more: Any) -> subprocess.CompletedProcess[str]:
        where = ("mlflow", "tiny", "--version", version, "--alias", "champion", "--tracking-uri", self.uri)
        return self.memguard("promote", *where, "--report", report, "--policy", "default", *more)

    @property
    def champion(self) -> str | None:
        number = self.client.get_registered_model("tiny").aliases.get("champion")
        return None if number is None else str(number)

    def served(self, version: int) -> Path:
        """Where the registry keeps the files of a version."""
        uri = self.client.get_model_version_download_uri("tiny", str(version))
        return Path(uri.removeprefix("file://"))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Registry(tmp_path)


def test_five_releases_meet_the_gate_and_the_alias_follows_the_clean_ones_alone(registry: Registry) -> None:
    first = registry.release(1)
    refused = registry.promote(1, first)
    assert (refused.returncode, registry.champion) == (3, None), refused.stderr  # the first release has no baseline yet
    accepted = registry.memguard(
        "gate", first, "--policy", "default", "--accept", "baseline.json", "--by", "jane", "--reason", "first release"
    )
    assert accepted.returncode == 0, accepted.stderr
    moved = registry.promote(1, first, "--baseline", "baseline.json")
    assert (moved.returncode, registry.champion) == (0, "1"), moved.stderr + moved.stdout

    memorised = registry.release(2, memorised={"pin-1x-5": -0.5, "card-4x-2": -0.5})
    blocked = registry.promote(2, memorised, "--baseline", "baseline.json", "--junit", "junit.xml")
    assert (blocked.returncode, registry.champion) == (1, "1")
    assert "pin-1x-5" in blocked.stdout
    assert (registry.folder / "junit.xml").exists()
    tags = registry.client.get_model_version("tiny", "2").tags
    assert tags["memguard.outcome"] == "block"

    clean = registry.release(3)
    before = registry.promote(2, clean, "--baseline", "baseline.json")  # the report of 3 for the version 2
    assert (before.returncode, registry.champion) == (3, "1")
    assert registry.client.get_model_version("tiny", "2").tags["memguard.outcome"] == "block"
    done = registry.promote(3, clean, "--baseline", "baseline.json", "--json")
    assert (done.returncode, registry.champion) == (0, "3"), done.stderr
    said = json.loads(done.stdout)
    report = load_report(clean)
    tags = registry.client.get_model_version("tiny", "3").tags
    assert tags["memguard.outcome"] == "pass"
    assert tags["memguard.report_digest"] == said["decision"]["report_digest"]
    assert tags["memguard.subject_digest"] == report.subject.digest == checkpoint_digest(registry.served(3))
    found = registry.client.search_model_versions("tags.`memguard.outcome` = 'pass'")
    assert sorted(str(one.version) for one in found) == ["1", "3"]

    again = registry.promote(3, clean, "--baseline", "baseline.json", "--json")
    assert (again.returncode, json.loads(again.stdout)["action"]) == (0, "already promoted")

    back = registry.release(4)
    assert registry.promote(4, back, "--baseline", "baseline.json").returncode == 0
    (registry.served(3) / "model.safetensors").write_text("weights 3, tampered with", encoding="utf-8")
    tampered = registry.promote(3, clean, "--baseline", "baseline.json")
    assert (tampered.returncode, registry.champion) == (3, "4")

    log = [json.loads(line) for line in (registry.folder / "promotions.jsonl").read_text(encoding="utf-8").splitlines()]
    ended = [(entry["version"], entry["action"]) for entry in log if entry["action"] != "moving"]
    assert ended == [
        ("1", "refused"),
        ("1", "moved"),
        ("2", "refused"),
        ("2", "refused"),
        ("3", "moved"),
        ("3", "already promoted"),
        ("4", "moved"),
        ("3", "refused"),
    ]
    assert log[-1]["attempt"] == 4  # four reports of this plan have met the gate


@pytest.mark.parametrize("same", [False, True], ids=["different versions", "the same decision"])
def test_eight_promotions_at_once_each_move_once_and_in_the_order_of_the_log(registry: Registry, same: bool) -> None:
    baseline = registry.release(1)
    reports = [registry.release(number) for number in range(2, 3 if same else 10)]
    offers = [(2, reports[0])] * 8 if same else [(2 + index, report) for index, report in enumerate(reports)]
    command = [sys.executable, "-m", "memguard", "promote", "mlflow", "tiny", "--alias", "champion", "--policy", "default"]
    command += ["--tracking-uri", registry.uri, "--baseline", str(baseline), "--json"]
    started = []
    for index, (version, report) in enumerate(offers):
        own = registry.folder / f"own-{index}" / "report.json"  # a decision file of its own beside it
        own.parent.mkdir()
        own.write_bytes(report.read_bytes())
        arguments = [*command, "--version", str(version), "--report", str(own)]
        started.append(
            subprocess.Popen(arguments, cwd=registry.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ends = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * 8, [error for _, error in ends]
    actions = [json.loads(output)["action"] for output, _ in ends]
    assert sorted(actions) == (["already promoted"] * 7 + ["moved"] if same else ["moved"] * 8)
    log = [json.loads(line) for line in (registry.folder / "promotions.jsonl").read_text(encoding="utf-8").splitlines()]
    moved = [entry["version"] for entry in log if entry["action"] == "moved"]
    assert sorted(moved) == sorted({str(version) for version, _ in offers})
    assert registry.champion == moved[-1]
    assert [entry["alias_before"] for entry in log if entry["action"] == "moved"] == [None, *moved[:-1]]
