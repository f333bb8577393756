"""One guarded Hugging Face run as a script, alone or under torchrun; writes what its rank found to `rank-N.json`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from small_run import ARGUMENTS


def interfere(parts: dict[str, Any], rank: int, measured: list[int]) -> None:
    """Count audits that score; let one rank's fail within its forward, or the process be killed within one."""
    from memguard.audit.runner import AuditRunner

    run = AuditRunner.run

    def watched(self: AuditRunner, model: Any, **options: Any) -> Any:
        step = options["subject"].global_step
        measured.append(step)
        if step == parts.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == parts.get("fails_on"):
            handle = model.register_forward_pre_hook(fail)
            try:
                return run(self, model, **options)
            finally:
                handle.remove()
        return run(self, model, **options)

    AuditRunner.run = watched  # type: ignore[method-assign]


def fail(*_: Any) -> None:
    raise RuntimeError("a device went away")


def main(folder: Path) -> None:
    from transformers import Trainer, TrainingArguments, set_seed

    from memguard.callbacks import HFAuditCallback

    torch.set_num_threads(1)
    parts = torch.load(folder / "parts.pt", weights_only=False)
    rank = int(os.environ.get("RANK", "0"))
    measured: list[int] = []
    interfere(parts, rank, measured)
    set_seed(0)
    arguments = TrainingArguments(**({"output_dir": str(folder / "out")} | ARGUMENTS | parts["arguments"]))
    callback = HFAuditCallback(parts["settings"])
    trainer = Trainer(
        parts["model"],
        arguments,
        train_dataset=parts["rows"],
        eval_dataset=parts["held_out"],
        processing_class=parts["tokenizer"],
        callbacks=[callback],
    )
    resume = parts.get("resume")
    trainer.train(resume_from_checkpoint=str(folder / "out" / resume) if resume else None)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found(trainer, callback, measured)), encoding="utf-8")


def found(trainer: Any, callback: Any, measured: list[int]) -> dict[str, Any]:
    """What all ranks, and a run that was killed, must agree on."""
    digest = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.float().numpy().tobytes())
    last = callback.auditor.last
    return {
        "weights": digest.hexdigest(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "best_metric": trainer.state.best_metric,
        "best_step": trainer.state.best_global_step,
        "last": [row.model_dump() for row in last.canaries] if last is not None else None,
        "trend": [[point.global_step, point.tier, point.mean_bits] for point in callback.auditor.trend],
        "measured": measured,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
