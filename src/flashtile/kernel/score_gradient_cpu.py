"""Gradients to the tensors of a score on the CPU, tile by tile; on GPUs see ``flash_attention_score_gradient.py``.

    ds = p * (do v^T - delta) with respect to the scored logit          dE = sum of ds * d(scored logit) / dE

with the derivatives that the score declares (``Score.parameters``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flashtile.dropout import Dropout
from flashtile.kernel.flash_attention_cpu import BLOCK_K, BLOCK_Q
from flashtile.kernel.packed import sequences
from flashtile.kernel.reference_tile import Tile, accumulation_dtype, load
from flashtile.kernel.sinks import row_delta
from flashtile.mask import Mask
from flashtile.score import Parameter, Score
from flashtile.seqlen import Seqlens


def parameter_gradients(
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
    score: Score,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradient of every tensor of ``score.tensors()`` that ``needs`` one, in its shape, in fp32 (or fp64).

    The other arguments are those of the backward pass.
    """
    dtype = accumulation_dtype(q.dtype)
    grads: list[Tensor | None] = [None] * len(needs)
    parameters = [p for p in score.parameters() if needs[p.index]]
    for p in parameters:
        grads[p.index] = torch.zeros(p.tensor.shape, dtype=dtype, device=q.device)
    everything = slice(0, q.shape[2]), slice(0, k.shape[2])
    for i, (rows, cols) in enumerate([everything] if seqlens is None else sequences(seqlens)):
        part = (do[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], o[:, :, rows], lse[:, :, rows])
        tile = Tile.of(part[1], part[2], softmax_scale, mask, score, dropout, i)
        _add(grads, parameters, tile, *part, None if dlse is None else dlse[:, :, rows])
    return tuple(grads)


def _add(grads, parameters, tile, do, q, k, v, o, lse, dlse) -> None:
    dtype = accumulation_dtype(q.dtype)
    delta = row_delta(do, o, dlse, dtype).masked_fill(lse == -math.inf, 0.0)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # no key, no weight
    for q_lo in range(0, q.shape[2], BLOCK_Q):
        rows = slice(q_lo, min(q_lo + BLOCK_Q, q.shape[2]))
        q_i, do_i, lse_i, delta_i = (tile.stack(load(x, rows)) for x in (q, do, lse[..., None], delta[..., None]))
        for cols, partial in tile.visited(rows, BLOCK_K):
            k_j, v_j = load(k, cols), load(v, cols)
            scaled = q_i @ k_j.mT * tile.softmax_scale
            p = torch.exp(tile.logits(scaled, rows, cols, partial) - lse_i)
            dp = tile.dropped(do_i @ v_j.mT, tile.keep(rows, cols))
            # A hidden key's row of v may hold anything.
            ds = (p * (dp - delta_i)).masked_fill(p == 0, 0.0)
            for parameter in parameters:
                weight = tile._replace(score=parameter.score).score_derivative(scaled, rows, cols)
                _add_tile(grads[parameter.index], parameter, tile, tile.unstack(ds * weight), rows, cols)


def _add_tile(grad: Tensor, parameter: Parameter, tile: Tile, de: Tensor, rows: slice, cols: slice) -> None:
    """Add the derivatives ``de`` ``(b, hq, m, n)`` with respect to the entry that each logit reads."""
    batch = tile.where.batch.flatten()
    if parameter.bucket is None:
        whole = [dim for dim in range(4) if grad.shape[dim] == 1]
        de = de.sum(dim=whole, keepdim=True) if whole else de
        here = grad if grad.shape[0] == 1 else grad[batch[0] : batch[-1] + 1] if batch.numel() else grad[:0]
        here = here if grad.shape[2] == 1 else here[:, :, rows]
        here = here if grad.shape[3] == 1 else here[..., cols]
        here += de
        return
    q_idx = torch.arange(rows.start, rows.stop, device=de.device)[:, None]
    k_idx = torch.arange(cols.start, cols.stop, device=de.device)[None, :]
    number = parameter.bucket.number(tile.where, q_idx, k_idx, parameter.bucket.args).expand(de.shape)
    by_head = de.permute(2, 3, 0, 1).reshape(-1, de.shape[1]), number.permute(2, 3, 0, 1).reshape(-1, de.shape[1])
    grad.scatter_add_(0, by_head[1].long(), by_head[0])
