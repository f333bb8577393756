"""`memguard watch` as a process that a test can hold in the middle of its first audit (HOLD=1) until it gets a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from memguard.audit.one_checkpoint import CheckpointAuditor, LoadedCheckpoint
from memguard.cli import main

original = CheckpointAuditor.load


def load_and_wait(self: CheckpointAuditor, folder: Path) -> LoadedCheckpoint:
    loaded = original(self, folder)
    print(f"in the middle of {folder.name}", file=sys.stderr, flush=True)
    sys.stdin.readline()
    CheckpointAuditor.load = original  # type: ignore[method-assign]
    return loaded


if __name__ == "__main__":
    if os.environ.get("HOLD") == "1":
        CheckpointAuditor.load = load_and_wait  # type: ignore[method-assign]
    main()
