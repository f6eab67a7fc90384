"""Scores as values: derivatives, order, buckets, errors, and the gradients of the CPU path to their tensors."""

import math
from typing import Any

import pytest
import torch

from flashtile import flash_attention, mask
from flashtile.kernel.flash_attention_cpu import backward, forward
from flashtile.kernel.flash_attention_mock import dense_attention
from flashtile.kernel.score_gradient_cpu import parameter_gradients
from flashtile.score import (
    Entries,
    Gradient,
    Score,
    alibi,
    bias,
    exp2,
    gradcheck,
    log2,
    read,
    relative_position,
    select,
    softcap,
    temperature,
)
from flashtile.score import value as score_value
from flashtile.score.functions import _tanh_on_device, ahead, ahead_times
from flashtile.seqlen import Where
from tests.reference import BACKWARD_FACTOR, Case, Result, assert_accurate, assert_result_accurate, plain, reference
from tests.score_cases import SCORES, gradients

SIZES = (2, 2, 5, 7)


@pytest.mark.parametrize("name", SCORES)
def test_derivatives_agree_with_finite_differences(name):
    gradcheck(SCORES[name](*SIZES))


def twice(where, q_idx, k_idx, s, args):
    return 2.0 * s


def thrice(where, q_idx, k_idx, s, args):
    return 3.0


def soft_bias(where, q_idx, k_idx, s, args):
    x = read(args[0], where, q_idx, k_idx, s)
    return s + select(x > 0.0, log2(1.0 + exp2(x)), exp2(x))


def soft_bias_weight(where, q_idx, k_idx, s, args):
    x = read(args[0], where, q_idx, k_idx, s)
    return select(x > 0.0, exp2(x) / (1.0 + exp2(x)), 0.6931471805599453 * exp2(x))


def one(where, q_idx, k_idx, s, args):
    return 1.0


@pytest.mark.parametrize("looks_back", [False, True])
@pytest.mark.parametrize("unit", [1.0, 0.3])
@pytest.mark.parametrize("name", SCORES)
def test_parts_make_the_same_logits(name, unit, looks_back, monkeypatch):
    """And the same derivatives: in any unit, in order, and where keys may only stand behind queries."""
    score = SCORES[name](*SIZES)
    score = score.with_tensors(tuple(t.double() if t.is_floating_point() else t for t in score.tensors()))
    monkeypatch.setattr(score_value, "jitted", lambda fn, rough=False: fn)
    parts = score.parts_on_device(False, looks_back)
    batch, heads, seqlen_q, seqlen_k = SIZES
    q_idx, k_idx = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    where = Where(torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1), seqlen_q, seqlen_k)
    s = 4.0 * torch.randn(SIZES, dtype=torch.float64)
    initial = parts.initial(where, q_idx, k_idx, s, unit, parts.args)
    x = s if initial is None else s + initial
    beside = parts.beside(where, q_idx, k_idx, parts.args)
    scaled = parts.scaled(where, q_idx, k_idx, x, beside, unit, parts.args)
    slope = torch.as_tensor(parts.slope(where, q_idx, k_idx, x, beside, scaled, unit, parts.args)).expand_as(s)
    seen = (k_idx <= q_idx + seqlen_k - seqlen_q).expand_as(s) if looks_back else torch.ones_like(s, dtype=torch.bool)
    want = score.forward(where, q_idx, k_idx, s * unit, score.args)
    torch.testing.assert_close((parts.unit(unit, parts.args) * scaled)[seen], want[seen])
    derivative = torch.as_tensor(score.derivative(where, q_idx, k_idx, s * unit, score.args)).expand_as(s)
    torch.testing.assert_close(slope[seen], derivative[seen].to(slope.dtype))
    assert parts.unit(unit, parts.args) > 0


def test_gradcheck_finds_a_wrong_derivative():
    with pytest.raises(
        ValueError, match=r"score twice: d\(logit\) / ds is 3, but wants 2 \(batch 0, head 0, query 0, key 0"
    ):
        gradcheck(Score.of(twice, thrice))


def test_gradcheck_finds_a_wrong_gradient():
    args = (Entries.of(torch.rand(1, 2, 1, 7) + 0.5),)
    gradcheck(Score.of(soft_bias, one, args, gradients=(Gradient(0, soft_bias_weight),)))
    with pytest.raises(ValueError, match=r"d\(entry of tensor 0\)"):
        gradcheck(Score.of(soft_bias, one, args, gradients=(Gradient(0, one),)))


def test_scores_apply_in_order():
    where, index = Where(0, 0, 1, 1), torch.zeros(1, 1, dtype=torch.long)
    s, lift = torch.full((1, 1, 1, 1), 3.0), bias(torch.tensor([[5.0]]))
    first, last = softcap(1.0).then(lift), lift.then(softcap(1.0))
    assert first.forward(where, index, index, s, first.args).item() == pytest.approx(5.0 + math.tanh(3.0))
    assert last.forward(where, index, index, s, last.args).item() == pytest.approx(math.tanh(8.0))


def test_tanh_of_the_kernels():
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.logspace(-30, 38, 10_001), -torch.logspace(-30, 38, 10_001)])
    got, want = _tanh_on_device(x), torch.tanh(x.double())
    assert ((got - want).abs() <= 4e-7 * want.abs()).all()


def test_how_far_keys_stand_ahead_of_queries():
    where, s = Where(0, 0, 3, 5), torch.zeros((), dtype=torch.float64)
    got = ahead(where, torch.arange(3)[:, None], torch.arange(5)[None, :], s)
    assert got.dtype == s.dtype
    assert got.tolist() == [[-2, -1, 0, 1, 2], [-3, -2, -1, 0, 1], [-4, -3, -2, -1, 0]]
    assert ahead(where, 2, 4, s) == 0.0
    assert ahead_times(where, 2, 1, s, 0.5) == -1.5


@pytest.mark.parametrize("slope", [1.0, 0.7, 2.0**-8])
def test_slopes_times_distances_of_the_hopper_kernels(slope):
    """The product that ALiBi's logits begin with, in the kernels' order of fp32 operations, distances up to 2**20.

    It is off by less than fp32 tells apart near the logit itself, and by 2**-16 slope near the diagonal.
    """
    q_idx = torch.cat([torch.arange(300), torch.arange(2**20 - 300, 2**20)])[:, None]
    for start in (0, 128, 2**19, 2**20 - 384, 2**20 - 128):
        place = torch.arange(128)
        by_thread, by_register = (place & 6).float(), (place & -7).float()
        factor = torch.tensor(slope, dtype=torch.float32) / 0.125
        ahead_by_thread = (torch.tensor(float(start)) + by_thread) - q_idx.float()
        first = ahead_by_thread * factor
        got = (by_register.double() * factor.double() + first.double()).float() * 0.125  # a fused multiply-add
        distance = (start + place - q_idx).double()
        error = (got.double() - distance * slope).abs()
        assert (error <= (2.0**-22 * distance.abs() + 2.0**-16) * slope).all()


def test_relative_buckets_are_those_of_t5():
    """Against the definition (Raffel et al., section 2.1), written out for one distance at a time."""

    def bucket(distance: int, count: int, bidirectional: bool, farthest: int) -> int:
        offset = 0
        if bidirectional:
            count //= 2
            offset, distance = (count if distance > 0 else 0), abs(distance)
        else:
            distance = max(-distance, 0)
        exact = count // 2
        if distance < exact:
            return offset + distance
        # In fp32 as there: at exact powers the rounding of the logarithm decides.
        ratio = torch.log(torch.tensor(distance / exact)) / math.log(farthest / exact)
        return offset + min(exact + int(ratio * (count - exact)), count - 1)

    for count, farthest in ((32, 128), (8, 20), (7, 11), (4, 2)):
        for bidirectional in (True, False):
            if not bidirectional and farthest <= count // 2:
                continue
            table = torch.arange(count).double()[:, None]
            score = relative_position(table, bidirectional=bidirectional, max_distance=farthest)
            q_idx, k_idx = torch.arange(150)[:, None], torch.arange(170)[None, :]
            where = Where(0, torch.zeros(1, 1, dtype=torch.long), 150, 170)
            got = score.forward(where, q_idx, k_idx, torch.zeros(150, 170, dtype=torch.float64), score.args)
            want = {d: bucket(d, count, bidirectional, farthest) for d in range(-200, 200)}
            assert got.tolist() == [[want[j - i - 20] for j in range(170)] for i in range(150)]


def test_published_t5_buckets():
    """Values of the function that T5 models are run with: 32 buckets, 128 the farthest."""
    score = relative_position(torch.arange(32).double()[:, None])
    index = torch.zeros(1, 1, dtype=torch.long)
    where = Where(0, index, 1, 1)
    seen = {-200: 15, -128: 15, -64: 14, -20: 10, -8: 8, -7: 7, -1: 1, 0: 0, 1: 17, 7: 23, 8: 24, 20: 26, 200: 31}
    for distance, want in seen.items():
        got = score.forward(where, index, index + distance, torch.zeros(1, 1).double(), score.args)
        assert got.item() == want, distance


def test_scores_are_values():
    assert softcap(30.0) == softcap(30.0)
    assert softcap(30.0) != softcap(20.0)
    assert hash(softcap(30.0)) == hash(softcap(30.0))
    slopes = torch.rand(2, 2)
    assert bias(slopes).tensors()[0].data_ptr() == slopes.data_ptr()
    assert bias(slopes) != bias(slopes.clone())
    assert repr(softcap(1.0).then(temperature(2.0))) == "Score(softcap, temperature)"


def test_tensors_are_replaced_in_order():
    score = alibi(torch.rand(2)).then(bias(torch.rand(5, 7)))
    slopes, other = torch.rand(1, 2, 1, 1), torch.rand(1, 1, 7, 5).mT
    replaced = score.with_tensors((slopes, other))
    assert replaced.tensors()[0] is slopes
    assert replaced.tensors()[1] is other
    assert [p.index for p in replaced.parameters()] == [0, 1]
    gradcheck(replaced)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: softcap(0.0), ValueError, "softcap: cap is 0.0, but wants a positive finite number"),
        (lambda: softcap(math.nan), ValueError, "softcap: cap is nan"),
        (lambda: temperature(-1.0), ValueError, "temperature: t is -1.0"),
        (
            lambda: alibi(torch.rand(2, 2, 2)),
            ValueError,
            r"slopes has shape \(2, 2, 2\), but wants \(heads_q,\)",
        ),
        (lambda: alibi(torch.arange(2)), TypeError, "alibi: slopes is torch.int64, but wants a floating-point tensor"),
        (lambda: bias(torch.rand(1, 1, 1, 1, 1)), ValueError, "one to four dimensions"),
        (lambda: bias(1.0), TypeError, "bias: tensor is float"),  # pyright: ignore[reportArgumentType]
        (lambda: relative_position(torch.rand(8)), ValueError, r"wants \(buckets, heads_q\)"),
        (lambda: relative_position(torch.rand(32, 2), max_distance=8), ValueError, "max_distance > 8"),
        (lambda: relative_position(torch.rand(2, 2)), ValueError, "at least 4 buckets"),
        (lambda: softcap(3.0).then(None), TypeError, "after is a NoneType, but wants a value"),  # pyright: ignore[reportArgumentType]
        (lambda: Score.of(lambda *a: a[3], one), TypeError, "forward is a lambda"),
        (lambda: Score.of(twice, one, [1.0]), TypeError, "args is a list"),  # pyright: ignore[reportArgumentType]
        (lambda: Score.of(twice, one, ("x",)), TypeError, r"args\[0\] is a str"),
        (lambda: Score.of(twice, one, (1.0,), gradients=(Gradient(0, one),)), TypeError, r"args\[0\] is a float"),
        (lambda: Score.of(twice, one, (), gradients=(Gradient(0, one),)), ValueError, "arg is 0"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("score", "error", "message"),
    [
        (bias(torch.rand(4, 7)), ValueError, "score bias: size 4 in the query dimension, but wants 1 or 5"),
        (bias(torch.rand(3, 1, 1, 1)), ValueError, "size 3 in the batch dimension, but wants 1 or 2"),
        (softcap(1.0).then(alibi(torch.rand(3))), ValueError, "size 3 in the head dimension, but wants 1 or 2"),
        (relative_position(torch.rand(8, 3)), ValueError, "size 3 in the head dimension, but wants 2"),
        (bias(torch.rand(7, device="meta")), ValueError, "a tensor is on meta, but wants cpu like q"),
        (Score.of(twice, one, (torch.rand(2).requires_grad_(),)), NotImplementedError, "declares none for it"),
    ],
)
def test_misfits(score, error, message):
    bias(torch.rand(1, 7)).check(*SIZES, torch.device("cpu"))
    with pytest.raises(error, match=message):
        score.check(*SIZES, torch.device("cpu"))


CASE = Case(2, 4, 2, 21, 13, 16)
SCALE = 0.25


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SCORES)
def test_cpu_path(name, is_causal):
    torch.manual_seed(1)
    q, k, v, do, dlse = CASE.tensors()
    score = SCORES[name](2, 4, CASE.seqlen_q, CASE.seqlen_k)
    options = {"softmax_scale": SCALE, "mask": mask.causal() if is_causal else mask.full(), "score": score}
    o, lse = forward(q, k, v, **options)
    got = Result(o, lse, *backward(do, q, k, v, o, lse, dlse, **options))
    given = {**options, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **given), plain(q, k, v, **given))
    needs = [t.is_floating_point() for t in score.tensors()]
    found = parameter_gradients(do, q, k, v, o, lse, dlse, needs=needs, **options)
    found = [t for t in found if t is not None]
    assert len(found) == sum(needs)
    want = gradients(q, k, v, do, dlse, **options)
    rough = gradients(q, k, v, do, dlse, dtype=torch.float32, **options)
    for ours, exact, theirs in zip(found, want, rough, strict=True):
        assert_accurate(ours, exact, theirs, BACKWARD_FACTOR, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_of_huge_logits(dtype):
    """The reference: capped scores are 50 tanh(x / 50), and gradients vanish where they saturate."""
    q, k, v, do = saturated(dtype)
    options = {"softmax_scale": 1.0, "mask": mask.full(), "score": softcap(50.0)}
    o, lse = forward(q, k, v, **options)
    dq, dk, _ = backward(do, q, k, v, o, lse, None, **options)
    check_saturated(o, dq, dk)


def saturated(dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return q, k, v, do with logits 10, 4416, 4992 and -9984 and one-hot values."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 4, 16)
    q[..., 0], k[..., 0] = 1.0, torch.tensor([10.0, 4416.0, 4992.0, -9984.0])
    v, do = torch.eye(4, 16)[None, None], torch.randn(1, 1, 1, 16)
    return tuple(t.to(device, dtype) for t in (q, k, v, do))


def check_saturated(o: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor) -> None:
    torch.testing.assert_close(o[0, 0, 0, :4].cpu().float(), torch.tensor([0.0, 0.5, 0.5, 0.0]), atol=1e-6, rtol=0)
    for grad in (dq, dk):
        assert grad.abs().max() < 1e-5


def test_slopes_get_the_gradient_of_the_dense_sum():
    """dslope_h = sum of dS_ij * -|i + seqlen_k - seqlen_q - j|, by finite differences, with q, k, v frozen."""
    q, k, v, do, _ = Case(1, 2, 2, 5, 7, 16, dtype=torch.float64).tensors()
    slopes = torch.rand(2, dtype=torch.float64)

    def loss(slopes: torch.Tensor) -> torch.Tensor:
        o, _ = dense_attention(q, k, v, softmax_scale=SCALE, mask=mask.full(), score=alibi(slopes))
        return (o * do).sum()

    step = 1e-6 * torch.eye(2, dtype=torch.float64)
    want = torch.stack([(loss(slopes + e) - loss(slopes - e)) / 2e-6 for e in step])
    options = {"softmax_scale": SCALE, "mask": mask.full(), "score": alibi(slopes.requires_grad_())}
    o, lse = forward(q, k, v, **options)
    (got,) = parameter_gradients(do, q, k, v, o, lse, None, needs=[True], **options)
    assert got is not None
    torch.testing.assert_close(got.flatten(), want, atol=1e-8, rtol=1e-6)


def untyped(value) -> Any:
    return value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: softcap(untyped("3")), "softcap: cap is '3', but wants a positive finite number"),
        (lambda: softcap(True), "softcap: cap is True"),
        (lambda: bool(softcap(3.0)), "score softcap has no truth value: scores combine with then"),
        (
            lambda: flash_attention(*[torch.ones(1, 1, 3, 4)] * 3, score=untyped(softcap)),
            r"call it, as in score=softcap\(30.0\)",
        ),
    ],
    ids=["text", "bool", "truth", "uncalled"],
)
def test_what_is_no_score_says_so(make, words):
    with pytest.raises(TypeError, match=words):
        make()
