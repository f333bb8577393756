"""The simulation of the gate's errors counts what it says, and the committed tables are what it prints at full size."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from memguard.audit.report import RuleResult
from memguard.metrics.exposure import sampled_null_mean_bits

HOME = Path(__file__).parents[2] / "benchmarks"
TABLES = ("stops", "runs", "one", "families", "printed", "rises")

pytestmark = pytest.mark.skipif(not HOME.exists(), reason="benchmarks are not part of an installed wheel")


@pytest.fixture(scope="module")
def errors() -> Iterator[ModuleType]:
    """The script, which imports the reports of the tests."""
    before = list(sys.path)
    sys.path.insert(0, str(HOME))
    yield importlib.import_module("gate_errors")
    sys.path[:] = before


@pytest.fixture(scope="module")
def committed() -> dict[str, dict[str, Any]]:
    """Lines of `gate_errors.jsonl` by their names."""
    lines = (HOME / "results" / "gate_errors.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


def test_all_tables_are_committed(errors: ModuleType, committed: dict[str, dict[str, Any]]) -> None:
    assert tuple(errors.TITLES) == TABLES == tuple(committed)


@pytest.mark.parametrize("table", TABLES)
def test_a_committed_table_is_the_one_that_the_code_prints_at_full_size(
    errors: ModuleType, committed: dict[str, dict[str, Any]], table: str
) -> None:
    line, cells = committed[table], errors.cells_of(table, errors.FULL)
    assert not line["smoke"]
    assert line["claim"] == errors.TITLES[table]
    assert line["columns"] == errors.columns_of(table)
    assert list(line["counts"]) == [cell.row for cell in cells]
    for cell in cells:
        counts = Counter(line["counts"][cell.row])
        assert {counts[f"{one}: audits"] + counts[f"{one}: nothing printed"] for one in cell.configs} == {cell.audits}
    assert line["rows"] == [errors.row_of(table, cell, Counter(line["counts"][cell.row])) for cell in cells]


def test_the_committed_page_is_made_of_the_committed_tables(errors: ModuleType, committed: dict[str, dict[str, Any]]) -> None:
    page = (HOME / "results" / "gate_errors.md").read_text(encoding="utf-8")
    assert page == errors.as_markdown(list(committed.values()))


def test_a_model_that_memorised_nothing_was_stopped_in_at_most_the_designed_share(
    committed: dict[str, dict[str, Any]],
) -> None:
    rows = {row: Counter(counts) for row, counts in committed["stops"]["counts"].items() if row.startswith("default")}
    assert len(rows) == 3
    for counts in rows.values():
        audits, stopped = counts["1 run: audits"], counts["1 run: audits"] - counts["1 run: exit 0"]
        assert stats.beta.ppf(0.975, stopped + 1, audits - stopped) <= 0.01
    assert rows["default"]["1 run: audits"] == 20_000


def test_what_a_decision_says_it_would_find_in_95_of_100_was_found_in_at_least_93(
    committed: dict[str, dict[str, Any]],
) -> None:
    for row, counts in committed["printed"]["counts"].items():
        rule = "canaries as a family" if row.startswith("family") else "not worse than the last release"
        configs = [key.removesuffix(": audits") for key in counts if key.endswith(": audits")]
        assert configs
        for config in configs:
            # Seeds are not in a test over one run, as its decision says: there the line promises more than is found.
            least = 0.8 if "sd 0.3" in row and config == "1 run" else 0.93
            assert counts[f"{config}: fires {rule}"] >= least * counts[f"{config}: audits"], (row, config)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_table_runs_at_smoke_size(errors: ModuleType, table: str) -> None:
    line = errors.run_table(table, errors.SMOKE)
    cells = errors.cells_of(table, errors.SMOKE)
    assert line["smoke"]
    assert [row[0] for row in line["rows"]] == [cell.row for cell in cells]
    assert all(len(row) == len(line["columns"]) for row in line["rows"])
    for cell in cells:
        counts = Counter(line["counts"][cell.row])
        for config in cell.configs:
            ends = [counts[f"{config}: exit {code}"] for code in (0, 1, 3)]
            assert sum(ends) == counts[f"{config}: audits"] == cell.audits - counts[f"{config}: nothing printed"]
            assert counts[f"{config}: stopped"] + counts[f"{config}: not shown"] == ends[1] + ends[2]


@pytest.mark.slow
def test_counts_do_not_depend_on_the_number_of_processes(errors: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "CHUNK", 2)
    sizes = errors.Sizes(4, 2, 2, 2, 4)
    assert errors.run_table("one", sizes)["counts"] == errors.run_table("one", sizes, workers=2)["counts"]


def test_a_memorised_canary_is_found_and_one_at_chance_is_not(errors: ModuleType) -> None:
    found, missed = (
        errors.count_chunk(errors.Cell("", 3, effect=errors.Effect(one_at=value), num_controls=20), 1, 3)
        for value in (-1.0, -20.0)
    )
    assert found["1 run: exit 1"] == found[f"1 run: fires {errors.MAX}"] == found["1 run: stopped"] == 3
    assert missed[f"1 run: fires {errors.MAX}"] == missed[f"1 run: fires {errors.LIMIT}"] == 0


def test_every_configuration_of_the_baseline_is_counted(errors: ModuleType) -> None:
    # All at 5 bits above chance: whatever runs at chance it is compared with must show that.
    cell = errors.Cell("", 2, rise=5.0, configs=tuple(errors.CONFIGS), num_controls=20)
    counts = errors.count_chunk(cell, 1, 2)
    for config in errors.CONFIGS:
        assert counts[f"{config}: audits"] == counts[f"{config}: fires {errors.RISE}"] == counts[f"{config}: exit 1"] == 2


def test_fresh_secrets_of_the_same_design_are_compared(errors: ModuleType) -> None:
    counts = errors.count_chunk(errors.Cell("", 2, fresh=True, rise=4.0, num_controls=20), 1, 2)
    assert counts[f"1 run: fires {errors.RISE}"] == 2
    assert counts["1 run: exit 3"] == 0  # the baseline compares


def test_no_shift_is_chance_and_a_shift_gives_its_bits(errors: ModuleType) -> None:
    shifts, bits = errors.mean_bits_by_nats()
    chance = (sampled_null_mean_bits(512) + sampled_null_mean_bits(128)) / 2
    assert float(np.interp(0.0, shifts, bits)) == pytest.approx(chance, abs=2e-3)
    assert errors.nats_of(0.0) == pytest.approx(0.0, abs=1e-9)
    # 20,000 canaries a format drawn afresh: sd of a sampled exposure is below 2.5 bits, 5 sd of the mean of both below 0.07.
    rng, mean = np.random.default_rng(0), 0.0
    for one in (errors.CARD, errors.PIN):
        tail = stats.norm.sf(rng.normal(size=20_000) + errors.nats_of(2.0) / errors.SD_NATS)
        above = rng.binomial(one.num_references, tail)
        mean += float((math.log2(one.num_references + 1) - np.log2(above + 1)).mean()) / 2
    assert mean - chance == pytest.approx(2.0, abs=0.07)


def test_a_power_of_the_tail_probability_multiplies_the_bits(errors: ModuleType) -> None:
    effect, rng = errors.Effect(44, power=4.0), np.random.default_rng(0)
    scores = [errors.memorised(effect, rng) for _ in range(100)]
    z = [(one["pin-1x-0"] + math.log(10**9) + 2.0) / errors.SD_NATS for one in scores]
    bits = -np.log2(stats.norm.sf(z))
    # -log2 of U^4 has mean and sd 4 / ln 2 = 5.77; of 100 draws 5 sd are 2.9, and the plain law has a mean of 1.44.
    assert bits.mean() == pytest.approx(4 / math.log(2), abs=2.9)


@pytest.mark.parametrize(("number", "tiers"), [(16, {"1x": 16}), (44, {"1x": 44}), (88, {"1x": 44, "4x": 44})])
def test_an_effect_takes_half_of_each_format_and_tier_1_first(errors: ModuleType, number: int, tiers: dict[str, int]) -> None:
    ids = [name.split("-") for name in errors.memorised(errors.Effect(number), np.random.default_rng(0))]
    assert Counter(one[1] for one in ids) == tiers
    assert Counter(one[0] for one in ids) == {"card": number // 2, "pin": number // 2}


@pytest.mark.parametrize(
    ("outcome", "figures", "expected"),
    [
        ("pass", {"p_value": 0.001, "share": 0.002}, True),
        ("block", {"p_value": 0.003, "share": 0.002}, False),  # rejected by Holm only since another rule was
        ("insufficient evidence", {"p_value": 0.5, "share": 0.002}, True),
        ("block", {"largest_low": 21.0}, True),
        ("not shown", {"largest_low": 1.0}, False),
        ("invalid", {}, True),
        ("warn", {}, False),
    ],
)
def test_a_rule_fires_by_itself(errors: ModuleType, outcome: Any, figures: dict[str, Any], expected: bool) -> None:
    assert errors.fires(RuleResult(name="a", kind="test", outcome=outcome, reason="A.", figures=figures)) is expected
