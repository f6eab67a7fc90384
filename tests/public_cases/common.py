"""What the public cases share: where they run, one call forward and backward, the comparison with the reference.

Every case is a fault that people met in another attention library; its test says which, and where it was reported.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import flash_attention, flash_attention_varlen, mask
from flashtile.seqlen import Seqlens
from tests.reference import Result, assert_result_accurate, plain, reference
from tests.test_attention import everywhere_and_interpreted, leaves

__all__ = [
    "HALF",
    "check",
    "check_packed",
    "cumulative",
    "everywhere_and_interpreted",
    "interpreted",
    "leaves",
    "packed",
    "run",
]

HALF = torch.bfloat16


def interpreted(backend: str | None) -> bool:
    """Return whether this is Triton's interpreter, where only small sizes take little time."""
    return backend == "triton"


def run(q, k, v, do, dlse=None, **options) -> Result:
    """Forward and backward on leaves that share the memory, and so the strides, of q, k, v."""
    q, k, v = leaves(q, k, v)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    outputs, given = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    grads = torch.autograd.grad(outputs, (q, k, v), given)
    return Result(o.detach(), lse.detach(), *grads)


def check(q, k, v, do, dlse=None, *, backend=None, **options) -> Result:
    """Run, and hold every result to the accuracy rule."""
    got = run(q, k, v, do, dlse, backend=backend, **options)
    if isinstance(options.get("mask"), torch.Tensor):
        options["mask"] = mask.dense(options["mask"])
    expected: dict[str, Any] = {**options, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))
    return got


def cumulative(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def packed(lengths_q, lengths_k, heads, head_dim, *, tail=0, device="cpu", dtype=torch.float32) -> Any:
    """Return packed q, k, v, do; the ``tail`` rows after their last sequence are NaN."""
    heads_q, heads_kv = heads
    tensors = []
    for lengths, n in ((lengths_q, heads_q), (lengths_k, heads_kv), (lengths_k, heads_kv), (lengths_q, heads_q)):
        t = torch.randn(sum(lengths) + tail, n, head_dim).to(device, dtype)
        t[sum(lengths) :] = math.nan
        tensors.append(t)
    return tensors


def check_packed(tensors, lengths_q, lengths_k, *, is_causal=False, backend=None, **options) -> Result:
    """Run packed sequences, and hold every result to the accuracy rule of each sequence by itself."""
    q, k, v, do = tensors
    cu_q, cu_k = cumulative(lengths_q, q.device), cumulative(lengths_k, q.device)
    q, k, v = leaves(q, k, v)
    o, lse = flash_attention_varlen(
        q, k, v, cu_q, cu_k, is_causal=is_causal, return_lse=True, backend=backend, **options
    )
    got = Result(o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do))

    def as_4d(t):
        return t.transpose(0, 1)[None]

    expected: dict[str, Any] = {"is_causal": is_causal, "seqlens": Seqlens(cu_q, cu_k), "do": as_4d(do)}
    want, theirs = (oracle(as_4d(q), as_4d(k), as_4d(v), **expected) for oracle in (reference, plain))
    as_given = got._replace(**{name: as_4d(t) for name, t in got._asdict().items() if t.ndim == 3}, lse=got.lse[None])
    assert_result_accurate(as_given, want, theirs)
    return got
