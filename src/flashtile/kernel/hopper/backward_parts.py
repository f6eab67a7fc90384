"""What the roles of the backward kernels for Hopper share: storage, operands, a tile's weights, ways out of registers.

A program owns a block of keys of one kv head. Two warpgroups, the consumers, compute (``backward_narrow.py`` and
``backward_wide.py``); a few warps move data (``backward_movers.py``).

All rows are copied in panels of ``panel`` columns, the widest that the copy engine swizzles; side by side in shared
memory, several panels are one operand of a matrix product.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flashtile.kernel.hiding import asks_rows, seen_by_rows
from flashtile.kernel.hopper import barriers, rows
from flashtile.kernel.hopper.backward_work import FIRST_KEY, SEQLEN_K, SEQLEN_Q, SEQUENCE, read_number
from flashtile.kernel.hopper.hiding import hide
from flashtile.kernel.tile import LOG2E
from flashtile.seqlen import Where

_Where = gl.constexpr(Where)
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
    entries: tuple  # of a score, one descriptor or none


class Buffers(NamedTuple):
    """Shared memory. ``tile`` holds two numbers per buffer of Q, see ``loader``; ``board`` is that of the work.

    ``entries``, of one or none, has a score's, a block for each half of the keys in every buffer.
    """

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
    board: Any
    entries: tuple


class Signals(NamedTuple):
    """mbarriers: the copies into q, k, v, do have arrived; k, v may be filled again, a share of dq has been read; work
    has been posted, and read. ``entries``: a score's have arrived, may be filled again; none if it has none."""

    q: Any
    k: Any
    v: Any
    do: Any
    k_free: Any
    v_free: Any
    dq_free: Any
    posted: Any
    read: Any
    entries: tuple


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
def start_transposed(a, first_a, b, first_b, initial, COUNT_B: gl.constexpr, HEAD_DIM: gl.constexpr,
                     PANEL: gl.constexpr):  # fmt: skip
    """Issue ``a @ b^T``, 64 rows by ``COUNT_B``, or ``initial + a @ b^T``, and return it in flight."""
    W: gl.constexpr = first_width(HEAD_DIM)
    left = columns(a, first_a, ROWS, W, PANEL)
    right = columns(b, first_b, COUNT_B, W, PANEL).permute((1, 0))
    if initial is None:
        LAYOUT: gl.constexpr = sums_layout(COUNT_B)
        zero = gl.zeros([ROWS, COUNT_B], gl.float32, LAYOUT)
        s = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(left, right, initial, is_async=True)
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


# --- rows in shared memory --------------------------------------------------------------------------------


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
def place_of(tile, head, first_key, board, slot, SIZES: gl.constexpr):
    """Return what masks and scores may ask for: the place of a tile of scores [keys, queries], and its indices.

    ``tile`` is what the loader noted: twice the query tile's number, and whether it needs the mask. The rest is read
    from the board, because registers are short in the loop around.
    """
    LAYOUT: gl.constexpr = sums_layout(SIZES.block_m)
    seqlen_k = read_number(board, slot + SEQLEN_K)
    where = _Where(read_number(board, slot + SEQUENCE), head, read_number(board, slot + SEQLEN_Q), seqlen_k)
    k_idx = (read_number(board, slot + FIRST_KEY) + first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)))[
        :, None
    ]
    q_idx = ((tile >> 1) * SIZES.block_m + gl.arange(0, SIZES.block_m, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
    return where, q_idx, k_idx


@gluon.jit
def initial_scores(buffer, first_key, buffers, slot, softmax_scale, score, SIZES: gl.constexpr):
    """Return what a score wants the product of a tile to begin with, if anything."""
    tile, head = read_number(buffers.tile, 2 * buffer), read_number(buffers.tile, 2 * buffer + 1)
    where, q_idx, k_idx = place_of(tile, head, first_key, buffers.board, slot, SIZES)
    return score.initial(where, q_idx, k_idx, softmax_scale, softmax_scale, score.args)


@gluon.jit
def beside_scores(half: gl.constexpr, it, tile, head, buffers, signals, slot, score, SIZES: gl.constexpr):
    """Return what a score wants to read while the product of a tile is computed, if anything."""
    if len(buffers.entries) > 0:
        LAYOUT: gl.constexpr = sums_layout(SIZES.block_m)
        buffer = it % SIZES.entries_stages
        mbarrier.wait(signals.entries[0].index(buffer), (it // SIZES.entries_stages) & 1)
        block = buffers.entries[0].index(buffer * (SIZES.block_n // ROWS) + half)
        return block.reshape([SIZES.block_m, ROWS]).permute((1, 0)).load(LAYOUT)
    else:
        where, q_idx, k_idx = place_of(tile, head, half * ROWS, buffers.board, slot, SIZES)
        return score.beside(where, q_idx, k_idx, score.args)


@gluon.jit
def release_entries(it, signals, SIZES: gl.constexpr):
    """Let go of a tile's entries, behind what all of them went into."""
    if len(signals.entries) > 0:
        mbarrier.arrive(signals.entries[1].index(it % SIZES.entries_stages), count=1)


@gluon.constexpr_function
def _is_tile(x):
    return hasattr(getattr(x, "type", None), "layout")


@gluon.jit
def rows_seen(tile, head, first_key, board, slot, mask, SIZES: gl.constexpr):
    """Return what a mask's tables say of a tile's keys, read early: the queries [first, end) that see each, and whether
    that is all to know. () where no table has to be asked."""
    if asks_rows(mask.exact):
        nothing = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, sums_layout(SIZES.block_m)))[:, None]
        seen = (nothing, nothing)
        exact = (tile & 1) != 0
        if exact:
            where, q_idx, k_idx = place_of(tile, head, first_key, board, slot, SIZES)
            seen = seen_by_rows(where, q_idx, k_idx, mask)
            exact = mask.exact(mask.args)
        return seen[0], seen[1], exact
    else:
        return ()


@gluon.jit
def _hide(x, instead, seen, where, q_idx, k_idx, mask):
    if len(seen) > 0:
        return hide(x, instead, seen, seen[2], where, q_idx, k_idx, mask, True)
    else:
        return hide(x, instead, None, True, where, q_idx, k_idx, mask, True)


@gluon.jit
def probabilities(s, beside, seen, lse_log2, tile, head, first_key, board, slot, softmax_scale, mask, score,
                  SIZES: gl.constexpr):  # fmt: skip
    """Return P of one tile of scores [keys, queries], and P times the score's derivative.

    ``lse_log2`` are numbers per query, or what to wait for and where they lie: (smem, buffer, mbarrier, phase).
    The mask is in a branch, not in a second copy of the code: copies cost more registers and instruction cache than the
    branch costs time.
    """
    where, q_idx, k_idx = place_of(tile, head, first_key, board, slot, SIZES)
    slope = 1.0
    if score is None:
        scale_log2 = softmax_scale * _LOG2E
        logits = s
    else:
        scale_log2 = score.unit(softmax_scale, score.args) * _LOG2E
        logits = score.scaled(where, q_idx, k_idx, s, beside, softmax_scale, score.args)
        slope = score.slope(where, q_idx, k_idx, s, beside, logits, softmax_scale, score.args)
    if not _is_tile(lse_log2):
        smem, buffer, bar, phase = lse_log2
        mbarrier.wait(bar, phase)  # again: the loads stay behind it, and a score's entries have left registers
        lse_log2 = per_query(smem, buffer, SIZES.block_m)
    # The mask after the exponential: faster for narrow heads, slower for wider ones, but where the slope is a tile it
    # takes the registers that logits with and without the mask would need.
    if SIZES.head_dim <= 64 or _is_tile(slope):
        p = gl.exp2(logits * scale_log2 - lse_log2[None, :])
        if (tile & 1) != 0:
            p = _hide(p, 0.0, seen, where, q_idx, k_idx, mask)
    else:
        if (tile & 1) != 0:
            logits = _hide(logits, float("-inf"), seen, where, q_idx, k_idx, mask)
        p = gl.exp2(logits * scale_log2 - lse_log2[None, :])
    if score is None:
        return p, p
    else:
        return p, p * slope


# --- out of registers -------------------------------------------------------------------------------------------------


@gluon.jit
def store_dq(consumer: gl.constexpr, dq, number, buffers, signals, BOXES: gl.constexpr, SIZES: gl.constexpr):
    """Hand part ``number`` (counted over all tiles) of the consumer's dQ to its reducer.

    The numbers lie in the order in which the threads hold them, 16 bytes of a thread side by side; the post kernel
    undoes that order.
    """
    mbarrier.wait(signals.dq_free.index(consumer), (number & 1) ^ 1)
    x = dq.reshape([4, 2, 8, 4 * BOXES, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * BOXES, BOX])
    smem = buffers.dq.index(consumer * SIZES.dq_kept)
    smem._reinterpret(gl.float32, [ROWS * BOXES, BOX], smem.layout).store(x)
    fence_async_shared()  # by those who wrote: the copy engine reads past the order that a barrier gives to loads
    barriers.arrive(DQ_READY + consumer, REDUCER_AND_CONSUMER)


@gluon.constexpr_function
def blocks(count, desc):
    """The shape of ``count`` blocks of a descriptor."""
    return [count, *desc.block_type.shape]


@gluon.jit
def store_sums(desc, sums, factor, smem, at, row, WIDTH: gl.constexpr, SIZES: gl.constexpr):
    """Start to write one consumer's dK or dV through a piece of shared memory that is free, whatever its type."""
    PANEL: gl.constexpr = SIZES.panel
    W: gl.constexpr = first_width(WIDTH)
    smem = smem._reinterpret(desc.dtype, blocks(WIDTH // PANEL, desc), desc.layout)
    columns(smem, 0, ROWS, W, PANEL).store((sums[0] * factor).to(desc.dtype))
    if W < WIDTH:
        columns(smem, W // PANEL, ROWS, WIDTH - W, PANEL).store((sums[1] * factor).to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    place = rows.coordinates(at.batch, at.head, at.k_start, at.seqlen_k, row, SIZES.packed)
    for i in gl.static_range(WIDTH // PANEL):
        rows.copy_out(desc, place, i * PANEL, smem.index(i), SIZES.packed)
