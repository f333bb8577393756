"""memguard: how much of its training data a language model memorises, while it trains, and a gate on the answer.

A lazy table of contents: `import memguard` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard.audit import AuditConfig, AuditReport, Decision, load_report, run_audit

__version__ = "0.1.0"
__all__ = ["AuditConfig", "AuditReport", "Decision", "__version__", "load_report", "run_audit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import memguard.audit

        return getattr(memguard.audit, name)
    raise AttributeError(f"module 'memguard' has no attribute '{name}'")
