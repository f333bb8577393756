"""The belief ratio that makes a target Prior-Aware memorised, from targets of its kind that were never trained on.

The raw ratio of a canary is mostly its template's cue, and that of a text its topic's: what never-trained targets reach is
what a ratio must exceed to say anything of memory. Fixed before any target is judged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from memguard.audit.prior import CONFIDENCE, PriorMeasurement
from memguard.audit.report_records import Threshold
from memguard.metrics.intervals import estimate_quantile
from memguard.scoring.scorer import Span

QUANTILE = 0.95
MAX_TARGETS = 64  # each costs a full measurement, c prefixes times its tokens
FALLBACK = 10.0  # where nothing of its kind was held back
LARGEST_LOG = 700.0  # nats that a float can hold


def given_threshold(targets: str, n: float) -> Threshold:
    """A ratio that the user gave, or the fallback."""
    return Threshold(targets=targets, n=n, method="given")


def calibrate(
    measurement: PriorMeasurement, spans: Sequence[Span], log_probs: Sequence[float], *, targets: str, seed: int
) -> Threshold | None:
    """The `QUANTILE` of the belief ratio over never-trained targets, with its order-statistic interval; None without any.

    Args:
        measurement: of the model.
        spans: never-trained targets; a random `MAX_TARGETS` of them are measured.
        log_probs: their scores; nats.
        targets: what is calibrated for.
        seed: of the sample.
    """
    if not spans:
        return None
    chosen = list(range(len(spans)))
    if len(chosen) > MAX_TARGETS:  # not the first ones: a file may be ordered by source or date
        chosen = sorted(random.Random(f"memguard/calibration/{seed}/{targets}").sample(chosen, MAX_TARGETS))
    ratios = measurement.log_ratios([spans[index] for index in chosen], [log_probs[index] for index in chosen])
    found = estimate_quantile(ratios, QUANTILE, confidence=CONFIDENCE)
    return Threshold(
        targets=targets,
        n=max(1.0, _ratio(found.value)),
        method="quantile",
        quantile=QUANTILE,
        low=_ratio(found.low) if math.isfinite(found.low) else None,
        high=_ratio(found.high) if math.isfinite(found.high) else None,
        confidence=CONFIDENCE,
        num_targets=len(ratios),
        mean_log_ratio=float(np.mean(ratios)),
    )


def _ratio(log_ratio: float) -> float:
    return math.exp(min(LARGEST_LOG, log_ratio))
