"""Re-checks the papers' predictions on tiny models on one CPU thread; each study prints a table and PASS or FAIL.

python benchmarks/reproduction/reproduce.py S1            one study, or `all`
python benchmarks/reproduction/reproduce.py all --smoke   sizes that only show that a study runs
python benchmarks/reproduction/reproduce.py S1 --write    also replaces its section of results.md and line of results.jsonl

A FAIL is a result: the predicted direction did not come out at this size. Finished runs are kept under --cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STUDIES = {
    "S1": "estimators",
    "S2": "search_identity",
    "P4": "prior_estimator",
    "P2": "spread_secret",
    "P3": "entities_passages",
    "P5": "prior_by_size",
    "S3": "exposure_timing",
    "Q1": "greedy_scaling",
    "F1": "fuzzy_copies",
    "D1": "dilution",
    "H1": "sampled_extraction",
    "A1": "one_run_audit",
    "S4": "dp_exposure",
    "D2": "mitigations",
    "P1": "counterfactual_mixes",
}


def run_study(name: str, *, smoke: bool, cache: Path | None) -> dict[str, Any]:
    """One study's line: its finding with seconds and versions.

    Args:
        name: of `STUDIES`.
        smoke: small sizes.
        cache: folder for finished runs; None keeps nothing.
    """
    import torch
    import transformers
    from tiny_runs import Cache

    import memguard

    torch.set_num_threads(1)
    study = importlib.import_module(STUDIES[name])
    began = time.monotonic()
    kept = Cache(cache / "runs.jsonl" if cache is not None else None)
    finding = study.run(study.SMOKE if smoke else study.FULL, kept)
    versions = {"memguard": memguard.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        **dataclasses.asdict(finding),
        "smoke": smoke,
        "seconds": round(time.monotonic() - began + sum(kept.kept_s), 1),
        "date": dt.date.today().isoformat(),
        "versions": versions,
    }


def as_text(line: dict[str, Any]) -> str:
    """A study as plain text: claim, table, verdict."""
    cells = [list(map(str, line["columns"])), *([str(cell) for cell in row] for row in line["rows"])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(line["columns"]))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([f"{line['name']}: {line['claim']}", *table, verdict_of(line)])


def verdict_of(line: dict[str, Any]) -> str:
    """The one line PASS or FAIL."""
    return f"{'PASS' if line['passed'] else 'FAIL'} {line['name']}: {line['reason']} ({line['seconds']:.0f} s)"


def as_markdown(lines: list[dict[str, Any]]) -> str:
    """All studies that were written, in their fixed order."""
    text = ["# The papers' predictions on tiny models", ""]
    text += ["Written by `reproduce.py`; one CPU thread, fixed seeds. A FAIL is a result, and its line says why.", ""]
    text += ["| study | verdict | prediction |", "| --- | --- | --- |"]
    text += [f"| {line['name']} | {'PASS' if line['passed'] else 'FAIL'} | {line['claim']} |" for line in lines]
    text += [""]
    for line in lines:
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
        text += [f"## {line['name']}: {'PASS' if line['passed'] else 'FAIL'}", "", line["claim"], ""]
        rows = (line["columns"], ["---"] * len(line["columns"]), *line["rows"])
        text += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
        text += [
            "",
            f"{line['reason'][:1].upper()}{line['reason'][1:]} {line['seconds']:.0f} s; {versions}, {line['date']}.",
            "",
        ]
    return "\n".join(text)


def write(line: dict[str, Any], folder: Path = HERE) -> None:
    """Put a study's line into `results.jsonl`, in place of an older one, and render `results.md` from all of them."""
    path = folder / "results.jsonl"
    kept = [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    lines = {one["name"]: one for one in kept} | {line["name"]: line}
    ordered = [lines[name] for name in STUDIES if name in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in ordered), encoding="utf-8")
    (folder / "results.md").write_text(as_markdown(ordered), encoding="utf-8")


def main() -> int:
    """Run what was asked for. A FAIL is a figure, not an error: the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*STUDIES, "all"], metavar="NAME", help=f"one of {', '.join(STUDIES)}, or all")
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that a study runs, not what it finds")
    parser.add_argument("--json", action="store_true", help="one JSON line a study")
    parser.add_argument("--write", action="store_true", help="also write results.md and results.jsonl; not with --smoke")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="folder for finished runs")
    options = parser.parse_args()
    if options.smoke and options.write:
        parser.error("--write is for full runs")
    sys.path.append(str(HERE.parent))  # text and tokenizer stand beside the benches
    for name in STUDIES if options.name == "all" else (options.name,):
        line = run_study(name, smoke=options.smoke, cache=options.cache)
        print(json.dumps(line) if options.json else as_text(line), flush=True)
        if options.write:
            write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
