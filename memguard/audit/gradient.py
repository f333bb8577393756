"""One probe of a live model: does the loss of a canary's secret move a trainable parameter?

Runs inside the audit context and asks for gradients without writing them: `.grad`, buffers, train flags, random state and
the weights are as before, bit for bit. Sharded models are left alone: their forward is for all ranks together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from memguard.canaries.preflight import GradientFinding, Place
from memguard.scoring.audit_mode import audit_mode, innermost

INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
SHARDED_WRAPPERS = ("FullyShardedDataParallel", "DeepSpeedEngine")


def gradient_probe(model: Any) -> Callable[[Any, Place], GradientFinding]:
    """A probe for `run_preflight`: a collated batch, and where it supervises a secret, to a `GradientFinding`.

    Args:
        model: the model of the run, wrapped or not.
    """
    return lambda batch, place: probe_gradient(model, batch, place)


def probe_gradient(model: Any, batch: Any, place: Place) -> GradientFinding:
    """Whether the loss of one secret has a finite gradient, not all zero, in some trainable parameter.

    Parameters are asked one at a time, the last ones first, so that no second copy of all gradients is held and a fresh
    adapter, whose first matrix has none yet, is not taken for a frozen model.

    Args:
        model: a torch module; wrappers for copies on several devices are taken off.
        batch: a collated batch of tensors with `input_ids` and `labels`.
        place: where `labels` hold the secret; all others are masked.

    Returns:
        *unseen* with a note where the model is sharded, or does not take the batch as it is.
    """
    if is_sharded(model):
        return GradientFinding("unseen", "the model is sharded over ranks: that gradients reach its parameters is not probed.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return GradientFinding("frozen")
    with audit_mode(model) as inner, torch.enable_grad():
        try:
            return _gradient(inner, batch, place)
        except Exception as error:  # the user's own model: it may want what a collator does not give
            note = f"the model did not take a batch alone ({type(error).__name__}): that gradients reach it is not probed."
            return GradientFinding("unseen", note)


def is_sharded(model: Any) -> bool:
    """Whether parameters lie in pieces on several ranks, or nowhere yet."""
    if any(type(module).__name__ in SHARDED_WRAPPERS for module in model.modules()):
        return True
    return any(
        type(parameter).__name__ == "DTensor" or hasattr(parameter, "ds_id") or parameter.is_meta
        for parameter in innermost(model).parameters()
    )


def _gradient(model: Any, batch: Any, place: Place) -> GradientFinding:
    loss = _loss(model, batch, place)
    if loss is None:
        return GradientFinding("unseen", "the model gives no loss and no logits: that gradients reach it is not probed.")
    if not torch.isfinite(loss):
        return GradientFinding("not finite")
    if not loss.requires_grad:
        return GradientFinding("frozen")
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in reversed(wanted):
        (gradient,) = torch.autograd.grad(loss, [parameter], retain_graph=True, allow_unused=True)
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not torch.isfinite(values).all():
            return GradientFinding("not finite")
        if torch.count_nonzero(values):
            return GradientFinding("reached")
    return GradientFinding("frozen")


def _loss(model: Any, batch: Any, place: Place) -> Any:
    """The model's own loss on the secret's labels alone; from its logits where it gives none."""
    device = next(model.parameters()).device
    forward = inspect.signature(model.forward).parameters
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in forward.values())
    inputs = {key: _on(batch[key], device) for key in INPUTS if key in batch and (key in forward or takes_more)}
    whole = torch.as_tensor(batch["labels"])
    labels = torch.full_like(whole, -100)
    where = (place.row, slice(place.start, place.end)) if labels.ndim == 2 else (slice(place.start, place.end),)
    labels[where] = whole[where]
    labels = labels.to(device)
    given = {"labels": labels} if "labels" in forward or takes_more else {}
    outputs = model(**inputs, **given)
    loss = outputs.get("loss") if hasattr(outputs, "get") else getattr(outputs, "loss", None)
    if loss is not None:
        return loss.float().mean()
    logits = outputs.get("logits") if hasattr(outputs, "get") else getattr(outputs, "logits", outputs)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        return None
    targets = labels.reshape(logits.shape[0], -1)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten())


def _on(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
