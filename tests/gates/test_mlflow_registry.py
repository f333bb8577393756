"""Promotion in MLflow: a real sqlite registry with artifacts as files, and servers that fail in every way."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import Answer, failing, serving

from memguard.audit.digest import checkpoint_digest
from memguard.errors import InputError, MissingExtraError, RegistryError
from memguard.gates.registries.mlflow_registry import MlflowRegistry
from memguard.gates.registries.protocol import Annotation, ModelVersion, Registry

# MLflow 3.17 on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

COUNTER = itertools.count()
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}


class Server:
    """A registry of MLflow in a folder, filled through MLflow's own client."""

    def __init__(self, folder: Path) -> None:
        import mlflow

        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client: Any = mlflow.MlflowClient(tracking_uri=self.uri)
        self.experiment = self.client.create_experiment("e", artifact_location=(folder / "artifacts").as_uri())

    def log(self, model: str, files: dict[str, bytes], *, source: str = "model") -> Path:
        """Register one more version of `model`; gives the folder of its artifacts."""
        run = self.client.create_run(self.experiment)
        root = Path(run.info.artifact_uri.removeprefix("file://"))
        for name, data in files.items():
            (root / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "model" / name).write_bytes(data)
        if not self.client.search_registered_models(f"name = '{model}'"):
            self.client.create_registered_model(model)
        self.client.create_model_version(model, f"{run.info.artifact_uri}/{source}".rstrip("/"), run.info.run_id)
        return root / "model"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield Server(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def model(server: Server, request: pytest.FixtureRequest) -> str:
    """A model with two versions, of its own for each test."""
    name = re.sub(r"\W", "-", request.node.name)[:80] + f"-{next(COUNTER)}"
    server.log(name, CHECKPOINT)
    server.log(name, {**CHECKPOINT, "model.safetensors": b"other weights"})
    return name


@pytest.fixture
def registry(server: Server, model: str) -> Registry:
    return MlflowRegistry(model, "champion", tracking_uri=server.uri)


def test_a_version_is_found_by_number_and_by_alias(server, registry, model):
    server.client.set_registered_model_alias(model, "candidate", 2)
    assert registry.resolve("1") == ModelVersion(model, "1")
    assert registry.resolve("@candidate") == ModelVersion(model, "2")
    assert registry.resolve("@latest") == ModelVersion(model, "2")


def test_what_is_not_there_is_said_in_words(server, registry, model):
    with pytest.raises(RegistryError, match=rf"could not find version '9' of '{model}': it is not there \(RESOURCE_DOES_NOT"):
        registry.resolve("9")
    with pytest.raises(RegistryError, match=rf"MLflow has no alias 'challenger' of '{model}'\."):
        registry.resolve("@challenger")
    nobody = MlflowRegistry("nobody", "champion", tracking_uri=server.uri)
    for ask in (lambda: nobody.resolve("1"), lambda: nobody.resolve("@a"), nobody.current):
        with pytest.raises(RegistryError, match=r"of 'nobody': it is not there"):
            ask()


def test_a_version_that_is_still_being_registered_is_refused(server, registry, model):
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    with SqlAlchemyStore(server.uri).ManagedSessionMaker(read_only=False) as session:
        from sqlalchemy import text

        session.execute(text(f"UPDATE model_versions SET status = 'PENDING_REGISTRATION' WHERE name = '{model}'"))
    with pytest.raises(RegistryError, match=r"is not ready in MLflow yet \(PENDING_REGISTRATION\)\."):
        registry.resolve("1")


@pytest.mark.parametrize("version", ["", "v1", "one", "1.0", "-1", "latest", "１", "1/../2"])
def test_a_version_is_a_number_or_an_alias(version):
    with pytest.raises(InputError, match="version must be a number or '@alias', got "):
        MlflowRegistry("tiny", "champion").resolve(version)


@pytest.mark.parametrize("alias", ["", "a b", "a/b", "a:b", "a.b", "@a"])
def test_an_alias_that_mlflow_cannot_hold_is_refused_before_any_call(alias):
    with pytest.raises(InputError, match="alias must hold letters, digits, '_' and '-' only, got "):
        MlflowRegistry("tiny", alias)
    with pytest.raises(InputError, match="alias must hold"):
        MlflowRegistry("tiny", "champion").resolve(f"@{alias}")


@pytest.mark.parametrize("alias", ["latest", "Latest", "v1", "V12"])
def test_mlflows_own_aliases_cannot_be_guarded(alias):
    with pytest.raises(InputError, match=r"alias must not be one of MLflow's own \('latest', 'v1', ...\), got "):
        MlflowRegistry("tiny", alias)


@pytest.mark.parametrize("name", ["", "a/b", "a:b"])
def test_a_model_name_that_mlflow_cannot_hold_is_refused(name):
    with pytest.raises(InputError, match="model must be a name without '/' and ':', got "):
        MlflowRegistry(name, "champion")


def test_the_alias_moves_back_and_away_and_is_read_anew(server, registry, model):
    assert registry.current() is None
    registry.move_alias(ModelVersion(model, "1"))
    registry.move_alias(ModelVersion(model, "2"))
    assert registry.current() == ModelVersion(model, "2")
    server.client.set_registered_model_alias(model, "champion", 1)  # another writer
    assert registry.current() == ModelVersion(model, "1")
    registry.move_alias(None)
    registry.move_alias(None)
    assert registry.current() is None


def test_an_alias_that_cannot_be_moved_stays(registry, model):
    registry.move_alias(ModelVersion(model, "1"))
    with pytest.raises(RegistryError, match=rf"could not move alias 'champion' of '{model}': it is not there"):
        registry.move_alias(ModelVersion(model, "7"))
    assert registry.current() == ModelVersion(model, "1")


def test_the_verdict_is_found_by_its_tags_and_written_twice_without_change(server, registry, model):
    note = Annotation("block", "r" * 2_000, tags={"report_digest": "a" * 64, "policy_digest": "b" * 64})
    registry.annotate(ModelVersion(model, "2"), note)
    registry.annotate(ModelVersion(model, "2"), note)
    (found,) = server.client.search_model_versions(f"name = '{model}' and tags.`memguard.outcome` = 'block'")
    assert found.version == 2
    assert found.tags == {
        "memguard.report_digest": "a" * 64,
        "memguard.policy_digest": "b" * 64,
        "memguard.reason": "r" * 500,
        "memguard.outcome": "block",
    }
    with pytest.raises(RegistryError, match="could not tag .* version 9: it is not there"):
        registry.annotate(ModelVersion(model, "9"), note)


def test_an_outcome_never_stands_beside_older_figures(server, registry, model, monkeypatch):
    import mlflow

    real = mlflow.MlflowClient.set_model_version_tag

    def fail(self: Any, name: str, version: str, key: str, value: str) -> None:
        if key == "memguard.reason":
            raise mlflow.exceptions.MlflowException("user:hunter2")
        real(self, name, version, key, value)

    monkeypatch.setattr(mlflow.MlflowClient, "set_model_version_tag", fail)
    with pytest.raises(RegistryError, match=r"could not tag .* version 1: no usable answer \(INTERNAL_ERROR\)\."):
        registry.annotate(ModelVersion(model, "1"), Annotation("pass", "r", tags={"report_digest": "a"}))
    assert server.client.get_model_version(model, "1").tags == {
        "memguard.report_digest": "a",
        "memguard.outcome": "pending",
    }


def test_what_is_served_is_what_was_logged_and_is_gone_after(server, registry, tmp_path):
    logged = server.log(registry.model, CHECKPOINT)
    with registry.served_files(ModelVersion(registry.model, "3")) as folder:
        assert logged not in (folder, *folder.parents)
        assert checkpoint_digest(folder) == checkpoint_digest(logged)
        (folder / "config.json").write_text("changed by a reader")
    assert not folder.exists()
    assert (logged / "config.json").read_bytes() == b"{}"


def test_a_changed_artifact_changes_the_digest(server, registry):
    logged = server.log(registry.model, CHECKPOINT)
    version = ModelVersion(registry.model, "3")
    with registry.served_files(version) as folder:
        before = checkpoint_digest(folder)
    (logged / "model.safetensors").write_bytes(b"weightz")
    with registry.served_files(version) as folder:
        assert checkpoint_digest(folder) != before


def test_a_deleted_artifact_is_no_empty_folder(server, registry):
    logged = server.log(registry.model, CHECKPOINT)
    shutil.rmtree(logged)
    with (
        pytest.raises(RegistryError, match=r"could not serve the files of .* version 3: it is not there"),
        registry.served_files(ModelVersion(registry.model, "3")),
    ):
        pytest.fail("nothing is served")


NESTED = {f"artifacts/final/{name}": data for name, data in CHECKPOINT.items()}
OTHER = {f"artifacts/other/{name}": data for name, data in CHECKPOINT.items()}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"adapter"}


@pytest.mark.parametrize(
    ("files", "inside"), [(CHECKPOINT, "model"), (NESTED, "final"), (ADAPTER, "model"), ({**CHECKPOINT, **NESTED}, "model")]
)
def test_the_checkpoint_is_found_wherever_the_run_logged_it(server, registry, files, inside):
    server.log(registry.model, {**files, "NOTES.md": b"", "registered_model_meta": b""}, source="")
    with registry.served_files(ModelVersion(registry.model, "3")) as folder:
        assert folder.name == inside


# What mlflow.transformers.save_model of 3.17 writes.
FLAVOUR = {
    "MLmodel": b"flavors: {transformers: {}}",
    "model/config.json": b"{}",
    "model/generation_config.json": b"{}",
    "model/model.safetensors": b"weights",
    "components/tokenizer/tokenizer.json": b"{}",
    "components/tokenizer/tokenizer_config.json": b"{}",
}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            FLAVOUR,
            r"that no audit was of: 'MLmodel', 'components/tokenizer/tokenizer\.json', .* Log the checkpoint folder as it is: ",
        ),
        ({**CHECKPOINT, "MLmodel": b"flavors: {}"}, r"that no audit was of: 'MLmodel'"),
        ({**NESTED, "MLmodel": b"flavors: {python_function: {}}"}, r"that no audit was of: 'MLmodel'"),
        ({**NESTED, "code/loader.py": b"import os"}, r"that no audit was of: 'code/loader\.py'"),
        ({**NESTED, "python_model.pkl": b"x"}, r"that no audit was of: 'python_model\.pkl'"),
        ({**NESTED, "model.safetensors": b"x"}, r"that no audit was of: 'model\.safetensors'"),
        ({**NESTED, ".hidden.safetensors": b"x"}, r"that no audit was of: '\.hidden\.safetensors'"),
        ({**NESTED, **OTHER}, r"serves 2 folders with weights and a configuration, .* mlflow.log_artifacts"),
        ({"config.json": b"{}"}, r"serves no weights beside a configuration"),
        ({"config.json": b"{}", "optimizer.pt": b""}, r"serves no weights beside a configuration"),
        ({"model.safetensors": b""}, r"serves no weights beside a configuration"),
    ],
)
def test_what_would_have_to_be_guessed_is_refused_with_the_cure(server, registry, files, sentence):
    server.log(registry.model, files)
    with (
        pytest.raises(RegistryError, match=sentence),
        registry.served_files(ModelVersion(registry.model, "3")),
    ):
        pytest.fail("nothing is served")


def test_an_error_of_the_reader_passes_through(registry, model):
    with pytest.raises(KeyError, match="mine"), registry.served_files(ModelVersion(model, "1")):
        raise KeyError("mine")


def test_without_an_address_nothing_is_created(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(InputError, match="the address of MLflow must be given or set as MLFLOW_TRACKING_URI, got neither"):
        MlflowRegistry("tiny", "champion").current()
    with pytest.raises(RegistryError, match=r"MLflow's database 'typo\.db' does not exist\."):
        MlflowRegistry("tiny", "champion", tracking_uri="sqlite:///typo.db?timeout=1").current()
    assert list(tmp_path.iterdir()) == []


def test_the_address_may_come_from_the_environment(monkeypatch, server, model):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert MlflowRegistry(model, "champion").resolve("1") == ModelVersion(model, "1")


def test_a_missing_library_names_the_line_that_installs_it(monkeypatch, server):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"promoting in MLflow needs the extra 'mlflow': pip install"):
        MlflowRegistry("tiny", "champion", tracking_uri=server.uri).current()


def test_a_database_without_its_driver_names_the_package(monkeypatch, server):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "alembic" else True)
    with pytest.raises(RegistryError, match=r"MLflow needs alembic to open a database: pip install mlflow\."):
        MlflowRegistry("tiny", "champion", tracking_uri=server.uri).current()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("refusing", r"it cannot be reached"),
        ("silent", r"it did not answer in time"),
        ("forbidding", r"this login is not allowed to do that \(PERMISSION_DENIED\)"),
        ("half", r"no usable answer \(INTERNAL_ERROR\)"),
    ],
)
def test_a_failing_server_is_named_without_its_address_or_words(server, impatient, kind, why):
    with failing(kind) as address:
        registry = MlflowRegistry("tiny", "champion", tracking_uri=address.replace("//", "//user:hunter2@"))
        version = ModelVersion("tiny", "1")
        for ask in (
            registry.current,
            lambda: registry.resolve("1"),
            lambda: registry.move_alias(version),
            lambda: registry.annotate(version, Annotation("pass", "")),
            lambda: registry.served_files(version).__enter__(),
        ):
            with pytest.raises(RegistryError, match=rf"MLflow could not .*: {why}\.$") as caught:
                ask()
            assert "hunter2" not in str(caught.value)
            assert "127.0.0.1" not in str(caught.value)
            if kind == "silent":  # one is enough: each waits a second
                break


def test_a_file_that_breaks_off_is_not_served(server, impatient):
    def answer(method: str, path: str, _: bytes) -> Answer:
        if "get-download-uri" in path:
            return Answer(json.dumps({"artifact_uri": f"{address}/api/2.0/mlflow-artifacts/artifacts/m"}).encode())
        if "registered-models/get" in path:
            return Answer(b'{"registered_model": {"name": "tiny"}}')
        if "path=m" in path:
            listed = [{"path": name, "is_dir": False, "file_size": len(data)} for name, data in CHECKPOINT.items()]
            return Answer(json.dumps({"files": listed if path.endswith("path=m") else []}).encode())
        data = CHECKPOINT[path.rpartition("/")[2]]
        return Answer(data, promised=len(data) + 100 if broken and "safetensors" in path else None)

    with serving(answer) as address:
        registry, version = MlflowRegistry("tiny", "champion", tracking_uri=address), ModelVersion("tiny", "1")
        broken = False
        with registry.served_files(version) as folder:
            assert (folder / "model.safetensors").read_bytes() == b"weights"
        broken = True
        with (
            pytest.raises(RegistryError, match="could not serve the files of tiny version 1: "),
            registry.served_files(version),
        ):
            pytest.fail("nothing is served")


def test_waiting_is_bounded_for_the_call_and_the_users_own_bounds_win(server, model, monkeypatch):
    import mlflow

    seen: list[dict[str, str]] = []
    real = mlflow.MlflowClient.get_registered_model

    def spy(self: Any, name: str) -> Any:
        seen.append({key: value for key, value in os.environ.items() if key.startswith("MLFLOW_HTTP")})
        return real(self, name)

    monkeypatch.setattr(mlflow.MlflowClient, "get_registered_model", spy)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    MlflowRegistry(model, "champion", tracking_uri=server.uri).current()
    assert seen == [{"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5"}]
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"
