"""Two ways of one result in one process: alternating runs, medians, extra memory, and what a bench reports.

Times are seconds of wall clock; a ratio is the naive way's median over ours, so above 1 ours is faster. Machines differ in
seconds and much less in ratios, so only ratios have targets.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

SIGNS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Pair:
    """Medians of two ways, seconds, and what their last runs gave."""

    baseline_s: float
    ours_s: float
    baseline: Any
    ours: Any
    runs: int


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it gave."""
    began = time.perf_counter()
    given = call()
    return time.perf_counter() - began, given


def cpu_timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call, those of its threads and child processes with it, and what it gave."""
    began = os.times()
    given = call()
    ended = os.times()
    return sum(ended[:4]) - sum(began[:4]), given


def repeated(call: Callable[[], Any], *, runs: int) -> tuple[float, Any]:
    """Median seconds of some calls, and what the last one gave."""
    taken = [timed(call) for _ in range(runs)]
    return statistics.median(seconds for seconds, _ in taken), taken[-1][1]


def alternate(baseline: Callable[[], Any], ours: Callable[[], Any], *, runs: int) -> Pair:
    """Both ways in turns, so that a busy machine slows both; the median leaves out a slow first run."""
    return _in_turns(baseline, ours, runs, timed)


def cpu_alternate(baseline: Callable[[], Any], ours: Callable[[], Any], *, runs: int) -> Pair:
    """`alternate` by CPU seconds, for ways that use several threads or processes."""
    return _in_turns(baseline, ours, runs, cpu_timed)


def _in_turns(
    baseline: Callable[[], Any], ours: Callable[[], Any], runs: int, measured: Callable[[Callable[[], Any]], tuple[float, Any]]
) -> Pair:
    seconds: dict[Callable[[], Any], list[float]] = {baseline: [], ours: []}
    given: dict[Callable[[], Any], Any] = {}
    for _ in range(runs):
        for way in (baseline, ours):
            took, given[way] = measured(way)
            seconds[way].append(took)
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return Pair(medians[baseline], medians[ours], given[baseline], given[ours], runs)


def peak_extra_bytes(call: Callable[[], Any]) -> int:
    """The most that tensors made inside the call held at a time, by torch's allocator on the CPU; bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)


def extra_max_rss(call: Callable[[], Any]) -> int:
    """How much the call raised this process's largest resident size; bytes. Only meant for a fresh process on Linux.

    Read from the process's own peak: `ru_maxrss` of a child begins at its parent's.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is resident now
    before = _peak_resident()
    call()
    return _peak_resident() - before


def _peak_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def in_child(script: Path, *arguments: str) -> int:
    """The integer that a bench's own file prints in a process of its own."""
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


def meets(fields: dict[str, Any], target: Sequence[str]) -> bool:
    """Whether the fields are as every 'field sign value' says."""
    conditions = [one.split(" ") for one in target]
    return all(SIGNS[sign](fields[field], json.loads(value)) for field, sign, value in conditions)


def report(
    name: str,
    *,
    baseline_s: float,
    ours_s: float,
    max_abs_err: float,
    model: str,
    template: str | None,
    lengths: dict[str, int],
    runs: int,
    target: Sequence[str],
    **more: Any,
) -> dict[str, Any]:
    """One bench's line.

    Args:
        name: of the bench.
        baseline_s: median of the naive way; seconds.
        ours_s: median of memguard's; seconds.
        max_abs_err: largest difference of what both gave; nats.
        model: in words.
        template: text around the secret, where there is one.
        lengths: sizes of the task; tokens, rows, candidates.
        runs: timed runs of each way.
        target: conditions as 'field sign value'.
        more: further fields.
    """
    fields = {
        "name": name,
        "baseline_s": _rounded(baseline_s),
        "ours_s": _rounded(ours_s),
        "ratio": _rounded(baseline_s / ours_s),
        "max_abs_err": _rounded(max_abs_err),
        "model": model,
        "template": template,
        "lengths": lengths,
        "runs": runs,
        "date": dt.date.today().isoformat(),
        **{field: _rounded(value) if isinstance(value, float) else value for field, value in more.items()},
    }
    return {**fields, "target": list(target), "meets_target": meets(fields, target)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
