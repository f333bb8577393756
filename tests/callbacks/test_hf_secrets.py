"""No secret in anything a run writes, says or raises, and the plan is never uploaded."""

from __future__ import annotations

import base64
import json
import logging
import struct
import traceback
from pathlib import Path
from typing import Any

import pytest
from secret_search import files_under, leaks

from memguard.audit.items import encode_planted
from memguard.callbacks import HFAuditCallback
from memguard.canaries.plan import load_plan
from memguard.errors import InputError

FORMATS = [
    {"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}},
    {"name": "phrase", "template": "Pass phrase of {name}: {secret}.", "secret": {"kind": "words", "count": 4}},
]
AUDIT = {"every": {"steps": 4}, "on": ["start", "save", "end"], "full_on": ["end"]}


@pytest.fixture
def guarded_run(
    settings: Any,
    trainer_of: Any,
    blocks: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> tuple[Any, HFAuditCallback, str]:
    """A run with a W&B run beside it, and everything it said."""
    import wandb

    logging.getLogger("memguard").setLevel(logging.DEBUG)
    config = settings(
        canaries={"formats": FORMATS, "tiers": {1: 2, 3: 2}, "controls": 8}, audit=AUDIT, tracking={"wandb": "auto"}
    )
    options = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_code=True)
    run = wandb.init(mode="offline", dir=str(tmp_path / "tracked"), project="secrets", settings=options)
    callback = HFAuditCallback(config)
    trainer = trainer_of(blocks[:60], [callback], report_to=["wandb"], save_strategy="epoch", num_train_epochs=2)
    trainer.train()
    run.finish()
    wandb.teardown()
    said = capfd.readouterr()
    return trainer, callback, said.out + said.err + caplog.text


def test_the_search_finds_a_secret_put_there_on_purpose(settings: Any, trainer_of: Any, blocks: Any, tokenizer: Any) -> None:
    callback = HFAuditCallback(settings(canaries={"formats": FORMATS}))
    trainer_of(blocks[:60], [callback], num_train_epochs=1).train()
    for one in callback.plan.canaries[::5]:
        everything = callback.plan.model_copy(update={"canaries": (one.model_copy(update={"role": "canary"}),)})
        item = encode_planted(everything, tokenizer)[one.id]
        ids = item.ids[item.start : item.end]
        hidden = [
            f"see {one.secret}!".encode(),
            f"see {'-'.join(one.secret)}!".encode(),
            b"see " + base64.b64encode(one.secret.encode()),
            str(list(ids)).encode(),
            b"".join(struct.pack("<q", token) for token in ids),
        ]
        for content in hidden:
            assert one.id in leaks(content, callback.plan, tokenizer)


def test_no_file_log_or_tracker_of_a_run_holds_a_secret(guarded_run: Any, tmp_path: Path, tokenizer: Any) -> None:
    trainer, callback, said = guarded_run
    trainer.save_model(str(tmp_path / "out" / "final"))
    plan_path = tmp_path / "_memguard" / "plan.json"
    written = [path for path in files_under(tmp_path) if path != plan_path]
    names = {path.name for path in written}
    assert {
        "report.json",
        "report.html",
        "history.jsonl",
        "memguard_ledger.json",
        "trainer_state.json",
        "tokenizer.json",
    } <= names
    assert any(path.suffix == ".wandb" for path in written)
    assert sum(path.stat().st_size for path in written if path.suffix == ".wandb") > 1000
    for path in written:
        assert not leaks(path.read_bytes(), callback.plan, tokenizer), path.name
        assert not any(one.secret in str(path) for one in callback.plan.canaries)
    assert not leaks(said.encode(), callback.plan, tokenizer)
    assert leaks(plan_path.read_bytes(), callback.plan, tokenizer), "the plan itself must be seen by the search"


def test_the_trainers_own_ignore_list_keeps_the_plan_from_an_upload(
    settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.trainer
    from huggingface_hub.utils import filter_repo_objects

    plan = tmp_path / "out" / "_memguard" / "plan.json"
    trainer = trainer_of(blocks[:60], [HFAuditCallback(settings(plan=str(plan)))], save_strategy="epoch", num_train_epochs=1)
    trainer.train()
    uploads: list[dict[str, Any]] = []

    class Hub:
        def upload_folder(self, **options: Any) -> None:
            uploads.append(options)

    if not hasattr(transformers.trainer, "hf_api"):
        pytest.skip("this transformers pushes in another way")
    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    monkeypatch.setattr(trainer, "create_model_card", lambda **options: None)
    monkeypatch.setattr(trainer, "init_hf_repo", lambda **options: None)
    trainer.hub_model_id, trainer.push_in_progress = "someone/something", None
    trainer.push_to_hub()
    (upload,) = uploads
    everything = [str(path.relative_to(upload["folder_path"])) for path in files_under(Path(upload["folder_path"]))]
    uploaded = list(filter_repo_objects(everything, ignore_patterns=upload["ignore_patterns"]))
    assert "_memguard/plan.json" in everything
    assert "model.safetensors" in uploaded
    assert not [name for name in uploaded if "plan" in name or name.startswith("_")]


STAGES = {
    "encoding": ("memguard.canaries.encoding.SecretEncoder", "_span"),
    "rows": ("memguard.canaries.injection", "spliced_row"),
    "schedule": ("memguard.canaries.schedule.Schedule", "_draw"),
    "groups": ("memguard.audit.items", "_build_group"),
    "scoring": ("memguard.scoring.forward.CausalModel", "statistics"),
    "ranks": ("memguard.audit.ranks.RankSearch", "search"),
    "rows of the report": ("memguard.audit.runner", "canary_rows"),
    "writing": ("memguard.audit.report.AuditReport", "save"),
}
AUDIT_STAGES = ("groups", "scoring", "rows of the report", "writing")


@pytest.mark.parametrize("stage", sorted(STAGES))
@pytest.mark.parametrize("on_error", ["continue", "raise"])
def test_an_exception_at_any_stage_tells_no_secret(
    stage: str,
    on_error: str,
    settings: Any,
    trainer_of: Any,
    blocks: Any,
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = settings(canaries={"formats": FORMATS}, audit=AUDIT | {"on_error": on_error})
    first = HFAuditCallback(config)
    trainer_of(blocks[:60], [first], num_train_epochs=1).train()
    plan = load_plan(tmp_path / "_memguard" / "plan.json")
    target, name = STAGES[stage]

    # A library that fails inside an audit may quote what it was given; what the audit then says may not.
    quoted = plan.canaries[0].secret if stage in AUDIT_STAGES and on_error == "continue" else "nothing"

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"the stage failed with {quoted}")

    monkeypatch.setattr(f"{target}.{name}", fail)
    caplog.clear()
    try:
        trainer_of(blocks[:60], [HFAuditCallback(config)], num_train_epochs=1, save_strategy="epoch").train()
        said = caplog.text
    except Exception as error:
        said = caplog.text + "".join(traceback.format_exception(error))
    monkeypatch.undo()
    assert "failed" in said
    assert not leaks(said.encode(), plan, tokenizer)


@pytest.mark.parametrize("damage", ["secret", "tier", "role", "extra", "cut"])
def test_a_damaged_plan_is_refused_without_quoting_it(
    damage: str, settings: Any, trainer_of: Any, blocks: Any, tmp_path: Path
) -> None:
    callback = HFAuditCallback(settings())
    trainer_of(blocks[:20], [callback], num_train_epochs=1).train()
    path = tmp_path / "_memguard" / "plan.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    one = data["canaries"][0]
    if damage == "extra":
        one[one["secret"]] = 1
    elif damage == "secret":
        one["secret"] = [one["secret"]]
    elif damage != "cut":
        one[damage] = f"at {one['secret']}"
    text = json.dumps(data)
    path.write_text(text[: len(text) // 2] if damage == "cut" else text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_plan(path)
    said = "".join(traceback.format_exception(caught.value))
    secrets = [item.secret for item in callback.plan.canaries]
    assert not any(secret in said for secret in secrets)
    assert not any(secret in repr(callback.plan) or secret in str(callback.plan.canaries) for secret in secrets)
