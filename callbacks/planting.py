"""From a plan and a dataset to what is planted: mode, rows, share of tokens. Knows no trainer.

Everything that would make a canary miss the loss is found here, before step 1, and said in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.audit.items import encode_planted
from memguard.audit.prior import PrefixSource
from memguard.canaries.drawing import draw_plan
from memguard.canaries.encoding import require_fast, tokenizer_digest
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.plan import CanaryPlan, PlannedCanary, load_plan
from memguard.canaries.schedule import Mode
from memguard.canaries.settings import CanarySettings
from memguard.errors import CanaryError, InputError

SAMPLED_ROWS = 512
WARN_SHARE = 0.001


@dataclass(frozen=True)
class Planting:
    """What goes into the data: planted canaries with their ids and repetitions, and how."""

    canaries: tuple[PlannedCanary, ...]
    ids: tuple[tuple[int, ...], ...]
    repetitions: tuple[int, ...]
    mode: Mode
    mean_row_tokens: float
    share_is_estimate: bool

    @property
    def tokens(self) -> int:
        """Canary tokens in one unit of `count` (an epoch or the run)."""
        return sum(len(ids) * number for ids, number in zip(self.ids, self.repetitions, strict=True))

    def share(self, *, num_rows: float) -> float:
        """Share of training tokens that are canaries when `num_rows` user rows go with one unit of `count`."""
        user = self.mean_row_tokens * num_rows
        total = user + self.tokens if self.mode == "append" else user
        return self.tokens / max(total, 1.0)


def resolve_plan(path: Path, settings: CanarySettings, tokenizer: Any) -> tuple[CanaryPlan, bool]:
    """The plan at `path`, or a new one (not yet saved); with whether it is new.

    Raises:
        InputError: an unreadable plan, one for another tokenizer, or one drawn from other settings.
        CanaryError: canaries that cannot be drawn.
    """
    require_fast(tokenizer)
    if not path.exists():
        return draw_plan(settings, tokenizer), True
    plan = load_plan(path)
    plan.check_tokenizer(tokenizer_digest(tokenizer))
    wanted = {(one.name, one.template, one.secret.kind) for one in settings.formats}
    held = {(one.name, one.template, one.secret.kind) for one in plan.formats if not one.positive_control}
    tiers = {tier for canary in plan.canaries if canary.role == "canary" for tier in [canary.tier]}
    if wanted != held or not tiers <= set(settings.tiers):
        raise InputError(
            f"plan '{path}' was drawn from other formats or tiers than the config asks for. "
            "Draw it again with `memguard plan --force`, or put the old settings back."
        )
    return plan, False


def refuse_uploaded_plan(path: Path, output_dir: Path) -> None:
    """Raise when the plan lies where the trainer would upload it."""
    plan, output = path.resolve(), output_dir.resolve()
    if plan.is_relative_to(output) and plan.relative_to(output).parts[0] != "_memguard":
        raise InputError(
            f"the plan must not lie in the trainer's output_dir ('{path}'): push_to_hub would upload its secrets. "
            "Keep it outside, or under output_dir/_memguard/."
        )


def row_ids(row: Any, tokenizer: Any) -> Sequence[int]:
    """Token ids of one training row, tokenised here when the row is raw text.

    Raises:
        CanaryError: a row that holds neither.
    """
    if hasattr(row, "keys") and "input_ids" in row:
        ids = row["input_ids"]
        return ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if hasattr(row, "keys") and isinstance(row.get("text"), str):
        return list(tokenizer(row["text"])["input_ids"])
    columns = ", ".join(map(str, row.keys())) if hasattr(row, "keys") else type(row).__name__
    raise CanaryError(f"training rows must hold 'input_ids' or raw 'text', got {columns}.")


def prefix_source(base: Any, tokenizer: Any) -> PrefixSource:
    """The user's rows, without canaries, as prior prefixes."""
    return PrefixSource(len(base), lambda index: row_ids(base[index], tokenizer))


def plan_planting(
    plan: CanaryPlan, settings: CanarySettings, base: Any, tokenizer: Any, *, max_positions: int | None
) -> Planting:
    """Decide how the canaries go into `base`.

    Args:
        plan: the canaries.
        settings: `plant_once`, `count`.
        base: the user's map-style dataset.
        tokenizer: of the run.
        max_positions: longest row the model takes, None when unknown.

    Raises:
        CanaryError: an empty dataset, rows that are neither ids nor text, or a canary longer than a row may be.
    """
    if len(base) == 0:
        raise CanaryError("the training dataset must hold at least one row, got none.")
    chosen = range(0, len(base), max(1, len(base) // SAMPLED_ROWS))
    sample = [base[index] for index in chosen]
    lengths = [len(row_ids(row, tokenizer)) for row in sample]
    is_text = "input_ids" not in sample[0]
    is_fixed = not is_text and len(set(lengths)) == 1
    mode: Mode = "splice" if is_fixed else "append" if settings.count == "per_epoch" else "replace"
    canaries = tuple(plan.planted())
    encoded = encode_planted(plan, tokenizer)
    ids = tuple(encoded[canary.id].ids for canary in canaries)
    limit = lengths[0] if is_fixed else max_positions
    _check_lengths(canaries, ids, limit, "block" if is_fixed else "longest row the model takes")
    repetitions = tuple(1 if settings.plant_once and canary.role == "canary" else canary.tier for canary in canaries)
    mean = sum(lengths) / len(lengths)
    return Planting(canaries, ids, repetitions, mode, mean, share_is_estimate=not is_fixed and len(sample) < len(base))


def _check_lengths(canaries: Sequence[PlannedCanary], ids: Sequence[Sequence[int]], limit: int | None, what: str) -> None:
    long = [(canary.id, len(one)) for canary, one in zip(canaries, ids, strict=True) if limit is not None and len(one) > limit]
    if long:
        raise CanaryError(
            f"every canary must fit in the {what} of {limit} tokens; {len(long)} of {len(canaries)} do not, first "
            f"canary '{long[0][0]}' with {long[0][1]} tokens. Use a shorter template or longer rows."
        )


def canary_dataset(plan: CanaryPlan, planting: Planting, base: Any) -> CanaryDataset:
    """The user's rows with the canaries behind them."""
    texts = ["".join(plan.format_named(one.format).split(one.secret, name=one.name)) for one in planting.canaries]
    return CanaryDataset(base, planting.ids, texts, mode=planting.mode, seed=plan.placement_seed)


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
    control = settings.positive_control.in_training if settings.positive_control is not None else None
    formats = len(settings.formats)
    while tiers:
        highest = max(tiers)
        repetitions = min(control.repetitions, max(8, 4 * highest)) if control is not None else 0
        extra = control.count * repetitions * formats if control is not None else 0
        if formats * sum(tier * number for tier, number in tiers.items()) + extra <= room:
            shown = ", ".join(f"{tier}: {number}" for tier, number in tiers.items())
            tail = f" with positive_control.in_training.repetitions: {repetitions}" if control is not None else ""
            return f"A plan that fits: tiers {{{shown}}}{tail}."
        if len(tiers) > 1:
            del tiers[highest]
        elif tiers[highest] > 1:
            tiers[highest] //= 2
        else:
            break
    return "No plan fits: use more data or raise canaries.max_share."
