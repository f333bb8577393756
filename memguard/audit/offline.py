"""Audits of checkpoints on disk, as `memguard audit` runs them. Weights come from safetensors only; nothing is unpickled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memguard.canaries.ledger import LEDGER_NAME, Ledger, load_ledger
from memguard.canaries.plan import CanaryPlan
from memguard.errors import InputError, ScoringError
from memguard.scoring.team import Team


@contextlib.contextmanager
def joined_ranks(environment: Mapping[str, str]) -> Iterator[Team]:
    """The ranks that `torchrun` started, for the block; this process alone where it started none.

    A failure of one rank is one of all. With CUDA each rank takes the device of its number on its machine, otherwise the CPU.

    Args:
        environment: variables of this process, as `torchrun` sets them.

    Raises:
        InputError: more ranks on this machine than devices.
        ScoringError: the ranks do not find each other.
    """
    import torch
    from torch import distributed

    is_launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys() and int(environment["WORLD_SIZE"]) > 1
    if not is_launched:
        yield Team.alone()
        return
    has_cuda, place = torch.cuda.is_available(), int(environment.get("LOCAL_RANK", 0))
    if has_cuda:
        if place >= torch.cuda.device_count():
            raise InputError(f"ranks of one machine must be at most its {torch.cuda.device_count()} devices, got rank {place}.")
        torch.cuda.set_device(place)
    try:
        distributed.init_process_group("nccl" if has_cuda else "gloo")
    except (RuntimeError, ValueError) as error:
        raise ScoringError(f"the ranks that torchrun started do not find each other ({type(error).__name__}).") from None
    try:
        team = Team.current()
        with team.guarded():
            yield team
        distributed.barrier()  # none tears down what another still talks through
    finally:
        distributed.destroy_process_group()


def check_reference(folder: Path, tokenizer: Any) -> None:
    """Raise `InputError`, before anything is measured, where a reference model reads other tokens."""
    other = load_tokenizer(folder)
    if other.get_vocab() != tokenizer.get_vocab():
        raise InputError(f"reference '{folder}' must have the vocabulary of the audited model, got another one.")


def load_tokenizer(folder: Path) -> Any:
    """Tokenizer of a checkpoint folder, offline, without code from it.

    Raises:
        InputError: not a folder with safetensors weights, or no tokenizer.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise InputError(f"checkpoint '{folder}' is not a folder.")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"checkpoint '{folder}' holds no safetensors weights; pickled weights are not opened.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"checkpoint '{folder}' has no tokenizer that loads ({type(error).__name__}).") from None


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint folder, offline, without code or pickles from it.

    Raises:
        InputError: not a folder, no safetensors weights, or no tokenizer.
        ScoringError: weights that do not load.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, dtype="auto", **options)
    except Exception as error:
        raise ScoringError(
            f"checkpoint '{folder}' does not load as a causal language model ({type(error).__name__})."
        ) from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def find_ledger(folder: Path, plan: CanaryPlan) -> Ledger | None:
    """The ledger beside a checkpoint, None when there is none.

    Raises:
        InputError: unreadable, or written for another plan.
    """
    path = folder / LEDGER_NAME
    if not path.exists():
        return None
    ledger = load_ledger(path)
    if ledger.plan_digest != plan.digest:
        raise InputError(f"the ledger of '{folder}' was written for another plan: these canaries are not the ones trained on.")
    return ledger
