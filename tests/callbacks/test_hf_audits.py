"""Which audits a real Hugging Face run makes, what they leave behind when they fail, and how a resumed run goes on."""

from __future__ import annotations

import copy
import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_versions import evaluates_at_the_end

from memguard.audit.report import load_report
from memguard.callbacks import HFAuditCallback
from memguard.errors import InputError, ScoringError
from memguard.reporting.jsonl_tracker import read_history

ALWAYS = {"every": {"steps": 2}, "on": ["start", "save", "end"], "on_error": "raise"}


def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "memguard_audit"


def steps_of(tmp_path: Path) -> list[int]:
    return [row["global_step"] for row in read_history(output(tmp_path) / "history.jsonl")]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def count_measurements(callback: HFAuditCallback, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Step and extent of every audit that really scored the model."""
    from memguard.audit.runner import AuditRunner

    made: list[tuple[int, bool]] = []
    run = AuditRunner.run

    def counted(self: AuditRunner, model: Any, **options: Any) -> Any:
        made.append((options["subject"].global_step, options["full"] is not None))
        return run(self, model, **options)

    monkeypatch.setattr(AuditRunner, "run", counted)
    return made


# -- when


def test_a_cadence_in_epochs_follows_the_epochs_of_the_run(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    callback = HFAuditCallback(settings(audit={"every": {"epochs": 0.5}}))
    trainer_of(blocks[:40], [callback]).train()  # two epochs of 5 steps
    assert steps_of(tmp_path) == [3, 5, 8, 10]


def test_a_cadence_in_epochs_of_a_stream_is_refused_before_step_one(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(blocks[:40]).to_iterable_dataset()
    config = settings(canaries={"count": "total"}, audit={"every": {"epochs": 0.5}})
    trainer = trainer_of(stream, [HFAuditCallback(config)], max_steps=6)
    with pytest.raises(InputError, match=r"audit\.every must be in steps for a stream"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "_memguard").exists()


def test_each_step_is_measured_once_whatever_moments_fall_on_it(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = {"every": {"steps": 2}, "on": ["start", "evaluate", "save", "end"], "full_on": ["end"]}
    callback = HFAuditCallback(settings(audit=audit))
    made = count_measurements(callback, monkeypatch)
    both = {"a": blocks[40:44], "b": blocks[44:48]}  # on_evaluate comes once for each
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = trainer_of(blocks[:40], [callback], trainer={"eval_dataset": both}, **options)
    trainer.train()
    # the last evaluation comes before the last save, which is full since it is the end
    at_the_end = [(10, False)] if evaluates_at_the_end() else []
    assert made == [(0, False), (2, False), (4, False), (6, False), (8, False), *at_the_end, (10, True)]
    rows = read_history(output(tmp_path) / "history.jsonl")
    assert len({(row["global_step"], row["kind"]) for row in rows}) == len(rows)
    trainer.evaluate()  # by hand, after training
    assert len(made) == 6 + len(at_the_end)


def test_a_step_leaves_its_audit_to_a_save_that_follows(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = HFAuditCallback(settings(audit={"every": {"steps": 1}, "on": ["save"], "full_on": ["save"]}))
    made = count_measurements(callback, monkeypatch)
    trainer_of(blocks[:40], [callback], num_train_epochs=1, save_strategy="steps", save_steps=2).train()
    assert made == [(1, False), (2, True), (3, False), (4, True), (5, True)]


def test_audits_of_the_cadence_wait_for_the_budget_and_named_moments_do_not(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    audit = {"every": {"steps": 2}, "on": ["start", "save", "end"], "max_overhead": 1e-9}
    callback = HFAuditCallback(settings(audit=audit))
    trainer_of(blocks[:40], [callback], save_strategy="steps", save_steps=5).train()
    rows = read_history(output(tmp_path) / "history.jsonl")
    assert [row["global_step"] for row in rows] == [0, 5, 10]
    last = load_report(output(tmp_path) / "report.json").cadence
    assert last is not None
    assert last.num_waited == 4  # steps 2, 4, 6 and 8
    assert last.overhead_share > 0.0
    assert last.steps_between > 10
    assert last.steps_between % 2 == 0
    assert rows[-1]["cadence"] == last.model_dump()
    assert {point["overhead_share"] for point in rows[-1]["points"]} == {last.overhead_share}
    assert "audits waited for it" in (output(tmp_path) / "report.html").read_text(encoding="utf-8")


def test_what_audits_and_the_callback_cost_is_said_in_two_lines(
    settings: Any, trainer_of: Any, blocks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    callback = HFAuditCallback(settings(audit={"every": {"steps": 2}, "on": ["start"]}))
    with caplog.at_level(logging.INFO, logger="memguard"):
        trainer_of(blocks[:40], [callback]).train()
    said = [record.message for record in caplog.records if record.name == "memguard.callbacks.auditor"]
    assert sum(text.startswith("an audit takes about") and "every 2 steps that is" in text for text in said) == 1
    assert said[-1].startswith("audits took ")
    assert "of the training time, the callback itself " in said[-1]
    assert callback.seconds_outside > 0.0
    assert callback.auditor.seconds > 0.0


# -- evaluation


def choosing(metric: str, **options: Any) -> dict[str, Any]:
    both = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    return both | {"metric_for_best_model": metric, "load_best_model_at_end": True, "greater_is_better": False} | options


def test_a_figure_of_the_audit_chooses_the_best_checkpoint(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["evaluate"]}))
    options = choosing("memguard_exposure_mean_tier_3", learning_rate=5e-3)
    trainer = trainer_of(blocks[:40], [callback], trainer={"eval_dataset": blocks[40:48]}, **options)
    trainer.train()
    rows = read_history(output(tmp_path) / "history.jsonl")
    means = {row["global_step"]: row["metrics"]["memguard/exposure_mean/tier_3"] for row in rows}
    assert list(means) == [2, 4, 6, 8, 10]
    assert trainer.state.best_metric == min(means.values())
    assert means[trainer.state.best_global_step] == min(means.values())
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10  # no log line of the trainer's is lost


def test_an_audit_that_fails_never_makes_a_checkpoint_the_best(
    settings: Any, trainer_of: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard.audit.runner import AuditRunner

    run = AuditRunner.run

    def fails_at_four(self: AuditRunner, model: Any, **options: Any) -> Any:
        if options["subject"].global_step == 4:
            raise ScoringError("the model could not be scored.")
        return run(self, model, **options)

    monkeypatch.setattr(AuditRunner, "run", fails_at_four)
    callback = HFAuditCallback(settings(audit={"on": ["evaluate"]}))
    trainer = trainer_of(
        blocks[:40], [callback], trainer={"eval_dataset": blocks[40:48]}, **choosing("eval_memguard_exposure_max")
    )
    trainer.train()
    assert trainer.state.global_step == 10
    assert trainer.state.best_global_step != 4
    assert math.isfinite(trainer.state.best_metric)


def test_a_best_figure_without_audits_at_evaluation_is_refused(settings: Any, trainer_of: Any, blocks: Any) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["end"]}))
    trainer = trainer_of(blocks[:40], [callback], trainer={"eval_dataset": blocks[40:48]}, **choosing("memguard_exposure_max"))
    with pytest.raises(InputError, match=r"'eval_memguard_exposure_max' needs audits at evaluation: add evaluate"):
        trainer.train()


def test_keeping_the_checkpoint_that_memorised_most_is_warned_of(
    settings: Any, trainer_of: Any, blocks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    callback = HFAuditCallback(settings(audit={"on": ["evaluate"]}))
    options = choosing("memguard_exposure_max", greater_is_better=True)
    trainer = trainer_of(blocks[:40], [callback], trainer={"eval_dataset": blocks[40:48]}, num_train_epochs=1, **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "greater_is_better: the checkpoint that memorised the most would be kept as the best." in caplog.text


# -- failures


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, *, allow: int = 0) -> None:
    """From now on a file of more than `allow` characters does not fit."""
    from memguard.audit import report

    write = report.write_text_atomic

    def full(path: Path, text: str, **options: Any) -> None:
        if len(text) > allow:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text, **options)

    monkeypatch.setattr(report, "write_text_atomic", full)


def test_a_full_disk_leaves_no_stale_report_and_the_same_weights(
    settings: Any,
    trainer_of: Any,
    blocks: Any,
    tiny_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = trainer_of(blocks[:40], [HFAuditCallback(settings())], model=copy.deepcopy(tiny_model))
    plain.train()
    callback = HFAuditCallback(settings(audit={"every": {"steps": 2}}))

    class Fills(HFAuditCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if state.global_step == 3:
                assert load_report(output(tmp_path) / "report.json").status == "valid"
                fill_the_disk(monkeypatch)
            return super().on_step_end(args, state, control, **kwargs)

    callback = Fills(callback.config)
    trainer = trainer_of(blocks[:40], [callback], model=copy.deepcopy(tiny_model))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert all(torch.equal(one, weights(plain)[name]) for name, one in weights(trainer).items())
    assert not (output(tmp_path) / "report.json").exists()
    assert not list(output(tmp_path).rglob(".*"))  # no half-written file
    assert "the audit at step 4 was not written everywhere: OSError: No space left on device." in caplog.text


def test_a_report_that_does_not_fit_is_recorded_as_invalid_if_that_much_does(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, allow=6000)
    callback = HFAuditCallback(settings(audit={"on": ["save"]}))
    trainer_of(blocks[:40], [callback], num_train_epochs=1, save_strategy="epoch").train()
    for folder in (output(tmp_path), tmp_path / "out" / "checkpoint-5" / "memguard_audit"):
        report = load_report(folder / "report.json")
        assert report.status == "invalid"
        assert report.invalid_reasons == ["the report of this audit could not be written: OSError: No space left on device."]
    assert [row["status"] for row in read_history(output(tmp_path) / "history.jsonl")] == ["invalid"]


@pytest.mark.parametrize("on_error", ["continue", "raise"])
def test_a_tracker_that_raises_costs_its_curve_and_not_the_report(
    on_error: str, settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Away:
        def log(self, report: Any) -> None:
            raise ConnectionError("token 4000 1234")

    class WithAway(HFAuditCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.auditor.files.trackers = [Away()]

    config = settings(audit={"every": {"steps": 3}, "on_error": on_error})
    trainer = trainer_of(blocks[:40], [WithAway(config)], num_train_epochs=1)
    if on_error == "raise":
        with pytest.raises(ConnectionError, match="token"):
            trainer.train()
        assert trainer.state.global_step == 3
    else:
        with caplog.at_level(logging.WARNING):
            trainer.train()
        assert "the audit at step 3 was not written everywhere: ConnectionError." in caplog.text
        assert "4000" not in caplog.text
    assert load_report(output(tmp_path) / "report.json").status == "valid"


def test_a_failed_audit_is_recorded_with_its_ledger_and_without_a_foreign_message(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard.audit.runner import AuditRunner

    def fails(self: AuditRunner, model: Any, **options: Any) -> Any:
        raise KeyError("4000 1234 5678 9017")

    monkeypatch.setattr(AuditRunner, "run", fails)
    callback = HFAuditCallback(settings(audit={"on": ["save", "end"]}))
    trainer_of(blocks[:40], [callback], num_train_epochs=1, save_strategy="epoch").train()
    report = load_report(tmp_path / "out" / "checkpoint-5" / "memguard_audit" / "report.json")
    assert report.invalid_reasons == ["the audit failed: KeyError."]
    assert report.subject.kind == "checkpoint"
    assert report.ledger.num_seen == 2 * 1 + 2 * 3 + 5  # tiers {1: 2, 3: 2} and a positive control five times
    assert "invalid" in (output(tmp_path) / "report.html").read_text(encoding="utf-8")
    assert steps_of(tmp_path) == [5]


# -- resume


def test_a_run_resumed_from_an_older_checkpoint_drops_what_it_does_not_go_on_from(
    settings: Any, trainer_of: Any, blocks: Any, tiny_model: Any, tmp_path: Path
) -> None:
    config = settings(audit=ALWAYS)
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(blocks[:40], [HFAuditCallback(config)], model=copy.deepcopy(tiny_model), **options).train()
    whole, report = read_history(output(tmp_path) / "history.jsonl"), load_report(output(tmp_path) / "report.json")
    assert steps_of(tmp_path) == [0, 2, 3, 4, 6, 8, 9, 10]

    resumed = HFAuditCallback(config)
    second = trainer_of(blocks[:40], [resumed], model=copy.deepcopy(tiny_model), **options)
    at_start: list[list[int]] = []
    resumed.on_step_begin = lambda *_, **__: at_start.append(steps_of(tmp_path))  # type: ignore[method-assign]
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert at_start[0] == [0, 2, 3, 4, 6]
    rows = read_history(output(tmp_path) / "history.jsonl")
    assert [(row["global_step"], row["metrics"]) for row in rows] == [(row["global_step"], row["metrics"]) for row in whole]
    aside = output(tmp_path) / "superseded"
    assert [row["global_step"] for row in read_history(aside / "history.jsonl")] == [8, 9, 10]
    assert {path.name for path in aside.iterdir()} >= {"step-00000008.json", "step-00000010.json", "report.json"}
    again = load_report(output(tmp_path) / "report.json")
    assert again.canaries == report.canaries  # calibrated exposure too: the scores before training were kept
    assert all(row.calibrated is not None for row in again.canaries)
    assert [(p.global_step, p.tier, p.mean_bits) for p in again.trend] == [
        (p.global_step, p.tier, p.mean_bits) for p in report.trend
    ]


def test_scores_before_training_that_are_gone_are_said_to_be(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    config = settings(audit=ALWAYS)
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    trainer_of(blocks[:40], [HFAuditCallback(config)], **options).train()
    (output(tmp_path) / "start.json").write_text("{}", encoding="utf-8")
    second = trainer_of(blocks[:40], [HFAuditCallback(config)], **options)
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    report = load_report(output(tmp_path) / "report.json")
    assert report.status == "valid"
    assert all(row.calibrated is None for row in report.canaries)
    assert [notice for notice in report.notices if "resumed without the scores before training" in notice]


def test_a_new_run_in_the_same_folder_begins_a_new_history(settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path) -> None:
    trainer_of(blocks[:40], [HFAuditCallback(settings(audit={"every": {"steps": 1}}))], num_train_epochs=1).train()
    trainer_of(blocks[:40], [HFAuditCallback(settings(audit={"every": {"steps": 2}}))], num_train_epochs=1).train()
    assert steps_of(tmp_path) == [2, 4]
    assert sorted(path.name for path in (output(tmp_path) / "reports").iterdir()) == [
        "step-00000002.json",
        "step-00000004.json",
    ]
    assert len(read_history(output(tmp_path) / "superseded" / "history.jsonl")) == 5


# -- several ranks, and a machine that goes away


def run_script(tmp_path: Path, parts: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    torch.save(parts, tmp_path / "parts.pt")
    script = str(Path(__file__).with_name("hf_audit_runs.py"))
    return subprocess.run(
        [sys.executable, *command, script, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )


def two_ranks(tmp_path: Path, parts: dict[str, Any]) -> list[dict[str, Any]]:
    """What both ranks of a run found."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    done = run_script(tmp_path, parts, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.fixture
def parts(tiny_model: Any, tokenizer: Any, blocks: Any, settings: Any) -> Any:
    def make(audit: dict[str, Any], **more: Any) -> dict[str, Any]:
        arguments = more.pop("arguments", {})
        held = {"model": tiny_model, "tokenizer": tokenizer, "rows": blocks[:40], "held_out": blocks[40:48]}
        return held | {"settings": settings(audit=audit), "arguments": arguments} | more

    return make


EVERY_MOMENT = {"every": {"steps": 2}, "on": ["start", "evaluate", "save", "end"], "full_on": ["end"], "on_error": "raise"}


def test_two_ranks_audit_together_and_agree_on_everything(parts: Any, tmp_path: Path) -> None:
    options = choosing("memguard_exposure_max", num_train_epochs=1)
    found = two_ranks(tmp_path / "run", parts(EVERY_MOMENT, arguments=options))
    for key in ("weights", "best_metric", "best_step", "last", "trend", "measured"):
        assert found[0][key] == found[1][key], key
    # at 3: evaluated, full at the last save; then the best weights were put back, under their own step
    assert found[0]["measured"] == [0, 2, *([3] if evaluates_at_the_end() else []), 3, found[0]["best_step"]]
    rows = read_history(tmp_path / "run" / "out" / "memguard_audit" / "history.jsonl")
    assert [row["status"] for row in rows] == ["valid"] * len(rows)
    assert found[0]["best_metric"] in [row["metrics"]["memguard/exposure_max"] for row in rows]
    beside = load_report(tmp_path / "run" / "out" / "checkpoint-2" / "memguard_audit" / "report.json")
    assert beside.subject.kind == "checkpoint"


@pytest.mark.slow
def test_two_ranks_index_what_both_were_trained_on(parts: Any, tmp_path: Path) -> None:
    from memguard.tracing.corpus_index import CorpusIndex

    index = {"index": str(tmp_path / "trained.index"), "index_training": True}
    propensity = index | {"num_prompts": 2, "max_new_tokens": 4, "prefix_tokens": 8}
    held = parts({"on": ["end"], "full_on": ["end"], "on_error": "raise", "propensity": propensity})
    found = two_ranks(tmp_path / "run", held)
    assert found[0]["weights"] == found[1]["weights"]
    report = load_report(tmp_path / "run" / "out" / "memguard_audit" / "report.json")
    assert report.propensity is not None
    planted = [row for row in report.canaries if row.role != "control"]
    assert all(row.tier <= row.num_copies <= row.num_seen for row in planted)
    opened = CorpusIndex.open(tmp_path / "trained.index")
    rows = [row["input_ids"] for row in held["rows"]]
    whole = opened.count([row[: len(row) // 4] for row in rows]) + opened.count([row[-(len(row) // 4) :] for row in rows])
    assert (whole > 0).all()  # every row, up to where a canary may be spliced in


@pytest.mark.slow
def test_two_ranks_train_alike_with_audits_and_without(parts: Any, tmp_path: Path) -> None:
    silent = {"every": None, "on": []}
    with_audits, without = (two_ranks(tmp_path / name, parts(audit)) for name, audit in (("a", EVERY_MOMENT), ("b", silent)))
    assert with_audits[0]["weights"] == without[0]["weights"]
    assert with_audits[0]["losses"] == without[0]["losses"]
    assert without[0]["last"] is None


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_an_invalid_report_on_both_and_no_hang(failing: int, parts: Any, tmp_path: Path) -> None:
    audit = EVERY_MOMENT | {"on": ["end"], "on_error": "continue"}
    found = two_ranks(tmp_path / "run", parts(audit, fails_on=failing))
    assert found[0]["steps"] == found[1]["steps"] == found[0]["max_steps"]
    assert found[0]["weights"] == found[1]["weights"]
    report = load_report(tmp_path / "run" / "out" / "memguard_audit" / "report.json")
    assert report.status == "invalid"
    assert "RuntimeError" in report.invalid_reasons[0]
    assert found[0]["last"] == found[1]["last"]


@pytest.mark.slow
def test_a_failure_on_one_rank_ends_both_where_the_settings_say_so(parts: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    held = parts(EVERY_MOMENT | {"on": ["end"]}, fails_on=1)
    done = run_script(run, held, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert done.returncode != 0
    assert "RuntimeError" in done.stderr
    assert load_report(run / "out" / "memguard_audit" / "report.json").status == "invalid"


@pytest.mark.slow
def test_a_blocked_rule_stops_both_ranks_at_one_step(parts: Any, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    evidence = {"positive_control": "none", "min_canaries": 1, "fresh_secrets": False}
    rules = [{"name": "none", "field": "exposure.bits", "each": "canary", "max": 0}]
    policy.write_text(json.dumps({"version": 1, "evidence": evidence, "rules": rules}), encoding="utf-8")
    held = parts({"every": {"steps": 2}, "on": ["end"]})
    held["settings"]["gate"] = {"policy": str(policy), "stop_when": "blocked"}
    found = two_ranks(tmp_path / "run", held)
    assert [one["steps"] for one in found] == [2, 2]
    assert found[0]["weights"] == found[1]["weights"]


@pytest.mark.slow
def test_a_run_killed_within_an_audit_goes_on_to_the_same_weights_and_trend(parts: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    audit = ALWAYS | {"on": ["start", "save", "end"]}
    assert run_script(whole, parts(audit, arguments=options)).returncode == 0
    shutil.rmtree(tmp_path / "_memguard")  # the plan is drawn from a seed: the same once more
    done = run_script(killed, parts(audit, arguments=options, dies_at=8))
    assert done.returncode == -signal.SIGKILL
    assert [row["global_step"] for row in read_history(killed / "out" / "memguard_audit" / "history.jsonl")] == [0, 2, 3, 4, 6]
    assert load_report(killed / "out" / "memguard_audit" / "report.json").subject.global_step == 6
    done = run_script(killed, parts(audit, arguments=options, resume="checkpoint-3"))
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = (json.loads((folder / "rank-0.json").read_text(encoding="utf-8")) for folder in (whole, killed))
    assert one["weights"] == other["weights"]
    assert one["trend"] == other["trend"]
    assert one["last"] == other["last"]
    assert os.listdir(whole / "out" / "memguard_audit" / "reports") != []
    names = [sorted(path.name for path in (one / "out" / "memguard_audit" / "reports").iterdir()) for one in (whole, killed)]
    assert names[0] == names[1]


def test_the_autocast_that_a_launcher_set_is_recorded(
    settings: Any, trainer_of: Any, blocks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    callback = HFAuditCallback(settings(audit={"on": ["end"]}))
    trainer = trainer_of(blocks[:40], [callback], max_steps=1)
    trainer.train()
    assert not trainer.args.bf16
    assert callback.auditor.last.procedure.autocast == "bf16"
