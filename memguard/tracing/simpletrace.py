"""Which training text generations came from: maximal spans, how rare they are, their documents, and how full the match is.

A generation is *full raw* when a document holds its text, *full normalised* when one does but for spelling, *partial* when a
span of tokens occurs, else *none*. Spans and counts are exact; the tiers look at up to `max_candidates` places of a match.

Source: SimpleTrace (Barmina, Schneider-Kamp, Galke Poech, 2606.06286). Differs: both neighbours of an absent suffix, tiers
decided on characters, figures on unmerged spans, documents drawn by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memguard.errors import InputError
from memguard.tracing.characters import DocumentReader, PlainGeneration
from memguard.tracing.corpus_index import CorpusIndex, Occurrence
from memguard.tracing.degenerate import degenerate_kind
from memguard.tracing.normalised import is_respelt, normalise
from memguard.tracing.recall import Recall, words_of
from memguard.tracing.recall_bound import RecallBound
from memguard.tracing.short_texts import MAX_BYTES, ShortTextFinder
from memguard.tracing.spans import Rows, SpanTable, merge_spans, rarest
from memguard.tracing.token_text import TokenText, character_offsets, trimmed

Tier = Literal["full raw", "full normalised", "partial", "none"]
UNMATCHED = ("partial", "none")
FULL = ("full raw", "full normalised")
TOGETHER = 32  # generations
EDGE = 8  # tokens at either end that a cut inside a token may change; 6 were the most in 1,000 excerpts
NUM_ANCHORS = 8  # spans from which a normalised match is looked for
MERGED_OVER = 3  # documents of a span that are looked at for its union with the next
WINDOW = 5  # lengths of the generation that a document is compared over


@dataclass(frozen=True)
class Generation:
    """One completion, as token ids or as text, and its prompt, which is taken off where it is repeated in front."""

    ids: Sequence[int] | None = None
    text: str | None = None
    prompt_ids: Sequence[int] = ()
    prompt: str = ""
    id: str = ""


@dataclass(frozen=True)
class TraceSettings:
    """How generations are traced.

    Args:
        min_tokens: of a span.
        rare_share: of a generation's tokens: so many of the rarest spans get documents.
        max_documents: of a span.
        max_candidates: places of a match that are compared on characters.
        near_verbatim: compare words with every document found; nearly as much again as all else.
        seed: of the documents drawn.
    """

    min_tokens: int = 4
    rare_share: float = 0.05
    max_documents: int = 10
    max_candidates: int = 64
    near_verbatim: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_documents", "max_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0.0 < self.rare_share <= 1.0:
            raise ValueError(f"rare_share must be above 0 and at most 1, got {self.rare_share}.")


@dataclass(frozen=True)
class DocumentPlace:
    """A span in a document: the document's number, tokens before it there, and near-verbatim recall where it was measured."""

    document: int
    position: int
    recall: float | None = None


@dataclass(frozen=True)
class TracedSpan:
    """A maximal span: tokens [start, end), characters, occurrences in the corpus, summed log unigram in nats.

    Only rare spans have documents: a sample, in corpus order.
    """

    start: int
    end: int
    first_character: int
    end_character: int
    count: int
    log_unigram: float
    is_rare: bool
    documents: tuple[DocumentPlace, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What was found of one generation.

    Args:
        id: of the generation.
        num_tokens: without prompt and special tokens.
        tier: the fullest match.
        document: one that holds all of it, for the full tiers.
        spans: maximal, by place.
        merged: tokens [start, end) of rare spans for display.
        longest_verbatim_characters: of the longest span, grown on the text of its documents.
        num_documents: that hold the longest span, every one counted.
        recall: the highest near-verbatim recall of any document found, 1 for a full match; None where it was not measured.
            0 for texts of fewer than four words that are no full match, since a run has at least four.
        flags: prompt_stripped, loop, degenerate, empty, candidates_capped.
    """

    id: str
    num_tokens: int
    tier: Tier
    document: int | None
    spans: tuple[TracedSpan, ...]
    merged: tuple[tuple[int, int], ...]
    longest_verbatim_characters: int
    num_documents: int
    recall: float | None
    flags: tuple[str, ...]

    @property
    def longest_tokens(self) -> int:
        """Of any span; 0 without one."""
        return max((span.end - span.start for span in self.spans), default=0)

    @property
    def longest_rare_tokens(self) -> int:
        """Of the rare spans; 0 without one."""
        return max((span.end - span.start for span in self.spans if span.is_rare), default=0)


def trace_generations(
    index: CorpusIndex, tokenizer: Any, generations: Sequence[Generation], *, settings: TraceSettings | None = None
) -> list[Trace]:
    """Trace generations to the corpus, in order; equal ones are traced once and each counted.

    Args:
        index: of the training corpus.
        tokenizer: the one the index was built with.
        generations: completions.
        settings: None takes the defaults.

    Raises:
        InputError: a generation without ids or text, or with ids that the index cannot hold; names it.

    Source: SimpleTrace (2606.06286), and OLMoTrace (2504.07096) for the rarity of spans.
    """
    return Tracer(index, TokenText(tokenizer), settings or TraceSettings()).trace(generations)


class Tracer:
    """An index, what its tokens write, and the settings; for many batches of one tokenizer."""

    def __init__(self, index: CorpusIndex, token_text: TokenText, settings: TraceSettings) -> None:
        if len(token_text.pieces) > index.manifest.vocabulary_size:
            raise InputError(
                f"the tokenizer has {len(token_text.pieces)} entries, the index {index.manifest.vocabulary_size}: "
                "give the tokenizer the index was built with."
            )
        self.index, self.token_text, self.settings = index, token_text, settings
        self.reader = DocumentReader(index, token_text)
        self._short = ShortTextFinder(index, token_text)
        self._bound = RecallBound(token_text.pieces) if settings.near_verbatim else None

    def plain(self, one: Generation) -> PlainGeneration:
        """Tokens and bytes of a completion, its prompt and special tokens taken off."""
        return self._prepare(one, 0)[0]

    def trace(self, generations: Sequence[Generation]) -> list[Trace]:
        """Traces in the order of the generations."""
        prepared = [self._prepare(one, number) for number, one in enumerate(generations)]
        first: dict[bytes, int] = {}
        for number, (plain, _) in enumerate(prepared):
            first.setdefault(plain.ids.tobytes() + b"/" + plain.raw, number)
        numbers = list(first.values())
        found: dict[int, Trace] = {}
        for start in range(0, len(numbers), TOGETHER):
            part = numbers[start : start + TOGETHER]
            found |= zip(part, self._trace_batch([prepared[number][0] for number in part]), strict=True)
        traces = []
        for one, (plain, flags) in zip(generations, prepared, strict=True):
            trace = found[first[plain.ids.tobytes() + b"/" + plain.raw]]
            traces.append(replace(trace, id=one.id, flags=(*flags, *trace.flags)))
        return traces

    def _prepare(self, one: Generation, number: int) -> tuple[PlainGeneration, tuple[str, ...]]:
        """Tokens and bytes of a completion, its prompt and special tokens taken off."""
        where = f"generation {one.id or number}"
        if (one.ids is None) == (one.text is None):
            raise InputError(f"{where} must have ids or text, and not both.")
        stripped = False
        if one.text is not None:
            stripped = bool(one.prompt) and one.text.startswith(one.prompt)
            text = one.text[len(one.prompt) :] if stripped else one.text
            ids, raw = self.token_text.encode(text), text.encode(errors="replace")
        else:
            assert one.ids is not None
            ids, raw, prompt = [int(id_) for id_ in one.ids], None, [int(id_) for id_ in one.prompt_ids]
            stripped = bool(prompt) and ids[: len(prompt)] == prompt
            ids = self._without_special(ids[len(prompt) :] if stripped else ids)
        self._check(ids, where)
        return self._plain(ids, raw), (("prompt_stripped",) if stripped else ())

    def _check(self, ids: Sequence[int], where: str) -> None:
        size = len(self.token_text.pieces)
        wrong = next((id_ for id_ in ids if not 0 <= id_ < size), None)
        if wrong is not None:
            what = "the separator of the index" if wrong == self.index.manifest.separator else f"outside 0..{size - 1}"
            raise InputError(f"{where} holds id {wrong}, {what}.")

    def _plain(self, ids: list[int], raw: bytes | None) -> PlainGeneration:
        array = np.asarray(ids, dtype=np.int64)
        whole, offsets = self.token_text.bytes_of(ids), self.token_text.offsets(array)
        # What the tokenizer does not keep of a text is not in the corpus either.
        kept = raw if raw is not None and whole.endswith(raw) else trimmed(whole)
        lead = whole.find(kept) if raw is None or not whole.endswith(raw) else len(whole) - len(kept)
        return PlainGeneration(array, kept, np.clip(offsets - lead, 0, len(kept)))

    def _without_special(self, ids: list[int]) -> list[int]:
        special = self.token_text.special_ids
        start, end = 0, len(ids)
        while start < end and ids[start] in special:
            start += 1
        while end > start and ids[end - 1] in special:
            end -= 1
        return ids[start:end]

    def _trace_batch(self, batch: Sequence[PlainGeneration]) -> list[Trace]:
        table = self.index.spans([one.ids for one in batch], min_tokens=self.settings.min_tokens)
        sums = self._log_unigram_sums(batch, table)
        is_rare = rarest(sums, table, [len(one.ids) for one in batch], share=self.settings.rare_share)
        cores = [inner_tokens(len(one.ids)) for one in batch]
        inner = [one.ids[start:end] for one, (start, end) in zip(batch, cores, strict=True)]
        places = [number for number, ids in enumerate(inner) if ids.size]
        rows = self.index.find([inner[number] for number in places])
        core_of = {number: place for place, number in enumerate(places)}
        counts, core_counts = table.count, rows.counts
        places_of = self._places_of(table, is_rare, len(batch))
        traces = []
        for number, one in enumerate(batch):
            core = (
                _Core(*cores[number], rows, core_of[number], int(core_counts[core_of[number]])) if number in core_of else None
            )
            traced = _Traced(
                self.index,
                self.reader,
                self._short,
                self._bound,
                self.settings,
                one,
                table,
                number,
                counts,
                sums,
                is_rare,
                places_of,
                core,
            )
            traces.append(traced.trace())
        return self._respelt(batch, traces)

    def _respelt(self, batch: Sequence[PlainGeneration], traces: list[Trace]) -> list[Trace]:
        """Texts in capitals or wide letters share no tokens with their source: they are looked for in plain spelling too."""
        again = [
            number
            for number, (one, found) in enumerate(zip(batch, traces, strict=True))
            if found.tier in UNMATCHED and is_respelt(one.text)
        ]
        wanted = [normalise(batch[number].text).strip() for number in again]
        plain = [self._plain(self.token_text.encode(text), text.encode()) for text in wanted]
        if not any(one.ids.size for one in plain):
            return traces
        table = self.index.spans([one.ids for one in plain], min_tokens=1)
        places = self._places_of(table, np.zeros(len(table), dtype=np.bool_), len(plain))
        for place, (number, one, text) in enumerate(zip(again, plain, wanted, strict=True)):
            part = table.of(place)
            for at in (at for at in range(part.start, part.stop) if at in places):
                span = int(table.start[at]), int(table.end[at])
                found = self.reader.find_normalised(one, text, span, places[at])
                if found is not None:
                    recall = 1.0 if self.settings.near_verbatim else None
                    traces[number] = replace(traces[number], tier="full normalised", document=found.document, recall=recall)
                    break
        return traces

    def _places_of(self, table: SpanTable, is_rare: NDArray[np.bool_], number: int) -> dict[int, list[Occurrence]]:
        """Places of the rare spans and of the longest of each generation, by their number in the table."""
        wanted = is_rare.copy()
        for query in range(number):
            part = table.of(query)
            wanted[part.start + np.argsort(table.start[part] - table.end[part], kind="stable")[:NUM_ANCHORS]] = True
        at = np.flatnonzero(wanted).tolist()
        found = self.index.occurrences(table.rows, at, limit=self.settings.max_documents, seed=self.settings.seed)
        return dict(zip(at, found, strict=True))

    def _log_unigram_sums(self, batch: Sequence[PlainGeneration], table: SpanTable) -> NDArray[np.float64]:
        log_unigrams = self.index.log_unigrams()
        found = np.zeros(len(table))
        for number, one in enumerate(batch):
            part = table.of(number)
            # A token of no span may be absent from the corpus: it must not reach the sums of spans.
            each = np.nan_to_num(log_unigrams[one.ids], neginf=0.0)
            sums = np.concatenate([[0.0], np.cumsum(each)])
            found[part] = sums[table.end[part]] - sums[table.start[part]]
        return found


@dataclass(frozen=True)
class _Core:
    """The inner tokens [start, end) of a generation, and where they occur."""

    start: int
    end: int
    rows: Rows
    pattern: int
    count: int


@dataclass(frozen=True)
class _Traced:
    """One generation of a batch, and its part of what was found together."""

    index: CorpusIndex
    reader: DocumentReader
    short: ShortTextFinder
    bound: RecallBound | None
    settings: TraceSettings
    one: PlainGeneration
    table: SpanTable
    number: int
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    is_rare: NDArray[np.bool_]
    places_of: dict[int, list[Occurrence]]
    core: _Core | None

    def trace(self) -> Trace:
        part = self.table.of(self.number)
        spans = list(zip(self.table.start[part].tolist(), self.table.end[part].tolist(), strict=True))
        kind = degenerate_kind(self.one.text)
        flags = ("empty",) if not self.one.ids.size else (kind,) if kind else ()
        places = {at: self.places_of[at] for at in range(part.start, part.stop) if self.is_rare[at]}
        order = sorted(range(part.start, part.stop), key=lambda at: int(self.table.start[at] - self.table.end[at]))
        tier, document, longest, capped = self._full_match(order)
        recalls = self._recalls(places, self.bound) if self.bound is not None else {}
        if not spans and tier not in FULL:
            tier = "none"
        return Trace(
            id="",
            num_tokens=len(self.one.ids),
            tier=tier,
            document=document,
            spans=self._spans(part, places, recalls),
            merged=tuple(self._merged(places)),
            longest_verbatim_characters=longest,
            num_documents=self.index.num_documents_with(self.table.rows, order[0]) if order else 0,
            recall=self._best_recall(tier, recalls),
            flags=(*flags, "candidates_capped") if capped else flags,
        )

    def _best_recall(self, tier: Tier, recalls: dict[tuple[int, int], float]) -> float | None:
        """A document that holds the text has all its words, though it begins inside one or is too short for a run."""
        if not self.settings.near_verbatim:
            return None
        return 1.0 if tier in FULL else max(recalls.values(), default=0.0)

    def _span(self, at: int) -> tuple[int, int]:
        return int(self.table.start[at]), int(self.table.end[at])

    def _full_match(self, order: list[int]) -> tuple[Tier, int | None, int, bool]:
        """Tier, document, longest verbatim stretch in characters, and whether more candidates were there than looked at."""
        size = len(self.one.raw)
        longest, best = 0, slice(0, 0)
        for span, some in self._raw_candidates(order):
            for place in some:
                match = self.reader.grow(self.one, span, place)
                if match.end - match.start > longest:
                    longest, best = match.end - match.start, slice(match.start, match.end)
                if size and longest == size:
                    return "full raw", place.document, len(self.one.text), False
        characters = len(self.one.raw[best].decode(errors="ignore"))
        capped = self.core is not None and self.core.count > self.settings.max_candidates
        if 0 < size <= MAX_BYTES:
            short = self.short.find(self.one.raw)
            if short.document is not None:
                return "full raw", short.document, len(self.one.text), False
            capped = short.is_capped
        wanted = normalise(self.one.text).strip()
        if wanted:
            for at in order[:NUM_ANCHORS]:
                found = self.reader.find_normalised(self.one, wanted, self._span(at), self.places_of[at])
                if found is not None:
                    return "full normalised", found.document, characters, capped
        return "partial", None, characters, capped

    def _raw_candidates(self, order: list[int]) -> Iterator[tuple[tuple[int, int], list[Occurrence]]]:
        """Spans and places from which all of a generation could be reached: its inner tokens, and its longest spans."""
        if self.core is not None and self.core.count:
            limit, seed = self.settings.max_candidates, self.settings.seed
            yield (
                (self.core.start, self.core.end),
                self.index.occurrences(self.core.rows, [self.core.pattern], limit=limit, seed=seed)[0],
            )
        for rank, at in enumerate(order[:3]):
            start, end = self._span(at)
            if rank == 0 or self.one.offsets[end] - self.one.offsets[start] >= len(self.one.raw) / 2:
                yield (start, end), self.places_of[at]

    def _recalls(self, places: dict[int, list[Occurrence]], bound: RecallBound) -> dict[tuple[int, int], float]:
        """Recall by span and place number; a window that several spans lead to is compared once."""
        words, length = words_of(self.one.text), len(self.one.ids)
        windows: dict[tuple[int, int], NDArray[Any]] = {}
        leads: dict[tuple[int, int], tuple[int, int]] = {}
        for at, some in places.items():
            start = int(self.table.start[at])
            for number, place in enumerate(some):
                where = leads[at, number] = (place.document, place.position - start)
                if where not in windows:
                    first = place.position - start - (WINDOW - 1) // 2 * length
                    windows[where] = self.reader.tokens(place, first, first + WINDOW * length)
        may_be = bound.may_be_above_zero(words, list(windows.values())).tolist()
        recall = Recall(words)
        known = {
            where: recall.of(words_of(self.reader.text(ids))) if is_read else 0.0
            for (where, ids), is_read in zip(windows.items(), may_be, strict=True)
        }
        return {lead: known[where] for lead, where in leads.items()}

    def _spans(
        self, part: slice, places: dict[int, list[Occurrence]], recalls: dict[tuple[int, int], float]
    ) -> tuple[TracedSpan, ...]:
        if part.start == part.stop:
            return ()
        characters = character_offsets(self.one.raw, self.one.offsets)
        columns = (self.table.start[part], self.table.end[part], self.counts[part], self.sums[part], self.is_rare[part])
        rows = zip(range(part.start, part.stop), *(column.tolist() for column in columns), strict=True)
        return tuple(
            TracedSpan(
                start,
                end,
                characters[start][0],
                characters[end - 1][1],
                count,
                log_unigram,
                is_rare,
                tuple(
                    DocumentPlace(place.document, place.position - place.start, recalls.get((at, number)))
                    for number, place in enumerate(places.get(at, ()))
                ),
            )
            for at, start, end, count, log_unigram, is_rare in rows
        )

    def _merged(self, places: dict[int, list[Occurrence]]) -> list[tuple[int, int]]:
        """Rare spans, joined where a document of one holds both in one stretch, but for spelling."""
        spans = [self._span(at) for at in places]
        of = dict(zip(spans, places, strict=True))

        def occurs(start: int, end: int) -> bool:
            inside = [span for span in spans if start <= span[0] and span[1] <= end]
            low, high = int(self.one.offsets[start]), int(self.one.offsets[end])
            union = PlainGeneration(self.one.ids[start:end], self.one.raw[low:high], self.one.offsets[start : end + 1] - low)
            wanted = normalise(union.text).strip()
            return any(
                self.reader.find_normalised(union, wanted, (span[0] - start, span[1] - start), places[of[span]][:MERGED_OVER])
                for span in inside
            )

        return merge_spans(spans, occurs)


def inner_tokens(num_tokens: int) -> tuple[int, int]:
    """The inner tokens [start, end) that a copy holds even where it is cut inside tokens."""
    edge = min(EDGE, num_tokens // 4)
    return edge, num_tokens - edge
