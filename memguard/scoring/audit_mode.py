"""The one context every audit of a live model runs in: training continues as if the audit had not happened.

Restores, also after an exception: per-module train / eval flags, buffers and plain attributes, `requires_grad`,
`config.use_cache`, compiled calls, the sharding of FSDP2 weights, and the random state of Python, numpy, torch and CUDA.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

COPIED_BYTES = 4 * 2**20  # larger ones hold weights of some quantised models, which no forward writes to
REPACKS = "support_avx512bf16_for_cpu"  # bitsandbytes: 4-bit weights that an eval forward lays out anew, for good


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def preserved_rng(seed: int) -> Iterator[None]:
    """Seed every global generator inside the block and put their states back after it."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if _cuda_in_use() else []
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    for device in range(len(cuda)):
        torch.cuda.default_generators[device].manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.random.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def innermost(model: Any) -> Any:
    """The module to call for an audit: DDP, DataParallel, Opacus and `torch.compile` wrappers taken off."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module
        elif type(model).__name__ == "GradSampleModule":
            model = model._module
        else:
            return model


def _state(module: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Buffers, copies of the small ones, and plain attributes: rotary embeddings that grow keep theirs in all three."""
    buffers = dict(module._buffers)
    copied = {name: one.detach().clone() for name, one in buffers.items() if one is not None and one.nbytes <= COPIED_BYTES}
    plain = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | torch.Tensor))
    }
    return buffers, copied, plain


def _put_back(module: Any, buffers: dict[str, Any], copied: dict[str, Any], plain: dict[str, Any]) -> None:
    module._buffers.update(buffers)
    for name, value in copied.items():
        if not torch.equal(buffers[name], value):
            buffers[name].copy_(value)
    for name, value in plain.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value


@contextlib.contextmanager
def audit_mode(model: Any, *, seed: int = 0) -> Iterator[Any]:
    """Give the innermost model in eval mode without gradients; put everything back, also on an exception.

    Args:
        model: a torch module, wrapped or not.
        seed: of the generators inside the block.

    Yields:
        The innermost module.
    """
    model = innermost(model)
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl is not None]
    held = [(module, *_state(module)) for module in model.modules()]
    repacked = [module for module in model.modules() if getattr(module, REPACKS, False)]
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_rng(seed))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        try:
            model.eval()
            for module, _ in compiled:  # compiled in place: shapes of an audit would count towards the recompile limit
                module._compiled_call_impl = None
            for module in repacked:
                setattr(module, REPACKS, False)
            yield model
        finally:
            for module, _ in modes:  # FSDP2 leaves the root's weights whole after a forward: for a backward that never comes
                if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                    module.reshard()
            for module, training in modes:  # not model.train(): parts frozen in eval stay so
                module.training = training
            for module, call in compiled:
                module._compiled_call_impl = call
            for module in repacked:
                setattr(module, REPACKS, True)
            for module, buffers, values, attributes in held:
                _put_back(module, buffers, values, attributes)
            for parameter, requires_grad in wanted:
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            if use_cache is not None and config.use_cache != use_cache:  # type: ignore[union-attr]
                config.use_cache = use_cache  # type: ignore[union-attr]
