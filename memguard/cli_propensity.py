"""`memguard propensity`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from memguard.errors import EndpointError, InputError

JSON_NAME, PAGE_NAME = "propensity.json", "propensity.html"


def propensity(
    checkpoint: Annotated[Path | None, typer.Argument(help="Checkpoint folder; none where an endpoint is asked.")] = None,
    index: Annotated[Path | None, typer.Option("--index", help="Index of the training corpus.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help=f"Folder for {JSON_NAME} and {PAGE_NAME}.")] = Path(
        "memguard_propensity"
    ),
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Ordinary prompts: JSON lines with prompt, or one a line; default: 100 of ours."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Records of the training data to cut prefixes from; default: of the index.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Records of the same kind, never trained on: the floor of chance.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="memguard.yaml; its audit.propensity is used.")] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", min=1, help="Prompts of a setting at most.")] = None,
    num_samples: Annotated[
        int | None, typer.Option("--samples", min=0, help="Sampled continuations a prompt; 0: one, greedily.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Of a continuation.")] = None,
    corpus_name: Annotated[str | None, typer.Option("--corpus-name", help="What the corpus is called in comparisons.")] = None,
    snippets: Annotated[
        bool, typer.Option("--snippets", help="Quote the longest spans: training text, in the report.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and draws.")] = 0,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Ask a served model: base of an OpenAI-compatible interface, as http://HOST/v1."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name that the endpoint knows the model by.")] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Folder of the served model's tokenizer.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Environment variable that holds the key of the endpoint.")
    ] = None,
    send_text: Annotated[
        bool, typer.Option("--send-text", help="Send prompts as text, to a server that takes no ids.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one request may take.")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")] = False,
) -> None:
    """How much of its corpus a model volunteers in ordinary use, against what a prefix forces out of it."""
    from memguard.cli import _console, _load_tokenizer, _require_torch_stack, state
    from memguard.documents import sealed_json

    if (checkpoint is None) == (endpoint is None):
        raise InputError("give a checkpoint, or a served model by --endpoint, one of them.")
    if endpoint is not None and (model is None or tokenizer is None):
        raise InputError(
            "--endpoint needs --model, the name it knows the model by, and --tokenizer, the folder of its tokenizer."
        )
    _require_torch_stack("propensity")
    from memguard.audit.endpoint import Endpoint, api_key_from
    from memguard.audit.offline import joined_ranks
    from memguard.audit.propensity_run import CorpusFiles, run_propensity, run_served_propensity

    wanted = {"num_prompts": num_prompts, "num_samples": num_samples, "max_new_tokens": max_new_tokens, "prompts": prompts}
    settings = _settings(config, wanted | {"snippets": snippets or None, "index": index})
    if settings.index is None:
        raise InputError("give the index of the training corpus by --index; memguard index build makes one.")
    files = CorpusFiles(settings.index, name=corpus_name, data=data, held_out=held_out)
    with joined_ranks(os.environ) as team:
        state["speaks"] = team.rank == 0
        if checkpoint is not None:
            report = run_propensity(checkpoint, files, settings, seed=seed, team=team)
        else:
            assert endpoint is not None
            assert model is not None
            assert tokenizer is not None
            served = Endpoint(
                endpoint,
                model,
                api_key=api_key_from(os.environ, api_key_env),
                send="text" if send_text else "ids",
                timeout_s=timeout,
            )
            report = run_served_propensity(served, _load_tokenizer(tokenizer), files, settings, seed=seed)
        if state["speaks"]:
            _write(report, output)
            _show(report, _console(json=json), output)
            if json:
                typer.echo(sealed_json(report), nl=False)
        team.gather("propensity is written", None)
    if report.propensity.partial is not None:
        raise EndpointError(f"{report.propensity.partial} What came back is in '{output / JSON_NAME}', marked as a part.")


def _settings(config: Path | None, options: dict[str, Any]) -> Any:
    from memguard.audit.config import load_config
    from memguard.audit.decoding import PropensitySettings

    loaded = load_config(config).audit.propensity if config is not None else None
    return (loaded or PropensitySettings()).model_copy(update={name: one for name, one in options.items() if one is not None})


def _write(report: Any, output: Path) -> None:
    from memguard.files import write_text_atomic
    from memguard.reporting.propensity import render_propensity

    output.mkdir(parents=True, exist_ok=True)
    report.save(output / JSON_NAME)
    write_text_atomic(output / PAGE_NAME, render_propensity(report))


def _show(report: Any, console: Any, output: Path) -> None:
    from memguard.reporting.propensity import propensity_view

    console.print(propensity_view(report, is_plain=not console.is_terminal))
    console.print(f"wrote {output / JSON_NAME} and {output / PAGE_NAME}", markup=False, highlight=False)


def compare(paths: list[Path], output: Path | None, *, json: bool) -> None:
    """Stages and corpora of several propensity reports; exit 3 if they do not compare."""
    from memguard.audit.propensity_report import load_propensity_report
    from memguard.audit.propensity_stages import compare_stages, stage_labels
    from memguard.cli import NO_EVIDENCE, _console, state
    from memguard.reporting.propensity import stages_view

    if len(paths) < 2:
        raise InputError("give two propensity reports or more to compare, got one.")
    reports = [load_propensity_report(path) for path in paths]
    comparison = compare_stages(reports, labels=stage_labels(paths, reports))
    if output is not None:
        comparison.save(output)
    console = _console(json=json)
    console.print(stages_view(comparison, is_plain=not console.is_terminal))
    if json:
        typer.echo(comparison.model_dump_json())
    elif state["quiet"] and not comparison.is_comparable:
        typer.echo(comparison.sentences[0], err=True)
    if not comparison.is_comparable:
        raise typer.Exit(NO_EVIDENCE)
