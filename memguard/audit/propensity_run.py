"""`memguard propensity`: the propensity of a checkpoint, or of a served model, as a document of its own; no plan is needed."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard import __version__
from memguard.audit.corpus import corpus_of, open_index, sample_documents
from memguard.audit.decoding import PropensitySettings
from memguard.audit.digest import base_digest, checkpoint_digest, unchanged
from memguard.audit.endpoint import Endpoint
from memguard.audit.offline import load_checkpoint
from memguard.audit.propensity import measure_endpoint, measure_model
from memguard.audit.propensity_report import CorpusSummary, PropensityReport
from memguard.audit.records import Record, load_records
from memguard.audit.report import Subject
from memguard.audit.report_propensity import Propensity
from memguard.canaries.encoding import tokenizer_digest
from memguard.canaries.ledger import LEDGER_NAME, load_ledger
from memguard.documents import json_digest
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer
from memguard.scoring.team import Team
from memguard.tracing.corpus_index import CorpusIndex


@dataclass(frozen=True)
class CorpusFiles:
    """What a run is traced to, and the records it is prompted with.

    Args:
        index: folder of the index.
        name: of the corpus; None takes the folder's.
        data: records of the training data; None takes documents of the index.
        held_out: records of the same kind, never trained on.
    """

    index: Path
    name: str | None = None
    data: Path | None = None
    held_out: Path | None = None


def run_propensity(
    checkpoint: Path,
    files: CorpusFiles,
    settings: PropensitySettings,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    team: Team | None = None,
) -> PropensityReport:
    """Measure a checkpoint; with several ranks, all call this together.

    Args:
        checkpoint: folder with safetensors weights and a tokenizer.
        files: corpus and records.
        settings: prompts and decoding.
        batch_size: rows a forward pass at most; None: what memory allows.
        seed: of prompts and draws.
        team: ranks that share the work.

    Raises:
        InputError: a file or folder that cannot be read, or an index of another tokenizer.
        EvidenceError: no prompt was left.
        ScoringError: the model does not load, or could not write.
    """
    with unchanged(checkpoint):
        model, tokenizer = load_checkpoint(checkpoint)
        ledger = load_ledger(checkpoint / LEDGER_NAME) if (checkpoint / LEDGER_NAME).exists() else None
        subject = Subject(
            kind="checkpoint",
            digest=checkpoint_digest(checkpoint),
            global_step=ledger.global_step if ledger is not None else None,
            epoch=None,
            base_digest=base_digest(checkpoint),
        )

    def measure(index: CorpusIndex, members: Sequence[Record], held_out: Sequence[Record]) -> Propensity:
        with audit_mode(model) as inner:
            scorer = Scorer(inner, batch_size=batch_size, team=team or Team.current())
            corpus = corpus_of(index, tokenizer, seed=seed)
            return measure_model(scorer, tokenizer, corpus, settings, members=members, held_out=held_out, seed=seed)

    return _report(measure, tokenizer, files, seed, subject=subject, served_model=None)


def run_served_propensity(
    endpoint: Endpoint, tokenizer: Any, files: CorpusFiles, settings: PropensitySettings, *, seed: int = 0
) -> PropensityReport:
    """Measure a served model; `propensity.partial` says why continuations are missing, and is no success.

    Args:
        endpoint: where to ask.
        tokenizer: of the served model.
        files: corpus and records.
        settings: prompts and decoding.
        seed: of prompts and draws.

    Raises:
        InputError: a file that cannot be read, or an index of another tokenizer.
        EvidenceError: no prompt was left.
        EndpointError: the endpoint refuses, or gave nothing at all.
    """

    def measure(index: CorpusIndex, members: Sequence[Record], held_out: Sequence[Record]) -> Propensity:
        corpus = corpus_of(index, tokenizer, seed=seed)
        return measure_endpoint(endpoint, tokenizer, corpus, settings, members=members, held_out=held_out, seed=seed)

    return _report(measure, tokenizer, files, seed, subject=None, served_model=endpoint.model)


def _report(
    measure: Callable[[CorpusIndex, Sequence[Record], Sequence[Record]], Propensity],
    tokenizer: Any,
    files: CorpusFiles,
    seed: int,
    *,
    subject: Subject | None,
    served_model: str | None,
) -> PropensityReport:
    began = time.monotonic()
    index = open_index(files.index, tokenizer)
    members = load_records(files.data, tokenizer) if files.data is not None else sample_documents(index, seed=seed)
    others = load_records(files.held_out, tokenizer, what="held-out data") if files.held_out is not None else []
    return PropensityReport(
        created_at=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        memguard=__version__,
        subject=subject,
        served_model=served_model,
        tokenizer_digest=tokenizer_digest(tokenizer),
        corpus=CorpusSummary(
            name=files.name or files.index.resolve().name,
            digest=json_digest([shard.model_dump(mode="json") for shard in index.manifest.shards]),
            num_tokens=index.num_tokens,
            num_documents=index.num_documents,
        ),
        prefixes_from="records" if files.data is not None else "documents of the index",
        propensity=measure(index, members, others),
        duration_s=time.monotonic() - began,
    )
