"""Every re-check of the papers runs at smoke size and holds what must hold whatever the model learnt."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[2] / "benchmarks" / "reproduction"
NAMES = ("S1", "S2", "P4", "P2", "P3", "P5", "S3", "Q1", "F1", "D1", "H1", "A1", "S4", "D2", "P1")
NEED_OPACUS = ("A1", "S4", "D2")

pytestmark = pytest.mark.skipif(not HOME.exists(), reason="benchmarks are not part of an installed wheel")


@pytest.fixture(scope="module", autouse=True)
def _import_path() -> Iterator[None]:
    """The studies import one another, and the benches' text, as scripts do."""
    added = [str(HOME), str(HOME.parent)]
    sys.path[:0] = added
    yield
    for one in added:
        sys.path.remove(one)


@functools.cache
def cache_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="reproduction-"))


@functools.cache
def line_of(name: str) -> dict[str, Any]:
    """A study's line at smoke size."""
    if name in NEED_OPACUS and importlib.util.find_spec("opacus") is None:
        pytest.skip("opacus is not installed")
    reproduce = importlib.import_module("reproduce")
    line: dict[str, Any] = reproduce.run_study(name, smoke=True, cache=cache_folder())
    return line


def figures_of(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = line_of(name)["figures"]
    return figures


def column(name: str, title: str) -> list[Any]:
    """One column of a study's table."""
    line = line_of(name)
    return [row[line["columns"].index(title)] for row in line["rows"]]


def test_every_study_is_tested_here() -> None:
    assert set(importlib.import_module("reproduce").STUDIES) == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_gives_a_table_a_verdict_and_a_reason(name: str) -> None:
    line = line_of(name)
    assert line["name"] == name
    assert line["rows"]
    assert all(len(row) == len(line["columns"]) for row in line["rows"])
    assert isinstance(line["passed"], bool)
    assert line["claim"].endswith(".")
    assert line["reason"].endswith(".")
    json.dumps(line["figures"], allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_study_goes_on_from_what_was_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, reproduce = line_of(name), importlib.import_module("reproduce")
    tiny_runs = importlib.import_module("tiny_runs")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished run was trained again")

    # All are imported first: one that was imported in between would take the refusal for its own trainer.
    modules = [importlib.import_module(module) for module in ("tiny_runs", "dp_training", *reproduce.STUDIES.values())]
    for module in modules:
        for trainer in ("train", "train_adam"):
            if hasattr(module, trainer):
                monkeypatch.setattr(module, trainer, refuse)
    assert tiny_runs.train is refuse
    again = reproduce.run_study(name, smoke=True, cache=cache_folder())
    assert {key: again[key] for key in ("rows", "figures", "passed")} == {
        key: first[key] for key in ("rows", "figures", "passed")
    }


@pytest.mark.slow
def test_exposure_lies_between_zero_and_the_size_of_the_space() -> None:
    figures = figures_of("S1")
    # 41 planned secrets: 40 siblings are left out of 10^4 candidates.
    assert 0.0 <= figures["highest_bits"] <= math.log2(10**4 - 40)
    assert figures["num_controls"] == 40


@pytest.mark.slow
def test_best_first_search_agrees_with_every_exact_rank() -> None:
    figures = figures_of("S2")
    assert figures["num_agreeing"] == figures["num_without_ties"] > 0
    assert figures["num_first"] > 0
    assert figures["most_nodes_when_first"] <= figures["secret_space_size"] / 10


@pytest.mark.slow
def test_the_sampled_prior_is_unbiased_and_its_variance_bounded() -> None:
    figures = figures_of("P4")
    assert figures["largest_z"] <= figures["limit_z"]
    assert figures["largest_variance"] <= figures["variance_bound"] == 1 / 64  # 1 / (4 * 16)
    assert figures["largest_share_of_tight_bound"] <= 1.0
    wide = {count: bias for sigma, count, bias, _ in figures["bias"] if sigma == 6}
    assert wide[64] > wide[500] > wide[5000] > 0


@pytest.mark.slow
def test_the_gate_blocks_whatever_prior_aware_memorisation_says() -> None:
    line = line_of("P2")
    assert len(line["rows"]) == 4
    assert line["figures"]["num_spread"] == 2
    assert line["figures"]["blocked"] >= line["figures"]["spread_extracted"]


@pytest.mark.slow
def test_entities_of_all_frequencies_add_up() -> None:
    counts = dict(zip(column("P3", "sequences"), column("P3", "extractable"), strict=True))
    strata = [count for name, count in counts.items() if name.startswith("entity, ") and name != "entity, all"]
    assert sum(strata) == counts["entity, all"]
    assert 0.0 <= figures_of("P3")["entity_failing"] <= 1.0


@pytest.mark.slow
def test_no_more_sequences_are_extractable_than_were_tested() -> None:
    for cell in column("P5", "extractable"):
        extractable, tested = map(int, cell.split(" of "))
        assert 0 <= extractable <= tested


@pytest.mark.slow
def test_the_lowest_validation_loss_is_no_higher_than_the_last() -> None:
    for lowest, last in zip(column("S3", "lowest loss"), column("S3", "last loss"), strict=True):
        assert float(lowest) <= float(last)


@pytest.mark.slow
def test_extraction_is_measured_over_three_factors() -> None:
    figures = figures_of("Q1")
    assert set(figures["slopes"]) == {"parameters", "context", "copies"}
    assert 0.0 <= figures["control_share"] <= 1.0


@pytest.mark.slow
def test_unaltered_copies_are_the_measure_of_fuzzy_ones() -> None:
    assert column("F1", "of exact copies")[0] == 1.0
    assert figures_of("F1")["replaced_few"] == 3  # the first level of at least 9% of 32 tokens


@pytest.mark.slow
def test_every_order_of_training_is_looked_at() -> None:
    assert set(column("D1", "order")) == {"before", "x1", "x2", "early, when seen", "early", "late"}


@pytest.mark.slow
def test_samples_agree_with_the_chance_of_one_forward_pass() -> None:
    figures = figures_of("H1")
    assert figures["hits_outside_top_k"] == 0
    assert min(figures["singles_inside"], figures["groups_inside"]) >= figures["enough"]
    assert list(figures["discoverable"].values()) == sorted(figures["discoverable"].values())


@pytest.mark.slow
def test_no_bound_on_epsilon_exceeds_its_cap() -> None:
    figures = figures_of("A1")
    assert 0.0 <= figures["bound"] <= figures["cap"]
    assert all(0.0 <= lower <= figures["cap"] for lower, _ in figures["private"])
    assert figures["shuffled_rate"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)  # 100 shuffles


@pytest.mark.slow
def test_the_null_band_of_the_highest_exposure_has_its_width() -> None:
    figures = figures_of("S4")
    low, high = figures["band"]
    assert (low, high) == (-2.41, 7.64)  # one model: log2 1 = 0
    assert len(figures["dp_highest"]) == 1


@pytest.mark.slow
def test_early_stopping_is_no_worse_on_other_text_than_training_to_the_end() -> None:
    losses = dict(zip(column("D2", "way"), column("D2", "loss on other text"), strict=True))
    assert losses["early stopping"] <= losses["plain"]
    assert set(figures_of("D2")["changes"]) == {"deduplicated", "early stopping", "DP"}


@pytest.mark.slow
def test_the_log_belief_ratio_is_the_difference_of_its_two_parts() -> None:
    parts = (column("P1", title) for title in ("log P(s|p)", "log P(s)", "PA, nats"))
    for own, prior, ratio in zip(*parts, strict=True):
        assert own - prior == pytest.approx(ratio, abs=0.016)  # three figures rounded to hundredths


def made_up(name: str, passed: bool) -> dict[str, Any]:
    return {
        "name": name,
        "claim": "It rises.",
        "columns": ["copies", "bits"],
        "rows": [[1, 2.5]],
        "figures": {"slope": 1.0},
        "passed": passed,
        "reason": "slope 1.0.",
        "smoke": False,
        "seconds": 3.0,
        "date": "2026-01-01",
        "versions": {"torch": "2"},
    }


def test_writing_a_study_replaces_its_own_section_alone(tmp_path: Path) -> None:
    reproduce = importlib.import_module("reproduce")
    for name, passed in (("P4", True), ("S1", False), ("P4", False)):
        reproduce.write(made_up(name, passed), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [(line["name"], line["passed"]) for line in lines] == [("S1", False), ("P4", False)]
    text = (tmp_path / "results.md").read_text()
    assert text.count("## P4: FAIL") == 1
    assert "| copies | bits |" in text
    assert "| 1 | 2.5 |" in text


def test_a_verdict_is_one_line() -> None:
    reproduce = importlib.import_module("reproduce")
    assert reproduce.verdict_of(made_up("S1", True)) == "PASS S1: slope 1.0. (3 s)"
    assert reproduce.as_text(made_up("S1", False)).splitlines()[-1] == "FAIL S1: slope 1.0. (3 s)"


def test_a_cache_computes_a_key_once_and_keeps_others_apart(tmp_path: Path) -> None:
    cache = importlib.import_module("tiny_runs").Cache(tmp_path / "runs.jsonl")
    calls: list[tuple[str, int]] = []

    def compute(kind: str, value: int) -> dict[str, Any]:
        calls.append((kind, value))
        return {"kind": kind, "pair": (value, value)}

    assert cache.get("S1", compute, "a", 1) == {"kind": "a", "pair": [1, 1]}
    assert cache.get("S1", compute, "a", 1) == {"kind": "a", "pair": [1, 1]}
    assert cache.get("S2", compute, "a", 1) == {"kind": "a", "pair": [1, 1]}
    assert cache.get("S1", compute, "a", 2)["pair"] == [2, 2]
    assert calls == [("a", 1), ("a", 1), ("a", 2)]


def test_a_near_duplicate_shares_a_fifth_of_its_tokens() -> None:
    mixes = importlib.import_module("counterfactual_mixes")
    rng = importlib.import_module("random").Random(0)
    row = tuple(range(33))
    # Replacements come from outside the row, so what is left is shared: the first token and round(0.2 * 32) = 6 others.
    copy = mixes.near_duplicate(row, [99], rng)
    assert sum(one == other for one, other in zip(row, copy, strict=True)) == 7


def test_altered_copies_differ_in_as_many_tokens_as_asked() -> None:
    fuzzy = importlib.import_module("fuzzy_copies")
    rng = importlib.import_module("random").Random(0)
    row = tuple(range(40))
    changed = fuzzy.altered(row, (4, 37), 12, [99], rng)
    places = [place for place, (one, other) in enumerate(zip(row, changed, strict=True)) if one != other]
    assert len(places) == 12
    assert min(places) >= 4
    assert max(places) < 36
