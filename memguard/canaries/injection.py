"""Puts canaries into map-style training data while it is loaded; nothing is written, nothing is copied.

The dataset is stateless: an index says what a row is, and the sampler, which lives in the main process, says when. User
rows keep the order of the unguarded run. See `memguard.canaries.schedule` for where canaries go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from memguard.canaries.schedule import Mode, Schedule
from memguard.errors import CanaryError


class CanaryDataset(Dataset[Any]):
    """The user's rows, `[0, n)`, followed by canaries.

    Append and replace: index `n + j` is a row of its own for planted canary j. Splice: index `n + j * n + i` is user row i
    with canary j written into it.

    Args:
        base: the user's map-style dataset.
        canary_ids: token ids of each planted canary.
        texts: their texts, for raw-text rows.
        mode: append, replace or splice.
        seed: placement seed; decides where in a row a canary is spliced.
        rows_per_epoch: what `len` says, as trainers log it; indices of canaries lie beyond it.
    """

    def __init__(
        self,
        base: Any,
        canary_ids: Sequence[Sequence[int]],
        texts: Sequence[str],
        *,
        mode: Mode,
        seed: int,
        rows_per_epoch: int | None = None,
    ) -> None:
        self._length = len(base) if rows_per_epoch is None else rows_per_epoch
        self.base, self.mode, self.num_rows = base, mode, len(base)
        self._ids, self._texts, self._seed = [list(ids) for ids in canary_ids], list(texts), seed
        self._sample = base[0]  # read once: a dataset with random transforms must not be drawn from per canary

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        index = int(index)
        if index < self.num_rows:
            return self.base[index]
        if self.mode == "splice":
            canary, row = divmod(index - self.num_rows, self.num_rows)
            return self._splice(self.base[row], canary, row)
        return self._row(self._sample, index - self.num_rows)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several rows; keeps the batched fast path of `datasets.Dataset` for user rows."""
        user = [int(index) for index in indices if index < self.num_rows]
        fetch: Callable[[list[int]], Any] | None = getattr(self.base, "__getitems__", None)
        fetched = iter(fetch(user) if user and fetch is not None else [self.base[index] for index in user])
        return [next(fetched) if index < self.num_rows else self[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("base", "num_rows"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def _row(self, sample: Mapping[str, Any], canary: int) -> dict[str, Any]:
        """A row of its own, with the columns and value types of a user row."""
        ids = self._ids[canary]
        values: dict[str, Any] = {
            "input_ids": ids,
            "labels": ids,
            "attention_mask": [1] * len(ids),
            "position_ids": list(range(len(ids))),
            "token_type_ids": [0] * len(ids),
            "special_tokens_mask": [0] * len(ids),
            "length": len(ids),
            "text": self._texts[canary],
        }
        return {key: _like(value, values.get(key, _MISSING)) for key, value in sample.items()}

    def _splice(self, row: Mapping[str, Any], canary: int, index: int) -> dict[str, Any]:
        """The user's row with the canary's ids written over a seeded stretch of it; its length stays."""
        ids = self._ids[canary]
        room = len(row["input_ids"]) - len(ids)
        if room < 0:
            raise CanaryError(f"a canary of {len(ids)} tokens must fit in a row of {len(row['input_ids'])}.")
        start = random.Random(f"memguard/splice/{self._seed}/{canary}/{index}").randrange(room + 1)
        spliced = dict(row)
        for key, fill in (("input_ids", ids), ("labels", ids), ("attention_mask", [1] * len(ids))):
            if key in row and _is_sequence(row[key]):
                spliced[key] = _overwrite(row[key], start, fill)
        return spliced


_MISSING = object()


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (hasattr(value, "ndim") and value.ndim > 0)


def _like(example: Any, value: Any) -> Any:
    """`value` in the type of `example`; something empty of that type when there is no value for the column."""
    if value is _MISSING or _is_sequence(example) != _is_sequence(value):
        return _empty_like(example)
    if isinstance(example, torch.Tensor):
        return torch.tensor(value, dtype=example.dtype)
    if hasattr(example, "ndim"):
        return type(example)(value) if example.ndim == 0 else _as_array(example, value)
    return tuple(value) if isinstance(example, tuple) else list(value) if isinstance(example, list) else value


def _as_array(example: Any, value: Any) -> Any:
    import numpy as np

    return np.asarray(value, dtype=example.dtype)


def _empty_like(example: Any) -> Any:
    if isinstance(example, torch.Tensor):
        return torch.zeros_like(example)
    if isinstance(example, (str, list, tuple, dict, bool, int, float)):
        return type(example)()
    if hasattr(example, "ndim") and hasattr(example, "dtype"):
        import numpy as np

        return np.zeros_like(example) if example.ndim else example.dtype.type()
    return None


def _overwrite(values: Any, start: int, fill: Sequence[int]) -> Any:
    """A copy of `values` with `fill` written from `start`, in the same type."""
    if isinstance(values, torch.Tensor):
        copy = values.clone()
        copy[start : start + len(fill)] = torch.tensor(fill, dtype=values.dtype, device=values.device)
        return copy
    if hasattr(values, "ndim"):
        copy = values.copy()
        copy[start : start + len(fill)] = fill
        return copy
    return type(values)([*values[:start], *fill, *values[start + len(fill) :]])


class CanarySampler(Sampler[int]):
    """User rows in the inner sampler's own order, canaries at the cells of a schedule.

    `set_epoch` is called by the trainer's loader and, since some wrappers drop it, by the callback.
    """

    def __init__(self, inner: Sampler[int], schedule: Schedule) -> None:
        self.inner, self.schedule, self.epoch = inner, schedule, 0
        self.generator = None  # accelerate looks for it on random samplers

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch
        forward = getattr(self.inner, "set_epoch", None)
        if forward is not None:
            forward(epoch)

    def __len__(self) -> int:
        return len(self.schedule)

    def __iter__(self) -> Iterator[int]:
        cells, n, epoch = self.schedule.cells(self.epoch), self.schedule.num_rows, self.epoch
        user = iter(self.inner)
        for position in range(len(self.schedule)):
            canary = cells.get(position)
            if canary is None:
                yield next(user)
            elif self.schedule.mode == "append":
                yield n + canary
            elif self.schedule.mode == "replace":
                next(user)
                yield n + canary
            else:
                yield n + canary * n + next(user)
        if self.epoch == epoch:
            self.epoch = epoch + 1
