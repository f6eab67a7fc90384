"""The kernels, and what stands around them; ``FlashAttention`` is loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["FlashAttention"]

if TYPE_CHECKING:
    from flashtile.kernel.autograd import FlashAttention


def __getattr__(name: str) -> Any:
    if name != "FlashAttention":
        raise AttributeError(f"module 'flashtile.kernel' has no attribute {name!r}")
    from flashtile.kernel.autograd import FlashAttention

    globals()[name] = FlashAttention
    return FlashAttention
