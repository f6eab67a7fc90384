"""The portable backward pass in Triton: two kernels, no atomics, bit-identical from run to run, O(n) memory.

    P = exp(score(S) - lse)     dP = dO V^T     delta = rowsum(dO * O) - dlse     dS = P * (dP - delta) * score'(S)
    dQ = softmax_scale dS K     dK = softmax_scale dS^T Q     dV = P^T dO

``backward_dq_kernel`` owns BLOCK_M query rows, computes delta on the way and sums dQ over key tiles.
``backward_dkdv_kernel`` owns BLOCK_N keys of one kv head and sums dK, dV over the query tiles of every query head that
reads it. Both recompute P from the saved log-sum-exp in ``backward_tile``. The scores are computed twice (7 matmuls
instead of 5); in exchange nothing is accumulated in global memory and the sums have one order.
Source: Dao et al., FlashAttention (2022), algorithm 4; the derivation is in docs/derivation.md.
"""

import torch
import triton
import triton.language as tl

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, replay, seqlen, tile_lists
from flashtile.kernel.dropout import keep
from flashtile.kernel.hiding import visible
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.seqlen import place
from flashtile.kernel.tile import (
    LOG2E,
    dot_add,
    dot_rows,
    dot_transposed,
    load_per_row,
    load_rows,
    lse_to_log2,
    scale_rows,
    sizes,
    store_rows,
    zero_rows,
)
from flashtile.kernel.tile_lists import key_tiles, nth_tile, query_tiles
from flashtile.mask import Mask
from flashtile.score import Score, for_scale
from flashtile.seqlen import Seqlens, Where

__all__ = ["backward", "backward_dkdv_kernel", "backward_dq_kernel"]

_Where = tl.constexpr(Where)


@triton.jit
def backward_tile(s, dp, lse_log2, delta, q_idx, k_idx, where, softmax_scale, mask, score, MASKED: tl.constexpr,
                  dropout=None):  # fmt: skip
    """Return (P after dropout, dS) of one tile; every argument broadcasts, so queries may run along either axis."""
    if score is None:
        p = tl.exp2(s * (softmax_scale * LOG2E) - lse_log2)
    else:
        s = s * softmax_scale
        p = tl.exp2(score.forward(where, q_idx, k_idx, s, score.args) * LOG2E - lse_log2)
    kept = p
    if dropout is not None:
        factor = tl.where(keep(tl.load(dropout.seed), where, q_idx, k_idx, dropout.threshold), dropout.scale, 0.0)
        kept = p * factor
        dp = dp * factor
    ds = p * (dp - delta)
    if score is not None:
        ds = ds * score.derivative(where, q_idx, k_idx, s, score.args)
    if MASKED:
        shown = visible(where, q_idx, k_idx, mask) & (q_idx < where.seqlen_q)
        kept = tl.where(shown, kept, 0.0)
        ds = tl.where(shown, ds, 0.0)
    return kept, ds


@triton.jit
def dq_tile(
    step, dq, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m, softmax_scale,
    mask, score, dropout, tiles, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add one key tile's share to dQ (still without softmax_scale)."""
    start_n = nth_tile(tiles, where, at.block, step) * BLOCK_N
    start, end = at.k_start + start_n, at.k_start + at.seqlen_k
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(k_src, k_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, MASKED,
                  MASKED and PACKED)  # fmt: skip
    v = load_rows(v_src, v_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, MASKED)
    s = dot_transposed(q, k)
    dp = dot_transposed(do, v)
    _, ds = backward_tile(s, dp, lse_log2[:, None], delta[:, None], offs_m[:, None], k_idx, where, softmax_scale,
                          mask, score, MASKED, dropout)  # fmt: skip
    return dot_add(ds, k, dq)


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_sequences", "lse_stride"])
def backward_dq_kernel(
    do_src, q_src, k_src, v_src, o_ptr, lse_ptr, dlse_ptr, dq_ptr, lse_log2_ptr, delta_ptr,
    do_strides, q_strides, k_strides, v_strides, o_strides, dq_strides, lse_stride, row_stride,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, packed, mask, score, dropout, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, sequence) writes dQ, delta and the LSE in log2 of BLOCK_M query rows."""
    at = place(seqlen_q, seqlen_k, num_sequences, packed, num_heads_q, BLOCK_M, False)
    if at.block < 0:
        return
    PACKED: tl.constexpr = packed is not None
    head_kv = at.head // heads_per_kv
    where = _Where(at.sequence, at.head, at.seqlen_q, at.seqlen_k)
    start_m = at.block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    start, end = at.q_start + start_m, at.q_start + at.seqlen_q
    q = load_rows(q_src, q_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM, CHUNKS, True)
    do = load_rows(do_src, do_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    o = load_rows(o_ptr, o_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    inside = offs_m < at.seqlen_q
    row = at.batch.to(tl.int64) * num_heads_q + at.head
    lse = tl.load(lse_ptr + row * lse_stride + at.q_start + offs_m, mask=inside, other=0.0)
    delta = dot_rows(do, o)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row * lse_stride + at.q_start + offs_m, mask=inside, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # no key, no gradient, whatever dlse says
    lse_log2 = lse_to_log2(lse)
    tl.store(delta_ptr + row * row_stride + at.scratch_start + offs_m, delta, mask=inside)
    tl.store(lse_log2_ptr + row * row_stride + at.scratch_start + offs_m, lse_log2, mask=inside)

    first, full_first, full_end, last = key_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
    dq = zero_rows(BLOCK_M, CHUNKS)
    for step in tl.range(first, full_first):
        dq = dq_tile(step, dq, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                     softmax_scale, mask, score, dropout, tiles,
                     HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    for step in tl.range(full_first, full_end):
        dq = dq_tile(step, dq, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                     softmax_scale, mask, score, dropout, tiles,
                     HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, False, PACKED)  # fmt: skip
    for step in tl.range(full_end, last):
        dq = dq_tile(step, dq, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                     softmax_scale, mask, score, dropout, tiles,
                     HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    store_rows(dq_ptr, dq_strides, at.batch, at.head, start, end, scale_rows(dq, softmax_scale), HEAD_DIM, CHUNKS)


@triton.jit
def dkdv_tile(
    step, state, k, v, q_src, do_src, lse_log2_src, delta_src, q_strides, do_strides, row_stride, row, at, where,
    offs_n, softmax_scale, mask, score, dropout, tiles, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add one query tile's share to dK (still without softmax_scale) and dV.

    Scores are held transposed, ``[BLOCK_N, BLOCK_M]``: P^T and dS^T then are left operands, fed from registers.
    """
    dk, dv = state
    start_m = nth_tile(tiles, where, at.block, step) * BLOCK_M
    start, end = at.q_start + start_m, at.q_start + at.seqlen_q
    q_idx = (start_m + tl.arange(0, BLOCK_M))[None, :]
    q = load_rows(q_src, q_strides, at.batch, where.head, start, end, BLOCK_M, HEAD_DIM, CHUNKS, MASKED,
                  MASKED and PACKED)  # fmt: skip
    do = load_rows(do_src, do_strides, at.batch, where.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, MASKED,
                   MASKED and PACKED)  # fmt: skip
    start, end = at.scratch_start + start_m, at.scratch_start + at.seqlen_q
    lse_log2 = load_per_row(lse_log2_src, row_stride, row, start, end, BLOCK_M, MASKED)
    delta = load_per_row(delta_src, row_stride, row, start, end, BLOCK_M, MASKED)
    s = dot_transposed(k, q)
    dp = dot_transposed(v, do)
    p, ds = backward_tile(s, dp, lse_log2[None, :], delta[None, :], q_idx, offs_n[:, None], where, softmax_scale,
                          mask, score, MASKED, dropout)  # fmt: skip
    dv = dot_add(p, do, dv)
    dk = dot_add(ds, q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_sequences"])
def backward_dkdv_kernel(
    do_src, q_src, k_src, v_src, lse_log2_src, delta_src, dk_ptr, dv_ptr,
    do_strides, q_strides, k_strides, v_strides, dk_strides, dv_strides, row_stride,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, packed, mask, score, dropout, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (n_block, kv head, sequence) writes dK and dV of BLOCK_N keys, summed over the group's query heads."""
    at = place(seqlen_q, seqlen_k, num_sequences, packed, num_heads_q // heads_per_kv, BLOCK_N, True)
    if at.block < 0:
        return
    PACKED: tl.constexpr = packed is not None
    start_n = at.block * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    start, end = at.k_start + start_n, at.k_start + at.seqlen_k
    k = load_rows(k_src, k_strides, at.batch, at.head, start, end, BLOCK_N, HEAD_DIM, CHUNKS, True)
    v = load_rows(v_src, v_strides, at.batch, at.head, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, True)
    state = (zero_rows(BLOCK_N, CHUNKS), zero_rows(BLOCK_N, CHUNKS_V))
    for in_group in tl.range(0, heads_per_kv):
        head = at.head * heads_per_kv + in_group
        where = _Where(at.sequence, head, at.seqlen_q, at.seqlen_k)
        row = at.batch * num_heads_q + head
        first, full_first, full_end, last = query_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
        # Keys past the sequence are dead rows of P^T: never stored, so "full" still holds for the others.
        for step in tl.range(first, full_first):
            state = dkdv_tile(step, state, k, v, q_src, do_src, lse_log2_src, delta_src, q_strides, do_strides,
                              row_stride, row, at, where, offs_n, softmax_scale, mask, score, dropout, tiles,
                              HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, True, PACKED)  # fmt: skip
        for step in tl.range(full_first, full_end):
            state = dkdv_tile(step, state, k, v, q_src, do_src, lse_log2_src, delta_src, q_strides, do_strides,
                              row_stride, row, at, where, offs_n, softmax_scale, mask, score, dropout, tiles,
                              HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, False, PACKED)  # fmt: skip
        for step in tl.range(full_end, last):
            state = dkdv_tile(step, state, k, v, q_src, do_src, lse_log2_src, delta_src, q_strides, do_strides,
                              row_stride, row, at, where, offs_n, softmax_scale, mask, score, dropout, tiles,
                              HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_M, True, PACKED)  # fmt: skip
    dk, dv = state
    store_rows(dk_ptr, dk_strides, at.batch, at.head, start, end, scale_rows(dk, softmax_scale), HEAD_DIM, CHUNKS)
    store_rows(dv_ptr, dv_strides, at.batch, at.head, start, end, dv, HEAD_DIM_V, CHUNKS_V)


def backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    config_dq: launch.LaunchConfig | None = None,
    config_dkdv: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(dq, dk, dv)`` for the gradients ``do`` of o and ``dlse`` of the log-sum-exp (None: zero).

    Shapes as in ``flash_attention_triton.forward``; every tensor may have any strides. Sinks need no mention: the
    log-sum-exp holds them. Memory beyond the gradients: two fp32 numbers per query row (delta and the LSE in log2).
    """
    score = for_scale(score, softmax_scale)
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    dq, dk, dv = (empty_in_order_of(t, t.shape) for t in (q, k, v))
    no_query = seqlen_q == 0 or batch * num_heads_q == 0
    if no_query or (seqlens is not None and seqlens.seqused_q is not None):
        dq.zero_()
    if no_query or (seqlens is not None and seqlens.seqused_k is not None):
        dk.zero_()
        dv.zero_()
    if dq.numel() == 0:
        return dq, dk, dv
    arch = launch.arch_of(q.device)
    config_dq = config_dq or launch.lookup("backward_dq", arch, head_dim, head_dim_v, q.dtype)
    config_dkdv = config_dkdv or launch.lookup("backward_dkdv", arch, head_dim, head_dim_v, q.dtype)
    # The copy engine reads rows that are multiples of 16 bytes; with 16 numbers no length compiles another kernel.
    scratch_length = seqlen.scratch_length(seqlens, seqlen_q)
    row_stride = launch.ceil_div(scratch_length, 16) * 16
    scratch = torch.empty((2, batch * num_heads_q, row_stride), dtype=torch.float32, device=q.device)
    dlse = None if dlse is None else dlse.contiguous()
    tensors, fresh = (do, q, k, v, o, lse, dlse), (dq, dk, dv, scratch)
    rest = (softmax_scale, config_dq, config_dkdv)
    call = replay.Call("backward", q.device, tensors, mask, *rest, score, dropout, seqlens, fresh=fresh)
    if call.again():
        return dq, dk, dv
    lse_log2, delta = scratch
    device_score, device_dropout = launcher.score_on_device(score, q, k), launcher.dropout_on_device(dropout)
    scalars = (softmax_scale, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k)
    with launch.on_device(q.device), call.noted():
        config = config_dq
        (do_src, do_strides), (q_src, q_strides) = (launcher.operand(t, config.block_m) for t in (do, q))
        (k_src, k_strides), (v_src, v_strides) = (launcher.operand(t, config.block_n) for t in (k, v))
        num_sequences, packed, num_tiles = seqlen.on_device(seqlens, seqlen_q, config.block_m)
        device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, False)
        args = (
            do_src, q_src, k_src, v_src, o, lse, dlse, dq, lse_log2, delta,
            do_strides, q_strides, k_strides, v_strides, launcher.strides_of(o), launcher.strides_of(dq),
            seqlen_q, row_stride, *scalars, num_sequences, packed, device_mask, device_score, device_dropout, tiles,
        )  # fmt: skip
        programs = num_tiles * num_heads_q * batch
        launcher.run(backward_dq_kernel, programs, q.device, args, sizes(head_dim, head_dim_v, config), config)
        if seqlen_k == 0:
            return dq, dk, dv
        config = config_dkdv
        (do_src, do_strides), (q_src, q_strides) = (launcher.operand(t, config.block_m) for t in (do, q))
        (k_src, k_strides), (v_src, v_strides) = (launcher.operand(t, config.block_n) for t in (k, v))
        lse_log2_src, delta_src = (launcher.row_operand(t, scratch_length, config.block_m) for t in (lse_log2, delta))
        num_sequences, packed, num_tiles = seqlen.on_device(seqlens, seqlen_k, config.block_n)
        device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, True)
        args = (
            do_src, q_src, k_src, v_src, lse_log2_src, delta_src, dk, dv,
            do_strides, q_strides, k_strides, v_strides, launcher.strides_of(dk), launcher.strides_of(dv),
            row_stride if lse_log2_src is lse_log2 else None,
            *scalars, num_sequences, packed, device_mask, device_score, device_dropout, tiles,
        )  # fmt: skip
        programs = num_tiles * num_heads_kv * batch
        launcher.run(backward_dkdv_kernel, programs, q.device, args, sizes(head_dim, head_dim_v, config), config)
    return dq, dk, dv
