"""The measurement as a whole. `run_audit` needs torch; the report schemas do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard.audit.config import AuditConfig, load_config
    from memguard.audit.report import AuditReport, Decision, load_report
    from memguard.audit.runner import AuditRunner, run_audit

__all__ = ["AuditConfig", "AuditReport", "AuditRunner", "Decision", "load_config", "load_report", "run_audit"]

_HOMES = {
    "AuditConfig": "config",
    "load_config": "config",
    "AuditReport": "report",
    "Decision": "report",
    "load_report": "report",
    "AuditRunner": "runner",
    "run_audit": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memguard.audit' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"memguard.audit.{_HOMES[name]}"), name)
