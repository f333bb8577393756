"""What the page and the markdown summary share: the template environment, the headline facts and the order of canaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from memguard.audit.decoding import SETTING_NAMES
from memguard.audit.report import AuditReport, CanaryRow, Decision
from memguard.audit.report_propensity import METRIC_NAMES
from memguard.errors import InputError
from memguard.reporting import formatting, parts, wording
from memguard.reporting.curves import CONTROLS_TIER, expected_control_bits, pool_tiers, trend_points
from memguard.reporting.formatting import show_count, show_number


@dataclass(frozen=True)
class Fact:
    """One headline figure with what it is to be read against."""

    name: str
    value: str
    beside: str


def environment(*, autoescape: bool, finalize: Callable[[Any], Any] | None = None) -> Environment:
    """Templates of this package with the number formats as filters; an unknown name in a template is an error."""
    env = Environment(
        loader=PackageLoader("memguard.reporting"),
        autoescape=autoescape,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    names = ("number", "count", "percent", "value", "yes_no", "size", "tries")
    env.filters.update({name: getattr(formatting, f"show_{name}") for name in names})
    env.globals.update(
        interval=formatting.show_interval,
        share_interval=formatting.show_share_interval,
        rank=formatting.show_rank,
        trend_points=trend_points,
        describe_sampler=wording.describe_sampler,
        describe_threshold=wording.describe_threshold,
        describe_copies=wording.describe_copies,
        describe_not_testable=wording.describe_not_testable,
        describe_decoding=wording.describe_decoding,
        score_names=wording.SCORE_NAMES,
        metric_names=METRIC_NAMES,
        setting_names=SETTING_NAMES,
        metrics_in_tokens=wording.IN_TOKENS,
        shown_records=parts.shown_records,
        row_with=row_with,
    )
    return env


def row_with(rows: Iterable[Any], **values: Any) -> Any | None:
    """The first row that has these values; None where none has."""
    return next((row for row in rows if all(getattr(row, name) == value for name, value in values.items())), None)


def check_same_subject(report: AuditReport, decision: Decision | None) -> None:
    """Refuse to show a decision beside a report that it was not made on."""
    if decision is None:
        return
    ours, theirs = report.subject, decision.subject
    if (ours.digest, ours.global_step) != (theirs.digest, theirs.global_step):
        raise InputError(
            "decision must be about the report's subject, got "
            f"step {theirs.global_step} digest {theirs.digest} for step {ours.global_step} digest {ours.digest}. "
            "Give the decision that the gate wrote for this report."
        )


def most_exposed_first(report: AuditReport) -> list[CanaryRow]:
    """Canaries, positive controls, controls; in each the unscored first, then the most exposed."""
    order = {"canary": 0, "positive_control": 1, "control": 2}

    def key(row: CanaryRow) -> tuple[int, float, str]:
        bits = row.exposure.bits
        return order[row.role], float("-inf") if bits is None else -bits, row.id

    return sorted(report.canaries, key=key)


def facts(report: AuditReport) -> list[Fact]:
    """The four figures that a reader looks for first."""
    return [_extracted(report), _highest(report), _controls(report), _positive_control(report)]


def _extracted(report: AuditReport) -> Fact:
    rows = [row for row in report.canaries if row.role == "canary"]
    possible = sum(row.may_be_extracted and not row.is_extracted for row in rows)
    rest = f"; {show_count(possible)} more cannot be excluded" if possible else ""
    return Fact("Extracted", show_count(sum(row.is_extracted for row in rows)), f"of {show_count(len(rows))} canaries{rest}")


def _highest(report: AuditReport) -> Fact:
    rows = [row for row in report.canaries if row.role == "canary"]
    scored = [row for row in rows if row.exposure.bits is not None]
    if not scored:
        return Fact("Highest exposure", formatting.NOT_MEASURED, "no canary with a finite score")
    row = max(scored, key=lambda row: row.exposure.bits or 0.0)
    ends = formatting.show_interval(row.exposure.low_bits, row.exposure.high_bits)
    beside = f"tier {row.tier}, {row.exposure.method}, {ends}"
    if len(scored) < len(rows):
        beside += f"; {show_count(len(rows) - len(scored))} without a finite score"
    return Fact("Highest exposure", f"{show_number(row.exposure.bits)} bits", beside)


def _controls(report: AuditReport) -> Fact:
    pooled = [row for row in pool_tiers(report) if row.tier == CONTROLS_TIER]
    if not pooled:
        return Fact("Controls", formatting.NOT_MEASURED, "the report holds no controls")
    mean, chance = show_number(pooled[0].mean_bits, missing="no finite score"), show_number(expected_control_bits(report))
    return Fact("Controls", f"{mean} bits", f"mean of {show_count(pooled[0].n)}; chance is {chance}")


def _positive_control(report: AuditReport) -> Fact:
    control = report.positive_control
    if control.kind == "none":
        return Fact("Positive control", "none", "low figures may mean that nothing could be seen")
    if control.kind == "probe" and control.n == 0:
        return Fact("Positive control", "not made", "the probe failed: whether anything could be seen is unknown")
    kind = "probe, " if control.kind == "probe" else ""
    p_value = f"{kind}best p-value {show_number(control.best_p_value)}, n\u00a0=\u00a0{show_count(control.n)}"
    return Fact("Positive control", "detected" if control.detected else "not detected", p_value)
