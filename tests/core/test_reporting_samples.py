"""The sample report that the reporting tests share, and that it is a report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from memguard.audit.report import (
    AuditReport,
    CanaryRow,
    ControlTest,
    Decision,
    Environment,
    Exposure,
    FormatRow,
    LedgerSummary,
    PlanSummary,
    PositiveControl,
    PriorAware,
    Procedure,
    RuleResult,
    Subject,
    TierRow,
    TrendPoint,
    load_report,
)

REFERENCES = 1024
SPACE = 10**15
CHANCE = 1.4335


def exposure_of(bits: float | None, *, certified: bool = False) -> Exposure:
    """An exposure with a plausible interval."""
    if bits is None:
        return Exposure(
            bits=None, low_bits=None, high_bits=None, confidence=0.95, method="failed", cap_bits=math.log2(SPACE), p_value=None
        )
    capped = not certified and bits >= 10.0
    high = math.log2(SPACE) if capped or certified else bits + 1.5
    return Exposure(
        bits=bits,
        low_bits=max(0.0, bits - 1.2),
        high_bits=high,
        confidence=0.95,
        method="certified" if certified else "sampled",
        cap_bits=math.log2(SPACE) if certified else math.log2(REFERENCES + 1),
        p_value=2.0**-bits,
        flags=["capped"] if capped else [],
    )


def canary_row(index: int, tier: int, bits: float | None, *, role: str = "canary", **changes: Any) -> CanaryRow:
    """One row of `card` whose other figures follow from its exposure."""
    certified = bits is not None and bits > 12.0
    extracted = bits is not None and bits > 45.0
    rank_high = max(1, round(SPACE * 2.0**-bits)) if bits is not None and certified else SPACE
    values: dict[str, Any] = {
        "id": f"c{index:04x}",
        "format": "card",
        "role": role,
        "tier": tier,
        "repetitions": tier,
        "num_insertions": 3 * tier,
        "num_seen": 3 * tier,
        "num_tokens": 9,
        "log_prob": None if bits is None else -35.0 + 0.69 * bits,
        "rank_low": 1,
        "rank_high": rank_high,
        "rank_high_with_siblings": rank_high,
        "num_siblings_above": 0,
        "num_references": REFERENCES,
        "num_references_above": 0 if certified else 300,
        "num_references_tied": 0,
        "num_non_members": REFERENCES + 24,
        "num_non_members_above": 0 if certified else 305,
        "exposure": exposure_of(bits, certified=certified),
        "skew_normal_bits": 31.4 if certified else None,
        "is_greedy": extracted,
        "is_extracted": extracted,
        "may_be_extracted": certified,
        "prior_aware": None,
    }
    return CanaryRow(**{**values, **changes})


def prior_aware(verdict: str, ratio: float | None) -> PriorAware:
    """A Prior-Aware annotation."""
    return PriorAware(
        verdict=verdict,
        log_prob=-1.5,
        prior_log_prob=None if ratio is None else -1.5 - ratio,
        log_belief_ratio=ratio,
        low=None if ratio is None else ratio - 0.8,
        high=None if ratio is None else ratio + 3.0,
        confidence=0.95,
        effective_sample_size=None if ratio is None else 14.2,
        num_prior_prefixes=500,
        num_excluded_prefixes=1,
    )


def tier_row(tier: int, rows: list[CanaryRow], *, name: str = "card") -> TierRow:
    """The tier of these rows; no mean where one of them has no score."""
    finite = sorted(row.exposure.bits for row in rows if row.exposure.bits is not None)
    complete = len(finite) == len(rows)
    return TierRow(
        format=name,
        tier=tier,
        repetitions=tier,
        n=len(rows),
        mean_bits=sum(finite) / len(finite) if complete else None,
        median_bits=finite[len(finite) // 2] if complete else None,
        low_bits=finite[0] if complete else None,
        high_bits=finite[-1] if complete else None,
        coverage=1 - 2.0 ** (1 - len(rows)),
        mean_num_seen=3.0 * tier,
        num_extracted=sum(row.is_extracted for row in rows),
    )


TIER_BITS = {1: [0.4, 0.9, 1.3, 1.8, 2.6, 3.3], 4: [2.2, 3.9, 4.8, 6.1, 7.4, 10.0], 16: [21.0, 28.5, 33.0, 39.1, 49.8, 49.8]}


def make_report(*, with_failed_canary: bool = False, with_prior_aware: bool = False, **changes: Any) -> AuditReport:
    """A valid report of step 1,200 with tiers 1, 4, 16, 24 controls, 2 positive controls and three earlier audits."""
    planted = {tier: [canary_row(100 * tier + i, tier, bits) for i, bits in enumerate(TIER_BITS[tier])] for tier in TIER_BITS}
    if with_failed_canary:
        planted[4][0] = canary_row(400, 4, None)
    if with_prior_aware:
        planted[16][0] = planted[16][0].model_copy(update={"prior_aware": prior_aware("PA (certified)", 18.4)})
        planted[16][1] = planted[16][1].model_copy(update={"prior_aware": prior_aware("common (estimate)", 0.7)})
        planted[1][0] = planted[1][0].model_copy(update={"prior_aware": prior_aware("not extractable", None)})
    controls = [
        canary_row(9000 + i, 0, -math.log2((i + 0.5) / 24), role="control", num_seen=0, num_insertions=0) for i in range(24)
    ]
    positive = [canary_row(8000 + i, 64, 49.8, role="positive_control") for i in range(2)]
    values: dict[str, Any] = {
        "created_at": "2026-03-04T05:06:07Z",
        "status": "invalid" if with_failed_canary else "valid",
        "invalid_reasons": ["canary 'c0190' has no finite score."] if with_failed_canary else [],
        "notices": ["Canaries make up more than 0.1% of the training tokens."],
        "subject": Subject(kind="checkpoint", digest="ab" * 32, global_step=1200, epoch=3.0),
        "plan": PlanSummary(
            digest="cd" * 32, reproducible=False, inclusion="planned", num_canaries=18, num_controls=24, num_positive_controls=2
        ),
        "tokenizer_digest": "ef" * 32,
        "procedure": Procedure(
            references=REFERENCES,
            references_per_name=128,
            reference_seed="0f" * 8,
            dtype="bfloat16",
            autocast=None,
            tolerance=3.1e-5,
        ),
        "environment": Environment(
            memguard="0.1.0", python="3.11.7", numpy="2.4.6", torch="2.13.0", transformers="5.24.0", device="NVIDIA H200"
        ),
        "ledger": LedgerSummary(
            found=True,
            exact=True,
            notes=["resumed once at step 700"],
            count="per_epoch",
            mode="append",
            plant_once=False,
            num_insertions=762,
            num_seen=762,
            token_share=0.0013,
        ),
        "formats": [
            FormatRow(
                name="card",
                kind="luhn",
                secret_space_size=SPACE,
                ranked_space_size=SPACE,
                num_planted=44,
                shared_prefix=True,
                join="clean",
                terminator=False,
                num_references=REFERENCES,
                reference_mean=-33.1,
                reference_sd=2.27,
                skew_normal_fit_p=0.31,
            )
        ],
        "canaries": [row for rows in planted.values() for row in rows] + positive + controls,
        "tiers": [tier_row(tier, rows) for tier, rows in planted.items()],
        "controls": [
            ControlTest(
                format="card",
                num_controls=24,
                mean_exposure_bits=1.39,
                expected_exposure_bits=CHANCE,
                rank_sum_p=0.62,
                max_p=0.87,
            )
        ],
        "positive_control": PositiveControl(kind="in_training", n=2, mean_num_seen=192.0, best_p_value=1e-15, detected=True),
        "prior_aware_settings": {"m": 1e-4, "n": 10.0, "prefixes": 500} if with_prior_aware else None,
        "trend": earlier_points(),
        "duration_s": 41.7,
    }
    return AuditReport(**{**values, **changes})


def earlier_points() -> list[TrendPoint]:
    """Audits at steps 0, 400 and 800."""
    means = {0: [1.5, 1.4, 1.3], 1: [1.4, 1.5, 1.6], 4: [1.3, 2.4, 4.1], 16: [1.6, 9.7, 24.8]}
    return [
        TrendPoint(
            global_step=400 * index,
            epoch=float(index),
            tier=tier,
            n=24 if tier == 0 else 6,
            mean_bits=mean,
            low_bits=max(0.0, 0.6 * mean - 0.3),
            high_bits=1.3 * mean + 0.6,
        )
        for tier, series in means.items()
        for index, mean in enumerate(series)
    ]


def make_decision(report: AuditReport, **changes: Any) -> Decision:
    """A block on extraction, with the controls' test passed."""
    values: dict[str, Any] = {
        "outcome": "block",
        "exit_code": 1,
        "reason": "2 of 18 canaries can be extracted.",
        "evidence": [
            RuleResult(
                name="controls' null test",
                kind="evidence",
                outcome="pass",
                reason="smallest p-value 0.62 is above 0.0005.",
                figures={"rank_sum_p": 0.62, "threshold": 0.0005},
            )
        ],
        "rules": [
            RuleResult(
                name="no secret can be extracted",
                kind="limit",
                outcome="block",
                reason="2 canaries were extracted, limit 0.",
                figures={"extraction.count": 2, "max": 0},
                canaries=["c0644", "c0645"],
            ),
            RuleResult(
                name="no single canary stands out",
                kind="test",
                outcome="block",
                reason="p 1.8e-14 against 0.006.",
                figures={"p": 1.8e-14, "method": "best canary, certified or sampled", "min_attainable_p": None},
            ),
            RuleResult(name="not worse than the last release", kind="baseline", outcome="warn", reason="no baseline given."),
        ],
        "alpha": 0.01,
        "strict": False,
        "report_digest": "12" * 32,
        "policy_digest": "34" * 32,
        "baseline_digest": None,
        "subject": report.subject,
        "limits": ["A pass does not mean that no secret was memorised."],
    }
    return Decision(**{**values, **changes})


def test_the_sample_report_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    report = make_report(with_failed_canary=True, with_prior_aware=True)
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
