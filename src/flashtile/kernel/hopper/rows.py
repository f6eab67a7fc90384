"""Rows of (batch, heads, rows, columns) tensors for the copy engine, of dense batches and of packed sequences.

The copy engine reads zeros past the end of a tensor and writes nothing there. A packed sequence has to end where it
ends, not where the tensor does. So its rows are a dimension of 2**30 that kernels enter from the far end, at
2**30 - length + row, and two more dimensions have coordinates that cancel what that adds to the address, in 64 bits:
2**30 * (2**34 - stride) + (start + length) * stride. Source: ``triton.tools.ragged_tma``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.kernel.launcher import Descriptor

_END = gl.constexpr(2**30)
ANY = 2**31 - 2**16  # the size of a dimension that bounds nothing


@functools.cache
def layout(rows: int, columns: int, packed: bool) -> Any:
    """Return how a block of 16-bit numbers lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([1] * (3 if packed else 2) + [rows, columns], gl.bfloat16)


def described(t: torch.Tensor, rows: int, columns: int, packed: bool) -> Descriptor:
    """Return a 4-D tensor for copies of ``rows`` rows of one head, ``columns`` wide."""
    shape, strides = t.shape, t.stride()
    if (strides[0] | strides[1] | strides[2]) % 8:  # where a dimension has size 1: its stride says nothing
        strides = (*(stride if stride % 8 == 0 else 8 for stride in strides[:3]), 1)
    block = (1, 1, rows, columns)
    if packed:
        row = strides[2]
        shape, strides = (ANY, ANY, shape[1], _END.value, shape[3]), (2**34 - row, row, strides[1], row, 1)
        block = (1, *block)
    return Descriptor(t, shape, strides, block, layout(rows, columns, packed))


@gluon.jit
def coordinates(batch, head, start, length, row, PACKED: gl.constexpr):
    """Return what ``copy_in`` and ``copy_out`` take for ``row`` of a sequence of ``length`` rows from ``start`` on."""
    if PACKED:
        return start + length, head, _END - length + row
    else:
        return batch, head, row


@gluon.jit
def copy_in(desc, at, column, bar, smem, PACKED: gl.constexpr):
    """Start to copy a block at coordinates ``at`` from a tensor to shared memory."""
    if PACKED:
        tma.async_copy_global_to_shared(desc, [_END, at[0], at[1], at[2], column], bar, smem)
    else:
        tma.async_copy_global_to_shared(desc, [at[0], at[1], at[2], column], bar, smem)


@gluon.jit
def copy_out(desc, at, column, smem, PACKED: gl.constexpr):
    """Start to copy a block from shared memory to coordinates ``at`` of a tensor."""
    if PACKED:
        tma.async_copy_shared_to_global(desc, [_END, at[0], at[1], at[2], column], smem)
    else:
        tma.async_copy_shared_to_global(desc, [at[0], at[1], at[2], column], smem)
