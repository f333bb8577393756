"""What a promotion reads from disk: each file once, so that what was verified is what is decided on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from memguard.audit.report import AuditReport, load_report
from memguard.errors import EvidenceError, InputError, MemguardError
from memguard.files import MAX_BYTES
from memguard.gates.baseline import Baseline, load_baseline
from memguard.gates.policy import BUILT_IN, Policy, load_policy

Loaded = TypeVar("Loaded")


def load_inputs(
    report_path: Path, policy: Path | str, baseline: Path | None, *, keys: Path | None
) -> tuple[AuditReport, Policy, Baseline | None]:
    """Read report, policy and baseline; what cannot be read comes before what was changed, and that before what is not signed.

    Args:
        report_path: report.json.
        policy: policy.yaml, or the name of a built-in one, which needs no signature.
        baseline: baseline.json or a bare report; None: there is none.
        keys: public keys that each file must be signed by one of; None: signatures are not looked at.

    Raises:
        InputError: a file or a key cannot be read.
        EvidenceError: a file was changed, or is not signed as asked.
    """
    own_policy = None if str(policy) in BUILT_IN else Path(policy)
    problems: list[MemguardError] = []
    with _held_still([report_path, own_policy, baseline]) as (report_copy, policy_copy, baseline_copy):
        rules = _try(load_policy, policy_copy or policy, problems)
        report = _try(load_report, report_copy, problems)
        accepted = _try(load_baseline, baseline_copy, problems) if baseline_copy is not None else None
        if report is None or rules is None or problems:
            raise min(problems, key=lambda problem: isinstance(problem, EvidenceError))
        if keys is not None:
            from memguard.gates.signing import require_signature

            for copy in (report_copy, baseline_copy, policy_copy):
                if copy is not None:
                    require_signature(copy, keys)
    return report, rules, accepted


def _try(load: Callable[[Any], Loaded], path: Any, problems: list[MemguardError]) -> Loaded | None:
    try:
        return load(path)
    except (InputError, EvidenceError) as problem:
        problems.append(problem)
        return None


@contextlib.contextmanager
def _held_still(paths: Sequence[Path | None]) -> Iterator[list[Path | None]]:
    """Private copies of files and their signatures, whoever writes to them meanwhile. What is no file is left to its loader."""
    with tempfile.TemporaryDirectory(prefix="memguard-") as folder:
        copies = list(paths)
        for number, path in enumerate(paths):
            if path is None or not _is_readable_size(path):
                continue
            place = Path(folder, str(number))
            place.mkdir()
            for one in (path, path.with_name(f"{path.name}.sig")):
                if _is_readable_size(one):
                    (place / one.name).write_bytes(_read(one))
            copies[number] = place / path.name
        yield copies


def _is_readable_size(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except OSError:  # such as a name that is too long
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
