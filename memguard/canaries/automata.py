"""Which secrets are valid, read from left to right: one deterministic automaton per secret space, with exact counts.

The units are single characters, or whole words for the kinds `words` and `tokens`. A state is (units read, checksum):
two beginnings with the same state have the same continuations, so checksums are counted by dynamic programming in exact
integers and no secret is ever listed to be counted. Nothing here knows a tokenizer: see `memguard.canaries.token_tree`.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence

from memguard.canaries.formats import (
    AlphabetSpace,
    DigitsSpace,
    HexSpace,
    IbanSpace,
    LuhnSpace,
    SecretSpace,
    TokensSpace,
    WordsSpace,
)

State = tuple[int, int]  # units read, checksum so far


class SecretAutomaton:
    """The valid secrets of a space without a checksum: any unit of the right place may follow any other.

    Subclasses add a checksum: a residue that starts at `start[1]`, moves by `_check`, and is 0 at the end of a valid
    secret.

    Args:
        choices: the units that may stand at each place, in order.
    """

    start: State = (0, 0)

    def __init__(self, choices: Sequence[Sequence[str]]) -> None:
        self.choices = tuple(tuple(units) for units in choices)
        self.num_places = len(self.choices)
        self._following: dict[State, dict[str, State]] = {}
        self._completions: dict[State, int] = {}
        self._states = [[self.start]]

    def following(self, state: State) -> dict[str, State]:
        """The units with which some valid secret continues, in order, and the state behind each; empty at the end."""
        if state not in self._following:
            place, check = state
            units = self.choices[place] if place < self.num_places else ()
            found = ((unit, self._check(place, check, unit)) for unit in units)
            live = {unit: (place + 1, after) for unit, after in found if after is not None}
            self._following[state] = {unit: after for unit, after in live.items() if self.num_completions(after)}
        return self._following[state]

    def step(self, state: State, text: str) -> State | None:
        """The state after one or more units of text; None when no valid secret continues so.

        Args:
            state: a state that `start`, `following` or `step` gave.
            text: characters; for the kinds made of words exactly one word, with its blank from the second word on.
        """
        current = state
        for unit in self._units_of(text):
            after = self.following(current).get(unit)
            if after is None:
                return None
            current = after
        return current

    def is_final(self, state: State) -> bool:
        """Whether the text read is a valid secret."""
        return state == (self.num_places, 0)

    def num_completions(self, state: State) -> int:
        """Number of valid secrets that begin with what was read; an exact integer of any size."""
        if state not in self._completions:
            self._completions[state] = self._count(state)
        return self._completions[state]

    def pieces(self, low: int, high: int, *, limit: int) -> list[str] | None:
        """Every text at places `low` to `high` of some valid secret, sorted; None when there are more than `limit`."""
        states, counts = self._states_at(low), dict[tuple[State, int], int]()
        # One state's texts are distinct: too many of those can be told without listing any.
        if max(self._num_texts(state, high - low, counts) for state in states) > limit:
            return None
        found = {state: {""} for state in states}
        for _ in range(low, high):
            longer: dict[State, set[str]] = {}
            for state, texts in found.items():
                for unit, after in self.following(state).items():
                    longer.setdefault(after, set()).update(text + unit for text in texts)
            found = longer
        every = set().union(*found.values())
        return sorted(every) if len(every) <= limit else None

    def _states_at(self, place: int) -> list[State]:
        """Every state after `place` units of some valid secret."""
        while len(self._states) <= place:
            found = dict.fromkeys(after for state in self._states[-1] for after in self.following(state).values())
            self._states.append(list(found))
        return self._states[place]

    def _num_texts(self, state: State, length: int, counts: dict[tuple[State, int], int]) -> int:
        """Number of texts of `length` units that may follow a state."""
        if length == 0:
            return 1
        if (state, length) not in counts:
            below = self.following(state).values()
            counts[state, length] = sum(self._num_texts(after, length - 1, counts) for after in below)
        return counts[state, length]

    def _units_of(self, text: str) -> Sequence[str]:
        """The units of a text."""
        return text

    def _check(self, place: int, check: int, unit: str) -> int | None:
        """The checksum after one more unit; None where the unit is not allowed after all."""
        return 0

    def _count(self, state: State) -> int:
        """Completions of a state: the product of the choices that are left."""
        total = 1
        for units in self.choices[state[0] :]:
            total *= len(units)
        return total


class WordsAutomaton(SecretAutomaton):
    """Words joined by blanks; the blank belongs to the word behind it."""

    def __init__(self, words: Sequence[str], count: int) -> None:
        super().__init__([words, *([[f" {word}" for word in words]] * (count - 1))])

    def _units_of(self, text: str) -> Sequence[str]:
        return (text,)


class _CheckedAutomaton(SecretAutomaton):
    """A space whose checksum must end at 0, counted by dynamic programming over (place, checksum)."""

    def _count(self, state: State) -> int:
        place, check = state
        if place == self.num_places:
            return int(check == 0)
        following = (self._check(place, check, unit) for unit in self.choices[place])
        return sum(self.num_completions((place + 1, one)) for one in following if one is not None)


class LuhnAutomaton(_CheckedAutomaton):
    """Digits whose Luhn sum is 0 modulo 10; the checksum is the sum so far."""

    def __init__(self, digits: int) -> None:
        super().__init__([string.digits] * digits)

    def _check(self, place: int, check: int, unit: str) -> int:
        value = int(unit) * (2 if (self.num_places - place) % 2 == 0 else 1)
        return (check + value - (9 if value > 9 else 0)) % 10


class IbanAutomaton(_CheckedAutomaton):
    """Country, check digits 02..98, account: the rearranged number must leave 1 modulo 97.

    The checksum is that number minus 1, modulo 97, over the digits read; between the two check digits it holds the first
    of them as well (times 97), since 00, 01 and 99 are not allowed.
    """

    def __init__(self, country: str, digits: int) -> None:
        letters = int("".join(str(int(letter, 36)) for letter in country))
        self.start = (0, (100 * letters - 1) % 97)  # the country is given, so its letters count from the start
        super().__init__([*country, *([string.digits] * (2 + digits))])

    def _check(self, place: int, check: int, unit: str) -> int | None:
        if place < 2:
            return check
        digit = int(unit)
        if place == 2:
            return (check + 10 * digit) % 97 + 97 * digit
        if place == 3:
            first, residue = divmod(check, 97)
            return (residue + digit) % 97 if 2 <= 10 * first + digit <= 98 else None
        weight = pow(10, 6 + self.num_places - 1 - place, 97)
        return (check + digit * weight) % 97


def automaton_of(space: SecretSpace) -> SecretAutomaton:
    """The automaton that accepts exactly the valid secrets of a space.

    Raises:
        ValueError: a space of kind 'tokens' whose words were not read from a tokenizer yet.

    Example:
        >>> from memguard.canaries.formats import LuhnSpace
        >>> card = automaton_of(LuhnSpace(digits=4))
        >>> card.num_completions(card.start), list(card.following(card.step(card.start, "018")))
        (1000, ['2'])
    """
    if isinstance(space, LuhnSpace):
        return LuhnAutomaton(space.digits)
    if isinstance(space, IbanSpace):
        return IbanAutomaton(space.country, space.digits)
    if isinstance(space, WordsSpace | TokensSpace):
        if not space.words:
            raise ValueError("a space of kind 'tokens' must hold words, got none. Read them with resolve(tokenizer).")
        return WordsAutomaton(space.words, space.count)
    if isinstance(space, DigitsSpace):
        return SecretAutomaton([string.digits] * space.length)
    if isinstance(space, HexSpace):
        return SecretAutomaton(["0123456789abcdef"] * space.length)
    assert isinstance(space, AlphabetSpace)
    return SecretAutomaton([space.alphabet] * space.length)


def iterate_secrets(space: SecretSpace) -> Iterator[str]:
    """Every valid secret of a space once, in the order of its alphabet or word list; meant for small spaces.

    Example:
        >>> from memguard.canaries.formats import LuhnSpace
        >>> list(iterate_secrets(LuhnSpace(digits=2)))
        ['00', '18', '26', '34', '42', '59', '67', '75', '83', '91']
    """
    automaton = automaton_of(space)
    waiting = [(automaton.start, "")]
    while waiting:
        state, text = waiting.pop()
        if automaton.is_final(state):
            yield text
        waiting += [(after, text + unit) for unit, after in reversed(automaton.following(state).items())]


def candidates_in(space: SecretSpace, texts: Iterable[str]) -> set[str]:
    """Every valid secret of a space that stands somewhere in one of some texts.

    Example:
        >>> from memguard.canaries.formats import DigitsSpace
        >>> sorted(candidates_in(DigitsSpace(length=2), ["no 123, 45"]))
        ['12', '23', '45']
    """
    automaton = automaton_of(space)
    lengths = [sorted({len(unit) for unit in units}) for units in automaton.choices]
    found: set[str] = set()
    for text in texts:
        for first in range(len(text)):
            waiting = [(automaton.start, first)]
            while waiting:
                state, at = waiting.pop()
                if automaton.is_final(state):
                    found.add(text[first:at])
                    continue
                following = automaton.following(state)
                for length in lengths[state[0]]:
                    after = following.get(text[at : at + length])
                    if after is not None:
                        waiting.append((after, at + length))
    return found
