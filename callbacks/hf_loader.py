"""The Hugging Face trainer's own loader, over the user's rows and the canaries.

The trainer builds its loader as ever, from a wrapped dataset; its index sampler, built for the user's rows alone, is put
inside ours, so that user rows keep the order of the unguarded run. What cannot be counted is refused here, by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

from memguard.audit.planting import is_stream
from memguard.callbacks.guard import RunGuard
from memguard.canaries.injection import CanarySampler
from memguard.canaries.schedule import Clock
from memguard.errors import CanaryError

SAMPLES_PROMPTS = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "PPOTrainer", "XPOTrainer", "NashMDTrainer")
COMPARES_ANSWERS = ("DPOTrainer", "CPOTrainer", "ORPOTrainer", "KTOTrainer", "BCOTrainer", "RewardTrainer", "PRMTrainer")
PROVEN_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher")


class GuardedLoader:
    """One training loader and what memguard put into it.

    Args:
        loader: as the trainer made it.
        dataset: the wrapped dataset it holds.
        sampler: ours, None for a stream.
    """

    def __init__(self, loader: Any, dataset: Any, sampler: CanarySampler | None) -> None:
        self.loader, self.dataset, self.sampler = loader, dataset, sampler

    def check(self) -> None:
        """Raise `CanaryError` when the trainer made its loader from other data."""
        if not self.is_in(self.loader):
            raise CanaryError(
                "this trainer builds its training loader from something else than train_dataset: no canary can be planted."
            )

    def is_in(self, loader: Any) -> bool:
        """Whether a loader iterates the wrapped dataset, under whatever the trainer put around it."""
        inner = getattr(loader, "dataset", None)
        while inner is not None:
            if inner is self.dataset:
                return True
            inner = getattr(inner, "dataset", None)
        return False


def build_loader(trainer: Trainer, original: Callable[[], Any], guard: RunGuard, tokenizer: Any) -> GuardedLoader:
    """Let the trainer build its loader over the user's rows and the canaries.

    Raises:
        CanaryError: data, samplers or trainers that canaries cannot be counted in; names the way out.
        InputError: a plan that cannot be used.
    """
    base = trainer.train_dataset
    refuse_unsupported(trainer, base)
    limits = [getattr(getattr(trainer.model, "config", None), "max_position_embeddings", None)]
    limits.append(getattr(trainer.args, "max_length", None))
    known = [int(limit) for limit in limits if isinstance(limit, int) and limit > 0]
    guard.prepare(base, tokenizer, output_dir=Path(trainer.args.output_dir), max_positions=min(known, default=None))
    built = _build_stream(trainer, original, guard) if is_stream(base) else _build_indexed(trainer, original, guard, base)
    if trainer.args.auto_find_batch_size:
        guard.notes.append("auto_find_batch_size may train some rows twice.")
    if type(built.loader).__name__ not in PROVEN_LOADERS:
        guard.notes.append(f"loader {type(built.loader).__name__}: counting is not proven in this version.")
    return built


def _build_indexed(trainer: Trainer, original: Callable[[], Any], guard: RunGuard, base: Any) -> GuardedLoader:
    dataset = guard.dataset()
    sampling = contextlib.nullcontext() if guard.as_records else _sampling_from(trainer, base)
    with _training_on(trainer, dataset), sampling:
        loader = original()
    built = GuardedLoader(loader, dataset, None)
    built.check()
    guard.preflight(dataset, loader.collate_fn, model=trainer.model)
    if guard.as_records:
        return built
    inner = _index_sampler(loader)
    if getattr(inner, "data_source", None) is dataset:
        inner.data_source = base  # a trainer that asked for its sampler some other way
    if len(inner) != len(base):
        raise CanaryError(
            f"the trainer's sampler must give every row once an epoch, got {len(inner)} indices for {len(base)} rows "
            f"({type(inner).__name__}): what is drawn how often cannot be planned."
        )
    schedule = guard.schedule(_clock(trainer, _rows_per_batch(trainer, loader)))
    if trainer.args.max_steps <= 0:  # as the trainer will say: somebody may look at the loader before
        schedule = guard.expect(math.ceil(trainer.args.num_train_epochs * schedule.steps_per_epoch))
    built.sampler = CanarySampler(inner, schedule)
    for level in _batch_samplers(loader):  # on every level: a loader that skips batches sets epochs on the outermost alone
        level.sampler = built.sampler
    return built


def _build_stream(trainer: Trainer, original: Callable[[], Any], guard: RunGuard) -> GuardedLoader:
    batch = int(getattr(trainer, "_train_batch_size", 0) or trainer.args.train_batch_size)
    ranks = max(1, trainer.accelerator.num_processes)
    split = bool(getattr(trainer.accelerator, "split_batches", False))
    schedule = guard.schedule(_clock(trainer, batch if split else batch * ranks))
    dataset = guard.stream(schedule, rows_per_batch=batch)
    with _training_on(trainer, dataset):
        loader = original()
    built = GuardedLoader(loader, dataset, None)
    built.check()
    guard.preflight(dataset, loader.collate_fn, model=trainer.model)
    return built


def _rows_per_batch(trainer: Trainer, loader: Any) -> int:
    """Rows of one micro-batch over all ranks."""
    if type(loader).__name__ == "DataLoaderDispatcher":  # its total_batch_size asks the dataset for a batch size
        ranks = 1 if loader.split_batches else max(1, trainer.accelerator.num_processes)
        return int(loader.batch_sampler.batch_size) * ranks
    return int(getattr(loader, "total_batch_size", 0) or trainer.args.train_batch_size)


def _clock(trainer: Trainer, rows_per_batch: int) -> Clock:
    args = trainer.args
    return Clock(
        rows_per_batch=rows_per_batch,
        accumulation=args.gradient_accumulation_steps,
        max_steps=max(1, args.max_steps),
        drop_last=args.dataloader_drop_last,
        num_ranks=max(1, trainer.accelerator.num_processes),
    )


@contextlib.contextmanager
def _training_on(trainer: Trainer, dataset: Any) -> Iterator[None]:
    """The trainer sees the wrapped dataset inside the block."""
    base, trainer.train_dataset = trainer.train_dataset, dataset
    try:
        yield
    finally:
        trainer.train_dataset = base


@contextlib.contextmanager
def _sampling_from(trainer: Trainer, base: Any) -> Iterator[None]:
    """Inside the block the trainer's index sampler is built for the user's rows alone, as in the unguarded run."""
    original = getattr(trainer, "_get_train_sampler", None)
    if original is None:
        yield
        return
    had = "_get_train_sampler" in vars(trainer)

    def of_user_rows(*_: Any, **__: Any) -> Any:
        dataset, trainer.train_dataset = trainer.train_dataset, base
        try:
            return original()
        finally:
            trainer.train_dataset = dataset

    trainer._get_train_sampler = of_user_rows
    try:
        yield
    finally:
        if had:
            trainer._get_train_sampler = original
        else:
            del trainer._get_train_sampler


def refuse_unsupported(trainer: Trainer, base: Any) -> None:
    """Raise `CanaryError`, with the way out, on what canaries cannot be planted or counted in."""
    names = {parent.__name__ for parent in type(trainer).__mro__}
    if names.intersection(SAMPLES_PROMPTS):
        raise CanaryError(
            f"{type(trainer).__name__} trains on completions it samples itself and repeats prompts: a canary cannot be planted "
            "a known number of times. Plant in the supervised stage before it and use `memguard audit` on these checkpoints."
        )
    if names.intersection(COMPARES_ANSWERS):
        raise CanaryError(
            f"{type(trainer).__name__} trains on pairs or ratings of answers, not on texts: a canary has no place in its rows. "
            "Plant in the supervised stage before it and use `memguard audit` on these checkpoints."
        )
    if base is None:
        raise CanaryError("the trainer must have a train_dataset to plant canaries in, got none.")
    if getattr(trainer.args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise CanaryError(
            "train_sampling_strategy 'batch_rebalance' makes batches without an index sampler, where sightings cannot be "
            "planned: use 'random', 'sequential' or 'group_by_length'."
        )
    if is_stream(base):
        _refuse_stream(trainer, base)


def _refuse_stream(trainer: Trainer, base: Any) -> None:
    if getattr(base, "_distributed", None) is not None:
        raise CanaryError(
            "the stream is split over ranks already (split_dataset_by_node), and the trainer would split it again, so that "
            "rows are lost: give the trainer the whole stream."
        )
    if trainer.args.max_steps <= 0:
        raise CanaryError("a stream needs max_steps: where canaries go is decided before the run, by its number of rows.")


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
