"""A1: the lower bound on epsilon from one run: near its cap for a perfect attack, 0 on shuffled coins, below theory under DP.

200 canaries with fair coins, each behind a prefix of its own; the score is what training added to a canary's
log-probability. A fifth are abstained from: fair coins fall unevenly, so that guesses on all of them could not all be right.
Source: Steinke, Nasr, Jagielski, arXiv 2305.08846. The DP run needs the extra `dp`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_training import Privacy, train_adam
from tiny_runs import Cache, Finding, figure, text_rows, tiny_llama, tokenizer

from memguard.canaries.drawing import draw_plan
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.settings import CanarySettings
from memguard.metrics.privacy import PrivacyBound, audit_one_run
from memguard.scoring.audit_mode import audit_mode
from memguard.scoring.scorer import Scorer, Span

CLAIM = (
    "The bound is near its cap when the attack is perfect, 0 on shuffled coins in 95% of runs, and below the stated epsilon "
    "under DP."
)
SIGNIFICANCE, DELTA = 0.05, 1e-3
GUESSED = 0.8  # of the coins: uneven coins leave a perfect attack enough on either side with chance 0.995


@dataclass(frozen=True)
class Sizes:
    """Canaries, text rows, epochs, shuffles of the coins, noise multipliers of the DP runs, their epochs, rows a step."""

    canaries: int
    rows: int
    epochs: int
    shuffles: int
    noises: tuple[float, ...]
    dp_epochs: int
    batch: int


FULL = Sizes(200, 200, 60, 1000, (0.5, 1.0), 12, 32)
SMOKE = Sizes(24, 8, 12, 100, (0.5,), 2, 16)


def plan_of(sizes: Sizes) -> CanaryPlan:
    """Canaries of one repetition, in or out by a coin."""
    settings = CanarySettings(
        seed=1,
        formats=(CanaryFormat(name="code", template="{name} has the code {secret}.", secret=DigitsSpace(length=9)),),
        tiers={1: sizes.canaries},
        controls=0,
        positive_control=None,
        inclusion="coin",
    )
    return draw_plan(settings, tokenizer())


def one_run(sizes: Sizes, noise: float | None) -> dict[str, Any]:
    """Train one model on the canaries whose coin says in; scores and coins of all."""
    plan, encoder = plan_of(sizes), SecretEncoder(tokenizer(), *(plan_of(sizes).lead_ids, plan_of(sizes).tail_ids))
    canaries = plan.canaries
    encoded = encoder.encode(plan.formats[0], [one.secret for one in canaries], [one.name for one in canaries])
    items = [item for item in encoded if item is not None]
    assert len(items) == len(canaries)
    spans = [Span(item.ids, item.start, item.end) for item in items]
    coins = [one.role == "canary" for one in canaries]
    model = tiny_llama(tied=False)

    def scores() -> Any:
        with audit_mode(model):
            return Scorer(model).score(spans).log_probs

    before = scores()
    rows = [*text_rows()[: sizes.rows], *(item.ids for item, is_in in zip(items, coins, strict=True) if is_in)]
    privacy = None if noise is None else Privacy(noise, 1.0, DELTA)
    epochs = sizes.epochs if noise is None else sizes.dp_epochs
    spent = train_adam(model, rows, epochs=epochs, batch=sizes.batch, learning_rate=3e-3, seed=0, privacy=privacy)
    return {"scores": (scores() - before).tolist(), "coins": coins, "epsilon": spent}


def bound_of(found: dict[str, Any], sizes: Sizes, *, delta: float = 0.0, guessed: float = GUESSED) -> PrivacyBound:
    """The bound from the scores and coins of a run."""
    guesses = 2 * int(guessed * sizes.canaries / 2)
    return audit_one_run(found["scores"], found["coins"], num_guesses=guesses, significance=SIGNIFICANCE, delta=delta)


def shuffled_rate(found: dict[str, Any], sizes: Sizes) -> float:
    """Share of shuffles of the coins whose bound is above 0."""
    rng, coins = np.random.default_rng(0), np.array(found["coins"])
    above = 0
    for _ in range(sizes.shuffles):
        shuffled = {"scores": found["scores"], "coins": rng.permutation(coins)}
        above += bound_of(shuffled, sizes).epsilon_lower_bound > 0
    return above / sizes.shuffles


def run(sizes: Sizes, cache: Cache) -> Finding:
    """The plain run, shuffles of its coins, and a DP run for each noise."""
    plain = cache.get("A1", one_run, sizes, None)
    bound, on_all = bound_of(plain, sizes), bound_of(plain, sizes, guessed=1.0)
    rate = shuffled_rate(plain, sizes)
    rows = [_row("plain", "-", bound), _row("plain, all coins guessed", "-", on_all)]
    rows.append((f"shuffled coins, {sizes.shuffles} times", "-", "-", f"above 0 in {rate:.1%}", figure(bound.cap)))
    figures: dict[str, Any] = {
        "bound": bound.epsilon_lower_bound,
        "cap": bound.cap,
        "num_correct": bound.num_correct,
        "shuffled_rate": rate,
    }
    private = []
    for noise in sizes.noises if importlib.util.find_spec("opacus") is not None else ():
        found = cache.get("A1", one_run, sizes, noise)
        theirs = bound_of(found, sizes, delta=DELTA)
        private.append((theirs.epsilon_lower_bound, found["epsilon"]))
        rows.append(_row(f"DP, noise {noise:g}", figure(found["epsilon"]), theirs))
    figures["private"] = private
    # Right guesses of a shuffle have a chance of at most 0.05 to give a bound: 3 binomial errors above that.
    limit = SIGNIFICANCE + 3 * (SIGNIFICANCE * (1 - SIGNIFICANCE) / sizes.shuffles) ** 0.5
    below = all(lower <= stated for lower, stated in private)
    passed = bound.epsilon_lower_bound > 0.8 * bound.cap and rate <= limit and below and bool(private)
    reason = (
        f"bound {bound.epsilon_lower_bound:.2f} of at most {bound.cap:.2f} with {bound.num_correct} of {bound.num_guesses} "
        f"right; above 0 on {rate:.1%} of shuffles; under DP "
        f"{', '.join(f'{lower:.2f} for a stated {stated:.1f}' for lower, stated in private) or 'not run: opacus is missing'}."
    )
    columns = ("run", "stated epsilon", "right guesses", "epsilon bound", "cap")
    return Finding("A1", CLAIM, columns, tuple(rows), figures, passed, reason)


def _row(name: str, stated: Any, bound: PrivacyBound) -> tuple[Any, ...]:
    correct = f"{bound.num_correct} of {bound.num_guesses}"
    return (name, stated, correct, figure(bound.epsilon_lower_bound), figure(bound.cap))
