"""From a plan and a dataset to what is planted: mode, rows, share of tokens. Knows no trainer.

Everything that would make a canary miss the loss is found here, before step 1, and said in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.audit.items import encode_planted
from memguard.audit.prior import PrefixSource
from memguard.canaries.drawing import draw_plan, plan_differences
from memguard.canaries.encoding import require_fast, tokenizer_digest
from memguard.canaries.injection import CanaryDataset
from memguard.canaries.plan import CanaryPlan, PlannedCanary, load_plan
from memguard.canaries.schedule import Mode
from memguard.canaries.settings import CanarySettings
from memguard.errors import CanaryError, InputError
from memguard.scoring.audit_mode import preserved_rng

SAMPLED_ROWS = 8192
TAIL_ROWS = 64
WARN_SHARE = 0.001
CHECKED_CANARIES = 64
DEFAULT_MIN_CANARIES = 40  # what the default policy asks for


@dataclass(frozen=True)
class Planting:
    """What goes into the data: planted canaries with their ids and repetitions, and how."""

    canaries: tuple[PlannedCanary, ...]
    ids: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int], ...]
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
    differences = plan_differences(plan, settings)
    if differences:
        raise InputError(
            f"plan '{path}' was drawn from other settings than the config holds: {', '.join(differences)}. "
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
    with preserved_rng(0):  # rows of a dataset with random transforms draw from the run's generators
        sample = [base[index] for index in _sampled(len(base))]
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
    spans = tuple((encoded[canary.id].start, encoded[canary.id].end) for canary in canaries)
    return Planting(canaries, ids, spans, repetitions, mode, mean, share_is_estimate=len(sample) < len(base))


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


def canary_dataset(plan: CanaryPlan, planting: Planting, base: Any) -> CanaryDataset:
    """The user's rows with the canaries behind them."""
    texts = ["".join(plan.format_named(one.format).split(one.secret, name=one.name)) for one in planting.canaries]
    added = sum(planting.repetitions) if planting.mode == "append" else 0
    with preserved_rng(0):
        return CanaryDataset(
            base,
            planting.ids,
            texts,
            mode=planting.mode,
            seed=plan.placement_seed,
            rows_per_epoch=len(base) + added,
        )


def check_reaches_loss(planting: Planting, dataset: CanaryDataset, collate: Callable[[list[Any]], Any]) -> list[str]:
    """Send canaries through the run's own collator: each secret must come out whole, and its labels with it.

    Args:
        planting: what goes in.
        dataset: rows with the canaries behind them.
        collate: of the training loader.

    Returns:
        Why the counts are not proven, empty when they are.

    Raises:
        CanaryError: a canary that is cut off, or whose labels are masked; names the first and how many.
    """
    every = max(1, len(planting.canaries) // CHECKED_CANARIES)
    lost, masked, checked = [], [], range(0, len(planting.canaries), every)
    for index in checked:
        step = dataset.num_rows if planting.mode == "splice" else 1
        try:
            with preserved_rng(0):
                batch = collate([dataset[dataset.num_rows + index * step]])
        except Exception as error:  # the user's own code: it may be right not to take one row alone
            return [f"the collator did not take a canary alone ({type(error).__name__}): what reaches the loss is not seen."]
        if not hasattr(batch, "keys") or "labels" not in batch or "input_ids" not in batch:
            return ["the collator makes no input_ids and labels: what reaches the loss is not seen."]
        start, end = planting.spans[index]
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        secret = list(planting.ids[index][start:end])
        at = next((i for i in range(len(ids) - len(secret) + 1) if ids[i : i + len(secret)] == secret), None)
        if at is None:
            lost.append(planting.canaries[index].id)
        elif labels[at : at + len(secret)] != secret:
            masked.append(planting.canaries[index].id)
    for found, what in ((lost, "cut off or tokenised otherwise"), (masked, "masked out of the loss")):
        if found:
            raise CanaryError(
                f"every canary must reach the loss; after the data collator {len(found)} of {len(checked)} are {what}, first "
                f"canary '{found[0]}'. Raise the collator's maximum length, or let it keep the labels of whole rows."
            )
    return []


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
