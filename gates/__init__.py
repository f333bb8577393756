"""The release gate: an audit report, a policy and a baseline in; one decision out. No torch, no network.

Source: statistics specification, section 3 (error budget, three outcomes of a limit, comparison with the baseline).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "memguard.gates":
    raise ImportError(
        f"the folder 'gates' must be imported as 'memguard.gates', got '{__name__}'. Install memguard and import that."
    )

if TYPE_CHECKING:
    from memguard.gates.baseline import accept, load_baseline
    from memguard.gates.decision import decide
    from memguard.gates.policy import Policy, load_policy

__all__ = ["Policy", "accept", "decide", "load_baseline", "load_policy"]

_HOMES = {
    "Policy": "memguard.gates.policy",
    "accept": "memguard.gates.baseline",
    "decide": "memguard.gates.decision",
    "load_baseline": "memguard.gates.baseline",
    "load_policy": "memguard.gates.policy",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'memguard.gates' has no attribute '{name}'.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
