"""One shard of a corpus index on disk, memory-mapped: its table, its documents and their metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.errors import InputError
from memguard.tracing.index_writer import count_unigrams
from memguard.tracing.manifest import TOKEN_BYTES
from memguard.tracing.search import Table
from memguard.tracing.suffix_array import pointer_bytes

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ShardFiles:
    """An opened shard. `ids` and `counts` are the unigrams, separators among them; `metadata` may be None."""

    number: int
    table: Table
    offsets: NDArray[np.uint64]
    ids: Ints
    counts: Ints
    metadata: NDArray[np.uint8] | None
    metadata_offsets: NDArray[np.uint64] | None

    @property
    def num_documents(self) -> int:
        return int(self.offsets.size)

    def documents_of(self, positions: Ints) -> Ints:
        """Which document each token position lies in, by its number in the shard."""
        return np.searchsorted(self.offsets, (positions * self.table.tokens.itemsize).astype(np.uint64), side="right") - 1

    def bounds_of(self, documents: Ints) -> tuple[Ints, Ints]:
        """Token positions [start, end) of documents, their separators left out."""
        width = self.table.tokens.itemsize
        last = self.num_documents - 1
        following = self.offsets[np.minimum(documents + 1, last)].astype(np.int64) // width
        return self.offsets[documents].astype(np.int64) // width + 1, np.where(documents < last, following, self.table.size)

    def metadata_of(self, document: int) -> dict[str, Any]:
        """What was stored with a document; empty where nothing was."""
        if self.metadata is None or self.metadata_offsets is None:
            return {}
        start = int(self.metadata_offsets[document])
        is_last = document + 1 == self.num_documents
        end = self.metadata.size if is_last else int(self.metadata_offsets[document + 1])
        try:
            found = json.loads(self.metadata[start:end].tobytes())
        except ValueError:
            raise InputError(f"metadata of document {document} in shard {self.number} is not readable.") from None
        return found if isinstance(found, dict) else {}


def open_shard(folder: Path, number: int, token_dtype: str) -> ShardFiles:
    """Map the files of a shard and check that they fit together.

    Raises:
        InputError: a file is missing, truncated or of another shape; names it.
    """
    width = TOKEN_BYTES[token_dtype]
    tokens = _map(folder / f"tokenized.{number}", f"<u{width}")
    table = _map(folder / f"table.{number}", "u1")
    offsets = np.asarray(_map(folder / f"offset.{number}", "<u8"))
    if table.size != tokens.size * pointer_bytes(tokens.nbytes):
        raise InputError(f"'table.{number}' holds {table.size} bytes, which do not fit {tokens.size} tokens.")
    if int(offsets[0]) != 0 or int(offsets[-1]) >= tokens.nbytes or int(tokens[0]) != np.iinfo(tokens.dtype).max:
        raise InputError(f"'offset.{number}' does not fit 'tokenized.{number}': is the dtype {token_dtype}?")
    ids, counts = _unigrams(folder / f"unigram.{number}", tokens)
    pair: list[Any] = [None, None]
    if (folder / f"metadata.{number}").is_file() and (folder / f"metaoff.{number}").is_file():
        pair = [_map(folder / f"metadata.{number}", "u1"), _map(folder / f"metaoff.{number}", "<u8")]
        if pair[1].size != offsets.size or int(pair[1][-1]) >= pair[0].size:
            raise InputError(f"'metaoff.{number}' does not fit 'metadata.{number}'.")
    return ShardFiles(number, Table(tokens, table, ids, counts), offsets, ids, counts, pair[0], pair[1])


def _map(path: Path, dtype: str) -> Any:
    try:
        size = path.stat().st_size
    except OSError:
        raise InputError(f"'{path.name}' is missing from index '{path.parent.name}'.") from None
    item = np.dtype(dtype).itemsize
    if size == 0 or size % item:
        raise InputError(f"'{path.name}' holds {size} bytes, which is no whole number of {item} bytes each.")
    return np.memmap(path, dtype=dtype, mode="r")


def _unigrams(path: Path, tokens: NDArray[Any]) -> tuple[Ints, Ints]:
    """Read the counts, or make them where another builder left them out."""
    if not path.is_file():
        return count_unigrams(tokens)
    try:
        pairs = np.loadtxt(path, dtype=np.int64, ndmin=2)
        ids, counts = pairs[:, 0], pairs[:, 1]
    except (ValueError, IndexError):
        raise InputError(f"'{path.name}' does not hold an id and a count a line.") from None
    order = np.argsort(ids, kind="stable")
    if int(counts.sum()) != tokens.size:
        raise InputError(f"'{path.name}' counts {int(counts.sum())} tokens instead of {tokens.size}.")
    return ids[order], counts[order]
