"""Forward-mode derivatives of the operators, and their vmap as a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile.dispatch import Problem, select
from flashtile.kernel import autograd, backend
from flashtile.kernel.rules import rules_of


def tangents(tq: Any, tk: Any, tv: Any, *saved: Any) -> Any:
    """Return the tangents of o and lse; ``saved`` is (q, k, v, o, lse, scale, key, ints, floats, *tensors)."""
    # The tangents of what was saved are known: they are tq, tk, tv.
    plain = (forward_ad.unpack_dual(t).primal if isinstance(t, Tensor) else t for t in saved)
    return Jvp.apply(tq, tk, tv, *plain)


class Jvp(torch.autograd.Function):
    """``(to, tlse)`` for tangents of q, k, v: a pass of its own, of which there is no derivative."""

    @staticmethod
    def forward(tq: Any, tk: Any, tv: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float,
                key: str, ints: Any, floats: Any, *tensors: Tensor) -> Any:  # fmt: skip
        rules = rules_of(key, scale, tensors, ints, floats)
        plan = select(Problem.of(q, k, v), rules.backend)
        options = rules._replace(sinks=None).options()  # lse holds the sinks
        return backend.jvp(plan.backend)(tq, tk, tv, q, k, v, o, lse, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        return loop(Jvp.apply, info, in_dims, args)


def loop(call: Callable[..., Any], info: Any, in_dims: tuple, args: tuple) -> tuple[tuple[Tensor, ...], tuple]:
    """Run ``call`` on every element of the new dimension: masks, scores and dropout see the number of the batch entry.

    So the new dimension must not join the batch.
    """

    def pick(arg: Any, dim: Any, i: int) -> Any:
        if isinstance(arg, Tensor):
            return arg if dim is None else arg.select(dim, i)
        if isinstance(arg, list) and isinstance(dim, list):
            return [pick(a, d, i) for a, d in zip(arg, dim, strict=True)]
        return arg

    each = [call(*(pick(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(info.batch_size)]
    if not each:
        raise NotImplementedError("vmap over no elements wants attention without masks, scores or other options")
    stacked = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return stacked, (0,) * len(stacked)
