"""The statistics of ``flash_attention_statistics.py`` for CPU tensors: the same three functions, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.kernel.flash_attention_cpu import BLOCK_K, BLOCK_Q
from flashtile.kernel.reference_tile import Tile, accumulation_dtype, load
from flashtile.mask import Mask
from flashtile.score import Score


def column_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return ``(batch, heads_q, seqlen_k)``: the probabilities of each key, summed over the queries."""
    tile = Tile.of(q, k, softmax_scale, mask, score)
    sums = q.new_zeros((*q.shape[:2], k.shape[2]), dtype=accumulation_dtype(q.dtype))
    for rows in _blocks(q.shape[2], BLOCK_Q):
        for cols, log_p in _log_probabilities(tile, q, k, lse, rows):
            p = log_p.exp()
            if weights is not None:
                p = (p * weights[:, :, rows, None]).masked_fill(p == 0, 0.0)
            sums[:, :, cols] += p.sum(dim=2)
    return sums


def row_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    entropy: bool = True,
    top_k: int = 0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``(entropy, values, indices)`` of every query; None for what is not asked for."""
    tile, dtype = Tile.of(q, k, softmax_scale, mask, score), accumulation_dtype(q.dtype)
    entropies = q.new_zeros(q.shape[:3], dtype=dtype) if entropy else None
    values = q.new_zeros((*q.shape[:3], top_k), dtype=dtype) if top_k else None
    indices = q.new_full((*q.shape[:3], top_k), -1, dtype=torch.int64) if top_k else None
    for rows in _blocks(q.shape[2], BLOCK_Q):
        shape = (*q.shape[:2], rows.stop - rows.start)
        largest = q.new_full((*shape, top_k), -math.inf, dtype=dtype)
        keys = q.new_full((*shape, top_k), -1, dtype=torch.int64)
        for cols, log_p in _log_probabilities(tile, q, k, lse, rows):
            if entropies is not None:
                p = log_p.exp()
                entropies[:, :, rows] -= (p * log_p).masked_fill(p == 0, 0.0).sum(dim=-1)
            if top_k:
                largest, keys = _merge(largest, keys, log_p, cols)
        if values is not None and indices is not None:
            values[:, :, rows], indices[:, :, rows] = largest.exp(), keys
    return None if entropies is None else entropies.clamp_(min=0.0), values, indices


def _merge(largest: Tensor, keys: Tensor, log_p: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """Return the largest of what was kept and a tile of candidates; the sort is stable, so lower keys stay first."""
    k_idx = torch.arange(cols.start, cols.stop, device=keys.device).expand_as(log_p)
    candidates = torch.cat((largest, log_p), dim=-1)
    # A candidate of probability 0 by mask is nothing, as is a free place.
    k_idx = torch.cat((keys, k_idx.masked_fill(log_p == -math.inf, -1)), dim=-1)
    order = candidates.sort(dim=-1, descending=True, stable=True).indices[..., : largest.shape[-1]]
    return candidates.gather(-1, order), k_idx.gather(-1, order)


def chosen_rows(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rows: Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
) -> Tensor:
    """Return ``(batch, heads_q, len(rows), seqlen_k)``: the probabilities of the queries numbered ``rows``."""
    tile = Tile.of(q, k, softmax_scale, mask, score)
    p = q.new_zeros((*q.shape[:2], rows.numel(), k.shape[2]), dtype=accumulation_dtype(q.dtype))
    for i, row in enumerate(rows.tolist()):
        for cols, log_p in _log_probabilities(tile, q, k, lse, slice(row, row + 1)):
            p[:, :, i, cols] = log_p.exp().squeeze(2)
    return p


def _blocks(length: int, block: int) -> Iterator[slice]:
    for lo in range(0, length, block):
        yield slice(lo, min(lo + block, length))


def _log_probabilities(tile: Tile, q: Tensor, k: Tensor, lse: Tensor, rows: slice) -> Iterator[tuple[slice, Tensor]]:
    """Yield the key tiles that these rows see, with ln P ``(b, hq, rows, cols)``, -inf where P = 0."""
    q_i, lse_i = tile.stack(load(q, rows)), load(lse[..., None], rows)
    # Rows that see no key: -inf - inf = -inf.
    lse_i = lse_i.masked_fill(lse_i == -math.inf, math.inf)
    for cols, partial in tile.visited(rows, BLOCK_K):
        scaled = q_i @ load(k, cols).mT * tile.softmax_scale
        yield cols, tile.unstack(tile.logits(scaled, rows, cols, partial)) - lse_i
