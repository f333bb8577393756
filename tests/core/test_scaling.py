"""Curves over audits: every fit is that of the metric, every forecast goes one step on, and too little is no number."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_cli import memguard, sentence
from test_compare import audited, planted
from test_reporting_samples import make_report

from memguard.audit.report import AuditReport
from memguard.audit.scaling import DEPENDENT_NOTE, Scaling, ScalingFit, measure_scaling
from memguard.documents import load_document
from memguard.errors import EvidenceError, InputError
from memguard.metrics.scaling import fit_log_linear, forecast_held_back
from memguard.reporting.comparison import scaling_view

# References above the eight canaries of a tier; the mean exposure of a row of them is worked out by `mean_bits`.
TIERS = {1: [511, 300, 255, 127, 100, 63, 40, 31], 4: [255, 127, 100, 63, 40, 31, 15, 9], 16: [63, 40, 31, 15, 9, 7, 3, 3]}
TIERS |= {64: [15, 9, 7, 3, 3, 1, 1, 1]}


def mean_bits(above: Sequence[int]) -> float:
    return float(np.mean([math.log2(1025) - math.log2(1 + count) for count in above]))


def audit_of(
    tiers: dict[int, list[int]],
    *,
    step: int = 300,
    epoch: float | None = 3.0,
    size: int | None = None,
    extracted: dict[int, int] | None = None,
    **parts: Any,
) -> AuditReport:
    """A report with these references above each canary, each seen three times its tier, the first of a tier extracted."""
    rows = []
    for tier, above in tiers.items():
        number = (extracted or {}).get(tier, 0)
        rows += [
            row.model_copy(update={"is_extracted": index < number})
            for index, row in enumerate(planted(tier, above, num_seen=3 * tier))
        ]
    subject = {"global_step": step, "epoch": epoch}
    return audited(rows, subject=subject, procedure={"num_parameters": size} | parts.pop("procedure", {}), **parts)


def halved(above: Sequence[int], times: int) -> list[int]:
    """About half as many references above, `times` times: one bit more each."""
    return [max(1, (count + 1) // 2**times) - 1 for count in above]


def measured(*reports: AuditReport) -> Scaling:
    return measure_scaling(reports, labels=[f"r{index}" for index in range(len(reports))])


def find(scaling: Scaling, against: str, quantity: str = "exposure", **wanted: Any) -> ScalingFit:
    (fit,) = [
        fit
        for fit in scaling.fits
        if (fit.against, fit.quantity) == (against, quantity)
        and all(getattr(fit, name) == value for name, value in wanted.items())
    ]
    return fit


def test_exposure_is_fitted_against_realised_repetitions_and_forecast_at_the_next_tier() -> None:
    scaling = measured(audit_of(TIERS))
    fit = find(scaling, "repetitions")
    x, y = [3.0, 12.0, 48.0, 192.0], [mean_bits(above) for above in TIERS.values()]
    assert [(point.x, point.n, point.label) for point in fit.points] == [(one, 8, "r0") for one in x]
    assert [point.y for point in fit.points] == pytest.approx(y)
    line = fit_log_linear(x, y)
    assert (fit.slope, fit.low, fit.high) == pytest.approx((line.slope, line.low, line.high))
    assert fit.r_squared == pytest.approx(line.r_squared)
    assert fit.forecast is not None
    assert fit.forecast.x == 768.0  # 192 * 192 / 48
    ahead = line.predict(768.0, limits=(0.0, math.log2(1025)))
    assert (fit.forecast.value, fit.forecast.low, fit.forecast.high) == pytest.approx((ahead.value, ahead.low, ahead.high))
    held = forecast_held_back(x, y, limits=(0.0, math.log2(1025)))
    assert fit.held_back is not None
    assert (fit.held_back.x, fit.held_back.observed) == pytest.approx((192.0, y[-1]))
    assert fit.held_back.error == pytest.approx(held.error)
    assert fit.held_back.is_inside == held.is_inside
    assert re.search(
        r"changes by .* bits \(95% interval .*\) for tenfold sightings in 'r0', over 4 points", scaling.sentences[0]
    )
    assert re.search(r"at 768 sightings it is forecast at .* bits \(95% prediction interval", scaling.sentences[0])
    assert "repetitions" not in " ".join(scaling.sentences)
    assert "dependent points" not in fit.flags  # tiers are of different canaries


def test_repetitions_are_also_fitted_over_all_reports_without_a_next_point() -> None:
    scaling = measured(audit_of(TIERS), audit_of({tier: halved(above, 1) for tier, above in TIERS.items()}, step=600))
    fit = find(scaling, "repetitions", report=None)
    assert fit.n == 8
    assert [point.label for point in fit.points] == ["r0", "r1"] * 4
    assert (fit.forecast, fit.held_back) == (None, None)
    assert [one.report for one in scaling.fits if one.against == "repetitions" and one.quantity == "exposure"] == [
        "r0",
        "r1",
        None,
    ]


def test_the_extracted_share_is_fitted_in_points_and_its_forecast_stays_a_share() -> None:
    scaling = measured(audit_of(TIERS, extracted={4: 2, 16: 5, 64: 8}))
    fit = find(scaling, "repetitions", "extracted share")
    assert [point.y for point in fit.points] == [0.0, 0.25, 0.625, 1.0]
    # log4 x grows by 1 a tier: slope in log4 by least squares (-1.5 * 0 - .5 * .25 + .5 * .625 + 1.5 * 1) / 5 = .3375.
    assert fit.slope == pytest.approx(0.3375 / math.log10(4))
    assert fit.forecast is not None
    assert (fit.forecast.value, fit.forecast.high) == (1.0, 1.0)
    assert fit.forecast.flags == ["extrapolated", "clipped"]
    assert "56.1 percentage points" in scaling.sentences[1]
    assert "100.0% (95% prediction interval" in scaling.sentences[1]
    assert "clipped to what can be measured" in scaling.sentences[1]


def test_nothing_extracted_is_told_without_a_slope() -> None:
    scaling = measured(audit_of(TIERS))
    fit = find(scaling, "repetitions", "extracted share")
    assert (fit.slope, fit.r_squared, fit.forecast, fit.held_back) == (0.0, None, None, None)
    assert scaling.sentences[1] == (
        "The extracted share is 0.0% at all 4 points of sightings in 'r0', of 8 canaries each; there is no slope to fit."
    )


def test_a_first_extraction_is_not_held_against_a_forecast_without_width() -> None:
    fit = find(measured(audit_of(TIERS, extracted={64: 1})), "repetitions", "extracted share")
    assert fit.held_back is None
    assert fit.forecast is not None


def test_a_run_is_fitted_against_epochs_and_forecast_one_epoch_on() -> None:
    reports = [
        audit_of({4: halved(TIERS[4], epoch)}, step=100 * epoch, epoch=float(epoch), size=10**8) for epoch in (1, 2, 3, 4)
    ]
    scaling = measured(*reports[::-1])  # the order of the files does not matter
    fit = find(scaling, "epoch")
    assert (fit.tier, fit.num_parameters) == (4, 10**8)
    assert [point.x for point in fit.points] == [1.0, 2.0, 3.0, 4.0]
    y = [mean_bits(halved(TIERS[4], epoch)) for epoch in (1, 2, 3, 4)]
    assert fit.slope == pytest.approx(fit_log_linear([1, 2, 3, 4], y).slope)
    assert fit.forecast is not None
    assert fit.forecast.x == 5.0
    assert fit.held_back is not None
    assert "of the model of 100,000,000 parameters" in scaling.sentences[-2]
    assert fit.flags == ["capped", "dependent points"]
    assert scaling.notes == [DEPENDENT_NOTE]
    assert "model size: needs reports of 3 sizes, got 1." in scaling.missing


def test_steps_stand_in_where_epochs_are_not_known_and_step_zero_is_left_out() -> None:
    reports = [audit_of({4: halved(TIERS[4], step // 100)}, step=step, epoch=None) for step in (0, 100, 200, 300)]
    scaling = measured(*reports)
    fit = find(scaling, "step")
    assert [point.x for point in fit.points] == [100.0, 200.0, 300.0]
    assert fit.forecast is not None
    assert fit.forecast.x == 400.0
    assert scaling.notes == ["Report 'r0' has no step above 0 and is left out of the curves of training.", DEPENDENT_NOTE]


def test_model_size_is_fitted_at_the_most_training_of_each_size() -> None:
    reports = [
        audit_of({16: halved(TIERS[16], power)}, size=10 ** (6 + power), step=step, epoch=step / 100)
        for power in (0, 1, 2, 3)
        for step in (100, 300)
    ]
    scaling = measured(*reports)
    fit = find(scaling, "model size")
    assert [(point.x, point.label) for point in fit.points] == [(1e6, "r1"), (1e7, "r3"), (1e8, "r5"), (1e9, "r7")]
    assert fit.forecast is not None
    assert fit.forecast.x == pytest.approx(1e10)
    assert fit.held_back is not None
    assert fit.held_back.x == 1e9
    assert [side.num_parameters for side in scaling.reports] == [10**6, 10**6, 10**7, 10**7, 10**8, 10**8, 10**9, 10**9]
    assert scaling.notes == []
    assert "dependent points" not in fit.flags  # one checkpoint of each model


def test_sizes_that_were_trained_for_other_steps_are_noted() -> None:
    reports = [audit_of({16: TIERS[16]}, size=size, step=step) for size, step in ((10**6, 100), (10**7, 200), (10**8, 300))]
    assert measured(*reports).notes == [
        "The model sizes were trained for 100 to 300 steps, which their curves do not tell apart."
    ]


def test_a_size_that_is_not_known_is_named_and_never_guessed() -> None:
    reports = [audit_of({16: TIERS[16]}, step=step, size=size) for step, size in ((100, 10**6), (200, 10**7), (300, None))]
    scaling = measured(*reports)
    assert not [fit for fit in scaling.fits if fit.against == "model size"]
    assert "model size: report 'r2' does not know its model's size (1 in all)." in scaling.missing
    assert "model size: needs 3 different values above 0, got 2." in scaling.missing


def test_one_report_of_one_tier_says_what_every_curve_needs() -> None:
    scaling = measured(audit_of({4: TIERS[4]}))
    assert scaling.fits == []
    assert scaling.sentences == []
    assert scaling.missing == [
        "training: needs 3 reports of one plan and model size at different steps.",
        "model size: report 'r0' does not know its model's size (1 in all).",
        "sightings in 'r0': needs 3 different values above 0, got 1.",
    ]


def test_a_report_without_a_ledger_has_no_curve_of_repetitions() -> None:
    rows = [row for tier, above in TIERS.items() for row in planted(tier, above, num_seen=None)]
    scaling = measured(audited(rows))
    assert not [fit for fit in scaling.fits if fit.against == "repetitions"]
    assert scaling.missing[0] == "sightings: report 'r0' has no ledger that says how often canaries were seen."


def test_curves_of_capped_or_mixed_exposure_are_flagged() -> None:
    tiers = TIERS | {64: [0] * 8}
    assert find(measured(audit_of(tiers)), "repetitions").flags == ["capped"]
    rows = [row for tier, above in TIERS.items() for row in planted(tier, above, num_seen=3 * tier)]
    known = rows[-1].exposure.model_copy(update={"method": "certified"})
    rows[-1] = rows[-1].model_copy(update={"exposure": known})
    assert find(measured(audited(rows)), "repetitions").flags == ["mixed estimators"]


# -- refusals


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"procedure": {"dtype": "float32"}}, r"the procedure's dtype differs \(bfloat16, float32\)"),
        ({"procedure": {"references": 64}}, r"the procedure's references differs \(1024, 64\)"),
        ({"ledger": {"plant_once": True}}, r"the ledger's plant_once differs \(False, True\)"),
    ],
)
def test_reports_of_other_procedures_are_refused_in_one_sentence(parts: Any, reason: str) -> None:
    with pytest.raises(EvidenceError, match=f"the reports were not made by one procedure: {reason}."):
        measured(audit_of(TIERS), audit_of(TIERS, step=600, **parts))


def test_invalid_reports_and_repeated_ones_are_refused() -> None:
    with pytest.raises(EvidenceError, match="report 'r1' is no evidence: canary 'c0190' has no finite score"):
        measured(audit_of(TIERS), make_report(with_failed_canary=True))
    with pytest.raises(InputError, match="report 'r2' is the same as 'r0'. Give each report once"):
        measured(audit_of(TIERS), audit_of(TIERS, step=600), audit_of(TIERS))
    with pytest.raises(InputError, match="at least one report and a label for each, got 0 and 0"):
        measure_scaling([], labels=[])


# -- the executable


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with three epochs of one run, of a model whose size is not known, and a report that is no evidence."""
    for epoch in (1, 2, 3):
        tiers = {tier: halved(above, epoch) for tier, above in TIERS.items()}
        audit_of(tiers, step=100 * epoch, epoch=float(epoch)).save(tmp_path / f"checkpoint-{epoch}" / "report.json")
    make_report(with_failed_canary=True).save(tmp_path / "broken" / "report.json")
    return tmp_path


REPORTS = [f"checkpoint-{epoch}/report.json" for epoch in (1, 2, 3)]


def test_scaling_prints_a_sentence_a_curve_when_piped(place: Path) -> None:
    done = memguard("scaling", *REPORTS, cwd=place)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Exposure changes by")
    assert "for tenfold sightings in 'checkpoint-1', over 4 points" in lines[0]
    assert lines[-1] == DEPENDENT_NOTE
    assert any(line.startswith("Exposure of tier 64 changes by") and "at 4 epochs" in line for line in lines)
    assert "Not fitted: model size: report 'checkpoint-1' does not know its model's size (3 in all)." in lines


def test_scaling_prints_one_json_document_and_writes_the_same(place: Path) -> None:
    done = memguard("scaling", *REPORTS, "--json", "-o", "scaling.json", cwd=place)
    document = load_document(place / "scaling.json", Scaling, what="scaling document")
    assert json.loads(done.stdout) == json.loads(document.model_dump_json())
    assert [side.label for side in document.reports] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert find(document, "epoch", tier=64).num_parameters is None


MISTAKES = {
    "missing": (2, ["none.json"], "report 'none.json' does not exist"),
    "nothing": (2, [], "Missing argument 'REPORT...'"),
    "invalid": (3, [REPORTS[0], "broken/report.json"], "report 'broken' is no evidence"),
    "twice": (2, [REPORTS[0], REPORTS[0]], "Give each report once"),
    "overwrite": (2, [REPORTS[0], "-o", REPORTS[0]], "must not be written over what is read"),
}


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_scaling_answers_a_mistake_with_its_exit_code_and_one_sentence(mistake: str, place: Path) -> None:
    code, arguments, words = MISTAKES[mistake]
    done = memguard("scaling", *arguments, cwd=place, code=code)
    assert words in sentence(done)
    assert done.stdout == ""


def test_a_terminal_gets_a_table_of_every_curve() -> None:
    console = Console(file=io.StringIO(), width=250, force_terminal=True)
    console.print(scaling_view(measured(audit_of(TIERS, extracted={4: 2, 16: 5, 64: 8})), is_plain=False))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "exposure (bits) │ sightings │ r0 │" in text
    assert "extracted share │ sightings │ r0 │" in text
    assert "1.00 at 768 (" in text
    assert "Not fitted: model size" in text
