"""Going on from an encoded prefix with many rows: a key-value cache whose rows are copied once, when a layer needs them.

transformers' own cache copies rows when they are selected and again when tokens are appended; here both happen in one
copy, and the parent stays as it was, so any number of branches can leave it.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def new_cache() -> Any:
    """An empty cache that keeps every key, also of layers with a sliding window: their masks do the forgetting."""
    from transformers import DynamicCache

    return DynamicCache()


@dataclass(frozen=True)
class Branch:
    """Keys and values of encoded rows, all of one length, and nothing but them."""

    cache: Any
    length: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values held."""
        tensors = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def grown(self, parents: Tensor) -> Any:
        """A cache whose rows are these rows of the branch, ready for new tokens."""
        from transformers.cache_utils import Cache

        return Cache(layers=[_grown_layer(layer, parents) for layer in self.cache.layers])


def _grown_layer(layer: Any, parents: Tensor) -> Any:
    from transformers.cache_utils import DynamicLayer

    if not isinstance(layer, DynamicLayer) or layer.is_sliding:
        raise TypeError(f"{type(layer).__name__} cannot be branched from")
    layer_class = _layer_class()
    grown = layer_class()
    grown.parent, grown.parents = (layer.keys, layer.values), parents
    grown.lazy_initialization(*grown.parent[: _num_states_wanted(layer_class)])
    return grown


@functools.cache
def _num_states_wanted(layer_class: Any) -> int:
    """How many states `lazy_initialization` looks at: keys and values, before transformers 5 the keys alone."""
    return len(inspect.signature(layer_class.lazy_initialization).parameters) - 1


_CLASSES: list[Any] = []


def _layer_class() -> Any:
    """Made on first use: transformers is imported only where a cache is."""
    if _CLASSES:
        return _CLASSES[0]
    from transformers.cache_utils import DynamicLayer

    class BranchLayer(DynamicLayer):  # type: ignore[misc]
        """One layer: the parent's rows until tokens come, then keys and values of its own."""

        parent: tuple[Tensor, Tensor] | None = None
        parents: Tensor

        def get_seq_length(self) -> int:
            return int(self.parent[0].shape[-2]) if self.parent is not None else int(self.keys.shape[-2])

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            if self.parent is None:
                grown: tuple[Tensor, Tensor] = super().update(key_states, value_states)
                return grown
            rows = self.parents.to(key_states.device)
            self.keys = _select_and_append(self.parent[0], rows, key_states)
            self.values = _select_and_append(self.parent[1], rows, value_states)
            self.parent = None
            return self.keys, self.values

    _CLASSES.append(BranchLayer)
    return BranchLayer


def _select_and_append(old: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """old[rows] with `new` behind it along the length, (rows, heads, length, width), in one copy."""
    length = old.shape[-2]
    whole = new.new_empty((*new.shape[:-2], length + new.shape[-2], new.shape[-1]))
    if old.shape[0] == 1:
        whole[..., :length, :] = old
    else:
        whole[..., :length, :] = old[rows]
    whole[..., length:, :] = new
    return whole
