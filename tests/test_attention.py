"""flash_attention as users call it: any rank and strides, every way of running PyTorch, on the CPU and on a GPU."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flashtile import flash_attention
from flashtile.dispatch import Problem, select
from tests.reference import Case, Result, assert_result_accurate, cases, plain, reference

# (device, backend): the tests' environment sends CPU tensors to Triton's interpreter, so PyTorch is asked for by name.
PLACES = [pytest.param("cpu", "cpu", id="cpu"), pytest.param("cuda", None, id="cuda", marks=pytest.mark.gpu)]
everywhere = pytest.mark.parametrize(("device", "backend"), PLACES)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
interpreter = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET is not 1, or there is no Triton")
everywhere_and_interpreted = pytest.mark.parametrize(
    ("device", "backend"), [*PLACES, pytest.param("cpu", "triton", id="interpreter", marks=interpreter)]
)
OPERATOR = torch.ops.flashtile.forward.default
HALF = torch.bfloat16


def leaves(*tensors) -> list[Any]:
    return [t.detach().requires_grad_() for t in tensors]


def with_gradients(q, k, v, do, dlse=None, **options) -> Result:
    """Run forward and backward on leaves that share the memory, and so the strides, of q, k, v."""
    q, k, v = leaves(q, k, v)
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    given = (do, torch.zeros_like(lse) if dlse is None else dlse)
    return Result(o.detach(), lse.detach(), *torch.autograd.grad((o, lse), (q, k, v), given))


def check(q, k, v, do, dlse=None, *, is_causal=False, softmax_scale=None, backend=None) -> Result:
    options: Any = {"is_causal": is_causal, "softmax_scale": softmax_scale}
    got = with_gradients(q, k, v, do, dlse, backend=backend, **options)
    grads: Any = {"do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **options, **grads), plain(q, k, v, **options, **grads))
    return got


# ---------------------------------------------------------------------------------------------------------- what it is


@everywhere
@pytest.mark.parametrize("case", cases(dtypes=(torch.float32, HALF)), ids=str)
def test_agrees_with_the_reference(case, device, backend):
    q, k, v, do, dlse = case.tensors(device=device)
    check(q, k, v, do, dlse, is_causal=case.is_causal, backend=backend)


@everywhere
@pytest.mark.parametrize("head_dims", [(1, 1), (3, 5), (40, 40), (64, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims(head_dims, device, backend):
    case = Case(1, 6, 2, 45, 70, *head_dims, is_causal=True)
    q, k, v, do, dlse = case.tensors(device=device)
    got = check(q, k, v, do, dlse, is_causal=True, backend=backend)
    assert got.o.shape == do.shape


@pytest.mark.parametrize("scale", [0.0, -0.5, 1, 0.1])
def test_scales(scale):
    q, k, v, do, dlse = Case(is_causal=True).tensors()
    check(q, k, v, do, dlse, is_causal=True, softmax_scale=scale, backend="cpu")


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (1, 2, 1, 2), (0, 3)], ids=str)
def test_any_number_of_leading_dimensions(lead):
    q, do = (torch.randn(*lead, 4, 11, 8) for _ in range(2))
    k, v = (torch.randn(*lead, 2, 13, 8) for _ in range(2))
    got = with_gradients(q, k, v, do, is_causal=True, backend="cpu")
    assert got.o.shape == q.shape
    assert got.lse.shape == q.shape[:-1]
    flat = with_gradients(*(t.reshape(-1, *t.shape[-3:]) for t in (q, k, v, do)), is_causal=True, backend="cpu")
    for ours, theirs in zip(got, flat, strict=True):
        assert torch.equal(ours.reshape(theirs.shape), theirs)


def test_returns_the_output_alone_unless_asked():
    q, k, v, *_ = Case().tensors()
    o = flash_attention(q, k, v, backend="cpu")
    both = flash_attention(q, k, v, return_lse=True, backend="cpu")
    assert torch.equal(o, both[0])
    assert both[1].dtype == torch.float32


@everywhere_and_interpreted
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0), (2, 0, 5, 5)], ids=str)
def test_empty_tensors(shape, is_causal, device, backend):
    batch, heads, seqlen_q, seqlen_k = shape
    q, do = (torch.randn(batch, heads, seqlen_q, 16, device=device) for _ in range(2))
    k, v = (torch.randn(batch, heads, seqlen_k, 16, device=device) for _ in range(2))
    got = with_gradients(q, k, v, do, is_causal=is_causal, backend=backend)
    for ours, like in zip(got, (q, q[..., 0], q, k, v), strict=True):
        assert ours.shape == like.shape
    for zero in (got.o, got.dq, got.dk, got.dv):
        assert torch.count_nonzero(zero) == 0
    assert (got.lse == -torch.inf).all()


@everywhere_and_interpreted
def test_rows_that_see_no_key(device, backend):
    q, k, v, do, dlse = Case(1, 2, 2, 5, 2).tensors(device=device)
    got = with_gradients(q, k, v, do, dlse, is_causal=True, backend=backend)
    assert torch.count_nonzero(got.o[:, :, :3]) == torch.count_nonzero(got.dq[:, :, :3]) == 0
    assert (got.lse[:, :, :3] == -torch.inf).all()
    torch.testing.assert_close(got.o[:, :, 3], v[:, :, 0])
    assert all(t.isfinite().all() for t in (got.o, got.dq, got.dk, got.dv))


# ------------------------------------------------------------------------------------------------------------- strides


def expanded(b, h, n, d, **kw):
    return torch.randn(b, 1, n, d, **kw).expand(b, h, n, d)


LAYOUTS = {
    "b-n-h-d": lambda b, h, n, d, **kw: torch.randn(b, n, h, d, **kw).transpose(1, 2),
    "n-b-h-d": lambda b, h, n, d, **kw: torch.randn(n, b, h, d, **kw).permute(1, 2, 0, 3),
    "fused": lambda b, h, n, d, **kw: torch.randn(b, n, 3, h, d, **kw)[:, :, 1].transpose(1, 2),
    "odd-offset": lambda b, h, n, d, **kw: torch.randn(b * h * n * d + 1, **kw)[1:].view(b, h, n, d),
    "row-padding": lambda b, h, n, d, **kw: torch.randn(b, h, n, d + 3, **kw)[..., :d],
    "last-stride-2": lambda b, h, n, d, **kw: torch.randn(b, h, n, 2 * d, **kw)[..., ::2],
    "d-before-n": lambda b, h, n, d, **kw: torch.randn(b, h, d, n, **kw).transpose(2, 3),
    "every-other-row": lambda b, h, n, d, **kw: torch.randn(b, h, 2 * n, d, **kw)[:, :, ::2],
    "expanded-heads": expanded,
    "expanded-batch": lambda b, h, n, d, **kw: torch.randn(1, h, n, d, **kw).expand(b, h, n, d),
    "expanded-rows": lambda b, h, n, d, **kw: torch.randn(b, h, 1, d, **kw).expand(b, h, n, d),
    "all-ones": lambda b, h, n, d, **kw: torch.ones((), **kw).expand(b, h, n, d),
}


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout, dtype, device, backend):
    make = LAYOUTS[layout]
    q, do = (make(2, 4, 33, 16, device=device, dtype=dtype) for _ in range(2))
    k, v = (make(2, 2, 65, 16, device=device, dtype=dtype) for _ in range(2))
    got = with_gradients(q, k, v, do, is_causal=True, backend=backend)
    dense = [t.contiguous() for t in (q, k, v, do)]
    want = with_gradients(*dense, is_causal=True, backend=backend)
    same_kernel = len({select(Problem.of(a, b, c)).backend for a, b, c in ((q, k, v), dense[:3])}) == 1
    for name, ours, theirs in zip(Result._fields, got, want, strict=True):
        if same_kernel:
            assert torch.equal(ours, theirs), name
        else:  # the copy engine of sm_90 cannot read the one, but can the other
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2, msg=name)


@everywhere
@pytest.mark.parametrize("seqlen", [33, 65])
def test_gradient_of_an_expanded_tensor_sums_over_heads(seqlen, device, backend):
    q, k, v, do, _ = Case(2, 4, 1, seqlen, seqlen, is_causal=True).tensors(device=device)
    grouped = with_gradients(q, k, v, do, is_causal=True, backend=backend)
    q, k, v = leaves(q, k, v)
    wide_k, wide_v = k.expand(2, 4, seqlen, 16), v.expand(2, 4, seqlen, 16)
    o = flash_attention(q, wide_k, wide_v, is_causal=True, backend=backend)
    grads = torch.autograd.grad(o, (q, k, v), do)
    torch.testing.assert_close(o, grouped.o, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(grads, grouped[2:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@everywhere
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fused_projection(head_dim, device, backend):
    """q, k, v are slices of one projection: the output keeps its order, and the projection's gradient is complete."""
    x = torch.randn(1, 128, 3, 4, head_dim, device=device, requires_grad=True)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    o = flash_attention(q, k, v, backend=backend)
    assert o.transpose(1, 2).is_contiguous()
    do = torch.randn_like(o)
    (dx,) = torch.autograd.grad(o, x, do)
    assert dx.isfinite().all()
    want = with_gradients(q.contiguous(), k.contiguous(), v.contiguous(), do, backend=backend)
    assert torch.equal(dx.permute(2, 0, 3, 1, 4), torch.stack(want[2:]))


@everywhere_and_interpreted
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "operator"])
def test_results_lie_in_memory_like_their_inputs(watched, device, backend):
    q = torch.randn(2, 20, 12, 16, device=device).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 12, 20, 16, device=device, requires_grad=True) for _ in range(2))
    call = torch.ops.flashtile.forward if watched else None
    o, lse = call(q, k, v, 0.25, True, backend) if call else flash_attention(q, k, v, return_lse=True, backend=backend)
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert [t.stride() for t in (o, *grads)] == [t.stride() for t in (q, q, k, v)]
    assert lse.is_contiguous()


def lazily_negated(t):
    return torch.complex(torch.zeros_like(t), -t).conj().imag


@everywhere_and_interpreted
def test_lazily_negated_tensors(device, backend):
    q, k, v, do, dlse = Case().tensors(device=device)
    views = [lazily_negated(t) for t in (q, k, v, do, dlse)]
    assert all(t.is_neg() for t in views)
    want = with_gradients(q, k, v, do, dlse, backend=backend)
    q, k, v = leaves(*views[:3])
    o, lse = flash_attention(q, k, v, return_lse=True, backend=backend)
    got = (o, lse, *torch.autograd.grad((o, lse), (q, k, v), views[3:]))
    assert all(map(torch.equal, got, want))


def test_gradient_of_nothing_but_a_view():
    """sum() hands a gradient whose strides are all 0."""
    q, k, v, _, _ = Case().tensors()
    got = with_gradients(q, k, v, torch.ones(()).expand(q.shape), backend="cpu")
    want = with_gradients(q, k, v, torch.ones(q.shape), backend="cpu")
    assert all(map(torch.equal, got, want))


# ----------------------------------------------------------------------------------------------------- dtypes, autocast


def test_mixed_dtypes_outside_autocast_name_all_three():
    q, k, v, *_ = Case().tensors()
    with pytest.raises(TypeError, match=r"float32.*float16.*bfloat16"):
        flash_attention(q, k.half(), v.bfloat16())


@everywhere
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lead", [(2,), (1, 2)], ids=["4-d", "5-d"])
def test_autocast(lead, compiled, device, backend):
    q, k, do = (torch.randn(*lead, 3, 17, 8, device=device) for _ in range(3))
    q, k, v = leaves(q, k, torch.randn(*lead, 3, 17, 8, device=device, dtype=HALF))

    def call(q, k, v):
        return flash_attention(q, k, v, is_causal=True, backend=backend)

    with torch.autocast(device, HALF):
        o = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v)
    assert o.dtype == HALF
    grads = torch.autograd.grad(o, (q, k, v), do.to(HALF))
    assert [t.dtype for t in grads] == [torch.float32, torch.float32, HALF]
    want = with_gradients(*(t.to(HALF) for t in (q, k, v, do)), is_causal=True, backend=backend)
    for ours, theirs in zip((o, *grads), (want.o, *want[2:]), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


# -------------------------------------------------------------------------------------- compilers, tracers, transforms


@everywhere
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_whole_graph(compiler, device, backend):
    """A fused projection, attention and the way back: strides and gradients are those of eager mode."""
    torch._dynamo.reset()
    x = torch.randn(2, 20, 3 * 4 * 16, device=device, requires_grad=True)

    def block(x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (2 * x).chunk(3, dim=-1))
        o, lse = flash_attention(q, k, v, is_causal=True, return_lse=True, backend=backend)
        return o.transpose(1, 2).flatten(-2), lse

    want, got = block(x), torch.compile(block, fullgraph=True, backend=compiler)(x)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(o.square().sum() + lse.sum(), x)[0] for o, lse in (got, want)]
    torch.testing.assert_close(*grads)


@everywhere
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_new_lengths_compile_nothing_new(dynamic, device, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, is_causal=True, backend=backend),
        fullgraph=True,
        dynamic=dynamic,
        backend=counter,
    )
    for seqlen in range(11, 21):
        q, k, v, do, _ = Case(seqlen_q=seqlen, seqlen_k=2 * seqlen, is_causal=True).tensors(device=device)
        want = with_gradients(q, k, v, do, is_causal=True, backend=backend)
        q, k, v = leaves(q, k, v)
        o = call(q, k, v)
        assert torch.equal(o, want.o)
        assert all(map(torch.equal, torch.autograd.grad(o, (q, k, v), do), want[2:]))
    assert counter.frame_count <= 2


def calls_in(graph: torch.fx.Graph) -> int:
    return sum(node.target == OPERATOR for node in graph.nodes)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attention(q, k, v, is_causal=True, backend="cpu")

    q, k, v, *_ = Case().tensors()
    n = torch.export.Dim("n", min=2, max=4096)
    program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=({2: n},) * 3, strict=strict)
    assert calls_in(program.graph) == 1
    q, k, v, *_ = Case(seqlen_q=50, seqlen_k=50).tensors()
    assert torch.equal(program.module()(q, k, v), Attention()(q, k, v))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(tracing_mode):
    q, k, v, *_ = Case().tensors()
    graph = make_fx(lambda *tensors: flash_attention(*tensors, backend="cpu"), tracing_mode=tracing_mode)(q, k, v)
    assert calls_in(graph.graph) == 1
    assert torch.equal(graph(q, k, v), flash_attention(q, k, v, backend="cpu"))


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_records_the_operator():
    q, k, v, *_ = Case().tensors()
    traced: Any = torch.jit.trace(lambda *tensors: flash_attention(*tensors, backend="cpu"), (q, k, v))
    assert "flashtile::forward" in str(traced.graph)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data(kind):
    if kind == "fake":
        with FakeTensorMode():
            q = torch.empty(2, 9, 6, 8, dtype=HALF).transpose(1, 2)
            o, lse = flash_attention(q, q, q, return_lse=True)
    else:
        q = torch.empty(2, 9, 6, 8, dtype=HALF, device="meta").transpose(1, 2)
        o, lse = flash_attention(q, q, q, return_lse=True)
    assert type(o) is type(q)
    assert (o.stride(), o.dtype) == (q.stride(), HALF)
    assert (lse.shape, lse.dtype) == ((2, 6, 9), torch.float32)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, None), (None, 0, 3)], ids=str)
def test_vmap_is_a_loop(in_dims):
    size = 3
    tensors = Case(2, 4, 2, 9, 11).tensors()[:3]
    many = [t if d is None else torch.randn_like(t.unsqueeze(d).expand(*t.shape[:d], size, *t.shape[d:]).contiguous())
            for t, d in zip(tensors, in_dims, strict=True)]  # fmt: skip

    def call(q, k, v):
        return flash_attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")

    got = torch.vmap(call, in_dims)(*many)
    loop = [
        call(*(t if d is None else t.select(d, i) for t, d in zip(many, in_dims, strict=True))) for i in range(size)
    ]
    for ours, theirs in zip(got, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize("lead", [(), (2,), (1, 2)], ids=["3-d", "4-d", "5-d"])
def test_functional_gradients(lead):
    q, k, v, do = (torch.randn(*lead, 2, 9, 8) for _ in range(4))

    def loss(q, k, v):
        return (flash_attention(q, k, v, is_causal=True, backend="cpu") * do).sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    want = with_gradients(q, k, v, do, is_causal=True, backend="cpu")
    for ours, theirs in zip(got, want[2:], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("order", ["vmap-of-grad", "grad-of-vmap"])
def test_gradients_per_sample(order):
    q, k, v = torch.randn(5, 2, 9, 8), torch.randn(2, 9, 8), torch.randn(5, 2, 9, 8)

    def loss(q, k, v):
        return flash_attention(q, k, v, backend="cpu").square().sum()

    if order == "vmap-of-grad":
        got = torch.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, 0))(q, k, v)
        want = [torch.func.grad(loss, (0, 1, 2))(q[i], k, v[i]) for i in range(5)]
        want = [torch.stack(t) for t in zip(*want, strict=True)]
    else:
        got = torch.func.grad(lambda q, k, v: torch.vmap(loss, (0, None, 0))(q, k, v).sum(), (0, 1, 2))(q, k, v)
        want = torch.func.grad(lambda q, k, v: sum(loss(q[i], k, v[i]) for i in range(5)), (0, 1, 2))(q, k, v)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_second_derivative_is_an_error_under_transforms_too():
    q = torch.randn(2, 9, 8)

    def loss(q):
        return flash_attention(q, q, q, backend="cpu").sum()

    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)


def test_parameters_take_the_short_way():
    q = torch.nn.Parameter(torch.randn(1, 2, 9, 8))
    node = flash_attention(q, q, q, backend="cpu").grad_fn
    assert node is not None
    assert node.name() == "FlashAttentionBackward"


# ---------------------------------------------------------------------------------------------------------- GPU matters


def step(q, k, v, do):
    o = flash_attention(q, k, v, is_causal=True)
    return (o, *torch.autograd.grad(o, (q, k, v), do))


@pytest.mark.gpu
def test_cuda_graph_of_forward_and_backward():
    *tensors, do, _ = Case(2, 4, 2, 130, 200, 64, is_causal=True, dtype=HALF).tensors(device="cuda")
    q, k, v = leaves(*tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(q, k, v, do)  # compiles; capture must not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(q, k, v, do)
    for seed in (1, 2):
        *new, new_do, _ = Case(2, 4, 2, 130, 200, 64, is_causal=True, dtype=HALF).tensors(seed, device="cuda")
        with torch.no_grad():
            for old, fresh in zip((q, k, v, do), (*new, new_do), strict=True):
                old.copy_(fresh)
        graph.replay()
        new_q, new_k, new_v = leaves(*new)
        for ours, theirs in zip(captured, step(new_q, new_k, new_v, new_do), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.slow
def test_compile_with_cuda_graphs():
    torch._dynamo.reset()
    compiled = torch.compile(flash_attention, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # the first calls warm up and record, the later ones replay
        *tensors, do, _ = Case(2, 4, 4, 64, 64, 64, is_causal=True, dtype=HALF).tensors(seed, device="cuda")
        q, k, v = leaves(*tensors)
        torch.compiler.cudagraph_mark_step_begin()
        o = compiled(q, k, v, is_causal=True)
        got = (o, *torch.autograd.grad(o, (q, k, v), do))
        for ours, theirs in zip(got, step(q, k, v, do), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    """Forward and backward wait for what their stream still has to write."""
    q, k, v, do, _ = Case(1, 2, 2, 256, 256, 64, dtype=HALF).tensors(device="cuda")
    q, k, v = leaves(q, k, v)
    step(q, k, v, do)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        with torch.no_grad():
            v.fill_(1.0)
        o = flash_attention(q, k, v)
        torch.cuda._sleep(200_000_000)
        do.zero_()
        grads = torch.autograd.grad(o, (q, k, v), do)
    stream.synchronize()
    torch.testing.assert_close(o, torch.ones_like(o))
    assert all(torch.count_nonzero(grad) == 0 for grad in grads)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu():
    tensors = Case(2, 4, 2, 130, 200, 64, is_causal=True, dtype=HALF).tensors()[:4]
    results = []
    for device in ("cuda:0", "cuda:1"):
        *inputs, do = (t.to(device) for t in tensors)
        q, k, v = leaves(*inputs)
        results.append([t.cpu() for t in step(q, k, v, do)])
        assert torch.cuda.current_device() == 0
        operator = torch.ops.flashtile.forward(q.detach(), k.detach(), v.detach(), 0.125, True)[0]
        assert torch.equal(operator.cpu(), results[-1][0])
    assert all(map(torch.equal, *results))


def peak_memory(seqlen: int) -> int:
    """Bytes that forward and backward take above their inputs."""
    q, k, v, do = (torch.randn(1, 4, seqlen, 64, device="cuda", dtype=HALF) for _ in range(4))
    q, k, v = leaves(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(q, k, v, do)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_memory_is_linear_in_the_length():
    peak_memory(1024)
    small, large = peak_memory(8192), peak_memory(16384)
    assert large <= 2.2 * small
    one_tensor = 4 * 16384 * 64 * HALF.itemsize
    # o, dq, dk, dv, lse and delta, and on Hopper dq once more in fp32; the matrix of logits alone would be 256 of them.
    q = torch.empty(1, 4, 16384, 64, device="cuda", dtype=HALF)
    assert large <= (8 if select(Problem.of(q, q, q)).backward == "hopper" else 6) * one_tensor


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_steps_keep_no_memory(compiled):
    torch._dynamo.reset()
    projection = torch.nn.Linear(64, 3 * 64, device="cuda", dtype=HALF)
    x = torch.randn(2, 256, 64, device="cuda", dtype=HALF)

    def model(x):
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in projection(x).chunk(3, dim=-1))
        return flash_attention(q, k, v, is_causal=True)

    call = torch.compile(model, fullgraph=True) if compiled else model
    used = []
    for _ in range(20):
        call(x).float().square().mean().backward()
        projection.zero_grad(set_to_none=True)
        used.append(torch.cuda.memory_allocated())
    assert used[-1] - used[3] <= 2**20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"return_lse": "yes"}, "return_lse is 'yes', but wants True or False"),
        ({"return_lse": None}, "return_lse is None"),
        ({"generator": "x"}, "generator is 'x', but wants a torch.Generator or None"),
    ],
    ids=["lse", "lse-none", "generator"],
)
def test_options_that_nothing_else_reads_are_checked(options, words):
    q = torch.ones(1, 1, 3, 4)
    with pytest.raises(TypeError, match=words):
        flash_attention(q, q, q, **options)
