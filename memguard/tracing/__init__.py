"""Which training text a generation came from: an index of the corpus, and the tracer that asks it.

Imports no torch and no model. `build_index` and `IndexWriter` make an index, `CorpusIndex` opens one, `trace_generations`
traces to it and `summarise_traces` gives the figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard.tracing.corpus_index import CorpusIndex
    from memguard.tracing.index_build import build_index
    from memguard.tracing.index_writer import IndexWriter
    from memguard.tracing.simpletrace import Generation, TraceSettings, trace_generations
    from memguard.tracing.trace_figures import summarise_traces

_HOMES = {
    "CorpusIndex": "corpus_index",
    "Generation": "simpletrace",
    "IndexWriter": "index_writer",
    "TraceSettings": "simpletrace",
    "build_index": "index_build",
    "summarise_traces": "trace_figures",
    "trace_generations": "simpletrace",
}
__all__ = [
    "CorpusIndex",
    "Generation",
    "IndexWriter",
    "TraceSettings",
    "build_index",
    "summarise_traces",
    "trace_generations",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
