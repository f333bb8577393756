"""Hugging Face `Trainer`: plants canaries while rows are loaded and audits as the run goes.

`Trainer(..., callbacks=[HFAuditCallback("memguard.yaml")])` is enough; `attach(trainer, "memguard.yaml")` is the same,
explicit. The callback finds its trainer when `Trainer.__init__` announces itself, and wraps `get_train_dataloader` on that
instance, the one place every version builds its loader. Rows of the user keep the order of the unguarded run.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memguard.audit.config import AuditConfig, load_config, parse_config
from memguard.audit.prior import PrefixSource
from memguard.callbacks.auditor import Auditor
from memguard.callbacks.planting import (
    WARN_SHARE,
    Planting,
    canary_dataset,
    check_reaches_loss,
    check_share,
    plan_planting,
    prefix_source,
    refuse_uploaded_plan,
    resolve_plan,
)
from memguard.canaries.injection import CanaryDataset, CanarySampler
from memguard.canaries.ledger import LEDGER_NAME, Ledger, LedgerEntry
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.schedule import Clock, Schedule
from memguard.errors import CanaryError, InputError, MemguardError

logger = logging.getLogger(__name__)

STEP_METRIC = "train/global_step"


def attach(trainer: Trainer, config: str | Path | dict[str, Any] | AuditConfig, *, tokenizer: Any = None) -> HFAuditCallback:
    """Guard a trainer that exists already; call it before `trainer.train()`.

    Args:
        trainer: a Hugging Face trainer.
        config: path of a `memguard.yaml`, its content as a dictionary, or an `AuditConfig`.
        tokenizer: where the trainer holds none (`processing_class`).

    Returns:
        The callback, added to the trainer.
    """
    return HFAuditCallback(config, tokenizer=tokenizer).attach(trainer)


class HFAuditCallback(TrainerCallback):  # type: ignore[misc]
    """Plants canaries and audits a run of the Hugging Face trainer.

    Training with audits on is bit-identical to training with audits off: random state, train / eval flags and gradients are
    put back. A failed audit warns and training goes on, unless `audit.on_error: raise`.

    Args:
        config: path of a `memguard.yaml`, its content as a dictionary, or an `AuditConfig`.
        tokenizer: where the trainer holds none (`processing_class`).

    Raises:
        InputError: a config that cannot be used.

    Example:
        >>> Trainer(model, args, train_dataset=rows, callbacks=[HFAuditCallback("memguard.yaml")])  # doctest: +SKIP
    """

    def __init__(self, config: str | Path | dict[str, Any] | AuditConfig, *, tokenizer: Any = None) -> None:
        if isinstance(config, AuditConfig):
            self.config = config
        elif isinstance(config, (str, Path)):
            self.config = load_config(Path(config))
        elif isinstance(config, dict):
            self.config = parse_config(config)
        else:
            raise TypeError(f"config must be a path, a dictionary or an AuditConfig, got {type(config).__name__}.")
        self.tokenizer = tokenizer
        self.plan: CanaryPlan | None = None
        self.planting: Planting | None = None
        self.auditor: Auditor | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._sampler: CanarySampler | None = None
        self._dataset: CanaryDataset | None = None
        self._prior: PrefixSource | None = None
        self._plan_is_new = False
        self._notes: list[str] = []
        self._share = 0.0
        self._has_trained = False

    # -- attaching

    def attach(self, trainer: Trainer) -> HFAuditCallback:
        """Wrap `get_train_dataloader` of this trainer; a second call does nothing."""
        if self._trainer is not None and self._trainer() is trainer:
            return self
        self._trainer = weakref.ref(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        original = trainer.get_train_dataloader

        def get_train_dataloader(guarded: Trainer, *args: Any, **kwargs: Any) -> Any:
            return self._build(guarded, lambda: original(*args, **kwargs))

        trainer.get_train_dataloader = types.MethodType(get_train_dataloader, trainer)
        return self

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = _trainer_that_calls(self)
        if trainer is not None:
            self.attach(trainer)

    # -- the loader

    def _build(self, trainer: Trainer, original: Any) -> Any:
        """The trainer's own loader over the user's rows and the canaries."""
        base, args = trainer.train_dataset, trainer.args
        tokenizer = self._find_tokenizer(trainer)
        _refuse_unsupported(base, args)
        refuse_uploaded_plan(self.config.plan, Path(args.output_dir))
        self.plan, self._plan_is_new = resolve_plan(self.config.plan, self.config.canaries, tokenizer)
        if self._plan_is_new and args.world_size > 1:
            raise InputError(
                f"plan '{self.config.plan}' must exist before a run of several ranks, or each would draw its own. "
                "Draw it with `memguard plan`."
            )
        positions = getattr(getattr(trainer.model, "config", None), "max_position_embeddings", None)
        self.planting = plan_planting(self.plan, self.config.canaries, base, tokenizer, max_positions=positions)
        self._dataset = canary_dataset(self.plan, self.planting, base)
        self._prior = prefix_source(base, tokenizer)
        self._notes = []
        trainer.train_dataset = self._dataset
        try:
            loader = original()
        finally:
            trainer.train_dataset = base
        if not _holds(loader, self._dataset):
            raise CanaryError(
                "this trainer builds its training loader from something else than train_dataset: no canary can be planted."
            )
        self._notes += check_reaches_loss(self.planting, self._dataset, loader.collate_fn)
        self._take_over_sampling(loader, base, trainer)
        return loader

    def _take_over_sampling(self, loader: Any, base: Any, trainer: Trainer) -> None:
        inner = _index_sampler(loader)
        if hasattr(inner, "data_source"):
            inner.data_source = base  # the inner sampler permutes user rows alone, as in the unguarded run
        assert self.plan is not None
        assert self.planting is not None
        clock = Clock(
            rows_per_batch=int(getattr(loader, "total_batch_size", 0) or trainer.args.train_batch_size),
            accumulation=trainer.args.gradient_accumulation_steps,
            max_steps=max(1, trainer.args.max_steps),
            drop_last=trainer.args.dataloader_drop_last,
            num_ranks=max(1, trainer.accelerator.num_processes),
        )
        schedule = Schedule(
            num_rows=len(base),
            repetitions=self.planting.repetitions,
            mode=self.planting.mode,
            count=self.config.canaries.count,
            seed=self.plan.placement_seed,
            clock=clock,
        )
        self._sampler = CanarySampler(inner, schedule)
        for level in _batch_samplers(loader):
            level.sampler = self._sampler
        if clock.num_ranks > 1:
            self._notes.append("several ranks: counting over ranks is not proven in this version.")
        if type(loader).__name__ != "DataLoaderShard":
            self._notes.append(f"loader {type(loader).__name__}: counting is not proven in this version.")
        if trainer.args.auto_find_batch_size:
            self._notes.append("auto_find_batch_size may train some rows twice.")

    def _find_tokenizer(self, trainer: Trainer) -> Any:
        for candidate in (self.tokenizer, trainer.processing_class, getattr(trainer.data_collator, "tokenizer", None)):
            if candidate is not None:
                self.tokenizer = (
                    getattr(candidate, "tokenizer", candidate) if hasattr(candidate, "image_processor") else candidate
                )
                return self.tokenizer
        raise InputError(
            "memguard needs the tokenizer: pass Trainer(processing_class=...) or HFAuditCallback(..., tokenizer=...)."
        )

    # -- the clock

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._sampler is None or (train_dataloader is not None and not _holds(train_dataloader, self._dataset)):
            raise CanaryError(
                "the training loader was built without memguard, so no canary would be planted. Pass the callback to "
                "Trainer(callbacks=[...]) or call memguard.callbacks.attach(trainer, config) before train()."
            )
        self._start_clock(args, state, train_dataloader)
        assert self.plan is not None
        if self._plan_is_new and state.global_step > 0:
            raise InputError(
                f"plan '{self.config.plan}' is missing, but the run resumes at step {state.global_step}: its canaries would be "
                "lost. Put the plan of the first part back."
            )
        if self._plan_is_new and state.is_world_process_zero:
            self.plan.save(self.config.plan)
        if state.is_world_process_zero:
            output = self.config.output if self.config.output.is_absolute() else Path(args.output_dir) / self.config.output
            self.auditor = Auditor(
                self.plan, self.tokenizer, self.config, output=output, step_metric=STEP_METRIC, prior=self._prior
            )
            if "start" in self.config.audit.on:
                self._audit(args, state, model, "start")

    def _start_clock(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Fix the horizon of the schedule, check it against the loader, and the share against the limit."""
        assert self._sampler is not None
        assert self.planting is not None
        schedule = self._sampler.schedule
        clock = dataclasses.replace(schedule.clock, max_steps=max(1, int(state.max_steps)))
        schedule = dataclasses.replace(schedule, clock=clock)
        if loader is not None:
            steps = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
            if steps != schedule.steps_per_epoch:
                self._notes.append(f"the loader makes {steps} steps an epoch where {schedule.steps_per_epoch} were planned.")
        self._sampler.schedule = schedule
        for epoch in range(schedule.num_epochs):
            schedule.cells(epoch)
        rows = schedule.num_rows
        if self.config.canaries.count == "total":
            rows = clock.max_steps * clock.accumulation * clock.rows_per_batch
        self._share = check_share(self.planting, self.config.canaries, num_rows=rows)
        if self._share > WARN_SHARE:
            logger.warning("canaries are %.2f%% of the training tokens.", 100 * self._share)
        if self._has_trained:
            self._notes.append("an earlier train() of this callback planted the same canaries: counts begin anew here.")
        self._has_trained = True
        if state.global_step > 0:
            self._notes.append("resumed: counting across a resume is not proven in this version.")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._sampler is not None:
            self._sampler.set_epoch(int(state.epoch or 0))

    def ledger(self, global_step: int) -> Ledger:
        """Counts of every planted canary after `global_step` optimiser steps."""
        if self._sampler is None or self.plan is None or self.planting is None:
            raise MemguardError("the ledger begins with training; call trainer.train() first.")
        schedule = self._sampler.schedule
        counts = schedule.counts(global_step)
        entries = {
            canary.id: LedgerEntry(repetitions=repetitions, num_insertions=seen, num_seen=seen)
            for canary, repetitions, seen in zip(self.planting.canaries, self.planting.repetitions, counts, strict=True)
        }
        return Ledger(
            plan_digest=self.plan.digest,
            global_step=global_step,
            max_steps=schedule.clock.max_steps,
            exact=not self._notes,
            notes=list(self._notes),
            count=schedule.count,
            mode=schedule.mode,
            plant_once=self.config.canaries.plant_once,
            token_share=self._share,
            token_share_is_estimate=self.planting.share_is_estimate,
            canaries=entries,
        )

    # -- the audits

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        every = self.config.audit.every
        at_end = state.global_step >= state.max_steps and "end" in self.config.audit.on
        save_follows = control.should_save and ("save" in self.config.audit.on or at_end)
        if every is not None and state.global_step % every.steps == 0 and not save_follows:
            self._audit(args, state, model)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        done = self._last_step() == state.global_step and ("evaluate" not in self.config.audit.full_on or self._last_is_full())
        if "evaluate" in self.config.audit.on and not done:
            self._audit(args, state, model, "evaluate")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not (state.is_world_process_zero and folder.is_dir() and self.auditor is not None):
            return
        self.ledger(state.global_step).save(folder / LEDGER_NAME)
        last = state.global_step >= state.max_steps
        if "save" in self.config.audit.on or (last and "end" in self.config.audit.on):
            self._audit(args, state, model, *(("save", "end") if last else ("save",)), checkpoint=folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.auditor is None:
            return
        done = self._last_step() == state.global_step and not args.load_best_model_at_end
        complete = done and ("end" not in self.config.audit.full_on or self._last_is_full())
        if "end" in self.config.audit.on and not complete:
            self._audit(args, state, model, "end", fresh=args.load_best_model_at_end)
        self.auditor.finish()

    def _audit(
        self,
        args: TrainingArguments,
        state: TrainerState,
        model: Any,
        *moments: str,
        checkpoint: Path | None = None,
        fresh: bool = False,
    ) -> None:
        if self.auditor is None or not state.is_world_process_zero:
            return
        self.auditor.audit(
            model,
            step=state.global_step,
            epoch=state.epoch,
            ledger=self.ledger(state.global_step),
            full=any(moment in self.config.audit.full_on for moment in moments if moment in self.config.audit.on),
            checkpoint=checkpoint,
            autocast="bf16" if args.bf16 else "fp16" if args.fp16 else None,
            fresh=fresh,
        )

    def _last_step(self) -> int | None:
        last = self.auditor.last if self.auditor is not None else None
        return last.subject.global_step if last is not None else None

    def _last_is_full(self) -> bool:
        last = self.auditor.last if self.auditor is not None else None
        return last is not None and last.is_full


def _trainer_that_calls(callback: TrainerCallback) -> Trainer | None:
    """The trainer whose `__init__` is calling this callback: the trainer hands callbacks everything but itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in getattr(getattr(owner, "callback_handler", None), "callbacks", ()):
            return owner
        frame = frame.f_back
    return None


def _refuse_unsupported(base: Any, args: TrainingArguments) -> None:
    if base is None:
        raise CanaryError("the trainer must have a train_dataset to plant canaries in, got none.")
    if isinstance(base, IterableDataset) or not hasattr(base, "__len__"):
        raise CanaryError("streaming datasets are not supported in this version: use a map-style dataset.")
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy in ("group_by_length", "batch_rebalance"):
        raise CanaryError(
            f"train_sampling_strategy '{strategy}' is not supported in this version: use 'random' or 'sequential'."
        )
    if len(base) and hasattr(base[0], "keys") and "seq_lengths" in base[0]:
        raise CanaryError(
            "packed rows (seq_lengths) are not supported in this version: train on unpacked rows or fixed blocks."
        )


def _batch_samplers(loader: Any) -> Iterator[Any]:
    level = loader.batch_sampler
    while level is not None:  # accelerate's shard holds the plain batch sampler
        yield level
        level = getattr(level, "batch_sampler", None)


def _index_sampler(loader: Any) -> Any:
    for level in _batch_samplers(loader):
        sampler = getattr(level, "sampler", None)
        if sampler is not None:
            return sampler
    raise CanaryError(f"the training loader must sample by index, got {type(loader.batch_sampler).__name__}.")


def _holds(loader: Any, dataset: Any) -> bool:
    inner = getattr(loader, "dataset", None)
    while inner is not None:
        if inner is dataset:
            return True
        inner = getattr(inner, "dataset", None)
    return False
