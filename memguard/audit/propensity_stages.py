"""Propensity over the stages of a training and over corpora: what `memguard compare` makes of several propensity reports.

A mother model and saved stages of continual pre-training, each traced to the old and to the new corpus. Whether figures rise
or fall is reported as found; a direction is named only where the interval of the difference leaves no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from memguard.audit.decoding import SETTING_NAMES, Setting
from memguard.audit.propensity_report import PropensityReport
from memguard.audit.report_propensity import METRIC_NAMES, Metric, PropensityEstimate
from memguard.documents import SCHEMA_VERSION, Document
from memguard.errors import EvidenceError
from memguard.files import write_text_atomic

Direction = Literal["rose", "fell", "not shown"]
Movement = Literal["first to last stage", "stage to next stage", "corpus to corpus", "verbatim to near-verbatim"]

SHOWN: tuple[Metric, ...] = (
    "average_longest_span",
    "full_match_rate",
    "full_match_rate_20",
    "full_match_rate_50",
    "near_verbatim_recall",
    "near_verbatim_rate",
)
SET_AGAINST_EACH_OTHER: tuple[Metric, ...] = ("average_longest_span", "full_match_rate")


class StageRow(Document):
    """One metric of one stage, corpus and setting, with its share against capability."""

    stage: str = Field(description="label of the report")
    global_step: int | None = Field(description="optimiser steps done, None: unknown")
    corpus: str = Field(description="name of the corpus")
    setting: Setting = Field(description="prefix: capability; others: propensity")
    metric: Metric = Field(description="which figure; tokens for longest spans, else a share of 0..1")
    value: float = Field(description="the estimate")
    low: float = Field(description="lower end of its interval")
    high: float = Field(description="upper end of it")
    confidence: float = Field(description="of the interval, 0..1")
    n: int = Field(description="count of prompts")
    method: str = Field(description="how the interval was made")
    share: float | None = Field(description="PM, 0..1; None: undefined, or the capability itself")
    share_low: float | None = Field(description="lower end of its interval, None: no share")
    share_high: float | None = Field(description="upper end of it, None: no share")


class MovementRow(Document):
    """What a metric did from stage to stage, or how it differs in one stage from another corpus, or from another metric."""

    what: Movement = Field(description="what is subtracted from what")
    earlier: str = Field(description="what is subtracted: the label of a stage, the name of a corpus, or full_match_rate")
    stage: str = Field(description="label of the later report")
    corpus: str = Field(description="name of the later corpus")
    setting: Setting = Field(description="of the prompts")
    metric: Metric = Field(description="which figure; for near-verbatim less verbatim, the former")
    difference: float = Field(description="later less earlier; tokens or a share")
    low: float = Field(description="lower end of its interval")
    high: float = Field(description="upper end of it")
    confidence: float = Field(description="of the interval: both ends hold at once with this chance, 0..1")
    direction: Direction = Field(description="rose or fell where the interval leaves out 0")


class PropensityComparison(Document):
    """Stages by corpora. It compares only what was prompted, drawn and tokenised alike."""

    kind: Literal["memguard propensity comparison"] = "memguard propensity comparison"
    schema_version: int = SCHEMA_VERSION
    is_comparable: bool = Field(description="whether the reports were made alike")
    differences: list[str] = Field(description="what was not alike, a sentence each")
    stages: list[str] = Field(description="labels, in the order given")
    corpora: list[str] = Field(description="names, in the order met")
    rows: list[StageRow] = Field(description="every metric, by stage, corpus and setting")
    movements: list[MovementRow] = Field(description="over the stages, between corpora, from verbatim to near-verbatim")
    sentences: list[str] = Field(description="what stands out")

    def save(self, path: Path) -> None:
        """Write the comparison as JSON, whole or not at all."""
        write_text_atomic(path, self.model_dump_json(indent=1) + "\n")


def stage_labels(paths: Sequence[Path], reports: Sequence[PropensityReport]) -> list[str]:
    """What the stage of each report is called: its step, else the part of the path that tells the models apart.

    Args:
        paths: of the reports.
        reports: those of one model on several corpora are one stage.
    """
    models = [one.subject.digest if one.subject is not None else one.served_model for one in reports]
    steps = [report.subject.global_step if report.subject is not None else None for report in reports]
    names = [[str(step) for step in steps]] if None not in steps else []
    parts = [[path.stem, *reversed(path.absolute().parts[:-1])] for path in paths]
    names += [list(level) for level in zip(*parts, strict=False)]
    for level in names:
        if len(set(zip(models, level, strict=True))) == len(set(models)) == len(set(level)):
            return [f"step {name}" for name in level] if level is names[0] and None not in steps else level
    order = list(dict.fromkeys(models))
    return [f"stage {order.index(model) + 1}" for model in models]


def compare_stages(reports: Sequence[PropensityReport], *, labels: Sequence[str]) -> PropensityComparison:
    """The table of stages and corpora, and what moved, with intervals.

    Args:
        reports: in the order of training; those of one stage on several corpora beside each other.
        labels: of their stages.

    Returns:
        `PropensityComparison`; where reports were made differently it says so, and names no movement.

    Raises:
        EvidenceError: a report is only a part, or a stage was traced to one corpus twice.
    """
    names = list(labels)
    for report, name in zip(reports, names, strict=True):
        if report.propensity.partial is not None:
            where = f"the report of '{name}' on corpus '{report.corpus.name}'"
            raise EvidenceError(f"{where} is only a part: {report.propensity.partial}")
    places = [(name, report.corpus.name) for name, report in zip(names, reports, strict=True)]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise EvidenceError(f"stage '{twice[0]}' was traced to corpus '{twice[1]}' twice: name corpora apart by --corpus-name.")
    differences = _differences(reports)
    rows = [row for report, name in zip(reports, names, strict=True) for row in _rows(report, name)]
    movements = [] if differences else [*_over_stages(rows), *_over_corpora(rows), *_near_against_verbatim(rows)]
    return PropensityComparison(
        is_comparable=not differences,
        differences=differences,
        stages=list(dict.fromkeys(names)),
        corpora=list(dict.fromkeys(report.corpus.name for report in reports)),
        rows=rows,
        movements=movements,
        sentences=[f"Not comparable: {one}." for one in differences] or _sentences(movements),
    )


def _differences(reports: Sequence[PropensityReport]) -> list[str]:
    """What the reports do not share, of what must be alike."""
    first, found = reports[0], []
    alike: dict[str, Callable[[PropensityReport], Any]] = {
        "the tokenizers differ": lambda one: one.tokenizer_digest,
        "the samplers differ": lambda one: (one.propensity.sampler, one.propensity.num_samples),
        "the limits of a continuation differ": lambda one: one.propensity.max_new_tokens,
        "the lengths of prefixes differ": lambda one: one.propensity.prefix_tokens,
        "the seeds of prompts differ": lambda one: one.propensity.seed,
    }
    found += [said for said, key in alike.items() if any(key(one) != key(first) for one in reports)]
    for name in dict.fromkeys(one.corpus.name for one in reports):
        if len({one.corpus.digest for one in reports if one.corpus.name == name}) > 1:
            found.append(f"corpus '{name}' is not the same index in all reports")
    return found


def _rows(report: PropensityReport, stage: str) -> list[StageRow]:
    shares = {(row.setting, row.metric): row for row in report.propensity.shares}
    step = report.subject.global_step if report.subject is not None else None
    rows = []
    for setting in report.propensity.settings:
        for one in setting.estimates:
            if one.metric in SHOWN:
                share = shares.get((setting.setting, one.metric))
                has_share = share is not None and share.share is not None
                rows.append(_row(one, stage, step, report.corpus.name, setting.setting, share if has_share else None))
    return rows


def _row(
    one: PropensityEstimate, stage: str, step: int | None, corpus: str, setting: Setting, share: object | None
) -> StageRow:
    return StageRow(
        stage=stage,
        global_step=step,
        corpus=corpus,
        setting=setting,
        **one.model_dump(include={"metric", "value", "low", "high", "confidence", "n", "method"}),
        share=getattr(share, "share", None),
        share_low=getattr(share, "low", None),
        share_high=getattr(share, "high", None),
    )


def _over_stages(rows: Sequence[StageRow]) -> list[MovementRow]:
    """The last stage less the first, and each less the one before, of a corpus, setting and metric."""
    found = []
    for key in dict.fromkeys((row.corpus, row.setting, row.metric) for row in rows):
        mine = [row for row in rows if (row.corpus, row.setting, row.metric) == key]
        if len(mine) > 1:
            found.append(_movement("first to last stage", mine[0], mine[-1], mine[0].stage))
        if len(mine) > 2:
            found += [_movement("stage to next stage", *pair, pair[0].stage) for pair in itertools.pairwise(mine)]
    return found


def _over_corpora(rows: Sequence[StageRow]) -> list[MovementRow]:
    """ALS and FMR of each corpus less those of the first, in each stage: the two need not say the same."""
    found = []
    for key in dict.fromkeys((row.stage, row.setting, row.metric) for row in rows if row.metric in SET_AGAINST_EACH_OTHER):
        first, *others = [row for row in rows if (row.stage, row.setting, row.metric) == key]
        found += [_movement("corpus to corpus", first, other, first.corpus) for other in others]
    return found


def _near_against_verbatim(rows: Sequence[StageRow]) -> list[MovementRow]:
    """Near-verbatim texts less those that match to the letter, in each stage."""
    at = {(row.stage, row.corpus, row.setting, row.metric): row for row in rows}
    pairs = [
        (row, at.get((row.stage, row.corpus, row.setting, "near_verbatim_rate")))
        for row in rows
        if row.metric == "full_match_rate"
    ]
    return [_movement("verbatim to near-verbatim", row, near, row.metric) for row, near in pairs if near is not None]


def _movement(what: Movement, before: StageRow, after: StageRow, earlier: str) -> MovementRow:
    """The difference, and how far it may lie while both intervals hold; by Bonferroni, whatever the two share."""
    low, high = after.low - before.high, after.high - before.low
    return MovementRow(
        what=what,
        earlier=earlier,
        stage=after.stage,
        corpus=after.corpus,
        setting=after.setting,
        metric=after.metric,
        difference=after.value - before.value,
        low=low,
        high=high,
        confidence=max(0.0, before.confidence + after.confidence - 1.0),
        direction="rose" if low > 0.0 else "fell" if high < 0.0 else "not shown",
    )


def _sentences(movements: Sequence[MovementRow]) -> list[str]:
    """What moved over the stages of each corpus, ALS against FMR between corpora, and near-verbatim texts."""
    sentences = []
    for corpus in dict.fromkeys(one.corpus for one in movements if one.what != "corpus to corpus"):
        mine = [one for one in movements if one.corpus == corpus]
        over = [one for one in mine if one.what == "first to last stage"]
        steps = [one for one in mine if one.what == "stage to next stage"]
        sentences += [f"Corpus '{corpus}', first to last stage: {said}." for said in _moved(over)]
        if over and not any(one.direction != "not shown" for one in over):
            sentences.append(f"Corpus '{corpus}', first to last stage: no movement is shown at this number of prompts.")
        for step in dict.fromkeys((one.earlier, one.stage) for one in steps):
            here = [one for one in steps if (one.earlier, one.stage) == step]
            sentences += [f"Corpus '{corpus}', {step[0]} to {step[1]}: {said}." for said in _moved(here)]
        more = [one for one in mine if one.what == "verbatim to near-verbatim" and one.direction == "rose"]
        if more:
            where = ", ".join(f"{one.stage} ({SETTING_NAMES[one.setting]})" for one in more)
            sentences.append(f"Corpus '{corpus}': near-verbatim texts exceed those that match to the letter in {where}.")
    return [*sentences, *_between_corpora([one for one in movements if one.what == "corpus to corpus"])]


def _moved(movements: Sequence[MovementRow]) -> Iterator[str]:
    """Which metrics moved which way, behind which prompts."""
    for setting in dict.fromkeys(one.setting for one in movements):
        for direction in ("rose", "fell"):
            names = [METRIC_NAMES[one.metric] for one in movements if (one.setting, one.direction) == (setting, direction)]
            if names:
                yield f"{SETTING_NAMES[setting]}: {', '.join(names)} {direction}"


def _between_corpora(movements: Sequence[MovementRow]) -> Iterator[str]:
    """One sentence a stage and setting where a difference of ALS or FMR is shown: on which corpus each is the greater."""
    for key in dict.fromkeys((one.stage, one.setting, one.earlier, one.corpus) for one in movements):
        mine = [one for one in movements if (one.stage, one.setting, one.earlier, one.corpus) == key]
        if any(one.direction != "not shown" for one in mine):
            stage, setting, earlier, corpus = key
            greater = {"rose": f"greater on '{corpus}'", "fell": f"greater on '{earlier}'", "not shown": "not shown to differ"}
            said = ", ".join(f"{METRIC_NAMES[one.metric]} is {greater[one.direction]}" for one in mine)
            yield f"Stage '{stage}', {SETTING_NAMES[setting]}: {said}."
