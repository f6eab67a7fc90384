"""The CPU path: both of its ways give the reference's answers, and torch's kernel is called wherever it may be.

The second half holds faults met in other libraries (the thread is named at each), on the tiles and on the CPU path.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile.kernel import flash_attention_cpu, flash_attention_mock
from flashtile.kernel.layout import empty_in_order_of
from flashtile.mask import Mask, causal, full
from flashtile.score import Score, identity
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

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PASSES = {
    "tiles": (flash_attention_mock.blockwise_forward, flash_attention_mock.blockwise_backward),
    "cpu": (flash_attention_cpu.forward, flash_attention_cpu.backward),
}
FORWARD_OP = "_scaled_dot_product_flash_attention_for_cpu"
on_both = pytest.mark.parametrize("name", PASSES)


class Watch(TorchDispatchMode):
    """Records the operators called and the largest tensor they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def attend(name: str, q, k, v, do=None, dlse=None, *, mask: Mask, score=None, softmax_scale=None) -> Result:
    """Run one of PASSES, forward and backward; without ``do`` its gradient is 0."""
    forward, backward = PASSES[name]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    o, lse = forward(q, k, v, softmax_scale=scale, mask=mask, score=score)
    do = torch.zeros_like(o) if do is None else do
    return Result(o, lse, *backward(do, q, k, v, o, lse, dlse, softmax_scale=scale, mask=mask, score=score))


def check(got: Result, q, k, v, do, dlse=None, **given) -> None:
    given = {"do": do, "dlse": dlse, **given}
    assert_result_accurate(got, reference(q, k, v, **given), plain(q, k, v, **given))


# ---------------------------------------------------------------------------------------------------- the same answers


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        *cases(dtypes=DTYPES),
        *cases(shapes=EMPTY_SHAPES),
        *(Case(1, 2, 2, 40, 40, d, dv, True) for d, dv in [(1, 1), (1, 3), (7, 5), (24, 40), (192, 128), (256, 256)]),
        Case(1, 32, 1, 64, 64, 32, None, True, torch.bfloat16),
        Case(1, 32, 1, 64, 64, 32, None, True, torch.float16),
        Case(1, 2, 2, 700, 700, 32, None, True, torch.bfloat16),
        Case(1, 1, 1, 300, 500, 8, None, True),
        Case(1, 1, 1, 500, 300, 8, None, True),
        Case(0, 2, 2, 5, 5),
    ],
    ids=str,
)
def test_answers_are_the_reference_s(case: Case, with_dlse: bool) -> None:
    q, k, v, do, dlse = case.tensors()
    dlse = dlse if with_dlse else None
    got = attend("cpu", q, k, v, do, dlse, mask=case.mask)
    assert [x.dtype for x in (got.o, *got[2:])] == [case.dtype] * 4
    assert got.lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert got.lse.is_contiguous()
    check(got, q, k, v, do, dlse, is_causal=case.is_causal)


@pytest.mark.parametrize(
    ("case", "fast"),
    [
        (Case(), True),
        (Case(is_causal=True), True),
        (Case(seqlen_q=17, seqlen_k=130), True),
        (Case(seqlen_q=1, seqlen_k=70, is_causal=True), True),
        (Case(heads_q=6, head_dim_v=24, dtype=torch.bfloat16), True),
        (Case(seqlen_q=17, seqlen_k=18, is_causal=True), False),
        (Case(seqlen_q=18, seqlen_k=17, is_causal=True), False),
        (Case(seqlen_k=0), False),
    ],
    ids=str,
)
def test_torch_s_kernel_is_called_where_it_means_the_same(case: Case, fast: bool) -> None:
    q, k, v, do, dlse = case.tensors()
    with Watch() as watch:
        got = attend("cpu", q, k, v, do, dlse, mask=case.mask)
    assert (FORWARD_OP in watch.ops) == fast
    assert (f"{FORWARD_OP}_backward" in watch.ops) == fast
    check(got, q, k, v, do, dlse, is_causal=case.is_causal)


@pytest.mark.parametrize("lengths", [(33, 33), (17, 130), (130, 17), (1, 9)], ids=str)
def test_torch_s_kernel_serves_masks_aligned_top_left(lengths: tuple[int, int]) -> None:
    q, k, v, do, dlse = Case(2, 4, 2, *lengths).tensors()
    mask = causal("top_left")
    renamed = Mask("renamed", mask.predicate, mask.key_range, mask.query_range)
    with Watch() as watch:
        got = attend("cpu", q, k, v, do, dlse, mask=renamed)
    assert FORWARD_OP in watch.ops
    assert f"{FORWARD_OP}_backward" in watch.ops
    check(got, q, k, v, do, dlse, mask=renamed)


def test_a_score_is_never_dropped() -> None:
    q, k, v, do, _ = Case().tensors()
    with Watch() as watch:
        got = attend("cpu", q, k, v, do, mask=full(), score=softcap(0.5))
    assert FORWARD_OP not in watch.ops
    check(got, q, k, v, do, score=softcap(0.5))


@pytest.mark.parametrize("lengths", [(1024, 1024), (1024, 1025)], ids=["torch's kernel", "tiles"])
def test_memory_is_linear_in_length(lengths: tuple[int, int]) -> None:
    q, k, v, do, dlse = Case(1, 1, 1, *lengths, head_dim=32).tensors()
    with Watch() as watch:
        attend("cpu", q, k, v, do, dlse, mask=causal())
    assert watch.numel <= 40 * max(lengths)


@pytest.mark.parametrize("softmax_scale", [-0.5, 0.0, 1.0])
@pytest.mark.parametrize("score", [None, identity()], ids=["no score", "identity"])
@on_both
def test_any_scale(name: str, score: Score | None, softmax_scale: float) -> None:
    q, k, v, do, dlse = Case().tensors()
    got = attend(name, q, k, v, do, dlse, mask=causal(), score=score, softmax_scale=softmax_scale)
    check(got, q, k, v, do, dlse, mask=causal(), softmax_scale=softmax_scale)


def layouts() -> dict:
    """Return (q, k, v, do) in memory layouts that a caller may have, each ``(2, 4, 33, 16)``."""
    packed = torch.randn(2, 33, 3, 4, 16).permute(2, 0, 3, 1, 4)
    plain_q, plain_do = torch.randn(2, 4, 33, 16), torch.randn(2, 4, 33, 16)
    one_head = torch.randn(2, 1, 33, 16).expand(2, 4, 33, 16)
    one_key = torch.randn(2, 4, 1, 16).expand(2, 4, 33, 16)
    spaced = torch.randn(2, 4, 33, 32)[..., ::2]
    columns = torch.randn(2, 4, 16, 33).mT
    offset = torch.randn(2 * 4 * 33 * 16 + 1)[1:].view(2, 4, 33, 16)
    return {
        "fused projection": (*packed, plain_do.mT.contiguous().mT),
        "expanded heads": (plain_q, one_head, one_head, torch.ones(()).expand(2, 4, 33, 16)),
        "expanded keys": (one_key, one_key, one_key, plain_do),
        "last stride 2": (spaced, spaced, spaced, spaced),
        "column-major": (columns, columns, columns, columns),
        "odd offset": (offset, offset, offset, plain_do.transpose(0, 1).contiguous().transpose(0, 1)),
    }


@pytest.mark.parametrize("mask", [full(), causal()], ids=lambda mask: mask.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", layouts())
@on_both
def test_strides_do_not_matter(name: str, layout: str, dtype: torch.dtype, mask: Mask) -> None:
    """pytorch#191937 (expanded heads), flash-attention#355 (do with strides), #2541 (a fused projection's slices)."""
    q, k, v, do = (x if dtype == x.dtype else x.to(dtype) for x in layouts()[layout])
    got = attend(name, q, k, v, do, mask=mask)
    want = attend(name, *(x.contiguous() for x in (q, k, v, do)), mask=mask)
    for field, ours, theirs in zip(Result._fields, got, want, strict=True):
        assert torch.equal(ours, theirs), field


def test_results_lie_in_memory_as_the_inputs_do() -> None:
    q, k, v, do = (torch.randn(2, 9, 3, 8).transpose(1, 2) for _ in range(4))
    for mask in (full(), causal()):
        got = attend("cpu", q, k[:, :, :7], v[:, :, :7], do, mask=mask)
        assert got.o.stride() == empty_in_order_of(q, q.shape).stride()
        assert got.dq.stride() == q.stride()
        assert got.dk.stride() == got.dv.stride() == empty_in_order_of(k, (2, 3, 7, 8)).stride()


# ---------------------------------------------------------------------------------------- faults met in other libraries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_both
def test_rows_without_a_key_are_zero_and_pass_nothing(name: str, dtype: torch.dtype) -> None:
    """pytorch#103963: rows 0-3 see keys 0-3, rows 4-7 see nothing."""
    mask = Mask(
        "upper left",
        lambda where, q_idx, k_idx, args: (q_idx < 4) & (k_idx < 4),
        lambda where, q_lo, q_hi, args: (0, 4, 0, 4),
        lambda where, k_lo, k_hi, args: (0, 4, 0, 4),
    )
    q, k, v, _, _ = Case(1, 1, 1, 8, 8, 8, dtype=dtype).tensors()
    do = torch.ones_like(q)
    got = attend(name, q, k, v, do, mask=mask)
    check(got, q, k, v, do, mask=mask)
    assert (got.o[:, :, 4:] == 0).all()
    assert (got.lse[:, :, 4:] == -math.inf).all()
    for grad in got[2:]:
        assert (grad[:, :, 4:] == 0).all()
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@on_both
def test_huge_finite_logits(name: str, dtype: torch.dtype) -> None:
    """pytorch#121558: q = k = v = 133120."""
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=dtype)
    got = attend(name, x, x, x, torch.ones_like(x), mask=full())
    assert (got.o == 133120).all()
    assert got.lse.item() == pytest.approx(133120**2 * 8, rel=1e-6)
    assert (got.dv == 1).all()
    assert (got.dq == 0).all()
    assert (got.dk == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen", "head_dim"), [(64, 64), (192, 64), (704, 64), (128, 64), (640, 64), (65, 16), (33, 5)]
)
@on_both
def test_all_logits_far_below_zero(name: str, seqlen: int, head_dim: int, is_causal: bool) -> None:
    """pytorch#196678: every lse is near -120; a padded column of the last tile would weigh exp(120)."""
    case = Case(1, 1, 1, seqlen, seqlen, head_dim, None, is_causal)
    q, k, v, do, _ = case.tensors()
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120 * head_dim**0.5
    q, k, v, do = (x.bfloat16() for x in (q, k, v, do))
    got = attend(name, q, k, v, do, mask=case.mask)
    assert got.lse.max() < -88.7
    check(got, q, k, v, do, is_causal=is_causal)


@pytest.mark.parametrize("factor", [1e3, 1e5, 1e6])
@pytest.mark.parametrize("is_causal", [False, True])
@on_both
def test_nothing_overflows_at_huge_logits(name: str, is_causal: bool, factor: float) -> None:
    """Weights recomputed from an lse that fp32 cannot resolve are at most 1, never exp of a rounding error."""
    for case in (Case(1, 2, 1, 300, 300, 64), Case(1, 2, 2, 700, 700, 16), Case(1, 4, 1, 1, 513, 64)):
        q, k, v, do, dlse = case.tensors()
        got = attend(name, q * factor, k * factor, v, do, dlse, mask=causal() if is_causal else full())
        assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("head_dim", [16, 1, 5, 64, 256])
@on_both
def test_one_token(name: str, head_dim: int) -> None:
    """flash-attention#334: one key has weight 1 whatever the logit; 512 draws, as a batch and alone."""
    q, k, v = ((torch.randn(512, 1, 1, head_dim) * 3).half() for _ in range(3))
    do = torch.ones_like(q)
    for rows in (slice(None), slice(7, 8)):
        got = attend(name, q[rows], k[rows], v[rows], do[rows], mask=causal())
        assert torch.equal(got.o, v[rows])
        assert torch.equal(got.dv, do[rows])
        assert max(got.dq.abs().max(), got.dk.abs().max()) <= 1e-3


def softcap(cap: float) -> Score:
    return Score(
        f"softcap {cap}",
        lambda where, q_idx, k_idx, s, args: args[0] * torch.tanh(s / args[0]),
        lambda where, q_idx, k_idx, s, args: 1 - torch.tanh(s / args[0]) ** 2,
        (cap,),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_both
def test_softcap_saturates(name: str, dtype: torch.dtype) -> None:
    """vllm#56578: logits 10, 4416, 4992, -9984 under a cap of 50."""
    q, k = torch.zeros(1, 1, 1, 4, dtype=dtype), torch.zeros(1, 1, 4, 4, dtype=dtype)
    q[..., 0] = 1.0
    k[0, 0, :, 0] = torch.tensor([10.0, 4416.0, 4992.0, -9984.0])
    v, do = torch.eye(4, dtype=dtype)[None, None], torch.randn(1, 1, 1, 4).to(dtype)
    got = attend(name, q, k, v, do, mask=full(), score=softcap(50.0), softmax_scale=1.0)
    assert max_error(got.o, torch.tensor([0.0, 0.5, 0.5, 0.0]).view(1, 1, 1, 4)) < 1e-6
    assert max(got.dq.abs().max(), got.dk.abs().max()) < 1e-6
    assert got.dv.isfinite().all()


def test_softcap_s_derivative_by_finite_differences() -> None:
    q, k, v, do, dlse = Case(2, 4, 2, 9, 11, 8, None, True, torch.float64).tensors()
    check(attend("tiles", q, k, v, do, dlse, mask=causal(), score=softcap(0.7)), q, k, v, do, dlse,
          is_causal=True, score=softcap(0.7))  # fmt: skip


@on_both
def test_products_beyond_fp16_s_range(name: str) -> None:
    """ultralytics#24990: raw products are 131072, fp16 ends at 65504."""
    q, v = torch.full((1, 1, 4, 128), 32.0, dtype=torch.float16), torch.randn(1, 1, 4, 128).half()
    got = attend(name, q, q, v, torch.ones_like(v), mask=full())
    assert max_error(got.o, v.double().mean(2, keepdim=True).expand_as(v)) < 2e-3
    assert max_error(got.lse, torch.full((1, 1, 4), 131072 * 128**-0.5 + math.log(4))) < 2e-3
    assert all(grad.isfinite().all() for grad in got[2:])


@on_both
def test_more_queries_than_keys(name: str) -> None:
    """flash-attention#1778: the first queries see nothing."""
    _, k, v, do, _ = Case(1, 1, 1, 5, 2, 4).tensors()
    got = attend(name, torch.zeros(1, 1, 5, 4), k, v, do, mask=causal())
    assert (got.o[:, :, :3] == 0).all()
    assert (got.lse[:, :, :3] == -math.inf).all()
    assert (got.dq[:, :, :3] == 0).all()
    assert max_error(got.o[:, :, 3], v[:, :, 0]) < 1e-6
    assert max_error(got.o[:, :, 4], v.mean(2)) < 1e-6


@on_both
def test_many_more_queries_than_keys(name: str) -> None:
    q, k, v, do, _ = Case(1, 1, 1, 2048, 1024, 8).tensors()
    got = attend(name, q, k, v, do, mask=causal())
    last = [x[:, :, 1024:] for x in (q, do)]
    want = attend(name, last[0], k, v, last[1], mask=causal())
    assert (got.o[:, :, :1024] == 0).all()
    assert (got.dq[:, :, :1024] == 0).all()
    assert max_error(got.o[:, :, 1024:], want.o) < 1e-5
    assert max_error(got.dk, want.dk) < 1e-4
    assert max_error(got.dv, want.dv) < 1e-4


@on_both
def test_one_causal_query_sees_the_whole_cache(name: str) -> None:
    """pytorch#144858: not only the first key, as a top-left mask would have it."""
    q, k, v, do, dlse = Case(2, 4, 2, 1, 16).tensors()
    got = attend(name, q, k, v, do, dlse, mask=causal())
    want = attend(name, q, k, v, do, dlse, mask=full())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    check(got, q, k, v, do, dlse)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3952, 16), (2, 0, 16), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mask", [full(), causal()], ids=lambda mask: mask.name)
@on_both
def test_lengths_of_zero(name: str, mask: Mask, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """flash-attention#1159, xformers#852."""
    q, k, v, do, dlse = Case(batch, 10, 10, seqlen_q, seqlen_k, 64, dtype=torch.float16).tensors()
    got = attend(name, q, k, v, do, dlse, mask=mask)
    assert [x.shape for x in got] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]
    assert all((x == 0).all() for x in (got.o, got.dq, got.dk, got.dv))
    assert (got.lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_both
def test_gradient_of_lse(name: str, dtype: torch.dtype) -> None:
    """flash-attention#1817: loss = mean(lse) has dq = scale P K / N, dk = scale P^T Q / N, dv = 0."""
    q, k, v, _, _ = Case(2, 4, 4, 64, 64, 64, dtype=dtype).tensors()
    count = 2 * 4 * 64
    got = attend(name, q, k, v, None, torch.full((2, 4, 64), 1 / count), mask=full())
    p = (q.double() @ k.double().mT / 8).softmax(-1)
    eps = 8 * torch.finfo(dtype).eps
    for ours, want in ((got.dq, p @ k.double() / 8 / count), (got.dk, p.mT @ q.double() / 8 / count)):
        assert max_error(ours, want) <= eps * want.abs().max().item()
    assert (got.dv == 0).all()


@on_both
def test_lse_is_in_natural_units(name: str) -> None:
    """pytorch#181645: ln 8, neither log2 8 nor ln 8 / log2 e."""
    _, k, v, _, _ = Case(1, 1, 1, 4, 8).tensors()
    got = attend(name, torch.zeros(1, 1, 4, 16), k, v, mask=full())
    assert max_error(got.lse, torch.full((1, 1, 4), math.log(8))) < 1e-6
