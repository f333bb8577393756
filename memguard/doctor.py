"""What is installed, and the line that installs what is not. Looks packages up without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass

from rich.table import Table

from memguard.errors import MissingExtraError

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hf": ("Hugging Face callback, plans, audits", ("torch", "transformers", "accelerate", "safetensors")),
    "triton": ("compiled kernels on NVIDIA GPUs", ("triton",)),
    "wandb": ("trends in Weights & Biases", ("wandb",)),
}


@dataclass(frozen=True)
class Finding:
    """One optional part: what it is for, what was found, how to get it."""

    extra: str
    feature: str
    versions: dict[str, str | None]
    is_complete: bool
    install: str


def examine() -> list[Finding]:
    """Every optional part this version uses."""
    return [_examine(extra) for extra in EXTRAS]


def require_extra(extra: str, feature: str) -> None:
    """Raise `MissingExtraError` unless every package of an extra is there."""
    if not _examine(extra).is_complete:
        raise MissingExtraError(feature, extra)


def scoring_paths() -> list[str]:
    """How each device would be scored, and why, in words; imports torch where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return ["no torch: reports can be read and gated, models cannot be audited"]
    from memguard.scoring.kernels import describe_paths

    return describe_paths()


def doctor_table(findings: list[Finding]) -> Table:
    """The findings for a terminal."""
    table = Table(title="memguard doctor", title_justify="left")
    for column in ("part", "for", "found", "install"):
        table.add_column(column)
    for finding in findings:
        found = ", ".join(f"{name} {version or 'missing'}" for name, version in finding.versions.items())
        table.add_row(finding.extra, finding.feature, found, "" if finding.is_complete else finding.install)
    for line in scoring_paths():
        table.add_row("scoring", line, "", "")
    return table


def _examine(extra: str) -> Finding:
    feature, packages = EXTRAS[extra]
    versions = {name: _version(name) for name in packages}
    complete = all(version is not None for version in versions.values())
    return Finding(extra, feature, versions, complete, f"pip install 'memguard-audit[{extra}]'")


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
