"""Lightning `Trainer`, of `lightning.pytorch` and of `pytorch_lightning`: plants canaries while rows are loaded, and audits.

`Trainer(callbacks=[LightningAuditCallback("memguard.yaml")])` is enough. The callback wraps the one place where Lightning asks
for its training data, whoever gives them. A `.ckpt` file is a pickle that memguard never loads: the ledger is written beside
it, and what `memguard audit` reads is a folder that the model inside was saved to with `save_pretrained`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memguard.audit.config import AuditConfig
from memguard.callbacks.auditor import Auditor, Event
from memguard.callbacks.clock import outside_audits
from memguard.callbacks.guard import NOT_BUILT, RunGuard, read_config
from memguard.callbacks.lightning_loader import GuardedLoader, guard_loaders
from memguard.callbacks.together import on_first, reason_of
from memguard.canaries.ledger import LEDGER_NAME, Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import CanaryError, InputError
from memguard.scoring.team import Team

logger = logging.getLogger(__name__)

STEP_METRIC = "trainer/global_step"
STATE = "memguard"  # in a checkpoint
NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
AUTOCAST = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def _callback_classes() -> tuple[type, ...]:
    """`Callback` of each namespace in use; the two are distinct, and a trainer may look for its own."""
    names = [name for name in NAMESPACES if sys.modules.get(name) is not None]
    for name in [] if names else NAMESPACES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
            names = [name]
            break
    if not names:
        raise ModuleNotFoundError("No module named 'pytorch_lightning'", name="pytorch_lightning")
    return tuple(sys.modules[name].Callback for name in names)


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = type("_Callback", _callback_classes(), {})


class LightningAuditCallback(_Callback):
    """Plants canaries and audits a run of the Lightning trainer.

    Training with audits on is bit-identical to training with audits off: random state, each module's train / eval flag and
    gradients are put back. A failed audit warns and training goes on, unless `audit.on_error: raise`.

    Args:
        config: path of a `memguard.yaml`, its content as a dictionary, or an `AuditConfig`.
        tokenizer: where neither the module nor the datamodule holds one as `tokenizer`.
        model: gives the language model inside the module, where it is not the one transformers model in it.
        target: key or index of the loader to plant in, where the module trains on several at once.

    Raises:
        InputError: a config that cannot be used.

    Example:
        >>> Trainer(callbacks=[LightningAuditCallback("memguard.yaml", tokenizer=tokenizer)])  # doctest: +SKIP
    """

    def __init__(
        self,
        config: str | Path | dict[str, Any] | AuditConfig,
        *,
        tokenizer: Any = None,
        model: Callable[[Any], Any] | None = None,
        target: str | int | None = None,
    ) -> None:
        self.config = read_config(config)
        self.tokenizer, self.target = tokenizer, target
        self.guard = RunGuard(self.config)
        self.auditor: Auditor | None = None
        self.seconds_outside = 0.0
        self._pick = model
        self._model: Any = None
        self._built: GuardedLoader | None = None
        self._is_running = False
        self._last_step, self._marked_step = 0, 0
        self._last_ledger: Ledger | None = None
        self._resumed: Ledger | None = None
        self._undo = contextlib.ExitStack()

    @property
    def plan(self) -> CanaryPlan | None:
        """The canaries, once the training loader was built."""
        return self.guard.plan

    # -- attaching

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Wrap the source of the training data; Lightning asks it when progress is restored, and at each reload."""
        if str(getattr(stage, "value", stage)) != "fit":
            return
        self._release()
        self._built, self._resumed, self._last_ledger, self.auditor, self.seconds_outside = None, None, None, None, 0.0
        if any(isinstance(one, LightningAuditCallback) and one is not self for one in trainer.callbacks):
            raise CanaryError(
                "a trainer takes one LightningAuditCallback, got two: put the formats of both into one config, or canaries of "
                "one would move those of the other."
            )
        if trainer.fast_dev_run:
            logger.warning("fast_dev_run tries a few batches: memguard plants nothing and audits nothing.")
            return
        source = getattr(trainer.fit_loop, "_data_source", None)
        if source is None:
            raise CanaryError("this version of Lightning is not known: it has no one place where it asks for its loader.")
        original = source.dataloader
        source.dataloader = lambda: self._guarded(trainer, original())
        self._undo.callback(source.__dict__.pop, "dataloader", None)
        self._follow_saves(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Leave the trainer's source of data as it was."""
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same when the run breaks; what saves a checkpoint then finds the counts of this step."""
        if self._is_running:  # other ranks may be elsewhere: what is counted in the models cannot be added up any more
            self._mark(trainer)
            is_planned = Team.current().is_alone or not self.config.canaries.verify
            self._last_ledger = self.ledger(trainer.global_step) if is_planned else None
        self._release()

    def _release(self) -> None:
        self._is_running, self._model = False, None
        self.guard.unwatch()
        self._undo.close()

    def _follow_saves(self, trainer: Any) -> None:
        """Hear of every checkpoint once it is written: no event of Lightning names the file."""
        original = trainer.save_checkpoint
        if getattr(original, "memguard", None) is self:
            return

        @functools.wraps(original)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            original(filepath, *args, **kwargs)
            if self in trainer.callbacks:  # a save by hand after training is followed, a run without the callback is not
                self._after_save(trainer, filepath)

        save_checkpoint.memguard = self  # type: ignore[attr-defined]
        trainer.save_checkpoint = save_checkpoint

    # -- the loader

    @outside_audits
    def _guarded(self, trainer: Any, loaders: Any) -> Any:
        if self not in trainer.callbacks:  # the tuner tries batches without callbacks and takes them back
            return loaders
        model = find_model(trainer.lightning_module, self._pick)
        tokenizer = self._find_tokenizer(trainer)
        running = self._built if self._is_running else None
        guarded, self._built = guard_loaders(
            trainer, loaders, self.guard, tokenizer, model, target=self.target, output=self._output(trainer), running=running
        )
        return guarded

    def _find_tokenizer(self, trainer: Any) -> Any:
        for holder in (self, trainer.lightning_module, trainer.datamodule):
            if getattr(holder, "tokenizer", None) is not None:
                self.tokenizer = holder.tokenizer
                return self.tokenizer
        raise InputError(
            "memguard needs the tokenizer: pass LightningAuditCallback(..., tokenizer=...), or hold it as `tokenizer` in the "
            "module or datamodule."
        )

    def _output(self, trainer: Any) -> Path:
        return self.config.output if self.config.output.is_absolute() else Path(trainer.default_root_dir) / self.config.output

    # -- the clock

    @outside_audits
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fix where canaries go, go on from an earlier part of the run, and audit for the first time."""
        if trainer.fast_dev_run:
            return
        if self._built is None or not self._built.is_in(trainer.fit_loop._combined_loader):
            raise CanaryError(NOT_BUILT.format(attach=""))
        self._begin(trainer)
        if self._built.is_stale():
            self._built.begin_pass()
            with torch.random.fork_rng(devices=[]):  # a loader draws a seed each time it is iterated
                iter(trainer.fit_loop._data_fetcher)
        self._model = find_model(pl_module, self._pick)
        on_first(Team.current(), "plan", self.guard.save_plan)
        self.guard.watch(self._model)
        self.guard.begin_epoch(trainer.current_epoch)  # a run that goes on inside an epoch has no start of one
        assert self.plan is not None
        self.auditor = Auditor(
            self.plan,
            self.tokenizer,
            self.config,
            output=self._output(trainer),
            step_metric=STEP_METRIC,
            prior=self.guard.prior,
            steps_per_epoch=self._built.steps_per_epoch,
            global_step=trainer.global_step,
            trained=self.guard.trained,
        )
        self._is_running, self._last_step, self._marked_step = True, trainer.global_step, trainer.global_step
        self._at("start", trainer)

    def _begin(self, trainer: Any) -> None:
        assert self._built is not None
        assert self.plan is not None
        if self._resumed is not None and self._resumed.plan_digest != self.plan.digest:
            raise InputError(
                f"the checkpoint was trained with another plan than '{self.config.plan}': its canaries would be lost. Put the "
                "plan of that run back."
            )
        schedule = self.guard.begin(max_steps=self._built.horizon, global_step=trainer.global_step, earlier=self._resumed)
        assert schedule is not None
        self._built.follow(schedule)
        if self._built.sampler is not None and math.isfinite(trainer.num_training_batches):
            self.guard.check_steps(max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)))
        if trainer.strategy.handles_gradient_accumulation and trainer.num_training_batches % trainer.accumulate_grad_batches:
            self.guard.notes.append("this strategy accumulates gradients itself: the last step of an epoch is not proven.")

    @outside_audits
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Before Lightning iterates a stream again."""
        if self._is_running and self._built is not None:
            self._built.begin_pass()
            self.guard.begin_epoch(trainer.current_epoch)

    @outside_audits
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note an epoch that ended elsewhere than planned."""
        if not self._is_running or self._built is None or self._built.steps_per_epoch is None or _stops(trainer):
            return
        done = trainer.global_step
        if done % self._built.steps_per_epoch and done < self._built.horizon:
            note = "an epoch ended before its last batch: counts after it are not exact."
            self.guard.notes += [note] if note not in self.guard.notes else []

    def ledger(self, global_step: int) -> Ledger:
        """Counts of every planted canary after `global_step` optimiser steps; with `verify` all ranks must ask together."""
        return self.guard.ledger(global_step)

    # -- the audits

    def _at(
        self,
        moment: Event,
        trainer: Any,
        *,
        ledger: Ledger | None = None,
        followed_by: Sequence[Event] = (),
        fresh: bool = False,
    ) -> None:
        """Tell the auditor of a moment, and obey its stop."""
        if not self._is_running or self.auditor is None or self._built is None:
            return
        self._mark(trainer)
        step = trainer.global_step
        epoch = step / self._built.steps_per_epoch if self._built.steps_per_epoch is not None else None
        is_mixed = trainer.precision in AUTOCAST
        with trainer.precision_plugin.forward_context() if is_mixed else contextlib.nullcontext():
            self.auditor.at(
                moment,
                self._model,
                step=step,
                epoch=epoch,
                ledger=ledger or (lambda: self.ledger(step)),
                autocast=AUTOCAST.get(trainer.precision),
                last=self._is_last(trainer),
                followed_by=followed_by,
                fresh=fresh,
            )
        if self.auditor.should_stop:
            trainer.should_stop = True

    def _is_last(self, trainer: Any) -> bool:
        return self._built is not None and (trainer.global_step >= self._built.horizon or _stops(trainer))

    def _mark(self, trainer: Any) -> None:
        """Keep what was counted up to a step that has just ended: batches of the next one are not trained on yet."""
        if trainer.global_step != self._marked_step:
            self._marked_step = trainer.global_step
            self.guard.mark_step(trainer.global_step)

    @outside_audits
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Audit at the cadence, after batches that ended a step."""
        if self._is_running and trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._at("step", trainer, followed_by=["end"] if self._is_last(trainer) else [])

    @outside_audits
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Audit with the evaluation; the sanity check before training is none."""
        if not trainer.sanity_checking:
            self._at("evaluate", trainer)

    @outside_audits
    def _after_save(self, trainer: Any, filepath: Any) -> None:
        """The ledger beside a checkpoint, and an audit of the weights it holds."""
        if self._is_running and (self._last_ledger is None or self._last_ledger.global_step != trainer.global_step):
            self._mark(trainer)
            self._last_ledger = self.ledger(trainer.global_step)  # a save of weights alone asks no callback
        ledger = self._last_ledger
        if ledger is None:
            return
        if "://" not in str(filepath):
            self._write_ledger(ledger, Path(f"{filepath}.{LEDGER_NAME}"), trainer)
        self._at("save", trainer, ledger=ledger)

    def _write_ledger(self, ledger: Ledger, path: Path, trainer: Any) -> None:
        def write() -> None:
            ledger.save(path)
            if "Async" not in type(getattr(trainer.strategy, "checkpoint_io", None)).__name__:  # its files come later
                _remove_orphans(path)

        try:
            if self._is_running and self.auditor is not None:
                on_first(self.auditor.team, "ledger", write)
            elif trainer.is_global_zero:
                write()
        except Exception as error:
            if self.config.audit.on_error == "raise":
                raise
            if trainer.is_global_zero:
                logger.warning("the ledger at step %d was not written: %s", ledger.global_step, reason_of(error))

    @outside_audits
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last audit, and the end of counting."""
        if not self._is_running:
            return
        self._mark(trainer)
        self.guard.end(trainer.global_step)
        self.guard.unwatch()
        self._last_ledger = self.ledger(trainer.global_step)
        if not _averages_weights(trainer):
            self._finish(trainer, fresh=False)
            return
        strategy, original = trainer.strategy, trainer.strategy.on_train_end

        def on_train_end() -> None:  # the last hook with the model in place: every callback has put its weights in
            original()
            self._finish(trainer, fresh=True)

        strategy.on_train_end = on_train_end
        self._undo.callback(strategy.__dict__.pop, "on_train_end", None)

    def _finish(self, trainer: Any, *, fresh: bool) -> None:
        self._at("end", trainer, fresh=fresh)
        if self.auditor is not None:
            self.auditor.finish(seconds_outside=self.seconds_outside)

    # -- the state, in a checkpoint

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Digest of the plan, and counts; no secret. Nothing before the run has begun."""
        if self._is_running:
            self._mark(trainer)
            self._last_ledger = self.ledger(trainer.global_step)
        if self._last_ledger is not None:
            digest, counts = self._last_ledger.plan_digest, self._last_ledger.model_dump(mode="json")
            checkpoint[STATE] = {"plan_digest": digest, "ledger": counts}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the counts of the part of the run that is gone on from.

        Raises:
            InputError: a state that cannot be read.
        """
        if STATE not in checkpoint:
            return
        try:
            self._resumed = Ledger.model_validate(checkpoint[STATE]["ledger"])
        except (KeyError, ValueError):
            raise InputError("the checkpoint's memguard state cannot be read by this version.") from None


def _stops(trainer: Any) -> bool:
    """Whether a stop that was asked for is obeyed now; Lightning trains on to `min_epochs` and `min_steps`."""
    return bool(trainer.should_stop and getattr(trainer.fit_loop, "_can_stop_early", True))


def _averages_weights(trainer: Any) -> bool:
    """Whether a callback puts other weights in when training ends; subclasses bear names of their own."""
    kinds = (kind for one in trainer.callbacks for kind in type(one).__mro__)
    return any("WeightAveraging" in kind.__name__ for kind in kinds)


def _remove_orphans(written: Path) -> None:
    """Take away ledgers in the folder whose checkpoint was deleted, as a saver does that keeps the best few."""
    ending = f".{LEDGER_NAME}"
    for path in written.parent.glob(f"*.ckpt{ending}"):
        if path != written and not path.with_name(path.name.removesuffix(ending)).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def find_model(module: Any, pick: Callable[[Any], Any] | None = None) -> Any:
    """The language model inside a Lightning module: what `pick` gives, or the one transformers or PEFT model with a head.

    Raises:
        CanaryError: none, or more than one.
    """
    if pick is not None:
        return pick(module)
    from transformers import PreTrainedModel

    found: list[Any] = []
    inside: set[int] = set()
    for one in module.modules():  # outermost first
        is_model = isinstance(one, PreTrainedModel) and one.get_output_embeddings() is not None
        if id(one) in inside or not (is_model or hasattr(one, "disable_adapter")):
            continue
        found.append(one)
        inside |= {id(part) for part in one.modules()}
    if len(found) == 1:
        return found[0]
    what = ", ".join(type(one).__name__ for one in found) or "none"
    raise CanaryError(
        f"the module must hold one transformers model that predicts tokens, got {what}: pass "
        "LightningAuditCallback(..., model=lambda module: module.lm)."
    )
