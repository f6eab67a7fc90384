"""What a consumer of the forward kernel for Hopper does with its 64 rows: products, softmax, results."""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
from flashtile.kernel.tile import logaddexp

LOG2E, LN2 = gl.constexpr(tile.LOG2E.value), gl.constexpr(tile.LN2.value)
HUGE_LOGIT, FAR_LOGIT = gl.constexpr(tile.HUGE_LOGIT.value), gl.constexpr(tile.FAR_LOGIT.value)
LOWEST = gl.constexpr(torch.finfo(torch.float32).min)  # where row maxima start: unlike -inf it can be subtracted
SLACK = gl.constexpr(8.0)  # see fold
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma takes


class Out(NamedTuple):
    """Where results go: O by way of shared memory, LSE by address."""

    o_desc: Any
    o_smem: Any
    lse_ptr: Any
    row_stride: Any
    num_heads: Any
    num_sequences: Any


class Statistics(NamedTuple):
    """What is known of each row: see ``fold``."""

    row_max: Any
    row_sum: Any  # of the exponentials
    excess: Any  # by how much the largest of each tile were rounded up


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
def issue_scores(rings, q_index, stage, initial, SIZES: gl.constexpr):
    """Start S = Q K^T, or ``initial`` + Q K^T."""
    k = _matrix(rings.k_smem[0], stage).permute((1, 0))
    if initial is None:
        zero = gl.zeros([ROWS, SIZES.block_n], gl.float32, layout=tile_layout(SIZES.block_n))
        s = warpgroup_mma(_matrix(rings.q_smem[0], q_index), k, zero, use_acc=False, is_async=True)
    else:
        s = warpgroup_mma(_matrix(rings.q_smem[0], q_index), k, initial, is_async=True)
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
def zeros_of_rows(COLUMNS: gl.constexpr):
    """Return integer zeros, one per row of a tile."""
    return gl.zeros([ROWS], gl.int32, layout=gl.SliceLayout(1, tile_layout(COLUMNS)))[:, None]


@gluon.jit
def finish_before_wait(x):
    """Return ``x``, of two numbers per thread; the compiler keeps later waits for products behind it.

    It would move them up to the first branch or barrier before. The assembly is a branch of its own, never taken.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $2, 0f7F800000; setp.gt.or.f32 p, $3, 0f7F800000, p;"
        " mov.b32 $0, $2; mov.b32 $1, $3; @p nanosleep.u32 1; }",
        "=&f,=&f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def sum_before_wait(statistics):
    """Return ``statistics``; the compiler keeps later waits for products behind the sums."""
    row_max, row_sum, excess = statistics
    return Statistics(row_max, finish_before_wait(row_sum), excess)


@gluon.jit
def scale_rows(acc, factor):
    """Multiply each row by its factor."""
    first = acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, acc[0].type.layout), assert_trivial=True)[:, None]
    if len(acc) == 1:
        return (first,)
    else:
        layout: gl.constexpr = gl.SliceLayout(1, acc[1].type.layout)
        return (first, acc[1] * gl.convert_layout(factor, layout, assert_trivial=True)[:, None])


@gluon.constexpr_function
def _row_in_thread(i):
    """Return which of a thread's two rows its register ``i`` of a tile belongs to: 0 0 1 1 0 0 1 1 ..."""
    return i % 4 // 2


@gluon.constexpr_function
def _rescale_assembly(count):
    """Multiply a thread's registers [0, count) by the rows' factors, in registers from 2 count on, unless all are 1."""
    factors = 2 * count  # after the inputs that are the outputs
    text = f"{{ .reg .pred p, q; setp.neu.f32 p, ${factors}, 0f3F800000; setp.neu.f32 q, ${factors + 2}, 0f3F800000;"
    text += " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; "
    return text + "".join(f"mul.f32 ${i}, ${i}, ${factors + 2 * _row_in_thread(i)}; " for i in range(count)) + "DONE: }"


@gluon.constexpr_function
def _rescale_registers(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def _rescale_if_needed(x, factor):
    COUNT: gl.constexpr = min(64, x.shape[1] // 2)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]
    return gl.inline_asm_elementwise(
        _rescale_assembly(COUNT), _rescale_registers(COUNT), [x, gl.broadcast(factor, x)[0]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def rescale_if_needed(acc, factor):
    """Multiply each row by its factor, unless all the warp's factors are 1: as a rule they are, see ``fold``."""
    if len(acc) == 1:
        return (_rescale_if_needed(acc[0], factor),)
    else:
        return (_rescale_if_needed(acc[0], factor), _rescale_if_needed(acc[1], factor))


# --- the softmax ------------------------------------------------------------------------------------------------------


@gluon.jit
def _by_thread(x):
    """See a tile of S as (rows, groups of 8 columns, the 4 threads that share a row, 2 neighbours)."""
    return gl.reshape(x, [ROWS, x.shape[1] // 8, 4, 2])


@gluon.constexpr_function
def _thread_max_assembly(count):
    """For each of a thread's rows in registers [count, 2 count), write the largest entry to registers [0, 4).

    IEEE numbers of which one has no sign compare like signed integers: max.s32. Where all have one, the largest is the
    least integer: min.s32. A NaN is passed over or wins (if without a sign): its row is NaN either way, see ``fold``.
    """
    text = "{ .reg .s32 largest<4>, least<4>; .reg .pred p, q; "
    # Two chains per row, of half the length. The compiler joins two of these instructions into one.
    chains = [[i for i in range(count) if _row_in_thread(i) == row] for row in (0, 1)]
    chains = [chain[half::2] for half in (0, 1) for chain in chains]  # chain c is of row c % 2

    def of_rows(kind, name):
        first = "".join(f"mov.b32 {name}{c}, ${count + chain[0]}; " for c, chain in enumerate(chains))
        rest = zip(*(chain[1:] for chain in chains), strict=True)
        each = "".join(f"{{ .reg .s32 x; mov.b32 x, ${count + i}; {kind}.s32 {name}{c}, {name}{c}, x; }} "
                       for step in rest for c, i in enumerate(step))  # fmt: skip
        return first + each + "".join(f"{kind}.s32 {name}{row}, {name}{row}, {name}{row + 2}; " for row in (0, 1))

    text += of_rows("max", "largest")
    text += "setp.lt.s32 p, largest0, 0; setp.lt.or.s32 p, largest1, 0, p; vote.sync.any.pred p, p, 0xffffffff; "
    text += "@!p bra.uni DONE; " + of_rows("min", "least")
    for row in (0, 1):
        text += f"setp.lt.s32 q, largest{row}, 0; selp.s32 largest{row}, least{row}, largest{row}, q; "
    return text + "DONE: " + "".join(f"mov.b32 ${i}, largest{_row_in_thread(i)}; " for i in range(count)) + "}"


@gluon.constexpr_function
def _thread_max_registers(count):
    return ",".join(["=&f"] * count + ["f"] * count)


@gluon.jit
def _first_columns(x):
    """Return the first 8 columns."""
    if x.shape[1] == 8:
        return x
    else:
        COLUMNS: gl.constexpr = x.shape[1] // 2
        left, _ = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS]), (0, 2, 1)))
        return _first_columns(gl.convert_layout(left, tile_layout(COLUMNS), assert_trivial=True))


@gluon.jit
def row_max_of(s):
    """Return the largest entry by row, as the floats' maximum gives it, but of integers.

    sm_90 takes the larger of three integers in one instruction, of floats of two.
    """
    COUNT: gl.constexpr = s.shape[1] // 2
    by_thread = gl.inline_asm_elementwise(
        _thread_max_assembly(COUNT), _thread_max_registers(COUNT), [s], dtype=gl.float32, is_pure=False, pack=COUNT
    )
    largest = gl.max(gl.max(gl.max(_by_thread(_first_columns(by_thread)), 3), 1), 1)
    return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def row_sum_of(p):
    """Return the sums by row and thread, (rows, 4): the threads' sums are added up when a query tile ends."""
    return gl.sum(gl.sum(_by_thread(p), 3), 1)


@gluon.jit
def start(v_smem, SIZES: gl.constexpr):
    """Return the online softmax's state before the first key tile: O, P, alpha, and the rows' statistics.

    O is what a product of nothing made of what lay in shared memory, and not to be kept: where registers have been
    zeroed on one way into a loop and come from products on the other, the compiler lets each use of them there wait
    for all products.
    """
    acc = _products_of_nothing(v_smem, zeros(SIZES.chunks_v[0]), 0)
    if len(SIZES.chunks_v) == 1:
        acc = wait_values((acc,))
    else:
        acc = wait_values((acc, _products_of_nothing(v_smem, zeros(SIZES.chunks_v[1]), 1)))
    p = gl.zeros([ROWS, SIZES.block_n], v_smem[0].dtype, layout=gl.DotOperandLayout(0, acc[0].type.layout, 2))
    by_row = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, tile_layout(SIZES.block_n)))
    statistics = fresh_statistics(Statistics(by_row, row_sum_of(zeros(SIZES.block_n)), by_row))
    return acc, p, gl.full_like(by_row, 1.0), statistics


@gluon.jit
def _products_of_nothing(v_smem, acc, CHUNK: gl.constexpr):
    p = gl.zeros([ROWS, 16], v_smem[0].dtype, layout=gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, _matrix(v_smem[CHUNK], 0).slice(0, 16, dim=0), acc, use_acc=False, is_async=True)


@gluon.jit
def fresh_statistics(like):
    """Return the statistics of rows that have seen no key yet."""
    row_max = gl.full_like(like.row_max, LOWEST)
    return Statistics(row_max, gl.full_like(like.row_sum, 0.0), gl.full_like(like.excess, 0.0))


@gluon.jit
def unit(softmax_scale, score):
    """Return the factor of the logits that the softmax is taken of."""
    if score is None:
        return softmax_scale
    else:
        return score.unit(softmax_scale, score.args)


@gluon.jit
def scales_of(scale_log2):
    """Return what ``fold`` wants to know of the logits' factor, computed once."""
    return scale_log2, gl.exp2(gl.ceil(gl.log2(scale_log2))), HUGE_LOGIT / scale_log2


@gluon.jit
def fold(s, statistics, tile_max, scales, DTYPE: gl.constexpr):
    """One step of the online softmax: ``tile.softmax_step``, which has the reasons, with sums by thread.

    ``row_max`` moves only where P would else exceed 2^SLACK: that cancels in P / row_sum, and alpha is 1 as a rule.
    P is rounded to ``DTYPE``. That leaves the largest as it is if it is 1, as with the true maximum, but not here: so
    ``excess`` says by how much the largest of each tile were rounded up, and acc / (row_sum + excess) is right where
    one weight is most of a row.
    A row that has seen no key keeps ``row_max = LOWEST`` and gets ``p = 0``. A NaN among the logits, or +inf, makes P
    and so the row NaN; ``row_max`` is never NaN.

    Returns ``(p, alpha, statistics)``.
    """
    row_max, row_sum, excess = statistics
    scale_log2, exact, huge = scales
    new_max = gl.maximum(row_max, tile_max)
    new_max = gl.where((new_max - row_max) * scale_log2 > SLACK, new_max, row_max)
    exact = gl.where(gl.abs(new_max) > FAR_LOGIT, gl.minimum(exact, 1.0), exact)
    scale = gl.where(gl.abs(new_max) > huge, exact, scale_log2)
    shift = new_max * scale
    p = gl.exp2(s * scale[:, None] - shift[:, None])
    largest = gl.exp2(tile_max * scale - shift)
    alpha = gl.exp2((row_max - new_max) * scale)
    excess = excess * alpha + (largest.to(DTYPE).to(gl.float32) - largest)
    kept = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)[:, None]
    return p, alpha, Statistics(new_max, kept + row_sum_of(p), excess)


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
def _log2(x):
    """Return log2 by the special function unit, off by 2^-22: the compiler's own takes twenty instructions more."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _reciprocal(x):
    """Return 1 / x by the special function unit, off by 2^-23 of it."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def write_rows(out, acc, statistics, at, logit_scale, sinks_ptr, CONSUMER: gl.constexpr, SIZES: gl.constexpr):
    """Write O and LSE of this consumer's rows of a query tile."""
    layout: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    total = gl.convert_layout(gl.sum(statistics.row_sum, 1), layout, assert_trivial=True)
    row_max = gl.convert_layout(statistics.row_max, layout, assert_trivial=True)
    excess = gl.convert_layout(statistics.excess, layout, assert_trivial=True)
    empty = total == 0.0  # the row saw no key
    lse = gl.where(empty, float("-inf"), row_max * logit_scale + _log2(total) * LN2)
    factor = _reciprocal(gl.where(empty, 1.0, total + excess))
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
