"""Canaries enter the data while it is loaded: user rows keep their order, types and length, and nothing is copied."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, Subset

from memguard.canaries.injection import CanaryDataset, CanarySampler
from memguard.canaries.rows import made_up_columns, spliced_row, target_columns
from memguard.canaries.schedule import Clock, Mode, Schedule
from memguard.errors import CanaryError

CANARIES = [[901, 902, 903], [911, 912, 913, 914]]
TEXTS = ["first canary", "second canary"]
LENGTH = 12


class Rows(Dataset[Any]):
    """Map-style rows whose ids tell which row they are of."""

    def __init__(self, number: int, *, kind: Callable[[list[int]], Any] = list, length: int = LENGTH) -> None:
        self.number, self.kind, self.length = number, kind, length
        self.column_names = ["input_ids", "labels"]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.number:
            raise IndexError(index)
        ids = [index] * self.length
        return {"input_ids": self.kind(ids), "labels": self.kind(ids), "attention_mask": self.kind([0] * self.length)}


def guarded(base: Any, mode: Mode, *, seed: int = 5) -> CanaryDataset:
    return CanaryDataset(base, CANARIES, TEXTS, mode=mode, seed=seed)


def plain(values: Any) -> list[int]:
    return [int(value) for value in values]


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int64 tensor": lambda ids: torch.tensor(ids),
    "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "int64 array": lambda ids: np.array(ids),
    "uint16 array": lambda ids: np.array(ids, dtype=np.uint16),
}


def same_type(one: Any, other: Any) -> bool:
    return type(one) is type(other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)


# -- rows of their own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["append", "replace"])
def test_a_canary_row_has_the_columns_and_types_of_a_user_row(kind: str, mode: Mode) -> None:
    base = Rows(6, kind=KINDS[kind])
    data = guarded(base, mode)
    for index, ids in enumerate(CANARIES):
        row = data[6 + index]
        assert list(row) == list(base[0])
        assert all(same_type(row[key], base[0][key]) for key in row)
        assert plain(row["input_ids"]) == plain(row["labels"]) == ids
        assert plain(row["attention_mask"]) == [1] * len(ids)


def test_every_known_column_is_filled_and_of_an_unknown_one_numbers_are_the_users() -> None:
    user = {
        "input_ids": [1, 2],
        "position_ids": [0, 1],
        "token_type_ids": torch.tensor([1, 1]),
        "special_tokens_mask": (1, 0),
        "length": 2,
        "text": "user text",
        "source": "web",
        "weights": [0.5, 0.5],
        "meta": {"a": 1},
        "pair": (1, 2, 3),
        "score": 0.5,
        "rank": 3,
        "clean": True,
        "picture": np.ones((2, 2), dtype=np.float32),
        "vector": torch.ones(3),
        "count": np.int64(7),
        "nothing": None,
    }
    row = guarded([user], "append")[1]
    assert list(row) == list(user)
    assert (row["input_ids"], row["position_ids"], row["special_tokens_mask"]) == (CANARIES[0], [0, 1, 2], (0, 0, 0))
    assert row["token_type_ids"].tolist() == [0, 0, 0]
    assert (row["length"], row["text"]) == (3, "first canary")
    assert (row["source"], row["weights"], row["meta"], row["pair"]) == ("", [0.5] * 3, {}, ())
    assert (row["score"], row["rank"], row["clean"], row["nothing"]) == (0.5, 3, True, None)
    assert row["picture"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert row["vector"].tolist() == [0.0, 0.0, 0.0]
    assert row["count"] == 7
    for key in user:
        assert same_type(row[key], user[key]), key


@pytest.mark.parametrize("mode", ["append", "splice"])
def test_targets_that_are_the_next_ids_stay_one_ahead(mode: Mode) -> None:
    text = list(range(20, 31))
    for column in ("labels", "targets"):
        user = {"input_ids": text[:-1], column: torch.tensor(text[1:])}
        row = guarded([user], mode)[1]
        ids, targets = list(row["input_ids"]), row[column].tolist()
        assert isinstance(row[column], torch.Tensor)
        assert targets[:-1] == ids[1:]
        whole = [*ids, targets[-1]]
        assert any(whole[at : at + 3] == CANARIES[0] for at in range(len(whole)))


def test_masked_labels_are_those_of_the_inputs() -> None:
    assert target_columns({"input_ids": [5, 6, 7], "labels": [-100] * 3}) == {"labels": 0}
    assert target_columns({"input_ids": [5, 6, 7], "labels": 1}) == {}
    assert target_columns({"input_ids": [5, 6, 7], "codes": [1, 0, 1], "weight": [0.5, 0.5, 1.0]}) == {}


def test_a_column_of_weights_a_token_gives_a_canary_the_largest() -> None:
    row = guarded([{"input_ids": [1, 2], "weights": np.array([0.0, 2.5])}], "append")[1]
    assert row["weights"].tolist() == [2.5] * 3
    assert made_up_columns({"input_ids": [1, 2], "weights": [0.0, 2.5], "source": "web", "loss_mask": [0, 1]}) == ["weights"]


def test_a_length_column_keeps_its_scalar_type() -> None:
    for length in (np.int32(2), torch.tensor(2, dtype=torch.int16), 2):
        row = guarded([{"input_ids": [1, 2], "length": length}], "append")[2]
        assert same_type(row["length"], length)
        assert int(row["length"]) == 4


def test_text_rows_hold_the_text_of_the_canary() -> None:
    data = guarded([{"text": "one"}, {"text": "two"}], "append")
    assert [data[index] for index in range(2 + len(TEXTS))] == [{"text": text} for text in ("one", "two", *TEXTS)]


def test_the_first_row_is_read_once_and_not_again_for_each_canary() -> None:
    class Counted(Rows):
        reads = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            Counted.reads += 1
            return super().__getitem__(index)

    data = guarded(Counted(3), "append")
    for _ in range(5):
        _ = data[3], data[4]
    assert Counted.reads == 1


def test_rows_of_a_canary_do_not_share_memory() -> None:
    data = guarded(Rows(3), "append")
    data[3]["input_ids"].append(7)
    assert data[3]["input_ids"] == CANARIES[0]
    row = data[3]
    row["labels"][0] = -100
    assert row["input_ids"] == CANARIES[0]


# -- splicing


@pytest.mark.parametrize("kind", KINDS)
def test_a_spliced_row_keeps_its_length_its_types_and_every_other_token(kind: str) -> None:
    base = Rows(6, kind=KINDS[kind])
    data = guarded(base, "splice")
    for canary, row in itertools.product(range(2), range(6)):
        user, spliced, ids = base[row], data[6 + canary * 6 + row], CANARIES[canary]
        assert list(spliced) == list(user)
        assert all(same_type(spliced[key], user[key]) for key in user)
        values = plain(spliced["input_ids"])
        start = values.index(ids[0])
        assert values == [row] * start + ids + [row] * (LENGTH - start - len(ids))
        assert plain(spliced["labels"]) == values
        assert plain(spliced["attention_mask"]) == [0] * start + [1] * len(ids) + [0] * (LENGTH - start - len(ids))


def test_splicing_leaves_the_users_own_row_as_it_was() -> None:
    for kind in KINDS.values():
        kept = [{"input_ids": kind([5] * LENGTH), "labels": kind([5] * LENGTH)} for _ in range(2)]
        data = guarded(kept, "splice")
        _ = [data[index] for index in range(len(data))]
        assert all(plain(value) == [5] * LENGTH for row in kept for value in row.values())


def test_other_columns_of_a_spliced_row_are_the_users() -> None:
    user = {"input_ids": list(range(8)), "position_ids": list(range(8)), "source": "web", "labels": 3}
    spliced = guarded([user], "splice")[1]
    assert (spliced["position_ids"], spliced["source"], spliced["labels"]) == (user["position_ids"], "web", 3)


def test_masked_labels_outside_the_canary_stay_masked() -> None:
    user = {"input_ids": list(range(8)), "labels": [-100] * 8}
    spliced = guarded([user], "splice")[1]
    assert Counter(spliced["labels"]) == Counter({-100: 5, 901: 1, 902: 1, 903: 1})


def test_the_place_of_a_splice_is_the_same_each_time_and_spread_over_the_row() -> None:
    data = guarded(Rows(400), "splice")
    starts = [data[400 + row]["input_ids"].index(901) for row in range(400)]
    assert [data[400 + row]["input_ids"].index(901) for row in range(400)] == starts
    assert set(starts) == set(range(LENGTH - 3 + 1))
    other = guarded(Rows(400), "splice", seed=6)
    assert [other[400 + row]["input_ids"].index(901) for row in range(400)] != starts


def test_a_canary_as_long_as_the_row_fills_it_and_a_longer_one_is_a_row_of_its_own() -> None:
    assert guarded(Rows(2, length=3), "splice")[2]["input_ids"] == CANARIES[0]
    assert guarded(Rows(2, length=3), "splice")[2 + 2]["input_ids"] == CANARIES[1]
    with pytest.raises(CanaryError, match="a canary of 4 tokens must fit in a row of 3"):
        spliced_row({"input_ids": [1, 2, 3]}, CANARIES[1], seed="any")


# -- as a dataset


@pytest.mark.parametrize(("mode", "indices"), [("append", 8), ("replace", 8), ("splice", 18)])
def test_user_rows_come_first_and_the_end_is_an_index_error(mode: Mode, indices: int) -> None:
    base = Rows(6)
    data = guarded(base, mode)
    assert len(data) == 6  # what a trainer logs: rows an epoch, not indices there are
    assert [data[index] for index in range(6)] == [base[index] for index in range(6)]
    assert data[indices - 1] is not None
    with pytest.raises(IndexError):
        _ = data[indices]


def test_the_length_is_the_rows_of_an_epoch_when_they_are_given() -> None:
    data = CanaryDataset(Rows(6), [[1, 2]], ["x"], mode="append", seed=0, rows_per_epoch=11)
    assert len(data) == 11


@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
def test_several_rows_at_once_are_those_read_one_by_one(mode: Mode) -> None:
    class Batched(Rows):
        asked: list[list[int]] = []  # noqa: RUF012

        def __getitems__(self, indices: list[int]) -> list[Any]:
            Batched.asked.append(indices)
            return [self[index] for index in indices]

    for base in (Rows(6), Batched(6), Subset(Rows(9), [8, 7, 6, 5, 4, 3])):
        data = guarded(base, mode)
        for indices in ([0, 6, 3, 7, 5], [6, 7], [2], []):
            assert data.__getitems__(indices) == [data[index] for index in indices]
        assert data.__getitems__(torch.tensor([1, 6])) == [data[1], data[6]]  # type: ignore[arg-type]
    assert Batched.asked == [[0, 3, 5], [2], [1]]  # user rows alone, in one request; none for canaries


@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
def test_a_guarded_dataset_can_be_sent_to_a_worker(mode: Mode) -> None:
    data = guarded(Rows(6), mode)
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[index] for index in range(len(data))] == [data[index] for index in range(len(data))]
    assert copy.column_names == ["input_ids", "labels"]


def test_attributes_of_the_users_dataset_are_reached_and_missing_ones_are_missing() -> None:
    data = guarded(Rows(6), "append")
    assert data.column_names == ["input_ids", "labels"]
    assert not hasattr(data, "features")
    assert not hasattr(data, "__array__")
    with pytest.raises(AttributeError, match="base"):
        _ = CanaryDataset.__new__(CanaryDataset).base


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
def test_a_hugging_face_dataset_is_guarded_in_every_format(form: str | None, mode: Mode) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[index] * LENGTH for index in range(6)], "labels": [[index] * LENGTH for index in range(6)]}
    base = datasets.Dataset.from_dict(rows).with_format(form)
    data = guarded(base, mode)
    assert data.column_names == ["input_ids", "labels"]
    batch = data.__getitems__([0, 6, 5, 7])
    assert [plain(row["input_ids"])[0] for row in batch[::2]] == [0, 5]
    for row, user in ((row, base[0]) for row in batch):
        assert all(same_type(row[key], user[key]) for key in user)
    found = plain(batch[1]["input_ids"])
    assert found == CANARIES[0] if mode != "splice" else sorted(found) == [0] * 9 + CANARIES[0]
    copy = pickle.loads(pickle.dumps(data))
    assert [plain(copy[index]["input_ids"]) for index in range(8)] == [plain(data[index]["input_ids"]) for index in range(8)]


# -- the sampler


def schedule_of(mode: Mode, *, num_rows: int = 30, repetitions: tuple[int, ...] = (2, 3), **clock: Any) -> Schedule:
    defaults: dict[str, Any] = {"rows_per_batch": 4, "accumulation": 1, "max_steps": 100, "drop_last": False}
    return Schedule(num_rows, repetitions, mode, "per_epoch", 9, Clock(**(defaults | clock)))


def read(mode: Mode, index: int, num_rows: int) -> tuple[int | None, int | None]:
    """User row and canary behind an index."""
    if index < num_rows:
        return index, None
    if mode == "splice":
        canary, row = divmod(index - num_rows, num_rows)
        return row, canary
    return None, index - num_rows


@given(st.sampled_from(["append", "replace", "splice"]), st.integers(5, 60), st.lists(st.integers(0, 3), max_size=3))
@settings(max_examples=150, deadline=None)
def test_user_rows_keep_the_order_of_the_unguarded_run_in_every_mode(mode: Mode, num_rows: int, numbers: list[int]) -> None:
    repetitions = tuple(numbers) if sum(numbers) <= num_rows else (1,)
    schedule = schedule_of(mode, num_rows=num_rows, repetitions=repetitions)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows)).tolist()
    indices = list(CanarySampler(order, schedule))  # type: ignore[arg-type]
    assert len(indices) == len(schedule)
    found = [read(mode, index, num_rows) for index in indices]
    canaries = Counter(canary for _, canary in found if canary is not None)
    assert [canaries[index] for index in range(len(repetitions))] == list(repetitions)
    users = [row for row, _ in found if row is not None]
    if mode == "replace":
        cells = schedule.cells(0)
        assert users == [row for position, row in enumerate(order) if position not in cells]
    else:
        assert users == order
    assert {position for position, (_, canary) in enumerate(found) if canary is not None} == set(schedule.cells(0))


@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
def test_no_canaries_leave_the_inner_order_untouched(mode: Mode) -> None:
    order = list(range(29, -1, -1))
    assert list(CanarySampler(order, schedule_of(mode, repetitions=()))) == order  # type: ignore[arg-type]


class Recorded(Sampler[int]):
    """An inner sampler that knows the epoch it was told, and how far it was read."""

    def __init__(self, number: int) -> None:
        self.number, self.epoch, self.read = number, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        for row in range(self.number):
            self.read += 1
            yield (row + self.epoch) % self.number


def test_the_loader_sets_the_epoch_of_the_users_order_and_the_callback_that_of_the_canaries() -> None:
    inner, schedule = Recorded(30), schedule_of("append")
    sampler = CanarySampler(inner, schedule)
    sampler.begin_epoch(3)
    sampler.set_epoch(0)  # as a loader that skips batches on a resume does
    indices = list(sampler)
    assert {position for position, index in enumerate(indices) if index >= 30} == set(schedule.cells(3))
    assert next(index for index in indices if index < 30) == 0
    sampler.set_epoch(5)
    assert inner.epoch == 5
    assert next(index for index in sampler if index < 30) == 5


def test_without_word_from_outside_a_pass_moves_on_to_the_next_epoch() -> None:
    schedule = schedule_of("append")
    sampler = CanarySampler(SequentialSampler(range(30)), schedule)
    for epoch in range(3):
        assert {position for position, index in enumerate(sampler) if index >= 30} == set(schedule.cells(epoch))


def test_an_epoch_set_during_a_pass_is_not_moved_on() -> None:
    sampler = CanarySampler(SequentialSampler(range(30)), schedule_of("append"))
    for position, _ in enumerate(sampler):
        if position == 3:
            sampler.begin_epoch(7)
    assert sampler.epoch == 7


def test_a_pass_that_is_broken_off_stays_in_its_epoch() -> None:
    sampler = CanarySampler(SequentialSampler(range(30)), schedule_of("append"))
    iterator = iter(sampler)
    _ = [next(iterator) for _ in range(5)]
    assert sampler.epoch == 0


def test_an_inner_sampler_is_read_no_further_than_its_rows() -> None:
    for mode in ("append", "replace", "splice"):
        inner = Recorded(30)
        list(CanarySampler(inner, schedule_of(mode)))
        assert inner.read == 30


@pytest.mark.parametrize("mode", ["append", "replace", "splice"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_of_guarded_rows_shows_each_canary_as_the_schedule_counts(mode: Mode, drop_last: bool) -> None:
    base = Rows(30, kind=KINDS["int64 tensor"], length=4)
    data = CanaryDataset(base, [[901] * 4, [911] * 4], TEXTS, mode=mode, seed=1)
    schedule = schedule_of(mode, drop_last=drop_last)
    generator = torch.Generator().manual_seed(0)
    sampler = CanarySampler(RandomSampler(base, generator=generator), schedule)
    loader: Any = DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)
    seen, steps = [0, 0], 0
    for _ in range(3):
        for batch in loader:
            steps += 1
            firsts = batch["input_ids"][:, 0].tolist()
            seen = [seen[0] + firsts.count(901), seen[1] + firsts.count(911)]
            assert schedule.counts(steps) == seen
    assert seen == [6, 9]


def test_the_guarded_loader_draws_the_users_rows_in_the_order_of_the_unguarded_one() -> None:
    base = Rows(30, kind=KINDS["int64 tensor"], length=4)

    def firsts(data: Any, sampler: Any) -> list[int]:
        return [int(first) for batch in DataLoader(data, batch_size=5, sampler=sampler) for first in batch["input_ids"][:, 0]]

    unguarded = firsts(base, RandomSampler(base, generator=torch.Generator().manual_seed(3)))
    data = CanaryDataset(base, [[901] * 4, [911] * 4], TEXTS, mode="append", seed=1)
    inner = RandomSampler(base, generator=torch.Generator().manual_seed(3))
    guarded_rows = firsts(data, CanarySampler(inner, schedule_of("append")))
    assert [row for row in guarded_rows if row < 900] == unguarded
    assert Counter(row for row in guarded_rows if row >= 900) == {901: 2, 911: 3}
