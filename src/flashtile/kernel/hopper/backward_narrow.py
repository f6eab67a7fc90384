"""The backward pass's consumers for heads up to 128 columns: each warpgroup owns 64 of the program's 128 keys.

Scores are held transposed, [keys, queries]: P^T and dS^T are left operands of dV and dK where they are. dQ needs dS of
all 128 keys, so dS goes through shared memory, and each consumer computes half of the dQ tile: half of its columns, or
of its rows where the tile has 128. It does so one tile late: while the tensor cores compute dQ of tile i - 1, the
exponentials of tile i are taken, and the consumers need not keep in step.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.kernel.hopper import barriers
from flashtile.kernel.hopper.backward_parts import (
    BOX,
    CONSUMERS,
    DO_FREE,
    DS_READY,
    LOADER_AND_CONSUMERS,
    Q_FREE,
    ROWS,
    beside_scores,
    columns,
    finish,
    finish_beside,
    initial_scores,
    operand_layout,
    panel_layout,
    per_query,
    probabilities,
    release_entries,
    rows_seen,
    start_sums,
    start_transposed,
    store_dq,
    store_sums,
    sums_layout,
    zero_sums,
)
from flashtile.kernel.hopper.backward_sizes import boxes_in, first_box
from flashtile.kernel.hopper.backward_work import FIELDS, SLOTS, done, read_number, read_place, read_total


@gluon.constexpr_function
def _width(consumer, sizes):
    return sizes.dq_boxes[consumer] * BOX.value


@gluon.jit
def _start_dq(consumer: gl.constexpr, parity, zero, buffers, SIZES: gl.constexpr):
    """Issue this consumer's half of dQ of the tile whose dS lies in the buffers of ``parity``.

    ``zero`` is 0, but the compiler cannot know: it would keep the operands' addresses in registers over the loop.
    """
    WIDTH: gl.constexpr = _width(consumer, SIZES)
    LAYOUT: gl.constexpr = sums_layout(WIDTH)
    PANELS: gl.constexpr = SIZES.head_dim // SIZES.panel
    barriers.sync(DS_READY + 2 * (1 - consumer) + parity, CONSUMERS)
    dq = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    for half in gl.static_range(2):
        ds = buffers.ds.index(2 * half + parity)
        if SIZES.block_m == 128:
            rows = ds._reinterpret(ds.dtype, [2, ROWS, ROWS], panel_layout(64)).index(consumer)
            k = columns(buffers.k, half * PANELS + zero, ROWS, WIDTH, SIZES.panel)
        else:
            rows = ds
            panel = half * PANELS + first_box(consumer, SIZES) * BOX // SIZES.panel
            k = columns(buffers.k, panel + zero, ROWS, WIDTH, SIZES.panel)
        dq = warpgroup_mma(rows.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _tile(consumer: gl.constexpr, it, has_last, slot, dk, dv, buffers, signals, softmax_scale, mask, score,
          SIZES: gl.constexpr):  # fmt: skip
    """Add query tile number ``it`` to dK (without softmax_scale) and dV, and the one before it, if any, to dQ."""
    BLOCK_M: gl.constexpr = SIZES.block_m
    PANEL: gl.constexpr = SIZES.panel
    HEAD_DIM: gl.constexpr = SIZES.head_dim
    HEAD_DIM_V: gl.constexpr = SIZES.head_dim_v
    BOXES: gl.constexpr = boxes_in(0, consumer, SIZES)
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    PANELS_V: gl.constexpr = HEAD_DIM_V // PANEL
    buffer = it % SIZES.stages
    phase = (it // SIZES.stages) & 1
    parity = it & 1
    zero = it >> 24
    dtype = buffers.q.dtype
    mbarrier.wait(signals.q.index(buffer), phase)
    initial, beside = None, None
    if score is not None:
        initial = initial_scores(buffer, consumer * ROWS, buffers, slot, softmax_scale, score, SIZES)
    s = start_transposed(buffers.k, zero + consumer * PANELS, buffers.q, buffer * PANELS, initial, BLOCK_M, HEAD_DIM,
                         PANEL)  # fmt: skip
    dq = _start_dq(consumer, parity ^ 1, zero, buffers, SIZES)
    tile, head = read_number(buffers.tile, 2 * buffer), read_number(buffers.tile, 2 * buffer + 1)
    if score is not None:
        beside = beside_scores(consumer, it, tile, head, buffers, signals, slot, score, SIZES)
    seen = rows_seen(tile, head, consumer * ROWS, buffers.board, slot, mask, SIZES)
    if len(buffers.entries) > 0 and BLOCK_M == 128:  # registers are short: later
        lse_log2 = (buffers.lse, buffer, signals.q.index(buffer), phase)
    else:
        lse_log2 = per_query(buffers.lse, buffer, BLOCK_M)
    if SIZES.dk_late:
        s, dk = finish_beside(s, dk, 2)
        barriers.arrive_if(has_last, Q_FREE + (it + SIZES.stages - 1) % SIZES.stages, LOADER_AND_CONSUMERS)
    else:
        s = warpgroup_mma_wait(2, [s])
    p, p_slope = probabilities(s, beside, seen, lse_log2, tile, head, consumer * ROWS, buffers.board, slot,
                               softmax_scale, mask, score, SIZES)  # fmt: skip
    p16 = gl.convert_layout(p.to(dtype), operand_layout())
    dq = warpgroup_mma_wait(0, [dq])
    if has_last:
        store_dq(consumer, dq, it - 1, buffers, signals, BOXES, SIZES)
    mbarrier.wait(signals.do.index(buffer), phase)
    dp = start_transposed(buffers.v, zero + consumer * PANELS_V, buffers.do, buffer * PANELS_V, None, BLOCK_M,
                          HEAD_DIM_V, PANEL)  # fmt: skip
    dv = start_sums(p16, buffers.do, buffer * PANELS_V, dv, BLOCK_M, HEAD_DIM_V, PANEL)
    release_entries(it, signals, SIZES)  # P, an operand, has been in registers
    dp = warpgroup_mma_wait(len(dv), [dp])
    # Waiting again keeps the loads of delta from moving up, to where registers are short.
    mbarrier.wait(signals.do.index(buffer), phase)
    delta = per_query(buffers.delta, buffer, BLOCK_M)
    ds = (p_slope * (dp - delta[None, :])).to(dtype)
    ds_smem = buffers.ds.index(2 * consumer + parity)
    ds_smem.store(ds)
    fence_async_shared()
    barriers.arrive(DS_READY + 2 * consumer + parity, CONSUMERS)
    gl.thread_barrier()
    if SIZES.dk_late:  # dS from shared memory: from registers, ptxas would serialise products that cross the loop's end
        dk = start_sums(ds_smem, buffers.q, buffer * PANELS, dk, BLOCK_M, HEAD_DIM, PANEL)
    else:
        ds = gl.convert_layout(ds, operand_layout())
        dk = start_sums(ds, buffers.q, buffer * PANELS, dk, BLOCK_M, HEAD_DIM, PANEL)
    dv = finish(dv, len(dk))
    barriers.arrive(DO_FREE + buffer, LOADER_AND_CONSUMERS)
    if not SIZES.dk_late:
        dk = finish(dk, 0)
        barriers.arrive(Q_FREE + buffer, LOADER_AND_CONSUMERS)
    return dk, dv


@gluon.jit
def consumer(consumer: gl.constexpr, copies, buffers, signals, softmax_scale, mask, score, SIZES: gl.constexpr):
    """One of two warpgroups: dK and dV of its 64 keys, and its half of every dQ tile."""
    it, number = 0, 0
    total = read_total(buffers.board, signals, number)
    while total >= 0:
        slot = number % SLOTS * FIELDS
        dk, dv = zero_sums(SIZES.head_dim, SIZES.dk_late), zero_sums(SIZES.head_dim_v, False)
        if total > 0:
            # The first tile computes a dQ of the tile before it out of whatever there is, and does not store it.
            barriers.arrive(DS_READY + 2 * consumer + ((it & 1) ^ 1), CONSUMERS)
        mbarrier.wait(signals.k.index(0), number & 1)
        mbarrier.wait(signals.v.index(0), number & 1)
        for i in range(total):
            dk, dv = _tile(consumer, it + i, i > 0, slot, dk, dv, buffers, signals, softmax_scale, mask, score, SIZES)
        it += total
        dk = finish(dk, 0)
        mbarrier.arrive(signals.v_free.index(0), count=1)
        if total > 0:
            if SIZES.dk_late:
                barriers.arrive(Q_FREE + (it - 1) % SIZES.stages, LOADER_AND_CONSUMERS)
            dq = warpgroup_mma_wait(0, [_start_dq(consumer, (it - 1) & 1, it >> 24, buffers, SIZES)])
            store_dq(consumer, dq, it - 1, buffers, signals, boxes_in(0, consumer, SIZES), SIZES)
        mbarrier.arrive(signals.k_free.index(0), count=1)
        # dS is free when the other consumer has computed its last dQ. The barrier is one on which no arrival can be
        # left: not that of the last tile's dS.
        barriers.sync(DS_READY + (it & 1), CONSUMERS)
        at = read_place(buffers.board, number)
        row = at.block * SIZES.block_n + consumer * ROWS
        store_sums(copies.dv, dv, 1.0, buffers.ds.index(2 * consumer), at, row, SIZES.head_dim_v, SIZES)
        mbarrier.wait(signals.dq_free.index(consumer), (it & 1) ^ 1)
        smem = buffers.dq.index(consumer * SIZES.dq_kept)
        store_sums(copies.dk, dk, softmax_scale, smem, at, row, SIZES.head_dim, SIZES)
        done(signals, number)
        number += 1
        total = read_total(buffers.board, signals, number)
        tma.store_wait(0)
        gl.thread_barrier()  # dS and dQ may be written again
