"""`memguard index build` and `memguard trace`: a corpus index on disk, and the training text behind a generation.

What is printed names documents by number and metadata; no text of the corpus is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memguard.documents import SCHEMA_VERSION, Document
from memguard.errors import InputError
from memguard.files import read_text

JSON_LINES = (".jsonl", ".ndjson")
MAX_ROWS = 40  # spans shown on a terminal
CONFIDENCE = 0.95

index_app = typer.Typer(name="index", help="An index of a training corpus.", no_args_is_help=True)


class SpanRow(Document):
    """A span of a traced text: tokens and characters [start, end), occurrences, summed log unigram in nats, documents."""

    start: int
    end: int
    first_character: int
    end_character: int
    count: int
    log_unigram: float
    is_rare: bool
    documents: list[int]


class TraceRow(Document):
    """One traced text. `documents` are numbers in the index; `sources` is what was stored with them."""

    id: str
    num_tokens: int
    tier: str
    document: int | None
    longest_tokens: int
    longest_rare_tokens: int
    longest_verbatim_characters: int
    num_documents: int
    recall: float | None
    flags: list[str]
    spans: list[SpanRow]
    sources: dict[int, dict[str, Any]]


class TraceEstimate(Document):
    """One figure over the texts that count, with a 95% interval: Clopper-Pearson for shares, else one for any distribution."""

    value: float
    low: float
    high: float
    confidence: float = CONFIDENCE
    method: str


class TraceDocument(Document):
    """What `memguard trace --json` prints. `n`: texts that count; loops, degenerate and empty ones stand in `num_apart`."""

    kind: str = "memguard trace"
    schema_version: int = SCHEMA_VERSION
    n: int
    num_apart: dict[str, int]
    average_longest_span: TraceEstimate | None
    average_longest_rare_span: float | None
    full_match_rate: TraceEstimate | None
    full_normalised_rate: float | None
    span_rate_at: dict[int, float]
    near_verbatim_recall: TraceEstimate | None
    eidetic: dict[int, int]
    span_histogram: dict[int, int]
    traces: list[TraceRow]


@index_app.command("build")
def build(
    corpus: Annotated[
        list[Path], typer.Argument(help="Files and folders: text, .jsonl (.gz, .zst), .parquet, saved datasets.")
    ],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the index.")],
    append: Annotated[bool, typer.Option("--append", help="Add shards to an index that is there.")] = False,
    text_field: Annotated[str, typer.Option("--text-field", help="Of rows.")] = "text",
    max_shard_tokens: Annotated[
        int, typer.Option("--max-shard-tokens", min=1, help="Sets the memory of the build.")
    ] = 250_000_000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")] = False,
) -> None:
    """Index a corpus for a tokenizer; a build that was stopped goes on when it is started again."""
    from memguard.cli import _console, _load_tokenizer, _require_torch_stack
    from memguard.tracing.index_build import build_index, estimate_build, guess_num_tokens

    _require_torch_stack("indexing a corpus")
    console = _console(json=json)
    loaded = _load_tokenizer(tokenizer)
    guessed = estimate_build(guess_num_tokens(corpus), vocabulary_size=len(loaded), max_shard_tokens=max_shard_tokens)
    console.print(
        f"at most about {guessed.num_tokens / 1e6:.3g} M tokens in {guessed.num_shards} shard(s): "
        f"{_size(guessed.memory_bytes)} of memory, {_size(guessed.disk_bytes)} on disk, "
        f"{guessed.sorting_seconds:.3g} s of sorting by {guessed.builder} besides encoding"
    )
    with _progress(console, guessed.num_tokens) as report:
        manifest = build_index(
            list(corpus),
            output,
            loaded,
            text_field=text_field,
            max_shard_tokens=max_shard_tokens,
            append=append,
            report=report,
        )
    console.print(
        f"wrote {output}: {manifest.num_tokens} tokens of {manifest.num_documents} documents in {len(manifest.shards)} "
        f"shard(s), {manifest.token_dtype}"
    )
    if json:
        typer.echo(manifest.model_dump_json())


def trace(
    index: Annotated[list[Path], typer.Argument(metavar="INDEX...", help="Folder of an index; several are asked as one.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer the index was built with.")],
    text: Annotated[str | None, typer.Option("--text", help="The text to trace.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A text, or JSON lines with text or ids, and maybe prompt, prompt_ids, id.")
    ] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", min=1, help="Of a span.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the documents drawn.")] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the digest of every file of the index first.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")] = False,
) -> None:
    """Which spans of a text occur in the training corpus, how often, and in which documents."""
    from memguard.canaries.encoding import tokenizer_digest
    from memguard.cli import _console, _load_tokenizer, _require_torch_stack
    from memguard.tracing import CorpusIndex, TraceSettings, trace_generations

    if (text is None) == (file is None):
        raise InputError("give the text to trace by --text or by --file, one of them.")
    _require_torch_stack("tracing a text")
    generations = read_generations(file) if file is not None else [_generation({"text": text}, "--text")]
    loaded = _load_tokenizer(tokenizer)
    opened = CorpusIndex.open(*index, tokenizer_digest=tokenizer_digest(loaded), verify=verify)
    traces = trace_generations(opened, loaded, generations, settings=TraceSettings(min_tokens=min_tokens, seed=seed))
    document = as_document(traces, opened)
    console = _console(json=json)
    for row in document.traces:
        console.print(trace_table(row))
    if len(document.traces) > 1:
        console.print(figures_line(document), markup=False, highlight=False)
    if json:
        typer.echo(document.model_dump_json())


def read_generations(path: Path) -> list[Any]:
    """Generations from a file: a text, or JSON lines.

    Raises:
        InputError: unreadable, empty, or a line that is no generation; names the line.
    """
    import json as json_module

    content = read_text(path, what="text").removeprefix("\ufeff")
    if path.suffix.lower() not in JSON_LINES:
        return [_generation({"text": content}, f"'{path.name}'")]
    found = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"'{path.name}' line {number}"
            try:
                row = json_module.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"{where} is not JSON.") from None
            found.append(_generation(row, where))
    if not found:
        raise InputError(f"'{path.name}' holds no text.")
    return found


def _generation(row: Any, where: str) -> Any:
    from memguard.tracing.simpletrace import Generation

    if not isinstance(row, dict):
        raise InputError(f"{where} must be an object with 'text' or 'ids'.")
    text, ids = row.get("text", row.get("completion")), row.get("ids")
    if isinstance(text, str) and ids is None:
        if not text.strip():
            raise InputError(f"{where} must hold a text, got an empty one.")
        return Generation(text=text, prompt=str(row.get("prompt", "")), id=str(row.get("id", "")))
    is_list = isinstance(ids, list) and bool(ids) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    if text is not None or not is_list:
        raise InputError(f"{where} must hold 'text', or 'ids' as a list of whole numbers, and not both.")
    return Generation(ids=ids, prompt_ids=row.get("prompt_ids", ()), id=str(row.get("id", "")))


def as_document(traces: list[Any], index: Any) -> TraceDocument:
    """Traces and their figures, with what is stored of the documents that were found."""
    from memguard.tracing import summarise_traces

    figures = summarise_traces(traces)
    rows = []
    for trace in traces:
        spans = [
            SpanRow(
                start=span.start,
                end=span.end,
                first_character=span.first_character,
                end_character=span.end_character,
                count=span.count,
                log_unigram=span.log_unigram,
                is_rare=span.is_rare,
                documents=[place.document for place in span.documents],
            )
            for span in trace.spans
        ]
        numbers = {number for span in spans for number in span.documents}
        numbers |= {trace.document} if trace.document is not None else set()
        rows.append(
            TraceRow(
                id=trace.id,
                num_tokens=trace.num_tokens,
                tier=trace.tier,
                document=trace.document,
                longest_tokens=trace.longest_tokens,
                longest_rare_tokens=trace.longest_rare_tokens,
                longest_verbatim_characters=trace.longest_verbatim_characters,
                num_documents=trace.num_documents,
                recall=trace.recall,
                flags=list(trace.flags),
                spans=spans,
                sources={number: index.metadata(number) for number in sorted(numbers)},
            )
        )
    return TraceDocument(
        n=figures.n,
        num_apart=figures.num_apart,
        average_longest_span=_mean(figures.longest_spans, max(1, *(trace.num_tokens for trace in traces))),
        average_longest_rare_span=figures.average_longest_rare_span if figures.n else None,
        full_match_rate=_share(figures.is_full_match),
        full_normalised_rate=figures.full_normalised_rate if figures.n else None,
        span_rate_at=figures.span_rate_at if figures.n else {},
        near_verbatim_recall=_mean(figures.recalls, 1.0) if figures.near_verbatim_recall is not None else None,
        eidetic=figures.eidetic,
        span_histogram=figures.span_histogram,
        traces=rows,
    )


def _mean(values: Any, largest: float) -> TraceEstimate | None:
    """A mean of texts; no text can have more than the longest one."""
    from memguard.metrics.intervals import bounded_mean_interval

    if not len(values):
        return None
    interval = bounded_mean_interval(values.astype(float), largest=float(largest), confidence=CONFIDENCE)
    return TraceEstimate(value=float(values.mean()), low=interval.low, high=interval.high, method="betting")


def _share(events: Any) -> TraceEstimate | None:
    from memguard.metrics.intervals import share_interval

    if not len(events):
        return None
    interval = share_interval(int(events.sum()), len(events), confidence=CONFIDENCE)
    return TraceEstimate(value=float(events.mean()), low=interval.low, high=interval.high, method="Clopper-Pearson")


def figures_line(document: TraceDocument) -> str:
    """The figures over all texts, with their intervals, as a line."""
    if document.n == 0:
        return "no text counts: all are loops, degenerate or empty"
    parts = [f"{document.n} texts"]
    for name, one in (
        ("longest span", document.average_longest_span),
        ("full match rate", document.full_match_rate),
        ("near-verbatim recall", document.near_verbatim_recall),
    ):
        if one is not None:
            parts.append(f"{name} {one.value:.3g} ({one.low:.3g} to {one.high:.3g}, {one.confidence:.0%})")
    return "; ".join(parts)


def trace_table(row: TraceRow) -> Table:
    """A traced text for a terminal: its match, and its spans, rare ones first."""
    recall = f", near-verbatim recall {row.recall:.2f}" if row.recall is not None else ""
    flags = f"; {', '.join(row.flags)}" if row.flags else ""
    title = f"{row.id or 'text'}: {row.tier}, longest span {row.longest_tokens} of {row.num_tokens} tokens{recall}{flags}"
    table = Table(title=Text(title), title_justify="left")  # not markup: ids and paths may hold brackets
    for column in ("tokens", "characters", "length", "occurrences", "rare", "documents"):
        table.add_column(column)
    ordered = sorted(row.spans, key=lambda span: (not span.is_rare, span.start - span.end))
    for span in ordered[:MAX_ROWS]:
        named = [f"{number} {row.sources[number].get('path', '')}".strip() for number in span.documents[:3]]
        more = f" and {span.count - 3} more" if len(span.documents) > 3 else ""
        table.add_row(
            f"{span.start}..{span.end}",
            f"{span.first_character}..{span.end_character}",
            str(span.end - span.start),
            str(span.count),
            "yes" if span.is_rare else "",
            Text(", ".join(named) + more),
        )
    return table


def _size(number: float) -> str:
    unit = next((unit for unit in (2**30, 2**20, 2**10) if number >= unit), 1)
    return f"{number / unit:.3g} {({2**30: 'GiB', 2**20: 'MiB', 2**10: 'KiB'}).get(unit, 'bytes')}"


class _progress:  # noqa: N801  # used as a function
    """A progress bar on a terminal, nothing when piped."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import Progress

        self._bar, self._total = Progress(console=console, transient=True, disable=not console.is_terminal), total

    def __enter__(self) -> Any:
        self._bar.start()
        task = self._bar.add_task("encoding", total=self._total)
        return lambda stage, done: self._bar.update(task, description=stage, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
