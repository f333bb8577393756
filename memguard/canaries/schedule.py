"""Where canaries go: cells (epoch, global row position), decided by the seed and the plan alone.

An epoch is the row order of the trainer's own sampler, over all ranks together; a stream is one epoch as long as the run. Cells
that are dropped (the tail under drop_last) or repeated (rows that even out the ranks) hold no canary; an exact total also stays
within the rows that the run reaches. Counts of what was trained follow from the global step. No torch, no state.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from memguard.errors import CanaryError

Mode = Literal["append", "replace", "splice", "record"]  # record: no schedule, the run's own sampler draws canaries as rows
Count = Literal["per_epoch", "total"]
When = Literal["uniform", "early", "late"]

WINDOW = 0.25  # of the usable rows of a run, for early and late planting


@dataclass(frozen=True)
class Clock:
    """How the trainer turns rows into steps.

    `rows_per_batch` counts the rows of one micro-batch over all ranks, `max_steps` the optimiser steps of the run.
    `repeats_head`: ranks are evened out with rows from the beginning of the epoch up to a whole batch, as accelerate does;
    False: with user rows alone, up to the number of ranks.
    """

    rows_per_batch: int
    accumulation: int
    max_steps: int
    drop_last: bool
    num_ranks: int = 1
    repeats_head: bool = True


@dataclass(frozen=True)
class Schedule:
    """The cells of one run.

    Args:
        num_rows: rows of the user's data, an epoch.
        repetitions: sightings of each planted canary, an epoch or in total.
        mode: append adds rows; replace puts a canary in place of a row; splice writes it into a row.
        count: the unit of `repetitions`.
        seed: placement seed of the plan.
        clock: of the trainer.
        when: which part of the run an exact total falls into: all of it, its first or its last quarter.
        is_stream: the data have no length: one epoch as long as the run, whatever the mode.

    Raises:
        ValueError: a mode that cannot keep the count, or a window without an exact total.
    """

    num_rows: int
    repetitions: tuple[int, ...]
    mode: Mode
    count: Count
    seed: int
    clock: Clock
    when: When = "uniform"
    is_stream: bool = False
    _cache: dict[int, dict[int, int]] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.is_stream and self.count != "total":
            raise ValueError("a stream has no epochs; count must be 'total'.")
        if self.mode == "append" and self.count == "total" and not self.is_stream:
            raise ValueError("mode 'append' counts per epoch; use 'replace' or 'splice' for an exact total.")
        if self.when != "uniform" and self.count != "total":
            raise ValueError(f"'{self.when}' speaks of a whole run; count must be 'total'.")

    def __len__(self) -> int:
        """Rows an epoch, canary rows included."""
        if self.is_stream:
            return self.clock.max_steps * self.clock.accumulation * self.clock.rows_per_batch
        return self.num_rows + (sum(self.repetitions) if self.mode == "append" else 0)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps an epoch."""
        rows = self._rows_dealt()
        batches = rows // self.clock.rows_per_batch if self.clock.drop_last else math.ceil(rows / self.clock.rows_per_batch)
        return max(1, math.ceil(batches / self.clock.accumulation))

    @property
    def num_epochs(self) -> int:
        """Epochs begun before `max_steps`."""
        return math.ceil(self.clock.max_steps / self.steps_per_epoch)

    def zone(self, epoch: int) -> tuple[int, int]:
        """First and last-but-one position of `epoch` where a canary may stand."""
        low, high, dealt = 0, len(self), self._rows_dealt()
        if dealt % self.clock.rows_per_batch:
            if self.clock.drop_last:
                high = min(high, dealt - dealt % self.clock.rows_per_batch)
            elif self.clock.num_ranks > 1 and self.clock.repeats_head:
                low = min(self.clock.rows_per_batch, high)
        if self.count == "total":
            high = min(high, self._rows_trained(epoch, self.clock.max_steps))
        return low, max(low, high)

    def cells(self, epoch: int) -> dict[int, int]:
        """Position in the epoch -> index of the planted canary. The same on every rank and after every resume."""
        if epoch not in self._cache:
            self._cache[epoch] = self._draw(epoch)
        return self._cache[epoch]

    def counts(self, global_step: int) -> list[int]:
        """Sightings of each planted canary in the first `global_step` steps."""
        seen: Counter[int] = Counter()
        for epoch in range(math.ceil(global_step / self.steps_per_epoch)):
            rows = self._rows_trained(epoch, global_step)
            seen.update(canary for position, canary in self.cells(epoch).items() if position < rows)
        return [seen[index] for index in range(len(self.repetitions))]

    def _rows_dealt(self) -> int:
        """Rows of an epoch that are dealt out to the ranks before batches are cut."""
        ranks = 1 if self.clock.repeats_head else self.clock.num_ranks
        return math.ceil(len(self) / ranks) * ranks

    def _rows_trained(self, epoch: int, global_step: int) -> int:
        """Rows of `epoch` that the first `global_step` steps train on."""
        steps = min(global_step - epoch * self.steps_per_epoch, self.steps_per_epoch)
        return max(0, min(len(self), steps * self.clock.accumulation * self.clock.rows_per_batch))

    def _draw(self, epoch: int) -> dict[int, int]:
        low, high = self.zone(epoch)
        if self.count == "total":
            return self._totals.get(epoch, {})
        wanted = _expand(self.repetitions)
        if high - low < len(wanted):
            raise CanaryError(
                f"{len(wanted)} canary sightings must fit in the {high - low} usable rows of epoch {epoch}. "
                "Use fewer canaries or repetitions, or more data."
            )
        rng = random.Random(f"memguard/placement/{self.seed}/{epoch}")
        positions = rng.sample(range(low, high), len(wanted))
        return dict(zip(positions, wanted, strict=True))

    @functools.cached_property
    def _totals(self) -> dict[int, dict[int, int]]:
        """Cells of an exact total by epoch: uniform over the usable rows of the run, or over its first or last quarter."""
        zones = [self.zone(epoch) for epoch in range(self.num_epochs)]
        ends = list(itertools.accumulate(high - low for low, high in zones))
        wanted, room = _expand(self.repetitions), ends[-1] if ends else 0
        window = range(room)
        if self.when != "uniform":
            part = math.ceil(WINDOW * room)
            window = range(part) if self.when == "early" else range(room - part, room)
        if len(window) < len(wanted):
            where = "" if self.when == "uniform" else f"{'first' if self.when == 'early' else 'last'} quarter, "
            raise CanaryError(
                f"{len(wanted)} canary sightings must fit in the {where}{len(window)} usable rows of the run. "
                "Use fewer canaries or repetitions, or train longer."
            )
        rng = random.Random(f"memguard/placement/{self.seed}/total")
        cells: dict[int, dict[int, int]] = {}
        for row, canary in zip(rng.sample(window, len(wanted)), wanted, strict=True):
            epoch = bisect.bisect_right(ends, row)
            low, high = zones[epoch]
            cells.setdefault(epoch, {})[low + row - (ends[epoch] - (high - low))] = canary
        return cells


def _expand(repetitions: Sequence[int]) -> list[int]:
    return [canary for canary, number in enumerate(repetitions) for _ in range(number)]
