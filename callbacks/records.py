"""Canaries as records of a dataset, for training loops of one's own: what a DP guarantee speaks of.

Under DP training a canary must be a row that the sampler draws as it draws any other; one planted at a planned position would
bypass the sampling that the guarantee is computed from. `plant_records` gives the dataset to hand to Opacus or to any loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from memguard.audit.config import AuditConfig
from memguard.audit.runner import run_audit
from memguard.callbacks.guard import RunGuard, read_config
from memguard.callbacks.together import on_first
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.ledger import Ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError
from memguard.scoring.team import Team


class PlantedRecords:
    """A dataset with canaries among its rows, and the count of how often each was drawn.

    Args:
        guard: of the run, prepared.

    Attributes:
        dataset: the user's rows and the canaries' records; give it to the loader in place of the user's.
    """

    def __init__(self, guard: RunGuard) -> None:
        self._guard = guard
        self.dataset: CanaryDataset = guard.dataset()
        on_first(Team.current(), "plan", guard.save_plan)

    @property
    def plan(self) -> CanaryPlan:
        """The canaries."""
        assert self._guard.plan is not None
        return self._guard.plan

    def watch(self, model: Any) -> None:
        """Count, in a hook on the model, what it is trained on from now on; call it before `PrivacyEngine.make_private`."""
        self._guard.watch(model)

    def ledger(self, global_step: int) -> Ledger:
        """How often each record was drawn in `global_step` optimiser steps; every rank must ask together, between two steps."""
        self._guard.mark_step(global_step)
        return self._guard.ledger(global_step)

    def audit(self, model: Any, *, global_step: int, **options: Any) -> Any:
        """`run_audit` with this run's plan, settings and counts; `options` are those of `AuditRunner.run`."""
        guard = self._guard
        ledger = self.ledger(global_step)
        return run_audit(model, guard.tokenizer, plan=self.plan, config=guard.config, ledger=ledger, **options)


def plant_records(
    dataset: Any,
    config: str | Path | dict[str, Any] | AuditConfig,
    *,
    tokenizer: Any,
    output_dir: Path = Path("output"),
    max_positions: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    earlier: Ledger | None = None,
) -> PlantedRecords:
    """Put each canary among the rows of a map-style dataset, as often as its tier says.

    Args:
        dataset: the user's, with an index.
        config: path of a `memguard.yaml`, its content, or an `AuditConfig`; it must state the guarantee (`dp:`).
        tokenizer: of the run.
        output_dir: of the run; the plan may not lie in it.
        max_positions: longest row the model takes, None when unknown.
        collate: of your loader; canaries go through it now, so that one that will not reach the loss is found.
        earlier: the ledger of the checkpoint that the run goes on from.

    Raises:
        InputError: a config without `dp:` or with `index_training`, or a plan that cannot be used.
        CanaryError: data that records cannot be put into.

    Example:
        >>> planted = plant_records(rows, "memguard.yaml", tokenizer=tokenizer)  # doctest: +SKIP
        >>> planted.watch(model)  # doctest: +SKIP
        >>> loader = DataLoader(planted.dataset, batch_size=64)  # doctest: +SKIP
        >>> parts = engine.make_private(module=model, optimizer=optimizer, data_loader=loader)  # doctest: +SKIP
    """
    settings = read_config(config)
    if settings.dp is None:
        raise InputError("records are for runs that state a guarantee: write dp: {epsilon: ..., delta: ...} into the config.")
    if settings.audit.propensity is not None and settings.audit.propensity.index_training:
        raise InputError("audit.propensity.index_training is for the callbacks of a trainer, not for records of your own loop.")
    guard = RunGuard(settings)
    guard.prepare(dataset, tokenizer, output_dir=output_dir, max_positions=max_positions)
    step = earlier.global_step if earlier is not None else 0
    guard.begin(max_steps=max(1, step), global_step=step, earlier=earlier)
    planted = PlantedRecords(guard)
    if collate is not None:
        guard.preflight(planted.dataset, collate)
    return planted
