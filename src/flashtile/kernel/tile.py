"""Small device functions on tiles: load, store, multiply over head-dim chunks, one online-softmax step.

A head dimension that is no power of two is held as one or two chunks, each a power of two (80 = 64 + 16), so a row of
Q, K, V, O or dO is a tuple of one or two tiles. Columns past the head dimension are loaded as zeros and never stored.
"""

import functools
import math
from typing import Any

import triton
import triton.language as tl

from flashtile.kernel.launch import LaunchConfig

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
# Past this, neighbouring fp32 logits lie so far apart that exp2 of their difference is 0: see softmax_step.
HUGE_LOGIT = tl.constexpr(2.0**29)
# Past this they do so under any scale; twice such a logit may overflow.
FAR_LOGIT = tl.constexpr(2.0**100)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def head_dim_chunks(head_dim: int) -> tuple[int, ...]:
    """Return the powers of two (one or two, each at least 16) that cover ``head_dim`` with the fewest columns."""
    whole = max(16, _next_power_of_2(head_dim))
    first = whole // 2
    if first < 16 or head_dim <= first:
        return (whole,)
    second = max(16, _next_power_of_2(head_dim - first))
    return (whole,) if second == first else (first, second)


@functools.cache
def sizes(head_dim: int, head_dim_v: int, config: LaunchConfig) -> dict[str, Any]:
    """Return the compile-time arguments that end every kernel's parameter list, in their order."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "CHUNKS": head_dim_chunks(head_dim),
        "CHUNKS_V": head_dim_chunks(head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }


@triton.jit
def _row_stride(ptr, strides):
    if len(strides) == 3:
        UNIT: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
        return strides[2] * UNIT
    else:
        return strides[2]


@triton.jit
def _element_pointers(ptr, strides, rows, cols):
    if len(strides) == 3:
        return ptr + rows[:, None] * _row_stride(ptr, strides) + cols[None, :]
    else:
        return ptr + rows[:, None] * strides[2] + cols[None, :] * strides[3]


@triton.jit
def _load_chunk(ptr, rows, rows_left, strides, START: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    cols = START + tl.arange(0, WIDTH)
    ptrs = _element_pointers(ptr, strides, rows, cols)
    if START + WIDTH <= HEAD_DIM:
        if MASKED:
            return tl.load(ptrs, mask=rows[:, None] < rows_left, other=0.0)
        else:
            return tl.load(ptrs)
    elif MASKED:
        return tl.load(ptrs, mask=(rows[:, None] < rows_left) & (cols[None, :] < HEAD_DIM), other=0.0)
    else:
        return tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def tile_pointer(ptr, strides, batch, head, start):
    """Return the address of row ``start`` of one head, computed in 64 bits."""
    offset = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
    if len(strides) == 3:  # in units of 16 bytes: see launcher.strides_of
        offset = offset * (128 // ptr.dtype.element_ty.primitive_bitwidth)
    return ptr + offset


@triton.jit
def load_rows(source, strides, batch, head, start, length, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
              CHUNKS: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr = False):  # fmt: skip  # pyright: ignore[reportArgumentType]
    """Load rows [start, start + BLOCK) of one head as a tuple of tiles; with MASKED, rows past ``length`` are zeros.

    A descriptor knows the end of the tensor but not of a sequence packed in it: what the rows after the sequence hold
    (perhaps NaN) counts unless GUARDED, which zeroes them at the price of a detour through registers.

    ``source`` is a pointer with four strides, or a tensor descriptor (the copy engine of sm_90 and later: no address
    arithmetic in registers, zeros past the end by itself) and then ``strides`` is empty. See ``launcher.operand``.
    """
    FIRST: tl.constexpr = CHUNKS[0]
    if len(strides) == 0:
        tile = source.load([batch, head, start, 0]).reshape([BLOCK, FIRST])
        if GUARDED:
            tile = tl.where((tl.arange(0, BLOCK) < length - start)[:, None], tile, 0.0)
        return (tile,)
    else:
        ptr = tile_pointer(source, strides, batch, head, start)
        rows = tl.arange(0, BLOCK)
        if len(CHUNKS) == 1:
            return (_load_chunk(ptr, rows, length - start, strides, 0, FIRST, HEAD_DIM, MASKED),)
        else:
            return (
                _load_chunk(ptr, rows, length - start, strides, 0, FIRST, HEAD_DIM, MASKED),
                _load_chunk(ptr, rows, length - start, strides, FIRST, CHUNKS[1], HEAD_DIM, MASKED),
            )


@triton.jit
def _store_chunk(ptr, tile, rows, rows_left, strides, START: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    cols = START + tl.arange(0, WIDTH)
    ptrs = _element_pointers(ptr, strides, rows, cols)
    inside = rows[:, None] < rows_left
    if START + WIDTH > HEAD_DIM:
        inside = inside & (cols[None, :] < HEAD_DIM)
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(ptr, strides, batch, head, start, length, tiles, HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Store a tuple of tiles as rows [start, ...) of one head, rows before ``length`` and real columns only."""
    ptr = tile_pointer(ptr, strides, batch, head, start)
    rows = tl.arange(0, tiles[0].shape[0])
    _store_chunk(ptr, tiles[0], rows, length - start, strides, 0, CHUNKS[0], HEAD_DIM)
    if len(CHUNKS) == 2:
        _store_chunk(ptr, tiles[1], rows, length - start, strides, CHUNKS[0], CHUNKS[1], HEAD_DIM)


@triton.jit
def load_per_row(source, row_stride, row, start, length, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Load one number per query, entries [start, start + BLOCK) of row ``row``; with MASKED, 0 past ``length``.

    ``source`` is a descriptor if ``row_stride`` is None, else a pointer. A pointer costs dearly where the numbers run
    along the columns of a tile: every thread then fetches a quarter of them itself.
    """
    if row_stride is None:
        return source.load([row, start]).reshape([BLOCK])
    else:
        offs = tl.arange(0, BLOCK)
        ptrs = source + row.to(tl.int64) * row_stride + start.to(tl.int64) + offs
        if MASKED:
            return tl.load(ptrs, mask=offs < length - start, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def zero_rows(BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return fp32 zeros in the shape of ``load_rows``."""
    FIRST: tl.constexpr = CHUNKS[0]
    if len(CHUNKS) == 1:  # pyright: ignore[reportArgumentType]
        return (tl.zeros((BLOCK, FIRST), tl.float32),)
    else:
        SECOND: tl.constexpr = CHUNKS[1]
        return (tl.zeros((BLOCK, FIRST), tl.float32), tl.zeros((BLOCK, SECOND), tl.float32))


@triton.jit
def scale_rows(tiles, factor):
    """Return every tile multiplied by ``factor``, a scalar or one number per row as ``[rows, 1]``."""
    if len(tiles) == 1:
        return (tiles[0] * factor,)
    else:
        return (tiles[0] * factor, tiles[1] * factor)


@triton.jit
def dot_transposed(a, b):
    """Return ``a @ b^T`` summed over the head-dim chunks: ``[rows_a, rows_b]`` in fp32."""
    s = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if len(a) == 2:
        s = tl.dot(a[1], tl.trans(b[1]), acc=s, input_precision="ieee")
    return s


@triton.jit
def dot_add(p, b, acc):
    """Return ``acc + p @ b`` chunk by chunk: p ``[rows, inner]``, b a tuple of ``[inner, width]``."""
    p = p.to(b[0].dtype)
    if len(b) == 1:
        return (tl.dot(p, b[0], acc=acc[0], input_precision="ieee"),)
    else:
        return (
            tl.dot(p, b[0], acc=acc[0], input_precision="ieee"),
            tl.dot(p, b[1], acc=acc[1], input_precision="ieee"),
        )


@triton.jit
def dot_rows(a, b):
    """Return the fp32 row sums of ``a * b``."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax over a tile of scores ``s``.

    ``p = exp2(scale_log2 * (s - new_max))``, ``alpha = exp2(scale_log2 * (row_max - new_max))``,
    ``new_sum = alpha * row_sum + sum(p)``. Returns ``(p, alpha, new_max, new_sum)``; the caller rescales its
    accumulator by ``alpha``. A row that has seen no key keeps ``row_max = -inf`` and gets ``p = 0``.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    # One fused multiply-add per score, s * scale - round(shift * scale), is off by the rounding of the product. That
    # cancels in p / row_sum until it overflows exp2, at logits near 2**31. Such rows take a power of two as their
    # scale: the product is exact, ties stay ties, and everything else is 0 under either scale.
    exact_scale = tl.exp2(tl.ceil(tl.log2(scale_log2)))
    exact_scale = tl.where(tl.abs(shift) > FAR_LOGIT, tl.minimum(exact_scale, 1.0), exact_scale)
    scale = tl.where(tl.abs(shift) * scale_log2 > HUGE_LOGIT, exact_scale, scale_log2)
    p = tl.exp2(s * scale[:, None] - (shift * scale)[:, None])
    alpha = tl.exp2((row_max - shift) * scale)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def lse_from_softmax(row_max, row_sum, scale):
    """Return the natural log-sum-exp ``scale * row_max + ln(row_sum)``; -inf for a row that saw no key."""
    empty = row_max == float("-inf")
    lse = tl.where(empty, 0.0, row_max) * scale + tl.log2(tl.where(empty, 1.0, row_sum)) * LN2
    return tl.where(empty, float("-inf"), lse)


@triton.jit
def logaddexp(a, b):
    """Return ln(e^a + e^b); -inf stands for nothing."""
    larger, smaller = tl.maximum(a, b), tl.minimum(a, b)
    gap = tl.where(larger == float("-inf"), 0.0, smaller - larger)
    return larger + tl.log2(1.0 + tl.exp2(gap * LOG2E)) * LN2


@triton.jit
def lse_to_log2(lse):
    """Return the LSE in units of log2, +inf for rows that take no part: ``exp2(s - inf)`` is 0.

    Those are the rows that saw no key (lse = -inf) and the rows whose LSE is past what fp32 resolves to a factor
    2**100 in p (|lse| near 2**29): their gradient is documented as 0 rather than left to overflow.
    """
    lse_log2 = lse * LOG2E
    return tl.where(tl.abs(lse_log2) < HUGE_LOGIT, lse_log2, float("inf"))


@triton.jit
def tile_bounds(bounds, length, BLOCK: tl.constexpr):
    """Turn a mask's range (lo, full_lo, full_hi, hi) into tile numbers (first, full_first, full_end, end).

    Tiles [first, full_first) and [full_end, end) need the predicate, tiles [full_first, full_end) do not; a tile that
    reaches past ``length`` is never a full one. Written so that lo = full_lo = 0 folds to first = full_first = 0 when
    compiled, and a mask without a left edge has no code for it.
    """
    first = tl.maximum(bounds[0], 0) // BLOCK
    full_first = tl.maximum(tl.cdiv(tl.maximum(bounds[1], 0), BLOCK), first)
    full_end = tl.maximum(tl.maximum(tl.minimum(bounds[2], length), 0) // BLOCK, full_first)
    end = tl.maximum(tl.cdiv(tl.maximum(tl.minimum(bounds[3], length), 0), BLOCK), full_end)
    return first, full_first, full_end, end
