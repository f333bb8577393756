"""Under Lightning, training with audits on is training with audits off, bit for bit, wherever the audits stand."""

from __future__ import annotations

import copy
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_cases import QUIET, Stream, loader_of, make_trainer, module_class, rows_of, to_tensors
from torch.utils.data import DataLoader

from memguard.callbacks import LightningAuditCallback

pytestmark = [pytest.mark.filterwarnings(one) for one in QUIET]

EVERYWHERE = {
    "every": {"steps": 3},
    "on": ["start", "save", "evaluate", "end"],
    "full_on": ["end"],
    "batch_size": 5,
    "on_error": "raise",
}


def sha(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


class Flags(pl.Callback):
    """Which parts are in training mode at each batch: nothing sets them again in Lightning."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, ...]] = []
        self.gradients: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(tuple(module.training for module in pl_module.modules()))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.gradients.append(sum(float(part.grad.double().sum()) for part in pl_module.parameters() if part.grad is not None))


def trained(
    audit: dict[str, Any], blocks: Any, model: Any, tokenizer: Any, settings: Any, folder: Path, case: dict[str, Any]
) -> Any:
    """All that a run leaves: losses, gradients, weights, optimiser, flags, rows, random state."""
    pl.seed_everything(5, verbose=False)
    callback = LightningAuditCallback(settings(audit=audit), tokenizer=tokenizer)
    flags, rows = Flags(), []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            rows.append(kwargs["input_ids"].tolist())

    model.register_forward_pre_hook(see, with_kwargs=True)
    options = {"max_steps": 9} if case.get("stream") else {"max_epochs": 2}
    saver = pl.callbacks.ModelCheckpoint(folder / str(bool(audit)), every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(
        folder, [flags, callback, saver], enable_checkpointing=True, val_check_interval=4, **options, **case.get("trainer", {})
    )
    module = module_class()(model)
    if case.get("frozen"):
        model.model.layers[0].eval()
    loader = loader_of(blocks, "fixed", number=40, num_workers=case.get("workers", 0))
    if case.get("stream"):
        loader = DataLoader(Stream(rows_of(blocks, "fixed"), 9), batch_size=8, collate_fn=to_tensors)
    held_out = DataLoader(rows_of(blocks, "fixed", number=16), batch_size=8, collate_fn=to_tensors)
    trainer.fit(module, loader, held_out)
    assert (callback.auditor.last is not None) == bool(audit)
    assert callback.auditor.last is None or callback.auditor.last.status == "valid"
    optimizer = trainer.optimizers[0].state_dict()["state"]
    return {
        "losses": module.losses,
        "gradients": flags.gradients,
        "flags": flags.seen,
        "rows": rows,
        "weights": sha([part.detach() for part in model.state_dict().values()]),
        "optimiser": sha([[part for _, part in sorted(state.items())] for _, state in sorted(optimizer.items())]),
        "random": sha(torch.random.get_rng_state()),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"trainer": {"accumulate_grad_batches": 2}}, id="accumulation"),
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"trainer": {"precision": "bf16-mixed"}}, id="mixed precision", marks=pytest.mark.slow),
        pytest.param({"workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"frozen": True}, id="a part in eval mode", marks=pytest.mark.slow),
        pytest.param({"stream": True}, id="stream", marks=pytest.mark.slow),
        pytest.param({"trainer": {"gradient_clip_val": 0.1}}, id="clipping", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_bit_identical_with_audits_on_and_off(
    case: dict[str, Any], blocks: Any, tiny_model: Any, tokenizer: Any, settings: Any, tmp_path: Path
) -> None:
    assert tiny_model.config.attention_dropout > 0
    on, off = (
        trained(audit, blocks, copy.deepcopy(tiny_model), tokenizer, settings, tmp_path, case) for audit in (EVERYWHERE, {})
    )
    assert on == off
    assert len(on["losses"]) >= 9
