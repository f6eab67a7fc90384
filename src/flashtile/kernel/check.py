"""What is wrong with an argument: every error for bad input, before any launch and without waiting for the device.

Each message names the argument, the value met and the value wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 256  # forward and backward
WIDEST_HEAD_DIM, WIDEST_HEAD_DIM_V = 576, 512  # forward
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def attention_inputs(q: Any, k: Any, v: Any, *, any_gradient: bool = False, needs: Sequence[bool] = ()) -> None:
    """Raise unless q ``(..., heads_q, seqlen_q, head_dim)`` may attend to k and v.

    k ``(..., heads_kv, seqlen_k, head_dim)``, v ``(..., heads_kv, seqlen_k, head_dim_v)``, with the same leading
    dimensions, heads_q a multiple of heads_kv, and one dtype and one device for all three. ``any_gradient``: heads that
    the passes serve forward only may require gradients; ``needs``: which of q, k, v do, where autograd knows better.

    Raises TypeError for what is no dense tensor and for dtypes, ValueError for shapes and devices.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is a {type(t).__name__}, but wants a torch.Tensor")
        if t.is_nested:
            raise TypeError(
                f"{name} is a nested tensor, but wants a dense one; flash_attention_varlen takes sequences of "
                "different lengths, packed one after the other"
            )
        if t.layout is not torch.strided:
            raise TypeError(f"{name} has layout {t.layout}, but wants a dense tensor (torch.strided)")
        if t.ndim < 3:
            raise ValueError(
                f"{name} has shape {_shape(t)}, but wants at least 3 dimensions (..., heads, seqlen, head_dim)"
            )
    _dtypes(q, k, v)
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}, but want one device")
    _shapes(q, k, v, any_gradient, needs)


def _dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype is k.dtype is v.dtype:
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but want the same one (or autocast)")
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k, v have dtype {q.dtype}, but want float16, bfloat16, float32 or float64")


def _shapes(q: Tensor, k: Tensor, v: Tensor, any_gradient: bool, needs: Sequence[bool]) -> None:
    if not q.ndim == k.ndim == v.ndim:
        raise ValueError(
            f"q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions, but want the same number: {_all(q, k, v)}"
        )
    if q.ndim > 3 and not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"q, k, v have leading (batch) dimensions {tuple(q.shape[:-3])}, {tuple(k.shape[:-3])}, "
            f"{tuple(v.shape[:-3])}, but want the same ones: {_all(q, k, v)}"
        )
    heads_q, _, head_dim = q.shape[-3:]
    heads_kv, seqlen_k, head_dim_k = k.shape[-3:]
    heads_v, seqlen_v, head_dim_v = v.shape[-3:]
    if heads_kv != heads_v:
        raise ValueError(f"k has {heads_kv} heads and v has {heads_v}, but both want heads_kv: {_all(q, k, v)}")
    if heads_q != heads_kv and (heads_kv == 0 or heads_q % heads_kv != 0):
        raise ValueError(
            f"q has {heads_q} heads, but wants a multiple of the {heads_kv} heads of k and v: {_all(q, k, v)}"
        )
    if seqlen_k != seqlen_v:
        raise ValueError(f"k has {seqlen_k} keys and v has {seqlen_v}, but want the same seqlen_k: {_all(q, k, v)}")
    if head_dim != head_dim_k:
        raise ValueError(f"q has head_dim {head_dim} and k has {head_dim_k}, but want the same one: {_all(q, k, v)}")
    if not 1 <= head_dim <= WIDEST_HEAD_DIM:
        raise ValueError(f"q and k have head_dim {head_dim}, but want 1 to {WIDEST_HEAD_DIM}: {_all(q, k, v)}")
    if not 1 <= head_dim_v <= WIDEST_HEAD_DIM_V:
        raise ValueError(f"v has head_dim_v {head_dim_v}, but wants 1 to {WIDEST_HEAD_DIM_V}: {_all(q, k, v)}")
    if (head_dim > MAX_HEAD_DIM or head_dim_v > MAX_HEAD_DIM) and not any_gradient:
        recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if recorded or any(needs[:3]):
            raise NotImplementedError(
                f"head_dim {head_dim} and head_dim_v {head_dim_v} are served forward only; with gradients both want at "
                f"most {MAX_HEAD_DIM} (or torch.no_grad(), or differentiable_twice=True)"
            )


def options(is_causal: Any, softmax_scale: Any) -> None:
    """Raise unless ``is_causal`` is a bool and ``softmax_scale`` None or a finite number."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {described(is_causal)}, but wants True or False")
    if softmax_scale is None:
        return
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"softmax_scale is {described(softmax_scale)}, but wants a float, or None for head_dim ** -0.5")
    if torch.compiler.is_compiling():  # it may be made of a length that varies
        return
    if isinstance(softmax_scale, (float, int)) and not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale}, but wants a finite number, or None for head_dim ** -0.5")


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def _all(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"


def described(value: Any) -> str:
    """Return a value as messages name it; a tensor's numbers lie on the device and stay there."""
    return f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else repr(value)
