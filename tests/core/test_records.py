"""Records are read as they are written, and targets are the tokens the user means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memguard.audit.records import Record, choose_targets, load_records
from memguard.errors import InputError


def test_records_keep_their_line_their_text_and_their_span(tmp_path: Path, tokenizer: Any) -> None:
    text = "The builder of the mill was Ada Lovelace of Ockham."
    start = text.index("Ada")
    rows = [{"text": text, "span": [start, start + len("Ada Lovelace")]}, {"input_ids": [1, 2, 3, 4], "span": [1, 3]}]
    path = tmp_path / "members.jsonl"
    path.write_text("\n".join(["", *map(json.dumps, rows)]), encoding="utf-8")
    named, ids = load_records(path, tokenizer)
    assert (named.line, ids.line) == (2, 3)
    assert ids == Record(None, (1, 2, 3, 4), 3, (1, 3))
    assert named.span is not None
    assert tokenizer.decode(named.ids[slice(*named.span)]).strip() == "Ada Lovelace"


def test_plain_text_has_a_record_a_line(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "members.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert [(one.text, one.line) for one in load_records(path, tokenizer)] == [("one", 1), ("two", 3)]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{}", "line 1 must be an object with 'text' or 'input_ids'"),
        ("[1]", "must be an object"),
        ('{"text": 5}', "must be an object"),
        ('{"text": ""}', "must be an object"),
        ('{"input_ids": []}', "must be an object"),
        ('{"input_ids": [1.5]}', "must be an object"),
        ('{"input_ids": [true]}', "must be an object"),
        ('{"input_ids": [-1]}', "must be an object"),
        ("[" * 10_000, "must be an object"),
        ('{"text": "abc", "span": [1]}', "'span' must be two whole numbers"),
        ('{"text": "abc", "span": [0.0, 1]}', "'span' must be two whole numbers"),
        ('{"text": "abc", "span": [0, 4]}', "'span' must lie within the record, 0 <= start < end <= 3"),
        ('{"input_ids": [1, 2], "span": [1, 1]}', "'span' must lie within the record"),
        ("", "holds no row"),
        ('{"input_ids": [512]}', "'input_ids' must be below 512, the size of the tokenizer"),
        (json.dumps({"input_ids": [10**30]}), "must be below 512"),
        ('{"text": "\\ud800"}', "'text' must be valid Unicode, got half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_not_quoted(tmp_path: Path, tokenizer: Any, line: str, match: str) -> None:
    path = tmp_path / "members.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(InputError, match=match) as caught:
        load_records(path, tokenizer)
    assert "abc" not in str(caught.value)


def test_only_a_newline_ends_a_line_and_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "members.JSON"
    path.write_text(
        "\ufeff" + json.dumps({"text": "one\u2028two"}, ensure_ascii=False) + "\r\n" + '{"text": "three"}', encoding="utf-8"
    )
    assert [(one.text, one.line) for one in load_records(path, tokenizer)] == [("one\u2028two", 1), ("three", 2)]
    plain = tmp_path / "members.txt"
    plain.write_bytes("one\x0ctwo\x85three\r\nfour\n".encode())
    assert [one.text for one in load_records(plain, tokenizer)] == ["one\x0ctwo\x85three", "four"]


def choose(records: list[Record], **changes: Any) -> Any:
    options: dict[str, Any] = {"prefix_tokens": 2, "suffix_tokens": 3, "max_records": 10, "lead_ids": (), "seed": "s"}
    return choose_targets(records, **(options | changes))


def test_the_target_follows_the_prefix_and_short_records_are_counted() -> None:
    targets, num_too_short = choose([Record(None, (1, 2, 3, 4, 5, 6), 1), Record(None, (1, 2, 3, 4), 2)])
    assert num_too_short == 1
    assert [(one.line, one.span.prefix_ids, one.span.suffix_ids) for one in targets] == [(1, (1, 2), (3, 4, 5))]


def test_a_span_is_the_target_behind_at_most_the_prefix() -> None:
    targets, num_too_short = choose(
        [Record(None, (1, 2, 3, 4, 5), 1, (3, 5)), Record(None, (1, 2, 3), 2, (1, 2)), Record(None, (1, 2), 3, (0, 1))]
    )
    assert num_too_short == 1  # nothing stands before the last one
    assert [(one.span.prefix_ids, one.span.suffix_ids) for one in targets] == [((2, 3), (4, 5)), ((1,), (2,))]


def test_a_target_that_the_model_has_no_positions_for_is_left_out() -> None:
    targets, num_left_out = choose([Record(None, (1, 2, 3, 4, 5, 6), 1), Record(None, (1, 2, 3), 2, (1, 3))], max_length=4)
    assert ([one.line for one in targets], num_left_out) == ([2], 1)


def test_lead_ids_are_put_once() -> None:
    targets, _ = choose([Record(None, (9, 1, 2, 3, 4), 1), Record(None, (1, 2, 3, 4, 5), 2)], lead_ids=(9,))
    assert [one.span.prefix_ids for one in targets] == [(9, 1), (9, 1, 2)]


def test_the_sample_is_random_seeded_and_in_order() -> None:
    records = [Record(None, tuple(range(line, line + 5)), line) for line in range(100)]
    first, second = choose(records, max_records=20)[0], choose(records, max_records=20)[0]
    other = choose(records, max_records=20, seed="t")[0]
    lines = [one.line for one in first]
    assert lines == [one.line for one in second] == sorted(lines)
    assert len(lines) == 20
    assert lines != [one.line for one in other]
    assert lines != list(range(20))
