"""Canaries in streams: at the planned positions of the global order, whoever reads, and no user row lost."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from memguard.canaries.schedule import Clock, Mode, Schedule
from memguard.canaries.streams import CanaryStream

IDS = [[901, 902, 903], [911, 912]]
TEXTS = ["first", "second"]


class Numbers(IterableDataset[Any]):
    """Rows (k, k, k, k) for k = 1.., dealt out to workers in turn; remembers the epochs it was told."""

    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter([{"input_ids": [k + 1] * 4} for k in range(first, self.length, step)])


def stream_of(base: Any, mode: Mode, *, rows: int = 24, batch: int = 2, rank: int = 0, ranks: int = 1) -> CanaryStream:
    clock = Clock(rows_per_batch=batch * ranks, accumulation=1, max_steps=rows // (batch * ranks), drop_last=False)
    schedule = Schedule(0, (2, 3), mode, "total", 7, clock, is_stream=True)
    return CanaryStream(
        base, {"input_ids": [1] * 4}, IDS, TEXTS, schedule=schedule, rows_per_batch=batch, rank=rank, num_ranks=ranks
    )


def canary_in(row: dict[str, Any]) -> int | None:
    ids = [int(one) for one in row["input_ids"]]
    for canary, needle in enumerate(IDS):
        if any(ids[at : at + len(needle)] == needle for at in range(len(ids))):
            return canary
    return None


def read(stream: Any, number: int) -> list[dict[str, Any]]:
    return list(itertools.islice(iter(stream), number))


@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
def test_canaries_stand_at_the_planned_positions(mode: Mode) -> None:
    stream = stream_of(Numbers(100), mode)
    rows = read(stream, 24)
    found = {place: canary for place, row in enumerate(rows) if (canary := canary_in(row)) is not None}
    assert found == stream.schedule.cells(0)
    assert Counter(found.values()) == {0: 2, 1: 3}


def test_appended_canaries_cost_no_user_row_and_replaced_ones_one_each() -> None:
    kept = [row["input_ids"][0] for row in read(stream_of(Numbers(100), "append"), 24) if canary_in(row) is None]
    assert kept == list(range(1, 20))
    stream = stream_of(Numbers(100), "replace")
    kept = [row["input_ids"][0] for row in read(stream, 24) if canary_in(row) is None]
    assert kept == [place + 1 for place in range(24) if place not in stream.schedule.cells(0)]


def test_a_spliced_row_keeps_its_length_and_the_rest_of_the_user_row() -> None:
    stream = stream_of(Numbers(100), "splice")
    for place, row in enumerate(read(stream, 24)):
        rest = [one for one in row["input_ids"] if one < 900]
        assert len(row["input_ids"]) == 4
        assert set(rest) <= {place + 1}
        assert len(rest) == (4 if canary_in(row) is None else 4 - len(IDS[canary_in(row) or 0]))


def test_a_short_stream_begins_again_and_is_told_the_epoch() -> None:
    base = Numbers(5)
    rows = read(stream_of(base, "append"), 24)
    kept = [row["input_ids"][0] for row in rows if canary_in(row) is None]
    assert kept == [k % 5 + 1 for k in range(19)]
    assert base.epochs == [1, 2, 3]


def test_an_empty_stream_stays_empty() -> None:
    assert list(stream_of(Numbers(0), "replace")) == []


@pytest.mark.parametrize("mode", ["append", "splice"])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_put_canaries_where_one_reader_would(mode: Mode, workers: int) -> None:
    stream = stream_of(Numbers(100), mode)
    loader = DataLoader(stream, batch_size=2, num_workers=workers, collate_fn=lambda rows: rows)
    rows = [row for batch in itertools.islice(loader, 12) for row in batch]
    assert {p: c for p, row in enumerate(rows) if (c := canary_in(row)) is not None} == stream.schedule.cells(0)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_beyond_the_shards_of_a_stream_read_nothing() -> None:
    datasets = pytest.importorskip("datasets")
    base = datasets.Dataset.from_list([{"input_ids": [k + 1] * 4} for k in range(50)]).to_iterable_dataset(num_shards=2)
    stream = stream_of(base, "append")
    loader = DataLoader(stream, batch_size=2, num_workers=3, collate_fn=lambda rows: rows)
    rows = [row for batch in itertools.islice(loader, 12) for row in batch]
    assert {p: c for p, row in enumerate(rows) if (c := canary_in(row)) is not None} == stream.schedule.cells(0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_read_loaders_of_their_own_share_the_plan(ranks: int) -> None:
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        stream = stream_of(Numbers(100), "append", rank=rank, ranks=ranks)
        rows = read(stream, 24 // ranks)
        seen.update(canary for row in rows if (canary := canary_in(row)) is not None)
    assert seen == {0: 2, 1: 3}


def test_the_columns_of_the_stream_are_reached_and_missing_ones_are_missing() -> None:
    stream = stream_of(Numbers(9), "append")
    assert stream.length == 9
    with pytest.raises(AttributeError, match="nothing"):
        _ = stream.nothing


def test_a_canary_spliced_into_packed_documents_is_one_of_its_own() -> None:
    row = {"input_ids": list(range(1, 13)), "position_ids": torch.tensor([*range(5), *range(7)])}
    from memguard.canaries.rows import spliced_row

    for seed in range(20):
        spliced = spliced_row(row, [901, 902, 903], seed=str(seed))
        positions = spliced["position_ids"].tolist()
        at = spliced["input_ids"].index(901)
        assert positions[at : at + 3] == [0, 1, 2]
        end = at + 3
        expected, place = [], 0
        for index in range(12):  # by hand: the old positions, begun anew behind the canary until the next document
            old = [*range(5), *range(7)][index]
            if at <= index < end:
                expected.append(index - at)
                place = 0
            elif index >= end and not (index == 5 or (end <= 5 < index)):
                expected.append(place)
                place += 1
            else:
                expected.append(old)
        assert positions == expected
