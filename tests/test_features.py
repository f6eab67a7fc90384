"""The options of flash_attention (masks, scores, sinks, dropout, ...), alone and together, against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from flashtile import FlashAttention, flash_attention, mask, score
from flashtile.dropout import Dropout
from tests.reference import Case, Result, assert_accurate, assert_result_accurate, max_error, plain, reference
from tests.test_attention import everywhere, everywhere_and_interpreted, interpreter, leaves

HALF = torch.bfloat16


def odd_keys(where, q_idx, k_idx, args):
    return (k_idx % args[0] != 1) | (q_idx == k_idx)


def masks(batch, heads, seqlen_q, seqlen_k, device="cpu") -> dict[str, Any]:
    """Makers of masks by name."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.rand(*shape, generator=generator).to(device)

    lengths = (drawn(batch) * (seqlen_k + 1)).int()
    return {
        "none": lambda: None,
        "causal": mask.causal,
        "top-left": lambda: mask.causal(align="top_left"),
        "window": lambda: mask.window(5, 2),
        "window-right": lambda: mask.window(-1, 100),
        "chunked": lambda: mask.chunked(7) & mask.causal(),
        "prefix": lambda: mask.prefix(lengths) | mask.causal(),
        "padding": lambda: mask.key_padding(lengths),
        "document": lambda: mask.document((drawn(batch, seqlen_k) * 3).int().sort(dim=1).values),
        "blocks": lambda: mask.block_sparse(drawn(-(-seqlen_q // 8), -(-seqlen_k // 8)) > 0.4, 8, 8),
        "tensor": lambda: drawn(batch, 1, seqlen_q, seqlen_k) > 0.4,
        "own": lambda: mask.Mask.of(odd_keys, (3,)),
    }


def scores(batch, heads, seqlen_q, seqlen_k, device="cpu", dtype=torch.float32) -> dict[str, Any]:
    """Scores by name, their tensors leaves that want gradients."""
    generator = torch.Generator().manual_seed(2)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    return {
        "none": lambda: (None, ()),
        "softcap": lambda: (score.softcap(2.0), ()),
        "temperature": lambda: (score.temperature(1.7), ()),
        "alibi": lambda: (lambda t: (score.alibi(t), (t,)))(leaf(heads)),
        "bias": lambda: (lambda t: (score.bias(t), (t,)))(leaf(1, heads, seqlen_q, seqlen_k)),
        "bias-row": lambda: (lambda t: (score.bias(t), (t,)))(leaf(batch, 1, 1, seqlen_k)),
        "relative": lambda: (lambda t: (score.relative_position(t), (t,)))(leaf(8, heads)),
        "several": lambda: (lambda a, b: (score.bias(a).then(score.softcap(3.0)).then(score.alibi(b)), (a, b)))(
            leaf(heads, seqlen_q, 1), leaf(heads)
        ),
    }


def as_mask(value, is_causal=False):
    value = mask.dense(value) if isinstance(value, torch.Tensor) else value
    if is_causal:
        return mask.causal() if value is None else value & mask.causal()
    return mask.full() if value is None else value


def run(q, k, v, do, dlse, learned=(), **options) -> tuple[Result, tuple]:
    """Return the result of forward and backward, dsinks included, and the gradients of ``learned``."""
    q, k, v = leaves(q, k, v)
    sinks = options.get("sinks")
    inputs = [q, k, v, *learned, *([] if sinks is None else [sinks])]
    o, lse = flash_attention(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad((o, lse), inputs, (do, dlse), allow_unused=True, materialize_grads=True)
    n = 3 + len(learned)
    return Result(o.detach(), lse.detach(), *grads[:3], dsinks=None if sinks is None else grads[n]), grads[3:n]


def compare(case, mask_name, score_name, *, sinks=False, dropout_p=0.0, is_causal=False, device="cpu", backend=None):
    """Check outputs and all gradients against the reference."""
    q, k, v, do, dlse = case.tensors(device=device)
    shape = case.batch, case.heads_q, case.seqlen_q, case.seqlen_k
    the_mask = masks(*shape, device)[mask_name]()
    the_score, learned = scores(*shape, device)[score_name]()
    the_sinks = torch.randn(case.heads_q, device=device).requires_grad_() if sinks else None
    torch.manual_seed(5)
    got, got_learned = run(q, k, v, do, dlse, learned, mask=the_mask, score=the_score, sinks=the_sinks,
                           dropout_p=dropout_p, is_causal=is_causal, backend=backend)  # fmt: skip
    torch.manual_seed(5)
    dropout = None
    if dropout_p:
        from flashtile.dropout import draw_seed

        dropout = Dropout(dropout_p, draw_seed(device).cpu())
    expected: dict[str, Any] = {"mask": as_mask(the_mask, is_causal), "score": the_score, "sinks": the_sinks,
                                "dropout": dropout, "do": do, "dlse": dlse}  # fmt: skip
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))
    if learned:
        wide = [t.cpu().double() for t in (q, k, v)]
        torch.manual_seed(5)
        of_64 = learned_gradients(wide, do, dlse, learned, the_score, the_mask, is_causal, the_sinks, dropout)
        for ours, want in zip(got_learned, of_64, strict=True):
            scale = want.abs().max().item() + 1
            tolerance = 3e-5 if case.dtype is torch.float32 else 3e-2
            assert max_error(ours, want) <= tolerance * scale


def learned_gradients(qkv, do, dlse, learned, the_score, the_mask, is_causal, sinks, dropout):
    """Gradients of a score's tensors in fp64, by autograd through the dense formula."""
    from flashtile.kernel.flash_attention_mock import dense_attention

    copies = [t.detach().cpu().double().requires_grad_() for t in learned]
    found = iter(copies)
    cpu_score = the_score.with_tensors(
        tuple(next(found).reshape(t.shape) if t.requires_grad else t.cpu() for t in the_score.tensors())
    )
    cpu_mask = as_mask(None if the_mask is None else the_mask.to("cpu"), is_causal)
    sinks = None if sinks is None else sinks.detach().cpu().double()
    scale = qkv[0].shape[-1] ** -0.5
    o, lse = dense_attention(*qkv, softmax_scale=scale, mask=cpu_mask, score=cpu_score, sinks=sinks, dropout=dropout)
    grads = torch.autograd.grad((o, lse), copies, (do.cpu().double(), dlse.cpu().double()))
    return [g.reshape(t.shape) for g, t in zip(grads, learned, strict=True)]


# ------------------------------------------------------------------------------------------------- options, one by one


@everywhere
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "and-causal"])
def test_masks(name, is_causal, device, backend):
    compare(Case(2, 4, 2, 33, 45), name, "none", is_causal=is_causal, device=device, backend=backend)


@everywhere
@pytest.mark.parametrize("name", scores(1, 1, 1, 1))
def test_scores(name, device, backend):
    compare(Case(2, 4, 2, 33, 45), "causal", name, device=device, backend=backend)


@interpreter
@pytest.mark.parametrize(
    ("mask_name", "score_name", "sinks", "dropout_p"),
    [
        ("window", "several", True, 0.3),
        ("tensor", "bias", False, 0.0),
        ("document", "relative", True, 0.0),
        ("prefix", "alibi", False, 0.5),
        ("own", "bias-row", False, 0.0),
    ],
)
def test_kernels_in_the_interpreter(mask_name, score_name, sinks, dropout_p):
    case = Case(2, 4, 2, 17, 21, 8)
    compare(case, mask_name, score_name, sinks=sinks, dropout_p=dropout_p, backend="triton")


@settings(max_examples=60)
@given(
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    shape=st.tuples(st.integers(1, 2), st.integers(0, 40), st.integers(0, 40)),
    dims=st.sampled_from([(8, 8), (5, 12), (16, 4)]),
    dtype=st.sampled_from([torch.float32, HALF]),
    mask_name=st.sampled_from(list(masks(1, 1, 1, 1))),
    score_name=st.sampled_from(list(scores(1, 1, 1, 1))),
    sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.4]),
    is_causal=st.booleans(),
)
def test_everything_together(heads, shape, dims, dtype, mask_name, score_name, sinks, dropout_p, is_causal):
    batch, seqlen_q, seqlen_k = shape
    if mask_name in ("blocks", "tensor", "document") or score_name in ("bias", "bias-row", "several"):
        seqlen_q, seqlen_k = max(seqlen_q, 1), max(seqlen_k, 1)  # no tensor is without entries
    case = Case(batch, heads[0], heads[1], seqlen_q, seqlen_k, dims[0], dims[1], dtype=dtype)
    compare(case, mask_name, score_name, sinks=sinks, dropout_p=dropout_p, is_causal=is_causal, backend="cpu")


def test_a_bool_tensor_of_any_rank_is_a_mask():
    q, k, v, *_ = Case(2, 4, 2, 9, 11).tensors()
    visible = torch.rand(9, 11) > 0.3
    want = flash_attention(q, k, v, mask=mask.dense(visible), backend="cpu")
    for same in (visible, visible[None, None], visible.expand(2, 4, 9, 11)):
        assert torch.equal(flash_attention(q, k, v, mask=same, backend="cpu"), want)


@everywhere_and_interpreted
def test_rows_that_see_nothing(device, backend):
    """Rows 4 to 7 see no key: nothing of them reaches a result or a gradient."""
    visible = torch.zeros(8, 8, dtype=torch.bool, device=device)
    visible[:4, :4] = True
    for dtype in (torch.float32, HALF):
        q, k, v, _, _ = Case(1, 1, 1, 8, 8, 8, dtype=dtype).tensors(device=device)
        do, dlse = torch.ones_like(q), torch.ones(1, 1, 8, device=device)
        got, _ = run(q, k, v, do, dlse, mask=visible, backend=backend)
        assert all(torch.count_nonzero(t[:, :, 4:]) == 0 for t in (got.o, got.dq, got.dk, got.dv))
        assert (got.lse[:, :, 4:] == -torch.inf).all()
        want = reference(q[:, :, :4], k[:, :, :4], v[:, :, :4], do=do[:, :, :4], dlse=dlse[:, :, :4])
        theirs = plain(q[:, :, :4], k[:, :, :4], v[:, :, :4], do=do[:, :, :4], dlse=dlse[:, :, :4])
        assert_result_accurate(Result(*(t[:, :, :4] for t in got)), want, theirs)


@everywhere_and_interpreted
def test_softcap_of_huge_logits(device, backend):
    x = torch.tensor([10.0, 4416, 4992, -9984], device=device)
    for dtype in (torch.float32, HALF):
        q = torch.zeros(1, 1, 1, 8, dtype=dtype, device=device)
        q[..., 0] = 1
        k = torch.zeros(1, 1, 4, 8, dtype=dtype, device=device)
        k[0, 0, :, 0] = x
        v = torch.eye(4, 8, dtype=dtype, device=device)[None, None]
        got, _ = run(q, k, v, torch.ones_like(v[:, :, :1]), torch.ones(1, 1, 1, device=device), softmax_scale=1.0,
                     score=score.softcap(50.0), backend=backend)  # fmt: skip
        want = torch.tensor([0, 0.5, 0.5, 0], device=device)
        torch.testing.assert_close(got.o[0, 0, 0, :4].float(), want, atol=1e-4, rtol=0)
        assert all(t.isfinite().all() and t.abs().max() <= 1 for t in (got.dq, got.dk, got.dv))


@everywhere
def test_slopes_get_their_gradient_when_nothing_else_does(device, backend):
    q, k, v = (torch.randn(1, 2, n, 8, device=device) for n in (5, 7, 7))
    slopes = torch.rand(2, device=device, requires_grad=True)
    flash_attention(q, k, v, score=score.alibi(slopes), backend=backend).square().sum().backward()
    copy = slopes.detach().cpu().double().requires_grad_()
    s = q.cpu().double() @ k.cpu().double().mT * 8**-0.5
    distance = (torch.arange(5)[:, None] + 2 - torch.arange(7)).abs()
    (((s - copy[:, None, None] * distance).softmax(-1) @ v.cpu().double()).square().sum()).backward()
    assert_accurate(slopes.grad, copy.grad, copy.grad.float(), name="dslopes")  # pyright: ignore


def test_exactly_what_is_needed_is_computed(monkeypatch):
    from flashtile.kernel import autograd

    passes = []
    original = autograd.run_backward
    monkeypatch.setattr(autograd, "run_backward", lambda *args: passes.append(1) or original(*args))
    q, k, v, do, _ = Case(1, 2, 2, 9, 9).tensors()
    sinks = torch.randn(2, requires_grad=True)
    torch.autograd.grad(flash_attention(q, k, v, sinks=sinks, backend="cpu"), sinks, do)
    assert not passes
    q.requires_grad_()
    torch.autograd.grad(flash_attention(q, k, v, sinks=sinks.detach(), backend="cpu"), q, do)
    assert passes


def test_gradients_keep_the_dtype_and_shape_of_their_tensor():
    q, k, v, do, _ = Case(2, 4, 2, 9, 9, dtype=HALF).tensors()
    inputs: list[Any] = [torch.randn(4, 9, 1, dtype=HALF), torch.randn(4), torch.randn(4, dtype=torch.float64)]
    for t in inputs:
        t.requires_grad_()
    bias, slopes, sinks = inputs
    o = flash_attention(q, k, v, score=score.bias(bias).then(score.alibi(slopes)), sinks=sinks, backend="cpu")
    grads = torch.autograd.grad(o, inputs, do)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in inputs]


@everywhere
def test_largest_logits(device, backend):
    q, k, v, *_ = Case(2, 4, 2, 20, 33).tensors(device=device)
    o, lse, largest = flash_attention(q, k, v, mask=mask.window(3, 0), return_lse=True, return_max_logits=True,
                                      backend=backend)  # fmt: skip
    alone = flash_attention(q, k, v, mask=mask.window(3, 0), return_max_logits=True, backend=backend)
    s = q @ k.repeat_interleave(2, 1).mT * 0.25
    distance = torch.arange(33, device=device) - torch.arange(20, device=device)[:, None] - 13
    s = s.masked_fill((distance > 0) | (distance < -3), -torch.inf)
    torch.testing.assert_close(largest, s.amax(-1))
    assert torch.equal(alone[1], largest)
    assert (largest <= lse).all()
    assert not flash_attention(q.requires_grad_(), k, v, return_max_logits=True, backend=backend)[1].requires_grad
    assert o.shape == q.shape


def test_wide_heads_are_served_forward():
    q, k, v, *_ = Case(1, 2, 1, 9, 11, 576, 512).tensors()
    o = flash_attention(q, k, v, is_causal=True, backend="cpu")
    assert_accurate(o, reference(q, k, v, is_causal=True).o, plain(q, k, v, is_causal=True).o)
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="head_dim 576 and head_dim_v 512 are served forward only"):
        flash_attention(q, k, v)
    with pytest.raises(NotImplementedError, match="served forward only"):
        FlashAttention.apply(q, k, v)
    with torch.no_grad():
        flash_attention(q, k, v, backend="cpu")
    flash_attention(q, k, v, differentiable_twice=True).sum().backward()


# ---------------------------------------------------------------------------------------------------- what is random


@everywhere
def test_dropout_advances_the_generator(device, backend):
    q, k, v, *_ = Case(1, 2, 2, 64, 64).tensors(device=device)

    def two():
        torch.manual_seed(3)
        first = flash_attention(q, k, v, dropout_p=0.5, backend=backend)
        between = torch.rand(1, device=device)
        return first, flash_attention(q, k, v, dropout_p=0.5, backend=backend), between

    a, b, drawn = two()
    assert not torch.equal(a, b)
    assert all(map(torch.equal, two(), (a, b, drawn)))
    torch.manual_seed(3)
    assert not torch.equal(torch.rand(1, device=device), drawn)
    generator = torch.Generator(device).manual_seed(7)
    one = flash_attention(q, k, v, dropout_p=0.5, generator=generator, backend=backend)
    assert torch.equal(
        one, flash_attention(q, k, v, dropout_p=0.5, generator=generator.manual_seed(7), backend=backend)
    )


def test_dropout_drops_as_told_and_nothing_at_zero():
    q, k, v, *_ = Case(1, 2, 2, 64, 64).tensors()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(flash_attention(q, k, v, dropout_p=0.0, backend="cpu"), flash_attention(q, k, v, backend="cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    ones = torch.ones(1, 2, 64, 16)
    o, lse = flash_attention(q, k, ones, dropout_p=0.8, return_lse=True, backend="cpu")
    assert (o.mean() - 1).abs() < 0.1
    assert o.std() > 0.1
    torch.testing.assert_close(lse, flash_attention(q, k, ones, return_lse=True, backend="cpu")[1])


@everywhere_and_interpreted
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_activation_checkpointing(reentrant, device, backend):
    *inputs, do, _ = Case(1, 2, 2, 20, 20, 8).tensors(device=device)
    inputs = leaves(*inputs)

    def block(q, k, v):
        return flash_attention(q.sin(), k, v, is_causal=True, dropout_p=0.3, backend=backend).sin()

    torch.manual_seed(0)
    want = block(*inputs)
    want = (want, *torch.autograd.grad(want, inputs, do))
    torch.manual_seed(0)
    got: Any = checkpoint(block, *inputs, use_reentrant=reentrant)
    if reentrant:
        got.backward(do)
        got = (got, *(t.grad for t in inputs))
    else:
        got = (got, *torch.autograd.grad(got, inputs, do))
    assert all(map(torch.equal, got, want))


@everywhere_and_interpreted
def test_gradients_are_bit_identical_from_run_to_run(device, backend):
    q, k, v, do, dlse = Case(1, 4, 2, 33, 18, 8).tensors(device=device)
    shape = 1, 4, 33, 18
    runs = []
    for _ in range(2):
        the_score, learned = scores(*shape, device)["several"]()
        torch.manual_seed(1)
        sinks = torch.ones(4, device=device, requires_grad=True)
        result, of_score = run(q, k, v, do, dlse, learned, score=the_score, sinks=sinks, mask=mask.window(9, 3),
                               deterministic=True, backend=backend)  # fmt: skip
        runs.append((*result, result.dsinks, *of_score))
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


# -------------------------------------------------------------------------------------------------- higher derivatives


@pytest.mark.parametrize("name", ["none", "several"])
def test_differentiable_twice(name):
    q, k, v = leaves(*(torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (3, 4, 4)))
    the_score, learned = scores(1, 2, 3, 4, dtype=torch.float64)[name]()
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sinks, *learned):
        rebuilt = None if the_score is None else the_score.with_tensors(tuple(
            t.reshape(old.shape) for t, old in zip(learned, the_score.tensors(), strict=True)))  # fmt: skip
        return flash_attention(q, k, v, is_causal=True, score=rebuilt, sinks=sinks, return_lse=True,
                               differentiable_twice=True)  # fmt: skip

    inputs = (q, k, v, sinks, *learned)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@everywhere
def test_differentiable_twice_agrees_with_the_fused_passes(device, backend):
    q, k, v, do, dlse = Case(2, 4, 2, 300, 33, 8).tensors(device=device)
    sinks = torch.randn(4, device=device, requires_grad=True)
    options: dict[str, Any] = {"mask": mask.window(20, 0), "sinks": sinks, "dropout_p": 0.2}
    torch.manual_seed(1)
    fused, _ = run(q, k, v, do, dlse, backend=backend, **options)
    torch.manual_seed(1)
    slow, _ = run(q, k, v, do, dlse, differentiable_twice=True, **options)
    for ours, theirs in zip((*slow, slow.dsinks), (*fused, fused.dsinks), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["sinks", "mask", "score"])
def test_a_second_derivative_of_the_fused_passes_is_an_error(name):
    q, k, v = leaves(*Case(1, 2, 2, 9, 9).tensors()[:3])
    option: Any = {name: {"sinks": torch.zeros(2), "mask": mask.window(3, 0), "score": score.softcap(2.0)}[name]}
    (dq,) = torch.autograd.grad(flash_attention(q, k, v, backend="cpu", **option).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable_twice=True"):
        dq.sum().backward()


# ------------------------------------------------------------------------------------------------------------- strides


@everywhere_and_interpreted
def test_strides_and_lazy_signs_of_other_tensors_change_nothing(device, backend):
    q, k, v, do, dlse = Case(1, 4, 2, 9, 11, 8).tensors(device=device)
    sinks, bias = torch.randn(4, device=device), torch.randn(1, 4, 9, 11, device=device)
    strided = torch.stack([sinks, sinks], 1)[:, 0], bias.transpose(2, 3).contiguous().transpose(2, 3)
    negated = tuple(torch.complex(torch.zeros_like(t), -t).conj().imag for t in (sinks, bias))
    assert negated[0].is_neg()
    results = []
    for s, b in ((sinks, bias), strided, negated):
        s, b = leaves(s, b)
        got, (dbias,) = run(q, k, v, do, dlse, (b,), sinks=s, score=score.bias(b), backend=backend)
        results.append((*got, got.dsinks, dbias))
        with torch.no_grad():
            assert torch.equal(flash_attention(q, k, v, sinks=s, score=score.bias(b), backend=backend), got.o)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


# ---------------------------------------------------------------------------------------------------------- GPU matters


@pytest.mark.gpu
def test_cuda_graph_draws_a_new_seed_at_every_replay():
    *inputs, do, _ = Case(2, 4, 2, 130, 200, 64, dtype=HALF).tensors(device="cuda")
    q, k, v = leaves(*inputs)
    sinks = torch.zeros(4, device="cuda", requires_grad=True)

    def step():
        o = flash_attention(q, k, v, mask=mask.window(50, 0), sinks=sinks, dropout_p=0.3)
        return (o, *torch.autograd.grad(o, (q, k, v, sinks), do))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles; capture must not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([t.clone() for t in captured])
    assert not torch.equal(replays[0][0], replays[1][0])
    for o, _, _, dv, _ in replays:  # o is linear in v, with the same weights in both passes
        torch.testing.assert_close((dv.float() * v).sum(), (o.float() * do).sum(), atol=0.5, rtol=0.02)


@pytest.mark.gpu
def test_memory_of_options_is_linear_in_the_length():
    def peak(seqlen: int, **options) -> int:
        q, k, v = leaves(*(torch.randn(1, 2, seqlen, 64, device="cuda", dtype=HALF) for _ in range(3)))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v, is_causal=True, **options).float().sum().backward()
        return torch.cuda.max_memory_allocated() - before

    options: dict[str, Any] = {"score": score.softcap(30.0), "sinks": torch.zeros(2, device="cuda"), "dropout_p": 0.1}
    peak(1024, **options)
    assert peak(16384, **options) <= 2.2 * peak(8192, **options)
    matrix = 2 * 16384**2 * 4
    assert peak(16384, differentiable_twice=True) <= matrix / 4
