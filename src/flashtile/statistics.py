"""What an attention matrix would be looked at for, without the matrix."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import mask as masks
from flashtile.dispatch import Problem, select
from flashtile.kernel import check, check_features
from flashtile.kernel.autograd import autocasts, cast_for_autocast
from flashtile.kernel.layout import as_4d
from flashtile.kernel.rules import Rules, also_causal
from flashtile.mask import Mask
from flashtile.score import Score

WHAT = ("column_sums", "entropy", "top_k", "rows")
MAX_TOP_K = 64
_MODULES = {"cpu": "flashtile.kernel.flash_attention_statistics_cpu"}


class TopK(NamedTuple):
    """The largest probabilities of every query in falling order, and the keys they belong to."""

    values: Tensor
    indices: Tensor


class AttentionStatistics(NamedTuple):
    """The statistics that were asked for: tensors, and a ``TopK``; the others are None."""

    column_sums: Any = None
    entropy: Any = None
    top_k: Any = None
    rows: Any = None


def attention_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    what: str | Sequence[str] = ("column_sums", "entropy", "top_k"),
    is_causal: bool = False,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    softmax_scale: float | None = None,
    top_k: int = 8,
    rows: Sequence[int] | Tensor | None = None,
    column_weights: Tensor | None = None,
    backend: str | None = None,
) -> AttentionStatistics:
    """Statistics of ``p = exp(score(softmax_scale * q k^T) - lse)``, masked, in O(n) memory beside the results.

    - ``"column_sums"`` ``(..., heads_q, seqlen_k)``: ``sum_i w_i p_ij``, how much key j is attended to
    - ``"entropy"`` ``(..., heads_q, seqlen_q)``: ``-sum_j p_ij ln p_ij`` of query i, in nats
    - ``"top_k"`` values and indices, both ``(..., heads_q, seqlen_q, top_k)``: the largest p_ij of query i, and their j
    - ``"rows"`` ``(..., heads_q, len(rows), seqlen_k)``: p_ij itself, of the chosen queries i

    A pass over tiles computes the probabilities again from the log-sum-exp that attention saved: one pass for column
    sums, one for entropy and top-k together, and one for the chosen rows alone. Results are fp32 (float64 for float64
    on the CPU), indices int64, bit-identical from run to run, and not differentiable.

    Args:
        q, k, lse: ``(..., heads_q, seqlen_q, head_dim)``, ``(..., heads_kv, seqlen_k, head_dim)`` and ``(..., heads_q,
            seqlen_q)`` as ``flash_attention(q, k, v, return_lse=True)`` took and returned them.
        what: one of these names, or several.
        is_causal, mask, score, softmax_scale: as they were given to attention.
        top_k: how many keys per query, 1 to 64. Among equal probabilities the lower key comes first.
        rows: numbers of the queries whose probabilities are wanted, negative ones counted from the end. A tensor on
            a GPU is read by the host.
        column_weights: a factor w_i per query in the column sums, broadcastable to lse's shape; for the keys that the
            last 32 queries look at, ones there and zeros elsewhere.
        backend: as in ``flash_attention``.

    A query that sees no key has entropy 0, adds nothing to any column, and its top-k are probability 0 at key -1; so
    are the places that are left where a query sees fewer than ``top_k`` keys. With attention sinks the sink's own
    share is in lse, so that the p_ij sum to less than 1; the entropy leaves its term out. Dropout plays no part.

    Raises:
        TypeError: a dtype, mask or score that is not served.
        ValueError: shapes or options that do not fit; the message names the argument, its value and what is wanted.
    """
    wanted = _checked_what(what)
    if autocasts(q):
        q, k, _ = cast_for_autocast(q, k, k)
    check.attention_inputs(q, k, k)
    check.options(is_causal, softmax_scale)
    check_features.kinds(mask, score, None)
    _check_lse(lse, q)
    if "top_k" in wanted and not (isinstance(top_k, int) and not isinstance(top_k, bool) and 1 <= top_k <= MAX_TOP_K):
        raise ValueError(f"top_k is {top_k!r}, but wants an integer from 1 to {MAX_TOP_K}")
    row_index = _checked_rows(rows, "rows" in wanted, q)
    weights = _checked_weights(column_weights, "column_sums" in wanted, lse)

    lead = q.shape[:-2]
    q, k = (as_4d(t.detach().resolve_neg()) for t in (q, k))
    lse = lse.detach().resolve_neg().reshape(q.shape[:3])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    rules = Rules(scale, _mask(is_causal, mask), score)
    check_features.rules_fit(rules, q, k)
    plan = select(Problem.of(q, k, k), backend)
    passes: Any = importlib.import_module(_MODULES.get(plan.backend, "flashtile.kernel.flash_attention_statistics"))
    options = rules.options()
    found: dict[str, Any] = {}
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if "column_sums" in wanted:
            weights = None if weights is None else weights.reshape(lse.shape)
            found["column_sums"] = passes.column_sums(q, k, lse, weights=weights, **options)
        if "entropy" in wanted or "top_k" in wanted:
            asked = {"entropy": "entropy" in wanted, "top_k": top_k if "top_k" in wanted else 0}
            found["entropy"], *largest = passes.row_statistics(q, k, lse, **asked, **options)
            if "top_k" in wanted:
                found["top_k"] = TopK(*(t.view(*lead, *t.shape[2:]) for t in largest))
        if row_index is not None:
            found["rows"] = passes.chosen_rows(q, k, lse, row_index, **options)
    for name in ("column_sums", "entropy", "rows"):
        if found.get(name) is not None:
            found[name] = found[name].view(*lead, *found[name].shape[2:])
    return AttentionStatistics(**found)


def _checked_what(what: Any) -> tuple[str, ...]:
    wanted = (what,) if isinstance(what, str) else tuple(what) if isinstance(what, Iterable) else ()
    if not wanted or any(name not in WHAT for name in wanted):
        raise ValueError(f"what is {what!r}, but wants one or several of {', '.join(map(repr, WHAT))}")
    return wanted


def _check_lse(lse: Any, q: Tensor) -> None:
    want = torch.float64 if q.dtype is torch.float64 else torch.float32
    if not isinstance(lse, Tensor):
        raise TypeError(f"lse is a {type(lse).__name__}, but wants the tensor that attention returned")
    if lse.shape != q.shape[:-1]:
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}, but wants {tuple(q.shape[:-1])}, that of q without head_dim"
        )
    if lse.dtype is not want or lse.device != q.device:
        raise ValueError(f"lse is {lse.dtype} on {lse.device}, but wants {want} on {q.device}")


def _mask(is_causal: bool, mask: Mask | Tensor | None) -> Mask:
    if mask is None:
        return masks.causal() if is_causal else masks.full()
    mask = masks.dense(mask) if isinstance(mask, Tensor) else mask
    return also_causal(mask) if is_causal else mask


def _checked_rows(rows: Any, wanted: bool, q: Tensor) -> Tensor | None:
    if not wanted:
        if rows is not None:
            raise ValueError('rows is given, but what leaves "rows" out; both or neither are wanted')
        return None
    if rows is None:
        raise ValueError('rows is None, but what="rows" wants the numbers of the queries')
    try:
        index = torch.as_tensor(rows, device="cpu")
        whole = index.ndim == 1 and (index.numel() == 0 or not (index.is_floating_point() or index.dtype is torch.bool))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(f"rows is {rows!r}, but wants a one-dimensional sequence of integers")
    index, seqlen_q = index.long(), q.shape[-2]
    outside = index[(index < -seqlen_q) | (index >= seqlen_q)]
    if outside.numel():
        raise ValueError(f"rows has {outside[0].item()}, but wants numbers from {-seqlen_q} to {seqlen_q - 1}")
    return (index % max(seqlen_q, 1)).to(q.device)


def _checked_weights(weights: Any, wanted: bool, lse: Tensor) -> Tensor | None:
    if weights is None:
        return None
    if not wanted:
        raise ValueError('column_weights is given, but what leaves "column_sums" out; both or neither are wanted')
    if not isinstance(weights, Tensor) or weights.device != lse.device:
        raise ValueError(f"column_weights is {weights!r}, but wants a tensor on {lse.device}")
    try:
        return weights.detach().resolve_neg().to(lse.dtype).expand(lse.shape)
    except RuntimeError:
        shape = tuple(weights.shape)
        raise ValueError(
            f"column_weights has shape {shape}, but wants one that broadcasts to {tuple(lse.shape)}, that of lse"
        ) from None
