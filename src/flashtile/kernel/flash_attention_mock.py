"""FlashAttention in readable PyTorch: the text to read first, and the mathematics every kernel is checked against.

    o = softmax(score(softmax_scale * q k^T), masked) v          lse_i = log sum_j exp(s_ij)

The file climbs in four steps, each built on the one before:

1. ``online_softmax``       softmax in one pass over blocks of a row, with a running maximum and a running sum
2. ``blockwise_forward``    the same loop, which also carries the weighted sum of value rows: attention without n x n
3. ``blockwise_backward``   the gradients, each tile of weights computed again from the saved lse
4. ``FlashAttentionMock``   both as one ``torch.autograd.Function``, with the dense formula beside it (``naive=True``)

Shapes: q ``(b, hq, sq, d)``, k ``(b, hkv, sk, d)``, v ``(b, hkv, sk, dv)``; query head h reads key head
``h // (hq // hkv)``. Everything is summed in fp32 (fp64 for fp64 inputs). A query that sees no key has o = 0,
lse = -inf and no gradient. ``docs/derivation.md`` derives each step.

Masks, scores, dropout and grouped heads are ``Tile``'s to know (``reference_tile.py``). Sinks and packed sequences
(``seqlens``) cost these passes a line each; ``sinks.py`` and ``packed.py`` explain them.

Sources: Milakov & Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (2205.14135); Dao 2023 (2307.08691).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.dropout import Dropout
from flashtile.kernel import check, check_features
from flashtile.kernel.packed import backward_by_sequence, forward_by_sequence
from flashtile.kernel.reference_tile import Tile, accumulation_dtype, load
from flashtile.mask import Mask, causal, full
from flashtile.score import Score

# ---------------------------------------------------------------------------------------------- 1. softmax in one pass


def softmax_step(s: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one more block of logits into a running softmax.

        m' = max(m, max_j s_j)      p_j = exp(s_j - m')      rescale = exp(m - m')      l' = l * rescale + sum_j p_j

    s ``(..., n, block)``; row_max m and row_sum l ``(..., n, 1)``. Returns ``(p, rescale, m', l')``; whatever was
    summed with weights relative to m has to be multiplied by ``rescale``.
    """
    new_max = torch.maximum(row_max, s.amax(dim=-1, keepdim=True))
    # A row that has met nothing but -inf has no maximum yet, and -inf - (-inf) would be NaN.
    shift = new_max.masked_fill(new_max == -math.inf, 0.0)
    # Subtract first, then exponentiate: the difference of two huge logits is exact where each one's product is not.
    p = torch.exp(s - shift)
    rescale = torch.exp(row_max - shift)
    return p, rescale, new_max, row_sum * rescale + p.sum(dim=-1, keepdim=True)


def online_softmax(x: Tensor, block_size: int) -> Tensor:
    """Softmax over the last dimension from one pass over blocks of ``block_size``; a row of only -inf gives zeros."""
    s = x.to(accumulation_dtype(x.dtype))
    row_max = s.new_full((*s.shape[:-1], 1), -math.inf)
    row_sum = s.new_zeros((*s.shape[:-1], 1))
    for start in range(0, s.shape[-1], block_size):
        _, _, row_max, row_sum = softmax_step(s[..., start : start + block_size], row_max, row_sum)
    row_max = row_max.masked_fill(row_sum == 0, 0.0)
    row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
    return (torch.exp(s - row_max) / row_sum).to(x.dtype)


# ------------------------------------------------------------------------------------------------- 2. attention forward


@forward_by_sequence
def blockwise_forward(
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
    block_q: int = 128,
    block_k: int = 128,
) -> tuple[Tensor, Tensor]:
    """Attention by tiles: ``online_softmax`` whose loop also carries ``acc``, the weighted sum of value rows.

        acc' = acc * rescale + p v_j        o = acc / l        lse = m + log l

    Returns o ``(b, hq, sq, dv)`` in q's dtype and lse ``(b, hq, sq)``, natural log. Memory beside the results: one
    tile of ``block_q`` x ``block_k`` logits per head. sinks ``(hq,)``; ``max_logits``, shaped as lse, receives the
    largest logit of every row; ``first_batch`` is the number of batch entry 0.
    """
    tile = Tile.of(q, k, softmax_scale, mask, score, dropout, first_batch)
    (batch, heads_q, seqlen_q, _), dtype = q.shape, accumulation_dtype(q.dtype)
    o = q.new_empty((batch, heads_q, seqlen_q, v.shape[-1]))
    lse = q.new_empty((batch, heads_q, seqlen_q), dtype=dtype)
    for q_lo in range(0, seqlen_q, block_q):
        rows = slice(q_lo, min(q_lo + block_q, seqlen_q))
        q_i = tile.stack(load(q, rows))
        row_max = q_i.new_full((*q_i.shape[:-1], 1), -math.inf)
        row_sum = q_i.new_zeros((*q_i.shape[:-1], 1))
        acc = q_i.new_zeros((*q_i.shape[:-1], v.shape[-1]))
        for cols, partial in tile.visited(rows, block_k):
            k_j, v_j, keep = load(k, cols), load(v, cols), tile.keep(rows, cols)
            s = tile.logits(q_i @ k_j.mT * softmax_scale, rows, cols, partial)
            p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum)
            acc = acc * rescale + tile.dropped(p, keep) @ v_j
        if max_logits is not None:
            max_logits[:, :, rows] = tile.unstack(row_max).squeeze(-1)
        if sinks is not None:
            # One more logit in every row, whose value row is zero.
            _, rescale, row_max, row_sum = softmax_step(
                tile.stack(tile.column(sinks.to(q_i.dtype), rows)), row_max, row_sum
            )
            acc = acc * rescale
        # A row that has met no logit: 0 / 1 = 0, and -inf + log 1 = -inf, without a NaN in the derivatives of either.
        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
        o[:, :, rows] = tile.unstack(acc / row_sum).to(q.dtype)
        lse[:, :, rows] = tile.unstack(row_max + row_sum.log()).squeeze(-1)
    return o, lse


# ------------------------------------------------------------------------------------------------ 3. attention backward


@backward_by_sequence
def blockwise_backward(
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
    block_q: int = 128,
    block_k: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by tiles, the weights computed again from lse.

        p = exp(s - lse)            dv = p^T do             delta = rowsum(do * o) - dlse
        ds = p * (do v^T - delta)   dq = scale * ds k       dk = scale * ds^T q

    do ``(b, hq, sq, dv)``, dlse ``(b, hq, sq)`` or None, the rest as in ``blockwise_forward``. Returns (dq, dk, dv) in
    the dtypes of q, k, v; dk and dv are summed over the query heads of a group before rounding. With dropout the
    weights in dv, and do v^T, are multiplied by keep / (1 - p). Sinks need no mention, being in o and lse already;
    their own gradient is ``sinks.sink_gradient``.
    """
    tile = Tile.of(q, k, softmax_scale, mask, score, dropout, first_batch)
    seqlen_q, dtype = q.shape[2], accumulation_dtype(q.dtype)
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    for q_lo in range(0, seqlen_q, block_q):
        rows = slice(q_lo, min(q_lo + block_q, seqlen_q))
        q_i = tile.stack(load(q, rows))
        dq_i = torch.zeros_like(q_i)
        saved = _row_terms(tile, rows, do, o, lse, dlse)
        for cols, partial in tile.visited(rows, block_k):
            k_j, v_j = load(k, cols), load(v, cols)
            dq_ij, dk_ij, dv_ij = _backward_tile(tile, q_i, k_j, v_j, *saved, rows, cols, partial)
            dq_i += dq_ij
            dk[:, :, cols] += dk_ij
            dv[:, :, cols] += dv_ij
        dq[:, :, rows] = tile.unstack(dq_i).to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _row_terms(
    tile: Tile, rows: slice, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return do, lse and delta of some query rows, stacked; rows that see no key pass no gradient on."""
    do, o, lse = (tile.stack(load(x, rows)) for x in (do, o, lse[..., None]))
    delta = (do * o).sum(dim=-1, keepdim=True)
    if dlse is not None:
        # dlse_i / ds_ij = p_ij, so the gradient of lse joins the row's constant.
        delta = delta - tile.stack(load(dlse[..., None], rows))
    # Such rows have s = -inf everywhere: with lse 0 instead of -inf their weights are exp(-inf) = 0, not NaN. What
    # arrives there may be NaN (the gradient of logaddexp(-inf, -inf) is), and 0 * NaN would spread.
    sees_no_key = lse == -math.inf
    return do.masked_fill(sees_no_key, 0.0), lse.masked_fill(sees_no_key, 0.0), delta.masked_fill(sees_no_key, 0.0)


def _backward_tile(
    tile: Tile,
    q_i: Tensor,
    k_j: Tensor,
    v_j: Tensor,
    do_i: Tensor,
    lse_i: Tensor,
    delta_i: Tensor,
    rows: slice,
    cols: slice,
    partial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one tile adds to dq, dk and dv: five matmuls, nothing larger than the tile."""
    scaled = q_i @ k_j.mT * tile.softmax_scale
    p = torch.exp(tile.logits(scaled, rows, cols, partial) - lse_i)
    keep = tile.keep(rows, cols)
    dv = tile.dropped(p, keep).mT @ do_i
    dp = tile.dropped(do_i @ v_j.mT, keep)
    ds = p * (dp - delta_i) * tile.score_derivative(scaled, rows, cols)
    dq = ds @ k_j * tile.softmax_scale
    dk = ds.mT @ q_i * tile.softmax_scale
    return dq, dk, dv


# --------------------------------------------------------------------------------- the dense formula, for comparison


@forward_by_sequence
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention with the whole matrix of logits in memory, to be differentiated by autograd as often as one likes.

    Shapes and results as in ``blockwise_forward``. In fp64 this is the oracle of all tests.
    """
    tile = Tile.of(q, k, softmax_scale, mask, score, dropout, first_batch)
    rows, cols = slice(0, q.shape[2]), slice(0, k.shape[2])
    scaled = tile.stack(load(q, rows)) @ load(k, cols).mT * softmax_scale
    s = tile.unstack(tile.logits(scaled, rows, cols, partial=True))
    if sinks is not None:
        s = torch.cat([s, tile.column(sinks.to(s.dtype), rows)], dim=-1)
    # Rows of nothing but -inf get finite logits, so that softmax and its gradients stay finite, and are cleared again.
    empty = (s == -math.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)[..., cols]
    o = tile.unstack(tile.dropped(tile.stack(p), tile.keep(rows, cols)) @ load(v, cols)).to(q.dtype)
    lse = torch.logsumexp(s, dim=-1).masked_fill(empty.squeeze(-1), -math.inf)
    return o, lse


def dense_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, softmax_scale: float, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from one tile that is the whole matrix; shapes and results as in ``blockwise_backward``."""
    tile = Tile.of(q, k, softmax_scale, mask, None)
    rows, cols = slice(0, q.shape[2]), slice(0, k.shape[2])
    saved = _row_terms(tile, rows, do, o, lse, None)
    q_i, k_j, v_j = tile.stack(load(q, rows)), load(k, cols), load(v, cols)
    dq, dk, dv = _backward_tile(tile, q_i, k_j, v_j, *saved, rows, cols, partial=True)
    return tile.unstack(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ------------------------------------------------------------------------------------------ 4. the autograd function


class FlashAttentionMock(torch.autograd.Function):
    """``FlashAttentionMock.apply(q, k, v, is_causal=False, naive=False)``: attention on ``(..., n, d)``.

    All leading dimensions are flattened; keys may have fewer heads than queries, in the last leading dimension, and are
    like them in the others. Saves q, k, v, o and the lse ``(..., n)``. ``naive=True`` takes the dense formula, which
    alone is twice differentiable. Raises TypeError and ValueError as ``flashtile.flash_attention`` does.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, naive: bool = False) -> Tensor:
        _check(q, k, v, is_causal, naive)
        attend = dense_attention if naive else blockwise_forward
        o, lse = attend(_flatten(q), _flatten(k), _flatten(v), **_rules(q, is_causal))
        o, lse = o.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal, ctx.naive = is_causal, naive
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        q, k, v, o, lse = ctx.saved_tensors
        if ctx.naive:
            grads = _naive_backward(do, q, k, v, ctx.is_causal)
        else:
            grads = _BlockwiseBackward.apply(do, q, k, v, o, lse, ctx.is_causal)
        return *grads, None, None


def _check(q: Any, k: Any, v: Any, is_causal: Any, naive: Any) -> None:
    """Raise unless attention can be computed; without leading dimensions there is one head."""
    if all(isinstance(x, Tensor) and x.ndim == 2 for x in (q, k, v)):
        q, k, v = q[None], k[None], v[None]
    check.attention_inputs(q, k, v, any_gradient=True)
    check.options(is_causal, None)
    check_features.switches(naive=naive)


def _rules(q: Tensor, is_causal: bool) -> dict:
    return {"softmax_scale": q.shape[-1] ** -0.5, "mask": causal() if is_causal else full()}


def _flatten(x: Tensor) -> Tensor:
    """``(..., n, d)`` -> ``(1, prod(...), n, d)``: the leading dimensions become the heads of one batch entry."""
    if x.numel() == 0:  # einx refuses axes of length 0
        return x.reshape(1, math.prod(x.shape[:-2]), *x.shape[-2:])
    import einx  # not above: it takes 0.9 s, and the CPU path imports this file for the tiles alone

    return einx.id("... n d -> 1 (...) n d", x)  # pyright: ignore[reportPrivateImportUsage]  (its public name)


def _flatten_lse(lse: Tensor) -> Tensor:
    return _flatten(lse[..., None]).squeeze(-1)


def _naive_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as an expression of do, q, k and v alone, so that autograd can differentiate it again."""
    rules = _rules(q, is_causal)
    o, lse = dense_attention(_flatten(q), _flatten(k), _flatten(v), **rules)
    dq, dk, dv = dense_backward(_flatten(do), _flatten(q), _flatten(k), _flatten(v), o, lse, **rules)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


class _BlockwiseBackward(torch.autograd.Function):
    """``blockwise_backward`` as a node of its own, so that differentiating it again ends in words."""

    @staticmethod
    def forward(ctx, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool):
        flat = (_flatten(do), _flatten(q), _flatten(k), _flatten(v), _flatten(o), _flatten_lse(lse))
        dq, dk, dv = blockwise_backward(*flat, None, **_rules(q, is_causal))
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)

    @staticmethod
    def backward(ctx, *grad_outputs):
        raise RuntimeError(
            "blockwise FlashAttentionMock is not twice differentiable: its backward recomputes the weights from the "
            "saved lse, which autograd does not follow. Pass naive=True for second derivatives."
        )


# --------------------------------------------------------------------------------------------- the compiled backward


@functools.cache
def _compiled_dense_backward() -> Callable:
    return torch.compile(dense_backward)


def _flash_attn_backward_compiled(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) by ``torch.compile`` of the dense formulas, with n x n memory: an oracle and a peer to time.

    q, k, v, o, do ``(..., n, d)``, lse ``(..., n)`` natural log. Compiled at the first call, never at import.
    """
    flat = (_flatten(do), _flatten(q), _flatten(k), _flatten(v), _flatten(o), _flatten_lse(lse))
    dq, dk, dv = _compiled_dense_backward()(*flat, **_rules(q, is_causal))
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
