"""The portable forward pass in Triton: exact attention, tile by tile, in O(n) memory.

    S = score(softmax_scale * Q K^T) where mask      P = softmax(S)      O = P V      lse = ln sum exp(S)

Each program owns BLOCK_M query rows of one head and walks over the key tiles that the mask leaves: first the partial
ones on the left, then the full ones, then the partial ones on the right, one body for all. It writes its rows of O and
of the log-sum-exp. The derivation is in docs/derivation.md, the readable version in ``flash_attention_mock.py``.
Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
"""

import math

import torch
import triton
import triton.language as tl

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, replay, seqlen, tile_lists
from flashtile.kernel.autograd import FlashAttention
from flashtile.kernel.dropout import keep
from flashtile.kernel.hiding import visible
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.seqlen import place
from flashtile.kernel.tile import (
    LOG2E,
    dot_add,
    dot_transposed,
    load_rows,
    logaddexp,
    lse_from_softmax,
    scale_rows,
    sizes,
    softmax_step,
    store_rows,
    zero_rows,
)
from flashtile.kernel.tile_lists import key_tiles, nth_tile
from flashtile.mask import Mask
from flashtile.score import Score, for_scale
from flashtile.seqlen import Seqlens, Where

__all__ = ["FlashAttention", "forward", "forward_kernel"]

_Where = tl.constexpr(Where)


@triton.jit
def forward_tile(
    step, state, q, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m, softmax_scale, mask, score,
    dropout, tiles, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Fold one key tile into the running state (acc, row_max, row_sum)."""
    acc, row_max, row_sum = state
    start_n = nth_tile(tiles, where, at.block, step) * BLOCK_N
    start, end = at.k_start + start_n, at.k_start + at.seqlen_k
    k = load_rows(k_src, k_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, MASKED)
    s = dot_transposed(q, k)
    q_idx = offs_m[:, None]
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    if score is None:
        scale_log2 = softmax_scale * LOG2E
    else:
        s = score.forward(where, q_idx, k_idx, s * softmax_scale, score.args)
        scale_log2 = LOG2E
    if MASKED:
        s = tl.where(visible(where, q_idx, k_idx, mask), s, float("-inf"))
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
    if dropout is not None:
        p = tl.where(keep(tl.load(dropout.seed), where, q_idx, k_idx, dropout.threshold), p, 0.0)
    v = load_rows(v_src, v_strides, at.batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, MASKED,
                  MASKED and PACKED)  # fmt: skip
    acc = dot_add(p, v, scale_rows(acc, alpha[:, None]))
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_sequences", "row_stride"])
def forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, max_ptr, q_strides, k_strides, v_strides, o_strides, row_stride,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, packed,
    mask, score, dropout, sinks_ptr, tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, sequence) writes O, LSE and, if asked for, the largest logit of BLOCK_M query rows."""
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
    first, full_first, full_end, last = key_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
    state = (
        zero_rows(BLOCK_M, CHUNKS_V),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    for step in tl.range(first, full_first):
        state = forward_tile(step, state, q, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                             softmax_scale, mask, score, dropout, tiles,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    for step in tl.range(full_first, full_end):
        state = forward_tile(step, state, q, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                             softmax_scale, mask, score, dropout, tiles,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, False, PACKED)  # fmt: skip
    for step in tl.range(full_end, last):
        state = forward_tile(step, state, q, k_src, v_src, k_strides, v_strides, at, where, head_kv, offs_m,
                             softmax_scale, mask, score, dropout, tiles,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True, PACKED)  # fmt: skip
    acc, row_max, row_sum = state

    inside = offs_m < at.seqlen_q
    row = (at.batch.to(tl.int64) * num_heads_q + at.head) * row_stride + at.q_start + offs_m
    scale = softmax_scale if score is None else 1.0
    lse = lse_from_softmax(row_max, row_sum, scale)
    factor = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if sinks_ptr is not None:
        with_sink = logaddexp(lse, tl.load(sinks_ptr + at.head).to(tl.float32))
        factor *= tl.exp2((lse - with_sink) * LOG2E)
        lse = with_sink
        if PACKED:  # no sink for the rows after the last sequence
            lse = tl.where(at.sequence < num_sequences, lse, float("-inf"))
    if dropout is not None:
        factor *= dropout.scale
    tl.store(lse_ptr + row, lse, mask=inside)
    if max_ptr is not None:
        tl.store(max_ptr + row, row_max * scale, mask=inside)
    o = scale_rows(acc, factor[:, None])
    store_rows(o_ptr, o_strides, at.batch, at.head, start, end, o, HEAD_DIM_V, CHUNKS_V)


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
    config: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(o, lse)`` of attention on 4-D views with any strides.

    q ``(batch, heads_q, seqlen_q, head_dim)``, k ``(batch, heads_kv, seqlen_k, head_dim)``, v ``(batch, heads_kv,
    seqlen_k, head_dim_v)``; o ``(batch, heads_q, seqlen_q, head_dim_v)`` in q's dtype, lse ``(batch, heads_q,
    seqlen_q)`` in fp32, natural logarithm. With ``seqlens`` batch is 1 and the sequences lie one after the other; rows
    outside them get o = 0 and lse = -inf. ``max_logits``, shaped as lse, receives the largest logit of every row.
    The caller has checked the arguments.
    """
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
    kernel = "forward" if dropout is None else "forward_dropout"
    config = config or launch.lookup(kernel, launch.arch_of(q.device), head_dim, head_dim_v, q.dtype)
    options = (softmax_scale, config, score, dropout, seqlens)
    call = replay.Call("forward", q.device, (q, k, v, max_logits, sinks), mask, *options, fresh=(o, lse))
    if call.again():
        return o, lse
    q_src, q_strides = launcher.operand(q, config.block_m)
    k_src, k_strides = launcher.operand(k, config.block_n)
    v_src, v_strides = launcher.operand(v, config.block_n)
    num_sequences, packed, num_tiles = seqlen.on_device(seqlens, seqlen_q, config.block_m)
    device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, False)
    args = (
        q_src, k_src, v_src, o, lse, max_logits, q_strides, k_strides, v_strides, launcher.strides_of(o), seqlen_q,
        softmax_scale, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k, num_sequences, packed,
        device_mask, launcher.score_on_device(score, q, k), launcher.dropout_on_device(dropout), sinks, tiles,
    )  # fmt: skip
    programs = num_tiles * num_heads_q * batch
    with launch.on_device(q.device), call.noted():
        launcher.run(forward_kernel, programs, q.device, args, sizes(head_dim, head_dim_v, config), config)
    return o, lse
