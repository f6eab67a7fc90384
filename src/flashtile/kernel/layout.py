"""Memory layouts: where results go, and how any rank becomes the four dimensions that the passes take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_in_order_of(t: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return a new dense tensor of ``shape`` whose dimensions lie in memory in the same order as those of ``t``.

    So the output of a ``(b, n, h, d)`` buffer seen as ``(b, h, n, d)`` is again a ``(b, n, h, d)`` buffer, and the
    ``transpose`` and ``reshape`` that follow attention cost nothing. The last dimension is always the innermost one.
    Where ``t`` has no order (an expanded dimension repeats its elements), the result is contiguous.

    The order depends on sizes and strides alone, real or symbolic: an operator's fake output has the true strides.
    """
    dtype = dtype or t.dtype
    if t.is_contiguous():
        return torch.empty(shape, dtype=dtype, device=t.device)
    strides = t.stride()
    leading = t.ndim - 1
    if any(strides[i] == 0 and t.shape[i] != 1 for i in range(leading)):
        return torch.empty(shape, dtype=dtype, device=t.device)
    order = sorted(range(leading), key=lambda i: -strides[i])
    return torch.empty_permuted(shape, (*order, leading), dtype=dtype, device=t.device)


def as_4d(t: Tensor) -> Tensor:
    """Return ``(..., heads, n, d)`` as ``(batch, heads, n, d)``: a view, unless the leading dims cannot merge."""
    if t.ndim == 4:
        return t
    if t.ndim == 3:
        return t.unsqueeze(0)
    return t.flatten(0, t.ndim - 4)


def copied_in_blocks(t: Tensor) -> bool:
    """Return whether the copy engine of sm_90 can read a 4-D tensor where it lies.

    It wants dense rows, every other stride and the address in multiples of 16 bytes, and at least one entry. (The
    stride of a dimension of size 1 says nothing.)
    """
    batch, heads, rows, columns = t.stride()
    if columns != 1 or t.data_ptr() % 16 or t.numel() == 0:
        return False
    unit = 16 // t.itemsize
    if (batch | heads | rows) % unit == 0:
        return True
    return all(stride % unit == 0 or size == 1 for stride, size in zip((batch, heads, rows), t.shape[:3], strict=True))
