"""FlashAttention: what is saved, which gradients come back, and what a second derivative says."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from flashtile import FlashAttention
from flashtile import kernel as kernels
from flashtile.kernel import autograd
from tests.reference import Result, assert_result_accurate, plain, reference

B, N, D = 3, 37, 16


def inputs(*shape, grad=True, dtype=torch.float32) -> list[Any]:
    return [torch.randn(shape or (B, N, D), dtype=dtype, requires_grad=grad) for _ in range(3)]


def apply(q, k, v, is_causal: Any = False, softmax_scale: Any = None, return_lse: Any = False) -> Any:
    return FlashAttention.apply(q, k, v, is_causal, softmax_scale, return_lse, "cpu")


@pytest.fixture
def calls(monkeypatch):
    """Count the passes that run."""
    counts = {"forward": 0, "backward": 0}
    for name in counts:
        original = getattr(autograd, name)

        def counted(*args, name=name, original=original):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(autograd, name, counted)
    return counts


def test_one_class_under_every_name():
    assert kernels.FlashAttention is FlashAttention is autograd.FlashAttention


@pytest.mark.parametrize("is_causal", [False, True])
def test_three_dimensions(is_causal):
    q, k, v = inputs()
    do = torch.randn(B, N, D)
    o = apply(q, k, v, is_causal)
    assert isinstance(o, torch.Tensor)
    o.backward(do)
    got = Result(o, reference(q, k, v, is_causal=is_causal).lse.float(), q.grad, k.grad, v.grad)
    assert_result_accurate(
        got, reference(q, k, v, is_causal=is_causal, do=do), plain(q, k, v, is_causal=is_causal, do=do)
    )


def test_default_backend_takes_the_short_call():
    q, k, v = (torch.randn(1, 5, 4) for _ in range(3))
    torch.testing.assert_close(FlashAttention.apply(q, k, v), apply(q, k, v), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(FlashAttention.apply(q, k, v, True), apply(q, k, v, True), atol=1e-5, rtol=1e-5)


def test_exactly_one_saved_tensor_is_the_lse():
    q, k, v = inputs()
    saved = apply(q, k, v, True).grad_fn.saved_tensors
    (lse,) = (t for t in saved if t.shape == (B, N))
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, reference(q, k, v, is_causal=True).lse.float())
    assert len(saved) == 5


def test_saved_tensors_are_the_inputs_and_the_output_themselves():
    q, k, v = inputs()
    o = apply(q, k, v)
    pointers = [t.data_ptr() for t in o.grad_fn.saved_tensors[:4]]
    assert pointers == [t.data_ptr() for t in (q, k, v, o)]


@pytest.mark.parametrize("grad", [False, True], ids=["frozen", "no_grad"])
def test_nothing_is_saved_without_gradients(grad):
    q, k, v = inputs(grad=grad)
    with torch.set_grad_enabled(not grad):
        o = apply(q, k, v)
    assert o.grad_fn is None


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_needed_gradients_come_back(needed):
    everything = inputs()
    want = torch.autograd.grad(apply(*everything).square().sum(), everything)
    some = [t.detach().requires_grad_(i in needed) for i, t in enumerate(everything)]
    o = apply(*some)
    returned = []
    o.grad_fn.register_hook(lambda grads, _: returned.extend(grads))
    o.square().sum().backward()
    assert [grad is not None for grad in returned] == [i in needed for i in range(3)]
    for i in needed:
        torch.testing.assert_close(some[i].grad, want[i])


@pytest.mark.parametrize("use", ["o", "lse", "both"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lse_is_differentiable(use, is_causal):
    q, k, v = inputs(2, 3, 11, 8)
    do = torch.randn(2, 3, 11, 8) if use != "lse" else None
    dlse = torch.randn(2, 3, 11) if use != "o" else None
    o, lse = apply(q, k, v, is_causal, 0.3, True)
    chosen = [(out, grad) for out, grad in ((o, do), (lse, dlse)) if grad is not None]
    outputs, given = zip(*chosen, strict=True)
    grads = torch.autograd.grad(outputs, (q, k, v), given)
    arguments: dict[str, Any] = {"is_causal": is_causal, "softmax_scale": 0.3, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **arguments), plain(q, k, v, **arguments))


def test_mean_of_lse():
    """d mean(lse) = scale P K / N for q, scale P^T Q / N for k, nothing for v."""
    q, k, v = inputs(2, 4, 64, 64)
    _, lse = apply(q, k, v, return_lse=True)
    lse.mean().backward()
    scale, p = 64**-0.5, torch.softmax(q @ k.mT * 64**-0.5, dim=-1)
    torch.testing.assert_close(q.grad, scale * p @ k / lse.numel())
    torch.testing.assert_close(k.grad, scale * p.mT @ q / lse.numel())
    assert torch.count_nonzero(v.grad) == 0


def test_no_gradients_in_no_backward_pass(calls):
    assert FlashAttention.backward(None, None, None) == (None,) * 7
    assert calls["backward"] == 0


def test_gradcheck_in_float64():
    q, k, v = (torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: apply(q, k, v, True, 0.7, True), (q, k, v))


def test_second_derivative_is_an_error():
    q, k, v = inputs()
    want = torch.autograd.grad(apply(q, k, v).sum(), q)[0]
    (dq,) = torch.autograd.grad(apply(q, k, v).sum(), q, create_graph=True)
    torch.testing.assert_close(dq, want)  # asking for a graph is no error, using it is
    with pytest.raises(NotImplementedError, match=r"differentiable once.*differentiable_twice=True"):
        dq.square().sum().backward()


@pytest.mark.parametrize("use", ["k", "do"])
def test_second_derivative_is_an_error_for_every_path(use):
    q, k, v = inputs()
    do = torch.randn(B, N, D, requires_grad=True)
    (dq,) = torch.autograd.grad(apply(q, k, v), q, do, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), k if use == "k" else do)


@pytest.mark.parametrize("shape", [(B, N, D), (2, 3, 11, 8)], ids=str)
def test_output_modified_in_place_is_noticed(shape):
    q, k, v = inputs(*shape)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        apply(q, k, v).add_(1).sum().backward()


@pytest.mark.parametrize("shape", [(B, N, D), (2, 3, 11, 8), (2, 2, 3, 11, 8)], ids=str)
def test_autocast_casts_inside_and_gradients_keep_their_dtypes(shape):
    q, k, v = *inputs(*shape)[:2], inputs(*shape, dtype=torch.bfloat16)[0]
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = apply(q, k, v, return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    o.float().sum().backward()
    assert [t.grad.dtype for t in (q, k, v)] == [torch.float32, torch.float32, torch.bfloat16]
    explicit: list[Any] = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    want = apply(*explicit)
    assert torch.equal(o, want)
    want.float().sum().backward()
    for got, wanted in zip((q, k, v), explicit, strict=True):
        assert torch.equal(got.grad, wanted.grad.to(got.dtype))


def test_autocast_does_not_reach_the_passes():
    """fp32 sums inside the backward pass stay fp32 although autocast is on when it runs."""
    q, k, v = inputs(1, 2, 65, 8)
    o = apply(q, k, v, True)
    want = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(map(torch.equal, got, want))


def test_autocast_leaves_float64():
    q, k, v = inputs(2, 5, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert apply(q, k, v).dtype == torch.float64


def test_reentrant_and_other_checkpoints_agree():
    q, k, v = inputs()
    want = torch.autograd.grad(apply(q, k, v, True).square().sum(), (q, k, v))
    for reentrant in (True, False):
        o = torch.utils.checkpoint.checkpoint(apply, q, k, v, True, use_reentrant=reentrant)
        o.square().sum().backward()
        for t, wanted in zip((q, k, v), want, strict=True):
            assert torch.equal(t.grad, wanted)
            t.grad = None


def test_compiled_call_is_one_operator():
    torch._dynamo.reset()
    q, k, v = inputs()
    compiled = torch.compile(lambda q, k, v: apply(2 * q, k, v, True), fullgraph=True, backend="aot_eager")
    want, got = apply(2 * q, k, v, True), compiled(q, k, v)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, want)]
    torch.testing.assert_close(*grads)
