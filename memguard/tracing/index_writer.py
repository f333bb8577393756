"""Writes a corpus index document by document: fixed memory while tokens come in, a table when a shard is full.

Every file is written under a temporary name and renamed; the manifest is the last to appear, so that what can be opened is
whole. A build that was killed keeps the shards it had finished in `building.json` and goes on behind them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.documents import Document, load_document
from memguard.errors import InputError
from memguard.files import write_text_atomic
from memguard.tracing.manifest import (
    FILE_STEMS,
    MANIFEST_NAME,
    TOKEN_BYTES,
    IndexManifest,
    ShardEntry,
    check_sizes,
    choose_token_dtype,
    describe_file,
    load_manifest,
)
from memguard.tracing.suffix_array import CHUNK, write_table

UNFINISHED_NAME = "building.json"
MAX_SHARD_TOKENS = 250_000_000  # about 3 GB of memory for u16, 5 GB for u32
Report = Callable[[str, int], None]


class UnfinishedIndex(Document):
    """The shards of a build that has not ended, and how much of its source they hold."""

    kind: Literal["memguard unfinished index"] = "memguard unfinished index"
    source_digest: str
    num_consumed: int
    manifest: IndexManifest


class IndexWriter:
    """Takes documents as token ids and makes shards of them.

    Use it as a context manager, or call `close`. An exception inside the block keeps the shards that are finished for a
    later writer with the same `source_digest`.

    Args:
        folder: of the index; made if it is not there.
        vocabulary_size: ids must be below it; above 65,535 they take four bytes each.
        tokenizer_digest: of the tokenizer that made the ids; None says that any may ask.
        max_shard_tokens: a shard is closed once it holds this many; sets the memory of a build.
        append: add shards to an index that is there.
        split_at: ids that end a document, such as EOS in packed rows; they are left out.
        source_digest: names what is being indexed, for a build that goes on where another stopped.
        report: called with a stage and the tokens done.
        use_divsufsort: None takes `pydivsufsort` where it is installed.

    Raises:
        InputError: an index is there and `append` is false, it has another tokenizer, or another build was begun here.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with IndexWriter(Path(place) / "index", vocabulary_size=100) as writer:
        ...         writer.add([5, 6, 7], {"path": "a.txt"})
        ...     writer.manifest.num_tokens, writer.manifest.token_dtype
        (3, 'u16')
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        vocabulary_size: int,
        tokenizer_digest: str | None = None,
        max_shard_tokens: int = MAX_SHARD_TOKENS,
        append: bool = False,
        split_at: Sequence[int] = (),
        source_digest: str = "",
        report: Report | None = None,
        use_divsufsort: bool | None = None,
    ) -> None:
        if max_shard_tokens < 1:
            raise ValueError(f"max_shard_tokens must be at least 1, got {max_shard_tokens}.")
        self.folder = Path(folder)
        self._limit, self._report, self._use_divsufsort = max_shard_tokens, report, use_divsufsort
        self._split_at = np.asarray(list(split_at), dtype=np.int64)
        self._source_digest = source_digest
        self.manifest, self.num_consumed = self._begin(vocabulary_size, tokenizer_digest, append)
        self.num_resumed = self.num_consumed
        self._dtype = np.dtype(f"<u{TOKEN_BYTES[self.manifest.token_dtype]}")
        self._shard: _OpenShard | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return self.manifest.num_tokens + (self._shard.num_tokens if self._shard is not None else 0)

    def add(self, ids: ArrayLike, metadata: Mapping[str, Any] | None = None) -> None:
        """Add one document.

        Raises:
            InputError: ids that are no whole numbers, or outside the vocabulary; names the document by its place.
        """
        tokens = self._checked(ids)
        if self._split_at.size and np.isin(tokens, self._split_at).any():
            ends = np.flatnonzero(np.isin(tokens, self._split_at))
            pieces = [piece[~np.isin(piece, self._split_at)] for piece in np.split(tokens, ends)]
            parts = [piece for piece in pieces if piece.size]
        else:
            parts = [tokens]
        for part in parts:
            self._write(part, metadata)
        self.num_consumed += 1
        if self._shard is not None and self._shard.num_tokens >= self._limit:
            self._finish_shard()

    def add_rows(self, input_ids: ArrayLike, attention_mask: ArrayLike | None = None) -> None:
        """Add the rows of a training batch as documents, padding left out.

        Args:
            input_ids: shape (B, T).
            attention_mask: 0 where a row is padded, shape (B, T).
        """
        rows = np.asarray(input_ids)
        mask = np.ones(rows.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        if rows.ndim != 2 or mask.shape != rows.shape:
            raise ValueError(f"input_ids and attention_mask must share a shape (B, T), got {rows.shape} and {mask.shape}.")
        for row, keep in zip(rows, mask, strict=True):
            self.add(row[keep])

    def close(self) -> IndexManifest:
        """Finish the last shard and write the manifest.

        Raises:
            InputError: no document with a token was added.
        """
        if self._shard is not None:
            self._finish_shard()
        if self.manifest.num_tokens == 0:
            raise InputError("the corpus holds no token: nothing would be found in its index.")
        self.manifest.save(self.folder)
        (self.folder / UNFINISHED_NAME).unlink(missing_ok=True)
        return self.manifest

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._shard is not None:
            self._shard.discard()
            self._shard = None

    def _begin(self, vocabulary_size: int, tokenizer_digest: str | None, append: bool) -> tuple[IndexManifest, int]:
        dtype = choose_token_dtype(vocabulary_size)
        wanted = IndexManifest(
            builder=_builder(),
            token_dtype=dtype,
            separator=(1 << (8 * TOKEN_BYTES[dtype])) - 1,
            vocabulary_size=vocabulary_size,
            tokenizer_digest=tokenizer_digest,
            shards=(),
        )
        begun = self._unfinished()
        if begun is not None:
            return _continued(begun.manifest, wanted, self.folder), begun.num_consumed
        if (self.folder / MANIFEST_NAME).exists():
            if not append:
                raise InputError(f"index '{self.folder}' exists already; append to it, or choose another folder.")
            return _continued(load_manifest(self.folder), wanted, self.folder), 0
        self.folder.mkdir(parents=True, exist_ok=True)
        return wanted, 0

    def _unfinished(self) -> UnfinishedIndex | None:
        for stale in self.folder.glob(".*.part"):
            stale.unlink()
        path = self.folder / UNFINISHED_NAME
        if not path.exists():
            return None
        begun = load_document(path, UnfinishedIndex, what="unfinished index")
        if not self._source_digest or begun.source_digest != self._source_digest:
            raise InputError(f"'{self.folder}' holds a build of another corpus that did not end; choose another folder.")
        check_sizes(self.folder, begun.manifest.shards)
        return begun

    def _checked(self, ids: ArrayLike) -> NDArray[np.int64]:
        tokens = np.asarray(ids)
        where = f"document {self.num_consumed + 1}"
        if tokens.size == 0:
            return np.zeros(0, dtype=np.int64)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InputError(f"{where} must be a list of token ids, got {tokens.dtype} of shape {tokens.shape}.")
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self.manifest.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            raise InputError(f"{where} holds id {wrong}; ids must lie in 0..{self.manifest.vocabulary_size - 1}.")
        return tokens

    def _write(self, tokens: NDArray[np.int64], metadata: Mapping[str, Any] | None) -> None:
        if self._shard is None:
            numbers = [shard.number for shard in self.manifest.shards]
            self._shard = _OpenShard(self.folder, max(numbers, default=-1) + 1, self._dtype)
        self._shard.add(tokens, metadata)

    def _finish_shard(self) -> None:
        assert self._shard is not None
        if self._report is not None:
            self._report("sorting", self._shard.num_tokens)
        entry = self._shard.finish(self._use_divsufsort)
        self._shard = None
        self.manifest = self.manifest.model_copy(update={"shards": (*self.manifest.shards, entry)})
        if self._source_digest:
            begun = UnfinishedIndex(source_digest=self._source_digest, num_consumed=self.num_consumed, manifest=self.manifest)
            write_text_atomic(self.folder / UNFINISHED_NAME, begun.model_dump_json() + "\n")


class _OpenShard:
    """The files of a shard that documents are being added to, under temporary names."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self.folder, self.number, self._dtype = folder, number, dtype
        self._separator = np.array([np.iinfo(dtype).max], dtype=dtype).tobytes()
        self._streams: dict[str, IO[bytes]] = {
            stem: self._part(stem).open("wb") for stem in ("tokenized", "offset", "metadata", "metaoff")
        }
        self._bytes = {"tokenized": 0, "metadata": 0}
        self.num_documents = 0

    @property
    def num_tokens(self) -> int:
        return self._bytes["tokenized"] // self._dtype.itemsize - self.num_documents

    def add(self, tokens: NDArray[np.int64], metadata: Mapping[str, Any] | None) -> None:
        line = json.dumps(metadata or {}, ensure_ascii=True).encode() + b"\n"
        for stem, index, content in (
            ("tokenized", "offset", self._separator + tokens.astype(self._dtype).tobytes()),
            ("metadata", "metaoff", line),
        ):
            self._streams[index].write(self._bytes[stem].to_bytes(8, "little"))
            self._streams[stem].write(content)
            self._bytes[stem] += len(content)
        self.num_documents += 1

    def finish(self, use_divsufsort: bool | None) -> ShardEntry:
        """Close the streams, sort, count, rename."""
        num_tokens = self.num_tokens
        for stream in self._streams.values():
            stream.close()
        tokens = np.memmap(self._part("tokenized"), dtype=self._dtype, mode="r")
        builder = write_table(tokens, self._part("table"), use_divsufsort=use_divsufsort)
        _write_unigrams(tokens, self._part("unigram"))
        del tokens
        files = {}
        for stem in FILE_STEMS:
            part, name = self._part(stem), f"{stem}.{self.number}"
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            files[name] = describe_file(part)
            os.replace(part, self.folder / name)
        return ShardEntry(
            number=self.number,
            num_tokens=num_tokens,
            num_documents=self.num_documents,
            suffix_array=builder,
            files=files,
        )

    def discard(self) -> None:
        for stream in self._streams.values():
            stream.close()
        for stem in FILE_STEMS:
            self._part(stem).unlink(missing_ok=True)

    def _part(self, stem: str) -> Path:
        return self.folder / f".{stem}.{self.number}.part"


def count_unigrams(tokens: NDArray[np.uint16] | NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids that occur, ascending, and how often; separators among them."""
    if tokens.dtype == np.uint16:
        counts = np.zeros(1 << 16, dtype=np.int64)
        for start in range(0, tokens.size, CHUNK):
            counts += np.bincount(tokens[start : start + CHUNK], minlength=1 << 16)
        ids = np.flatnonzero(counts)
        return ids, counts[ids]
    ids, sums = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, tokens.size, CHUNK):
        more, counted = np.unique(tokens[start : start + CHUNK], return_counts=True)
        ids, where = np.unique(np.concatenate([ids, more.astype(np.int64)]), return_inverse=True)
        sums = np.bincount(where, weights=np.concatenate([sums, counted])).astype(np.int64)
    return ids, sums


def _write_unigrams(tokens: NDArray[np.uint16] | NDArray[np.uint32], path: Path) -> None:
    ids, counts = count_unigrams(tokens)
    path.write_text("".join(f"{id_} {count}\n" for id_, count in zip(ids.tolist(), counts.tolist(), strict=True)))


def _continued(there: IndexManifest, wanted: IndexManifest, folder: Path) -> IndexManifest:
    for name in ("token_dtype", "vocabulary_size", "tokenizer_digest"):
        if getattr(there, name) != getattr(wanted, name):
            raise InputError(f"index '{folder}' was built with another tokenizer ({name.replace('_', ' ')} differs).")
    return there


def _builder() -> str:
    import memguard

    return f"memguard {memguard.__version__}"
