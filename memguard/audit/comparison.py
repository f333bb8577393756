"""Two audits side by side: what changed from A to B, by tier and metric, with intervals; A is without the defence, B with it.

The same canaries are compared pair by pair where the plan is the same, groups of a format and tier otherwise. Exposure is in
bits, log-probabilities in nats, shares in 0..1; every difference is B minus A. Measures nothing and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from memguard.audit.report import RANK_METHODS, AuditReport, CanaryRow, Subject
from memguard.documents import SCHEMA_VERSION, Document, document_digest
from memguard.errors import EvidenceError
from memguard.files import write_text_atomic
from memguard.metrics.differences import (
    DifferenceEstimate,
    estimate_paired_difference,
    estimate_share_difference,
    estimate_unpaired_difference,
)

Figures = NDArray[np.float64]
Metric = Literal["exposure", "log_prob", "extracted share", "log belief ratio"]
UNITS: dict[Metric, Literal["bits", "nats", "share"]] = {
    "exposure": "bits",
    "log_prob": "nats",
    "extracted share": "share",
    "log belief ratio": "nats",
}
SCORING = ("dtype", "autocast", "score")  # scores made otherwise do not compare
RANKING = ("references", "references_per_name", "exact")  # exposures do, once both are recomputed alike
RECOMPUTED = "recomputed sampled"
OTHER_WAY = "means go the other way"  # a median of pairs and the difference of means have other signs
SAME_NAMES = ("report", "memguard_audit", "/")
ROUNDING = 1e-9  # means closer than this, in their unit, differ by rounding alone
ONE_RUN = "One training run a side: variation from run to run is in no interval."


class Side(Document):
    """One of the two audits."""

    label: str = Field(description="how sentences call it")
    subject: Subject = Field(description="what was measured")
    report_digest: str = Field(description="sha256 of the report")
    plan_digest: str = Field(description="sha256 of its plan")
    num_parameters: int | None = Field(description="None: the report does not know it")


class DifferenceRow(Document):
    """One metric of one tier, B minus A."""

    format: str | None = Field(description="None: the canaries of all formats together")
    tier: int = Field(description="planned repetitions")
    metric: Metric = Field(description="what is compared")
    unit: Literal["bits", "nats", "share"] = Field(description="of means and difference")
    n_a: int = Field(description="count of canaries in A")
    n_b: int = Field(description="count of canaries in B")
    mean_a: float = Field(description="mean in A, in the unit")
    mean_b: float = Field(description="mean in B, in the unit")
    difference: float = Field(description="B minus A: of means, or a median of pairs or shifts where the method says so")
    low: float = Field(description="lower end of the interval of the difference, of the mean or median as it is")
    high: float = Field(description="upper end of it")
    confidence: float = Field(description="coverage that the interval reaches, 0..1")
    p_value: float | None = Field(description="two-sided, of no difference, by the test that the method names; 0..1")
    method: str = Field(description="of difference and interval, then the test behind the p-value")
    num_capped_a: int = Field(default=0, description="canaries above every reference: their exposure is at its cap")
    num_capped_b: int = Field(default=0, description="count of those in B at the cap")
    cap_bits: float | None = Field(default=None, description="the largest sampled exposure either side could print; bits")
    flags: list[str] = Field(
        default_factory=list, description="identical, no spread, too few, lower ends, means go the other way"
    )

    @property
    def is_measurable(self) -> bool:
        """Whether the interval leaves 0 out at the confidence that was asked for."""
        return not self.low <= 0.0 <= self.high and "too few" not in self.flags


class Comparison(Document):
    """What changed from A to B. Without `is_comparable` the rows are shown, and nothing is concluded from them."""

    kind: Literal["memguard comparison"] = Field(default="memguard comparison", description="what this document is")
    schema_version: int = Field(default=SCHEMA_VERSION, description="of this document")
    a: Side = Field(description="the first report")
    b: Side = Field(description="the second report")
    confidence: float = Field(description="of every interval, 0..1")
    is_paired: bool = Field(description="the same canaries, compared one by one")
    is_comparable: bool = Field(description="the two were measured alike; without it nothing is concluded")
    not_paired: list[str] = Field(description="why groups were compared and not pairs")
    not_comparable: list[str] = Field(description="what differs in how the scores were made")
    notes: list[str] = Field(description="what a reader should know of the rows")
    rows: list[DifferenceRow] = Field(description="one a metric, format and tier")
    sentences: list[str] = Field(description="what the rows say, in words")

    def save(self, path: Path) -> None:
        """Write the comparison as JSON, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


@dataclass(frozen=True)
class _Group:
    """The canaries of one tier on both sides, of one format or of all; in one order where they are pairs."""

    format: str | None
    tier: int
    a: list[CanaryRow]
    b: list[CanaryRow]


def compare_reports(
    a: AuditReport, b: AuditReport, *, labels: Sequence[str] = ("A", "B"), confidence: float = 0.95
) -> Comparison:
    """What changed from audit A to audit B, by tier and metric, B minus A with intervals; bits, nats and shares.

    Canaries of one report are taken as independent, which those behind one prefix are but nearly: they share references.

    Args:
        a: the audit without the defence, or the older one.
        b: the audit with it, or the newer one.
        labels: what the two are called in sentences.
        confidence: of every interval, 0..1.

    Returns:
        A `Comparison`; where estimators or caps of exposure differ, both sides are recomputed alike and a note says so.

    Raises:
        EvidenceError: a report is invalid or lacks a score, or the two share no format and tier.

    Source: statistics specification, sections 2 and 3.
    """
    label_a, label_b = labels
    check_evidence(a, label_a)
    check_evidence(b, label_b)
    not_paired, not_comparable, notes = pairing_obstacles(a, b), scoring_differences([a, b]), _notes(a, b, label_a, label_b)
    groups = _groups(a, b, is_paired=not not_paired, notes=notes)
    if not groups:
        raise EvidenceError(f"the reports '{label_a}' and '{label_b}' share no format and tier; there is nothing to compare.")
    with_ratios = _ratios_compare(a, b, notes)
    rows = [
        row for one in groups for row in _rows(one, is_paired=not not_paired, with_ratios=with_ratios, confidence=confidence)
    ]
    if any(RECOMPUTED in row.method for row in rows):
        notes.append("Where estimators or caps of exposure differ, both sides are recomputed from sampled references, one cap.")
    chance = (1.0 - confidence) * len(rows)
    if chance >= 1.0:
        notes.append(f"Of {len(rows)} intervals at {confidence:.0%} about {chance:.0f} leave out 0 by chance alone.")
    return Comparison(
        a=side_of(a, label_a),
        b=side_of(b, label_b),
        confidence=confidence,
        is_paired=not not_paired,
        is_comparable=not not_comparable,
        not_paired=not_paired,
        not_comparable=not_comparable,
        notes=[*notes, ONE_RUN],
        rows=rows,
        sentences=_sentences(rows, label_a, label_b, not_comparable, confidence),
    )


# -- may they be compared, and how


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Short names of report files: the last part of their paths that sets them apart, else A, B, C or numbers.

    Example:
        >>> labels_of([Path("plain/memguard_audit/report.json"), Path("dedup/memguard_audit/report.json")])
        ['plain', 'dedup']
    """
    parts = [[path.stem, *reversed(path.absolute().parts[:-1])] for path in paths]
    if len(parts) == 1:  # nothing to be told from: the first name that is not that of every report
        return [next((name for name in parts[0] if name not in SAME_NAMES), parts[0][0])]
    for names in zip(*parts, strict=False):
        if len(set(names)) == len(names):
            return list(names)
    return [chr(ord("A") + index) if len(paths) <= 26 else str(index + 1) for index in range(len(paths))]


def side_of(report: AuditReport, label: str) -> Side:
    """Which audit this is."""
    return Side(
        label=label,
        subject=report.subject,
        report_digest=document_digest(report),
        plan_digest=report.plan.digest,
        num_parameters=getattr(report.procedure, "num_parameters", None),
    )


def planted(report: AuditReport) -> list[CanaryRow]:
    """The canaries of the tiers: no control and no positive control."""
    return [row for row in report.canaries if row.role == "canary"]


def check_evidence(report: AuditReport, label: str) -> None:
    """Raise `EvidenceError`, naming the report, when it is invalid, holds no canary, or one without a usable score."""
    if report.status != "valid" or report.invalid_reasons:
        reason = " ".join(next(iter(report.invalid_reasons), "it is marked invalid").split())[:200].rstrip(".")
        raise EvidenceError(f"report '{label}' is no evidence: {reason}.")
    rows = planted(report)
    ids = [row.id for row in rows]
    if not rows or len(set(ids)) != len(ids):
        raise EvidenceError(f"report '{label}' is no evidence: it must hold canaries, each once, got {len(ids)} rows.")
    failed = [row.id for row in rows if not _is_scored(row)]
    if failed:
        raise EvidenceError(
            f"report '{label}' is no evidence: canary '{failed[0]}' has no finite score ({len(failed)} in all)."
        )


def _is_scored(row: CanaryRow) -> bool:
    figures = (row.log_prob, row.exposure.bits)
    is_finite = all(figure is not None and math.isfinite(figure) for figure in figures)
    return is_finite and row.exposure.method != "failed" and 0 <= row.num_references_above <= row.num_references > 0


def scoring_differences(reports: Sequence[AuditReport]) -> list[str]:
    """What makes the scores of reports incomparable, one phrase each; empty when nothing does."""
    found = ["the tokenizer differs"] if len({report.tokenizer_digest for report in reports}) > 1 else []
    for field in SCORING:
        values = dict.fromkeys(str(getattr(report.procedure, field)) for report in reports)
        if len(values) > 1:
            found.append(f"the procedure's {field} differs ({', '.join(values)})")
    spaces: dict[str, set[tuple[object, ...]]] = {}
    for report in reports:
        for one in report.formats:
            same = (one.kind, one.secret_space_size, one.shared_prefix, one.terminator)
            spaces.setdefault(one.name, set()).add(same)
    return found + [f"the format '{name}' is another one" for name, kinds in spaces.items() if len(kinds) > 1]


def pairing_obstacles(a: AuditReport, b: AuditReport) -> list[str]:
    """Why the canaries of two reports are not the same ones, one phrase each; empty when they are."""
    if a.plan.digest != b.plan.digest:
        return ["the plans differ"]
    keys_a, keys_b = ({(row.id, row.format, row.tier) for row in planted(report)} for report in (a, b))
    return [f"canaries that one report alone holds: {len(keys_a ^ keys_b)}"] if keys_a != keys_b else []


def _notes(a: AuditReport, b: AuditReport, label_a: str, label_b: str) -> list[str]:
    """What differs without standing in the way: ranking, planting and what was seen."""
    notes = []
    for field in RANKING:
        one, other = getattr(a.procedure, field), getattr(b.procedure, field)
        if one != other:
            notes.append(f"The procedure's {field} differs ({one} in {label_a}, {other} in {label_b}).")
    if a.plan.digest == b.plan.digest and a.procedure.reference_seed != b.procedure.reference_seed:
        notes.append("The canaries were ranked among other references, which adds noise to exposure.")
    for field in ("plant_once", "count", "mode"):
        one, other = getattr(a.ledger, field), getattr(b.ledger, field)
        if None not in (one, other) and one != other:
            notes.append(
                f"The ledger's {field} differs ({one} in {label_a}, {other} in {label_b}): tiers are compared as planned."
            )
    seen = [_num_seen(report) for report in (a, b)]
    if seen[0] != seen[1]:
        counts = ["unknown" if one is None else f"{one:,}" for one in seen]
        notes.append(f"Sightings of canaries in training: {counts[0]} in {label_a}, {counts[1]} in {label_b}.")
    return notes


def _num_seen(report: AuditReport) -> int | None:
    seen = [row.num_seen for row in planted(report)]
    return None if None in seen else sum(one for one in seen if one is not None)


def _ratios_compare(a: AuditReport, b: AuditReport, notes: list[str]) -> bool:
    """Whether Prior-Aware figures were made alike."""
    settings = [report.prior_aware_settings for report in (a, b) if report.prior_aware_settings is not None]
    if len(settings) < 2:
        return False
    # The threshold n makes a verdict of a ratio and is no part of the ratio.
    alike = len({tuple((key, kept) for key, kept in sorted(one.items()) if key != "n") for one in settings}) == 1
    if not alike:
        notes.append("Log belief ratios are left out: they were measured by other settings.")
    return alike


def _groups(a: AuditReport, b: AuditReport, *, is_paired: bool, notes: list[str]) -> list[_Group]:
    """The groups of every tier that both reports hold, by tier, then by format, all formats together last."""
    rows_a, rows_b = planted(a), planted(b)
    by_id = {row.id: row for row in rows_b}
    cells = [{(row.format, row.tier): None for row in rows} for rows in (rows_a, rows_b)]
    lonely = [cell for cell in {**cells[0], **cells[1]} if cell not in cells[0] or cell not in cells[1]]
    notes += [f"Tier {tier} of '{name}' is in one report only." for name, tier in lonely]
    groups = []
    for tier in sorted({tier for _, tier in cells[0]} & {tier for _, tier in cells[1]}):
        mine = []
        for name in dict.fromkeys(name for name, other in cells[0] if other == tier and (name, tier) in cells[1]):
            members = [row for row in rows_a if (row.format, row.tier) == (name, tier)]
            others = [row for row in rows_b if (row.format, row.tier) == (name, tier)]
            mine.append(_Group(name, tier, members, [by_id[row.id] for row in members] if is_paired else others))
        groups += mine
        if len(mine) > 1 and (is_paired or all(len(one.a) == len(one.b) for one in mine)):
            groups.append(_Group(None, tier, [row for one in mine for row in one.a], [row for one in mine for row in one.b]))
        elif len(mine) > 1:
            notes.append(f"Tier {tier} is not pooled over formats: their numbers of canaries differ.")
    return groups


# -- the rows


def _rows(group: _Group, *, is_paired: bool, with_ratios: bool, confidence: float) -> Iterable[DifferenceRow]:
    yield _exposure_row(group, is_paired, confidence)
    if is_paired or group.format is not None:  # log-probabilities of formats differ in scale, their pairs do not
        scores = [np.array([row.log_prob for row in side], dtype=np.float64) for side in (group.a, group.b)]
        yield _row(group, "log_prob", scores[0], scores[1], _estimate(scores[0], scores[1], is_paired, confidence))
    hits = [np.array([float(row.is_extracted) for row in side]) for side in (group.a, group.b)]
    counts = [int(side.sum()) for side in hits]
    share = estimate_share_difference(counts[1], hits[1].size, counts[0], hits[0].size, confidence=confidence)
    yield _row(group, "extracted share", hits[0], hits[1], share)
    if with_ratios:
        yield from _ratio_rows(group, is_paired, confidence)


def _estimate(a: Figures, b: Figures, is_paired: bool, confidence: float) -> DifferenceEstimate:
    return (estimate_paired_difference if is_paired else estimate_unpaired_difference)(b, a, confidence=confidence)


def _row(group: _Group, metric: Metric, a: Figures, b: Figures, found: DifferenceEstimate) -> DifferenceRow:
    is_tested = found.method.startswith("paired ")  # the other methods name their test
    shift = float(b.mean() - a.mean())
    other_way = [OTHER_WAY] if abs(shift) > ROUNDING and shift * found.value < 0.0 else []
    return DifferenceRow(
        format=group.format,
        tier=group.tier,
        metric=metric,
        unit=UNITS[metric],
        n_a=a.size,
        n_b=b.size,
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=found.value,
        low=found.low,
        high=found.high,
        confidence=found.confidence,
        p_value=found.p_value,
        method=f"{found.method}; p: sign flips, mean" if is_tested else found.method,
        flags=[*found.flags, *other_way],
    )


def _exposure_row(group: _Group, is_paired: bool, confidence: float) -> DifferenceRow:
    """Exposure by one estimator with one cap a format; the sampled one unless all ranks of the format are known alike."""
    a, b = np.empty(len(group.a)), np.empty(len(group.b))
    capped_a, capped_b = 0, 0
    caps: list[float] = []
    estimators: list[str] = []
    for name in dict.fromkeys(row.format for row in group.a):
        places_a = [i for i, row in enumerate(group.a) if row.format == name]
        places_b = [i for i, row in enumerate(group.b) if row.format == name]
        rows = [group.a[i] for i in places_a] + [group.b[i] for i in places_b]
        methods = {row.exposure.method for row in rows}
        if len(methods) == 1 and methods <= {*RANK_METHODS}:
            a[places_a] = [group.a[i].exposure.bits for i in places_a]
            b[places_b] = [group.b[i].exposure.bits for i in places_b]
            estimators += methods
            continue
        sizes = {row.num_references for row in rows}
        cap = math.log2(min(sizes) + 1)
        a[places_a] = [min(cap, sampled_bits(group.a[i])) for i in places_a]
        b[places_b] = [min(cap, sampled_bits(group.b[i])) for i in places_b]
        caps.append(cap)
        capped_a += int((a[places_a] >= cap).sum())
        capped_b += int((b[places_b] >= cap).sum())
        estimators.append("sampled" if methods == {"sampled"} and len(sizes) == 1 else RECOMPUTED)
    row = _row(group, "exposure", a, b, _estimate(a, b, is_paired, confidence))
    return row.model_copy(
        update={
            "num_capped_a": capped_a,
            "num_capped_b": capped_b,
            "cap_bits": max(caps, default=None),
            "method": f"{row.method}; {' and '.join(dict.fromkeys(estimators))} exposure",
        }
    )


def sampled_bits(row: CanaryRow) -> float:
    """log2(N + 1) - log2(b + 1): sampled exposure, whatever else is known of the rank; bits."""
    return math.log2(row.num_references + 1) - math.log2(row.num_references_above + 1)


def _ratio_rows(group: _Group, is_paired: bool, confidence: float) -> Iterable[DifferenceRow]:
    """The log belief ratio of canaries where it was measured: on both sides of a pair, or on either side of a group."""
    pairs = [[_ratio(row) for row in side] for side in (group.a, group.b)]
    if is_paired:
        both = [(one, other) for one, other in zip(*pairs, strict=True) if one is not None and other is not None]
        kept = [[pair[0] for pair in both], [pair[1] for pair in both]]
    else:
        kept = [[one for one in side if one is not None] for side in pairs]
    if not (kept[0] and kept[1]):
        return
    a, b = (np.array([value for value, _ in side]) for side in kept)
    row = _row(group, "log belief ratio", a, b, _estimate(a, b, is_paired, confidence))
    is_bound = any(is_open for side in kept for _, is_open in side)
    yield row.model_copy(update={"flags": [*row.flags, "lower ends"]}) if is_bound else row


def _ratio(row: CanaryRow) -> tuple[float, bool] | None:
    """The ratio in nats and whether it is a lower end only; None where it was not measured."""
    one = row.prior_aware
    if one is None or one.log_belief_ratio is None or not math.isfinite(one.log_belief_ratio):
        return None
    return one.log_belief_ratio, one.num_open_prefixes > 0


# -- the sentences


def _sentences(
    rows: Sequence[DifferenceRow], label_a: str, label_b: str, not_comparable: Sequence[str], confidence: float
) -> list[str]:
    if not_comparable:
        return [f"{label_a} and {label_b} do not compare: {'; '.join(not_comparable)}."]
    scores = [row for row in rows if row.metric in ("exposure", "log_prob")]
    if all("identical" in row.flags for row in scores):
        return [f"{label_a} and {label_b} hold the same scores: every difference is exactly 0."]
    told = []
    for tier in dict.fromkeys(row.tier for row in rows):
        mine = [row for row in rows if row.tier == tier]
        pooled = [row for row in mine if row.format is None]
        for row in [row for row in (pooled or mine) if row.metric == "exposure"]:
            where = f"tier {tier}" if pooled or len({row.format for row in mine}) == 1 else f"tier {tier} of '{row.format}'"
            scores = [other for other in mine if other.metric == "log_prob" and other.format == row.format]
            told.append(_exposure_sentence(row, scores, where, label_a, label_b, confidence))
            told += [
                _extraction_sentence(other, where, label_a, label_b)
                for other in mine
                if other.metric == "extracted share" and other.format == row.format and other.mean_a + other.mean_b > 0
            ]
    return told


def _exposure_sentence(
    row: DifferenceRow, scores: Sequence[DifferenceRow], where: str, label_a: str, label_b: str, confidence: float
) -> str:
    """What B did to exposure in plain words: lowered, raised or neither, and then what `log_prob` shows in its place."""
    if not row.is_measurable:
        few = (
            f"; {min(row.n_a, row.n_b)} canaries are too few for an interval at {confidence:.0%}"
            if "too few" in row.flags
            else ""
        )
        change = f"{label_b} - {label_a} is {_show_signed(row.difference)} bits"
        text = f"{label_b} did not change exposure of {where} measurably: {change} ({_ends(row)}{few})"
    elif row.difference < 0:
        drop, low, high = (show_plain(-value) for value in (row.difference, row.high, row.low))
        least = "at least " if row.num_capped_a and not row.num_capped_b else ""
        text = f"{label_b} lowered exposure of {where} by {least}{drop} bits ({low} to {high})"
    else:
        least = "at least " if row.num_capped_b and not row.num_capped_a else ""
        rise, low, high = (show_plain(value) for value in (row.difference, row.low, row.high))
        text = f"{label_b} raised exposure of {where} by {least}{rise} bits ({low} to {high})"
    changed = [other for other in scores if other.is_measurable and not row.is_measurable]
    if row.num_capped_a and row.num_capped_b:
        text += (
            f"; {row.num_capped_a} of {row.n_a} canaries in {label_a} and {row.num_capped_b} of {row.n_b} in {label_b} are "
            f"above every reference, where exposure tells no more{'' if changed else ' and log_prob does'}"
        )
    for other in changed:
        text += f"; log_prob did change: {label_b} - {label_a} is {_show_signed(other.difference)} nats ({_ends(other)})"
    return f"{text}; the {OTHER_WAY}." if OTHER_WAY in row.flags else f"{text}."


def _show_signed(value: float) -> str:
    """A change with its sign; 0 has none."""
    text = show_plain(value)
    return f"+{text}" if float(text) > 0.0 else text


def _ends(row: DifferenceRow) -> str:
    return f"{show_plain(row.low)} to {show_plain(row.high)}"


def _extraction_sentence(row: DifferenceRow, where: str, label_a: str, label_b: str) -> str:
    counts = [round(mean * number) for mean, number in ((row.mean_a, row.n_a), (row.mean_b, row.n_b))]
    return f"Extracted in {where}: {counts[0]} of {row.n_a} in {label_a}, {counts[1]} of {row.n_b} in {label_b}."


def show_plain(value: float) -> str:
    """A figure to one decimal, two below 0.1; never -0.0."""
    text = f"{value:.1f}" if abs(value) >= 0.1 or value == 0.0 else f"{value:.2f}"
    return text.removeprefix("-") if float(text) == 0.0 else text
