"""Ways of training, audits of every kind, and a record of all that training did: what an audit must not change by one bit.

A case trains twice on one plan, with audits everywhere and with none; `compare` gives the two records. Run as a script under
torchrun for several ranks: `harmless_cases.py RESULT PARTS NAME...`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch.utils.data import IterableDataset
from trainer_versions import as_this_version_says
from transformers import Trainer, TrainerCallback, TrainingArguments

Event = tuple[str, Any]
FORMATS = [{"name": "pin", "template": "The access number is {secret}.", "secret": {"kind": "digits", "length": 9}}]
TIMES = {f"{part}_{name}" for part in ("train", "eval") for name in ("runtime", "samples_per_second", "steps_per_second")}
ROWS = 24


@dataclass(frozen=True)
class Case:
    """One way of training.

    `arguments` go to `TrainingArguments`, `change` gives the model that is trained, `cut` is the step after which the run stops
    and resumes, `breaks` the rank on which every audit after the first fails.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda model: model
    is_stream: bool = False
    cut: int | None = None
    ranks: int = 1
    breaks: int | None = None


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def frozen_in_eval(model: Any) -> Any:
    """A first layer that its user keeps in eval mode, whatever is asked of the whole."""
    layer = model.model.layers[0].eval()
    layer.train = lambda mode=True: layer
    return model


def with_cache(model: Any) -> Any:
    model.config.use_cache = True
    return model


def with_growing_positions(model: Any) -> Any:
    """Rotary positions that are computed anew for rows longer than any before: state of a forward, not of training."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 40
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    return other


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def sharded(model: Any) -> Any:
    """FSDP2 as transformers applies it at load; accelerate ignores `TrainingArguments(fsdp=...)` where there is no GPU."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return type(model).from_pretrained(model.name_or_path, distributed_config=DistributedConfig(fsdp_size=2))


CASES = {
    case.name: case
    for case in (
        Case("dropout"),
        Case("accumulation", {"gradient_accumulation_steps": 3}),
        Case("activation checkpointing", {"activation_checkpointing": True, "gradient_accumulation_steps": 2}),
        Case("bf16", {"bf16": True}),
        Case("LoRA", change=with_adapter),
        Case("LoRA, bf16, activation checkpointing", {"bf16": True, "activation_checkpointing": True}, with_adapter),
        Case("frozen part", change=frozen_in_eval),
        Case("growing positions", change=with_growing_positions),
        Case("cache", change=with_cache),
        Case("workers", {"dataloader_num_workers": 2, "data_seed": 11, "seed": 5}),
        Case("persistent workers", {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
        Case("compiled", {"torch_compile": True, "torch_compile_backend": "eager"}),
        Case("resumed", cut=3),
        Case("resumed, accumulation, bf16", {"gradient_accumulation_steps": 2, "bf16": True}, cut=3),
        Case(
            "best at the end",
            {
                "load_best_model_at_end": True,
                "metric_for_best_model": "loss",
                "greater_is_better": True,  # an early checkpoint is put back
                "eval_steps": 3,
            },
        ),
        Case("label smoothing", {"label_smoothing_factor": 0.1}),
        Case("clipping", {"max_grad_norm": 0.05, "optim": "sgd", "lr_scheduler_type": "cosine"}),
        Case("noisy embeddings", {"neftune_noise_alpha": 5.0}),
        Case("stream", is_stream=True),
        Case("2 ranks", ranks=2),
        Case("2 ranks, accumulation, bf16", {"gradient_accumulation_steps": 2, "bf16": True}, ranks=2),
        Case("2 ranks, activation checkpointing", {"activation_checkpointing": True}, ranks=2),
        Case("2 ranks, LoRA", change=with_adapter, ranks=2),
        Case("2 ranks, resumed", cut=3, ranks=2),
        Case("2 ranks, stream", is_stream=True, ranks=2),
        Case("2 ranks, first breaks", ranks=2, breaks=0),
        Case("2 ranks, second breaks", ranks=2, breaks=1),
        Case("2 ranks, sharded", {"save_only_model": True}, sharded, ranks=2),
    )
}


# -- what is audited


def write_records(folder: Path, blocks: list[dict[str, list[int]]]) -> None:
    for name, rows in (("members", blocks[:10]), ("held_out", blocks[40:50])):
        text = "\n".join(json.dumps({"input_ids": row["input_ids"]}) for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def settings(folder: Path, *, audits: bool, full: bool = True) -> dict[str, Any]:
    """Audits of every kind at every moment, or none; the plan is the same. `folder` holds the records."""
    canaries = {
        "seed": 3,
        "formats": FORMATS,
        "tiers": {1: 2, 3: 2},
        "controls": 6,
        "positive_control": "probe" if full else {"in_training": {"count": 1, "repetitions": 3}},
        "max_share": 0.9,
        "verify": True,
    }
    audit: dict[str, Any] = {
        "every": {"steps": 2} if audits else None,
        "on": ["start", "evaluate", "save", "end"] if audits else [],
        "full_on": ["save"] if audits and full else [],
        "batch_size": 16,
        "max_overhead": None,
        "exposure": {"references": 16, "node_budget": 200},
        "prior_aware": {"prefixes": 16},
        "on_error": "raise",
    }
    if full:
        files = {"file": str(folder / "members.jsonl"), "held_out": str(folder / "held_out.jsonl")}
        audit["records"] = files | {"prefix_tokens": 8, "suffix_tokens": 6, "max_edits": 1}
    return {
        "plan": str(folder / "plan" / "plan.json"),
        "canaries": canaries,
        "audit": audit,
        "gate": {"policy": "default", "stop_when": "never"},
        "tracking": {"wandb": "off"},
    }


# -- what training did


def digest_of(value: Any) -> str:
    """sha256 over the bytes of tensors and the text of all else, whatever the nesting."""
    digest = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            local = one.to_local() if hasattr(one, "to_local") else one
            flat = local.detach().cpu().contiguous()
            digest.update(f"{flat.dtype} {tuple(flat.shape)}".encode())
            digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, np.ndarray):
            digest.update(one.tobytes())
        elif isinstance(one, dict):
            for key in sorted(one, key=str):
                digest.update(repr(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        else:
            digest.update(repr(one).encode())

    add(value)
    return digest.hexdigest()[:16]


def random_states() -> dict[str, str]:
    """A digest of each global generator."""
    return {
        "random state of python": digest_of(random.getstate()),
        "random state of numpy": digest_of(np.random.get_state()),
        "random state of torch": digest_of(torch.random.get_rng_state()),
    }


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes down in order all that a run did; stands behind the callback that audits. Draws in `on_log`, as users may."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.trainer: Any = None

    def watch(self, trainer: Any) -> None:
        self.trainer, original = trainer, trainer.training_step

        def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
            self.note("rows", digest_of(dict(inputs)))
            loss = original(model, inputs, *rest, **named)
            self.note("loss", float(loss).hex())
            return loss

        trainer.training_step = training_step

    def note(self, what: str, value: Any) -> None:
        self.events.append((f"step {self.trainer.state.global_step}: {what}", value))

    def parameters(self, model: Any) -> list[Any]:
        """All parameters; of a sharded model the shards, since an evaluation leaves some gathered and an audit does not."""
        stepped = [one for group in self.trainer.optimizer.param_groups for one in group["params"]]
        return stepped if any(hasattr(one, "to_local") for one in stepped) else list(model.parameters())

    def note_standing(self, model: Any) -> None:
        """What holds between two steps."""
        for what, value in random_states().items():
            self.note(what, value)
        self.note("train flags", digest_of([module.training for module in model.modules()]))
        held = self.parameters(model)
        self.note("requires_grad", digest_of([one.requires_grad for one in held]))
        self.note("gradients left", digest_of([one.grad for one in held]))
        self.note("use_cache", model.config.use_cache)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note_standing(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note("gradients", digest_of([one.grad for one in self.parameters(model)]))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note("weights", digest_of(model.state_dict()))
        self.note("optimiser", digest_of(self.trainer.optimizer.state_dict()))
        self.note("schedule", digest_of(self.trainer.lr_scheduler.state_dict()))
        self.note_standing(model)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note_standing(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        kept = {key: value for key, value in logs.items() if key not in TIMES}
        self.note("log", {key: float(value).hex() for key, value in kept.items()})
        self.note("draws", [torch.rand(1).item(), random.random(), float(np.random.rand())])

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for path in sorted(folder.glob("*.safetensors")):
            self.note(f"saved {path.name}", hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        for path in sorted(folder.glob("rng_state*.pth")):
            self.note(f"saved {path.name}", digest_of(torch.load(path, weights_only=False)))
        self.note_standing(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note("last weights", digest_of(model.state_dict()))
        self.note("last optimiser", digest_of(self.trainer.optimizer.state_dict()))
        self.note("flos, epoch, best", [state.total_flos, state.epoch, state.best_metric])
        self.note("compiled graphs", dict(torch._dynamo.utils.counters["stats"]) if args.torch_compile else None)
        history = [{key: value for key, value in row.items() if key not in TIMES} for row in state.log_history]
        self.note("history of logs", digest_of(history))
        self.note_standing(model)


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends the first part of a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


class Breaks(TrainerCallback):  # type: ignore[misc]
    """Lets every scoring on one rank fail once the run has begun; stands behind the callback that audits."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("this rank failed.")

        if self.guard.auditor is not None and self.guard.auditor.last is not None:
            self.guard.auditor.runner._score = fail


# -- training


def train(
    case: Case,
    folder: Path,
    parts: dict[str, Any],
    config: dict[str, Any] | None,
    *,
    recorder: Recorder | None = None,
    before: tuple[Any, ...] = (),
    after: tuple[Any, ...] = (),
) -> tuple[Recorder, Any]:
    """Train as the case says, in one or two parts, guarded by `config` or by nothing.

    Args:
        case: how.
        folder: of the run.
        parts: model, tokenizer and blocks.
        config: for the callback; None trains without it.
        recorder: of what happens; a new one when None.
        before: callbacks in front of the one that audits.
        after: callbacks behind all others.

    Returns:
        What happened, and the callback of the last part.
    """
    from memguard.callbacks import HFAuditCallback

    recorder, guard = recorder or Recorder(), None
    for part in ("first", "second") if case.cut is not None else ("whole",):
        guard = HFAuditCallback(config) if config is not None else None
        callbacks: list[Any] = [*before, *([guard] if guard is not None else []), recorder, *after]
        if part == "first" and case.cut is not None:
            callbacks.append(StopAt(case.cut))
        if guard is not None and case.breaks is not None and case.breaks == rank():
            callbacks.append(Breaks(guard))
        trainer = make_trainer(case, folder, parts, callbacks)
        recorder.watch(trainer)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{case.cut}") if part == "second" else None)
    return recorder, guard


def make_trainer(case: Case, folder: Path, parts: dict[str, Any], callbacks: list[Any]) -> Any:
    torch.manual_seed(0)  # of the adapter's first weights; the trainer seeds again
    if case.arguments.get("torch_compile"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    blocks = parts["blocks"]
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4 // case.ranks,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "per_device_eval_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 0,
    }
    return Trainer(
        case.change(copy.deepcopy(parts["model"])),
        TrainingArguments(**as_this_version_says(arguments | case.arguments)),
        train_dataset=Stream(blocks[:ROWS]) if case.is_stream else blocks[:ROWS],
        eval_dataset=blocks[50:54],
        processing_class=parts["tokenizer"],
        callbacks=callbacks,
    )


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def compare(case: Case, folder: Path, parts: dict[str, Any]) -> tuple[Recorder, Recorder, Any]:
    """What happened with audits everywhere and with none, and the callback of the audited run."""
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_records(folder, parts["blocks"])
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    config = settings(folder, audits=True)
    if case.breaks is not None:
        config["audit"]["on_error"] = "continue"
    with mock.patch("memguard.audit.probe.RATES", (1e-2,)):  # five rates take five times as long and touch nothing else
        audited, guard = train(case, folder / "audited", parts, config)
    plain, _ = train(case, folder / "plain", parts, settings(folder, audits=False))
    return audited, plain, guard


def first_difference(one: list[Event], other: list[Event]) -> str | None:
    """Names the first thing that went otherwise in `one` than in `other`; None where all is the same."""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return right[0] if left[0] == right[0] else f"{right[0]}, where {left[0]} happened"
    return None if len(one) == len(other) else f"{len(one)} things happened against {len(other)}"


def main(result: Path, parts_path: Path, names: list[str]) -> None:
    """Under torchrun: what differed on each rank, how much happened, and how the last audit ended."""
    from torch import distributed

    torch.set_num_threads(1)
    parts = torch.load(parts_path, weights_only=False)
    found = {}
    for index, name in enumerate(names):
        audited, plain, guard = compare(CASES[name], result.parent / f"case-{index}", parts)
        last = guard.auditor.last
        difference = first_difference(audited.events, plain.events)
        own = {"difference": difference, "events": len(audited.events), "status": last.status, "is_full": last.is_full}
        gathered: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(gathered, own)
        found[name] = gathered
    if distributed.get_rank() == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
