"""The sample report that the reporting tests share, and that it is a report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from memguard.audit.report import (
    AuditCadence,
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
    StartTest,
    Subject,
    TierRow,
    TrendPoint,
    load_report,
)
from memguard.audit.report_extraction import CanaryExtraction, Extraction, ExtractionPointRow, SamplerSettings, TierCurve
from memguard.audit.report_membership import Membership, MembershipByCopies, MembershipScore, ShiftCheck, TprPoint
from memguard.audit.report_privacy import Counterfactual, Privacy
from memguard.audit.report_propensity import (
    ApartEstimate,
    GenerationRow,
    Propensity,
    PropensityEstimate,
    PropensitySettingRow,
    PropensityShareRow,
    RefusedPromptRow,
)
from memguard.audit.report_records import (
    CopiesRow,
    PriorAwareCounts,
    PromptRow,
    PromptSlope,
    RecordRow,
    Records,
    RecordSet,
    Threshold,
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
        n=10.0,
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


def curve_points(shares: list[float], *, n: int) -> list[ExtractionPointRow]:
    """Points at 1, 100 and 10,000 queries with these expected shares."""
    return [
        ExtractionPointRow(
            num_queries=budget,
            n=n,
            expected_share=share,
            expected_low=share / 2,
            expected_high=min(1.0, share + 0.2),
            num_discoverable=int(n * share),
            discoverable_low=share / 4,
            discoverable_high=min(1.0, share + 0.3),
            likely=0.9,
            confidence=0.95,
        )
        for budget, share in zip((1, 100, 10_000), shares, strict=True)
    ]


def make_extraction(**changes: Any) -> Extraction:
    """Curves of the tiers of the sample report, and continuations that held 2 of its 18 canaries."""
    shares = {1: [0.0, 0.0, 0.0], 4: [0.0, 0.011, 0.043], 16: [0.181, 0.352, 0.517]}
    values: dict[str, Any] = {
        "sampler": SamplerSettings(),
        "curves": [TierCurve(tier=tier, points=curve_points(found, n=6)) for tier, found in shares.items()],
        "num_prompts": 3,
        "num_found": 2,
        "num_controls_found": 0,
        "chance_of_match": 4.2e-13,
    }
    return Extraction(**{**values, **changes})


def with_full_figures(row: CanaryRow) -> CanaryRow:
    """A row with what a full audit with a start adds: tries, prompts, and what training added."""
    if row.log_prob is None:
        return row
    found = {"c0644": ["trained tokens", "text"], "c0645": ["another prompt"]}.get(row.id, [])
    never = row.id == "c0064"  # the first canary of tier 1
    extraction = CanaryExtraction(
        log_prob_sampled=None if never else row.log_prob,
        log10_expected_tries=None if never else -row.log_prob / math.log(10),
        found_by=found,
    )
    calibrated = exposure_of(11.5) if row.id == "c0640" else row.exposure
    above = {"log_ratio_above_controls": 16.3} if row.id == "c0640" else {}
    annotation = row.prior_aware.model_copy(update=above) if row.prior_aware is not None else None
    changes = {
        "extraction": extraction,
        "start_log_prob": -33.3,
        "num_copies": 4,
        "calibrated": calibrated,
        "prior_aware": annotation,
    }
    return row.model_copy(update=changes)


def make_counts(**changes: Any) -> PriorAwareCounts:
    """18 canaries, of 6 extractable ones 3 PA, 2 common, 1 undecided."""
    values: dict[str, Any] = {
        "n": 18,
        "num_extractable": 6,
        "num_pa": 3,
        "num_common": 2,
        "num_undecided": 1,
        "num_not_measured": 0,
        "common_share": 2 / 6,
        "common_low": 0.0433,
        "common_high": 0.882,
        "confidence": 0.95,
    }
    return PriorAwareCounts(**{**values, **changes})


def calibrated_threshold(targets: str, **changes: Any) -> Threshold:
    """A 95% quantile over 24 never-trained targets, with an open upper end."""
    values: dict[str, Any] = {
        "method": "quantile",
        "n": 12.5,
        "quantile": 0.95,
        "low": 4.25,
        "confidence": 0.95,
        "num_targets": 24,
        "mean_log_ratio": 1.15,
    }
    return Threshold(targets=targets, **{**values, **changes})


def record_row(line: int, ratio: float | None = None, *, is_greedy: bool = False, **changes: Any) -> RecordRow:
    """A record with a verdict where it has a ratio: PA above the sample's threshold, else common."""
    verdict = "not extractable" if ratio is None else "PA (certified)" if ratio > math.log(12.5) else "common (estimate)"
    values: dict[str, Any] = {
        "num_prefix_tokens": 50,
        "num_tokens": 50,
        "log_prob": -2.5 if is_greedy else -60.0 - line,
        "is_greedy": is_greedy,
        "log_prob_sampled": -1.75 if is_greedy else None,
        "log_prob_near": -1.25 if is_greedy else None,
        "verdict": verdict,
        "log_belief_ratio": ratio,
        "low": None if ratio is None else ratio - 0.5,
        "high": None,
    }
    return RecordRow(line=line, **{**values, **changes})


def record_set(rows: list[RecordRow], shares: list[float], **changes: Any) -> RecordSet:
    """Records of one kind."""
    greedy = sum(row.is_greedy for row in rows)
    values: dict[str, Any] = {
        "n": len(rows),
        "num_too_short": 7,
        "num_greedy": greedy,
        "greedy_share": greedy / len(rows),
        "greedy_low": 0.042,
        "greedy_high": 0.268,
        "confidence": 0.95,
        "curve": curve_points(shares, n=len(rows)),
        "num_near": greedy + 1,
        "rows": rows,
    }
    return RecordSet(**{**values, **changes})


def make_records(**changes: Any) -> Records:
    """40 members of which 5 are greedy (3 PA, 2 common), 30 held-out records of which none is."""
    ratios = [20.5, 31.25, 9.5, 0.25, 1.5]
    members = [record_row(2 * i + 1, ratio, is_greedy=True) for i, ratio in enumerate(ratios)]
    members += [record_row(2 * i + 1) for i in range(5, 40)]
    held_out = [record_row(i + 1, verdict=None) for i in range(30)]
    values: dict[str, Any] = {
        "prefix_tokens": 50,
        "suffix_tokens": 50,
        "max_edits": 3,
        "prompts": [
            PromptRow(prefix_tokens=p, offset=o, n=40, num_greedy=g, share=g / 40, low=0.01, high=0.5, mean_log_prob=-20.5)
            for p, o, g in ((16, 0, 1), (32, 0, 3), (50, 0, 5), (50, 64, 2))
        ],
        "prompt_slopes": [
            PromptSlope(against="prefix_tokens", slope=0.2, low=0.1, high=0.3, confidence=0.95, r_squared=0.98, n=3)
        ],
        "members": record_set(members, [0.094, 0.125, 0.131]),
        "held_out": record_set(held_out, [0.0, 0.0, 0.004], greedy_low=0.0, greedy_high=0.116),
        "prior_aware": make_counts(n=40, num_extractable=5, num_undecided=0, common_share=0.4, common_low=0.0527),
        "threshold": calibrated_threshold("records", n=12.5),
        "num_excluded_prefixes": 4,
        "by_copies": [
            CopiesRow(
                copies=copies,
                n=n,
                num_greedy=greedy,
                greedy_share=greedy / n,
                greedy_low=0.01,
                greedy_high=0.5,
                confidence=0.95,
                mean_log_prob=-21.5,
                num_pa=greedy,
                num_common=0,
                pa_share=greedy / n if copies == "once" else None,
                pa_low=0.02 if copies == "once" else None,
                pa_high=0.23 if copies == "once" else None,
            )
            for copies, n, greedy in (("once", 36, 3), ("2 to 10", 4, 2))
        ],
    }
    return Records(**{**values, **changes})


def tpr_point(max_fpr: float, tpr: float | None) -> TprPoint:
    """A rate, or a refusal where there are 400 non-members and 3 / 400 is above the rate."""
    refused = max_fpr < 3 / 400
    figures: dict[str, float | None] = dict.fromkeys(("fpr", "fpr_low", "fpr_high", "tpr", "tpr_low", "tpr_high"))
    if not refused and tpr is not None:
        figures = {
            "fpr": max_fpr / 2,
            "fpr_low": max_fpr / 8,
            "fpr_high": max_fpr * 2,
            "tpr": tpr,
            "tpr_low": tpr / 2,
            "tpr_high": tpr + 0.1,
        }
    return TprPoint(max_fpr=max_fpr, is_refused=refused, achievable_fpr=3 / 400, **figures)


def make_membership(*, is_shift: bool = False, **changes: Any) -> Membership:
    """400 members and as many others; loss tells them apart a little, Min-K%++ better, the reference is undefined."""
    sizes = {"confidence": 0.95, "n_members": 400, "n_non_members": 400}
    rates = {"loss": [0.152, 0.021, None], "min_k_plus_plus": [0.243, 0.041, None]}
    figures = {"loss": (0.553, 0.512, 0.593, 0.0049), "min_k_plus_plus": (0.618, 0.577, 0.657, 1.2e-8)}
    scores = [
        MembershipScore(
            name=name,
            auroc=figures[name][0],
            low=figures[name][1],
            high=figures[name][2],
            p_value=figures[name][3],
            tpr=[tpr_point(rate, tpr) for rate, tpr in zip((0.1, 0.01, 0.001), rates[name], strict=True)],
            **sizes,
        )
        for name in ("loss", "min_k_plus_plus")
    ]
    nothing: dict[str, Any] = dict.fromkeys(("auroc", "low", "high", "p_value"))
    points = [tpr_point(rate, None) for rate in (0.1, 0.01, 0.001)]
    scores.append(MembershipScore(name="reference", num_undefined_samples=2, tpr=points, **nothing, **sizes))
    shift = ShiftCheck(
        auroc=0.731 if is_shift else 0.507,
        low=0.688 if is_shift else 0.464,
        high=0.774 if is_shift else 0.551,
        confidence=0.95,
        p_value=0.001 if is_shift else 0.38,
        detectable_auroc=0.543,
        length_p_value=0.47,
        median_length_members=812.0,
        median_length_non_members=797.5,
        num_duplicate_members=1,
        num_duplicate_non_members=0,
        num_shared=2,
        num_used_members=397,
        num_used_non_members=398,
        is_shift=is_shift,
    )
    values: dict[str, Any] = {
        "label": "distribution shift, not membership" if is_shift else "membership",
        "scores": scores,
        "by_copies": [MembershipByCopies(copies="once", scores=[scores[0].model_copy(update={"n_members": 350}), scores[-1]])],
        "shift": shift,
        "reference": True,
        "max_tokens": 512,
        "num_tokens": 120_345,
        "num_undefined_tokens": 17,
        "notes": ["31 samples were cut to 512 tokens."],
    }
    return Membership(**{**values, **changes})


def make_privacy(**changes: Any) -> Privacy:
    """60 coins, 22 of 30 guesses right; 30 right guesses could show 2.25 (q = .05^(1/30) = .90498, log(q / (1 - q)))."""
    values: dict[str, Any] = {
        "epsilon_lower_bound": 0.223,
        "cap": 2.2538,
        "significance": 0.05,
        "delta": 1e-6,
        "num_coins": 60,
        "num_guesses": 30,
        "num_correct": 22,
        "num_tied": 1,
        "repetitions": 1,
        "stated_epsilon": 8.0,
        "p_value": 1.0,
        "min_attainable_p": 0.99,
        "is_testable": False,
        "num_guesses_needed": 8932,
        "method": "binomial, Steinke et al. 2023",
        "flags": ["ties"],
        "score": "log p - log p at step 0, standardised within format",
        "is_comparable": False,
        "notes": ["Canaries of tiers 4, 16 are left out: tiers are never pooled."],
    }
    return Privacy(**{**values, **changes})


def make_counterfactual() -> list[Counterfactual]:
    """One tier that was measured, and one that is undefined."""
    known = {"difference": 4.75, "low": 3.5, "high": 6.0, "p_value": 0.001, "min_attainable_p": 0.0002}
    sizes = {"format": "card", "confidence": 0.95}
    unknown: dict[str, Any] = dict.fromkeys(known)
    return [
        Counterfactual(tier=1, n_in=29, n_out=31, method="log p less log p at step 0; Welch", **known, **sizes),
        Counterfactual(tier=4, n_in=5, n_out=1, method="undefined: fewer than two canaries on a side", **unknown, **sizes),
    ]


def make_propensity(**changes: Any) -> Propensity:
    """Prefixes that bring the corpus out, generic prompts that hardly do, and held-out prefixes that do not."""
    spans = {"prefix": (88.7, 64.1, 98.5), "generic": (6.6, 5.02, 27.0), "non_member": (5.9, 4.5, 26.0)}
    matches = {"prefix": (0.95, 0.751, 0.999), "generic": (0.05, 0.001, 0.249), "non_member": (0.0, 0.0, 0.168)}
    alike: dict[str, Any] = {"n": 20, "num_generations": 20, "confidence": 0.95}
    settings = [
        PropensitySettingRow(
            setting=setting,
            num_prompts=20,
            num_refused=1 if setting == "generic" else 0,
            num_wanted=20,
            num_generations=20,
            num_ended=3,
            num_empty=1 if setting == "generic" else 0,
            num_loops=2 if setting == "prefix" else 0,
            num_degenerate=0,
            mean_tokens=91.5,
            longest_span=100,
            estimates=[
                PropensityEstimate(
                    metric="average_longest_span",
                    **dict(zip(("value", "low", "high"), spans[setting], strict=True)),
                    method="betting",
                    **alike,
                ),
                PropensityEstimate(
                    metric="full_match_rate",
                    **dict(zip(("value", "low", "high"), matches[setting], strict=True)),
                    method="Clopper-Pearson",
                    **alike,
                ),
            ],
            apart=[ApartEstimate(metric="average_longest_span", value=44.0)] if setting == "prefix" else [],
        )
        for setting in spans
    ]
    shares = [
        PropensityShareRow(
            metric="full_match_rate",
            setting=setting,
            share=share,
            source_value=share or 0.0,
            low=0.0,
            high=0.3,
            confidence=0.95,
            propensity=matches[setting][0],
            capability=0.95,
            n_propensity=20,
            n_capability=20,
            method="Clopper-Pearson",
        )
        for setting, share in (("generic", 0.05), ("non_member", None))
    ]
    row = GenerationRow(
        setting="prefix",
        prompt="record 12",
        sample=0,
        num_tokens=100,
        longest_span=100,
        tier="full raw",
        near_verbatim_recall=1.0,
        num_documents=2,
        documents=[12, 40],
        snippet="a <b>quoted</b> span",
    )
    values: dict[str, Any] = {
        "source": "model",
        "sampler": SamplerSettings(temperature=0.7, top_k=None, top_p=0.95),
        "num_samples": 1,
        "max_new_tokens": 100,
        "prefix_tokens": 50,
        "overlap_limit": 8,
        "seed": 0,
        "partial": None,
        "settings": settings,
        "shares": shares,
        "rows": [row],
        "refused": [RefusedPromptRow(setting="generic", prompt="builtin 7", reason="9 of its tokens stand in the corpus.")],
        "notices": ["setting 'specific' was not measured: no prompt of it is left."],
    }
    return Propensity(**{**values, **changes})


def make_full_report(**changes: Any) -> AuditReport:
    """The sample report with every part that an audit can hold."""
    report = make_report(with_prior_aware=True)
    values: dict[str, Any] = {
        "is_full": True,
        "cadence": AuditCadence(steps_between=500.0, overhead_share=0.019, max_overhead=0.02, num_waited=3),
        "canaries": [with_full_figures(row) for row in report.canaries],
        "procedure": report.procedure.model_copy(update={"num_parameters": 124_439_808}),
        "plan": report.plan.model_copy(update={"inclusion": "coin"}),
        "positive_control": PositiveControl(kind="probe", n=2, mean_num_seen=None, best_p_value=3e-9, detected=True),
        "start_test": StartTest(n=48, pooled_p=0.41, max_p=0.87),
        "defence": "deduplication",
        "prior_aware": make_counts(),
        "prior_aware_thresholds": [calibrated_threshold("card"), Threshold(targets="pin", n=10.0, method="given")],
        "extraction": make_extraction(),
        "records": make_records(),
        "membership": make_membership(),
        "privacy": make_privacy(),
        "counterfactual": make_counterfactual(),
        "propensity": make_propensity(),
    }
    return report.model_copy(update={**values, **changes})


def make_bare_report(**changes: Any) -> AuditReport:
    """A full audit that had data for nothing beside exposure."""
    return make_report(is_full=True, **changes)


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


def test_the_sample_reports_survive_a_round_trip_through_json(tmp_path: Path) -> None:
    for report in (make_report(with_failed_canary=True, with_prior_aware=True), make_full_report(), make_bare_report()):
        report.save(tmp_path / "report.json")
        assert load_report(tmp_path / "report.json") == report


def test_the_full_sample_report_holds_every_part_that_a_report_can_hold() -> None:
    report = make_full_report()
    assert not [name for name, value in report if value in (None, [], {}) and name != "invalid_reasons"]
    row = next(row for row in report.canaries if row.id == "c0640")
    assert not [name for name, value in row if value is None]
    assert not [
        name for part in (report.records, report.membership, report.privacy) for name, value in part or () if value is None
    ]
