"""Train from a stream: a `datasets` IterableDataset has no length, so that the run is measured in steps.

There are no epochs to count in, so a tier is how often a canary is seen in the whole run (`count: total`). Where each one goes
is decided before the first step, from max_steps; the stream begins again when it runs out.

    python examples/streaming.py [--output example_output/streaming]
"""

from __future__ import annotations

from collections.abc import Iterator

from common import language_reference, open_output, paragraphs, show, small_llama, train_tokenizer
from datasets import IterableDataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from memguard.callbacks import HFAuditCallback

output = open_output("streaming", __doc__)

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
        "count": "total",  # what a stream needs
        "tiers": {1: 16, 8: 16, 96: 8},  # in the whole run; 96 times is so often that they must show
        "controls": 100,  # never trained on: they must look like chance
        "max_share": 0.1,  # of training tokens; a tiny corpus takes far more than the default 0.01, which yours should keep
    },
    "audit": {
        "every": {"steps": 100},
        "max_overhead": None,  # a tiny model trains as fast as it is audited; leave the default 0.02
        "exposure": {"references": 512, "node_budget": 20000},  # small numbers for a small computer
        "prior_aware": {"prefixes": 100},
    },
}

text = language_reference()
tokenizer = train_tokenizer(text)


def rows() -> Iterator[dict[str, list[int]]]:
    """One row at a time, as from files that do not fit in memory."""
    for paragraph in paragraphs(text):
        yield {"input_ids": tokenizer(paragraph)["input_ids"][:96]}


set_seed(0)
trainer = Trainer(
    small_llama(len(tokenizer)),
    TrainingArguments(
        output_dir=str(output / "run"),
        per_device_train_batch_size=32,
        max_steps=300,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=100,
        save_steps=300,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=IterableDataset.from_generator(rows),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
    callbacks=[HFAuditCallback(settings)],
)
trainer.train()

show(output / "run" / "checkpoint-300" / "memguard_audit" / "report.json", "a stream, 300 steps")
