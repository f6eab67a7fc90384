"""The backward pass's consumers for heads of more than 128 columns: the program's 64 keys belong to both warpgroups.

The accumulators of dK and dV fill the registers of one warpgroup each. So one consumer makes P and sums dV, the other
makes dS and sums dK; P goes from the first to the second through shared memory, in fp16 (it is at most 1; with a score
its product with the derivative may be anything, and goes in the tensors' dtype). dQ's columns are shared out, and
computed one tile late, 64 at a time.
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
    initial_scores,
    operand_layout,
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
from flashtile.kernel.hopper.backward_sizes import boxes_in, first_box, parts
from flashtile.kernel.hopper.backward_work import FIELDS, SLOTS, done, read_number, read_place, read_total

# Named barriers: dS of a tile (two numbers, by the tile's parity), P of a tile, and P has been read.
P_READY, P_READ = gl.constexpr(DS_READY.value + 2), gl.constexpr(DS_READY.value + 3)


@gluon.jit
def _start_dq(consumer: gl.constexpr, part: gl.constexpr, parity, zero, buffers, SIZES: gl.constexpr):
    """Issue a part of this consumer's columns of dQ of the tile whose dS lies in the buffer of ``parity``."""
    WIDTH: gl.constexpr = boxes_in(part, consumer, SIZES) * BOX
    LAYOUT: gl.constexpr = sums_layout(WIDTH)
    FIRST: gl.constexpr = (first_box(consumer, SIZES) + part * SIZES.dq_kept) * BOX // SIZES.panel
    ds = buffers.ds.index(parity).permute((1, 0))
    k = columns(buffers.k, zero + FIRST, ROWS, WIDTH, SIZES.panel)
    return warpgroup_mma(ds, k, gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def _last_dq(consumer: gl.constexpr, it, buffers, signals, SIZES: gl.constexpr):
    """Compute and store this consumer's columns of dQ of query tile number ``it``, the last one."""
    PARTS: gl.constexpr = parts(consumer, SIZES)
    for part in gl.static_range(PARTS):
        dq = warpgroup_mma_wait(0, [_start_dq(consumer, part, it & 1, it >> 24, buffers, SIZES)])
        store_dq(consumer, dq, it * PARTS + part, buffers, signals, boxes_in(part, consumer, SIZES), SIZES)


@gluon.jit
def _p_tile(it, has_last, slot, dv, buffers, signals, softmax_scale, mask, score, SIZES: gl.constexpr):
    """Make P of query tile number ``it``, hand it on, and add its share to dV."""
    PARTS: gl.constexpr = parts(0, SIZES)
    PANELS: gl.constexpr = SIZES.head_dim // SIZES.panel
    PANELS_V: gl.constexpr = SIZES.head_dim_v // SIZES.panel
    buffer, buffer_do = it % SIZES.stages, it % SIZES.stages_do
    zero = it >> 24
    mbarrier.wait(signals.q.index(buffer), (it // SIZES.stages) & 1)
    initial, beside = None, None
    if score is not None:
        initial = initial_scores(buffer, 0, buffers, slot, softmax_scale, score, SIZES)
    s = start_transposed(buffers.k, zero, buffers.q, buffer * PANELS, initial, SIZES.block_m, SIZES.head_dim,
                         SIZES.panel)  # fmt: skip
    barriers.sync(DS_READY + ((it & 1) ^ 1), CONSUMERS)
    if PARTS > 0:
        dq = _start_dq(0, 0, (it & 1) ^ 1, zero, buffers, SIZES)
    tile, head = read_number(buffers.tile, 2 * buffer), read_number(buffers.tile, 2 * buffer + 1)
    if score is not None:
        beside = beside_scores(0, it, tile, head, buffers, signals, slot, score, SIZES)
    seen = rows_seen(tile, head, 0, buffers.board, slot, mask, SIZES)
    lse_log2 = per_query(buffers.lse, buffer, SIZES.block_m)
    s = warpgroup_mma_wait(1 if PARTS > 0 else 0, [s])
    p, p_slope = probabilities(s, beside, seen, lse_log2, tile, head, 0, buffers.board, slot, softmax_scale, mask,
                               score, SIZES)  # fmt: skip
    p16 = gl.convert_layout(p.to(buffers.q.dtype), operand_layout())
    if PARTS > 0:
        dq = warpgroup_mma_wait(0, [dq])
        if has_last:
            store_dq(0, dq, (it - 1) * PARTS, buffers, signals, boxes_in(0, 0, SIZES), SIZES)
    barriers.sync(P_READ, CONSUMERS)
    buffers.p.store(p_slope.to(buffers.p.dtype))
    barriers.arrive(P_READY, CONSUMERS)
    barriers.arrive(Q_FREE + buffer, LOADER_AND_CONSUMERS)  # not before P is stored: lse_log2 has been read by then
    release_entries(it, signals, SIZES)  # likewise
    mbarrier.wait(signals.do.index(buffer_do), (it // SIZES.stages_do) & 1)
    if PARTS > 1:
        dq = _start_dq(0, 1, (it & 1) ^ 1, zero, buffers, SIZES)
    dv = start_sums(p16, buffers.do, buffer_do * PANELS_V, dv, SIZES.block_m, SIZES.head_dim_v, SIZES.panel)
    if PARTS > 1:
        dq = warpgroup_mma_wait(len(dv), [dq])
        if has_last:
            store_dq(0, dq, (it - 1) * PARTS + 1, buffers, signals, boxes_in(1, 0, SIZES), SIZES)
    dv = finish(dv, 0)
    barriers.arrive(DO_FREE + buffer_do, LOADER_AND_CONSUMERS)
    return dv


@gluon.jit
def p_consumer(copies, buffers, signals, softmax_scale, mask, score, SIZES: gl.constexpr):
    """The warpgroup that makes P and dV."""
    it, number = 0, 0
    total = read_total(buffers.board, signals, number)
    while total >= 0:
        dv = zero_sums(SIZES.head_dim_v, False)
        mbarrier.wait(signals.k.index(0), number & 1)
        for i in range(total):
            dv = _p_tile(
                it + i, i > 0, number % SLOTS * FIELDS, dv, buffers, signals, softmax_scale, mask, score, SIZES
            )
        it += total
        if total > 0:
            barriers.sync(DS_READY + ((it - 1) & 1), CONSUMERS)
            barriers.sync(P_READ, CONSUMERS)  # takes the last arrival
            _last_dq(0, it - 1, buffers, signals, SIZES)
        barriers.sync(P_READY, CONSUMERS)  # neither consumer reads K or V any more
        mbarrier.arrive(signals.k_free.index(0), count=1)
        mbarrier.wait(signals.v.index(0), number & 1)
        at = read_place(buffers.board, number)
        store_sums(copies.dv, dv, 1.0, buffers.v.index(0), at, at.block * SIZES.block_n, SIZES.head_dim_v, SIZES)
        done(signals, number)
        tma.store_wait(0)
        mbarrier.arrive(signals.v_free.index(0), count=1)
        number += 1
        total = read_total(buffers.board, signals, number)


@gluon.jit
def _ds_tile(it, has_last, dk, buffers, signals, SIZES: gl.constexpr):
    """Make dS of query tile number ``it``, hand it on, and add its share to dK (without softmax_scale)."""
    PARTS: gl.constexpr = parts(1, SIZES)
    PANELS: gl.constexpr = SIZES.head_dim // SIZES.panel
    PANELS_V: gl.constexpr = SIZES.head_dim_v // SIZES.panel
    LAYOUT: gl.constexpr = sums_layout(SIZES.block_m)
    buffer, buffer_do = it % SIZES.stages, it % SIZES.stages_do
    parity = it & 1
    zero = it >> 24
    mbarrier.wait(signals.do.index(buffer_do), (it // SIZES.stages_do) & 1)
    dp = start_transposed(buffers.v, zero, buffers.do, buffer_do * PANELS_V, None, SIZES.block_m,
                          SIZES.head_dim_v, SIZES.panel)  # fmt: skip
    dq = _start_dq(1, 0, parity ^ 1, zero, buffers, SIZES)
    delta = per_query(buffers.delta, buffer_do, SIZES.block_m)
    dp = warpgroup_mma_wait(1, [dp])
    dp = dp - delta[None, :]
    barriers.sync(P_READY, CONSUMERS)
    p = buffers.p.load(LAYOUT).to(gl.float32)
    barriers.arrive(P_READ, CONSUMERS)
    ds = (p * dp).to(buffers.q.dtype)
    buffers.ds.index(parity).store(ds)
    fence_async_shared()
    barriers.arrive(DS_READY + parity, CONSUMERS)
    # Not before dS is stored, which needs delta in registers: the copy engine may write its buffer while loads from it
    # are still under way, for a barrier orders them before other loads and stores only.
    barriers.arrive(DO_FREE + buffer_do, LOADER_AND_CONSUMERS)
    gl.thread_barrier()  # of this warpgroup, which reads it too
    dq = warpgroup_mma_wait(0, [dq])
    if has_last:
        store_dq(1, dq, (it - 1) * PARTS, buffers, signals, boxes_in(0, 1, SIZES), SIZES)
    mbarrier.wait(signals.q.index(buffer), (it // SIZES.stages) & 1)
    if PARTS > 1:
        dq = _start_dq(1, 1, parity ^ 1, zero, buffers, SIZES)
    ds = gl.convert_layout(ds, operand_layout())
    dk = start_sums(ds, buffers.q, buffer * PANELS, dk, SIZES.block_m, SIZES.head_dim, SIZES.panel)
    if PARTS > 1:
        dq = warpgroup_mma_wait(len(dk), [dq])
        if has_last:
            store_dq(1, dq, (it - 1) * PARTS + 1, buffers, signals, boxes_in(1, 1, SIZES), SIZES)
    dk = finish(dk, 0)
    barriers.arrive(Q_FREE + buffer, LOADER_AND_CONSUMERS)
    return dk


@gluon.jit
def ds_consumer(copies, buffers, signals, softmax_scale, SIZES: gl.constexpr):
    """The warpgroup that makes dS and dK."""
    it, number = 0, 0
    total = read_total(buffers.board, signals, number)
    while total >= 0:
        dk = zero_sums(SIZES.head_dim, False)
        if total > 0:
            # The first tile computes a dQ of the tile before it out of whatever there is, and does not store it.
            barriers.arrive(DS_READY + ((it & 1) ^ 1), CONSUMERS)
            barriers.arrive(P_READ, CONSUMERS)
        mbarrier.wait(signals.k.index(0), number & 1)
        mbarrier.wait(signals.v.index(0), number & 1)
        for i in range(total):
            dk = _ds_tile(it + i, i > 0, dk, buffers, signals, SIZES)
        it += total
        if total > 0:
            _last_dq(1, it - 1, buffers, signals, SIZES)
        barriers.sync(P_READY, CONSUMERS)
        mbarrier.arrive(signals.v_free.index(0), count=1)
        at = read_place(buffers.board, number)
        row = at.block * SIZES.block_n
        store_sums(copies.dk, dk, softmax_scale, buffers.k.index(0), at, row, SIZES.head_dim, SIZES)
        done(signals, number)
        tma.store_wait(0)
        mbarrier.arrive(signals.k_free.index(0), count=1)
        number += 1
        total = read_total(buffers.board, signals, number)
