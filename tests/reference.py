"""The oracle of all tests, the accuracy rule, and readable cases.

reference(...)        explicit-mask attention in fp64, gradients by autograd
plain(...)            the same formula in the inputs' own dtype, as anybody would write it in PyTorch
assert_accurate(...)  max error of ours <= factor * max error of plain + 1e-5
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.dropout import Dropout, keep_mask
from flashtile.kernel.flash_attention_mock import dense_attention
from flashtile.kernel.packed import forward_by_sequence
from flashtile.mask import Mask, causal, full
from flashtile.score import Score
from flashtile.seqlen import Seqlens, Where

if TYPE_CHECKING:
    from typing_extensions import Self

FORWARD_FACTOR, BACKWARD_FACTOR, ABSOLUTE = 2.0, 3.0, 1e-5


class _Fields(NamedTuple):
    o: Tensor
    lse: Tensor
    dq: Any = None
    dk: Any = None
    dv: Any = None


class Result(_Fields):
    """Everything an attention call can return; gradients are None when no ``do`` or ``dlse`` was given.

    ``dsinks``, None without sinks, is an attribute only: whoever unpacks a result gets the five of every call.
    """

    dsinks: Any = None

    def __new__(cls, *fields: Any, dsinks: Any = None, **named: Any) -> Self:
        result = super().__new__(cls, *fields, **named)
        result.dsinks = dsinks
        return result


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    softmax_scale: float | None = None,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Result:
    """Attention in fp64 with an explicit mask on ``(..., heads, n, d)`` (or ``(b, n, d)``).

    Gradients are those of ``sum(o * do) + sum(lse * dlse)``; give ``do``, ``dlse`` or both to get them. With
    ``seqlens`` q, k, v are packed, ``(1, heads, total, d)``.
    """
    q, k, v = (x.detach().double() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach().double()
    options = {"score": score, "dropout": dropout, "seqlens": seqlens}
    return _differentiated(dense_attention, q, k, v, sinks, is_causal, mask, softmax_scale, do, dlse, options)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    softmax_scale: float | None = None,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Result:
    """What plain PyTorch computes in the inputs' own dtype; arguments as in ``reference``."""
    q, k, v = (x.detach() for x in (q, k, v))
    sinks = None if sinks is None else sinks.detach()
    options = {"score": score, "dropout": dropout, "seqlens": seqlens}
    return _differentiated(_plain_attention, q, k, v, sinks, is_causal, mask, softmax_scale, do, dlse, options)


@forward_by_sequence
def _plain_attention(q, k, v, *, softmax_scale, mask, score, sinks, dropout, first_batch=0):
    (batch, heads_q, seqlen_q, _), (_, heads_kv, seqlen_k, _) = q.shape, k.shape
    group = heads_q // max(heads_kv, 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    batch_idx = torch.arange(first_batch, first_batch + batch, device=q.device)
    head_idx, cols = torch.arange(heads_q, device=q.device), torch.arange(seqlen_k, device=q.device)
    where = Where(batch_idx[:, None, None, None], head_idx[:, None, None], seqlen_q, seqlen_k)
    q_idx, k_idx = torch.arange(seqlen_q, device=q.device)[:, None], cols[None, :]
    s = q @ k.mT * softmax_scale
    if score is not None:
        s = score.forward(where, q_idx, k_idx, s, score.args).to(q.dtype)
    visible = mask.predicate(where, q_idx, k_idx, mask.args).expand_as(s)
    s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    empty = (s == -math.inf).all(dim=-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    p = s.softmax(dim=-1).masked_fill(empty, 0.0)[..., :seqlen_k]
    if dropout is not None:
        p = p * keep_mask(dropout.seed, where, q_idx, k_idx, dropout.p) / (1 - dropout.p)
    return p @ v, s.logsumexp(dim=-1).masked_fill(empty.squeeze(-1), -math.inf)


def _differentiated(attend, q, k, v, sinks, is_causal, mask, softmax_scale, do, dlse, options) -> Result:
    mask = mask if mask is not None else causal() if is_causal else full()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    options = {"mask": mask, "sinks": sinks, **options}
    options = {name: moved(option, q.device) for name, option in options.items()}
    o, lse = attend(_as_4d(q), _as_4d(k), _as_4d(v), softmax_scale=scale, **options)
    o, lse = o.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])
    outputs = [(out, grad.detach().to(out)) for out, grad in ((o, do), (lse, dlse)) if grad is not None]
    if not outputs:
        return Result(o.detach().cpu(), lse.detach().cpu())
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if any(out.requires_grad for out, _ in outputs):
        outs, grads = zip(*outputs, strict=True)
        grads = torch.autograd.grad(outs, inputs, grads, allow_unused=True, materialize_grads=True)
    else:  # no sequence at all
        grads = [torch.zeros_like(x) for x in inputs]
    o, lse, *grads = (t.detach().cpu() for t in (o, lse, *grads))  # where the comparisons are
    return Result(o, lse, *grads[:3], dsinks=None if sinks is None else grads[3])


def moved(value: Any, device: torch.device) -> Any:
    """Return an option with every tensor in it on ``device``, those in the arguments of masks and scores too."""
    if isinstance(value, Mask | Score):
        return dataclasses.replace(value, args=moved(value.args, device))
    if isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value.to(device) if isinstance(value, Tensor) else value


def _as_4d(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def max_error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference; NaN counts as infinite, equal infinities as 0."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=math.inf)
    return error.max().item() if error.numel() else 0.0


def assert_accurate(got: Tensor, ref64: Tensor, plain: Tensor, factor: float = FORWARD_FACTOR, name: str = "") -> None:
    """Assert the accuracy rule; where plain overflows, its error counts as one rounding of the largest value."""
    plain_error = max_error(plain, ref64)
    if not math.isfinite(plain_error):
        finite = ref64[ref64.isfinite()]
        plain_error = torch.finfo(plain.dtype).eps * (finite.abs().max().item() if finite.numel() else 0.0)
    # With few elements plain may be luckier than its dtype: it counts as one rounding of the largest value at least.
    finite = ref64[ref64.isfinite()]
    rounding = torch.finfo(plain.dtype).eps / 2 * (finite.abs().max().item() if finite.numel() else 0.0)
    error, bound = max_error(got, ref64), factor * max(plain_error, rounding) + ABSOLUTE
    assert error <= bound, f"{name or 'result'}: max error {error:.3g}, want <= {bound:.3g} (plain: {plain_error:.3g})"


def assert_result_accurate(got: Result, ref64: Result, plain: Result) -> None:
    """Assert the accuracy rule for every field that both ``got`` and ``ref64`` have."""
    for name in (*Result._fields, "dsinks"):
        ours, want, theirs = (getattr(result, name) for result in (got, ref64, plain))
        if ours is not None and want is not None and theirs is not None:
            assert_accurate(ours, want, theirs, BACKWARD_FACTOR if name.startswith("d") else FORWARD_FACTOR, name)


@dataclass(frozen=True)
class Case:
    """One attention problem; ``str()`` is its test id."""

    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    seqlen_q: int = 33
    seqlen_k: int = 33
    head_dim: int = 16
    head_dim_v: int | None = None
    is_causal: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        heads = f"h{self.heads_q}" + (f"kv{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        kind = "causal" if self.is_causal else "full"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"b{self.batch}-{heads}-{self.seqlen_q}x{self.seqlen_k}-{dims}-{kind}-{dtype}"

    @property
    def mask(self) -> Mask:
        return causal() if self.is_causal else full()

    def tensors(self, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v, do ``(b, h, n, d)`` and dlse ``(b, hq, sq)``, standard normal."""
        generator = torch.Generator().manual_seed(seed)
        width_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        shapes = (
            (self.batch, self.heads_q, self.seqlen_q, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, width_v),
            (self.batch, self.heads_q, self.seqlen_q, width_v),
        )
        q, k, v, do = (torch.randn(shape, generator=generator).to(device, self.dtype) for shape in shapes)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        dlse = torch.randn(shapes[0][:3], generator=generator).to(device, lse_dtype)
        return q, k, v, do, dlse


SHAPES = [  # (heads_q, heads_kv, seqlen_q, seqlen_k): odd, single, both directions of unequal, grouped
    (2, 2, 33, 33),
    (2, 2, 1, 1),
    (2, 2, 1, 70),
    (2, 2, 70, 1),
    (2, 2, 17, 130),
    (2, 2, 130, 17),
    (6, 2, 65, 65),
    (4, 1, 31, 64),
]
EMPTY_SHAPES = [(2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0), (0, 0, 5, 5)]


def cases(*, dtypes=(torch.float32,), shapes=tuple(SHAPES), head_dims=(16,), causal=(False, True)) -> list[Case]:
    """Return the product of shapes, head dims, causal or not, and dtypes as cases."""
    return [
        Case(2, hq, hkv, sq, sk, d, None, c, dtype)
        for (hq, hkv, sq, sk) in shapes
        for d in head_dims
        for c in causal
        for dtype in dtypes
    ]
