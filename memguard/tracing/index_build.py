"""Builds a corpus index from files or rows: how much it will take, encoding in batches, going on after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from memguard.canaries.encoding import tokenizer_digest
from memguard.errors import InputError
from memguard.tracing.index_writer import MAX_SHARD_TOKENS, IndexWriter
from memguard.tracing.manifest import TOKEN_BYTES, IndexManifest, choose_token_dtype
from memguard.tracing.sources import PACKED, SourceDocument, as_document, list_sources, read_corpus, source_digest
from memguard.tracing.suffix_array import builder_name, pointer_bytes

TEXTS_TOGETHER = 512
CHARACTERS_TOGETHER = 2_000_000
BYTES_A_TOKEN = {"text": 3.0, "packed": 1.0}  # of a file; low, so that an estimate is rather too high
# Bytes of memory and CPU seconds a million tokens, as measured on 10 M tokens of source code.
COST = {"pydivsufsort": {2: (17.0, 0.35), 4: (25.0, 0.6)}, "numpy": {2: (70.0, 0.9), 4: (75.0, 1.2)}}


@dataclass(frozen=True)
class BuildEstimate:
    """What a build will take, roughly: tokens, memory and disk in bytes, CPU seconds without encoding."""

    num_tokens: int
    num_shards: int
    memory_bytes: int
    disk_bytes: int
    sorting_seconds: float
    builder: str


def estimate_build(
    num_tokens: int, *, vocabulary_size: int, max_shard_tokens: int = MAX_SHARD_TOKENS, builder: str | None = None
) -> BuildEstimate:
    """Memory, disk and time of indexing so many tokens, to say before it begins.

    Example:
        >>> found = estimate_build(10_000_000, vocabulary_size=49_152, builder="pydivsufsort 0.0.20")
        >>> found.disk_bytes, found.memory_bytes, found.num_shards
        (60000000, 170000000, 1)
    """
    if num_tokens < 1 or max_shard_tokens < 1:
        raise ValueError(f"num_tokens and max_shard_tokens must be at least 1, got {num_tokens} and {max_shard_tokens}.")
    builder = builder or builder_name()
    width = TOKEN_BYTES[choose_token_dtype(vocabulary_size)]
    memory, seconds = COST[builder.split(" ")[0]][width]
    largest = min(num_tokens, max_shard_tokens)
    return BuildEstimate(
        num_tokens=num_tokens,
        num_shards=-(-num_tokens // max_shard_tokens),
        memory_bytes=int(memory * largest),
        disk_bytes=num_tokens * (width + pointer_bytes(largest * width)),
        sorting_seconds=seconds * num_tokens / 1e6,
        builder=builder,
    )


def guess_num_tokens(paths: Sequence[Path]) -> int:
    """About how many tokens files hold, by their sizes alone: rather too many."""
    total = 0.0
    for path in list_sources(paths):
        if path.is_dir():
            total += sum(one.stat().st_size for one in path.rglob("*.arrow")) / BYTES_A_TOKEN["text"]
            continue
        is_packed = path.suffix.lower() in (*PACKED, ".parquet")
        total += path.stat().st_size / BYTES_A_TOKEN["packed" if is_packed else "text"]
    return max(1, int(total))


def build_index(
    corpus: Path | Sequence[Path] | Iterable[Any],
    folder: Path | str,
    tokenizer: Any,
    *,
    text_field: str = "text",
    max_shard_tokens: int = MAX_SHARD_TOKENS,
    append: bool = False,
    split_at: Sequence[int] = (),
    report: Callable[[str, int], None] | None = None,
) -> IndexManifest:
    """Index a corpus for a tokenizer, and return the manifest of the index.

    A build of files that was stopped goes on where its last whole shard ended when it is started again in the same way.

    Args:
        corpus: `Path`s of files and folders, or rows: texts, token ids, mappings with `text` or `input_ids`, a dataset.
        folder: of the index.
        tokenizer: of the model that will be traced; texts are encoded without special tokens.
        text_field: of rows.
        max_shard_tokens: sets the memory of the build.
        append: add to an index that is there.
        split_at: ids that end a document inside a row, such as EOS of packed rows.
        report: called with "encoding" or "sorting" and the tokens so far.

    Raises:
        InputError: an unreadable or empty corpus, ids outside the vocabulary, an index that is there already.
        MissingExtraError: a file that needs a package which is not installed.

    Example:
        >>> build_index([Path("data.jsonl")], "corpus.index", tokenizer)  # doctest: +SKIP
    """
    digest = tokenizer_digest(tokenizer)
    items = [corpus] if isinstance(corpus, Path) else corpus
    paths = _paths(items)
    source = ""
    if paths is not None:
        source = source_digest(paths, digest, text_field, max_shard_tokens, append, list(split_at))
        documents = read_corpus(paths, text_field=text_field)
    else:
        rows = enumerate(items, start=1)
        documents = (as_document(row, text_field=text_field, where=f"row {number}") for number, row in rows)
    with IndexWriter(
        folder,
        vocabulary_size=len(tokenizer),
        tokenizer_digest=digest,
        max_shard_tokens=max_shard_tokens,
        append=append,
        split_at=split_at,
        source_digest=source,
        report=report,
    ) as writer:
        for document, ids in encode_documents(islice(documents, writer.num_resumed, None), tokenizer):
            writer.add(ids, document.metadata)
            if report is not None and writer.num_consumed % TEXTS_TOGETHER == 0:
                report("encoding", writer.num_tokens)
    return writer.manifest


def encode_documents(documents: Iterable[SourceDocument], tokenizer: Any) -> Iterator[tuple[SourceDocument, Sequence[int]]]:
    """Documents with their token ids; texts are encoded many at a time, without special tokens."""
    waiting: list[SourceDocument] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document.text or "")
        if len(waiting) >= TEXTS_TOGETHER or size >= CHARACTERS_TOGETHER:
            yield from _encoded(waiting, tokenizer)
            waiting, size = [], 0
    yield from _encoded(waiting, tokenizer)


def _encoded(documents: list[SourceDocument], tokenizer: Any) -> Iterator[tuple[SourceDocument, Sequence[int]]]:
    texts = [document.text for document in documents if document.text is not None]
    found = iter(())
    if texts:
        options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
        found = iter(tokenizer(texts, **options)["input_ids"])
    for document in documents:
        yield document, (next(found) if document.text is not None else document.ids if document.ids is not None else ())


def _paths(items: Iterable[Any]) -> list[Path] | None:
    """The paths where a corpus is given as such; strings are texts."""
    if not isinstance(items, (list, tuple)) or not items:
        return None
    if all(isinstance(item, Path) for item in items):
        return list(items)
    if any(isinstance(item, Path) for item in items):
        raise InputError("a corpus must be paths alone or rows alone.")
    return None
