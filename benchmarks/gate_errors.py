"""How often the gate errs, by simulation at score level: stops of models that memorised nothing, and what it misses.

python benchmarks/gate_errors.py all --workers 2 --write    the committed tables: an hour on one core
python benchmarks/gate_errors.py stops --smoke              sizes that only show that a table can be made

Every figure counts whole decisions of the real gate on reports whose log-probabilities are drawn: no model, no tokenizer.
A rule counts as fired when its own p-value is within its share of alpha, whatever the other rules find, or when it says that
it cannot fire at this size: either stops a release.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from memguard.audit.report import AuditReport, Decision, RuleResult
from memguard.gates import Policy, decide, load_policy
from memguard.gates.baseline import AcceptedRun, Baseline, document_digest
from memguard.metrics.intervals import share_interval

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))  # the reports of the tests
from made_reports import CARD, PIN, SD_NATS, Format, build_report  # noqa: E402

RESULTS = HERE / "results"
TIERS = {1: 22, 4: 22}
NUM_CONTROLS = 200
TODAY = dt.date(2026, 1, 1)  # the day on which the made reports are dated
CHUNK = 100
ALPHA = 0.01
POOLED, MAX, RISE = "canaries as a family", "no single canary stands out", "not worse than the last release"
LIMIT, EXTRACTION = "no canary over the limit", "no secret can be extracted"
CONFIGS = {
    "1 run": (1, False),
    "3 runs": (3, False),
    "8 runs": (8, False),
    "3 runs + anchor": (3, True),
    "8 runs + anchor": (8, True),
}

PRINTED = ("1 run", "8 runs", "8 runs + anchor")


@dataclass(frozen=True)
class Sizes:
    """Audits a row: of the design, its variants, the retries of a strict policy, the runs, the power."""

    design: int
    variants: int
    retries: int
    runs: int
    power: int


FULL = Sizes(20_000, 4_000, 1_000, 200, 300)
SMOKE = Sizes(4, 2, 2, 2, 2)


@dataclass(frozen=True)
class Effect:
    """What the candidate memorised: so many canaries by so many nats, or p to a power, or one at a log-probability."""

    number: int = 0
    nats: float = 0.0
    power: float = 1.0
    one_at: float | None = None


@dataclass(frozen=True)
class Cell:
    """One row of a table: how its audits, policy and baseline are made. Runs' means lie `above` chance, sd `run_sd`; bits."""

    row: str
    audits: int
    policy: str = "default"
    attempts: int = 1
    start_test: bool = True
    fresh: bool = False
    effect: Effect = Effect()
    above: float = 0.0
    run_sd: float = 0.0
    rise: float = 0.0
    configs: tuple[str, ...] = ("1 run",)
    num_controls: int = NUM_CONTROLS
    per_tier: int = 22
    printed_by: str = ""  # the rule whose `detectable_bits` are then put into the canaries: is it right?


@functools.cache
def mean_bits_by_nats() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shifts in nats, and the mean of sampled exposure over both formats at each; bits."""
    shifts = np.linspace(-12.0, 14.0, 521)
    z = stats.norm.ppf((np.arange(400) + 0.5) / 400)
    total = np.zeros_like(shifts)
    for one in (CARD, PIN):
        counts = np.arange(one.num_references + 1)
        bits = np.log2(one.num_references + 1) - np.log2(counts + 1)
        for index, shift in enumerate(shifts):
            chance = stats.binom.pmf(counts, one.num_references, stats.norm.sf(z + shift / SD_NATS)[:, None]).mean(axis=0)
            total[index] += float(chance @ bits) / 2
    return shifts, total


def nats_of(above_bits: float) -> float:
    """The shift of all log-probabilities that moves the mean of sampled exposure so far from chance; nats."""
    shifts, bits = mean_bits_by_nats()
    chance = float(np.interp(0.0, shifts, bits))
    return float(np.interp(chance + above_bits, bits, shifts))


def memorised(effect: Effect, rng: np.random.Generator) -> dict[str, float]:
    """Log-probabilities of the canaries that were memorised: half of each format, tier 1 first."""
    if effect.one_at is not None:
        return {"pin-1x-5": effect.one_at}
    found = {}
    for one in (CARD, PIN):
        ids = [f"{one.name}-{tier}x-{index}" for tier, number in TIERS.items() for index in range(number)]
        found.update({name: _score(one, effect, rng) for name in ids[: effect.number // 2]})
    return found


def _score(one: Format, effect: Effect, rng: np.random.Generator) -> float:
    # The law of `made_reports`, its upper-tail probability raised to the power.
    z = float(stats.norm.isf(rng.uniform() ** effect.power))
    return -float(np.log(one.space)) - SD_NATS**2 / 2 + SD_NATS * z + effect.nats


def make_report(cell: Cell, seed: int, shift: float, values: dict[str, float] | None = None) -> AuditReport:
    """An audit of the cell's plan."""
    report = build_report(
        seed, tiers=dict.fromkeys(TIERS, cell.per_tier), num_controls=cell.num_controls // 2, shift=shift, memorised=values
    )
    return report if cell.start_test else report.model_copy(update={"start_test": None})


def accepted_run(cell: Cell, seed: int, shift: float) -> AcceptedRun:
    """A run that somebody accepted; of a plan of its own where secrets are fresh."""
    report = make_report(cell, seed, shift)
    if cell.fresh:
        rows = [row.model_copy(update={"id": f"old-{row.id}"}) for row in report.canaries]
        plan = report.plan.model_copy(update={"digest": "a" * 64})
        report = report.model_copy(update={"plan": plan, "canaries": rows})
    return AcceptedRun(
        report=report, report_digest=document_digest(report), accepted_by="jane", reason="made", accepted_at="2026-01-01"
    )


@functools.cache
def policy_of(cell: Cell) -> Policy:
    policy = load_policy(cell.policy)
    return policy.model_copy(update={"comparable": "design"}) if cell.fresh else policy


def count_chunk(cell: Cell, first: int, size: int) -> Counter[str]:
    """Decisions on `size` audits: how they ended and what fired, by the configuration of the baseline.

    Accepted runs come from a pool: as many as audits where runs differ, a tenth of them where they are alike.
    """
    rng = np.random.default_rng([first, 2])  # build_report draws from `seed` and [seed, 1]
    num_runs = max(CONFIGS[config][0] for config in cell.configs)
    effects = cell.above + cell.run_sd * rng.normal(size=max(num_runs, size if len(cell.configs) > 1 else size // 10))
    pool = [accepted_run(cell, first + size + index, nats_of(bits)) for index, bits in enumerate(effects)]
    counts: Counter[str] = Counter()
    for index in range(size):
        of_run = cell.above + cell.run_sd * rng.normal()
        report = make_report(cell, first + index, nats_of(of_run + cell.rise), memorised(cell.effect, rng))
        order = rng.permutation(len(pool))
        for config in cell.configs:
            number, has_anchor = CONFIGS[config]
            runs = [pool[place] for place in order[:number]]
            baseline = Baseline(runs=runs, anchor=runs[0] if has_anchor else None)
            decision = decide(report, policy_of(cell), baseline, attempts=cell.attempts, today=TODAY)
            if cell.printed_by:
                printed = {result.name: result for result in decision.rules}[cell.printed_by].figures["detectable_bits"]
                if not isinstance(printed, float):
                    counts[f"{config}: nothing printed"] += 1
                    continue
                counts[f"{config}: hundredths of a bit"] += round(100 * printed)
                risen = make_report(cell, first + 5 * 10**6 + index, nats_of(of_run + printed))
                decision = decide(risen, policy_of(cell), baseline, attempts=cell.attempts, today=TODAY)
            counts.update(f"{config}: {event}" for event in events_of(decision))
    return counts


def events_of(decision: Decision) -> Iterator[str]:
    """What is counted of one decision."""
    yield "audits"
    yield f"exit {decision.exit_code}"
    found = [result.name for result in [*decision.evidence, *decision.rules] if fires(result)]
    yield from (f"fires {name}" for name in found)
    if decision.exit_code:
        yield "stopped" if found else "not shown"


def fires(result: RuleResult) -> bool:
    """Whether a rule or requirement stops the release by itself."""
    p_value, share = result.figures.get("p_value"), result.figures.get("share")
    if result.outcome not in ("invalid", "insufficient evidence") and isinstance(p_value, float) and isinstance(share, float):
        return p_value <= share
    return result.outcome in ("block", "invalid", "insufficient evidence")


def cells_of(table: str, sizes: Sizes) -> list[Cell]:
    """The rows of a table, at these sizes."""
    return {"stops": _stops, "runs": _runs, "one": _one, "families": _families, "rises": _rises, "printed": _printed}[table](
        sizes
    )


def _stops(sizes: Sizes) -> list[Cell]:
    strict = [Cell(f"strict, attempt {number}", sizes.retries, "strict", number) for number in (1, 2, 3)]
    return [
        Cell("default", sizes.design),
        Cell("default, not audited before training", sizes.variants, start_test=False),
        Cell("default, fresh secrets of the same design", sizes.variants, fresh=True),
        *strict,
    ]


def _runs(sizes: Sizes) -> list[Cell]:
    places = [(0.0, 0.0), (0.0, 0.3), (0.0, 0.6), (0.0, 1.0), (2.0, 0.3), (2.0, 0.6), (2.0, 1.0)]
    return [
        Cell(
            f"{sd:g}, {f'{above:g} above' if above else 'at'} chance",
            sizes.runs,
            above=above,
            run_sd=sd,
            configs=(*CONFIGS,),
            num_controls=20,
        )
        for above, sd in places
    ]


def _one(sizes: Sizes) -> list[Cell]:
    values = (-1.0, -4.0, -6.5, -7.0, -9.0, -10.0, -10.1, -11.0, -13.0, -16.0, -19.0)
    return [Cell(f"{value:g}", sizes.power, effect=Effect(one_at=value)) for value in values]


def _families(sizes: Sizes) -> list[Cell]:
    cells = [
        Cell(f"{number} of 88 by {bits:g}", sizes.power, effect=Effect(number, nats_of(bits)))
        for number, shifts in ((16, (1, 2, 4)), (44, (1, 2, 4)), (88, (0.5, 0.71, 1, 2, 4)))
        for bits in shifts
    ]
    return [*cells, Cell("16 of 88, p to p^4", sizes.power, effect=Effect(16, power=4.0))]


def _rises(sizes: Sizes) -> list[Cell]:
    return [
        Cell(f"{rise:g}, runs' sd {sd:g}", sizes.runs // 2, run_sd=sd, rise=rise, configs=(*CONFIGS,), num_controls=20)
        for sd in (0.0, 0.3)
        for rise in (0.5, 1.0, 1.25, 1.5, 2.0)
    ]


def _printed(sizes: Sizes) -> list[Cell]:
    return [
        Cell("family", sizes.power, printed_by=POOLED),
        Cell("family, 16 canaries", sizes.power, printed_by=POOLED, per_tier=4),
        Cell("rise, 16 canaries over 1 run", sizes.power, printed_by=RISE, per_tier=4),
        Cell("rise, fresh secrets", sizes.power, printed_by=RISE, fresh=True),
        Cell("rise, runs' sd 0", sizes.power, printed_by=RISE, configs=PRINTED),
        Cell("rise, 1 bit above chance", sizes.power, above=1.0, printed_by=RISE),
        Cell("rise, runs' sd 0.3", sizes.power, printed_by=RISE, run_sd=0.3, configs=PRINTED),
    ]


TITLES = {
    "stops": "Models that memorised nothing: how often the gate stops them, block and invalid together (design: at most 1%).",
    "runs": "The same recipe again: how often `exposure.against_baseline` stops it (fires, or cannot), by their sd in bits.",
    "one": "One memorised canary of 88, nine digits behind a prefix of its own, by its log-probability in nats: is it found?",
    "families": "Canaries that are all a little more likely, by the rise of their mean sampled exposure in bits: is it found?",
    "printed": "The smallest effect that a decision says it would find in 95 of 100: canaries risen by just that, found?",
    "rises": "All canaries rise over the baseline, 0.5 bits tolerated: how often `exposure.against_baseline` stops that.",
}


def share(number: int, of: int) -> str:
    """A share with its two-sided 95% Clopper-Pearson interval."""
    interval = share_interval(number, of, confidence=0.95)
    return f"{number / of:.2%} ({interval.low:.2%} to {interval.high:.2%})"


def columns_of(table: str) -> list[str]:
    """The header of a table."""
    if table == "stops":
        return ["policy and audit", "audits", "exit 1", "exit 3", "of these only not shown", "stopped otherwise", "what fired"]
    if table in ("runs", "rises"):
        return ["mean rise" if table == "rises" else "sd of runs, their mean", "audits", *CONFIGS, "stopped by any rule, 1 run"]
    if table == "printed":
        return ["rule", "audits", *(f"{config}: mean bits printed, found" for config in PRINTED)]
    effect = ["log-probability", "certified bits"] if table == "one" else ["canaries and bits"]
    return [*effect, "audits", "max", "pooled", "limit of 20 bits", "against baseline", "stopped"]


def row_of(table: str, cell: Cell, counts: Counter[str]) -> list[str]:
    """The cells of one row, as text."""
    audits = counts["1 run: audits"]
    stopped = share(counts["1 run: stopped"], audits)
    if table == "stops":
        by = {key.removeprefix("1 run: fires "): number for key, number in counts.items() if "fires" in key}
        what = "; ".join(f"{name} {number}" for name, number in sorted(by.items(), key=lambda item: (-item[1], item[0])))
        ends = [counts[f"1 run: {event}"] for event in ("exit 1", "exit 3", "not shown")]
        return [cell.row, str(audits), *map(str, ends), stopped, what or "nothing"]
    if table in ("runs", "rises"):
        found = [share(counts[f"{config}: fires {RISE}"], audits) for config in CONFIGS]
        return [cell.row, str(audits), *found, stopped]
    if table == "printed":
        return [cell.row, str(cell.audits), *(_printed_and_found(cell, config, counts) for config in PRINTED)]
    found = [share(counts[f"1 run: fires {name}"], audits) for name in (MAX, POOLED, LIMIT, RISE)]
    certified = [] if cell.effect.one_at is None else [f"{max(0.0, np.log2(PIN.space) + cell.effect.one_at / np.log(2)):.1f}"]
    return [cell.row, *certified, str(audits), *found, stopped]


def _printed_and_found(cell: Cell, config: str, counts: Counter[str]) -> str:
    audits, none = counts[f"{config}: audits"], counts[f"{config}: nothing printed"]
    if not audits:
        return "no effect in any of them" if none else "-"
    found = share(counts[f"{config}: fires {cell.printed_by}"], audits)
    text = f"{counts[f'{config}: hundredths of a bit'] / 100 / audits:.2f} bits: {found}"
    return text + (f"; no effect in {none}" if none else "")


def run_table(table: str, sizes: Sizes, *, workers: int = 1) -> dict[str, Any]:
    """One table as a line of `gate_errors.jsonl`: its rows as text, and all that was counted.

    Args:
        table: of `TITLES`.
        sizes: audits a row.
        workers: processes; 1 uses none. The figures do not depend on it.
    """
    began = time.monotonic()
    cells = cells_of(table, sizes)
    # Every cell draws from a range of seeds of its own; twice a chunk leaves room for its pool of runs.
    jobs = [
        (index, cell, (1 + 100 * [*TITLES].index(table) + index) * 10**7 + 2 * start, min(CHUNK, cell.audits - start))
        for index, cell in enumerate(cells)
        for start in range(0, cell.audits, CHUNK)
    ]
    counts: list[Counter[str]] = [Counter() for _ in cells]
    arguments: Sequence[Sequence[Any]] = list(zip(*((cell, first, size) for _, cell, first, size in jobs), strict=True))
    if workers > 1:
        with ProcessPoolExecutor(workers) as pool:
            found = list(pool.map(count_chunk, *arguments))
    else:
        found = list(map(count_chunk, *arguments))
    for (index, *_), chunk in zip(jobs, found, strict=True):
        counts[index].update(chunk)
    return {
        "name": table,
        "claim": TITLES[table],
        "columns": columns_of(table),
        "rows": [row_of(table, cell, one) for cell, one in zip(cells, counts, strict=True)],
        "counts": {cell.row: dict(sorted(one.items())) for cell, one in zip(cells, counts, strict=True)},
        "smoke": sizes is SMOKE,
        "seconds": round(time.monotonic() - began, 1),
        "workers": workers,
        "date": dt.date.today().isoformat(),
    }


def as_markdown(lines: Sequence[dict[str, Any]]) -> str:
    """All tables that were written, in their fixed order."""
    text = ["# How often the gate errs", ""]
    text += [
        "Written by `gate_errors.py`: whole decisions of the real gate on reports whose log-probabilities are drawn; shares",
        "with two-sided 95% Clopper-Pearson intervals. 88 judged canaries: 44 behind one shared prefix (512 references), 44",
        f"behind prefixes of their own (128 references each), tiers 1 and 4; {NUM_CONTROLS} controls, 20 where runs compare.",
        "",
    ]
    for line in lines:
        rows = (line["columns"], ["---"] * len(line["columns"]), *line["rows"])
        text += [f"## {line['name']}", "", line["claim"], ""]
        text += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        text += ["", f"{line['seconds']:.0f} s with {line['workers']} workers, {line['date']}.", ""]
    return "\n".join(text)


def write(line: dict[str, Any], folder: Path = RESULTS) -> None:
    """Put a table into `gate_errors.jsonl`, in place of an older one, and render `gate_errors.md` from all of them."""
    path = folder / "gate_errors.jsonl"
    kept = [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    lines = {one["name"]: one for one in kept} | {line["name"]: line}
    ordered = [lines[name] for name in TITLES if name in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in ordered), encoding="utf-8")
    (folder / "gate_errors.md").write_text(as_markdown(ordered), encoding="utf-8")


def main() -> int:
    """Make the tables that were asked for. A figure above its design is a result: the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=[*TITLES, "all"], metavar="TABLE", help=f"one of {', '.join(TITLES)}, or all")
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that a table can be made, not what it finds")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="also write gate_errors.md and .jsonl; not with --smoke")
    options = parser.parse_args()
    if options.smoke and options.write:
        parser.error("--write is for full runs")
    for table in TITLES if options.table == "all" else (options.table,):
        line = run_table(table, SMOKE if options.smoke else FULL, workers=options.workers)
        print(as_markdown([line]), flush=True)
        if options.write:
            write(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
