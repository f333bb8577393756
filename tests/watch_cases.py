"""A run's folder of real checkpoints, a watcher's auditor that counts its audits, and a stop that acts while it waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_run import SETTINGS

from memguard.audit.config import AuditConfig, parse_config
from memguard.audit.one_checkpoint import CheckpointAuditor, LoadedCheckpoint
from memguard.audit.watch import Watcher, WatchResult
from memguard.canaries.ledger import LEDGER_NAME, Ledger, LedgerEntry
from memguard.canaries.plan import CanaryPlan

# small enough for a hundred audits a minute; the whole path of a full audit all the same
QUICK = SETTINGS | {
    "audit": SETTINGS["audit"]
    | {"prior_aware": None, "extraction": None, "membership": None, "exposure": {"references": 16, "exact": "off"}}
}


def quick_config() -> AuditConfig:
    return parse_config(QUICK, what="config")


class CountingAuditor(CheckpointAuditor):
    """Keeps the names of the checkpoints that it loaded, in order; `during` is called in the middle of each audit."""

    during: Callable[[Path], None] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loaded: list[str] = []
        self._folder = Path()

    def load(self, folder: Path) -> LoadedCheckpoint:
        self.loaded.append(folder.name)
        self._folder = folder
        return super().load(folder)

    def measure(self, loaded: LoadedCheckpoint, **options: Any) -> Any:
        report = super().measure(loaded, **options)
        if self.during is not None:
            self.during(self._folder)
        return report


class Waits:
    """A stop that does one thing in each wait and then says stop; nothing sleeps."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self._actions, self._is_set = list(actions), False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float) -> bool:
        if not self._actions:
            self._is_set = True
        else:
            self._actions.pop(0)()
        return self._is_set


@dataclasses.dataclass
class Run:
    """A run's folder, its plan, and what saves checkpoints into it."""

    folder: Path
    plan: CanaryPlan
    model: Any
    tokenizer: Any

    def save(self, name: str | int, *, ledger: bool = True, **options: Any) -> Path:
        """A checkpoint of other weights than any before, by step or by name."""
        import torch

        folder = self.folder / (f"checkpoint-{name}" if isinstance(name, int) else name)
        with torch.no_grad():
            self.model.model.norm.weight.mul_(1.01)
        self.model.save_pretrained(folder, **options)
        self.tokenizer.save_pretrained(folder)
        if ledger:
            self.save_ledger(folder, step=name if isinstance(name, int) else 1)
        return folder

    def save_ledger(self, folder: Path, *, step: int, plan_digest: str | None = None) -> None:
        """What the callback writes after the trainer has saved."""
        planted = [one for one in self.plan.canaries if one.role != "control"]
        Ledger(
            plan_digest=plan_digest or self.plan.digest,
            global_step=step,
            max_steps=100,
            exact=True,
            notes=[],
            count="per_epoch",
            mode="append",
            plant_once=False,
            token_share=0.01,
            token_share_is_estimate=False,
            canaries={one.id: LedgerEntry(repetitions=one.tier, num_insertions=1, num_seen=1) for one in planted},
        ).save(folder / LEDGER_NAME)

    def auditor(self, **options: Any) -> CountingAuditor:
        return CountingAuditor(self.plan, quick_config().audit, **options)

    def watch(
        self, *actions: Callable[[], object], auditor: CountingAuditor | None = None, once: bool = True, **options: Any
    ) -> tuple[WatchResult, list[str]]:
        """Watch with a new watcher, as a restart does; the result, and what was loaded to be audited."""
        auditor = auditor or self.auditor()
        result = Watcher(self.folder, auditor, **options).watch(Waits(*actions, *[lambda: None] * once), once=once)
        return result, auditor.loaded

    def outcomes(self, result: WatchResult) -> dict[str, str]:
        return {one.checkpoint: one.outcome for one in result.checkpoints}
