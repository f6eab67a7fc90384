"""Scores in the kernels, in the interpreter or on a GPU: outputs and gradients, those to their tensors included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import mask
from flashtile.dropout import Dropout
from flashtile.score import Entries, Gradient, Score, alibi, bias, gradcheck, read, real, select, softcap
from flashtile.seqlen import Seqlens, Where
from tests.reference import BACKWARD_FACTOR, Case, Result, assert_accurate, assert_result_accurate, plain, reference
from tests.score_cases import SCORES, gradients
from tests.test_score import check_saturated, saturated

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_score_gradient import parameter_gradients
from flashtile.kernel.flash_attention_triton import forward
from flashtile.kernel.launch import LaunchConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.25
_Where = tl.constexpr(Where)


def on(device: str, score: Score) -> Score:
    return score.with_tensors(tuple(t.to(device) for t in score.tensors()))


def check(
    case: Case, score: Score, *, mask_value: mask.Mask, config: LaunchConfig | None = None, passes: bool = True, **rules
) -> None:
    """Check o, lse, dq, dk, dv (if ``passes``) and the gradients to the score's tensors against the fp64 reference."""
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    options = {"softmax_scale": SCALE, "mask": mask_value, "score": on(DEVICE, score), **rules}
    o, lse = forward(q, k, v, config=config, **options)
    given = {"softmax_scale": SCALE, "mask": mask_value, "score": score, **rules}
    if passes:
        grads = backward(do, q, k, v, o, lse, dlse, config_dq=config, config_dkdv=config, **options)
        expected = {**given, "do": do, "dlse": dlse}
        results = reference(q, k, v, **expected), plain(q, k, v, **expected)
        assert_result_accurate(Result(o, lse, *grads), *results)
    needs = [t.is_floating_point() for t in score.tensors()]
    found = [t for t in parameter_gradients(do, q, k, v, o, lse, dlse, needs=needs, config=config, **options)
             if t is not None]  # fmt: skip
    assert len(found) == sum(needs)
    want = gradients(q, k, v, do, dlse, **given)
    rough = gradients(q, k, v, do, dlse, dtype=case.dtype, **given)
    for ours, exact, theirs in zip(found, want, rough, strict=True):
        assert ours.dtype == torch.float32
        assert_accurate(ours, exact, theirs, BACKWARD_FACTOR, score.name)


@triton.jit
def parts_kernel(s_ptr, logits_ptr, slopes_ptr, unit, seqlen_q, seqlen_k, score, M: tl.constexpr, N: tl.constexpr):
    """Take a score by parts, as the kernels for Hopper do, on a tile of batch entry 1 and head 0."""
    where = _Where(1, 0, seqlen_q, seqlen_k)
    q_idx, k_idx = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    s = tl.load(s_ptr + q_idx * N + k_idx)
    initial = score.initial(where, q_idx, k_idx, s, unit, score.args)
    if initial is not None:
        s += initial
    beside = score.beside(where, q_idx, k_idx, score.args)
    scaled = score.scaled(where, q_idx, k_idx, s, beside, unit, score.args)
    slope = score.slope(where, q_idx, k_idx, s, beside, scaled, unit, score.args)
    tl.store(logits_ptr + q_idx * N + k_idx, scaled * score.unit(unit, score.args))
    tl.store(slopes_ptr + q_idx * N + k_idx, slope + 0.0 * s)


@pytest.mark.parametrize("looks_back", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_parts(name, looks_back):
    score, unit, (m, n) = SCORES[name](2, 2, 16, 32), 0.3, (16, 32)
    s = 4.0 * torch.randn(m, n)
    of_kernel = on(DEVICE, score).parts_on_device(False, looks_back)
    logits, slopes = torch.full((2, m, n), torch.nan, device=DEVICE)
    parts_kernel[(1,)](s.to(DEVICE), logits, slopes, unit, m, n, of_kernel, m, n)  # pyright: ignore[reportArgumentType]
    q_idx, k_idx, where = torch.arange(m)[:, None], torch.arange(n), Where(1, 0, m, n)
    seen = (k_idx <= q_idx + n - m) if looks_back else torch.ones(m, n, dtype=torch.bool)
    at = (where, q_idx, k_idx, (s * unit).double(), score.args)
    tolerance = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(logits.cpu()[seen], score.forward(*at).expand(m, n)[seen], **tolerance)
    derivative = torch.as_tensor(score.derivative(*at)).expand(m, n)
    torch.testing.assert_close(slopes.cpu()[seen], derivative[seen], **tolerance)


@pytest.mark.parametrize("name", SCORES)
def test_causal_with_grouped_heads(name):
    case = Case(2, 2, 1, 37, 29, 16)
    check(case, SCORES[name](2, 2, 37, 29), mask_value=mask.causal())


def floors(where, q_idx, k_idx, s, args):
    """Floors of integers and of floats, either operand of either sign: a staircase with another at 0 and past it."""
    far = (real(q_idx, s) - real(k_idx, s)) / 4.0
    return s + (q_idx - k_idx) % args[0] + (k_idx - q_idx) // 3 + far % -3.0 + far // 1.5 + s * (far % 2.0)


def floors_slope(where, q_idx, k_idx, s, args):
    return 1.0 + ((real(q_idx, s) - real(k_idx, s)) / 4.0) % 2.0


def test_score_that_floors():
    score = Score.of(floors, floors_slope, (5,))
    gradcheck(score)
    check(Case(1, 2, 1, 33, 20, 16), score, mask_value=mask.full())


@pytest.mark.parametrize("name", ["alibi per batch", "bias hqk", "bias b11k", "bias hq1", "relative", "in order"])
def test_full(name):
    check(Case(2, 2, 2, 21, 45, 16), SCORES[name](2, 2, 21, 45), mask_value=mask.full())


@pytest.mark.parametrize("name", ["alibi", "bias qk", "bias b11k", "relative causal"])
def test_small_tiles_and_many_shares(name):
    config = LaunchConfig(16, 16, 4, 1)
    score = SCORES[name](1, 2, 50, 40)
    check(Case(1, 2, 2, 50, 40, 16), score, mask_value=mask.window(20, 5), config=config, passes=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(2, 33, 40).to(dtype)
    score = softcap(3.0).then(bias(tensor))
    check(Case(1, 2, 1, 33, 40, 32, dtype=dtype), score, mask_value=mask.causal())


def test_dropout():
    dropout = Dropout(0.3, torch.tensor([7]))
    q, k, v, do, dlse = Case(1, 2, 2, 21, 19, 16).tensors()
    score = bias(torch.randn(2, 21, 19))
    given = {"softmax_scale": SCALE, "mask": mask.causal(), "score": score, "dropout": dropout}
    want = gradients(q, k, v, do, dlse, **given)
    rough = gradients(q, k, v, do, dlse, dtype=torch.float32, **given)
    q, k, v, do, dlse = (t.to(DEVICE) for t in (q, k, v, do, dlse))
    given |= {"score": on(DEVICE, score), "dropout": Dropout(0.3, dropout.seed.to(DEVICE))}
    o, lse = forward(q, k, v, **given)
    (got,) = parameter_gradients(do, q, k, v, o, lse, dlse, needs=[True], **given)
    assert got is not None
    assert_accurate(got, want[0], rough[0], BACKWARD_FACTOR)


@pytest.mark.parametrize("name", ["alibi per batch", "bias b1qk", "bias qk", "relative"])
def test_packed_sequences(name):
    """Sequences of 5, 0 and 20 queries; the second dimension of where is the sequence's number."""
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(n, dtype=torch.int32) for n in ([0, 5, 5, 25], [0, 9, 12, 30]))
    seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k, torch.tensor([5, 0, 17], dtype=torch.int32))
    q, k, v, do, dlse = Case(1, 2, 1, 27, 33, 16).tensors()
    score = SCORES[name](3, 2, 20, 18)
    given = {"softmax_scale": SCALE, "mask": mask.causal(), "score": score, "seqlens": seqlens}
    want = gradients(q, k, v, do, dlse, **given)
    rough = gradients(q, k, v, do, dlse, dtype=torch.float32, **given)
    q, k, v, do, dlse = (t.to(DEVICE) for t in (q, k, v, do, dlse))
    moved = Seqlens(cu_seqlens_q.to(DEVICE), cu_seqlens_k.to(DEVICE), seqlens.seqused_q.to(DEVICE))
    given |= {"score": on(DEVICE, score), "seqlens": moved}
    o, lse = forward(q, k, v, **given)
    # Rows past the last sequence hold anything.
    q[:, :, 25:], do[:, :, 25:] = float("nan"), float("nan")
    needs = [t.is_floating_point() for t in score.tensors()]
    found = parameter_gradients(do, q, k, v, o, lse, dlse, needs=needs, **given)
    assert found[0] is not None
    assert_accurate(found[0], want[0], rough[0], BACKWARD_FACTOR)


def test_gradients_are_the_same_bits_again():
    case = Case(2, 2, 1, 40, 40, 16)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    score = on(DEVICE, alibi(torch.rand(2)).then(bias(torch.randn(40))))
    options = {"softmax_scale": SCALE, "mask": mask.causal(), "score": score}
    o, lse = forward(q, k, v, **options)
    needs = [t.is_floating_point() for t in score.tensors()]
    first, second = (parameter_gradients(do, q, k, v, o, lse, dlse, needs=needs, **options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # pyright: ignore[reportArgumentType]


def test_only_what_is_needed():
    q, k, v, do, dlse = Case(1, 2, 2, 9, 9, 16).tensors(device=DEVICE)
    score = on(DEVICE, alibi(torch.rand(2)).then(bias(torch.randn(9, 9))))
    options = {"softmax_scale": SCALE, "mask": mask.full(), "score": score}
    o, lse = forward(q, k, v, **options)
    assert parameter_gradients(do, q, k, v, o, lse, dlse, **options) == (None, None)
    slopes, tensor = parameter_gradients(do, q, k, v, o, lse, dlse, needs=[False, True], **options)
    assert slopes is None
    assert tensor is not None
    assert tensor.shape == (1, 1, 9, 9)
    nothing = torch.empty(1, 2, 0, 16, device=DEVICE)
    empty = parameter_gradients(do, q, nothing, nothing, o, lse, dlse, needs=[True, True], **options)
    assert all(t is not None and not t.any() for t in empty)


def gate(where, q_idx, k_idx, s, args):
    strength = read(args[0], where, q_idx, k_idx, s)
    return select(k_idx % 2 == 0, s * strength, s)


def gate_derivative(where, q_idx, k_idx, s, args):
    strength = read(args[0], where, q_idx, k_idx, s)
    return select(k_idx % 2 == 0, strength + 0.0 * s, 1.0 + 0.0 * s)


def gate_weight(where, q_idx, k_idx, s, args):
    return select(k_idx % 2 == 0, s, 0.0 * s)


def test_your_own_score():
    """A score whose derivative with respect to an entry depends on the logit, under another one."""
    own = Score.of(gate, gate_derivative, (Entries.of(torch.rand(1, 2, 1, 1)),), gradients=(Gradient(0, gate_weight),))
    check(Case(1, 2, 1, 21, 19, 16), own.then(softcap(2.0)), mask_value=mask.causal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_of_huge_logits(dtype):
    """Written as a ratio of exponentials it would be inf / inf."""
    q, k, v, do = saturated(dtype, DEVICE)
    options = {"softmax_scale": 1.0, "mask": mask.full(), "score": softcap(50.0)}
    o, lse = forward(q, k, v, **options)
    dq, dk, _ = backward(do, q, k, v, o, lse, None, **options)
    check_saturated(o, dq, dk)


@pytest.mark.parametrize("seqlen", [64, 65])
def test_bias_by_position_past_the_last_tile(seqlen):
    """A slope of -1 makes hidden logits the largest; where the last tile is not whole, gradients must stay finite."""
    check(Case(1, 1, 1, seqlen, seqlen, 64, dtype=torch.bfloat16), alibi(torch.tensor([-1.0])),
          mask_value=mask.causal())  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (softcap(30.0), softcap(50.0)),
        (alibi(torch.rand(3)), alibi(torch.rand(5))),
        (bias(torch.rand(7, 9)).then(softcap(2.0)), bias(torch.rand(13, 11)).then(softcap(3.0))),
    ],
    ids=["softcap", "alibi", "bias"],
)
def test_new_numbers_compile_nothing(one, other):
    """The functions are the same objects, and the arguments of the same types."""

    def kinds(value):
        if isinstance(value, tuple):
            return [kinds(item) for item in value]
        return value if hasattr(value, "fn") else type(value)

    assert kinds(one.on_device()) == kinds(other.on_device())


def test_kernels_compile():
    """The passes with every score and the gradient kernel, for sm_80 and sm_90."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.compile_scores", "sm_80", "sm_90"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [result for result in results if "error" in result or not result["fits"]] == []
    # A few bytes: the walk over a table's buckets. (What the passes spill with a score is theirs to bound.)
    assert [r for r in results if r["kernel"] == "score_gradient_kernel" and r["spilled"] > 64] == []


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [1024, 1025])
def test_bias_by_position_at_full_size(seqlen):
    case = Case(1, 1, 1, seqlen, seqlen, 64, dtype=torch.bfloat16)
    check(case, alibi(torch.tensor([-1.0])), mask_value=mask.causal())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCORES)
def test_large(name):
    case = Case(2, 4, 2, 700, 900, 64, dtype=torch.bfloat16)
    check(case, SCORES[name](2, 4, 700, 900), mask_value=mask.causal())
