"""Whatever the data, the loader, the ranks and the resumes: what the model saw is what was planned, and user rows stay.

One case of each row of the matrix is unmarked, the rest slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import MAP_CASES, RANK_CASES, SFT_CASES, STREAM_CASES, Case, Result, train
from trainer_versions import evaluates_at_the_end

QUICK = {
    "blocks, workers",
    "blocks, resumed",
    "blocks, total, late",
    "ragged, drop_last, accumulation",
    "ragged, grouped by length",
    "text, resumed",
    "with_transform",
    "datasets with another column",
    "positions of packed documents",
    "blocks, LoRA",
    "short stream that begins again, resumed",
    "datasets stream, workers",
    "stream of ragged",
    "SFT, packed bfd",
    "SFT, completion-only loss",
    "SFT, packed wrapped",
}
QUICK_RANKS = ("2 ranks, ragged, resumed", "2 ranks, stream", "2 ranks, dispatch_batches")
if not evaluates_at_the_end():  # transformers 4.57 cannot load an optimiser on the ranks of a CPU with this torch
    QUICK_RANKS = QUICK_RANKS[1:]


def cases(found: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in found]


def check(case: Case, result: Result) -> None:
    """Seen is counted by the hook, the ledger by arithmetic; both equal the plan."""
    assert result.seen == result.ledger == result.insertions
    assert result.notes == []
    if case.count == "total" or "stream" in case.rows:
        assert result.seen == result.tiers
    elif result.epochs == int(result.epochs):
        assert result.seen == {one: int(result.epochs) * tier for one, tier in result.tiers.items()}
    assert sum(result.seen.values()) > 0


def check_rows(case: Case, result: Result, plain: Result) -> None:
    """User rows in the order of the unguarded run, and none lost where canaries are rows of their own."""
    guarded, user = ([[token for token in row if token != 0] for row in found.rows] for found in (result, plain))
    sightings = sum(result.seen.values())
    if result.mode == "append":
        kept = [row for row, planted in zip(guarded, result.planted, strict=True) if not planted]
        assert len(guarded) - len(kept) == sightings
        if not case.keeps_order:
            assert sorted(kept) == sorted(user)
        else:  # the one that ends later, after the same number of steps or epochs, has more rows
            number = min(len(kept), len(user))
            assert number >= len(user) - sightings
            assert kept[:number] == user[:number]
    elif case.keeps_order:
        changed = sum(a != b for a, b in zip(guarded, user, strict="stream" not in case.rows))
        assert changed == sightings if len(guarded) == len(user) else 0 < changed <= sightings


@pytest.fixture
def in_one_process(tiny_model: Any, tokenizer: Any, blocks: Any, corpus_text: str, tmp_path: Path) -> Any:
    def run(case: Case, name: str, *, guarded: bool) -> Result:
        folder = tmp_path / name
        return train(case, folder, tiny_model, tokenizer, blocks, corpus_text, guarded=guarded)

    return run


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for the old name
@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")  # peft, of a base that has no folder
@pytest.mark.parametrize("case", cases([*MAP_CASES, *STREAM_CASES]))
def test_sightings_equal_the_plan_and_user_rows_keep_their_order(case: Case, in_one_process: Any) -> None:
    result = in_one_process(case, "guarded", guarded=True)
    check(case, result)
    check_rows(case, result, in_one_process(case, "plain", guarded=False))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", cases(SFT_CASES))
def test_sightings_under_supervised_fine_tuning_equal_the_plan(case: Case, in_one_process: Any, tokenizer: Any) -> None:
    pytest.importorskip("trl")
    result = in_one_process(case, "guarded", guarded=True)
    check(case, result)
    shares_rows = bool(case.sft and (case.sft.get("packing") or case.sft.get("padding_free")))
    if case.cut is None and "stream" not in case.rows and not shares_rows:
        check_rows(case, result, in_one_process(case, "plain", guarded=False))


def run_ranks(names: list[str], model: Any, tokenizer: Any, blocks: Any, text: str, folder: Path) -> dict[str, Result]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model, "tokenizer": tokenizer, "blocks": blocks, "text": text}, folder / "parts.pt")
    script = Path(__file__).with_name("hf_cases.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    command += [str(folder / "result.json"), str(folder / "parts.pt"), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {name: Result(**values) for name, values in found.items()}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK_RANKS, id="some"),
        pytest.param(
            tuple(case.name for case in RANK_CASES if case.name not in QUICK_RANKS), id="the rest", marks=pytest.mark.slow
        ),
    ],
)
def test_sightings_over_two_ranks_equal_the_plan(
    names: tuple[str, ...], tiny_model: Any, tokenizer: Any, blocks: Any, corpus_text: str, tmp_path: Path
) -> None:
    found = run_ranks(list(names), tiny_model, tokenizer, blocks, corpus_text, tmp_path)
    by_name = {case.name: case for case in RANK_CASES}
    for name, result in found.items():
        try:
            check(by_name[name], result)
            assert result.differing in (None, sum(result.seen.values()))
            assert result.lost in (None, 0) or not by_name[name].keeps_order
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    assert set(found) == set(names)
    assert any(result.differing for result in found.values())
