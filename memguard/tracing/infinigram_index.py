"""Opens an index that infini-gram built, by our own reader, after its files were checked.

infini-gram's engine is not loaded: on a missing or malformed file it ends the whole process, and an empty folder answers 0.
The files are the same, so its indexes of any size are read here as they are, memory-mapped.

Source: infini-gram (2401.17377), index version 4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memguard.errors import InputError
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.manifest import (
    FILE_STEMS,
    TOKEN_BYTES,
    FileEntry,
    IndexManifest,
    ShardEntry,
    TokenDtype,
    choose_token_dtype,
    separator_of,
)
from memguard.tracing.search import Table
from memguard.tracing.shard import ShardFiles, open_shard

NUM_CHECKED = 4096  # rows of a table that are compared with the next
MAX_WHOLE = 1 << 22  # rows of a table that is checked to hold every token once
NOT_HASHED = ""


def open_infinigram(
    folder: Path | str, *, vocabulary_size: int, token_dtype: TokenDtype | None = None, tokenizer_digest: str | None = None
) -> CorpusIndex:
    """An index of infini-gram as a `CorpusIndex`.

    What the folder does not say must be said here: of which tokenizer it is. A wrong one finds next to nothing.

    Args:
        folder: with `tokenized.N`, `table.N`, `offset.N`, and maybe `metadata.N`, `metaoff.N`, `unigram.N`.
        vocabulary_size: of the tokenizer; ids of queries must be below it.
        token_dtype: u16 or u32; None takes the one that infini-gram's own documentation advises for the vocabulary.
        tokenizer_digest: of that tokenizer, if it is known.

    Returns:
        A `CorpusIndex`. Unigrams are counted here where the folder has none.

    Raises:
        InputError: no shard, a gap in their numbers, a truncated file, ids above the vocabulary, a table that is not sorted.
    """
    folder = Path(folder)
    dtype = token_dtype or choose_token_dtype(vocabulary_size)
    numbers = _shard_numbers(folder)
    shards, entries = [], []
    for number in numbers:
        shard = open_shard(folder, number, dtype)
        _check_ids(shard, number, vocabulary_size, dtype)
        _check_table(shard.table, number)
        shards.append(shard)
        entries.append(_entry(folder, number, shard, dtype))
    manifest = IndexManifest(
        builder="infini-gram",
        token_dtype=dtype,
        separator=separator_of(dtype),
        vocabulary_size=vocabulary_size,
        tokenizer_digest=tokenizer_digest,
        shards=tuple(entries),
    )
    if manifest.num_tokens == 0:
        raise InputError(f"index '{folder.name}' is empty: nothing would be found in it.")
    return CorpusIndex(shards, manifest)


def _shard_numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        raise InputError(f"index '{folder}' is not a folder.")
    names = [path.name.removeprefix("tokenized.") for path in folder.glob("tokenized.*")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if not numbers:
        raise InputError(f"index '{folder}' holds no shard (tokenized.0).")
    if numbers != list(range(len(numbers))):
        gap = next(number for number in range(len(numbers)) if number != numbers[number])
        raise InputError(f"index '{folder.name}' lacks shard {gap}.")
    return numbers


def _check_ids(shard: ShardFiles, number: int, vocabulary_size: int, dtype: str) -> None:
    highest = int(max((one for one in shard.ids.tolist() if one != separator_of(dtype)), default=0))
    if highest >= vocabulary_size:
        raise InputError(f"shard {number} holds id {highest}, above a vocabulary of {vocabulary_size}: is it {dtype}?")
    separators = dict(zip(shard.ids.tolist(), shard.counts.tolist(), strict=True)).get(separator_of(dtype), 0)
    if separators != shard.num_documents:
        raise InputError(f"'offset.{number}' lists {shard.num_documents} documents, 'tokenized.{number}' has {separators}.")


def _check_table(table: Table, number: int) -> None:
    """Rows must point into the text, at whole tokens, in order; a small table must hold every token once."""
    rows = np.unique(np.linspace(0, table.size - 1, min(table.size, NUM_CHECKED)).astype(np.int64))
    pairs = np.unique(np.concatenate([rows, np.minimum(rows + 1, table.size - 1)]))
    positions = table.positions(pairs)
    is_inside = bool((positions < table.size).all())
    if is_inside and table.size <= MAX_WHOLE:
        marks = np.zeros(table.size, dtype=bool)
        every = table.positions(np.arange(table.size))
        marks[every[every < table.size]] = True
        is_inside = bool(marks.all())
    if not is_inside or not all(_is_ordered(table, row) for row in rows[:-1].tolist()):
        raise InputError(f"'table.{number}' is not the sorted table of 'tokenized.{number}': its build failed. Build it again.")


def _is_ordered(table: Table, row: int) -> bool:
    """Whether a row is below the next, by as many bytes as tell them apart, within reason."""
    first, second = table.positions(np.array([row, row + 1])).tolist()
    size = 256
    one, other = (table.tokens[at : at + size].tobytes() for at in (first, second))
    return one <= other


def _entry(folder: Path, number: int, shard: ShardFiles, dtype: TokenDtype) -> ShardEntry:
    paths = {f"{stem}.{number}": folder / f"{stem}.{number}" for stem in FILE_STEMS}
    sizes = {name: path.stat().st_size if path.is_file() else 0 for name, path in paths.items()}
    return ShardEntry(
        number=number,
        num_tokens=shard.table.tokens.nbytes // TOKEN_BYTES[dtype] - shard.num_documents,
        num_documents=shard.num_documents,
        suffix_array="infini-gram",
        files={name: FileEntry(size=size, sha256=NOT_HASHED) for name, size in sizes.items()},
    )
