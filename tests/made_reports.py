"""Audit reports made at score level: log-probabilities drawn by the thousand, rows filled by the real estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memguard.audit.report import (
    AuditReport,
    CanaryRow,
    ControlTest,
    Environment,
    Exposure,
    FormatRow,
    LedgerSummary,
    PlanSummary,
    PositiveControl,
    Procedure,
    StartTest,
    Subject,
    TierRow,
)
from memguard.metrics.exposure import estimate_exposure, sampled_null_mean_bits
from memguard.metrics.family import FamilyGroup, controls_rank_sum_test, max_test
from memguard.metrics.intervals import median_interval

SD_NATS = 2.0
TIERS = {1: 12, 4: 12, 16: 4}


@dataclass(frozen=True)
class Format:
    """One format of the made-up plan."""

    name: str
    space: int
    shared: bool
    num_references: int


CARD = Format("card", 10**15, True, 512)
PIN = Format("pin", 10**9, False, 128)


def _score(rng: np.random.Generator, one: Format, size: int | tuple[int, int]) -> np.ndarray:
    # Mean chosen so that the probabilities of the whole space sum to 1 on average: E exp(l) = 1 / space.
    return rng.normal(-math.log(one.space) - SD_NATS**2 / 2, SD_NATS, size)


def _row(
    one: Format, entry: tuple[str, str, int], log_prob: float, references: np.ndarray, controls: np.ndarray, space: int
) -> CanaryRow:
    name, role, repetitions = entry
    estimate = estimate_exposure(log_prob, references, secret_space_size=space)
    ranked = role == "canary" and one.shared
    return CanaryRow(
        id=name,
        format=one.name,
        role=role,
        tier=repetitions,
        repetitions=repetitions,
        num_insertions=repetitions,
        num_seen=repetitions,
        num_tokens=9,
        log_prob=log_prob,
        rank_low=estimate.rank_low,
        rank_high=estimate.rank_high,
        rank_high_with_siblings=estimate.rank_high,
        num_siblings_above=0,
        num_references=references.size,
        num_references_above=estimate.num_above,
        num_references_tied=estimate.num_tied,
        num_non_members=references.size + (controls.size if ranked else 0),
        num_non_members_above=estimate.num_above + (int((controls >= log_prob).sum()) if ranked else 0),
        exposure=Exposure(
            bits=estimate.bits,
            low_bits=estimate.low_bits,
            high_bits=estimate.high_bits,
            confidence=0.95,
            method=estimate.method,
            cap_bits=estimate.cap_bits,
            p_value=estimate.p_value,
        ),
        is_greedy=False,
        is_extracted=estimate.rank_high == 1,
        # The made-up audit searched a little: an unbeaten canary below 1e-3 is known not to be first.
        may_be_extracted=estimate.rank_low == 1 and log_prob > math.log(1e-3),
    )


def _entries(one: Format, tiers: Mapping[int, int], num_controls: int, num_positive: int) -> list[tuple[str, str, int]]:
    canaries = [(f"{one.name}-{r}x-{i}", "canary", r) for r, number in tiers.items() for i in range(number)]
    controls = [(f"{one.name}-control-{i}", "control", 0) for i in range(num_controls)]
    return canaries + controls + [(f"{one.name}-positive-{i}", "positive_control", 64) for i in range(num_positive)]


def _rows(
    rng: np.random.Generator, one: Format, entries: Sequence[tuple[str, str, int]], memorised: Mapping[str, float], shift: float
) -> list[CanaryRow]:
    scores = _score(rng, one, len(entries))
    shape = one.num_references if one.shared else (len(entries), one.num_references)
    references = _score(rng, one, shape)  # type: ignore[arg-type]
    controls = np.array([score for score, entry in zip(scores, entries, strict=True) if entry[1] == "control"])
    rows, space = [], one.space - (len(entries) - 1)
    for index, entry in enumerate(entries):
        default = -1.0 if entry[1] == "positive_control" else float(scores[index]) + (shift if entry[1] == "canary" else 0.0)
        rows.append(
            _row(one, entry, memorised.get(entry[0], default), references if one.shared else references[index], controls, space)
        )
    return rows


def _format_row(one: Format, num_planted: int) -> FormatRow:
    return FormatRow(
        name=one.name,
        kind="digits",
        secret_space_size=one.space,
        ranked_space_size=one.space,
        num_planted=num_planted,
        shared_prefix=one.shared,
        join="clean",
        terminator=False,
        num_references=one.num_references,
        reference_mean=-20.0,
        reference_sd=SD_NATS,
    )


def _tier_rows(one: Format, rows: Sequence[CanaryRow]) -> list[TierRow]:
    found = []
    for tier in dict.fromkeys(row.tier for row in rows if row.role == "canary"):
        members = [row for row in rows if row.role == "canary" and row.tier == tier]
        bits = [row.exposure.bits for row in members]
        interval = median_interval(bits, confidence=0.95)
        found.append(
            TierRow(
                format=one.name,
                tier=tier,
                repetitions=members[0].repetitions,
                n=len(members),
                mean_bits=float(np.mean(bits)),
                median_bits=float(np.median(bits)),
                low_bits=interval.low,
                high_bits=interval.high,
                coverage=interval.confidence,
                mean_num_seen=float(tier),
                num_extracted=sum(row.is_extracted for row in members),
            )
        )
    return found


def _control_test(one: Format, rows: Sequence[CanaryRow], space: int) -> ControlTest:
    above = np.array([row.num_references_above for row in rows])
    p_values = np.array([row.exposure.p_value for row in rows])
    certified = np.array([row.exposure.method == "certified" for row in rows])
    group = FamilyGroup(
        above, one.num_references, one.shared, p_values, [row.rank_high or space for row in rows], space, certified
    )
    return ControlTest(
        format=one.name,
        num_controls=len(rows),
        mean_exposure_bits=float(np.mean([row.exposure.bits for row in rows])),
        expected_exposure_bits=sampled_null_mean_bits(one.num_references),
        rank_sum_p=controls_rank_sum_test(above, [0] * len(rows), num_references=one.num_references, shared=one.shared).p_value,
        max_p=max_test([group]).p_value,
    )


def build_report(
    seed: int = 0,
    *,
    formats: Sequence[Format] = (CARD, PIN),
    tiers: Mapping[int, int] = TIERS,
    num_controls: int = 16,
    num_positive: int = 1,
    memorised: Mapping[str, float] | None = None,
    shift: float = 0.0,
) -> AuditReport:
    """A report of a model that memorised nothing but what `memorised` (id: log_prob) and `shift` (nats, all canaries) say."""
    rng, before = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    rows: list[CanaryRow] = []
    format_rows, tier_rows, controls = [], [], []
    for one in formats:
        entries = _entries(one, tiers, num_controls, num_positive)
        mine = _rows(rng, one, entries, memorised or {}, shift)
        rows += mine
        format_rows.append(_format_row(one, len(entries)))
        tier_rows += _tier_rows(one, mine)
        if num_controls:
            controls.append(_control_test(one, [row for row in mine if row.role == "control"], one.space - (len(entries) - 1)))
    positive = [row.exposure.p_value for row in rows if row.role == "positive_control" and row.exposure.p_value is not None]
    return AuditReport(
        created_at="2026-01-01T00:00:00+00:00",
        status="valid",
        invalid_reasons=[],
        notices=[],
        subject=Subject(kind="checkpoint", digest=f"{seed:064x}", global_step=100, epoch=1.0),
        plan=PlanSummary(
            digest="f" * 64,
            reproducible=False,
            inclusion="planned",
            num_canaries=sum(row.role == "canary" for row in rows),
            num_controls=sum(row.role == "control" for row in rows),
            num_positive_controls=len(positive),
            design_digest="c" * 64,
        ),
        tokenizer_digest="e" * 64,
        procedure=Procedure(
            references=512, references_per_name=128, reference_seed="d" * 16, dtype="float32", autocast=None, tolerance=1e-4
        ),
        environment=Environment(memguard="0", python="3", numpy="2", torch="2", transformers="5", device="cpu"),
        ledger=LedgerSummary(
            found=True,
            exact=True,
            notes=[],
            count="per_epoch",
            mode="append",
            plant_once=False,
            num_insertions=sum(row.num_insertions for row in rows),
            num_seen=sum(row.num_seen or 0 for row in rows),
            token_share=0.001,
        ),
        formats=format_rows,
        canaries=rows,
        tiers=tier_rows,
        controls=controls,
        positive_control=PositiveControl(
            kind="in_training" if positive else "none",
            n=len(positive),
            mean_num_seen=64.0,
            best_p_value=min(positive, default=None),
            detected=bool(positive),
        ),
        # A valid test's p-value under the null, from draws of its own.
        start_test=StartTest(n=28, pooled_p=float(before.uniform()), max_p=float(before.uniform())),
        duration_s=1.0,
    )
