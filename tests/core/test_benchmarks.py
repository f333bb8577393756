"""Every bench runs at small sizes and gives what it promises; no time is looked at, and no ratio of times."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench.py"
PROMISED = {
    "name",
    "baseline_s",
    "ours_s",
    "ratio",
    "max_abs_err",
    "model",
    "template",
    "lengths",
    "runs",
    "target",
    "meets_target",
    "quick",
}
# What each bench holds whatever the machine; errors are nats.
BOUNDS = {
    "fused_head": {"max_abs_err": 1e-5},
    "exposure_enumeration": {"max_abs_err": 1e-4},
    "exact_rank": {"max_abs_err": 1e-3, "nodes_expanded": 10_000, "nodes_expanded_near": 10_000, "rank": 1000},
    "pa_verdict": {"max_abs_err": 1e-3},
    "greedy_extraction": {"max_abs_err": 1e-4},
    "audit_vs_step": {"max_abs_err": 1e-4},
    "audit_vs_memaudit": {"max_abs_err": 1e-3},
    "gate_cold_start": {"max_abs_err": 0.0},
    "trace_spans": {"max_abs_err": 0.0},
    "trace_full": {"max_abs_err": 0.0},
    "index_build": {"max_abs_err": 0.0},
}
NEEDS = {"audit_vs_memaudit": "memaudit", "trace_spans": "infini_gram", "index_build": "infini_gram"}
FACTS: dict[str, dict[str, Any]] = {
    "exposure_enumeration": {"num_candidates": 1000, "num_compared": 1000},
    "exact_rank": {"is_exact": True, "is_exact_near": True, "secret_space_size": 10**15},
    "pa_verdict": {"identical_verdicts": True},
    "greedy_extraction": {"identical_outcomes": True},
    "audit_vs_memaudit": {"identical_outcomes": True},
    "gate_cold_start": {"identical_decisions": True},
    "trace_spans": {"identical_spans": True},
    "trace_full": {"identical_outcomes": True},
    "index_build": {"identical_table": True},
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BENCH.exists(), reason="benchmarks are not part of an installed wheel")]


@functools.cache
def run_bench(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), name, "--quick", "--json", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", list(BOUNDS))
def test_a_bench_runs_and_is_right(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    done = run_bench(name)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    fields = json.loads(line)
    assert set(fields) >= PROMISED
    assert fields["name"] == name
    assert {field: fields[field] for field in FACTS.get(name, {})} == FACTS.get(name, {})
    for field, bound in BOUNDS[name].items():
        assert 0 <= fields[field] <= bound, field
    for condition in fields["target"]:
        assert condition.split(" ")[0] in fields


def test_both_verdicts_and_both_outcomes_occur() -> None:
    verdicts = json.loads(run_bench("pa_verdict").stdout)["verdicts"]
    assert {verdict.split(" ")[0] for verdict in verdicts} >= {"PA", "common"}
    fields = json.loads(run_bench("greedy_extraction").stdout)
    assert 0 < fields["num_extracted"] < fields["lengths"]["sequences"]


def test_less_is_sent_through_the_model_and_less_is_held() -> None:
    assert json.loads(run_bench("pa_verdict").stdout)["token_ratio"] > 2
    assert json.loads(run_bench("fused_head").stdout)["memory_ratio"] > 8


def test_results_are_written_without_naming_the_machine(tmp_path: Path) -> None:
    done = run_bench("audit_vs_step", "--write", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["audit_vs_step"]
    table = (tmp_path / "results.md").read_text()
    assert "| audit_vs_step |" in table
    assert "torch" in table
    assert str(tmp_path) not in table


def test_the_lines_of_other_benches_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    write_results = importlib.import_module("writing").write_results

    line = {"baseline_s": 2.0, "ours_s": 1.0, "ratio": 2.0, "max_abs_err": 0.0, "runs": 1, "lengths": {}, "model": "none"}
    line |= {"target": ["ratio >= 1"], "meets_target": True, "quick": False, "date": "2026-01-02"}
    write_results(tmp_path, [line | {"name": "one"}, line | {"name": "two"}])
    write_results(tmp_path, [line | {"name": "one", "ratio": 4.0, "is_cpu_time": True, "date": "2026-03-04"}])
    found = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(one["name"], one["ratio"], one["date"]) for one in found] == [
        ("one", 4.0, "2026-03-04"),
        ("two", 2.0, "2026-01-02"),
    ]
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| one (CPU) | 2 | 1 | 4 | 0 | 1 | ratio >= 1 (4) | yes |" in table
    assert "- two: none; ; 2026-01-02." in table


def test_an_unknown_bench_is_refused() -> None:
    done = run_bench("fastest")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr
