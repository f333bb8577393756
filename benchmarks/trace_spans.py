"""Maximal spans of generations in a corpus of 10 M tokens: memguard's batches against infini-gram's `attribute`.

Both read the same index files. CPU seconds of the process, which infini-gram's threads are part of; its prefetch is off, as it
is fastest in memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from corpus import VOCABULARY, Ids, documents, generations
from measuring import cpu_alternate, report

from memguard.tracing import CorpusIndex, IndexWriter

LENGTH, BATCH, MIN_TOKENS = 256, 32, 6
TARGET = ("ratio >= 30", "identical_spans == true")


def spans_of(index: CorpusIndex, asked: list[Ids]) -> list[list[tuple[int, int, int]]]:
    """Spans in batches."""
    found = []
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        found += index.spans(part, min_tokens=MIN_TOKENS).as_lists(len(part))
    return found


def attributed(engine: Any, asked: list[Ids]) -> list[list[tuple[int, int, int]]]:
    """Spans one generation at a time, none left out for being frequent."""
    found = []
    for ids in asked:
        given = engine.attribute(ids.tolist(), delim_ids=[], min_len=MIN_TOKENS, max_cnt=2**40, enforce_bow=False)
        found.append([(span["l"], span["r"], span["count"]) for span in given["spans"]])
    return found


def run(quick: bool) -> dict[str, Any]:
    """Measure; the corpus is made anew, which takes longer than the bench."""
    try:
        from infini_gram.engine import InfiniGramEngine
    except ImportError:
        raise SystemExit("trace_spans needs infini-gram: pip install 'memguard-audit[infinigram]'") from None
    corpus = documents(50_000 if quick else 10_000_000)
    held = max(1, len(corpus) // 20)
    asked = generations(corpus[:-held], corpus[-held:], BATCH if quick else 2 * BATCH, LENGTH)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "index"
        with IndexWriter(folder, vocabulary_size=VOCABULARY) as writer:
            for ids in corpus[:-held]:
                writer.add(ids)
        index = CorpusIndex.open(folder)
        engine = InfiniGramEngine(
            str(folder), eos_token_id=0, vocab_size=VOCABULARY, ds_prefetch_depth=0, sa_prefetch_depth=0, od_prefetch_depth=0
        )
        pair = cpu_alternate(lambda: attributed(engine, asked), lambda: spans_of(index, asked), runs=2 if quick else 5)
    return report(
        "trace_spans",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=0.0,
        model=f"no model; Python source, {VOCABULARY} tokens of vocabulary",
        template=None,
        lengths={"corpus_tokens": index.num_tokens, "generations": len(asked), "tokens": LENGTH, "batch": BATCH},
        runs=pair.runs,
        is_cpu_time=True,
        target=TARGET,
        identical_spans=pair.baseline == pair.ours,
        cpu_ms_per_generation=1e3 * pair.ours_s / len(asked),
        num_spans=int(np.sum([len(one) for one in pair.ours])),
    )
