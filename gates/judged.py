"""Which canaries the rules judge, and whether a row's figures can be used at all. NaN and missing are never usable."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from memguard.audit.report import RANK_METHODS, AuditReport, CanaryRow
from memguard.errors import EvidenceError
from memguard.gates.policy import Policy, Selection
from memguard.gates.wording import quoted
from memguard.metrics.family import FamilyGroup


def judged_canaries(report: AuditReport, policy: Policy) -> list[CanaryRow]:
    """Planted canaries repeated up to `judged_tiers.max_repetitions`; no control and no positive control."""
    most = policy.judged_tiers.max_repetitions
    return [row for row in report.canaries if row.role == "canary" and row.repetitions <= most]


def selected_canaries(report: AuditReport, policy: Policy, select: Selection | None) -> list[CanaryRow]:
    """The canaries that one rule looks at: the judged ones, or those it selects. A tier it names is judged however high.

    Raises:
        EvidenceError: a format, tier or canary that the report does not have, or nothing in common between them.
    """
    if select is None:
        return judged_canaries(report, policy)
    rows = [row for row in report.canaries if row.role == "canary"]
    if select.tiers is None and select.canaries is None:
        rows = judged_canaries(report, policy)
    asked: list[tuple[str, Sequence[str | int] | None, str]] = [
        ("format", select.formats, "format"),
        ("tier", select.tiers, "repetitions"),
        ("canary", select.canaries, "id"),
    ]
    for what, wanted, key in asked:
        if wanted is None:
            continue
        known = {getattr(row, key) for row in report.canaries if row.role == "canary"}
        lost = [str(one) for one in wanted if one not in known]
        if lost:
            raise EvidenceError(f"the rule selects the {what} {quoted(lost)}, which no canary of the report has")
        rows = [row for row in rows if getattr(row, key) in wanted]
    if not rows:
        raise EvidenceError("the rule selects formats, tiers and canaries that no canary has together")
    if report.ledger.found and not any(row.num_seen for row in rows):
        raise EvidenceError("none of the canaries that the rule selects reached the loss")
    return rows


def ruled_canaries(report: AuditReport, policy: Policy) -> list[CanaryRow]:
    """Every canary that a rule looks at: the judged ones, and those of higher tiers that rules select."""
    ids = {row.id for row in judged_canaries(report, policy)}
    for rule in policy.rules:
        with contextlib.suppress(EvidenceError):  # said by the rule itself
            ids |= {row.id for row in selected_canaries(report, policy, rule.select)}
    return [row for row in report.canaries if row.role == "canary" and row.id in ids]


def finite(*values: float | None) -> list[float]:
    """The values; an empty list when one of them is missing or not finite."""
    found = [float(value) for value in values if value is not None and math.isfinite(value)]
    return found if len(found) == len(values) else []


def is_scored(row: CanaryRow) -> bool:
    """Whether every figure that a rule may use is there, finite, and agrees with the others."""
    one = row.exposure
    if one.method == "failed" or not finite(row.log_prob, one.bits, one.low_bits, one.high_bits, one.p_value):
        return False
    bits, low, high, p_value = finite(one.bits, one.low_bits, one.high_bits, one.p_value)
    low_rank, high_rank = row.rank_low, row.rank_high
    if not (isinstance(low_rank, int) and isinstance(high_rank, int) and 1 <= low_rank <= high_rank):
        return False
    if not (low <= bits <= high and 0.0 < p_value <= 1.0):
        return False
    return _is_count(row.num_references_above, row.num_references) and _is_count(row.num_non_members_above, row.num_non_members)


def _is_count(above: int, size: int) -> bool:
    return size >= 1 and 0 <= above <= size


def sampled_bits(row: CanaryRow) -> float:
    """log2(N + 1) - log2(b + 1): sampled exposure, one estimator and one cap whatever else is known; bits."""
    return math.log2(row.num_references + 1) - math.log2(row.num_references_above + 1)


def family_groups(report: AuditReport, judged: Sequence[CanaryRow]) -> list[FamilyGroup]:
    """The judged canaries as one family a format, in the report's order.

    Raises:
        EvidenceError: no judged canary, one without finite figures, or rows that were not ranked alike.
    """
    unscored = [row.id for row in judged if not is_scored(row)]
    if unscored:
        raise EvidenceError(f"{quoted(unscored)} have no finite score")
    if not judged:
        raise EvidenceError("no canary is judged")
    spaces = {one.name: one.ranked_space_size - (one.num_planted - 1) for one in report.formats}
    shared = {one.name: one.shared_prefix for one in report.formats}
    groups = []
    for name in dict.fromkeys(row.format for row in judged):
        rows = [row for row in judged if row.format == name]
        sizes = {row.num_non_members for row in rows}
        if len(sizes) != 1:
            raise EvidenceError(
                f"the canaries of the format {quoted([name])} were ranked among different numbers of non-members"
            )
        if spaces.get(name, 0) < len(rows):
            raise EvidenceError(f"the size of the secret space of the format {quoted([name])} is missing or too small")
        groups.append(_group(rows, sizes.pop(), spaces[name], shared[name]))
    return groups


def _group(rows: Sequence[CanaryRow], num_non_members: int, space: int, shared: bool) -> FamilyGroup:
    return FamilyGroup(
        num_above=np.array([row.num_non_members_above for row in rows], dtype=np.int64),
        num_non_members=num_non_members,
        shared=shared,
        p_values=np.array([row.exposure.p_value for row in rows], dtype=np.float64),
        rank_high=[row.rank_high or space for row in rows],
        secret_space_size=space,
        is_certified=np.array([row.exposure.method in RANK_METHODS for row in rows]),
    )
