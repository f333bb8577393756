"""A folder as a registry: an atomic pointer, names that stay inside, and no link that leads out."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from memguard.errors import InputError, RegistryError
from memguard.gates.registries.directory_registry import DirectoryRegistry
from memguard.gates.registries.protocol import Annotation, ModelVersion, Registry

V1, V2 = ModelVersion("tiny", "v1"), ModelVersion("tiny", "v2")


@pytest.fixture
def root(tmp_path):
    """A registry of one model with two versions and no alias."""
    for version in ("v1", "v2"):
        folder = tmp_path / "tiny" / "versions" / version
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(version.encode())
    return tmp_path


@pytest.fixture
def registry(root):
    registry: Registry = DirectoryRegistry(root, "tiny", "champion")  # keeps to the protocol
    return registry


def _pointer(root: Path) -> Path:
    return root / "tiny" / "aliases" / "champion"


def test_an_alias_is_set_moved_and_taken_away(root, registry):
    assert registry.current() is None
    registry.move_alias(V1)
    assert (registry.current(), _pointer(root).read_text()) == (V1, "v1\n")
    registry.move_alias(V2)
    assert (registry.current(), registry.resolve("@champion"), registry.resolve("v1")) == (V2, V2, V1)
    registry.move_alias(None)
    registry.move_alias(None)
    assert registry.current() is None
    assert list(_pointer(root).parent.iterdir()) == []


def test_what_is_served_is_the_folder_itself(root, registry):
    with registry.served_files(V1) as folder:
        assert folder == root / "tiny" / "versions" / "v1"


def test_the_verdict_lies_beside_the_version_and_the_last_one_counts(root, registry):
    registry.annotate(V1, Annotation("block", "Blocked.", {"report_digest": "a"}))
    registry.annotate(V1, Annotation("pass", "Passed.", {"report_digest": "b"}))
    written = json.loads((root / "tiny" / "annotations" / "v1.json").read_text())
    assert written == {"outcome": "pass", "reason": "Passed.", "report_digest": "b"}
    assert sorted(path.name for path in (root / "tiny" / "versions" / "v1").iterdir()) == ["config.json", "model.safetensors"]


BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "../v1",
    "/etc",
    "C:x",
    "v1.",
    "v 1",
    "v1\n",
    "é",
    "con",
    "NUL.txt",
    "lpt1",
    "a" * 129,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_plain_name_is_refused_everywhere(root, registry, name):
    with pytest.raises(InputError, match="version must be a plain name of letters"):
        registry.resolve(name)
    with pytest.raises(InputError, match="alias must be a plain name of letters"):
        registry.resolve(f"@{name}")
    with pytest.raises(InputError, match="model must be a plain name of letters"):
        DirectoryRegistry(root, name, "champion")
    with pytest.raises(InputError, match="alias must be a plain name of letters"):
        DirectoryRegistry(root, "tiny", name)


@pytest.mark.parametrize("name", ["v1", "1", "a", "2026-01-01_b.3", "v1+cpu", "console", "a" * 128])
def test_plain_names_are_taken(root, name):
    (root / "tiny" / "versions" / name).mkdir(exist_ok=True)
    assert DirectoryRegistry(root, "tiny", name).resolve(name).version == name


def test_what_is_not_there_is_said(root, registry):
    with pytest.raises(RegistryError, match="tiny version v9 does not exist in the directory registry"):
        registry.resolve("v9")
    with pytest.raises(RegistryError, match="model 'other' does not exist"):
        DirectoryRegistry(root, "other", "champion").current()
    with pytest.raises(RegistryError, match="'tiny' has no alias 'champion'"):
        registry.resolve("@champion")
    with pytest.raises(RegistryError, match="tiny version v9 does not exist"):
        registry.move_alias(ModelVersion("tiny", "v9"))
    assert registry.current() is None


def _outside(root: Path) -> Path:
    folder = root / "outside"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def test_a_version_that_is_a_link_is_refused(root, registry):
    (root / "tiny" / "versions" / "v3").symlink_to(_outside(root), target_is_directory=True)
    with pytest.raises(RegistryError, match="tiny version v3 must not be a symbolic link"):
        registry.resolve("v3")


@pytest.mark.parametrize("name", ["tiny", "versions"])
def test_a_folder_on_the_way_that_is_a_link_is_refused(root, registry, name):
    real = root / "tiny" if name == "tiny" else root / "tiny" / "versions"
    real.rename(root / "moved")
    real.symlink_to(root / "moved", target_is_directory=True)
    with pytest.raises(RegistryError, match="must not be a symbolic link"):
        registry.resolve("v1")


@pytest.mark.parametrize("make", ["file", "folder", "dangling", "deep", "fifo"])
def test_a_link_or_anything_but_files_inside_a_version_is_refused(root, registry, make):
    folder, outside = root / "tiny" / "versions" / "v1", _outside(root)
    (folder / "sub").mkdir()
    if make == "fifo":
        os.mkfifo(folder / "odd")
    elif make == "deep":
        (folder / "sub" / "odd").symlink_to(outside / "model.safetensors")
    else:
        target = {"file": outside / "model.safetensors", "folder": outside, "dangling": root / "nowhere"}[make]
        (folder / "odd").symlink_to(target)
    only_plain = r"tiny version v1 must hold plain files and folders only, got '(sub/)?odd'"
    with pytest.raises(RegistryError, match=only_plain), registry.served_files(V1):
        pass


def test_an_empty_version_is_refused(root, registry):
    (root / "tiny" / "versions" / "v3" / "sub").mkdir(parents=True)
    with (
        pytest.raises(RegistryError, match="tiny version v3 holds no files"),
        registry.served_files(ModelVersion("tiny", "v3")),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"../v1", b"v1 v2", b"\xff\xfe", b"v1\n\nv2", b"v" * 4096])
def test_an_alias_that_holds_no_name_is_refused_and_stays(root, registry, content):
    _pointer(root).parent.mkdir()
    _pointer(root).write_bytes(content)
    for ask in (registry.current, lambda: registry.move_alias(V1), lambda: registry.resolve("@champion")):
        with pytest.raises(RegistryError, match="alias 'champion' of 'tiny' does not hold the name of a version"):
            ask()
    assert _pointer(root).read_bytes() == content


@pytest.mark.parametrize("make", ["link", "folder", "linked parent"])
def test_an_alias_that_is_no_plain_file_is_refused(root, registry, make):
    outside = _outside(root)
    (outside / "champion").write_text("v1\n")
    if make == "linked parent":
        _pointer(root).parent.symlink_to(outside, target_is_directory=True)
    else:
        _pointer(root).parent.mkdir()
        _pointer(root).symlink_to(outside / "champion") if make == "link" else _pointer(root).mkdir()
    for ask in (registry.current, lambda: registry.move_alias(V2), lambda: registry.move_alias(None)):
        with pytest.raises(RegistryError, match="alias 'champion' of 'tiny' must be a plain file"):
            ask()
    assert (outside / "champion").read_text() == "v1\n"


def test_an_annotation_is_not_written_through_a_link(root, registry):
    (root / "tiny" / "annotations").symlink_to(_outside(root), target_is_directory=True)
    with pytest.raises(RegistryError, match="'annotations/v1.json' of 'tiny' must not be a symbolic link"):
        registry.annotate(V1, Annotation("pass", "Passed."))


def test_a_place_that_cannot_be_written_leaves_the_old_alias(root, registry, monkeypatch):
    registry.move_alias(V1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RegistryError, match="'aliases/champion' of 'tiny' cannot be written: No space left on device"):
        registry.move_alias(V2)
    assert registry.current() == V1
    assert [path.name for path in _pointer(root).parent.iterdir()] == ["champion"]


def test_files_where_folders_belong_are_infrastructure(root, registry):
    (root / "tiny" / "annotations").write_text("")
    with pytest.raises(RegistryError, match="cannot be written: the folder does not allow it"):
        registry.annotate(V1, Annotation("pass", "Passed."))
    (root / "tiny" / "aliases").write_text("")
    with pytest.raises(RegistryError, match="alias 'champion' of 'tiny' cannot be read: Not a directory"):
        registry.current()


def test_an_alias_can_be_read_by_others(root, registry):
    registry.move_alias(V1)
    assert stat.S_IMODE(_pointer(root).stat().st_mode) == 0o644
