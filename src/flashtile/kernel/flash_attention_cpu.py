"""Attention for CPU tensors: torch's own CPU flash kernel where its meaning is ours, the readable tiles elsewhere.

torch's kernel (``aten::_scaled_dot_product_flash_attention_for_cpu``) is asked for full masks, top-left causal ones and
bottom-right causal ones of squares, without a score or dropout; each packed sequence by itself, and sinks join its
result. Facts about it, seen in torch 2.13, that shape this file:

- Its causal mask is aligned top-left, ours bottom-right unless told: they agree where seqlen_q == seqlen_k.
- It masks before it scales: under a causal mask a scale of 0 or below gives NaN and infinity.
- A length of 0 ends the process with a division by zero; a last dimension with stride other than 1 is read wrongly.
- In bf16 and fp16 its backward adds dk and dv up in that dtype: up to 6 times the error of plain PyTorch with grouped
  heads. On an AVX-512 CPU without fp16 arithmetic its fp16 backward takes up to 15 times as long as fp32's, and one
  bf16 query against 2,048 keys 7 times as long. So half-precision inputs are widened to fp32, which costs O(n d)
  memory and makes all sums fp32, as everywhere else.
- It wants head_dim_v == head_dim, and its backward knows no gradient of lse. Zero columns change neither products nor
  results, so the narrower tensors are padded; and one more column turns its delta = rowsum(do * o) into
  delta - dlse, which is all that the gradient of lse changes: do gets -dlse there, o gets 1, v gets 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.dropout import Dropout
from flashtile.kernel.flash_attention_mock import blockwise_backward, blockwise_forward
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.packed import backward_by_sequence, forward_by_sequence
from flashtile.kernel.reference_tile import accumulation_dtype
from flashtile.kernel.sinks import join_sinks
from flashtile.mask import Mask, causal, full
from flashtile.score import Score

# The best of five pairs, or close to it, at lengths 64 to 2,048 on one AVX-512 core (forward and backward).
BLOCK_Q, BLOCK_K = 64, 256
# Torch's backward rounds logits otherwise than its forward, and far above this exp(s - lse) can overflow. The tiles of
# our two passes round alike, so that s <= lse holds for an lse of theirs: past it both passes are tiles.
HUGE_LOGIT = 2.0**20


@forward_by_sequence
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    max_logits: Tensor | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return o ``(b, hq, sq, dv)``, its dimensions in memory in q's order, and lse ``(b, hq, sq)``.

    q ``(b, hq, sq, d)``, k ``(b, hkv, sk, d)``, v ``(b, hkv, sk, dv)``, any strides; lse in natural log, fp32 (fp64 for
    fp64). Memory: O(n). sinks ``(hq,)``; ``seqlens`` for packed sequences (``packed.py``); ``max_logits``, shaped as
    lse, receives the largest logit of every row.
    """
    if max_logits is None and serves(q, k, v, softmax_scale, mask, score, dropout):
        o, lse = _aten_forward(q, k, v, softmax_scale, _is_causal(mask, q.shape[2], k.shape[2]))
        if lse.abs().max() < HUGE_LOGIT:
            o, lse = (o, lse) if sinks is None else join_sinks(sinks, o, lse)
            return _stored_like(q, o), lse.contiguous()
    o, lse = blockwise_forward(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        mask=mask,
        score=score,
        sinks=sinks,
        dropout=dropout,
        max_logits=max_logits,
        first_batch=first_batch,
        block_q=BLOCK_Q,
        block_k=BLOCK_K,
    )
    return _stored_like(q, o), lse.contiguous()


@backward_by_sequence
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    dropout: Dropout | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) in the dtypes and memory orders of q, k, v, for the gradients do of o and dlse of lse.

    Sinks need no mention, being in o and lse; their own gradient is ``sinks.sink_gradient``.
    """
    if serves(q, k, v, softmax_scale, mask, score, dropout) and lse.abs().max() < HUGE_LOGIT:
        is_causal = _is_causal(mask, q.shape[2], k.shape[2])
        dq, dk, dv = _aten_backward(do, q, k, v, o, lse, dlse, softmax_scale, is_causal)
    else:
        dq, dk, dv = blockwise_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            dlse,
            softmax_scale=softmax_scale,
            mask=mask,
            score=score,
            dropout=dropout,
            first_batch=first_batch,
            block_q=BLOCK_Q,
            block_k=BLOCK_K,
        )
    return _stored_like(q, dq), _stored_like(k, dk), _stored_like(v, dv)


def serves(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: Mask, score: Score | None, dropout: Dropout | None
) -> bool:
    """Tell whether torch's CPU kernel means the same as we do for this problem."""
    if score is not None or dropout is not None or softmax_scale <= 0 or 0 in (q.numel(), k.numel(), v.numel()):
        return False
    return _is_causal(mask, q.shape[2], k.shape[2]) is not None


def _is_causal(mask: Mask, seqlen_q: int, seqlen_k: int) -> bool | None:
    """Return what torch's kernel calls this mask, None if it has no word for it."""
    bottom_right = mask.predicate is causal().predicate
    # One query, the last one, sees every key.
    if mask.predicate is full().predicate or (bottom_right and seqlen_q == 1):
        return False
    if mask.predicate is causal("top_left").predicate or (bottom_right and seqlen_q == seqlen_k):
        return True
    return None


def _aten_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, is_causal: bool | None
) -> tuple[Tensor, Tensor]:
    width = max(q.shape[-1], v.shape[-1])
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(_prepared(x, width) for x in (q, k, v)), 0.0, bool(is_causal), scale=softmax_scale
    )
    return o[..., : v.shape[-1]], lse


def _aten_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    is_causal: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    width = max(head_dim, head_dim_v)
    if dlse is not None:
        # A column that v does not use; being padded, o and do are our own to write into.
        width = max(width, head_dim_v + 1)
    q, k, v, o, do = (_prepared(x, width) for x in (q, k, v, o, do))
    if dlse is not None:
        o[..., head_dim_v] = 1.0
        do[..., head_dim_v] = -dlse.to(do.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, bool(is_causal), scale=softmax_scale
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]


def _prepared(x: Tensor, width: int) -> Tensor:
    """Widen x to the accumulation dtype and to ``width`` columns, its rows dense and apart; no copy if it is so."""
    x = x.to(accumulation_dtype(x.dtype))
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    rows_are_dense = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if rows_are_dense else x.clone(memory_format=torch.contiguous_format)


def _stored_like(like: Tensor, x: Tensor) -> Tensor:
    """Return x in the dtype and memory order of ``like``; no copy if it is so."""
    out = empty_in_order_of(like, x.shape, like.dtype)
    if x.dtype == out.dtype and x.stride() == out.stride():
        return x
    return out.copy_(x)
