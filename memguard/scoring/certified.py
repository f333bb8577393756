"""The mean of P(suffix | prefix) over many prefixes, known only as well as a verdict needs it.

After some tokens, the product of a pair so far is an upper bound of what it will be; the mean lies between that of the
completed pairs and that of all partial products. The likeliest open pairs are gone on with until the verdict is certain;
nothing is forgotten, so a pair that was stopped can be resumed. Prefixes are encoded once for all suffixes.
Source: Tiwari, Trachtenberg, Suh, arXiv 2602.18733 (the mean); statistics specification, section 4 (the bounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from memguard.errors import NonFiniteScoreError
from memguard.scoring.batches import release
from memguard.scoring.branching import Branch
from memguard.scoring.failures import as_scoring_error, is_out_of_memory
from memguard.scoring.scorer import Scorer

Floats = NDArray[np.float64]
MAX_PAIRS = 64  # open pairs gone on with at a time: more would do work that the next bound may save
KEPT_BYTES = 2**31  # keys of encoded prefixes kept; beyond, prefixes are encoded again when asked for


@dataclass
class PriorState:
    """Partial products of one suffix behind c prefixes; (c,) each."""

    suffix: tuple[int, ...]
    log_products: Floats
    num_tokens: NDArray[np.int64]
    num_token_forwards: int = 0

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """Pairs with tokens still to come."""
        return self.num_tokens < len(self.suffix)

    def bounds(self) -> PriorBounds:
        """What is known of the mean and of the effective sample size."""
        is_open = self.is_open
        return prior_bounds(self.log_products[~is_open], self.log_products[is_open])


@dataclass(frozen=True)
class PriorBounds:
    """log of the mean, nats, and effective sample size, each between low and high."""

    log_mean_low: float
    log_mean_high: float
    effective_size_low: float
    effective_size_high: float
    num_open: int = field(default=0)


def prior_bounds(completed: Floats, open_: Floats) -> PriorBounds:
    """Bounds from log-products of completed and of open pairs, nats.

    Example:
        >>> bounds = prior_bounds(np.log([0.5]), np.log([0.1]))
        >>> round(math.exp(bounds.log_mean_low), 3), round(math.exp(bounds.log_mean_high), 3)
        (0.25, 0.3)
    """
    count = completed.size + open_.size
    done, left = _log_sum(completed), _log_sum(open_)
    done_squared, left_squared = _log_sum(2 * completed), _log_sum(2 * open_)
    high = np.logaddexp(done, left)
    size_low = math.exp(min(700.0, 2 * done - np.logaddexp(done_squared, left_squared))) if completed.size else 1.0
    size_high = math.exp(min(700.0, 2 * high - done_squared)) if done_squared > -math.inf else float(count)
    return PriorBounds(
        float(done - math.log(count)),
        float(high - math.log(count)),
        float(np.clip(size_low, 1.0, count)),
        float(np.clip(size_high, 1.0, count)),
        int(open_.size),
    )


def _log_sum(values: Floats) -> float:
    return float(special.logsumexp(values)) if values.size else -math.inf


class PriorPrefixes:
    """Prefixes that many suffixes are asked behind, encoded once while they fit in memory.

    Args:
        scorer: of the model.
        prefixes: token ids, lead ids included; lengths may differ.
    """

    def __init__(self, scorer: Scorer, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.scorer, self.prefixes = scorer, list(prefixes)
        self._parts = self._chunks()
        self._encoded: dict[int, tuple[Tensor, Branch | None]] = {}
        self._kept = 0

    def __len__(self) -> int:
        return len(self.prefixes)

    def begin(self, suffix: tuple[int, ...]) -> PriorState:
        """The first token of a suffix behind every prefix: no forward pass but that of the prefixes themselves."""
        self.scorer.model.check([(*self.prefixes[0], *suffix)])
        products = np.zeros(len(self.prefixes))
        before = self.scorer.model.num_token_forwards

        def work() -> None:
            for part, members in enumerate(self._parts):
                last, _ = self._encode(part)
                products[members] = self._first_log_probs(last, suffix[0])

        self._with_room(work)
        spent = self.scorer.model.num_token_forwards - before
        return PriorState(suffix, products, np.ones(len(self.prefixes), np.int64), spent)

    def decide(self, state: PriorState, decision: Callable[[PriorBounds], str | None]) -> str | None:
        """Go on with the likeliest open pairs until `decision` gives a verdict; its answer when none is open any more."""
        team = self.scorer.model.team
        while (verdict := team.agreed("verdict", decision(state.bounds()))) is None and state.is_open.any():
            open_ = np.flatnonzero(state.is_open)
            likeliest = open_[np.argsort(-state.log_products[open_], kind="stable")][:MAX_PAIRS]
            self.resume(state, likeliest)
        return verdict

    def resume(self, state: PriorState, pairs: NDArray[np.int64]) -> None:
        """Go on with some pairs: as many tokens again as they have, at most to the end."""
        before = self.scorer.model.num_token_forwards
        aims = np.minimum(len(state.suffix), 2 * state.num_tokens)

        def work() -> None:
            left = pairs[state.num_tokens[pairs] < aims[pairs]]  # those that a first try did not reach
            for part, members in enumerate(self._parts):
                for chosen in self._alike(state, left[np.isin(left, members)]):
                    self._extend(state, part, members, chosen)

        self._with_room(work)
        state.num_token_forwards += self.scorer.model.num_token_forwards - before

    def _with_room(self, work: Callable[[], None]) -> None:
        """Do the work; again with half as many prefixes a batch when memory runs out."""
        while True:
            try:
                return work()
            except Exception as error:
                largest = max(len(members) for members in self._parts)
                if not (is_out_of_memory(error) and largest > 1):
                    raise as_scoring_error(error, "prior prefixes", largest) from None
            self.scorer.batches.max_rows = math.ceil(largest / 2)
            self._encoded.clear()
            self._kept = 0
            self._parts = self._chunks()
            release(self.scorer.model.device)

    def _alike(self, state: PriorState, pairs: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Pairs by how many tokens they have: they are sent in one batch, and end at the same place."""
        return [pairs[state.num_tokens[pairs] == count] for count in np.unique(state.num_tokens[pairs])]

    def _extend(self, state: PriorState, part: int, members: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        have = int(state.num_tokens[chosen[0]])
        end = min(len(state.suffix), 2 * have)
        sent = state.suffix[: end - 1]
        targets = state.suffix[have:end]
        _, branch = self._encode(part)
        local = np.searchsorted(members, chosen)

        def work(rows: Sequence[int]) -> Floats:
            pairs = chosen[list(rows)]
            states = self._states(branch, local[list(rows)], pairs, sent)[:, have - 1 :]
            wanted = torch.tensor(targets).repeat(len(pairs))
            log_probs = self._log_probs(states.reshape(-1, states.shape[-1]), wanted, torch.arange(len(wanted)))
            summed: Floats = log_probs.reshape(len(pairs), len(targets)).sum(axis=1)
            return summed

        def store(rows: Sequence[int], log_probs: Floats) -> None:
            state.log_products[chosen[list(rows)]] += log_probs
            state.num_tokens[chosen[list(rows)]] = end

        width = len(self.prefixes[int(members[0])]) + len(sent)
        self.scorer.batches.run(range(len(chosen)), work, store, width=lambda _: width, label=lambda _: "a prior prefix")

    def _states(
        self, branch: Branch | None, rows: NDArray[np.int64], pairs: NDArray[np.int64], sent: tuple[int, ...]
    ) -> Tensor:
        """What stands at the suffix tokens sent, (pairs, tokens, width)."""
        if branch is not None:
            return self.scorer.model.extend(branch, torch.from_numpy(rows), [sent] * len(rows))[0]
        whole = self.scorer.model.whole([(*self.prefixes[pair], *sent) for pair in pairs.tolist()])
        return whole[:, -len(sent) :]

    def _encode(self, part: int) -> tuple[Tensor, Branch | None]:
        if part in self._encoded:
            return self._encoded[part]
        rows = [self.prefixes[index] for index in self._parts[part].tolist()]
        found: list[tuple[tuple[Tensor, Branch | None], int]] = []
        self.scorer.model.together(
            "prior prefixes", lambda: found.append(self._run(rows)), num_forwards=1, label="prior prefixes", num_rows=len(rows)
        )
        ((encoded, size),) = found
        if self._kept + size <= KEPT_BYTES:
            self._encoded[part] = encoded
            self._kept += size
        return encoded

    def _first_log_probs(self, last: Tensor, token: int) -> Floats:
        """Of one token behind every prefix of a part."""
        heads, rows = torch.full((len(last),), token), torch.arange(len(last))
        return self.scorer.model.together(
            "first tokens",
            lambda: self._log_probs(last, heads, rows),
            num_forwards=0,
            label="prior prefixes",
            num_rows=len(last),
        )

    def _run(self, rows: list[tuple[int, ...]]) -> tuple[tuple[Tensor, Branch | None], int]:
        """What stands at the end of some prefixes, where to go on from, and the bytes that holds."""
        if self.scorer.model.can_branch():
            last, branch = self.scorer.model.encode(rows)
            return (last, branch), branch.num_bytes
        return (self.scorer.model.whole(rows)[:, -1], None), 0

    def _log_probs(self, states: Tensor, targets: Tensor, rows: Tensor) -> Floats:
        statistics = self.scorer.model.statistics(states, targets, rows)
        log_probs: Floats = np.minimum(statistics.log_prob.double().cpu().numpy(), 0.0)
        if not np.isfinite(log_probs).all():
            raise NonFiniteScoreError("the scores behind prior prefixes must be finite, got NaN or infinity.")
        return log_probs

    def _chunks(self) -> list[NDArray[np.int64]]:
        """Indices of prefixes of one length, at most a batch each, ascending."""
        lengths = np.array([len(prefix) for prefix in self.prefixes])
        chunks = []
        for length in np.unique(lengths).tolist():
            members = np.flatnonzero(lengths == length)
            size = self.scorer.batches.rows(length)
            chunks += [members[first : first + size] for first in range(0, len(members), size)]
        return chunks
