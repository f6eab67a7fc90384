"""Attention statistics, kernels (in the interpreter or on a GPU) and CPU path, against the dense matrix in fp64."""

import math
from typing import Any

import pytest
import torch

from flashtile import mask
from flashtile.kernel import flash_attention_statistics_cpu
from flashtile.score import Score
from flashtile.seqlen import Where
from tests.reference import ABSOLUTE, EMPTY_SHAPES, Case, max_error

pytest.importorskip("triton")

from flashtile.kernel import flash_attention_statistics, flash_attention_triton
from flashtile.kernel.launch import LaunchConfig
from tests.kernel.offline import SHARED_LIMIT
from tests.kernel.offline_extras import Job, compile_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = {"triton": (flash_attention_statistics, DEVICE), "cpu": (flash_attention_statistics_cpu, "cpu")}
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def dense(q, k, *, softmax_scale, mask, score=None):
    """Return the matrix of probabilities in fp64 and the log-sum-exp; zeros and -inf where a query sees no key."""
    q, k = q.cpu().double(), k.cpu().double()
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    where = Where(torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], seqlen_q, seqlen_k)
    q_idx, k_idx = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    s = q @ k.repeat_interleave(heads // max(k.shape[1], 1), dim=1).mT * softmax_scale
    if score is not None:
        s = score.forward(where, q_idx, k_idx, s, score.args)
    s = s.masked_fill(~mask.predicate(where, q_idx, k_idx, mask.args).expand_as(s), -math.inf)
    lse = s.logsumexp(-1)
    return torch.exp(s - lse[..., None]).nan_to_num(nan=0.0), lse


def close(got, want, tolerance=ABSOLUTE, name=""):
    error = max_error(got, want)
    assert error <= tolerance * max(1.0, want.abs().max().item()), f"{name}: error {error:.3g}"


def check(path, case, *, top_k=5, config=None, **options):
    """Compare every statistic with the dense matrix of the same (rounded) q and k."""
    module, device = PATHS[path]
    q, k = case.tensors(device=device)[:2]
    options = {"softmax_scale": case.head_dim**-0.5, "mask": case.mask} | options
    p, lse64 = dense(q, k, **options)
    lse = lse64.to(device, torch.float64 if case.dtype == torch.float64 else torch.float32)
    options |= {"config": config} if config else {}
    weights = torch.rand(lse.shape, device=device, dtype=lse.dtype)
    got = module.column_sums(q, k, lse, weights=weights, **options)
    close(got, (p * weights.cpu()[..., None]).sum(2), name="weighted column sums")
    entropy, values, indices = module.row_statistics(q, k, lse, top_k=top_k, **options)
    close(entropy, -torch.special.xlogy(p, p).sum(-1), name="entropy")
    check_top_k(p, values, indices, top_k)
    rows = torch.tensor([case.seqlen_q - 1, 0, case.seqlen_q // 2, 0], device=device)
    close(module.chosen_rows(q, k, lse, rows, **options), p[:, :, rows.cpu()], name="chosen rows")
    return entropy, values, indices


def check_top_k(p, values, indices, top_k):
    values, indices = values.cpu().double(), indices.cpu()
    want = torch.zeros_like(values)
    n = min(top_k, p.shape[-1])
    want[..., :n] = p.topk(n, dim=-1).values
    close(values, want, name="top-k values")
    seen = (p > 0).sum(-1, keepdim=True)
    places = torch.arange(top_k)
    assert torch.equal(indices >= 0, (places < seen).expand_as(indices))
    # The keys named are those of the probabilities named, and none is named twice.
    close(p.gather(-1, indices.clamp(min=0)) * (indices >= 0), values, name="top-k indices")
    named = torch.where(indices >= 0, indices, -1 - places).sort(-1).values
    assert (named.diff(dim=-1) > 0).all()
    assert (values.diff(dim=-1) <= 0).all()


SHAPES = [(1, 1, 33, 33), (1, 1, 1, 1), (1, 1, 1, 70), (1, 1, 70, 1), (2, 2, 17, 90), (1, 1, 90, 17), (3, 1, 40, 35)]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(path, shape, is_causal):
    check(path, Case(1, *shape, is_causal=is_causal))


def test_batches_and_grouped_heads(path):
    check(path, Case(2, 4, 2, 20, 25, 16, None, True))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_half_precision(path, dtype, head_dim):
    check(path, Case(1, 2, 1, 40, 50, head_dim, is_causal=True, dtype=dtype))


def test_fp64_on_the_cpu():
    entropy, values, _ = check("cpu", Case(2, 4, 2, 30, 33, 16, is_causal=True, dtype=torch.float64))
    assert entropy.dtype == values.dtype == torch.float64


@pytest.mark.parametrize("top_k", [1, 2, 7, 64])
def test_any_number_of_top_keys(path, top_k):
    check(path, Case(1, 1, 1, 20, 80, 16, is_causal=True), top_k=top_k)


@pytest.mark.parametrize("config", [LaunchConfig(16, 64, 4, 1), LaunchConfig(64, 16, 4, 2)], ids=str)
def test_any_tile_size_gives_the_same_answer(config):
    check("triton", Case(1, 1, 1, 70, 90, 16, is_causal=True), config=config)


def test_what_is_not_asked_for_is_none_and_changes_nothing(path):
    module, device = PATHS[path]
    q, k = Case(1, 1, 1, 20, 40, 16).tensors(device=device)[:2]
    options = {"softmax_scale": 0.25, "mask": mask.causal()}
    lse = dense(q, k, **options)[1].float().to(device)
    entropy, values, indices = module.row_statistics(q, k, lse, top_k=3, **options)
    assert torch.equal(module.row_statistics(q, k, lse, **options)[0], entropy)
    assert module.row_statistics(q, k, lse, **options)[1:] == (None, None)
    none, values_alone, indices_alone = module.row_statistics(q, k, lse, entropy=False, top_k=3, **options)
    assert none is None
    assert torch.equal(values_alone, values)
    assert torch.equal(indices_alone, indices)
    ones = torch.ones_like(lse)
    sums = module.column_sums(q, k, lse, **options)
    assert torch.equal(sums, module.column_sums(q, k, lse, weights=ones, **options))
    assert max_error(sums.sum(-1), torch.full_like(sums[..., 0], 20)) < 1e-4


def test_equal_probabilities_go_to_the_lower_key(path):
    """All logits are equal, then all but two: exact in every dtype and tile size."""
    module, device = PATHS[path]
    q, k = torch.ones(1, 1, 5, 16, device=device), torch.zeros(1, 1, 70, 16, device=device)
    options = {"softmax_scale": 1.0, "mask": mask.causal(), "top_k": 6}
    _, values, indices = module.row_statistics(q, k, torch.arange(66.0, 71, device=device).log()[None, None], **options)
    assert torch.equal(indices.cpu(), torch.arange(6).expand(1, 1, 5, 6))
    assert max_error(values[0, 0, :, 5], 1 / torch.arange(66.0, 71)) < 1e-7
    k[:, :, [11, 60]] = 0.125
    lse = torch.full((1, 1, 5), 6.0, device=device)
    _, _, indices = module.row_statistics(q, k, lse, **options)
    assert torch.equal(indices.cpu(), torch.tensor([11, 60, 0, 1, 2, 3]).expand(1, 1, 5, 6))


def test_rows_without_a_key(path):
    """Causal, more queries than keys: the first rows see nothing, and what their q and weights hold is not read."""
    module, device = PATHS[path]
    q, k = Case(1, 2, 1, 60, 20, 16).tensors(device=device)[:2]
    options = {"softmax_scale": 0.25, "mask": mask.causal()}
    p, lse = dense(q, k, **options)
    lse = lse.float().to(device)
    assert (lse[:, :, :40] == -math.inf).all()
    weights = torch.ones_like(lse)
    weights[:, :, :40] = math.nan
    close(module.column_sums(q, k, lse, weights=weights, **options), p.sum(2))
    entropy, values, indices = module.row_statistics(q, k, lse, top_k=4, **options)
    assert (entropy[:, :, :40] == 0).all()
    assert (entropy[:, :, 40] < 1e-6).all()  # one key
    assert (values[:, :, :40] == 0).all()
    assert (indices[:, :, :40] == -1).all()
    assert torch.equal(indices[0, 0, 40].cpu(), torch.tensor([0, -1, -1, -1]))
    assert (module.chosen_rows(q, k, lse, torch.tensor([0, 39], device=device), **options) == 0).all()


def test_entropy_of_large_logits_does_not_cancel(path):
    """lse - sum p s would lose ten bits here."""
    module, device = PATHS[path]
    q, k = torch.full((1, 1, 3, 16), 64.0, device=device), torch.full((1, 1, 50, 16), 64.0, device=device)
    lse = torch.full((1, 1, 3), 16 * 4096 + math.log(50), device=device)
    entropy = module.row_statistics(q, k, lse, softmax_scale=1.0, mask=mask.full())[0]
    assert max_error(entropy, torch.full_like(entropy, math.log(50))) < 0.05
    lse[:] = 16 * 4096
    k[:, :, 1:] = 0
    assert (module.row_statistics(q, k, lse, softmax_scale=1.0, mask=mask.full())[0] == 0).all()


def _square(where, q_idx, k_idx, s, args):
    return args[0] * s * s + 0.01 * (k_idx - q_idx) + 0.1 * where.head


def _square_derivative(where, q_idx, k_idx, s, args):
    return 2 * args[0] * s


def test_a_score_is_a_value(path):
    score = Score("square", _square, _square_derivative, (0.7,))
    check(path, Case(1, 2, 1, 37, 50, 16, is_causal=True), score=score)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(path, scale):
    check(path, Case(1, 1, 1, 20, 45, 24, is_causal=True), softmax_scale=scale, top_k=3)


def _every_third(where, q_idx, k_idx, args):
    return (k_idx + q_idx) % 3 == 0


def test_a_mask_without_ranges(path):
    check(path, Case(1, 1, 1, 40, 75, 16), mask=mask.Mask("every third", _every_third, None, None))


def test_any_strides_equal_contiguous_copies_bit_for_bit(path):
    module, device = PATHS[path]
    q, k = Case(1, 2, 2, 30, 50, 64, dtype=torch.float16).tensors(device=device)[:2]
    options = {"softmax_scale": 0.125, "mask": mask.causal()}
    lse = dense(q, k, **options)[1].float().to(device)
    strided = (q.transpose(1, 2).contiguous().transpose(1, 2), k.mT.contiguous().mT, lse.mT.contiguous().mT)
    rows = torch.tensor([0, 29], device=device)
    for run in (
        lambda *x: [module.column_sums(*x, **options)],
        lambda *x: module.row_statistics(*x, top_k=4, **options),
        lambda *x: [module.chosen_rows(*x, rows, **options)],
    ):
        for got, want in zip(run(*strided), run(q, k, lse), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty(path, shape):
    module, device = PATHS[path]
    q, k = Case(2, *shape).tensors(device=device)[:2]
    lse = torch.full(q.shape[:3], -math.inf, device=device)
    options = {"softmax_scale": 0.25, "mask": mask.full()}
    assert torch.equal(module.column_sums(q, k, lse, **options), torch.zeros(*q.shape[:2], k.shape[2], device=device))
    entropy, values, indices = module.row_statistics(q, k, lse, top_k=2, **options)
    assert torch.equal(entropy, torch.zeros_like(lse))
    assert values.shape == indices.shape == (*lse.shape, 2)
    assert (values == 0).all()
    assert (indices == -1).all()
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    assert module.chosen_rows(q, k, lse, nothing, **options).shape == (*q.shape[:2], 0, k.shape[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_long_sequences(dtype, head_dim, is_causal):
    check("triton", Case(2, 4, 2, 1111, 1300, head_dim, is_causal=is_causal, dtype=dtype), top_k=33)


@pytest.mark.gpu
def test_100_thousand_tokens_in_linear_memory():
    """The matrix of one head would take 40 GB in fp32."""
    n = 100_000
    q, k = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    options = {"softmax_scale": 0.125, "mask": mask.causal()}
    _, lse = flash_attention_triton.forward(q, k, k, **options)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sums = flash_attention_statistics.column_sums(q, k, lse, **options)
    found: Any = flash_attention_statistics.row_statistics(q, k, lse, top_k=8, **options)
    entropy, values, _ = found
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    assert abs(sums.sum().item() - n) < 1
    last = torch.softmax((q[0, 0, -1].double() @ k[0, 0].double().T) * 0.125, dim=-1)
    assert max_error(values[0, 0, -1], last.topk(8).values) < 1e-5
    assert abs(entropy[0, 0, -1].item() + torch.special.xlogy(last, last).sum().item()) < 1e-3


COMPILED = [
    ("columns", 64, "bf16", 0),
    ("columns", 128, "bf16", 0),
    ("columns", 256, "fp16", 0),
    ("rows", 64, "bf16", 8),
    ("rows", 128, "bf16", 64),
    ("rows", 256, "fp16", 8),
    ("chosen_rows", 128, "bf16", 0),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_compile_without_spilling(arch):
    jobs = [Job(kernel, arch, head_dim, dtype, "causal", top_k) for kernel, head_dim, dtype, top_k in COMPILED]
    for job, report in zip(jobs, compile_all(jobs), strict=True):
        assert "error" not in report, f"{job}: {report}"
        assert report["spilled"] == 0, f"{job}: {report}"
        assert report["shared"] <= SHARED_LIMIT[arch], f"{job}: {report}"
        assert report["matrix_instructions"] > 0, f"{job}: {report}"
