"""What the examples share and a reader may skip: text, a small base model, the command line, the printed end.

Nothing here is needed to use memguard: text, tokenizer and model are the demo's, which all come with Python.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent / "demo"))

import torch
from corpus import language_reference, small_llama, token_blocks, train_tokenizer
from rich.console import Console
from transformers import set_seed
from transformers.utils import logging as transformers_logging

from memguard.audit import AuditReport, load_report
from memguard.gates import decide, load_policy
from memguard.reporting.terminal import exposure_table

HERE = Path(__file__).parent
console = Console(width=118)

__all__ = [
    "HERE",
    "console",
    "language_reference",
    "open_output",
    "paragraphs",
    "pretrained_base",
    "run_memguard",
    "show",
    "small_llama",
    "token_blocks",
    "train_tokenizer",
]


def open_output(name: str, description: str | None) -> Path:
    """The folder of `--output`, emptied; quiet libraries, one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("example_output") / name, help="replaced if it exists")
    output: Path = parser.parse_args().output
    logging.getLogger("memguard").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if int(os.environ.get("RANK", "0")) == 0:
        shutil.rmtree(output, ignore_errors=True)
    return output


def paragraphs(text: str) -> list[str]:
    """Paragraphs of at least 80 characters."""
    return [part.strip() for part in text.split("\n\n") if len(part.strip()) >= 80]


def pretrained_base(folder: Path, *, steps: int = 300) -> tuple[str, Any]:
    """Folder and tokenizer of a small Llama that has read the first half of the language reference: a stand-in for the
    base model that you download."""
    text = language_reference()
    tokenizer = train_tokenizer(text)
    set_seed(0)
    model = small_llama(len(tokenizer))
    blocks = torch.tensor([row["input_ids"] for row in token_blocks(text[: len(text) // 2], tokenizer)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        batch = blocks[torch.randint(len(blocks), (32,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer


def run_memguard(*arguments: object) -> None:
    """The command `memguard`, as from a shell; its words are left to the caller."""
    command = [sys.executable, "-m", "memguard", "-q", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # 1: a rule failed
        raise SystemExit(done.returncode)


def show(report: AuditReport | Path, title: str, *, policy: Path = HERE / "policy.yaml") -> None:
    """Print exposure by tier and what the gate says of it."""
    report = report if isinstance(report, AuditReport) else load_report(report)
    console.print(exposure_table(report, title=title))
    decision = decide(report, load_policy(policy))
    console.print(
        f"gate: {decision.outcome}, exit code {decision.exit_code}. {decision.reason}", highlight=False, soft_wrap=True
    )
