"""Packed sequences of different lengths in plain PyTorch: each one by itself, through a pass for dense batches.

Sequence i has the query rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])`` and likewise its keys, cut to ``seqused``. Its
number is what masks, scores and dropout see as the batch entry. Rows that belong to no sequence (past the last one, or
cut off) come back as o = 0, lse = -inf and gradients 0, and what they hold is never read.

The decorators keep the passes readable: a pass takes one batch entry whose number is ``first_batch``, and learns
``seqlens`` here. Reading the lengths waits for the device; the kernels do not do that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.kernel.layout import empty_in_order_of
from flashtile.seqlen import Seqlens


def forward_by_sequence(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Let ``forward(q, k, v, **options)`` take ``seqlens``: then q, k, v are ``(1, heads, total, d)``."""

    @functools.wraps(forward)
    def with_seqlens(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seqlens: Seqlens | None = None,
        max_logits: Tensor | None = None,
        **options: Any,
    ):
        if max_logits is not None:
            options["max_logits"] = max_logits
        if seqlens is None:
            return forward(q, k, v, **options)
        o = empty_in_order_of(q, (*q.shape[:-1], v.shape[-1]), q.dtype).zero_()
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
        if max_logits is not None:
            max_logits.fill_(-math.inf)
        nothing = slice(0, 0)  # without any sequence o and lse are differentiable all the same
        for i, (rows, cols) in enumerate(list(sequences(seqlens)) or [(nothing, nothing)]):
            if max_logits is not None:
                options["max_logits"] = max_logits[:, :, rows]
            part = q[:, :, rows], k[:, :, cols], v[:, :, cols]
            o[:, :, rows], lse[:, :, rows] = forward(*part, first_batch=i, **options)
        return o, lse

    return with_seqlens


def backward_by_sequence(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Let ``backward(do, q, k, v, o, lse, dlse, **options)`` take ``seqlens``, as ``forward_by_sequence`` does."""

    @functools.wraps(backward)
    def with_seqlens(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        seqlens: Seqlens | None = None,
        **options: Any,
    ):
        if seqlens is None:
            return backward(do, q, k, v, o, lse, dlse, **options)
        dq, dk, dv = (empty_in_order_of(x, x.shape).zero_() for x in (q, k, v))
        for i, (rows, cols) in enumerate(sequences(seqlens)):
            of_queries = (None if x is None else x[:, :, rows] for x in (do, q, o, lse, dlse))
            do_i, q_i, o_i, lse_i, dlse_i = of_queries
            dq[:, :, rows], dk[:, :, cols], dv[:, :, cols] = backward(
                do_i, q_i, k[:, :, cols], v[:, :, cols], o_i, lse_i, dlse_i, first_batch=i, **options
            )
        return dq, dk, dv

    return with_seqlens


def sequences(seqlens: Seqlens) -> Iterator[tuple[slice, slice]]:
    """Yield the query rows and the key rows of every sequence."""
    rows = _slices(seqlens.cu_seqlens_q, seqlens.seqused_q)
    cols = _slices(seqlens.cu_seqlens_k, seqlens.seqused_k)
    return zip(rows, cols, strict=True)


def _slices(cu_seqlens: Tensor, seqused: Tensor | None) -> list[slice]:
    bounds = cu_seqlens.tolist()
    used = [math.inf] * (len(bounds) - 1) if seqused is None else seqused.tolist()
    return [slice(lo, int(min(hi, lo + n))) for lo, hi, n in zip(bounds, bounds[1:], used, strict=False)]
