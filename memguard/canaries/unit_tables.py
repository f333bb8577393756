"""Whether the tokens of a secret are those of its pieces, one piece after the other: learned from samples, then verified.

A secret is cut into pieces: words, or runs of characters where the tokenizer always cuts. Every text that can stand at a
piece is encoded in its place among others and must give the same tokens each time. Then whole secrets are encoded and
compared with the pieces' tokens put together: random draws, every pair of neighbours where that is feasible, and texts
in which a token of the vocabulary would lie across a cut. `NotFactorised` says what failed, without any secret.
"""

from __future__ import annotations

import itertools
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memguard.canaries.automata import SecretAutomaton, WordsAutomaton, iterate_secrets
from memguard.canaries.encoding import BLANK_MARKS, EncodedSecret, SecretEncoder
from memguard.canaries.formats import CanaryFormat, SecretSpace

MAX_TEXTS = 20_000  # texts of one piece that are encoded one by one
NUM_SAMPLES = 256  # secrets that show where the tokenizer cuts
NUM_DRAWS = 2_048  # secrets that are compared whole
NUM_ROUNDS = 3  # different neighbours that every text of a piece is encoded among
MAX_PAIRS = 2_000  # neighbours at one cut that are all tried
MAX_CROSSING_ROWS = 8_192  # secrets that hold a token of the vocabulary across a cut
SEED = "memguard/unit tables"

Pieces = tuple[tuple[str, ...], ...]  # the texts that can stand at each piece
Row = tuple[str, ...]  # the pieces of one secret, in order
Table = dict[str, tuple[int, ...]]  # text of a piece -> its token ids


class NotFactorised(Exception):
    """A space whose tokens are not those of its pieces; the message is a plain sentence."""


@dataclass(frozen=True)
class UnitTables:
    """Tokens of every text at every piece of a secret, and the ids that stand before all of them."""

    prefix_ids: tuple[int, ...]
    tables: tuple[Table, ...]


def learn_unit_tables(
    automaton: SecretAutomaton, canary_format: CanaryFormat, encoder: SecretEncoder, *, name: str | None
) -> UnitTables:
    """Cut the secrets of a format into pieces and find the tokens of each; verified on whole secrets.

    Raises:
        NotFactorised: the tokens of a piece depend on what stands around it.
    """
    rng = random.Random(SEED)
    probe = _Probe(canary_format, encoder, name)
    words = isinstance(automaton, WordsAutomaton)
    samples = [canary_format.secret.draw(rng) for _ in range(NUM_SAMPLES)]
    pieces = automaton.choices if words else _runs(automaton, probe.cuts(samples))
    prefix_ids, parts_of = probe.parts(list(dict.fromkeys(_mixed_rows(pieces, rng))))
    learned = UnitTables(prefix_ids, _tables(parts_of, len(pieces)))
    vocabulary = probe.vocabulary()
    across = _word_rows(vocabulary, pieces) if words else _run_rows(vocabulary, pieces, probe.before, probe.after)
    if len(across) > MAX_CROSSING_ROWS:
        across = rng.sample(across, MAX_CROSSING_ROWS)
    drawn = [_row_of(secret, pieces, words=words) for secret in _draws(canary_format.secret, rng)]
    _verify(learned, probe, list(dict.fromkeys([*drawn, *_pair_rows(pieces), *across])))
    return learned


def _tables(parts_of: dict[Row, list[tuple[int, ...]]], num_pieces: int) -> tuple[Table, ...]:
    """One table per piece, if every text has the same tokens in every row."""
    tables: tuple[Table, ...] = tuple({} for _ in range(num_pieces))
    for row, parts in parts_of.items():
        for table, text, tokens in zip(tables, row, parts, strict=True):
            if table.setdefault(text, tokens) != tokens:
                raise NotFactorised("The tokens of one part of the secret depend on the characters around it.")
    if any(len(set(table.values())) < len(table) for table in tables):
        raise NotFactorised("Two texts of the space are written with the same tokens.")
    return tables


class _Probe:
    """Encodes secrets of one format, and holds them to be carried and to one kind of join with the template."""

    def __init__(self, canary_format: CanaryFormat, encoder: SecretEncoder, name: str | None) -> None:
        self.canary_format, self.encoder, self.name = canary_format, encoder, name
        before, _, self.after = canary_format.split("", name=name)
        self.before, self.low = before, len(before)
        self._merged: bool | None = None

    def spans(self, secrets: Sequence[str]) -> list[EncodedSecret]:
        """Every secret encoded."""
        found = []
        for item in self.encoder.encode(self.canary_format, secrets, [self.name] * len(secrets)):
            if item is None:
                raise NotFactorised("The tokenizer does not write every secret of the space back.")
            merged = item.join == "merged"
            if self._merged not in (None, merged):
                # Such a format's plan draws only those that do not.
                raise NotFactorised("Some secrets of the space share a token with the template and others do not.")
            self._merged = merged
            found.append(item)
        return found

    def offsets(self, secrets: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Character offsets of every token of `EncodedSecret.ids` but the tail, as `SecretEncoder.encode` reads them."""
        texts = [self.before + secret + self.after for secret in secrets]
        encoded = self.encoder.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, padding=False, truncation=False
        )
        lead = [(0, 0)] * len(self.encoder.lead_ids)
        return [[*lead, *offsets] for offsets in encoded["offset_mapping"]]

    def vocabulary(self) -> list[str]:
        """The texts of all tokens, a blank where the vocabulary marks one."""
        marks = re.compile("|".join(BLANK_MARKS))
        return sorted({marks.sub(" ", token).removeprefix("##") for token in self.encoder.tokenizer.get_vocab()})

    def cuts(self, secrets: Sequence[str]) -> list[int]:
        """Places of a secret, its ends among them, that no token of any of these secrets lies across."""
        length = len(secrets[0])
        places = set(range(1, length))
        for item, offsets in zip(self.spans(secrets), self.offsets(secrets), strict=True):
            for start, end in offsets[item.start : item.end]:
                places -= set(range(max(start - self.low, 0) + 1, min(end - self.low, length)))
        return [0, *sorted(places), length]

    def parts(self, rows: Sequence[Row]) -> tuple[tuple[int, ...], dict[Row, list[tuple[int, ...]]]]:
        """The ids that all rows begin with, at most up to the secret, and the tokens of every piece behind them."""
        secrets = ["".join(row) for row in rows]
        spans = self.spans(secrets)
        first = spans[0].ids
        start = min(item.start for item in spans)
        start = next((at for at in range(start) if any(item.ids[at] != first[at] for item in spans)), start)
        if start < 1:
            raise NotFactorised("No token stands before all secrets alike.")
        offsets = self.offsets(secrets)
        found = {
            row: self._parts(row, item.ids[start : item.end], offsets[start : item.end])
            for row, item, offsets in zip(rows, spans, offsets, strict=True)
        }
        return first[:start], found

    def _parts(self, row: Row, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """A span's tokens, each with the piece whose characters it holds; a terminator goes with the last one."""
        starts = list(itertools.accumulate(map(len, row[:-1]), initial=self.low))
        parts: list[list[int]] = [[] for _ in row]
        for token, (start, end) in zip(ids, offsets, strict=True):
            place = bisect_right(starts, max(start, self.low)) - 1
            if end > start and bisect_right(starts, max(end - 1, self.low)) - 1 != place:
                raise NotFactorised("Some tokens hold characters of two parts of the secret.")
            parts[place].append(token)
        if not all(parts):
            raise NotFactorised("Some parts of the secret have no token of their own.")
        return [tuple(part) for part in parts]


def _runs(automaton: SecretAutomaton, cuts: Sequence[int]) -> Pieces:
    """Every text that can stand between two cuts."""
    pieces = []
    for low, high in itertools.pairwise(cuts):
        texts = automaton.pieces(low, high, limit=MAX_TEXTS)
        if texts is None:
            raise NotFactorised(
                f"The tokenizer does not cut the secrets at the same places: a stretch of {high - low} characters, cut in "
                f"varying ways, has more than {MAX_TEXTS} texts."
            )
        pieces.append(tuple(texts))
    return tuple(pieces)


def _row_of(secret: str, pieces: Pieces, *, words: bool) -> Row:
    """A secret cut into its pieces."""
    if words:
        first, *rest = secret.split(" ")
        return (first, *(f" {word}" for word in rest))
    ends = list(itertools.accumulate((len(texts[0]) for texts in pieces), initial=0))
    return tuple(secret[low:high] for low, high in itertools.pairwise(ends))


def _mixed_rows(pieces: Pieces, rng: random.Random) -> Iterable[Row]:
    """Rows that hold every text of every piece in each of several rounds, among other neighbours each time."""
    for _ in range(NUM_ROUNDS):
        mixed = [rng.sample(texts, len(texts)) for texts in pieces]
        for number in range(max(map(len, mixed))):
            yield tuple(texts[number % len(texts)] for texts in mixed)


def _draws(space: SecretSpace, rng: random.Random) -> list[str]:
    """Random secrets of the space; all of them when they are few."""
    return list(iterate_secrets(space)) if space.size <= NUM_DRAWS else [space.draw(rng) for _ in range(NUM_DRAWS)]


def _pair_rows(pieces: Pieces) -> Iterable[Row]:
    """Rows that hold every pair of neighbours at every cut with at most `MAX_PAIRS` of them."""
    junctions = [(place, len(left) * len(right)) for place, (left, right) in enumerate(itertools.pairwise(pieces))]
    for parity in (0, 1):
        sizes = [size for place, size in junctions if place % 2 == parity and size <= MAX_PAIRS]
        for number in range(max(sizes, default=0)):
            row = [texts[number % len(texts)] for texts in pieces]
            for place, size in junctions[parity::2]:
                row[place] = pieces[place][number % size // len(pieces[place + 1])]
            yield tuple(row)


def _word_rows(tokens: Sequence[str], pieces: Pieces) -> list[Row]:
    """Pairs of words that hold the two sides of a token with a blank inside."""
    if len(pieces) < 2:
        return []
    heads: dict[str, list[str]] = {}
    tails: dict[str, list[str]] = {}
    for text in pieces[1]:
        for place in range(len(text)):
            heads.setdefault(text[: place + 1], []).append(text)
            tails.setdefault(text[place:], []).append(text)
    rows: dict[Row, None] = {}
    for token in tokens:
        for blank in (place for place in range(1, len(token)) if token[place] == " "):
            left = tails.get(token[max(token.rfind(" ", 0, blank), 0) : blank], [])
            right = heads.get(" " + token[blank + 1 :].split(" ")[0], [])
            for pair in itertools.islice(itertools.product(left, right), MAX_PAIRS):
                for cycle in (pair, pair[::-1]):
                    first, *rest = (cycle[number % 2] for number in range(len(pieces)))
                    row = (first[1:], *rest)
                    rows[row] = None
    return list(rows)


def _run_rows(tokens: Sequence[str], pieces: Pieces, before: str, after: str) -> list[Row]:
    """Secrets made of one token's characters over and over, at every shift, wherever those may stand."""
    allowed = [{text[place] for text in texts} for texts in pieces for place in range(len(texts[0]))]
    letters = re.escape("".join(sorted(set().union(*allowed))))
    inside = re.compile(f"([^{letters}]*)([{letters}]{{2,}})([^{letters}]*)")
    known = [set(texts) for texts in pieces]
    rows: dict[Row, None] = {}
    for found in filter(None, map(inside.fullmatch, tokens)):
        if not f" {before}".endswith(found[1]) or not f"{after} ".startswith(found[3]):
            continue
        for shift in range(len(found[2])):
            run = itertools.islice(itertools.cycle(found[2]), shift, None)
            secret = "".join(one if one in here else min(here) for one, here in zip(run, allowed, strict=False))
            row = _row_of(secret, pieces, words=False)
            if all(text in texts for text, texts in zip(row, known, strict=True)):
                rows[row] = None
    return list(rows)


def _verify(learned: UnitTables, probe: _Probe, rows: Sequence[Row]) -> None:
    """Hold whole secrets to the tokens of their pieces."""
    start = len(learned.prefix_ids)
    for row, item in zip(rows, probe.spans(["".join(row) for row in rows]), strict=True):
        parts = (table[text] for table, text in zip(learned.tables, row, strict=True))
        if item.ids[: item.end] != (*learned.prefix_ids, *itertools.chain.from_iterable(parts)) or item.start < start:
            raise NotFactorised("The tokens of some secrets are not those of their parts put together.")
