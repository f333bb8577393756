"""Promotion through W&B's own library: the part of the server's interface that it uses, on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import Answer, serving

from memguard.audit.digest import checkpoint_digest
from memguard.errors import RegistryError
from memguard.gates.registries.protocol import Annotation, ModelVersion
from memguard.gates.registries.wandb_registry import WandbRegistry

wandb = pytest.importorskip("wandb")

COLLECTION = "acme/released/tiny"
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"weights"}
V0, V1 = ModelVersion(COLLECTION, "v0"), ModelVersion(COLLECTION, "v1")
PROJECT = {"id": "p", "internalId": "1", "name": "released", "entity": {"name": "acme"}}


class LocalWandb:
    """One collection of two versions, as the server tells it."""

    def __init__(self) -> None:
        self.address = ""
        self.reset()

    def reset(self) -> None:
        self.aliases = {"candidate": "v1"}
        self.metadata: dict[str, dict[str, Any]] = {"v0": {}, "v1": {"loss": 1.5}}
        self.may_alias = True
        self.served = dict(CHECKPOINT)

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        if method == "GET":
            name = path.rpartition("/")[2]
            return Answer(json.dumps(self._manifest()).encode() if name == "manifest" else self.served[name])
        asked = json.loads(body)
        operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
        assert operation is not None
        data = getattr(self, f"_{operation[1]}", lambda _: {})(asked.get("variables") or {})
        if data is None:
            return Answer(b'{"errors": [{"message": "permission denied"}]}', 403)
        return Answer(json.dumps({"data": data}).encode())

    def _Viewer(self, _: Any) -> dict[str, Any]:  # noqa: N802
        names = {"id": "u", "entity": "acme", "username": "jane", "name": "Jane", "email": "jane@acme", "admin": False}
        return {"viewer": {**names, "flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}}}

    _GetDefaultEntity = _Viewer

    def _ServerFeaturesQuery(self, _: Any) -> dict[str, Any]:  # noqa: N802
        return {"serverInfo": {"features": []}}

    def _ArtifactMembershipByName(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        if asked["project"] != "released":
            return {"project": None}
        collection, _, name = asked["name"].partition(":")
        version = self.aliases.get(name, name)
        known = collection == "tiny" and version in self.metadata
        return {"project": {"artifactCollectionMembership": self._membership(version) if known else None}}

    def _AddAliases(self, asked: dict[str, Any]) -> dict[str, Any] | None:  # noqa: N802
        if not self.may_alias:
            return None
        self.aliases |= {one["alias"]: asked["input"]["artifactID"] for one in asked["input"]["aliases"]}
        return {"result": {"success": True}}

    def _DeleteAliases(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        for one in asked["input"]["aliases"]:
            assert self.aliases.pop(one["alias"]) == asked["input"]["artifactID"]
        return {"result": {"success": True}}

    def _UpdateArtifact(self, asked: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        version = asked["input"]["artifactID"]
        self.metadata[version] = json.loads(asked["input"]["metadata"])
        return {"result": {"artifact": self._artifact(version)}}

    def _FetchArtifactManifest(self, _: Any) -> dict[str, Any]:  # noqa: N802
        return {"artifact": {"currentManifest": {"file": {"directUrl": f"{self.address}/manifest"}}}}

    def _GetArtifactMembershipFileUrls(self, _: Any) -> dict[str, Any]:  # noqa: N802
        nodes = [{"__typename": "File", "name": name, "directUrl": f"{self.address}/files/{name}"} for name in CHECKPOINT]
        files = {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": [{"node": node} for node in nodes]}
        membership = {"artifactMembership": {"files": files}}
        return {"project": {"artifactCollection": {"__typename": "ArtifactSequence", **membership}}}

    def _manifest(self) -> dict[str, Any]:
        contents = {
            name: {"digest": base64.b64encode(hashlib.md5(data).digest()).decode(), "size": len(data)}
            for name, data in CHECKPOINT.items()
        }
        policy = {"storagePolicy": "wandb-storage-policy-v1", "storagePolicyConfig": {}}
        return {"version": 1, **policy, "contents": contents}

    def _membership(self, version: str) -> dict[str, Any]:
        return {
            "__typename": "ArtifactCollectionMembership",
            "id": f"m-{version}",
            "versionIndex": int(version[1:]),
            "createdAt": "2026-01-01T00:00:00Z",
            "aliases": [
                {"__typename": "ArtifactAlias", "id": name, "alias": name}
                for name, held in self.aliases.items()
                if held == version
            ],
            "artifactCollection": {"__typename": "ArtifactSequence", "name": "tiny", "project": PROJECT},
            "artifact": self._artifact(version),
        }

    def _artifact(self, version: str) -> dict[str, Any]:
        return {
            "__typename": "Artifact",
            "id": version,
            "artifactSequence": {"__typename": "ArtifactSequence", "name": "tiny", "project": PROJECT},
            "versionIndex": int(version[1:]),
            "artifactType": {"name": "model"},
            "description": None,
            "metadata": json.dumps(self.metadata[version]),
            "ttlDurationSeconds": -1,
            "ttlIsInherited": False,
            "tags": [],
            "historyStep": None,
            "state": "COMMITTED",
            "size": 9,
            "digest": version,
            "commitHash": version,
            "fileCount": 2,
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            "aliases": [],
        }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWandb]:
    server = LocalWandb()
    with serving(server.answer) as server.address, pytest.MonkeyPatch.context() as patch:
        home = str(tmp_path_factory.mktemp("wandb"))
        settings = {"MODE": "online", "SILENT": "true", "ERROR_REPORTING": "false", "CONFIG_DIR": home, "CACHE_DIR": home}
        for name, value in {**settings, "BASE_URL": server.address, "API_KEY": "5" * 40, "DATA_DIR": home}.items():
            patch.setenv(f"WANDB_{name}", value)
        wandb.teardown()
        yield server
        wandb.teardown()


@pytest.fixture
def server(running: LocalWandb) -> LocalWandb:
    running.reset()
    return running


@pytest.fixture
def registry(server: LocalWandb) -> WandbRegistry:
    return WandbRegistry(COLLECTION, "production")


def test_a_version_is_found_by_its_name_and_by_alias(registry):
    assert registry.resolve("v0") == V0
    assert registry.resolve("candidate") == V1
    with pytest.raises(RegistryError, match=r"could not find version 'v9' of 'acme/released/tiny': it is not there\."):
        registry.resolve("v9")


def test_the_alias_moves_back_and_away_and_is_read_anew(server, registry):
    assert registry.current() is None
    for to in (V0, V1, V0):
        registry.move_alias(to)
        assert registry.current() == to
    server.aliases["production"] = "v1"  # another writer
    assert registry.current() == V1
    registry.move_alias(None)
    assert registry.current() is None
    assert server.aliases == {"candidate": "v1"}


def test_a_project_that_is_not_there_is_no_missing_alias(server):
    with pytest.raises(RegistryError, match=r"could not read alias 'production' of 'acme/other/tiny': it is not there\."):
        WandbRegistry("acme/other/tiny", "production").current()


def test_a_protected_alias_is_named_as_such_and_stays(server, registry):
    registry.move_alias(V0)
    server.may_alias = False
    with pytest.raises(
        RegistryError, match=r"not allowed to do that \(403\)\. If the alias is protected, only a registry admin"
    ):
        registry.move_alias(V1)
    assert registry.current() == V0


def test_the_verdict_is_kept_in_the_metadata_beside_what_was_there(server, registry):
    registry.annotate(V1, Annotation("block", "1 rule failed.", tags={"report_digest": "a" * 64}))
    verdict = {"outcome": "block", "reason": "1 rule failed.", "report_digest": "a" * 64}
    assert server.metadata == {"v0": {}, "v1": {"loss": 1.5, "memguard": verdict}}
    assert server.aliases == {"candidate": "v1"}


def test_what_is_served_is_what_the_manifest_says(server, registry, tmp_path):
    for name, data in CHECKPOINT.items():
        (tmp_path / name).write_bytes(data)
    with registry.served_files(V1) as folder:
        assert checkpoint_digest(folder) == checkpoint_digest(tmp_path)
    assert not Path(folder).exists()
    server.served["model.safetensors"] = b"weightz"
    with (
        pytest.raises(RegistryError, match=r"could not serve the files of acme/released/tiny version v1: "),
        registry.served_files(V1),
    ):
        pytest.fail("nothing is served")
