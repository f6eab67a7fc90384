"""The portable kernels, in the interpreter or on a GPU, against the fp64 reference: outputs, LSE and gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtile import mask
from flashtile.kernel.launch import LaunchConfig
from flashtile.score import Score
from tests.reference import (
    EMPTY_SHAPES,
    Case,
    Result,
    assert_result_accurate,
    cases,
    max_error,
    plain,
    reference,
)

pytest.importorskip("triton")

from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_triton import forward
from flashtile.kernel.tile import head_dim_chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = [torch.float16, torch.bfloat16]


def run(q, k, v, do, dlse, *, mask_value, scale=None, score=None, config=None) -> Result:
    """Run the three kernels; ``config`` replaces every launch configuration."""
    options = {"softmax_scale": q.shape[-1] ** -0.5 if scale is None else scale, "mask": mask_value, "score": score}
    o, lse = forward(q, k, v, config=config, **options)
    dq, dk, dv = backward(do, q, k, v, o, lse, dlse, config_dq=config, config_dkdv=config, **options)
    return Result(o, lse, dq, dk, dv)


def check(case: Case, config: LaunchConfig | None = None) -> None:
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    # A row that sees no key has lse = -inf, a constant: no gradient may come through it, whatever dlse says there.
    got = run(q, k, v, do, dlse, mask_value=case.mask, config=config)
    expected = {"is_causal": case.is_causal, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_shape(case):
    check(case)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_half_precision(dtype, is_causal):
    check(Case(1, 4, 2, 70, 90, 64, is_causal=is_causal, dtype=dtype))


@pytest.mark.parametrize("head_dim", [1, 2, 8, 15, 17, 24, 33, 40, 48, 72, 80, 96, 100, 112, 128, 160, 192, 200, 256])
def test_every_kind_of_head_dim(head_dim):
    check(Case(1, 2, 1, 35, 40, head_dim, is_causal=True))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 128), (192, 128), (128, 64), (16, 80), (40, 7)])
def test_value_width_of_its_own(head_dim, head_dim_v):
    check(Case(1, 2, 2, 33, 37, head_dim, head_dim_v, is_causal=True))


@pytest.mark.parametrize(
    "config",
    [LaunchConfig(16, 64, 4, 1), LaunchConfig(64, 16, 4, 2), LaunchConfig(128, 32, 8, 2), LaunchConfig(16, 16, 4, 1)],
    ids=lambda c: f"{c.block_m}x{c.block_n}",
)
@pytest.mark.parametrize("lengths", [(100, 100), (150, 70), (70, 150), (128, 128)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_any_tile_size_gives_the_same_answer(config, lengths, is_causal):
    check(Case(1, 1, 1, lengths[0], lengths[1], 16, is_causal=is_causal), config)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(shape):
    heads_q, heads_kv, seqlen_q, seqlen_k = shape
    case = Case(2, heads_q, heads_kv, seqlen_q, seqlen_k, 16)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    got = run(q, k, v, do, dlse, mask_value=mask.full())
    expected = reference(q, k, v, do=do, dlse=dlse)
    for name, ours, want in zip(Result._fields, got, expected, strict=True):
        assert max_error(ours, want) == 0.0, name


def test_head_dim_chunks_cover_and_are_few():
    for head_dim in range(1, 513):
        chunks = head_dim_chunks(head_dim)
        assert len(chunks) <= 2
        assert all(chunk >= 16 and chunk & (chunk - 1) == 0 for chunk in chunks)
        assert sum(chunks) >= head_dim > sum(chunks[:-1]) or head_dim < 16
        assert sum(chunks) <= max(16, 2 ** math.ceil(math.log2(head_dim)))


def _strided(kind: str, t: torch.Tensor) -> torch.Tensor:
    """Return a tensor equal to ``t`` in another layout."""
    batch, heads, rows, columns = t.shape
    if kind == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "every second column":
        wide = torch.empty(batch, heads, rows, 2 * columns, dtype=t.dtype, device=t.device)
        wide[..., ::2] = t
        return wide[..., ::2]
    if kind == "columns far apart":
        return t.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == "2-byte aligned":
        flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)
    assert kind == "slice of a fused projection"
    fused = torch.empty(batch, rows, 3, heads, columns, dtype=t.dtype, device=t.device)
    fused[:, :, 1] = t.transpose(1, 2)
    return fused[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize(
    "kind",
    ["transposed", "every second column", "columns far apart", "2-byte aligned", "slice of a fused projection"],
)
@pytest.mark.parametrize("head_dim", [64, 40] if DEVICE == "cpu" else [64, 80, 128, 256])
def test_any_strides_equal_contiguous_copies_bit_for_bit(kind, head_dim):
    q, k, v, do, dlse = Case(1, 2, 1, 40, 50, head_dim, dtype=torch.float16).tensors(device=DEVICE)
    expected = run(q, k, v, do, dlse, mask_value=mask.causal())
    q, k, v, do = (_strided(kind, t) for t in (q, k, v, do))
    got = run(q, k, v, do, dlse, mask_value=mask.causal())
    for name, ours, want in zip(Result._fields, got, expected, strict=True):
        assert torch.equal(ours, want), name


@pytest.mark.parametrize("seqlen_k", [33, 65])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_expanded_keys_and_gradient(seqlen_k, head_dim):
    """Stride 0 in K, V and in dO (the gradient of a sum)."""
    q, k, v, _, _ = Case(1, 4, 1, seqlen_k, seqlen_k, head_dim, dtype=torch.float16).tensors(device=DEVICE)
    k, v = k.expand(1, 4, -1, -1), v.expand(1, 4, -1, -1)
    do = torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape)
    got = run(q, k, v, do, None, mask_value=mask.causal())
    expected = run(q, k.contiguous(), v.contiguous(), do.contiguous(), None, mask_value=mask.causal())
    for name, ours, want in zip(Result._fields, got, expected, strict=True):
        assert torch.equal(ours, want), name


def test_layout_of_results_follows_the_inputs():
    q, k, v, do, _ = Case(2, 4, 2, 20, 30, 16).tensors(device=DEVICE)
    q, k, v = (_strided("transposed", t) for t in (q, k, v))
    got = run(q, k, v, do, None, mask_value=mask.full())
    for ours, like in ((got.o, q), (got.dq, q), (got.dk, k), (got.dv, v)):
        assert ours.stride() == like.stride()


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale(scale):
    q, k, v, do, dlse = Case(1, 2, 1, 40, 45, 24).tensors(device=DEVICE)
    options = {"softmax_scale": scale, "is_causal": True, "do": do, "dlse": dlse}
    got = run(q, k, v, do, dlse, mask_value=mask.causal(), scale=scale)
    assert_result_accurate(got, reference(q, k, v, **options), plain(q, k, v, **options))


def _square(where, q_idx, k_idx, s, args):
    return args[0] * s * s + 0.01 * (k_idx - q_idx) + 0.1 * where.head


def _square_derivative(where, q_idx, k_idx, s, args):
    return 2 * args[0] * s


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_a_score_is_a_value(is_causal):
    score = Score("square", _square, _square_derivative, (0.7,))
    case = Case(2, 4, 2, 37, 50, 16, is_causal=is_causal)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    options = {"is_causal": is_causal, "score": score, "do": do, "dlse": dlse}
    got = run(q, k, v, do, dlse, mask_value=case.mask, score=score)
    assert_result_accurate(got, reference(q, k, v, **options), plain(q, k, v, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_same_bits_from_run_to_run(dtype):
    tensors = Case(1, 2, 1, 50, 50, 32, dtype=dtype).tensors(device=DEVICE)
    first, second = (run(*tensors, mask_value=mask.causal()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_without_a_key():
    """Causal, more queries than keys: the first rows see nothing."""
    q, k, v, do, dlse = Case(1, 2, 2, 90, 40, 16).tensors(device=DEVICE)
    dlse[:, :, :50] = math.nan  # what logaddexp(-inf, -inf) sends back
    got = run(q, k, v, do, dlse, mask_value=mask.causal())
    assert torch.all(got.o[:, :, :50] == 0)
    assert torch.all(got.lse[:, :, :50] == -math.inf)
    assert torch.all(got.dq[:, :, :50] == 0)
    assert all(t.isfinite().all() for t in (got.dq, got.dk, got.dv))


def test_a_fp16_dot_product_past_65504():
    q = torch.full((1, 1, 4, 128), 32.0, dtype=torch.float16, device=DEVICE)
    v = torch.randn(1, 1, 4, 128, device=DEVICE).half()
    o, lse = forward(q, q, v, softmax_scale=128**-0.5, mask=mask.full())
    assert max_error(o, v.double().mean(2, keepdim=True).expand_as(o)) < 1e-3
    assert max_error(lse, torch.full_like(lse, 11585.2375 + math.log(4)).double()) < 2e-3


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("keys", [1, 3, 70])
def test_huge_logits_are_exact(head_dim, keys):
    """The fused multiply-add of the softmax must not turn the rounding of a product near 1e11 into a power of two."""
    q, k = (torch.full((1, 1, n, head_dim), 133120.0, dtype=torch.bfloat16, device=DEVICE) for n in (3, keys))
    o, lse = forward(q, k, k, softmax_scale=head_dim**-0.5, mask=mask.full())
    assert torch.all(o == 133120)
    assert max_error(lse / (133120.0**2 * head_dim**0.5), torch.ones_like(lse)) < 1e-6
    grads = backward(torch.ones_like(o), q, k, k, o, lse, None, softmax_scale=head_dim**-0.5, mask=mask.full())
    assert all(g.isfinite().all() for g in grads)


def test_huge_logits_with_a_winner():
    """One key wins by far at |logit| around 1e10, positive or negative: its value comes back exactly."""
    for sign in (1.0, -1.0):
        q = torch.full((1, 1, 2, 16), 1e5, device=DEVICE)
        k = sign * torch.full((1, 1, 40, 16), 1e5, device=DEVICE)
        k[0, 0, 33] += 100.0
        v = torch.randn(1, 1, 40, 16, device=DEVICE)
        o, lse = forward(q, k, v, softmax_scale=0.25, mask=mask.full())
        assert torch.equal(o, v[:, :, 33:34].expand_as(o))
        assert lse.isfinite().all()


@pytest.mark.parametrize("seqlen", [64, 192, 704] if DEVICE == "cuda" else [64, 96])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_very_negative_lse_and_a_partial_tile(seqlen, is_causal):
    """Every logit near -120: a key past the end that scored 0 would overflow."""
    case = Case(1, 1, 1, seqlen - 3, seqlen - 3, 64, is_causal=is_causal, dtype=torch.bfloat16)
    q, k, v, do, _ = case.tensors(device=DEVICE)
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -960.0
    got = run(q, k, v, do, None, mask_value=case.mask)
    expected = {"is_causal": is_causal, "do": do}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))


def test_a_single_key_gives_its_value_bit_for_bit():
    for seed in range(8):
        q, k, v, do, _ = (3 * t for t in Case(1, 1, 1, 1, 1, 16, dtype=torch.float16).tensors(seed, DEVICE))
        got = run(q, k, v, do, None, mask_value=mask.causal())
        assert torch.equal(got.o, v)
        assert torch.equal(got.dv, do)
        assert got.dq.abs().max() <= 1e-3
        assert got.dk.abs().max() <= 1e-3


def test_garbage_past_the_end_is_never_read():
    """K and V are views into buffers whose further rows hold NaN."""
    q, k, v, do, _ = Case(1, 2, 2, 40, 45, 64, dtype=torch.float16).tensors(device=DEVICE)
    expected = run(q, k, v, do, None, mask_value=mask.causal())

    def padded(t):
        buffer = torch.full((*t.shape[:2], 128, t.shape[3]), math.nan, dtype=t.dtype, device=t.device)
        buffer[:, :, : t.shape[2]] = t
        return buffer[:, :, : t.shape[2]]

    q, k, v, do = (padded(t) for t in (q, k, v, do))
    got = run(q, k, v, do, None, mask_value=mask.causal())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@settings(max_examples=8 if DEVICE == "cpu" else 100)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    seqlen_q=st.integers(1, 80),
    seqlen_k=st.integers(1, 80),
    head_dim=st.integers(1, 72),
    head_dim_v=st.integers(1, 72),
    is_causal=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_any_problem(heads, seqlen_q, seqlen_k, head_dim, head_dim_v, is_causal, dtype):
    heads_q, heads_kv = heads
    check(Case(1, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, is_causal, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_long_sequences(dtype, head_dim, is_causal):
    check(Case(2, 4, 2, 1111, 1300, head_dim, is_causal=is_causal, dtype=dtype))


@pytest.mark.gpu
def test_more_than_65535_heads():
    q, k, v = (torch.randn(70_001, 1, 20, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    o, lse = forward(q, k, v, softmax_scale=0.25, mask=mask.causal())
    last = slice(69_990, None)
    expected = reference(q[last], k[last], v[last], is_causal=True)
    assert max_error(o[last], expected.o) < 2e-3
    grads = backward(o, q, k, v, o, lse, None, softmax_scale=0.25, mask=mask.causal())
    expected = reference(q[last], k[last], v[last], is_causal=True, do=o[last])
    for got, want in zip(grads, expected[2:], strict=True):
        assert max_error(got[last], want) < 1e-2


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_elements():
    """K, V stored (seqlen, batch, d) and seen batch-first: row stride x row number passes 2**31."""
    batch, seqlen_k, head_dim = 700, 24_000, 128
    q = torch.randn(batch, 1, 256, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (
        torch.randn(seqlen_k, batch, head_dim, device="cuda", dtype=torch.bfloat16).transpose(0, 1).unsqueeze(1)
        for _ in range(2)
    )
    options = {"softmax_scale": head_dim**-0.5, "mask": mask.full()}
    o, lse = forward(q, k, v, **options)
    got = o, lse, *backward(o, q, k, v, o, lse, None, **options)
    q1, k1, v1 = (t[-1:].contiguous() for t in (q, k, v))
    o1, lse1 = forward(q1, k1, v1, **options)
    expected = o1, lse1, *backward(o1, q1, k1, v1, o1, lse1, None, **options)
    for ours, want in zip(got, expected, strict=True):
        assert torch.equal(ours[-1:], want)
