"""Attention sinks: a learned logit per query head that takes part in the softmax's denominator and has no value row.

    lse' = log(exp(lse) + exp(sink))      o' = exp(lse - lse') * o      dsink_h = -sum_i exp(sink_h - lse'_i) delta_i

with delta = rowsum(do * o') - dlse'. A query that sees no key has o' = 0 and lse' = sink. Nothing else in the backward
pass changes: it reads o' and lse' where it read o and lse.

Source: Xiao et al. 2023 (arXiv 2309.17453); with a learned logit, as in OpenAI's gpt-oss models (2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def join_sinks(sinks: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o', lse') from attention without sinks; sinks ``(hq,)``, o ``(b, hq, sq, dv)``, lse ``(b, hq, sq)``."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # exp(-inf - -inf) would be NaN where there is neither key nor sink.
    weight = torch.exp(lse - joined).masked_fill(lse == -math.inf, 0.0)
    return o * weight[..., None].to(o.dtype), joined


def row_delta(do: Tensor, o: Tensor, dlse: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``rowsum(do * o) - dlse`` ``(b, hq, sq)``, summed in ``dtype``."""
    delta = (do.to(dtype) * o.to(dtype)).sum(dim=-1)
    return delta if dlse is None else delta - dlse


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsinks ``(hq,)`` in the dtype of sinks; lse (sinks included) and delta ``(b, hq, sq)``.

    Rows with lse = -inf (past the end of packed sequences) count nothing, whatever their delta. Deterministic.
    """
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    lost = (share * delta).masked_fill(lse == -math.inf, 0.0)
    return -lost.sum(dim=(0, 2)).to(sinks.dtype)
