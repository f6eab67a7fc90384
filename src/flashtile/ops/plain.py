"""The passes as PyTorch operators, ``torch.ops.flashtile.forward`` and ``torch.ops.flashtile.backward``.

Compilers, tracers, transforms and policies see each as one opaque call with a schema, and find here what they need to
know about it: shapes and strides (fake), derivative, autocast rule, vmap rule, FLOPs. No mathematics here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake, register_vmap

from flashtile.kernel import autograd, check
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.rules import CAUSAL, Rules, flatten, key_of
from flashtile.mask import full
from flashtile.ops.tangent import tangents

DEVICES = ("CPU", "CUDA", "XPU")  # dispatch keys; ROCm devices use CUDA's

library = Library("flashtile", "DEF")
# The kernels take any strides, and the fake results below follow them: the compiler may not change them.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library.define(
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal, str? backend=None)"
    " -> (Tensor o, Tensor lse)",
    tags=TAGS,
)
library.define(
    "backward(Tensor? do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, float softmax_scale,"
    " bool is_causal, str? backend=None) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=TAGS,
)
forward = torch.ops.flashtile.forward.default
backward = torch.ops.flashtile.backward.default


# ---- the passes themselves


def _forward(q, k, v, softmax_scale, is_causal, backend=None) -> tuple[Tensor, Tensor]:
    four_dimensions(q, k, v)
    return autograd.forward(q, k, v, softmax_scale, is_causal, backend)


def _backward(do, q, k, v, o, lse, dlse, softmax_scale, is_causal, backend=None) -> tuple[Tensor, Tensor, Tensor]:
    four_dimensions(q, k, v)
    return autograd.backward(do, q, k, v, o, lse, dlse, softmax_scale, is_causal, backend)


for _device in DEVICES:
    library.impl("forward", _forward, _device)
    library.impl("backward", _backward, _device)


def four_dimensions(q, k, v) -> None:
    """Check q, k, v as every operator wants them."""
    check.attention_inputs(q, k, v)
    if q.ndim != 4:
        raise ValueError(f"q, k, v have {q.ndim} dimensions, but the operator wants 4 (flash_attention flattens)")


# ---- fake: shapes, dtypes and strides without computing


@register_fake("flashtile::forward", lib=library)
def _(q, k, v, softmax_scale, is_causal, backend=None):
    four_dimensions(q, k, v)
    o = empty_in_order_of(q, (*q.shape[:3], v.shape[3]))
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return o, torch.empty(q.shape[:3], dtype=lse_dtype, device=q.device)


@register_fake("flashtile::backward", lib=library)
def _(do, q, k, v, o, lse, dlse, softmax_scale, is_causal, backend=None):
    return tuple(empty_in_order_of(t, t.shape) for t in (q, k, v))


# ---- autograd


class Forward(torch.autograd.Function):
    """``forward`` with its derivative: registered with the operator, and called as it is under torch.func transforms.

    (Those cannot differentiate through an operator that is registered from Python.)
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.save_for_forward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        nothing = (None,) * len(ctx.options)
        if do is None and dlse is None:
            return None, None, None, *nothing
        differentiate = Backward.apply if torch._C._are_functorch_transforms_active() else backward
        grads: Any = differentiate(do, *ctx.saved_tensors, dlse, *ctx.options)
        return *(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad, strict=False)), *nothing

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, *_: Any) -> Any:
        scale, is_causal, backend = ctx.options
        structure, tensors, ints, floats = flatten(Rules(scale, CAUSAL if is_causal else full(), backend=backend))
        return tangents(tq, tk, tv, *ctx.saved_tensors, scale, key_of(structure), ints, floats, *tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        return _vmap(Forward.apply, info, in_dims, args)


class Backward(torch.autograd.Function):
    """``backward``, of which there is no derivative."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        return _vmap(Backward.apply, info, in_dims, args)


register_autograd("flashtile::forward", Forward.backward, setup_context=Forward.setup_context, lib=library)
register_autograd("flashtile::backward", Backward.backward, lib=library)


# ---- autocast: the cast is outside of the operator, and recorded


def _register_autocast(device_type: str, key: str) -> None:
    def cast_forward(q, k, v, softmax_scale, is_causal, backend=None):
        q, k, v = autograd.cast_for_autocast(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return forward(q, k, v, softmax_scale, is_causal, backend)

    def as_saved(*args):  # the backward pass works in the dtype of what the forward pass saved
        with torch.autocast(device_type, enabled=False):
            return backward(*args)

    library.impl("forward", cast_forward, key)
    library.impl("backward", as_saved, key)


for _device in DEVICES:
    _register_autocast(_device.lower(), "Autocast" + _device)


# ---- vmap: the new dimension joins the batch


def _vmap(call: Callable[..., Any], info: Any, in_dims: tuple, args: tuple) -> tuple[tuple[Tensor, ...], tuple]:
    """Run ``call`` on arguments whose tensors have one dimension more (``in_dims``; None: this one has not)."""
    size = info.batch_size

    def fold(arg: Any, dim: int | None) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        return (arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)

    results = call(*(fold(arg, dim) for arg, dim in zip(args, in_dims, strict=True)))
    return tuple(t.view(size, t.shape[0] // max(size, 1), *t.shape[1:]) for t in results), (0,) * len(results)


def _vmap_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda info, in_dims, *args: _vmap(operator, info, in_dims, args)


register_vmap("flashtile::forward", _vmap_of(forward), lib=library)
register_vmap("flashtile::backward", _vmap_of(backward), lib=library)
