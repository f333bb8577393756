"""Trackers: names and values of metrics, the JSON lines file after crashes and resumes, and a real offline W&B run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import OfflineRun
from test_reporting_samples import (
    TIER_BITS,
    canary_row,
    make_bare_report,
    make_counts,
    make_full_report,
    make_membership,
    make_privacy,
    make_records,
    make_report,
)

from memguard.audit.report import AuditReport, PositiveControl, Subject, TrendPoint
from memguard.errors import InputError
from memguard.reporting.curves import own_points
from memguard.reporting.jsonl_tracker import JsonlTracker, read_history
from memguard.reporting.trackers import Tracker, flatten_metrics
from memguard.reporting.wandb_tracker import COLUMNS, WandbTracker


def at_step(step: int | None, *, kind: Any = "live", digest: str | None = None, **changes: Any) -> AuditReport:
    return make_report(subject=Subject(kind=kind, digest=digest, global_step=step, epoch=None), **changes)


def test_metrics_have_the_agreed_names_and_values() -> None:
    metrics = flatten_metrics(make_report())
    assert metrics.pop("memguard/exposure_mean/controls") == pytest.approx(1.41, abs=0.1)
    assert metrics == {
        "memguard/valid": 1.0,
        "memguard/exposure_mean/tier_1": pytest.approx(sum(TIER_BITS[1]) / 6),
        "memguard/exposure_mean/tier_4": pytest.approx(sum(TIER_BITS[4]) / 6),
        "memguard/exposure_mean/tier_16": pytest.approx(sum(TIER_BITS[16]) / 6),
        "memguard/num_seen/tier_1": 3.0,
        "memguard/num_seen/tier_4": 12.0,
        "memguard/num_seen/tier_16": 48.0,
        "memguard/exposure_max": 49.8,
        "memguard/extraction_count": 2.0,
        "memguard/positive_control_detected": 1.0,
    }


def test_maximum_and_counts_are_over_canaries_alone() -> None:
    rows = [canary_row(1, 4, 3.0), canary_row(2, 0, 9.0, role="control"), canary_row(3, 64, 49.0, role="positive_control")]
    metrics = flatten_metrics(make_report(canaries=rows))
    assert metrics["memguard/exposure_max"] == 3.0
    assert metrics["memguard/extraction_count"] == 0.0


def test_a_metric_over_an_unscored_canary_is_left_out() -> None:
    metrics = flatten_metrics(make_report(with_failed_canary=True))
    assert metrics["memguard/valid"] == 0.0
    assert metrics["memguard/exposure_mean/tier_1"] > 0
    assert not {"memguard/exposure_mean/tier_4", "memguard/exposure_max"} & set(metrics)


def test_what_was_not_measured_is_left_out_of_the_metrics() -> None:
    none = PositiveControl(kind="none", n=0, mean_num_seen=None, best_p_value=None, detected=False)
    metrics = flatten_metrics(make_report(canaries=[canary_row(1, 4, 3.0, num_seen=None)], controls=[], positive_control=none))
    assert set(metrics) == {
        "memguard/valid",
        "memguard/exposure_mean/tier_4",
        "memguard/exposure_max",
        "memguard/extraction_count",
    }


def test_prior_aware_findings_are_counted_when_measured() -> None:
    assert "memguard/prior_aware_count" not in flatten_metrics(make_report())
    assert flatten_metrics(make_report(with_prior_aware=True))["memguard/prior_aware_count"] == 1.0


def test_a_full_audit_adds_a_trend_for_every_part() -> None:
    added = {
        name: value for name, value in flatten_metrics(make_full_report()).items() if name not in flatten_metrics(make_report())
    }
    assert added == {
        "memguard/prior_aware_count": 1.0,
        "memguard/extraction_found_count": 2.0,
        **{f"memguard/extraction_expected_share/tier_1/queries_{budget}": 0.0 for budget in (1, 100, 10_000)},
        "memguard/extraction_expected_share/tier_4/queries_1": 0.0,
        "memguard/extraction_expected_share/tier_4/queries_100": 0.011,
        "memguard/extraction_expected_share/tier_4/queries_10000": 0.043,
        "memguard/extraction_expected_share/tier_16/queries_1": 0.181,
        "memguard/extraction_expected_share/tier_16/queries_100": 0.352,
        "memguard/extraction_expected_share/tier_16/queries_10000": 0.517,
        "memguard/prior_aware_common_share/canaries": 2 / 6,
        "memguard/prior_aware_common_share/records": 0.4,
        "memguard/records_greedy_share/members": 0.125,
        "memguard/records_greedy_share/held_out": 0.0,
        "memguard/membership_is_shift": 0.0,
        "memguard/membership_auroc/loss": 0.553,
        "memguard/membership_auroc/min_k_plus_plus": 0.618,
        "memguard/epsilon_lower_bound": 0.223,
        "memguard/epsilon_cap": 2.2538,
        "memguard/propensity/average_longest_span/prefix": 88.7,
        "memguard/propensity/average_longest_span/generic": 6.6,
        "memguard/propensity/average_longest_span/non_member": 5.9,
        "memguard/propensity/full_match_rate/prefix": 0.95,
        "memguard/propensity/full_match_rate/generic": 0.05,
        "memguard/propensity/full_match_rate/non_member": 0.0,
        "memguard/propensity_share/full_match_rate/generic": 0.05,
    }


def test_parts_without_a_figure_have_no_trend() -> None:
    assert flatten_metrics(make_bare_report()) == flatten_metrics(make_report())
    nothing = make_counts(common_share=None)
    alone = make_bare_report(prior_aware=nothing, records=make_records(held_out=None, prior_aware=nothing))
    assert set(flatten_metrics(alone)) - set(flatten_metrics(make_report())) == {"memguard/records_greedy_share/members"}
    assert flatten_metrics(make_bare_report(membership=make_membership(is_shift=True)))["memguard/membership_is_shift"] == 1.0


def test_a_figure_that_is_not_finite_is_never_logged(tmp_path: Path) -> None:
    broken = make_bare_report(privacy=make_privacy().model_copy(update={"epsilon_lower_bound": math.nan, "cap": math.inf}))
    assert flatten_metrics(broken) == flatten_metrics(make_report())
    JsonlTracker(tmp_path / "history.jsonl").log(broken)
    assert len(read_history(tmp_path / "history.jsonl")) == 1


def test_each_audit_is_one_json_line_with_the_points_of_its_curves(tmp_path: Path) -> None:
    tracker: Tracker = JsonlTracker(tmp_path / "deep" / "history.jsonl")
    for step in (0, 500):
        tracker.log(at_step(step))
    lines = (tmp_path / "deep" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in lines] == [0, 500]
    rows = read_history(tmp_path / "deep" / "history.jsonl")
    assert rows[1]["metrics"] == flatten_metrics(at_step(500))
    assert [TrendPoint(**point) for point in rows[1]["points"]] == own_points(at_step(500))


def test_a_second_audit_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "history.jsonl")
    for step in (0, 500, 1000):
        tracker.log(at_step(step))
    tracker.log(at_step(500, with_failed_canary=True))
    rows = read_history(tracker.path)
    assert [(row["global_step"], row["status"]) for row in rows] == [(0, "valid"), (500, "invalid"), (1000, "valid")]


def test_the_live_model_and_the_checkpoint_of_a_step_have_a_line_each(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "history.jsonl")
    tracker.log(at_step(500))
    tracker.log(at_step(500, kind="checkpoint", digest="aa" * 32))
    tracker.log(at_step(500, kind="checkpoint", digest="bb" * 32))
    assert [(row["kind"], row["digest"]) for row in read_history(tracker.path)] == [("live", None), ("checkpoint", "bb" * 32)]


def test_checkpoints_without_a_step_are_told_apart_by_their_digest(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "history.jsonl")
    for digest in ("aa" * 32, "bb" * 32, "aa" * 32):
        tracker.log(at_step(None, kind="checkpoint", digest=digest))
    assert [row["digest"] for row in read_history(tracker.path)] == ["aa" * 32, "bb" * 32]


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_last_line_cut_short_by_a_crash_is_dropped_and_written_anew(tmp_path: Path, cut: int) -> None:
    tracker = JsonlTracker(tmp_path / "history.jsonl")
    tracker.log(at_step(0))
    tracker.log(at_step(500))
    whole = tracker.path.read_text()
    tracker.path.write_text(whole[:-cut])
    kept = [0, 500] if cut == 1 else [0]  # one character less is the newline alone: that line is whole
    assert [row["global_step"] for row in read_history(tracker.path)] == kept
    tracker.log(at_step(500))
    assert tracker.path.read_text() == whole


def test_a_broken_line_that_no_crash_explains_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "history.jsonl")
    tracker.log(at_step(0))
    broken = "[1, 2]\n" + tracker.path.read_text()
    tracker.path.write_text(broken)
    with pytest.raises(InputError, match=r"must hold one JSON object a line, got something else in line 1"):
        tracker.log(at_step(500))
    assert tracker.path.read_text() == broken


def test_a_missing_history_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"history .* does not exist"):
        read_history(tmp_path / "history.jsonl")


def test_no_temporary_file_is_left_beside_the_history(tmp_path: Path) -> None:
    JsonlTracker(tmp_path / "history.jsonl").log(at_step(0))
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Opens offline runs below the folder of the test, named each time: wandb reads its environment once a process."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    settings = wandb.Settings(mode="offline", silent=True, console="off", disable_git=True)

    def start(name: str = "") -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return wandb.init(project="memguard-test", dir=str(tmp_path / name), settings=settings)

    return start


def test_a_real_wandb_run_keeps_every_audit_with_its_own_step_axis(offline: Callable[[str], Any], tmp_path: Path) -> None:
    tracker = WandbTracker()
    with offline("") as run:
        run.define_metric("*", step_metric="train/global_step", step_sync=True)  # as the Hugging Face callback does
        run.log({"train/loss": 2.0, "train/global_step": 400})
        tracker.log(at_step(400))
        run.log({"train/loss": 1.5, "train/global_step": 900})
        tracker.log(at_step(800, with_prior_aware=True))  # finished after a later training step was logged
        run.log({"train/loss": 1.2, "train/global_step": 1000})
        tracker.log_table(at_step(800, with_prior_aware=True))
    written = OfflineRun(tmp_path)

    audits = [row for row in written.history if "memguard/exposure_max" in row]
    assert [row["train/global_step"] for row in audits] == [400, 800]
    for row, report in zip(audits, (at_step(400), at_step(800, with_prior_aware=True)), strict=True):
        assert {name: value for name, value in row.items() if name.startswith("memguard/")} == flatten_metrics(report)
    assert [row["train/loss"] for row in written.history if "train/loss" in row] == [2.0, 1.5, 1.2]

    names = flatten_metrics(at_step(800, with_prior_aware=True))
    assert {name: written.metrics[name] for name in names} == {
        name: {"step": "train/global_step", "summary": ["max", "last"]} for name in names
    }
    assert written.summary["memguard/exposure_max"] == {"max": 49.8, "last": 49.8}


def test_a_full_audit_reads_back_from_history_and_from_a_real_wandb_run(offline: Callable[[str], Any], tmp_path: Path) -> None:
    report = make_full_report()
    history = JsonlTracker(tmp_path / "history.jsonl")
    history.log(report)
    with offline(""):
        tracker = WandbTracker()
        tracker.log(report)
        tracker.log_table(report)
    metrics = flatten_metrics(report)
    assert read_history(history.path)[0]["metrics"] == metrics
    written = OfflineRun(tmp_path)
    (row,) = [row for row in written.history if "memguard/valid" in row]
    assert {name: value for name, value in row.items() if name.startswith("memguard/")} == metrics
    assert set(metrics) <= set(written.metrics)
    (row,) = [row for row in written.history if "memguard/canaries/path" in row]
    table = json.loads((written.folder / "files" / row["memguard/canaries/path"]).read_text())
    found = {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in table["data"]}
    assert found["c0644"]["found_by"] == "trained tokens, text"
    assert found["c0640"]["calibrated_exposure_bits"] == 11.5
    assert found["c0064"]["log10_expected_tries"] is None


def test_a_real_wandb_run_keeps_the_table_of_canaries(offline: Callable[[str], Any], tmp_path: Path) -> None:
    report = at_step(800, with_prior_aware=True)
    with offline(""):
        WandbTracker().log_table(report)
    written = OfflineRun(tmp_path)
    (row,) = [row for row in written.history if "memguard/canaries/path" in row]
    assert row["train/global_step"] == 800
    table = json.loads((written.folder / "files" / row["memguard/canaries/path"]).read_text())
    assert table["columns"] == COLUMNS
    assert [line[0] for line in table["data"]] == [one.id for one in report.canaries]
    found = dict(zip(COLUMNS, table["data"][0], strict=True))
    assert (found["exposure_bits"], found["prior_aware"], found["log_belief_ratio"]) == (0.4, "not extractable", None)
    assert (found["calibrated_exposure_bits"], found["log10_expected_tries"], found["found_by"]) == (None, None, "not measured")


def test_each_wandb_run_gets_its_own_definitions(offline: Callable[[str], Any], tmp_path: Path) -> None:
    tracker = WandbTracker(step_metric="trainer/global_step")
    for name in ("first", "second"):
        with offline(name):
            tracker.log(at_step(1))
            tracker.log(at_step(2))
        written = OfflineRun(tmp_path / name)
        assert written.metrics["memguard/valid"]["step"] == "trainer/global_step"
        assert len([row for row in written.history if "memguard/valid" in row]) == 2


def test_without_an_active_wandb_run_nothing_is_logged_or_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    WandbTracker().log(at_step(1))
    WandbTracker().log_table(at_step(1))
    assert "wandb" not in sys.modules
    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    WandbTracker().log(at_step(1))


def test_an_audit_without_a_step_is_not_put_at_a_wrong_place_of_the_axis(offline: Callable[[str], Any], tmp_path: Path) -> None:
    with offline(""):
        WandbTracker().log(at_step(None))
    assert not [row for row in OfflineRun(tmp_path).history if "memguard/valid" in row]
