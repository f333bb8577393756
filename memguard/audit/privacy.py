"""From rows of a report and the coins of its plan to a bound of epsilon and to counterfactual memorisation.

Both need `inclusion: coin`. Failed scores make the section no evidence: nothing is left out to save it. A tier is a group of
its own: tier 1 bounds the epsilon of a record, another tier that of its copies, and tiers are never pooled. No torch.

Source: statistics specification, section 6; Steinke et al., arXiv 2305.08846; Zhang et al., arXiv 2112.12938.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from memguard.audit.report import CanaryRow
from memguard.audit.report_privacy import Counterfactual, Privacy, PrivacyScore
from memguard.errors import EvidenceError
from memguard.metrics.counterfactual import estimate_population_counterfactual
from memguard.metrics.privacy import PrivacyBound, audit_one_run, standardise_within

Inclusion = Literal["planned", "coin"]

CONFIDENCE = 0.95
NOT_RECORDS = (
    "Canaries were planted by position and did not enter as records before the sampler of a DP run: the bound may not be held "
    "against a stated epsilon."
)


def measure_privacy(
    rows: Sequence[CanaryRow],
    *,
    inclusion: Inclusion,
    coins: Mapping[str, bool],
    tiers: Mapping[str, int],
    stated_epsilon: float | None = None,
    delta: float = 0.0,
    significance: float = 0.05,
    enters_as_record: bool = False,
) -> Privacy | None:
    """Lower bound of the epsilon of one record, from the canaries of the lowest tier that had coins.

    Args:
        rows: every row of the report.
        inclusion: of the plan.
        coins: canary id -> True (in) or False (out), for every canary whose coin was thrown, and for no other.
        tiers: canary id -> copies that its coin put in or left out, also where it said out.
        stated_epsilon: the guarantee of one record to be tested, if there is one.
        delta: of that guarantee.
        significance: 1 - confidence.
        enters_as_record: canaries pass through the sampler of a DP run as records do.

    Returns:
        `Privacy`, or None where no coins were thrown. `num_guesses` is the largest even number up to half of the coins.

    Raises:
        EvidenceError: a canary with a coin has no row or no score, or a role that its coin contradicts.
        ValueError: a coin without a tier, or numbers out of range.

    Source: statistics specification, section 6.
    """
    thrown = _thrown(rows, inclusion, coins, tiers)
    if not thrown:
        return None
    repetitions = min(tiers[row.id] for row in thrown)
    members = [row for row in thrown if tiers[row.id] == repetitions]
    scores, is_calibrated = _scores(thrown, members)
    bound = audit_one_run(
        standardise_within(scores, [row.format for row in members]),
        np.array([coins[row.id] for row in members]),
        num_guesses=len(members) // 4 * 2,
        significance=significance,
        delta=delta,
        stated_epsilon=stated_epsilon,
        repetitions=repetitions,
    )
    score: PrivacyScore = (
        "log p - log p at step 0, standardised within format" if is_calibrated else "log p, standardised within format"
    )
    left_out = sorted({tiers[row.id] for row in thrown} - {repetitions})
    return Privacy(
        **{**dataclasses.asdict(bound), "flags": list(bound.flags)},
        score=score,
        is_comparable=enters_as_record,
        notes=_notes(bound, left_out, enters_as_record=enters_as_record),
    )


def measure_counterfactual(
    rows: Sequence[CanaryRow], *, inclusion: Inclusion, coins: Mapping[str, bool], tiers: Mapping[str, int]
) -> list[Counterfactual]:
    """What inclusion added to the log-probability of the average canary, in nats: one row a format and tier.

    Args:
        rows: every row of the report.
        inclusion: of the plan.
        coins: as for `measure_privacy`.
        tiers: as for `measure_privacy`.

    Returns:
        One `Counterfactual` a format and tier, in the order of the rows; figures are None, with the reason in `method`,
        where fewer than two canaries are on a side. Empty where no coins were thrown.

    Raises:
        EvidenceError: a canary with a coin has no row or no score, or a role that its coin contradicts.
        ValueError: a coin without a tier.

    Source: Zhang et al., arXiv 2112.12938, section 2, averaged over canaries.
    """
    thrown = _thrown(rows, inclusion, coins, tiers)
    groups: dict[tuple[str, int], list[CanaryRow]] = {}
    for row in thrown:
        groups.setdefault((row.format, tiers[row.id]), []).append(row)
    return [_counterfactual(key, members, coins, thrown) for key, members in groups.items()]


def _counterfactual(
    key: tuple[str, int], members: Sequence[CanaryRow], coins: Mapping[str, bool], thrown: Sequence[CanaryRow]
) -> Counterfactual:
    is_in = np.array([coins[row.id] for row in members])
    n_in, n_out = int(is_in.sum()), int((~is_in).sum())
    if min(n_in, n_out) < 2:
        method = "undefined: fewer than two canaries on a side"
        return Counterfactual(
            format=key[0],
            tier=key[1],
            n_in=n_in,
            n_out=n_out,
            difference=None,
            low=None,
            high=None,
            confidence=CONFIDENCE,
            p_value=None,
            min_attainable_p=None,
            method=method,
        )
    scores, is_calibrated = _scores(thrown, members)
    estimate = estimate_population_counterfactual(scores, is_in, confidence=CONFIDENCE)
    has_interval = "no spread" not in estimate.flags
    return Counterfactual(
        format=key[0],
        tier=key[1],
        n_in=n_in,
        n_out=n_out,
        difference=estimate.value,
        low=estimate.low if has_interval else None,
        high=estimate.high if has_interval else None,
        confidence=estimate.confidence,
        p_value=estimate.p_value,
        min_attainable_p=estimate.min_attainable_p,
        method=("log p less log p at step 0; " if is_calibrated else "log p; ") + estimate.method,
    )


def _thrown(
    rows: Sequence[CanaryRow], inclusion: Inclusion, coins: Mapping[str, bool], tiers: Mapping[str, int]
) -> list[CanaryRow]:
    """Rows of the canaries whose coin was thrown, in the order of the report; raises once with all that is wrong."""
    if inclusion == "planned":
        return []
    without_tier = [canary_id for canary_id in coins if tiers.get(canary_id, 0) < 1]
    if without_tier:
        raise ValueError(f"tiers must give at least 1 for every canary with a coin, got none for {_named(without_tier)}.")
    thrown = [row for row in rows if row.id in coins]
    number = Counter(row.id for row in thrown)
    has_start = any(row.start_log_prob is not None for row in thrown)
    findings = {
        "no row": [canary_id for canary_id in coins if not number[canary_id]],
        "more than one row": [canary_id for canary_id in coins if number[canary_id] > 1],
        "no score": [row.id for row in thrown if _failed(row.log_prob)],
        "no score at step 0, which others have": [row.id for row in thrown if has_start and _failed(row.start_log_prob)],
        "a role that its coin contradicts": [
            row.id for row in thrown if row.role != ("canary" if coins[row.id] else "control")
        ],
    }
    wrong = [f"{what}: {_named(ids)}" for what, ids in findings.items() if ids]
    if wrong:
        raise EvidenceError(
            f"every canary with a coin must have one row with its scores and the role its coin gave, got {'; '.join(wrong)}. "
            "Without them neither epsilon nor counterfactual memorisation can be measured."
        )
    return thrown


def _failed(log_prob: float | None) -> bool:
    return log_prob is None or not math.isfinite(log_prob)


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return "canary " + ", ".join(f"'{one}'" for one in ids[:5]) + more


def _scores(thrown: Sequence[CanaryRow], members: Sequence[CanaryRow]) -> tuple[list[float], bool]:
    """Log-probabilities of `members`, less those at step 0 where they were measured; nats. `_thrown` let none be missing."""
    is_calibrated = thrown[0].start_log_prob is not None
    return [(row.log_prob or 0.0) - (row.start_log_prob or 0.0) for row in members], is_calibrated


def _notes(bound: PrivacyBound, left_out: Sequence[int], *, enters_as_record: bool) -> list[str]:
    notes = [] if enters_as_record else [NOT_RECORDS]
    if bound.repetitions > 1:
        notes.append(f"Each coin moved {bound.repetitions} copies: one record is bounded by group privacy.")
    if left_out:
        notes.append(f"Canaries of tiers {', '.join(map(str, left_out))} are left out: tiers are never pooled.")
    if bound.num_guesses == 0:
        notes.append(f"Fewer than four coins ({bound.num_coins}): nothing can be guessed.")
    if bound.is_testable is False:
        needed = f"{bound.num_guesses_needed} are needed" if bound.num_guesses_needed else "no number is enough at this delta"
        if bound.repetitions > 1:
            needed = f"canaries of tier 1 would show {bound.repetitions} times as much"
        notes.append(
            f"The stated epsilon {bound.stated_epsilon:g} cannot be tested with {bound.num_guesses} guesses, which show at "
            f"most {bound.cap:.2f}: {needed}."
        )
    return notes
