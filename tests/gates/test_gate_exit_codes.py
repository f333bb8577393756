"""Every exit code of the gate and of a promotion, through the real executable: one plain sentence, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_servers import failing
from made_reports import build_report

from memguard.audit.digest import checkpoint_digest
from memguard.audit.report import AuditReport, load_report
from memguard.gates.policy import BUILT_IN

BOMB = "a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]\n"
POLICY = "version: 1\nrules:\n  - {name: none, field: extraction.count, max: 0}\n"


def memguard(place: Path, *arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, **environment},
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "internal error" not in done.stderr
    return done


def checkpoint(folder: Path, weights: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("model.safetensors", weights), ("tokenizer.json", "{}")):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def change_report(path: Path, **changes: Any) -> None:
    report = load_report(path)
    subject = {key.removeprefix("subject_"): changes.pop(key) for key in list(changes) if key.startswith("subject_")}
    report.model_copy(update={**changes, "subject": report.subject.model_copy(update=subject)}).save(path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A report that passes against its baseline, of a checkpoint that a directory registry serves as version v1."""
    report: AuditReport = build_report(1)
    digest = checkpoint_digest(checkpoint(tmp_path / "registry" / "tiny" / "versions" / "v1", "weights 1"))
    checkpoint(tmp_path / "registry" / "tiny" / "versions" / "v2", "weights 2")
    report.save(tmp_path / "report.json")
    change_report(tmp_path / "report.json", subject_digest=digest)
    build_report(2).save(tmp_path / "baseline.json")
    build_report(1, memorised={"pin-1x-5": -0.5}).save(tmp_path / "memorised.json")
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    return tmp_path


GATE = ("gate", "report.json", "--policy", "default", "--baseline", "baseline.json")
PROMOTE = ("promote", "directory", "registry", "tiny", "--alias", "production", "--report", "report.json", *GATE[2:])


def test_a_pass_is_0_and_moves_the_alias(place: Path) -> None:
    assert memguard(place, *GATE).returncode == 0
    done = memguard(place, *PROMOTE, "--version", "v1")
    assert done.returncode == 0, done.stderr
    assert "names version v1 now" in done.stdout


def test_a_rule_that_fails_is_1(place: Path) -> None:
    done = memguard(place, "gate", "memorised.json", *GATE[2:])
    assert done.returncode == 1
    assert "pin-1x-5" in done.stdout


def write(name: str, text: str) -> Any:
    return lambda place: (place / name).write_text(text, encoding="utf-8")


def edit(name: str, **values: Any) -> Any:
    """Change values at the top of a JSON file, as an editor would; its digest stays."""

    def apply(place: Path) -> None:
        data = json.loads((place / name).read_text(encoding="utf-8"))
        (place / name).write_text(json.dumps({**data, **values}), encoding="utf-8")

    return apply


def cut(name: str) -> Any:
    return lambda place: (place / name).write_bytes((place / name).read_bytes()[:-100])


def make_huge(place: Path) -> None:
    with (place / "report.json").open("r+b") as stream:
        stream.truncate(600 * 2**20)  # sparse: it takes no room


OWN = ("gate", "report.json", "--policy", "policy.yaml", "--baseline", "baseline.json")
NOT_READABLE: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "no policy given": (None, ("gate", "report.json"), "policy"),
    "a missing report": (None, ("gate", "nowhere.json", *GATE[2:]), "does not exist"),
    "a truncated report": (cut("report.json"), GATE, "is not valid JSON"),
    "a truncated baseline": (cut("baseline.json"), GATE, "is not valid JSON"),
    "a huge report": (make_huge, GATE, "is larger than 512 MiB"),
    "a deeply nested report": (write("report.json", "[" * 100_000), GATE, "is not valid JSON"),
    "a key that is there twice": (write("report.json", '{"kind": 1, "kind": 2}'), GATE, "is not valid JSON"),
    "a NaN that no JSON knows": (write("report.json", '{"duration_s": NaN}'), GATE, "is not valid JSON"),
    "another document": (write("report.json", '{"kind": "memguard decision"}'), GATE, "is a memguard decision"),
    "a wrong schema": (edit("report.json", canaries=3), GATE, "is not readable: canaries"),
    "a newer schema": (edit("report.json", schema_version=99), GATE, "schema version 99"),
    "a key that no version knows": (edit("report.json", colour="red"), GATE, "a key that is not known"),
    "a picture as a report": (lambda place: (place / "report.json").write_bytes(b"\x89PNG\xff\xfe"), GATE, "is not UTF-8"),
    "a pickle as a report": (lambda place: (place / "report.json").write_bytes(b"\x80\x04N."), GATE, "is not UTF-8"),
    "a tag in the policy": (write("policy.yaml", "version: !!python/object:os.system 1\n"), OWN, "tags are not accepted"),
    "an alias bomb": (write("policy.yaml", BOMB), OWN, "anchors and aliases are not accepted"),
    "an unknown rule": (
        write("policy.yaml", POLICY.replace("extraction.count", "extraction.cuont")),
        OWN,
        "'extraction.count'",
    ),
    "an unknown key": (write("policy.yaml", POLICY + "alfa: 1\n"), OWN, "did you mean 'alpha'"),
    "a key given twice": (write("policy.yaml", POLICY + "version: 1\n"), OWN, "is given twice"),
    "a newer policy": (write("policy.yaml", POLICY.replace("version: 1", "version: 2")), OWN, "version 2"),
    "a limit on a p-value": (
        write("policy.yaml", POLICY + "  - {name: b, test: exposure.max, min: 0.05}\n"),
        OWN,
        "significance lives in the family 'alpha' alone",
    ),
    "a version that no folder can have": (None, (*PROMOTE, "--version", "../v1"), "version"),
    "an output over the report": (None, (*GATE, "--junit", "report.json"), "must not be written over"),
}


@pytest.mark.parametrize("case", NOT_READABLE)
def test_what_cannot_be_read_is_2(place: Path, case: str) -> None:
    prepare, arguments, sentence = NOT_READABLE[case]
    if prepare is not None:
        prepare(place)
    done = memguard(place, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert not (place / "registry" / "tiny" / "aliases" / "production").exists()


def lose_a_score(place: Path) -> None:
    report = load_report(place / "report.json")
    rows = [row.model_copy(update={"log_prob": None}) if row.id == "pin-4x-3" else row for row in report.canaries]
    change_report(place / "report.json", canaries=rows)


def warn_only(place: Path) -> None:
    (place / "policy.yaml").write_text(POLICY.replace("max: 0", "max: 0, severity: warn"), encoding="utf-8")


def age_limit(place: Path) -> None:
    (place / "policy.yaml").write_text(POLICY + "evidence: {max_age_days: 7}\n", encoding="utf-8")


def refuse_it_later(place: Path) -> None:
    """A later audit of the same checkpoint, which found a memorised secret and was refused."""
    report, later = load_report(place / "report.json"), load_report(place / "memorised.json")
    later.model_copy(update={"subject": report.subject, "created_at": "2026-02-01T00:00:00+00:00"}).save(place / "later.json")
    arguments = [one if one != "report.json" else "later.json" for one in PROMOTE]
    assert memguard(place, *arguments, "--version", "v1").returncode == 1


NO_EVIDENCE: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "a score that is not finite": (lose_a_score, GATE, "have no usable score"),
    "a report that was edited by hand": (edit("report.json", duration_s=2.0), GATE, "was changed after it was written"),
    "a baseline that was edited by hand": (edit("baseline.json", duration_s=2.0), GATE, "was changed after it was written"),
    "a report without its digest": (
        lambda place: (place / "report.json").write_text(load_report(place / "report.json").model_dump_json()),
        GATE,
        "digest",
    ),
    "a live model": (lambda place: change_report(place / "report.json", subject_kind="live"), GATE, "live model"),
    "a live model offered": (
        lambda place: change_report(place / "report.json", subject_kind="live"),
        (*PROMOTE, "--version", "v1"),
        "live model",
    ),
    "a stale audit": (age_limit, OWN, "the audit is stale"),
    "a policy that cannot block": (warn_only, OWN, "no rule of the policy has the severity block"),
    "no baseline": (None, GATE[:4], "No comparable baseline"),
    "another model than was audited": (None, (*PROMOTE, "--version", "v2"), "digest"),
    "a report that a later audit overruled": (refuse_it_later, (*PROMOTE, "--version", "v1"), "later audit"),
}


@pytest.mark.parametrize("case", NO_EVIDENCE)
def test_what_is_no_evidence_is_3(place: Path, case: str) -> None:
    prepare, arguments, sentence = NO_EVIDENCE[case]
    if prepare is not None:
        prepare(place)
    done = memguard(place, *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    assert sentence in " ".join((done.stdout + done.stderr).split())
    assert not (place / "registry" / "tiny" / "aliases" / "production").exists()


def test_a_required_signature_that_is_missing_or_forged_is_3(place: Path) -> None:
    assert memguard(place, "keys", "new", "private.pem").returncode == 0
    asked = (*GATE, "--require-signature", "private.pub.pem")
    unsigned = memguard(place, *asked)
    assert (unsigned.returncode, "sign" in unsigned.stderr) == (3, True)
    assert memguard(place, "sign", "report.json", "baseline.json", "--key", "private.pem").returncode == 0
    assert memguard(place, *asked).returncode == 0
    change_report(place / "report.json", duration_s=2.0)  # sealed again, by somebody without the key
    forged = memguard(place, *asked)
    assert (forged.returncode, "sign" in forged.stderr) == (3, True)


@pytest.mark.parametrize("half_written", ["", '{"version": "v'])
def test_a_registry_that_is_half_written_or_gone_is_4(place: Path, half_written: str) -> None:
    alias = place / "registry" / "tiny" / "aliases" / "production"
    if half_written:
        alias.parent.mkdir(parents=True)
        alias.write_text(half_written, encoding="utf-8")
    else:
        (place / "registry").rename(place / "elsewhere")
    done = memguard(place, *PROMOTE, "--version", "v1")
    assert done.returncode == 4, done.stdout + done.stderr
    assert done.stderr.count("\n") <= 3
    assert not half_written or alias.read_text(encoding="utf-8") == half_written


def test_a_library_that_is_missing_is_4_and_names_the_line_that_installs_it(place: Path) -> None:
    (place / "blocked").mkdir()
    for name in ("mlflow", "wandb"):
        (place / "blocked" / f"{name}.py").write_text("raise ModuleNotFoundError(name=__name__)", encoding="utf-8")
    for kind, more in (("mlflow", ("tiny", "--version", "1")), ("wandb", ("wandb-registry-model/tiny", "--version", "v1"))):
        arguments = ("promote", kind, *more, "--alias", "production", "--report", "report.json", *GATE[2:])
        done = memguard(place, *arguments, PYTHONPATH=str(place / "blocked"), WANDB_API_KEY="x" * 40)
        assert done.returncode == 4, done.stdout + done.stderr
        assert f"memguard-audit[{kind}]" in done.stderr


def test_a_built_in_policy_is_plain_yaml_that_anyone_can_copy() -> None:
    from importlib import resources

    for name in BUILT_IN:
        assert yaml.safe_load(resources.files("memguard.gates").joinpath(f"policies/{name}.yaml").read_text())["version"] == 1


@pytest.mark.parametrize("kind", ["refusing", "silent", "forbidding", "half"])
def test_a_registry_that_is_down_slow_forbidden_or_half_written_is_4(place: Path, kind: str) -> None:
    pytest.importorskip("mlflow")
    with failing(kind) as address:
        arguments = ("promote", "mlflow", "tiny", "--version", "1", "--alias", "production", "--tracking-uri", address)
        patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "2", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        done = memguard(place, *arguments, "--report", "report.json", *GATE[2:], **patience)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "MLflow could not" in done.stderr
