"""A score's entries by query and key, a bias above all, in tiles that the copy engine brings beside Q and K.

Read from global memory in the layout of a product, entries come in pairs: 32 loads per thread for 64 rows of 128 keys,
which take as long as the rest of the tile. From shared memory they come by eight ``ldmatrix``.

A buffer may be filled again when what was read from it is in registers, not as soon as the loads are issued: a barrier
orders them before other loads and stores only, not before the copy engine. So it is let go of behind something that all
of it went into.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.kernel import launcher
from flashtile.kernel.hopper.rows import ANY
from flashtile.kernel.launcher import Descriptor
from flashtile.score import Score

_STRIDES_END = 2**40  # in bytes, of what the copy engine describes


@gluon.jit
def copy_in(desc, where, row, column, bar, smem):
    """Start to copy the entries of a tile of queries from ``row`` and keys from ``column`` on, as a sequence counts."""
    tma.async_copy_global_to_shared(desc, [where.batch, where.head, row, column], bar, smem)


# --- on the host ------------------------------------------------------------------------------------------------------


def tensor_of(score: Score | None, softmax_scale: float) -> torch.Tensor | None:
    """Return the tensor by (batch, head, query, key) that a score has beside, if the copy engine can read it."""
    tensor = None if score is None else launcher.with_unit(score, softmax_scale).entries_beside()
    return tensor if tensor is not None and _copied_in_tiles(tensor) else None


def _copied_in_tiles(t: torch.Tensor) -> bool:
    strides = _strides(t)
    return (
        t.itemsize in (2, 4)
        and strides[3] == 1
        and all(stride * t.itemsize % 16 == 0 and stride * t.itemsize < _STRIDES_END for stride in strides[:3])
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
        and max(t.shape) < ANY
    )


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Return strides with which any batch entry and any head can be asked for, also where one serves all."""
    return tuple(0 if i < 2 and t.shape[i] == 1 else stride for i, stride in enumerate(t.stride()))


@functools.cache
def _layout(queries: int, keys: int, dtype: torch.dtype) -> Any:
    of_its_size = gl.float32 if dtype.itemsize == 4 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, 1, queries, keys], of_its_size)


def described(t: torch.Tensor, queries: int, keys: int) -> Descriptor:
    """Return the tensor for copies of tiles of so many queries and keys."""
    return Descriptor(t, (ANY, ANY, *t.shape[2:]), _strides(t), (1, 1, queries, keys), _layout(queries, keys, t.dtype))
