"""A model with its language-model head lifted out: hidden states come out where logits would, and the head's weights beside.

The head is the module `get_output_embeddings` names. While it is lifted, that module hands its input over and returns one
column, so the model's own forward runs as ever (autocast, adapters, patched forwards) but makes no logits. What a
model does to its logits after the head is read from its configuration and checked against its own logits: see
`memguard.scoring.forward`. A head that cannot be read safely is `Unreadable`, and the model's own logits are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from memguard.scoring.kernels import TokenStatistics, token_statistics

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1
DIVISORS = ("logits_scaling",)  # Granite
CAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_softcap")  # Gemma; RecurrentGemma and others


@dataclass(frozen=True)
class Head:
    """From hidden states to logits: `(hidden @ weight.T + bias) * scale`, then `cap * tanh(logits / cap)`.

    Args:
        module: the output embeddings.
        weight: (vocabulary, width); rows past the tokenizer's vocabulary stay in the normaliser, as in the model's softmax.
        bias: (vocabulary,) or None.
        scale: factor of the logits.
        soft_cap: bound of the logits, None for none.
        down: low-rank adapters on the head, (rank, width) each; `weight` then holds their other halves as further columns.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    down: tuple[Tensor, ...] = field(default=())

    def statistics(self, hidden: Tensor, targets: Tensor, rows: Tensor | None = None, **options: Any) -> TokenStatistics:
        """`token_statistics` of hidden states, shape (N, width), as they reach the head."""
        return token_statistics(
            self._widened(hidden),
            self.weight,
            targets.to(self.weight.device),
            rows=rows.to(self.weight.device) if rows is not None else None,
            bias=self.bias,
            scale=self.scale,
            soft_cap=self.soft_cap,
            **options,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits of a few hidden states, (..., width) to (..., vocabulary), float32: for a check alone."""
        logits = self._widened(hidden).float() @ self.weight.float().T
        logits = (logits + self.bias.float() if self.bias is not None else logits) * self.scale
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap is not None else logits

    def _widened(self, hidden: Tensor) -> Tensor:
        """Hidden states as the weight takes them: behind the low-rank adapters, in its dtype and on its device."""
        low_rank = [nn.functional.linear(hidden.to(down.dtype), down).to(hidden.dtype) for down in self.down]
        wide = torch.cat([hidden, *low_rank], dim=-1) if low_rank else hidden
        return wide.to(self.weight.device, self.weight.dtype)


@dataclass(frozen=True)
class Unreadable:
    """Why a head is left to the model itself; a sentence for the report."""

    reason: str


@dataclass
class Lifted:
    """What reached the head while it was lifted, one tensor a forward."""

    hidden: list[Tensor]

    def take(self) -> Tensor:
        """The one tensor of the last forward, shape (batch, length, width)."""
        (hidden,) = self.hidden
        self.hidden.clear()
        return hidden


def read_head(model: Any) -> Head | Unreadable:
    """The head of a causal language model, or why it cannot be read.

    Args:
        model: a module with `get_output_embeddings`; DDP and compile wrappers taken off already, PEFT wrappers allowed.
    """
    if _is_a(model, SHARDED):
        return Unreadable("the model is sharded.")
    getter = getattr(model, "get_output_embeddings", None)
    module = getter() if callable(getter) else None
    if not isinstance(module, nn.Module):
        return Unreadable("it names no output embeddings.")
    read = _read_lora(module) if hasattr(module, "lora_A") else _read_linear(_active(module))
    if isinstance(read, Unreadable):
        return read
    weight, bias, down = read
    scale, cap = _scale_and_cap(text_config(model))
    return Head(_active(module), weight, bias, scale, cap, down)


def is_sharded(model: Any) -> bool:
    """Whether the weights of a model are spread over ranks, so that its forward is a collective."""
    if _is_a(model, SHARDED) or is_tensor_parallel(model):
        return True
    return any(hasattr(one, "placements") or hasattr(one, "ds_id") for one in model.parameters())  # FSDP2; DeepSpeed ZeRO-3


def is_tensor_parallel(model: Any) -> bool:
    """Whether ranks compute one forward pass between them: each must then be given the same rows."""
    if any((getattr(module, "_tp_size", None) or 1) > 1 for module in model.modules()):
        return True
    data_parallel = 1 if _is_a(model, ("FSDPModule",)) else 0  # of the ways a weight is cut, FSDP2 makes one
    placed = [one.placements for one in model.parameters() if hasattr(one, "placements")]
    return any(sum(not way.is_replicate() for way in ways) > data_parallel for ways in placed)


def _is_a(model: Any, names: tuple[str, ...]) -> bool:
    """Whether a model or a part of it is of a class of one of these names; libraries stay unimported."""
    return any(base.__name__ in names for module in model.modules() for base in type(module).__mro__)


@contextlib.contextmanager
def lifted(head: Head) -> Iterator[Lifted]:
    """Take the head out of its model for the block; put back whatever happens."""
    caught = Lifted([])

    def hand_over(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        caught.hidden.append(hidden)
        return hidden[..., :1].clone()

    had = head.module.__dict__.get("forward")
    head.module.forward = hand_over
    try:
        yield caught
    finally:
        if had is None:
            del head.module.__dict__["forward"]
        else:
            head.module.forward = had


def _active(module: nn.Module) -> nn.Module:
    """PEFT keeps a trained copy of a whole head beside the original one; the copy in use is the head."""
    copies, active = getattr(module, "modules_to_save", None), getattr(module, "active_adapter", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(active, str) and active in copies:
        return copies[active]
    return module


_Read = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]


def _read_linear(module: Any) -> _Read | Unreadable:
    if type(module).forward is not nn.Linear.forward:
        return Unreadable(f"it is a {type(module).__name__}, not a linear layer.")
    if module._forward_hooks or module._forward_pre_hooks:
        return Unreadable("it carries forward hooks.")
    weight, bias = module.weight, module.bias
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
        return Unreadable("its weight is quantised or sharded.")
    if weight.is_meta or weight.numel() == 0:
        return Unreadable("its weight is kept elsewhere.")
    return weight.detach(), bias.detach() if isinstance(bias, Tensor) else None, ()


def _read_lora(module: Any) -> _Read | Unreadable:
    """A head with low-rank adapters, as further columns of the weight: exact, and no product of the two halves is made."""
    base = _read_linear(module.get_base_layer())
    if isinstance(base, Unreadable):
        return base
    weight, bias, _ = base
    if module.disable_adapters or module.merged:
        return base
    columns, downs = [weight], []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        variants, biased = getattr(module, "lora_variant", {}), module.lora_B[name].bias is not None
        if name in variants or biased or getattr(module, "fan_in_fan_out", False):
            return Unreadable("its adapter is not a plain low-rank product.")
        downs.append(module.lora_A[name].weight.detach())
        columns.append((module.lora_B[name].weight.detach() * module.scaling[name]).to(weight.dtype))
    return torch.cat(columns, dim=1) if downs else weight, bias, tuple(downs)


def text_config(model: Any) -> Any:
    """The configuration of a model's language part; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _scale_and_cap(config: Any) -> tuple[float, float | None]:
    scale, cap = 1.0, None
    for name in MULTIPLIERS:
        scale *= _number(config, name) or 1.0
    for name in DIVISORS:
        scale /= _number(config, name) or 1.0
    for name in CAPS:
        cap = cap or _number(config, name)
    return scale, cap


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value != 0 else None
