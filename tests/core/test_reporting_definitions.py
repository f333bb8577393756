"""Every figure that a report can hold has a definition with its unit on the page."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from memguard.audit.report import AuditCadence, CanaryRow, Exposure, PositiveControl, PriorAware, StartTest
from memguard.audit.report_extraction import CanaryExtraction, Extraction, ExtractionPointRow
from memguard.audit.report_membership import Membership, MembershipByCopies, MembershipScore, ShiftCheck, TprPoint
from memguard.audit.report_privacy import Counterfactual, Privacy
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
from memguard.reporting.definitions import DEFINITIONS

# Fields that say by their own name what they are: identities, sizes, settings, ends of intervals, sentences.
PLAIN = {
    "id", "format", "role", "tier", "repetitions", "line", "n", "num_queries", "num_tokens", "num_prefix_tokens", "confidence",
    "low", "high", "method", "flags", "notes", "sampler", "curves", "curve", "rows", "n_members", "n_non_members", "n_in",
    "n_out", "prefix_tokens", "suffix_tokens", "max_edits", "max_tokens", "num_too_short", "reference", "name", "targets",
    "quantile", "num_targets", "num_not_measured", "kind", "detected", "significance", "delta",
}  # fmt: skip
TERMS: dict[type[BaseModel], dict[str, str]] = {
    AuditCadence: dict.fromkeys(AuditCadence.model_fields, "Audit overhead"),
    Exposure: dict.fromkeys(("bits", "cap_bits", "p_value"), "Sampled exposure")
    | dict.fromkeys(("low_bits", "high_bits"), "Interval of an exposure"),
    PriorAware: {
        "verdict": "Prior-Aware verdict",
        "log_prob": "log-probability",
        "log_ratio_above_controls": "log ratio above controls",
        "effective_sample_size": "Effective sample size (ESS)",
        "n": "Belief-ratio threshold n",
    }
    | dict.fromkeys(("prior_log_prob", "prior_log_prob_low"), "Prior-Aware verdict")
    | dict.fromkeys(("log_belief_ratio", "num_open_prefixes"), "log belief ratio")
    | dict.fromkeys(("num_prior_prefixes", "num_excluded_prefixes"), "Effective sample size (ESS)"),
    CanaryRow: dict.fromkeys(("num_insertions", "num_seen"), "Seen")
    | dict.fromkeys(("log_prob", "start_log_prob"), "log-probability")
    | dict.fromkeys(("rank_low", "rank_high", "rank_high_with_siblings", "num_siblings_above"), "Rank")
    | dict.fromkeys(("num_references", "num_references_above", "exposure"), "Sampled exposure")
    | {
        "num_copies": "Copies of a record",
        "num_references_tied": "Interval of an exposure",
        "skew_normal_bits": "Extrapolated exposure",
    }
    | dict.fromkeys(("num_non_members", "num_non_members_above"), "Controls' null test")
    | dict.fromkeys(("is_greedy", "is_extracted", "may_be_extracted"), "Extracted")
    | {"prior_aware": "Prior-Aware verdict", "calibrated": "Calibrated exposure", "extraction": "Expected tries"},
    StartTest: dict.fromkeys(("pooled_p", "max_p"), "Before training"),
    PositiveControl: {"mean_num_seen": "Positive control", "best_p_value": "Probe"},
    CanaryExtraction: dict.fromkeys(("log_prob_sampled", "log10_expected_tries"), "Expected tries") | {"found_by": "Found by"},
    ExtractionPointRow: dict.fromkeys(("expected_share", "expected_low", "expected_high"), "Expected share")
    | dict.fromkeys(("num_discoverable", "discoverable_low", "discoverable_high", "likely"), "Discoverable"),
    Extraction: dict.fromkeys(("num_prompts", "num_found", "num_controls_found", "chance_of_match"), "Found by"),
    Threshold: {"n": "Belief-ratio threshold n", "mean_log_ratio": "log ratio above controls"},
    PriorAwareCounts: {"num_extractable": "Extractable", "num_undecided": "Common share", "num_pa": "Prior-Aware verdict"}
    | dict.fromkeys(("num_common", "common_share", "common_low", "common_high"), "Common share"),
    RecordRow: {"log_prob": "log-probability", "is_greedy": "Greedy share", "log_prob_sampled": "Expected tries"}
    | {"log_prob_near": "Near-verbatim", "verdict": "Prior-Aware verdict", "log_belief_ratio": "log belief ratio"}
    | dict.fromkeys(("num_copies", "num_near_copies", "copies_capped"), "Copies of a record"),
    CopiesRow: {"copies": "Copies of a record", "mean_log_prob": "log-probability", "num_pa": "Prior-Aware verdict"}
    | dict.fromkeys(("num_common", "num_undecided", "pa_share", "pa_low", "pa_high"), "Prior-Aware verdict")
    | dict.fromkeys(("num_greedy", "greedy_share", "greedy_low", "greedy_high"), "Greedy share"),
    RecordSet: dict.fromkeys(("num_greedy", "greedy_share", "greedy_low", "greedy_high"), "Greedy share")
    | {"num_near": "Near-verbatim"},
    Records: {
        "by_copies": "Copies of a record",
        "members": "Greedy share",
        "held_out": "Greedy share",
        "prior_aware": "Common share",
    }
    | {"threshold": "Belief-ratio threshold n", "num_excluded_prefixes": "Prior-Aware verdict"}
    | dict.fromkeys(("prompts", "prompt_slopes"), "Other prompts"),
    PromptRow: dict.fromkeys(("offset", "num_greedy", "share", "mean_log_prob"), "Other prompts"),
    PromptSlope: dict.fromkeys(("against", "slope", "r_squared"), "Other prompts"),
    TprPoint: dict.fromkeys(
        ("max_fpr", "fpr", "fpr_low", "fpr_high", "tpr", "tpr_low", "tpr_high", "is_refused", "achievable_fpr"), "TPR at FPR"
    ),
    MembershipScore: {"name": "Membership scores", "auroc": "AUROC", "p_value": "AUROC", "tpr": "TPR at FPR"}
    | {"num_undefined_samples": "AUROC"},
    MembershipByCopies: {"copies": "Copies of a record", "scores": "Membership scores"},
    ShiftCheck: dict.fromkeys(ShiftCheck.model_fields, "Distribution shift"),
    Membership: {"label": "Distribution shift", "shift": "Distribution shift", "scores": "Membership scores"}
    | {"num_undefined_tokens": "Membership scores", "by_copies": "Copies of a record"},
    Privacy: dict.fromkeys(
        ("epsilon_lower_bound", "num_coins", "num_guesses", "num_correct", "num_tied", "score"), "Epsilon lower bound"
    )
    | dict.fromkeys(("cap", "is_testable", "num_guesses_needed"), "Cap of epsilon")
    | dict.fromkeys(("stated_epsilon", "p_value", "min_attainable_p", "is_comparable"), "Stated epsilon"),
    Counterfactual: dict.fromkeys(("difference", "p_value", "min_attainable_p"), "Counterfactual memorisation"),
}


@pytest.mark.parametrize("schema", TERMS, ids=lambda schema: schema.__name__)
def test_every_field_of_a_report_has_a_definition_or_says_what_it_is(schema: type[BaseModel]) -> None:
    terms, defined = TERMS[schema], {definition.term for definition in DEFINITIONS}
    assert set(terms.values()) <= defined
    assert set(terms) <= set(schema.model_fields), "a field was renamed"
    assert set(schema.model_fields) <= set(terms) | PLAIN


def test_a_definition_has_a_unit_a_text_and_no_second_one() -> None:
    terms = [definition.term for definition in DEFINITIONS]
    assert len(terms) == len(set(terms))
    assert all(definition.unit and definition.text.endswith(".") for definition in DEFINITIONS)
