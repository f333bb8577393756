"""`memguard watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memguard.errors import EvidenceError, RegistryError

SLICE_S = 0.1


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder that the trainer saves its checkpoints in.")],
    plan_path: Annotated[Path, typer.Option("--plan", help="The plan the run is trained with.")],
    config: Annotated[Path | None, typer.Option("--config", help="memguard.yaml; canaries and gate are not used.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Records of the training data (.jsonl or text); default: the config's.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Records of the same kind that were never trained on.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Audit what is there now, and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between looks.")] = 30.0,
    wandb_run: Annotated[
        str | None,
        typer.Option("--wandb-run", help="ENTITY/PROJECT/ID of the training's W&B run; logged to when it has ended."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")] = False,
) -> None:
    """Audit every checkpoint of a run once, as it becomes complete, until Ctrl-C; exit 3 if one is no evidence."""
    from memguard.audit.config import AuditSettings, load_config
    from memguard.audit.one_checkpoint import CheckpointAuditor
    from memguard.audit.start import START_NAME
    from memguard.audit.watch import Watcher
    from memguard.canaries.plan import load_plan
    from memguard.cli import _console, _progress, _require_torch_stack
    from memguard.reporting.wandb_run import WandbRunLog

    _require_torch_stack("an audit")
    loaded = load_config(config) if config is not None else None
    output = run / (loaded.output if loaded is not None else "memguard_audit")
    console = _console(json=json)
    auditor = CheckpointAuditor(
        load_plan(plan_path),
        loaded.audit if loaded is not None else AuditSettings(),
        dp=loaded.dp if loaded is not None else None,
        defence=loaded.defence if loaded is not None else None,
        data=data,
        held_out=held_out,
        start=output / START_NAME,
    )
    watcher = Watcher(
        run,
        auditor,
        output=output,
        run_logger=WandbRunLog(wandb_run, output / "wandb.json") if wandb_run is not None else None,
        interval=interval,
        say=lambda watched, report: _say(console, watched, report),
        progress=lambda: _progress(console),
    )
    if not once:
        console.print(f"watching {run}; Ctrl-C ends it after the audit in hand", markup=False, highlight=False)
    with _Stop() as stop:
        result = watcher.watch(stop, once=once)
    if json:
        typer.echo(result.model_dump_json())
    _end(result, once=once)


def _say(console: Any, watched: Any, report: Any) -> None:
    """One line an outcome; a checkpoint that is not complete is told of with -v alone, since it soon is."""
    import logging

    from memguard.reporting.trackers import flatten_metrics

    if watched.outcome in ("incomplete", "elsewhere"):
        logging.getLogger(__name__).info("%s: %s.", watched.checkpoint, watched.reason)
        return
    text = f"{watched.checkpoint}: {watched.reason or watched.outcome}"
    if watched.outcome == "valid":
        figures = flatten_metrics(report)
        most, count = figures.get("memguard/exposure_max"), figures.get("memguard/extraction_count")
        shown = f"highest exposure {most:.1f} bits, {count:.0f} extracted" if most is not None else "no canary"
        text = f"{watched.checkpoint}: {'' if watched.is_new else 'audited before, '}valid; {shown}"
    style = "bold red" if watched.outcome == "invalid" else None
    console.print(text, style=style, markup=False, highlight=False)


def _end(result: Any, *, once: bool) -> None:
    """Exit 3 where a checkpoint is no evidence, or, with --once, was left; 4 where the W&B run could not be logged to."""
    from memguard.cli import state

    left = [one for one in result.checkpoints if once and one.outcome == "incomplete"]
    bad = [one for one in result.checkpoints if one.outcome == "invalid"]
    for one in [*left, *(bad if state["quiet"] else [])]:
        typer.echo(f"{one.checkpoint}: {one.reason}", err=True)
    if once and not result.checkpoints:
        raise EvidenceError("the run holds no checkpoint: nothing was audited.")
    if result.unlogged is not None and not result.is_unlogged_by_failure:
        typer.echo(result.unlogged, err=True)
    if left or bad:
        raise typer.Exit(3)
    if result.is_unlogged_by_failure:
        raise RegistryError(result.unlogged)


class _Stop:
    """Set by the first Ctrl-C or SIGTERM, so that the audit in hand is ended; a second one ends the process at once.

    Waiting is cut in slices: a lock that a signal handler shares with the code it interrupts may never be got.
    """

    def __init__(self) -> None:
        self._is_set = False

    def __enter__(self) -> _Stop:
        import signal

        self._earlier = {number: signal.signal(number, self._set) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _set(self, *_: object) -> None:
        self._is_set = True
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        import signal

        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        import time

        end = time.monotonic() + timeout
        while not self._is_set and time.monotonic() < end:
            time.sleep(min(SLICE_S, max(0.0, end - time.monotonic())))
        return self._is_set
