"""Supervised fine-tuning with TRL, where LoRA adapters alone are trained.

The callback audits the model in training, base and adapter together. A saved adapter is not the whole model, so that these
reports say *live*, which no gate lets pass; `memguard audit` on the saved checkpoint gives the report that can be gated.

    python examples/trl_sft_lora.py [--output example_output/trl_sft_lora]
"""

from __future__ import annotations

from common import HERE, language_reference, open_output, paragraphs, pretrained_base, run_memguard, show
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from memguard.audit import load_config
from memguard.callbacks import HFAuditCallback

disable_progress_bars()
output = open_output("trl_sft_lora", __doc__)
settings = HERE / "trl_sft_lora.yaml"
plan = output / "_memguard" / "plan.json"
callback = HFAuditCallback(load_config(settings).model_copy(update={"plan": plan}))

base, tokenizer = pretrained_base(output / "base")
text = language_reference()
rows = Dataset.from_list([{"text": one} for one in paragraphs(text[len(text) // 2 :])])

trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(base),
    SFTConfig(
        output_dir=str(output / "run"),
        max_length=96,
        per_device_train_batch_size=16,
        num_train_epochs=3,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        lr_scheduler_type="cosine",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[callback],
)
trainer.train()

checkpoint = output / "run" / f"checkpoint-{trainer.state.global_step}"
trained = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
print(f"{len(rows)} rows of the user, {trainer.state.global_step} steps, {trained:,} parameters trained")
show(checkpoint / "memguard_audit" / "report.json", "TRL SFT with LoRA, in training")

# From a shell: memguard audit CHECKPOINT --plan PLAN --config memguard.yaml -o audit
run_memguard("audit", checkpoint, "--plan", plan, "--config", settings, "-o", output / "audit")
show(output / "audit" / "report.json", "TRL SFT with LoRA, the saved checkpoint")
