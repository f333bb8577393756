"""A lower bound on epsilon from one training run, by guessing which canaries a fair coin put into the training data.

Under (epsilon, delta)-DP few guesses can be right: more right ones than the claim allows refute it. A bound of 0 is no proof of
privacy, and no attack can show more than `epsilon_cap`. Scores are higher for members; epsilon has no unit (natural logarithm).

Source: Steinke, Nasr, Jagielski, Privacy Auditing with One (1) Training Run (NeurIPS 2023, arXiv 2305.08846).
Differs: ties count as wrong guesses, and several copies of a canary give the bound of one record by group privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads a part at its first use: the gate starts in half the time
from numpy.typing import ArrayLike, NDArray

SMALLEST_P = float(np.finfo(np.float64).tiny)  # stands for whatever underflows: an upper bound of it, and never 0
NO_SPREAD = 1e-9  # scores closer than this do not differ; nats, far below what float32 resolves
FIRST_BLOCK = 4096


@dataclass(frozen=True)
class PrivacyBound:
    """Lower bound on a record's epsilon. `cap` is what it would be with every guess right; None: nothing was stated."""

    epsilon_lower_bound: float
    cap: float
    significance: float
    delta: float
    num_coins: int
    num_guesses: int
    num_correct: int
    num_tied: int
    repetitions: int
    stated_epsilon: float | None
    p_value: float | None
    min_attainable_p: float | None
    is_testable: bool | None
    num_guesses_needed: int | None
    method: str
    flags: tuple[str, ...]


def one_run_p_value(
    num_correct: int, num_guesses: int, *, epsilon: float, delta: float = 0.0, num_coins: int | None = None
) -> float:
    """Largest chance, 0..1, of at least `num_correct` right guesses if training were (epsilon, delta)-DP.

    Right guesses are then dominated by Binomial(num_guesses, e^eps / (1 + e^eps)), up to what delta adds:
    beta + 2 m delta alpha, beta = P[X >= v], alpha = max over i of P[v - i <= X < v] / i.

    Args:
        num_correct: v, right guesses.
        num_guesses: r, fixed before the coins are looked at; all other canaries are abstained from.
        epsilon: the claim, >= 0.
        delta: the claim's delta, 0..1.
        num_coins: m, all coins thrown, abstained ones too; needed when delta is above 0.

    Returns:
        The p-value, at most 1. One that underflows is given as `SMALLEST_P`, an upper bound.

    Raises:
        ValueError: counts that do not fit together, or a claim out of range.

    Example:
        >>> round(one_run_p_value(90, 100, epsilon=1.5), 4)
        0.0173
        >>> round(one_run_p_value(90, 100, epsilon=1.5, delta=1e-5, num_coins=200), 4)
        0.0176

    Source: Steinke et al. 2023, theorem on approximate DP; the sum over i is at most m times its largest term.
    """
    _check_counts(num_correct, num_guesses, delta=delta, num_coins=num_coins)
    if not (math.isfinite(epsilon) and epsilon >= 0.0):
        raise ValueError(f"epsilon must be finite and at least 0, got {epsilon}.")
    num_wrong, chance_wrong = num_guesses - num_correct, float(scipy.special.expit(-epsilon))
    beta = float(_binomial_cdf(num_wrong, num_guesses, chance_wrong))
    p_value = beta
    if delta > 0.0 and num_coins is not None and num_correct:
        alpha = _largest_mean_term(num_correct, num_guesses, chance_wrong, beta)
        p_value += 2.0 * num_coins * delta * alpha
    return min(1.0, max(p_value, SMALLEST_P))


def _binomial_cdf(count: int | NDArray[np.int64], trials: int, chance: float) -> NDArray[np.float64]:
    """P[Binomial(trials, chance) <= count]. What scipy.stats computes, which takes half a second to import."""
    below = scipy.special.betaincc(np.add(count, 1.0), np.maximum(np.subtract(trials, count), 1.0), chance)
    return np.where(np.less(count, trials), below, 1.0)


def _largest_mean_term(num_correct: int, num_guesses: int, chance_wrong: float, beta: float) -> float:
    """max over 1 <= i <= num_correct of P[one to i more guesses wrong than were] / i."""
    best, start, size = 0.0, 1, FIRST_BLOCK
    while start <= num_correct and best * start < 1.0:  # from here on no term exceeds 1 / start
        more = np.arange(start, min(num_correct + 1, start + size))
        chance = _binomial_cdf(num_guesses - num_correct + more, num_guesses, chance_wrong) - beta
        best = max(best, float((chance / more).max()))
        start, size = start + size, 2 * size
    return best


def epsilon_lower_bound(
    num_correct: int,
    num_guesses: int,
    *,
    significance: float,
    delta: float = 0.0,
    num_coins: int | None = None,
    repetitions: int = 1,
) -> float:
    """The largest epsilon of a record that the right guesses refute, 0 if none; true with probability 1 - significance.

    Args:
        num_correct: right guesses.
        num_guesses: guesses, fixed in advance.
        significance: 1 - confidence, above 0 and below 0.5.
        delta: of the record's claim, 0..1.
        num_coins: all coins thrown; needed when delta is above 0.
        repetitions: copies of each canary. The coin moves them together, so group privacy applies: copies of an
            (eps, delta)-DP record are (copies * eps, `group_delta`)-DP. With delta 0 the bound is the group's / copies.

    Returns:
        Epsilon of one record, accurate to 1e-9.

    Raises:
        ValueError: counts that do not fit together, or numbers out of range.

    Example:
        >>> round(epsilon_lower_bound(150, 200, significance=0.05), 2)
        0.82
        >>> epsilon_lower_bound(100, 200, significance=0.05)
        0.0

    Source: statistics specification, section 6.
    """
    _check_counts(num_correct, num_guesses, delta=delta, num_coins=num_coins)
    if not 0.0 < significance < 0.5:
        raise ValueError(f"significance must be above 0 and below 0.5, got {significance}.")
    _check_repetitions(repetitions)

    def excess(epsilon: float) -> float:
        claim = _Claim(epsilon, delta, repetitions)
        return claim.p_value(num_correct, num_guesses, num_coins) - significance

    if excess(0.0) > 0.0:
        return 0.0
    # Every guess right, delta 0: q^r = significance. No other count and no other delta gives more.
    log_q = math.log(significance) / num_guesses
    ceiling = (log_q - math.log(-math.expm1(log_q))) / repetitions
    if num_correct == num_guesses and delta == 0.0:
        return max(0.0, ceiling)
    # The p-value rises with epsilon wherever it is below one half, so there is one crossing.
    return float(scipy.optimize.brentq(excess, 0.0, ceiling + 1e-6, xtol=1e-10))


def epsilon_cap(
    num_guesses: int, *, significance: float, delta: float = 0.0, num_coins: int | None = None, repetitions: int = 1
) -> float:
    """What `epsilon_lower_bound` would give if every guess were right: no attack shows more with as many guesses.

    Example:
        >>> [round(epsilon_cap(r, significance=0.05), 2) for r in (32, 88, 100, 200, 1000)]
        [2.32, 3.36, 3.49, 4.19, 5.81]
    """
    return epsilon_lower_bound(
        num_guesses, num_guesses, significance=significance, delta=delta, num_coins=num_coins, repetitions=repetitions
    )


def num_guesses_needed(
    epsilon: float, *, significance: float, delta: float = 0.0, coins_per_guess: float = 1.0, repetitions: int = 1
) -> int | None:
    """The smallest even number of guesses, all right, that would refute a stated epsilon.

    Args:
        epsilon: the record's claim, >= 0.
        significance: as in `epsilon_lower_bound`.
        delta: of the claim.
        coins_per_guess: coins thrown for each guess made, >= 1; only matters when delta is above 0.
        repetitions: copies of each canary.

    Returns:
        An even number; None when no number is enough, since what delta adds grows with the number of coins.

    Raises:
        ValueError: numbers out of range.

    Example:
        >>> num_guesses_needed(8.0, significance=0.05)
        8932
    """
    if not 0.0 < significance < 0.5:
        raise ValueError(f"significance must be above 0 and below 0.5, got {significance}.")
    if not coins_per_guess >= 1.0:
        raise ValueError(f"coins_per_guess must be at least 1, got {coins_per_guess}.")
    _check_repetitions(repetitions)
    claim = _Claim(epsilon, delta, repetitions)
    claim.p_value(0, 0, 0)  # refuses a claim out of range
    log_wrong = math.log1p(math.exp(-repetitions * epsilon))
    if log_wrong == 0.0:
        return None
    half = math.ceil(-math.log(significance) / log_wrong / 2.0)
    if delta == 0.0:
        return 2 * half
    return _search_guesses(claim, half, significance, coins_per_guess) if half < 10**9 else None


def _search_guesses(claim: _Claim, half: int, significance: float, coins_per_guess: float) -> int | None:
    """The first even number of right guesses that refutes a claim with delta above 0, from `half` guesses a side on."""

    def refutes(half: int) -> bool:
        return claim.p_value(2 * half, 2 * half, math.ceil(2 * half * coins_per_guess)) <= significance

    # Past its least value, within four times the start, the p-value levels off at about 2 delta (1 + e^eps) coins_per_guess.
    low = high = half
    while not refutes(high):
        low, high = high, high + max(1, high // 20)
        if high > 10 * half + 10:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(middle) else (middle, high)
    return 2 * high


def group_delta(delta: float, *, epsilon: float, repetitions: int) -> float:
    """Delta, 0..1, of `repetitions` copies of an (epsilon, delta)-DP record: delta * sum over i < copies of e^(i eps).

    Example:
        >>> round(group_delta(1e-5, epsilon=0.0, repetitions=4), 9)
        4e-05
    """
    _check_repetitions(repetitions)
    _check_delta(delta)
    if delta == 0.0 or repetitions == 1:
        return delta
    log_delta = math.log(delta) + float(scipy.special.logsumexp(epsilon * np.arange(repetitions)))
    return min(1.0, math.exp(min(0.0, log_delta)))


@dataclass(frozen=True)
class _Claim:
    """(epsilon, delta)-DP of one record, when each coin moves `repetitions` copies."""

    epsilon: float
    delta: float
    repetitions: int

    def p_value(self, num_correct: int, num_guesses: int, num_coins: int | None) -> float:
        delta = group_delta(self.delta, epsilon=self.epsilon, repetitions=self.repetitions)
        epsilon = self.repetitions * self.epsilon
        return one_run_p_value(num_correct, num_guesses, epsilon=epsilon, delta=delta, num_coins=num_coins)


def guess_membership(scores: ArrayLike, *, num_guesses: int) -> NDArray[np.int8]:
    """Guesses: 1 in, -1 out, 0 abstained. The top half of `num_guesses` is guessed in, the bottom half out.

    A tie that reaches past the last guess is not broken: all of its scores stay at 0, which an audit counts as wrong
    guesses. Breaking it by position would leak the coins wherever members come first.

    Args:
        scores: higher for members, shape (m,).
        num_guesses: r, even, at most m, fixed before the scores are seen.

    Returns:
        int8, shape (m,), at most r of them not 0.

    Raises:
        ValueError: scores that are not finite or not a list, or a number of guesses that is odd or too large.

    Example:
        >>> guess_membership([3.0, 1.0, 2.0, 0.0, 5.0], num_guesses=4).tolist()
        [1, -1, 0, -1, 1]
        >>> guess_membership([3.0, 1.0, 2.0, 0.0, 2.0], num_guesses=4).tolist()
        [1, -1, 0, -1, 0]
    """
    values = _checked_scores(scores)
    if num_guesses < 0 or num_guesses % 2 or num_guesses > values.size:
        raise ValueError(f"num_guesses must be even, from 0 to the number of scores {values.size}, got {num_guesses}.")
    ordered = np.sort(values)
    at_or_above = values.size - np.searchsorted(ordered, values, side="left")
    at_or_below = np.searchsorted(ordered, values, side="right")
    half = num_guesses // 2
    return (at_or_above <= half).astype(np.int8) - (at_or_below <= half).astype(np.int8)


def standardise_within(scores: ArrayLike, groups: Sequence[object]) -> NDArray[np.float64]:
    """Scores less their group's mean, in units of their group's standard deviation; so that formats can be ranked together.

    Args:
        scores: shape (m,); nats.
        groups: m labels. A group with one member, or whose scores do not differ, gets zeros.

    Returns:
        float64, shape (m,), without a unit.

    Raises:
        ValueError: scores that are not finite, or labels that do not match.

    Example:
        >>> standardise_within([-2.0, -4.0, -90.0, -70.0, -5.0], ["a", "a", "b", "b", "c"]).tolist()
        [1.0, -1.0, -1.0, 1.0, 0.0]
    """
    values = _checked_scores(scores)
    if len(groups) != values.size:
        raise ValueError(f"groups must have one label a score, got {len(groups)} for {values.size}.")
    members: dict[object, list[int]] = {}
    for index, label in enumerate(groups):
        members.setdefault(label, []).append(index)
    result = np.zeros(values.size)
    for indices in members.values():
        mine = values[indices]
        if np.ptp(mine) > NO_SPREAD:
            result[indices] = (mine - mine.mean()) / mine.std()
    return result


def audit_one_run(
    scores: ArrayLike,
    is_in: ArrayLike,
    *,
    num_guesses: int,
    significance: float = 0.05,
    delta: float = 0.0,
    stated_epsilon: float | None = None,
    repetitions: int = 1,
) -> PrivacyBound:
    """Guess the coins from the scores, and bound epsilon of one record from how many guesses are right.

    Needs coins that are fair, independent and never rebalanced; every coin counts, and tiers are never pooled. A bound below
    a stated epsilon says nothing in its favour.

    Args:
        scores: higher for members, made from the model and not from the coins, shape (m,).
        is_in: what the coins said, bool, shape (m,).
        num_guesses: r, even, at most m, fixed in advance.
        significance: 1 - confidence, above 0 and below 0.5.
        delta: of the record's claim.
        stated_epsilon: the claim to be tested, if there is one.
        repetitions: copies of every canary of this audit; the bound is of one record all the same.

    Returns:
        `PrivacyBound`; `is_testable` says whether `cap` reaches the stated epsilon.

    Raises:
        ValueError: shapes that do not match, scores that are not finite, coins that are not booleans, numbers out of range.

    Example:
        >>> bound = audit_one_run([4.0, 3.0, 2.5, 2.0, 1.5, 1.0], [True, True, True, False, False, False], num_guesses=6)
        >>> bound.num_correct, round(bound.epsilon_lower_bound, 2), bound.epsilon_lower_bound == bound.cap
        (6, 0.43, True)

    Source: statistics specification, section 6.
    """
    values, coins = check_coins(scores, is_in)
    guesses = guess_membership(values, num_guesses=num_guesses)
    num_correct = int((guesses == np.where(coins, 1, -1)).sum())
    num_tied = num_guesses - int((guesses != 0).sum())
    bounds = [
        epsilon_lower_bound(
            count, num_guesses, significance=significance, delta=delta, num_coins=values.size, repetitions=repetitions
        )
        for count in (num_correct, num_guesses)
    ]
    p_value = least = needed = None
    if stated_epsilon is not None:
        claim = _Claim(stated_epsilon, delta, repetitions)
        p_value, least = (claim.p_value(count, num_guesses, values.size) for count in (num_correct, num_guesses))
        needed = num_guesses_needed(
            stated_epsilon,
            significance=significance,
            delta=delta,
            coins_per_guess=values.size / num_guesses if num_guesses else 1.0,
            repetitions=repetitions,
        )
    return PrivacyBound(
        epsilon_lower_bound=bounds[0],
        cap=bounds[1],
        significance=significance,
        delta=delta,
        num_coins=values.size,
        num_guesses=num_guesses,
        num_correct=num_correct,
        num_tied=num_tied,
        repetitions=repetitions,
        stated_epsilon=stated_epsilon,
        p_value=p_value,
        min_attainable_p=least,
        is_testable=bounds[1] >= stated_epsilon if stated_epsilon is not None else None,
        num_guesses_needed=needed,
        method="one run, binomial domination",
        flags=("ties",) if num_tied else (),
    )


def check_coins(scores: ArrayLike, is_in: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores as float64 and coins as bool, both of shape (m,); `ValueError` for anything else."""
    values, coins = _checked_scores(scores), np.asarray(is_in)
    if coins.dtype != np.bool_:
        raise ValueError(f"is_in must hold booleans, got {coins.dtype}.")
    if coins.shape != values.shape:
        raise ValueError(f"is_in must have the shape of scores {values.shape}, got {coins.shape}.")
    return values, coins


def _checked_scores(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"scores must be a list of at least one number, got shape {values.shape}.")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ValueError(f"scores must be finite, got {values[bad[0]]} at index {bad[0]} ({bad.size} in all).")
    return values


def _check_counts(num_correct: int, num_guesses: int, *, delta: float, num_coins: int | None) -> None:
    if not 0 <= num_correct <= num_guesses:
        raise ValueError(f"num_correct must be from 0 to num_guesses {num_guesses}, got {num_correct}.")
    _check_delta(delta)
    if num_coins is None and delta > 0.0:
        raise ValueError(f"num_coins must be given when delta is above 0 ({delta}), got None.")
    if num_coins is not None and num_coins < num_guesses:
        raise ValueError(f"num_coins must be at least num_guesses {num_guesses}, got {num_coins}.")


def _check_delta(delta: float) -> None:
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must be from 0 to 1, got {delta}.")


def _check_repetitions(repetitions: int) -> None:
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}.")
