"""What a full audit measures beside exposure: extraction, PA, real records, membership, propensity, the probe.

Each part needs data of its own and is left *not measured* without it; a part whose data cannot carry it says so in a notice.
A score that is not finite makes the whole audit invalid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from memguard.audit.calibration import FALLBACK, calibrate, given_threshold
from memguard.audit.canary_copies import canary_notices, count_canary_copies
from memguard.audit.config import AuditSettings
from memguard.audit.corpus import corpus_of, open_index, sample_documents
from memguard.audit.decoding import PropensitySettings
from memguard.audit.extraction import measure_extraction, with_extraction
from memguard.audit.membership import measure_membership
from memguard.audit.offline import check_reference, load_checkpoint
from memguard.audit.prior import PrefixSource, PriorMeasurement, not_extractable
from memguard.audit.probe import run_probe
from memguard.audit.propensity import measure_model
from memguard.audit.record_copies import copies_of, split_by_copies, with_copies
from memguard.audit.record_sets import count_verdicts, measure_records
from memguard.audit.records import Record, load_records
from memguard.audit.report import CanaryRow, PositiveControl, PriorAware
from memguard.audit.report_extraction import Extraction
from memguard.audit.report_membership import Membership
from memguard.audit.report_propensity import Propensity
from memguard.audit.report_records import PriorAwareCounts, Records, Threshold
from memguard.audit.rows import GroupScores
from memguard.canaries.plan import CanaryPlan
from memguard.errors import EvidenceError, MemguardError, NonFiniteScoreError
from memguard.metrics.distribution_shift import MIN_TEXTS
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer
from memguard.tracing.corpus_index import CorpusIndex

T = TypeVar("T")


@dataclass(frozen=True)
class Sources:
    """The data of a full audit.

    Args:
        prior: training rows to cut prior prefixes from; None leaves Prior-Aware memorisation *not measured*.
        members: records of the training data.
        held_out: records of the same kind, never trained on.
        reference: checkpoint of a model that never saw the members, for membership inference.
        index: of the training corpus, for propensity, and to count copies of members and canaries.
    """

    prior: PrefixSource | None = None
    members: Sequence[Record] = ()
    held_out: Sequence[Record] = ()
    reference: Path | None = None
    index: CorpusIndex | None = None


def load_sources(
    settings: AuditSettings,
    tokenizer: Any,
    *,
    prior: PrefixSource | None = None,
    data: Path | None = None,
    held_out: Path | None = None,
    reference: Path | None = None,
    index: Path | None = None,
    with_index: bool = True,
) -> Sources:
    """Read the files that settings or the command line name; the command line goes first.

    `with_index` is false while the index that settings name is still being written.

    Raises:
        InputError: a file that cannot be read, a line of it that is no record, a reference with another vocabulary, or an
            index that cannot be asked by this tokenizer.
    """
    data, held_out = data or settings.records.file, held_out or settings.records.held_out
    members = load_records(data, tokenizer) if data is not None else []
    if prior is None and members:
        prior = PrefixSource(len(members), lambda index: members[index].ids)
    others = load_records(held_out, tokenizer, what="held-out data") if held_out is not None else []
    if reference is None and settings.membership is not None:
        reference = settings.membership.reference
    if reference is not None:
        check_reference(reference, tokenizer)
    if index is None and settings.propensity is not None and with_index:
        index = settings.propensity.index
    return Sources(prior, members, others, reference, open_index(index, tokenizer) if index is not None else None)


@dataclass
class FullFigures:
    """What a full audit found; None: not measured."""

    rows: Sequence[CanaryRow]
    extraction: Extraction | None = None
    prior_aware: PriorAwareCounts | None = None
    thresholds: list[Threshold] = field(default_factory=list)
    records: Records | None = None
    membership: Membership | None = None
    propensity: Propensity | None = None
    positive_control: PositiveControl | None = None
    notices: list[str] = field(default_factory=list)


class FullMeasurement:
    """One full audit of one model, in audit mode.

    Args:
        scorer: of the model.
        plan: the canaries.
        tokenizer: of the plan.
        settings: the `audit` part of the configuration.
        sources: data.
        tolerance: scores closer than this tie; nats.
    """

    def __init__(
        self, scorer: Scorer, plan: CanaryPlan, tokenizer: Any, settings: AuditSettings, sources: Sources, tolerance: float
    ) -> None:
        self.scorer, self.plan, self.tokenizer = scorer, plan, tokenizer
        self.settings, self.sources, self.tolerance = settings, sources, tolerance
        self.notices: list[str] = []
        self.held_out = self._without_members(sources.held_out)
        if sources.held_out and not sources.members:
            self._note("held-out records were given without members, so neither records nor membership were measured.")
        if sources.reference is not None and not (sources.members and sources.held_out):
            self._note("a reference was given without members and held-out records, so membership was not measured.")
        self.prior: PriorMeasurement | None = None
        if settings.prior_aware is not None and sources.prior is not None:
            self.prior = PriorMeasurement(
                scorer,
                sources.prior,
                settings.prior_aware,
                lead_ids=plan.lead_ids,
                seed=plan.placement_seed,
                tolerance=tolerance,
            )

    def measure(self, scored: Sequence[GroupScores], rows: Sequence[CanaryRow]) -> FullFigures:
        """Everything there is data for.

        Args:
            scored: canaries and references with their scores, all finite.
            rows: of the canaries.

        Raises:
            NonFiniteScoreError: a score that is not finite.
            ScoringError: the model could not be scored.
        """
        figures = FullFigures(rows, notices=self.notices)
        if self.settings.extraction is not None:
            groups = [item.group for item in scored]
            figures.extraction, found, counted = measure_extraction(
                self.scorer, self.plan, groups, self.tokenizer, self.settings.extraction
            )
            figures.rows = with_extraction(rows, found, counted=counted)
        measured = self._section("Prior-Aware memorisation was", lambda: self._prior_aware(scored))
        if measured is not None:
            figures.thresholds, annotated = measured
            figures.rows = [row.model_copy(update={"prior_aware": annotated.get(row.id)}) for row in figures.rows]
            figures.prior_aware = count_verdicts([row.prior_aware for row in figures.rows if row.role == "canary"])
        figures.records = self._section("records were", self._records)
        figures.membership = self._section("membership was", self._membership)
        figures.propensity = self._section("propensity was", self._propensity)
        if self.plan.probe:
            made = run_probe(
                self.scorer.model.model,
                self.plan,
                self.tokenizer,
                batch_size=self.settings.batch_size,
                tolerance=self.tolerance,
            )
            figures.positive_control, notice = self.scorer.model.team.agreed("probe", made)
            self.notices += [notice] if notice is not None else []
        figures.rows = self._section("copies of canaries were", lambda: self._with_copies(figures.rows)) or figures.rows
        return figures

    def _with_copies(self, rows: Sequence[CanaryRow]) -> list[CanaryRow] | None:
        if self.sources.index is None:
            return None
        counted = count_canary_copies(self.plan, self.sources.index, self.tokenizer)
        for notice in canary_notices(rows, counted):
            self._note(notice)
        return [row.model_copy(update={"num_copies": counted[row.id]}) for row in rows]

    def _prior_aware(self, scored: Sequence[GroupScores]) -> tuple[list[Threshold], dict[str, PriorAware]] | None:
        if self.prior is None:
            return None
        thresholds = self._thresholds(scored)
        return thresholds, self._annotate(scored, {one.targets: one for one in thresholds})

    def _thresholds(self, scored: Sequence[GroupScores]) -> list[Threshold]:
        """The belief ratio that makes a canary of each format PA, from its controls; none where no canary is extractable."""
        assert self.settings.prior_aware is not None
        assert self.prior is not None
        n = self.settings.prior_aware.n
        found = []
        for one in self.plan.formats:
            mine = [item for item in scored if item.group.format.name == one.name]
            targets = [target for item in mine for target in _targets(item)]
            if not any(self.prior.is_extractable(score) for role, _, score in targets if role != "control"):
                continue
            if n != "calibrated":
                found.append(given_threshold(one.name, n))
                continue
            controls = [(span, score) for role, span, score in targets if role == "control"]
            calibrated = calibrate(
                self.prior, [c[0] for c in controls], [c[1] for c in controls], targets=one.name, seed=self.plan.placement_seed
            )
            if calibrated is None:
                if not one.positive_control:
                    self._note(f"format '{one.name}' has no controls: its Prior-Aware ratio is {FALLBACK:g}, not calibrated.")
                calibrated = given_threshold(one.name, FALLBACK)
            found.append(calibrated)
        return found

    def _annotate(self, scored: Sequence[GroupScores], thresholds: Mapping[str, Threshold]) -> dict[str, PriorAware]:
        assert self.prior is not None
        found = {}
        for item in scored:
            threshold = thresholds.get(item.group.format.name)
            for canary, (role, span, score) in zip(item.group.canaries, _targets(item), strict=True):
                if role == "control":
                    continue
                if threshold is None:
                    found[canary.id] = not_extractable(score)
                else:
                    found[canary.id] = _above_controls(self.prior.measure(span, score, n=threshold.n), threshold)
        return found

    def _section(self, name: str, measure: Callable[[], T | None]) -> T | None:
        """A part on data of the user's: what is wrong with the data costs that part, and not the audit of the canaries."""
        try:
            return measure()
        except NonFiniteScoreError:
            raise
        except MemguardError as error:
            self._note(f"{name} not measured: {error}")
            return None

    def _records(self) -> Records | None:
        if not self.sources.members:
            return None
        found = measure_records(
            self.scorer,
            self.sources.members,
            self.held_out,
            self.settings,
            lead_ids=self.plan.lead_ids,
            seed=self.plan.placement_seed,
            prior=self.prior,
        )
        wants_calibration = self.settings.prior_aware is not None and self.settings.prior_aware.n == "calibrated"
        if self.sources.index is not None:
            found = with_copies(found, self.sources.members, self.sources.index, self.tokenizer)
        if wants_calibration and found.threshold is not None and found.threshold.method == "given":
            self._note(f"no held-out record was given: the records' Prior-Aware ratio is {FALLBACK:g}, not calibrated.")
        return found

    def _membership(self) -> Membership | None:
        wanted = self.settings.membership
        if wanted is None or not self.sources.members or not self.sources.held_out:
            return None
        members, held_out = self._sample(self.sources.members), self._sample(self.held_out)
        few = min(len(members), len(held_out))
        if few < MIN_TEXTS:
            raise EvidenceError(f"it needs {MIN_TEXTS} records of each kind at least, got {few}.")
        with_reference = self.sources.reference is not None and "reference" not in wanted.scores
        limit, records = self.scorer.model.max_length, self.settings.records
        options: dict[str, Any] = {
            "scores": (*wanted.scores, "reference") if with_reference else wanted.scores,
            "tokenizer": self.tokenizer,
            "seed": self.plan.placement_seed,
            "max_tokens": min(limit or 512, max(512, records.prefix_tokens + records.suffix_tokens)),
        }
        if self.sources.index is not None:
            options["split"] = split_by_copies(copies_of(members, self.sources.index, self.tokenizer))
        if self.sources.reference is None:
            return measure_membership(self.scorer, members, held_out, **options)
        model, tokenizer = load_checkpoint(self.sources.reference)
        with audit_mode(model) as inner:
            reference = Scorer(inner, batch_size=self.settings.batch_size, team=self.scorer.model.team)
            options |= {"reference": reference, "reference_tokenizer": tokenizer}
            return measure_membership(self.scorer, members, held_out, **options)

    def _propensity(self) -> Propensity | None:
        wanted, index, seed = self.settings.propensity, self.sources.index, self.plan.placement_seed
        if wanted is None and index is None:
            return None
        if index is None:
            raise EvidenceError("it needs an index of the training corpus: audit.propensity.index, or --index.")
        members = self.sources.members or sample_documents(index, seed=seed)
        corpus = corpus_of(index, self.tokenizer, seed=seed)
        return measure_model(
            self.scorer,
            self.tokenizer,
            corpus,
            wanted or PropensitySettings(),
            members=members,
            held_out=self.held_out,
            seed=seed,
        )

    def _sample(self, records: Sequence[Record]) -> list[Record]:
        """At most `max_records` records of two tokens or more, at random."""
        usable = [record for record in records if len(record.ids) >= 2]
        if len(usable) <= self.settings.records.max_records:
            return usable
        stream = random.Random(f"memguard/membership/{self.plan.placement_seed}")
        chosen = stream.sample(range(len(usable)), self.settings.records.max_records)
        return [usable[index] for index in sorted(chosen)]

    def _without_members(self, held_out: Sequence[Record]) -> list[Record]:
        """Held-out records that are no members: a member among them would hide what training added."""
        members = {record.ids for record in self.sources.members}
        kept = [record for record in held_out if record.ids not in members]
        if len(kept) < len(held_out):
            self._note(f"{len(held_out) - len(kept)} of {len(held_out)} held-out records are members too, and were left out.")
        return kept

    def _note(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)


def _targets(item: GroupScores) -> list[tuple[str, Any, float]]:
    """Role, span and score of the planned secrets of a group."""
    return [
        (canary.role, span, float(score))
        for canary, span, score in zip(item.group.canaries, item.group.canary_spans, item.canary_log_probs, strict=True)
    ]


def _above_controls(measured: PriorAware, threshold: Threshold) -> PriorAware:
    """The ratio less its mean over controls, where it is an estimate and not the lower end that an open one is."""
    if measured.log_belief_ratio is None or threshold.mean_log_ratio is None or measured.num_open_prefixes:
        return measured
    above = measured.log_belief_ratio - threshold.mean_log_ratio
    return measured.model_copy(update={"log_ratio_above_controls": above})
