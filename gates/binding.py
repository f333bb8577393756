"""Is what a registry serves the checkpoint that was audited, and is its audit the last word on it?

Both become rows of evidence in the decision, so that every output shows them. Digests catch accidents and swapped files;
against somebody who edits reports there are signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memguard.audit.digest import adapter_base, checkpoint_digest
from memguard.audit.report import AuditReport, Decision, RuleResult, Subject
from memguard.documents import document_digest
from memguard.errors import EvidenceError, InputError
from memguard.gates.promotion_log import PromotionLog
from memguard.gates.registries.protocol import ModelVersion, Registry
from memguard.gates.wording import clip, sentence

SERVED = "the registry serves what was audited"
LAST = "no later audit of this checkpoint was stopped"
SHOWN = 12  # hex digits of a digest in a sentence


def served_digest(registry: Registry, version: ModelVersion) -> tuple[str, bool]:
    """Digest of the files that a registry serves, fetched anew, and whether they are an adapter.

    Raises:
        EvidenceError: what is served cannot be hashed as a checkpoint.
        RegistryError: nothing is served, or not all of it.
    """
    with registry.served_files(version) as folder:
        try:
            return checkpoint_digest(folder), adapter_base(folder) is not None
        except InputError as error:
            raise EvidenceError(clip(str(error).replace(str(folder), str(version)))) from None


def check_served(registry: Registry, version: ModelVersion, subject: Subject, *, base: Path | None) -> RuleResult:
    """Hash what is served for a version, and compare with what the report was made on.

    Args:
        registry: serves the files.
        version: what is offered.
        subject: what the report was made on.
        base: of an adapter: the folder of its base.

    Raises:
        InputError: `base` is no checkpoint.
        RegistryError: the registry does not serve the files.
    """
    if subject.digest is None:
        return _row(SERVED, "the report is of a model in memory, which no registry can serve; audit the saved checkpoint", "")
    try:
        served, is_adapter = served_digest(registry, version)
    except EvidenceError as error:
        return _row(SERVED, str(error), "")
    problem = _base_problem(subject, base, is_adapter=is_adapter)
    if served != subject.digest:
        problem = (
            f"what is served for {version} has the digest {served[:SHOWN]}, the audited checkpoint {subject.digest[:SHOWN]}"
        )
    return _row(SERVED, problem, f"what is served for {version} has the digest {served[:SHOWN]}, as audited")


def _base_problem(subject: Subject, base: Path | None, *, is_adapter: bool) -> str:
    """An adapter says nothing without its base, so the base must be the one that it was measured on."""
    if subject.base_digest is None:
        unbound = "an adapter is served, and its report does not bind the base; audit it with the base in a folder of its own"
        return unbound if is_adapter else ""
    if base is None:
        return (
            f"the adapter was audited on a base of digest {subject.base_digest[:SHOWN]}; give the folder of its base (--base)"
        )
    given = checkpoint_digest(base)
    if given == subject.base_digest:
        return ""
    return f"the base has the digest {given[:SHOWN]}, the adapter was audited on {subject.base_digest[:SHOWN]}"


def check_last(log: PromotionLog, report: AuditReport) -> RuleResult:
    """Whether the log holds a younger audit of the same checkpoint whose last verdict is no pass."""
    later = log.later_failure(
        subject_digest=report.subject.digest or "",
        report_digest=document_digest(report),
        audited_at=report.created_at,
    )
    problem = (
        "" if later is None else f"a later audit of this checkpoint, of {later.audited_at}, ended in {later.audit_outcome}"
    )
    return _row(LAST, problem, "the promotion log holds none")


def _row(name: str, problem: str, fine: str) -> RuleResult:
    return RuleResult(name=name, kind="evidence", outcome="invalid" if problem else "pass", reason=sentence(problem or fine))


def with_evidence(decision: Decision, rows: Sequence[RuleResult]) -> Decision:
    """The decision with more evidence; a row that fails makes it invalid (exit code 3), whatever else it was."""
    evidence, failed = [*decision.evidence, *rows], [row for row in rows if row.outcome != "pass"]
    if not failed:
        return decision.model_copy(update={"evidence": evidence})
    parts = [f"'{row.name}' does not hold ({row.reason[:1].lower()}{row.reason[1:].rstrip('.')})" for row in failed]
    besides = [] if decision.outcome == "pass" else [f"besides: {decision.reason}"]
    reason = sentence(f"Not evidence: {'; '.join([*parts, *besides])}")
    return decision.model_copy(update={"evidence": evidence, "outcome": "invalid", "exit_code": 3, "reason": reason})
