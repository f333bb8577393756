"""Hugging Face `Trainer`: plants canaries while rows are loaded and audits as the run goes.

`Trainer(..., callbacks=[HFAuditCallback("memguard.yaml")])` is enough; `attach(trainer, "memguard.yaml")` is the same,
explicit. The callback finds its trainer when `Trainer.__init__` announces itself, and wraps `get_train_dataloader` on that
instance, the one place every version builds its loader. Rows of the user keep the order of the unguarded run.
"""

from __future__ import annotations

import logging
import math
import sys
import types
import weakref
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memguard.audit.config import AuditConfig
from memguard.callbacks.auditor import Auditor, Event
from memguard.callbacks.clock import outside_audits
from memguard.callbacks.guard import NOT_BUILT, RunGuard, read_config
from memguard.callbacks.hf_loader import GuardedLoader, build_loader
from memguard.callbacks.together import on_first
from memguard.canaries.ledger import LEDGER_NAME, Ledger, load_ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import CanaryError, EvidenceError, InputError

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
        self.config = read_config(config)
        self.tokenizer = tokenizer
        self.guard = RunGuard(self.config)
        self.auditor: Auditor | None = None
        self.seconds_outside = 0.0
        self._is_training = False
        self._trainer: weakref.ref[Trainer] | None = None
        self._built: GuardedLoader | None = None
        self._candidate: tuple[RunGuard, GuardedLoader] | None = None

    @property
    def plan(self) -> CanaryPlan | None:
        """The canaries, once the training loader was built."""
        return self.guard.plan

    # -- attaching

    def attach(self, trainer: Trainer) -> HFAuditCallback:
        """Wrap `get_train_dataloader` of this trainer; a second call does nothing."""
        if self._trainer is not None and self._trainer() is trainer:
            return self
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, HFAuditCallback) and one is not self]
        if others:
            raise CanaryError(
                "a trainer takes one HFAuditCallback, got two: put the formats of both into one config, or canaries of one "
                "would move those of the other."
            )
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

    @outside_audits
    def _build(self, trainer: Trainer, original: Any) -> Any:
        """The trainer's own loader over the user's rows and the canaries.

        Once a run began it stays one to look at, until another run begins with it: others may ask the trainer for a loader.
        """
        guard = RunGuard(self.config)
        self._candidate = (guard, build_loader(trainer, original, guard, self._find_tokenizer(trainer)))
        built = self._candidate[1]
        if self.auditor is None:
            self._adopt()
        return built.loader

    def _adopt(self) -> None:
        """The loader that was built last is the one of the run that begins."""
        if self._candidate is not None:
            before, (self.guard, self._built), self._candidate = self.guard, self._candidate, None
            before.unwatch()
            self.guard.follows(before)
            self.auditor, self.seconds_outside = None, 0.0

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

    @outside_audits
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if self._candidate is not None and (train_dataloader is None or self._candidate[1].is_in(train_dataloader)):
            self._adopt()
        if self._built is None or (train_dataloader is not None and not self._built.is_in(train_dataloader)):
            raise CanaryError(NOT_BUILT.format(attach=" or call memguard.callbacks.attach(trainer, config) before train()"))
        self._start_clock(args, state, train_dataloader)
        self.auditor = self._open_auditor(args, state, train_dataloader)
        on_first(self.auditor.team, "plan", self.guard.save_plan)
        self.guard.watch(model)
        self._is_training = True
        self._at("start", args, state, control, model)

    def _start_clock(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Fix the horizon of the schedule, and check it against the loader."""
        assert self._built is not None
        earlier = _earlier_ledger(args, state) if state.global_step > 0 else None
        schedule = self.guard.begin(max_steps=int(state.max_steps), global_step=state.global_step, earlier=earlier)
        if loader is not None and self._built.sampler is not None:
            self.guard.check_steps(max(1, math.ceil(len(loader) / args.gradient_accumulation_steps)))
        if state.global_step > 0 and args.ignore_data_skip:
            self.guard.notes.append("ignore_data_skip: the resumed epoch began anew, so that some rows were trained twice.")
        if schedule is not None:
            holder = self._built.dataset if self._built.sampler is None else self._built.sampler
            holder.schedule = schedule

    @outside_audits
    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._built is not None and self._built.sampler is not None:
            self._built.sampler.begin_epoch(int(state.epoch or 0))
        self.guard.begin_epoch(int(state.epoch or 0))

    def ledger(self, global_step: int) -> Ledger:
        """Counts of every planted canary after `global_step` optimiser steps; with `verify` all ranks must ask together."""
        return self.guard.ledger(global_step)

    # -- the audits

    def _open_auditor(self, args: TrainingArguments, state: TrainerState, loader: Any) -> Auditor:
        """The auditor of this run, or a refusal of what it could not do."""
        _refuse_early_pushes(self.config, args)
        _refuse_metric_without_audits(self.config, args)
        assert self.plan is not None
        output = self.config.output if self.config.output.is_absolute() else Path(args.output_dir) / self.config.output
        is_stream = self.guard.data is None or self.guard.data.is_stream
        return Auditor(
            self.plan,
            self.tokenizer,
            self.config,
            output=output,
            step_metric=STEP_METRIC,
            prior=self.guard.prior,
            steps_per_epoch=None if is_stream else max(1, math.ceil(len(loader) / args.gradient_accumulation_steps)),
            global_step=state.global_step,
            can_veto_push=hasattr(TrainerCallback, "on_push_begin"),
            trained=self.guard.trained,
        )

    def _at(
        self,
        moment: Event,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any,
        **options: Any,
    ) -> TrainerControl:
        """Tell the auditor of a moment, and obey its stop."""
        if self.auditor is not None:
            told = {
                "step": state.global_step,
                "epoch": state.epoch,
                "ledger": lambda: self.ledger(state.global_step),
                "last": state.global_step >= state.max_steps or control.should_training_stop,
            }
            self.auditor.at(moment, model, autocast=self._autocast(args), **(told | options))
            control.should_training_stop = control.should_training_stop or self.auditor.should_stop
        return control

    def _autocast(self, args: TrainingArguments) -> str | None:
        """The autocast dtype in force, which a launcher may have set past the arguments."""
        trainer = self._trainer() if self._trainer is not None else None
        named = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        precision = named if trainer is None else str(trainer.accelerator.mixed_precision)
        return None if precision == "no" else precision

    @outside_audits
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> TrainerControl:
        self.guard.mark_step(state.global_step)
        follow: list[Event] = ["evaluate"] if control.should_evaluate else []
        follow += ["save"] if control.should_save else []
        return self._at("step", args, state, control, model, followed_by=follow)

    @outside_audits
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> TrainerControl:
        if self._is_training:  # evaluate() by hand audits nothing
            self._at("evaluate", args, state, control, model)
            if metrics is not None and "evaluate" in self.config.audit.on and self.auditor is not None:
                metrics.update(self.auditor.figures())
                wanted = _metric_of_ours(args)
                if wanted is not None and wanted not in metrics:
                    metrics[wanted] = math.nan  # never the best, and no KeyError of the trainer's
                    logger.warning(
                        "metric_for_best_model '%s' is no figure of the audit at step %d.", wanted, state.global_step
                    )
        return control

    @outside_audits
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> TrainerControl:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.auditor is None:
            return control
        if not self.auditor.team.agreed("checkpoint", folder.is_dir()):  # ranks wait here for the first to have saved
            return self._at("save", args, state, control, model)
        ledger = self.ledger(state.global_step)
        self.auditor.save_ledger(ledger, folder)
        return self._at("save", args, state, control, model, ledger=ledger, checkpoint=folder)

    @outside_audits
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> TrainerControl:
        self._is_training = False
        self.guard.end(state.global_step)
        self.guard.unwatch()
        self._at("end", args, state, control, model, **self._put_back(args, state))
        if self.auditor is not None:
            self.auditor.finish(seconds_outside=self.seconds_outside)
        return control

    def _put_back(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """What differs at the end where the weights of the best checkpoint were put back: step, counts, and the folder."""
        best, step = state.best_model_checkpoint, state.best_global_step
        if not (args.load_best_model_at_end and best and step and self.auditor is not None):
            return {}
        folder = Path(best)
        path = folder / LEDGER_NAME
        saved = on_first(self.auditor.team, "best ledger", lambda: load_ledger(path) if path.is_file() else None)
        epoch = state.epoch * step / state.global_step if state.epoch is not None else None
        told = {"step": step, "epoch": epoch, "ledger": saved or (lambda: self.ledger(step)), "fresh": True}
        return told | ({"checkpoint": folder} if self.auditor.team.agreed("best", folder.is_dir()) else {})

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.config.gate is not None and self.config.gate.push == "gated":
            if self.auditor is None or self.auditor.gate is None:
                raise EvidenceError("the push is vetoed (gate.push: gated): these weights were not audited in this process.")
            self.auditor.gate.check_push(model)


def _metric_of_ours(args: TrainingArguments) -> str | None:
    """The figure of ours that chooses the best checkpoint, as the trainer looks it up; None where another does."""
    name = str(args.metric_for_best_model or "")
    name = name if name.startswith("eval_") else f"eval_{name}"
    return name if name.startswith("eval_memguard_") else None


def _refuse_metric_without_audits(config: AuditConfig, args: TrainingArguments) -> None:
    metric = _metric_of_ours(args)
    if metric is None:
        return
    if "evaluate" not in config.audit.on:
        raise InputError(f"metric_for_best_model '{metric}' needs audits at evaluation: add evaluate to audit.on.")
    if args.greater_is_better and "exposure" in metric:
        logger.warning("greater_is_better: the checkpoint that memorised the most would be kept as the best.")


def _refuse_early_pushes(config: AuditConfig, args: TrainingArguments) -> None:
    gated = config.gate is not None and config.gate.push == "gated"
    if gated and args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        raise InputError(
            "hub_strategy must be end under gate.push: gated, since the trainer pushes a checkpoint before it can be audited. "
            "Call trainer.push_to_hub() after training."
        )


def _trainer_that_calls(callback: TrainerCallback) -> Trainer | None:
    """The trainer whose `__init__` is calling this callback: the trainer hands callbacks everything but itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in getattr(getattr(owner, "callback_handler", None), "callbacks", ()):
            return owner
        frame = frame.f_back
    return None


def _earlier_ledger(args: TrainingArguments, state: TrainerState) -> Ledger | None:
    """The ledger of the checkpoint that the run goes on from, None where it has none."""
    folders = [*_resumed_from(), Path(args.output_dir) / f"checkpoint-{state.global_step}"]
    found = [folder / LEDGER_NAME for folder in folders if (folder / LEDGER_NAME).is_file()]
    return load_ledger(found[0]) if found else None


def _resumed_from() -> list[Path]:
    """The checkpoint that `train(resume_from_checkpoint=...)` was given: callbacks are not told."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        given = frame.f_locals.get("resume_from_checkpoint")
        if isinstance(given, str | Path) and isinstance(frame.f_locals.get("self"), Trainer):
            return [Path(given)]
        frame = frame.f_back
    return []
