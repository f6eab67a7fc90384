"""Gradients and the log-sum-exp, in each of the ways that they are computed."""

import math

import pytest
import torch

from flashtile import FlashAttention, flash_attention, flash_attention_varlen, score
from tests.public_cases.common import HALF, check, everywhere_and_interpreted, interpreted
from tests.reference import Case, reference

WAYS = {
    "dense": lambda q, k, v, backend: flash_attention(q, k, v, return_lse=True, backend=backend),
    "decode": lambda q, k, v, backend: flash_attention(q[:, :, :1], k, v, is_causal=True, return_lse=True,
                                                       backend=backend),
    "operator": lambda q, k, v, backend: torch.ops.flashtile.forward(q, k, v, 0.25, False, backend),
    "function": lambda q, k, v, backend: FlashAttention.apply(q, k, v, False, None, True, backend),
    "score": lambda q, k, v, backend: flash_attention(q, k, v, score=score.softcap(5.0), return_lse=True,
                                                      backend=backend),
    "twice": lambda q, k, v, backend: flash_attention(q, k, v, return_lse=True, differentiable_twice=True),
    "reference": lambda q, k, v, backend: reference(q, k, v)[:2],
}  # fmt: skip


@everywhere_and_interpreted
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_b29_the_log_sum_exp_is_natural(grad, way, device, backend):
    """One backend returned the log-sum-exp in another base (pytorch/pytorch#181645)."""
    q, k, v = (torch.randn(1, 2, n, 16, device=device) for n in (3, 8, 8))
    q = torch.zeros_like(q).requires_grad_(grad)
    lse = WAYS[way](q, k, v, backend)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)), atol=1e-6, rtol=0)


@everywhere_and_interpreted
def test_b29_the_log_sum_exp_of_packed_sequences_is_natural(device, backend):
    """The same for packed sequences (pytorch/pytorch#181645)."""
    q, k, v = (torch.randn(n, 2, 16, device=device) for n in (5, 11, 11))
    cu_q, cu_k = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 3, 5], [0, 8, 11]))
    _, lse = flash_attention_varlen(torch.zeros_like(q), k, v, cu_q, cu_k, return_lse=True, backend=backend)
    want = torch.tensor([8.0, 8, 8, 3, 3], device=device).log().expand(2, 5)
    torch.testing.assert_close(lse, want, atol=1e-6, rtol=0)


@everywhere_and_interpreted
@pytest.mark.parametrize("past_the_tile", [0, 1])
def test_b32_a_bias_that_grows_with_distance(past_the_tile, device, backend):
    """A bias by position with a causal mask gave NaN gradients where the length is no multiple of the tile
    (pytorch/pytorch#153799)."""
    seqlen = (64 if interpreted(backend) else 1024) + past_the_tile
    q, k, v, do, _ = Case(1, 1, 1, seqlen, seqlen, 64, dtype=HALF).tensors(device=device)
    do = torch.full_like(do, 0.01 / do.numel())
    slopes = score.alibi(torch.tensor([-1.0], device=device))
    got = check(q, k, v, do, is_causal=True, score=slopes, backend=backend)
    assert all(t.isfinite().all() for t in got)


@everywhere_and_interpreted
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_b40_float32_is_float32(head_dim, device, backend):
    """fp32 products silently ran in TF32: the forward pass hid it, the backward pass was off by 0.7
    (evintunador/triton_docs_tutorials#6)."""
    seqlen = 20 if interpreted(backend) else 128
    q, k, v, do, dlse = Case(1, 1, 1, seqlen, seqlen, head_dim).tensors(device=device)
    check(q, k, v, do, dlse, is_causal=True, backend=backend)
