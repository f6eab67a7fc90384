"""The autograd function ``FlashAttention``: what plain eager calls go through, whatever the backend.

Nothing here computes: the passes do. This file checks the arguments, chooses the backend, keeps q, k, v, o and the
log-sum-exp for the backward pass, and says what can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import mask
from flashtile.dispatch import Plan, Problem, select
from flashtile.kernel import backend as backends
from flashtile.kernel import check, hopper
from flashtile.kernel.backend import load
from flashtile.kernel.layout import as_4d
from flashtile.kernel.rules import CAUSAL, Rules
from flashtile.kernel.sinks import row_delta, sink_gradient

TWICE = (
    "flash attention is differentiable once: its backward pass has no derivative. For second derivatives call "
    "flashtile.flash_attention with differentiable_twice=True, which takes the reference, a block of queries at a time"
)


def autocasts(t: Any) -> bool:
    """Return whether autocast is on for the device of ``t``."""
    return isinstance(t, Tensor) and not t.is_meta and torch.is_autocast_enabled(t.device.type)


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in autocast's dtype (float64 stays, as everywhere in torch.amp)."""
    dtype = torch.get_autocast_dtype(q.device.type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(t: Any, dtype: torch.dtype) -> Any:
    castable = isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64
    return t.to(dtype) if castable else t


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    softmax_scale: float | None,
    backend: str | None,
    needs: Sequence[bool] = (),
) -> tuple[tuple[Tensor, ...], tuple[float, bool, str | None]]:
    """Check the arguments and run the forward pass at any rank; nothing is recorded.

    ``needs`` says which of q, k, v will get gradients.

    Returns ``(q, k, v, o, lse), (softmax_scale, is_causal, backend)`` as they were used, for ``differentiate``: under
    autocast q, k, v are the cast tensors.
    """
    if autocasts(q):
        q, k, v = cast_for_autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return attend(q, k, v, is_causal, softmax_scale, backend, needs)
    check.attention_inputs(q, k, v, needs=needs)
    check.options(is_causal, softmax_scale)
    options = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale), is_causal, backend
    run: Any = forward
    if torch.compiler.is_compiling():
        # Dynamo reads this function when it meets FlashAttention.apply: show it the operator (of flashtile.ops).
        run = torch.ops.flashtile.forward
    elif q.is_neg() or k.is_neg() or v.is_neg():  # negated lazily (conj().imag): kernels would read the wrong sign
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    if q.ndim == 4:
        return (q, k, v, *run(q, k, v, *options)), options
    o, lse = run(as_4d(q), as_4d(k), as_4d(v), *options)
    return (q, k, v, o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])), options


def differentiate(
    do: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv)`` at any rank, from what ``attend`` returned and the gradients of o and lse."""
    options = softmax_scale, is_causal, backend
    if autocasts(q):
        with torch.autocast(q.device.type, enabled=False):
            return differentiate(do, q, k, v, o, lse, dlse, *options)
    run: Any = torch.ops.flashtile.backward if torch.compiler.is_compiling() else backward
    if q.ndim == 4:
        return run(do, q, k, v, o, lse, dlse, *options)
    do_4d = None if do is None else as_4d(do)
    lse_3d, dlse_3d = (None if t is None else as_4d(t.unsqueeze(-1)).squeeze(-1) for t in (lse, dlse))
    dq, dk, dv = run(do_4d, as_4d(q), as_4d(k), as_4d(v), as_4d(o), lse_3d, dlse_3d, *options)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    is_causal: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` from the backend that serves the request; q, k, v are checked and 4-D."""
    plan = select(Problem.of(q, k, v, is_causal), backend)
    return load(plan.backend).forward(q, k, v, softmax_scale=softmax_scale, mask=_mask(is_causal))


def backward(
    do: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv)`` from the backend that served the forward pass; every tensor is 4-D (lse 3-D)."""
    asks = (hopper.DETERMINISTIC,) if _told_deterministic() else ()
    plan = select(Problem.of(q, k, v, is_causal, asks), backend)
    do, dlse = _given(do, o, dlse)
    options = {"softmax_scale": softmax_scale, "mask": _mask(is_causal), **_order(plan, asks)}
    return load(plan.backward).backward(do, q, k, v, o, lse, dlse, **options)


def run_forward(q: Tensor, k: Tensor, v: Tensor, rules: Rules, max_logits: Tensor | None = None) -> tuple:
    """Return ``(o, lse)`` under ``rules``; ``max_logits``, shaped as lse, receives the largest logit of each row."""
    asks, options = rules.asks(), rules.options()
    if max_logits is not None:
        asks, options["max_logits"] = (*asks, "max_logits"), max_logits
    plan = select(Problem.of(q, k, v, rules.mask is CAUSAL, asks), rules.backend)
    return load(plan.backend).forward(q, k, v, **options)


def run_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rules: Rules
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv)`` under ``rules``; o and lse hold the sinks already."""
    asks = rules.asks()
    if rules.deterministic or _told_deterministic():
        asks += (hopper.DETERMINISTIC,)
    plan = select(Problem.of(q, k, v, rules.mask is CAUSAL, asks), rules.backend)
    options = rules.options() | _order(plan, asks)
    options.pop("sinks", None)
    return load(plan.backward).backward(do, q, k, v, o, lse, dlse, **options)


def gradients(
    do: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    rules: Rules,
    needs: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of those that ``needs`` names among q, k, v and ``rules.learned()``; nothing else is done.

    Each has the dtype of its tensor.
    """
    do, dlse = _given(do, o, dlse)
    found: list[Tensor] = []
    if any(needs[:3]):
        grads = run_backward(do, dlse, q, k, v, o, lse, rules)
        found += [grad for grad, need in zip(grads, needs[:3], strict=True) if need]
    of_score = needs[3:] if rules.sinks is None else needs[3:-1]
    if any(of_score):
        plan = select(Problem.of(q, k, v), rules.backend)
        options = rules._replace(sinks=None).options()
        tensors = rules.score.tensors()  # pyright: ignore[reportOptionalMemberAccess]
        of_tensors = backends.parameter_gradients(plan.backend)(do, q, k, v, o, lse, dlse, needs=of_score, **options)
        found += [grad.to(t.dtype) for t, grad in zip(tensors, of_tensors, strict=True) if grad is not None]
    if rules.sinks is not None and needs[-1]:
        found.append(sink_gradient(rules.sinks, lse, row_delta(do, o, dlse, lse.dtype)))
    return found


def _given(do: Tensor | None, o: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return do and dlse as the passes take them; without do only the log-sum-exp was used."""
    do = o.new_zeros(()).expand(o.shape) if do is None else do.resolve_neg()
    return do, None if dlse is None else dlse.contiguous().resolve_neg()


def _order(plan: Plan, asks: tuple[str, ...]) -> dict[str, bool]:
    """Return the option that fixes the order of sums, for the one backend that has another order otherwise."""
    return {"deterministic": True} if plan.backward == "hopper" and hopper.DETERMINISTIC in asks else {}


def _told_deterministic() -> bool:
    """Return whether PyTorch was told to take deterministic algorithms where there are any."""
    return torch.are_deterministic_algorithms_enabled()


def _mask(is_causal: bool) -> mask.Mask:
    return CAUSAL if is_causal else mask.full()


class FlashAttention(torch.autograd.Function):
    """Exact attention with O(n) memory: ``FlashAttention.apply(q, k, v, is_causal=False)``.

    o = softmax(softmax_scale * q k^T, masked) v

    q ``[b, n, d]``, k ``[b, m, d]``, v ``[b, m, dv]``, or with more leading dimensions ``(..., heads, n, d)``; returns
    o ``[b, n, dv]`` in q's dtype. Further positional arguments: ``softmax_scale=None`` (``d ** -0.5``),
    ``return_lse=False`` (return ``(o, lse)``, lse ``[b, n]`` in fp32, natural logarithm, differentiable),
    ``backend=None``. See ``flashtile.flash_attention`` for the rest: masks, errors, what serves which device.

    Saved for the backward pass: q, k, v, o and lse. Differentiable once. torch.compile sees the operator of
    ``flashtile.ops``, torch.func transforms want ``flash_attention``.
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
        saved, ctx.options = attend(q, k, v, is_causal, softmax_scale, backend, ctx.needs_input_grad)
        # Under autocast these are cast tensors; autograd returns each gradient in its input's dtype.
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        *_, o, lse = saved
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if do is None and dlse is None:
            return None, None, None, None, None, None, None
        # create_graph=True: gradients of these gradients must raise, not be zero.
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        run: Any = _Once.apply if twice else differentiate
        grads = run(do, *ctx.saved_tensors, dlse, *ctx.options)
        needs = ctx.needs_input_grad
        return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None, None, None, None


class _Once(torch.autograd.Function):
    """``differentiate`` as a node of its own, so that a second derivative is an error."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return differentiate(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(TWICE)
