"""The exceptions of memguard, one tree, by what the user can do about them.

    MemguardError
    |-- InputError         a file, key or value the user wrote cannot be used      (CLI exit 2)
    |-- CanaryError        the canaries cannot be drawn or planted as asked        (CLI exit 2)
    |-- ScoringError       a model could not be scored; names the item             (CLI exit 4)
    |   `-- NonFiniteScoreError  a score is NaN or infinite; a report is *invalid*  (CLI exit 3)
    |-- EvidenceError      the figures are not evidence; gates answer *invalid*    (CLI exit 3)
    |-- RegistryError      a registry refused or is away                           (CLI exit 4)
    |-- EndpointError      a served model refused, is away or too slow             (CLI exit 4)
    `-- MissingExtraError  an optional part is not installed; names the pip line   (CLI exit 4)

No message ever holds the text of a secret. Wrong arguments to a function stay ``ValueError`` / ``TypeError``.
"""

from __future__ import annotations


class MemguardError(Exception):
    """Anything memguard raises on purpose."""


class InputError(MemguardError, ValueError):
    """A file, key or value that the user wrote cannot be used."""


class CanaryError(MemguardError, ValueError):
    """Canaries cannot be drawn, encoded or planted as asked."""


class ScoringError(MemguardError, RuntimeError):
    """A model could not be scored."""


class NonFiniteScoreError(ScoringError):
    """A score is NaN or infinite: what was measured is no evidence."""


class EvidenceError(MemguardError):
    """The figures are not evidence of anything; a gate answers *invalid*."""


class RegistryError(MemguardError):
    """A model registry refused, or could not be reached."""


class EndpointError(MemguardError):
    """An endpoint that serves a model refused, could not be reached, or was too slow."""


class MissingExtraError(MemguardError, ImportError):
    """An optional part is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra '{extra}': pip install 'memguard-audit[{extra}]'.")
        self.extra = extra
