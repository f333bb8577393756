"""The training corpus as an audit asks for it: how much of a prompt stands in it, where a continuation is from, its documents.

The one place that joins an index of `memguard.tracing` with what `memguard.audit` measures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memguard.audit.decoding import Generation
from memguard.audit.records import Record
from memguard.audit.traced import Corpus
from memguard.canaries.encoding import tokenizer_digest
from memguard.tracing.corpus_index import CorpusIndex
from memguard.tracing.simpletrace import Generation as Completion
from memguard.tracing.simpletrace import Trace, Tracer, TraceSettings
from memguard.tracing.token_text import TokenText

NUM_DOCUMENTS = 2000  # read where no records are given
MAX_TOKENS = 4096  # of a document


def open_index(folder: Path, tokenizer: Any) -> CorpusIndex:
    """Open the index of a corpus for the tokenizer it was built with.

    Args:
        folder: as `memguard index build` wrote it.
        tokenizer: of the model.

    Raises:
        InputError: no index, an empty one, a missing or truncated file, or one of another tokenizer.
    """
    return CorpusIndex.open(folder, tokenizer_digest=tokenizer_digest(tokenizer))


def corpus_of(index: CorpusIndex, tokenizer: Any, *, seed: int = 0) -> Corpus:
    """What propensity asks of an index.

    Args:
        index: of the training corpus.
        tokenizer: the one the index was built with.
        seed: of the documents drawn for a span.

    Raises:
        InputError: the tokenizer has more entries than the index.
    """
    tracer = Tracer(index, TokenText(tokenizer), TraceSettings(seed=seed))

    def longest_match(prompts: Sequence[tuple[int, ...]]) -> list[int]:
        return [int(lengths.max(initial=0)) for lengths in index.match_lengths(prompts)]

    def trace(generations: Sequence[Generation]) -> list[Trace]:
        return tracer.trace([Completion(ids=one.ids, id=str(number)) for number, one in enumerate(generations)])

    return Corpus(longest_match, trace)


def sample_documents(index: CorpusIndex, *, seed: int = 0) -> list[Record]:
    """Documents of a corpus as records, where nobody gave any: 2,000 at random, at most 4,096 tokens of each.

    Args:
        index: of the training corpus.
        seed: of the sample.

    Returns:
        Records in the order of the corpus; `line` is the number of the document.
    """
    number = min(NUM_DOCUMENTS, index.num_documents)
    chosen = random.Random(f"memguard/documents/{seed}").sample(range(index.num_documents), number)
    return [_record(index, document) for document in sorted(chosen)]


def _record(index: CorpusIndex, document: int) -> Record:
    shard, start, end = index.bounds(document)
    return Record(None, tuple(index.ids(shard, start, min(end, start + MAX_TOKENS)).tolist()), document)
