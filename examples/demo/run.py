"""The main job in two minutes: train with planted secrets, watch exposure rise, let a gate refuse the release.

Run A plants canaries by tier. Run B trains on the same data with the same plan, each canary once an epoch: what
de-duplication does to a corpus. Four gate calls must come out as they should, or this script exits 1.

    python examples/demo/run.py [--output demo_output]
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from corpus import language_reference, small_llama, token_blocks, train_tokenizer
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from memguard.audit import AuditConfig, AuditReport, load_config, load_report
from memguard.audit.report import load_decision
from memguard.callbacks import HFAuditCallback
from memguard.reporting.terminal import exposure_table

HERE = Path(__file__).parent
console = Console(width=118)


@dataclasses.dataclass(frozen=True)
class GateCall:
    """One call of `memguard gate` and how it must end."""

    what: str
    report: Path
    policy: str
    baseline: Path | None
    exit_code: int
    failing_rule: str | None = None


def train(name: str, config: AuditConfig, output: Path) -> Path:
    """Train one run from scratch and give the report of its last checkpoint."""
    text = language_reference()
    tokenizer = train_tokenizer(text)
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(output / name),
        per_device_train_batch_size=32,
        num_train_epochs=3,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        logging_steps=106,
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    callback = HFAuditCallback(config)
    trainer = Trainer(
        small_llama(len(tokenizer)),
        arguments,
        train_dataset=token_blocks(text, tokenizer),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    began = time.monotonic()
    trainer.train()
    assert callback.auditor is not None
    seconds = time.monotonic() - began
    shares = (
        f"{callback.auditor.seconds / seconds:.0%} of it audits, {callback.seconds_outside / seconds:.1%} the callback itself"
    )
    console.print(f"run {name}: {seconds:.0f} s of training, {shares}")
    return output / name / f"checkpoint-{trainer.state.global_step}" / "memguard_audit" / "report.json"


def curve_table(report: AuditReport, title: str) -> Table:
    """Mean exposure by tier at each audit of the run; bits."""
    tiers = sorted({point.tier for point in report.trend})
    table = Table(title=title, title_justify="left")
    for column in ("step", *("controls" if tier == 0 else f"{tier}x" for tier in tiers)):
        table.add_column(column, justify="right")
    for step in sorted({point.global_step for point in report.trend}):
        means = {point.tier: point.mean_bits for point in report.trend if point.global_step == step}
        table.add_row(str(step), *(f"{means[tier]:.2f}" for tier in tiers))
    return table


def run_gate(call: GateCall, decision_path: Path) -> bool:
    """Call the real executable; true when it ends as it must."""
    command = [sys.executable, "-m", "memguard", "-q", "gate", str(call.report), "--policy", str(HERE / call.policy)]
    command += ["--baseline", str(call.baseline)] if call.baseline is not None else []
    done = subprocess.run([*command, "-o", str(decision_path)], capture_output=True, text=True)
    if not decision_path.exists():
        console.print(done.stderr)
        return False
    decision = load_decision(decision_path)
    failing = [rule.name for rule in decision.rules if rule.outcome == "block"]
    right = done.returncode == call.exit_code and (call.failing_rule is None or call.failing_rule in failing)
    console.print(f"\n[bold]{call.what}[/]: exit {done.returncode}, wanted {call.exit_code} {'ok' if right else 'WRONG'}")
    console.print(f"  {decision.reason}", highlight=False)
    for rule in decision.rules:
        console.print(f"  {rule.outcome:>21}  {rule.name}: {rule.reason}", highlight=False)
    return right


def main() -> int:
    """Train both runs, print both tables, make the four gate calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="replaced if it exists")
    output: Path = parser.parse_args().output
    logging.getLogger("memguard").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if output.exists():
        shutil.rmtree(output)
    began = time.monotonic()
    config = load_config(HERE / "memguard.yaml")
    config = config.model_copy(update={"plan": output / "_memguard" / "plan.json"})
    once = config.model_copy(update={"canaries": config.canaries.model_copy(update={"plant_once": True})})
    report_a, report_b = train("A", config, output), train("B", once, output)
    for name, path in (("A, planted by tier", report_a), ("B, each planted once", report_b)):
        report = load_report(path)
        console.print(curve_table(report, f"{name}: mean exposure in bits as it trains"))
        console.print(exposure_table(report, title=name))
    relative = "policy_relative.yaml"
    start = output / "A" / "memguard_audit" / "reports" / "step-00000000.json"
    worse = "not worse than the last release"
    calls = [
        GateCall("A, a baseline is required and there is none", report_a, relative, None, 3),
        GateCall("A against its own start", report_a, "policy.yaml", start, 1),
        GateCall("B against A", report_b, "policy.yaml", report_a, 0),
        GateCall("A against B", report_a, "policy.yaml", report_b, 1, worse),
    ]
    right = [run_gate(call, output / "decisions" / f"{number}.json") for number, call in enumerate(calls, start=1)]
    console.print(f"\n{sum(right)} of {len(right)} gate calls as they should be, {time.monotonic() - began:.0f} s in all.")
    console.print(f"Pages to look at: {report_a.parents[2] / 'memguard_audit' / 'report.html'}")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
