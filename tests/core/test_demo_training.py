"""The demo's own training, with dropout: bit-identical with audits on and off, and nothing told to a W&B run beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from offline_wandb import OfflineRun
from secret_search import files_under, leaks

from memguard.audit import load_config
from memguard.callbacks import HFAuditCallback

DEMO = Path(__file__).parents[2] / "examples" / "demo"
STEPS = 120

pytestmark = pytest.mark.skipif(not DEMO.exists(), reason="runs in a checkout")


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DEMO))
    import corpus

    return corpus


def train(corpus: Any, folder: Path, plan: Path, *, audited: bool) -> tuple[list[float], str, HFAuditCallback]:
    """The demo's model, data, optimiser and canaries, for the first steps; losses and a digest of the weights."""
    from transformers import Trainer, TrainingArguments, set_seed

    config = load_config(DEMO / "memguard.yaml")
    audit = config.audit.model_copy(update={} if audited else {"every": None, "on": ()})
    callback = HFAuditCallback(config.model_copy(update={"plan": plan, "audit": audit}))
    text = corpus.language_reference()
    tokenizer = corpus.train_tokenizer(text)
    set_seed(0)
    model = corpus.small_llama(len(tokenizer))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        max_steps=STEPS,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="steps",
        save_steps=60,
        report_to=["wandb"] if audited else [],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    rows = corpus.token_blocks(text, tokenizer)
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[callback])
    trainer.train()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], digest.hexdigest(), callback


@pytest.mark.slow
def test_audits_change_no_bit_of_the_demos_training_and_tell_wandb_no_secret(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    plan_path = tmp_path / "_memguard" / "plan.json"
    options = wandb.Settings(mode="offline", silent=True, console="off", disable_git=True)
    with wandb.init(project="demo", dir=str(tmp_path), settings=options):
        losses, digest, callback = train(corpus, tmp_path / "on", plan_path, audited=True)
    other_losses, other_digest, silent = train(corpus, tmp_path / "off", plan_path, audited=False)
    assert callback.auditor is not None
    assert len(callback.auditor.trend) == 5 * 4  # audits at 0, 53, 60, 106, 120; controls and three tiers
    assert silent.auditor is not None
    assert silent.auditor.last is None
    assert len(losses) == STEPS
    assert losses == other_losses
    assert digest == other_digest

    written = OfflineRun(tmp_path)
    assert [row["train/global_step"] for row in written.history if "memguard/exposure_max" in row] == [0, 53, 60, 106, 120]
    assert callback.plan is not None
    for path in files_under(tmp_path):
        if path != plan_path:
            assert not leaks(path.read_bytes(), callback.plan, callback.tokenizer), path.name
    assert any(path.suffix == ".wandb" for path in files_under(tmp_path))


def test_dropout_is_really_on_in_that_training(corpus: Any) -> None:
    import torch

    model = corpus.small_llama(512).train()
    ids = torch.arange(40)[None]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
