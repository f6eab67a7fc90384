"""The tangent of attention on CPU tensors, tile by tile; the formulas are in ``flash_attention_jvp.py``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashtile.dropout import Dropout
from flashtile.kernel.flash_attention_cpu import BLOCK_K, BLOCK_Q
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.packed import sequences
from flashtile.kernel.reference_tile import Tile, load
from flashtile.mask import Mask
from flashtile.score import Score
from flashtile.seqlen import Seqlens


def jvp(
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    first_batch: int = 0,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
) -> tuple[Tensor, Tensor]:
    """Return ``(to, tlse)``, the tangents of o and lse for the tangents ``tq, tk, tv`` of q, k, v (None: zero).

    Shapes as in ``flash_attention_jvp.jvp``; computed in fp32 (fp64 for fp64 inputs).
    """
    to, tlse = empty_in_order_of(q, (*q.shape[:3], v.shape[3])).zero_(), torch.zeros_like(lse)
    if seqlens is not None:
        options: Any = {"softmax_scale": softmax_scale, "mask": mask, "score": score, "dropout": dropout}
        for i, (rows, cols) in enumerate(sequences(seqlens)):
            index = (rows, cols, cols, rows, cols, cols, rows, rows)
            given = zip((tq, tk, tv, q, k, v, o, lse), index, strict=True)
            parts: Any = (None if x is None else x[:, :, of] for x, of in given)
            to[:, :, rows], tlse[:, :, rows] = jvp(*parts, **options, first_batch=i, block_q=block_q, block_k=block_k)
        return to, tlse
    tile = Tile.of(q, k, softmax_scale, mask, score, dropout, first_batch)
    for q_lo in range(0, q.shape[2], block_q):
        rows = slice(q_lo, min(q_lo + block_q, q.shape[2]))
        q_i, o_i, lse_i = (tile.stack(load(x, rows)) for x in (q, o, lse[..., None]))
        tq_i = None if tq is None else tile.stack(load(tq, rows))
        # Rows that see no key: exp(-inf - inf) = 0.
        lse_i = lse_i.masked_fill(lse_i == -math.inf, math.inf)
        acc, tlse_i = torch.zeros_like(o_i), torch.zeros_like(lse_i)
        for cols, partial in tile.visited(rows, block_k):
            k_j, v_j = load(k, cols), load(v, cols)
            scaled = q_i @ k_j.mT * softmax_scale
            p = torch.exp(tile.logits(scaled, rows, cols, partial) - lse_i)
            keep = tile.keep(rows, cols)
            if tv is not None:
                acc += tile.dropped(p, keep) @ load(tv, cols)
            if tq_i is None and tk is None:
                continue
            ts = torch.zeros_like(p)
            if tq_i is not None:
                ts += tq_i @ k_j.mT
            if tk is not None:
                ts += q_i @ load(tk, cols).mT
            # Not p * ts alone: the tangent of a hidden key may be anything, NaN included.
            p_ts = (p * ts * softmax_scale * tile.score_derivative(scaled, rows, cols)).masked_fill(p == 0, 0.0)
            tlse_i += p_ts.sum(dim=-1, keepdim=True)
            acc += tile.dropped(p_ts, keep) @ v_j
        to[:, :, rows] = tile.unstack(acc - tlse_i * o_i).to(to.dtype)
        tlse[:, :, rows] = tile.unstack(tlse_i).squeeze(-1)
    return to, tlse
