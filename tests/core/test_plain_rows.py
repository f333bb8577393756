"""Rows without columns: a text, a sequence of ids, inputs with the same ids as targets or with the next ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memguard.audit.planting import row_ids
from memguard.canaries.rows import canary_row, ids_of, shift_of, spliced_row
from memguard.errors import CanaryError

CANARY = [901, 902, 903]
LENGTH = 8
KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tensor": torch.tensor,
    "array": lambda ids: np.array(ids, dtype=np.uint16),
}


def plain(values: Any) -> list[int]:
    return [int(value) for value in values]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sequence_of_ids_is_spliced_into_and_imitated_in_its_own_type(kind: Callable[[list[int]], Any]) -> None:
    user = kind([5] * LENGTH)
    spliced = spliced_row(user, CANARY, seed="a")
    start = plain(spliced).index(901)
    assert plain(spliced) == [5] * start + CANARY + [5] * (LENGTH - 3 - start)
    assert plain(user) == [5] * LENGTH
    own = canary_row(user, CANARY, "text")
    assert plain(own) == CANARY
    assert type(own) is type(spliced) is type(user)
    assert getattr(own, "dtype", None) == getattr(spliced, "dtype", None) == getattr(user, "dtype", None)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_targets_of_a_splice_are_the_next_tokens_and_the_users_own_elsewhere(kind: Callable[[list[int]], Any]) -> None:
    starts = set()
    for seed in range(40):
        user = (kind(list(range(10, 18))), kind(list(range(11, 19))))
        inputs, targets = (plain(part) for part in spliced_row(user, CANARY, seed=str(seed)))
        start = inputs.index(901)
        starts.add(start)
        assert inputs == [*range(10, 10 + start), *CANARY, *range(13 + start, 18)]
        assert targets == [*inputs[1:], 18]
        assert shift_of(inputs, targets) == 1
    assert starts == set(range(LENGTH - 3 + 1))  # 40 draws of 6 places: one is missed with probability 6 (5/6)^40 = 0.004


def test_targets_that_are_the_inputs_stay_so() -> None:
    ids = list(range(LENGTH))
    spliced = spliced_row((ids, ids), CANARY, seed="a")
    assert spliced[0] == spliced[1]
    assert set(CANARY) < set(spliced[0])
    assert canary_row((ids, ids), CANARY, "text") == (CANARY, CANARY)


def test_a_row_of_its_own_has_the_next_tokens_as_targets_and_one_part_stays_one() -> None:
    pair = (torch.arange(8), torch.arange(1, 9))
    inputs, targets = canary_row(pair, CANARY, "text")
    assert (inputs.tolist(), targets.tolist()) == ([901, 902], [902, 903])
    (only,) = canary_row((torch.arange(8),), CANARY, "text")
    (spliced,) = spliced_row([torch.arange(3)], CANARY, seed="a")
    assert only.tolist() == spliced.tolist() == CANARY


def test_a_text_is_imitated_as_a_text(tokenizer: Any) -> None:
    assert canary_row("some text", CANARY, "the number is 7") == "the number is 7"
    assert ids_of("some text") is None
    assert row_ids("some text", tokenizer) == tokenizer("some text")["input_ids"]


def test_the_shift_is_seen_through_masked_targets() -> None:
    assert shift_of([5, 6, 7, 8], [-100, 7, 8, -100]) == 1
    assert shift_of([5, 6, 7, 8], [-100, -100, 7, 8]) == 0
    assert shift_of([5, 6, 7, 8], [1, 0, 0, 1]) is None
    assert shift_of([5, 6, 7, 8], [6, 7, 8]) is None


@pytest.mark.parametrize(
    "row", [(torch.arange(4), torch.zeros(4, dtype=torch.int64)), (torch.ones(3), 1), torch.ones(3), [], (), 7, [True, False]]
)
def test_rows_of_anything_else_hold_no_ids(row: Any, tokenizer: Any) -> None:
    assert ids_of(row) is None
    with pytest.raises(CanaryError, match="training rows without columns must be a text, one sequence of token ids, or inputs"):
        row_ids(row, tokenizer)


def test_ids_are_read_as_they_are(tokenizer: Any) -> None:
    assert row_ids(torch.arange(3), tokenizer) == row_ids(np.arange(3), tokenizer) == row_ids([0, 1, 2], tokenizer) == [0, 1, 2]
    assert row_ids((torch.arange(3), torch.arange(1, 4)), tokenizer) == [0, 1, 2]
