"""The backends by name, each imported when first asked for: a machine without Triton still serves CPU tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Backend(NamedTuple):
    """The two passes of one backend, on 4-D views with any strides.

    ``forward(q, k, v, *, softmax_scale, mask, score=None) -> (o, lse)``
    ``backward(do, q, k, v, o, lse, dlse, *, softmax_scale, mask, score=None) -> (dq, dk, dv)``
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# name: (module of the forward pass, module of the backward pass)
_MODULES = {
    "triton": ("flashtile.kernel.flash_attention_triton", "flashtile.kernel.flash_attention_backward"),
    "cpu": ("flashtile.kernel.flash_attention_cpu", "flashtile.kernel.flash_attention_cpu"),
}
NAMES = tuple(_MODULES)


@functools.cache
def load(name: str) -> Backend:
    """Return the backend called ``name`` (one of NAMES), importing its modules on the first call."""
    forward, backward = _MODULES[name]
    return Backend(name, importlib.import_module(forward).forward, importlib.import_module(backward).backward)
