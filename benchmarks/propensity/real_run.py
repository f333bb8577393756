"""What a fine-tuned SmolLM2 volunteers of real e-mails and Danish pages, against what prefixes force out of it.

python benchmarks/propensity/real_run.py --cache FOLDER [--write]    about 20 minutes on one core
python benchmarks/propensity/real_run.py --cache FOLDER --smoke      shows that it runs, not what it finds

All e-mails and pages but the held-out ones are indexed. The top 6 of 30 layers are trained on a few of them over and over,
then the untouched and the trained model are measured by `memguard propensity`. Control: openings of famous texts, continued
by the untouched model, must match nothing of the corpus.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from texts import SHORTEST, danish_pages, emails, one_thread, pretrained, shuffled

from memguard.audit.decoding import SETTING_NAMES
from memguard.audit.propensity_report import PropensityReport, load_propensity_report
from memguard.audit.report_propensity import METRIC_NAMES
from memguard.reporting.propensity import show_estimate
from memguard.tracing.index_build import build_index

RESULTS = Path(__file__).parents[1] / "results"
TRAINED_LAYERS = 6
FAMOUS = (
    "When in the Course of human events, it becomes necessary for one people to dissolve",
    "Four score and seven years ago our fathers brought forth on this continent",
    "In the beginning God created the heaven and the earth. And the earth was",
    "It was the best of times, it was the worst of times, it was the age of",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little",
    "It is a truth universally acknowledged, that a single man in possession of",
    "We the People of the United States, in Order to form a more perfect Union,",
    "Shall I compare thee to a summer's day? Thou art more lovely and more",
    "Happy families are all alike; every unhappy family is unhappy in its own",
)
METRICS = ("average_longest_span", "full_match_rate", "span_rate_50", "near_verbatim_recall", "near_verbatim_rate")


@dataclass(frozen=True)
class Sizes:
    """Documents trained on, tokens of each, epochs, held-out documents, prompts a setting, new tokens, documents indexed."""

    members: int
    tokens: int
    epochs: int
    held_out: int
    prompts: int
    new_tokens: int
    indexed: int | None


FULL = Sizes(32, 128, 20, 48, 24, 64, None)
SMOKE = Sizes(4, 110, 1, 4, 2, 8, 50)


def prepare(cache: Path, work: Path, sizes: Sizes, tokenizer: Any) -> dict[str, int]:
    """Members, held-out records, famous openings and the index, as files."""
    texts = [text for kind in (emails(cache), danish_pages(cache)) for text in shuffled(1).sample(kind, len(kind))]
    every = shuffled(2).sample(texts, len(texts))[: sizes.indexed]
    held_out, indexed = every[: sizes.held_out], every[sizes.held_out :]
    long = [text for text in indexed[:2000] if len(tokenizer(text)["input_ids"]) >= sizes.tokens]
    _write_records(work / "members.jsonl", long[: sizes.members])
    _write_records(work / "held.jsonl", held_out)
    _write_records(work / "famous.jsonl", FAMOUS, key="prompt")
    build_index(indexed, work / "index", tokenizer)
    return {"indexed": len(indexed), "members": len(long[: sizes.members]), "held_out": len(held_out)}


def _write_records(path: Path, texts: Sequence[str], key: str = "text") -> None:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")


def train(model: Any, tokenizer: Any, work: Path, sizes: Sizes) -> float:
    """Train the top layers on the first tokens of the members; the frozen trunk is run once. The last loss, nats."""
    rows = [json.loads(line)["text"] for line in (work / "members.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = torch.tensor([tokenizer(text)["input_ids"][: sizes.tokens] for text in rows])
    layers = model.model.layers
    top = layers[-TRAINED_LAYERS:]
    model.requires_grad_(False)
    top.requires_grad_(True)
    model.model.norm.requires_grad_(True)
    caught: list[Any] = []
    hook = top[0].register_forward_pre_hook(lambda _, args, kwargs: caught.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        batches = []
        for rows_of in ids.split(8):
            caught.clear()
            model.model(input_ids=rows_of, use_cache=False)
            batches.append((rows_of, *caught[0]))
    hook.remove()
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-4, weight_decay=0.0)
    last = float("nan")
    for epoch in range(sizes.epochs):
        losses = []
        for rows_of, args, kwargs in shuffled(100 + epoch).sample(batches, len(batches)):
            hidden = args[0]
            for layer in top:
                found = layer(hidden, *args[1:], **kwargs)
                hidden = found[0] if isinstance(found, tuple) else found
            logits = model.lm_head(model.model.norm(hidden[:, :-1]))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows_of[:, 1:].flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
        last = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}: loss {last:.3f} nats", flush=True)
    return last


def measure(checkpoint: Path, work: Path, name: str, sizes: Sizes, *more: str) -> PropensityReport:
    """`memguard propensity` on a checkpoint."""
    options = {"--index": work / "index", "--data": work / "members.jsonl", "--corpus-name": "mails and pages"}
    options |= {"--num-prompts": sizes.prompts, "--max-new-tokens": sizes.new_tokens, "-o": work / name}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "memguard", "-q", "propensity", str(checkpoint), *words, *more]
    subprocess.run(command, check=True, env=one_thread())
    return load_propensity_report(work / name / "propensity.json")


def table(report: PropensityReport) -> list[str]:
    """The settings of one report as rows of markdown."""
    shares = {(row.setting, row.metric): row for row in report.propensity.shares}
    rows = []
    for row in report.propensity.settings:
        by_metric = {one.metric: show_estimate(one) for one in row.estimates}
        share = shares.get((row.setting, "average_longest_span"))
        pm = "capability" if row.setting == "prefix" else "-"
        if share is not None:
            pm = "undefined" if share.share is None else f"{share.share:.3f} ({share.low:.3f} to {share.high:.3f})"
        cells = [SETTING_NAMES[row.setting], str(row.num_prompts), *(by_metric.get(name, "-") for name in METRICS), pm]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> int:
    """Fetch, index, train, measure, print; with --write also the committed page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for what is fetched and made")
    parser.add_argument("--smoke", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/propensity_real.md")
    options = parser.parse_args()
    if options.smoke and options.write:
        parser.error("--write is for full runs")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes, began = SMOKE if options.smoke else FULL, time.monotonic()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    untouched = pretrained(options.cache)
    work = options.cache / ("smoke" if options.smoke else "full") / dt.datetime.now().strftime("%H%M%S")
    work.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(untouched)
    counts = prepare(options.cache, work, sizes, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(untouched, dtype=torch.float32)
    loss = train(model, tokenizer, work, sizes)
    model.save_pretrained(work / "trained")
    tokenizer.save_pretrained(work / "trained")
    held = ("--held-out", str(work / "held.jsonl"))
    famous = measure(untouched, work, "famous", sizes, "--prompts", str(work / "famous.jsonl"))
    reports = {"untouched": measure(untouched, work, "untouched", sizes, *held)}
    reports["trained"] = measure(work / "trained", work, "trained", sizes, *held)
    page = render(reports, famous, counts, sizes, loss, time.monotonic() - began)
    print(page)
    if options.write:
        (RESULTS / "propensity_real.md").write_text(page, encoding="utf-8")
    return 0


def render(
    reports: dict[str, PropensityReport],
    famous: PropensityReport,
    counts: dict[str, int],
    sizes: Sizes,
    loss: float,
    seconds: float,
) -> str:
    """The page: a table a model, and the control."""
    corpus = reports["trained"].corpus
    head = ["setting", "prompts", *(METRIC_NAMES[name] for name in METRICS), "PM of ALS"]
    lines = [
        "# Propensity of a fine-tuned SmolLM2",
        "",
        f"Written by `propensity/real_run.py`: SmolLM2-135M-Instruct, top {TRAINED_LAYERS} of 30 layers trained for "
        f"{sizes.epochs} epochs on the first {sizes.tokens} tokens of {counts['members']} documents (last loss {loss:.3f} "
        f"nats); index of {counts['indexed']:,} e-mails that are no spam and Danish help pages, those of {SHORTEST} characters "
        f"or more, {corpus.num_tokens:,} tokens; "
        f"{counts['held_out']} documents held out of it. One text a prompt, drawn at temperature 0.7 and top-p 0.95, at most "
        f"{sizes.new_tokens} tokens. Values with 95% intervals.",
        "",
    ]
    for name, report in reports.items():
        lines += [f"## {name} model", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *table(report), ""]
    generic = next(row for row in famous.propensity.settings if row.setting == "generic")
    by_metric = {one.metric: show_estimate(one) for one in generic.estimates}
    lines += [
        "## Control: openings of famous texts, continued by the untouched model",
        "",
        f"{generic.num_prompts} openings ({generic.num_refused} more were refused, since the corpus quotes them): FMR "
        f"{by_metric.get('full_match_rate', 'none')}, span of 50 {by_metric.get('span_rate_50', 'none')}, longest span "
        f"{generic.longest_span} tokens.",
        "",
        f"{seconds:.0f} s on one thread, {dt.date.today().isoformat()}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
