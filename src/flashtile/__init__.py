"""flashtile: exact attention in pure Python.

    from flashtile import flash_attention
    o = flash_attention(q, k, v, is_causal=True)        # (..., heads, seqlen, head_dim)

Names are loaded when first used: ``import flashtile`` is instant and needs neither a GPU nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "FlashAttention",
    "FlashAttentionMock",
    "__version__",
    "attention_statistics",
    "checked",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "mask",
    "score",
]

if TYPE_CHECKING:
    from flashtile import mask, score
    from flashtile.attention import checked, flash_attention, flash_attention_varlen
    from flashtile.dispatch import explain
    from flashtile.kernel.autograd import FlashAttention
    from flashtile.kernel.flash_attention_mock import FlashAttentionMock
    from flashtile.statistics import attention_statistics

_HOME = {
    "FlashAttention": "flashtile.attention",  # not from the kernels: so that its operators are there too
    "FlashAttentionMock": "flashtile.kernel.flash_attention_mock",
    "checked": "flashtile.attention",
    "attention_statistics": "flashtile.statistics",
    "explain": "flashtile.dispatch",
    "flash_attention": "flashtile.attention",
    "flash_attention_varlen": "flashtile.attention",
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
