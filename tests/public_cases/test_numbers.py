"""NaN, Inf and extreme values."""

import math

import pytest
import torch

from flashtile import FlashAttentionMock, flash_attention, mask, score
from tests.public_cases.common import HALF, check, check_packed, everywhere_and_interpreted, interpreted, packed, run
from tests.reference import Case, max_error, reference


@everywhere_and_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_b01_a_bias_that_hides_every_key_of_a_row(dtype, device, backend):
    """A query row that may see no key came back NaN and poisoned the gradients (pytorch/pytorch#103963)."""
    bias = torch.full((8, 8), -math.inf, device=device)
    bias[:4, :4] = 0
    q, k, v, *_ = Case(1, 1, 1, 8, 8, 8, dtype=dtype).tensors(device=device)
    got = check(q, k, v, torch.ones_like(q), score=score.bias(bias), backend=backend)
    for t in (got.o, got.dq, got.dk, got.dv):
        assert torch.count_nonzero(t[:, :, 4:]) == 0
    assert (got.lse[:, :, 4:] == -math.inf).all()
    assert got.lse[:, :, :4].isfinite().all()
    bias.requires_grad_()
    (dbias,) = torch.autograd.grad(
        flash_attention(q, k, v, score=score.bias(bias), backend=backend).float().sum(), bias
    )
    assert dbias.isfinite().all()
    assert torch.count_nonzero(dbias[4:]) == torch.count_nonzero(dbias[:, 4:]) == 0


@everywhere_and_interpreted
def test_b01_a_bias_of_the_lowest_number(device, backend):
    """The same where keys are hidden by the lowest finite number, in whole tiles too (pytorch/pytorch#103963)."""
    lowest = torch.finfo(torch.float32).min
    bias = torch.zeros(20, 150, device=device)
    bias[:, :130] = lowest
    bias[5] = lowest
    q, k, v, do, _ = Case(1, 2, 1, 20, 150).tensors(device=device)
    got = run(q, k, v, do, score=score.bias(bias), backend=backend)
    assert all(t.isfinite().all() for t in got)
    torch.testing.assert_close(got.o[:, :, 5], v.mean(2).expand(1, 2, 16), atol=1e-5, rtol=1e-5)
    visible = bias == 0
    others = torch.arange(20, device=device) != 5
    want = run(q, k, v, do * others[:, None], mask=visible, backend=backend)
    torch.testing.assert_close(got.o[:, :, others], want.o[:, :, others])
    torch.testing.assert_close(got.dq[:, :, others], want.dq[:, :, others])


@everywhere_and_interpreted
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 70, 16), (2, 5, 128)], ids=str)
def test_b02_huge_finite_inputs(shape, device, backend):
    """Very large finite bf16 inputs gave NaN: a fused multiply-add was exact, the row maximum rounded
    (pytorch/pytorch#121558)."""
    queries, keys, head_dim = shape
    q, k = (torch.full((1, 1, n, head_dim), 133120.0, dtype=HALF, device=device) for n in (queries, keys))
    got = run(q, k, k, torch.ones_like(q), backend=backend)
    assert (got.o == 133120).all()
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, 133120.0**2 * head_dim**0.5), rtol=1e-6, atol=0)
    assert all(t.isfinite().all() for t in (got.dq, got.dk, got.dv))


@everywhere_and_interpreted
@pytest.mark.parametrize("seqlen", [61, 64, 128, 192, 640, 704])
@pytest.mark.parametrize("seen", ["full", "all-true", "causal"])
def test_b04_every_lse_far_below_zero(seen, seqlen, device, backend):
    """dq was NaN where the last key tile is part padding and exp(0 - lse) of a pad column overflows
    (pytorch/pytorch#196678)."""
    if interpreted(backend) and seqlen > 64:
        pytest.skip("the interpreter takes small sizes only")
    q, k, v, do, _ = Case(1, 1, 1, seqlen, seqlen, 64, dtype=HALF).tensors(device=device)
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -960.0
    options = {"mask": torch.ones(seqlen, seqlen, dtype=torch.bool, device=device)} if seen == "all-true" else {}
    got = check(q, k, v, do, is_causal=seen == "causal", backend=backend, **options)
    assert (got.lse < -88.7).all()
    assert all(t.isfinite().all() for t in (got.dq, got.dk, got.dv))


@everywhere_and_interpreted
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_b04_every_lse_far_below_zero_in_packed_sequences(is_causal, device, backend):
    """The same where the next sequence, or NaN, takes the place of padding (pytorch/pytorch#196678)."""
    lengths = [61, 3, 0, 17]
    tensors = packed(lengths, lengths, (2, 1), 16, tail=2, device=device, dtype=HALF)
    q, k, v, do = (t.mul(0.1) for t in tensors)
    q[:, :, 0], k[:61, :, 0], k[61:, :, 0] = 1.0, -480.0, 480.0
    check_packed((q, k, v, do), lengths, lengths, is_causal=is_causal, backend=backend)


@everywhere_and_interpreted
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_b05_one_token(is_causal, device, backend):
    """A sequence of one token gave NaN in dq (Dao-AILab/flash-attention#334)."""
    for seed in range(4 if interpreted(backend) else 512):
        q, k, v, *_ = (3 * t for t in Case(1, 1, 1, 1, 1, 16, dtype=torch.float16).tensors(seed, device))
        got = run(q, k, v, torch.ones_like(q), is_causal=is_causal, backend=backend)
        assert torch.equal(got.o, v)
        assert torch.equal(got.dv, torch.ones_like(v))
        assert got.dq.abs().max() <= 1e-3
        assert got.dk.abs().max() <= 1e-3


@everywhere_and_interpreted
@pytest.mark.parametrize("seqlen", [4, 70])
def test_b08_half_precision_products_past_65504(seqlen, device, backend):
    """The fp16 product of q and k overflowed before the scale was applied (ultralytics/ultralytics#24990)."""
    q = torch.full((1, 1, seqlen, 128), 32.0, dtype=torch.float16, device=device)
    v = torch.randn(1, 1, seqlen, 128, device=device).half()
    o, lse = flash_attention(q, q, v, return_lse=True, backend=backend)
    mean = v.double().mean(2, keepdim=True).expand_as(o)
    torch.testing.assert_close(o.double(), mean, atol=1e-3, rtol=1e-3)
    want = 32.0**2 * 128**0.5 + math.log(seqlen)
    torch.testing.assert_close(lse, torch.full_like(lse, want), atol=2e-3, rtol=0)
    for naive in (False, True):
        readable = FlashAttentionMock.apply(q, q, v, False, naive)
        torch.testing.assert_close(readable.double(), mean, atol=1e-3, rtol=1e-3)  # pyright: ignore


@everywhere_and_interpreted
def test_b08_gradients_past_65504(device, backend):
    """The same overflow on the way back, and in masked tiles (ultralytics/ultralytics#24990)."""
    q, k, v, do, _ = Case(1, 2, 1, 20, 37, 128, dtype=torch.float16).tensors(device=device)
    q[..., 0] = 400.0
    k[..., 0] = 400 + 80 * k[..., 0]
    assert not (q @ k.mT).isfinite().all()
    options = {"mask": mask.window(9, 2), "softmax_scale": 1e-4}
    got = run(q, k, v, do, backend=backend, **options)
    for name, ours, want in zip(got._fields, got, reference(q, k, v, do=do, **options), strict=True):
        assert max_error(ours, want) <= 0.02 * want[want.isfinite()].abs().max(), name
