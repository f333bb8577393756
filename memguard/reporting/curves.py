"""The figures behind the curves: one pooled row a tier, the canaries of all formats taken together; exposure in bits.

The interval is that of the tier's *median*, and need not hold the mean of a skewed tier. A tier with a canary that has no
finite score has neither: such a canary is never left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from memguard.audit.report import AuditReport, CanaryRow, TrendPoint

CONTROLS_TIER = 0
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PooledTier:
    """Exposure of one tier over all formats; tier 0 stands for the controls."""

    tier: int
    n: int
    mean_bits: float | None
    low_bits: float | None
    high_bits: float | None
    mean_num_seen: float | None


def pool_tiers(report: AuditReport) -> list[PooledTier]:
    """One row a tier, lowest first, the controls as tier 0 where the report has any; bits.

    Args:
        report: an audit report, valid or not. Positive controls are left out.

    Returns:
        Rows in order of tier; the figures are None where any canary of the tier could not be scored.
    """
    rows = sorted((row for row in report.canaries if row.role != "positive_control"), key=tier_of)
    return [_pool_tier(tier, list(members)) for tier, members in itertools.groupby(rows, key=tier_of)]


def tier_of(row: CanaryRow) -> int:
    """The tier that a row is drawn in: 0 for every control."""
    return CONTROLS_TIER if row.role == "control" else row.tier


def _pool_tier(tier: int, rows: Sequence[CanaryRow]) -> PooledTier:
    seen = [row.num_seen for row in rows if row.num_seen is not None]
    bits = sorted(row.exposure.bits for row in rows if row.exposure.bits is not None)
    is_complete = len(bits) == len(rows)
    low, high = _median_interval(bits) if is_complete else (None, None)
    return PooledTier(
        tier=tier,
        n=len(rows),
        mean_bits=math.fsum(bits) / len(bits) if is_complete else None,
        low_bits=low,
        high_bits=high,
        mean_num_seen=sum(seen) / len(seen) if seen else None,
    )


def _median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Narrowest pair of order statistics that holds the median at 95%, the range below six values.

    The same as `memguard.metrics.intervals.median_interval` (a test compares them), which this package may not import.
    """
    n, outside, place = len(ordered), 1, 0
    while place + 1 <= (n - 1) // 2:
        wider = outside + math.comb(n, place + 1)
        if 1 - 2 * wider / 2**n < CONFIDENCE:
            break
        outside, place = wider, place + 1
    return ordered[place], ordered[n - 1 - place]


def expected_control_bits(report: AuditReport) -> float | None:
    """Mean exposure of a secret the model never saw, over the controls of all formats; bits, None without controls."""
    num_controls = sum(test.num_controls for test in report.controls)
    if not num_controls:
        return None
    return sum(test.expected_exposure_bits * test.num_controls for test in report.controls) / num_controls


def own_points(report: AuditReport) -> list[TrendPoint]:
    """This audit as points of a trend; none where its step is not known."""
    step, epoch = report.subject.global_step, report.subject.epoch
    if step is None:
        return []
    return [
        TrendPoint(
            global_step=step,
            epoch=epoch,
            tier=row.tier,
            n=row.n,
            mean_bits=row.mean_bits,
            low_bits=row.low_bits,
            high_bits=row.high_bits,
            steps_between=report.cadence.steps_between if report.cadence is not None else None,
            overhead_share=report.cadence.overhead_share if report.cadence is not None else None,
        )
        for row in pool_tiers(report)
    ]


def trend_points(report: AuditReport) -> list[TrendPoint]:
    """Earlier audits and this one, by step then tier; of two with one step and tier the later stands."""
    points = {(point.global_step, point.tier): point for point in [*report.trend, *own_points(report)]}
    return [points[key] for key in sorted(points)]
