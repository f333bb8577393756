"""Proves that every planned canary will reach the loss, before step 1, on the run's own rows and collator.

A ladder per canary: in the data stream, tokens intact, supervised, gradient. That other text stands before a canary in its
own segment is a flag, no failure: splicing does so by design. Knows no trainer and no model; the caller holds the random
state (`memguard.scoring.audit_mode.preserved_rng`) and gives the probe of the gradient. No secret is in any message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from memguard.canaries.batch_view import BatchRow, view_rows
from memguard.errors import CanaryError

Step = Literal["stream", "tokens", "supervised", "gradient"]
Flag = Literal["contaminated", "shifted", "unseen"]

MAX_CHECKED = 512
MAX_NAMED = 6
RUN = 4  # consecutive tokens of a canary that show it is there, though not whole
EDGE = 2  # tokens that truncation may put behind a cut, such as an end token
REPEATS = 3  # calls that a collator must answer alike
MASKING = ("DataCollatorForPermutationLanguageModeling", "DataCollatorForWholeWordMask", "DataCollatorForSOP")

CURES: dict[str, str] = {
    "missing": "Let no filter or de-duplication of the dataset and no truncation of the collator take canary rows out.",
    "cut": "Raise the maximum length of a row to at least {tokens} tokens, or use a shorter template.",
    "split": "Pack with bfd, or use longer blocks, so that no canary is cut in two (wrapped packing cuts rows anywhere).",
    "changed": "Take rows as token ids, or draw the plan with the tokenizer and normalisation that the run uses.",
    "random": "Let the collator give the same tokens and labels for the same row each time.",
    "masked": "Keep the labels of canary rows: with completion-only loss a canary must stand in the completion.",
    "first": "Let text or a BOS token stand before the secret: nothing predicts the first token of a row.",
    "frozen": "Let parameters of the model require gradients, and the loss depend on them.",
    "not finite": "The loss of a canary has no finite gradient: look at the precision and at the weights.",
}
REASONS: dict[str, str] = {
    "missing": "in no row",
    "cut": "cut off by a maximum length",
    "split": "split over two rows by packing",
    "changed": "made of other tokens than planned",
    "random": "changed at random by the data collator",
    "masked": "masked out of the labels",
    "first": "the first tokens of their row, which no label is compared with",
    "frozen": "without a gradient in any trainable parameter",
    "not finite": "with a gradient that is not finite",
}


@dataclass(frozen=True)
class PlantedIds:
    """Token ids of one planted canary; the secret is `ids[start:end]`, `ids[0]` a leading BOS or the first of its template."""

    id: str
    ids: tuple[int, ...] = field(repr=False)
    start: int
    end: int
    format: str = ""


@dataclass(frozen=True)
class Place:
    """Where a batch supervises a secret: `labels[row, start:end]`."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class GradientFinding:
    """Whether the loss of a canary's secret moves a trainable parameter; `note` says why it was not seen."""

    outcome: Literal["reached", "frozen", "not finite", "unseen"]
    note: str | None = None


@dataclass(frozen=True)
class CanaryFinding:
    """How far one canary of so many tokens came. `reached` is the last step seen, `failed` the step that stopped it."""

    id: str
    format: str
    num_tokens: int
    reached: Step | None
    failed: Step | None = None
    reason: str | None = None
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """Findings in the order of the plan; `num_planted` counts those that were not sent through the collator too."""

    findings: tuple[CanaryFinding, ...]
    num_planted: int
    notes: tuple[str, ...] = ()

    def failures(self) -> tuple[CanaryFinding, ...]:
        """Canaries that will not reach the loss."""
        return tuple(one for one in self.findings if one.failed is not None)

    def flagged(self, flag: Flag) -> tuple[CanaryFinding, ...]:
        """Canaries with a flag."""
        return tuple(one for one in self.findings if flag in one.flags)

    def message(self) -> str:
        """One text on all failures: how many, at which step, which (ids alone), and the cure; empty where there is none.

        Example:
            >>> lost = CanaryFinding("a17", "pin", 22, "stream", failed="tokens", reason="cut")
            >>> print(Preflight((lost,), 1).message())
            every canary must reach the loss; 1 of 1 checked will not.
            1 at step 'tokens', cut off by a maximum length: canary 'a17'. Raise the maximum length of a row to \
at least 22 tokens, or use a shorter template.
        """
        failures = self.failures()
        if not failures:
            return ""
        lines = [f"every canary must reach the loss; {len(failures)} of {len(self.findings)} checked will not."]
        return "\n".join([*lines, *failure_lines(failures)])


def failure_lines(failures: Sequence[CanaryFinding]) -> list[str]:
    """A sentence and its cure for every step and reason that stopped canaries."""
    groups: dict[tuple[str, str], list[CanaryFinding]] = defaultdict(list)
    for one in failures:
        groups[str(one.failed), str(one.reason)].append(one)
    lines = []
    for (step, reason), members in groups.items():
        named = ", ".join(f"'{one.id}'" for one in members[:MAX_NAMED])
        more = f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else ""
        word = "canary" if len(members) == 1 else "canaries"
        cure = CURES[reason].format(tokens=max(one.num_tokens for one in members))
        lines.append(f"{len(members)} at step '{step}', {REASONS[reason]}: {word} {named}{more}. {cure}")
    return lines


def run_preflight(
    planted: Sequence[PlantedIds],
    rows: Callable[[int], Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    *,
    user_rows: Callable[[], Sequence[Any]] | None = None,
    gradient: Callable[[Any, Place], GradientFinding] | None = None,
    max_checked: int = MAX_CHECKED,
) -> Preflight:
    """Send planned canaries through the run's own collator and say how far each comes.

    Args:
        planted: what is to be planted, in plan order.
        rows: index of a canary -> the raw rows that hold it, as the loader would fetch them; fresh on each call.
        collate: of the training loader.
        user_rows: a few raw rows of the user, for collators that take no row alone.
        gradient: probe of the model, called once; None where there is no model.
        max_checked: canaries sent through the collator; a larger plan is sampled evenly within each format and length.

    Returns:
        A `Preflight`. What a collator does not show (no labels, tuples) is flagged *unseen* and noted, no failure.

    Raises:
        CanaryError: a collator of masked language modelling, by its name. One that is random otherwise fails every canary.
        ValueError: nothing planted, two canaries of one id, or a span outside the ids.

    Example:
        >>> one = PlantedIds("a17", (1, 5, 6, 7), 2, 4, "pin")
        >>> keep = lambda rows: {"input_ids": [row["input_ids"] for row in rows], "labels": [row["input_ids"] for row in rows]}
        >>> run_preflight([one], lambda j: [{"input_ids": [1, 5, 6, 7]}], keep).findings[0].reached
        'supervised'
    """
    _check_planted(planted)
    refuse_random_masking(collate)
    chosen = _chosen(planted, max_checked)
    notes = [_sampling_note(len(chosen), len(planted))] if len(chosen) < len(planted) else []
    collator = _Collator(collate, user_rows)
    findings: list[CanaryFinding] = []
    probed: GradientFinding | None = None
    for index in chosen:
        raw = rows(index)
        batch = collator.batch(raw)
        finding, place = _climb(planted[index], raw, batch, collator)
        if gradient is not None and probed is None and place is not None:
            probed = gradient(batch, place)
        findings.append(finding)
    notes += collator.notes
    if gradient is not None:
        findings = _with_gradient(findings, probed)
        notes += [probed.note] if probed is not None and probed.note else []
    return Preflight(tuple(findings), len(planted), tuple(notes))


def refuse_random_masking(collate: Any) -> None:
    """Raise `CanaryError` for a collator of masked or permuted language modelling, also behind a wrapper of the trainer."""
    while collate is not None:
        name = type(collate).__name__
        if getattr(collate, "mlm", False) is True or name in MASKING:
            raise CanaryError(
                f"the data collator must keep every token and its label, got {name}, which masks tokens at random: a canary "
                "would be trained on in part. memguard measures causal language models (mlm=False)."
            )
        collate = getattr(collate, "data_collator", None)


def _check_planted(planted: Sequence[PlantedIds]) -> None:
    if not planted:
        raise ValueError("planted must hold at least one canary, got none.")
    if len({one.id for one in planted}) != len(planted):
        raise ValueError(f"planted must have distinct ids, got {len(planted)} canaries with repeated ids.")
    for one in planted:
        if not 0 < one.start < one.end <= len(one.ids):
            raise ValueError(f"canary '{one.id}' must have 0 < start < end <= {len(one.ids)}, got {one.start} and {one.end}.")


def _chosen(planted: Sequence[PlantedIds], most: int) -> list[int]:
    """All indices, or evenly spaced ones of every format and length, at least one of each."""
    if len(planted) <= most:
        return list(range(len(planted)))
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, one in enumerate(planted):
        groups[one.format, len(one.ids)].append(index)
    each = max(1, most // len(groups))
    kept = (members[:: -(-len(members) // each)] for members in groups.values())
    return sorted(index for members in kept for index in members)


def _sampling_note(checked: int, planned: int) -> str:
    return f"{checked} of {planned} canaries were sent through the collator, some of every format and length."


class _Collator:
    """The run's collator, with user rows beside a canary where it takes no row alone."""

    def __init__(self, collate: Callable[[list[Any]], Any], user_rows: Callable[[], Sequence[Any]] | None) -> None:
        self._collate, self._user_rows = collate, user_rows
        self._beside: Sequence[Any] = ()
        self.is_random: bool | None = None
        self.notes: list[str] = []

    def batch(self, rows: Sequence[Any]) -> Any:
        """The collated rows; None where there is no row, or the collator takes them in no way."""
        batch = self._call(rows) if rows else None
        if batch is not None and self.is_random is None:
            self.is_random = any(view_rows(self._call(rows)) != view_rows(batch) for _ in range(REPEATS - 1))
        return batch

    def _call(self, rows: Sequence[Any]) -> Any:
        if not self._beside:
            try:
                return self._collate(_copies(rows))
            except Exception as error:  # the user's own code: it may be right not to take one row alone
                self._beside = self._user_rows() if self._user_rows is not None else ()
                if not self._beside:
                    return self._refused(error)
        try:
            return self._collate(_copies([*self._beside, *rows]))
        except Exception as error:
            return self._refused(error)

    def _refused(self, error: Exception) -> None:
        self.note(f"the collator did not take a canary ({type(error).__name__}): what reaches the loss is not seen.")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _copies(rows: Sequence[Any]) -> list[Any]:
    """Rows of their own: some collators empty what they are given."""
    return [dict(row) if isinstance(row, dict) else row for row in rows]


def _climb(one: PlantedIds, raw: Sequence[Any], batch: Any, collator: _Collator) -> tuple[CanaryFinding, Place | None]:
    """How far a canary comes up to its labels, and where a batch supervises its secret."""
    start = CanaryFinding(one.id, one.format, len(one.ids), None)
    if not raw:
        return replace(start, failed="stream", reason="missing"), None
    seen = view_rows(batch) if batch is not None else []
    if not seen:
        if batch is not None:
            collator.note("the collator makes no input_ids: what reaches the loss is not seen.")
        return replace(start, reached="stream", flags=("unseen",)), None
    if collator.is_random:
        return replace(start, reached="stream", failed="tokens", reason="random"), None
    needle, skipped = one.ids[1 : one.end], one.start - 1
    found = [(row, at) for row in seen for at in _occurrences(row.ids, needle)]
    if not found:
        segments = [row.ids for row in seen]
        tried = [_why_broken(segments, whole) for whole in (needle, one.ids[1:])]  # with what follows the secret, or without
        reason = next(why for why in ("split", "cut", "changed", "missing") if why in tried)
        step: Step = "stream" if reason == "missing" else "tokens"
        return replace(start, reached=None if step == "stream" else "stream", failed=step, reason=reason), None
    judged = [_judge(one, row, at, skipped) for row, at in found]
    best = min(judged, key=lambda item: (item[0].failed is not None, "contaminated" in item[0].flags))
    if "unseen" in best[0].flags:
        collator.note("the collator makes no labels of the shape of input_ids: whether a canary is supervised is not seen.")
    if "shifted" in best[0].flags:
        collator.note("the collator shifts the labels by one token itself: the model must not shift them again.")
    return best


def _judge(one: PlantedIds, row: BatchRow, at: int, skipped: int) -> tuple[CanaryFinding, Place | None]:
    """One occurrence in one segment: alone or not, supervised or not. `at` is where `ids[1]` stands."""
    low, high = at + skipped, at + one.end - 1
    secret = one.ids[one.start : one.end]
    begin = at - 1 if at > 0 and row.ids[at - 1] == one.ids[0] else at
    flags: list[Flag] = ["contaminated"] if row.sees_before(low, begin, ignored=one.ids[0]) else []
    finding = CanaryFinding(one.id, one.format, len(one.ids), "tokens", flags=tuple(flags))
    if row.labels is None:
        return replace(finding, flags=(*flags, "unseen")), None
    if row.is_shifted:
        flags.append("shifted")
        low, high = low - 1, high - 1
    finding = replace(finding, flags=tuple(flags))
    if low < (0 if row.is_shifted else 1):  # at the head of its segment
        return replace(finding, failed="supervised", reason="first"), None
    if tuple(row.labels[low:high]) != secret:
        return replace(finding, failed="supervised", reason="masked"), None
    return replace(finding, reached="supervised"), Place(row.row, row.positions[low], row.positions[high - 1] + 1)


def _occurrences(ids: Sequence[int], needle: Sequence[int]) -> list[int]:
    """Every place where `needle` stands in `ids`."""
    size, first = len(needle), needle[0]
    return [at for at, one in enumerate(ids) if one == first and tuple(ids[at : at + size]) == tuple(needle)]


def _why_broken(segments: Sequence[Sequence[int]], needle: Sequence[int]) -> str:
    """Why a canary's tokens stand nowhere whole: missing, cut, split or changed."""
    size = len(needle)
    heads = {k for ids in segments for k in range(1, size) if _ends_with(ids, needle[:k])}
    tails = {size - k for ids in segments for k in range(1, size) if tuple(ids[:k]) == tuple(needle[size - k :])}
    run = min(RUN, size)
    long_head, long_tail = max(heads, default=0) >= run, size - min(tails, default=size) >= run
    if heads & tails or (long_head and long_tail):  # a long one may lie over three rows
        return "split"
    if (
        long_head
        or long_tail
        or any(len(ids) <= k + 1 + EDGE and _ends_with(ids, needle[:k]) for ids in segments for k in heads)
    ):
        return "cut"
    pieces = {tuple(needle[at : at + run]) for at in range(size - run + 1)}
    there = any(tuple(ids[at : at + run]) in pieces for ids in segments for at in range(len(ids)))
    return "changed" if there else "missing"


def _ends_with(ids: Sequence[int], head: Sequence[int]) -> bool:
    return any(tuple(ids[len(ids) - len(head) - extra : len(ids) - extra]) == tuple(head) for extra in range(EDGE + 1))


def _with_gradient(findings: list[CanaryFinding], probed: GradientFinding | None) -> list[CanaryFinding]:
    """What one probe says of every canary that is supervised."""
    if probed is None or probed.outcome == "unseen":
        return findings
    if probed.outcome == "reached":
        return [replace(one, reached="gradient") if one.reached == "supervised" else one for one in findings]
    return [
        replace(one, failed="gradient", reason=probed.outcome) if one.reached == "supervised" and one.failed is None else one
        for one in findings
    ]
