"""One walk over a token tree behind a prefix: every node that is likely enough is computed once, leaves are read from it.

The walk goes down in chunks of rows, the likeliest first, so that memory holds one chunk a level whatever the tree's size.
A node below the floor is kept unexpanded, if a lower floor may ask for it later; then its few tokens are sent again.
Log-probabilities are nats, summed in float64.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memguard.errors import NonFiniteScoreError
from memguard.scoring.batches import Batches, release
from memguard.scoring.branching import Branch
from memguard.scoring.failures import as_scoring_error, is_out_of_memory
from memguard.scoring.forward import CausalModel
from memguard.scoring.trees import CandidateTree, Ints, first_path

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Nodes:
    """Nodes of one depth: token paths (n, depth), automaton states (n,) and log-probabilities (n,)."""

    paths: Ints
    states: Ints
    log_probs: Floats

    def __len__(self) -> int:
        return len(self.log_probs)

    def take(self, chosen: NDArray[np.bool_] | Ints) -> Nodes:
        """Some of the nodes."""
        return Nodes(self.paths[chosen], self.states[chosen], self.log_probs[chosen])


@dataclass(frozen=True)
class _Pending:
    """Nodes to expand. With a branch, only their last token is to be sent; without, their whole path behind the prefix."""

    nodes: Nodes
    branch: Branch | None = None
    parents: Ints | None = None

    def cut(self, size: int) -> tuple[_Pending, _Pending | None]:
        """The first `size` nodes, and the rest."""
        if size >= len(self.nodes):
            return self, None
        head, tail = (np.arange(size), np.arange(size, len(self.nodes)))
        return self._take(head), self._take(tail)

    def _take(self, chosen: Ints) -> _Pending:
        parents = self.parents[chosen] if self.parents is not None else None
        return _Pending(self.nodes.take(chosen), self.branch, parents)


class TreeWalk:
    """A walk that can be continued with a lower floor or a larger budget.

    Args:
        model: of a `Scorer`.
        batches: decides on rows a chunk.
        prefix_ids: what stands before the candidates.
        tree: the candidates.
        keep: nodes and leaves less likely than this are forgotten; nats.
        label: names the walk in errors.
        max_rows: rows a chunk at most: a narrow walk reaches candidates sooner, a wide one does more a second.

    Attributes:
        num_nodes: nodes expanded.
        frontier: nodes known and not expanded, in parts of one depth.
        leaves: candidates found, with `states` of their leaves.
    """

    def __init__(
        self,
        model: CausalModel,
        batches: Batches,
        prefix_ids: Sequence[int],
        tree: CandidateTree,
        *,
        keep: float = -math.inf,
        label: str = "",
        max_rows: int | None = None,
    ) -> None:
        self.model, self.batches, self.prefix_ids, self.tree = model, batches, list(prefix_ids), tree
        self.keep, self.label, self.max_rows = keep, label, max_rows
        self.num_nodes = 0
        root = Nodes(np.zeros((1, 0), np.int64), np.zeros(1, np.int64), np.zeros(1))
        self.frontier: list[Nodes] = [root]
        self.leaves: list[Nodes] = []
        self._root: tuple[Tensor, Branch] | None = None
        self._is_leaf: dict[int, bool] = {}

    def advance(
        self,
        floor: float,
        *,
        max_nodes: int | None = None,
        max_leaves: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> bool:
        """Expand every node at or above `floor`.

        Args:
            floor: nats; not below `keep`.
            max_nodes: nodes this walk may have expanded in all, earlier calls included; None for no limit.
            max_leaves: likewise, candidates found after which no further chunk is expanded.
            progress: called with the number of nodes expanded after each chunk.

        Returns:
            Whether none is left at or above the floor; the leaves at or above it are then all found.
        """
        stack = self._wanted(floor)
        while stack:
            room = math.inf if max_nodes is None else max_nodes - self.num_nodes
            if room < 1 or (max_leaves is not None and sum(map(len, self.leaves)) >= max_leaves):
                self._shelve(stack)
                return False
            pending = stack.pop()
            pending, rest = pending.cut(int(min(room, self._rows())))
            if rest is not None:
                stack.append(rest)
            try:
                below: list[_Pending] | None = self._expand(pending, floor)
            except Exception as error:
                if not (is_out_of_memory(error) and len(pending.nodes) > 1):
                    raise as_scoring_error(error, self.label, len(pending.nodes)) from None
                below = None
            if below is None:  # memory ran out: again, with half of the rows
                self.batches.max_rows = math.ceil(len(pending.nodes) / 2)
                release(self.model.device)
                stack.append(pending)
                continue
            stack += below
            self.num_nodes += len(pending.nodes)
            if progress is not None:
                progress(len(pending.nodes))
        return True

    def found(self) -> list[tuple[tuple[int, ...], int, float]]:
        """Candidates found, likeliest first: tokens, leaf state, log-probability."""
        rows = [
            (tuple(path), int(state), float(log_prob))
            for leaves in self.leaves
            for path, state, log_prob in zip(leaves.paths.tolist(), leaves.states, leaves.log_probs, strict=True)
        ]
        return sorted(rows, key=lambda row: -row[2])

    def _rows(self) -> int:
        """Rows of a chunk: one chunk a level is alive at a time, each with the keys of its whole path."""
        width = len(self.prefix_ids) + self.tree.max_depth
        alive = self.tree.max_depth * width * self.model.cache_bytes_per_token()
        fitting = min(self.batches.rows(width), self.batches.memory_budget // alive)
        return max(1, min(fitting, self.max_rows or fitting))

    def _wanted(self, floor: float) -> list[_Pending]:
        stack, left = [], []
        for nodes in _by_depth(self.frontier):
            chosen = nodes.log_probs >= floor
            if chosen.any():
                wanted = nodes.take(chosen)
                stack.append(_Pending(wanted.take(np.argsort(-wanted.log_probs, kind="stable"))))
            if not chosen.all():
                left.append(nodes.take(~chosen))
        self.frontier = left
        return stack

    def _shelve(self, stack: Sequence[_Pending]) -> None:
        self.frontier += [pending.nodes for pending in stack]

    def _expand(self, pending: _Pending, floor: float) -> list[_Pending]:
        if not self.num_nodes:
            self.model.check([[*self.prefix_ids, *first_path(self.tree)]], label=self.label)
        self._encode_root()
        rows, tokens, following = self._children(pending.nodes.states)
        branches: list[Branch | None] = []

        def score() -> Floats:
            states, branch = self._forward(pending)
            branches.append(branch)
            statistics = self.model.statistics(states, torch.from_numpy(tokens), torch.from_numpy(rows))
            scores: Floats = statistics.log_prob.double().cpu().numpy()
            return scores

        is_root = self._root is not None and pending.nodes.paths.shape[1] == 0
        what = f"nodes {zlib.crc32(rows.tobytes() + tokens.tobytes())}"  # ranks that walk other nodes would mix their scores
        scores = self.model.together(
            what, score, num_forwards=0 if is_root else 1, label=self.label, num_rows=len(pending.nodes)
        )
        (branch,) = branches
        log_probs = pending.nodes.log_probs[rows] + scores
        if np.isnan(log_probs).any():
            raise NonFiniteScoreError(f"the scores of {self.label or 'a tree'} must be finite, got NaN.")
        kept = np.flatnonzero(log_probs >= self.keep)
        rows, tokens, following, log_probs = rows[kept], tokens[kept], following[kept], log_probs[kept]
        paths = np.concatenate([pending.nodes.paths[rows], tokens[:, None]], axis=1)
        children = Nodes(paths, following, log_probs)
        ends = self._ends(following)
        if ends.any():
            self.leaves.append(children.take(ends))
        again = ~ends & (log_probs >= floor)
        later = ~ends & ~again
        if later.any():
            self.frontier.append(children.take(later))
        if not again.any():
            return []
        order = np.flatnonzero(again)
        order = order[np.argsort(-log_probs[order], kind="stable")]
        return [_Pending(children.take(order), branch, rows[order] if branch is not None else None)]

    def _children(self, states: Ints) -> tuple[Ints, Ints, Ints]:
        """Row, token and state of every child of some nodes."""
        rows, tokens, following = [], [], []
        for state in np.unique(states).tolist():
            members = np.flatnonzero(states == state)
            child_tokens, child_states = self.tree.children(state)
            rows.append(np.repeat(members, len(child_tokens)))
            tokens.append(np.tile(child_tokens, len(members)))
            following.append(np.tile(child_states, len(members)))
        return np.concatenate(rows), np.concatenate(tokens), np.concatenate(following)

    def _ends(self, states: Ints) -> NDArray[np.bool_]:
        distinct, inverse = np.unique(states, return_inverse=True)
        for state in distinct.tolist():
            if state not in self._is_leaf:
                self._is_leaf[state] = not self.tree.children(state)[0].size
        return np.array([self._is_leaf[state] for state in distinct.tolist()], dtype=bool)[inverse]

    def _forward(self, pending: _Pending) -> tuple[Tensor, Branch | None]:
        """What stands at the nodes, (n, width), and the branch of their rows."""
        paths = pending.nodes.paths
        if self._root is None:
            whole = self.model.whole([[*self.prefix_ids, *path] for path in paths.tolist()])
            return whole[:, -1], None
        if paths.shape[1] == 0:
            return self._root
        branch, parents, tokens = pending.branch, pending.parents, paths[:, -1:]
        if branch is None:
            branch, parents, tokens = self._root[1], np.zeros(len(paths), np.int64), paths
        assert parents is not None
        states, grown = self.model.extend(branch, torch.from_numpy(parents), torch.from_numpy(np.ascontiguousarray(tokens)))
        return states[:, -1], grown

    def _encode_root(self) -> None:
        """Encode what stands before the candidates, once, where the model can go on from it."""
        if self._root is not None or not self.model.can_branch():
            return
        found: list[tuple[Tensor, Branch]] = []
        self.model.together(
            "root", lambda: found.append(self.model.encode([self.prefix_ids])), num_forwards=1, label=self.label
        )
        (self._root,) = found


def _by_depth(parts: Sequence[Nodes]) -> list[Nodes]:
    """Nodes joined by depth, deepest first, so that a stack takes the shallow ones first."""
    depths = sorted({part.paths.shape[1] for part in parts}, reverse=True)
    joined = []
    for depth in depths:
        same = [part for part in parts if part.paths.shape[1] == depth]
        joined.append(
            Nodes(
                np.concatenate([part.paths for part in same]),
                np.concatenate([part.states for part in same]),
                np.concatenate([part.log_probs for part in same]),
            )
        )
    return joined
