"""From a secret in its template to token ids and the span that is scored.

Templates are encoded whole, as training encodes them, and the span is found by character offsets: a token counts when it
overlaps the secret. A secret that the tokenizer cannot write back, or whose tokens would hold letters of the template, is
refused here so that the plan can draw another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memguard.canaries.formats import CanaryFormat
from memguard.errors import CanaryError

Join = Literal["clean", "space", "merged"]
BLANK_MARKS = ("Ġ", "▁")  # how byte-level BPE and SentencePiece write a leading blank
PROBE_TEXTS = (
    "The quick brown fox, 0123456789.",
    "  two blanks\tand\ttabs\nline",
    "IBAN DK50 0040 0440 1162 43",
    "naïve café – Ærø 東京 🙂",
    "a1b2c3 <html> {json: true} x_y-z",
)


@dataclass(frozen=True)
class EncodedSecret:
    """Token ids of one filled template; the secret's tokens are `ids[start:end]`."""

    ids: tuple[int, ...]
    start: int
    end: int
    join: Join


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of what a tokenizer does: its vocabulary, its special ids and its encoding of fixed texts.

    Independent of how it was saved, and of padding or truncation left switched on.
    """
    encodings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBE_TEXTS]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    facts = [sorted(tokenizer.get_vocab().items()), special, encodings]
    return hashlib.sha256(json.dumps(facts, ensure_ascii=True).encode()).hexdigest()


def require_fast(tokenizer: Any) -> None:
    """Raise unless the tokenizer reports character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise CanaryError(
            f"the tokenizer must report character offsets, got {type(tokenizer).__name__}. Load it as a fast tokenizer "
            "(AutoTokenizer does, where one exists)."
        )


def frame_ids(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids put before and after every canary: BOS (else EOS), and EOS, where the tokenizer has them."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    lead = bos if bos is not None else eos
    return ((lead,) if lead is not None else ()), ((eos,) if eos is not None else ())


@dataclass(frozen=True)
class SecretEncoder:
    """Encodes secrets in templates the way they are trained: lead ids, template, tail ids."""

    tokenizer: Any
    lead_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]

    def encode(
        self, canary_format: CanaryFormat, secrets: Sequence[str], names: Sequence[str | None]
    ) -> list[EncodedSecret | None]:
        """Encode many secrets of one format; None stands where a secret cannot be written back by the tokenizer.

        Args:
            canary_format: template and space.
            secrets: candidates of the space.
            names: the public name of each, None where the format has none.

        Returns:
            In order, `EncodedSecret` or None. The span holds one more token, the terminator, when lengths vary.
        """
        if not secrets:
            return []
        parts = [canary_format.split(secret, name=name) for secret, name in zip(secrets, names, strict=True)]
        texts = ["".join(part) for part in parts]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, padding=False, truncation=False)
        decoded = self.tokenizer.batch_decode(
            encoded["input_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        again = self.tokenizer(decoded, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
        terminated = canary_format.secret.variable_length
        results: list[EncodedSecret | None] = []
        for part, ids, offsets, text, second in zip(
            parts, encoded["input_ids"], encoded["offset_mapping"], decoded, again, strict=True
        ):
            stable = list(ids) == list(second) and part[1] in text
            results.append(self._span(part, ids, offsets, terminated) if stable else None)
        return results

    def _span(
        self, part: tuple[str, str, str], ids: Sequence[int], offsets: Sequence[tuple[int, int]], terminated: bool
    ) -> EncodedSecret | None:
        before, secret, after = part
        low, high = len(before), len(before) + len(secret)
        text = "".join(part)
        touching = [i for i, (s, e) in enumerate(offsets) if e > low and s < high and e > s]
        if not touching:
            return None
        start, end = touching[0], touching[-1] + 1
        outside = text[offsets[start][0] : low] + text[high : offsets[end - 1][1]]
        first = self.tokenizer.convert_ids_to_tokens([ids[start]])[0]
        join: Join = "clean"
        if outside.strip():
            join = "merged"
        elif outside or (before[-1:].isspace() and str(first).startswith(BLANK_MARKS) and len(str(first)) > 1):
            join = "space"
        whole = (*self.lead_ids, *ids, *self.tail_ids)
        start, end = start + len(self.lead_ids), end + len(self.lead_ids)
        if start < 1:
            raise CanaryError("a template must have text before {secret} where the tokenizer has neither BOS nor EOS.")
        if terminated:
            # Not the end token: a collator that pads with it takes it out of the loss, and it would never be learnt.
            if not after:
                raise CanaryError("a secret of varying length needs text after {secret} in its template, such as a full stop.")
            end = min(end + 1, len(self.lead_ids) + len(ids))  # or the last token holds what follows already
        return EncodedSecret(whole, start, end, join)
