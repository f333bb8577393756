"""Counts what a callback costs beside its audits: planting, schedules, ledgers, waiting for other ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def outside_audits(event: F) -> F:
    """Add the seconds of an event, audits taken off, to `seconds_outside` of its callback, however it ends.

    Args:
        event: method of a callback that holds an `auditor` (an Auditor or None) and a number of `seconds_outside`.
    """

    @functools.wraps(event)
    def timed(callback: Any, *args: Any, **kwargs: Any) -> Any:
        began, before = time.monotonic(), callback.auditor
        audits = before.seconds if before is not None else 0.0
        try:
            return event(callback, *args, **kwargs)
        finally:
            now = callback.auditor  # an event may begin a run, with an auditor of its own
            spent = 0.0 if now is None else now.seconds - (audits if now is before else 0.0)
            callback.seconds_outside += time.monotonic() - began - spent

    return cast(F, timed)
