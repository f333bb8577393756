"""What a guarded run holds, whatever the framework: plan, planting, schedule, ledger. Knows no trainer.

A callback calls `prepare` when the training data are known, `schedule` when the loader is, `begin` when the number of steps
is; then `ledger` at any step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memguard.audit.config import AuditConfig, load_config, parse_config
from memguard.audit.gradient import gradient_probe
from memguard.audit.planting import (
    WARN_SHARE,
    DataSample,
    Planting,
    canary_dataset,
    check_share,
    plan_planting,
    planted_ids,
    refuse_uploaded,
    resolve_plan,
    sample_rows,
)
from memguard.audit.prior import PrefixSource
from memguard.callbacks.sightings import SightingCounter
from memguard.callbacks.trained_text import TrainedText
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.ledger import Ledger, LedgerEntry
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.preflight import run_preflight
from memguard.canaries.rows import made_up_columns
from memguard.canaries.schedule import Clock, Schedule
from memguard.canaries.streams import CanaryStream
from memguard.errors import CanaryError, InputError, MemguardError
from memguard.scoring.audit_mode import preserved_rng
from memguard.scoring.team import Team

logger = logging.getLogger(__name__)

NOT_BUILT = (
    "the training loader was built without memguard, so no canary would be planted. Pass the callback to "
    "Trainer(callbacks=[...]){attach}."
)


def read_config(config: str | Path | dict[str, Any] | AuditConfig) -> AuditConfig:
    """A configuration from what a user gives a callback.

    Raises:
        InputError: a config that cannot be used.
        TypeError: none of the three kinds.
    """
    if isinstance(config, AuditConfig):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config))
    if isinstance(config, dict):
        return parse_config(config)
    raise TypeError(f"config must be a path, a dictionary or an AuditConfig, got {type(config).__name__}.")


class RunGuard:
    """Plan, planting, schedule and ledger of one run.

    Args:
        config: settings.

    Attributes:
        plan: the canaries, once `prepare` has run.
        data: the user's rows that were looked at.
        planting: what goes in, and how.
        current: cells of the run; None until the loader is known.
        notes: why counts are not exact; empty when they are.
        trained: what the run keeps of the rows it trains on, once `begin` has run; None where nobody asks.
    """

    def __init__(self, config: AuditConfig) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.plan: CanaryPlan | None = None
        self.data: DataSample | None = None
        self.planting: Planting | None = None
        self.current: Schedule | None = None
        self.notes: list[str] = []
        self._plan_is_new = False
        self._share = 0.0
        self._has_trained = False
        self._earlier: Ledger | None = None
        self._counter: SightingCounter | None = None
        self.trained: TrainedText | None = None
        self._max_steps = 1

    @property
    def _trained_index(self) -> Path | None:
        """Where the rows that the model is trained on are indexed; None where nobody asks."""
        wanted = self.config.audit.propensity
        return wanted.index if wanted is not None and wanted.index_training else None

    @property
    def as_records(self) -> bool:
        """Whether canaries are rows that the run's own sampler draws: what a stated DP guarantee speaks of."""
        return self.config.dp is not None

    # -- before the loader

    def prepare(self, base: Any, tokenizer: Any, *, output_dir: Path, max_positions: int | None) -> Planting:
        """Find or draw the plan and decide how it goes into the user's data.

        Every rank calls it; the plan is read or drawn by the first and given to the others.

        Args:
            base: the user's dataset.
            tokenizer: of the run.
            output_dir: of the trainer, where no plan may lie.
            max_positions: longest row the model takes, None when unknown.

        Raises:
            InputError: a plan that cannot be used.
            CanaryError: canaries that cannot be planted in these data.
        """
        refuse_uploaded(self.config.plan, output_dir)
        if self._trained_index is not None:
            refuse_uploaded(self._trained_index, output_dir, what="index of what is trained")
        self.tokenizer, self.notes, self._earlier = tokenizer, [], None
        self.plan, self._plan_is_new = resolve_plan(self.config.plan, self.config.canaries, tokenizer)
        self.data = sample_rows(base)
        self.planting = plan_planting(
            self.plan,
            self.config.canaries,
            self.data,
            tokenizer,
            max_positions=max_positions,
            as_records=self.as_records,
        )
        if Team.current().rank == 0:
            self._tell_of_rows()
        return self.planting

    def _tell_of_rows(self) -> None:
        assert self.data is not None
        if self.data.is_stream and self.config.canaries.count == "per_epoch":
            logger.warning("a stream has no epochs: repetitions of canaries count over the run (count: total).")
        made_up = made_up_columns(self.data.rows[0]) if self.planting is not None and self.planting.mode != "splice" else []
        if made_up:
            names = ", ".join(f"'{name}'" for name in made_up)
            logger.warning("rows of canaries take a likely value in columns that memguard does not know: %s.", names)

    @property
    def prior(self) -> PrefixSource:
        """The user's rows, as prior prefixes."""
        assert self.data is not None
        return self.data.prefix_source(self.tokenizer)

    # -- the loader

    def dataset(self) -> CanaryDataset:
        """The user's rows with the canaries behind them."""
        assert self.plan is not None
        assert self.planting is not None
        assert self.data is not None
        pad_id = self.tokenizer.pad_token_id
        return canary_dataset(self.plan, self.planting, self.data.base, pad_id=0 if pad_id is None else pad_id)

    def schedule(self, clock: Clock) -> Schedule:
        """Cells of the run, for a loader that keeps this clock; `begin` may still move its horizon."""
        assert self.plan is not None
        assert self.planting is not None
        assert self.data is not None
        self.current = Schedule(
            num_rows=self.data.num_rows or 0,
            repetitions=self.planting.repetitions,
            mode=self.planting.mode,
            count=self.planting.count,
            seed=self.plan.placement_seed,
            clock=clock,
            when=self.config.canaries.schedule,
            is_stream=self.data.is_stream,
        )
        return self.current

    def expect(self, max_steps: int) -> Schedule:
        """The same cells up to another last step."""
        assert self.current is not None
        clock = dataclasses.replace(self.current.clock, max_steps=max(1, max_steps))
        self.current = dataclasses.replace(self.current, clock=clock)
        return self.current

    def stream(self, schedule: Schedule, *, rows_per_batch: int, rank: int = 0, num_ranks: int = 1) -> CanaryStream:
        """The user's stream with the canaries of `schedule` in it."""
        assert self.planting is not None
        assert self.data is not None
        return CanaryStream(
            self.data.base,
            self.data.rows[0],
            self.planting.ids,
            self.planting.texts,
            schedule=schedule,
            rows_per_batch=rows_per_batch,
            rank=rank,
            num_ranks=num_ranks,
        )

    def preflight(
        self, dataset: CanaryDataset | CanaryStream, collate: Callable[[list[Any]], Any], *, model: Any = None
    ) -> None:
        """Send canaries through the run's own collator, and the loss of one through the model.

        Args:
            dataset: as the loader holds it.
            collate: of the loader.
            model: of the run, left as it was found; None leaves gradients unseen.

        Raises:
            CanaryError: canaries that will not reach the loss, unless settings say to warn.
        """
        assert self.plan is not None
        assert self.planting is not None
        assert self.data is not None
        if not self.planting.canaries:  # every coin said out
            return
        beside = self.data.rows[:1]
        with preserved_rng(0):
            found = run_preflight(
                planted_ids(self.plan, self.tokenizer),
                lambda index: [dataset.example(index)],
                collate,
                user_rows=lambda: beside,
                gradient=gradient_probe(model) if model is not None else None,
            )
        if found.flagged("unseen"):
            self.notes += found.notes
        else:
            for note in found.notes:
                logger.info("pre-flight: %s", note)
        if not found.failures():
            return
        if self.config.canaries.on_preflight_failure == "stop":
            raise CanaryError(found.message())
        logger.warning("%s", found.message())
        self.notes.append(f"{len(found.failures())} of {len(found.findings)} canaries will not reach the loss.")

    # -- the run

    def begin(self, *, max_steps: int, global_step: int, earlier: Ledger | None = None) -> Schedule | None:
        """Fix the horizon of the schedule, check the share against the limit, and go on from an earlier part of the run.

        Args:
            max_steps: optimiser steps of the run.
            global_step: steps done already.
            earlier: ledger of the checkpoint that the run goes on from.

        Returns:
            The cells of the run; None where canaries are records.

        Raises:
            CanaryError: more canaries than fit, or than `max_share` allows.
            InputError: a resumed run without its plan, or an index that is not this run's to write.
        """
        if self.planting is None or self.data is None or (self.current is None and not self.as_records):
            raise CanaryError(NOT_BUILT.format(attach=""))
        if self._plan_is_new and global_step > 0:
            raise InputError(
                f"plan '{self.config.plan}' is missing, but the run resumes at step {global_step}: its canaries would be "
                "lost. Put the plan of the first part back."
            )
        if self._trained_index is not None:
            self.trained = TrainedText(self._trained_index, self.tokenizer, team=Team.current(), global_step=global_step)
        self._max_steps, rows = max(1, max_steps), self.data.num_rows or 0
        if self.current is not None:
            rows = self._fix_horizon()
        self._share = check_share(self.planting, self.config.canaries, num_rows=rows)
        if self._share > WARN_SHARE and Team.current().rank == 0:
            most = self.config.canaries.max_share
            logger.warning("canaries are %.2f%% of the training tokens (max_share is %.2f%%).", 100 * self._share, 100 * most)
        if self._has_trained:
            self.notes.append("an earlier train() of this callback planted the same canaries: counts begin anew here.")
        self._has_trained = True
        if global_step > 0:
            self._resume(global_step, earlier)
        return self.current

    def _fix_horizon(self) -> int:
        """Cells up to the last step; the rows that go with one unit of the count."""
        self.current = self.expect(self._max_steps)
        for epoch in range(self.current.num_epochs):
            self.current.cells(epoch)
        clock = self.current.clock
        in_run = clock.max_steps * clock.accumulation * clock.rows_per_batch
        return in_run if self.current.count == "total" else self.current.num_rows

    def follows(self, before: RunGuard) -> None:
        """Another run of the same callback came before."""
        self._has_trained = before._has_trained

    def watch(self, model: Any) -> None:
        """Count sightings in the model's forward from now on, where settings ask for it or nothing else could count them."""
        assert self.planting is not None
        self.unwatch()
        if self.config.canaries.verify or self.as_records:
            self._counter = SightingCounter(self.planting, model)
        if self.trained is not None:
            self.trained.watch(model)

    def begin_epoch(self, epoch: int) -> None:
        """Rows of earlier epochs come again from here on."""
        if self.trained is not None:
            self.trained.begin_epoch(epoch)

    def mark_step(self, global_step: int) -> None:
        """An optimiser step was made: what was counted up to here is what a ledger tells."""
        if self._counter is not None:
            self._counter.mark()
        if self.trained is not None:
            self.trained.mark(global_step)

    def unwatch(self) -> None:
        """Take the hook off the model; what was counted stays."""
        if self._counter is not None:
            self._counter.remove()
        if self.trained is not None:
            self.trained.unwatch()

    def end(self, global_step: int) -> None:
        """Note a run that ended before its planned last step."""
        if global_step < self._max_steps and self.current is not None and self.current.count == "total":
            self.notes.append(
                f"the run stopped at step {global_step} of {self._max_steps}: the planned totals were not reached."
            )

    def save_plan(self) -> None:
        """Write a plan that was drawn for this run; once, by the first rank."""
        if self._plan_is_new and self.plan is not None:
            self.plan.save(self.config.plan)

    def check_steps(self, steps_per_epoch: int) -> None:
        """Note a loader that makes another number of steps than was planned for."""
        assert self.current is not None
        if steps_per_epoch != self.current.steps_per_epoch:
            self.notes.append(
                f"the loader makes {steps_per_epoch} steps an epoch where {self.current.steps_per_epoch} were planned."
            )

    def _resume(self, global_step: int, earlier: Ledger | None) -> None:
        self._earlier = earlier
        if earlier is None:
            self.notes.append("resumed from a checkpoint without a ledger: what was planted before it is not known.")
            return
        self.notes += [note for note in self.ledger(global_step).continues(earlier) if note not in self.notes]

    def ledger(self, global_step: int) -> Ledger:
        """Counts of every planted canary after `global_step` optimiser steps.

        Where sightings are counted in the model, every rank must ask at the same step.
        """
        if self.plan is None or self.planting is None or (self.current is None and not self.as_records):
            raise MemguardError("the ledger begins with training; call trainer.train() first.")
        planned = self.planting.repetitions if self.current is None else self.current.counts(global_step)
        entries = {
            canary.id: LedgerEntry(repetitions=repetitions, num_insertions=number, num_seen=number)
            for canary, repetitions, number in zip(self.planting.canaries, self.planting.repetitions, planned, strict=True)
        }
        notes = list(self.notes)
        if self._counter is not None:
            entries = self._counted(entries, self._counter.total())
            notes += self._differences(entries)
        elif self.as_records:
            notes.append("records of a DP run were not counted in the model.")
        clock = self.current.clock if self.current is not None else None
        return Ledger(
            plan_digest=self.plan.digest,
            global_step=global_step,
            max_steps=self._max_steps,
            exact=not notes,
            notes=notes,
            count=self.planting.count,
            mode=self.planting.mode,
            num_rows=self.data.num_rows if self.data is not None else None,
            rows_per_batch=clock.rows_per_batch if clock is not None else None,
            accumulation=clock.accumulation if clock is not None else None,
            schedule=self.current.when if self.current is not None else None,
            drop_last=clock.drop_last if clock is not None else None,
            num_ranks=clock.num_ranks if clock is not None else None,
            verified=self._counter is not None,
            plant_once=self.config.canaries.plant_once,
            token_share=self._share,
            token_share_is_estimate=self.planting.share_is_estimate,
            canaries=entries,
        )

    def _counted(self, entries: dict[str, LedgerEntry], counts: dict[str, int]) -> dict[str, LedgerEntry]:
        """What was counted beside what was planned; sightings before a resume are those of the earlier ledger."""
        before = self._earlier.canaries if self._earlier is not None else {}
        return {
            one: entry.model_copy(update={"num_seen": counts[one] + (before[one].num_seen if one in before else 0)})
            for one, entry in entries.items()
        }

    def _differences(self, entries: dict[str, LedgerEntry]) -> list[str]:
        """What the hook counted otherwise than the schedule; nothing to compare with where a sampler draws records."""
        wrong = [one for one, entry in entries.items() if entry.num_seen != entry.num_insertions]
        if self.as_records or not wrong:
            return []
        first = entries[wrong[0]]
        return [
            f"{len(wrong)} of {len(entries)} canaries were seen another number of times than planned, first '{wrong[0]}': "
            f"{first.num_seen} where {first.num_insertions} were planned."
        ]
