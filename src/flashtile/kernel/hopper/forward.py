"""The forward pass for Hopper in Gluon: one warp loads, two or three warpgroups compute.

    S = score(softmax_scale * Q K^T) where mask      P = softmax(S)      O = P V      lse = ln sum exp(S)

The scheduler, one warp, finds out which query tile is next and which key tiles it sees; the producer, another one,
copies tiles of Q, K and V into rings of buffers; the consumers, warpgroups that own 64 query
rows each, do everything else in one loop over key tiles: issue Q K^T of tile i and P V of tile i - 1, then take the
softmax of tile i while the tensor cores work for the other consumers (they take turns).

The loop runs on across the ends of query tiles: at the first key tile of the next one, P V of the last key tile of this
one is in flight as ever, and its rows are written when it is done. So the tensor cores find work at the ends too. Where
``hot_loop`` says so, the key tiles in the middle of a query tile have a loop of their own over the same function. (A
study had a copy each for first, masked, full and last tiles: 150 KB of code.)

Source: Shah et al., FlashAttention-3 (2024). The portable version is in ``flash_attention_triton.py``.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, replay, seqlen, tile_lists
from flashtile.kernel.hiding import asks_rows, seen_by_rows
from flashtile.kernel.hopper import barriers, forward_parts, rows, schedule, score_entries
from flashtile.kernel.hopper.barriers import mbarriers
from flashtile.kernel.hopper.forward_parts import LOG2E, ROWS, Out
from flashtile.kernel.hopper.forward_sizes import chunks_of, operands, sizes, two_consumers
from flashtile.kernel.hopper.hiding import hide
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.tile_lists import key_tiles, nth_tile
from flashtile.mask import Mask, full
from flashtile.mask.kinds import most_seen
from flashtile.mask.value import is_full
from flashtile.score import Score, few_registers, for_scale
from flashtile.seqlen import Seqlens, Where


class Rings(NamedTuple):
    """What the roles share: buffers by chunk of columns, mbarriers that say when they are filled; the board of tiles,
    mbarriers that say when one is posted, and one by which the producer asks for the next.

    ``entries`` is (buffers, mbarriers) for a score's entries, each of one consumer's rows, or () if there are none.
    """

    q_smem: Any
    k_smem: Any
    v_smem: Any
    q_full: Any
    k_full: Any
    v_full: Any
    board: Any
    posted: Any
    wanted: Any
    entries: Any


class Walk(NamedTuple):
    """Where a consumer is: key tile ``step`` of a walk down to ``first``, of which [full_first, full_end) need no mask.

    ``is_first`` says whether it is the first of its query tile, ``keep`` whether the key tile before it was not.
    """

    step: Any
    first: Any
    full_first: Any
    full_end: Any
    is_first: Any
    keep: Any
    stage: Any
    phase: Any
    q_buffer: Any
    slot: Any
    slot_before: Any
    entries_buffer: Any
    entries_phase: Any


_Where, _Rings, _Out, _Walk = gl.constexpr(Where), gl.constexpr(Rings), gl.constexpr(Out), gl.constexpr(Walk)


@gluon.jit
def _where(at, num_sequences, SIZES: gl.constexpr):
    """Return what masks and scores know of a tile's place."""
    if SIZES.packed:  # the rows after the last sequence are in none, but a score may read a table by sequence
        return _Where(gl.maximum(gl.minimum(at.sequence, num_sequences - 1), 0), at.head, at.seqlen_q, at.seqlen_k)
    else:
        return _Where(at.sequence, at.head, at.seqlen_q, at.seqlen_k)


# --- the producer -----------------------------------------------------------------------------------------------------


# How many key tiles of a query tile are left to copy when the next query tile is asked for; in a short walk, all.
DRAW_AHEAD, SHORT_WALK = gl.constexpr(3), gl.constexpr(8)
# Below so many keys to see two consumers beat three under a mask. Causal, head_dim 64, against three: 1.29 at 512, 1.15
# at 1,024, 0.99 at 2,048; a window in 16k: 1.43 with 256 keys, 1.08 with 1,024, 0.98 with 2,048.
SHORT_SEQUENCE = 2048


@gluon.jit
def _expect(full, descs, COPIES: gl.constexpr):
    if len(descs) == 1:
        mbarrier.expect(full, COPIES * descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full, COPIES * (descs[0].block_type.nbytes + descs[1].block_type.nbytes))


@gluon.jit
def _copy(descs, smem, full, index, at, SIZES: gl.constexpr):
    """Start to copy the rows at coordinates ``at`` into buffer ``index``, chunk by chunk."""
    rows.copy_in(descs[0], at, 0, full, smem[0].index(index), SIZES.packed)
    if len(descs) == 2:
        rows.copy_in(descs[1], at, smem[0].shape[-1], full, smem[1].index(index), SIZES.packed)


@gluon.jit
def _copy_next(descs, smem, full, free, count, at, SIZES: gl.constexpr):
    """Start to copy block number ``count`` of a ring, when the consumers are done with the one in its buffer."""
    stage = count % SIZES.stages
    if count >= SIZES.stages:
        barriers.sync(free + stage, SIZES.threads, 1)
    _expect(full.index(stage), descs, 1)
    _copy(descs, smem, full.index(stage), stage, at, SIZES)


@gluon.jit
def _copy_queries(descs, rings, count, at, SIZES: gl.constexpr):
    """Start to copy the queries of a tile, the one number ``count``."""
    buffer = count % SIZES.q_buffers
    if count >= SIZES.q_buffers:
        barriers.sync(SIZES.q_free + buffer, SIZES.threads, 1)
    full = rings.q_full.index(buffer)
    _expect(full, descs, SIZES.consumers)
    for c in gl.static_range(SIZES.consumers):
        row = (at.block * SIZES.consumers + c) * ROWS
        where = rows.coordinates(at.batch, at.head, at.q_start, at.seqlen_q, row, SIZES.packed)
        _copy(descs, rings.q_smem, full, buffer * SIZES.consumers + c, where, SIZES)


@gluon.jit
def _full_tiles(CONSUMER: gl.constexpr, mask, tiles, where, at, SIZES: gl.constexpr):
    """Return the key tiles [first, end) of which a consumer's own rows see every key."""
    if tiles is None:
        block = gl.minimum(at.block * SIZES.consumers + CONSUMER, (where.seqlen_q - 1) // ROWS)  # one that has rows
        bounds = key_tiles(mask, tiles, where, block, ROWS, SIZES.block_n)
    else:
        bounds = key_tiles(mask, tiles, where, at.block, ROWS * SIZES.consumers, SIZES.block_n)
    return bounds[1], bounds[2]


@gluon.jit
def scheduler(rings, counts, counter, packed, mask, tiles, SIZES: gl.constexpr):
    """Post query tiles, each when the producer asks for it: one ahead, so that nobody waits for what a tile's place and
    its mask's tables take to be found out."""
    num_heads_q, _, seqlen_q, seqlen_k, num_sequences, num_tiles, section = counts
    BLOCK_M: gl.constexpr = ROWS * SIZES.consumers
    slot, phase = 0, 0
    number = gl.program_id(0)
    while number < num_tiles:
        at = schedule.place(number, num_tiles, section, seqlen_q, seqlen_k, num_sequences, packed, num_heads_q, BLOCK_M)
        if at.block >= 0:
            where = _where(at, num_sequences, SIZES)
            first, _, _, last = key_tiles(mask, tiles, where, at.block, BLOCK_M, SIZES.block_n)
            # A query tile without keys: one key tile, of which the mask leaves nothing.
            last = gl.maximum(last, first + 1)
            full = (_full_tiles(0, mask, tiles, where, at, SIZES), _full_tiles(1, mask, tiles, where, at, SIZES))
            if SIZES.consumers == 3:
                full = full + (_full_tiles(2, mask, tiles, where, at, SIZES),)  # noqa: RUF005
            schedule.post(rings.board, rings.posted, slot, at, first, last, full, SIZES.packed)
            slot = (slot + 1) % SIZES.slots
            mbarrier.wait(rings.wanted.index(0), phase)
            phase ^= 1
        if SIZES.queue:
            number = schedule.drawn(schedule.draw(counter), num_tiles, counter)
        else:
            number += gl.num_programs(0)
    schedule.post_end(rings.board, rings.posted, slot)


@gluon.jit
def producer(descs, rings, counts, tiles, SIZES: gl.constexpr):
    """Copy what the consumers need in the order in which they do: the keys of a tile, then the values of the one before
    it, a query tile's queries with its first keys, and a score's entries."""
    q_descs, k_descs, v_descs, entries_descs = descs
    _, heads_per_kv, seqlen_q, seqlen_k, num_sequences, _, _ = counts
    count, q_count, slot, slot_phase = 0, 0, 0, 0
    # "Before the first tile" are rows past the end, zeros: the consumers' first P V is then one like all others.
    values_at = rows.coordinates(0, 0, 0, 0, 0 if SIZES.packed else seqlen_k, SIZES.packed)
    mbarrier.wait(rings.posted.index(0), 0)
    live, first, last = schedule.read_walk(rings.board, 0)
    while live:
        at = schedule.read_place(rings.board, slot, seqlen_q, seqlen_k, SIZES.packed)
        where = _where(at, num_sequences, SIZES)
        steps = last - first
        # As late as finding out allows: who has just begun a long tile must not keep the next long one from the others.
        # (Drawn at the beginning, shares of a causal pass at head_dim 256 differed by 8 %.)
        ask_at = gl.where(steps > SHORT_WALK, steps - DRAW_AHEAD, 0)
        kv_head = at.head // heads_per_kv
        for i in range(steps):
            if i == ask_at:
                mbarrier.arrive(rings.wanted.index(0), count=1)
            row = nth_tile(tiles, where, at.block, last - 1 - i) * SIZES.block_n
            keys_at = rows.coordinates(at.batch, kv_head, at.k_start, at.seqlen_k, row, SIZES.packed)
            _copy_next(k_descs, rings.k_smem, rings.k_full, SIZES.k_free, count, keys_at, SIZES)
            _copy_next(v_descs, rings.v_smem, rings.v_full, SIZES.v_free, count, values_at, SIZES)
            values_at = keys_at
            if i == 0:
                _copy_queries(q_descs, rings, q_count, at, SIZES)
                q_count += 1
            if len(entries_descs) > 0:
                score_entries.copy_next(entries_descs[0], rings.entries, count, where, at.block, row, SIZES)
            count += 1
        slot, slot_phase = _next(slot, slot_phase, SIZES.slots)
        mbarrier.wait(rings.posted.index(slot), slot_phase)
        live, first, last = schedule.read_walk(rings.board, slot)
    if count > 0:
        _copy_next(v_descs, rings.v_smem, rings.v_full, SIZES.v_free, count, values_at, SIZES)
    # Every release has to meet its wait before the program ends. (The consumers do not release the last values.)
    for i in gl.static_range(SIZES.stages):
        if count + i >= SIZES.stages:
            barriers.sync(SIZES.k_free + (count + i) % SIZES.stages, SIZES.threads, 1)
            if i > 0:
                barriers.sync(SIZES.v_free + (count + i) % SIZES.stages, SIZES.threads, 1)
    for i in gl.static_range(SIZES.q_buffers):
        if q_count + i >= SIZES.q_buffers:
            barriers.sync(SIZES.q_free + (q_count + i) % SIZES.q_buffers, SIZES.threads, 1)
    score_entries.take_last_releases(count, SIZES)


# --- a consumer -------------------------------------------------------------------------------------------------------


@gluon.jit
def _next(index, phase, COUNT: gl.constexpr):
    """Return the next buffer of a ring, and the phase of its mbarrier."""
    return gl.where(index == COUNT - 1, 0, index + 1), gl.where(index == COUNT - 1, phase ^ 1, phase)


@gluon.jit
def _indices(at, tiles, where, step, CONSUMER: gl.constexpr, SIZES: gl.constexpr):
    """Return the query indices of a tile of S, the number of its first key, and its keys counted from there."""
    layout: gl.constexpr = forward_parts.tile_layout(SIZES.block_n)
    row = (at.block * SIZES.consumers + CONSUMER) * ROWS
    q_idx = (row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))[:, None]
    start_n = nth_tile(tiles, where, at.block, step) * SIZES.block_n
    return q_idx, start_n, gl.arange(0, SIZES.block_n, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _key_tile(CONSUMER: gl.constexpr, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles,
              scales, walk, state, finished, EDGE: gl.constexpr, SIZES: gl.constexpr):  # fmt: skip
    """Take one key tile: issue its Q K^T and P V of the tile before, and return the online softmax's next state.

    Without EDGE the tile needs no mask, and is neither the first nor the last of its query tile. At the first, the rows
    of the query tile before are written; their statistics are ``finished``, if not still in ``state``.

    Who comes to a named barrier without waiting there (``arrive``) lets go of something: of its turn, of a buffer.
    """
    NEXT: gl.constexpr = (CONSUMER + 1) % SIZES.consumers
    stage, phase, step = walk.stage, walk.phase, walk.step
    acc, p, alpha, statistics = state
    initial, beside = None, None
    if score is not None:
        at = schedule.read_place(rings.board, walk.slot, seqlen_q, seqlen_k, SIZES.packed)
        where = _where(at, out.num_sequences, SIZES)
        q_idx, start_n, offs_n = _indices(at, tiles, where, step, CONSUMER, SIZES)
        k_idx = start_n + offs_n
        initial = score.initial(where, q_idx, k_idx, softmax_scale, softmax_scale, score.args)
    mbarrier.wait(rings.k_full.index(stage), phase)
    barriers.sync(SIZES.turn + CONSUMER, 256)
    # min(step, 0) is 0, but unknown: else the compiler makes all descriptors of Q before the loop, too many to keep.
    q_index = walk.q_buffer * SIZES.consumers + CONSUMER + gl.minimum(step, 0)
    s = forward_parts.issue_scores(rings, q_index, stage, initial, SIZES)
    acc = forward_parts.rescale_if_needed(acc, alpha)  # while the tensor cores have Q K^T to do
    mbarrier.wait(rings.v_full.index(stage), phase)
    acc = forward_parts.issue_values(p, rings.v_smem, stage, acc, walk.keep)
    barriers.arrive(SIZES.turn + NEXT, 256)
    if score is not None:
        if len(rings.entries) > 0:
            beside = score_entries.read(rings.entries, walk.entries_buffer, walk.entries_phase)
        else:
            beside = score.beside(where, q_idx, k_idx, score.args)
    masked = EDGE and (step >= walk.full_end) | (step < walk.full_first)
    seen, exact = None, masked
    if EDGE and asks_rows(mask.exact):  # tables, which are read while the tensor cores work
        nothing = forward_parts.zeros_of_rows(SIZES.block_n)
        seen = (nothing, nothing)
        if masked:
            at = schedule.read_place(rings.board, walk.slot, seqlen_q, seqlen_k, SIZES.packed)
            where = _where(at, out.num_sequences, SIZES)
            q_idx, start_n, offs_n = _indices(at, tiles, where, step, CONSUMER, SIZES)
            seen = seen_by_rows(where, q_idx, start_n + offs_n, mask)
            exact = mask.exact(mask.args)
    # Gluon puts a barrier of the warpgroup between two waits for one mbarrier. Here it costs nothing.
    gl.thread_barrier()
    s = warpgroup_mma_wait(len(acc), deps=(s,))
    barriers.arrive(SIZES.k_free + stage, SIZES.threads)
    if EDGE:
        barriers.arrive_if(step == walk.first, SIZES.q_free + walk.q_buffer, SIZES.threads)

    if score is not None:
        s = score.scaled(where, q_idx, k_idx, s, beside, softmax_scale, score.args)
    if EDGE and masked:
        at = schedule.read_place(rings.board, walk.slot, seqlen_q, seqlen_k, SIZES.packed)
        where = _where(at, out.num_sequences, SIZES)
        q_idx, start_n, offs_n = _indices(at, tiles, where, step, CONSUMER, SIZES)
        s = hide(s, float("-inf"), seen, exact, where, q_idx, start_n + offs_n, mask, False)
        if start_n + SIZES.block_n > where.seqlen_k:
            s = gl.where(offs_n < where.seqlen_k - start_n, s, float("-inf"))
    tile_max = forward_parts.row_max_of(s)
    if len(rings.entries) > 0:  # of which all went into the maximum, and that into a branch
        barriers.arrive(SIZES.entries_free + walk.entries_buffer, SIZES.threads_of_one)

    if SIZES.wait_after == "maximum":
        tile_max = forward_parts.finish_before_wait(tile_max)
    if SIZES.wait_after == "exponentials":
        p_fp32, alpha, statistics = forward_parts.fold(s, statistics, tile_max, scales, p.dtype)
        statistics = forward_parts.sum_before_wait(statistics)
    acc = forward_parts.wait_values(acc)
    barriers.arrive(SIZES.v_free + stage, SIZES.threads)
    if EDGE and walk.is_first:
        at = schedule.read_place(rings.board, walk.slot_before, seqlen_q, seqlen_k, SIZES.packed)
        logit_scale = forward_parts.unit(softmax_scale, score)
        if SIZES.wait_after == "exponentials":  # then ``statistics`` are those of this query tile already
            forward_parts.write_rows(out, acc, finished, at, logit_scale, sinks_ptr, CONSUMER, SIZES)
        else:
            forward_parts.write_rows(out, acc, statistics, at, logit_scale, sinks_ptr, CONSUMER, SIZES)
            statistics = forward_parts.fresh_statistics(statistics)
    if SIZES.wait_after != "exponentials":
        p_fp32, alpha, statistics = forward_parts.fold(s, statistics, tile_max, scales, p.dtype)
    return acc, gl.convert_layout(p_fp32.to(p.dtype), p.type.layout, assert_trivial=True), alpha, statistics


@gluon.jit
def consumer(CONSUMER: gl.constexpr, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles,
             SIZES: gl.constexpr):  # fmt: skip
    """Compute rows 64 CONSUMER, ... of every query tile that the producer posts."""
    scales = forward_parts.scales_of(forward_parts.unit(softmax_scale, score) * LOG2E)
    acc, p, alpha, statistics = forward_parts.start(rings.v_smem, SIZES)
    finished = statistics
    stage, phase, q_buffer, q_phase, slot, slot_phase, slot_before = 0, 0, 0, 0, 0, 0, 0
    entries_buffer, entries_phase = CONSUMER + 0, 0
    if SIZES.consumers - 1 == CONSUMER:
        barriers.arrive(SIZES.turn, 256)

    mbarrier.wait(rings.posted.index(0), 0)
    live, first, last = schedule.read_walk(rings.board, 0)
    full_first, full_end = schedule.read_full(rings.board, 0, CONSUMER)
    mbarrier.wait(rings.q_full.index(0), 0, pred=live)
    step = last - 1
    # Before the first tile of all there is nothing, neither rows to write nor a sum to keep.
    any_tile, keep, is_first = live, step < first, step < first
    while live:
        acc, p, alpha, statistics = _key_tile(
            CONSUMER, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, scales,
            _Walk(step, first, full_first, full_end, is_first, keep, stage, phase, q_buffer, slot, slot_before,
                  entries_buffer, entries_phase),
            (acc, p, alpha, statistics), finished, True, SIZES,
        )  # fmt: skip
        keep = is_first == 0  # else P V of this tile, the first of its query tile, begins a new sum
        is_first = step == first  # the next one
        stage, phase = _next(stage, phase, SIZES.stages)
        entries_buffer, entries_phase = score_entries.next_buffer(entries_buffer, entries_phase, SIZES)
        step -= 1
        if is_first:
            if SIZES.wait_after == "exponentials":
                finished = statistics
                statistics = forward_parts.fresh_statistics(statistics)
            slot_before = slot
            slot, slot_phase = _next(slot, slot_phase, SIZES.slots)
            q_buffer, q_phase = _next(q_buffer, q_phase, SIZES.q_buffers)
            mbarrier.wait(rings.posted.index(slot), slot_phase)
            live, first, last = schedule.read_walk(rings.board, slot)
            full_first, full_end = schedule.read_full(rings.board, slot, CONSUMER)
            step = last - 1
            mbarrier.wait(rings.q_full.index(q_buffer), q_phase, pred=live)
        if SIZES.hot_loop:
            # Key tiles in the middle. Without branches the compiler puts more of the softmax under the products.
            stop = gl.where(is_first | (step >= full_end), step + 1, gl.maximum(full_first, first + 1))
            while step >= stop:
                acc, p, alpha, statistics = _key_tile(
                    CONSUMER, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, scales,
                    _Walk(step, first, full_first, full_end, is_first, keep, stage, phase, q_buffer, slot, slot_before,
                          entries_buffer, entries_phase),
                    (acc, p, alpha, statistics), finished, False, SIZES,
                )  # fmt: skip
                keep = live  # that is, true
                stage, phase = _next(stage, phase, SIZES.stages)
                entries_buffer, entries_phase = score_entries.next_buffer(entries_buffer, entries_phase, SIZES)
                step -= 1
    if any_tile:
        acc = forward_parts.rescale_if_needed(acc, alpha)
        mbarrier.wait(rings.v_full.index(stage), phase)
        acc = forward_parts.wait_values(forward_parts.issue_values(p, rings.v_smem, stage, acc, keep))
        at = schedule.read_place(rings.board, slot_before, seqlen_q, seqlen_k, SIZES.packed)
        logit_scale = forward_parts.unit(softmax_scale, score)
        if SIZES.wait_after != "exponentials":
            finished = statistics
        forward_parts.write_rows(out, acc, finished, at, logit_scale, sinks_ptr, CONSUMER, SIZES)
        tma.store_wait(0)
    if CONSUMER == 0:
        barriers.sync(SIZES.turn, 256)


# --- the kernel -------------------------------------------------------------------------------------------------------


@gluon.jit
def _ring(descs, COUNT: gl.constexpr):
    """Return room for ``COUNT`` blocks of each descriptor."""
    shape: gl.constexpr = [COUNT] + descs[0].block_shape  # noqa: RUF005
    first = gl.allocate_shared_memory(descs[0].dtype, shape, descs[0].layout)
    if len(descs) == 1:
        return (first,)
    else:
        shape_of_rest: gl.constexpr = [COUNT] + descs[1].block_shape  # noqa: RUF005
        return (first, gl.allocate_shared_memory(descs[1].dtype, shape_of_rest, descs[1].layout))


@gluon.jit
def _with_rest(desc, rest):
    if rest is None:
        return (desc,)
    else:
        return (desc, rest)


@gluon.jit(
    do_not_specialize=["row_stride", "num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_sequences",
                       "num_tiles", "section"]
)  # fmt: skip
def forward_kernel(
    q_desc, q_rest, k_desc, k_rest, v_desc, v_rest, o_desc, lse_ptr, counter, sinks_ptr,
    row_stride, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, num_tiles, section, softmax_scale,
    packed, mask, score, entries_desc, tiles, SIZES: gl.constexpr,
):  # fmt: skip
    """Each program writes O and LSE of the query tiles that it is dealt. ``*_rest`` are a second chunk of columns."""
    CONSUMERS: gl.constexpr = SIZES.consumers
    descs = (_with_rest(q_desc, q_rest), _with_rest(k_desc, k_rest), _with_rest(v_desc, v_rest),
             () if entries_desc is None else (entries_desc,))  # fmt: skip
    rings = _Rings(
        _ring(descs[0], CONSUMERS * SIZES.q_buffers), _ring(descs[1], SIZES.stages), _ring(descs[2], SIZES.stages),
        mbarriers(SIZES.q_buffers, 1), mbarriers(SIZES.stages, 1), mbarriers(SIZES.stages, 1),
        schedule.board(SIZES.slots), mbarriers(SIZES.slots, 1), mbarriers(1, 1),
        score_entries.new_ring(descs[3], SIZES),
    )  # fmt: skip
    out = _Out(
        o_desc, _ring((o_desc,), CONSUMERS * SIZES.o_buffers)[0], lse_ptr, row_stride, num_heads_q, num_sequences
    )
    fence_async_shared()
    counts = (num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, num_tiles, section)
    # Triton can neither give a name to a tuple that holds functions nor repeat a list: hence the lines alike.
    C0: gl.constexpr = 0
    C1: gl.constexpr = 1
    C2: gl.constexpr = 2
    REGISTERS: gl.constexpr = SIZES.registers_consumer
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (C0, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, SIZES)),
            (consumer, (C1, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, SIZES)),
            (producer, (descs, rings, counts, tiles, SIZES)),
            (scheduler, (rings, counts, counter, packed, mask, tiles, SIZES)),
        ], [4, 1, 1], [REGISTERS, SIZES.registers_producer, SIZES.registers_producer])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (C0, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, SIZES)),
            (consumer, (C1, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, SIZES)),
            (consumer, (C2, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, SIZES)),
            (producer, (descs, rings, counts, tiles, SIZES)),
            (scheduler, (rings, counts, counter, packed, mask, tiles, SIZES)),
        ], [4, 4, 1, 1], [REGISTERS, REGISTERS, SIZES.registers_producer, SIZES.registers_producer])  # fmt: skip


# --- on the host ------------------------------------------------------------------------------------------------------


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    sinks: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    max_logits: torch.Tensor | None = None,
    config: launch.HopperConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(o, lse)``: see the portable ``forward``. ``hopper.refusal`` says what this one does not serve."""
    score = for_scale(score, softmax_scale)
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    o = empty_in_order_of(q, (batch, num_heads_q, seqlen_q, head_dim_v))
    lse = torch.empty((batch, num_heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    if seqlens is not None and seqlens.seqused_q is not None:
        o.zero_()
        lse.fill_(-math.inf)
    if lse.numel() == 0:
        return o, lse
    if seqlen_k == 0:  # nothing to describe to the copy engine, and nothing that a mask could leave
        k, v = (k.new_zeros(batch, num_heads_kv, 1, columns) for columns in (head_dim, head_dim_v))
        mask = full()
    alike = seqlens is None and is_full(mask)  # all query tiles take the same time
    counter = None if alike else schedule.counter_of(q.device)
    options = (softmax_scale, seqlen_k, config, score, seqlens)
    call = replay.Call("hopper_forward", q.device, (q, k, v, sinks), mask, *options, fresh=(o, lse, counter))
    if call.again():
        return o, lse
    config = config or launch.lookup_hopper("hopper_forward", head_dim, head_dim_v, q.dtype)
    listed = mask.key_range is None and seqlens is None
    length = seqlen_q if seqlens is None else seqlen_q // max(1, seqlens.cu_seqlens_q.numel() - 1)  # on average
    short = min(length, most_seen(mask)) < SHORT_SEQUENCE and not is_full(mask)
    tables = next(mask.tensors(), None) is not None
    if config.consumers == 3 and (not few_registers(score) or listed or short or tables):
        # Most scores and tables want registers that three consumers do not leave; tile lists are made for a power of
        # two of queries; in short sequences larger tiles lose more at the mask's edge than they gain elsewhere.
        config = two_consumers(config)
    queue = config.schedule == "queue" and not alike
    entries = score_entries.tensor_of(score, softmax_scale)
    SIZES = sizes(chunks_of(head_dim), chunks_of(head_dim_v), config, queue, seqlens is not None, score is not None,
                  entries.itemsize if entries is not None else 0)  # fmt: skip
    num_sequences, packed, num_tiles = seqlen.on_device(seqlens, seqlen_q, config.block_m)
    device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, False)
    num_tiles *= batch * num_heads_q
    section = 1
    if not alike:
        section = schedule.heads_per_section(batch, num_heads_q, num_heads_kv, seqlen_k * (head_dim + head_dim_v) * 2)
    args = (
        *operands(q, k, v, o, SIZES), lse, counter if queue else None, sinks,
        seqlen_q, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k, num_sequences, num_tiles,
        section, softmax_scale, packed, device_mask, launcher.score_in_parts(score, q, k, mask, softmax_scale),
        score_entries.described(entries, ROWS.value, SIZES.block_n.value, SIZES.entries_buffers.value), tiles,
    )  # fmt: skip
    programs = num_tiles if config.schedule == "grid" else min(num_tiles, schedule.multiprocessors(q.device))
    with launch.on_device(q.device), call.noted():
        launcher.run(forward_kernel, programs, q.device, args, {"SIZES": SIZES}, config)
    return o, lse
