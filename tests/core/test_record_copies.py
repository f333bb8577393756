"""Copies of records and canaries join the report: what is looked for, buckets, shares with intervals, notices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import built

from memguard.audit.canary_copies import canary_notices, count_canary_copies
from memguard.audit.config import parse_config
from memguard.audit.record_copies import BUCKETS, copies_of, split_by_copies, with_copies
from memguard.audit.records import Record
from memguard.audit.report_records import RecordRow, Records, RecordSet
from memguard.canaries.drawing import draw_plan
from memguard.tracing.copies import Copies
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.index_build import build_index

CANARIES = {"formats": [{"name": "pin", "template": "The pin is {secret}.", "secret": {"kind": "digits", "length": 6}}]}


def index_of(documents: list[str], folder: Path) -> CorpusIndex:
    build_index(documents, folder, built("merged digits"))
    return CorpusIndex.open(folder)


def encoded(text: str) -> tuple[int, ...]:
    return tuple(built("merged digits")(text)["input_ids"])


@pytest.mark.parametrize(
    ("copies", "bucket"),
    [
        (Copies(0, 0, 0, False), "not found"),
        (Copies(0, 0, 0, True), "not known"),
        (Copies(0, 0, 2, False), "near-duplicates alone"),
        (Copies(1, 1, 0, False), "once"),
        (Copies(1, 1, 0, True), "not known"),
        (Copies(1, 1, 0, False, is_near_capped=True), "once, near-duplicates not known"),
        (Copies(1, 1, 3, False, is_near_capped=True), "once, near-duplicates besides"),
        (Copies(10, 1, 0, False), "2 to 10"),
        (Copies(10, 1, 0, True), "not known"),
        (Copies(11, 9, 0, True), "above 10"),
    ],
)
def test_a_lower_end_puts_no_record_among_the_rare_ones(copies: Copies, bucket: str) -> None:
    assert split_by_copies([copies]) == {bucket: [0]}
    assert bucket in BUCKETS


def test_a_record_is_looked_for_by_the_span_it_names_and_with_the_special_tokens_inside_it(tmp_path: Path) -> None:
    turns = "How is the parser built?<e>It is built by hand, from a grammar."
    index = index_of(
        ["Nobody but Margrethe Sandoval saw it.", "Yes, Margrethe Sandoval.", turns, "Something else."], tmp_path / "i"
    )
    whole = encoded("Nobody but Margrethe Sandoval saw it.")
    name = len(encoded("Nobody but")), len(encoded("Nobody but Margrethe Sandoval"))
    eos = built("merged digits").eos_token_id
    records = [Record(None, whole), Record(None, whole, span=name), Record(None, (eos, *encoded(turns), eos))]
    found = copies_of(records, index, built("merged digits"))
    assert [one.num_occurrences for one in found] == [1, 2, 1]


def row(line: int, *, is_greedy: bool, verdict: str | None) -> RecordRow:
    return RecordRow(line=line, num_prefix_tokens=4, num_tokens=4, log_prob=-2.0, is_greedy=is_greedy, verdict=verdict)


def test_shares_by_copies_have_exact_intervals_and_undecided_members_widen_them(corpus_text: str, tmp_path: Path) -> None:
    texts = [corpus_text[start : start + 200] for start in range(0, 2000, 200)]
    members = [Record(text, encoded(text), line) for line, text in enumerate(texts)]
    verdicts = ["PA (mean)", "undecided", "common (mean)", None, *[None] * 6]
    rows = [row(line, is_greedy=line < 3, verdict=verdicts[line]) for line in range(10)]
    one = RecordSet(
        n=10,
        num_too_short=0,
        num_greedy=3,
        greedy_share=0.3,
        greedy_low=0.1,
        greedy_high=0.6,
        confidence=0.95,
        curve=[],
        rows=rows,
    )
    records = Records(prefix_tokens=4, suffix_tokens=4, max_edits=0, members=one)
    found = with_copies(records, members, index_of([*texts, *texts[8:]], tmp_path / "i"), built("merged digits"))
    assert [one.num_copies for one in found.members.rows] == [1] * 8 + [2] * 2
    once, more = found.by_copies
    assert (once.copies, once.n, once.num_greedy, once.num_pa, once.num_undecided, once.num_common) == ("once", 8, 3, 1, 1, 1)
    # Clopper-Pearson by scipy.stats.beta.ppf: 1 of 3 from .0084, 2 of 3 to .9916; 3 of 8 from .0852 to .7551.
    assert once.pa_share == pytest.approx(1 / 3)
    assert [once.pa_low, once.pa_high] == pytest.approx([0.0084, 0.9916], abs=1e-4)
    assert [once.greedy_low, once.greedy_high] == pytest.approx([0.0852, 0.7551], abs=1e-4)
    assert (more.copies, more.n, more.pa_share, more.pa_low) == ("2 to 10", 2, None, None)


class _Row:
    """What the notices read of a canary's row."""

    def __init__(self, id_: str, role: str, num_seen: int | None) -> None:
        self.id, self.role, self.num_seen = id_, role, num_seen


def test_canaries_are_counted_in_what_was_trained_as_often_as_they_were_put_there(corpus_text: str, tmp_path: Path) -> None:
    plan = draw_plan(parse_config({"canaries": CANARIES}).canaries, built("merged digits"))
    documents = [corpus_text[start : start + 500] for start in range(0, 10_000, 500)]
    planted: Counter[str] = Counter()
    for number, one in enumerate(plan.canaries):
        for time in range(one.tier if one.is_planted else 0):
            documents[(number + time) % 20] += f" The pin is {one.secret}."
            planted[one.id] += 1
    counted = count_canary_copies(plan, index_of(documents, tmp_path / "i"), built("merged digits"))
    assert counted == {one.id: planted[one.id] for one in plan.canaries}
    rows: list[Any] = [_Row(one.id, one.role, planted[one.id]) for one in plan.canaries]
    assert canary_notices(rows, counted) == []
    control = next(one for one in rows if one.role == "control")
    seen = next(one for one in rows if one.role == "canary" and one.num_seen)
    assert canary_notices(rows, counted | {control.id: 1}) == [
        f"1 never-inserted controls stand in the indexed corpus, such as '{control.id}'."
    ]
    assert "1 canaries that the ledger saw do not stand in the index" in canary_notices(rows, counted | {seen.id: 0})[0]
    assert canary_notices(rows, dict.fromkeys(counted, 0)) == []
