"""An index of a training corpus, asked for spans, counts and documents; exact, over any number of shards.

Files are memory-mapped: what a query needs is read, so its memory does not grow with the corpus. Matches are of token ids;
copies that are cut inside a token are found on characters, by `memguard.tracing.characters`.

Source: infini-gram (2401.17377) for the files. Differs: both neighbours of an absent suffix are looked at, no span is dropped
for being frequent, and an index that is empty or damaged is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memguard.errors import InputError
from memguard.tracing.manifest import IndexManifest, check_sizes, describe_file, load_manifest
from memguard.tracing.search import Patterns, Text
from memguard.tracing.shard import ShardFiles, open_shard
from memguard.tracing.spans import Rows, SpanTable, maximal_spans

Ints = NDArray[np.int64]
MAX_TOKENS_TOGETHER = 1 << 16  # of queries; bounds the memory of a batch at some 10 MB
MAX_LISTED = 1 << 16  # occurrences read at once while documents are counted


@dataclass(frozen=True)
class Occurrence:
    """One place of a pattern: shard, token position in it, document by its number in the whole index, and its bounds there."""

    shard: int
    position: int
    document: int
    start: int
    end: int


class CorpusIndex:
    """Answers which stretches of token ids occur in a corpus, how often, and where.

    Args:
        shards: opened shards.
        manifest: what the index says of itself.

    Example:
        >>> import tempfile
        >>> from memguard.tracing.index_writer import IndexWriter
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with IndexWriter(place, vocabulary_size=100) as writer:
        ...         writer.add([5, 9, 9, 9])
        ...         writer.add([7, 8, 9])
        ...     index = CorpusIndex.open(place)
        ...     index.spans([[5, 9, 1, 8, 9]]).as_lists(1)
        [[(0, 2, 1), (3, 5, 1)]]
    """

    def __init__(self, shards: Sequence[ShardFiles], manifest: IndexManifest) -> None:
        self.shards, self.manifest = list(shards), manifest
        self._first_documents = np.concatenate([[0], np.cumsum([shard.num_documents for shard in self.shards])])
        self._dtype = self.shards[0].table.tokens.dtype
        self._log_unigrams: NDArray[np.float64] | None = None

    @classmethod
    def open(cls, *folders: Path | str, tokenizer_digest: str | None = None, verify: bool = False) -> CorpusIndex:
        """Open an index, or several of one tokenizer as one.

        Args:
            folders: each with a manifest.
            tokenizer_digest: of the tokenizer that will ask; an index of another one is refused.
            verify: compare the digest of every file, which reads them all.

        Raises:
            InputError: no index, an empty one, a missing or truncated file, another tokenizer.
        """
        if not folders:
            raise ValueError("folders must name at least one index, got none.")
        manifests = [load_manifest(Path(folder)) for folder in folders]
        shards = []
        for folder, manifest in zip(map(Path, folders), manifests, strict=True):
            _check_tokenizer(folder, manifest, manifests[0], tokenizer_digest)
            check_sizes(folder, manifest.shards)
            if verify:
                _check_digests(folder, manifest)
            shards += [open_shard(folder, shard.number, manifest.token_dtype) for shard in manifest.shards]
        entries = tuple(shard for manifest in manifests for shard in manifest.shards)
        return cls(shards, manifests[0].model_copy(update={"shards": entries}))

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def num_documents(self) -> int:
        return int(self._first_documents[-1])

    def log_unigrams(self) -> NDArray[np.float64]:
        """Log of the share of each id among the tokens of the corpus; nats, -inf where it does not occur, shape (V,)."""
        if self._log_unigrams is None:
            counts = np.zeros(self.manifest.vocabulary_size, dtype=np.float64)
            for shard in self.shards:
                inside = shard.ids < counts.size
                counts[shard.ids[inside]] += shard.counts[inside]
            with np.errstate(divide="ignore"):
                self._log_unigrams = np.log(counts) - np.log(counts.sum())
        return self._log_unigrams

    def match_lengths(self, queries: Sequence[ArrayLike]) -> list[Ints]:
        """Tokens of the longest match in the corpus from every place of each query.

        Raises:
            InputError: a query holds the separator, or an id outside the vocabulary; names it.
        """
        arrays = self._checked(queries)
        found: list[Ints] = []
        for batch in _batches(arrays):
            flat, bounds = _joined(batch, self._dtype)
            found += np.split(self._match_lengths(flat, bounds), bounds[1:-1])
        return found

    def spans(self, queries: Sequence[ArrayLike], *, min_tokens: int = 1) -> SpanTable:
        """The maximal spans of queries that occur in the corpus, with their counts.

        Args:
            queries: token ids, each shape (T,); many at once are several times cheaper than one by one.
            min_tokens: shorter spans are left out.

        Raises:
            InputError: as `match_lengths`.
        """
        arrays = self._checked(queries)
        parts: list[tuple[Ints, ...]] = []
        done = 0
        for batch in _batches(arrays):
            flat, bounds = _joined(batch, self._dtype)
            query, start, end = maximal_spans(self._match_lengths(flat, bounds), bounds, min_tokens=min_tokens)
            offset = bounds[query]
            rows = self._rows(Patterns(Text(flat), start + offset, end + offset))
            parts.append((query + done, start, end, rows.low, rows.high))
            done += len(batch)
        if not parts:
            none, no_rows = np.zeros(0, dtype=np.int64), np.zeros((len(self.shards), 0), dtype=np.int64)
            return SpanTable(none, none, none, Rows(no_rows, no_rows))
        query, start, end, low, high = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
        return SpanTable(query, start, end, Rows(low, high))

    def find(self, patterns: Sequence[ArrayLike]) -> Rows:
        """The rows that begin with each pattern.

        Raises:
            InputError: as `match_lengths`; an empty pattern.
        """
        arrays = self._checked(patterns)
        empty = [index for index, one in enumerate(arrays) if not one.size]
        if empty:
            raise InputError(f"pattern {empty[0]} must hold at least one token, got none.")
        flat, bounds = _joined(arrays, self._dtype)
        return self._rows(Patterns(Text(flat), bounds[:-1], bounds[1:]))

    def count(self, patterns: Sequence[ArrayLike]) -> Ints:
        """How often each pattern occurs in the corpus; shape (P,)."""
        return self.find(patterns).counts

    def occurrences(self, rows: Rows, patterns: Sequence[int], *, limit: int, seed: int = 0) -> list[list[Occurrence]]:
        """Some places of patterns: all of them up to `limit`, else a sample that the seed fixes, in corpus order.

        Args:
            rows: from `find` or of a `SpanTable`.
            patterns: their numbers there.
            limit: places of a pattern at most.
            seed: of the samples. They depend on nothing else, so that a batch gives what single queries give.
        """
        found: list[list[Occurrence]] = [[] for _ in patterns]
        wanted: list[list[Ints]] = [[] for _ in self.shards]
        owners: list[list[int]] = [[] for _ in self.shards]
        for order, pattern in enumerate(patterns):
            for number, mine in _sampled_rows(rows.low[:, pattern].tolist(), rows.high[:, pattern].tolist(), limit, seed):
                wanted[number].append(mine)
                owners[number] += [order] * mine.size
        for number, shard in enumerate(self.shards):
            if wanted[number]:
                positions = shard.table.positions(np.concatenate(wanted[number]))
                for order, place in zip(owners[number], self._places(number, positions), strict=True):
                    found[order].append(place)
        for some in found:
            some.sort(key=lambda place: (place.document, place.position))
        return found

    def _places(self, number: int, positions: Ints) -> list[Occurrence]:
        shard = self.shards[number]
        documents = shard.documents_of(positions)
        starts, ends = shard.bounds_of(documents)
        columns = (positions, documents + self._first_documents[number], starts, ends)
        return [Occurrence(number, *values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def num_documents_with(self, rows: Rows, pattern: int) -> int:
        """Documents that hold a pattern; reads every occurrence, a part at a time."""
        number = 0
        for shard, low, high in zip(self.shards, rows.low[:, pattern], rows.high[:, pattern], strict=True):
            parts = [
                np.unique(shard.documents_of(shard.table.positions(np.arange(start, min(high, start + MAX_LISTED)))))
                for start in range(int(low), int(high), MAX_LISTED)
            ]
            number += np.unique(np.concatenate(parts)).size if parts else 0
        return number

    def documents_of(self, shard: int, positions: Ints) -> Ints:
        """The numbers of the documents that token positions of a shard lie in."""
        found: Ints = self.shards[shard].documents_of(positions) + self._first_documents[shard]
        return found

    def document_of(self, shard: int, position: int) -> int:
        """The number of the document that a token position of a shard lies in."""
        return int(self.documents_of(shard, np.array([position]))[0])

    def bounds(self, document: int) -> tuple[int, int, int]:
        """Shard of a document and its token positions [start, end) there."""
        number, inside = self._locate(document)
        starts, ends = self.shards[number].bounds_of(np.array([inside]))
        return number, int(starts[0]), int(ends[0])

    def ids(self, shard: int, start: int, end: int) -> NDArray[Any]:
        """Token ids of a stretch of a shard, of the type they are stored in."""
        found: NDArray[Any] = self.shards[shard].table.tokens[start:end]
        return found

    def metadata(self, document: int) -> dict[str, Any]:
        """What was stored with a document."""
        number, inside = self._locate(document)
        return self.shards[number].metadata_of(inside)

    def _locate(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise ValueError(f"document must lie in 0..{self.num_documents - 1}, got {document}.")
        number = int(np.searchsorted(self._first_documents, document, side="right")) - 1
        return number, document - int(self._first_documents[number])

    def _match_lengths(self, flat: NDArray[Any], bounds: Ints) -> Ints:
        longest = np.zeros(flat.size, dtype=np.int64)
        if not flat.size:
            return longest
        patterns = Patterns(Text(flat), np.arange(flat.size), np.repeat(bounds[1:], np.diff(bounds)))
        for shard in self.shards:
            found = shard.table.neighbours(patterns)
            np.maximum(longest, np.maximum(found.before, found.after), out=longest)
        return longest

    def _rows(self, patterns: Patterns) -> Rows:
        found = [shard.table.interval(patterns) for shard in self.shards]
        return Rows(np.stack([low for low, _ in found]), np.stack([high for _, high in found]))

    def _checked(self, queries: Sequence[ArrayLike]) -> list[NDArray[Any]]:
        arrays = []
        for number, query in enumerate(queries):
            array = np.asarray(query)
            array = array.astype(np.int64) if array.size == 0 else array
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise InputError(f"query {number} must be a list of token ids, got {array.dtype} of shape {array.shape}.")
            if array.size:
                lowest, highest = int(array.min()), int(array.max())
                if highest == self.manifest.separator:
                    raise InputError(f"query {number} holds the separator of the index, {highest}, which no text has.")
                if lowest < 0 or highest >= self.manifest.vocabulary_size:
                    wrong = lowest if lowest < 0 else highest
                    raise InputError(
                        f"query {number} holds id {wrong}; ids of this index lie in 0..{self.manifest.vocabulary_size - 1}. "
                        "Is it the tokenizer that the index was built with?"
                    )
            arrays.append(array)
        return arrays


def _sampled_rows(lows: list[int], highs: list[int], limit: int, seed: int) -> Iterator[tuple[int, Ints]]:
    """Shard numbers with the rows to read there: all rows of a pattern, or `limit` of them."""
    total = sum(highs) - sum(lows)
    if total <= limit:
        for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
            if high > low:
                yield number, np.arange(low, high)
        return
    generator = np.random.default_rng([seed, total, *lows])
    chosen = np.sort(generator.choice(total, size=limit, replace=False, shuffle=False))
    done = 0
    for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
        mine = chosen[(chosen >= done) & (chosen < done + high - low)] - done + low
        done += high - low
        if mine.size:
            yield number, mine


def _batches(arrays: Sequence[NDArray[Any]]) -> Iterator[list[NDArray[Any]]]:
    batch: list[NDArray[Any]] = []
    size = 0
    for array in arrays:
        if batch and size + array.size > MAX_TOKENS_TOGETHER:
            yield batch
            batch, size = [], 0
        batch.append(array)
        size += array.size
    if batch:
        yield batch


def _joined(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> tuple[NDArray[Any], Ints]:
    bounds = np.concatenate([[0], np.cumsum([array.size for array in arrays])]).astype(np.int64)
    flat = np.concatenate([array.astype(dtype) for array in arrays]) if arrays else np.zeros(0, dtype)
    return flat, bounds


def _check_tokenizer(folder: Path, manifest: IndexManifest, first: IndexManifest, digest: str | None) -> None:
    for name in ("token_dtype", "vocabulary_size", "tokenizer_digest"):
        if getattr(manifest, name) != getattr(first, name):
            raise InputError(f"index '{folder.name}' has another tokenizer than the first ({name.replace('_', ' ')} differs).")
    if digest is not None and manifest.tokenizer_digest is not None and digest != manifest.tokenizer_digest:
        raise InputError(
            f"index '{folder.name}' was built with another tokenizer (digest {manifest.tokenizer_digest[:12]}, asked with "
            f"{digest[:12]}): nothing would be found. Give the tokenizer it was built with, or build it again."
        )


def _check_digests(folder: Path, manifest: IndexManifest) -> None:
    for shard in manifest.shards:
        for name, entry in sorted(shard.files.items()):
            if describe_file(folder / name) != entry:
                raise InputError(f"'{name}' of index '{folder.name}' is not the file that was built (digest differs).")
