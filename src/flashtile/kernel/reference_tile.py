"""One tile of attention weights in PyTorch: what the readable passes of ``flash_attention_mock.py`` ask it for.

``Tile`` knows the mask, the score, the dropout and the grouped heads; the passes know none of them. It says which key
tiles some rows have to visit, what the logits of a tile are, and what dropout leaves of its weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.dropout import Dropout, keep_mask
from flashtile.mask import Mask
from flashtile.score import Score
from flashtile.seqlen import Where


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits, softmax and sums are computed: fp64 for fp64, fp32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def load(x: Tensor, index: slice) -> Tensor:
    """Return rows of ``(b, h, n, c)`` in the accumulation dtype, and dense, so that strides change no rounding."""
    return x[:, :, index].to(accumulation_dtype(x.dtype)).contiguous()


class Tile(NamedTuple):
    """How one tile of weights is made: scale, mask, score, dropout, and the layout that grouped-query heads need."""

    where: Where
    softmax_scale: float
    mask: Mask
    score: Score | None
    dropout: Dropout | None
    heads_q: int
    heads_kv: int
    group: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        softmax_scale: float,
        mask: Mask,
        score: Score | None,
        dropout: Dropout | None = None,
        first_batch: int = 0,
    ) -> Tile:
        (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
        batch_idx = torch.arange(first_batch, first_batch + batch, device=q.device).view(batch, 1, 1, 1)
        head_idx = torch.arange(heads_q, device=q.device).view(heads_q, 1, 1)
        where = Where(batch_idx, head_idx, seqlen_q, seqlen_k)
        group = max(heads_q // max(heads_kv, 1), 1)
        return Tile(where, softmax_scale, mask, score, dropout, heads_q, heads_kv, group)

    def stack(self, x: Tensor) -> Tensor:
        """Stack the query heads that share a key head as rows, so that one matmul serves the group.

        ``(b, hq, m, c)`` -> ``(b, hkv, hq / hkv * m, c)``. Transposed products of such tensors sum over the group by
        themselves, which is just what dk and dv need.
        """
        batch, _, m, c = x.shape
        return x.reshape(batch, self.heads_kv, self.group * m, c)

    def unstack(self, x: Tensor) -> Tensor:
        """``(b, hkv, hq / hkv * m, c)`` -> ``(b, hq, m, c)``."""
        batch, _, stacked, c = x.shape
        return x.reshape(batch, self.heads_q, stacked // self.group, c)

    def column(self, per_head: Tensor, rows: slice) -> Tensor:
        """One number per query head as a column of a tile, ``(hq,)`` -> ``(b, hq, m, 1)``."""
        return per_head.view(-1, 1, 1).expand(self.where.batch.numel(), self.heads_q, rows.stop - rows.start, 1)

    def logits(self, scaled: Tensor, rows: slice, cols: slice, partial: bool) -> Tensor:
        """Return the scored logits of a tile of scaled products, -inf where the mask forbids.

        Only a ``partial`` tile asks the mask's predicate.
        """
        s = self.unstack(scaled)
        q_idx, k_idx = self._indices(rows, cols, s.device)
        if self.score is not None:
            s = self.score.forward(self.where, q_idx, k_idx, s, self.score.args)
        if partial:
            s = s.masked_fill(~self.mask.predicate(self.where, q_idx, k_idx, self.mask.args), -math.inf)
        return self.stack(s)

    def score_derivative(self, scaled: Tensor, rows: slice, cols: slice) -> Tensor | float:
        """Return d(logit) / d(scaled product) on a tile: 1 without a score."""
        if self.score is None:
            return 1.0
        s = self.unstack(scaled)
        q_idx, k_idx = self._indices(rows, cols, s.device)
        slope = self.score.derivative(self.where, q_idx, k_idx, s, self.score.args)
        return self.stack(torch.as_tensor(slope, dtype=s.dtype, device=s.device).expand_as(s))

    def keep(self, rows: slice, cols: slice) -> Tensor | None:
        """Return which of the tile's weights dropout keeps; None without dropout."""
        if self.dropout is None:
            return None
        q_idx, k_idx = self._indices(rows, cols, self.dropout.seed.device)
        return self.stack(keep_mask(self.dropout.seed, self.where, q_idx, k_idx, self.dropout.p))

    def dropped(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Return what dropout makes of weights x, or of their gradient: 0, or x / (1 - p)."""
        if self.dropout is None or keep is None:
            return x
        return x.masked_fill(~keep, 0.0) * self.dropout.rescale

    def _indices(self, rows: slice, cols: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        q_idx = torch.arange(rows.start, rows.stop, device=device)[:, None]
        k_idx = torch.arange(cols.start, cols.stop, device=device)[None, :]
        return q_idx, k_idx

    def visited(self, rows: slice, block_k: int) -> Iterator[tuple[slice, bool]]:
        """Yield the key tiles that some of these query rows see, and whether a tile needs the mask's predicate."""
        lo, full_lo, full_hi, hi = self._key_range(rows)
        for k_lo in range(lo, hi, block_k):
            k_hi = min(k_lo + block_k, hi)
            yield slice(k_lo, k_hi), not (full_lo <= k_lo and k_hi <= full_hi)

    def _key_range(self, rows: slice) -> tuple[int, int, int, int]:
        """Join the mask's key ranges over all (batch, head) pairs, since the loops here treat them together.

        Few masks look at both, most at neither: the mask is asked about one pair first, then about what it looked at.
        """
        if self.mask.key_range is None:
            return 0, 0, 0, self.where.seqlen_k
        all_batch, all_heads = self.where.batch.flatten().tolist(), list(range(self.heads_q))
        seen: set[str] = set()
        ranges, asked = [], None
        while seen != asked:
            asked = set(seen)
            places = itertools.product(
                all_batch if "batch" in asked else all_batch[:1], all_heads if "head" in asked else all_heads[:1]
            )
            watched = [_Watched(self.where._replace(batch=b, head=h), seen) for b, h in places]
            ranges = [self.mask.key_range(where, rows.start, rows.stop, self.mask.args) for where in watched]
        if not ranges:
            return 0, 0, 0, 0
        los, full_los, full_his, his = ([int(bound) for bound in bounds] for bounds in zip(*ranges, strict=True))
        return max(min(los), 0), max(full_los), min(full_his), min(max(his), self.where.seqlen_k)


class _Watched:
    """A ``Where`` that notes in ``seen`` whether somebody looked at its batch entry or its head."""

    def __init__(self, where: Where, seen: set[str]) -> None:
        self._where, self._seen = where, seen

    def __getattr__(self, name: str) -> Any:
        self._seen |= {"batch", "head"} & ({name} if name in Where._fields else set(Where._fields))
        return getattr(self._where, name)

    def __getitem__(self, index: Any) -> Any:
        self._seen |= {"batch", "head"}
        return self._where[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])
