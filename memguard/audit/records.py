"""Real samples, members of the training data or held out: how they are read, and which part of one is asked for.

A record is a text or token ids; with a `span` of characters (or of ids) the target is that span, such as a name of four
tokens, otherwise the tokens behind a prefix of stated length from the record's start. The text of a record never leaves this
process: reports name records by the number of their line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.errors import InputError
from memguard.files import read_text
from memguard.scoring.scorer import Span

JSON_LINES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Record:
    """One sample. `text` is None where the file held ids alone; `span` is a half-open range of `ids`."""

    text: str | None
    ids: tuple[int, ...]
    line: int = 0
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Target:
    """The part of a record that a model is asked for, behind what stands before it."""

    line: int
    span: Span


def load_records(path: Path, tokenizer: Any, *, what: str = "data") -> list[Record]:
    """Samples from a file: JSON lines with `text` or `input_ids` and maybe `span`, or one text a line.

    Args:
        path: `.jsonl`, or plain text.
        tokenizer: of the model; texts are encoded as it does by default, special tokens included.
        what: how the file is called in messages.

    Raises:
        InputError: an unreadable file, a line that is no record, or no line at all.
    """
    is_json = path.suffix.lower() in JSON_LINES
    # Not splitlines(): a form feed or a line separator inside a text ends no line of the file.
    lines = read_text(path, what=what).removeprefix("\ufeff").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{what} '{path.name}' line {number}"
            record = (
                _parse(line, tokenizer, number, where)
                if is_json
                else _of_text(line.rstrip("\r"), None, tokenizer, number, where)
            )
            if record.ids and max(record.ids) >= len(tokenizer):
                raise InputError(f"{where}: 'input_ids' must be below {len(tokenizer)}, the size of the tokenizer.")
            records.append(record)
    if not records:
        raise InputError(f"{what} '{path.name}' holds no row.")
    return records


def _parse(line: str, tokenizer: Any, number: int, where: str) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        row = {}
    ids, text, span = row.get("input_ids"), row.get("text"), row.get("span")
    if span is not None and not (isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)):
        raise InputError(f"{where}: 'span' must be two whole numbers, [start, end].")
    if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
        return Record(None, tuple(ids), number, _inside(span, len(ids), where))
    if isinstance(text, str) and text:
        return _of_text(text, span, tokenizer, number, where)
    raise InputError(f"{where} must be an object with 'text' or 'input_ids'.")


def _of_text(text: str, span: Sequence[int] | None, tokenizer: Any, number: int, where: str) -> Record:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: 'text' must be valid Unicode, got half of a surrogate pair.") from None
    if span is None:
        return Record(text, tuple(tokenizer(text)["input_ids"]), number)
    start, end = _inside(span, len(text), where) or (0, 0)
    encoded = tokenizer(text, return_offsets_mapping=True)
    touching = [at for at, (low, high) in enumerate(encoded["offset_mapping"]) if low < end and high > start]
    if not touching:
        raise InputError(f"{where}: no token of the text stands in its 'span'.")
    return Record(text, tuple(encoded["input_ids"]), number, (touching[0], touching[-1] + 1))


def _inside(span: Sequence[int] | None, length: int, where: str) -> tuple[int, int] | None:
    if span is None:
        return None
    if not 0 <= span[0] < span[1] <= length:
        raise InputError(f"{where}: 'span' must lie within the record, 0 <= start < end <= {length}.")
    return span[0], span[1]


def choose_targets(
    records: Sequence[Record],
    *,
    prefix_tokens: int,
    suffix_tokens: int,
    max_records: int,
    lead_ids: tuple[int, ...],
    seed: str,
    max_length: int | None = None,
    label: str = "record",
) -> tuple[list[Target], int]:
    """A random sample of records, each with the part that is asked for.

    Args:
        records: samples.
        prefix_tokens: tokens before the target, at most so many before a `span`.
        suffix_tokens: tokens asked for where a record names no span.
        max_records: the sample's size at most.
        lead_ids: put before a prefix that does not begin with them.
        seed: of the sample.
        max_length: positions of the model, None for no limit.
        label: how messages call a record.

    Returns:
        Targets in the order of their lines, and how many records hold none, or none that fits the model.
    """
    usable = []
    for record in records:
        cut = _cut(record, prefix_tokens, suffix_tokens)
        if cut is not None and (max_length is None or cut[2] - cut[0] + len(lead_ids) <= max_length):
            usable.append((record, *cut))
    chosen = usable
    if len(usable) > max_records:
        picked = random.Random(seed).sample(range(len(usable)), max_records)
        chosen = [usable[index] for index in sorted(picked)]
    targets = []
    for record, first, start, end in chosen:
        lead = lead_ids if record.ids[first : first + len(lead_ids)] != lead_ids else ()
        ids = (*lead, *record.ids[first:end])
        begin = start - first + len(lead)
        if begin >= 1:
            targets.append(Target(record.line, Span(ids, begin, len(ids), f"{label} {record.line}")))
    return targets, len(records) - len(usable)


def _cut(record: Record, prefix_tokens: int, suffix_tokens: int) -> tuple[int, int, int] | None:
    """Places of the first token of the prefix, of the target, and behind it; None where the record is too short."""
    if record.span is not None:
        start, end = record.span
        return (max(0, start - prefix_tokens), start, end) if start >= 1 else None
    end = prefix_tokens + suffix_tokens
    return (0, prefix_tokens, end) if len(record.ids) >= end else None
