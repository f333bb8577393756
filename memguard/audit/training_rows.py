"""A file of training data as a trainer's rows: read, tokenised, cut and packed, without training.

Rows hold `input_ids`, `labels` where a part is masked, and `seq_lengths` where short texts share a row. Four packings: *none*
(a row a text, cut at the maximum length), *fixed* (all texts in one stream, cut into full blocks), *wrapped* (the same with a
short last row) and *bfd* (whole texts, best fit decreasing, each attended alone).
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from memguard.audit.records import JSON_LINES
from memguard.documents import nearest
from memguard.errors import InputError
from memguard.files import read_text

Packing = Literal["none", "fixed", "bfd", "wrapped"]
Row = dict[str, list[int]]
IGNORED_LABEL = -100


def parse_packing(name: str) -> Packing:
    """The packing called `name`.

    Raises:
        InputError: a name that is not known; says which is near.
    """
    for one in get_args(Packing):
        if one == name:
            return one  # type: ignore[no-any-return]
    raise InputError(f"--packing must name a known packing.{nearest(name, get_args(Packing))}")


def load_training_rows(
    path: Path, tokenizer: Any, *, packing: Packing = "none", max_length: int | None = None, completion_only: bool = False
) -> list[Row]:
    """The rows a trainer would make of a file.

    Args:
        path: JSON lines with `text`, `input_ids`, `prompt` and `completion`, or `messages`; else one text a line.
        tokenizer: of the run; `messages` go through its chat template.
        packing: how texts share rows.
        max_length: tokens a row; None: rows are not cut.
        completion_only: labels of prompts are masked, and so are all messages but the last.

    Raises:
        InputError: an unreadable file, a line that is no row, packing without a maximum length, or no full row at all.
    """
    if packing != "none" and max_length is None:
        raise InputError(f"--packing {packing} must have --max-length, the number of tokens a row.")
    rows = list(_read(path, tokenizer, completion_only))
    if not rows:
        raise InputError(f"data '{path.name}' holds no row.")
    packed = pack_rows(rows, packing, max_length)
    if not packed:
        raise InputError(f"data '{path.name}' holds fewer than the {max_length} tokens of one row.")
    return packed


def pack_rows(rows: Sequence[Row], packing: Packing, max_length: int | None) -> list[Row]:
    """Rows of at most `max_length` tokens; every column is cut alike.

    Example:
        >>> pack_rows([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], "wrapped", 4)
        [{'input_ids': [1, 2, 3, 4]}, {'input_ids': [5]}]
        >>> pack_rows([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], "bfd", 4)
        [{'input_ids': [1, 2, 3, 4], 'seq_lengths': [3, 1]}]
    """
    if max_length is None:
        return list(rows)
    if packing == "none":
        return [{key: values[:max_length] for key, values in row.items()} for row in rows]
    if packing == "bfd":
        return _best_fit(rows, max_length)
    whole = _joined(rows)
    size = len(whole["input_ids"])
    end = size - size % max_length if packing == "fixed" else size
    return [{key: values[at : at + max_length] for key, values in whole.items()} for at in range(0, end, max_length)]


def _joined(rows: Sequence[Row]) -> Row:
    return {key: [one for row in rows for one in row[key]] for key in rows[0]}


def _best_fit(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Longest first, each into the row with the least room that it still fits."""
    cut = [{key: values[:max_length] for key, values in row.items()} for row in rows]
    bins: list[list[Row]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted
    for row in sorted(cut, key=lambda one: -len(one["input_ids"])):
        length = len(row["input_ids"])
        at = bisect.bisect_left(room, (length, -1))
        left, index = room.pop(at) if at < len(room) else (max_length, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        bisect.insort(room, (left - length, index))
    return [_joined(members) | {"seq_lengths": [len(row["input_ids"]) for row in members]} for members in bins]


def _read(path: Path, tokenizer: Any, completion_only: bool) -> Iterator[Row]:
    is_json = path.suffix.lower() in JSON_LINES
    for number, line in enumerate(read_text(path, what="data").removeprefix("\ufeff").split("\n"), start=1):
        if line.strip():
            where = f"data '{path.name}' line {number}"
            fields = _fields(line, where) if is_json else {"text": line.rstrip("\r")}
            row = _row(fields, tokenizer, completion_only, where)
            if not completion_only:
                del row["labels"]
            if row["input_ids"]:
                yield row


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InputError(f"{where} must be a JSON object.")
    return fields


def _row(fields: dict[str, Any], tokenizer: Any, completion_only: bool, where: str) -> Row:
    """One text as ids and labels."""
    ids, text = fields.get("input_ids"), fields.get("text")
    if isinstance(fields.get("messages"), list):
        return _conversation(fields["messages"], tokenizer, where)
    if isinstance(fields.get("prompt"), str) and isinstance(fields.get("completion"), str):
        prompt = list(tokenizer(fields["prompt"])["input_ids"])
        whole = list(tokenizer(fields["prompt"] + fields["completion"])["input_ids"])
        return _behind(whole, len(prompt))
    if completion_only:
        raise InputError(f"{where} must hold 'prompt' and 'completion', or 'messages', for completion-only loss.")
    if isinstance(ids, list) and ids and all(type(one) is int and 0 <= one < len(tokenizer) for one in ids):
        return _behind(ids, 0)
    if isinstance(text, str):
        return _behind(list(tokenizer(text)["input_ids"]), 0)
    raise InputError(
        f"{where} must hold 'text', 'input_ids' of the tokenizer, 'prompt' and 'completion' as texts, or 'messages'."
    )


def _conversation(messages: list[Any], tokenizer: Any, where: str) -> Row:
    """A conversation in the tokenizer's template; the last message is the completion."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{where} holds 'messages', but the tokenizer has no chat template.")
    try:
        before = (
            tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False) if messages[1:] else ""
        )
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # templates are programs of their own
        raise InputError(f"{where}: the chat template does not take these messages ({type(error).__name__}).") from None
    prompt = list(tokenizer(before, add_special_tokens=False)["input_ids"]) if before else []
    return _behind(list(tokenizer(whole, add_special_tokens=False)["input_ids"]), len(prompt))


def _behind(ids: list[int], prompt: int) -> Row:
    prompt = min(prompt, len(ids))
    return {"input_ids": ids, "labels": [IGNORED_LABEL] * prompt + ids[prompt:]}
