"""The public attention functions."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtile import mask as masks
from flashtile import ops
from flashtile.dropout import Dropout, draw_seed
from flashtile.kernel import check, check_features, twice
from flashtile.kernel.autograd import FlashAttention, attend, autocasts, cast_for_autocast
from flashtile.kernel.check_features import checked
from flashtile.kernel.layout import as_4d
from flashtile.kernel.rules import CAUSAL, Rules, also_causal, resolved
from flashtile.mask import Mask
from flashtile.score import Score
from flashtile.seqlen import Seqlens

__all__ = ["FlashAttention", "checked", "flash_attention", "flash_attention_varlen"]

_FULL = masks.full()
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any:
    """Exact attention in O(n) memory, with gradients: no seqlen_q x seqlen_k tensor is ever made.

    ::

        s   = score(softmax_scale * q k^T)       keys that the mask hides from a query: -inf
        lse = log(sum(exp(s)))                   over the keys, and the sink of the head if there are sinks
        o   = dropout(exp(s - lse)) v

    Shapes (any strides; nothing is copied to make them contiguous):

    - q ``(..., heads_q, seqlen_q, head_dim)``
    - k ``(..., heads_kv, seqlen_k, head_dim)``
    - v ``(..., heads_kv, seqlen_k, head_dim_v)``
    - o ``(..., heads_q, seqlen_q, head_dim_v)``, in q's dtype and in q's memory order
    - lse ``(..., heads_q, seqlen_q)``, fp32 (fp64 for fp64), natural logarithm

    heads_q is a multiple of heads_kv; query head h reads kv head ``h // (heads_q // heads_kv)``. head_dim and
    head_dim_v are any integers from 1 to 256 (without gradients head_dim to 576, head_dim_v to 512), the lengths any
    integers from 0.

    Args:
        q, k, v: tensors of one dtype on one device: float16, bfloat16 or float32 (float64 on the CPU). Products are
            accumulated, and the softmax is computed, in float32. Under ``torch.autocast`` they are cast to its dtype.
        is_causal: query i sees the keys ``j <= i + seqlen_k - seqlen_q``, so the last query sees every key.
        mask: a value of ``flashtile.mask``, or a bool tensor that broadcasts to (batch, heads_q, seqlen_q, seqlen_k),
            True where a query sees a key. With ``is_causal`` a query sees what both let it see.
        score: a value of ``flashtile.score``, which changes the logits.
        softmax_scale: factor of the logits; ``head_dim ** -0.5`` if None.
        sinks: ``(heads_q,)``, a logit per head that takes part in lse and has no value row.
        dropout_p: every weight is dropped with this probability, and the others multiplied by ``1 / (1 - dropout_p)``.
            It drops whenever it is told to: a module passes 0 in eval mode. Which weights are dropped depends on a seed
            and their place alone, so that recomputation and other backends drop the same ones.
        generator: what the seed is drawn from, which advances; the default generator of q's device if None.
        deterministic: gradients are bit-identical from run to run. So they are anyway, except those of q from the
            backend "hopper", which adds them up in the order in which its programs come by; there this (or
            ``torch.use_deterministic_algorithms``) has them take turns.
        differentiable_twice: compute by plain PyTorch operations, one block of queries at a time, which can be
            differentiated any number of times in every mode; slower, O(n * block) memory for first derivatives in eager
            mode (compilers and torch.func transforms keep every block).
        return_lse: also return lse, which is differentiable.
        return_max_logits: also return, last, the largest s of every query, shaped as lse, -inf where it sees no key;
            not differentiable.
        backend: "hopper", "triton" or "cpu"; if None, what ``flashtile.explain(q, k, v)`` says.

    Returns:
        o, or a tuple of o and what else was asked for. A query that sees no key has o = 0, lse = -inf (its sink, if
        there are sinks) and no gradient. Gradients flow to q, k, v, sinks and the tensors of the score, whichever
        require them.

    Raises:
        TypeError: a dtype that is not served, q, k, v of different dtypes, an option of the wrong kind.
        ValueError: shapes, devices or options that do not fit, or a backend that cannot serve these tensors.
        NotImplementedError: a gradient of a gradient without ``differentiable_twice``, or a tensor of a score that
            requires a gradient which the score does not declare.

    ``torch.compile``, ``torch.export``, ``torch.func`` transforms, FLOP counters and checkpointing policies see one
    operator, ``torch.ops.flashtile.forward``, or ``forward_with_rules`` with any option but the first and the scale; a
    plain eager call goes straight to the kernels. Another window, cap or tensor compiles nothing new. Forward-mode
    derivatives are there for q, k and v.

    The algorithm is that of FlashAttention-2 (Dao, 2023, https://arxiv.org/abs/2307.08691); ``docs/derivation.md``
    derives it.
    """
    if (
        mask is not None
        or score is not None
        or sinks is not None
        or dropout_p != 0
        or generator is not None
        or deterministic is not False
        or differentiable_twice is not False
        or return_max_logits is not False
    ):
        check_features.switches(deterministic=deterministic, differentiable_twice=differentiable_twice,
                                return_lse=return_lse, return_max_logits=return_max_logits)  # fmt: skip
        options = _Options(is_causal, mask, score, softmax_scale, sinks, dropout_p, generator, backend, deterministic)
        found = _attend(q, k, v, options, None, differentiable_twice, return_max_logits)
        return _asked_for(*found, return_lse, return_max_logits)
    if return_lse is not False:
        check_features.switches(return_lse=return_lse)
    if _must_be_an_operator(q, k, v):
        o, lse = _operator(q, k, v, is_causal, softmax_scale, backend)
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return FlashAttention.apply(q, k, v, is_causal, softmax_scale, return_lse, backend)  # pyright: ignore
    else:
        (*_, o, lse), _ = attend(q, k, v, is_causal, softmax_scale, backend)
    return (o, lse) if return_lse else o


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any: ...


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> Any:
    """Exact attention of packed sequences of different lengths, as ``flash_attention`` of each by itself.

    Sequence i has the query rows ``[cu_seqlens_q[i], cu_seqlens_q[i + 1])`` and likewise its keys. Nothing waits for
    the device to learn the lengths, and other lengths compile nothing new.

    Shapes (any strides):

    - q ``(total_q, heads_q, head_dim)``, k ``(total_k, heads_kv, head_dim)``, v ``(total_k, heads_kv, head_dim_v)``
    - o ``(total_q, heads_q, head_dim_v)``, lse ``(heads_q, total_q)``

    Args:
        q, k, v: as in ``flash_attention``.
        cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` int32, rising from 0 to at most total_q and total_k. Rows after the
            last sequence are padding: never read, and o = 0, lse = -inf and gradients 0 there.
        max_seqlen_q, max_seqlen_k: accepted because callers of other libraries have them; nothing needs them.
        seqused_q, seqused_k: ``(batch,)`` int32, cut each sequence to its first rows; the rest is padding.
        is_causal, mask, score, ...: as in ``flash_attention``. A mask or score counts queries and keys from the start
            of their sequence, and the number of the sequence is its batch entry; the lengths of a sequence align its
            causal mask.

    Returns:
        As ``flash_attention``.

    Raises:
        As ``flash_attention``. What lengths on a GPU hold is checked inside ``with flashtile.checked():`` only, since
        that waits for the device.
    """
    check_features.packed_inputs(q, k, v)
    check_features.switches(deterministic=deterministic, differentiable_twice=differentiable_twice,
                            return_lse=return_lse, return_max_logits=return_max_logits)  # fmt: skip
    seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    check_features.seqlens_fit(seqlens, max_seqlen_q, max_seqlen_k, q, k)
    seqlens = Seqlens(*(t if t is None or t.is_contiguous() else t.contiguous() for t in seqlens[:4]))
    options = _Options(is_causal, mask, score, softmax_scale, sinks, dropout_p, generator, backend, deterministic)
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    o, lse, max_logits = _attend(q, k, v, options, seqlens, differentiable_twice, return_max_logits)
    return _asked_for(o.transpose(0, 1), lse, max_logits, return_lse, return_max_logits)


class _Options(NamedTuple):
    """Options as users give them."""

    is_causal: Any
    mask: Any
    score: Any
    softmax_scale: Any
    sinks: Any
    dropout_p: Any
    generator: Any
    backend: Any
    deterministic: bool


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: _Options,
    seqlens: Seqlens | None,
    differentiable_twice: bool,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(o, lse, max_logits)`` at any rank, under any options."""
    if autocasts(q):
        q, k, v = cast_for_autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return _attend(q, k, v, options, seqlens, differentiable_twice, return_max_logits)
    check.attention_inputs(q, k, v, any_gradient=differentiable_twice)
    q_4d, k_4d, v_4d = as_4d(q), as_4d(k), as_4d(v)
    rules = _rules(q_4d, k_4d, options, seqlens)
    if differentiable_twice:
        if options.backend is not None:
            raise ValueError(f"backend is {options.backend!r}, but wants None with differentiable_twice=True")
        o, lse, max_logits = _twice(q_4d, k_4d, v_4d, rules, return_max_logits)
    else:
        o, lse, max_logits = _once(q_4d, k_4d, v_4d, rules, return_max_logits)
    if q.ndim == 4:
        return o, lse, max_logits
    max_logits = max_logits.view(q.shape[:-1]) if return_max_logits else max_logits
    return o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1]), max_logits


def _asked_for(o: Tensor, lse: Tensor, max_logits: Tensor, return_lse: bool, return_max_logits: bool) -> Any:
    if return_max_logits:
        return (o, lse, max_logits) if return_lse else (o, max_logits)
    return (o, lse) if return_lse else o


def _rules(q: Tensor, k: Tensor, options: _Options, seqlens: Seqlens | None) -> Rules:
    """Return checked options as one value."""
    is_causal, mask, score, softmax_scale, sinks, dropout_p, generator, backend, deterministic = options
    check.options(is_causal, softmax_scale)
    check_features.kinds(mask, score, sinks)
    check_features.dropout_options(dropout_p, generator, q.device)
    if mask is None:
        mask = CAUSAL if is_causal else _FULL
    else:
        mask = masks.dense(mask) if isinstance(mask, Tensor) else mask
        mask = also_causal(mask) if is_causal else mask
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rules = Rules(scale, mask, score, sinks, None, seqlens, backend, deterministic)
    check_features.rules_fit(rules, q, k)
    if sinks is not None and not sinks.is_contiguous():
        rules = rules._replace(sinks=sinks.contiguous())
    if dropout_p == 0:
        return rules
    if torch.compiler.is_compiling():  # which has no rule for random_ (of draw_seed)
        seed = torch.randint(2**63 - 1, (1,), device=q.device, generator=generator)
    else:
        seed = draw_seed(q.device, generator)
    return rules._replace(dropout=Dropout(float(dropout_p), seed))


def _once(q: Tensor, k: Tensor, v: Tensor, rules: Rules, return_max_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The fused passes, differentiable once."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if not transformed and _must_be_an_operator(q, k, v):
        arguments = ops.arguments(rules, return_max_logits)
        return ops.forward_with_rules(q, k, v, *arguments[:6], list(arguments[6:]))
    learned = rules.learned()
    inputs = (q, k, v, *learned)
    if not transformed and any(t.is_neg() for t in inputs):
        # Negated lazily (conj().imag): kernels would read the wrong sign.
        q, k, v, rules = q.resolve_neg(), k.resolve_neg(), v.resolve_neg(), resolved(rules)
    if transformed or (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        if not transformed and not learned:
            return ops.AtOnce.apply(q, k, v, rules, return_max_logits)  # pyright: ignore[reportReturnType]
        arguments = ops.arguments(rules, return_max_logits)
        return ops.ForwardWithRules.apply(q, k, v, *arguments)  # pyright: ignore[reportReturnType]
    return ops.run_forward(q, k, v, rules, return_max_logits)


def _twice(q: Tensor, k: Tensor, v: Tensor, rules: Rules, return_max_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    max_logits = torch.empty(q.shape[:3] if return_max_logits else (0,), dtype=lse_dtype, device=q.device)
    options = {"max_logits": max_logits} if return_max_logits else {}
    o, lse = twice.attention(q, k, v, **rules.options(), **options)
    return o, lse, max_logits


def _must_be_an_operator(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether somebody is watching: a compiler, a tracer, a transform, a mode or a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN)
        or q.is_meta
        or forward_ad._current_level >= 0
    )


def _operator(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softmax_scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    if autocasts(q):
        q, k, v = cast_for_autocast(q, k, v)
    check.attention_inputs(q, k, v)
    check.options(is_causal, softmax_scale)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    operator: Any = ops.Forward.apply if transformed else ops.forward
    o, lse = operator(as_4d(q), as_4d(k), as_4d(v), scale, is_causal, backend)
    if q.ndim == 4:
        return o, lse
    return o.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])
