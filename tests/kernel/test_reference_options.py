"""Sinks, dropout and packed sequences in the reference and on the CPU path, gradients included."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashtile.dropout import Dropout, keep_mask
from flashtile.kernel import flash_attention_cpu
from flashtile.kernel.flash_attention_mock import blockwise_backward, blockwise_forward, dense_attention
from flashtile.kernel.sinks import join_sinks, row_delta, sink_gradient
from flashtile.mask import Mask, causal, full
from flashtile.score import Score
from flashtile.seqlen import Seqlens, Where
from tests.kernel.test_cpu import FORWARD_OP, Watch
from tests.reference import Case, Result, assert_accurate, assert_result_accurate, max_error, plain, reference
from tests.test_mask import MASKS


class Passes(NamedTuple):
    forward: Any
    backward: Any
    blocks: dict


PASSES = {
    "tiles": Passes(blockwise_forward, blockwise_backward, {}),
    "small tiles": Passes(blockwise_forward, blockwise_backward, {"block_q": 7, "block_k": 5}),
    "cpu": Passes(flash_attention_cpu.forward, flash_attention_cpu.backward, {}),
}
on_all = pytest.mark.parametrize("name", PASSES)
both_masks = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def attend(name: str, q, k, v, do, dlse=None, *, sinks=None, **options: Any) -> Result:
    """Run one of PASSES, forward and backward."""
    forward, backward, blocks = PASSES[name]
    options = {"softmax_scale": q.shape[-1] ** -0.5, "mask": full(), **options, **blocks}
    o, lse = forward(q, k, v, sinks=sinks, **options)
    grads = backward(do, q, k, v, o, lse, dlse, **options)
    dsinks = None if sinks is None else sink_gradient(sinks, lse, row_delta(do, o, dlse, lse.dtype))
    return Result(o, lse, *grads, dsinks=dsinks)


def check(got: Result, q, k, v, do, dlse=None, **given: Any) -> None:
    given = {"do": do, "dlse": dlse, **given}
    assert_result_accurate(got, reference(q, k, v, **given), plain(q, k, v, **given))


def dropout_of(p: float = 0.3, seed: int = 2**40 + 17) -> Dropout:
    return Dropout(p, torch.tensor([seed]))


def distance_score() -> Score:
    """A score that sees every index: batch, head, query and key."""

    def forward(where, q_idx, k_idx, s, args):
        return s * args[0] + (q_idx - k_idx) * (where.head + 1) * 0.02 - k_idx * where.batch * 0.03

    return Score("distance", forward, lambda where, q_idx, k_idx, s, args: args[0], (0.8,))


# ---------------------------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(33, 33), (40, 21), (1, 9), (5, 0)], ids=str)
@both_masks
@on_all
def test_sinks(name: str, is_causal: bool, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(2, 6, 2, *lengths, 16, 8, is_causal, dtype)
    q, k, v, do, dlse = case.tensors()
    sinks = torch.randn(6).to(dtype)
    got = attend(name, q, k, v, do, dlse, mask=case.mask, sinks=sinks)
    assert got.dsinks.dtype == dtype
    assert [x.dtype for x in (got.o, got.dq, got.dk, got.dv)] == [dtype] * 4
    check(got, q, k, v, do, dlse, is_causal=is_causal, sinks=sinks)


@on_all
def test_a_sink_is_a_key_whose_value_is_zero(name: str) -> None:
    q, k, v, do, dlse = Case(2, 4, 4, 9, 12, 8, dtype=torch.float64).tensors()
    key, zero = torch.randn(1, 4, 1, 8, dtype=torch.float64), torch.zeros(2, 4, 1, 8, dtype=torch.float64)
    q = q[:, :, :1].expand(2, 4, 9, 8)[:1].expand(2, 4, 9, 8).contiguous()  # one query, so that its logit is a number
    sinks = (q[0, :, 0] * key[0, :, 0]).sum(-1) * 8**-0.5
    got = attend(name, q, k, v, do, dlse, sinks=sinks)
    want = attend(name, q, torch.cat([k, key.expand(2, 4, 1, 8)], 2), torch.cat([v, zero], 2), do, dlse)
    assert max_error(got.o, want.o) < 1e-12
    assert max_error(got.lse, want.lse) < 1e-12
    assert max_error(got.dk, want.dk[:, :, :-1]) < 1e-12
    assert max_error(got.dv, want.dv[:, :, :-1]) < 1e-12


@on_all
def test_queries_without_keys_see_the_sink(name: str) -> None:
    q, k, v, do, dlse = Case(2, 2, 2, 7, 3).tensors()
    sinks = torch.tensor([1.5, -2.0])
    got = attend(name, q, k, v, do, dlse, mask=causal(), sinks=sinks)
    assert (got.o[:, :, :4] == 0).all()
    assert torch.equal(got.lse[:, :, :4], sinks[:, None].expand(2, 2, 4))
    assert (got.dq[:, :, :4] == 0).all()
    only_empty = torch.zeros_like(dlse)
    only_empty[:, :, :4] = dlse[:, :, :4]
    got = attend(name, q, k, v, torch.zeros_like(do), only_empty, mask=causal(), sinks=sinks)
    assert max_error(got.dsinks, only_empty.sum((0, 2))) < 1e-6


@pytest.mark.parametrize("lengths", [(9, 9), (9, 4)], ids=str)
@on_all
def test_a_sink_of_minus_infinity_is_none(name: str, lengths: tuple[int, int]) -> None:
    q, k, v, do, dlse = Case(2, 2, 2, *lengths).tensors()
    got = attend(name, q, k, v, do, dlse, mask=causal(), sinks=torch.full((2,), -math.inf))
    want = attend(name, q, k, v, do, dlse, mask=causal())
    for ours, theirs in zip(got, want, strict=True):
        assert max_error(ours, theirs) < 1e-6
    assert (got.dsinks == 0).all()


@pytest.mark.parametrize("sink", [-1e30, -1e4, 1e4, 3e6, 1e30])
@on_all
def test_huge_sinks(name: str, sink: float) -> None:
    q, k, v, do, dlse = Case(1, 2, 2, 9, 9).tensors()
    got = attend(name, q, k, v, do, dlse, sinks=torch.full((2,), sink))
    want = reference(q, k, v, sinks=torch.full((2,), sink), do=do, dlse=dlse)
    for ours, theirs in zip((*got, got.dsinks), (*want, want.dsinks), strict=True):
        assert ours.isfinite().all()
        assert max_error(ours, theirs) <= 1e-5 * max(1.0, theirs.abs().max().item())


def test_joining_sinks_where_there_is_nothing() -> None:
    o, lse = join_sinks(torch.tensor([-math.inf, 2.0]), torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -math.inf))
    assert (o == 0).all()
    assert lse.flatten().tolist() == [-math.inf, 2.0]


# -------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@both_masks
@on_all
def test_dropout(name: str, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v, do, dlse = Case(2, 6, 2, 40, 33, 16, 8, is_causal, dtype).tensors()
    given = {"mask": causal() if is_causal else full(), "dropout": dropout_of(), "score": distance_score()}
    check(attend(name, q, k, v, do, dlse, **given), q, k, v, do, dlse, **given)


def test_everything_drops_the_same_weights() -> None:
    """With v the identity o shows the weights: kept ones are positive, dropped ones exactly zero."""
    q, k, *_ = Case(2, 4, 2, 50, 60, 8).tensors()
    v, dropout = torch.eye(60).expand(2, 2, 60, 60), dropout_of(0.4)
    where = Where(torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1), 50, 60)
    want = keep_mask(dropout.seed, where, torch.arange(50)[:, None], torch.arange(60), 0.4)
    options = {"softmax_scale": 0.3, "mask": full(), "dropout": dropout}
    outputs = [forward(q, k, v, **options, **blocks) for forward, _, blocks in PASSES.values()]
    outputs.append(dense_attention(q, k, v, **options))
    _, undropped = dense_attention(q, k, v, softmax_scale=0.3, mask=full())
    for o, lse in outputs:
        assert torch.equal(o != 0, want)
        assert max_error(lse, undropped) < 1e-5, "the log-sum-exp is that of the softmax before dropout"
        assert max_error(o, outputs[0][0]) < 1e-5


@on_all
def test_dropout_is_repeatable_and_its_seed_matters(name: str) -> None:
    q, k, v, do, dlse = Case().tensors()
    one, again, other = (attend(name, q, k, v, do, dlse, dropout=dropout_of(0.5, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert max_error(one.o, other.o) > 0.1
    assert torch.equal(one.lse, other.lse)


@on_all
def test_dropping_nothing_changes_nothing(name: str) -> None:
    q, k, v, do, dlse = Case(2, 4, 2, 33, 40).tensors()
    got = attend(name, q, k, v, do, dlse, dropout=dropout_of(0.0))
    for ours, theirs in zip(got, attend(name, q, k, v, do, dlse), strict=True):
        assert max_error(ours, theirs) < 1e-5


# ------------------------------------------------------------------------------------------------------------ all of it


@pytest.mark.parametrize("lengths", [(3, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", ["dense", "small tiles"])
def test_first_and_second_derivatives_by_autograd(name: str, with_sinks: bool, lengths: tuple[int, int]) -> None:
    q, k, v, _, _ = Case(1, 2, 1, *lengths, 3, None, True, torch.float64).tensors()
    sinks = torch.randn(2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in ((q, k, v, sinks) if with_sinks else (q, k, v))]
    options = {"softmax_scale": 0.7, "mask": causal(), "score": distance_score(), "dropout": dropout_of()}

    def run(q, k, v, sinks=None):
        if name == "dense":
            o, lse = dense_attention(q, k, v, sinks=sinks, **options)
        else:
            o, lse = blockwise_forward(q, k, v, sinks=sinks, **options, block_q=3, block_k=2)
        return o, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_second_derivatives_of_packed_sequences() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 4])
    q, k, v = (torch.randn(1, 1, n, 3, dtype=torch.float64, requires_grad=True) for n in (6, 5, 5))

    def run(q, k, v):
        o, _ = dense_attention(q, k, v, softmax_scale=0.7, mask=causal(), seqlens=Seqlens(cu_q, cu_k))
        return o

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradgradcheck(run, (q, k, v))


@given(st.data())
@settings(max_examples=60)
def test_any_combination(data: st.DataObject) -> None:
    """Lengths, heads, widths, dtype, mask, score, sinks, dropout and packing, drawn together."""
    draw = data.draw
    # Not half precision: delta is made from the o that was saved, so that a row of one dropped-out key, whose dq is 0,
    # shows the rounding of o, which plain PyTorch's backward never sees. Longer rows are above.
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "mask": draw(st.sampled_from(MASKS)),
        "score": draw(st.sampled_from([None, distance_score()])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-2, 2, heads_kv * group)])),
        "dropout": draw(st.sampled_from([None, dropout_of(0.2), dropout_of(0.8)])),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2))
        sides = [[pair[side] for pair in lengths] for side in (0, 1)]
        at = packed(*sides, heads_q=heads_kv * group, heads_kv=heads_kv, dtype=dtype)
        tensors, options["seqlens"] = at[:5], at.seqlens
    else:
        seqlen_q, seqlen_k, head_dim, head_dim_v = (draw(st.integers(lo, 9 + 11 * lo)) for lo in (0, 0, 1, 1))
        case = Case(2, heads_kv * group, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype=dtype)
        tensors = case.tensors()
    got = attend(draw(st.sampled_from(list(PASSES))), *tensors, **options)
    check(got, *tensors, **options)


# ----------------------------------------------------------------------------------------------------- packed sequences


class Packed(NamedTuple):
    """Packed tensors with ``tail`` rows of NaN behind the last sequence, and where the sequences lie."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    seqlens: Seqlens


def packed(
    lengths_q, lengths_k, *, heads_q=4, heads_kv=2, head_dim=8, used_q=None, used_k=None, tail=3, dtype=torch.float32
) -> Packed:
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k))

    def tensor(total: int, heads: int, *last: int) -> Tensor:
        x = torch.randn(total + tail, heads, *last).to(dtype)
        x[total:] = math.nan
        return x.transpose(0, 1).unsqueeze(0)

    total_q, total_k = sum(lengths_q), sum(lengths_k)
    used_q, used_k = (None if used is None else torch.tensor(used, dtype=torch.int32) for used in (used_q, used_k))
    return Packed(
        tensor(total_q, heads_q, head_dim),
        tensor(total_k, heads_kv, head_dim),
        tensor(total_k, heads_kv, head_dim),
        tensor(total_q, heads_q, head_dim),
        tensor(total_q, heads_q).to(torch.float64 if dtype == torch.float64 else torch.float32),
        Seqlens(cu_q, cu_k, used_q, used_k),
    )


def spans(cu_seqlens: Tensor, used: Tensor | None) -> list[tuple[int, int]]:
    bounds, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
    lengths = lengths if used is None else [min(pair) for pair in zip(lengths, used.tolist(), strict=True)]
    return [(lo, lo + n) for lo, n in zip(bounds, lengths, strict=False)]


def one_by_one(run, at: Packed, sinks: Tensor | None = None, **given: Any) -> Result:
    """Build the result from one dense call per sequence, as if it were the first and only batch entry."""
    q, k, v, do, dlse, seqlens = at
    want = Result(*(torch.zeros(x.shape, dtype=torch.float64) for x in (do, dlse, q, k, v)))
    want.lse.fill_(-math.inf)
    want.dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float64)
    for (a, b), (c, d) in zip(
        spans(seqlens.cu_seqlens_q, seqlens.seqused_q), spans(seqlens.cu_seqlens_k, seqlens.seqused_k), strict=True
    ):
        part = run(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], do=do[:, :, a:b], dlse=dlse[:, :, a:b], sinks=sinks,
                   **given)  # fmt: skip
        for name, lo, hi in (("o", a, b), ("lse", a, b), ("dq", a, b), ("dk", c, d), ("dv", c, d)):
            getattr(want, name)[:, :, lo:hi] = getattr(part, name)
        if sinks is not None:
            want.dsinks += part.dsinks
    return want


LENGTHS = {
    "odd": ([5, 33, 1, 40], [7, 20, 64, 40]),
    "empty": ([0, 30, 0, 0, 17, 0], [5, 0, 0, 9, 17, 3]),
    "single": ([70], [70]),
    "fewer keys than queries": ([76, 34, 46], [1, 1, 1]),
    "nothing": ([0, 0], [0, 0]),
    "no sequence": ([], []),
}


@pytest.mark.parametrize("use_less", [False, True], ids=["all", "seqused"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("lengths", LENGTHS)
@both_masks
@on_all
def test_packed_equals_one_by_one(name: str, is_causal: bool, lengths: str, with_sinks: bool, use_less: bool) -> None:
    used = [[max(n - 2, 0) for n in side] for side in LENGTHS[lengths]] if use_less else (None, None)
    at = packed(*LENGTHS[lengths], used_q=used[0], used_k=used[1])
    sinks = torch.randn(4) if with_sinks else None
    mask = causal() if is_causal else full()
    got = attend(name, *at[:5], mask=mask, sinks=sinks, seqlens=at.seqlens)
    want, theirs = (one_by_one(run, at, sinks, mask=mask) for run in (reference, plain))
    assert_result_accurate(got, want, theirs)
    oracle = reference(*at[:3], mask=mask, sinks=sinks, seqlens=at.seqlens, do=at.do, dlse=at.dlse)
    for ours, wanted in zip((*oracle, oracle.dsinks), (*want, want.dsinks), strict=True):
        assert wanted is None or max_error(ours, wanted) < 1e-12


@on_all
def test_rows_past_the_last_sequence_are_zero(name: str) -> None:
    """flash-attention#2324: 160 rows, 131 of them used; nothing comes from the rest, and nothing goes there."""
    at = packed([100, 31], [100, 31], heads_q=8, heads_kv=8, head_dim=64, tail=29, dtype=torch.bfloat16)
    got = attend(name, *at[:5], mask=causal(), seqlens=at.seqlens)
    for x in (got.o, got.dq, got.dk, got.dv):
        assert x.shape[2] == 160
        assert (x[:, :, 131:] == 0).all()
        assert x.isfinite().all()
    assert (got.lse[:, :, 131:] == -math.inf).all()
    assert_result_accurate(got, *(one_by_one(run, at, mask=causal()) for run in (reference, plain)))


@on_all
def test_many_queries_and_one_key_in_a_sequence(name: str) -> None:
    """flash-attention#443: 75, 33 and 145 queries see nothing, the last of each sequence sees its only key."""
    at = packed([76, 34, 146], [1, 1, 1], heads_q=1, heads_kv=1, head_dim=32, tail=0, dtype=torch.float16)
    q, k, v = (x * 3 for x in at[:3])
    got = attend(name, q, k, v, torch.ones_like(at.do), mask=causal(), seqlens=at.seqlens)
    last = [75, 109, 255]
    others = torch.ones(256, dtype=torch.bool).index_fill(0, torch.tensor(last), False)
    assert (got.o[:, :, others] == 0).all()
    assert torch.equal(got.o[:, :, last], v)
    assert (got.dv == 1).all()
    assert (got.dq == 0).all()
    assert (got.dk == 0).all()


@on_all
def test_fewer_tokens_than_sequences(name: str) -> None:
    """flash-attention#1619: one token in four sequences; query head h reads value head h // 3."""
    at = packed([0, 0, 0, 1], [0, 0, 0, 1], heads_q=21, heads_kv=7, head_dim=120, tail=0)
    got = attend(name, *at[:4], mask=causal(), seqlens=at.seqlens)
    assert max_error(got.o, at.v.repeat_interleave(3, 1)) < 1e-6
    assert max_error(got.dv, at.do.unflatten(1, (7, 3)).sum(2)) < 1e-5


@on_all
def test_single_queries_and_empty_sequences(name: str) -> None:
    """flash-attention#1537: queries [0, 1, 0, 1], keys [0, 3, 0, 5]."""
    at = packed([0, 1, 0, 1], [0, 3, 0, 5], heads_q=9, heads_kv=3, head_dim=64, tail=0)
    got = attend(name, *at[:5], mask=causal(), seqlens=at.seqlens)
    assert_result_accurate(got, *(one_by_one(run, at, mask=causal()) for run in (reference, plain)))


@pytest.mark.parametrize("name", ["tiles", "cpu"])
def test_keys_of_empty_query_sequences_get_no_gradient(name: str) -> None:
    """flash-attention#2562, at a quarter of its lengths."""
    lengths_q, lengths_k = [0, 302, 210, 0], [634, 436, 210, 768]
    at = packed(lengths_q, lengths_k, heads_q=4, heads_kv=1, head_dim=64, tail=0)
    got = attend(name, *at[:5], seqlens=at.seqlens)
    for x in (got.dk, got.dv):
        assert (x[:, :, :634] == 0).all()
        assert (x[:, :, 1280:] == 0).all()
        assert (x[:, :, 634:1280] != 0).any()
    assert_result_accurate(got, *(one_by_one(run, at) for run in (reference, plain)))


@on_all
def test_masks_scores_and_dropout_see_the_sequence_s_number(name: str) -> None:
    lengths_q, lengths_k = [20, 0, 31], [25, 4, 31]
    at = packed(lengths_q, lengths_k)
    given = {"mask": causal(), "score": distance_score(), "dropout": dropout_of()}
    got = attend(name, *at[:5], **given, seqlens=at.seqlens)
    check(got, *at[:5], **given, seqlens=at.seqlens)
    # The same sequences as entries of a dense batch: the third one is number 2 there too.
    q, k, v, do, dlse = (torch.zeros(3, *x.shape[1:2], 31, *x.shape[3:]) for x in at[:5])
    for x, ours, lo in zip((q, k, v, do, dlse), at[:5], (20, 29, 29, 20, 20), strict=True):
        x[2] = ours[0, :, lo : lo + 31]
    dense = attend(name, q, k, v, do, dlse, **given)
    for field, lo in (("o", 20), ("lse", 20), ("dq", 20), ("dk", 29), ("dv", 29)):
        assert max_error(getattr(got, field)[0, :, lo : lo + 31], getattr(dense, field)[2]) < 1e-5


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", ["small tiles", "cpu"])
def test_every_mask_serves_packed_sequences(name: str, mask: Mask) -> None:
    """Each sequence as the same entry of a dense batch, whose other entries are noise."""
    at = packed([6, 9], [8, 5], heads_q=2, heads_kv=2)
    given = {"mask": mask, "dropout": dropout_of(0.1), "sinks": torch.tensor([-0.5, 0.5])}
    got = attend(name, *at[:5], **given, seqlens=at.seqlens)
    check(got, *at[:5], **given, seqlens=at.seqlens)
    rows, cols = spans(at.seqlens.cu_seqlens_q, None), spans(at.seqlens.cu_seqlens_k, None)
    for batch, ((a, b), (c, d)) in enumerate(zip(rows, cols, strict=True)):
        parts = [x[0, :, lo:hi] for x, lo, hi in zip(at[:5], (a, c, c, a, a), (b, d, d, b, b), strict=True)]
        dense = [torch.stack([part if i == batch else torch.randn_like(part) for i in range(2)]) for part in parts]
        want = attend(name, *dense, **given)
        for field, lo, hi in (("o", a, b), ("lse", a, b), ("dq", a, b), ("dk", c, d), ("dv", c, d)):
            assert max_error(getattr(got, field)[0, :, lo:hi], getattr(want, field)[batch]) < 1e-5


def test_layouts_are_kept_and_torch_s_kernel_serves_each_sequence() -> None:
    at = packed([20, 31], [20, 31])
    with Watch() as watch:
        got = attend("cpu", *at[:5], mask=causal(), sinks=torch.randn(4), seqlens=at.seqlens)
    assert watch.ops.count(FORWARD_OP) == 2
    assert watch.ops.count(f"{FORWARD_OP}_backward") == 2
    for ours, theirs in ((got.o, at.q), (got.dq, at.q), (got.dk, at.k), (got.dv, at.v)):
        assert ours.stride()[1:] == theirs.stride()[1:]
    assert got.lse.is_contiguous()


# ----------------------------------------------------------------------------------------- what passes ask and tell


@pytest.mark.parametrize("with_seqlens", [False, True], ids=["dense", "packed"])
@both_masks
@on_all
def test_the_largest_logit_of_every_row(name: str, is_causal: bool, with_seqlens: bool) -> None:
    at = packed([20, 31], [15, 40], tail=2)
    q, k, v = (x.nan_to_num(9.0) for x in at[:3])
    seqlens = at.seqlens if with_seqlens else None
    got, score = torch.empty(q.shape[:3]), distance_score()
    forward, _, blocks = PASSES[name]
    mask = causal() if is_causal else full()
    given = {"softmax_scale": 0.4, "mask": mask, "score": score, "seqlens": seqlens, "sinks": torch.full((4,), 50.0)}
    forward(q, k, v, max_logits=got, **given, **blocks)
    want = torch.full_like(got, -math.inf)
    places = [(0, (0, 53), (0, 57))] if seqlens is None else [(0, (0, 20), (0, 15)), (1, (20, 51), (15, 55))]
    for batch, (a, b), (c, d) in places:
        where, q_idx, k_idx = (
            Where(batch, torch.arange(4).view(4, 1, 1), b - a, d - c),
            torch.arange(b - a),
            torch.arange(d - c),
        )
        s = q[:, :, a:b] @ k[:, :, c:d].repeat_interleave(2, 1).mT * 0.4
        s = score.forward(where, q_idx[:, None], k_idx, s, score.args)
        want[:, :, a:b] = s.masked_fill(~mask.predicate(where, q_idx[:, None], k_idx, mask.args), -math.inf).amax(-1)
    assert max_error(got, want) < 1e-4


def counted(mask: Mask, batch: bool, head: bool) -> tuple[Mask, list]:
    """Return ``mask`` whose ranges look at these fields of ``where``, and a list of the places they were asked of."""
    asked = []

    def key_range(where, q_lo, q_hi, args):
        asked.append((where.batch if batch else None, where.head if head else None))
        return 0, 0, 0, where.seqlen_k

    return Mask("counted", mask.predicate, key_range, mask.query_range, mask.args), asked


@pytest.mark.parametrize(
    ("batch", "head", "most"), [(False, False, 1), (True, False, 1 + 3), (False, True, 1 + 5), (True, True, 1 + 15)]
)
def test_a_mask_is_asked_no_more_often_than_it_has_answers(batch: bool, head: bool, most: int) -> None:
    mask, asked = counted(causal(), batch, head)
    q, k, v, *_ = Case(3, 5, 5, 8, 8).tensors()
    blockwise_forward(q, k, v, softmax_scale=1.0, mask=mask)
    assert len(asked) == most
    assert len(set(asked)) == max(most - 1, 1)


def test_ranges_that_look_at_a_head_only_in_some_batch_entry() -> None:
    def first_keys(where):
        return where.seqlen_k if where.batch == 0 else where.head + 1

    def predicate(where, q_idx, k_idx, args):
        return (k_idx < torch.where(where.batch == 0, where.seqlen_k, where.head + 1)) & (q_idx >= 0)

    def key_range(where, q_lo, q_hi, args):
        batch, *_ = where if where.batch == 2 else (where.batch,)
        return 0, 0, first_keys(where), where.seqlen_k if batch == 0 else where.head + 1

    mask = Mask("some", predicate, key_range, full().query_range)
    q, k, v, do, dlse = Case(3, 3, 3, 9, 9).tensors()
    check(attend("small tiles", q, k, v, do, dlse, mask=mask), q, k, v, do, dlse, mask=mask)


def test_a_mask_without_ranges_visits_everything() -> None:
    mask = Mask("no range", lambda where, q_idx, k_idx, args: (q_idx + k_idx) % 3 == 0, None, None)  # type: ignore[arg-type]
    q, k, v, do, dlse = Case().tensors()
    check(attend("small tiles", q, k, v, do, dlse, mask=mask), q, k, v, do, dlse, mask=mask)


def test_sink_gradient_ignores_rows_of_no_sequence() -> None:
    lse, delta = torch.tensor([[[1.0, -math.inf]]]), torch.tensor([[[2.0, math.nan]]])
    assert_accurate(sink_gradient(torch.zeros(1), lse, delta), torch.tensor([-2 / math.e]).double(), torch.zeros(1))
