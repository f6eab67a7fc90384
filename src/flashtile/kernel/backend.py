"""The backends by name, each imported when first asked for: a machine without Triton still serves CPU tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Backend(NamedTuple):
    """The two passes of one backend, on 4-D views with any strides.

    ``forward(q, k, v, *, softmax_scale, mask, score, sinks, dropout, seqlens, max_logits) -> (o, lse)``
    ``backward(do, q, k, v, o, lse, dlse, *, softmax_scale, mask, score, dropout, seqlens) -> (dq, dk, dv)``

    Everything after ``mask`` is None by default.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# name: modules of the forward pass, the backward pass, gradients of a score's tensors, and forward-mode tangents
_MODULES = {
    "hopper": ("hopper.forward", "hopper.backward", "flash_attention_score_gradient", "flash_attention_jvp"),
    "triton": ("flash_attention_triton", "flash_attention_backward", "flash_attention_score_gradient",
               "flash_attention_jvp"),
    "cpu": ("flash_attention_cpu", "flash_attention_cpu", "score_gradient_cpu", "flash_attention_jvp_cpu"),
}  # fmt: skip
NAMES = tuple(_MODULES)


@functools.cache
def load(name: str) -> Backend:
    """Return the backend called ``name`` (one of NAMES), importing its modules on the first call."""
    forward, backward = (_module(name, i) for i in (0, 1))
    return Backend(name, forward.forward, backward.backward)


def parameter_gradients(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return ``parameter_gradients(do, q, k, v, o, lse, dlse, *, needs, softmax_scale, mask, score, ...)``."""
    return _module(name, 2).parameter_gradients


def jvp(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return ``jvp(tq, tk, tv, q, k, v, o, lse, *, softmax_scale, mask, score) -> (to, tlse)``."""
    return _module(name, 3).jvp


def _module(name: str, number: int) -> Any:
    return importlib.import_module(f"flashtile.kernel.{_MODULES[name][number]}")
