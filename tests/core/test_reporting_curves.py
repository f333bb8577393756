"""Pooled tiers, trends and the figures drawn of them."""

from __future__ import annotations

import itertools
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from test_reporting_samples import CHANCE, TIER_BITS, canary_row, make_report

from memguard.audit.report import AuditReport, Subject, TrendPoint
from memguard.metrics.intervals import median_interval
from memguard.reporting.curves import expected_control_bits, own_points, pool_tiers, trend_points
from memguard.reporting.plots import draw_curves, draw_dots, spread_apart


def with_step(report: AuditReport, step: int | None) -> AuditReport:
    return report.model_copy(update={"subject": Subject(kind="live", digest=None, global_step=step, epoch=None)})


def test_a_tier_is_pooled_over_formats_and_positive_controls_are_left_out() -> None:
    report = make_report()
    other = [canary_row(1, 4, 20.0, format="pin"), canary_row(2, 4, 22.0, format="pin")]
    pooled = {row.tier: row for row in pool_tiers(report.model_copy(update={"canaries": report.canaries + other}))}
    assert sorted(pooled) == [0, 1, 4, 16]  # positive controls are tier 64
    assert pooled[4].n == 8
    assert pooled[4].mean_bits == pytest.approx((sum(TIER_BITS[4]) + 42.0) / 8)
    assert pooled[4].mean_num_seen == 12.0


def test_a_tier_with_an_unscored_canary_has_no_figures_rather_than_those_of_the_rest() -> None:
    pooled = {row.tier: row for row in pool_tiers(make_report(with_failed_canary=True))}
    assert (pooled[4].mean_bits, pooled[4].low_bits, pooled[4].high_bits, pooled[4].n) == (None, None, None, 6)
    assert pooled[1].mean_bits is not None


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 8, 24, 40, 200, 1500])
def test_the_interval_of_a_pooled_median_is_the_one_of_the_metrics(n: int) -> None:
    bits = np.random.default_rng(n).exponential(1.44, size=n)
    report = make_report(canaries=[canary_row(i, 1, float(value)) for i, value in enumerate(bits)])
    expected = median_interval(bits, confidence=0.95)
    assert (pool_tiers(report)[0].low_bits, pool_tiers(report)[0].high_bits) == (expected.low, expected.high)


def test_chance_is_weighted_by_the_controls_of_each_format() -> None:
    report = make_report()
    second = report.controls[0].model_copy(update={"num_controls": 72, "expected_exposure_bits": CHANCE + 0.04})
    assert expected_control_bits(report.model_copy(update={"controls": [*report.controls, second]})) == pytest.approx(
        CHANCE + 0.03
    )
    assert expected_control_bits(report.model_copy(update={"controls": []})) is None


def test_this_audit_joins_the_trend_and_replaces_an_earlier_one_of_its_step() -> None:
    report = make_report()
    stale = TrendPoint(global_step=1200, epoch=None, tier=4, n=1, mean_bits=99.0, low_bits=None, high_bits=None)
    points = trend_points(report.model_copy(update={"trend": [stale, *report.trend]}))
    assert [point.global_step for point in points if point.tier == 4] == [0, 400, 800, 1200]
    assert [point for point in points if point.global_step == 1200] == own_points(report)


def test_an_audit_without_a_step_adds_no_point() -> None:
    report = with_step(make_report(), None)
    assert own_points(report) == []
    assert trend_points(report) == sorted(report.trend, key=lambda point: (point.global_step, point.tier))


@pytest.mark.parametrize("draw", [draw_curves, draw_dots])
def test_a_figure_is_xml_with_a_text_alternative_and_no_outside_reference(draw: object) -> None:
    text = draw(make_report())  # type: ignore[operator]
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["role"] == "img"
    assert "bits" in root.attrib["aria-label"]
    targets = [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
    ids = {node.attrib["id"] for node in root.iter() if "id" in node.attrib}
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= ids


def test_every_colour_of_a_figure_is_declared_for_light_and_dark() -> None:
    text = draw_curves(make_report()) or ""
    light, dark = text.split("prefers-color-scheme:dark")
    used = set(re.findall(r"var\((--mg-[a-z0-9-]+)\)", text))
    assert used == {"--mg-ink", "--mg-control", "--mg-tier-1", "--mg-tier-4", "--mg-tier-16"}
    assert all(f"{name}:#" in light and f"{name}:#" in dark for name in used)
    assert not re.search(r"(fill|stroke): #", text)


def test_figures_are_the_same_text_every_time_whatever_the_users_matplotlib_settings() -> None:
    import matplotlib

    report = make_report()
    first = draw_curves(report), draw_dots(report)
    with matplotlib.rc_context({"font.size": 23, "axes.grid": False, "lines.linewidth": 9, "svg.hashsalt": None}):
        assert (draw_curves(report), draw_dots(report)) == first
        assert matplotlib.rcParams["font.size"] == 23


def test_figures_leave_pyplot_unloaded() -> None:
    if "matplotlib.pyplot" in sys.modules:
        pytest.skip("another test of this process loaded pyplot")
    draw_curves(make_report())
    assert "matplotlib.pyplot" not in sys.modules


def test_two_figures_of_a_page_share_no_id() -> None:
    ids = [set(re.findall(r'\bid="([^"]+)"', draw(make_report()) or "")) for draw in (draw_curves, draw_dots)]
    assert not ids[0] & ids[1]


def test_the_curves_name_every_tier_the_controls_and_chance() -> None:
    text = draw_curves(make_report()) or ""
    for label in (
        "tier 1<",
        "tier 4<",
        "tier 16<",
        "controls<",
        "chance 1.43<",
        "training step<",
        "exposure (bits)<",
        "1,200<",
    ):
        assert label in text


def test_curves_survive_unscored_tiers_single_audits_and_missing_steps() -> None:
    assert draw_curves(make_report(with_failed_canary=True))
    assert draw_curves(make_report(trend=[]))
    assert draw_curves(with_step(make_report(trend=[]), None)) is None
    assert draw_curves(with_step(make_report(), None))


def test_dots_survive_reports_without_canaries_or_controls() -> None:
    assert draw_dots(make_report(canaries=[])) is None
    assert draw_dots(make_report(canaries=[canary_row(1, 4, None)])) is None
    assert draw_dots(make_report(canaries=[canary_row(1, 4, 3.0)], controls=[]))


def test_labels_that_would_overlap_are_pushed_apart_about_their_lines() -> None:
    heights = spread_apart([0.1, 0.2, 0.3, 30.0], gap=2.0)
    assert heights[0] >= 0
    assert all(b - a >= 2.0 - 1e-12 for a, b in itertools.pairwise(heights))
    assert heights[3] == 30.0
    assert math.isclose(sum(spread_apart([10.0, 10.0, 10.0], gap=2.0)), 30.0)
