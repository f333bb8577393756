"""`promotions.jsonl`: every promotion that was tried, a line a step, in the order they happened; appended to under one lock.

A line carries its own sha256 and that of the line before, so a line that is changed, taken out or moved is found. Lines cut
off the end are not: keep the log where the gate alone can write. It holds digests, names and sentences; no path, no secret.
A move is written down before it begins (`moving`): a promotion that is killed leaves what the alias named before it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import filelock
from pydantic import Field, ValidationError

from memguard.documents import SCHEMA_VERSION, Document, json_digest
from memguard.errors import EvidenceError, InputError, RegistryError
from memguard.files import MAX_BYTES

logger = logging.getLogger(__name__)

# A promotion fetches a checkpoint twice while it holds the lock. One that was killed holds it no longer.
LOCK_SECONDS = 600.0
FIRST = "0" * 64

Action = Literal["moving", "moved", "already promoted", "refused", "rolled back", "not rolled back"]
CHANGES = ("moving", "moved", "rolled back", "not rolled back")  # after which the alias may name something else
UNFINISHED = ("moving", "not rolled back")


class PromotionEntry(Document):
    """One step of one promotion. `moving` is written before the alias is touched; every promotion ends in another action."""

    schema_version: int = SCHEMA_VERSION
    previous: str = Field(description="sha256 of the line before; zeros in the first line")
    time: str = Field(description="UTC, ISO 8601")
    action: Action
    registry: str = Field(description="kind of registry")
    model: str
    alias: str
    version: str = Field(description="the version that was offered")
    subject_digest: str | None = Field(description="of the checkpoint the report is of; None: a live model")
    plan_digest: str
    report_digest: str
    policy_digest: str
    baseline_digest: str | None
    audited_at: str = Field(description="when the report was made: UTC, ISO 8601")
    audit_outcome: Literal["pass", "block", "invalid"] = Field(description="of the report by the policy and the baseline alone")
    outcome: Literal["pass", "block", "invalid"] = Field(description="with what the registry serves and later audits say")
    exit_code: int
    reason: str = Field(description="one sentence")
    attempt: int = Field(description="distinct reports of this plan and model so far, this one included")
    alias_before: str | None = Field(description="the version the alias named; None: there was no alias")
    alias_after: str | None = Field(description="the version it names as far as known; None: there is no alias")

    @property
    def digest(self) -> str:
        """sha256 of the entry, `previous` included."""
        return json_digest(self.model_dump(mode="json"))

    @property
    def line(self) -> bytes:
        """The entry as it stands in the log."""
        return json.dumps({**self.model_dump(mode="json"), "digest": self.digest}, separators=(",", ":")).encode("ascii")


class PromotionLog:
    """The entries of a log that is held open under its lock; made by `open_log`."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        self.entries, self._end = _verified(data, path.name)
        if data[self._end :] not in (b"", b"\n"):
            logger.warning("The last line of '%s' was cut short while it was written; the next entry replaces it.", path.name)

    def attempts(self, *, model: str, plan_digest: str, report_digest: str) -> int:
        """How many distinct reports of a plan were offered for a model, `report_digest` included."""
        reports = {entry.report_digest for entry in self.entries if (entry.model, entry.plan_digest) == (model, plan_digest)}
        return len(reports | {report_digest})

    def last_change(self, *, registry: str, model: str, alias: str) -> PromotionEntry | None:
        """The newest entry after which the alias may name something else."""
        for entry in reversed(self.entries):
            if (entry.registry, entry.model, entry.alias) == (registry, model, alias) and entry.action in CHANGES:
                return entry
        return None

    def later_failure(self, *, subject_digest: str, report_digest: str, audited_at: str) -> PromotionEntry | None:
        """A younger audit of the same checkpoint whose last verdict is no pass: an older one must not outlive it."""
        mine, last = _moment(audited_at), dict[str, PromotionEntry]()
        for entry in self.entries:
            if entry.subject_digest == subject_digest and entry.report_digest != report_digest:
                last[entry.report_digest] = entry
        failed = [entry for entry in last.values() if entry.audit_outcome != "pass" and _moment(entry.audited_at) > mine]
        return max(failed, key=lambda entry: _moment(entry.audited_at), default=None)

    def append(self, **fields: Any) -> PromotionEntry:
        """Write one entry, down to the disk, before it counts.

        Raises:
            OSError: the disk is full, or fails; what was written of the line is cut off by the next append.
        """
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        previous = self.entries[-1].digest if self.entries else FIRST
        entry = PromotionEntry.model_validate({"previous": previous, "time": now, **fields})
        with self._path.open("r+b") as stream:
            stream.truncate(self._end)
            stream.seek(self._end)
            stream.write((b"\n" if self.entries else b"") + entry.line)
            end = stream.tell()
            stream.write(b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._end = end
        self.entries.append(entry)
        return entry


@contextlib.contextmanager
def open_log(path: Path | str, *, lock_seconds: float = LOCK_SECONDS) -> Iterator[PromotionLog]:
    """Hold the log, and with it every promotion that uses it, for the block.

    A line that a crash cut short while it was written is no entry: a warning says so, and the next entry replaces it.

    Args:
        path: `promotions.jsonl`; made where it does not exist. Its lock is a file beside it.
        lock_seconds: how long to wait for a promotion that is under way.

    Raises:
        InputError: the file cannot be read or written.
        EvidenceError: the log was changed.
        RegistryError: another promotion held the lock all that time.
    """
    path = Path(path).resolve()  # one lock for a log, whatever name it is called by
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=lock_seconds)
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock)
            data = _read_or_make(path)
        except filelock.Timeout:
            raise RegistryError(
                f"another promotion has held '{path.name}' for {lock_seconds:g} seconds; nothing was moved. Try again later."
            ) from None
        except OSError as error:
            raise InputError(f"promotion log '{path}' cannot be used: {error.strerror}.") from None
        yield PromotionLog(path, data)


def _read_or_make(path: Path) -> bytes:
    """What stands in the log; an empty one where there is none, its name on the disk before any entry is."""
    if path.exists():
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise InputError(f"promotion log '{path}' must be a regular file of at most {MAX_BYTES // 2**20} MiB.")
        return path.read_bytes()
    path.touch(exist_ok=False)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return b""


def _verified(data: bytes, name: str) -> tuple[list[PromotionEntry], int]:
    """Every entry, and where the last one ends. What stands behind the last line end and is no whole JSON was cut short."""
    entries: list[PromotionEntry] = []
    end, previous = 0, FIRST
    *lines, rest = data.split(b"\n")
    for line in [*lines, rest] if rest else lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            if len(entries) == len(lines):
                break
            raise _changed(name, len(entries) + 1) from None
        entry = _entry_of(fields, name)
        if entry is None or entry.previous != previous or entry.line != line:
            raise _changed(name, len(entries) + 1)
        end += len(line) + bool(entries)
        entries.append(entry)
        previous = entry.digest
    return entries, end


def _entry_of(fields: Any, name: str) -> PromotionEntry | None:
    if not isinstance(fields, dict):
        return None
    version = fields.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(f"promotion log '{name}' has entries of a newer memguard. Upgrade memguard to read it.")
    try:
        return PromotionEntry.model_validate({key: value for key, value in fields.items() if key != "digest"})
    except ValidationError:
        return None


def _changed(name: str, number: int) -> EvidenceError:
    return EvidenceError(
        f"promotion log '{name}' was changed: line {number} is not the one that was written. Nothing is promoted by it; put "
        "back the log as it was, or begin a new one under another name."
    )


def _moment(text: str) -> datetime.datetime:
    """A time of a report; one that cannot be read is older than any."""
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)
