"""How often a text occurs in a corpus: to the letter, and in other documents that differ by a few edits.

"Seen once" is then counted, never assumed. Exact copies are every place of its characters. Near-duplicates are found where
pieces of the text stand at about the same distances, compared by edit distance: their number is a lower end, by its nature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memguard.tracing.characters import PlainGeneration
from memguard.tracing.edits import fewest_edits, needs_more_edits
from memguard.tracing.normalised import normalise
from memguard.tracing.simpletrace import Generation, Tracer
from memguard.tracing.text_places import PlaceFinder
from memguard.tracing.token_text import trimmed

Ints = NDArray[np.int64]
MAX_EDIT_SHARE = 0.1  # of a text's characters
PIECE = 4  # tokens of a piece of the text; half as many where it has fewer than four pieces
MAX_PLACES = 1 << 10  # of a piece; more common ones lead everywhere
MAX_ROWS = 1 << 17  # of all pieces of a text
MAX_COMPARED = 128  # candidates of a text
PATIENCE = 16  # candidates in a row that are no near-duplicates, after which the others are none either
SLACK = 64  # bytes beside a candidate, besides a quarter of the text


@dataclass(frozen=True)
class Copies:
    """Copies of one text in a corpus.

    Args:
        num_occurrences: places that hold it to the letter; those that overlap are counted each.
        num_documents: documents that hold it so.
        num_near_documents: other documents found to hold it up to a tenth of its characters edited, spelling aside.
        is_capped: there are more places than were looked at, so that occurrences and documents are lower ends.
        is_near_capped: more candidates than were compared, or the text's pieces are too common to lead to any.
    """

    num_occurrences: int
    num_documents: int
    num_near_documents: int
    is_capped: bool
    is_near_capped: bool = False

    @property
    def is_once(self) -> bool:
        """Whether the corpus holds it once, and nothing close to it was found elsewhere."""
        return self.num_occurrences == 1 and self.num_near_documents == 0 and not (self.is_capped or self.is_near_capped)


@dataclass(frozen=True)
class _Candidate:
    """A place of a piece of the text: piece's first token, shard, token position there, document."""

    start: int
    shard: int
    position: int
    document: int


def count_copies(tracer: Tracer, texts: Sequence[str], *, near: bool = True) -> list[Copies]:
    """Exact copies and near-duplicates of each text, in order.

    Args:
        tracer: of the corpus.
        texts: such as records of the training data, whose own place counts as one.
        near: look for near-duplicates too. Not for canaries: their siblings differ by a secret alone.

    Returns:
        One `Copies` a text; an empty text has none.

    Example:
        >>> Copies(1, 1, 0, False).is_once, Copies(1, 1, 2, False).is_once
        (True, False)
    """
    finder = PlaceFinder(tracer.index, tracer.token_text)
    return [_count(tracer, finder, tracer.plain(Generation(text=text)), near=near) for text in texts]


def _count(tracer: Tracer, finder: PlaceFinder, one: PlainGeneration, *, near: bool) -> Copies:
    if not one.ids.size or not one.raw:
        return Copies(0, 0, 0, is_capped=False)
    places = finder.find(one.raw)
    exact = np.unique(places.documents)
    num_occurrences, num_whole = places.documents.size, int(tracer.index.count([one.ids])[0])
    if places.is_capped:  # then its own tokens' count may be the better lower end
        num_occurrences = max(num_occurrences, num_whole)
    num_near, is_near_capped = _num_near(tracer, one, exact, num_whole) if near else (0, False)
    return Copies(num_occurrences, exact.size, num_near, places.is_capped, is_near_capped)


def _num_near(tracer: Tracer, one: PlainGeneration, exact: Ints, num_whole: int) -> tuple[int, bool]:
    """Other documents with a stretch close to the text, and whether there may be more than were compared."""
    wanted = normalise(one.text).strip()
    most = int(MAX_EDIT_SHARE * len(wanted))
    candidates, is_capped = _candidates(tracer, one, exact, num_whole)
    found: set[int] = set()
    compared = misses = 0
    for candidate in candidates:
        if candidate.document in found:
            continue
        if compared == MAX_COMPARED:
            return len(found), True
        compared += 1
        raw = _around(tracer, one, candidate)
        text = normalise(raw.decode(errors="replace"))
        if one.raw in raw or needs_more_edits(wanted, text, most) or fewest_edits(wanted, text) > most:
            misses += 1
            if misses == PATIENCE:
                break
        else:
            found.add(candidate.document)
            misses = 0
    return len(found), is_capped


def _candidates(tracer: Tracer, one: PlainGeneration, exact: Ints, num_whole: int) -> tuple[Iterator[_Candidate], bool]:
    """Places where most pieces of the text stand as in the text, the best first; and whether too many were left out.

    Pieces that occur in exact copies alone lead nowhere else. The rarest are not enough: an edit makes a piece rare.
    """
    size = len(one.ids)
    length = PIECE if size >= 4 * PIECE else max(1, min(PIECE // 2, size // 2))
    pieces = [one.ids[start : start + length] for start in range(size - length + 1)]
    same: dict[bytes, int] = {}
    for piece in pieces:
        same[piece.tobytes()] = same.get(piece.tobytes(), 0) + 1
    rows = tracer.index.find(pieces)
    counts = rows.counts
    explained = num_whole * np.array([same[piece.tobytes()] for piece in pieces])
    leading = np.flatnonzero(counts > explained)
    leading = leading[np.argsort(counts[leading], kind="stable")]
    read = leading[(counts[leading] <= MAX_PLACES + explained[leading]) & (np.cumsum(counts[leading]) <= MAX_ROWS)]
    is_capped = read.size < leading.size / 2
    starts, shards, positions, documents = [], [], [], []
    for number, shard in enumerate(tracer.index.shards):
        low, high = rows.low[number, read], rows.high[number, read]
        sizes = high - low
        if sizes.sum():
            offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            found = shard.table.positions(np.repeat(low, sizes) + offsets)
            starts.append(np.repeat(read, sizes))
            shards.append(np.full(found.size, number))
            positions.append(found)
            documents.append(tracer.index.documents_of(number, found))
    if not starts:
        return iter(()), is_capped
    columns = [np.concatenate(column) for column in (starts, shards, positions, documents)]
    others = ~np.isin(columns[3], exact)
    return _grouped(*(column[others] for column in columns), gap=16 + size // 8), is_capped


def _grouped(starts: Ints, shards: Ints, positions: Ints, documents: Ints, *, gap: int) -> Iterator[_Candidate]:
    """Places of a document that lie as in the text, but for `gap` tokens from one to the next; most pieces first."""
    if not starts.size:
        return
    begins = positions - starts
    order = np.lexsort((begins, documents))
    starts, shards, positions, documents, begins = (one[order] for one in (starts, shards, positions, documents, begins))
    is_new = np.concatenate([[True], (np.diff(documents) != 0) | (np.diff(begins) > gap)])
    groups = np.cumsum(is_new) - 1
    pairs = np.unique(groups * (int(starts.max()) + 1) + starts)
    num_pieces = np.bincount(pairs // (int(starts.max()) + 1))
    firsts = np.flatnonzero(is_new)
    middles = (firsts + np.append(firsts[1:], starts.size) - 1) // 2
    for at in middles[np.argsort(-num_pieces, kind="stable")].tolist():
        yield _Candidate(*(int(column[at]) for column in (starts, shards, positions, documents)))


def _around(tracer: Tracer, one: PlainGeneration, candidate: _Candidate) -> bytes:
    """Bytes of a document around a place, as many as the text has on either side of it and some more."""
    ahead = int(one.offsets[candidate.start])
    more = SLACK + len(one.raw) // 4
    _, first, last = tracer.index.bounds(candidate.document)
    here, lengths = candidate.position, tracer.token_text.lengths
    before = tracer.index.ids(candidate.shard, max(first, here - ahead - more), here)
    behind = tracer.index.ids(candidate.shard, here, min(last, here + len(one.raw) - ahead + more))
    # At least a byte a token: more were read than are needed.
    before = before[before.size - int(np.searchsorted(np.cumsum(lengths[before[::-1]]), ahead + more)) :]
    behind = behind[: int(np.searchsorted(np.cumsum(lengths[behind]), len(one.raw) - ahead + more))]
    return trimmed(tracer.token_text.bytes_of([*before.tolist(), *behind.tolist()]))
