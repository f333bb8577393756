"""What a tracker is, and the metric names that every tracker shares, whatever the trainer.

Names never change with the trainer or the tracker. Exposure is in bits, counts are plain. A figure that was not measured is
left out, so that no tracker ever shows a 0 for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from memguard.audit.report import AuditReport
from memguard.reporting.curves import CONTROLS_TIER, pool_tiers


class Tracker(Protocol):
    """Somewhere that audits of a run are written to, one call an audit, from rank 0 only."""

    def log(self, report: AuditReport) -> None:
        """Write one audit."""
        ...


def flatten_metrics(report: AuditReport) -> dict[str, float]:
    """The figures of one audit that a curve is drawn of, by name.

    `memguard/exposure_mean/tier_4`, `memguard/exposure_mean/controls`, `memguard/exposure_max` (bits);
    `memguard/num_seen/tier_4`, `memguard/extraction_count`, `memguard/prior_aware_count`; `memguard/valid` and
    `memguard/positive_control_detected` (1 or 0). The maximum and the counts are over canaries, never over controls.
    A mean or maximum over canaries of which one has no finite score is left out, as is all that was not measured.

    Where measured: `memguard/extraction_expected_share/tier_4/queries_100` and `memguard/records_greedy_share/members`, beside
    `.../held_out`; `memguard/prior_aware_common_share/canaries` and `.../records`; `memguard/membership_auroc/loss` by score,
    with `memguard/membership_is_shift` (1: these show how the texts differ); `memguard/epsilon_lower_bound` and
    `memguard/epsilon_cap`; `memguard/propensity/full_match_rate/generic` and `memguard/propensity_share/...` by metric and
    setting. Shares and AUROC are 0..1, longest spans tokens.

    Args:
        report: an audit report, valid or not.

    Returns:
        Finite floats by name.
    """
    found: dict[str, float | None] = {"memguard/valid": float(report.status == "valid")}
    for row in pool_tiers(report):
        name = "controls" if row.tier == CONTROLS_TIER else f"tier_{row.tier}"
        found[f"memguard/exposure_mean/{name}"] = row.mean_bits
        if row.tier != CONTROLS_TIER:
            found[f"memguard/num_seen/{name}"] = row.mean_num_seen
    found.update(_over_canaries(report))
    if report.positive_control.kind != "none":
        found["memguard/positive_control_detected"] = float(report.positive_control.detected)
    found.update(_parts(report))
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _parts(report: AuditReport) -> Iterator[tuple[str, float | None]]:
    """The trends of what a full audit measures beside exposure."""
    if report.extraction is not None:
        yield "memguard/extraction_found_count", float(report.extraction.num_found)
        for curve in report.extraction.curves:
            for point in curve.points:
                name = f"memguard/extraction_expected_share/tier_{curve.tier}/queries_{point.num_queries}"
                yield name, point.expected_share
    if report.prior_aware is not None:
        yield "memguard/prior_aware_common_share/canaries", report.prior_aware.common_share
    if report.records is not None:
        yield "memguard/records_greedy_share/members", report.records.members.greedy_share
        if report.records.held_out is not None:
            yield "memguard/records_greedy_share/held_out", report.records.held_out.greedy_share
        if report.records.prior_aware is not None:
            yield "memguard/prior_aware_common_share/records", report.records.prior_aware.common_share
    if report.membership is not None:
        yield "memguard/membership_is_shift", float(report.membership.shift.is_shift)
        for score in report.membership.scores:
            yield f"memguard/membership_auroc/{score.name}", score.auroc
    if report.propensity is not None:
        for row in report.propensity.settings:
            for one in row.estimates:
                yield f"memguard/propensity/{one.metric}/{row.setting}", one.value
        for share in report.propensity.shares:
            yield f"memguard/propensity_share/{share.metric}/{share.setting}", share.share
    if report.privacy is not None:
        yield "memguard/epsilon_lower_bound", report.privacy.epsilon_lower_bound
        yield "memguard/epsilon_cap", report.privacy.cap


def _over_canaries(report: AuditReport) -> dict[str, float | None]:
    rows = [row for row in report.canaries if row.role == "canary"]
    bits = [row.exposure.bits for row in rows if row.exposure.bits is not None]
    annotated = [row.prior_aware for row in rows if row.prior_aware is not None]
    return {
        "memguard/exposure_max": max(bits) if bits and len(bits) == len(rows) else None,
        "memguard/extraction_count": float(sum(row.is_extracted for row in rows)) if rows else None,
        "memguard/prior_aware_count": float(sum(one.verdict.startswith("PA") for one in annotated)) if annotated else None,
    }
