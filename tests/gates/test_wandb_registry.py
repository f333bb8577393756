"""Promotion in W&B: a fake server behind the surface of the library that is used, and the library itself where it fails."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import failing

from memguard.audit.digest import checkpoint_digest
from memguard.errors import InputError, MissingExtraError, RegistryError
from memguard.gates.registries import wandb_registry
from memguard.gates.registries.protocol import Annotation, ModelVersion
from memguard.gates.registries.wandb_registry import WandbRegistry

wandb = pytest.importorskip("wandb")

COLLECTION = "wandb-registry-model/tiny"
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"weights"}
V0, V1 = ModelVersion(COLLECTION, "v0"), ModelVersion(COLLECTION, "v1")


def like(real: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in that takes only the calls that the library's own function takes."""

    def wrap(fake: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            inspect.signature(real).bind(self, *args, **kwargs)
            return fake(self, *args, **kwargs)

        return call

    return wrap


class FakeServer:
    """One collection: versions with files, metadata and aliases."""

    def __init__(self) -> None:
        self.files = {"v0": dict(CHECKPOINT), "v1": {**CHECKPOINT, "model.safetensors": b"other weights"}}
        self.metadata: dict[str, dict[str, Any]] = {"v0": {"loss": 1.5}, "v1": {}}
        self.aliases = {"candidate": "v1", "latest": "v1"}
        self.fails: dict[str, Exception] = {}
        self.keeps_metadata = True
        self.saves = 0

    def may(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]


class FakeArtifact:
    def __init__(self, server: FakeServer, version: str) -> None:
        self.server, self.version = server, version
        self.metadata = dict(server.metadata[version])
        self.aliases = [alias for alias, held in server.aliases.items() if held == version]

    @like(wandb.Artifact.save)
    def save(self) -> None:
        self.server.may("save")
        for alias in [alias for alias, held in self.server.aliases.items() if held == self.version]:
            if alias not in self.aliases:
                del self.server.aliases[alias]
        self.server.aliases |= dict.fromkeys(self.aliases, self.version)
        self.server.may("save figures")
        if self.server.keeps_metadata:
            self.server.metadata[self.version] = json.loads(json.dumps(self.metadata))
        self.server.saves += 1

    @like(wandb.Artifact.download)
    def download(self, root: str, skip_cache: bool) -> str:
        assert skip_cache
        for name, data in self.server.files[self.version].items():
            (Path(root) / name).write_bytes(data)
        self.server.may("download")
        return root

    @like(wandb.Artifact.verify)
    def verify(self, root: str) -> None:
        self.server.may("verify")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()

    class FakeApi:
        @like(wandb.Api.__init__)
        def __init__(self, timeout: int) -> None:
            assert timeout == 20
            server.may("login")

        @like(wandb.Api.artifact)
        def artifact(self, name: str) -> FakeArtifact:
            server.may("artifact")
            collection, _, version = name.rpartition(":")
            held = server.aliases.get(version, version)
            if collection != COLLECTION or held not in server.files:
                message = f"artifact membership {name!r} not found in 'acme/wandb-registry-model'"
                raise wandb.errors.CommError(message, ValueError(message))
            return FakeArtifact(server, held)

    monkeypatch.setattr(wandb, "Api", FakeApi)
    monkeypatch.setenv("WANDB_MODE", "online")
    return server


@pytest.fixture
def registry(server: FakeServer, tmp_path: Path) -> WandbRegistry:
    return WandbRegistry(COLLECTION, "production", queue=tmp_path / "queue.jsonl")


def failed(status: int | None = None) -> Exception:
    """What the library raises when the server refuses; without a status, when it does not answer."""
    from wandb.proto.wandb_api_pb2 import ApiErrorResponse
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    response = ApiErrorResponse(message="user:hunter2", http_status=status) if status is not None else None
    inner = WandbApiFailedError("user:hunter2", response)
    inner.__cause__ = None if status is not None else TimeoutError()
    error = wandb.errors.CommError("user:hunter2", inner)
    error.__cause__ = inner
    return error


def test_a_version_and_an_alias_become_the_version_of_the_collection(registry):
    assert registry.resolve("v0") == V0
    assert registry.resolve("candidate") == V1


def test_what_is_not_there_is_said_in_words(server, registry):
    with pytest.raises(RegistryError, match=rf"W&B could not find version 'v9' of '{COLLECTION}': it is not there\."):
        registry.resolve("v9")
    with pytest.raises(RegistryError, match=r"could not find version 'v0' of 'a/b': it is not there\."):
        WandbRegistry("a/b", "production").resolve("v0")
    with pytest.raises(RegistryError, match=r"could not serve the files of .* version v9: it is not there\."):
        registry.served_files(ModelVersion(COLLECTION, "v9")).__enter__()


@pytest.mark.parametrize("alias", ["", "team/production", "a:b"])
def test_an_alias_that_wandb_cannot_hold_is_refused_before_any_call(alias):
    with pytest.raises(InputError, match="alias must be a name without '/' and ':', got "):
        WandbRegistry(COLLECTION, alias)


@pytest.mark.parametrize("alias", ["latest", "v12"])
def test_wandbs_own_aliases_cannot_be_guarded(alias):
    with pytest.raises(InputError, match=r"alias must not be one of W&B's own \('latest', 'v0', ...\), got "):
        WandbRegistry(COLLECTION, alias)


@pytest.mark.parametrize("collection", ["", "tiny", "a/b/c/d", "a/b:v1", "a//b"])
def test_a_collection_is_a_path(collection):
    with pytest.raises(InputError, match="collection must be 'wandb-registry-model/NAME' or 'ENTITY/PROJECT/NAME', got "):
        WandbRegistry(collection, "production")


def test_a_version_must_be_in_the_collection(registry):
    with pytest.raises(InputError, match=r"got the artifact 'acme/runs/tiny:v3'\. Link it first: run\.link_artifact\("):
        registry.resolve("acme/runs/tiny:v3")
    for version in ("", "tiny:v3"):
        with pytest.raises(InputError, match="version must be 'v3' or an alias of the collection, got "):
            registry.resolve(version)


def test_the_alias_moves_back_and_away_and_other_aliases_stay(server, registry):
    assert registry.current() is None
    registry.move_alias(V1)
    assert registry.current() == V1
    registry.move_alias(V0)
    assert registry.current() == V0
    assert server.aliases == {"candidate": "v1", "latest": "v1", "production": "v0"}
    registry.move_alias(None)
    registry.move_alias(None)
    assert registry.current() is None
    assert server.aliases == {"candidate": "v1", "latest": "v1"}


def test_a_move_that_changes_nothing_is_not_sent(server, registry):
    registry.move_alias(V1)
    server.fails["save"] = failed(403)
    registry.move_alias(V1)
    assert server.saves == 1


def test_a_protected_alias_is_named_as_such_and_stays(server, registry):
    registry.move_alias(V0)
    for refusal in (failed(403), wandb.errors.CommError("You do not have permission to add the following alias")):
        server.fails["save"] = refusal
        with pytest.raises(RegistryError, match="only a registry admin or an admin service account may move it: give"):
            registry.move_alias(V1)
        assert registry.current() == V0


def test_an_alias_that_moved_although_the_save_failed_has_moved(server, registry):
    server.fails["save figures"] = failed(403)
    registry.move_alias(V1)
    assert registry.current() == V1


@pytest.mark.parametrize(("status", "why"), [(None, "it did not answer in time"), (500, "it answered with status 500")])
def test_a_failure_is_never_taken_for_a_missing_alias(server, registry, status, why):
    registry.move_alias(V0)
    server.fails["artifact"] = failed(status)
    for ask in (registry.current, lambda: registry.resolve("v0"), lambda: registry.move_alias(None)):
        with pytest.raises(RegistryError, match=f"W&B could not .*: {why}") as caught:
            ask()
        assert "hunter2" not in str(caught.value)


def test_what_is_served_is_fetched_past_the_cache_and_is_gone_after(server, registry, tmp_path):
    for name, data in CHECKPOINT.items():
        (tmp_path / name).write_bytes(data)
    with registry.served_files(V0) as folder:
        assert checkpoint_digest(folder) == checkpoint_digest(tmp_path)
    assert not folder.exists()
    server.files["v0"]["model.safetensors"] = b"weightz"
    with registry.served_files(V0) as folder:
        assert checkpoint_digest(folder) != checkpoint_digest(tmp_path)


@pytest.mark.parametrize("what", ["download", "verify"])
def test_a_download_that_breaks_off_is_not_served(server, registry, what):
    server.fails[what] = ValueError("Digest mismatch for file: model.safetensors")
    with (
        pytest.raises(RegistryError, match=r"could not serve the files of .* version v0: an unexpected ValueError\."),
        registry.served_files(V0),
    ):
        pytest.fail("nothing is served")


def test_an_artifact_without_weights_is_refused_with_the_cure(server, registry):
    del server.files["v0"]["model.safetensors"]
    with (
        pytest.raises(RegistryError, match=r"no weights beside a configuration.* artifact\.add_dir\(folder\)"),
        registry.served_files(V0),
    ):
        pytest.fail("nothing is served")


def test_the_verdict_joins_the_metadata_and_writing_it_twice_changes_nothing(server, registry):
    note = Annotation("pass", "r" * 2_000, tags={"report_digest": "a" * 64})
    registry.annotate(V0, note)
    registry.annotate(V0, note)
    verdict = {"outcome": "pass", "reason": "r" * 500, "report_digest": "a" * 64}
    assert server.metadata["v0"] == {"loss": 1.5, "memguard": verdict}
    assert server.saves == 1
    assert server.aliases == {"candidate": "v1", "latest": "v1"}


def test_metadata_that_wandb_drops_without_a_word_is_an_error(server, registry):
    server.keeps_metadata = False
    with pytest.raises(RegistryError, match=r"did not keep the metadata of .* version v0: the key may not write to its source"):
        registry.annotate(V0, Annotation("pass", ""))


@pytest.fixture
def _settings() -> Iterator[None]:
    """The library reads the environment once a process, so each of these tests starts it anew."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("_settings")
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_offline_nothing_is_promoted_and_the_request_is_kept_until_wandb_is_reached(server, registry, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    queue = registry.queue
    queue.write_text('{"other": "request"}\n')
    for _ in range(2):
        with pytest.raises(
            RegistryError, match=rf"W&B is switched off here \(mode {mode}\)\. The request is kept in '.*jsonl'\. Run"
        ):
            registry.resolve("candidate")
    with pytest.raises(RegistryError, match="W&B is switched off here"):
        registry.move_alias(V0)
    kept = [json.loads(line) for line in queue.read_text().splitlines()]
    assert kept == [{"other": "request"}, {"collection": COLLECTION, "version": "candidate", "alias": "production"}]
    assert "production" not in server.aliases

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    registry.resolve("candidate")
    assert queue.read_text() == '{"other": "request"}\n'


@pytest.mark.usefixtures("_settings")
def test_without_a_queue_offline_is_said_all_the_same(server, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(RegistryError, match=r"W&B is switched off here \(mode offline\)\. Run the same command again where"):
        WandbRegistry(COLLECTION, "production").resolve("v0")


def test_a_missing_library_names_the_line_that_installs_it(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"promoting in W&B needs the extra 'wandb': pip install"):
        registry.current()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _settings: None) -> WandbRegistry:
    """The library itself, as a user without login would have it."""
    for name, value in {"MODE": "online", "SILENT": "true", "ERROR_REPORTING": "false", "CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb_registry, "TIMEOUT_S", 1)
    return WandbRegistry("acme/wandb-registry-model/tiny", "production", queue=tmp_path / "queue.jsonl")


def test_without_a_key_the_request_is_kept(real):
    with pytest.raises(RegistryError, match=r"there is no key for W&B here .*\. The request is kept in "):
        real.resolve("candidate")
    assert json.loads(real.queue.read_text())["version"] == "candidate"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("refusing", "it did not answer in time"),  # the library tries again until its time is up
        ("silent", "it did not answer in time"),
        ("forbidding", r"this login is not allowed to do that \(403\)"),
        ("half", "its answer cannot be read"),
    ],
)
def test_a_failing_server_is_named_without_its_address_or_words(real, monkeypatch, kind, why):
    with failing(kind) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "5" * 40)
        for ask in (lambda: real.resolve("candidate"), real.current):
            with pytest.raises(RegistryError, match=rf"W&B could not .*: {why}") as caught:
                ask()
            assert "5" * 40 not in str(caught.value)
            assert "127.0.0.1" not in str(caught.value)
        assert not real.queue.exists()
