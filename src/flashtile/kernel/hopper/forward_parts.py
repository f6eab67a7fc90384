"""What a consumer of the forward kernel for Hopper does with its 64 rows: products, softmax, results."""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.kernel import tile
from flashtile.kernel.hopper import rows
from flashtile.kernel.tile import logaddexp, lse_from_softmax

LOG2E = gl.constexpr(tile.LOG2E.value)
HUGE_LOGIT, FAR_LOGIT = gl.constexpr(tile.HUGE_LOGIT.value), gl.constexpr(tile.FAR_LOGIT.value)
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma takes


class Out(NamedTuple):
    """Where results go: O by way of shared memory, LSE by address."""

    o_desc: Any
    o_smem: Any
    lse_ptr: Any
    row_stride: Any
    num_heads: Any
    num_sequences: Any


# --- matrix products --------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def tile_layout(columns):
    """Return how a result of wgmma lies in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _matrix(smem, index):
    """Return a block in shared memory as a matrix."""
    block = smem.index(index)
    return block.reshape([block.shape[-2], block.shape[-1]])


@gluon.jit
def issue_scores(rings, q_index, stage, SIZES: gl.constexpr):
    """Start S = Q K^T."""
    zero = gl.zeros([ROWS, SIZES.block_n], gl.float32, layout=tile_layout(SIZES.block_n))
    k = _matrix(rings.k_smem[0], stage).permute((1, 0))
    s = warpgroup_mma(_matrix(rings.q_smem[0], q_index), k, zero, use_acc=False, is_async=True)
    if len(rings.k_smem) == 2:
        k = _matrix(rings.k_smem[1], stage).permute((1, 0))
        s = warpgroup_mma(_matrix(rings.q_smem[1], q_index), k, s, is_async=True)
    return s


@gluon.jit
def issue_values(p, v_smem, stage, acc, keep):
    """Start acc + P V, or P V unless ``keep``, by chunk of columns."""
    first = warpgroup_mma(p, _matrix(v_smem[0], stage), acc[0], use_acc=keep, is_async=True)
    if len(acc) == 1:
        return (first,)
    else:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc[1].type.layout, 2), assert_trivial=True)
        return (first, warpgroup_mma(p, _matrix(v_smem[1], stage), acc[1], use_acc=keep, is_async=True))


@gluon.jit
def wait_values(acc):
    if len(acc) == 1:
        return (warpgroup_mma_wait(0, deps=acc),)
    else:
        return warpgroup_mma_wait(0, deps=acc)


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout=tile_layout(COLUMNS))


@gluon.jit
def scale_rows(acc, factor):
    """Multiply each row by its factor."""
    first = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, acc[0].type.layout), assert_trivial=True)[:, None]
    if len(acc) == 1:
        return (first,)
    else:
        layout: gl.constexpr = gl.SliceLayout(1, acc[1].type.layout)
        return (first, acc[1] * gl.convert_layout(factor, layout, assert_trivial=True)[:, None])


# --- the softmax ------------------------------------------------------------------------------------------------------


@gluon.jit
def _by_thread(x):
    """See a tile of S as (rows, groups of 8 columns, the 4 threads that share a row, 2 neighbours)."""
    return gl.reshape(x, [ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def row_max_of(s):
    """Return the largest entry by row. (Neighbours first: one chain of comparisons would be twice as long.)"""
    largest = gl.max(gl.max(gl.max(_by_thread(s), 3), 1), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def row_sum_of(p):
    """Return the sums by row and thread, (rows, 4): the threads' sums are added up when a query tile ends."""
    return gl.sum(gl.sum(_by_thread(p), 3), 1)


@gluon.jit
def scales_of(scale_log2):
    """Return what ``fold`` wants to know of the logits' factor, computed once."""
    return scale_log2, gl.exp2(gl.ceil(gl.log2(scale_log2))), HUGE_LOGIT / scale_log2


@gluon.jit
def fold(s, row_max, row_sum, tile_max, scales):
    """One step of the online softmax: ``tile.softmax_step``, which has the reasons, with sums by thread.

    Returns ``(p, alpha, new_max, new_sum)``.
    """
    scale_log2, exact, huge = scales
    new_max = gl.maximum(row_max, tile_max)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    exact = gl.where(gl.abs(shift) > FAR_LOGIT, gl.minimum(exact, 1.0), exact)
    scale = gl.where(gl.abs(shift) > huge, exact, scale_log2)
    p = gl.exp2(s * scale[:, None] - (shift * scale)[:, None])
    alpha = gl.exp2((row_max - shift) * scale)
    kept = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)[:, None]
    return p, alpha, new_max, kept + row_sum_of(p)


# --- results ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _slices(x, WIDTH: gl.constexpr):
    """Return a tile as a tuple of tiles of ``WIDTH`` columns."""
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS == WIDTH:
        return (gl.convert_layout(x, tile_layout(WIDTH), assert_trivial=True),)
    else:
        halves = gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1))
        left, right = gl.split(halves)
        return _slices(left, WIDTH) + _slices(right, WIDTH)


@gluon.jit
def _write_output(out, acc, at, row, CONSUMER: gl.constexpr, SIZES: gl.constexpr):
    """Write rows of O by way of shared memory, as many columns at a time as there is room for."""
    slices = _slices(acc[0], SIZES.o_width)
    if len(acc) == 2:
        slices = slices + _slices(acc[1], SIZES.o_width)
    where = rows.coordinates(at.batch, at.head, at.q_start, at.seqlen_q, row, SIZES.packed)
    for done in gl.static_range(0, len(slices), SIZES.o_buffers):
        tma.store_wait(0)
        gl.thread_barrier()
        for i in gl.static_range(min(SIZES.o_buffers, len(slices) - done)):
            smem = _matrix(out.o_smem, CONSUMER * SIZES.o_buffers + i)
            smem.store(slices[done + i].to(smem.dtype))
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(min(SIZES.o_buffers, len(slices) - done)):
            smem = out.o_smem.index(CONSUMER * SIZES.o_buffers + i)
            rows.copy_out(out.o_desc, where, (done + i) * SIZES.o_width, smem, SIZES.packed)


@gluon.jit
def write_rows(out, acc, row_max, row_sum, at, logit_scale, sinks_ptr, CONSUMER: gl.constexpr, SIZES: gl.constexpr):
    """Write O and LSE of this consumer's rows of a query tile."""
    layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    total = gl.convert_layout(gl.sum(row_sum, 1), layout, assert_trivial=True)
    lse = lse_from_softmax(gl.convert_layout(row_max, layout, assert_trivial=True), total, logit_scale)
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    if sinks_ptr is not None:
        with_sink = logaddexp(lse, gl.load(sinks_ptr + at.head).to(gl.float32))
        factor *= gl.exp2((lse - with_sink) * LOG2E)
        lse = with_sink
        if SIZES.packed:  # no sink for the rows after the last sequence
            lse = gl.where(at.sequence < out.num_sequences, lse, float("-inf"))
    row = (at.block * SIZES.consumers + CONSUMER) * ROWS
    offs_m = row + gl.arange(0, ROWS, layout=layout)
    start = (at.batch.to(gl.int64) * out.num_heads + at.head) * out.row_stride + at.q_start
    gl.store(out.lse_ptr + start + offs_m, lse, mask=offs_m < at.seqlen_q)
    _write_output(out, scale_rows(acc, factor), at, row, CONSUMER, SIZES)
