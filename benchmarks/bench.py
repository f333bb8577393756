"""Measures memguard's scoring against the plain way of doing the same: ratios on one thread, in one process.

python benchmarks/bench.py all                    a small table a bench
python benchmarks/bench.py pa_verdict --json      one JSON line
python benchmarks/bench.py all --write            benchmarks/results/results.jsonl and results.md
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging
from writing import write_results

NAMES = (
    "fused_head",
    "exposure_enumeration",
    "exact_rank",
    "pa_verdict",
    "greedy_extraction",
    "audit_vs_step",
    "audit_vs_memaudit",
    "gate_cold_start",
    "trace_spans",
    "trace_full",
    "index_build",
)
RESULTS = Path(__file__).parent / "results"


def show(fields: dict[str, Any]) -> None:
    """One bench as a table of its fields."""
    table = Table(title=fields["name"], title_justify="left", show_header=False)
    for field, value in fields.items():
        if field != "name" and value is not None:
            table.add_row(field, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    Console(width=118).print(table)


def main() -> int:
    """Run what was asked for; 1 when a bench could not run. A missed target is a figure, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*NAMES, "all"], metavar="NAME", help=f"one of {', '.join(NAMES)}, or all")
    parser.add_argument("--json", action="store_true", help="one JSON line a bench")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that a bench runs, not how fast")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, metavar="DIR", help="also write lines and a table here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    results: list[dict[str, Any]] = []
    failed = False
    for name in NAMES if options.name == "all" else (options.name,):
        try:
            fields = importlib.import_module(name).run(options.quick)
        except SystemExit as stop:
            print(stop, file=sys.stderr)
            failed = True
            continue
        fields["quick"] = options.quick
        results.append(fields)
        print(json.dumps(fields), flush=True) if options.json else show(fields)
        if options.write is not None:
            write_results(options.write, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
