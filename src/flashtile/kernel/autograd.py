"""The autograd function ``FlashAttention``: what plain eager calls go through, whatever the backend.

Nothing here computes: the passes do. This file checks the arguments, chooses the backend, keeps q, k, v, o and the
log-sum-exp for the backward pass, and says what can be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import mask
from flashtile.dispatch import Problem, select
from flashtile.kernel import check
from flashtile.kernel.backend import load
from flashtile.kernel.layout import as_4d

TWICE = (
    "flash attention is differentiable once: its backward pass has no derivative. For second derivatives use "
    "flashtile.FlashAttentionMock.apply(q, k, v, is_causal, True), the dense reference"
)


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in autocast's dtype (float64 stays, as everywhere in torch.amp)."""
    dtype = torch.get_autocast_dtype(q.device.type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64
    return t.to(dtype) if castable else t


def attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(q, k, v, o, lse)`` at any rank, q, k, v as they were used (autocast); nothing is recorded."""
    if isinstance(q, Tensor) and torch.is_autocast_enabled(device_type := q.device.type):
        q, k, v = cast_for_autocast(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return attend(q, k, v, is_causal, softmax_scale, backend)
    check.attention_inputs(q, k, v)
    check.options(is_causal, softmax_scale)
    if q.ndim == 4:
        return q, k, v, *forward(q, k, v, softmax_scale, is_causal, backend)
    o, lse = forward(as_4d(q), as_4d(k), as_4d(v), softmax_scale, is_causal, backend)
    # .data: no views for autograd, since users may change results in place.
    return q, k, v, o.view(*q.shape[:-1], v.shape[-1]).data, lse.view(q.shape[:-1]).data


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, is_causal: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` from the backend that serves the request; q, k, v are checked and 4-D."""
    plan = select(Problem.of(q, k, v, is_causal), backend)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    return load(plan.backend).forward(q, k, v, softmax_scale=scale, mask=_mask(is_causal))


def backward(
    do: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv)`` from the backend that served the forward pass; every tensor is 4-D (lse 3-D)."""
    plan = select(Problem.of(q, k, v, is_causal), backend)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if do is None:  # only the log-sum-exp was used
        do = o.new_zeros(()).expand(o.shape)
    if dlse is not None:
        dlse = dlse.contiguous()
    return load(plan.backend).backward(do, q, k, v, o, lse, dlse, softmax_scale=scale, mask=_mask(is_causal))


def _mask(is_causal: bool) -> mask.Mask:
    return mask.causal() if is_causal else mask.full()


class FlashAttention(torch.autograd.Function):
    """Exact attention with O(n) memory: ``FlashAttention.apply(q, k, v, is_causal=False)``.

    o = softmax(softmax_scale * q k^T, masked) v

    q ``[b, n, d]``, k ``[b, m, d]``, v ``[b, m, dv]``, or with more leading dimensions ``(..., heads, n, d)``; returns
    o ``[b, n, dv]`` in q's dtype. Further positional arguments: ``softmax_scale=None`` (``d ** -0.5``),
    ``return_lse=False`` (return ``(o, lse)``, lse ``[b, n]`` in fp32, natural logarithm, differentiable),
    ``backend=None``. See ``flashtile.flash_attention`` for the rest: masks, errors, what serves which device.

    Saved for the backward pass: q, k, v, o and lse. Differentiable once.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> Any:
        q, k, v, o, lse = attend(q, k, v, is_causal, softmax_scale, backend)
        # Under autocast these are the cast tensors; autograd returns each gradient in its input's dtype.
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.options = softmax_scale, is_causal, backend
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if do is None and dlse is None:
            return None, None, None, None, None, None, None
        # create_graph=True: gradients of these gradients must raise, not be zero.
        differentiate = _Backward.apply if torch.is_grad_enabled() else _at_any_rank
        grads = differentiate(do, *ctx.saved_tensors, dlse, ctx.options)  # pyright: ignore[reportCallIssue]
        needs = ctx.needs_input_grad
        return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None, None, None, None


def _at_any_rank(do, q, k, v, o, lse, dlse, options) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten, ``backward``, and give the gradients their inputs' shapes back."""
    if q.ndim == 4:
        return _no_autocast(do, q, k, v, o, lse, dlse, *options)
    flat_do = None if do is None else as_4d(do)
    flat_lse, flat_dlse = (None if t is None else as_4d(t.unsqueeze(-1)).squeeze(-1) for t in (lse, dlse))
    grads = _no_autocast(flat_do, as_4d(q), as_4d(k), as_4d(v), as_4d(o), flat_lse, flat_dlse, *options)
    return grads[0].view(q.shape), grads[1].view(k.shape), grads[2].view(v.shape)


def _no_autocast(do, q, *rest) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_autocast_enabled(device_type := q.device.type):
        with torch.autocast(device_type, enabled=False):
            return backward(do, q, *rest)
    return backward(do, q, *rest)


class _Backward(torch.autograd.Function):
    """The backward pass as a node of its own, so that a second derivative is an error."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _at_any_rank(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(TWICE)
