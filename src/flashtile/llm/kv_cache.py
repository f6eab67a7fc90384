"""Keys and values of the tokens a model has already read."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.llm.config import ModelConfig


class LayerCache:
    """One layer's keys and values, `(batch, heads_kv, capacity, head_dim)`, of which the first `length` are filled."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store `(batch, heads_kv, n, head_dim)` behind what is there and return views of everything stored.

        Raises:
            ValueError: if the cache has no room for n more.
        """
        end = self.length + k.shape[-2]
        if end > self.k.shape[-2]:
            raise ValueError(f"the cache holds {self.k.shape[-2]} tokens, cannot grow to {end}")
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class KVCache:
    """A LayerCache per layer, with room for the model's whole context."""

    def __init__(self, config: ModelConfig, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (batch_size, config.kv_heads, config.context_length, config.head_dim)
        self.layers = [LayerCache(shape, device, dtype) for _ in range(config.num_layers)]

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forget everything stored; the memory is kept."""
        for layer in self.layers:
            layer.length = 0
