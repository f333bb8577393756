"""What a model registry must be able to do for the gate. All that decides lies elsewhere; an adapter only fetches and moves.

An adapter never opens weights by a loader: what is served is hashed as files. Every failure of the registry itself, of the
network or of permissions is a `RegistryError` (exit code 4) whose message names no secret, token or host credential.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ModelVersion:
    """One immutable version of one model in a registry: what an alias points at."""

    model: str
    version: str

    def __str__(self) -> str:
        return f"{self.model} version {self.version}"


@dataclass(frozen=True)
class Annotation:
    """What the gate leaves on a version, pass or not: figures, digests and one sentence; never the text of a secret."""

    outcome: str
    reason: str
    tags: Mapping[str, str] = field(default_factory=dict)  # plain names such as report_digest; an adapter adds its own prefix
    markdown: str = ""  # for registries that show a page


class Registry(Protocol):
    """A model registry with one alias of one model that the gate guards."""

    kind: str
    model: str
    alias: str

    def resolve(self, version: str) -> ModelVersion:
        """The immutable version behind a version or alias as the user wrote it.

        Raises:
            InputError: a name or version that this kind of registry cannot have.
            RegistryError: no such model or version, or the registry refused or is away.
        """
        ...

    def served_files(self, version: ModelVersion) -> contextlib.AbstractContextManager[Path]:
        """The folder of exactly what the registry serves for this version, fetched anew, for the block.

        A partial, truncated or missing artifact is a `RegistryError`, never an empty folder.
        """
        ...

    def current(self) -> ModelVersion | None:
        """The version the alias names now; None where the alias does not exist. Read from the registry, never from a cache."""
        ...

    def move_alias(self, to: ModelVersion | None) -> None:
        """Point the alias at a version, or take it away (None). The old alias stays untouched where this raises."""
        ...

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        """Leave the verdict on a version, as tags and, where there is one, on its page. Repeating it changes nothing."""
        ...
