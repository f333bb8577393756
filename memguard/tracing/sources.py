"""Documents of a corpus as they lie on disk: text, JSON lines (plain, .gz, .zst), Parquet, a saved `datasets` folder.

A text file is one document; of JSON lines and tables every row is one. Rows hold `text` or `input_ids`; what else they hold
is kept as metadata. Nothing is read ahead of what is asked for.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memguard.errors import InputError, MissingExtraError

JSON_LINES = (".jsonl", ".json", ".ndjson")
PACKED = (".gz", ".zst")
TABLES = (".parquet",)


@dataclass(frozen=True)
class SourceDocument:
    """One document: a text, or token ids; where it came from and what stood beside it."""

    text: str | None
    ids: Sequence[int] | None
    metadata: Mapping[str, Any]


def list_sources(paths: Sequence[Path]) -> list[Path]:
    """The files of a corpus in a fixed order: folders are walked, hidden files left out.

    Raises:
        InputError: a path that is not there, or nothing to read at all.
    """
    found: list[Path] = []
    for path in paths:
        if _is_saved_dataset(path) or path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = [one for one in path.rglob("*") if one.is_file()]
            found += sorted(one for one in inside if not any(part.startswith(".") for part in one.relative_to(path).parts))
        else:
            raise InputError(f"corpus '{path}' does not exist.")
    if not found:
        raise InputError("the corpus holds no file.")
    return found


def read_corpus(paths: Sequence[Path], *, text_field: str = "text") -> Iterator[SourceDocument]:
    """Every document of the files, in order.

    Args:
        paths: files and folders.
        text_field: of rows; without it a row must hold `input_ids`.

    Raises:
        InputError: an unreadable file or row; names the file and the line.
        MissingExtraError: a compressed file without the package that reads it.
    """
    for path in list_sources(paths):
        kind = _kind(path)
        if _is_saved_dataset(path):
            rows: Iterable[Any] = _saved_rows(path)
        elif kind in TABLES:
            rows = _table_rows(path)
        elif kind in JSON_LINES:
            rows = _json_rows(path)
        else:
            yield SourceDocument(_read_text(path), None, {"path": path.name})
            continue
        for number, row in enumerate(rows, start=1):
            yield as_document(row, text_field=text_field, where=f"'{path.name}' row {number}", path=path.name, line=number)


def as_document(
    row: Any, *, text_field: str = "text", where: str = "row", path: str | None = None, line: int | None = None
) -> SourceDocument:
    """A document from a text, a list of ids, or a row that holds either.

    Raises:
        InputError: it is none of these; names `where`.
    """
    place = {key: value for key, value in (("path", path), ("linenum", line)) if value is not None}
    if isinstance(row, str):
        return SourceDocument(row, None, place)
    if isinstance(row, Mapping):
        kept = {key: value for key, value in row.items() if key not in (text_field, "input_ids") and _is_plain(value)}
        metadata = {**place, "metadata": kept} if kept else place
        if isinstance(row.get(text_field), str):
            return SourceDocument(row[text_field], None, metadata)
        if row.get("input_ids") is not None and not isinstance(row["input_ids"], str):
            return SourceDocument(None, row["input_ids"], metadata)
        raise InputError(f"{where} must hold '{text_field}' or 'input_ids'.")
    if hasattr(row, "__len__") and not isinstance(row, (bytes, bytearray)):
        return SourceDocument(None, row, place)
    raise InputError(f"{where} must be a text, token ids or a mapping, got {type(row).__name__}.")


def source_digest(paths: Sequence[Path], *settings: object) -> str:
    """sha256 over names, sizes and times of the files and the settings: says that a build may go on with them."""
    facts = []
    for path in list_sources(paths):
        stat = path.stat()
        facts.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps([facts, [str(one) for one in settings]]).encode()).hexdigest()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _kind(path: Path) -> str:
    """The suffix that says what a file holds, packed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def _opened(path: Path) -> io.TextIOBase:
    """A text stream of a file, unpacked on the way."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise MissingExtraError("reading .zst files", "tracing") from None
        stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.TextIOWrapper(stream, encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_text(path: Path) -> str:
    try:
        with _opened(path) as stream:
            return stream.read()
    except Exception as error:
        raise _unreadable(path, error) from None


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows of JSON lines; only a line feed ends a line, whatever stands inside a text."""
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise InputError(f"'{path.name}' line {number} is not JSON.") from None
            yield row


def _lines(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as stream:
            yield from stream
    except Exception as error:
        raise _unreadable(path, error) from None


def _table_rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"'{path.name}' is Parquet: install pyarrow to read it.") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _saved_rows(path: Path) -> Iterable[Any]:
    try:
        from datasets import load_from_disk
    except ImportError:
        raise InputError(f"'{path.name}' is a saved dataset: install datasets to read it.") from None
    rows: Iterable[Any] = load_from_disk(str(path))
    return rows


def _unreadable(path: Path, error: Exception) -> Exception:
    if isinstance(error, (MissingExtraError, InputError)):
        return error
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"'{path.name}' is not UTF-8 text.")
    return InputError(f"'{path.name}' cannot be read ({type(error).__name__}).")
