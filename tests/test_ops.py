"""The operators as PyTorch sees them: schema, fake results, derivative, FLOPs, checkpointing, autocast, vmap."""

import functools
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flashtile import flash_attention, ops
from flashtile.kernel import autograd
from tests.reference import Case

PLACES = [pytest.param("cpu", "cpu", id="cpu"), pytest.param("cuda", None, id="cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize(("device", "backend"), PLACES)


def bhnd(b, h, n, d, **kw):
    return torch.randn(b, h, n, d, **kw)


def bnhd(b, h, n, d, **kw):
    return torch.randn(b, n, h, d, **kw).transpose(1, 2)


def fused(b, h, n, d, **kw):
    return torch.randn(b, n, 3, h, d, **kw)[:, :, 1].transpose(1, 2)


def expanded(b, h, n, d, **kw):
    return torch.randn(b, 1, n, d, **kw).expand(b, h, n, d)


SAMPLES = {  # name: (layout of q, of k and v, (heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v), causal)
    "contiguous": (bhnd, bhnd, (4, 4, 20, 20, 16, 16), True),
    "transposed": (bnhd, bnhd, (12, 12, 20, 20, 16, 16), True),
    "fused-grouped": (fused, fused, (6, 2, 20, 33, 16, 16), True),
    "mixed-layouts": (bnhd, bhnd, (4, 2, 7, 40, 8, 24), False),
    "expanded": (expanded, expanded, (4, 4, 20, 20, 16, 16), False),
    "more-queries-than-keys": (bnhd, bnhd, (2, 1, 9, 4, 8, 8), True),
}
samples = pytest.mark.parametrize("name", SAMPLES)


def forward_arguments(name, device, backend, grad=True) -> tuple:
    make_q, make_k, (hq, hkv, sq, sk, d, dv), is_causal = SAMPLES[name]
    q, k, v = (
        make_q(2, hq, sq, d, device=device),
        make_k(2, hkv, sk, d, device=device),
        make_k(2, hkv, sk, dv, device=device),
    )
    return *(t.detach().requires_grad_(grad) for t in (q, k, v)), d**-0.5, is_causal, backend


def backward_arguments(name, device, backend, use_do=True, use_dlse=True) -> tuple:
    q, k, v, *options = forward_arguments(name, device, backend, grad=False)
    o, lse = ops.forward(q, k, v, *options)
    return (
        (torch.randn_like(o) if use_do else None),
        q,
        k,
        v,
        o,
        lse,
        (torch.randn_like(lse) if use_dlse else None),
        *options,
    )


@everywhere
@samples
def test_opcheck_forward(name, device, backend):
    results = opcheck(ops.forward, forward_arguments(name, device, backend))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@everywhere
@samples
def test_opcheck_backward(name, device, backend):
    results = opcheck(ops.backward, backward_arguments(name, device, backend))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize(("use_do", "use_dlse"), [(True, False), (False, True)])
def test_opcheck_backward_without_one_gradient(use_do, use_dlse):
    results = opcheck(ops.backward, backward_arguments("mixed-layouts", "cpu", "cpu", use_do, use_dlse))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@samples
def test_fake_results_have_the_true_shapes_dtypes_and_strides(name, dtype):
    def description(t):
        return t.shape, t.dtype, t.stride()

    q, k, v, *options = forward_arguments(name, "cpu", "cpu", grad=False)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    o, lse = ops.forward(q, k, v, *options)
    real = o, lse, *ops.backward(o, q, k, v, o, lse, lse, *options)
    with torch._subclasses.FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t) for t in (q, k, v))
        o, lse = ops.forward(q, k, v, *options)
        fake = o, lse, *ops.backward(o, q, k, v, o, lse, lse, *options)
    assert list(map(description, fake)) == list(map(description, real))


@everywhere
@samples
def test_gradients_are_those_of_the_eager_path(name, device, backend):
    q, k, v, scale, is_causal, _ = forward_arguments(name, device, backend)
    eager: Any = flash_attention(q, k, v, is_causal=is_causal, softmax_scale=scale, return_lse=True, backend=backend)
    watched = ops.forward(q, k, v, scale, is_causal, backend)
    given = [torch.randn_like(t) for t in eager]
    for ours, theirs in zip(watched, eager, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(*(torch.autograd.grad(o, (q, k, v), given) for o in (watched, eager)), strict=True):
        assert torch.equal(ours, theirs)


def test_only_the_log_sum_exp_used():
    q, k, v, *options = forward_arguments("contiguous", "cpu", "cpu")
    _, lse = ops.forward(q, k, v, *options)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.count_nonzero() > 0
    assert dk.count_nonzero() > 0
    assert dv.count_nonzero() == 0


def test_second_derivative_is_an_error():
    q, k, v, *options = forward_arguments("contiguous", "cpu", "cpu")
    (dq,) = torch.autograd.grad(ops.forward(q, k, v, *options)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"differentiable once.*differentiable_twice=True"):
        dq.sum().backward()


# --------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_flops(is_causal):
    b, hq, hkv, sq, sk, d, dv = 2, 6, 2, 33, 70, 16, 24
    q, k, v, *_ = Case(b, hq, hkv, sq, sk, d, dv).tensors()
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        o = flash_attention(q, k, v, is_causal=is_causal, backend="cpu")
    forward = 2 * b * hq * sq * sk * (d + dv) // (2 if is_causal else 1)
    assert counter.get_flop_counts()["Global"] == {torch.ops.flashtile.forward: forward}
    with counter:
        o.sum().backward()
    assert counter.get_flop_counts()["Global"][torch.ops.flashtile.backward] == forward * 5 // 2


def test_flops_of_equal_head_dims():
    q = torch.empty(2, 4, 64, 16, device="meta")
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, q, q)
    assert counter.get_total_flops() == 4 * 2 * 4 * 64 * 64 * 16


# ------------------------------------------------------------------------------------------------------- checkpointing


@pytest.fixture
def calls(monkeypatch):
    """Count the forward passes that run."""
    counts = []
    original = autograd.forward
    monkeypatch.setattr(autograd, "forward", lambda *args: counts.append(1) or original(*args))
    return counts


def save_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    saved = operator == torch.ops.flashtile.forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@everywhere
@pytest.mark.parametrize(("policy", "times"), [(None, 2), (save_attention, 1)], ids=["plain", "must-save"])
def test_selective_checkpointing_saves_the_forward_pass(policy, times, calls, device, backend):
    q, k, v, do, _ = Case(is_causal=True).tensors(device=device)
    leaves: list[Any] = [t.requires_grad_() for t in (q, k, v)]

    def block(q, k, v):
        return flash_attention(q.sin(), k, v, is_causal=True, backend=backend).sin()

    want = torch.autograd.grad(block(*leaves), leaves, do)
    calls.clear()
    kind: Any = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if policy else {}
    o: Any = checkpoint(block, *leaves, use_reentrant=False, **kind)
    got = torch.autograd.grad(o, leaves, do)
    assert len(calls) == times
    assert all(map(torch.equal, got, want))


# ------------------------------------------------------------------------------------------------------ autocast, vmap


def test_autocast_rule_of_the_operator():
    q, k, v, *options = forward_arguments("transposed", "cpu", "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = ops.forward(q, k, v, *options)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert q.dtype == torch.autograd.grad(o.float().sum(), q)[0].dtype == torch.float32
    assert torch.equal(o, ops.forward(*(t.bfloat16() for t in (q, k, v)), *options)[0])


def test_vmap_rule_of_the_operators():
    many = [torch.randn(3, 2, 4, 9, 8) for _ in range(3)]
    o, lse = torch.vmap(lambda q, k, v: ops.forward(q, k, v, 0.3, True, "cpu"))(*many)
    loop = [ops.forward(*(t[i] for t in many), 0.3, True, "cpu") for i in range(3)]
    torch.testing.assert_close((o, lse), tuple(map(torch.stack, zip(*loop, strict=True))))

    def gradients(q, k, v, o, lse):
        return ops.backward(do, q, k, v, o, lse, lse, 0.3, True, "cpu")

    do = torch.randn(2, 4, 9, 8)
    got = torch.vmap(gradients)(many[0], many[1], many[2], o, lse)
    loop = [gradients(many[0][i], many[1][i], many[2][i], o[i], lse[i]) for i in range(3)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*loop, strict=True))))


def test_schema():
    assert str(ops.forward._schema) == (
        "flashtile::forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal, str? backend=None) -> "
        "(Tensor o, Tensor lse)"
    )
    assert not any(
        argument.alias_info for operator in (ops.forward, ops.backward) for argument in operator._schema.arguments
    )
