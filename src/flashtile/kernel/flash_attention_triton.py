"""The portable forward pass in Triton: exact attention, tile by tile, in O(n) memory.

    S = score(softmax_scale * Q K^T) where mask      P = softmax(S)      O = P V      lse = ln sum exp(S)

Each program owns BLOCK_M query rows of one head and walks over the key tiles that the mask leaves: first the partial
ones on the left, then the full ones, then the partial ones on the right, one body for all. It writes its rows of O and
of the log-sum-exp. The derivation is in docs/derivation.md, the readable version in ``flash_attention_mock.py``.
Source: Dao et al., FlashAttention (2022) and FlashAttention-2 (2023).
"""

import torch
import triton
import triton.language as tl

from flashtile.kernel import launch, launcher
from flashtile.kernel.autograd import FlashAttention
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.tile import (
    LOG2E,
    dot_add,
    dot_transposed,
    load_rows,
    lse_from_softmax,
    scale_rows,
    sizes,
    softmax_step,
    store_rows,
    tile_bounds,
    zero_rows,
)
from flashtile.mask import Mask
from flashtile.score import Score, for_scale
from flashtile.seqlen import Where

__all__ = ["FlashAttention", "forward", "forward_kernel"]

_Where = tl.constexpr(Where)


@triton.jit
def forward_tile(
    n_block, state, q, k_src, v_src, k_strides, v_strides, where, head_kv, offs_m, softmax_scale, mask, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one key tile into the running state (acc, row_max, row_sum)."""
    acc, row_max, row_sum = state
    start_n = n_block * BLOCK_N
    batch, length = where.batch, where.seqlen_k
    k = load_rows(k_src, k_strides, batch, head_kv, start_n, length, BLOCK_N, HEAD_DIM, CHUNKS, MASKED)
    s = dot_transposed(q, k)
    q_idx = offs_m[:, None]
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    if score is None:
        scale_log2 = softmax_scale * LOG2E
    else:
        s = score.forward(where, q_idx, k_idx, s * softmax_scale, score.args)
        scale_log2 = LOG2E
    if MASKED:
        visible = mask.predicate(where, q_idx, k_idx, mask.args) & (k_idx < where.seqlen_k)
        s = tl.where(visible, s, float("-inf"))
    p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum, scale_log2)
    v = load_rows(v_src, v_strides, batch, head_kv, start_n, length, BLOCK_N, HEAD_DIM_V, CHUNKS_V, MASKED)
    acc = dot_add(p, v, scale_rows(acc, alpha[:, None]))
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k"])
def forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, q_strides, k_strides, v_strides, o_strides,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, mask, score,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, batch) writes O and LSE of BLOCK_M query rows."""
    num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    # The last query tiles see most keys under a causal mask: start with them, so that short ones fill the tail.
    m_block = num_m_blocks - 1 - tl.program_id(0) % num_m_blocks
    head = (tl.program_id(0) // num_m_blocks) % num_heads_q
    batch = tl.program_id(0) // num_m_blocks // num_heads_q
    head_kv = head // heads_per_kv
    where = _Where(batch, head, seqlen_q, seqlen_k)

    start_m = m_block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_src, q_strides, batch, head, start_m, seqlen_q, BLOCK_M, HEAD_DIM, CHUNKS, True)
    bounds = mask.key_range(where, start_m, tl.minimum(start_m + BLOCK_M, seqlen_q), mask.args)
    first, full_first, full_end, end = tile_bounds(bounds, seqlen_k, BLOCK_N)
    state = (
        zero_rows(BLOCK_M, CHUNKS_V),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
    )
    for n_block in tl.range(first, full_first):
        state = forward_tile(n_block, state, q, k_src, v_src, k_strides, v_strides, where, head_kv, offs_m,
                             softmax_scale, mask, score,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True)  # fmt: skip
    for n_block in tl.range(full_first, full_end):
        state = forward_tile(n_block, state, q, k_src, v_src, k_strides, v_strides, where, head_kv, offs_m,
                             softmax_scale, mask, score,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, False)  # fmt: skip
    for n_block in tl.range(full_end, end):
        state = forward_tile(n_block, state, q, k_src, v_src, k_strides, v_strides, where, head_kv, offs_m,
                             softmax_scale, mask, score,
                             HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N, True)  # fmt: skip
    acc, row_max, row_sum = state

    lse = lse_from_softmax(row_max, row_sum, softmax_scale if score is None else 1.0)
    lse_ptr += (batch.to(tl.int64) * num_heads_q + head) * seqlen_q
    tl.store(lse_ptr + offs_m, lse, mask=offs_m < seqlen_q)
    o = scale_rows(acc, (1.0 / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None])
    store_rows(o_ptr, o_strides, batch, head, start_m, seqlen_q, o, HEAD_DIM_V, CHUNKS_V)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    config: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(o, lse)`` of attention on 4-D views with any strides.

    q ``(batch, heads_q, seqlen_q, head_dim)``, k ``(batch, heads_kv, seqlen_k, head_dim)``, v ``(batch, heads_kv,
    seqlen_k, head_dim_v)``; o ``(batch, heads_q, seqlen_q, head_dim_v)`` in q's dtype, lse ``(batch, heads_q,
    seqlen_q)`` in fp32, natural logarithm. The caller has checked the arguments.
    """
    score = for_scale(score, softmax_scale)
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    o = empty_in_order_of(q, (batch, num_heads_q, seqlen_q, head_dim_v))
    lse = torch.empty((batch, num_heads_q, seqlen_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0 and lse.numel() == 0:
        return o, lse
    config = config or launch.lookup("forward", launch.arch_of(q.device), head_dim, head_dim_v, q.dtype)
    q_src, q_strides = launcher.operand(q, config.block_m)
    k_src, k_strides = launcher.operand(k, config.block_n)
    v_src, v_strides = launcher.operand(v, config.block_n)
    args = (
        q_src, k_src, v_src, o, lse, q_strides, k_strides, v_strides, o.stride(),
        softmax_scale, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k,
        mask.on_device(), score.on_device() if score else None,
    )  # fmt: skip
    programs = triton.cdiv(seqlen_q, config.block_m) * num_heads_q * batch
    with launch.on_device(q.device):
        launcher.run(forward_kernel, programs, q.device, args, sizes(head_dim, head_dim_v, config), config)
    return o, lse
