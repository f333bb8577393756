"""Secret spaces and canary formats: what a canary can look like, and exactly how many such secrets there are.

A *secret space* is the set of valid candidates a secret is drawn from, uniformly; its size is an exact integer and counts
valid candidates only (checksums included). A *format* puts a secret into a template. Nothing here knows a tokenizer but
`TokensSpace.resolve`. Exposure is measured in a space: see `memguard.metrics.exposure`.
"""

from __future__ import annotations

import math
import random
import string
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from memguard.canaries.wordlists import WORDS
from memguard.documents import Document
from memguard.errors import CanaryError

MAX_TOKEN_WORDS = 4096


class _Space(Document):
    """Behaviour shared by the kinds; `variable_length` asks for a terminator token in the scored span."""

    @property
    def size(self) -> int:
        """Number of valid candidates, exact."""
        raise TypeError(f"{type(self).__name__} must define its size.")

    @property
    def variable_length(self) -> bool:
        """Whether candidates differ in their number of characters."""
        return False

    def draw(self, rng: random.Random) -> str:
        """One candidate, uniform over the space."""
        raise TypeError(f"{type(self).__name__} must define how it is drawn.")


class DigitsSpace(_Space):
    """`length` decimal digits, leading zeros allowed."""

    kind: Literal["digits"] = "digits"
    length: int = Field(ge=1, le=64)

    @property
    def size(self) -> int:
        return int(10**self.length)

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.choice(string.digits) for _ in range(self.length))


class HexSpace(_Space):
    """`length` lower-case hexadecimal digits."""

    kind: Literal["hex"] = "hex"
    length: int = Field(ge=1, le=128)

    @property
    def size(self) -> int:
        return int(16**self.length)

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.choice("0123456789abcdef") for _ in range(self.length))


class AlphabetSpace(_Space):
    """`length` characters of `alphabet`, each distinct character once in it."""

    kind: Literal["alphabet"] = "alphabet"
    alphabet: str = string.ascii_lowercase
    length: int = Field(ge=1, le=128)

    @field_validator("alphabet")
    @classmethod
    def _distinct(cls, value: str) -> str:
        if len(value) < 2 or len(set(value)) != len(value) or any(c.isspace() for c in value):
            raise ValueError("alphabet must hold at least two distinct characters and no blanks")
        return value

    @property
    def size(self) -> int:
        return int(len(self.alphabet) ** self.length)

    def draw(self, rng: random.Random) -> str:
        return "".join(rng.choice(self.alphabet) for _ in range(self.length))


class LuhnSpace(_Space):
    """Card-like numbers of `digits` digits, the last one the Luhn check digit: 10^(digits - 1) of them."""

    kind: Literal["luhn"] = "luhn"
    digits: int = Field(default=16, ge=2, le=32)

    @property
    def size(self) -> int:
        return int(10 ** (self.digits - 1))

    def draw(self, rng: random.Random) -> str:
        body = "".join(rng.choice(string.digits) for _ in range(self.digits - 1))
        return body + luhn_check_digit(body)


class IbanSpace(_Space):
    """IBAN-like: country, two mod-97 check digits, `digits` digits. Check digits follow from the rest: 10^digits of them."""

    kind: Literal["iban"] = "iban"
    country: str = Field(default="DK", pattern="^[A-Z]{2}$")
    digits: int = Field(default=14, ge=1, le=30)

    @property
    def size(self) -> int:
        return int(10**self.digits)

    def draw(self, rng: random.Random) -> str:
        account = "".join(rng.choice(string.digits) for _ in range(self.digits))
        return self.country + iban_check_digits(self.country, account) + account


def _distinct_words(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) < 2 or len(set(value)) != len(value) or any(not w or any(c.isspace() for c in w) for w in value):
        raise ValueError("words must hold at least two distinct words without blanks")
    return value


class WordsSpace(_Space):
    """`count` words of a list, joined by blanks, repeats allowed: len(words)^count of them."""

    kind: Literal["words"] = "words"
    count: int = Field(ge=1, le=32)
    words: tuple[str, ...] = WORDS

    @field_validator("words")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _distinct_words(value)

    @property
    def size(self) -> int:
        return int(len(self.words) ** self.count)

    @property
    def variable_length(self) -> bool:
        return len({len(word) for word in self.words}) > 1

    def draw(self, rng: random.Random) -> str:
        return " ".join(rng.choice(self.words) for _ in range(self.count))


class TokensSpace(_Space):
    """`count` random token ids, taken from the tokens that stay themselves when their text is encoded again.

    Those are whole words behind a blank; any sequence of them survives decode and encode, so the space is their product
    and its size is exact. `words` is filled by `resolve` and kept in the plan.
    """

    kind: Literal["tokens"] = "tokens"
    count: int = Field(ge=1, le=64)
    words: tuple[str, ...] = ()

    @field_validator("words")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _distinct_words(value) if value else value

    @property
    def size(self) -> int:
        return int(len(self.words) ** self.count)

    @property
    def variable_length(self) -> bool:
        return len({len(word) for word in self.words}) > 1

    def draw(self, rng: random.Random) -> str:
        return " ".join(rng.choice(self.words) for _ in range(self.count))

    def resolve(self, tokenizer: Any) -> TokensSpace:
        """The same space with its words read from a tokenizer; at most 4,096, lowest ids first."""
        alone = len(tokenizer("is", add_special_tokens=False)["input_ids"])
        special = set(tokenizer.all_special_ids)
        words: dict[str, None] = {}
        for token_id in sorted(set(tokenizer.get_vocab().values()) - special):
            word = tokenizer.decode([token_id]).strip()
            if len(word) < 2 or not (word.isascii() and word.isalpha()):
                continue
            if len(tokenizer(f"is {word}", add_special_tokens=False)["input_ids"]) == alone + 1:
                words[word] = None
            if len(words) == MAX_TOKEN_WORDS:
                break
        if len(words) < 16:
            raise CanaryError(
                f"a secret of kind 'tokens' needs at least 16 whole-word tokens in the vocabulary, got {len(words)}. "
                "Use kind 'alphabet' or 'digits' with this tokenizer."
            )
        return self.model_copy(update={"words": tuple(words)})


SecretSpace = Annotated[
    DigitsSpace | HexSpace | AlphabetSpace | LuhnSpace | IbanSpace | WordsSpace | TokensSpace, Field(discriminator="kind")
]


def luhn_check_digit(body: str) -> str:
    """The digit that makes `body` plus it pass the Luhn check.

    Example:
        >>> luhn_check_digit("7992739871")
        '3'
    """
    total = 0
    for place, digit in enumerate(reversed(body)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return str(-total % 10)


def iban_check_digits(country: str, account: str) -> str:
    """The two digits, 02..98, that make an IBAN-like string leave 1 modulo 97.

    Example:
        >>> iban_check_digits("GB", "WEST12345698765432")
        '82'
    """
    digits = "".join(str(int(character, 36)) for character in account + country + "00")
    return f"{98 - int(digits) % 97:02d}"


class CanaryFormat(Document):
    """A template with one `{secret}` and, where wanted, a public per-canary `{name}`.

    Without `{name}` every canary of the format stands behind the same prefix and shares its references. With it each
    canary has a prefix, and references, of its own.

    Example:
        >>> card = CanaryFormat(name="card", template="Card {secret}.", secret=LuhnSpace(digits=16))
        >>> card.split("4111111111111111", name=None)
        ('Card ', '4111111111111111', '.')
    """

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    template: str = Field(max_length=4096)
    secret: SecretSpace

    @field_validator("template")
    @classmethod
    def _placeholders(cls, value: str) -> str:
        try:
            parsed = [part for part in string.Formatter().parse(value) if part[1] is not None]
        except ValueError:
            raise ValueError("template must have balanced braces; write {{ for a brace") from None
        fields = [name for _, name, _, _ in parsed]
        plain = [name for _, name, spec, how in parsed if not spec and not how]
        if fields.count("secret") != 1 or plain.count("secret") != 1:
            raise ValueError("template must hold {secret} exactly once")
        if set(fields) - {"secret", "name"} or len(plain) != len(fields):
            raise ValueError("template may hold {secret} and {name} and no other placeholder")
        return value

    @property
    def has_name(self) -> bool:
        """Whether each canary stands behind a prefix of its own."""
        return "{name}" in self._pieces()[0]

    @property
    def takes_name(self) -> bool:
        """Whether a name stands anywhere in the template, before the secret or behind it."""
        return any("{name}" in piece for piece in self._pieces())

    def split(self, secret: str, *, name: str | None) -> tuple[str, str, str]:
        """The text before the secret, the secret, the text after it."""
        before, after = ("".join(piece).format(name=name) for piece in self._pieces())
        return before, secret, after

    def _pieces(self) -> tuple[list[str], list[str]]:
        """The template before and behind the secret, literals and placeholders apart: `{{secret}}` is a literal."""
        pieces: list[str] = []
        for literal, name, _, _ in string.Formatter().parse(self.template):
            pieces.append(literal.replace("{", "{{").replace("}", "}}"))
            if name is not None:
                pieces.append("{" + name + "}")
        at = pieces.index("{secret}")
        return pieces[:at], pieces[at + 1 :]


def log2_size(size: int) -> float:
    """log2 of an exact integer of any size; bits."""
    return math.log2(size)
