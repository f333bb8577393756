"""Candidates as token trees: what a search may expand. Nodes that allow the same continuations may be one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class CandidateTree(Protocol):
    """Token sequences as the paths of a deterministic automaton; state 0 is the root. Paths are prefix-free."""

    @property
    def max_depth(self) -> int:
        """Tokens of the longest candidate."""

    def children(self, state: int) -> tuple[Ints, Ints]:
        """Distinct tokens that may come next, and the states they lead to; both empty at a leaf."""

    def num_leaves(self, state: int) -> int:
        """Candidates below a state, exact; 1 at a leaf."""


class ExplicitTree:
    """A tree of listed candidates.

    Args:
        candidates: distinct token sequences, none of which begins another.

    Raises:
        ValueError: no candidate, an empty one, or one that begins another.

    Example:
        >>> tree = ExplicitTree([(5, 6), (5, 7)])
        >>> tree.children(0)[0].tolist(), tree.num_leaves(0)
        ([5], 2)
    """

    def __init__(self, candidates: Sequence[Sequence[int]]) -> None:
        if not candidates or any(len(one) == 0 for one in candidates):
            raise ValueError("candidates must be token sequences that are not empty.")
        self.max_depth = max(len(one) for one in candidates)
        edges: list[dict[int, int]] = [{}]
        self._counts = [0]
        self._leaf_of: dict[int, int] = {}
        for index, one in enumerate(candidates):
            state = 0
            self._counts[0] += 1
            for token in one:
                if state in self._leaf_of:
                    raise ValueError("candidates must be distinct, and none may begin another.")
                following = edges[state].get(token)
                if following is None:
                    following = edges[state][token] = len(edges)
                    edges.append({})
                    self._counts.append(0)
                state = following
                self._counts[state] += 1
            if edges[state] or state in self._leaf_of:
                raise ValueError("candidates must be distinct, and none may begin another.")
            self._leaf_of[state] = index
        self._edges = [
            (np.fromiter(edge.keys(), np.int64, len(edge)), np.fromiter(edge.values(), np.int64, len(edge))) for edge in edges
        ]

    def children(self, state: int) -> tuple[Ints, Ints]:
        """Distinct tokens that may come next, and the states they lead to; both empty at a leaf."""
        return self._edges[state]

    def num_leaves(self, state: int) -> int:
        """Candidates below a state."""
        return self._counts[state]

    def candidate_of(self, state: int) -> int:
        """Index of the candidate that a leaf stands for."""
        return self._leaf_of[state]


def is_path(tree: CandidateTree, path: Sequence[int]) -> bool:
    """Whether a token sequence is a candidate of a tree."""
    state = 0
    for token in path:
        tokens, states = tree.children(state)
        found = np.flatnonzero(tokens == token)
        if not found.size:
            return False
        state = int(states[found[0]])
    return not tree.children(state)[0].size


def first_path(tree: CandidateTree) -> list[int]:
    """One candidate of a tree: the first child at every node."""
    path: list[int] = []
    tokens, states = tree.children(0)
    while tokens.size:
        path.append(int(tokens[0]))
        tokens, states = tree.children(int(states[0]))
    return path
