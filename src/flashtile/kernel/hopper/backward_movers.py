"""The warps that move data in the backward kernels for Hopper: a loader, and a reducer per consumer.

The loader copies tiles of Q and dO into rings of buffers; a reducer adds one consumer's share of each dQ tile to an
fp32 sum in global memory. All walk over the same query tiles of the same query heads, in the same order.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flashtile.kernel.hopper import barriers, rows, score_entries
from flashtile.kernel.hopper.backward_parts import (
    BOX,
    DO_FREE,
    DQ_READY,
    LOADER_AND_CONSUMERS,
    Q_FREE,
    REDUCER_AND_CONSUMER,
    ROWS,
)
from flashtile.kernel.hopper.backward_sizes import boxes_in, first_box, parts
from flashtile.kernel.hopper.backward_work import (
    count_tiles,
    done,
    first_work,
    is_rising,
    key_block,
    next_work,
    post,
    post_end,
    read_place,
    read_total,
    start_of,
    step_of,
    walk,
    write_number,
)
from flashtile.kernel.hopper.pre_post import UNTOUCHED, in_order, next_turn
from flashtile.kernel.tile_lists import nth_tile


@builtin
def _start_add(desc, coord, src, _semantic=None):
    """``tma``'s missing member in Triton 3.6: add a block in shared memory to one in global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _load_keys(desc, at, bar, smem, WIDTH: gl.constexpr, SIZES: gl.constexpr):
    """Start to copy the program's block of K or V."""
    PANELS: gl.constexpr = WIDTH // SIZES.panel
    mbarrier.expect(bar, SIZES.block_n * WIDTH * 2)
    for i in gl.static_range(SIZES.block_n // ROWS):
        row = at.block * SIZES.block_n + i * ROWS
        place = rows.coordinates(at.batch, at.head, at.k_start, at.seqlen_k, row, SIZES.packed)
        for panel in gl.static_range(PANELS):
            rows.copy_in(desc, place, panel * SIZES.panel, bar, smem.index(i * PANELS + panel), SIZES.packed)


@gluon.jit
def _load_queries(desc, per_query_desc, place, first, bar, smem, per_query_smem, buffer, WIDTH: gl.constexpr,
                  SIZES: gl.constexpr):  # fmt: skip
    """Start to copy a tile of Q or dO, and its numbers per query from number ``first`` on, the LSE or delta."""
    PANELS: gl.constexpr = WIDTH // SIZES.panel
    mbarrier.expect(bar, SIZES.block_m * WIDTH * 2 + SIZES.block_m * 4)
    for panel in gl.static_range(PANELS):
        rows.copy_in(desc, place, panel * SIZES.panel, bar, smem.index(buffer * PANELS + panel), SIZES.packed)
    tma.async_copy_global_to_shared(per_query_desc, [first], bar, per_query_smem.index(buffer))


@gluon.jit
def loader(copies, buffers, signals, problem, counter, packed, mask, tiles, SIZES: gl.constexpr):
    """One warp: take blocks of keys, walk over the query tiles of every query head, and copy all that into buffers.

    Beside each tile of Q it notes ``2 * tile number + (1 if it needs the mask)`` and the query head. In the block that
    reaches past the last key every tile needs the mask: those keys' scores must not reach dQ.
    """
    it, posted = 0, 0
    work = first_work(SIZES)
    while work < problem.num_works:
        if work >= 0:
            at = key_block(work, problem, packed, SIZES)
            if at.block >= 0:
                total = count_tiles(at, problem, mask, tiles, SIZES)
                post(buffers.board, signals, posted, total, at, SIZES.block_n)
                it = _load_work(it, posted, total, at, copies, buffers, signals, problem, mask, tiles, SIZES)
                posted += 1
        # Not earlier: who draws before a long block would begin its next one after those that others draw later, which
        # may have to wait for it. Consumers have two tiles left to compute.
        work = next_work(counter, problem, SIZES)
    post_end(buffers.board, signals, posted)
    # Take the last arrivals: a program must not end with one left on a named barrier.
    for i in range(gl.maximum(it - SIZES.stages, 0), it):
        barriers.sync(Q_FREE + i % SIZES.stages, LOADER_AND_CONSUMERS, 1)
    for i in range(gl.maximum(it - SIZES.stages_do, 0), it):
        barriers.sync(DO_FREE + i % SIZES.stages_do, LOADER_AND_CONSUMERS, 1)


@gluon.jit
def _load_work(it, number, total, at, copies, buffers, signals, problem, mask, tiles, SIZES: gl.constexpr):
    """Load a block of keys and its query tiles; ``it`` counts the query tiles of all blocks.

    K and V come after the first query tile: their buffers become free later.
    """
    if total == 0:
        _load_k_and_v(number, at, copies, buffers, signals, SIZES)
    beyond = (at.block + 1) * SIZES.block_n > at.seqlen_k
    start = it
    rising = is_rising(at, problem)
    for head in range(at.head * problem.heads_per_kv, (at.head + 1) * problem.heads_per_kv):
        where, first_tile, bounds = walk(head, at, problem, mask, tiles, SIZES)
        first, full_first, full_end, last = bounds
        first_step = start_of(at, first, last, tiles, SIZES)
        for i in range(last - first):
            step = step_of(i, first_step, rising, first, last, SIZES)
            m_block = nth_tile(tiles, where, at.block, step)
            masked = (step < full_first) | (step >= full_end) | beyond
            row, first_query = m_block * SIZES.block_m, (first_tile + m_block) * SIZES.block_m
            place = rows.coordinates(at.batch, head, at.q_start, at.seqlen_q, row, SIZES.packed)
            buffer, buffer_do = it % SIZES.stages, it % SIZES.stages_do
            if it >= SIZES.stages:
                barriers.sync(Q_FREE + buffer, LOADER_AND_CONSUMERS, 1)
            write_number(buffers.tile, 2 * buffer, m_block * 2 + masked.to(gl.int32))
            write_number(buffers.tile, 2 * buffer + 1, head)
            _load_queries(copies.q, copies.lse, place, first_query, signals.q.index(buffer), buffers.q, buffers.lse,
                          buffer, SIZES.head_dim, SIZES)  # fmt: skip
            if it >= SIZES.stages_do:
                barriers.sync(DO_FREE + buffer_do, LOADER_AND_CONSUMERS, 1)
            _load_queries(copies.do, copies.delta, place, first_query, signals.do.index(buffer_do), buffers.do,
                          buffers.delta, buffer_do, SIZES.head_dim_v, SIZES)  # fmt: skip
            if len(copies.entries) > 0:
                _load_entries(it, where, row, at.block * SIZES.block_n, copies, buffers, signals, SIZES)
            if it == start:
                _load_k_and_v(number, at, copies, buffers, signals, SIZES)
            it += 1
    return it


@gluon.jit
def _load_entries(it, where, row, column, copies, buffers, signals, SIZES: gl.constexpr):
    """Load a score's entries of query tile number ``it``, one block for each half of the keys."""
    HALVES: gl.constexpr = SIZES.block_n // ROWS
    full, free = signals.entries
    buffer = it % SIZES.entries_stages
    if it >= SIZES.entries_stages:
        mbarrier.wait(free.index(buffer), (it // SIZES.entries_stages - 1) & 1)
    bar = full.index(buffer)
    mbarrier.expect(bar, SIZES.block_m * SIZES.block_n * SIZES.entry_bytes)
    for half in gl.static_range(HALVES):
        smem = buffers.entries[0].index(buffer * HALVES + half)
        score_entries.copy_in(copies.entries[0], where, row, column + half * ROWS, bar, smem)


@gluon.jit
def _load_k_and_v(number, at, copies, buffers, signals, SIZES: gl.constexpr):
    """Load the block of keys of piece of work ``number`` when the consumers are done with the one before."""
    if number > 0:
        mbarrier.wait(signals.v_free.index(0), (number - 1) & 1)
    _load_keys(copies.v, at, signals.v.index(0), buffers.v, SIZES.head_dim_v, SIZES)
    if number > 0:
        mbarrier.wait(signals.k_free.index(0), (number - 1) & 1)
    _load_keys(copies.k, at, signals.k.index(0), buffers.k, SIZES.head_dim, SIZES)


# --- sums of dQ -------------------------------------------------------------------------------------------------------
#
# Who comes first to a consumer's share of a dQ tile stores it; who comes later adds to it. So nothing has to be zeroed
# beforehand. A number per share, ``turn``, is what programs tell one another by. Where dQ has to be the same from run
# to run, it says whose turn it is: the place of a block of keys in the order of the work (plus _UNTOUCHED before the
# first one). Programs wait for their turns; all that they wait for is work of lower numbers, which programs have taken
# before, so the lowest that is not done can always go on. Else it says how far the first one is:
_NOBODY, _SOMEBODY, _STORED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
_UNTOUCHED = gl.constexpr(UNTOUCHED)


@gluon.jit
def _read(turn):
    """Return the number at ``turn``, and see what its writer had done before."""
    return barriers.uniform(
        gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [turn], dtype=gl.int32, is_pure=False, pack=1
        )
    )


@gluon.jit
def _claim(turn):
    """Make the number _SOMEBODY if it is _NOBODY, in one lane for the warp; return what it was."""
    return barriers.uniform(
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 $0, 0;"
            " @p atom.acquire.gpu.global.cas.b32 $0, [$1], 0, 1; }",
            "=&r,l", [turn], dtype=gl.int32, is_pure=False, pack=1,
        )
    )  # fmt: skip


@gluon.jit
def _write(turn, value):
    """When all of this warp's copies have arrived in global memory, set the number at ``turn``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;"
        " cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff;"
        " @p st.release.gpu.global.s32 [$1], $2; mov.b32 $0, $2; }",
        "=r,l,r", [turn, value], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _pass_on_assembly(pending):
    return (
        "{ .reg .pred p, q; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 q, lane, 0; setp.ne.and.s32 p, $3, 0, q;"
        f" ld.relaxed.gpu.global.s32 $0, [$4]; cp.async.bulk.wait_group {pending}; bar.warp.sync 0xffffffff;"
        " fence.acq_rel.gpu; @p st.relaxed.gpu.global.s32 [$1], $2; }"
    )


@gluon.jit
def _pass_on(turn, value, condition, ahead, PENDING: gl.constexpr):
    """When all of this warp's copies but the latest ``PENDING`` have arrived, set the number at ``turn`` if
    ``condition`` holds; return the number at ``ahead`` as ``_read`` does: one fence orders both."""
    return barriers.uniform(
        gl.inline_asm_elementwise(
            _pass_on_assembly(PENDING), "=&r,l,r,r,l", [turn, value, condition.to(gl.int32), ahead],
            dtype=gl.int32, is_pure=False, pack=1,
        )
    )  # fmt: skip


@gluon.jit
def _wait_for(turn, seen, mine):
    """Wait until it is this program's turn at a share, and return whether it is the first one.

    ``seen`` is what the number was a while ago.
    """
    while (seen != mine) & (seen != mine + _UNTOUCHED):
        seen = _read(turn)
    return seen >= _UNTOUCHED


@gluon.jit
def _come_to(turn, seen):
    """Return whether this program is the first to come to a share; ``seen`` is what the number was a while ago."""
    if seen == _NOBODY:
        seen = _claim(turn)
    first = seen == _NOBODY
    while seen == _SOMEBODY:
        seen = _read(turn)
    return first


@gluon.jit
def reducer(consumer: gl.constexpr, copies, buffers, signals, problem, mask, tiles, SIZES: gl.constexpr):
    """One warp per consumer: add its share of each dQ tile to the sum in global memory."""
    number = 0
    while read_total(buffers.board, signals, number) >= 0:
        at = read_place(buffers.board, number)
        if parts(consumer, SIZES) > 0:  # else all of dQ is the other consumer's
            rising = is_rising(at, problem)
            for head in range(at.head * problem.heads_per_kv, (at.head + 1) * problem.heads_per_kv):
                where, first_tile, bounds = walk(head, at, problem, mask, tiles, SIZES)
                first, _, _, last = bounds
                start = start_of(at, first, last, tiles, SIZES)
                turns = problem.turns + 2 * first_tile.to(gl.int64) + consumer
                if SIZES.in_turn:
                    _add_in_turn(consumer, first_tile, first, last, turns, rising, at, where, copies, buffers, signals,
                                 mask, SIZES)  # fmt: skip
                else:
                    for i in range(last - first):
                        m_block = nth_tile(tiles, where, at.block, step_of(i, start, rising, first, last, SIZES))
                        _add(consumer, first_tile + m_block, turns + 2 * m_block, copies, buffers, signals, SIZES)
        done(signals, number)
        number += 1


@gluon.jit
def _add(consumer: gl.constexpr, tile, turn, copies, buffers, signals, SIZES: gl.constexpr):
    """Add a consumer's share of one tile of dQ, as it stores it part by part."""
    seen = _read(turn)
    barriers.sync(DQ_READY + consumer, REDUCER_AND_CONSUMER, 1)
    alone = _come_to(turn, seen)
    _start(0, consumer, tile, alone, copies, buffers, signals, SIZES)
    for part in gl.static_range(1, parts(consumer, SIZES)):
        barriers.sync(DQ_READY + consumer, REDUCER_AND_CONSUMER, 1)
        _start(part, consumer, tile, alone, copies, buffers, signals, SIZES)
    if alone:
        _write(turn, _STORED)


@gluon.jit
def _add_in_turn(consumer: gl.constexpr, first_tile, first, last, turns, rising, at, where, copies, buffers, signals,
                 mask, SIZES: gl.constexpr):  # fmt: skip
    """Add a consumer's shares of all dQ tiles of a query head, each when it is the program's turn.

    The warp waits for its turn before the consumer has the share ready. It passes the turn on when it has begun to add
    to the next tile: copies take about as long as a tile to arrive, and nothing should wait for them. Who comes after
    this program comes several tiles later: see ``key_block``.
    """
    mine = in_order(at.block, gl.cdiv(at.seqlen_k, SIZES.block_n), rising)
    seen, then = first * 0 - 1, mine
    for i in range(last - first):
        m_block = step_of(i, first * 0, rising, first, last, SIZES)
        before = m_block - step_of(i - 1, first * 0, rising, first, last, SIZES)
        turn = turns + 2 * m_block
        alone = _wait_for(turn, seen, mine)
        for part in gl.static_range(parts(consumer, SIZES)):
            barriers.sync(DQ_READY + consumer, REDUCER_AND_CONSUMER, 1)
            _start(part, consumer, first_tile + m_block, alone, copies, buffers, signals, SIZES)
            if part == 0:
                ahead = gl.where(i + 1 < last - first, 2 * before, 0)
                seen = _pass_on(turn - 2 * before, then, i > 0, turn + ahead, boxes_in(0, consumer, SIZES))
        then = next_turn(mask, where, m_block, mine + 1, rising, SIZES)
    if first < last:
        _write(turns + 2 * step_of(last - first - 1, first * 0, rising, first, last, SIZES), then)


@gluon.jit
def _start(part: gl.constexpr, consumer: gl.constexpr, tile, alone, copies, buffers, signals, SIZES: gl.constexpr):
    """Store a part of a share if the program is the first there, else add it; let go of the buffer when it is read."""
    BOXES_PER_TILE: gl.constexpr = SIZES.block_m * SIZES.head_dim // (ROWS * BOX)
    box = tile * BOXES_PER_TILE + first_box(consumer, SIZES) + part * SIZES.dq_kept
    for i in gl.static_range(boxes_in(part, consumer, SIZES)):
        smem = buffers.dq.index(consumer * SIZES.dq_kept + i)
        if alone:
            tma.async_copy_shared_to_global(copies.dq, [(box + i) * ROWS, 0], smem)
        else:
            _start_add(copies.dq, [(box + i) * ROWS, 0], smem)
    tma.store_wait(0)
    mbarrier.arrive(signals.dq_free.index(consumer), count=1)
