"""The readable reference: online softmax, tiles against the dense formula, gradients of every order."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile.kernel.flash_attention_mock import (
    FlashAttentionMock,
    _flash_attn_backward_compiled,
    blockwise_backward,
    blockwise_forward,
    dense_attention,
    online_softmax,
)
from flashtile.mask import Mask, causal, full
from tests.reference import (
    EMPTY_SHAPES,
    Case,
    Result,
    assert_accurate,
    assert_result_accurate,
    cases,
    max_error,
    plain,
    reference,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


# ------------------------------------------------------------------------------------------------------ online softmax

logits = st.one_of(
    st.floats(-1e4, 1e4, width=32), st.floats(-5, 5, width=32), st.just(-math.inf), st.just(1e30), st.just(-1e30)
)


@given(st.lists(logits, max_size=40), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_online_softmax_equals_softmax_for_any_block_size(row: list[float], block_size: int) -> None:
    x = torch.tensor(row, dtype=torch.float64)
    got = online_softmax(x, block_size)
    if all(value == -math.inf for value in row):
        assert got.tolist() == [0.0] * len(row)
    else:
        torch.testing.assert_close(got, x.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_online_softmax_keeps_shape_and_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2, 37) * 30).to(dtype)
    got = online_softmax(x, 8)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert_accurate(got, x.double().softmax(-1), x.softmax(-1))


# --------------------------------------------------------------------------------------------- tiles against the oracle


@pytest.mark.parametrize("case", cases(dtypes=(torch.float64,)), ids=str)
def test_dense_formula_is_that_of_torch(case: Case) -> None:
    q, k, v, *_ = case.tensors()
    group = case.heads_q // case.heads_kv
    k_idx, q_idx = torch.arange(case.seqlen_k), torch.arange(case.seqlen_q)[:, None]
    mask = (k_idx <= q_idx + case.seqlen_k - case.seqlen_q) if case.is_causal else torch.ones_like(q_idx + k_idx) > 0
    repeated = (x.repeat_interleave(group, 1) for x in (k, v))
    sees_key = mask.any(-1)
    want = F.scaled_dot_product_attention(q, *repeated, attn_mask=mask)[:, :, sees_key]
    o, lse = dense_attention(q, k, v, softmax_scale=case.head_dim**-0.5, mask=case.mask)
    assert max_error(o[:, :, sees_key], want) < 1e-12
    assert (o[:, :, ~sees_key] == 0).all()
    assert (lse[:, :, ~sees_key] == -math.inf).all()


@pytest.mark.parametrize("blocks", [(128, 128), (16, 32), (7, 5)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        *cases(dtypes=DTYPES, causal=(True,)),
        *cases(causal=(False,), head_dims=(1, 40)),
        *cases(shapes=EMPTY_SHAPES),
        Case(2, 6, 2, 50, 70, 24, 40, True),
        Case(0, 2, 2, 5, 5),
    ],
    ids=str,
)
def test_tiles_equal_the_dense_formula(case: Case, blocks: tuple[int, int]) -> None:
    q, k, v, do, dlse = case.tensors()
    options = {"softmax_scale": case.head_dim**-0.5, "mask": case.mask, "block_q": blocks[0], "block_k": blocks[1]}
    o, lse = blockwise_forward(q, k, v, **options)
    grads = blockwise_backward(do, q, k, v, o, lse, dlse, **options)
    assert [x.dtype for x in (o, *grads)] == [case.dtype] * 4
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    given = {"is_causal": case.is_causal, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **given), plain(q, k, v, **given))


def test_memory_is_linear_in_length() -> None:
    n, d, block = 512, 8, 32
    q, k, v, do = (torch.randn(1, 1, n, d) for _ in range(4))
    options = {"softmax_scale": 1.0, "mask": causal(), "block_q": block, "block_k": block}
    with LargestTensor() as largest:
        o, lse = blockwise_forward(q, k, v, **options)
        blockwise_backward(do, q, k, v, o, lse, None, **options)
    assert largest.numel <= n * d


def test_causal_skips_the_tiles_above_the_diagonal() -> None:
    asked = []

    def predicate(where, q_idx, k_idx, args):
        asked.append((q_idx[0].item(), k_idx[0, 0].item()))
        return causal().predicate(where, q_idx, k_idx, args)

    counting = Mask("counting", predicate, causal().key_range, causal().query_range)
    q, k, v = (torch.randn(1, 1, 64, 4) for _ in range(3))
    o, _ = blockwise_forward(q, k, v, softmax_scale=0.5, mask=counting, block_q=16, block_k=16)
    assert asked == [(0, 0), (16, 16), (32, 32), (48, 48)], "only tiles that the diagonal cuts ask the predicate"
    assert max_error(o, reference(q, k, v, is_causal=True, softmax_scale=0.5).o) < 1e-5


def test_ranges_may_differ_between_heads() -> None:
    """A mask that reads ``where.head``: head 0 sees everything, head h only the first h keys."""

    def predicate(where, q_idx, k_idx, args):
        return (k_idx < where.head) | (where.head + q_idx * 0 == 0)

    def key_range(where, q_lo, q_hi, args):
        hi = where.seqlen_k if where.head == 0 else where.head
        return 0, 0, hi, hi

    def query_range(where, k_lo, k_hi, args):
        return 0, where.seqlen_q, where.seqlen_q, where.seqlen_q

    mask = Mask("first keys", predicate, key_range, query_range)
    q, k, v, do, dlse = Case(2, 3, 3, 9, 9).tensors()
    o, lse = blockwise_forward(q, k, v, softmax_scale=1.0, mask=mask, block_q=4, block_k=2)
    grads = blockwise_backward(do, q, k, v, o, lse, dlse, softmax_scale=1.0, mask=mask, block_q=4, block_k=2)
    given = {"softmax_scale": 1.0, "mask": mask, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **given), plain(q, k, v, **given))


def test_nothing_flows_from_a_query_that_sees_no_key() -> None:
    q, k, v, do, dlse = Case(seqlen_q=7, seqlen_k=3, is_causal=True).tensors()
    options = {"softmax_scale": 0.25, "mask": causal()}
    o, lse = blockwise_forward(q, k, v, **options)
    want = blockwise_backward(do, q, k, v, o, lse, dlse, **options)
    do[:, :, :4], dlse[:, :, :4] = math.nan, math.nan
    got = blockwise_backward(do, q, k, v, o, lse, dlse, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (got[0][:, :, :4] == 0).all()


# ------------------------------------------------------------------------------------------------ the autograd function


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 5), (5, 3), (1, 1)], ids=str)
def test_gradients_by_finite_differences(lengths: tuple[int, int], is_causal: bool, naive: bool) -> None:
    sq, sk = lengths
    q, k, v = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (sq, sk, sk))

    def attend(*qkv: Tensor) -> Tensor:
        return FlashAttentionMock.apply(*qkv, is_causal, naive)

    assert torch.autograd.gradcheck(attend, (q, k, v))
    if naive:
        assert torch.autograd.gradgradcheck(attend, (q, k, v))


def test_second_derivative_of_tiles_is_refused_in_words() -> None:
    q = torch.randn(1, 4, 4, requires_grad=True)
    o = FlashAttentionMock.apply(q, q, q)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not twice differentiable.*naive=True"):
        dq.pow(2).sum().backward()


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dimensions_come_back(leading: tuple[int, ...], naive: bool) -> None:
    q, k, v = (torch.randn(*leading, n, 8, requires_grad=True) for n in (13, 17, 17))
    o = FlashAttentionMock.apply(q, k, v, True, naive)
    saved = [tuple(x.shape) for x in o.grad_fn.saved_tensors]
    assert saved.count((*leading, 13)) == 1
    assert len(saved) == 5
    do = torch.randn_like(o)
    got = Result(o, o.grad_fn.saved_tensors[-1], *torch.autograd.grad(o, (q, k, v), do))
    as_heads = [x.detach().reshape(1, -1, *x.shape[-2:]) for x in (q, k, v, do)]
    want = reference(*as_heads[:3], is_causal=True, do=as_heads[3])
    for ours, oracle in zip(got, want, strict=True):
        assert max_error(ours.reshape(oracle.shape), oracle) < 1e-5


@pytest.mark.parametrize("naive", [False, True])
def test_grouped_heads_and_narrow_values(naive: bool) -> None:
    q, k, v, do, _ = Case(2, 6, 2, 19, 23, 8, 5, True).tensors()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = FlashAttentionMock.apply(q, k, v, True, naive)
    got = Result(o, o.grad_fn.saved_tensors[-1], *torch.autograd.grad(o, (q, k, v), do))
    given = {"is_causal": True, "do": do}
    assert_result_accurate(got, reference(q, k, v, **given), plain(q, k, v, **given))


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_empty_tensors(shape: tuple[int, int, int], naive: bool) -> None:
    batch, sq, sk = shape
    q, k, v = (torch.randn(batch, n, 4, requires_grad=True) for n in (sq, sk, sk))
    o = FlashAttentionMock.apply(q, k, v, False, naive)
    assert o.shape == q.shape
    assert (o == 0).all()
    assert (o.grad_fn.saved_tensors[-1] == -math.inf).all()
    for x, grad in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_both_branches_agree(is_causal: bool) -> None:
    q, k, v = (torch.randn(3, 300, 16, dtype=torch.float64) for _ in range(3))
    tiles = FlashAttentionMock.apply(q, k, v, is_causal)
    assert max_error(tiles, FlashAttentionMock.apply(q, k, v, is_causal, True)) < 1e-12


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_backward_is_the_same_mathematics() -> None:
    q, k, v = (torch.randn(2, 3, n, 8) for n in (21, 13, 13))
    o, lse = blockwise_forward(q, k, v, softmax_scale=8**-0.5, mask=causal())
    do = torch.randn_like(o)
    got = _flash_attn_backward_compiled(q, k, v, o, do, lse, True)
    want = reference(q, k, v, is_causal=True, do=do)
    for ours, oracle in zip(got, want[2:], strict=True):
        assert max_error(ours, oracle) < 1e-5


def test_full_mask_is_the_default() -> None:
    q, k, v = (torch.randn(2, 6, 4) for _ in range(3))
    want, _ = dense_attention(*(x[None] for x in (q, k, v)), softmax_scale=0.5, mask=full())
    assert max_error(FlashAttentionMock.apply(q, k, v), want[0]) < 1e-6


DERIVATION = Path(__file__).parents[2] / "docs" / "derivation.md"
LINKS = re.findall(r"\[`(\w+)`\]\((\.\./[\w/.]+\.py)\)", DERIVATION.read_text())


@pytest.mark.parametrize(("name", "path"), sorted(set(LINKS)))
def test_the_derivation_points_at_code_that_exists(name: str, path: str) -> None:
    assert re.search(rf"^ *(def|class) {name}\b", (DERIVATION.parent / path).read_text(), re.MULTILINE)
