"""The public attention function."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from flashtile import ops
from flashtile.kernel import check
from flashtile.kernel.autograd import FlashAttention, attend, autocasts, cast_for_autocast
from flashtile.kernel.layout import as_4d

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in O(n) memory, with gradients: no seqlen_q x seqlen_k tensor is ever made.

    ::

        s   = softmax_scale * q k^T              keys that a query may not see: -inf
        lse = log(sum(exp(s)))                   over the keys
        o   = exp(s - lse) v

    Shapes (any strides; nothing is copied to make them contiguous):

    - q ``(..., heads_q, seqlen_q, head_dim)``
    - k ``(..., heads_kv, seqlen_k, head_dim)``
    - v ``(..., heads_kv, seqlen_k, head_dim_v)``
    - o ``(..., heads_q, seqlen_q, head_dim_v)``, in q's dtype and in q's memory order
    - lse ``(..., heads_q, seqlen_q)``, fp32 (fp64 for fp64), natural logarithm

    heads_q is a multiple of heads_kv; query head h reads kv head ``h // (heads_q // heads_kv)``. head_dim and
    head_dim_v are any integers from 1 to 256, the lengths any integers from 0.

    Args:
        q, k, v: tensors of one dtype on one device: float16, bfloat16 or float32 (float64 on the CPU). Products are
            accumulated, and the softmax is computed, in float32. Under ``torch.autocast`` they are cast to its dtype.
        is_causal: query i sees the keys ``j <= i + seqlen_k - seqlen_q``, so the last query sees every key.
        softmax_scale: factor of the logits; ``head_dim ** -0.5`` if None.
        return_lse: also return lse, which is differentiable.
        backend: "triton" or "cpu"; if None, what ``flashtile.explain(q, k, v)`` says.

    Returns:
        o, or ``(o, lse)``. A query that sees no key has o = 0, lse = -inf and no gradient.

    Raises:
        TypeError: a dtype that is not served, or q, k, v of different dtypes.
        ValueError: shapes or devices that do not fit, or a backend that cannot serve these tensors.
        NotImplementedError: when a gradient of a gradient is asked for.

    ``torch.compile``, ``torch.export``, ``torch.func`` transforms, FLOP counters and checkpointing policies see one
    operator, ``torch.ops.flashtile.forward``; a plain eager call goes straight to the kernels.

    The algorithm is that of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691); ``docs/derivation.md``
    derives it.
    """
    if _must_be_an_operator(q, k, v):
        o, lse = _operator(q, k, v, is_causal, softmax_scale, backend)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return FlashAttention.apply(q, k, v, is_causal, softmax_scale, return_lse, backend)  # pyright: ignore
    else:
        (*_, o, lse), _ = attend(q, k, v, is_causal, softmax_scale, backend)
    return (o, lse) if return_lse else o


def _must_be_an_operator(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether somebody is watching: a compiler, a tracer, a transform, a mode or a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or q.is_meta
    )


def _operator(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    if autocasts(q):
        q, k, v = cast_for_autocast(q, k, v)
    check.attention_inputs(q, k, v)
    check.options(is_causal, softmax_scale)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    operator: Any = ops.Forward.apply if torch._C._are_functorch_transforms_active() else ops.forward
    o, lse = operator(as_4d(q), as_4d(k), as_4d(v), scale, is_causal, backend)
    if q.ndim == 4:
        return o, lse
    return o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])
