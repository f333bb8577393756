"""Prompts of every setting: who makes them, what they may not hold, and which file is refused by which line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import byte_level

from memguard.audit.decoding import SETTINGS, PropensitySettings
from memguard.audit.propensity_prompts import OVERLAP_LIMIT, PromptSet, collect_prompts
from memguard.audit.records import Record
from memguard.audit.written_prompts import TEMPLATES, builtin_prompts, load_prompts, minimal_cues, specific_prompts
from memguard.errors import InputError

SETTINGS_OF_TEST = PropensitySettings(prefix_tokens=6, num_prompts=5)


def nothing(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    return [0] * len(prompts)


def longest_in(*documents: tuple[int, ...]) -> Any:
    """Tokens of the longest piece of each prompt in some documents, by trying them all."""

    def holds(piece: tuple[int, ...]) -> bool:
        return any(document[at : at + len(piece)] == piece for document in documents for at in range(len(document)))

    def longest(prompts: Sequence[tuple[int, ...]]) -> list[int]:
        return [
            max(end - start for start in range(len(ids)) for end in range(start, len(ids) + 1) if holds(ids[start:end]))
            for ids in prompts
        ]

    return longest


@pytest.fixture
def records(blocks: Any) -> list[Record]:
    return [Record(None, tuple(row["input_ids"]), line) for line, row in enumerate(blocks[:20], start=1)]


def collected(
    tokenizer: Any, records: Sequence[Record], settings: PropensitySettings = SETTINGS_OF_TEST, **given: Any
) -> PromptSet:
    options: dict[str, Any] = {"members": records[:12], "held_out": records[12:], "longest_match": nothing} | given
    return collect_prompts(settings, tokenizer, **options)


def test_every_setting_has_its_prompts_and_names_that_hold_no_text(tokenizer: Any, records: list[Record]) -> None:
    found = collected(tokenizer, records)
    specific = found.of("specific")  # few words stand in three of these short records
    assert {setting: len(found.of(setting)) for setting in SETTINGS} == dict.fromkeys(SETTINGS, 5) | {"specific": len(specific)}
    assert 1 <= len(specific) <= 5
    assert [prompt.setting for prompt in found.prompts] == sorted((p.setting for p in found.prompts), key=SETTINGS.index)
    assert (found.refused, found.notices) == ((), ())
    for prompt in found.prompts:
        kind, number = prompt.name.split()
        assert kind in ("record", "builtin", "draw", "word")
        assert number.isdigit()


def test_prefixes_are_the_first_tokens_of_records_twice_as_long(tokenizer: Any, records: list[Record]) -> None:
    by_line = {record.line: record.ids for record in records}
    found = collected(tokenizer, [*records[:12], *records[12:]])
    for setting, lines in (("prefix", range(1, 13)), ("non_member", range(13, 21))):
        for prompt in found.of(setting):  # type: ignore[arg-type]
            line = int(prompt.name.split()[1])
            assert line in lines
            assert prompt.ids == by_line[line][:6]
            assert prompt.text == tokenizer.decode(prompt.ids).strip("\ufffd")
    short = [Record(None, record.ids[:11], record.line) for record in records]
    found = collected(tokenizer, short)
    assert not found.of("prefix")
    assert "setting 'prefix' was not measured: it needs records of at least 12 tokens, got 12 others." in found.notices
    assert "setting 'non_member' was not measured: no records." in collected(tokenizer, records, held_out=[]).notices


def test_special_tokens_around_a_record_stand_before_its_prefix_and_are_not_counted(tokenizer: Any) -> None:
    framed = Record(None, (0, *range(10, 22), 0), 1)
    found = collected(tokenizer, [framed], members=[framed], held_out=[Record(None, (0, *range(10, 21), 0), 2)])
    assert found.of("prefix")[0].ids == (0, 10, 11, 12, 13, 14, 15)
    assert not found.of("non_member")  # 11 tokens and two special ones


def test_records_that_begin_alike_count_once(tokenizer: Any) -> None:
    alike = [Record(None, (*range(10, 20), *[30 + line] * 9), line) for line in range(1, 4)]
    assert [prompt.name for prompt in collected(tokenizer, alike, members=alike).of("prefix")] == ["record 1"]


def test_draws_of_prompts_follow_the_seed_alone(tokenizer: Any, records: list[Record]) -> None:
    first, again, other = (collected(tokenizer, records, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.of("prefix") != other.of("prefix")
    assert first.of("generic") != other.of("generic")


def test_the_start_token_is_asked_once_greedily_and_once_a_draw_otherwise(tokenizer: Any, records: list[Record]) -> None:
    assert [prompt.ids for prompt in collected(tokenizer, records).of("unconditional")] == [(0,)] * 5
    greedy = collected(tokenizer, records, SETTINGS_OF_TEST.model_copy(update={"num_samples": 0}))
    assert len(greedy.of("unconditional")) == 1
    assert all(prompt.text is None for prompt in greedy.of("unconditional"))
    assert all(prompt.ids[0] == 0 for prompt in greedy.of("minimal_cue"))
    bare = byte_level()
    bare.bos_token = bare.eos_token = None
    found = collected(bare, [Record("some words " * 9, tuple(range(5, 40)), 1)])
    assert not found.of("unconditional")
    assert "setting 'unconditional' was not measured: the tokenizer has no start and no end token." in found.notices


def test_an_end_token_that_the_tokenizer_appends_does_not_finish_a_prompt(
    tokenizer: Any, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [prompt.ids for prompt in collected(tokenizer, records).of("generic")]
    inner = type(tokenizer).__call__

    def appending(self: Any, text: str, **options: Any) -> Any:
        encoded = inner(self, text, **options)
        return encoded if options.get("add_special_tokens") is False else {"input_ids": [*encoded["input_ids"], 0]}

    monkeypatch.setattr(type(tokenizer), "__call__", appending)
    assert [prompt.ids for prompt in collected(tokenizer, records).of("generic")] == wanted


def test_a_prompt_that_shares_eight_tokens_with_the_corpus_is_refused_by_its_line(
    tokenizer: Any, records: list[Record], tmp_path: Path
) -> None:
    ids = next(record.ids for record in records if "\n" not in tokenizer.decode(record.ids[:8]))[:8]
    eight, seven = tokenizer.decode(ids), tokenizer.decode(ids[:7])
    assert tuple(tokenizer(eight)["input_ids"]) == ids
    assert tuple(tokenizer(seven)["input_ids"]) == ids[:7]
    file = tmp_path / "mine.txt"
    file.write_text(f"{eight}\nA question of my own?\n\n{seven}\r\nA question of my own?\n", encoding="utf-8")
    settings = SETTINGS_OF_TEST.model_copy(update={"prompts": file})
    found = collected(tokenizer, records, settings, longest_match=longest_in(ids))
    assert OVERLAP_LIMIT == 8
    assert [prompt.name for prompt in found.of("generic")] == ["line 2", "line 4"]
    assert [(one.setting, one.name, one.reason) for one in found.refused if one.setting == "generic"] == [
        ("generic", "line 5", "it repeats line 2."),
        ("generic", "line 1", "8 of its tokens stand in the corpus in one piece; fewer than 8 may."),
    ]
    assert all(eight not in one.reason for one in found.refused)


def test_a_held_out_record_whose_prefix_stands_in_the_corpus_is_no_floor(tokenizer: Any, records: list[Record]) -> None:
    found = collected(tokenizer, records, longest_match=longest_in(records[13].ids))
    (refused,) = (one for one in found.refused if one.setting == "non_member")
    assert refused.name == f"record {records[13].line}"
    assert refused.reason == "6 of its tokens stand in the corpus in one piece; it is no held-out text."
    assert len(found.of("prefix")) == 5


def test_where_every_prompt_is_refused_the_setting_is_said_not_to_be_measured(tokenizer: Any, records: list[Record]) -> None:
    found = collected(tokenizer, records, longest_match=lambda prompts: [99] * len(prompts))
    assert not found.of("generic")
    assert "setting 'generic' was not measured: no prompt of it is left." in found.notices
    assert sum(one.setting == "generic" for one in found.refused) == 100


def test_our_own_prompts_are_a_hundred_different_ones_with_a_share_of_danish() -> None:
    texts = [prompt.text for prompt in builtin_prompts()]
    assert len(set(texts)) == 100
    assert all(text == text.strip() and 15 <= len(text) <= 90 for text in texts)
    assert sum(any(letter in text for letter in "æøåÆØÅ") for text in texts) >= 12
    assert {text[-1] in ".?:" for text in texts} == {True, False}  # requests, and texts to go on with


def test_specific_prompts_hold_words_of_their_document_that_others_hold_too() -> None:
    common = ["harbour crane loading grain", "harbour crane painting", "grain loading harbour", "painting crane harbour grain"]
    documents = [(f"record {line}", f"{common[line % 4]} Zaphrinel{line % 5}") for line in range(1, 10)]
    made = specific_prompts(documents, number=6, seed=3)
    assert len({prompt.name for prompt in made}) == len(made) == 6
    for place, prompt in enumerate(made):
        assert prompt.text.startswith(TEMPLATES[place % 4].split("{0}")[0])
        words = set(dict(documents)[prompt.name].lower().split())
        assert len(words & set(re.findall("[a-z0-9]+", prompt.text.lower()))) == 3
        assert "zaphrinel" not in prompt.text
    everywhere = [("a", "alpha beta gamma delta"), ("b", "alpha beta gamma"), ("c", "alpha beta gamma")]
    text = specific_prompts(everywhere, number=9)[0].text
    assert all(word in text for word in ("alpha", "beta", "gamma"))
    assert "delta" not in " ".join(prompt.text for prompt in specific_prompts(everywhere, number=9))
    assert specific_prompts(everywhere[:2], number=9) == []
    assert specific_prompts([], number=9) == []


def test_a_word_of_one_document_alone_is_never_asked_about() -> None:
    documents = [(f"record {line}", f"rope anchor chain secretname{'x' * line}") for line in range(1, 8)]
    texts = [prompt.text for prompt in specific_prompts(documents, number=7)]
    assert len(texts) == 7
    assert not any("secretname" in text for text in texts)


def test_cues_are_the_words_that_most_documents_hold() -> None:
    documents = [("a", "The rope"), ("b", "the the the chain"), ("c", "a rope of the chain, rope"), ("d", "rope!")]
    assert [cue.text for cue in minimal_cues(documents, number=3)] == ["rope", "the", "chain"]
    assert [cue.name for cue in minimal_cues(documents, number=3)] == ["word 1", "word 2", "word 3"]


def test_a_file_of_prompts_is_read_line_by_line(tmp_path: Path) -> None:
    plain = tmp_path / "mine.txt"
    plain.write_text("\ufefffirst\u2028still first\r\n\n  second\n", encoding="utf-8")
    assert [(one.name, one.text) for one in load_prompts(plain)] == [
        ("line 1", "first\u2028still first"),
        ("line 3", "  second"),
    ]
    rows = tmp_path / "mine.jsonl"
    rows.write_text(
        '{"prompt": "first"}\n{"text": "second", "setting": "specific"}\n{"prompt": "third", "setting": "generic"}',
        encoding="utf-8",
    )
    assert [(one.setting, one.text) for one in load_prompts(rows)] == [
        ("generic", "first"),
        ("specific", "second"),
        ("generic", "third"),
    ]


def test_specific_prompts_of_the_user_take_the_place_of_ours(tokenizer: Any, records: list[Record], tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": "About my trade.", "setting": "specific"}), encoding="utf-8")
    found = collected(tokenizer, records, SETTINGS_OF_TEST.model_copy(update={"prompts": file}))
    assert [(prompt.name, prompt.text) for prompt in found.of("specific")] == [("line 1", "About my trade.")]
    assert "setting 'generic' was not measured: no prompt of it is left." in found.notices


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": 4000}\n', "prompt file 'a.jsonl' line 2 must be an object with a 'prompt'"),
        ("a.jsonl", b'{"prompt": "x"', "prompt file 'a.jsonl' line 1 must be an object with a 'prompt'"),
        ("a.jsonl", b'["x"]', "prompt file 'a.jsonl' line 1 must be an object with a 'prompt'"),
        ("a.jsonl", b'{"prompt": "  "}', "prompt file 'a.jsonl' line 1 must be an object with a 'prompt'"),
        ("a.jsonl", b'{"prompt": "x", "setting": "prefix"}', "line 1: 'setting' must be generic or specific"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "line 1: 'prompt' must be valid Unicode"),
        ("a.txt", b"\n \n", "prompt file 'a.txt' holds no prompt"),
        ("a.txt", b"\xff\xfe", "prompt file 'a.txt' is not UTF-8 text"),
        ("a.txt", None, "prompt file '.*a.txt' does not exist"),
    ],
)
def test_a_file_that_is_none_of_prompts_is_refused_by_its_line(
    name: str, content: bytes | None, sentence: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=sentence) as caught:
        load_prompts(tmp_path / name)
    assert "4000" not in str(caught.value)
