"""Text, tokenizer, tiny models and training of the re-checks, and a cache of figures that a killed study goes on from.

Every row begins with the end token, as canaries do. Everything runs on one thread from fixed seeds. Models are trained
here; every figure of theirs is measured by memguard's own scorer, audit and metrics.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import digit_tokenizer, language_reference
from transformers import LlamaConfig, LlamaForCausalLM

from memguard.audit.config import AuditSettings, ExposureSettings
from memguard.audit.items import encode_planted
from memguard.audit.report import Subject
from memguard.audit.runner import AuditRunner
from memguard.canaries.drawing import draw_plan
from memguard.canaries.formats import CanaryFormat, DigitsSpace
from memguard.canaries.ledger import Ledger, LedgerEntry
from memguard.canaries.plan import CanaryPlan
from memguard.canaries.settings import CanarySettings

VOCABULARY = 512
LENGTH = 64
LEAD = 0  # the end token, which also begins every row
Row = tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """What one study found.

    Args:
        name: of the study, such as S1.
        claim: the predicted direction, one sentence.
        columns: of the table.
        rows: of the table.
        figures: what the verdict rests on, by name.
        passed: whether the predicted direction came out.
        reason: why, or why not; one sentence with figures.
    """

    name: str
    claim: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    figures: dict[str, Any]
    passed: bool
    reason: str


@dataclass(frozen=True)
class Cache:
    """Figures of finished runs, a JSON line each; a path of None keeps nothing. `kept_s`: seconds of runs not run again."""

    path: Path | None = None
    kept_s: list[float] = field(default_factory=list)

    def get(self, study: str, compute: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
        """What was kept of `compute(*arguments)` for a study; else it is computed, and kept from then on.

        The code is no part of the key: throw the file away after changing how a figure is made.
        """
        key = repr((study, *arguments))
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        if self.path is not None and self.path.exists():
            for text in self.path.read_text(encoding="utf-8").splitlines():
                kept = json.loads(text)
                if kept["name"] == name:
                    self.kept_s.append(kept["seconds"])
                    figures: dict[str, Any] = kept["figures"]
                    return figures
        began = time.monotonic()
        figures = json.loads(json.dumps(compute(*arguments)))  # as they will be read back
        line = {"name": name, "key": key, "seconds": round(time.monotonic() - began, 1), "figures": figures}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return figures


def tokenizer() -> Any:
    """A byte-level BPE of 512 entries in which every digit is a token of its own."""
    return digit_tokenizer(VOCABULARY)


@functools.cache
def text_rows(length: int = LENGTH) -> tuple[Row, ...]:
    """The whole text as rows of `length` tokens, the end token first, in a fixed random order."""
    ids = tokenizer()(language_reference())["input_ids"]
    step = length - 1
    rows = [(LEAD, *ids[start : start + step]) for start in range(0, len(ids) - step + 1, step)]
    random.Random(f"text/{length}").shuffle(rows)
    return tuple(rows)


def tiny_llama(*, width: int = 64, layers: int = 2, seed: int = 0, tied: bool = True) -> Any:
    """An untrained Llama, 0.13 M parameters by default; heads are 32 wide. `tied`: the head is the embedding."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 32),
            num_key_value_heads=max(1, width // 32),
            max_position_embeddings=2 * LENGTH,
            tie_word_embeddings=tied,
            bos_token_id=LEAD,
            eos_token_id=LEAD,
            # Opacus counts the gradient of a padding token's embedding, which torch leaves out and zeros make enormous.
            pad_token_id=LEAD if tied else None,
        )
    ).eval()


def num_parameters(model: Any) -> int:
    """Trainable parameters, a tied head counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, right-padded; padding is not in the loss. Shapes (rows, longest)."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[LEAD] * (width - len(row))] for row in rows])
    labels = torch.tensor([[*row, *[-100] * (width - len(row))] for row in rows])
    return ids, labels


def train(
    model: Any,
    rows: Sequence[Row],
    *,
    epochs: int = 1,
    batch: int = 32,
    learning_rate: float = 3e-3,
    seed: int = 0,
    shuffle: bool = True,
    warm_up: int = 10,
    on_step: Callable[[int], None] | None = None,
) -> int:
    """Train with AdamW, a short warm-up and then a constant rate; the model is left in eval mode.

    Args:
        model: a causal language model.
        rows: token ids; a row that stands in it n times is seen n times an epoch.
        epochs: passes over the rows.
        batch: rows a step.
        learning_rate: after the warm-up.
        seed: of the order.
        shuffle: anew in every epoch; else the order given.
        warm_up: steps until the rate is reached.
        on_step: called after each step with the number of steps done; may audit the model.

    Returns:
        Steps taken.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    rng, step = random.Random(seed), 0
    for _ in range(epochs):
        order = list(range(len(rows)))
        if shuffle:
            rng.shuffle(order)
        for first in range(0, len(order), batch):
            model.train()
            ids, labels = padded([rows[index] for index in order[first : first + batch]])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (step + 1) / warm_up)
            model(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if on_step is not None:
                model.eval()
                on_step(step)
    model.eval()
    return step


def mean_loss(model: Any, rows: Sequence[Row], *, batch: int = 64) -> float:
    """Mean loss a token over rows of one length; nats."""
    losses = []
    with torch.no_grad():
        for first in range(0, len(rows), batch):
            ids, labels = padded(rows[first : first + batch])
            losses += [float(model(input_ids=ids, labels=labels).loss)] * len(ids)
    return sum(losses) / len(losses)


def pins(seed: int, *, copies: int, canaries: int, references: int) -> tuple[CanaryPlan, AuditRunner]:
    """A plan of nine-digit canaries behind one prefix, without controls, and a runner that ranks them by sampling alone."""
    settings = CanarySettings(
        seed=seed,
        formats=(
            CanaryFormat(name="pin", template="The access number of the gate is {secret}.", secret=DigitsSpace(length=9)),
        ),
        tiers={copies: canaries},
        controls=0,
        positive_control=None,
    )
    plan = draw_plan(settings, tokenizer())
    exposure = ExposureSettings(exact="off", references=references)
    return plan, AuditRunner(plan, tokenizer(), AuditSettings(exposure=exposure, prior_aware=None))


def planted_rows(plan: CanaryPlan, copies: Mapping[str, int] | None = None) -> list[Row]:
    """Every planted canary as often as its tier says, or as `copies` says of its id."""
    encoded = encode_planted(plan, tokenizer())
    tiers = {canary.id: canary.tier for canary in plan.planted()}
    return [item.ids for name, item in encoded.items() for _ in range((copies or tiers).get(name, 0))]


def ledger_of(plan: CanaryPlan, *, epochs: int, steps: int, token_share: float) -> Ledger:
    """What plain training on `planted_rows` saw: every canary its tier times an epoch."""
    entries = {
        canary.id: LedgerEntry(repetitions=canary.tier, num_insertions=canary.tier * epochs, num_seen=canary.tier * epochs)
        for canary in plan.planted()
    }
    return Ledger(
        plan_digest=plan.digest,
        global_step=steps,
        max_steps=steps,
        exact=True,
        notes=[],
        count="per_epoch",
        mode="append",
        plant_once=False,
        token_share=token_share,
        token_share_is_estimate=False,
        canaries=entries,
    )


def checkpoint_of(model: Any, steps: int) -> Subject:
    """A model in memory as the gate sees a checkpoint: named by a digest of its weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return Subject(kind="checkpoint", digest=digest.hexdigest(), global_step=steps, epoch=None)


def figure(value: Any, digits: int = 2) -> float:
    """A figure as tables print it."""
    return round(float(value), digits) + 0.0  # not -0.0
