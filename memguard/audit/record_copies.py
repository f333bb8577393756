"""How often the audited records stand in the corpus, and how much is extracted of those that stand there once, or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from memguard.audit.records import Record
from memguard.audit.report_records import CopiesBucket, CopiesRow, RecordRow, Records
from memguard.metrics.intervals import share_interval
from memguard.tracing.copies import Copies, count_copies
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.simpletrace import Tracer, TraceSettings
from memguard.tracing.token_text import TokenText

CONFIDENCE = 0.95
MAX_TOKENS = 512  # of a record that are looked for
BUCKETS: tuple[CopiesBucket, ...] = get_args(CopiesBucket)


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
    found = copies_of([by_line[row.line] for row in records.members.rows], index, tokenizer)
    rows = [
        row.model_copy(
            update={
                "num_copies": one.num_occurrences,
                "num_near_copies": one.num_near_documents,
                "copies_capped": one.is_capped or one.is_near_capped,
            }
        )
        for row, one in zip(records.members.rows, found, strict=True)
    ]
    members_set = records.members.model_copy(update={"rows": rows})
    split = split_by_copies(found)
    by_copies = [_copies_row(bucket, [rows[place] for place in places]) for bucket, places in split.items()]
    return records.model_copy(update={"members": members_set, "by_copies": by_copies})


def copies_of(records: Sequence[Record], index: CorpusIndex, tokenizer: Any) -> list[Copies]:
    """Copies of each record in the corpus: of the span it names, else of its first 512 tokens.

    Raises:
        InputError: the tokenizer has more entries than the index.
    """
    tracer = Tracer(index, TokenText(tokenizer), TraceSettings(near_verbatim=False))
    return count_copies(tracer, [_text(record, tokenizer, tracer.token_text.special_ids) for record in records])


def split_by_copies(copies: Sequence[Copies]) -> dict[CopiesBucket, list[int]]:
    """Places of the records that stand so often in the corpus, for any table over the same records.

    Args:
        copies: of each record, as counted.

    Returns:
        Bucket -> places, ascending; in the order of `BUCKETS`, empty ones left out.

    Example:
        >>> split_by_copies([Copies(1, 1, 0, False), Copies(12, 3, 0, True), Copies(1, 1, 0, False), Copies(3, 3, 0, True)])
        {'once': [0, 2], 'above 10': [1], 'not known': [3]}
    """
    buckets = [_bucket(one) for one in copies]
    split = {bucket: [place for place, one in enumerate(buckets) if one == bucket] for bucket in BUCKETS}
    return {bucket: places for bucket, places in split.items() if places}


def _text(record: Record, tokenizer: Any, special_ids: frozenset[int]) -> str:
    """What is looked for. Special tokens at the ends were put there by the tokenizer; those inside are text, as in a chat."""
    ids = list(record.ids[slice(*record.span)] if record.span is not None else record.ids)
    while ids and ids[0] in special_ids:
        del ids[0]
    ids = ids[:MAX_TOKENS]
    while ids and ids[-1] in special_ids:
        del ids[-1]
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.strip("\ufffd")


def _bucket(copies: Copies) -> CopiesBucket:
    if copies.num_occurrences > 10:
        return "above 10"
    if copies.is_capped:  # a lower end: a record that seems to stand once may stand a thousand times
        return "not known"
    if copies.num_occurrences >= 2:
        return "2 to 10"
    if copies.num_occurrences == 0:
        return "near-duplicates alone" if copies.num_near_documents else "not found"
    if copies.num_near_documents:
        return "once, near-duplicates besides"
    return "once, near-duplicates not known" if copies.is_near_capped else "once"


def _copies_row(bucket: CopiesBucket, rows: Sequence[RecordRow]) -> CopiesRow:
    n, greedy = len(rows), sum(row.is_greedy for row in rows)
    interval = share_interval(greedy, n, confidence=CONFIDENCE)
    verdicts = [row.verdict for row in rows if row.verdict is not None]
    pa = sum(verdict.startswith("PA") for verdict in verdicts)
    undecided = verdicts.count("undecided")
    # Over all measured members and not over the extractable: a model that writes none of them shows none to be PA.
    low = share_interval(pa, len(verdicts), confidence=CONFIDENCE).low if verdicts else None
    high = share_interval(pa + undecided, len(verdicts), confidence=CONFIDENCE).high if verdicts else None
    return CopiesRow(
        copies=bucket,
        n=n,
        num_greedy=greedy,
        greedy_share=greedy / n,
        greedy_low=interval.low,
        greedy_high=interval.high,
        confidence=CONFIDENCE,
        mean_log_prob=sum(row.log_prob for row in rows) / n,
        num_pa=pa,
        num_common=sum(verdict.startswith("common") for verdict in verdicts),
        num_undecided=undecided,
        pa_share=pa / len(verdicts) if verdicts else None,
        pa_low=low,
        pa_high=high,
    )
