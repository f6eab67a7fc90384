"""A score's entries by query and key, a bias above all, in tiles that the copy engine brings beside Q and K.

Read from global memory in the layout of a product, entries come in pairs: 32 loads per thread for 64 rows of 128 keys,
which take as long as the rest of the tile. From shared memory they come by eight ``ldmatrix``.

A buffer may be filled again when what was read from it is in registers, not as soon as the loads are issued: a barrier
orders them before other loads and stores only, not before the copy engine. So it is let go of behind something that all
of it went into.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.kernel import launcher
from flashtile.kernel.hopper import barriers
from flashtile.kernel.hopper.forward_parts import ROWS, tile_layout
from flashtile.kernel.hopper.rows import ANY
from flashtile.kernel.launcher import Descriptor
from flashtile.score import Score

_STRIDES_END = 2**40  # in bytes, of what the copy engine describes


@gluon.jit
def copy_in(desc, where, row, column, bar, smem):
    """Start to copy the entries of a tile of queries from ``row`` and keys from ``column`` on, as a sequence counts."""
    tma.async_copy_global_to_shared(desc, [where.batch, where.head, row, column], bar, smem)


# --- the ring of the forward pass: a buffer has the entries of one consumer's rows ------------------------------------


@gluon.jit
def new_ring(descs, SIZES: gl.constexpr):
    """Return room and mbarriers for the entries that ``descs`` describe, if they do."""
    if len(descs) == 0:
        return ()
    else:
        COUNT: gl.constexpr = SIZES.entries_buffers
        shape: gl.constexpr = [COUNT] + descs[0].block_shape  # noqa: RUF005
        bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(COUNT):
            mbarrier.init(bars.index(i), count=1)
        return gl.allocate_shared_memory(descs[0].dtype, shape, descs[0].layout), bars


@gluon.jit
def copy_next(desc, ring, count, where, block, column, SIZES: gl.constexpr):
    """Start to copy the entries of key tile number ``count``, for each consumer when there is a buffer free."""
    smem, full = ring
    for c in gl.static_range(SIZES.consumers):
        index = count * SIZES.consumers + c
        buffer = index % SIZES.entries_buffers
        if index >= SIZES.entries_buffers:
            barriers.sync(SIZES.entries_free + buffer, SIZES.threads_of_one, 1)
        mbarrier.expect(full.index(buffer), desc.block_type.nbytes)
        row = (block * SIZES.consumers + c) * ROWS
        copy_in(desc, where, row, column, full.index(buffer), smem.index(buffer))


@gluon.jit
def take_last_releases(count, SIZES: gl.constexpr):
    """Let every release meet its wait, when the entries of ``count`` key tiles have been copied."""
    for i in gl.static_range(SIZES.entries_buffers):
        index = count * SIZES.consumers + i
        if index >= SIZES.entries_buffers:
            barriers.sync(SIZES.entries_free + index % SIZES.entries_buffers, SIZES.threads_of_one, 1)


@gluon.jit
def next_buffer(buffer, phase, SIZES: gl.constexpr):
    """Return where a consumer's next entries will be, and the phase of their mbarrier: the others' lie in between."""
    if SIZES.entries_buffers == 0:
        return buffer, phase
    else:
        wraps = buffer + SIZES.consumers >= SIZES.entries_buffers
        return buffer + SIZES.consumers - gl.where(wraps, SIZES.entries_buffers, 0), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def read(ring, buffer, phase):
    """Return entries as S lies in registers, when they have come."""
    smem, full = ring
    mbarrier.wait(full.index(buffer), phase)
    block = smem.index(buffer)
    return block.reshape([block.shape[-2], block.shape[-1]]).load(tile_layout(smem.shape[-1]))


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


def described(t: torch.Tensor | None, queries: int, keys: int, buffers: int) -> Descriptor | None:
    """Return the tensor for copies of tiles of so many queries and keys; None if there is none, or no buffer."""
    if t is None or buffers == 0:
        return None
    return Descriptor(t, (ANY, ANY, *t.shape[2:]), _strides(t), (1, 1, queries, keys), _layout(queries, keys, t.dtype))
