"""The manifest of a corpus index: what its files must be, so that a wrong or broken index is refused and never answers 0.

Without it a missing shard, a truncated table or another tokenizer would look like a text that does not occur. Sizes are
compared whenever an index is opened; digests when `verify` asks for it, which reads every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from memguard.documents import SCHEMA_VERSION, Document, load_document
from memguard.errors import InputError
from memguard.files import write_text_atomic

MANIFEST_NAME = "manifest.json"
FILE_STEMS = ("tokenized", "table", "offset", "metadata", "metaoff", "unigram")
TokenDtype = Literal["u16", "u32"]
TOKEN_BYTES: dict[str, int] = {"u16": 2, "u32": 4}


class FileEntry(Document):
    """Size in bytes and sha256 of one file."""

    size: int = Field(ge=0)
    sha256: str


class ShardEntry(Document):
    """One shard: tokens (without separators), documents, the tokens that each file holds."""

    number: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=1)
    suffix_array: str
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _names_every_file(self) -> ShardEntry:
        if set(self.files) != {f"{stem}.{self.number}" for stem in FILE_STEMS}:
            raise ValueError(f"a shard must list its {len(FILE_STEMS)} files")
        return self


class IndexManifest(Document):
    """What an index is made of. Rows of the table are in the order of the raw little-endian bytes, as infini-gram's."""

    kind: Literal["memguard index"] = "memguard index"
    schema_version: int = SCHEMA_VERSION
    format: Literal["infini-gram v4"] = "infini-gram v4"
    builder: str
    token_dtype: TokenDtype
    separator: int
    vocabulary_size: int = Field(ge=1)
    tokenizer_digest: str | None
    shards: tuple[ShardEntry, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    def save(self, folder: Path) -> None:
        """Write the manifest: the last act of a build, which makes its shards part of the index."""
        write_text_atomic(folder / MANIFEST_NAME, self.model_dump_json(indent=1) + "\n")


def separator_of(token_dtype: str) -> int:
    """The id that stands before every document; no token may have it."""
    return (1 << (8 * TOKEN_BYTES[token_dtype])) - 1


def choose_token_dtype(vocabulary_size: int) -> TokenDtype:
    """The narrowest type that leaves room for the separator.

    Example:
        >>> choose_token_dtype(65_535), choose_token_dtype(65_536)
        ('u16', 'u32')
    """
    if not 1 <= vocabulary_size <= separator_of("u32"):
        raise ValueError(f"vocabulary_size must lie in 1..{separator_of('u32')}, got {vocabulary_size}.")
    return "u16" if vocabulary_size <= separator_of("u16") else "u32"


def load_manifest(folder: Path) -> IndexManifest:
    """Read the manifest of an index; `InputError` when there is none, or when it names no document."""
    if not folder.is_dir():
        raise InputError(f"index '{folder}' is not a folder.")
    if not (folder / MANIFEST_NAME).is_file():
        raise InputError(
            f"index '{folder}' has no {MANIFEST_NAME}: it is not an index, or its build did not end. Build it again."
        )
    manifest = load_document(folder / MANIFEST_NAME, IndexManifest, what="index")
    if manifest.num_documents == 0 or manifest.num_tokens == 0:
        raise InputError(f"index '{folder.name}' is empty: nothing would be found in it.")
    numbers = [shard.number for shard in manifest.shards]
    if len(set(numbers)) != len(numbers):
        raise InputError(f"index '{folder.name}' lists a shard twice.")
    if manifest.separator != separator_of(manifest.token_dtype):
        raise InputError(
            f"index '{folder.name}' has separator {manifest.separator}, which does not fit {manifest.token_dtype}."
        )
    return manifest


def check_sizes(folder: Path, shards: Iterable[ShardEntry]) -> None:
    """`InputError` for every file that is missing or not as long as the manifest says."""
    findings = []
    for shard in shards:
        for name, entry in sorted(shard.files.items()):
            path = folder / name
            if not path.is_file():
                findings.append(f"'{name}' is missing")
            elif path.stat().st_size != entry.size:
                findings.append(f"'{name}' has {path.stat().st_size} bytes instead of {entry.size}")
    if findings:
        more = f" and {len(findings) - 4} more" if len(findings) > 4 else ""
        raise InputError(f"index '{folder.name}' is damaged: {', '.join(findings[:4])}{more}. Build it again.")


def describe_file(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return FileEntry(size=path.stat().st_size, sha256=digest.hexdigest())
