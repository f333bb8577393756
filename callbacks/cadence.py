"""When a cadence is due, and what audits may cost: seconds of audits against seconds of training, on one clock.

Steps decide when an audit is due, so that a resumed run keeps its cadence; time only lets one wait. Times are those of one
rank: a caller with several decides on the first and tells the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memguard.audit.config import Cadence
from memguard.errors import InputError

ROUNDING = 1e-9  # of a step: fractions of an epoch that should meet a whole step do


def steps_between(every: Cadence | None, steps_per_epoch: int | None) -> float | None:
    """Optimiser steps from one audit of the cadence to the next, before any budget; None: named moments alone.

    Args:
        every: the setting.
        steps_per_epoch: optimiser steps an epoch; None for a stream, which has none.

    Raises:
        InputError: a cadence in epochs of a stream.

    Example:
        >>> steps_between(Cadence(epochs=0.25), 10)
        2.5
    """
    if every is None:
        return None
    if every.epochs is None:
        assert every.steps is not None
        return float(every.steps)
    if steps_per_epoch is None:
        raise InputError("audit.every must be in steps for a stream, which has no epochs, got epochs.")
    return max(1.0, every.epochs * steps_per_epoch)


def is_due(step: int, interval: float | None) -> bool:
    """Whether a multiple of `interval` lies in the step that was just made, (step - 1, step].

    Example:
        >>> [step for step in range(1, 11) if is_due(step, 2.5)]
        [3, 5, 8, 10]
    """
    if interval is None or step < 1:
        return False
    return math.floor(step / interval + ROUNDING) > math.floor((step - 1) / interval + ROUNDING)


@dataclass
class Budget:
    """Seconds of audits against seconds of training. The clock starts when it is made.

    Args:
        max_overhead: audits over training without audits, as a share; None: no limit.
        clock: seconds.

    Attributes:
        audits: seconds of audits so far.
        num_waited: audits that were due and had to wait.
    """

    max_overhead: float | None
    clock: Callable[[], float] = time.monotonic
    audits: float = 0.0
    num_waited: int = 0
    _began: float = field(init=False)
    _audit_began: float | None = field(default=None, init=False)
    _last_short: float | None = field(default=None, init=False)
    _last: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def audit_seconds(self) -> float:
        """Seconds of audits so far, with the one that is running."""
        return self.audits + (self.clock() - self._audit_began if self._audit_began is not None else 0.0)

    @property
    def training_seconds(self) -> float:
        """Seconds since the start, audits taken off."""
        return max(0.0, self.clock() - self._began - self.audit_seconds)

    @property
    def overhead(self) -> float | None:
        """Seconds of audits over seconds of training so far, as a share; None before any training."""
        training = self.training_seconds
        return self.audit_seconds / training if training > 0 else None

    @property
    def next_seconds(self) -> float | None:
        """What the next audit of the cadence is taken to need: what the last short one took, else the last one."""
        return self._last_short if self._last_short is not None else self._last

    @contextlib.contextmanager
    def audit(self, *, full: bool | None) -> Iterator[None]:
        """Count the block as an audit, however it ends; `full` is None where earlier figures are only written again."""
        self._audit_began = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - self._audit_began
            self._audit_began = None
            self.audits += seconds
            if full is not None:
                self._last = seconds
            if full is False:
                self._last_short = seconds

    def expect(self, seconds: float) -> None:
        """What an audit took in an earlier part of the run, until one is measured here."""
        self._last = seconds

    def allows_another(self) -> bool:
        """Whether one more audit, as long as the last, keeps all of them within the share; counts those that must wait."""
        if self.max_overhead is None or self.next_seconds is None:
            return True
        fits = self.audits + self.next_seconds <= self.max_overhead * self.training_seconds
        self.num_waited += not fits
        return fits

    def stretched(self, interval: float | None, *, steps: int) -> float | None:
        """Steps between audits that the share allows at the speed so far, a multiple of `interval`; None without a cadence.

        Args:
            interval: steps between audits before any budget.
            steps: optimiser steps since the clock started.
        """
        training = self.training_seconds
        if interval is None or self.max_overhead is None or self.next_seconds is None or steps < 1 or training <= 0:
            return interval
        wanted = self.next_seconds / (self.max_overhead * training / steps)
        return interval * max(1, math.ceil(wanted / interval - ROUNDING))

    def describe(self, interval: float | None, *, steps: int) -> str | None:
        """One sentence on what the cadence costs; None while an audit or a step is still to be measured."""
        training = self.training_seconds
        if interval is None or self.next_seconds is None or steps < 1 or training <= 0:
            return None
        share = self.next_seconds / (interval * training / steps)
        text = f"an audit takes about {self.next_seconds:.2g} s; every {interval:g} steps that is {share:.1%} of training"
        between = self.stretched(interval, steps=steps)
        if between == interval or between is None:
            return f"{text}."
        return f"{text}, above max_overhead {self.max_overhead:.1%}: audits come about every {between:.0f} steps."
