"""What a significance rule found before its outcome is decided: a p-value with its limits, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memguard.gates.evidence import Figures


@dataclass(frozen=True)
class Measured:
    """A test that was made. `sees` names the smallest effect it finds, `needed` the size at which it could fire."""

    p_value: float
    min_attainable_p: float
    n: int
    finding: str
    needed: str | None
    sees: str | None
    detectable_bits: float | None
    canaries: list[str]
    figures: Figures
    note: str = field(default="")


@dataclass(frozen=True)
class Unmeasured:
    """A test that could not be made."""

    kind: Literal["test", "baseline"]
    outcome: Literal["invalid", "insufficient evidence"]
    reason: str
