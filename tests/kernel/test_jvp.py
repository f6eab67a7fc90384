"""The tangents of attention, kernel (in the interpreter or on a GPU) and CPU path, against forward-mode AD in fp64."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD

from flashtile import mask, score
from flashtile.dropout import Dropout
from flashtile.kernel import flash_attention_cpu, flash_attention_jvp_cpu
from flashtile.kernel.flash_attention_mock import dense_attention
from flashtile.score import Score
from flashtile.seqlen import Seqlens
from tests.reference import BACKWARD_FACTOR, EMPTY_SHAPES, Case, _plain_attention, assert_accurate, max_error

pytest.importorskip("triton")

from flashtile.kernel import flash_attention_jvp, flash_attention_triton
from flashtile.kernel.launch import LaunchConfig
from tests.kernel.offline import SHARED_LIMIT
from tests.kernel.offline_extras import Job, compile_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = {
    "triton": (flash_attention_triton.forward, flash_attention_jvp.jvp, DEVICE),
    "cpu": (flash_attention_cpu.forward, flash_attention_jvp_cpu.jvp, "cpu"),
}
HALF = [torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 33, 33), (1, 1, 1, 1), (1, 1, 1, 70), (1, 1, 70, 1), (2, 2, 17, 90), (1, 1, 90, 17), (3, 1, 40, 35)]


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def tangents(case: Case, device: str = "cpu"):
    """Return tangents of q, k and v."""
    return case.tensors(seed=1, device=device)[:3]


def by_autodiff(attend, primals, directions, dtype, **options) -> Any:
    """Return ``(to, tlse)`` by PyTorch's forward-mode AD of a dense formula."""
    primals = [x.cpu().to(dtype) for x in primals]
    directions = [
        torch.zeros_like(x) if t is None else t.cpu().to(dtype) for x, t in zip(primals, directions, strict=True)
    ]
    return torch.func.jvp(lambda *x: attend(*x, **options), tuple(primals), tuple(directions))[1]


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the options with their tensors on ``device``: the oracles run on the CPU."""
    options = options | {"mask": options["mask"].to(device)}
    if options["score"] is not None:
        tensors = tuple(t.to(device) for t in options["score"].tensors())
        options["score"] = options["score"].with_tensors(tensors)
    if options["dropout"]:
        options["dropout"] = options["dropout"]._replace(seed=options["dropout"].seed.to(device))
    return options


def check(path: str, case: Case, directions: Any = None, config: Any = None, sinks: Any = None, **options: Any):
    """Compare with the fp64 oracle, under the accuracy rule for gradients."""
    forward, jvp, device = PATHS[path]
    primals = case.tensors(device=device)[:3]
    directions = tangents(case, device) if directions is None else directions
    options = {"softmax_scale": case.head_dim**-0.5, "mask": case.mask, "score": None, "dropout": None} | options
    options = moved(options, device)
    o, lse = forward(*primals, sinks=sinks, **options)
    to, tlse = jvp(*directions, *primals, o, lse, **options, **({"config": config} if config else {}))
    options = moved(options, "cpu") | {"sinks": None if sinks is None else sinks.cpu()}
    assert to.dtype == case.dtype
    assert to.stride() == o.stride()
    assert tlse.dtype == lse.dtype
    want = by_autodiff(dense_attention, primals, directions, torch.float64, **options)
    theirs = by_autodiff(_plain_attention, primals, directions, case.dtype, **options)
    for name, got, oracle, plain in zip(("to", "tlse"), (to, tlse), want, theirs, strict=True):
        assert_accurate(got, oracle, plain, BACKWARD_FACTOR, name)
    return to, tlse


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(path, shape, is_causal):
    check(path, Case(1, *shape, is_causal=is_causal))


def test_batches_and_grouped_heads(path):
    check(path, Case(2, 4, 2, 20, 25, 16, None, True))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_half_precision(path, dtype, is_causal):
    check(path, Case(1, 4, 2, 40, 50, 64, is_causal=is_causal, dtype=dtype))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (24, 24), (80, 80), (64, 128), (40, 7)])
def test_head_dims(path, head_dim, head_dim_v):
    check(path, Case(1, 1, 1, 33, 37, head_dim, head_dim_v, is_causal=True))


def test_fp64_on_the_cpu():
    case = Case(2, 4, 2, 30, 33, 16, is_causal=True, dtype=torch.float64)
    q, k, v = case.tensors()[:3]
    options = {"softmax_scale": 0.25, "mask": mask.causal()}
    o, lse = flash_attention_cpu.forward(q, k, v, **options)
    got = flash_attention_jvp_cpu.jvp(*tangents(case), q, k, v, o, lse, **options)
    want = by_autodiff(dense_attention, (q, k, v), tangents(case), torch.float64, **options)
    assert all(max_error(a, b) < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_any_subset_of_tangents(path, given):
    case = Case(1, 2, 1, 20, 40, 16, is_causal=True)
    device = PATHS[path][2]
    directions = [t if is_given else None for t, is_given in zip(tangents(case, device), given, strict=True)]
    to, tlse = check(path, case, directions)
    assert bool(to.any()) == any(given)
    assert bool(tlse.any()) == any(given[:2])


@pytest.mark.parametrize("config", [LaunchConfig(16, 64, 4, 1), LaunchConfig(64, 16, 4, 2)], ids=str)
def test_any_tile_size(config):
    check("triton", Case(1, 1, 1, 70, 90, 16, is_causal=True), config=config)


def test_rows_without_a_key(path):
    """Causal, more queries than keys: the first rows are constant, whatever their tangents hold."""
    forward, jvp, device = PATHS[path]
    case = Case(1, 2, 1, 60, 20, 16)
    q, k, v = case.tensors(device=device)[:3]
    tq, tk, tv = tangents(case, device)
    tq[:, :, :40] = math.nan
    options = {"softmax_scale": 0.25, "mask": mask.causal()}
    to, tlse = jvp(tq, tk, tv, q, k, v, *forward(q, k, v, **options), **options)
    assert (to[:, :, :40] == 0).all()
    assert (tlse[:, :, :40] == 0).all()
    assert to.isfinite().all()
    assert tlse.isfinite().all()


def _square(where, q_idx, k_idx, s, args):
    return args[0] * s * s + 0.01 * (k_idx - q_idx) + 0.1 * where.head


def _square_derivative(where, q_idx, k_idx, s, args):
    return 2 * args[0] * s


def test_a_score_is_a_value(path):
    check(path, Case(1, 2, 1, 37, 50, 16, is_causal=True), score=Score("s", _square, _square_derivative, (0.7,)))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale(path, scale):
    check(path, Case(1, 1, 1, 20, 45, 24, is_causal=True), softmax_scale=scale)


@pytest.mark.parametrize(
    ("the_mask", "the_score"),
    [
        (mask.window(5, 0), score.softcap(2.0)),
        (mask.document(torch.arange(30) // 8) & mask.causal(), score.alibi(torch.tensor([0.5, 0.25]))),
        (mask.prefix(4) | mask.causal(), score.bias(torch.randn(2, 30, 30)).then(score.softcap(3.0))),
    ],
    ids=["window", "document", "prefix"],
)
def test_masks_and_scores(path, the_mask, the_score):
    check(path, Case(1, 2, 1, 30, 30, 16), mask=the_mask, score=the_score)


def _every_third(where, q_idx, k_idx, args):
    return (k_idx + q_idx) % 3 == 0


def test_a_mask_without_ranges(path):
    check(path, Case(1, 1, 1, 40, 75, 16), mask=mask.Mask("every third", _every_third, None, None))


def test_sinks(path):
    sinks = torch.tensor([0.5, 2.0], device=PATHS[path][2])
    check(path, Case(1, 2, 1, 40, 30, 16, is_causal=True), sinks=sinks)


def test_dropout(path):
    check(path, Case(1, 2, 1, 30, 40, 16, is_causal=True), dropout=Dropout(0.3, torch.tensor([7])))


def test_packed_sequences_equal_each_by_itself(path):
    forward, jvp, device = PATHS[path]
    case = Case(1, 2, 1, 50, 60, 16)
    x, t = case.tensors(device=device)[:3], tangents(case, device)
    bounds_q, bounds_k = [0, 20, 20, 45], [0, 33, 35, 58]
    starts: Any = (torch.tensor(b, dtype=torch.int32, device=device) for b in (bounds_q, bounds_k))
    options: Any = {"softmax_scale": 0.25, "mask": mask.causal()}
    packed: Any = options | {"seqlens": Seqlens(*starts)}
    for tensor in (*x, *t):
        tensor[:, :, 58:] = math.nan  # belongs to no sequence
    x[0][:, :, 45:] = t[0][:, :, 45:] = math.nan
    to, tlse = jvp(*t, *x, *forward(*x, **packed), **packed)
    assert (to[:, :, 45:] == 0).all()
    assert (tlse[:, :, 45:] == 0).all()
    for i in range(3):
        rows, cols = slice(*bounds_q[i : i + 2]), slice(*bounds_k[i : i + 2])
        part, direction = ([a[0][:, :, rows], a[1][:, :, cols], a[2][:, :, cols]] for a in (x, t))
        want = jvp(*direction, *part, *forward(*part, **options), **options)
        assert max_error(to[:, :, rows], want[0]) < 1e-5
        assert max_error(tlse[:, :, rows], want[1]) < 1e-5


def test_any_strides_equal_contiguous_copies_bit_for_bit(path):
    forward, jvp, device = PATHS[path]
    case = Case(1, 2, 2, 30, 50, 64, dtype=torch.float16)
    x, t = case.tensors(device=device)[:3], tangents(case, device)
    options = {"softmax_scale": 0.125, "mask": mask.causal()}
    o, lse = forward(*x, **options)
    want = jvp(*t, *x, o, lse, **options)
    strided = [a.transpose(1, 2).contiguous().transpose(1, 2) for a in (*t, *x)]
    strided[1] = t[1].mT.contiguous().mT
    got = jvp(*strided, o.mT.contiguous().mT, lse, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[0].stride() == strided[3].stride()


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(path, shape):
    forward, jvp, device = PATHS[path]
    case = Case(2, *shape)
    x, t = case.tensors(device=device)[:3], tangents(case, device)
    options = {"softmax_scale": 0.25, "mask": mask.full()}
    o, lse = forward(*x, **options)
    to, tlse = jvp(*t, *x, o, lse, **options)
    assert torch.equal(to, torch.zeros_like(o))
    assert torch.equal(tlse, torch.zeros_like(lse))


class Attention(torch.autograd.Function):
    """How an autograd function offers the tangents: what forward saves, jvp reads."""

    @staticmethod
    def forward(q, k, v, path):
        return PATHS[path][0](q, k, v, softmax_scale=0.25, mask=mask.causal())

    @staticmethod
    def setup_context(ctx, inputs, output):
        *primals, ctx.path = inputs
        ctx.save_for_forward(*primals, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx, tq, tk, tv, _):
        return Tangent.apply(tq, tk, tv, *ctx.saved_tensors, ctx.path)


class Tangent(torch.autograd.Function):
    """The kernel call: under torch.func transforms what ``jvp`` sees are wrappers, what a ``forward`` sees is data."""

    @staticmethod
    def forward(tq, tk, tv, q, k, v, o, lse, path):
        return PATHS[path][1](tq, tk, tv, q, k, v, o, lse, softmax_scale=0.25, mask=mask.causal())

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("given", [(True, True, True), (False, True, False)], ids=str)
def test_in_an_autograd_function(path, given):
    """torch.func.jvp and dual tensors alike."""
    device = PATHS[path][2]
    case = Case(1, 2, 1, 20, 40, 16, is_causal=True)
    x, t = case.tensors(device=device)[:3], tangents(case, device)
    directions = [b if is_given else None for b, is_given in zip(t, given, strict=True)]
    want = by_autodiff(dense_attention, x, directions, torch.float64, softmax_scale=0.25, mask=mask.causal())
    with fwAD.dual_level():
        duals = [a if b is None else fwAD.make_dual(a, b) for a, b in zip(x, directions, strict=True)]
        outputs: Any = Attention.apply(*duals, path)
        got: Any = [fwAD.unpack_dual(output).tangent for output in outputs]
        assert all(max_error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))
    chosen = [i for i, b in enumerate(directions) if b is not None]

    def attend(*some):
        full = list(x)
        for i, a in zip(chosen, some, strict=True):
            full[i] = a
        return Attention.apply(*full, path)

    primals, moved = tuple(x[i] for i in chosen), tuple(t[i] for i in chosen)
    got = torch.func.jvp(attend, primals, moved)[1]
    assert all(max_error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_long_sequences(dtype, head_dim, is_causal):
    check("triton", Case(2, 4, 2, 1111, 1300, head_dim, is_causal=is_causal, dtype=dtype))


# Head dim, dtype and the bytes per thread that may spill on (sm_80, sm_90): five tiles of operands are alive at once.
COMPILED = [
    (64, "bf16", (0, 0)),
    (96, "bf16", (0, 0)),
    (128, "fp16", (0, 0)),
    (160, "bf16", (16, 0)),
    (192, "bf16", (0, 0)),
    (256, "bf16", (16, 16)),
    (64, "fp32", (0, 0)),
    (128, "fp32", (0, 0)),
    (256, "fp32", (512, 512)),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernel_compiles_within_bounds(arch):
    jobs = [Job("jvp", arch, head_dim, dtype) for head_dim, dtype, _ in COMPILED]
    for job, (_, _, allowed), report in zip(jobs, COMPILED, compile_all(jobs), strict=True):
        assert "error" not in report, f"{job}: {report}"
        assert report["spilled"] <= allowed[arch == "sm_90"], f"{job}: {report}"
        assert report["shared"] <= SHARED_LIMIT[arch], f"{job}: {report}"
        assert (report["matrix_instructions"] > 0) == (job.dtype != "fp32"), f"{job}: {report}"
