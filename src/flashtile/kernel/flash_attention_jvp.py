"""The tangent of attention in Triton (forward-mode derivative): one kernel, one pass over the key tiles, O(n) memory.

    S  = softmax_scale Q K^T      tS = softmax_scale (tQ K^T + Q tK^T) * score'(S)      P = exp(score(S) - lse)
    tlse = rowsum(P * tS)         tO = (P * tS) V + P tV - tlse * O

Each program owns BLOCK_M query rows, as in the forward pass. P comes from the saved log-sum-exp and is never rescaled,
so a tangent costs five matmuls (fewer where one of tQ, tK, tV is zero) and no softmax. Attention sinks need no mention:
the log-sum-exp holds them. Dropout multiplies P by keep / (1 - p) in tO, but not in tlse.
Source: the derivative of FlashAttention's forward pass (Dao et al., 2022); compare the JVP kernel of Lu and Song,
"Simplifying, Stabilizing and Scaling Continuous-Time Consistency Models" (2024, arXiv 2410.11081).
"""

import torch
import triton
import triton.language as tl

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, seqlen, tile_lists
from flashtile.kernel.dropout import keep
from flashtile.kernel.flash_attention_backward import backward_tile
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.seqlen import place
from flashtile.kernel.tile import (
    dot_add,
    dot_transposed,
    load_rows,
    lse_to_log2,
    scale_rows,
    sizes,
    store_rows,
    zero_rows,
)
from flashtile.kernel.tile_lists import key_tiles, nth_tile
from flashtile.mask import Mask
from flashtile.score import Score, for_scale
from flashtile.seqlen import Seqlens, Where

__all__ = ["jvp", "jvp_kernel"]

_Where = tl.constexpr(Where)


@triton.jit
def add_rows(a, b):
    """Return the sums of two tuples of tiles."""
    if len(a) == 1:
        return (a[0] + b[0],)
    else:
        return (a[0] + b[0], a[1] + b[1])


@triton.jit
def jvp_tile(
    step, state, q, tq, lse_log2, k_src, v_src, tk_src, tv_src, k_strides, v_strides, tk_strides, tv_strides,
    at, where, head_kv, offs_m, softmax_scale, mask, score, dropout, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add one key tile's share to (P tV + (P * tS) V, rowsum(P * tS))."""
    acc, tlse = state
    start_n = nth_tile(tiles, where, at.block, step) * BLOCK_N
    start, end = at.k_start + start_n, at.k_start + at.seqlen_k
    q_idx, k_idx = offs_m[:, None], (start_n + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(k_src, k_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, MASKED)
    s = dot_transposed(q, k)
    ts = tl.zeros_like(s)
    if tq is not None:
        ts += dot_transposed(tq, k)
    if tk_src is not None:
        tk = load_rows(tk_src, tk_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, MASKED)
        ts += dot_transposed(q, tk)
    # dS = P * (dP - delta) * score'(S) of the backward pass, with dP = tS and delta = 0, is P * tS.
    p, p_ts = backward_tile(s, ts, lse_log2[:, None], 0.0, q_idx, k_idx, where, softmax_scale, mask, score, MASKED)
    if dropout is not None:
        factor = tl.where(keep(tl.load(dropout.seed), where, q_idx, k_idx, dropout.threshold), dropout.scale, 0.0)
    else:
        factor = 1.0
    if tq is not None or tk_src is not None:
        p_ts = p_ts * softmax_scale
        tlse += tl.sum(p_ts, 1)
        v = load_rows(v_src, v_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, MASKED,
                      MASKED and PACKED)  # fmt: skip
        acc = dot_add(p_ts * factor, v, acc)
    if tv_src is not None:
        tv = load_rows(tv_src, tv_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, MASKED,
                       MASKED and PACKED)  # fmt: skip
        acc = dot_add(p * factor, tv, acc)
    return acc, tlse


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_sequences", "lse_stride"])
def jvp_kernel(
    q_src, k_src, v_src, tq_src, tk_src, tv_src, o_ptr, lse_ptr, to_ptr, tlse_ptr,
    q_strides, k_strides, v_strides, tq_strides, tk_strides, tv_strides, o_strides, to_strides, lse_stride,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, packed, mask, score, dropout, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, sequence) writes the tangents of O and of the LSE for BLOCK_M query rows."""
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
    if tq_src is not None:
        tq = load_rows(tq_src, tq_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM, CHUNKS, True)
    else:
        tq = None
    inside = offs_m < at.seqlen_q
    row = (at.batch.to(tl.int64) * num_heads_q + at.head) * lse_stride + at.q_start
    lse_log2 = lse_to_log2(tl.load(lse_ptr + row + offs_m, mask=inside, other=float("-inf")))

    first, full_first, full_end, last = key_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
    state = (zero_rows(BLOCK_M, CHUNKS_V), tl.zeros((BLOCK_M,), tl.float32))
    for step in tl.range(first, full_first):
        state = jvp_tile(step, state, q, tq, lse_log2, k_src, v_src, tk_src, tv_src, k_strides, v_strides,
                         tk_strides, tv_strides, at, where, head_kv, offs_m, softmax_scale, mask, score, dropout, tiles,
                         HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    for step in tl.range(full_first, full_end):
        state = jvp_tile(step, state, q, tq, lse_log2, k_src, v_src, tk_src, tv_src, k_strides, v_strides,
                         tk_strides, tv_strides, at, where, head_kv, offs_m, softmax_scale, mask, score, dropout, tiles,
                         HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, False, PACKED)  # fmt: skip
    for step in tl.range(full_end, last):
        state = jvp_tile(step, state, q, tq, lse_log2, k_src, v_src, tk_src, tv_src, k_strides, v_strides,
                         tk_strides, tv_strides, at, where, head_kv, offs_m, softmax_scale, mask, score, dropout, tiles,
                         HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    acc, tlse = state

    tl.store(tlse_ptr + row + offs_m, tlse, mask=inside)
    o = load_rows(o_ptr, o_strides, at.batch, at.head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    to = add_rows(acc, scale_rows(o, -tlse[:, None]))
    store_rows(to_ptr, to_strides, at.batch, at.head, start, end, to, HEAD_DIM_V, CHUNKS_V)


def jvp(
    tq: torch.Tensor | None,
    tk: torch.Tensor | None,
    tv: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    config: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(to, tlse)``, the tangents of o and lse for the tangents ``tq, tk, tv`` of q, k, v (None: zero).

    q, tq ``(batch, heads_q, seqlen_q, head_dim)``, k, tk ``(batch, heads_kv, seqlen_k, head_dim)``, v, tv ``(batch,
    heads_kv, seqlen_k, head_dim_v)``, any strides; o and lse as ``flash_attention_triton.forward`` returned them. to
    has o's shape, q's dtype and q's memory order; tlse is fp32 ``(batch, heads_q, seqlen_q)``. A query that sees no
    key, or belongs to no sequence, has tangents 0. The caller has checked the arguments.
    """
    score = for_scale(score, softmax_scale)
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    to = empty_in_order_of(q, (batch, num_heads_q, seqlen_q, head_dim_v))
    tlse = torch.empty((batch, num_heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    if tlse.numel() == 0:
        return to, tlse
    cut = seqlens is not None and seqlens.seqused_q is not None
    if cut or seqlen_k == 0 or (tq is None and tk is None and tv is None):
        to.zero_()
        tlse.zero_()
    if seqlen_k == 0 or (tq is None and tk is None and tv is None):
        return to, tlse
    config = config or launch.lookup("jvp", launch.arch_of(q.device), head_dim, head_dim_v, q.dtype)
    with launch.on_device(q.device):
        sources, strides = [], []
        for t, like, rows in (
            (q, q, config.block_m), (k, k, config.block_n), (v, v, config.block_n),
            (tq, q, config.block_m), (tk, k, config.block_n), (tv, v, config.block_n),
        ):  # fmt: skip
            source, its_strides = (None, ()) if t is None else launcher.operand(t.to(like.dtype), rows)
            sources.append(source)
            strides.append(its_strides)
        num_sequences, packed, num_tiles = seqlen.on_device(seqlens, seqlen_q, config.block_m)
        device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, False)
        args = (
            *sources, o, lse.contiguous(), to, tlse,
            *strides, launcher.strides_of(o), launcher.strides_of(to), seqlen_q,
            softmax_scale, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k, num_sequences, packed,
            device_mask, launcher.score_on_device(score, q, k), launcher.dropout_on_device(dropout), tiles,
        )  # fmt: skip
        programs = num_tiles * num_heads_q * batch
        launcher.run(jvp_kernel, programs, q.device, args, sizes(head_dim, head_dim_v, config), config)
    return to, tlse
