"""Gate, then move an alias: nothing but a pass on the very files that the registry serves ever moves it.

One promotion at a time holds the log. After the move the alias is read back and what it names is hashed again; any doubt puts
the old alias back. Exit codes: those of the decision; whatever the registry does wrong is a `RegistryError` (4).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memguard.audit.report import AuditReport, Decision, RuleResult
from memguard.documents import document_digest
from memguard.errors import InputError, MemguardError, RegistryError
from memguard.gates.binding import SERVED, SHOWN, check_last, check_served, served_digest, with_evidence
from memguard.gates.commands import DECISION_NAME
from memguard.gates.decision import decide
from memguard.gates.promotion_inputs import load_inputs
from memguard.gates.promotion_log import LOCK_SECONDS, UNFINISHED, Action, PromotionEntry, PromotionLog, open_log
from memguard.gates.registries.protocol import Annotation, ModelVersion, Registry

logger = logging.getLogger(__name__)

LOG_NAME = "promotions.jsonl"
MOVED = "the registry moved the alias"


@dataclass(frozen=True)
class Promotion:
    """What became of one promotion: the decision, and what happened to the alias."""

    decision: Decision
    action: Literal["moved", "already promoted", "refused"]
    version: ModelVersion  # that was offered
    previous: ModelVersion | None  # that the alias named before; None: there was no alias
    attempt: int  # distinct reports of this plan and model so far


def promote(
    registry: Registry,
    report_path: Path,
    *,
    version: str,
    policy: Path | str,
    baseline: Path | None = None,
    log: Path = Path(LOG_NAME),
    base: Path | None = None,
    require_signature: Path | None = None,
    lock_seconds: float = LOCK_SECONDS,
    on_decision: Callable[[Decision], None] | None = None,
) -> Promotion:
    """Point the alias of a registry at a version, if the gate passes the report and the registry serves what it is of.

    `decision.json` is written beside the report. The verdict is left on the version: a pass before the alias moves, any other
    where the registry allows it.

    Args:
        registry: where the version and the alias are.
        report_path: report.json of the checkpoint behind the version.
        version: as the registry names it.
        policy: policy.yaml, or the name of a built-in one.
        baseline: baseline.json, or a bare report to compare with.
        log: `promotions.jsonl`; every promotion of a model belongs into one log.
        base: of an adapter: the folder of the base that it was audited on.
        require_signature: public keys; report, baseline and a policy of one's own must each be signed by one of them.
        lock_seconds: how long to wait for another promotion.
        on_decision: told the decision before the alias is touched, to write it elsewhere; what it raises ends the promotion.
            Where the move then fails or is interrupted it is told again, of one that is *invalid* by that, as is
            `decision.json`. A refusal is logged before.

    Returns:
        What happened; the exit code is that of its decision. `already promoted`: the alias named this version by this very
        decision, and was not touched.

    Raises:
        InputError: a file or argument cannot be used.
        EvidenceError: a file or the log was changed, or is not signed.
        RegistryError: the registry refused, is away, or another promotion holds the log; the alias is what it was before,
            or the message says that it may not be.
    """
    target = report_path.with_name(DECISION_NAME)
    if target.resolve() in {Path(one).resolve() for one in (report_path, policy, baseline, log) if one is not None}:
        raise InputError(f"'{DECISION_NAME}' beside the report is where the decision goes; the other file needs another name.")
    report, rules, accepted = load_inputs(report_path, policy, baseline, keys=require_signature)
    if base is not None and report.subject.base_digest is None:
        raise InputError("base must be given for the report of an adapter only; this report names no base.")
    with open_log(log, lock_seconds=lock_seconds) as book:
        to = registry.resolve(version)
        before = registry.current()
        attempt = book.attempts(model=registry.model, plan_digest=report.plan.digest, report_digest=document_digest(report))
        audit = decide(report, rules, accepted, attempts=attempt)
        served = check_served(registry, to, report.subject, base=base)
        decision = with_evidence(audit, [served, check_last(book, report)])
        case = _Case(registry, book, report, audit, decision, to, before, attempt)
        done = _refuse(case) if decision.outcome != "pass" else None
        decision.save(target)
        tell = on_decision or (lambda _: None)
        tell(decision)
        if done is not None:
            return done
        if case.is_settled:
            return _leave(case)
        try:
            return _move(case)
        except BaseException as error:
            with _undisturbed():
                _take_back(decision, _plain(error), target, tell)
            raise


def _take_back(decision: Decision, why: str, target: Path, tell: Callable[[Decision], None]) -> None:
    """Let no output say that a pass was promoted which was not; the failure itself is what the caller hears of."""
    undone = with_evidence(decision, [RuleResult(name=MOVED, kind="evidence", outcome="invalid", reason=why)])
    try:
        undone.save(target)
        tell(undone)
    except Exception as error:
        logger.warning("What was written of the decision may say that it passed, and nothing was promoted: %s", _plain(error))


@dataclass(frozen=True)
class _Case:
    """One promotion under the lock, decided."""

    registry: Registry
    book: PromotionLog
    report: AuditReport
    audit: Decision  # by the policy alone
    decision: Decision  # with what the registry serves and what the log knows
    to: ModelVersion
    before: ModelVersion | None
    attempt: int

    @property
    def alias(self) -> str:
        return f"alias '{self.registry.alias}' of {self.registry.model}"

    @property
    def last_change(self) -> PromotionEntry | None:
        return self.book.last_change(registry=self.registry.kind, model=self.registry.model, alias=self.registry.alias)

    @property
    def is_settled(self) -> bool:
        """Whether the alias names this version, and the log says that it was this very decision that moved it there."""
        last = self.last_change
        if last is None or last.action != "moved" or self.before != self.to or last.version != self.to.version:
            return False
        return (last.report_digest, last.policy_digest, last.baseline_digest) == (
            self.decision.report_digest,
            self.decision.policy_digest,
            self.decision.baseline_digest,
        )

    def log(self, action: Action, *, before: ModelVersion | None, after: ModelVersion | None, failure: str = "") -> None:
        self.book.append(
            action=action,
            registry=self.registry.kind,
            model=self.registry.model,
            alias=self.registry.alias,
            version=self.to.version,
            subject_digest=self.report.subject.digest,
            plan_digest=self.report.plan.digest,
            report_digest=self.decision.report_digest,
            policy_digest=self.decision.policy_digest,
            baseline_digest=self.decision.baseline_digest,
            audited_at=self.report.created_at,
            audit_outcome=self.audit.outcome,
            outcome=self.decision.outcome,
            exit_code=4 if failure else self.decision.exit_code,
            reason=failure or self.decision.reason,
            attempt=self.attempt,
            alias_before=before.version if before is not None else None,
            alias_after=after.version if after is not None else None,
        )

    def annotate(self) -> None:
        from memguard.gates.reporters.markdown import render_decision

        digests = {
            "subject_digest": self.decision.subject.digest or "",
            "report_digest": self.decision.report_digest,
            "policy_digest": self.decision.policy_digest,
        }
        if self.decision.baseline_digest is not None:
            digests["baseline_digest"] = self.decision.baseline_digest
        page = render_decision(self.decision)
        self.registry.annotate(self.to, Annotation(self.decision.outcome, self.decision.reason, digests, page))


def _refuse(case: _Case) -> Promotion:
    """Log the refusal; leave it on the version where it is a verdict on that version, and not on the wrong report for it."""
    _tell_of_cut_off(case, case.before)
    case.log("refused", before=case.before, after=case.before)
    is_verdict = case.decision.outcome == case.audit.outcome and _holds(case.decision, SERVED)
    if is_verdict:
        try:
            case.annotate()
        except Exception as error:
            logger.warning("The verdict could not be left on %s: %s", case.to, _plain(error))
    return Promotion(case.decision, "refused", case.to, case.before, case.attempt)


def _holds(decision: Decision, name: str) -> bool:
    return all(row.outcome == "pass" for row in decision.evidence if row.name == name)


def _leave(case: _Case) -> Promotion:
    case.log("already promoted", before=case.before, after=case.before)
    return Promotion(case.decision, "already promoted", case.to, case.before, case.attempt)


def _move(case: _Case) -> Promotion:
    try:
        case.annotate()
    except BaseException as error:  # no change of the alias: what the log knows of a promotion that was cut off still holds
        case.log("refused", before=case.before, after=case.before, failure=f"{_plain(error)} Nothing was moved.")
        raise
    previous = _alias_to_go_back_to(case)
    case.log("moving", before=previous, after=case.to)
    try:
        case.registry.move_alias(case.to)
        _read_back(case)
        case.log("moved", before=previous, after=case.to)
    except BaseException as error:
        failure = _roll_back(case, previous, error)
        if not isinstance(error, Exception):
            raise  # interrupted by hand: the alias is back, the interruption goes on
        raise RegistryError(failure) from None
    return Promotion(case.decision, "moved", case.to, previous, case.attempt)


def _alias_to_go_back_to(case: _Case) -> ModelVersion | None:
    """What the alias names right before the move, or did before a promotion that was cut off; a move by others is told.

    It is no reason to stop: an operator may put an older version back by hand.
    """
    now, last = case.registry.current(), case.last_change
    if now != case.before:
        logger.warning("The %s was moved by somebody else just now, from %s to %s.", case.alias, _name(case.before), _name(now))
    if last is None:
        return now
    if _tell_of_cut_off(case, now):
        return ModelVersion(case.registry.model, last.alias_before) if last.alias_before is not None else None
    if last.action not in UNFINISHED and (now.version if now is not None else None) != last.alias_after:
        logger.warning(
            "The %s names %s, and the log last set it to %s: it was moved without the gate.",
            case.alias,
            _name(now),
            f"version {last.alias_after}" if last.alias_after is not None else "nothing",
        )
    return now


def _tell_of_cut_off(case: _Case, now: ModelVersion | None) -> bool:
    """Whether the alias is where a promotion that was cut off left it: on the version offered, or nowhere."""
    last = case.last_change
    if last is None or last.action not in UNFINISHED or (now is not None and now.version != last.version):
        return False
    logger.warning(
        "A promotion was cut off while it moved the %s from %s to version %s; it names %s, which was never checked.",
        case.alias,
        f"version {last.alias_before}" if last.alias_before is not None else "nothing",
        last.version,
        _name(now),
    )
    return True


def _read_back(case: _Case) -> None:
    """Ask the registry again what the alias names, and hash that."""
    now, expected = case.registry.current(), case.report.subject.digest
    if now != case.to:
        raise RegistryError(f"{case.alias} names {_name(now)} after it was moved to {case.to}.")
    digest, _ = served_digest(case.registry, case.to)
    if digest != expected:
        raise RegistryError(
            f"{case.to} has the digest {digest[:SHOWN]} after the move, and had {str(expected)[:SHOWN]} before it."
        )


def _roll_back(case: _Case, previous: ModelVersion | None, error: BaseException) -> str:
    """Put the old alias back and log it; the sentence says whether that worked. No signal ends it half-way."""
    with _undisturbed():
        return _put_back(case, previous, error)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C and no termination for the block, where this is the main thread, which alone gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _put_back(case: _Case, previous: ModelVersion | None, error: BaseException) -> str:
    try:
        case.registry.move_alias(previous)
        is_back = case.registry.current() == previous
    except Exception:
        is_back = False
    what = _name(previous)
    failure = f"{_plain(error)} " + (
        f"The {case.alias} names {what} as before."
        if is_back
        else f"The {case.alias} could not be put back to {what} and may name {case.to}: look, and set it by hand."
    )
    try:
        if is_back:
            case.log("rolled back", before=previous, after=previous, failure=failure)
        else:
            case.log("not rolled back", before=previous, after=case.to, failure=failure)
    except OSError as trouble:
        failure += f" The log could not be written: {trouble.strerror}."
    return failure


def _name(version: ModelVersion | None) -> str:
    return str(version) if version is not None else "nothing"


def _plain(error: BaseException) -> str:
    """What we say ourselves; of other people's exceptions the kind alone, since their words may hold an address or a key."""
    text = str(error) if isinstance(error, MemguardError) else f"An unexpected {type(error).__name__}"
    if isinstance(error, KeyboardInterrupt):
        text = "It was interrupted"
    return text[:1].upper() + text[1:].rstrip(".") + "."
