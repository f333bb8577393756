"""MLflow's model registry behind the gate: an alias of a registered model, tags on its versions, files as they are served.

Nothing on the server stops another writer from moving the alias; permissions must. Answers come from the registry itself, never
from a search. Needs the extra `mlflow`; a tracking address that is a database needs the full package of MLflow.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from memguard.errors import InputError, MemguardError, MissingExtraError, RegistryError
from memguard.gates.registries.failures import describe_failure
from memguard.gates.registries.protocol import Annotation, ModelVersion
from memguard.gates.registries.served import find_checkpoint

PREFIX = "memguard."
MAX_REASON = 500
PENDING = "pending"
# What MLflow reads anew for each request, and would otherwise wait for up to a quarter of an hour; a user's own value wins.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
CURE = "Log the checkpoint folder as it is: mlflow.log_artifacts(folder, 'model'), and register that."


class MlflowRegistry:
    """One alias of one registered model of MLflow 3; a `Registry`.

    Args:
        model: name of the registered model.
        alias: the alias that the gate guards. `latest` and `v1`, `v2`, ... are MLflow's own.
        tracking_uri: where the registry is; default: what MLflow is set to, such as by `MLFLOW_TRACKING_URI`.

    Raises:
        InputError: a name that MLflow cannot have.

    Example:
        >>> MlflowRegistry("tiny", "latest")
        Traceback (most recent call last):
        ...
        memguard.errors.InputError: alias must not be one of MLflow's own ('latest', 'v1', ...), got 'latest'.
    """

    kind = "mlflow"

    def __init__(self, model: str, alias: str, *, tracking_uri: str | None = None) -> None:
        if not model or re.search(r"[/:]", model):
            raise InputError(f"model must be a name without '/' and ':', got '{model}'.")
        _check_alias(alias)
        if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise InputError(f"alias must not be one of MLflow's own ('latest', 'v1', ...), got '{alias}'.")
        self.model = model
        self.alias = alias
        self.tracking_uri = tracking_uri

    def resolve(self, version: str) -> ModelVersion:
        """The version behind a number or `@alias`. See `Registry.resolve`."""
        alias = version.removeprefix("@")
        if version.startswith("@"):
            _check_alias(alias)
        elif not re.fullmatch(r"[0-9]+", version):
            raise InputError(f"version must be a number or '@alias', got '{version}'.")
        with self._asked(f"find version '{version}' of '{self.model}'") as client:
            by_alias = version.startswith("@")
            found = _by_alias(client, self.model, alias) if by_alias else client.get_model_version(self.model, version)
        if found.status != "READY":
            raise RegistryError(f"version {found.version} of '{self.model}' is not ready in MLflow yet ({found.status}).")
        return ModelVersion(self.model, str(found.version))

    @contextlib.contextmanager
    def served_files(self, version: ModelVersion) -> Iterator[Path]:
        """The checkpoint folder in the artifacts of a version, downloaded anew. See `Registry.served_files`."""
        with tempfile.TemporaryDirectory(prefix="memguard-") as folder:
            with self._asked(f"serve the files of {version}") as client:
                from mlflow.artifacts import download_artifacts

                uri = client.get_model_version_download_uri(version.model, version.version)
                served = Path(download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=self.tracking_uri))
            yield find_checkpoint(served, cure=CURE)

    def current(self) -> ModelVersion | None:
        """The version that the alias names now. See `Registry.current`."""
        with self._asked(f"read the aliases of '{self.model}'") as client:
            number = client.get_registered_model(self.model).aliases.get(self.alias)
        return None if number is None else ModelVersion(self.model, str(number))

    def move_alias(self, to: ModelVersion | None) -> None:
        """Set or delete the alias, in one request. See `Registry.move_alias`."""
        with self._asked(f"move alias '{self.alias}' of '{self.model}'") as client:
            if to is None:
                client.delete_registered_model_alias(self.model, self.alias)
            else:
                client.set_registered_model_alias(self.model, self.alias, to.version)

    def annotate(self, version: ModelVersion, note: Annotation) -> None:
        """Leave tags `memguard.*`. The outcome is *pending* until all others are set: none stands beside another's figures."""
        tags = [("outcome", PENDING), *note.tags.items(), ("reason", note.reason[:MAX_REASON]), ("outcome", note.outcome)]
        with self._asked(f"tag {version}") as client:
            for name, value in tags:
                client.set_model_version_tag(version.model, version.version, PREFIX + name, value)

    @contextlib.contextmanager
    def _asked(self, what: str) -> Iterator[Any]:
        """A client, with bounded waiting; any failure becomes one sentence without MLflow's own words."""
        try:
            with _bounded_waiting():
                yield self._client()
        except MemguardError:
            raise
        except Exception as error:
            raise RegistryError(f"MLflow could not {what}: {describe_failure(error)}.") from None

    def _client(self) -> Any:
        try:
            mlflow: Any = importlib.import_module("mlflow")
        except ModuleNotFoundError:
            raise MissingExtraError("promoting in MLflow", "mlflow") from None
        if self.tracking_uri is None and not mlflow.is_tracking_uri_set():
            raise InputError("the address of MLflow must be given or set as MLFLOW_TRACKING_URI, got neither.")
        uri = self.tracking_uri or mlflow.get_tracking_uri()
        _check_database(uri)
        return mlflow.MlflowClient(tracking_uri=uri)


def _check_alias(alias: str) -> None:
    if not re.fullmatch(r"[\w-]+", alias):
        raise InputError(f"alias must hold letters, digits, '_' and '-' only, got '{alias}'.")


def _by_alias(client: Any, model: str, alias: str) -> Any:
    try:
        return client.get_model_version_by_alias(model, alias)
    except Exception as error:
        if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":  # what a database answers for a missing alias
            raise RegistryError(f"MLflow has no alias '{alias}' of '{model}'.") from None
        raise


def _check_database(uri: str) -> None:
    """MLflow makes a database that is not there, so that a mistyped address would be an empty registry."""
    if re.match(r"(sqlite|postgresql|mysql|mssql)[+:]", uri):
        missing = [name for name in ("sqlalchemy", "alembic", "sqlparse") if importlib.util.find_spec(name) is None]
        if missing:
            raise RegistryError(f"MLflow needs {', '.join(missing)} to open a database: pip install mlflow.")
    path = Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0]))
    if uri.startswith("sqlite:///") and not path.is_file():
        raise RegistryError(f"MLflow's database '{path}' does not exist.")


@contextlib.contextmanager
def _bounded_waiting() -> Iterator[None]:
    """Wait about a minute for a dead server. Settings are those of the process, since MLflow has no others."""
    ours = {name: value for name, value in PATIENCE.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
