"""Continual pre-training in small: a mother model on e-mails, then three saved stages on e-mails and Danish pages, 1 to 2.

python benchmarks/propensity/staged_run.py --cache FOLDER [--write]    about 12 minutes on one core
python benchmarks/propensity/staged_run.py --cache FOLDER --smoke      shows that it runs, not what it finds

Every stage is traced to the old and to the new corpus by `memguard propensity`, and all are set side by side by `memguard
compare`. What rises and what falls is reported as found.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from texts import danish_pages, emails, one_thread, shuffled

from memguard.audit.decoding import SETTING_NAMES
from memguard.audit.propensity_stages import PropensityComparison, StageRow
from memguard.audit.report_propensity import METRIC_NAMES
from memguard.reporting.propensity import describe_movement
from memguard.tracing.index_build import build_index

RESULTS = Path(__file__).parents[1] / "results"
VOCABULARY = 4096
OLD_ROWS, NEW_ROWS = 4, 8  # of a batch
SHOWN_SETTINGS = ("prefix", "generic")


@dataclass(frozen=True)
class Sizes:
    """Documents a corpus, tokens of each, steps of the mother and of a stage, prompts a setting, new tokens."""

    documents: int
    tokens: int
    mother: int
    stage: int
    prompts: int
    new_tokens: int


FULL = Sizes(60, 128, 600, 150, 60, 60)
SMOKE = Sizes(24, 110, 3, 2, 2, 8)


def small_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE of the texts' own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<e>"], show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>", bos_token="<e>")


def cut(texts: list[str], tokenizer: Any, sizes: Sizes) -> tuple[list[str], torch.Tensor]:
    """The first tokens of as many documents that are long enough, as texts and as rows."""
    rows = [row for text in texts if len(row := tokenizer(text)["input_ids"]) >= sizes.tokens][: sizes.documents]
    ids = torch.tensor([row[: sizes.tokens] for row in rows])
    return [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids], ids


def train(model: Any, optimiser: Any, old: torch.Tensor, new: torch.Tensor | None, steps: int, seed: int) -> float:
    """So many steps on batches of old rows, or of old and new ones; the mean loss of the last ten, nats."""
    stream, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        parts = [(old, OLD_ROWS + NEW_ROWS)] if new is None else [(old, OLD_ROWS), (new, NEW_ROWS)]
        batch = torch.cat([rows[torch.randint(len(rows), (number,), generator=stream)] for rows, number in parts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / len(losses[-10:])


def build_stages(cache: Path, work: Path, sizes: Sizes) -> list[str]:
    """Corpora, indexes and checkpoints; a line for each stage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = {"old": emails(cache), "new": danish_pages(cache)}
    texts = {name: shuffled(3).sample(some, min(len(some), 4 * sizes.documents)) for name, some in texts.items()}
    tokenizer = small_tokenizer([*texts["old"], *texts["new"]])
    rows = {}
    for name, some in texts.items():
        documents, rows[name] = cut(some, tokenizer, sizes)
        build_index(documents, work / f"index-{name}", tokenizer)
    shape = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **shape))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    said = []
    for number, name in enumerate(("mother", "stage-1", "stage-2", "stage-3")):
        new, steps = (rows["new"], sizes.stage) if number else (None, sizes.mother)
        loss = train(model.train(), optimiser, rows["old"], new, steps, seed=number)
        model.eval().save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
        said.append(f"{name}: {steps} steps, last loss {loss:.3f} nats")
        print(said[-1], flush=True)
    return said


def compare(work: Path, sizes: Sizes) -> PropensityComparison:
    """Every stage on both corpora, side by side."""
    paths = []
    for stage in ("mother", "stage-1", "stage-2", "stage-3"):
        for corpus in ("old", "new"):
            output = work / "reports" / stage / corpus
            options = {"--index": work / f"index-{corpus}", "--corpus-name": corpus, "-o": output}
            options |= {"--num-prompts": sizes.prompts, "--max-new-tokens": sizes.new_tokens}
            words = [str(word) for pair in options.items() for word in pair]
            subprocess.run(
                [sys.executable, "-m", "memguard", "-q", "propensity", str(work / stage), *words], check=True, env=one_thread()
            )
            paths.append(str(output / "propensity.json"))
    command = [sys.executable, "-m", "memguard", "-q", "compare", *paths, "--json"]
    return PropensityComparison.model_validate_json(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def shown(row: StageRow | None) -> str:
    """A value with its interval."""
    return "-" if row is None else f"{row.value:.3g} ({row.low:.3g} to {row.high:.3g})"


def render(found: PropensityComparison, said: list[str], sizes: Sizes, seconds: float) -> str:
    """The page: a table a corpus, what moved, and what was found."""
    lines = [
        "# Continual pre-training: what of the old and the new corpus is volunteered, stage by stage",
        "",
        f"Written by `propensity/staged_run.py`: a Llama of 3 layers, 128 wide, {VOCABULARY} tokens; {sizes.documents} e-mails "
        f"(old) and {sizes.documents} Danish pages (new) of {sizes.tokens} tokens each; batches of {OLD_ROWS + NEW_ROWS} rows, "
        f"from stage 1 on {OLD_ROWS} old and {NEW_ROWS} new; {'; '.join(said)}. Up to {sizes.prompts} prompts a setting, one "
        f"text each of at most {sizes.new_tokens} tokens. Values with 95% intervals; PM is that of generic prompts.",
        "",
    ]
    at = {(row.corpus, row.metric, row.stage, row.setting): row for row in found.rows}
    for corpus in found.corpora:
        head = ["metric", "stage", *(SETTING_NAMES[name] for name in SHOWN_SETTINGS), "PM"]
        lines += [f"## {corpus} corpus", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for metric in dict.fromkeys(row.metric for row in found.rows):
            for stage in found.stages:
                cells = [shown(at.get((corpus, metric, stage, name))) for name in SHOWN_SETTINGS]
                share = at.get((corpus, metric, stage, "generic"))
                pm = "undefined"
                if share is not None and share.share is not None:
                    pm = f"{share.share:.3f} ({share.share_low:.3f} to {share.share_high:.3f})"
                lines.append(f"| {' | '.join([METRIC_NAMES[metric], stage, *cells, pm])} |")
        lines.append("")
    lines += ["## What moved", "", *(f"- {sentence}" for sentence in found.sentences), ""]
    for one in found.movements:
        if one.direction != "not shown" and one.setting in SHOWN_SETTINGS:
            span = f"{one.difference:.3g} ({one.low:.3g} to {one.high:.3g}, {one.confidence:.0%})"
            lines.append(f"- {describe_movement(one)}: {METRIC_NAMES[one.metric]} {one.direction}: {span}")
    return "\n".join([*lines, "", f"{seconds:.0f} s on one thread, {dt.date.today().isoformat()}.", ""])


def main() -> int:
    """Train, measure, compare, print; with --write also the committed page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is fetched and made")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/propensity_stages.md and .json")
    options = parser.parse_args()
    if options.smoke and options.write:
        parser.error("--write is for full runs")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes, began = SMOKE if options.smoke else FULL, time.monotonic()
    work = options.cache / "stages" / dt.datetime.now().strftime("%H%M%S")
    work.mkdir(parents=True)
    said = build_stages(options.cache, work, sizes)
    found = compare(work, sizes)
    page = render(found, said, sizes, time.monotonic() - began)
    print(page)
    if options.write:
        (RESULTS / "propensity_stages.md").write_text(page, encoding="utf-8")
        (RESULTS / "propensity_stages.json").write_text(
            json.dumps(found.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
