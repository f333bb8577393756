"""How often a text occurs in a corpus: to the letter, and in other documents that differ by a few edits.

"Seen once" is then counted, never assumed. Exact copies are found by the inner tokens and verified on characters, wherever
tokens cut them; near-duplicates by its rarest pieces, around which documents are compared by edit distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memguard.tracing.characters import PlainGeneration
from memguard.tracing.corpus_index import Occurrence
from memguard.tracing.normalised import normalise
from memguard.tracing.simpletrace import Generation, Tracer, inner_tokens

MAX_EDIT_SHARE = 0.1  # of a text's characters
MAX_PLACES = 256  # of exact copies that are verified on characters
PIECE, STRIDE = 5, 2  # tokens of a piece of the text, and from one to the next
NUM_PIECES = 24  # rarest ones, which lead to near-duplicates
NEAR_PLACES = 16  # places of a piece that are compared, besides those of exact copies
SLACK = 32  # tokens beside a place, besides a tenth of the text


@dataclass(frozen=True)
class Copies:
    """Copies of one text in a corpus.

    Args:
        num_occurrences: places that hold it to the letter.
        num_documents: documents that hold it so.
        num_near_documents: other documents that hold it up to a tenth of its characters edited, spelling aside.
        is_capped: there are more places than were looked at, so that counts are lower ends.
    """

    num_occurrences: int
    num_documents: int
    num_near_documents: int
    is_capped: bool

    @property
    def is_once(self) -> bool:
        """Whether the corpus holds it once, and nothing close to it elsewhere."""
        return self.num_occurrences == 1 and self.num_near_documents == 0 and not self.is_capped


def count_copies(tracer: Tracer, texts: Sequence[str]) -> list[Copies]:
    """Exact copies and near-duplicates of each text, in order.

    Args:
        tracer: of the corpus.
        texts: such as records of the training data, whose own place counts as one.

    Returns:
        One `Copies` a text; an empty text has none.

    Example:
        >>> Copies(1, 1, 0, False).is_once, Copies(1, 1, 2, False).is_once
        (True, False)
    """
    return [_count(tracer, tracer.plain(Generation(text=text))) for text in texts]


def fewest_edits(pattern: str, text: str) -> int:
    """The fewest characters inserted, left out or replaced that make the pattern a stretch of the text.

    Example:
        >>> fewest_edits("the lazy dog", "over the lasy dog"), fewest_edits("abc", "")
        (1, 3)

    Source: Myers, JACM 46 (1999), bit-parallel approximate matching.
    """
    size = len(pattern)
    if not size:
        return 0
    places: dict[str, int] = {}
    for place, letter in enumerate(pattern):
        places[letter] = places.get(letter, 0) | 1 << place
    every, last = (1 << size) - 1, 1 << (size - 1)
    plus, minus, score = every, 0, size
    best = size
    for letter in text:
        same = places.get(letter, 0)
        vertical = same | minus
        horizontal = (((same & plus) + plus) ^ plus) | same
        up, down = minus | ~(horizontal | plus), plus & horizontal
        score += 1 if up & last else -1 if down & last else 0
        best = min(best, score)
        up, down = up << 1, down << 1
        plus, minus = (down | ~(vertical | up)) & every, up & vertical & every
    return best


def _count(tracer: Tracer, one: PlainGeneration) -> Copies:
    if not one.ids.size or not one.raw:
        return Copies(0, 0, 0, is_capped=False)
    places, is_capped = _exact_places(tracer, one)
    documents = {place.document for place in places}
    near, more = _near_documents(tracer, one, documents, len(places))
    occurrences, num_documents = len(places), len(documents)
    if is_capped:  # then the tokens' own count is the better lower end
        rows = tracer.index.find([one.ids])
        occurrences = max(occurrences, int(rows.counts[0]))
        num_documents = max(num_documents, tracer.index.num_documents_with(rows, 0))
    return Copies(occurrences, num_documents, len(near), is_capped or more)


def _exact_places(tracer: Tracer, one: PlainGeneration) -> tuple[list[Occurrence], bool]:
    """Places whose characters are those of the text, and whether there were more than were looked at."""
    start, end = inner_tokens(len(one.ids))
    rows = tracer.index.find([one.ids[start:end]])
    some = tracer.index.occurrences(rows, [0], limit=MAX_PLACES, seed=tracer.settings.seed)[0]
    whole = []
    for place in some:
        match = tracer.reader.grow(one, (start, end), place)
        if match.end - match.start == len(one.raw):
            whole.append(place)
    return whole, int(rows.counts[0]) > len(some)


def _near_documents(tracer: Tracer, one: PlainGeneration, exact: set[int], num_exact: int) -> tuple[set[int], bool]:
    """Other documents with a stretch close to the text, and whether more were there than were compared.

    Its rarest pieces lead there: the longest spans would lead to exact copies alone.
    """
    starts = list(range(0, max(1, len(one.ids) - PIECE + 1), STRIDE))
    rows = tracer.index.find([one.ids[start : start + PIECE] for start in starts])
    counts = rows.counts
    order = [at for at in np.argsort(counts, kind="stable").tolist() if counts[at]]
    rarest = order[:NUM_PIECES]
    limit = num_exact + NEAR_PLACES
    wanted = normalise(one.text).strip()
    length, most = len(one.ids), int(MAX_EDIT_SHARE * len(wanted))
    slack = SLACK + length // 10
    found: set[int] = set()
    compared: set[tuple[int, int]] = set()
    for at, some in zip(rarest, tracer.index.occurrences(rows, rarest, limit=limit, seed=tracer.settings.seed), strict=True):
        for place in some:
            begin = place.position - starts[at]
            where = place.document, begin // max(1, slack)
            if place.document in exact or place.document in found or where in compared:
                continue
            compared.add(where)
            ahead = Occurrence(place.shard, begin, place.document, place.start, place.end)
            window = tracer.reader.window(ahead, slack, length + slack)
            if fewest_edits(wanted, normalise(window.decode(errors="replace"))) <= most:
                found.add(place.document)
    return found, any(counts[at] > limit for at in rarest)
