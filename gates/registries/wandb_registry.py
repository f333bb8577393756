"""A collection of the W&B registry behind the gate: an alias, metadata on versions, files as they are served.

The one thing on the server that stops others from moving the alias is to make it a protected alias, which only registry admins
may add: give such a key to the gate job alone. Offline nothing can be promoted; what was asked for is kept in a local file.
Needs the extra `wandb`.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memguard.errors import InputError, MemguardError, MissingExtraError, RegistryError
from memguard.files import read_text, write_text_atomic
from memguard.gates.registries.failures import describe_failure, status_of
from memguard.gates.registries.protocol import Annotation, ModelVersion
from memguard.gates.registries.served import find_checkpoint

METADATA = "memguard"
MAX_REASON = 500
TIMEOUT_S = 20
LINK = "Link it first: run.link_artifact(artifact, 'wandb-registry-model/NAME', aliases=['candidate'])."
CURE = "Log the checkpoint folder as it is: artifact.add_dir(folder), and link that artifact."
PROTECTED = (
    "If the alias is protected, only a registry admin or an admin service account may move it: "
    "give such a key to the gate job alone."
)


class _OfflineError(RegistryError):
    """W&B was not asked at all."""


class WandbRegistry:
    """One alias of one collection of the W&B registry; a `Registry`.

    Args:
        collection: `wandb-registry-model/NAME`, or `ENTITY/PROJECT/NAME`.
        alias: the alias that the gate guards. `latest` and `v0`, `v1`, ... are W&B's own.
        queue: file that keeps, one JSON line each, the promotions asked for while W&B could not be reached.

    Raises:
        InputError: a name that W&B cannot have.

    Example:
        >>> WandbRegistry("wandb-registry-model/tiny", "team/production")
        Traceback (most recent call last):
        ...
        memguard.errors.InputError: alias must be a name without '/' and ':', got 'team/production'.
    """

    kind = "wandb"

    def __init__(self, collection: str, alias: str, *, queue: Path | None = None) -> None:
        if not re.fullmatch(r"[^/:]+(/[^/:]+){1,2}", collection):
            raise InputError(f"collection must be 'wandb-registry-model/NAME' or 'ENTITY/PROJECT/NAME', got '{collection}'.")
        if not re.fullmatch(r"[^/:]+", alias):
            raise InputError(f"alias must be a name without '/' and ':', got '{alias}'.")
        if re.fullmatch(r"latest|v\d+", alias):
            raise InputError(f"alias must not be one of W&B's own ('latest', 'v0', ...), got '{alias}'.")
        self.model = collection
        self.alias = alias
        self.queue = queue

    def resolve(self, version: str) -> ModelVersion:
        """The version behind `v3` or an alias of the collection. See `Registry.resolve`."""
        if "/" in version:
            raise InputError(f"version must be in the collection, got the artifact '{version}'. {LINK}")
        if not version or ":" in version:
            raise InputError(f"version must be 'v3' or an alias of the collection, got '{version}'.")
        request = json.dumps({"collection": self.model, "version": version, "alias": self.alias})
        try:
            with self._asked(f"find version '{version}' of '{self.model}'") as api:
                found = ModelVersion(self.model, str(self._artifact(api, version).version))
        except _OfflineError as error:
            raise RegistryError(f"{error} {self._keep(request)}") from None
        self._forget(request)
        return found

    @contextlib.contextmanager
    def served_files(self, version: ModelVersion) -> Iterator[Path]:
        """The checkpoint folder in the artifact of a version, downloaded past the cache. See `Registry.served_files`."""
        with tempfile.TemporaryDirectory(prefix="memguard-") as folder:
            with self._asked(f"serve the files of {version}") as api:
                artifact = self._artifact(api, version.version)
                artifact.download(root=folder, skip_cache=True)
                artifact.verify(root=folder)
            yield find_checkpoint(Path(folder), cure=CURE)

    def current(self) -> ModelVersion | None:
        """The version that the alias names now, asked anew. See `Registry.current`."""
        with self._asked(f"read alias '{self.alias}' of '{self.model}'") as api:
            try:
                artifact = self._artifact(api, self.alias)
            except Exception as error:
                if _says_not_found(error) and "membership" in str(error):  # and not the whole project
                    return None
                raise
            return ModelVersion(self.model, str(artifact.version))

    def move_alias(self, to: ModelVersion | None) -> None:
        """Add the alias to a version; W&B takes it from the one that held it. See `Registry.move_alias`."""
        before = self.current()
        if before == to:
            return
        try:
            with self._asked(f"move alias '{self.alias}' of '{self.model}'") as api:
                self._move(api, before, to)
        except RegistryError as error:
            # W&B saves figures after aliases: the alias may have moved although the save failed.
            with contextlib.suppress(RegistryError):
                if self.current() == to:
                    return
            raise error from None

    def _move(self, api: Any, before: ModelVersion | None, to: ModelVersion | None) -> None:
        target = to or before
        if target is None:
            return
        artifact = self._artifact(api, target.version)
        others = [name for name in artifact.aliases if name != self.alias]
        artifact.aliases = others if to is None else [*others, self.alias]
        artifact.save()

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        """Leave the verdict in the metadata of a version, under `memguard`; read back, since W&B skips it without a word."""
        verdict = {"outcome": note.outcome, "reason": note.reason[:MAX_REASON], **note.tags}
        with self._asked(f"write the metadata of {version}") as api:
            artifact = self._artifact(api, version.version)
            if artifact.metadata.get(METADATA) == verdict:
                return
            artifact.metadata = {**artifact.metadata, METADATA: verdict}
            artifact.save()
        with self._asked(f"read the metadata of {version}") as api:
            if self._artifact(api, version.version).metadata.get(METADATA) != verdict:
                raise RegistryError(f"W&B did not keep the metadata of {version}: the key may not write to its source project.")

    def _artifact(self, api: Any, version: str) -> Any:
        return api.artifact(f"{self.model}:{version}")

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[Any]:
        """A fresh `wandb.Api`, with bounded waiting; any failure becomes one sentence without W&B's own words."""
        try:
            yield self._api()
        except MemguardError:
            raise
        except Exception as error:
            why = "it is not there" if _says_not_found(error) else describe_failure(error)
            advice = f" {PROTECTED}" if _says_forbidden(error) and "alias" in what else ""
            raise RegistryError(f"W&B could not {what}: {why}.{advice}") from None

    def _api(self) -> Any:
        try:
            import wandb
        except ModuleNotFoundError:
            raise MissingExtraError("promoting in W&B", "wandb") from None
        mode = wandb.setup().settings.mode
        if mode in ("offline", "dryrun", "disabled"):
            raise _OfflineError(f"W&B is switched off here (mode {mode}).")
        try:
            return wandb.Api(timeout=TIMEOUT_S)
        except wandb.errors.UsageError:
            raise _OfflineError("there is no key for W&B here (WANDB_API_KEY or 'wandb login').") from None

    def _keep(self, request: str) -> str:
        """Write down, once, what was asked for; says where."""
        again = "Run the same command again where W&B can be reached."
        if self.queue is None:
            return again
        if request not in (waiting := self._waiting(self.queue)):
            write_text_atomic(self.queue, "".join(f"{line}\n" for line in [*waiting, request]))
        return f"The request is kept in '{self.queue}'. {again}"

    def _forget(self, request: str) -> None:
        """W&B was reached: the request waits no longer, whatever comes of it."""
        if self.queue is not None and request in (waiting := self._waiting(self.queue)):
            write_text_atomic(self.queue, "".join(f"{line}\n" for line in waiting if line != request))

    def _waiting(self, queue: Path) -> list[str]:
        return read_text(queue, what="queue").splitlines() if queue.exists() else []


def _says_not_found(error: Exception) -> bool:
    """Whether W&B answered that there is none: its library then wraps a `ValueError`, and no failed exchange."""
    return isinstance(getattr(error, "exc", None), ValueError) and "not found" in str(error)


def _says_forbidden(error: Exception) -> bool:
    inner = getattr(error, "exc", None)
    return "permission" in str(error) or (inner is not None and status_of(inner) in (401, 403))
