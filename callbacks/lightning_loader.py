"""A Lightning training loader over the user's rows and the canaries; knows the trainer, holds no callback.

The user's own loader is copied, with our dataset and our sampler in it. Batches done, which Lightning counts across epochs and
restores, say where a pass begins. What cannot be counted is refused here, by name.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from memguard.audit.planting import is_stream
from memguard.callbacks.guard import RunGuard
from memguard.callbacks.lightning_passes import GuardedSampler, LoaderFacts, PassedStream, Place, order_of_rows
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.rows import shift_of
from memguard.canaries.schedule import Clock, Schedule
from memguard.canaries.streams import CanaryStream
from memguard.errors import CanaryError

logger = logging.getLogger(__name__)

BESIDE_IDS = frozenset({"input_ids", "attention_mask", "position_ids", "token_type_ids", "seq_idx"})

# -- from the trainer's loaders to guarded ones


@dataclass(frozen=True)
class GuardedLoader:
    """The loader that holds the canaries.

    Args:
        loader: the copy that Lightning iterates.
        dataset: rows and canaries; a `PassedStream` where rows come in turn only.
        sampler: ours; None for a stream.
        num_rows: rows of the user's data that a pass reads; None for a stream.
        steps_per_epoch: optimiser steps an epoch of Lightning's; None for a stream that is one epoch.
        horizon: optimiser steps of the run.
        place: where the next pass begins.
    """

    loader: DataLoader[Any]
    dataset: CanaryDataset | PassedStream
    sampler: GuardedSampler | None
    num_rows: int | None
    steps_per_epoch: int | None
    horizon: int
    place: Place

    def is_in(self, loaders: Any) -> bool:
        """Whether it is one of the loaders that Lightning iterates."""
        return any(getattr(one, "dataset", None) is self.dataset for one in getattr(loaders, "flattened", ()))

    def follow(self, schedule: Schedule) -> None:
        """Use these cells from now on."""
        if self.sampler is not None:
            self.sampler.schedule = schedule
        else:
            assert isinstance(self.dataset, PassedStream)
            self.dataset.schedule = schedule

    def begin_pass(self) -> None:
        """Tell a stream, and its workers, where its next pass begins."""
        if isinstance(self.dataset, PassedStream):
            self.dataset.start.fill_(self.place()[1])

    def is_stale(self) -> bool:
        """Whether the first pass began before Lightning restored its progress, as `estimated_stepping_batches` makes it."""
        if isinstance(self.dataset, PassedStream):
            return int(self.dataset.start) != self.place()[1]
        assert self.sampler is not None
        return self.sampler.begun_at is not None and self.sampler.begun_at != self.place()


def guard_loaders(
    trainer: Any,
    loaders: Any,
    guard: RunGuard,
    tokenizer: Any,
    model: Any,
    *,
    target: str | int | None,
    output: Path,
    running: GuardedLoader | None = None,
) -> tuple[Any, GuardedLoader]:
    """Put the canaries into one of the loaders that Lightning was given.

    Args:
        trainer: of Lightning, while it asks for its training data.
        loaders: one loader, a dictionary or sequence of them, or a combined loader.
        guard: of the run.
        tokenizer: of the run.
        model: language model of the run.
        target: key or index of the loader to plant in, where there are several.
        output: folder of the reports, where no plan may lie.
        running: what was guarded before a reload in the middle of the run, which must be like it.

    Returns:
        The loaders with the guarded one in its place, and that one.

    Raises:
        CanaryError: loaders, samplers or settings that canaries cannot be counted in; names the way out.
        InputError: a plan that cannot be used.
    """
    refuse_unsupported(trainer, guard)
    named, mode = _by_name(loaders)
    name = _chosen(named, target)
    others = [one for other, one in named.items() if other != name]
    loader = named[name]
    if not isinstance(loader, DataLoader):
        raise CanaryError(
            f"the training loader must be a torch DataLoader, got {type(loader).__name__}: what it puts into a batch is not "
            "known. Wrap the rows in a Dataset and a DataLoader."
        )
    dealt = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    facts = read_facts(loader, rank=dealt["rank"], num_ranks=dealt["num_replicas"])
    if running is None:
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        limit = longest if isinstance(longest, int) and longest > 0 else None
        guard.prepare(loader.dataset, tokenizer, output_dir=output, max_positions=limit)
        if not getattr(loader, "in_order", True):
            guard.notes.append("in_order=False: batches come in any order, so that counts hold at the end of epochs alone.")
    build = _build_stream if is_stream(loader.dataset) else _build_indexed
    built = build(trainer, loader, guard, facts, others, mode, running)
    if running is None:
        guard.preflight(built.dataset, _with_names(loader.collate_fn), model=model)
    return _put(loaders, name, built.loader), built


def _build_indexed(
    trainer: Any,
    loader: Any,
    guard: RunGuard,
    facts: LoaderFacts,
    others: Sequence[Any],
    mode: str,
    running: GuardedLoader | None,
) -> GuardedLoader:
    base = loader.dataset
    inner = order_of_rows(facts, base, lightning_distributes=trainer._accelerator_connector.use_distributed_sampler)
    assert guard.planting is not None
    assert guard.data is not None
    added = sum(guard.planting.repetitions) if guard.planting.mode == "append" else 0
    rows = len(inner)
    if running is not None:
        _refuse_other_reload(running, rows, facts, guard)
    whole = facts.num_batches(rows + added)
    batches = _batches_an_epoch(trainer, whole, others, mode, facts)
    steps = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    horizon, place = _horizon(trainer, steps), _place_in(trainer, batches)
    if running is None:
        trained = rows if batches == whole else batches * facts.rows_per_batch - added
        guard.data = dataclasses.replace(guard.data, num_rows=trained)
        guard.schedule(_clock(trainer, facts, horizon))
    else:
        guard.data = dataclasses.replace(guard.data, base=base)
    dataset = guard.dataset()
    assert guard.current is not None
    sampler = GuardedSampler(inner, guard.current, num_rows=len(base), num_positions=rows + added, facts=facts, place=place)
    return GuardedLoader(rebuilt(loader, dataset, sampler), dataset, sampler, rows, steps, horizon, place)


def _refuse_other_reload(running: GuardedLoader, rows: int, facts: LoaderFacts, guard: RunGuard) -> None:
    assert guard.current is not None
    assert running.num_rows is not None
    clock = guard.current.clock
    before = (running.num_rows, clock.rows_per_batch // clock.num_ranks, clock.drop_last)
    now = (rows, facts.batch_size, facts.drop_last)
    if now != before:
        shown = [f"{one[0]} in batches of {one[1]}{' with drop_last' if one[2] else ''}" for one in (before, now)]
        raise CanaryError(
            f"a reloaded training loader must read as many rows as before, {shown[0]}, got {shown[1]}: where canaries go is "
            "decided before the run. Reload data of one size, or start a run for each."
        )


def _build_stream(
    trainer: Any,
    loader: Any,
    guard: RunGuard,
    facts: LoaderFacts,
    others: Sequence[Any],
    mode: str,
    running: GuardedLoader | None,
) -> GuardedLoader:
    batches = _batches_an_epoch(trainer, math.inf, others, mode, facts)
    accumulation = trainer.accumulate_grad_batches
    if math.isinf(batches) and trainer.max_epochs not in (None, -1):
        raise CanaryError(
            f"a guarded stream is one epoch as long as the run, so that max_epochs={trainer.max_epochs} does not say where it "
            "ends: set max_steps and leave max_epochs out, or set limit_train_batches to the batches of an epoch."
        )
    if math.isfinite(batches) and batches % accumulation:
        raise CanaryError(
            f"limit_train_batches of a stream must be a multiple of accumulate_grad_batches, {accumulation}, got {batches}."
        )
    steps = None if math.isinf(batches) else int(batches) // accumulation
    horizon = _horizon(trainer, steps)
    done = trainer.fit_loop.epoch_loop.batch_progress.total

    def place() -> tuple[int, int]:
        return 0, done.processed

    if running is None:
        guard.schedule(_clock(trainer, facts, horizon))
        if math.isinf(batches):
            logger.warning(
                "a guarded stream is read as one epoch as long as the run: ask for validation and schedules by steps, or set "
                "limit_train_batches."
            )
    assert guard.planting is not None
    assert guard.data is not None
    assert guard.current is not None
    dataset = PassedStream(
        loader.dataset,
        guard.data.rows[0],
        guard.planting.ids,
        guard.planting.texts,
        schedule=guard.current,
        rows_per_batch=facts.batch_size,
        rank=facts.rank,
        num_ranks=facts.num_ranks,
        start=done.processed,
        ahead=1 if math.isinf(batches) else 0,  # Lightning looks for the end of what has no length
    )
    return GuardedLoader(rebuilt(loader, dataset, None), dataset, None, None, steps, horizon, place)


def refuse_unsupported(trainer: Any, guard: RunGuard) -> None:
    """Raise `CanaryError`, with the way out, on what canaries cannot be planted or counted in."""
    module = trainer.lightning_module
    if guard.as_records:
        raise CanaryError(
            "a stated DP guarantee (dp) is not tested in Lightning runs, whose sampler is ours: use plant_records in a loop of "
            "your own."
        )
    if not module.automatic_optimization:
        raise CanaryError(
            "the module must leave optimisation to Lightning (automatic_optimization): with manual steps nothing says how many "
            "rows a step trains on."
        )
    if trainer.overfit_batches:
        raise CanaryError("overfit_batches repeats a few batches, so that no count of a canary holds: leave it at 0.")
    if any(type(one).__name__ == "GradientAccumulationScheduler" for one in trainer.callbacks):
        raise CanaryError(
            "accumulate_grad_batches must be one number for the run, got a GradientAccumulationScheduler: cells are planned in "
            "steps of one size."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise CanaryError(
            "training_step must take a batch, got one that takes dataloader_iter: how many batches a step reads is not known."
        )


def _by_name(loaders: Any) -> tuple[dict[Any, Any], str]:
    """Loaders by key or index, and how Lightning combines them."""
    mode = "max_size_cycle"
    if type(loaders).__name__ == "CombinedLoader":
        loaders, mode = loaders.iterables, loaders._mode
    if isinstance(loaders, Mapping):
        return dict(loaders), mode
    if isinstance(loaders, list | tuple):
        return dict(enumerate(loaders)), mode
    return {None: loaders}, mode


def _chosen(named: dict[Any, Any], target: str | int | None) -> Any:
    if target is None and len(named) == 1:
        return next(iter(named))
    if target is not None and target in named:
        return target
    known = ", ".join(repr(name) for name in named if name is not None) or "one loader without a name"
    raise CanaryError(
        f"target must name the loader to plant in, of {known}, got {target!r}: pass LightningAuditCallback(..., target=...)."
    )


def _put(loaders: Any, name: Any, loader: Any) -> Any:
    """The same collection with one loader replaced; the user's own stays as it is."""
    if type(loaders).__name__ == "CombinedLoader":
        return type(loaders)(_put(loaders.iterables, name, loader), loaders._mode)
    if isinstance(loaders, Mapping):
        return {key: loader if key == name else one for key, one in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [loader if index == name else one for index, one in enumerate(loaders)]
    return loader


def _batches_an_epoch(trainer: Any, own: float, others: Sequence[Any], mode: str, facts: LoaderFacts) -> Any:
    """Batches that Lightning takes from the guarded loader in an epoch.

    Raises:
        CanaryError: another loader is longer, so that this one would begin again or run dry within an epoch.
    """
    limited = _limited(trainer, own)
    lengths = [_limited(trainer, _length(trainer, one, facts)) for one in others]
    if mode == "min_size":
        return min([limited, *lengths])
    if any(length > limited for length in lengths):
        raise CanaryError(
            f"the loader that canaries are planted in must be the longest of those that are combined, got {limited} batches "
            f"where another has {max(lengths)}: it would begin again within an epoch. Choose the longest as target."
        )
    return limited


def _limited(trainer: Any, batches: float) -> float:
    """Batches of an epoch under `limit_train_batches`, as Lightning counts them."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(batches, limit)
    return batches if math.isinf(batches) else int(batches * limit)


def _length(trainer: Any, loader: Any, facts: LoaderFacts) -> float:
    """Batches of another loader, once Lightning has dealt its rows out to ranks."""
    is_dealt = isinstance(loader, DataLoader) and trainer._data_connector._requires_distributed_sampler(loader)
    if is_dealt and _is_plain(loader.batch_sampler):
        return read_facts(loader, rank=facts.rank, num_ranks=facts.num_ranks).num_batches(len(loader.sampler))
    try:
        return len(loader)
    except TypeError:
        return math.inf


def _horizon(trainer: Any, steps_per_epoch: int | None) -> int:
    """Optimiser steps of the run.

    Raises:
        CanaryError: a run without an end.
    """
    ends = [trainer.max_steps] if trainer.max_steps > 0 else []
    if steps_per_epoch is not None and trainer.max_epochs not in (None, -1):
        ends.append(trainer.max_epochs * steps_per_epoch)
    if not ends:
        what = "a stream needs max_steps, or limit_train_batches and max_epochs" if steps_per_epoch is None else ""
        raise CanaryError(f"{what or 'the run must have max_steps or max_epochs'}: where canaries go is decided before it.")
    return max(1, int(min(ends)))


def _place_in(trainer: Any, batches: int) -> Place:
    loop, done = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress.total

    def place() -> tuple[int, int]:
        epoch, begun = divmod(done.processed, max(1, batches))
        if begun and not loop.restarting:  # an epoch was cut short: the next one begins at its head
            return epoch + 1, 0
        return epoch, begun

    return place


def _clock(trainer: Any, facts: LoaderFacts, horizon: int) -> Clock:
    return Clock(
        rows_per_batch=facts.rows_per_batch,
        accumulation=trainer.accumulate_grad_batches,
        max_steps=horizon,
        drop_last=facts.drop_last,
        num_ranks=facts.num_ranks,
        repeats_head=False,
    )


def _with_names(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The collator with its batch as input_ids and labels; labels are the inputs where the module makes them itself.

    A batch with a table that may be targets, under whatever name, is left alone: whether they are right is not seen.
    """

    def named(rows: list[Any]) -> Any:
        batch = collate(rows)
        if isinstance(batch, Mapping):
            is_named = "labels" in batch or "input_ids" not in batch
            return batch if is_named or _may_hold_targets(batch) else {**batch, "labels": batch["input_ids"]}
        parts = batch if isinstance(batch, list | tuple) else [batch]
        if not 1 <= len(parts) <= 2 or not all(isinstance(part, torch.Tensor) and part.ndim == 2 for part in parts):
            return batch
        ids, targets = parts[0], parts[-1]
        if len(parts) == 2 and shift_of(ids[0], targets[0]) == 1:
            targets = torch.cat([ids[:, :1], targets[:, :-1]], dim=1)
        return {"input_ids": ids, "labels": targets}

    named.data_collator = collate  # type: ignore[attr-defined]  # the pre-flight looks behind wrappers
    return named


def _may_hold_targets(batch: Mapping[str, Any]) -> bool:
    """Whether another table of whole numbers has the shape of input_ids, what models read beside them apart."""
    shape = _shape_of_ids(batch["input_ids"])
    return any(_shape_of_ids(part) == shape is not None for name, part in batch.items() if name not in BESIDE_IDS)


def _shape_of_ids(value: Any) -> tuple[int, ...] | None:
    """Shape of whole numbers, in a tensor or in lists; None for anything else."""
    try:
        table = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # texts, or rows of different lengths
        return None
    return None if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool else tuple(table.shape)


# -- one loader


def read_facts(loader: Any, *, rank: int, num_ranks: int) -> LoaderFacts:
    """How a loader cuts rows into batches.

    Raises:
        CanaryError: a loader whose batches cannot be planned; names the way out.
    """
    batches = loader.batch_sampler
    if batches is None or (isinstance(loader.dataset, CanaryDataset | CanaryStream)):
        what = "makes no batches of rows (batch_size=None)" if batches is None else "holds canaries already"
        raise CanaryError(f"the training loader must make batches of the user's rows, got one that {what}.")
    if not _is_plain(batches):
        raise CanaryError(
            f"the training loader must cut batches from an index sampler, got batch_sampler {type(batches).__name__}, which "
            "places rows itself: pass sampler= and batch_size= instead."
        )
    sampler = getattr(batches, "sampler", loader.sampler)
    return LoaderFacts(int(batches.batch_size), bool(batches.drop_last), rank, num_ranks, sampler)


def rebuilt(loader: DataLoader[Any], dataset: Any, sampler: GuardedSampler | None) -> DataLoader[Any]:
    """A copy of the user's loader, of whatever class, over other rows; a stream has no sampler."""
    new = copy.copy(loader)
    for name in [name for name in vars(new) if name.startswith("__pl_") or name == "__dataset"]:
        del new.__dict__[name]  # or Lightning would rebuild the user's own loader from the arguments it saw
    parts: dict[str, Any] = {"dataset": dataset, "_iterator": None}
    if sampler is not None:
        parts |= {"sampler": sampler, "batch_sampler": _batches(loader, sampler)}
    for name, part in parts.items():
        object.__setattr__(new, name, part)  # a loader refuses to have them set
    return new


def _batches(loader: Any, sampler: GuardedSampler) -> Any:
    """Batches of our sampler, in the loader's own class; a stateful loader saves only its own kind."""
    old = loader.batch_sampler
    if hasattr(loader, "load_state_dict") and type(old) is BatchSampler:
        kind = importlib.import_module("torchdata.stateful_dataloader.sampler").BatchSampler
        return kind(sampler, old.batch_size, old.drop_last)
    new = copy.copy(old)
    new.sampler = sampler
    return new


def _is_plain(batches: Any) -> bool:
    """Torch's batch sampler, or torchdata's, which only adds a state; also as a stream has one."""
    kind = type(batches)
    return kind is BatchSampler or (kind.__name__ == "BatchSampler" and kind.__module__.startswith("torchdata."))
