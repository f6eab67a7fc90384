"""flash_attention_varlen: packed sequences are each sequence by itself, whatever lies around them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import flashtile
from flashtile import flash_attention, flash_attention_varlen, mask, score
from flashtile.dropout import Dropout, draw_seed
from flashtile.seqlen import Seqlens
from tests.reference import Result, assert_result_accurate, plain, reference
from tests.test_attention import everywhere, everywhere_and_interpreted, leaves

HALF = torch.bfloat16


def cumulative(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def packed(lengths_q, lengths_k, heads=(4, 2), dims=(8, 8), tail=5, device="cpu", dtype=torch.float32) -> Any:
    """Return packed q, k, v, do, whose last ``tail`` rows are NaN."""
    (heads_q, heads_kv), (d, dv) = heads, dims
    shapes = ((lengths_q, heads_q, d), (lengths_k, heads_kv, d), (lengths_k, heads_kv, dv), (lengths_q, heads_q, dv))
    tensors = []
    for lengths, h, width in shapes:
        t = torch.randn(sum(lengths) + tail, h, width).to(device, dtype)
        t[sum(lengths) :] = math.nan
        tensors.append(t)
    return tensors


def as_4d(t):
    return t.transpose(0, 1).unsqueeze(0)


def run(q, k, v, do, cu_q, cu_k, **options) -> Result:
    q, k, v = leaves(q, k, v)
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    sinks = options.get("sinks")
    inputs = [q, k, v, *([] if sinks is None else [sinks])]
    grads = torch.autograd.grad(o, inputs, do, materialize_grads=True, allow_unused=True)
    return Result(o.detach(), lse.detach(), *grads[:3], dsinks=None if sinks is None else grads[3])


def check(tensors, cu_q, cu_k, *, backend=None, used=(None, None), dropout_p=0.0, **options) -> Result:
    """Compare with the reference, which takes each sequence by itself."""
    q, k, v, do = tensors
    torch.manual_seed(4)
    got = run(q, k, v, do, cu_q, cu_k, seqused_q=used[0], seqused_k=used[1], dropout_p=dropout_p, backend=backend,
              **options)  # fmt: skip
    torch.manual_seed(4)
    dropout = Dropout(dropout_p, draw_seed(q.device).cpu()) if dropout_p else None
    expected: dict[str, Any] = {**options, "dropout": dropout, "do": as_4d(do),
                                "seqlens": Seqlens(cu_q, cu_k, *used)}  # fmt: skip
    want, theirs = (oracle(*map(as_4d, (q, k, v)), **expected) for oracle in (reference, plain))
    packed_again = [Result(*(t if t.ndim == 3 else t.squeeze(0).transpose(0, 1) for t in r), dsinks=r.dsinks)
                    for r in (want, theirs)]  # fmt: skip
    want, theirs = (r._replace(lse=r.lse.squeeze(0)) for r in packed_again)
    want.dsinks, theirs.dsinks = packed_again[0].dsinks, packed_again[1].dsinks
    assert_result_accurate(got, want, theirs)
    return got


LENGTHS = {
    "odd": ([5, 33, 1, 40], [7, 20, 64, 40]),
    "empty": ([0, 30, 0, 0, 17, 0], [5, 0, 0, 9, 17, 3]),
    "single": ([41], [41]),
    "fewer-keys": ([26, 14, 16], [1, 1, 1]),
    "fewer-tokens-than-sequences": ([0, 0, 0, 1], [0, 0, 0, 1]),
    "one-query": ([0, 1, 0, 1], [0, 3, 0, 5]),
    "no-sequence": ([], []),
}
every_length = pytest.mark.parametrize("name", LENGTHS)


@everywhere
@every_length
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_equals_every_sequence_by_itself(name, is_causal, device, backend):
    lengths_q, lengths_k = LENGTHS[name]
    tensors = packed(lengths_q, lengths_k, device=device)
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    got = check(tensors, cu_q, cu_k, is_causal=is_causal, backend=backend)
    for t, total in (
        (got.o, sum(lengths_q)),
        (got.dq, sum(lengths_q)),
        (got.dk, sum(lengths_k)),
        (got.dv, sum(lengths_k)),
    ):
        assert torch.count_nonzero(t[total:]) == 0
    assert (got.lse[:, sum(lengths_q) :] == -math.inf).all()


OPTIONS = {
    "window": lambda device: {"mask": mask.window(6, 2)},
    "padding": lambda device: {"mask": mask.key_padding(torch.tensor([3, 9, 60, 7], device=device)) & mask.causal()},
    "prefix": lambda device: {"mask": mask.prefix(4) | mask.causal()},
    "softcap": lambda device: {"score": score.softcap(2.0), "is_causal": True},
    "alibi-sinks": lambda device: {
        "score": score.alibi(torch.rand(4, device=device)),
        "sinks": torch.randn(4, device=device, requires_grad=True),
    },
    "bias-of-a-sequence": lambda device: {"score": score.bias(torch.randn(4, 4, 1, 1, device=device))},
    "dropout": lambda device: {"dropout_p": 0.4, "is_causal": True},
}


@everywhere
@pytest.mark.parametrize("name", OPTIONS)
def test_options_count_from_the_start_of_a_sequence(name, device, backend):
    lengths_q, lengths_k = LENGTHS["odd"]
    tensors = packed(lengths_q, lengths_k, device=device)
    cu_q, cu_k = cumulative(lengths_q, device), cumulative(lengths_k, device)
    check(tensors, cu_q, cu_k, backend=backend, **OPTIONS[name](device))


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    lengths_q, lengths_k = [5, 0, 13], [7, 4, 21]
    used = torch.tensor([4, 0, 13], dtype=torch.int32), torch.tensor([7, 2, 20], dtype=torch.int32)
    options = {"score": score.softcap(2.0), "mask": mask.window(6, 2), "sinks": torch.randn(4, requires_grad=True)}
    check(packed(lengths_q, lengths_k), cumulative(lengths_q), cumulative(lengths_k), used=used, dropout_p=0.3,
          backend=None, **options)  # fmt: skip


@settings(max_examples=30)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4),
    less=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (5, 12)]),
    dtype=st.sampled_from([torch.float32, HALF]),
    the_mask=st.sampled_from([mask.full(), mask.causal(), mask.window(4, 1), mask.chunked(5)]),
    the_score=st.sampled_from([None, score.softcap(3.0), score.temperature(0.7)]),
    sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.3]),
)
def test_everything_together(lengths, less, heads, dims, dtype, the_mask, the_score, sinks, dropout_p):
    lengths_q, lengths_k = [n for n, _ in lengths], [n for _, n in lengths]
    used = [torch.tensor([n // 2 for n in ns], dtype=torch.int32) if less else None for ns in (lengths_q, lengths_k)]
    tensors = packed(lengths_q, lengths_k, heads, dims, dtype=dtype)
    the_sinks = torch.randn(heads[0], requires_grad=True) if sinks else None
    with flashtile.checked():
        check(tensors, cumulative(lengths_q), cumulative(lengths_k), used=used, dropout_p=dropout_p, mask=the_mask,
              score=the_score, sinks=the_sinks, backend="cpu")  # fmt: skip


@everywhere_and_interpreted
def test_a_padded_buffer_trains_a_layer_before_it(device, backend):
    """NaN in the rows past the end reaches no weight."""
    x = torch.randn(24, 16, device=device)
    x[17:] = 0
    layer = torch.nn.Linear(16, 3 * 2 * 8, device=device)
    q, k, v = layer(x).view(24, 3, 2, 8).unbind(1)
    cu = cumulative([6, 11], device)
    o = flash_attention_varlen(q, k, v, cu, cu, is_causal=True, backend=backend)
    assert torch.count_nonzero(o[17:]) == 0
    o.square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@everywhere_and_interpreted
def test_what_lies_past_seqused_is_never_read(device, backend):
    """A cache of capacity 3 per sequence of which 1 and 3 entries are valid."""
    for junk in (math.nan, math.inf):
        q = torch.randn(2, 4, 8, device=device)
        k, v = torch.randn(6, 2, 8, device=device), torch.randn(6, 2, 8, device=device)
        k[1:3], v[1:3] = junk, junk
        used = torch.tensor([1, 3], dtype=torch.int32, device=device)
        o = flash_attention_varlen(q, k, v, cumulative([1, 1], device), cumulative([3, 3], device), seqused_k=used,
                                   is_causal=True, backend=backend)  # fmt: skip
        first = flash_attention(q[:1].transpose(0, 1), k[:1].transpose(0, 1), v[:1].transpose(0, 1), backend=backend)
        torch.testing.assert_close(o[:1], first.transpose(0, 1))
        assert o.isfinite().all()


def test_one_long_sequence_is_the_dense_call():
    q, k, v, do = packed([33], [33], tail=0)
    cu = cumulative([33])
    got = run(
        q, k, v, do, cu, cu, is_causal=True, mask=mask.window(9, 9), max_seqlen_q=33, max_seqlen_k=33, backend="cpu"
    )
    q, k, v = leaves(*map(as_4d, (q, k, v)))
    o, lse = flash_attention(q, k, v, is_causal=True, mask=mask.window(9, 9), return_lse=True, backend="cpu")
    assert torch.equal(as_4d(got.o), o)
    assert torch.equal(got.lse, lse[0])
    for ours, theirs in zip(got[2:], torch.autograd.grad(o, (q, k, v), as_4d(do)), strict=True):
        assert torch.equal(as_4d(ours), theirs)


def test_shapes_and_memory_order_of_what_is_returned():
    q, k, v, _ = packed([3, 4], [3, 4], dims=(8, 12), tail=0)
    cu = cumulative([3, 4])
    o, lse, largest = flash_attention_varlen(q, k, v, cu, cu, return_lse=True, return_max_logits=True, backend="cpu")
    assert o.shape == (7, 4, 12)
    assert o.is_contiguous()
    assert lse.shape == largest.shape == (4, 7)
    assert (largest <= lse).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_differentiable_twice(is_causal):
    q, k, v = leaves(*(t.double() for t in packed([2, 0, 3], [3, 1, 2], heads=(2, 1), dims=(3, 3), tail=0)[:3]))
    cu_q, cu_k = cumulative([2, 0, 3]), cumulative([3, 1, 2])

    def call(q, k, v):
        return flash_attention_varlen(q, k, v, cu_q, cu_k, is_causal=is_causal, differentiable_twice=True)

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))
    torch.testing.assert_close(
        call(q, k, v), flash_attention_varlen(q, k, v, cu_q, cu_k, is_causal=is_causal, backend="cpu")
    )


@everywhere
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_new_lengths_compile_nothing_new(dynamic, device, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, cu, longest):
        return flash_attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, is_causal=True,
                                      backend=backend)  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    for i in range(10):
        lengths = [3 + i, 6 + i, 0, 11 + 2 * i]
        q, k, v, do = packed(lengths, lengths, tail=0, device=device)
        cu = cumulative(lengths, device)
        want = run(q, k, v, do, cu, cu, is_causal=True, backend=backend)
        q, k, v = leaves(q, k, v)
        o = compiled(q, k, v, cu, max(lengths))
        assert torch.equal(o, want.o)
        assert all(map(torch.equal, torch.autograd.grad(o, (q, k, v), do), want[2:]))
    assert counter.frame_count <= 2


@pytest.mark.gpu
def test_lengths_stay_on_the_device():
    lengths = [100, 0, 300]
    *inputs, do = packed(lengths, lengths, dims=(64, 64), device="cuda", dtype=HALF)
    cu = cumulative(lengths, "cuda")
    q, k, v = leaves(*inputs)

    def step():
        o = flash_attention_varlen(q, k, v, cu, cu, is_causal=True, dropout_p=0.1)
        torch.autograd.grad(o, (q, k, v), do)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 256])
def test_empty_queries_beside_long_keys(head_dim):
    """Sequences without queries get no gradient and cause no fault."""
    lengths_q, lengths_k = [0, 1208, 840, 0], [2538, 1742, 840, 3072]
    tensors = packed(lengths_q, lengths_k, heads=(4, 1), dims=(head_dim, head_dim), tail=0, device="cuda", dtype=HALF)
    got = check(tensors, cumulative(lengths_q, "cuda"), cumulative(lengths_k, "cuda"), is_causal=False)
    for t in (got.dk, got.dv):
        assert torch.count_nonzero(t[:2538]) == torch.count_nonzero(t[5120:]) == 0


@everywhere_and_interpreted
def test_strides_change_nothing(device, backend):
    q, k, v, do = packed([5, 9], [5, 9], tail=0, device=device)
    cu = cumulative([5, 9], device)
    want = run(q, k, v, do, cu, cu, is_causal=True, backend=backend)
    apart = torch.stack([cu, -cu], 1)[:, 0]
    fused = torch.stack([k, v], 1)
    got = run(q, fused[:, 0], fused[:, 1], do, apart, apart, is_causal=True, backend=backend)
    assert all(map(torch.equal, got, want))


LEARNED = {
    "bias-of-a-sequence": lambda t: score.bias(t),
    "bias-of-keys": lambda t: score.bias(t),
    "alibi": score.alibi,
    "relative": score.relative_position,
}
LEARNED_SHAPES = {"bias-of-a-sequence": (3, 4, 1, 1), "bias-of-keys": (1, 21), "alibi": (4,), "relative": (8, 4)}


@everywhere_and_interpreted
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_a_score_sum_over_the_sequences(name, device, backend):
    q, k, v, do = packed([5, 0, 13], [7, 4, 21], tail=0, device=device)
    cu_q, cu_k = cumulative([5, 0, 13], device), cumulative([7, 4, 21], device)
    grads = []
    each: Any = ({"backend": backend}, {"differentiable_twice": True})
    for options in each:
        torch.manual_seed(0)
        tensor = torch.randn(LEARNED_SHAPES[name], device=device, requires_grad=True)
        o = flash_attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, score=LEARNED[name](tensor), **options)
        grads.append(torch.autograd.grad(o, tensor, do)[0])
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
