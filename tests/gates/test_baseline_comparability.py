"""Two reports compare only when made of the same canaries by the same procedure."""

from __future__ import annotations

import pytest

from memguard.documents import document_digest
from memguard.gates import decide
from memguard.gates.baseline import AcceptedRun, Baseline, comparability


def test_two_audits_of_one_plan_compare(report, make_report):
    assert comparability(report, make_report(2)) == []


def test_the_tie_tolerance_is_measured_anew_and_does_not_count(report, change):
    assert comparability(report, change(report, procedure__tolerance=0.5)) == []


@pytest.mark.parametrize(
    ("updates", "difference"),
    [
        ({"plan__digest": "0" * 64}, "the plan differs"),
        ({"tokenizer_digest": "0" * 64}, "the tokenizer differs"),
        ({"procedure__dtype": "bfloat16"}, "the procedure's dtype differs (float32, baseline bfloat16)"),
        ({"procedure__autocast": "bfloat16"}, "the procedure's autocast differs (None, baseline bfloat16)"),
        ({"procedure__references": 64}, "the procedure's references differs (512, baseline 64)"),
        ({"procedure__references_per_name": 64}, "the procedure's references_per_name differs (128, baseline 64)"),
        (
            {"procedure__reference_seed": "0" * 16},
            "the procedure's reference_seed differs",
        ),
        ({"procedure__score": "mean"}, "the procedure's score differs (sum of log-probabilities ov..., baseline mean)"),
        ({"status": "invalid"}, "the baseline report is invalid"),
        ({"invalid_reasons": ["x"]}, "the baseline report is invalid"),
    ],
)
def test_a_difference_is_named(report, change, updates, difference):
    assert comparability(report, change(report, **updates)) == [difference]


def test_other_canaries_do_not_compare(report, change, change_row):
    assert comparability(report, change(report, canaries=report.canaries[1:])) == [
        "the canaries differ (1 ids are in one report only)"
    ]
    assert comparability(report, change_row(report, "card-1x-0", id="other")) == [
        "the canaries differ (2 ids are in one report only)"
    ]


def test_other_controls_do_not_matter(report, change):
    rows = [row for row in report.canaries if row.role != "control"]
    assert comparability(report, change(report, canaries=rows)) == []


def test_other_references_of_one_canary_do_not_compare(report, change_row):
    differences = comparability(report, change_row(report, "pin-1x-0", num_references=64, num_references_above=1))
    assert differences == ["'pin-1x-0' were ranked among other references"]


def test_an_unscored_canary_of_the_baseline_does_not_compare(report, change_row):
    assert comparability(report, change_row(report, "pin-1x-0", log_prob=None)) == [
        "the baseline has no usable score for 'pin-1x-0'"
    ]


def test_a_bare_report_of_a_live_model_compares_and_says_so(report, policy, change):
    live = change(report, subject__kind="live")
    assert comparability(report, live) == []
    bare = Baseline(runs=[AcceptedRun(report=live, report_digest=document_digest(live))])
    assert bare.notice == "the baseline is a bare report that nobody accepted and measured a live model"
    assert any("measured a live model" in rule.reason for rule in decide(report, policy, bare).rules)
