"""How often the audited records stand in the corpus, and how much is extracted of those that stand there once, or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memguard.audit.records import Record
from memguard.audit.report_records import CopiesBucket, CopiesRow, RecordRow, Records
from memguard.metrics.intervals import share_interval
from memguard.tracing.copies import Copies, count_copies
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.simpletrace import Tracer, TraceSettings
from memguard.tracing.token_text import TokenText

CONFIDENCE = 0.95
MAX_TOKENS = 512  # of a record that are looked for
BUCKETS: tuple[CopiesBucket, ...] = ("not found", "once", "once, near-duplicates besides", "2 to 10", "above 10")


def with_copies(records: Records, members: Sequence[Record], index: CorpusIndex, tokenizer: Any) -> Records:
    """The same figures, each member with its copies in the corpus, and the shares by their number.

    Args:
        records: as measured.
        members: the records of the training data, by whose lines the rows are named.
        index: of the training corpus.
        tokenizer: the one the index was built with.

    Raises:
        InputError: the tokenizer has more entries than the index.
    """
    by_line = {record.line: record for record in members}
    tracer = Tracer(index, TokenText(tokenizer), TraceSettings(near_verbatim=False))
    texts = [_text(by_line[row.line], tokenizer) for row in records.members.rows]
    found = count_copies(tracer, texts)
    rows = [
        row.model_copy(
            update={
                "num_copies": one.num_occurrences,
                "num_near_copies": one.num_near_documents,
                "copies_capped": one.is_capped,
            }
        )
        for row, one in zip(records.members.rows, found, strict=True)
    ]
    members_set = records.members.model_copy(update={"rows": rows})
    by_copies = _by_copies(rows, [_bucket(one) for one in found])
    return records.model_copy(update={"members": members_set, "by_copies": by_copies})


def _text(record: Record, tokenizer: Any) -> str:
    text: str = tokenizer.decode(record.ids[:MAX_TOKENS], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text.strip("\ufffd")


def _bucket(copies: Copies) -> CopiesBucket:
    if copies.num_occurrences == 0:
        return "not found"
    if copies.num_occurrences == 1:
        return "once, near-duplicates besides" if copies.num_near_documents else "once"
    return "2 to 10" if copies.num_occurrences <= 10 else "above 10"


def _by_copies(rows: Sequence[RecordRow], buckets: Sequence[CopiesBucket]) -> list[CopiesRow]:
    found = []
    for bucket in BUCKETS:
        mine = [row for row, one in zip(rows, buckets, strict=True) if one == bucket]
        if mine:
            greedy = sum(row.is_greedy for row in mine)
            interval = share_interval(greedy, len(mine), confidence=CONFIDENCE)
            verdicts = [row.verdict or "" for row in mine]
            found.append(
                CopiesRow(
                    copies=bucket,
                    n=len(mine),
                    num_greedy=greedy,
                    greedy_share=greedy / len(mine),
                    greedy_low=interval.low,
                    greedy_high=interval.high,
                    confidence=CONFIDENCE,
                    mean_log_prob=sum(row.log_prob for row in mine) / len(mine),
                    num_pa=sum(verdict.startswith("PA") for verdict in verdicts),
                    num_common=sum(verdict.startswith("common") for verdict in verdicts),
                )
            )
    return found
