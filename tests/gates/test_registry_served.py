"""What may lie around the checkpoint that a registry serves: texts, and nothing that a loader could take."""

from __future__ import annotations

from pathlib import Path

import pytest

from memguard.errors import RegistryError
from memguard.gates.registries.served import find_checkpoint


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder as it was fetched, with a checkpoint in `model`."""
    checkpoint = tmp_path / "served" / "model"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}", encoding="utf-8")
    (checkpoint / "model.safetensors").write_bytes(b"audited")
    return tmp_path / "served"


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "registered_model_meta", "docs/NOTES.md", "trainer_state.json"])
def test_texts_around_a_checkpoint_change_nothing(served: Path, name: str) -> None:
    (served / name).parent.mkdir(exist_ok=True)
    (served / name).write_text("read me", encoding="utf-8")
    assert find_checkpoint(served, cure="") == served / "model"


@pytest.mark.parametrize(
    "name", ["code/loader.py", "python_model.pkl", "optimizer.pt", ".weights.bin", "MLmodel", "model/MLmodel", "conda.yaml"]
)
def test_what_a_loader_could_take_is_refused_around_a_checkpoint(served: Path, name: str) -> None:
    (served / name).parent.mkdir(exist_ok=True)
    (served / name).write_bytes(b"x")
    with pytest.raises(RegistryError, match=rf"that no audit was of: '{name}'\. Log the folder\."):
        find_checkpoint(served, cure="Log the folder.")


def test_a_link_to_a_folder_elsewhere_is_refused_and_not_overlooked(served: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (served / "code").symlink_to(tmp_path / "code", target_is_directory=True)
    with pytest.raises(RegistryError, match="that no audit was of: 'code'"):
        find_checkpoint(served, cure="")
