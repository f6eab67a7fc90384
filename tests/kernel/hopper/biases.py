"""Biases for the kernels for Hopper by name: in all dtypes, shapes and strides in which their entries lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Those that the copy engine can read in tiles; the others are read one by one.
TILED = ("every entry", "fp16", "fp32", "shared by heads", "shared by batch", "shared by both", "expanded", "rows last",
         "rows alike", "heads apart")  # fmt: skip


def biases(batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """Return makers of tensors that broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    b, h, m, n = batch, heads, seqlen_q, seqlen_k
    wide = -(-n // 8) * 8  # rows of whole 16 bytes

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)

    return {
        "every entry": lambda: drawn(b, h, m, wide)[..., :n],
        "fp16": lambda: drawn(b, h, m, wide, dtype=torch.float16)[..., :n],
        "fp32": lambda: drawn(b, h, m, wide, dtype=torch.float32)[..., :n],
        "shared by heads": lambda: drawn(b, 1, m, wide)[..., :n],
        "shared by batch": lambda: drawn(h, m, wide)[..., :n],
        "shared by both": lambda: drawn(m, wide)[..., :n],
        "expanded": lambda: drawn(1, 1, m, wide).expand(b, h, m, wide)[..., :n],
        "rows last": lambda: drawn(m, h, b, wide).permute(2, 1, 0, 3)[..., :n],
        "rows alike": lambda: drawn(b, h, 1, wide).expand(b, h, m, wide)[..., :n],
        "heads apart": lambda: drawn(b, 2 * h, m, wide + 8)[:, ::2, :, 8 : n + 8],
        "fp64": lambda: drawn(b, h, m, wide, dtype=torch.float64)[..., :n],
        "rows of odd length": lambda: drawn(b, h, m, wide + 1)[..., :n],
        "odd address": lambda: drawn(b, h, m, wide + 8)[..., 1 : n + 1],
        "columns first": lambda: drawn(b, h, n, m).mT,
        "every other key": lambda: drawn(b, h, m, 2 * wide)[..., : 2 * n : 2],
        "of keys": lambda: drawn(b, 1, 1, wide)[..., :n],
        "of queries": lambda: drawn(b, h, m, 1),
        "of heads": lambda: drawn(h, 1, 1),
    }
