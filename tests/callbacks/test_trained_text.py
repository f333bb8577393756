"""What a run trains on is what is indexed: rows once an epoch, resumed and packed runs, and training left as it was."""

from __future__ import annotations

import itertools
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_cases import QUIET, loader_of
from lightning_cases import run as run_lightning
from lightning_cases import stop_at as stop_lightning_at

from memguard.audit.report import load_report
from memguard.callbacks import HFAuditCallback
from memguard.callbacks.trained_text import TrainedText
from memguard.errors import InputError
from memguard.scoring.team import Team
from memguard.tracing.corpus_index import CorpusIndex

PROPENSITY = {"num_prompts": 3, "max_new_tokens": 4, "prefix_tokens": 8}


def asked(folder: Path, **audit: Any) -> dict[str, Any]:
    """The audit part of settings: one full audit at the end, of an index that the run writes."""
    propensity = PROPENSITY | {"index": str(folder / "trained.index"), "index_training": True}
    part: dict[str, Any] = {"on": ["end"], "full_on": ["end"], "every": None, "on_error": "raise", "propensity": propensity}
    return part | {"extraction": None, "membership": None, "prior_aware": None} | audit


def indexed(folder: Path) -> Counter[tuple[int, ...]]:
    """Documents of the index, as ids, each as often as it stands there."""
    index = CorpusIndex.open(folder / "trained.index", verify=True)
    bounds = [index.bounds(number) for number in range(index.num_documents)]
    return Counter(tuple(index.ids(shard, start, end).tolist()) for shard, start, end in bounds)


class Seen:
    """The rows that a model trains on in two epochs of equal length, padding left out."""

    def __init__(self, model: Any) -> None:
        self.rows: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
            keep = torch.ones_like(ids) if mask is None else mask
            self.rows += [tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, keep, strict=True)]

    def documents(self, tokenizer: Any) -> Counter[tuple[int, ...]]:
        """Rows of the first epoch as often as they came, and those that are new in the second; cut at BOS, EOS and padding."""
        half = len(self.rows) // 2
        first, second = Counter(self.rows[:half]), Counter(self.rows[half:])
        kept = first + Counter({row: number for row, number in second.items() if row not in first})
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        found: Counter[tuple[int, ...]] = Counter()
        for row, number in kept.items():
            for is_end, ids in itertools.groupby(row, lambda one: one in ends):
                if not is_end:
                    found[tuple(ids)] += number
        return found


def copies_of(report: Any, plan: Any, tokenizer: Any, rows: Counter[tuple[int, ...]]) -> dict[str, int]:
    """Places of each canary in rows, by their text."""
    text = {row: tokenizer.decode(row) for row in rows}
    secrets = {one.id: one.secret for one in plan.canaries}
    return {row.id: sum(number * text[ids].count(secrets[row.id]) for ids, number in rows.items()) for row in report.canaries}


def test_the_rows_of_two_epochs_are_indexed_once_and_canaries_are_counted_in_them(
    settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    callback, seen = HFAuditCallback(settings(audit=asked(tmp_path))), Seen(tiny_model)
    trainer_of([*blocks[:39], blocks[0]], [callback]).train()  # one row stands twice
    assert len(seen.rows) == 80
    assert indexed(tmp_path) == seen.documents(tokenizer)
    report = load_report(tmp_path / "out" / "memguard_audit" / "report.json")
    assert report.propensity is not None
    counted = {row.id: row.num_copies for row in report.canaries}
    assert counted == copies_of(report, callback.plan, tokenizer, seen.documents(tokenizer))
    assert sum(counted.values()) > 0
    assert {counted[row.id] for row in report.canaries if row.role == "control"} == {0}
    assert not [one for one in report.notices if "index" in one]
    for name in ("trained.index", "trained.index.rows"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_training_is_bit_identical_with_and_without_the_index(
    settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path
) -> None:
    import copy

    from transformers import set_seed

    losses, weights = [], []
    for number, audit in enumerate((asked(tmp_path), {"on": [], "full_on": [], "every": None})):
        set_seed(0)
        model = copy.deepcopy(tiny_model)
        trainer = trainer_of(
            blocks[:40], [HFAuditCallback(settings(audit=audit))], model=model, output_dir=str(tmp_path / str(number))
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append([one.clone() for one in model.state_dict().values()])
        assert not model._forward_pre_hooks
    assert losses[0] == losses[1]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_resumed_run_indexes_what_an_unbroken_one_does(
    settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path
) -> None:
    import copy

    found = []
    for name, stops in (("whole", [None]), ("broken", [4, None]), ("later", [8, None])):
        folder = tmp_path / name
        config = settings(audit=asked(folder)) | {"plan": str(folder / "plan.json")}
        for number, stop in enumerate(stops):
            callbacks: list[Any] = [HFAuditCallback(config)]
            options = {"output_dir": str(folder / "out"), "save_strategy": "steps", "save_steps": 3, "save_total_limit": 3}
            rows = [*blocks[:20], *blocks[:20]]  # what stands twice in an epoch does so on either side of the break
            trainer = trainer_of(rows, callbacks, model=copy.deepcopy(tiny_model), **options)
            if stop is not None:
                trainer.add_callback(stop_at(stop))
            trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{stops[0] // 3 * 3}") if number else None)
        found.append(indexed(folder))
    assert sum(found[0].values()) >= 40
    assert found[0] == found[1] == found[2]


def stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


@pytest.mark.filterwarnings(*QUIET)
def test_a_lightning_run_indexes_its_rows_too(
    settings: Any, blocks: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    seen = Seen(tiny_model)
    loader = loader_of(blocks, "variable")
    callback, _, _ = run_lightning(tmp_path, tiny_model, loader, settings(audit=asked(tmp_path)), tokenizer)
    report = callback.auditor.last
    assert report.propensity is not None
    assert indexed(tmp_path) == seen.documents(tokenizer)
    counted = {row.id: row.num_copies for row in report.canaries}
    assert counted == copies_of(report, callback.plan, tokenizer, seen.documents(tokenizer))
    assert sum(counted.values()) > 0


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("stop", [5, 11])  # of 8 steps an epoch
def test_a_resumed_lightning_run_indexes_what_both_its_parts_were_trained_on(
    settings: Any, blocks: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path, stop: int
) -> None:
    config, checkpoint, seen = settings(audit=asked(tmp_path)), tmp_path / "stopped.ckpt", Seen(tiny_model)
    given = (tmp_path, tiny_model, loader_of([*blocks[:30], *blocks[:31]], "fixed"), config, tokenizer)
    run_lightning(*given, extra=[stop_lightning_at(stop, checkpoint)])
    run_lightning(*given, ckpt=checkpoint)
    assert len(seen.rows) == 2 * 61
    assert indexed(tmp_path) == seen.documents(tokenizer)


class Reader(torch.nn.Module):
    """Takes what a model takes."""

    def forward(self, *_: Any, **__: Any) -> None:
        """Give nothing."""


class TwoRanks:
    """Ranks one after another in this process, for what they write in common."""

    def __init__(self, folder: Path, tokenizer: Any, *, global_step: int = 0) -> None:
        teams = [Team(rank, 2, lambda said: [said, said]) for rank in (1, 0)]
        one, first = (TrainedText(folder / "i", tokenizer, team=team, global_step=global_step) for team in teams)
        self.model = torch.nn.Identity()
        self.ranks = [first, one]

    def step(self, step: int, epoch: int, *rows: list[list[int]]) -> None:
        for rank, batch in zip(self.ranks, rows, strict=True):
            rank.begin_epoch(epoch)
            rank._take(self.model, (torch.tensor(batch),), {})
            rank.mark(step)

    def documents(self, folder: Path) -> Counter[tuple[int, ...]]:
        assert self.ranks[0].try_build() is None
        index = CorpusIndex.open(folder / "i")
        return Counter(tuple(index.ids(*index.bounds(number)).tolist()) for number in range(index.num_documents))


def test_a_row_that_another_rank_had_in_an_earlier_epoch_is_kept_once(tokenizer: Any, tmp_path: Path) -> None:
    both = TwoRanks(tmp_path, tokenizer)
    both.step(1, 0, [[11, 12, 13], [21, 22, 23]], [[31, 32, 33], [11, 12, 13]])
    assert both.documents(tmp_path) == Counter({(11, 12, 13): 2, (21, 22, 23): 1, (31, 32, 33): 1})
    both.step(2, 1, [[31, 32, 33], [41, 42, 43]], [[21, 22, 23], [11, 12, 13]])
    assert both.documents(tmp_path) == Counter({(11, 12, 13): 2, (21, 22, 23): 1, (31, 32, 33): 1, (41, 42, 43): 1})
    again = TwoRanks(tmp_path, tokenizer, global_step=1)  # goes on from step 1
    assert again.documents(tmp_path) == Counter({(11, 12, 13): 2, (21, 22, 23): 1, (31, 32, 33): 1})
    alone = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=0)
    alone._take(torch.nn.Identity(), (torch.tensor([[51, 52]]),), {})
    assert alone.try_build() == "the corpus holds no token: nothing would be found in its index"
    alone.mark(1)
    assert alone.try_build() is None
    assert CorpusIndex.open(tmp_path / "i").num_documents == 1  # nothing is left of the second rank


def test_padding_and_packed_rows_are_told_apart_and_only_training_counts(tokenizer: Any, tmp_path: Path) -> None:
    trained = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=0)
    model = Reader()
    trained.watch(model)
    given = torch.tensor([[11, 12, 13, 0]])
    model(input_ids=given, attention_mask=torch.tensor([[1, 1, 1, 0]]))
    model(torch.tensor([[21, 22, 31, 32]]), position_ids=torch.tensor([[0, 1, 0, 1]]))
    with torch.no_grad():
        model(torch.tensor([[41, 42]]))
    model.eval()
    model(torch.tensor([[51, 52]]))
    trained.mark(1)
    trained.unwatch()
    assert trained.try_build() is None
    index = CorpusIndex.open(tmp_path / "i")
    found = [index.ids(*index.bounds(number)).tolist() for number in range(index.num_documents)]
    assert found == [[11, 12, 13], [21, 22], [31, 32]]


def test_a_full_disk_costs_the_index_and_not_the_training(
    settings: Any,
    trainer_of: Any,
    blocks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrainedText, "_tokens_of", fail)
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(audit=asked(tmp_path)))], num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == 5
    assert "OSError: No space left on device; training goes on" in caplog.text
    report = load_report(tmp_path / "out" / "memguard_audit" / "report.json")
    assert (report.status, report.propensity) == ("valid", None)
    assert "what was trained is not indexed: rows could not be kept: OSError: No space left on device." in report.notices


@pytest.mark.parametrize("ids", [[[1.5, 2.5]], [[-100, 7]], [[[1, 2]]]])
def test_rows_that_cannot_be_read_cost_the_index_and_not_the_training(
    tokenizer: Any, tmp_path: Path, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trained = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=0)
    model = Reader()
    trained.watch(model)
    model(torch.tensor([[11, 12]]))
    trained.mark(1)
    assert trained.try_build() is None
    model(torch.tensor(ids))
    trained.mark(2)
    if trained.lost is None:  # nothing that is a row
        assert CorpusIndex.open(tmp_path / "i").num_documents == 1
        return
    assert "training goes on" in caplog.text
    assert "rows could not be kept" in str(trained.try_build())
    assert not (tmp_path / "i").exists()  # one that is not whole is no evidence
    later = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=2)
    assert later.try_build() == "what was trained before step 2 was not kept"
    assert TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=0).lost is None


def test_a_run_that_goes_on_with_more_ranks_keeps_what_fewer_had(tokenizer: Any, tmp_path: Path) -> None:
    alone = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=0)
    alone._take(torch.nn.Identity(), (torch.tensor([[51, 52]]),), {})
    alone.mark(1)
    both = TwoRanks(tmp_path, tokenizer, global_step=1)
    both.step(2, 0, [[11, 12]], [[21, 22]])
    assert both.documents(tmp_path) == Counter({(51, 52): 1, (11, 12): 1, (21, 22): 1})


def test_an_index_that_would_be_uploaded_or_is_there_already_is_refused(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    config = settings(audit=asked(tmp_path / "out"))
    with pytest.raises(InputError, match="the index of what is trained must not lie in the trainer's output_dir"):
        trainer_of(blocks[:40], [HFAuditCallback(config)]).train()
    (tmp_path / "trained.index").mkdir()
    trainer = trainer_of(blocks[:40], [HFAuditCallback(settings(audit=asked(tmp_path)))])
    with pytest.raises(InputError, match="was there before any run: index_training needs a new folder"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(InputError, match="index_training needs index, the folder to write to, got none"):
        HFAuditCallback(settings(audit={"propensity": {"index_training": True}}))


def test_a_resumed_run_without_the_earlier_rows_says_that_it_has_no_index(tokenizer: Any, tmp_path: Path) -> None:
    trained = TrainedText(tmp_path / "i", tokenizer, team=Team.alone(), global_step=7)
    assert trained.try_build() == "what was trained before step 7 was not kept"
