"""A run that states a differential-privacy guarantee, and the test of it: once with Opacus' noise, once without.

Each canary is a record that Opacus draws as it draws any row (Poisson sampling), and a fair coin decided whether it is in the
data. An audit guesses the coins from the scores. Under epsilon 1 no attacker can be right much more often than 73%, so a run
that lost its noise, and still states epsilon 1, is caught. Not being caught proves nothing.

    python examples/dp_opacus.py [--output example_output/dp_opacus]
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from common import HERE, language_reference, open_output, pretrained_base, run_memguard, show, token_blocks
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, set_seed

from memguard.audit import load_config, load_report
from memguard.callbacks import plant_records
from memguard.reporting.terminal import findings_lines

EPOCHS, BATCH, CLIP = 30, 32, 1.0
warnings.filterwarnings("ignore", message="Full backward hook|Secure RNG|Optimal order")
output = open_output("dp_opacus", __doc__)
settings = HERE / "dp_opacus.yaml"
plan = output / "_memguard" / "plan.json"
config = load_config(settings).model_copy(update={"plan": plan})

base, tokenizer = pretrained_base(output / "base")
text = language_reference()
rows = [{"input_ids": row["input_ids"]} for row in token_blocks(text[len(text) // 2 :], tokenizer, size=48)[:200]]


def train(name: str, *, private: bool) -> Path:
    """Train one run, with the same plan and the same stated guarantee; its checkpoint."""
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base).train()
    model.get_input_embeddings().weight.requires_grad_(False)  # tied weights have no gradient of one sample
    planted = plant_records(rows, config, tokenizer=tokenizer, output_dir=output / name)
    planted.watch(model)  # before make_private: counts what the sampler really draws
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    loader = DataLoader(planted.dataset, batch_size=BATCH, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    engine = PrivacyEngine()
    parts = {"module": model, "optimizer": optimizer, "data_loader": loader, "max_grad_norm": CLIP}
    if private:
        assert config.dp is not None
        target = {"target_epsilon": config.dp.epsilon, "target_delta": config.dp.delta}
        guarded, optimizer, loader = engine.make_private_with_epsilon(**parts, **target, epochs=EPOCHS)
    else:  # the mistake: clipped and sampled, but no noise
        guarded, optimizer, loader = engine.make_private(**parts, noise_multiplier=0.0)
    steps = 0
    for _ in range(EPOCHS):
        for batch in loader:
            guarded(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    checkpoint = output / name / f"checkpoint-{steps}"
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    planted.ledger(steps).save(checkpoint / "memguard_ledger.json")
    return checkpoint


for name, private in (("with noise", True), ("without noise", False)):
    checkpoint = train(name.replace(" ", "_"), private=private)
    # From a shell: memguard audit CHECKPOINT --plan PLAN --config memguard.yaml --start BASE -o audit
    run_memguard(
        "audit", checkpoint, "--plan", plan, "--config", settings, "--start", base, "-o", checkpoint / "memguard_audit"
    )
    report = load_report(checkpoint / "memguard_audit" / "report.json")
    show(report, f"epsilon 1 stated, trained {name}", policy=HERE / "dp_policy.yaml")
    print(next(line for line in findings_lines(report) if line.startswith("privacy")))
