"""The public attention_statistics: layouts, options, errors; tests/kernel/test_statistics.py has the numbers."""

import math

import pytest
import torch

from flashtile import flash_attention, mask, score
from flashtile.statistics import WHAT, AttentionStatistics, attention_statistics
from tests.reference import max_error


def inputs(*lead: int, heads_q=4, heads_kv=2, seqlen_q=20, seqlen_k=30, dtype=torch.float32):
    q = torch.randn(*lead, heads_q, seqlen_q, 16, dtype=dtype)
    k, v = (torch.randn(*lead, heads_kv, seqlen_k, 16, dtype=dtype) for _ in range(2))
    return q, k, flash_attention(q, k, v, is_causal=True, return_lse=True, backend="cpu")[1]


def causal_weights(q, k):
    group = q.shape[-3] // k.shape[-3]
    s = q.double() @ k.double().repeat_interleave(group, dim=-3).mT * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:]).tril(s.shape[-1] - s.shape[-2]) == 0
    return s.masked_fill(hidden, -math.inf).softmax(-1)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_every_statistic_at_any_rank(lead, backend):
    if backend is None and lead == (2, 3):
        pytest.skip("slow in the interpreter, and two ranks are tested there")
    q, k, lse = inputs(*lead)
    p = causal_weights(q, k)
    what = ("column_sums", "entropy", "top_k", "rows")
    got = attention_statistics(q, k, lse, what=what, is_causal=True, top_k=3, rows=[-1, 4], backend=backend)
    assert max_error(got.column_sums, p.sum(-2)) < 1e-5
    assert max_error(got.entropy, -torch.special.xlogy(p, p).sum(-1)) < 1e-5
    assert max_error(got.top_k.values, p.topk(3).values) < 1e-5
    assert torch.equal(got.top_k.indices, p.topk(3).indices)
    assert max_error(got.rows, p[..., [19, 4], :]) < 1e-5


def test_only_what_was_asked_for():
    q, k, lse = inputs(1)
    got = attention_statistics(q, k, lse, what="entropy", is_causal=True)
    assert [name for name, value in zip(got._fields, got, strict=True) if value is not None] == ["entropy"]
    got = attention_statistics(q, k, lse, is_causal=True)
    assert isinstance(got, AttentionStatistics)
    assert got.rows is None
    assert got.top_k.values.shape == (1, 4, 20, 8)


def test_weights_choose_queries():
    q, k, lse = inputs(1)
    last = torch.zeros(20)
    last[-5:] = 1
    got = attention_statistics(q, k, lse, what="column_sums", is_causal=True, column_weights=last).column_sums
    assert max_error(got, causal_weights(q, k)[..., -5:, :].sum(-2)) < 1e-5


@pytest.mark.parametrize("rows", [torch.tensor([3, 3]), (3, 3), range(3, 4)], ids=["tensor", "tuple", "range"])
def test_rows_come_in_many_forms(rows):
    q, k, lse = inputs(1)
    got = attention_statistics(q, k, lse, what="rows", is_causal=True, rows=rows).rows
    assert max_error(got, causal_weights(q, k)[..., [3] * len(rows), :]) < 1e-5


def test_nothing_is_recorded_for_autograd():
    q, k, lse = inputs(1)
    got = attention_statistics(q.requires_grad_(), k, lse, mask=mask.causal())
    assert not got.column_sums.requires_grad
    assert not got.top_k.values.requires_grad


@pytest.mark.parametrize(
    ("the_mask", "the_score"),
    [
        (mask.window(5, 0), score.softcap(2.0)),
        (mask.document(torch.arange(30) // 8), score.alibi(torch.tensor([0.5, 0.25, 0.1, 0.0]))),
        (mask.prefix(4) | mask.causal(), score.bias(torch.randn(4, 30, 30)).then(score.temperature(2.0))),
        (torch.rand(30, 30) < 0.5, None),
    ],
    ids=["window", "document", "prefix", "dense"],
)
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_masks_and_scores_as_in_attention(the_mask, the_score, backend):
    """The rows of the statistics, times v, are attention."""
    q, k, v = torch.randn(1, 4, 30, 16), torch.randn(1, 2, 30, 16), torch.randn(1, 2, 30, 16)
    rules = {"mask": the_mask, "score": the_score, "is_causal": True}
    o, lse = flash_attention(q, k, v, return_lse=True, backend=backend, **rules)
    got = attention_statistics(q, k, lse, what=WHAT, rows=range(30), backend=backend, **rules)
    p = got.rows.double()
    assert max_error(p.float() @ v.repeat_interleave(2, dim=1), o) < 1e-5
    assert max_error(got.column_sums, p.sum(2)) < 1e-5
    assert max_error(got.entropy, -torch.special.xlogy(p, p).sum(-1)) < 1e-5
    assert max_error(got.top_k.values, p.topk(8).values) < 1e-6


def test_under_autocast():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = flash_attention(q, k, v, return_lse=True, backend="cpu")
        rows = attention_statistics(q, k, lse, what="rows", rows=[3], backend="cpu").rows
    assert max_error(rows.sum(-1), torch.ones(1, 2, 1)) < 1e-5


def test_float64():
    q, k, lse = inputs(1, dtype=torch.float64)
    got = attention_statistics(q, k, lse, what="column_sums", is_causal=True, backend="cpu").column_sums
    assert got.dtype == torch.float64
    assert max_error(got, causal_weights(q, k).sum(-2)) < 1e-12


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"what": 3}, ValueError, "what is 3, but wants one or several of 'column_sums'"),
        ({"what": "columns"}, ValueError, "what is 'columns', but wants one or several of 'column_sums'"),
        ({"what": ()}, ValueError, r"what is \(\)"),
        ({"top_k": 0}, ValueError, "top_k is 0, but wants an integer from 1 to 64"),
        ({"top_k": 65}, ValueError, "top_k is 65"),
        ({"top_k": True}, ValueError, "top_k is True"),
        ({"what": "rows"}, ValueError, "rows is None"),
        ({"rows": [1]}, ValueError, 'rows is given, but what leaves "rows" out'),
        ({"what": "rows", "rows": [0, 20]}, ValueError, "rows has 20, but wants numbers from -20 to 19"),
        ({"what": "rows", "rows": [0.5]}, ValueError, "wants a one-dimensional sequence of integers"),
        ({"what": "rows", "rows": "all"}, ValueError, "rows is 'all'"),
        (
            {"column_weights": torch.ones(7)},
            ValueError,
            r"column_weights has shape \(7,\), but wants one that broadcasts",
        ),
        ({"column_weights": 2.0}, ValueError, "column_weights is 2.0, but wants a tensor on cpu"),
        ({"what": "entropy", "column_weights": torch.ones(20)}, ValueError, "column_weights is given"),
        ({"mask": "causal"}, TypeError, "mask is 'causal', but wants a value of flashtile.mask"),
        ({"mask": torch.ones(20, 31).bool()}, ValueError, "seqlen_k 31, but the tensors have seqlen_k 30"),
        ({"score": 1.0}, TypeError, "score is 1.0, but wants a value of flashtile.score"),
        ({"softmax_scale": "large"}, TypeError, "softmax_scale is 'large'"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ],
)
def test_errors_name_argument_value_and_wish(options, error, words):
    q, k, lse = inputs(1)
    with pytest.raises(error, match=words):
        attention_statistics(q, k, lse, **options)


def test_errors_about_lse():
    q, k, lse = inputs(1)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 4, 19\), but wants \(1, 4, 20\)"):
        attention_statistics(q, k, lse[..., 1:])
    with pytest.raises(ValueError, match=r"lse is torch\.float16 on cpu, but wants torch\.float32"):
        attention_statistics(q, k, lse.half())
    with pytest.raises(TypeError, match="lse is a NoneType"):
        attention_statistics(q, k, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="q has 4 heads"):
        attention_statistics(q, k.repeat(1, 2, 1, 1)[:, :3], lse)
