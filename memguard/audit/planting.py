"""From a plan and a dataset to what is planted: mode, rows, share of tokens. Knows no trainer.

Everything that would make a canary miss the loss is found here, before step 1, and said in one sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from memguard.audit.items import encode_planted
from memguard.audit.prior import PrefixSource
from memguard.canaries.drawing import draw_plan, plan_differences
from memguard.canaries.encoding import require_fast, tokenizer_digest
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.plan import CanaryPlan, PlannedCanary, load_plan
from memguard.canaries.preflight import PlantedIds
from memguard.canaries.rows import ids_of
from memguard.canaries.schedule import Count, Mode
from memguard.canaries.settings import CanarySettings
from memguard.errors import CanaryError, InputError
from memguard.scoring.audit_mode import preserved_rng
from memguard.scoring.team import Team

SAMPLED_ROWS = 8192
TAIL_ROWS = 64
USED_UP = (
    "a stream must begin with the same row each time it is iterated, got one that goes on: looking at its first rows would "
    "take them from training. Return a fresh iterator from __iter__, and shuffle by a seed that is set there."
)
PEEKED_ROWS = 512  # of a stream: enough for the default number of prior prefixes
WARN_SHARE = 0.001
DEFAULT_MIN_CANARIES = 40  # what the default policy asks for


@dataclass(frozen=True)
class DataSample:
    """What is known of the training data before it is trained on.

    Args:
        rows: rows looked at.
        num_rows: rows an epoch; None for a stream.
        base: the user's dataset.
    """

    rows: tuple[Any, ...]
    num_rows: int | None
    base: Any

    @property
    def is_stream(self) -> bool:
        """Whether the data have no length."""
        return self.num_rows is None

    def prefix_source(self, tokenizer: Any) -> PrefixSource:
        """The user's rows, without canaries, as prior prefixes; of a stream those that were looked at."""
        rows = self.rows if self.is_stream else self.base
        return PrefixSource(len(rows), lambda index: row_ids(rows[index], tokenizer))


@dataclass(frozen=True)
class Planting:
    """What goes into the data: planted canaries with their ids and repetitions, and how."""

    canaries: tuple[PlannedCanary, ...]
    ids: tuple[tuple[int, ...], ...] = field(repr=False)
    texts: tuple[str, ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    repetitions: tuple[int, ...]
    mode: Mode
    count: Count
    pad_to: int
    mean_row_tokens: float
    share_is_estimate: bool

    @property
    def tokens(self) -> int:
        """Canary tokens in one unit of `count` (an epoch or the run)."""
        return sum(len(ids) * number for ids, number in zip(self.ids, self.repetitions, strict=True))

    def share(self, *, num_rows: float) -> float:
        """Share of training tokens that are canaries when `num_rows` user rows go with one unit of `count`."""
        user = self.mean_row_tokens * num_rows
        total = user + self.tokens if self.mode in ("append", "record") else user
        return self.tokens / max(total, 1.0)


def planted_ids(plan: CanaryPlan, tokenizer: Any) -> list[PlantedIds]:
    """Every planted canary of a plan for the pre-flight, in plan order."""
    encoded = encode_planted(plan, tokenizer)
    return [
        PlantedIds(one.id, encoded[one.id].ids, encoded[one.id].start, encoded[one.id].end, one.format)
        for one in plan.planted()
    ]


def resolve_plan(path: Path, settings: CanarySettings, tokenizer: Any) -> tuple[CanaryPlan, bool]:
    """The plan at `path`, or a new one (not yet saved); with whether it is new.

    The first rank reads or draws it and gives it to the others, who need not see the file.

    Raises:
        InputError: an unreadable plan, one for another tokenizer, or one drawn from other settings.
        CanaryError: canaries that cannot be drawn.
    """
    require_fast(tokenizer)
    team = Team.current()
    with team.guarded():
        return team.agreed("plan", _read_or_draw(path, settings, tokenizer) if team.rank == 0 else None)  # type: ignore[return-value]


def _read_or_draw(path: Path, settings: CanarySettings, tokenizer: Any) -> tuple[CanaryPlan, bool]:
    if not path.exists():
        return draw_plan(settings, tokenizer), True
    plan = load_plan(path)
    plan.check_tokenizer(tokenizer_digest(tokenizer))
    differences = plan_differences(plan, settings)
    if differences:
        raise InputError(
            f"plan '{path}' was drawn from other settings than the config holds: {', '.join(differences)}. "
            "Draw it again with `memguard plan --force`, or put the old settings back."
        )
    return plan, False


def refuse_uploaded(path: Path, output_dir: Path, *, what: str = "plan") -> None:
    """Raise when what holds secrets lies where the trainer would upload it."""
    inside, output = path.resolve(), output_dir.resolve()
    if inside.is_relative_to(output) and inside.relative_to(output).parts[:1] != ("_memguard",):
        raise InputError(
            f"the {what} must not lie in the trainer's output_dir ('{path}'): push_to_hub would upload its secrets. "
            "Keep it outside, or under output_dir/_memguard/."
        )


def row_ids(row: Any, tokenizer: Any) -> Sequence[int]:
    """Token ids of one training row, tokenised here when the row is raw text.

    Raises:
        CanaryError: a row that holds neither.
    """
    ids = ids_of(row)
    if ids is not None:
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)
    text = row.get("text") if hasattr(row, "keys") else row
    if isinstance(text, str):
        return list(tokenizer(text)["input_ids"])
    if hasattr(row, "keys"):
        raise CanaryError(f"training rows must hold 'input_ids' or raw 'text', got {', '.join(map(str, row.keys()))}.")
    raise CanaryError(
        "training rows without columns must be a text, one sequence of token ids, or inputs with targets that are the same "
        f"ids or the next ones, got {type(row).__name__}."
    )


def sample_rows(base: Any) -> DataSample:
    """Look at the user's rows, or at the first of a stream, without drawing from the run's random generators.

    Raises:
        CanaryError: no row, or a stream that can be read only once.
    """
    with preserved_rng(0):  # rows of a dataset with random transforms draw from the run's generators
        if is_stream(base):
            rows, num_rows = tuple(itertools.islice(_fresh(base), PEEKED_ROWS)), None
            with preserved_rng(0):
                again = next(_fresh(base), None)
            if rows and not _is_same(rows[0], again):
                raise CanaryError(USED_UP)
        else:
            num_rows = len(base)
            rows = tuple(base[index] for index in _sampled(num_rows))
    if not rows:
        raise CanaryError("the training dataset must hold at least one row, got none.")
    return DataSample(rows, num_rows, base)


def _fresh(base: Any) -> Iterator[Any]:
    """A new iterator of a stream; `CanaryError` where it gives the same one again, which can be read only once."""
    stream: Iterator[Any] = iter(base)
    if stream is base or stream is iter(base):
        raise CanaryError(USED_UP)
    return stream


def _is_same(row: Any, again: Any) -> bool:
    ids = [ids_of(one) if again is not None else None for one in (row, again)]
    if ids[0] is None or ids[1] is None:
        return again is not None and str(row) == str(again)
    return [int(one) for one in ids[0]] == [int(one) for one in ids[1]]


def is_stream(base: Any) -> bool:
    """Whether rows come in turn only, without an index."""
    return isinstance(base, IterableDataset) or not (hasattr(base, "__len__") and hasattr(base, "__getitem__"))


def plan_planting(
    plan: CanaryPlan,
    settings: CanarySettings,
    data: DataSample,
    tokenizer: Any,
    *,
    max_positions: int | None,
    as_records: bool = False,
) -> Planting:
    """Decide how the canaries go into the data: spliced into rows of one length, else as rows of their own.

    Args:
        plan: the canaries.
        settings: `plant_once`, `count`.
        data: the user's rows.
        tokenizer: of the run.
        max_positions: longest row the model takes, None when unknown.
        as_records: canaries are rows that the run's own sampler draws, as a DP guarantee needs; not at planned positions.

    Raises:
        CanaryError: rows that are neither ids nor text, a canary longer than a row may be, or records of a stream.
    """
    if as_records and data.is_stream:
        raise CanaryError("records of a DP run are drawn by index, which a stream does not have: use a map-style dataset.")
    lengths = [len(row_ids(row, tokenizer)) for row in data.rows]
    first = data.rows[0]
    is_packed = hasattr(first, "keys") and "seq_lengths" in first
    is_fixed = ids_of(first) is not None and not is_packed and len(set(lengths)) == 1
    is_total = data.is_stream or settings.count == "total"
    mode: Mode = "append" if data.is_stream or not is_total else "replace"
    if is_fixed or as_records:
        mode = "record" if as_records else "splice"
    canaries = tuple(plan.planted())
    encoded = encode_planted(plan, tokenizer)
    ids = tuple(encoded[canary.id].ids for canary in canaries)
    limit = lengths[0] if is_fixed else max_positions
    _check_lengths(canaries, ids, limit, "block" if is_fixed else "longest row the model takes")
    return Planting(
        canaries=canaries,
        ids=ids,
        texts=tuple("".join(plan.format_named(one.format).split(one.secret, name=one.name)) for one in canaries),
        spans=tuple((encoded[canary.id].start, encoded[canary.id].end) for canary in canaries),
        repetitions=tuple(1 if settings.plant_once and canary.role == "canary" else canary.tier for canary in canaries),
        mode=mode,
        count="total" if is_total and not as_records else "per_epoch",
        pad_to=lengths[0] if is_fixed and as_records else 0,
        mean_row_tokens=sum(lengths) / len(lengths),
        share_is_estimate=len(data.rows) != data.num_rows,
    )


def _sampled(num_rows: int) -> list[int]:
    """Every row of a small dataset; of a large one rows at even distances, and its tail, where short rows are."""
    if num_rows <= SAMPLED_ROWS:
        return list(range(num_rows))
    return sorted({*range(0, num_rows, num_rows // (SAMPLED_ROWS // 2) + 1), *range(num_rows - TAIL_ROWS, num_rows)})


def _check_lengths(canaries: Sequence[PlannedCanary], ids: Sequence[Sequence[int]], limit: int | None, what: str) -> None:
    long = [(canary.id, len(one)) for canary, one in zip(canaries, ids, strict=True) if limit is not None and len(one) > limit]
    if long:
        raise CanaryError(
            f"every canary must fit in the {what} of {limit} tokens; {len(long)} of {len(canaries)} do not, first "
            f"canary '{long[0][0]}' with {long[0][1]} tokens. Use a shorter template or longer rows."
        )


def canary_dataset(plan: CanaryPlan, planting: Planting, base: Any, *, pad_id: int = 0) -> CanaryDataset:
    """The user's rows with the canaries behind them."""
    added = sum(planting.repetitions) if planting.mode in ("append", "record") else 0
    is_record = planting.mode == "record"
    with preserved_rng(0):
        return CanaryDataset(
            base,
            planting.ids,
            planting.texts,
            mode=planting.mode,
            seed=plan.placement_seed,
            rows_per_epoch=len(base) + added,
            records=[canary for canary, number in enumerate(planting.repetitions) for _ in range(number)] if is_record else (),
            pad_to=planting.pad_to,
            pad_id=pad_id,
        )


def check_share(planting: Planting, settings: CanarySettings, *, num_rows: float) -> float:
    """The share of training tokens that are canaries.

    Raises:
        CanaryError: above `max_share`; names a smaller plan that fits.
    """
    share = planting.share(num_rows=num_rows)
    if share > settings.max_share:
        raise CanaryError(
            f"canaries must be at most {settings.max_share:.2%} of the training tokens (canaries.max_share), got {share:.2%}. "
            f"{_smaller_plan(planting, settings, num_rows)}"
        )
    return share


def _smaller_plan(planting: Planting, settings: CanarySettings, num_rows: float) -> str:
    """A plan that stays under the limit: highest tiers dropped first, then fewer canaries a tier."""
    mean = sum(map(len, planting.ids)) / len(planting.ids)
    room = settings.max_share * planting.mean_row_tokens * num_rows / mean
    tiers = dict(sorted(settings.tiers.items()))
    control = settings.planted_control
    formats = len(settings.formats)
    while tiers:
        highest = max(tiers)
        repetitions = min(control.repetitions, max(8, 4 * highest)) if control is not None else 0
        extra = control.count * repetitions * formats if control is not None else 0
        if formats * sum(tier * number for tier, number in tiers.items()) + extra <= room:
            shown = ", ".join(f"{tier}: {number}" for tier, number in tiers.items())
            tail = f" with positive_control.in_training.repetitions: {repetitions}" if control is not None else ""
            few = formats * sum(tiers.values()) < DEFAULT_MIN_CANARIES
            more = f" It has fewer than the {DEFAULT_MIN_CANARIES} canaries the default policy asks for: more data is better."
            return f"A plan that fits: tiers {{{shown}}}{tail}.{more if few else ''}"
        if len(tiers) > 1:
            del tiers[highest]
        elif tiers[highest] > 1:
            tiers[highest] //= 2
        else:
            break
    return "No plan fits: use more data or raise canaries.max_share."
