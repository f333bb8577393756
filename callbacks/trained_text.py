"""Keeps what the model is trained on, and indexes it: what was trained is what is indexed (`propensity.index_training`).

A hook on the model itself reads the rows of every training batch, as `SightingCounter` does. Rows of a step go to disk when the
step is complete, in files of this rank; the first rank indexes them when a full audit asks, and at the end. A row that comes
again in a later epoch is kept once, a row that stands twice in an epoch twice: places in the index are copies in the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memguard.callbacks.together import on_first, reason_of
from memguard.canaries.batch_view import view_rows
from memguard.canaries.encoding import tokenizer_digest
from memguard.errors import InputError
from memguard.scoring.audit_mode import innermost
from memguard.scoring.team import Team
from memguard.tracing.index_writer import IndexWriter

logger = logging.getLogger(__name__)

ROW = np.dtype([("step", "<u8"), ("epoch", "<u4"), ("length", "<u4"), ("digest", "<u8")])
TOKEN = np.dtype("<u4")
READ = ("input_ids", "attention_mask", "position_ids", "seq_lengths", "seq_idx", "cu_seq_lens_q")
OURS_ALONE = 0o700  # the rows hold canaries


class TrainedText:
    """The rows that a run trains on, kept beside `index` in `NAME.rows`, until they are indexed there.

    Whatever goes wrong ends the keeping with a warning, never the training; `lost` then says why, and the index is taken away:
    one that is not whole would say of a text that it was not trained on.

    Args:
        index: folder of the index; what an earlier run wrote there in this way is replaced.
        tokenizer: of the run; its BOS, EOS and padding end a document and are left out.
        team: the ranks, which share the folder.
        global_step: steps done already; rows of later steps, of a part that the run does not go on from, are dropped.

    Attributes:
        lost: why rows are missing, None while they are whole.

    Raises:
        InputError: an index is there that no run wrote.
    """

    def __init__(self, index: Path, tokenizer: Any, *, team: Team, global_step: int) -> None:
        self.index, self._rows_folder = index, index.with_name(f"{index.name}.rows")
        self._tokenizer, self._team = tokenizer, team
        self.lost: str | None = None
        self._epoch = 0
        self._waiting: list[tuple[tuple[int, ...], int]] = []
        self._current: set[int] = set()
        self._before: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._kept: NDArray[Any] = np.empty(0, ROW)  # of the part of the run that this one goes on from
        self._num_indexed: dict[str, int] = {}
        self._handle: Any = None
        if index.exists() and not self._rows_folder.exists():
            raise InputError(f"index '{index}' was there before any run: index_training needs a new folder.")
        try:
            self._begin(global_step)
        except Exception as error:
            self._lose(error)

    def _begin(self, global_step: int) -> None:
        """Keep the rows of steps that the run goes on from; the first rank also sees to those of ranks there no longer are."""
        self._rows_folder.mkdir(parents=True, exist_ok=True, mode=OURS_ALONE)
        mine = f"rank-{self._team.rank}"
        if global_step and (any(self._rows_folder.glob("*.lost")) or not any(self._rows_folder.glob("rank-*.rows"))):
            self.lost = f"what was trained before step {global_step} was not kept"
            return
        names = {mine}
        if self._team.rank == 0:
            shutil.rmtree(self.index, ignore_errors=True)
            here = {f"rank-{rank}" for rank in range(self._team.size)}
            names |= {path.stem for path in self._rows_folder.glob("rank-*.rows")} - here
            for path in self._rows_folder.glob("*.lost"):
                path.unlink()
        for name in names:
            self._cut(name, global_step)
        self._kept = self._read(mine)

    def _cut(self, name: str, global_step: int) -> None:
        kept = self._read(name) if self._rows_of(name).exists() else np.empty(0, ROW)
        kept = kept[: int(np.searchsorted(kept["step"], global_step, side="right")) if global_step else 0]
        for path, size in ((self._rows_of(name), kept.nbytes), (self._tokens_of(name), _num_tokens(kept) * TOKEN.itemsize)):
            with path.open("ab") as file:
                file.truncate(size)

    def _rows_of(self, name: str) -> Path:
        return self._rows_folder / f"{name}.rows"

    def _tokens_of(self, name: str) -> Path:
        return self._rows_folder / f"{name}.tokens"

    def _read(self, name: str) -> NDArray[Any]:
        return np.fromfile(self._rows_of(name), ROW)

    # -- while training

    def watch(self, model: Any) -> None:
        """Read the rows of every training batch from now on.

        Args:
            model: wrapped or not; the hook sits on the innermost module.
        """
        self.unwatch()
        self._handle = innermost(model).register_forward_pre_hook(self._take, with_kwargs=True)

    def unwatch(self) -> None:
        """Take the hook off the model."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin_epoch(self, epoch: int) -> None:
        """Rows of earlier epochs are known from now on."""
        if epoch > self._epoch:
            now = np.fromiter(self._current, np.uint64, len(self._current))
            earlier = self._kept["digest"][self._kept["epoch"] < epoch]
            self._before = np.unique(np.concatenate([self._before, now, earlier]))
            self._current, self._epoch = set(), epoch

    def mark(self, global_step: int) -> None:
        """Write the rows of a step that is complete."""
        kept, self._waiting = self._waiting, []
        if self.lost is not None or not kept:
            return
        name = f"rank-{self._team.rank}"
        try:
            with self._tokens_of(name).open("ab") as file:
                file.write(b"".join(np.asarray(ids, TOKEN).tobytes() for ids, _ in kept))
            with self._rows_of(name).open("ab") as file:
                file.write(np.array([(global_step, self._epoch, len(ids), digest) for ids, digest in kept], ROW).tobytes())
        except Exception as error:
            self._lose(error)

    def _take(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.lost is not None or not module.training or not torch.is_grad_enabled():
            return
        try:
            self._keep(args, kwargs)
        except Exception as error:
            self._lose(error)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {"input_ids": args[0]} | kwargs if args else kwargs
        batch = {name: given[name].detach().cpu() for name in READ if isinstance(given.get(name), torch.Tensor)}
        for row in view_rows(batch):
            digest = _digest(row.ids)
            if not _holds(self._before, digest):
                self._current.add(digest)
                self._waiting.append((row.ids, digest))

    def _lose(self, error: Exception) -> None:
        self.lost, self._waiting = f"rows could not be kept: {reason_of(error).rstrip('.')}", []
        name = f"rank-{self._team.rank}"
        with contextlib.suppress(OSError):  # for a later part of the run to know; what is taken away makes room for it
            self._tokens_of(name).unlink(missing_ok=True)
            self._rows_of(name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self._rows_folder / f"{name}.lost").touch()
        logger.warning("%s; training goes on, and what it trains on will not be indexed.", self.lost)

    # -- at a full audit, and at the end

    def try_build(self) -> str | None:
        """Index what was kept and is not yet indexed; all ranks call it, the first one builds.

        Returns:
            Why there is no index; None: it is whole, up to the last complete step.
        """
        lost = next((one for one in self._team.gather("rows that were kept", self.lost) if one is not None), None)
        return on_first(self._team, "index of what was trained", lambda: self._built(lost))

    def _built(self, lost: str | None) -> str | None:
        if lost is None:
            try:
                self._build()
            except Exception as error:
                lost = reason_of(error).rstrip(".")
        if lost is not None:
            shutil.rmtree(self.index, ignore_errors=True)
            self._num_indexed = {}
        return lost

    def _build(self) -> None:
        found = {path.stem: self._read(path.stem) for path in sorted(self._rows_folder.glob("rank-*.rows"))}
        new = {name: rows[self._num_indexed.get(name, 0) :] for name, rows in found.items()}
        if self.index.exists() and not any(rows.size for rows in new.values()):
            return
        digests = np.concatenate([rows["digest"] for rows in found.values()])
        epochs = np.concatenate([rows["epoch"] for rows in found.values()])
        known, places = np.unique(digests, return_inverse=True)
        first = np.full(known.size, np.iinfo(epochs.dtype).max, epochs.dtype)
        np.minimum.at(first, places, epochs)
        ends = {self._tokenizer.bos_token_id, self._tokenizer.eos_token_id, self._tokenizer.pad_token_id} - {None}
        with IndexWriter(
            self.index,
            vocabulary_size=len(self._tokenizer),
            tokenizer_digest=tokenizer_digest(self._tokenizer),
            append=self.index.exists(),
            split_at=sorted(ends),
        ) as writer:
            self.index.chmod(OURS_ALONE)
            for name, rows in new.items():
                # another rank may have trained on the row in an earlier epoch
                wanted = first[np.searchsorted(known, rows["digest"])] == rows["epoch"]
                for step, ids in self._new_rows(name, found[name], wanted):
                    writer.add(ids, {"step": step})
        self._num_indexed = {name: rows.size for name, rows in found.items()}

    def _new_rows(self, name: str, rows: NDArray[Any], wanted: NDArray[np.bool_]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Step and ids of the wanted ones among the last rows of a rank."""
        if not wanted.any():
            return
        ends = np.cumsum(rows["length"], dtype=np.int64)
        tokens = np.memmap(self._tokens_of(name), TOKEN, "r", shape=(int(ends[-1]),))
        first = rows.size - wanted.size
        for place in first + np.flatnonzero(wanted):
            yield int(rows["step"][place]), tokens[ends[place] - int(rows["length"][place]) : ends[place]].astype(np.int64)


def _num_tokens(rows: NDArray[Any]) -> int:
    return int(rows["length"].sum(dtype=np.int64))


def _digest(ids: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(ids, TOKEN).tobytes(), digest_size=8).digest(), "little")


def _holds(digests: NDArray[np.uint64], digest: int) -> bool:
    place = int(np.searchsorted(digests, np.uint64(digest)))
    return place < digests.size and int(digests[place]) == digest
