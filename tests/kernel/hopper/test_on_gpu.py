"""The Hopper kernels on a GPU of compute capability 9.0, by name: outputs and all gradients against the reference."""

import pytest
import torch

from flashtile import flash_attention, mask, score
from flashtile.kernel import launch
from tests.reference import Case, assert_result_accurate, plain, reference
from tests.test_attention import leaves
from tests.test_features import compare, masks, run, scores
from tests.test_varlen import check, cumulative, packed

HERE = torch.cuda.is_available() and launch.arch_of(torch.device("cuda")) == "sm_90"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU of compute capability 9.0")]

DEVICE, BACKEND = "cuda", "hopper"
WIDTHS = (8, 40, 64, 72, 96, 104, 128, 160, 192, 248, 256)
DIMS = [(d, d) for d in WIDTHS] + [(192, 128), (64, 128), (128, 64), (64, 256)]
LENGTHS = [
    (1, 1),
    (1, 500),
    (500, 1),
    (63, 65),
    (128, 128),
    (129, 127),
    (200, 333),
    (333, 200),
    (700, 130),
    (1000, 777),
]
BF16, FP16 = torch.bfloat16, torch.float16


def case(head_dim=128, head_dim_v=None, seqlens=(200, 333), heads=(4, 2), dtype=BF16, batch=2) -> Case:
    return Case(batch, heads[0], heads[1], seqlens[0], seqlens[1], head_dim, head_dim_v, dtype=dtype)


def attend(problem: Case, mask_name: str = "none", score_name: str = "none", **options) -> None:
    compare(problem, mask_name, score_name, device=DEVICE, backend=BACKEND, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims, is_causal):
    attend(case(*dims), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
def test_lengths(seqlens, head_dim, is_causal):
    attend(case(head_dim, seqlens=seqlens), is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp16(head_dim):
    attend(case(head_dim, dtype=FP16), is_causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (50, 50)], ids=str)
def test_heads(heads):
    attend(case(64, heads=heads), is_causal=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", masks(1, 1, 1, 1))
def test_masks(name, head_dim):
    attend(case(head_dim), name)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", scores(1, 1, 1, 1))
def test_scores(name, head_dim):
    attend(case(head_dim), "causal", name)


@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0, 2.0**-50], ids=str)
@pytest.mark.parametrize("name", ["softcap", "temperature", "alibi", "bias", "several"])
def test_scores_with_scales_that_are_no_unit(name, softmax_scale):
    problem = case(64)
    q, k, v, do, dlse = problem.tensors(device=DEVICE)
    the_score, _ = scores(problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, DEVICE)[name]()
    rules = {"mask": mask.causal(), "score": the_score, "softmax_scale": softmax_scale}
    got, _ = run(q, k, v, do, dlse, backend=BACKEND, **rules)
    expected = {**rules, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask_name", ["none", "window"])
def test_slopes_without_a_mask_that_looks_back(mask_name, head_dim):
    attend(case(head_dim), mask_name, "alibi")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_slopes_of_keys_that_are_all_far(head_dim):
    """The tensor cores add q . k to the slopes' share of a logit, which must not cost more than fp32 does."""
    length, near, heads = 2**15, 128, 4
    q, k, v = (torch.randn(1, heads, length, head_dim, device=DEVICE, dtype=BF16) for _ in range(3))
    slopes = torch.tensor([1.0, 0.5, 2.0**-4, 2.0**-8], device=DEVICE)
    rules = {"mask": mask.causal() & mask.key_padding(near), "score": score.alibi(slopes)}
    _, lse = flash_attention(q, k, v, backend=BACKEND, return_lse=True, **rules)
    s = q.double() @ k[:, :, :near].double().mT * head_dim**-0.5
    distance = torch.arange(length, device=DEVICE)[:, None] - torch.arange(near, device=DEVICE)
    s = (s - slopes.double()[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    want = s.logsumexp(-1)
    assert ((lse - want).abs() <= 2.0**-20 * want.abs() + 1e-4).all()


def test_sinks():
    attend(case(), "window", "softcap", sinks=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths",
    [([1, 300, 0, 128, 57], [1, 300, 20, 128, 257]), ([0, 0, 5, 200], [7, 0, 0, 333]), ([3] * 40, [2] * 40)],
    ids=["ragged", "empty", "short"],
)
def test_packed_sequences(lengths, is_causal, head_dim):
    """The rows after the last sequence hold NaN."""
    tensors = packed(*lengths, dims=(head_dim, head_dim), device=DEVICE, dtype=BF16)
    check(tensors, *(cumulative(n, DEVICE) for n in lengths), is_causal=is_causal, backend=BACKEND)


def test_packed_sequences_cut_short():
    tensors = packed([100, 200, 300], [100, 200, 300], dims=(128, 128), device=DEVICE, dtype=BF16)
    used = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([100, 150, 0], [50, 200, 300])]
    cu_seqlens = cumulative([100, 200, 300], DEVICE)
    check(tensors, cu_seqlens, cu_seqlens, used=used, mask=mask.window(40, 0), backend=BACKEND)


@pytest.mark.parametrize("layout", ["bnhd", "fused", "expanded", "sliced"])
def test_strides_that_the_copy_engine_reads(layout):
    b, h, n, d = 2, 3, 260, 64
    if layout == "bnhd":
        q, k, v = (torch.randn(b, n, h, d, device=DEVICE, dtype=BF16).transpose(1, 2) for _ in range(3))
    elif layout == "fused":
        q, k, v = (t.transpose(1, 2) for t in torch.randn(b, n, 3, h, d, device=DEVICE, dtype=BF16).unbind(2))
    elif layout == "expanded":
        q, k, v = (torch.randn(b, 1, n, d, device=DEVICE, dtype=BF16).expand(b, h, n, d) for _ in range(3))
    else:
        q, k, v = (torch.randn(b, h, 2 * n, d + 8, device=DEVICE, dtype=BF16)[:, :, ::2, 8:] for _ in range(3))
    do = torch.randn(b, h, d, n, device=DEVICE, dtype=BF16).mT  # which it does not read: copied
    results = []
    for tensors in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        inputs = leaves(*(t.detach() for t in tensors))
        o = flash_attention(*inputs, is_causal=True, backend=BACKEND)
        results.append((o, *torch.autograd.grad(o, inputs, do)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_streams_do_not_share_a_queue(head_dim):
    """Programs of two launches at the same time draw their tiles from counters of their own."""
    q = torch.randn(2, 16, 1500, head_dim, device=DEVICE, dtype=BF16)
    want = flash_attention(q, q, q, is_causal=True, backend=BACKEND)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(flash_attention(q, q, q, is_causal=True, backend=BACKEND))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want) for o in results)


def test_cuda_graph():
    q = torch.randn(2, 8, 700, 128, device=DEVICE, dtype=BF16).requires_grad_()
    do = torch.randn_like(q)

    def step():
        o = flash_attention(q, q, q, is_causal=True, score=score.softcap(5.0), backend=BACKEND)
        return o, torch.autograd.grad(o, q, do)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
