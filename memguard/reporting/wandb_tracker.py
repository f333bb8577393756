"""Audits as curves in the Weights & Biases run that the trainer opened. Never opens a run, never imports wandb itself.

Metrics are defined by their exact names, since overlapping globs are resolved at random, and logged with their step as a
value, since rows with a smaller `step=` than the last are dropped in silence.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from memguard.audit.report import AuditReport, CanaryRow
from memguard.reporting.trackers import flatten_metrics

logger = logging.getLogger(__name__)

TABLE = "memguard/canaries"
COLUMNS = [
    "id", "format", "role", "tier", "num_seen", "log_prob", "rank_low", "rank_high", "exposure_bits", "exposure_low_bits",
    "exposure_high_bits", "method", "flags", "is_extracted", "prior_aware", "log_belief_ratio", "effective_sample_size",
    "calibrated_exposure_bits", "log10_expected_tries", "found_by",
]  # fmt: skip


class WandbTracker:
    """Logs audits to the active W&B run, and does nothing where there is none.

    Late audits (of an old checkpoint, or finished after later training steps) keep their place on the step axis.

    Args:
        step_metric: the trainer's own step axis: `train/global_step` (Hugging Face) or `trainer/global_step` (Lightning).
    """

    def __init__(self, step_metric: str = "train/global_step") -> None:
        self.step_metric = step_metric
        self._run: Any = None
        self._defined: set[str] = set()

    def log(self, report: AuditReport) -> None:
        """Log one audit as one row. An audit whose step is not known has no place on the axis and is not logged."""
        run, step = _active_run(), report.subject.global_step
        if run is None:
            return
        if step is None:
            logger.info("The audit is not logged to W&B: its subject has no training step.")
            return
        metrics = flatten_metrics(report)
        self._define(run, metrics)
        run.log({**metrics, self.step_metric: step})

    def log_table(self, report: AuditReport) -> None:
        """Log the canaries of one audit as a table of ids and figures; meant for the last audit of a run."""
        run = _active_run()
        if run is None:
            return
        table = sys.modules["wandb"].Table(columns=COLUMNS, data=[_table_row(row) for row in report.canaries])
        step = report.subject.global_step
        run.log({TABLE: table} if step is None else {TABLE: table, self.step_metric: step})

    def _define(self, run: Any, metrics: dict[str, float]) -> None:
        if run is not self._run:
            self._run, self._defined = run, set()
        for name in metrics:
            if name not in self._defined:
                run.define_metric(name, step_metric=self.step_metric, summary="max,last")
                self._defined.add(name)


def _active_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _table_row(row: CanaryRow) -> list[Any]:
    exposure, prior = row.exposure, row.prior_aware
    figures = [row.num_seen, row.log_prob, _exact(row.rank_low), _exact(row.rank_high)]
    bits = [exposure.bits, exposure.low_bits, exposure.high_bits, exposure.method, ", ".join(exposure.flags)]
    annotation = [prior.verdict, prior.log_belief_ratio, prior.effective_sample_size] if prior else ["not measured", None, None]
    return [row.id, row.format, row.role, row.tier, *figures, *bits, row.is_extracted, *annotation, *_full_figures(row)]


def _full_figures(row: CanaryRow) -> list[Any]:
    """What was measured beside exposure; None where it was not."""
    calibrated = row.calibrated.bits if row.calibrated is not None else None
    if row.extraction is None:
        return [calibrated, None, "not measured"]
    return [calibrated, row.extraction.log10_expected_tries, ", ".join(row.extraction.found_by)]


def _exact(value: int | None) -> str | None:
    """Ranks as text: spaces may be larger than a float of the table can count."""
    return None if value is None else str(value)
