"""Gradients to the tensors of a score on the CPU, tile by tile; on GPUs see ``flash_attention_score_gradient.py``.

    ds = p * (do v^T - delta) with respect to the scored logit          dE = sum of ds * d(scored logit) / dE

PyTorch's autograd differentiates the score's own forward function on one tile of logits at a time.
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
from flashtile.score import Score
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
    leaves = [
        t.detach().to(dtype).requires_grad_() if need else t for t, need in zip(score.tensors(), needs, strict=True)
    ]
    wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
    sums = [torch.zeros_like(t) for t in wanted]
    with torch.enable_grad():
        score = score.with_tensors(tuple(leaves))
    everything = slice(0, q.shape[2]), slice(0, k.shape[2])
    for i, (rows, cols) in enumerate([everything] if seqlens is None else sequences(seqlens)):
        part = (do[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], o[:, :, rows], lse[:, :, rows])
        tile = Tile.of(part[1], part[2], softmax_scale, mask, score, dropout, i)
        _add(sums, wanted, tile, *part, None if dlse is None else dlse[:, :, rows])
    found = iter(sums)
    return tuple(next(found) if need else None for need in needs)


def _add(sums, wanted, tile, do, q, k, v, o, lse, dlse) -> None:
    dtype = accumulation_dtype(q.dtype)
    delta = row_delta(do, o, dlse, dtype).masked_fill(lse == -math.inf, 0.0)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # no key, no weight
    for q_lo in range(0, q.shape[2], BLOCK_Q):
        rows = slice(q_lo, min(q_lo + BLOCK_Q, q.shape[2]))
        q_i, do_i, lse_i, delta_i = (tile.stack(load(x, rows)) for x in (q, do, lse[..., None], delta[..., None]))
        for cols, partial in tile.visited(rows, BLOCK_K):
            k_j, v_j = load(k, cols), load(v, cols)
            with torch.enable_grad():
                s = tile.logits(q_i @ k_j.mT * tile.softmax_scale, rows, cols, partial)
            if not s.requires_grad:
                continue
            p = torch.exp(s.detach() - lse_i)
            dp = tile.dropped(do_i @ v_j.mT, tile.keep(rows, cols))
            # A hidden key's row of v may hold anything.
            ds = (p * (dp - delta_i)).masked_fill(p == 0, 0.0)
            grads = torch.autograd.grad(s, wanted, ds, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad
