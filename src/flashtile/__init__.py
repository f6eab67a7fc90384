"""flashtile: exact attention in pure Python.

    from flashtile import flash_attention
    o = flash_attention(q, k, v, is_causal=True)        # (..., heads, seqlen, head_dim)

Names are loaded when first used: ``import flashtile`` is instant and needs neither a GPU nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["FlashAttention", "FlashAttentionMock", "__version__", "explain", "flash_attention", "mask", "score"]

if TYPE_CHECKING:
    from flashtile import mask, score
    from flashtile.attention import flash_attention
    from flashtile.dispatch import explain
    from flashtile.kernel.autograd import FlashAttention
    from flashtile.kernel.flash_attention_mock import FlashAttentionMock

_HOME = {
    "FlashAttention": "flashtile.attention",  # not from the kernels: so that its operators are there too
    "FlashAttentionMock": "flashtile.kernel.flash_attention_mock",
    "explain": "flashtile.dispatch",
    "flash_attention": "flashtile.attention",
    "mask": "flashtile.mask",
    "score": "flashtile.score",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashtile' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    module = importlib.import_module(_HOME[name])
    value = module if _HOME[name] == f"flashtile.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
