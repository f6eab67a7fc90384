"""silu, softmax, cross_entropy: equal to torch's in value and gradient, finite where a naive formula is not."""

import pytest
import torch
from torch.nn import functional as F

from flashtile.llm import cross_entropy, silu, softmax


def grads(fn, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    return out, torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))


def test_silu_is_torchs():
    x = torch.linspace(-30, 30, 101, dtype=torch.float64)
    for ours, theirs in zip(grads(silu, x), grads(F.silu, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_is_torchs(scale, dim):
    x = scale * torch.randn(4, 5, 6, dtype=torch.float64)
    for ours, theirs in zip(grads(lambda t: softmax(t, dim), x), grads(lambda t: F.softmax(t, dim), x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_keeps_the_dtype_and_survives_large_logits(dtype):
    x = 1000 * torch.randn(3, 50).clamp(-60, 60).to(dtype)
    y = softmax(x, -1)
    assert y.dtype == dtype
    torch.testing.assert_close(y, F.softmax(x.double(), -1).to(dtype), atol=1e-3, rtol=0)


def test_softmax_over_nothing_is_zero_and_has_no_gradient():
    x = torch.randn(2, 4).requires_grad_()
    hidden = x.masked_fill(torch.tensor([[False] * 4, [True] * 4]), float("-inf"))
    y = softmax(hidden, -1)
    assert y[0].sum().item() == pytest.approx(1)
    assert y[1].eq(0).all()
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.isfinite().all()
    assert grad[1].eq(0).all()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_is_torchs(scale, reduction):
    logits = scale * torch.randn(3, 5, 11, dtype=torch.float64)
    targets = torch.randint(11, (3, 5))
    targets[1, 2] = targets[0, 0] = -100

    def theirs(x):
        return F.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction=reduction)

    for a, b in zip(
        grads(lambda x: cross_entropy(x, targets, reduction=reduction), logits), grads(theirs, logits), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_cross_entropy_of_large_fp32_logits_is_exact():
    logits = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    assert cross_entropy(logits, torch.tensor([0])).item() == 0
    loss = cross_entropy(logits, torch.tensor([2]))
    assert loss.item() == 2000
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.tensor([[1.0, 0.0, -1.0]]))


def test_cross_entropy_of_bf16_logits_is_computed_in_fp32():
    logits = (10 * torch.randn(8, 100)).bfloat16()
    targets = torch.randint(100, (8,))
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits.double(), targets))


def test_cross_entropy_over_no_tokens_is_zero():
    logits = torch.randn(2, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2,), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_cross_entropy_refuses():
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'none'"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), reduction="none")
    with pytest.raises(ValueError, match=r"targets must have shape \(2,\), got \(3,\)"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
