"""`memguard promote`: the gate, then the alias. Loads no registry's library before a command needs it.

Exit codes are the gate's; 4 where the registry refused or is away, or where an output cannot be written before the move.
Nothing but 0 moves an alias: once it is moved, it is 0 whatever becomes of what is printed about it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memguard.errors import InputError

if TYPE_CHECKING:
    from memguard.audit.report import Decision
    from memguard.gates.promotion import Promotion
    from memguard.gates.registries.protocol import Registry

app = typer.Typer(
    help="Point an alias of a model registry at a version, if the gate passes and the registry serves what was audited.",
    no_args_is_help=True,
)

logger = logging.getLogger(__name__)

OUTPUTS = ("junit", "sarif", "markdown", "gitlab")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model in the registry.")]
Version = Annotated[str, typer.Option("--version", help="The version to promote; its checkpoint is what the report is of.")]
Alias = Annotated[str, typer.Option("--alias", help="The alias that the gate guards.")]


def _options(
    report: Annotated[Path, typer.Option("--report", help="report.json of the checkpoint.")],
    policy: Annotated[str, typer.Option("--policy", help="policy.yaml, or the name of a built-in one.")],
    baseline: Annotated[Path | None, typer.Option("--baseline", help="baseline.json, or a report to compare with.")] = None,
    log: Annotated[Path, typer.Option("--log", help="Every promotion of a model goes into one log.")] = Path(
        "promotions.jsonl"
    ),
    lock_seconds: Annotated[
        float, typer.Option("--lock-timeout", min=0, help="Seconds to wait for another promotion with this log.")
    ] = 600.0,
    require_signature: Annotated[
        Path | None, typer.Option("--require-signature", help="Public keys; report, baseline and policy must be signed by one.")
    ] = None,
    base: Annotated[Path | None, typer.Option("--base", help="Of an adapter: the base it was audited on.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the reason as a page.")] = None,
    gitlab: Annotated[Path | None, typer.Option("--gitlab", help="Write GitLab's code quality report.")] = None,
    github: Annotated[bool, typer.Option("--github", help="Annotations, step summary and outputs of a GitHub job.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")] = False,
) -> None:
    """What every command takes beside its registry; the body is `_promote`."""


def _command(name: str) -> Callable[[Callable[..., tuple[Registry, str]]], None]:
    """Make a command of what gives a registry and a version: its own options, then those that all commands share."""

    def register(find: Callable[..., tuple[Registry, str]]) -> None:
        own = inspect.signature(find, eval_str=True, locals={"Registry": Any}).parameters
        shared = inspect.signature(_options, eval_str=True).parameters

        def run(**given: Any) -> None:
            registry, version = find(**{key: given.pop(key) for key in own})
            outputs = {key: given.pop(key) for key in OUTPUTS}
            _promote(registry, version, outputs=outputs, **given)

        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own.values(), *shared.values())]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        run.__doc__ = find.__doc__
        app.command(name)(run)

    return register


@_command("mlflow")
def _mlflow(
    model: Model,
    version: Version,
    alias: Alias,
    tracking_uri: Annotated[
        str | None, typer.Option("--tracking-uri", help="Default: what MLflow is set to, such as by MLFLOW_TRACKING_URI.")
    ] = None,
) -> tuple[Registry, str]:
    """An alias of a registered model of MLflow; a version is a number or '@alias'."""
    from memguard.gates.registries.mlflow_registry import MlflowRegistry

    return MlflowRegistry(model, alias, tracking_uri=tracking_uri), version


@_command("wandb")
def _wandb(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION", help="Such as wandb-registry-model/NAME.")],
    version: Version,
    alias: Alias,
    queue: Annotated[Path, typer.Option("--queue", help="Keeps what was asked for while W&B could not be reached.")] = Path(
        "wandb_promotions.jsonl"
    ),
) -> tuple[Registry, str]:
    """An alias of a collection of the W&B registry; protect it there, so that this job alone may move it."""
    from memguard.gates.registries.wandb_registry import WandbRegistry

    return WandbRegistry(collection, alias, queue=queue), version


@_command("hub")
def _hub(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME of a model repository.")],
    alias: Annotated[str, typer.Option("--alias", help="The tag that the gate guards.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Commit, branch or tag to promote.")] = None,
    pull_request: Annotated[
        int | None, typer.Option("--pull-request", min=1, help="Number of a pull request: a pass merges it.")
    ] = None,
) -> tuple[Registry, str]:
    """A tag of a model repository on the Hugging Face Hub, by a revision or by a pull request."""
    from memguard.gates.registries.hub_registry import HubRegistry

    if (revision is None) == (pull_request is None):
        raise InputError("give either --revision REVISION or --pull-request NUMBER.")
    return HubRegistry(repo, alias, pull_request=pull_request), revision or f"refs/pr/{pull_request}"


@_command("directory")
def _directory(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="Folder that holds MODEL/versions/VERSION.")],
    model: Model,
    version: Version,
    alias: Alias,
) -> tuple[Registry, str]:
    """An alias in a folder: ROOT/MODEL/aliases/ALIAS names one of ROOT/MODEL/versions."""
    from memguard.gates.registries.directory_registry import DirectoryRegistry

    return DirectoryRegistry(root, model, alias), version


def _promote(
    registry: Registry, version: str, *, report: Path, github: bool, json: bool, outputs: dict[str, Path | None], **inputs: Any
) -> None:
    from memguard.cli import _console, _refuse_to_overwrite, _tell_ci, state
    from memguard.gates.commands import DECISION_NAME
    from memguard.gates.promotion import promote
    from memguard.gates.terminal import format_decision

    read = [inputs[name] for name in ("policy", "baseline", "log") if inputs[name] is not None]
    for file in outputs.values():
        _refuse_to_overwrite(file, [report, report.with_name(DECISION_NAME), *map(Path, read)])

    def write(decision: Decision) -> None:
        _tell_ci(decision, report, outputs, github=github, json=json)

    # Outputs are written before the alias moves, and again where the move fails: a place that cannot be written moves nothing.
    with _interrupted_by_termination():
        done = promote(registry, report, version=version, on_decision=write, **inputs)
    try:
        console = _console(json=json)
        console.print(format_decision(done.decision))
        console.print(_sentence(done, registry.alias), markup=False, highlight=False)
        if json:
            typer.echo(_as_json(done, registry))
        elif state["quiet"] and done.decision.exit_code:
            typer.echo(done.decision.reason, err=True)
    except Exception:  # what became of the alias is the exit code, whoever still listens
        logger.debug("what became of the promotion could not be printed", exc_info=True)
    raise typer.Exit(done.decision.exit_code)


@contextlib.contextmanager
def _interrupted_by_termination() -> Iterator[None]:
    """A job that is cancelled puts the alias back as one that is interrupted by hand does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _sentence(done: Promotion, alias: str) -> str:
    old = f"version {done.previous.version}" if done.previous is not None else "nothing"
    what = {
        "moved": f"alias '{alias}' of {done.version.model} named {old} and names version {done.version.version} now",
        "already promoted": f"already promoted: alias '{alias}' of {done.version.model} names {old} by this decision",
        "refused": f"refused: alias '{alias}' of {done.version.model} still names {old}",
    }[done.action]
    return f"{what} (attempt {done.attempt} of this plan)"


def _as_json(done: Promotion, registry: Registry) -> str:
    import json

    return json.dumps(
        {
            "action": done.action,
            "registry": registry.kind,
            "model": done.version.model,
            "alias": registry.alias,
            "version": done.version.version,
            "previous": done.previous.version if done.previous is not None else None,
            "attempt": done.attempt,
            "decision": done.decision.model_dump(mode="json"),
        }
    )
