"""The small functions of a language model, written so that no finite input overflows."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""A target with this value is not trained on."""


def silu(x: Tensor) -> Tensor:
    """Return `x * sigmoid(x)`, of any shape."""
    return x * torch.sigmoid(x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return `exp(x_i - m) / sum_j exp(x_j - m)` along `dim`, where `m = max_j x_j`.

    Subtracting the maximum changes nothing mathematically and keeps every exponent at or below 0. A slice that is all
    -inf (a query that may see no key) gives 0. Half precision is computed in fp32 and returned in x's dtype.
    """
    wide = _at_least_fp32(x)
    largest = wide.detach().amax(dim, keepdim=True)  # softmax does not depend on it, so no gradient flows through it
    exps = torch.exp(wide - largest.masked_fill(largest == float("-inf"), 0))
    # The largest element contributes exp(0) = 1, so the clamp touches nothing but the all -inf slices.
    return (exps / exps.sum(dim, keepdim=True).clamp_min(1)).to(x.dtype)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean"
) -> Tensor:
    """Return the mean or sum over trained tokens of `log sum_j exp(logits_j) - logits_target`, in nats.

    Args:
        logits: `(..., vocab)`; computed in fp32 at least.
        targets: `(...)`, integers; positions equal to `ignore_index` count neither in the sum nor in the mean.
        reduction: "mean" or "sum". The mean over no tokens is 0.

    Raises:
        ValueError: for an unknown reduction, or shapes that do not match.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"targets must have shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}")
    logits = _at_least_fp32(logits)
    trained = targets != ignore_index
    target_logits = logits.gather(-1, targets.masked_fill(~trained, 0).unsqueeze(-1)).squeeze(-1)
    losses = torch.logsumexp(logits, dim=-1) - target_logits
    total = losses.masked_fill(~trained, 0).sum()
    return total if reduction == "sum" else total / trained.sum().clamp_min(1)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
