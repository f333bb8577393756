"""Data-parallel training on two processes; the audit's work is shared between them.

Canaries are planned by their position among the rows of all ranks, so a canary is seen as often as its tier says however many
processes there are. The first rank draws the plan and writes the reports. On a CPU the ranks speak gloo.

    torchrun --standalone --nproc_per_node 2 examples/torchrun_two_processes.py [--output example_output/torchrun_two_processes]
"""

from __future__ import annotations

import torch.distributed as dist
from common import language_reference, open_output, show, small_llama, token_blocks, train_tokenizer
from transformers import Trainer, TrainingArguments, set_seed

from memguard.callbacks import HFAuditCallback

output = open_output("torchrun_two_processes", __doc__)

# The same keys as in memguard.yaml; HFAuditCallback("memguard.yaml") reads them from there.
settings = {
    "plan": str(output / "_memguard" / "plan.json"),  # the only file with secrets; a new run draws new ones
    "canaries": {
        "formats": [
            {
                "name": "pin",
                "template": "The access number of the north gate is {secret}.",
                "secret": {"kind": "digits", "length": 9},
            }
        ],
        "tiers": {1: 16, 4: 16, 32: 8},  # 16 canaries once an epoch, 16 four times, 8 so often that they must show
        "controls": 100,  # never trained on: they must look like chance
        "max_share": 0.1,  # of training tokens; a tiny corpus takes far more than the default 0.01, which yours should keep
        "verify": True,  # count sightings in the model on every rank, and compare with the plan
    },
    "audit": {
        "every": {"epochs": 1},
        "max_overhead": None,  # a tiny model trains as fast as it is audited; leave the default 0.02
        "exposure": {"references": 512, "node_budget": 20000},  # small numbers for a small computer
        "prior_aware": {"prefixes": 100},
    },
}

text = language_reference()
tokenizer = train_tokenizer(text)
set_seed(0)
callback = HFAuditCallback(settings)
trainer = Trainer(
    small_llama(len(tokenizer)),
    TrainingArguments(
        output_dir=str(output / "run"),
        per_device_train_batch_size=16,  # a rank: 32 rows a step
        num_train_epochs=4,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=token_blocks(text, tokenizer),
    processing_class=tokenizer,
    callbacks=[callback],
)
trainer.train()

ledger = callback.ledger(trainer.state.global_step)  # with verify, every rank must ask
if dist.get_rank() == 0:
    as_planned = sum(one.num_seen == one.num_insertions for one in ledger.canaries.values())
    print(f"{dist.get_world_size()} ranks: {as_planned} of {len(ledger.canaries)} canaries seen as often as planned")
    checkpoint = output / "run" / f"checkpoint-{trainer.state.global_step}"
    show(checkpoint / "memguard_audit" / "report.json", "two processes")
dist.destroy_process_group()
