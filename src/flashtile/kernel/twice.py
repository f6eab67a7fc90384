"""The reference that can be differentiated as often as one likes: dense formulas, one block of query rows at a time.

Every block is computed again when its gradient is wanted, so first gradients take O(n * block) memory. Gradients of
gradients need the weights of every block at once: they take O(n * n).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashtile.dropout import Dropout
from flashtile.kernel.packed import forward_by_sequence
from flashtile.kernel.reference_tile import Tile, load
from flashtile.mask import Mask
from flashtile.score import Score

BLOCK = 256


@forward_by_sequence
def attention(
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
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` by operations that autograd follows, to q, k, v, sinks and the tensors of the score.

    Arguments as those of ``flash_attention_mock.blockwise_forward``.
    """
    tile = Tile.of(q, k, softmax_scale, mask, score, dropout, first_batch)
    compute_again = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    blocks = []
    for lo in range(0, max(q.shape[2], 1), BLOCK):
        rows = slice(lo, min(lo + BLOCK, q.shape[2]))

        def block(q_i: Tensor, k: Tensor, v: Tensor, rows: slice = rows) -> tuple[Tensor, Tensor, Tensor]:
            return _block(tile, q_i, k, v, rows, sinks)

        part = q[:, :, rows], k, v
        if compute_again and torch.is_grad_enabled():
            blocks.append(checkpoint(block, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(block(*part))
    o, lse, largest = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
    if max_logits is not None:
        max_logits.copy_(largest.detach())
    return o, lse


def _block(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, rows: slice, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    everything, cols = slice(0, q.shape[2]), slice(0, k.shape[2])
    scaled = tile.stack(load(q, everything)) @ load(k, cols).mT * tile.softmax_scale
    s = tile.unstack(tile.logits(scaled, rows, cols, partial=True))
    largest = s.detach().amax(dim=-1) if k.shape[2] else s.new_full(s.shape[:-1], -math.inf)
    if sinks is not None:
        s = torch.cat([s, tile.column(sinks.to(s.dtype), rows)], dim=-1)
    # Rows of nothing but -inf get finite logits, so that softmax and its gradients stay finite, and are cleared again.
    empty = (s == -math.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)[..., cols]
    o = tile.unstack(tile.dropped(tile.stack(p), tile.keep(rows, cols)) @ load(v, cols)).to(q.dtype)
    lse = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    return o, lse.masked_fill(empty.squeeze(-1), -math.inf), largest
