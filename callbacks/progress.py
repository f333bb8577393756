"""Shows how far a long audit is: a bar on a terminal, a log line now and then elsewhere, nothing for a short one."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0  # a bar that flashes by tells nobody anything
LOG_EVERY_S = 60.0


class AuditProgress:
    """Progress of one audit, to be called with rows done and rows in all.

    Args:
        title: what is going on.
        is_shown: false on all ranks but the first.
        on_terminal: whether standard error is one; looked up when None.
        clock: seconds.
    """

    def __init__(
        self,
        title: str,
        *,
        is_shown: bool = True,
        on_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self._is_shown, self._clock = title, is_shown, clock
        self._on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
        self._bar: Any = None
        self._task: Any = None
        self._next = clock() + PATIENCE_S

    def __enter__(self) -> AuditProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` rows are scored."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif self._is_shown and self._clock() >= self._next:
            self._show(done, total)

    def _show(self, done: int, total: int) -> None:
        if not self._on_terminal:
            logger.info("%s: %d of %d rows scored.", self.title, done, total)
            self._next = self._clock() + LOG_EVERY_S
            return
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.title, total=total, completed=done)
        self._bar.start()
