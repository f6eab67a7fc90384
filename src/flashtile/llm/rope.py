"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryPositionalEmbedding(nn.Module):
    """Rotate each pair of neighbouring features by an angle proportional to the token's position.

        (y[2i], y[2i+1]) = R(p * theta^(-2i / d_k)) (x[2i], x[2i+1]),   R(a) = [[cos a, -sin a], [sin a, cos a]]

    so the dot product of a query at p and a key at p' depends on p - p' only. The tables of cosines and sines are fp32
    whatever the model's dtype (bf16 angles are wrong by whole radians at long positions) and are not saved.

    Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: torch.device | str | None = None) -> None:
        """Build tables for positions `0 ... max_seq_len - 1`; ValueError if `d_k` is odd."""
        super().__init__()
        if d_k < 2 or d_k % 2:
            raise ValueError(f"d_k must be even: features are rotated in pairs, got {d_k}")
        self.theta, self.d_k, self.max_seq_len = theta, d_k, max_seq_len
        self._build_tables(device)

    def _build_tables(self, device: torch.device | str | None) -> None:
        positions = torch.arange(self.max_seq_len, dtype=torch.float64)
        frequencies = self.theta ** (-torch.arange(0, self.d_k, 2, dtype=torch.float64) / self.d_k)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("cos", angles.cos().to(device, torch.float32), persistent=False)
        self.register_buffer("sin", angles.sin().to(device, torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositionalEmbedding:
        # Every .to(), .half(), .cuda() and .to_empty() comes through here. Follow the device, never the dtype.
        super()._apply(fn, recurse)
        self._build_tables(self.cos.device)
        return self

    def forward(self, x: Tensor, token_positions: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Return x rotated, in x's shape and dtype; the rotation itself is fp32 at least.

        Args:
            x: `(..., seq, d_k)`.
            token_positions: integers `(seq)` or `(batch..., seq)`; its leading dimensions align with x's leading ones,
                so `(batch, seq)` serves `(batch, heads, seq, d_k)`. None means `start, start + 1, ...`.
            start: first position when `token_positions` is None.

        Raises:
            ValueError: if x's last dimension is not `d_k` or a position lies beyond the tables.
        """
        if x.shape[-1] != self.d_k:
            raise ValueError(f"x must have {self.d_k} features in its last dimension, got shape {tuple(x.shape)}")
        if token_positions is None:
            end = start + x.shape[-2]
            if end > self.max_seq_len:
                raise ValueError(f"positions must stay below max_seq_len={self.max_seq_len}, got {end - 1}")
            cos, sin = self.cos[start:end], self.sin[start:end]
        else:
            if token_positions.ndim > 1:
                middle = (1,) * (x.ndim - 1 - token_positions.ndim)
                token_positions = token_positions.reshape(*token_positions.shape[:-1], *middle, -1)
            cos, sin = self.cos[token_positions], self.sin[token_positions]
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)
