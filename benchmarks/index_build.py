"""Building the table of 10 M tokens: memguard against infini-gram's builder, plain and with 2,000 copies of a document.

CPU seconds with those of child processes, in which infini-gram's builder runs. Memory is the peak of a process of its own.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from corpus import VOCABULARY, Ids, documents
from measuring import cpu_alternate, extra_max_rss, in_child, report

from memguard.tracing import IndexWriter
from memguard.tracing.suffix_array import write_table

COPIES, COPY_LENGTH = 2000, 300
TARGET = (
    "ratio >= 2",
    "ratio_duplicates >= 20",
    "identical_table == true",
    "bytes_per_token <= 25",
)


def written(folder: Path, corpus: list[Ids]) -> Path:
    """The token file of a corpus, in a folder of its own."""
    with IndexWriter(folder, vocabulary_size=VOCABULARY) as writer:
        for ids in corpus:
            writer.add(ids)
    return folder / "tokenized.0"


def theirs(tokens: Path) -> bytes:
    """infini-gram's table; its builder changes the working folder and prints."""
    from infini_gram import indexing

    (tokens.parent / "table.0").unlink(missing_ok=True)
    options = Namespace(
        save_dir=str(tokens.parent), temp_dir=str(tokens.parent), worker_id=0, workers=1, shards=1, cpus=1, mem=4, token_width=2
    )
    indexing.print = lambda *_, **__: None
    indexing.tqdm = lambda items, **_: items
    indexing.build_sa(options)
    return (tokens.parent / "table.0").read_bytes()


def ours(tokens: Path) -> bytes:
    """Our table of the same tokens."""
    path = tokens.parent / "ours.0"
    write_table(np.memmap(tokens, dtype="<u2", mode="r"), path)
    return path.read_bytes()


def run(quick: bool) -> dict[str, Any]:
    """Measure."""
    try:
        import infini_gram.indexing  # noqa: F401
    except ImportError:
        raise SystemExit("index_build needs infini-gram: pip install 'memguard-audit[infinigram]'") from None
    corpus = documents(50_000 if quick else 10_000_000)
    rng = np.random.default_rng(0)
    copy = rng.choice(np.concatenate(corpus[:50]), COPY_LENGTH)
    copies = [copy] * (50 if quick else COPIES)
    with tempfile.TemporaryDirectory() as place:
        plain = written(Path(place) / "plain", corpus)
        # Half the corpus, or the builder that slows down would run for minutes.
        repeated = written(Path(place) / "copies", corpus[: len(corpus) // 2] + copies)
        pair = cpu_alternate(lambda: theirs(plain), lambda: ours(plain), runs=2 if quick else 3)
        doubled = cpu_alternate(lambda: theirs(repeated), lambda: ours(repeated), runs=1)
        num_tokens = plain.stat().st_size // 2
        peak = in_child(Path(__file__), str(plain))
    return report(
        "index_build",
        baseline_s=pair.baseline_s,
        ours_s=pair.ours_s,
        max_abs_err=0.0,
        model=f"no model; Python source, {VOCABULARY} tokens of vocabulary",
        template=None,
        lengths={"corpus_tokens": num_tokens, "copies": len(copies), "copy_tokens": COPY_LENGTH},
        runs=pair.runs,
        is_cpu_time=True,
        target=TARGET,
        ratio_duplicates=doubled.baseline_s / doubled.ours_s,
        baseline_duplicates_s=doubled.baseline_s,
        ours_duplicates_s=doubled.ours_s,
        identical_table=pair.baseline == pair.ours and doubled.baseline == doubled.ours,
        bytes_per_token=peak / num_tokens,
    )


if __name__ == "__main__":
    given = Path(sys.argv[1])
    print(extra_max_rss(lambda: write_table(np.memmap(given, dtype="<u2", mode="r"), given.parent / "peak.0")))
