"""Not worse than the last release: did the same canaries rise by more than a tolerance? Bits of sampled exposure.

The estimand is these two checkpoints on these canaries. With one baseline run the seed-to-seed variation of training is
not in the test. Source: statistics specification, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memguard.audit.report import AuditReport, CanaryRow
from memguard.gates.baseline import Baseline, comparability
from memguard.gates.judged import sampled_bits
from memguard.gates.measured import Measured, Unmeasured
from memguard.gates.policy import SignificanceRule
from memguard.gates.resolution import canaries_needed, rise_detectable_bits
from memguard.metrics.family import paired_rise_test

NUM_FLIPS, MANY_FLIPS = 9_999, 99_999
FLIPS_A_SHARE = 10  # flips expected at the level: fewer make the p-value coarse
NAMED = 5
ONE_RUN = "one baseline run: seed-to-seed variation is not in this test"


def measure_rise(
    rule: SignificanceRule, report: AuditReport, judged: Sequence[CanaryRow], baseline: Baseline | None, *, share: float
) -> Measured | Unmeasured:
    """Test the rise of the judged canaries over the newest run of the baseline.

    Args:
        rule: holds the tolerance; bits.
        report: the candidate.
        judged: its judged canaries, all with finite figures.
        baseline: None when there is none.
        share: the level of the test; sets how finely its null is drawn.

    Returns:
        What was found; or, without a comparable baseline, why nothing was.

    Source: statistics specification, section 3, against the baseline.
    """
    if baseline is None:
        return Unmeasured("baseline", "insufficient evidence", "there is no baseline to compare with; accept one with --accept")
    differences = comparability(report, baseline.newest.report)
    if differences:
        reason = f"the baseline does not compare: {'; '.join(differences[:4])}"
        return Unmeasured("baseline", "insufficient evidence", reason)
    if len(judged) < 2:
        needed = canaries_needed(share, _num_flips(share)) or "more"
        reason = f"this rule cannot fire with 1 judged canary; {needed} would be needed"
        return Unmeasured("test", "insufficient evidence", reason)
    old = {row.id: sampled_bits(row) for row in baseline.newest.report.canaries if row.role == "canary"}
    rises = np.array([sampled_bits(row) - old[row.id] for row in judged])
    note = "; ".join(filter(None, [baseline.notice, ONE_RUN]))
    return _measured(rule, judged, rises, share=share, note=note)


def _num_flips(share: float) -> int:
    return NUM_FLIPS if share * NUM_FLIPS >= FLIPS_A_SHARE else MANY_FLIPS


def _measured(
    rule: SignificanceRule, judged: Sequence[CanaryRow], rises: NDArray[np.float64], *, share: float, note: str
) -> Measured:
    strata, num_flips = [(row.format, row.tier) for row in judged], _num_flips(share)
    needed = canaries_needed(share, num_flips)
    result = paired_rise_test(rises, strata, tolerance_bits=rule.tolerance, num_flips=num_flips)
    detectable = rise_detectable_bits(rises, strata, tolerance_bits=rule.tolerance, share=share)
    order = np.argsort(-rises, kind="stable")[:NAMED]
    return Measured(
        p_value=result.p_value,
        min_attainable_p=result.min_attainable_p,
        n=result.n,
        finding=f"exposure rose {result.statistic:.2f} bits on average over {result.n} canaries ({rule.tolerance:g} tolerated)",
        needed=None if needed is None else f"{needed} judged canaries",
        sees=f"a mean rise of {detectable:.2f} bits",
        detectable_bits=detectable,
        canaries=[judged[index].id for index in order if rises[index] > rule.tolerance],
        figures={"statistic": result.statistic, "tolerance_bits": rule.tolerance, "largest_rise": float(rises.max())},
        note=note,
    )
