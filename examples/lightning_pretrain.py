"""Pre-train with Lightning; memguard is one callback, and the module knows nothing of it.

A `.ckpt` file is a pickle that memguard never loads: the model is saved as a folder, with the ledger of what it was trained on
beside it, and `memguard audit` measures that folder. This is the report to gate; those written in training say *live*.

    python examples/lightning_pretrain.py [--output example_output/lightning_pretrain]
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from common import HERE, language_reference, open_output, run_memguard, show, small_llama, token_blocks, train_tokenizer
from torch.utils.data import DataLoader
from transformers import default_data_collator, set_seed

from memguard.audit import load_config
from memguard.callbacks import LightningAuditCallback

output = open_output("lightning_pretrain", __doc__)
settings = HERE / "lightning_pretrain.yaml"
plan = output / "_memguard" / "plan.json"


class LanguageModel(pl.LightningModule):
    """A causal language model and its loss."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.model = small_llama(vocabulary)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Mean loss of a batch, nats a token."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        """AdamW on a cosine over the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


text = language_reference()
tokenizer = train_tokenizer(text)
set_seed(0)
module = LanguageModel(len(tokenizer))
callback = LightningAuditCallback(load_config(settings).model_copy(update={"plan": plan}), tokenizer=tokenizer)
trainer = pl.Trainer(
    default_root_dir=output / "run",
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
rows = token_blocks(text, tokenizer)
trainer.fit(module, DataLoader(rows, batch_size=32, shuffle=True, collate_fn=default_data_collator))

checkpoint = output / "run" / f"checkpoint-{trainer.global_step}"
module.model.save_pretrained(checkpoint)
tokenizer.save_pretrained(checkpoint)
callback.ledger(trainer.global_step).save(checkpoint / "memguard_ledger.json")

# From a shell: memguard audit CHECKPOINT --plan PLAN --config memguard.yaml -o audit
run_memguard("audit", checkpoint, "--plan", plan, "--config", settings, "-o", output / "audit")
print(f"{len(rows)} rows of the user, {trainer.global_step} steps")
show(output / "audit" / "report.json", "Lightning pre-train")
