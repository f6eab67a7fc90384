"""The passes with masks, scores, sinks, dropout and packed sequences as PyTorch operators.

``torch.ops.flashtile.forward_with_rules`` and ``backward_with_rules`` take what ``kernel/rules.py`` makes of the rules:
a text that stands for the functions in this process, and lists of tensors, integers and floats. Masks and scores are
Python functions, so that a graph with these operators belongs to its process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake, register_vmap

from flashtile.kernel import autograd
from flashtile.kernel.layout import empty_in_order_of
from flashtile.kernel.rules import Rules, flatten, key_of, num_learned, rules_of
from flashtile.ops.plain import DEVICES, TAGS, four_dimensions, library
from flashtile.ops.tangent import loop, tangents

library.define(
    "forward_with_rules(Tensor q, Tensor k, Tensor v, float softmax_scale, str rules, SymInt[] ints, float[] floats,"
    " Tensor[] changing, bool return_max_logits, Tensor[] tensors) -> (Tensor o, Tensor lse, Tensor max_logits)",
    tags=TAGS,
)
library.define(
    "backward_with_rules(Tensor? do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse,"
    " float softmax_scale, str rules, SymInt[] ints, float[] floats, Tensor[] changing, bool[] needs, Tensor[] tensors)"
    " -> Tensor[]",
    tags=TAGS,
)
forward_with_rules = torch.ops.flashtile.forward_with_rules.default
backward_with_rules = torch.ops.flashtile.backward_with_rules.default


def arguments(rules: Rules, return_max_logits: bool) -> tuple[Any, ...]:
    """Return what follows q, k, v in ``ForwardWithRules.apply``: six values, then tensors."""
    structure, tensors, ints, floats = flatten(rules)
    changing: list[Tensor] = []
    if torch.compiler.is_compiling():
        floats, changing = _apart(floats)
    return rules.softmax_scale, key_of(structure), ints, floats, changing, return_max_logits, *tensors


def _apart(floats: list[float]) -> tuple[list[float], list[Tensor]]:
    """Put floats that have changed since the first compilation into tensors, and NaN into their places.

    The compiler would compile anew for another value of a float; it does not look into tensors, if made in this way.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value  # heavy, but a compiler has it already

    changing = [torch.ones((), dtype=torch.float64, device="cpu") * x for x in floats if not has_static_value(x)]
    return [x if has_static_value(x) else math.nan for x in floats], changing


# ---- the passes themselves


def _rules(scale: float, key: str, ints: Any, floats: Any, changing: Sequence[Tensor], tensors: Any) -> Rules:
    if changing:
        values = iter(changing)
        floats = [next(values).item() if math.isnan(x) else x for x in floats]
    return rules_of(key, scale, tensors, ints, floats)


def _forward(q, k, v, scale, key, ints, floats, changing, return_max_logits, tensors) -> tuple[Tensor, Tensor, Tensor]:
    return run_forward(q, k, v, _rules(scale, key, ints, floats, changing, tensors), return_max_logits)


def run_forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules, return_max_logits: bool) -> tuple:
    """Return ``(o, lse, max_logits)``, the last of them empty unless it is asked for."""
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    shape = q.shape[:3] if return_max_logits else (0,)
    max_logits = torch.full(shape, -torch.inf, dtype=lse_dtype, device=q.device)
    return (*autograd.run_forward(q, k, v, rules, max_logits if return_max_logits else None), max_logits)


def _backward(do, q, k, v, o, lse, dlse, scale, key, ints, floats, changing, needs, tensors) -> list[Tensor]:
    return autograd.gradients(do, q, k, v, o, lse, dlse, _rules(scale, key, ints, floats, changing, tensors), needs)


def _checked_forward(q, k, v, *args):
    four_dimensions(q, k, v)
    return _forward(q, k, v, *args)


def _checked_backward(do, q, k, v, *args):
    four_dimensions(q, k, v)
    return _backward(do, q, k, v, *args)


for _device in DEVICES:
    library.impl("forward_with_rules", _checked_forward, _device)
    library.impl("backward_with_rules", _checked_backward, _device)


# ---- fake


@register_fake("flashtile::forward_with_rules", lib=library)
def _(q, k, v, scale, key, ints, floats, changing, return_max_logits, tensors):
    four_dimensions(q, k, v)
    o = empty_in_order_of(q, (*q.shape[:3], v.shape[3]))
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = torch.empty(q.shape[:3], dtype=lse_dtype, device=q.device)
    return o, lse, torch.empty(q.shape[:3] if return_max_logits else (0,), dtype=lse_dtype, device=q.device)


@register_fake("flashtile::backward_with_rules", lib=library)
def _(do, q, k, v, o, lse, dlse, scale, key, ints, floats, changing, needs, tensors):
    grads = [empty_in_order_of(t, t.shape) for t, need in zip((q, k, v), needs, strict=False) if need]
    return grads + [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, need in _pairs(tensors, needs) if need]


def _pairs(tensors: Sequence[Tensor], needs: Sequence[bool]) -> Any:
    """Pair the learned tensors, which come first, with whether they need gradients."""
    return zip(tensors, needs[3:], strict=False)


# ---- autograd


class ForwardWithRules(torch.autograd.Function):
    """``forward_with_rules`` with its derivatives; called as it is in eager mode and under torch.func transforms."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _run(_forward, forward_with_rules, args, 9)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v, *ctx.options = inputs[:9]
        tensors = inputs[9:]
        o, lse, max_logits = output
        ctx.mark_non_differentiable(max_logits)
        _save(ctx, q, k, v, o, lse, tensors)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_k_v, tensors = _differentiate(ctx, do, dlse, list(ctx.needs_input_grad[9:]))
        return *q_k_v, None, None, None, None, None, None, *tensors

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, *others: Any) -> Any:
        if any(t is not None for t in others[6:]):
            raise NotImplementedError(
                "forward-mode derivatives with respect to sinks or a score's tensors are not there; detach them, or "
                "use differentiable_twice=True"
            )
        scale, key, ints, floats = ctx.options[:4]
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        to, tlse = tangents(tq, tk, tv, q, k, v, o, lse, scale, key, ints, floats, *tensors)
        return to, tlse, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        return loop(ForwardWithRules.apply, info, in_dims, args)


class AtOnce(torch.autograd.Function):
    """``ForwardWithRules`` where nothing is learned and nobody looks on: the rules stay together.

    Taking them apart and putting them together again is half of what a call costs the host before any launch.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rules: Rules, return_max_logits: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rules = rules
        o, lse, max_logits = run_forward(q, k, v, rules, return_max_logits)
        ctx.mark_non_differentiable(max_logits)
        # The others are saved to be watched: who changes one in place before the backward pass gets autograd's error.
        ctx.save_for_backward(q, k, v, o, lse, *rules.others())
        ctx.set_materialize_grads(False)
        return o, lse, max_logits

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs = list(ctx.needs_input_grad[:3])
        if (do is None and dlse is None) or not any(needs):
            return (None,) * 5
        rules: Rules = ctx.rules
        q, k, v, o, lse = ctx.saved_tensors[:5]
        watched = torch.is_grad_enabled() or _is_watched((do, q, k, v, o, lse, dlse))
        if watched or torch._C._are_functorch_transforms_active():
            scale, key, ints, floats, changing, _, *tensors = arguments(rules, False)
            args = (do, q, k, v, o, lse, dlse, scale, key, ints, floats, changing, needs, *tensors)
            found: Any = BackwardWithRules.apply(*args)
        elif autograd.autocasts(q):
            with torch.autocast(q.device.type, enabled=False):
                found = autograd.gradients(do, q, k, v, o, lse, dlse, rules, needs)
        else:
            found = autograd.gradients(do, q, k, v, o, lse, dlse, rules, needs)
        grads = iter(found)
        return *(next(grads) if need else None for need in needs), None, None


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, tensors: Sequence[Tensor]) -> None:
    ctx.save_for_backward(q, k, v, o, lse, *tensors)
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        ctx.save_for_forward(q, k, v, o, lse, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Any, dlse: Any, needs_tensors: list[bool]) -> tuple[list, list]:
    """Return the gradients of (q, k, v) and of the tensors, None where none is needed."""
    needs = [*ctx.needs_input_grad[:3], *needs_tensors]
    if (do is None and dlse is None) or not any(needs):
        return [None] * 3, [None] * len(needs_tensors)
    scale, key, ints, floats, changing = ctx.options[:5]
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    of_learned = needs[: 3 + num_learned(key)]  # what follows among the tensors has no gradients
    args = (do, q, k, v, o, lse, dlse, scale, key, ints, floats, changing, of_learned)
    if autograd.autocasts(q):
        with torch.autocast(q.device.type, enabled=False):
            return _differentiate(ctx, do, dlse, needs_tensors)
    if torch._C._are_functorch_transforms_active() or (torch.is_grad_enabled() and not _is_tracing()):
        found: Any = BackwardWithRules.apply(*args, *tensors)
    else:
        found = _run(_backward, backward_with_rules, (*args, *tensors), 13)
    grads = iter(found)
    every = [next(grads) if need else None for need in needs]
    return every[:3], every[3:]


def _is_tracing() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def _run(run: Callable, operator: Callable, args: Sequence[Any], fixed: int) -> Any:
    """Run the pass itself where nobody watches, the operator where a mode or a subclass of Tensor does.

    ``fixed`` is how many arguments there are before those that make the list of tensors.
    """
    return (operator if _is_watched(args) else run)(*args[:fixed], list(args[fixed:]))


def _is_watched(args: Sequence[Any]) -> bool:
    return _is_tracing() or not all(type(t) in _PLAIN for t in args if isinstance(t, Tensor))


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


class BackwardWithRules(torch.autograd.Function):
    """``backward_with_rules``, of which there is no derivative."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(_run(_backward, backward_with_rules, args, 13))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(autograd.TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        return loop(BackwardWithRules.apply, info, in_dims, args)


for _function in (ForwardWithRules, BackwardWithRules):
    # ``apply`` asks for it in every call, and would work it out anew.
    _function.forward.__signature__ = inspect.signature(_function.forward)  # pyright: ignore[reportFunctionMemberAccess]


def _setup_registered(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, *ctx.options, tensors = inputs
    ctx.save_for_backward(q, k, v, *output[:2], *tensors)
    ctx.set_materialize_grads(False)


def _backward_registered(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
    needs = ctx.needs_input_grad[9]
    q_k_v, tensors = _differentiate(ctx, do, dlse, list(needs))
    ints, floats, changing = ctx.options[2:5]
    # A list without numbers counts as a list of tensors.
    numbers = [None if values else [] for values in (ints, floats)]
    return *q_k_v, None, None, *numbers, [None] * len(changing), None, tensors


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(autograd.TWICE)


register_autograd(
    "flashtile::forward_with_rules", _backward_registered, setup_context=_setup_registered, lib=library
)  # fmt: skip
register_autograd("flashtile::backward_with_rules", _no_second, lib=library)


# ---- autocast, as of the plain operators


def _register_autocast(device_type: str, key: str) -> None:
    def cast_forward(q, k, v, *args):
        q, k, v = autograd.cast_for_autocast(q, k, v)
        with torch.autocast(device_type, enabled=False):
            return forward_with_rules(q, k, v, *args)

    def as_saved(*args):
        with torch.autocast(device_type, enabled=False):
            return backward_with_rules(*args)

    library.impl("forward_with_rules", cast_forward, key)
    library.impl("backward_with_rules", as_saved, key)


for _device in DEVICES:
    _register_autocast(_device.lower(), "Autocast" + _device)


# ---- vmap: a loop, because masks, scores and dropout see the number of the batch entry


def _loop_of(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda info, in_dims, *args: loop(operator, info, in_dims, args)


register_vmap("flashtile::forward_with_rules", _loop_of(forward_with_rules), lib=library)
register_vmap("flashtile::backward_with_rules", _loop_of(backward_with_rules), lib=library)
