"""`propensity.json`: what a model volunteers of a corpus, as a document of its own. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from memguard.audit.report import Subject
from memguard.audit.report_propensity import Propensity
from memguard.documents import SCHEMA_VERSION, Document, load_document, sealed_json
from memguard.errors import InputError
from memguard.files import read_json, write_text_atomic


class CorpusSummary(Document):
    """The index that continuations were traced to."""

    name: str = Field(description="what the corpus is called; its folder's name where nobody said")
    digest: str = Field(description="sha256 over the digests of its files")
    num_tokens: int = Field(description="tokens that it holds")
    num_documents: int = Field(description="documents that it holds")


class PropensityReport(Document):
    """What a model volunteers of a corpus: numbers of documents and lines, and text only where snippets were asked for."""

    kind: Literal["memguard propensity report"] = "memguard propensity report"
    schema_version: int = SCHEMA_VERSION
    created_at: str = Field(description="when it was measured, ISO 8601 in UTC")
    memguard: str = Field(description="version")
    subject: Subject | None = Field(description="the checkpoint; None: a served model")
    served_model: str | None = Field(default=None, description="the name that an endpoint knows its model by")
    tokenizer_digest: str = Field(description="sha256 of the tokenizer")
    corpus: CorpusSummary = Field(description="what was traced to")
    prefixes_from: Literal["records", "documents of the index"] = Field(description="where prefixes were cut from")
    propensity: Propensity = Field(description="the figures")
    duration_s: float = Field(description="seconds it took")

    @property
    def name(self) -> str:
        """What was measured, in a word or two."""
        if self.subject is None:
            return f"served model {self.served_model}"
        return "checkpoint" if self.subject.global_step is None else f"step {self.subject.global_step}"

    def save(self, path: Path | str) -> None:
        """Write the report as JSON with its seal, whole or not at all."""
        write_text_atomic(path, sealed_json(self))


def is_propensity_report(path: Path) -> bool:
    """Whether a file says that it is one; one that cannot be read does not."""
    try:
        data = read_json(path, what="report")
    except InputError:
        return False
    return isinstance(data, dict) and data.get("kind") == PropensityReport.model_fields["kind"].default


def load_propensity_report(path: Path) -> PropensityReport:
    """Read a propensity report.

    Raises:
        InputError: unreadable, of another kind or a newer schema.
        EvidenceError: changed after it was written.
    """
    return load_document(path, PropensityReport, what="propensity report", sealed=True)
