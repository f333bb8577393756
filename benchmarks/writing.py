"""Results on disk: one JSON line a bench, and a table with the machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

SHORT = 4  # figures shown of a number


def write_results(folder: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write `results.jsonl` and `results.md`; the lines of other benches stay, as they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    earlier = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {one["name"]: one for one in earlier} | {one["name"]: one for one in results}
    path.write_text("".join(json.dumps(one) + "\n" for one in found.values()))
    (folder / "results.md").write_text(as_markdown(list(found.values())))


def as_markdown(results: Sequence[dict[str, Any]]) -> str:
    """A row a bench: ratio, error, and whether its targets are met."""
    where = f"{processor()}, {os.cpu_count()} cores, one thread used"
    what = f"torch {torch.__version__}, transformers {transformers.__version__}"
    about = "Medians of alternating runs; ratio = the plain way over memguard's. Seconds of the clock, or of (CPU)."
    lines = ["# Benchmarks", "", f"{where}; {what}. {about}", ""]
    lines += [
        "| bench | the plain way, s | memguard, s | ratio | max error, nats | runs | targets | met |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        targets = "; ".join(f"{target} ({_figure(one[target.split()[0]])})" for target in one["target"])
        figures = [_figure(one[field]) for field in ("baseline_s", "ours_s", "ratio", "max_abs_err", "runs")]
        name = f"{one['name']} (CPU)" if one.get("is_cpu_time") else one["name"]
        lines.append("| " + " | ".join([name, *figures, targets, "yes" if one["meets_target"] else "no"]) + " |")
    lines += ["", *(f"- {one['name']}: {one['model']}; {_lengths(one)}{_measured(one)}; {one['date']}." for one in results)]
    if any(one["quick"] for one in results):
        lines += ["", "Small sizes (`--quick`): these figures say nothing about speed."]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """The processor's model, without anything that names the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.{SHORT}g}" if isinstance(value, float) else str(value)


def _lengths(one: dict[str, Any]) -> str:
    return ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in one["lengths"].items())


def _measured(one: dict[str, Any]) -> str:
    return f"; the plain way {one['baseline_measured']}" if "baseline_measured" in one else ""
