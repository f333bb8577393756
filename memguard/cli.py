"""The command line. Loads nothing heavy before a command needs it: `gate` and `report` run without torch.

Exit codes: 0 done or pass, 1 a rule or the pre-flight failed, 2 usage or unreadable input, 3 no evidence, 4 infrastructure.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from memguard import cli_index, cli_keys, cli_promote, cli_propensity, cli_watch
from memguard.errors import CanaryError, EvidenceError, InputError, MemguardError

NOT_REACHED, USAGE, NO_EVIDENCE, INFRASTRUCTURE = 1, 2, 3, 4

app = typer.Typer(
    name="memguard",
    help="Measures how much of its training data a language model memorises, and blocks the release when the number says so.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_promote.app, name="promote")
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_index.index_app, name="index")
state: dict[str, bool] = {"quiet": False, "speaks": True}  # of several ranks, the first one speaks

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]


def _console(*, json: bool = False) -> Console:
    """Where people read: stdout, or stderr when stdout carries JSON."""
    return Console(stderr=json, quiet=state["quiet"] or not state["speaks"], soft_wrap=not sys.stdout.isatty())


def _version(asked: bool) -> None:
    if asked:
        import memguard

        typer.echo(f"memguard {memguard.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what was asked for and errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what is being done.")] = False,
) -> None:
    state["quiet"] = quiet
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=Console(stderr=True), show_path=False, show_time=False)],
        force=True,
    )


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write memguard.yaml and policy.yaml.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented memguard.yaml and policy.yaml."""
    from memguard.starter import write_starter_files

    for path in write_starter_files(folder, force=force):
        _console().print(f"wrote {path}")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="memguard.yaml")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: the config's plan.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a plan that exists.")] = False,
) -> None:
    """Draw canaries and controls; the file holds every secret (mode 0600)."""
    _require_torch_stack("drawing a plan")
    from memguard.audit.config import load_config
    from memguard.canaries.drawing import draw_plan

    settings = load_config(config)
    target = output or settings.plan
    if target.exists() and not force:
        raise InputError(f"plan '{target}' exists already. A trained plan cannot be drawn again; use --force to replace it.")
    drawn = draw_plan(settings.canaries, _load_tokenizer(tokenizer))
    drawn.save(target, overwrite=force)
    roles = [canary.role for canary in drawn.canaries]
    _console().print(
        f"wrote {target}: {roles.count('canary')} canaries, {roles.count('control')} controls, "
        f"{roles.count('positive_control')} positive controls, digest {drawn.digest[:16]}"
    )
    for one in drawn.formats:
        _console().print(f"  {one.name}: {one.secret.kind}, {one.secret_space_size} candidates, join {one.join}")


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="memguard.yaml")],
    data: Annotated[Path, typer.Option("--data", help="Training data: JSON lines, or one text a line.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer.")],
    max_length: Annotated[int | None, typer.Option("--max-length", min=2, help="Tokens a row.")] = None,
    packing: Annotated[str, typer.Option("--packing", help="none, fixed, bfd or wrapped.")] = "none",
    completion_only: Annotated[bool, typer.Option("--completion-only", help="Prompts are out of the loss.")] = False,
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint, to prove that gradients reach it.")] = None,
    json: JsonFlag = False,
) -> None:
    """Will every canary reach the loss? Nothing is trained or written; exit 1 if one will not."""
    _require_torch_stack("the pre-flight")
    from memguard.audit.check import check_plan
    from memguard.audit.config import load_config
    from memguard.audit.offline import load_checkpoint
    from memguard.audit.training_rows import parse_packing
    from memguard.reporting.check import check_lines, check_table

    result = check_plan(
        load_config(config),
        data,
        _load_tokenizer(tokenizer),
        packing=parse_packing(packing),
        max_length=max_length,
        completion_only=completion_only,
        model=load_checkpoint(model)[0] if model is not None else None,
    )
    console = _console(json=json)
    console.print(check_table(result))
    for line in check_lines(result):
        console.print(line, markup=False, highlight=False)
    if json:
        typer.echo(result.model_dump_json())
    elif state["quiet"] and not result.reaches_loss:
        typer.echo(result.failures[0], err=True)
    if not result.reaches_loss:
        raise typer.Exit(NOT_REACHED)


@app.command()
def audit(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoint folders; several give a trend.")],
    plan_path: Annotated[Path, typer.Option("--plan", help="The plan the run was trained with.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the reports.")],
    config: Annotated[Path | None, typer.Option("--config", help="memguard.yaml; its audit and dp parts are used.")] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Records of the training data (.jsonl or text); default: the config's.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Records of the same kind that were never trained on.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="Index of the training corpus, for audit.propensity; default: the config's.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", help="Checkpoint of a model that never saw the records.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--start", help="Checkpoint that training began from, to show what training added.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Audit checkpoints; exit 3 if a report is no evidence. Under torchrun, its ranks share the work."""
    _require_torch_stack("an audit")
    from memguard.audit.checkpoints import audit_checkpoints
    from memguard.audit.config import AuditSettings, load_config
    from memguard.audit.offline import joined_ranks
    from memguard.audit.written import write_reports
    from memguard.canaries.plan import load_plan

    with joined_ranks(os.environ) as team:
        state["speaks"] = team.rank == 0
        logging.disable(logging.NOTSET if state["speaks"] else logging.WARNING)
        loaded = load_config(config) if config is not None else None
        with _progress(_console(json=json)) as advance:
            reports = audit_checkpoints(
                checkpoints,
                load_plan(plan_path),
                loaded.audit if loaded is not None else AuditSettings(),
                dp=loaded.dp if loaded is not None else None,
                defence=loaded.defence if loaded is not None else None,
                data=data,
                held_out=held_out,
                reference=reference,
                index=index,
                start=start,
                progress=advance,
            )
        if state["speaks"]:
            write_reports(reports, checkpoints, output)
            _show(reports, checkpoints, json=json)
        team.gather("reports are written", None)  # a rank that left earlier would have the first one stopped
    if any(report.status == "invalid" for report in reports):
        raise typer.Exit(NO_EVIDENCE)


def _show(reports: list[Any], checkpoints: list[Path], *, json: bool) -> None:
    from memguard.documents import sealed_json
    from memguard.reporting.terminal import exposure_table, findings_lines

    console = _console(json=json)
    for folder, report in zip(checkpoints, reports, strict=True):
        console.print(exposure_table(report, title=folder.name))
        for line in findings_lines(report):
            console.print(line, markup=False, highlight=False)
        for reason in report.invalid_reasons:
            console.print(f"no evidence: {reason}", style="bold red")
    if json:
        typer.echo(sealed_json(reports[-1]), nl=False)


app.command()(cli_watch.watch)


@app.command()
def gate(
    report: Annotated[Path, typer.Argument(help="report.json of a checkpoint.")],
    policy: Annotated[str, typer.Option("--policy", help="policy.yaml, or the name of a built-in one.")],
    baseline: Annotated[Path | None, typer.Option("--baseline", help="baseline.json, or a report to compare with.")] = None,
    accept: Annotated[Path | None, typer.Option("--accept", help="Write the report into this baseline.")] = None,
    by: Annotated[str | None, typer.Option("--by", help="Who accepts.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why.")] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="With --accept: later releases may not drift from this one.")
    ] = False,
    require_signature: Annotated[
        Path | None, typer.Option("--require-signature", help="Public keys: report, baseline and policy must be signed.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: decision.json beside the report.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the reason as a page of markdown.")] = None,
    gitlab: Annotated[Path | None, typer.Option("--gitlab", help="Write GitLab's code quality report.")] = None,
    github: Annotated[bool, typer.Option("--github", help="Print annotations; add to the step's summary and outputs.")] = False,
    json: JsonFlag = False,
) -> None:
    """May this checkpoint ship? Exit 0 pass, 1 block, 3 no evidence. With --accept: 0 when the report was accepted."""
    from memguard.documents import sealed_json
    from memguard.gates.commands import format_decision, gate_report

    files = {"junit": junit, "sarif": sarif, "markdown": markdown, "gitlab": gitlab}
    inputs = [report, Path(policy), baseline, accept, output or report.with_name("decision.json")]
    for file in files.values():
        _refuse_to_overwrite(file, [path for path in inputs if path is not None])
    decision = gate_report(
        report,
        policy=policy,
        baseline=baseline,
        accept=accept,
        by=by,
        reason=reason,
        pin=anchor,
        require_signature=require_signature,
        output=output,
    )
    _tell_ci(decision, report, files, github=github, json=json)
    _console(json=json).print(format_decision(decision))
    if json:
        typer.echo(sealed_json(decision), nl=False)
    elif state["quiet"] and decision.exit_code:
        typer.echo(decision.reason, err=True)
    if accept is not None:
        _console(json=json).print(f"accepted into {accept}")
    raise typer.Exit(0 if accept is not None else decision.exit_code)


def _tell_ci(decision: Any, report: Path, files: dict[str, Path | None], *, github: bool, json: bool) -> None:
    """Files and annotations for continuous integration, where they were asked for or a GitHub job runs this."""
    on_github = github or os.environ.get("GITHUB_ACTIONS") == "true"
    if not on_github and not any(files.values()):
        return
    from memguard.gates.reporters import write_outputs

    for line in write_outputs(decision, str(report), **files, github=on_github, environment=os.environ):
        typer.echo(line, err=json)


app.command("sign")(cli_keys.sign_command)
app.command("trace")(cli_index.trace)
app.command()(cli_propensity.propensity)


@app.command()
def report(
    report_path: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json")],
    decision: Annotated[Path | None, typer.Option("--decision", help="decision.json to show with it.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write a page of markdown.")] = None,
) -> None:
    """Render a report again, as a table, a page or markdown."""
    from memguard.audit.report import load_decision, load_report
    from memguard.files import write_text_atomic
    from memguard.reporting import render_html, render_markdown
    from memguard.reporting.terminal import exposure_table

    outputs = [path.resolve() for path in (html, markdown) if path is not None]
    if {report_path.resolve(), decision.resolve() if decision is not None else None} & {*outputs}:
        raise InputError("a page must not be written over the report or the decision; give another file name.")
    document = load_report(report_path)
    verdict = load_decision(decision) if decision is not None else None
    if html is not None:
        write_text_atomic(html, render_html(document, verdict))
    if markdown is not None:
        write_text_atomic(markdown, render_markdown(document, verdict))
    _console().print(exposure_table(document, title=report_path.name))


@app.command()
def compare(
    reports: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT...",
            help="Two report.json: without the defence and with it, or the older and the newer one. Or two and more "
            "propensity.json: stages of a training, on one corpus or several.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the comparison as JSON.")] = None,
    json: JsonFlag = False,
) -> None:
    """What changed from report to report, with intervals; exit 3 if they do not compare."""
    from memguard.audit.comparison import compare_reports, labels_of
    from memguard.audit.propensity_report import is_propensity_report
    from memguard.audit.report import load_report
    from memguard.reporting.comparison import comparison_view

    _refuse_to_overwrite(output, reports)
    if any(map(is_propensity_report, reports)):
        cli_propensity.compare(reports, output, json=json)
        return
    if len(reports) != 2:
        raise InputError(f"give two reports to compare, got {len(reports)}.")
    comparison = compare_reports(*map(load_report, reports), labels=labels_of(reports))
    if output is not None:
        comparison.save(output)
    console = _console(json=json)
    console.print(comparison_view(comparison, is_plain=not console.is_terminal))
    if json:
        typer.echo(comparison.model_dump_json())
    elif state["quiet"] and not comparison.is_comparable:
        typer.echo(comparison.sentences[0], err=True)
    if not comparison.is_comparable:
        raise typer.Exit(NO_EVIDENCE)


@app.command()
def scaling(
    report_paths: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="report.json of each audit.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the fits as JSON.")] = None,
    json: JsonFlag = False,
) -> None:
    """How exposure and extraction grow with sightings, training and model size: slopes and a forecast."""
    from memguard.audit.comparison import labels_of
    from memguard.audit.report import load_report
    from memguard.audit.scaling import measure_scaling
    from memguard.reporting.comparison import scaling_view

    _refuse_to_overwrite(output, report_paths)
    fitted = measure_scaling([load_report(path) for path in report_paths], labels=labels_of(report_paths))
    if output is not None:
        fitted.save(output)
    console = _console(json=json)
    console.print(scaling_view(fitted, is_plain=not console.is_terminal))
    if json:
        typer.echo(fitted.model_dump_json())


def _refuse_to_overwrite(output: Path | None, inputs: list[Path]) -> None:
    if output is not None and output.resolve() in {path.resolve() for path in inputs}:
        raise InputError(f"'{output}' must not be written over what is read or decided; give another file name.")


@app.command()
def doctor(json: JsonFlag = False) -> None:
    """What is installed, what is missing, and the line that installs it."""
    from memguard.doctor import doctor_table, examine

    findings = examine()
    _console(json=json).print(doctor_table(findings))
    if json:
        import json as json_module

        typer.echo(json_module.dumps([vars(finding) for finding in findings]))


def _require_torch_stack(feature: str) -> None:
    from memguard.doctor import require_extra

    require_extra("hf", feature)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise InputError(f"tokenizer '{folder}' is not a folder.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"tokenizer '{folder}' does not load ({type(error).__name__}).") from None


class _progress:  # noqa: N801  # used as a function
    """A progress bar on a terminal, nothing when piped."""

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task("scoring", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def exit_code_of(error: MemguardError) -> int:
    """The exit code of an error that memguard raised on purpose."""
    if isinstance(error, (InputError, CanaryError)):
        return USAGE
    return NO_EVIDENCE if isinstance(error, EvidenceError) else INFRASTRUCTURE


def main() -> None:
    """Run the command line; no traceback for a user's mistake, never Python's own exit code 1.

    Where nobody reads stdout any more the exit code is 4, and not 0 or 1: what was asked for was not told. stderr may go
    unread, and so may what `promote` tells of an alias that it moved or left: its exit code says that.
    """
    streams = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # for a stream that was closed before we began
        sys.stdout, sys.stderr = _Stream(sys.stdout or nowhere), _Stream(sys.stderr or nowhere, must_be_read=False)
        try:
            _run()
        finally:
            sys.stdout, sys.stderr = streams


def _run() -> None:
    try:
        app()
    except MemguardError as error:
        _complain(str(error))
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        where = f"'{error.filename}': " if error.filename else ""
        _complain(f"{where}{error.strerror or 'input or output failed'}.")
        sys.exit(INFRASTRUCTURE)
    except Exception as error:
        logging.getLogger(__name__).debug("internal error", exc_info=True)
        _complain(f"internal error ({type(error).__name__}); run with -v and report it.")
        sys.exit(INFRASTRUCTURE)


class _Stream:
    """A stream whose reader may go away: an error of its own, or nothing. typer and rich would end with 1, a failed rule."""

    def __init__(self, stream: Any, *, must_be_read: bool = True) -> None:
        self._stream, self._must_be_read = stream, must_be_read

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return _Stream(found, must_be_read=self._must_be_read) if name == "buffer" else found

    def write(self, text: Any) -> int:
        with self._kept_apart():
            return int(self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        with self._kept_apart():
            self._stream.flush()

    @contextlib.contextmanager
    def _kept_apart(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._must_be_read and not isinstance(error, BrokenPipeError):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # nothing is left to fail at the end
            if self._must_be_read:
                raise OSError(errno.EIO, "the reader of stdout went away") from None


def _complain(sentence: str) -> None:
    if state["speaks"]:
        Console(stderr=True, soft_wrap=True).print(f"memguard: {sentence}", markup=False, highlight=False)
