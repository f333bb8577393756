"""The bytes that each token writes, so that token places are character places without decoding and searching.

Exact for byte-level BPE and for SentencePiece with or without byte fallback. Other tokenizers (WordPiece) lose letters or
blanks of a text when they encode it: corpus and generation are then compared as both are written back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memguard.canaries.encoding import PROBE_TEXTS

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """What ids of a tokenizer write.

    Args:
        tokenizer: of transformers, fast where that exists.

    Attributes:
        pieces: bytes by id.
        lengths: of the pieces, int64, shape (V,).
        is_exact: the pieces of an encoded text are its bytes, but for a blank that SentencePiece puts first.
        special_ids: ids that are no text, such as EOS.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pieces = _pieces(tokenizer)
        self.lengths = np.array([len(piece) for piece in self.pieces], dtype=np.int64)
        self.special_ids = frozenset(int(one) for one in tokenizer.all_special_ids)
        self.is_exact = all(self.bytes_of(self.encode(text)).lstrip(b" ") == text.encode().lstrip(b" ") for text in PROBE_TEXTS)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        options = {"add_special_tokens": False, "padding": False, "truncation": False, "verbose": False}
        return list(self._tokenizer(text, **options)["input_ids"])

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """What ids write; may begin or end inside a character."""
        return b"".join(map(self.pieces.__getitem__, ids))

    def offsets(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each id begins in `bytes_of(ids)`, and the end of the last; shape (T + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths[ids])])


def character_offsets(raw: bytes, offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The characters that each piece of `raw` touches: (first, behind the last); a piece inside a character has all of it.

    Args:
        raw: UTF-8; a character that is cut at an end counts as one.
        offsets: bytes where pieces begin, and the end; shape (T + 1,).

    Example:
        >>> character_offsets("aø".encode(), np.array([0, 1, 2, 3]))
        [(0, 1), (1, 2), (1, 2)]
    """
    begins = (np.frombuffer(raw, dtype=np.uint8) & 0xC0) != 0x80
    before = np.concatenate([[0], np.cumsum(begins)])
    at_boundary = np.append(begins, True)
    starts = np.maximum(before[offsets] - ~at_boundary[offsets], 0)
    return list(zip(starts[:-1].tolist(), before[offsets[1:]].tolist(), strict=True))


def trimmed(raw: bytes) -> bytes:
    """`raw` without the parts of characters that it begins or ends with."""
    start = 0
    while start < min(3, len(raw)) and raw[start] & 0xC0 == 0x80:
        start += 1
    for back in range(1, min(4, len(raw) - start) + 1):
        byte = raw[-back]
        if byte & 0xC0 != 0x80:
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return raw[start:-back] if needed > back else raw[start:]
    return raw[start:]


def _pieces(tokenizer: Any) -> list[bytes]:
    """Bytes by id, by the decoder that the tokenizer has."""
    strings = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {int(id_): str(token) for id_, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    kinds = _decoder_kinds(tokenizer)
    alphabet = _byte_alphabet()
    pieces = []
    for id_, string in enumerate(strings):
        text = "" if string is None else str(string)
        if "ByteFallback" in kinds and (byte := BYTE_PIECE.fullmatch(text)):
            pieces.append(bytes([int(byte[1], 16)]))
        elif id_ in added:
            pieces.append(added[id_].encode())
        elif "ByteLevel" in kinds:
            pieces.append(b"".join(alphabet.get(letter, letter.encode()) for letter in text))
        elif kinds & {"Metaspace", "Replace"}:
            pieces.append(text.replace("▁", " ").encode())
        else:
            pieces.append((text[2:] if text.startswith("##") else f" {text}").encode())
    return pieces


def _decoder_kinds(tokenizer: Any) -> set[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"Replace"}  # SentencePiece without a fast form
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {str(one.get("type")) for one in (decoder, *decoder.get("decoders", ()))}


def _byte_alphabet() -> dict[str, bytes]:
    """The letters by which byte-level BPE writes bytes: printable Latin-1 as it is, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    return letters | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}
