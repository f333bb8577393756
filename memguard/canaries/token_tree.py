"""The secrets of a space as token sequences: which tokens may come next, and how many secrets lie behind them, exactly.

Accepted sequences are the canonical encodings of the valid secrets, one each, up to the end of the span that
`SecretEncoder` marks; none begins another, so their probabilities behind the prefix sum to at most 1. That a space can be
walked so is verified for the tokenizer at hand, not assumed: see `memguard.canaries.unit_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memguard.canaries.automata import SecretAutomaton, State, automaton_of
from memguard.canaries.encoding import SecretEncoder
from memguard.canaries.formats import CanaryFormat
from memguard.canaries.unit_tables import NotFactorised, Table, UnitTables, learn_unit_tables

MAX_VERIFIED_STATES = 50_000

Item = tuple[int, State, int]  # pieces done, automaton state, node of the next piece's trie


@dataclass(frozen=True)
class Unfactorised:
    """Why the secrets of a format cannot be walked token by token with a tokenizer; a plain sentence."""

    reason: str


@dataclass
class _Trie:
    """Token sequences of the texts of one piece; node 0 is the root."""

    following: list[dict[int, int]] = field(default_factory=lambda: [{}])
    texts: dict[int, str] = field(default_factory=dict)

    def add(self, text: str, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            if token not in self.following[node]:
                self.following[node][token] = len(self.following)
                self.following.append({})
            node = self.following[node][token]
        self.texts[node] = text

    @property
    def is_prefix_free(self) -> bool:
        """Whether no text's tokens begin another's."""
        return not any(self.following[node] for node in self.texts)


class TokenTree:
    """A deterministic automaton over tokens whose accepted sequences are the encodings of a space's secrets.

    States are integers, 0 is the root; they are made when asked for. Two paths share a state when the same may follow
    them, so the walk is over a graph and only paths are one per secret. Build it with `build_token_tree`.

    Attributes:
        prefix_ids: what stands before every secret, `ids[:start]` of its encoding. Where only some secrets take the blank
            before them into their first token, the prefix ends before that blank and it is a token of the tree.
        max_depth: tokens of the longest path.

    Args:
        automaton: the valid secrets of the space.
        units: the verified tokens of every piece.

    Raises:
        NotFactorised: a secret's tokens are, or begin, another's.
    """

    def __init__(self, automaton: SecretAutomaton, units: UnitTables) -> None:
        self.prefix_ids = units.prefix_ids
        self.max_depth = sum(max(map(len, table.values())) for table in units.tables)
        self._automaton = automaton
        self._tries = _tries(units.tables)
        self._items: list[frozenset[Item]] = []
        self._numbers: dict[frozenset[Item], int] = {}
        self._children: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._leaves: dict[Item, int] = {}
        self._number_of([(0, automaton.start, 0)])
        self._verify()

    def children(self, state: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens that may come next, ascending, and the state behind each; both empty for a leaf."""
        if state not in self._children:
            targets: dict[int, list[Item]] = {}
            for item in self._items[state]:
                for token, target, _ in self._moves(item):
                    targets.setdefault(token, []).append(target)
            tokens = sorted(targets)
            states = [self._number_of(targets[token]) for token in tokens]
            found = np.array(tokens, dtype=np.int64), np.array(states, dtype=np.int64)
            for array in found:
                array.flags.writeable = False  # handed out again at every visit
            self._children[state] = found
        return self._children[state]

    def num_leaves(self, state: int) -> int:
        """Number of secrets behind a state, exact and without walking; 1 for a leaf."""
        return sum(self._count(item) for item in self._items[state])

    def secret_of(self, path: Sequence[int]) -> str:
        """The secret that a path from the root to a leaf spells.

        Raises:
            ValueError: the path does not end at a leaf.
        """
        live = dict.fromkeys(self._items[0], "")
        for token in path:
            moves = [(text, move) for item, text in live.items() for move in self._moves(item, only=int(token))]
            live = {target: text + more for text, (_, target, more) in moves}
        found = [text for item, text in live.items() if item[0] == len(self._tries)]
        if not found:
            raise ValueError(f"path must lead from the root to a leaf, got {len(path)} tokens that do not.")
        return found[0]

    def _moves(self, item: Item, *, only: int | None = None) -> Iterator[tuple[int, Item, str]]:
        """Tokens that may follow an item, where they lead, and the text they complete: on to the next piece, or deeper."""
        place, state, node = item
        if place == len(self._tries):
            return
        trie = self._tries[place]
        following = trie.following[node]
        for token in following if only is None else following.keys() & {only}:
            child = following[token]
            text = trie.texts.get(child)
            after = None if text is None else self._automaton.step(state, text)
            if text is not None and after is not None:
                yield token, (place + 1, after, 0), text
            if trie.following[child] and self._count((place, state, child)):
                yield token, (place, state, child), ""

    def _count(self, item: Item) -> int:
        """Secrets behind an item."""
        if item[2] == 0:
            return self._automaton.num_completions(item[1])
        if item not in self._leaves:
            self._leaves[item] = sum(self._count(target) for _, target, _ in self._moves(item))
        return self._leaves[item]

    def _number_of(self, items: Sequence[Item]) -> int:
        """The integer of the items that one sequence of tokens leads to."""
        key = frozenset(items)
        done = any(place == len(self._tries) for place, _, _ in key)
        # Two ways to one item are two secrets with the same tokens.
        if len(key) < len(items) or (done and len(key) > 1):
            raise NotFactorised("The tokens of some secrets begin those of others.")
        if key not in self._numbers:
            self._numbers[key] = len(self._items)
            self._items.append(key)
        return self._numbers[key]

    def _verify(self) -> None:
        """Walk every state once; not needed where no text's tokens begin another's, for then no two paths can meet."""
        if all(trie.is_prefix_free for trie in self._tries):
            return
        state = 0
        while state < len(self._items):
            if state == MAX_VERIFIED_STATES:
                raise NotFactorised(f"Its token tree has more than {MAX_VERIFIED_STATES} states.")
            self.children(state)
            state += 1


def _tries(tables: Sequence[Table]) -> list[_Trie]:
    """One trie per piece; equal neighbours share theirs."""
    tries: list[_Trie] = []
    for place, table in enumerate(tables):
        if place and table == tables[place - 1]:
            tries.append(tries[-1])
            continue
        tries.append(_Trie())
        for text, tokens in table.items():
            tries[-1].add(text, tokens)
    return tries


def build_token_tree(canary_format: CanaryFormat, encoder: SecretEncoder, *, name: str | None) -> TokenTree | Unfactorised:
    """The token tree of a format's secrets behind one prefix, or why there is none.

    Args:
        canary_format: template and space; a space of kind 'tokens' with its words.
        encoder: tokenizer and frame that canaries are trained with.
        name: the public name in the template; None where the format has none.

    Returns:
        A `TokenTree`, the same each time, or `Unfactorised` when the tokens of a part of the secret depend on what stands
        around it, or the tokenizer cannot carry every secret.

    Raises:
        CanaryError: the template has no room for the span's ends (see `SecretEncoder.encode`).
        ValueError: a space of kind 'tokens' without words.
    """
    automaton = automaton_of(canary_format.secret)
    try:
        return TokenTree(automaton, learn_unit_tables(automaton, canary_format, encoder, name=name))
    except NotFactorised as error:
        return Unfactorised(str(error))
