"""The small kernels before and after the backward pass for Hopper, in portable Triton.

Before: delta and the LSE in log2, in the order that the consumers read, and whose turn it is to add to dQ. After: the
sums of dQ out of the order in which the consumers stored them, scaled, in the tensors' dtype. Both own one tile of
queries per program; every packed sequence begins a tile of its own, so tiles of the sums belong to one sequence alone.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl

from flashtile.kernel.hopper.backward_sizes import boxes_in, first_box, parts
from flashtile.kernel.seqlen import place
from flashtile.kernel.tile import dot_rows, load_rows, lse_to_log2, tile_pointer
from flashtile.kernel.tile_lists import query_tiles
from flashtile.seqlen import Where

_BOX = tl.constexpr(64 * 32)  # numbers in a box
UNTOUCHED = 2**30  # on top of a turn: nobody has stored anything yet
_UNTOUCHED = tl.constexpr(UNTOUCHED)
_Where = tl.constexpr(Where)


@triton.jit
def _tile_number(at, packed, num_heads, tiles_per_head, BLOCK_M: tl.constexpr):
    """Return the number of this program's tile in 64 bits: (batch, query head, tile)."""
    tile = (at.batch.to(tl.int64) * num_heads + at.head) * tiles_per_head + at.block
    if packed is not None:
        tile += at.q_start // BLOCK_M + at.sequence
    return tile


@triton.jit
def in_order(block, num_blocks, rising):
    """Return the place of a block of keys in rising or falling order; and likewise the block in a place."""
    return tl.where(rising, block, num_blocks - 1 - block)


@triton.jit
def next_turn(mask, where, m_block, turn, rising, SIZES: tl.constexpr):
    """Return the first turn from ``turn`` on whose block of keys walks over a tile of queries, or the number of blocks.

    Turns at a tile of dQ come in rising or falling order of the blocks.
    """
    num_blocks = tl.cdiv(where.seqlen_k, SIZES.block_n)
    visits = False
    while (turn < num_blocks) & (visits == 0):
        block = in_order(turn, num_blocks, rising)
        first, _, _, last = query_tiles(mask, None, where, block, SIZES.block_m, SIZES.block_n)
        visits = (first <= m_block) & (m_block < last)
        turn += tl.where(visits, 0, 1)
    return turn


@triton.jit(
    do_not_specialize=["lse_stride", "num_heads", "seqlen_q", "seqlen_k", "num_sequences", "tiles_per_head",
                       "first_rising"]
)  # fmt: skip
def before_kernel(
    do_ptr, o_ptr, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr, turns_ptr, do_strides, o_strides, lse_stride,
    num_heads, seqlen_q, seqlen_k, num_sequences, tiles_per_head, packed, mask, first_rising,
    HEAD_DIM_V: tl.constexpr, CHUNKS_V: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, sequence) writes ``rowsum(dO * O) - dlse``, the LSE in log2, and first turns.

    Rows past the end get lse = +inf: exp2(s - inf) is 0, and such queries add nothing to dK and dV.
    """
    BLOCK_M: tl.constexpr = SIZES.block_m
    at = place(seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK_M, False)
    if at.block < 0:
        return
    tile = _tile_number(at, packed, num_heads, tiles_per_head, BLOCK_M)
    turn = tile * 0
    if SIZES.in_turn:
        where = _Where(at.sequence, at.head, at.seqlen_q, at.seqlen_k)
        rising = at.batch * num_heads + at.head >= first_rising
        turn += next_turn(mask, where, at.block, at.block * 0, rising, SIZES) + _UNTOUCHED
    tl.store(turns_ptr + 2 * tile + tl.arange(0, 2), turn.to(tl.int32))
    rows = tl.arange(0, BLOCK_M)
    start_m = at.block * BLOCK_M
    start, end = at.q_start + start_m, at.q_start + at.seqlen_q
    do = load_rows(do_ptr, do_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    o = load_rows(o_ptr, o_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    inside = rows < at.seqlen_q - start_m
    offs = (at.batch.to(tl.int64) * num_heads + at.head) * lse_stride + start + rows
    lse = tl.load(lse_ptr + offs, mask=inside, other=float("-inf"))
    delta = dot_rows(do, o)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offs, mask=inside, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # no key, no gradient, whatever dlse says
    # Of 16 numbers a thread of the consumers needs 2q, 2q + 1, 2q + 8 and 2q + 9: here they lie side by side.
    order = rows // 16 * 16 + rows // 2 % 4 * 4 + rows // 8 % 2 * 2 + rows % 2
    tl.store(delta_ptr + tile * BLOCK_M + order, delta)
    tl.store(lse_log2_ptr + tile * BLOCK_M + order, lse_to_log2(lse))


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k", "num_sequences", "tiles_per_head"])
def after_kernel(
    dq_sum_ptr, turns_ptr, dq_ptr, dq_strides, softmax_scale,
    num_heads, seqlen_q, seqlen_k, num_sequences, tiles_per_head, packed,
    HEAD_DIM: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, sequence) writes dQ of its rows."""
    BLOCK_M: tl.constexpr = SIZES.block_m
    at = place(seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK_M, False)
    if at.block < 0:
        return
    tile = _tile_number(at, packed, num_heads, tiles_per_head, BLOCK_M)
    sum_ptr = dq_sum_ptr + tile * (BLOCK_M * SIZES.head_dim)
    start_m = at.block * BLOCK_M
    dq_ptr = tile_pointer(dq_ptr, dq_strides, at.batch, at.head, at.q_start + start_m)
    for consumer in tl.static_range(2):
        turn = tl.load(turns_ptr + 2 * tile + consumer)
        touched = turn < _UNTOUCHED if SIZES.in_turn else turn != 0
        for part in tl.static_range(parts(consumer, SIZES)):
            _store_part(sum_ptr, touched, dq_ptr, dq_strides, softmax_scale, at.seqlen_q - start_m, consumer, part,
                        HEAD_DIM, SIZES)  # fmt: skip


@triton.jit
def _store_part(sum_ptr, touched, dq_ptr, dq_strides, softmax_scale, rows_left, CONSUMER: tl.constexpr,
                PART: tl.constexpr, HEAD_DIM: tl.constexpr, SIZES: tl.constexpr):  # fmt: skip
    """Write what a consumer stored at a time: ``store_dq`` in ``backward_parts.py`` says in which order.

    Queries that no program has visited have a gradient of 0, and their sums were never written.
    """
    BOXES: tl.constexpr = boxes_in(PART, CONSUMER, SIZES)
    FIRST: tl.constexpr = first_box(CONSUMER, SIZES) + PART * SIZES.dq_kept
    x = tl.zeros([_BOX * BOXES], tl.float32)
    if touched:
        x = tl.load(sum_ptr + FIRST * _BOX + tl.arange(0, _BOX * BOXES)) * softmax_scale
    x = x.to(dq_ptr.dtype.element_ty).reshape([4 * BOXES, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    x = x.reshape([64, 32 * BOXES])
    rows, cols = tl.arange(0, 64), tl.arange(0, 32 * BOXES)
    if SIZES.block_m == 128:  # the consumers share out the rows, else the columns
        rows += CONSUMER * 64
    else:
        cols += FIRST * 32
    ptrs = _pointers(dq_ptr, dq_strides, rows, cols)
    tl.store(ptrs, x, mask=(rows < rows_left)[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit
def _pointers(ptr, strides, rows, cols):
    """dq's last stride is 1, and its rows lie multiples of 16 bytes apart: see ``launcher.strides_of``."""
    return ptr + rows[:, None] * (strides[2] * (128 // ptr.dtype.element_ty.primitive_bitwidth)) + cols[None, :]
