"""The watcher: each checkpoint audited once, when complete, whatever is killed, deleted, broken or written beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from watch_cases import Run, quick_config

from memguard.audit.completeness import Looks, files_of
from memguard.audit.report import AuditCadence, AuditReport, load_report
from memguard.audit.standing import place_report
from memguard.audit.start import save_start
from memguard.canaries.drawing import draw_plan
from memguard.canaries.ledger import LEDGER_NAME
from memguard.errors import InputError, ScoringError
from memguard.reporting.jsonl_tracker import JsonlTracker, read_history

IN_TRAINING = AuditCadence(steps_between=None, overhead_share=None, max_overhead=None, num_waited=0)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Any, tokenizer: Any) -> Run:
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run", draw_plan(quick_config().canaries, tokenizer), tiny_model, tokenizer)


def report_of(folder: Path, name: str = "report.json") -> AuditReport:
    return load_report(folder / "memguard_audit" / name)


def steps_of(run: Run) -> list[int]:
    return [row["global_step"] for row in read_history(run.folder / "memguard_audit" / "history.jsonl")]


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- once each


def test_each_checkpoint_is_audited_once_in_order_of_steps_and_a_restart_does_nothing_new(run: Run) -> None:
    folders = [run.save(step) for step in (10, 2)]
    result, audited = run.watch()
    assert audited == ["checkpoint-2", "checkpoint-10"]
    assert [(one.outcome, one.is_new, one.global_step) for one in result.checkpoints] == [
        ("valid", True, 2),
        ("valid", True, 10),
    ]
    reports = [report_of(folder) for folder in folders]
    assert all(report.is_full and report.ledger.found and report.subject.kind == "checkpoint" for report in reports)
    assert [{point.global_step for point in report.trend} for report in reports] == [{2}, set()]
    assert steps_of(run) == [2, 10]

    before = state_of(run.folder)
    again, audited = run.watch()
    assert audited == []
    assert [(one.outcome, one.is_new) for one in again.checkpoints] == [("valid", False), ("valid", False)]
    assert state_of(run.folder) == before


def test_checkpoints_that_appear_are_audited_until_told_to_stop(run: Run) -> None:
    run.save(1)
    told: list[str] = []
    result, audited = run.watch(
        lambda: run.save(2),
        lambda: None,
        lambda: run.save(3),
        once=False,
        say=lambda watched, _: told.append(watched.checkpoint),
    )
    assert audited == told == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert set(run.outcomes(result).values()) == {"valid"}


def test_what_is_asked_for_once_leaves_checkpoints_that_come_later(run: Run) -> None:
    run.save(1, ledger=False)
    result, audited = run.watch(lambda: run.save(2))
    assert audited == ["checkpoint-1"]
    assert list(run.outcomes(result)) == ["checkpoint-1"]


def test_a_copy_whose_ledger_came_before_its_weights_is_waited_for(run: Run) -> None:
    run.save(1)
    weights = run.folder / "checkpoint-1" / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # as a copy in the order of names, with the ledger as its newest file so far
    result, audited = run.watch(lambda: weights.write_bytes(content) and None, lambda: None, lambda: None, once=False)
    assert audited == ["checkpoint-1"]
    assert run.outcomes(result) == {"checkpoint-1": "valid"}


def test_an_earlier_checkpoint_that_is_audited_late_takes_its_place_in_the_history(run: Run) -> None:
    run.save(5)
    run.watch()
    live = report_of(run.folder / "checkpoint-5").model_copy(update={"created_at": "2026-01-01T00:00:00+00:00"})
    subject = live.subject.model_copy(update={"kind": "live", "digest": None, "global_step": 7})
    JsonlTracker(run.folder / "memguard_audit" / "history.jsonl").log(live.model_copy(update={"subject": subject}))
    run.save(3)
    run.save(9)
    run.watch()
    assert steps_of(run) == [3, 5, 7, 9]
    assert {point.global_step for point in report_of(run.folder / "checkpoint-9").trend} == {3, 5, 7}


def test_a_line_of_the_history_that_was_lost_is_written_again(run: Run) -> None:
    run.save(1)
    run.save(2)
    path = run.folder / "memguard_audit" / "history.jsonl"

    def lose() -> None:  # the trainer read the file before our line was in it, and wrote it after
        path.write_text(path.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")

    run.watch(lose, lambda: None, once=False)
    assert steps_of(run) == [1, 2]
    path.unlink()  # killed between the report and its line
    run.watch()
    assert steps_of(run) == [1, 2]


def test_other_weights_under_one_name_are_audited_again(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    first = report_of(folder).subject.digest
    run.save(1)
    _, audited = run.watch()
    assert audited == ["checkpoint-1"]
    assert report_of(folder).subject.digest != first
    assert steps_of(run) == [1]


def test_scores_before_training_that_the_callback_left_are_used(run: Run) -> None:
    folder, path = run.save(4), run.folder / "memguard_audit" / "start.json"
    auditor = run.auditor(start=path)
    runner, _ = auditor.prepare(run.tokenizer)
    runner.remember_start(run.model)
    assert runner.start is not None
    save_start(path, runner.start, run.plan)
    run.watch(auditor=run.auditor(start=path))
    assert report_of(folder).start_test is not None
    assert all(row.start_log_prob is not None for row in report_of(folder).canaries)


# -- complete


def test_a_checkpoint_whose_shard_is_missing_waits_for_it_and_never_fails(run: Run, tmp_path: Path) -> None:
    folder = run.save(1, max_shard_size="50KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shutil.move(shard, tmp_path / shard.name)

    def complete() -> None:
        assert not (folder / "memguard_audit").exists()
        shutil.move(tmp_path / shard.name, shard)

    result, audited = run.watch(lambda: None, lambda: None, complete, lambda: None, once=False)
    assert audited == ["checkpoint-1"]
    assert run.outcomes(result) == {"checkpoint-1": "valid"}
    assert not (folder / "memguard_audit" / "failed.json").exists()


def test_a_checkpoint_that_stays_without_a_shard_is_named_with_it_when_asked_for_once(run: Run) -> None:
    folder = run.save(1, max_shard_size="50KB")
    sorted(folder.glob("model-*.safetensors"))[0].unlink()
    result, audited = run.watch()
    assert audited == []
    (one,) = result.checkpoints
    assert one.outcome == "incomplete"
    assert one.reason is not None
    assert "model-00001-of-" in one.reason


UNFINISHED: dict[str, tuple[dict[str, str], str]] = {
    "an index cut short": ({"model.safetensors.index.json": '{"weight_map": {"a": "model-0'}, "index.json is not whole"),
    "an index of something else": ({"model.safetensors.index.json": "[]"}, "index.json is not whole"),
    "a shard before the index": ({"model-00001-of-00002.safetensors": "x"}, "the index of its shards is missing"),
    "no state of the trainer": ({"training_args.bin": "x"}, "trainer_state.json, which the trainer writes last, is missing"),
}


@pytest.mark.parametrize("unfinished", sorted(UNFINISHED))
def test_what_is_known_to_be_missing_is_named_however_long_nothing_changes(tmp_path: Path, unfinished: str) -> None:
    files, words = UNFINISHED[unfinished]
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    looks = Looks()
    for _ in range(3):
        assert words in str(looks.missing(folder, files_of(folder)))


def test_a_ledger_ends_a_save_only_where_nothing_was_written_after_it(tmp_path: Path) -> None:
    for name, seconds in (("model.safetensors", 100), (LEDGER_NAME, 200)):
        (tmp_path / name).write_text("x", encoding="utf-8")
        os.utime(tmp_path / name, (seconds, seconds))
    assert Looks().missing(tmp_path, files_of(tmp_path)) is None
    os.utime(tmp_path / "model.safetensors", (300, 300))  # a resumed run writes the folder anew
    looks = Looks()
    assert looks.missing(tmp_path, files_of(tmp_path)) == "it is still being written"
    assert looks.missing(tmp_path, files_of(tmp_path)) is None


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "training_args.bin", "rng_state.pth", "global_step3/mp_rank_00_model_states.pt"]
)
def test_the_state_of_training_is_no_weights_that_a_ledger_could_end(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for file, seconds in ((name, 100), ("trainer_state.json", 100), (LEDGER_NAME, 200)):
        (tmp_path / file).write_text("x", encoding="utf-8")
        os.utime(tmp_path / file, (seconds, seconds))
    assert Looks().missing(tmp_path, files_of(tmp_path)) == "it is still being written"


def test_a_file_put_in_place_with_its_old_time_is_a_change(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one", encoding="utf-8")
    before = files_of(tmp_path)
    old = (tmp_path / "a").stat()
    (tmp_path / "b").write_text("two", encoding="utf-8")
    os.utime(tmp_path / "b", ns=(old.st_atime_ns, old.st_mtime_ns))
    (tmp_path / "b").replace(tmp_path / "a")
    assert files_of(tmp_path) != before


def test_a_file_that_grows_between_looks_is_waited_for_where_no_ledger_ends_the_save(run: Run) -> None:
    folder = run.save(1, ledger=False)
    whole = (folder / "model.safetensors").read_bytes()

    def written(share: float) -> None:
        (folder / "model.safetensors").write_bytes(whole[: int(len(whole) * share)])

    written(0.3)
    result, audited = run.watch(lambda: written(0.6), lambda: written(1.0), lambda: None, once=False)
    assert audited == ["checkpoint-1"]
    assert run.outcomes(result) == {"checkpoint-1": "valid"}


def test_a_ledger_that_comes_after_the_audit_has_the_checkpoint_audited_with_it(run: Run) -> None:
    folder = run.save(1, ledger=False)

    def ledger_comes() -> None:
        run.save_ledger(folder, step=1)
        os.utime(folder / LEDGER_NAME, (100, 100))  # a copy that kept the time of what it was copied from

    _, audited = run.watch(lambda: None, ledger_comes, lambda: None, lambda: None, once=False)
    assert audited == ["checkpoint-1", "checkpoint-1"]
    assert report_of(folder).ledger.found


# -- bad checkpoints


def cut_short(run: Run, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without_weights(run: Run, folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(run: Run, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def of_another_tokenizer(run: Run, folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text.replace('"<|end|>"', '"<|stop|>"'), encoding="utf-8")


def of_another_plan(run: Run, folder: Path) -> None:
    run.save_ledger(folder, step=2, plan_digest="0" * 64)


BAD = {
    cut_short: "does not load as a causal language model",
    without_weights: "holds no weights",
    pickled: "holds no safetensors weights; pickled weights are not opened",
    of_another_tokenizer: "the plan was made for another tokenizer",
    of_another_plan: "the ledger of 'checkpoint-2' was written for another plan",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_bad_checkpoint_is_recorded_skipped_and_tried_again_only_when_its_files_change(
    run: Run, spoil: Callable[[Run, Path], None]
) -> None:
    run.save(1)
    folder = run.save(2)
    run.save(3)
    spoil(run, folder)
    told: list[tuple[str, str | None]] = []
    result, _ = run.watch(
        lambda: None,
        lambda: None,
        lambda: None,
        once=False,
        say=lambda watched, _: told.append((watched.checkpoint, watched.reason)),
    )
    assert run.outcomes(result) == {"checkpoint-1": "valid", "checkpoint-2": "invalid", "checkpoint-3": "valid"}
    (reason,) = [reason for name, reason in told if name == "checkpoint-2" and "not complete" not in str(reason)]
    assert reason is not None
    assert BAD[spoil] in reason
    report = report_of(folder)
    assert report.status == "invalid"
    assert report.canaries == []
    assert str(run.folder) not in report.model_dump_json()
    before = state_of(folder)
    again, audited = run.watch()
    assert audited == []
    assert run.outcomes(again)["checkpoint-2"] == "invalid"
    assert state_of(folder) == before

    for path in folder.glob("*.*"):
        path.unlink()
    run.save(2)
    healed, audited = run.watch()
    assert audited == ["checkpoint-2"]
    assert run.outcomes(healed)["checkpoint-2"] == "valid"
    assert report_of(folder).status == "valid"


def test_a_model_with_nan_weights_is_invalid_and_not_audited_again(run: Run) -> None:
    import torch

    with torch.no_grad():
        run.model.model.norm.weight.fill_(float("nan"))
    folder = run.save(1)
    result, audited = run.watch()
    assert run.outcomes(result) == {"checkpoint-1": "invalid"}
    assert audited == ["checkpoint-1"]
    assert report_of(folder).canaries
    assert run.watch()[1] == []


def test_records_that_cannot_be_read_end_the_watch_and_are_no_fault_of_the_checkpoint(run: Run, tmp_path: Path) -> None:
    folder = run.save(1)
    with pytest.raises(InputError, match=r"data '.*none.jsonl' does not exist"):
        run.watch(auditor=run.auditor(data=tmp_path / "none.jsonl"))
    assert not (folder / "memguard_audit").exists()


# -- reports that are there


def put(folder: Path, report: AuditReport, **changes: Any) -> AuditReport:
    """A report beside a checkpoint as the callback of a trainer writes it, with a decision on it."""
    made = report.model_copy(update={"created_at": "2026-01-01T00:00:00+00:00", "cadence": IN_TRAINING} | changes)
    made.save(folder / "memguard_audit" / "report.json")
    (folder / "memguard_audit" / "decision.json").write_text("{}", encoding="utf-8")
    return made


def test_a_full_report_of_the_callback_is_kept(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    kept = put(folder, report_of(folder))
    result, audited = run.watch()
    assert audited == []
    assert report_of(folder) == kept
    assert run.outcomes(result) == {"checkpoint-1": "valid"}
    assert (folder / "memguard_audit" / "decision.json").exists()


LESSER: dict[str, dict[str, Any]] = {
    "exposure alone": {"is_full": False},
    "of the live model": {"subject": {"kind": "live"}},
    "of other files": {"subject": {"digest": "0" * 64}},
    "of another base": {"subject": {"base_digest": "0" * 64}},
    "of another plan": {"plan": {"digest": "0" * 64}},
    "failed in training": {"status": "invalid", "invalid_reasons": ["the audit failed: no memory."], "canaries": []},
}


@pytest.mark.parametrize("lesser", sorted(LESSER))
def test_a_lesser_report_is_replaced_together_with_the_decision_on_it(run: Run, lesser: str) -> None:
    folder = run.save(1)
    run.watch()
    report = report_of(folder)
    changes = {
        key: getattr(report, key).model_copy(update=value) if isinstance(value, dict) else value
        for key, value in LESSER[lesser].items()
    }
    put(folder, report, **changes)
    _, audited = run.watch()
    assert audited == ["checkpoint-1"]
    new = report_of(folder)
    assert (new.is_full, new.status, new.cadence) == (True, "valid", None)
    assert (new.subject.digest, new.plan.digest) == (report.subject.digest, run.plan.digest)
    assert not (folder / "memguard_audit" / "decision.json").exists()


def test_a_report_that_was_edited_by_hand_counts_for_nothing(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    path = folder / "memguard_audit" / "report.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"status": "valid"', '"status": "invalid"'), encoding="utf-8")
    assert run.watch()[1] == ["checkpoint-1"]
    assert report_of(folder).status == "valid"


@pytest.mark.parametrize("is_told", [False, True])
def test_an_audit_that_memory_ran_out_in_is_tried_again_by_the_next_watcher_once(run: Run, is_told: bool) -> None:
    folder = run.save(1)

    def run_out(_: Path) -> None:
        try:
            raise MemoryError("what it says may hold 4929-1182-2837")
        except MemoryError:
            if is_told:
                raise ScoringError("scoring canary 'a' failed.") from None
            raise

    auditor = run.auditor()
    auditor.during = run_out
    result, audited = run.watch(lambda: None, lambda: None, auditor=auditor, once=False)
    assert (audited, run.outcomes(result)) == (["checkpoint-1"], {"checkpoint-1": "invalid"})
    (reason,) = report_of(folder).invalid_reasons
    what = "scoring canary 'a' failed." if is_told else "it failed (MemoryError)."
    again = "Memory ran out, so a watcher that is started anew tries it again."
    assert reason == f"the checkpoint could not be audited: {what} {again}"

    auditor = run.auditor()
    auditor.during = run_out
    _, audited = run.watch(lambda: None, lambda: None, auditor=auditor, once=False)
    assert audited == ["checkpoint-1"]
    result, audited = run.watch()
    assert (audited, run.outcomes(result)) == (["checkpoint-1"], {"checkpoint-1": "valid"})
    assert run.watch()[1] == []


def test_a_failure_never_takes_the_place_of_a_valid_report_of_the_same_files(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    shown = put(folder, report_of(folder), is_full=False)

    def fail(_: Path) -> None:
        raise RuntimeError("what a library says may hold 4929-1182-2837")

    auditor = run.auditor()
    auditor.during = fail
    result, _ = run.watch(auditor=auditor)
    assert run.outcomes(result) == {"checkpoint-1": "invalid"}
    assert report_of(folder) == shown
    (reason,) = report_of(folder, "failed.json").invalid_reasons
    assert reason == (
        "the checkpoint could not be audited: it failed (RuntimeError); delete this report to have it tried again."
    )
    (row,) = read_history(run.folder / "memguard_audit" / "history.jsonl")
    assert row["status"] == "valid"
    again, audited = run.watch()
    assert (audited, run.outcomes(again)) == ([], {"checkpoint-1": "invalid"})

    failed = folder / "memguard_audit" / "failed.json"
    text = failed.read_text(encoding="utf-8")
    failed.unlink()
    _, audited = run.watch()
    assert audited == ["checkpoint-1"]
    assert report_of(folder).is_full
    failed.write_text(text, encoding="utf-8")
    run.save(1)
    run.watch()
    assert not failed.exists()  # it was about other files


def test_a_report_that_the_callback_ends_later_does_not_cost_another_audit(run: Run) -> None:
    folder = run.save(1)
    full: list[AuditReport] = []

    def callback_ends() -> None:
        full.append(report_of(folder))
        put(folder, full[0], is_full=False)

    _, audited = run.watch(callback_ends, lambda: None, once=False)
    assert audited == ["checkpoint-1"]
    assert report_of(folder) == full[0]


def test_a_report_that_is_deleted_has_the_checkpoint_audited_again(run: Run) -> None:
    folder = run.save(1)
    _, audited = run.watch((folder / "memguard_audit" / "report.json").unlink, lambda: None, once=False)
    assert audited == ["checkpoint-1", "checkpoint-1"]


# -- folders that go and change


def test_a_checkpoint_deleted_in_the_middle_of_its_audit_is_not_made_anew(run: Run) -> None:
    folder = run.save(1)
    run.save(2)
    auditor = run.auditor()
    auditor.during = lambda path: shutil.rmtree(path) if path == folder else None
    result, _ = run.watch(auditor=auditor)
    assert run.outcomes(result) == {"checkpoint-1": "deleted", "checkpoint-2": "valid"}
    assert not folder.exists()
    assert steps_of(run) == [2]


def test_a_report_written_into_a_folder_that_was_just_deleted_leaves_no_folder_behind(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    report = report_of(folder)
    shutil.rmtree(folder)
    folder.mkdir()  # `rmtree` had listed the folder before, and could not remove it with our report in it
    assert place_report(folder, report, run.plan) is None
    assert not folder.exists()


def test_a_checkpoint_deleted_after_its_audit_stays_audited(run: Run) -> None:
    folder = run.save(1)
    result, _ = run.watch(lambda: shutil.rmtree(folder), lambda: None, once=False)
    assert run.outcomes(result) == {"checkpoint-1": "valid"}


def test_files_changed_in_the_middle_of_an_audit_have_it_made_again(run: Run) -> None:
    folder = run.save(1)
    auditor = run.auditor()

    def resave(path: Path) -> None:
        auditor.during = None
        run.save(1)

    auditor.during = resave
    result, audited = run.watch(lambda: None, lambda: None, auditor=auditor, once=False)
    assert audited == ["checkpoint-1", "checkpoint-1"]
    assert run.outcomes(result) == {"checkpoint-1": "valid"}
    assert run.watch()[1] == []
    assert len(read_history(run.folder / "memguard_audit" / "history.jsonl")) == 1
    assert folder.exists()


def test_a_report_outlives_the_weights_that_are_deleted_to_save_space(run: Run) -> None:
    folder = run.save(1)
    run.watch()
    report = report_of(folder)
    (folder / "model.safetensors").unlink()
    result, audited = run.watch()
    assert (audited, run.outcomes(result)) == ([], {"checkpoint-1": "deleted"})
    assert report_of(folder) == report


# -- several watchers, and use


def test_a_checkpoint_in_the_hands_of_another_watcher_is_left_to_it_and_waited_for(run: Run) -> None:
    folder = run.save(1)
    run.save(2)
    (run.folder / "memguard_audit" / "locks").mkdir(parents=True)
    lock = FileLock(run.folder / "memguard_audit" / "locks" / "checkpoint-1.lock")
    lock.acquire()
    auditor = run.auditor()

    def other_ends() -> None:
        assert auditor.loaded == ["checkpoint-2"]
        assert not (folder / "memguard_audit").exists()
        lock.release()

    result, audited = run.watch(other_ends, auditor=auditor)
    assert audited == ["checkpoint-2", "checkpoint-1"]
    assert set(run.outcomes(result).values()) == {"valid"}


def test_every_folder_with_weights_and_configuration_is_a_checkpoint_and_a_link_to_one_is_not(run: Run) -> None:
    run.save(1)
    run.save("epoch=0-step=7")
    (run.folder / "last").symlink_to(run.folder / "checkpoint-1", target_is_directory=True)
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "config.json").write_text("{}", encoding="utf-8")
    (run.folder / "checkpoint-9").mkdir()  # nothing is in it yet
    assert list(run.outcomes(run.watch()[0])) == ["checkpoint-1", "epoch=0-step=7"]


def test_the_step_is_the_trainers_where_no_ledger_tells_it(run: Run) -> None:
    folder = run.save("final", ledger=False)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 12, "epoch": 0.5}), encoding="utf-8")
    run.watch()
    subject = report_of(folder).subject
    assert (subject.global_step, subject.epoch) == (12, 0.5)


def test_a_folder_or_a_history_that_is_not_a_runs_is_an_error(run: Run) -> None:
    with pytest.raises(InputError, match=r"run '.*none' must be a folder that a trainer saves in"):
        Run(run.folder / "none", run.plan, run.model, run.tokenizer).watch()
    path = run.folder / "memguard_audit" / "history.jsonl"
    path.parent.mkdir()
    path.write_text('{"status": "valid"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"'history.jsonl' holds a line that is no audit of this version"):
        run.watch()
    path.write_text("[1]\n[2]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"must hold one JSON object a line"):
        run.watch()
    assert LEDGER_NAME not in {one.name for one in run.folder.iterdir()}
