"""All of SimpleTrace on a corpus of 10 M tokens: spans, counts, rarity, documents, tiers on characters, merging, recall.

The plain way is the same trace one generation at a time. Near-verbatim recall compares words with some forty stretches of
documents a generation; what the trace takes without it is given beside.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from corpus import VOCABULARY, documents, generations, source_tokenizer
from measuring import cpu_alternate, cpu_timed, report

from memguard.tracing import CorpusIndex, Generation, IndexWriter, TraceSettings
from memguard.tracing.simpletrace import TOGETHER, Trace, Tracer
from memguard.tracing.token_text import TokenText

LENGTH = 256
TARGET = ("cpu_ms_per_generation <= 3", "identical_outcomes == true")


def one_by_one(tracer: Tracer, asked: list[Generation]) -> list[Trace]:
    return [tracer.trace([one])[0] for one in asked]


def run(quick: bool) -> dict[str, Any]:
    """Measure."""
    corpus = documents(50_000 if quick else 10_000_000)
    held = max(1, len(corpus) // 20)
    asked = [
        Generation(ids=ids.tolist())
        for ids in generations(corpus[:-held], corpus[-held:], TOGETHER if quick else 4 * TOGETHER, LENGTH)
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "index"
        with IndexWriter(folder, vocabulary_size=VOCABULARY) as writer:
            for ids in corpus[:-held]:
                writer.add(ids)
        index, token_text = CorpusIndex.open(folder), TokenText(source_tokenizer())
        tracer = Tracer(index, token_text, TraceSettings())
        pair = cpu_alternate(lambda: one_by_one(tracer, asked), lambda: tracer.trace(asked), runs=2 if quick else 5)
        without = Tracer(index, token_text, TraceSettings(near_verbatim=False))
        without_recall, _ = cpu_timed(lambda: without.trace(asked))
    return report(
        "trace_full",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=0.0,
        model=f"no model; Python source, {VOCABULARY} tokens of vocabulary",
        template=None,
        lengths={"corpus_tokens": index.num_tokens, "generations": len(asked), "tokens": LENGTH, "batch": TOGETHER},
        runs=pair.runs,
        is_cpu_time=True,
        target=TARGET,
        identical_outcomes=pair.baseline == pair.ours,
        cpu_ms_per_generation=1e3 * pair.ours_s / len(asked),
        cpu_ms_without_recall=1e3 * without_recall / len(asked),
        num_spans=sum(len(one.spans) for one in pair.ours),
    )
