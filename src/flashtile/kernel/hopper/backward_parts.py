"""What the backward kernels for Hopper share: their numbers, their storage, and the warps that move data.

A program owns a block of keys of one kv head. Two warpgroups, the consumers, compute (``backward_narrow.py`` and
``backward_wide.py``); the loader copies tiles of Q and dO into rings of buffers, and a reducer per consumer adds that
consumer's share of each dQ tile to an fp32 sum in global memory.

All rows are copied in panels of ``panel`` columns, the widest that the copy engine swizzles; side by side in shared
memory, several panels are one operand of a matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashtile.kernel.hopper import barriers
from flashtile.kernel.hopper.backward_sizes import boxes_in, first_box
from flashtile.kernel.seqlen import Place, place
from flashtile.kernel.tile import LOG2E
from flashtile.kernel.tile_lists import nth_tile, query_tiles
from flashtile.seqlen import Where

_Where, _Place = gl.constexpr(Where), gl.constexpr(Place)
_LOG2E = gl.constexpr(LOG2E.value)
ROWS = gl.constexpr(64)  # of one matrix instruction: a consumer's keys, and the rows of a box of dQ
BOX = gl.constexpr(32)  # columns of a box of dQ: 128 bytes

# Named barriers. Triton uses 0 and 1, and 2 to 5 for the roles after the first; a ring has two buffers at most.
Q_FREE, DO_FREE = gl.constexpr(6), gl.constexpr(8)  # a buffer of the ring may be filled again
DS_READY = gl.constexpr(10)  # four numbers; see the consumers
DQ_READY = gl.constexpr(14)  # one per consumer: its share of a dQ tile lies in shared memory
LOADER_AND_CONSUMERS, CONSUMERS, REDUCER_AND_CONSUMER = gl.constexpr(288), gl.constexpr(256), gl.constexpr(160)


class Copies(NamedTuple):
    """Descriptors of the copy engine."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    dk: Any
    dv: Any
    dq: Any


class Buffers(NamedTuple):
    """Shared memory. ``tile`` holds two numbers per buffer of Q, see ``loader``; ``facts`` what masks ask for."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    ds: Any
    p: Any
    dq: Any
    tile: Any
    facts: Any


class Filled(NamedTuple):
    """mbarriers: the copies into a buffer have arrived; and for ``dq_free``, the reducer has read it."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq_free: Any


class Work(NamedTuple):
    """A program's share: its block of keys, and ``total`` query tiles over ``heads`` query heads, a group (or none).

    Tiles of queries are numbered (batch, query head, tile), ``tiles_per_head`` for each head, and this program's
    sequence begins with tile ``first_tile`` of a head.
    """

    at: Any
    num_heads_q: Any
    first_head: Any
    heads: Any
    tiles_per_head: Any
    first_tile: Any
    total: Any


_Work = gl.constexpr(Work)

# --- layouts and operands ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def sums_layout(columns):
    """The accumulator of one warpgroup, 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout():
    """A left operand in the registers of one warpgroup."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)


@gluon.constexpr_function
def panel_layout(panel, rank=2):
    return gl.NVMMASharedLayout(2 * panel, 16, rank)


@gluon.constexpr_function
def first_width(head_dim):
    """Columns of the first of the one or two accumulators that hold ``head_dim`` columns: a power of two."""
    return 1 << (head_dim.bit_length() - 1)


@gluon.jit
def columns(smem, first, COUNT: gl.constexpr, WIDTH: gl.constexpr, PANEL: gl.constexpr):
    """Return ``COUNT`` rows of the panels from number ``first`` on, ``WIDTH`` columns, as a matrix operand."""
    LAYOUT: gl.constexpr = panel_layout(PANEL)
    return smem.index(first)._reinterpret(smem.dtype, [COUNT, WIDTH], LAYOUT)


@gluon.jit
def start_transposed(a, first_a, b, first_b, COUNT_B: gl.constexpr, HEAD_DIM: gl.constexpr, PANEL: gl.constexpr):
    """Issue ``a @ b^T``, 64 rows by ``COUNT_B``, and return it in flight."""
    LAYOUT: gl.constexpr = sums_layout(COUNT_B)
    W: gl.constexpr = first_width(HEAD_DIM)
    s = warpgroup_mma(
        columns(a, first_a, ROWS, W, PANEL),
        columns(b, first_b, COUNT_B, W, PANEL).permute((1, 0)),
        gl.zeros([ROWS, COUNT_B], gl.float32, LAYOUT),
        use_acc=False,
        is_async=True,
    )
    if W < HEAD_DIM:
        s = warpgroup_mma(
            columns(a, first_a + W // PANEL, ROWS, HEAD_DIM - W, PANEL),
            columns(b, first_b + W // PANEL, COUNT_B, HEAD_DIM - W, PANEL).permute((1, 0)),
            s,
            is_async=True,
        )
    return s


@gluon.jit
def start_sums(a, b, first_b, sums, COUNT_B: gl.constexpr, HEAD_DIM: gl.constexpr, PANEL: gl.constexpr):
    """Issue ``sums + a @ b`` and return the sums in flight; b has ``COUNT_B`` rows."""
    W: gl.constexpr = first_width(HEAD_DIM)
    first = warpgroup_mma(a, columns(b, first_b, COUNT_B, W, PANEL), sums[0], is_async=True)
    if W == HEAD_DIM:
        return (first,)
    else:
        rest = columns(b, first_b + W // PANEL, COUNT_B, HEAD_DIM - W, PANEL)
        return (first, warpgroup_mma(a, rest, sums[1], is_async=True))


@gluon.jit
def zero_sums(HEAD_DIM: gl.constexpr, IN_FLIGHT: gl.constexpr):
    """Return zeros for ``start_sums``; a loop that carries sums in flight has to begin with such ones."""
    W: gl.constexpr = first_width(HEAD_DIM)
    LAYOUT: gl.constexpr = sums_layout(W)
    first = gl.zeros([ROWS, W], gl.float32, LAYOUT)
    if IN_FLIGHT:
        first = warpgroup_mma_init(first)
    if W == HEAD_DIM:
        return (first,)
    else:
        REST: gl.constexpr = HEAD_DIM - W
        LAYOUT_REST: gl.constexpr = sums_layout(REST)
        rest = gl.zeros([ROWS, REST], gl.float32, LAYOUT_REST)
        if IN_FLIGHT:
            rest = warpgroup_mma_init(rest)
        return (first, rest)


@gluon.jit
def finish(sums, PENDING: gl.constexpr):
    """Wait until at most ``PENDING`` products are in flight, and return ``sums``, a tuple, which are none of them."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(PENDING, [sums[0]]),)
    else:
        return warpgroup_mma_wait(PENDING, sums)


@gluon.jit
def finish_beside(s, sums, PENDING: gl.constexpr):
    """Wait likewise for one more product ``s``, and return it and the sums."""
    if len(sums) == 1:
        s, first = warpgroup_mma_wait(PENDING, [s, sums[0]])
        return s, (first,)
    else:
        s, first, rest = warpgroup_mma_wait(PENDING, [s, sums[0], sums[1]])
        return s, (first, rest)


# --- numbers and rows in shared memory --------------------------------------------------------------------------------


@gluon.jit
def write_number(smem, i, value):
    WARPS: gl.constexpr = gl.num_warps()
    smem.index(i).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def read_number(smem, i):
    WARPS: gl.constexpr = gl.num_warps()
    return gl.max(smem.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def per_query(smem, buffer, BLOCK_M: gl.constexpr):
    """Return one number per query, along the columns of a transposed score tile.

    They lie in the order of ``pre_post.py``, in which the four that a thread needs of sixteen are one load.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(0, sums_layout(BLOCK_M))
    place_of = gl.arange(0, BLOCK_M, layout=LAYOUT).reshape([BLOCK_M // 16, 2, 4, 2]).permute((0, 2, 1, 3))
    x = smem.index(buffer).load(place_of.reshape([BLOCK_M]).type.layout)
    x = x.reshape([BLOCK_M // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([BLOCK_M])
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def probabilities(s, lse_log2, tile, head, first_key, facts, softmax_scale, mask, score, SIZES: gl.constexpr):
    """Return P of one tile of scores [keys, queries], and P times the score's derivative.

    ``tile`` is what the loader noted: the query tile's number, and whether it needs the mask. A branch, not a second
    copy of the code: copies cost more registers and instruction cache than the branch costs time.
    What a mask or score may ask for is read from shared memory, because registers are short in the loop around.
    """
    BLOCK_M: gl.constexpr = SIZES.block_m
    LAYOUT: gl.constexpr = sums_layout(BLOCK_M)
    seqlen_k = read_number(facts, 2)
    where = _Where(read_number(facts, 0), head, read_number(facts, 1), seqlen_k)
    k_idx = (read_number(facts, 3) + first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))[:, None]
    q_idx = ((tile >> 1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    if score is None:
        scale_log2 = softmax_scale * _LOG2E
        logits = s
    else:
        scale_log2 = _LOG2E
        s = s * softmax_scale
        logits = score.forward(where, q_idx, k_idx, s, score.args)
    if SIZES.exp_first:
        p = gl.exp2(logits * scale_log2 - lse_log2[None, :])
        if (tile & 1) != 0:
            visible = mask.predicate(where, q_idx, k_idx, mask.args) & (k_idx < seqlen_k)
            p = gl.where(visible, p, 0.0)
    else:
        if (tile & 1) != 0:
            visible = mask.predicate(where, q_idx, k_idx, mask.args) & (k_idx < seqlen_k)
            logits = gl.where(visible, logits, float("-inf"))
        p = gl.exp2(logits * scale_log2 - lse_log2[None, :])
    if score is None:
        return p, p
    else:
        return p, p * score.derivative(where, q_idx, k_idx, s, score.args)


# --- the warps that move data -----------------------------------------------------------------------------------------


@builtin
def _start_add(desc, coord, src, _semantic=None):
    """``tma``'s missing member in Triton 3.6: add a block in shared memory to one in global memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# A packed sequence ends where the copy engine sees the end of a dimension of 2**30 rows: see ``packed_descriptor``.
_FAR = gl.constexpr(2**30)


@gluon.jit
def copy_in(desc, at, head, start, length, row, bar, smem, first, WIDTH: gl.constexpr, PANEL: gl.constexpr,
            PACKED: gl.constexpr):  # fmt: skip
    """Start to copy rows of one head from ``row`` on, panel by panel; zeros past the end of the sequence."""
    for i in gl.static_range(WIDTH // PANEL):
        if PACKED:
            coordinates = [_FAR, start + length, head, _FAR - length + row, i * PANEL]
            tma.async_copy_global_to_shared(desc, coordinates, bar, smem.index(first + i))
        else:
            tma.async_copy_global_to_shared(desc, [at.batch, head, row, i * PANEL], bar, smem.index(first + i))


@gluon.jit
def copy_out(desc, at, row, smem, first, WIDTH: gl.constexpr, PANEL: gl.constexpr, PACKED: gl.constexpr):
    """Start to copy 64 rows of keys from shared memory to ``row``, those before the end of the sequence."""
    for i in gl.static_range(WIDTH // PANEL):
        if PACKED:
            coordinates = [_FAR, at.k_start + at.seqlen_k, at.head, _FAR - at.seqlen_k + row, i * PANEL]
            tma.async_copy_shared_to_global(desc, coordinates, smem.index(first + i))
        else:
            tma.async_copy_shared_to_global(desc, [at.batch, at.head, row, i * PANEL], smem.index(first + i))


@gluon.jit
def load_keys(desc, at, bar, smem, WIDTH: gl.constexpr, SIZES: gl.constexpr):
    """Start to copy the program's block of K or V."""
    PANEL: gl.constexpr = SIZES.panel
    mbarrier.expect(bar, SIZES.block_n * WIDTH * 2)
    for i in gl.static_range(SIZES.block_n // ROWS):
        row = at.block * SIZES.block_n + i * ROWS
        copy_in(desc, at, at.head, at.k_start, at.seqlen_k, row, bar, smem, i * (WIDTH // PANEL), WIDTH, PANEL,
                SIZES.packed)  # fmt: skip


@gluon.jit
def load_queries(desc, row_desc, at, head, m_block, tile, bar, smem, row_smem, buffer, WIDTH: gl.constexpr,
                 SIZES: gl.constexpr):  # fmt: skip
    """Start to copy a tile of Q (dO) and its numbers per query, the LSE (delta)."""
    PANEL: gl.constexpr = SIZES.panel
    BLOCK_M: gl.constexpr = SIZES.block_m
    mbarrier.expect(bar, BLOCK_M * WIDTH * 2 + BLOCK_M * 4)
    copy_in(desc, at, head, at.q_start, at.seqlen_q, m_block * BLOCK_M, bar, smem, buffer * (WIDTH // PANEL), WIDTH,
            PANEL, SIZES.packed)  # fmt: skip
    tma.async_copy_global_to_shared(row_desc, [(tile + m_block) * BLOCK_M], bar, row_smem.index(buffer))


@gluon.jit
def loader(copies, buffers, filled, work, mask, tiles, SIZES: gl.constexpr):
    """One warp: walk over the query tiles of every query head, and copy them into the rings.

    Beside each tile of Q it notes ``2 * tile number + (1 if it needs the mask)`` and the query head. In the block that
    reaches past the last key every tile needs the mask: those keys' scores must not reach dQ.
    """
    at = work.at
    beyond = (at.block + 1) * SIZES.block_n > at.seqlen_k
    it = 0
    for head in range(work.first_head, work.first_head + work.heads):
        tile = (at.batch * work.num_heads_q + head) * work.tiles_per_head + work.first_tile
        where = _Where(at.sequence, head, at.seqlen_q, at.seqlen_k)
        first, full_first, full_end, last = query_tiles(mask, tiles, where, at.block, SIZES.block_m, SIZES.block_n)
        for step in range(first, last):
            m_block = nth_tile(tiles, where, at.block, step)
            masked = (step < full_first) | (step >= full_end) | beyond
            buffer = it % SIZES.stages
            buffer_do = it % SIZES.stages_do
            if it >= SIZES.stages:
                barriers.sync(Q_FREE + buffer, LOADER_AND_CONSUMERS, 1)
            if it == 0:
                load_keys(copies.k, at, filled.k.index(0), buffers.k, SIZES.head_dim, SIZES)
            write_number(buffers.tile, 2 * buffer, m_block * 2 + masked.to(gl.int32))
            write_number(buffers.tile, 2 * buffer + 1, head)
            load_queries(copies.q, copies.lse, at, head, m_block, tile, filled.q.index(buffer), buffers.q, buffers.lse,
                         buffer, SIZES.head_dim, SIZES)  # fmt: skip
            if it >= SIZES.stages_do:
                barriers.sync(DO_FREE + buffer_do, LOADER_AND_CONSUMERS, 1)
            if it == 0:
                load_keys(copies.v, at, filled.v.index(0), buffers.v, SIZES.head_dim_v, SIZES)
            load_queries(copies.do, copies.delta, at, head, m_block, tile, filled.do.index(buffer_do), buffers.do,
                         buffers.delta, buffer_do, SIZES.head_dim_v, SIZES)  # fmt: skip
            it += 1
    # Take the last arrivals: a program must not end with one left on a named barrier.
    for i in range(gl.maximum(it - SIZES.stages, 0), it):
        barriers.sync(Q_FREE + i % SIZES.stages, LOADER_AND_CONSUMERS, 1)
    for i in range(gl.maximum(it - SIZES.stages_do, 0), it):
        barriers.sync(DO_FREE + i % SIZES.stages_do, LOADER_AND_CONSUMERS, 1)


@gluon.jit
def reducer(consumer: gl.constexpr, copies, buffers, filled, work, mask, tiles, SIZES: gl.constexpr):
    """One warp per consumer: add its share of each dQ tile to the sum in global memory, in the same walk."""
    at = work.at
    BOXES_PER_TILE: gl.constexpr = SIZES.block_m * SIZES.head_dim // (ROWS * BOX)
    for head in range(work.first_head, work.first_head + work.heads):
        tile = (at.batch * work.num_heads_q + head) * work.tiles_per_head + work.first_tile
        where = _Where(at.sequence, head, at.seqlen_q, at.seqlen_k)
        first, _, _, last = query_tiles(mask, tiles, where, at.block, SIZES.block_m, SIZES.block_n)
        for step in range(first, last):
            m_block = nth_tile(tiles, where, at.block, step)
            for part in gl.static_range(2):
                if boxes_in(part, consumer, SIZES) > 0:
                    box = (tile + m_block) * BOXES_PER_TILE + first_box(consumer, SIZES) + part * SIZES.dq_kept
                    barriers.sync(DQ_READY + consumer, REDUCER_AND_CONSUMER, 1)
                    fence_async_shared()
                    for i in gl.static_range(boxes_in(part, consumer, SIZES)):
                        _start_add(copies.dq, [(box + i) * ROWS, 0], buffers.dq.index(consumer * SIZES.dq_kept + i))
                    tma.store_wait(0)
                    mbarrier.arrive(filled.dq_free.index(consumer), count=1)


@gluon.jit
def store_dq(consumer: gl.constexpr, dq, number, buffers, filled, BOXES: gl.constexpr, SIZES: gl.constexpr):
    """Hand part ``number`` (counted over all tiles) of the consumer's dQ to its reducer.

    The numbers lie in the order in which the threads hold them, 16 bytes of a thread side by side; the post kernel
    undoes that order.
    """
    mbarrier.wait(filled.dq_free.index(consumer), (number & 1) ^ 1)
    x = dq.reshape([4, 2, 8, 4 * BOXES, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * BOXES, BOX])
    smem = buffers.dq.index(consumer * SIZES.dq_kept)
    smem._reinterpret(gl.float32, [ROWS * BOXES, BOX], smem.layout).store(x)
    barriers.arrive(DQ_READY + consumer, REDUCER_AND_CONSUMER)


@gluon.jit
def store_sums(desc, sums, factor, smem, first, at, row, WIDTH: gl.constexpr, SIZES: gl.constexpr):
    """Start to write one consumer's dK or dV through its own part of K's or V's shared memory."""
    PANEL: gl.constexpr = SIZES.panel
    W: gl.constexpr = first_width(WIDTH)
    columns(smem, first, ROWS, W, PANEL).store((sums[0] * factor).to(smem.dtype))
    if W < WIDTH:
        columns(smem, first + W // PANEL, ROWS, WIDTH - W, PANEL).store((sums[1] * factor).to(smem.dtype))
    fence_async_shared()
    gl.thread_barrier()
    copy_out(desc, at, row, smem, first, WIDTH, PANEL, SIZES.packed)


# --- before the roles part --------------------------------------------------------------------------------------------


@gluon.jit
def key_block(seqlen_q, seqlen_k, num_sequences, packed, num_heads_kv, heads_per_section, BLOCK_N: gl.constexpr):
    """Return this program's Place.

    Heads are taken in sections whose Q, dO and dQ stay in the L2 cache; in a section, first the first block of every
    head, then the second: long ones come first under a causal mask.
    """
    if packed is None:
        num_blocks = gl.cdiv(seqlen_k, BLOCK_N)
        first = gl.program_id(0) // (heads_per_section * num_blocks) * heads_per_section
        heads = gl.minimum(heads_per_section, gl.num_programs(0) // num_blocks - first)
        rest = gl.program_id(0) - first * num_blocks
        head = first + rest % heads
        batch = head // num_heads_kv
        return _Place(batch, batch, head % num_heads_kv, rest // heads, 0, 0, seqlen_q, seqlen_k, 0)
    else:
        return place(seqlen_q, seqlen_k, num_sequences, packed, num_heads_kv, BLOCK_N, True)


@gluon.jit
def share_of(at, packed, num_heads_q, heads_per_kv, tiles_per_head, mask, tiles, SIZES: gl.constexpr):
    """Return this program's Work."""
    heads = gl.where(at.block < 0, 0, heads_per_kv)
    first_head = at.head * heads_per_kv
    total = heads * 0
    for head in range(first_head, first_head + heads):
        where = _Where(at.sequence, head, at.seqlen_q, at.seqlen_k)
        first, _, _, last = query_tiles(mask, tiles, where, at.block, SIZES.block_m, SIZES.block_n)
        total += last - first
    first_tile = heads * 0
    if packed is not None:
        first_tile = at.q_start // SIZES.block_m + at.sequence
    return _Work(at, num_heads_q, first_head, heads, tiles_per_head, first_tile, total)
