"""How memorisation grows over a set of audits: with repetitions, with training, with model size; fitted and forecast.

Exposure is the mean of a tier over all formats, in bits; extraction is the share of its canaries, 0..1. Slopes are per tenfold.
Points of one run are of the same canaries at several checkpoints: they depend on each other, are flagged *dependent points*,
and their intervals are too narrow. Points of one plan in several models share canaries, and their intervals are a guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from memguard.audit.comparison import Side, check_evidence, planted, scoring_differences, show_plain, side_of
from memguard.audit.report import AuditReport, CanaryRow
from memguard.documents import SCHEMA_VERSION, Document
from memguard.errors import EvidenceError, InputError
from memguard.files import write_text_atomic
from memguard.metrics.scaling import MIN_DISTINCT, LogLinearFit, Prediction, fit_log_linear, forecast_held_back

Quantity = Literal["exposure", "extracted share"]
Against = Literal["repetitions", "epoch", "step", "model size"]
UNITS: dict[Quantity, Literal["bits", "share"]] = {"exposure": "bits", "extracted share": "share"}
PLANTING = ("plant_once", "count")
DEPENDENT = "dependent points"
DEPENDENT_NOTE = (
    "Points of one run, of the same canaries at several checkpoints, depend on each other: their intervals are too narrow."
)
WORDS: dict[Against, str] = {
    "repetitions": "sightings",
    "epoch": "epochs",
    "step": "steps",
    "model size": "model size",
}


class ScalingPoint(Document):
    """One point of a curve."""

    x: float = Field(description="the variable")
    y: float = Field(description="the quantity, in its unit")
    n: int = Field(description="canaries behind it")
    label: str = Field(description="the report it comes from")


class Forecast(Document):
    """The next point, with its prediction interval."""

    x: float = Field(description="the variable")
    value: float = Field(description="the quantity, in its unit")
    low: float = Field(description="lower end of the prediction interval")
    high: float = Field(description="upper end of it")
    flags: list[str] = Field(description="clipped where it left what is possible")


class HeldBackScore(Document):
    """The last point as forecast from the others, beside what was observed."""

    x: float = Field(description="the variable at the held-back point")
    forecast: float = Field(description="from the other points, in the unit")
    low: float = Field(description="lower end of the prediction interval")
    high: float = Field(description="upper end of it")
    observed: float = Field(description="what was measured there")
    error: float = Field(description="observed minus forecast")
    is_inside: bool = Field(description="the interval held it")


class ScalingFit(Document):
    """One fitted curve: the quantity against log10 of what it grows with."""

    quantity: Quantity = Field(description="what is fitted")
    unit: Literal["bits", "share"] = Field(description="of the quantity")
    against: Against = Field(description="the variable, on a log10 axis; repetitions are sightings that reached the loss")
    tier: int | None = Field(description="planned repetitions; None: the tiers are the points")
    report: str | None = Field(description="the one report behind it; None: several")
    num_parameters: int | None = Field(description="of the one model behind a curve of training, where it is known")
    points: list[ScalingPoint] = Field(description="what the line goes through")
    slope: float = Field(description="for every tenfold")
    low: float = Field(description="lower end of the interval of the slope")
    high: float = Field(description="upper end of it")
    intercept: float = Field(description="at 1 sighting, step or parameter")
    r_squared: float | None = Field(description="None: the quantity does not vary")
    n: int = Field(description="count of points")
    confidence: float = Field(description="of every interval, 0..1")
    flags: list[str] = Field(description="what limits the fit; dependent points: several checkpoints of one run")
    forecast: Forecast | None = Field(description="the next point, None: too few points")
    held_back: HeldBackScore | None = Field(description=f"None: needs {MIN_DISTINCT + 1} points, one of them last")


class Scaling(Document):
    """Every curve that the reports allow, and what the others would need."""

    kind: Literal["memguard scaling"] = Field(default="memguard scaling", description="what this document is")
    schema_version: int = Field(default=SCHEMA_VERSION, description="of this document")
    reports: list[Side] = Field(description="what was read, in order")
    confidence: float = Field(description="of every interval, 0..1")
    fits: list[ScalingFit] = Field(description="one a quantity and variable")
    missing: list[str] = Field(description="what was not fitted, and what it would need")
    notes: list[str] = Field(description="what a reader should know of the fits")
    sentences: list[str] = Field(description="what the fits say, in words")

    def save(self, path: Path) -> None:
        """Write the document as JSON, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


@dataclass(frozen=True)
class _Audit:
    label: str
    report: AuditReport
    side: Side
    rows: list[CanaryRow]

    def tier_rows(self, tier: int) -> list[CanaryRow]:
        return [row for row in self.rows if row.tier == tier]


@dataclass(frozen=True)
class _Curve:
    """What a fit is made of; `x_of_next` gives the next x from the last two distinct ones, None: no next point is meant."""

    against: Against
    tier: int | None
    report: str | None
    points: list[tuple[float, _Audit, list[CanaryRow]]]
    x_of_next: Callable[[float, float], float] | None
    num_parameters: int | None = None


def measure_scaling(reports: Sequence[AuditReport], *, labels: Sequence[str], confidence: float = 0.95) -> Scaling:
    """Fitted slopes of exposure and extraction against repetitions, training and model size, with forecasts.

    Repetitions are sightings that reached the loss, within each report and over all; training needs several reports of one
    plan and size; model size needs reports that know theirs, of which those trained longest are taken.

    Args:
        reports: valid audits made by one procedure, each once.
        labels: what they are called, one a report.
        confidence: of every interval, 0..1.

    Returns:
        A `Scaling`; a curve with too few points is named in `missing` with what it needs, and has no number.

    Raises:
        InputError: no report, or one given twice.
        EvidenceError: a report is invalid, or the reports were made by different procedures.

    Source: Quantifying Memorization (ICLR 2023): log-linear growth in size, copies and context.
    """
    audits = _checked_audits(reports, labels)
    missing: list[str] = []
    notes: list[str] = []
    fits = [
        fit
        for curve in [
            *_repetition_curves(audits, missing),
            *_training_curves(audits, missing, notes),
            *_size_curves(audits, missing, notes),
        ]
        for fit in _fits(curve, confidence, missing)
    ]
    notes += [DEPENDENT_NOTE] if any(DEPENDENT in fit.flags for fit in fits) else []
    return Scaling(
        reports=[one.side for one in audits],
        confidence=confidence,
        fits=fits,
        missing=list(dict.fromkeys(missing)),
        notes=notes,
        sentences=[_sentence(fit) for fit in fits],
    )


def _checked_audits(reports: Sequence[AuditReport], labels: Sequence[str]) -> list[_Audit]:
    if not reports or len(reports) != len(labels):
        raise InputError(f"scaling needs at least one report and a label for each, got {len(reports)} and {len(labels)}.")
    for label, report in zip(labels, reports, strict=True):
        check_evidence(report, label)
    sides = [side_of(report, label) for label, report in zip(labels, reports, strict=True)]
    digests = [side.report_digest for side in sides]
    for index, digest in enumerate(digests):
        if digest in digests[:index]:
            raise InputError(
                f"report '{labels[index]}' is the same as '{labels[digests.index(digest)]}'. Give each report once."
            )
    differences = scoring_differences(reports) + _mixed(reports)
    if differences:
        raise EvidenceError(f"the reports were not made by one procedure: {'; '.join(differences)}.")
    return [_Audit(side.label, report, side, planted(report)) for side, report in zip(sides, reports, strict=True)]


def _mixed(reports: Sequence[AuditReport]) -> list[str]:
    """What differs in ranking or planting; a ledger that is missing is not held against the others."""
    found = []
    for part, fields in (("procedure", ("references", "references_per_name", "exact")), ("ledger", PLANTING)):
        for field in fields:
            values = dict.fromkeys(getattr(getattr(report, part), field) for report in reports)
            known = [str(value) for value in values if value is not None]
            if len(known) > 1:
                found.append(f"the {part}'s {field} differs ({', '.join(known)})")
    return found


# -- the curves


def _ratio_again(previous: float, last: float) -> float:
    return last * last / previous


def _step_again(previous: float, last: float) -> float:
    return 2 * last - previous


def _tiers(audits: Iterable[_Audit]) -> list[int]:
    return sorted({row.tier for one in audits for row in one.rows})


def _repetition_curves(audits: Sequence[_Audit], missing: list[str]) -> list[_Curve]:
    """Tiers against the mean number of sightings, within each report and over all of them."""
    curves, everything = [], []
    for one in audits:
        if any(row.num_seen is None for row in one.rows):
            missing.append(f"sightings: report '{one.label}' has no ledger that says how often canaries were seen.")
            continue
        points = []
        for tier in _tiers([one]):
            rows = one.tier_rows(tier)
            seen = float(np.mean([row.num_seen for row in rows if row.num_seen is not None]))
            if seen > 0:
                points.append((seen, one, rows))
        curves.append(_Curve("repetitions", None, one.label, points, _ratio_again))
        everything += points
    if len(curves) > 1:
        curves.append(_Curve("repetitions", None, None, everything, None))
    return curves


def _training_curves(audits: Sequence[_Audit], missing: list[str], notes: list[str]) -> list[_Curve]:
    """Each tier of one run against epochs, or steps where epochs are not known."""
    runs: dict[tuple[str, int | None], list[_Audit]] = {}
    for one in audits:
        runs.setdefault(_run_of(one), []).append(one)
    curves = []
    for (_, num_parameters), members in runs.items():
        against: Against = "epoch" if all(one.side.subject.epoch is not None for one in members) else "step"
        times = [one.side.subject.epoch if against == "epoch" else one.side.subject.global_step for one in members]
        timed = [(float(time), one) for time, one in zip(times, members, strict=True) if time is not None and time > 0]
        if len({time for time, _ in timed}) < 2:
            continue  # one checkpoint is no curve
        unseen = [one.label for one in members if one not in [kept for _, kept in timed]]
        notes += [f"Report '{label}' has no step above 0 and is left out of the curves of training." for label in unseen]
        for tier in _tiers(members):
            points = [(time, one, one.tier_rows(tier)) for time, one in timed if one.tier_rows(tier)]
            curves.append(_Curve(against, tier, None, points, _step_again, num_parameters))
    if not curves:
        missing.append(f"training: needs {MIN_DISTINCT} reports of one plan and model size at different steps.")
    return curves


def _size_curves(audits: Sequence[_Audit], missing: list[str], notes: list[str]) -> list[_Curve]:
    """Each tier against the number of parameters, each size at the most training there is of it."""
    unknown = [one.label for one in audits if one.side.num_parameters is None]
    if unknown:
        missing.append(f"model size: report '{unknown[0]}' does not know its model's size ({len(unknown)} in all).")
    longest: dict[int, list[_Audit]] = {}
    for one in audits:
        if one.side.num_parameters is not None:
            longest.setdefault(one.side.num_parameters, []).append(one)
    if len(longest) < 2:
        if not unknown:
            missing.append(f"model size: needs reports of {MIN_DISTINCT} sizes, got {len(longest)}.")
        return []
    kept = [(float(size), one) for size, members in longest.items() for one in _most_trained(members)]
    steps = sorted({one.side.subject.global_step or 0 for _, one in kept})
    if len(steps) > 1:
        notes.append(
            f"The model sizes were trained for {steps[0]:,} to {steps[-1]:,} steps, which their curves do not tell apart."
        )
    return [
        _Curve(
            "model size", tier, None, [(x, one, one.tier_rows(tier)) for x, one in kept if one.tier_rows(tier)], _ratio_again
        )
        for tier in _tiers(one for _, one in kept)
    ]


def _most_trained(audits: Sequence[_Audit]) -> list[_Audit]:
    most = max(one.side.subject.global_step or 0 for one in audits)
    return [one for one in audits if (one.side.subject.global_step or 0) == most]


# -- the fits


def _fits(curve: _Curve, confidence: float, missing: list[str]) -> Iterable[ScalingFit]:
    points = sorted(curve.points, key=lambda point: point[0])
    distinct = sorted({x for x, _, _ in points})
    if len(distinct) < MIN_DISTINCT:
        where = "" if curve.report is None else f" in '{curve.report}'"
        missing.append(f"{WORDS[curve.against]}{where}: needs {MIN_DISTINCT} different values above 0, got {len(distinct)}.")
        return
    rows = [row for _, _, members in points for row in members]
    cap = max(row.exposure.cap_bits for row in rows)
    shared = _dependence_flags([audit for _, audit, _ in points])
    yield _fit(curve, "exposure", points, (0.0, cap), confidence, [*_estimator_flags(rows), *shared])
    yield _fit(curve, "extracted share", points, (0.0, 1.0), confidence, shared)


def _dependence_flags(audits: Sequence[_Audit]) -> list[str]:
    """*dependent points*: several checkpoints of one plan and model size, so of one run, are in one curve."""
    checkpoints = {one.side.report_digest: _run_of(one) for one in audits}
    return [DEPENDENT] if len(set(checkpoints.values())) < len(checkpoints) else []


def _run_of(audit: _Audit) -> tuple[str, int | None]:
    return audit.side.plan_digest, audit.side.num_parameters


def _estimator_flags(rows: Sequence[CanaryRow]) -> list[str]:
    """*mixed estimators*: sampled and known ranks in one curve; *capped*: some exposure may be larger than it says."""
    mixed = ["mixed estimators"] if len({row.exposure.method for row in rows}) > 1 else []
    return [*mixed, "capped"] if any("capped" in row.exposure.flags for row in rows) else mixed


def _fit(
    curve: _Curve,
    quantity: Quantity,
    points: Sequence[tuple[float, _Audit, list[CanaryRow]]],
    limits: tuple[float, float],
    confidence: float,
    flags: list[str],
) -> ScalingFit:
    x, y = [point[0] for point in points], [_value(quantity, members) for _, _, members in points]
    fit = fit_log_linear(x, y, confidence=confidence)
    last = sorted(set(x))[-2:]
    return ScalingFit(
        quantity=quantity,
        unit=UNITS[quantity],
        against=curve.against,
        tier=curve.tier,
        report=curve.report,
        num_parameters=curve.num_parameters,
        points=[
            ScalingPoint(x=one_x, y=one_y, n=len(members), label=one.label)
            for one_x, one_y, (_, one, members) in zip(x, y, points, strict=True)
        ],
        slope=fit.slope,
        low=fit.low,
        high=fit.high,
        intercept=fit.intercept,
        r_squared=None if np.isnan(fit.r_squared) else fit.r_squared,
        n=fit.n,
        confidence=confidence,
        flags=[*fit.flags, *flags],
        forecast=_forecast(fit, curve.x_of_next(last[0], last[1]), limits) if curve.x_of_next else None,
        held_back=_held_back(x, y, limits, confidence) if curve.x_of_next else None,
    )


def _value(quantity: Quantity, rows: Sequence[CanaryRow]) -> float:
    if quantity == "exposure":
        return float(np.mean([row.exposure.bits for row in rows if row.exposure.bits is not None]))
    return sum(row.is_extracted for row in rows) / len(rows)


def _forecast(fit: LogLinearFit, x: float, limits: tuple[float, float]) -> Forecast | None:
    if fit.flags:  # no residual, no interval: a number alone would look certain
        return None
    found: Prediction = fit.predict(x, limits=limits)
    return Forecast(x=x, value=found.value, low=found.low, high=found.high, flags=list(found.flags))


def _held_back(x: Sequence[float], y: Sequence[float], limits: tuple[float, float], confidence: float) -> HeldBackScore | None:
    if len(set(x)) <= MIN_DISTINCT or x[-1] == x[-2]:
        return None
    held = forecast_held_back(x, y, confidence=confidence, limits=limits)
    if held.fit.flags:
        return None
    one = held.forecast
    return HeldBackScore(
        x=one.x,
        forecast=one.value,
        low=one.low,
        high=one.high,
        observed=held.observed,
        error=held.error,
        is_inside=held.is_inside,
    )


# -- the sentences


def _sentence(fit: ScalingFit) -> str:
    """Slope, forecast and held-back score of one curve in plain words."""
    is_share = fit.unit == "share"
    unit = "percentage points" if is_share else "bits"
    shown = [show_plain(100 * value if is_share else value) for value in (fit.slope, fit.low, fit.high)]
    of_tier = "" if fit.tier is None else f" of tier {fit.tier}"
    where = "" if fit.report is None else f" in '{fit.report}'"
    where += "" if fit.num_parameters is None else f" of the model of {fit.num_parameters:,} parameters"
    what = "The extracted share" if is_share else "Exposure"
    if "no spread" in fit.flags:
        sizes = [point.n for point in fit.points]
        number = " to ".join(f"{one:,}" for one in sorted({min(sizes), max(sizes)}))
        level = f"{show_plain(100 * fit.intercept)}%" if is_share else f"{show_plain(fit.intercept)} bits"
        points = f"all {fit.n} points of {WORDS[fit.against]}{where}, of {number} canaries each"
        return f"{what}{of_tier} is {level} at {points}; there is no slope to fit."
    ends = f"{_percent(fit.confidence)} interval {shown[1]} to {shown[2]}"
    text = f"{what}{of_tier} changes by {shown[0]} {unit} ({ends}) for tenfold {WORDS[fit.against]}{where}"
    text += f", over {fit.n} points (R squared {fit.r_squared:.2f})"
    return text + _forecast_words(fit, is_share) + "."


def _forecast_words(fit: ScalingFit, is_share: bool) -> str:
    unit = "%" if is_share else " bits"

    def show(*values: float) -> str:
        return " to ".join(show_plain(100 * value if is_share else value) for value in values) + unit

    text = ""
    if fit.forecast is not None:
        one = fit.forecast
        clipped = ", clipped to what can be measured" if "clipped" in one.flags else ""
        at = f"{one.x:,.6g} {'parameters' if fit.against == 'model size' else WORDS[fit.against]}"
        ends = f"{_percent(fit.confidence)} prediction interval {show(one.low, one.high)}{clipped}"
        text += f"; at {at} it is forecast at {show(one.value)} ({ends})"
    if fit.held_back is not None:
        held = fit.held_back
        verdict = "inside" if held.is_inside else "outside"
        text += f"; the last point, held back, was forecast at {show(held.forecast)} and is {show(held.observed)}: {verdict}"
        text += f" its {_percent(fit.confidence)} interval"
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
