"""Fine-tune a base model with a plain Hugging Face `Trainer`; memguard is one callback.

Canaries become rows of their own among the user's; every save is audited, and the gate reads the report of the last one.

    python examples/hf_finetune.py [--output example_output/hf_finetune]
"""

from __future__ import annotations

from common import language_reference, open_output, paragraphs, pretrained_base, show
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from memguard.callbacks import HFAuditCallback

output = open_output("hf_finetune", __doc__)

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
        "max_share": 0.2,  # of training tokens; a tiny corpus takes far more than the default 0.01, which yours should keep
    },
    "audit": {
        "every": {"steps": 100},
        "max_overhead": None,  # a tiny model trains as fast as it is audited; leave the default 0.02
        "exposure": {"references": 512, "node_budget": 20000},  # small numbers for a small computer
        "prior_aware": {"prefixes": 100},
    },
}

base, tokenizer = pretrained_base(output / "base")
text = language_reference()
rows = [{"input_ids": tokenizer(one)["input_ids"][:96]} for one in paragraphs(text[len(text) // 2 :])]

set_seed(0)
callback = HFAuditCallback(settings)
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(base),
    TrainingArguments(
        output_dir=str(output / "run"),
        per_device_train_batch_size=32,
        num_train_epochs=3,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
    callbacks=[callback],
)
trainer.train()

checkpoint = output / "run" / f"checkpoint-{trainer.state.global_step}"
print(f"{len(rows)} rows of the user, {trainer.state.global_step} steps")
show(checkpoint / "memguard_audit" / "report.json", "HF fine-tune")
