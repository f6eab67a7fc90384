"""The Hopper kernels on a GPU of compute capability 9.0, by name: outputs and all gradients against the reference."""

import math
from typing import Any

import pytest
import torch

from flashtile import flash_attention, mask, score
from flashtile.kernel import launch
from tests.kernel.hopper.biases import biases
from tests.reference import Case, assert_result_accurate, max_error, plain, reference
from tests.test_attention import leaves
from tests.test_features import compare, learned_gradients, masks, run, scores
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_rounding_of_a_weight_that_is_most_of_its_row(head_dim):
    """O is no further from exact than what rounding it costs; the weight's rounding alone would make that 1.3 times.

    The walk begins with the last two keys, of logit 0, and meets the large one, of at most 2^8, after them.
    """
    rows, keys = 128, 130
    q, k = torch.zeros(rows, head_dim), torch.zeros(keys, head_dim)
    q[:, 0], q[:, 1] = 6 + torch.arange(rows) % 64 / 32, 1
    k[0, 0], k[1:128, 1] = 1, -40
    v = torch.randn(keys, head_dim, generator=torch.Generator().manual_seed(0))
    q, k, v = (t.to(DEVICE, BF16)[None, None] for t in (q, k, v))
    o = flash_attention(q, k, v, softmax_scale=math.log(2), backend=BACKEND).double()
    weights = torch.exp2(q.double() @ k.double().mT)
    exact = weights / weights.sum(-1, keepdim=True) @ v.double()
    rounded = exact.to(BF16).double()
    assert (o - exact).square().mean().sqrt() <= 1.05 * (rounded - exact).square().mean().sqrt()


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


def attend_with(problem: Case, the_score: score.Score | None, the_mask: mask.Mask, learned=(), **options) -> None:
    """Compare with the reference; ``learned`` are the score's tensors, whose gradients are compared too."""
    q, k, v, do, dlse = problem.tensors(device=DEVICE)
    rules: dict[str, Any] = {"mask": the_mask, "score": the_score, **options}
    got, got_learned = run(q, k, v, do, dlse, learned, backend=BACKEND, **rules)
    expected: dict[str, Any] = {**rules, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))
    if learned:
        wide = [t.cpu().double() for t in (q, k, v)]
        want = learned_gradients(wide, do, dlse, learned, the_score, the_mask, False, None, None)
        for ours, theirs in zip(got_learned, want, strict=True):
            assert max_error(ours, theirs) <= 3e-2 * (theirs.abs().max().item() + 1)


# Of ids in pieces, and of scattered ones.
DOCUMENTS = {
    "pieces": lambda a, b: mask.document(a),
    "pieces, causal": lambda a, b: mask.causal() & mask.document(a),
    "window, pieces of pieces": lambda a, b: mask.window(70, 3) & mask.document(a) & mask.document(a // 2),
    "scattered": lambda a, b: mask.document(b),
    "scattered, causal": lambda a, b: mask.document(b) & mask.causal(),
    "one of either": lambda a, b: mask.document(torch.stack([a, b])) & mask.causal(),
    "without ranges": lambda a, b: mask.document(a).without_ranges(),
    "beside one without": lambda a, b: mask.document(a) & mask.causal().without_ranges(),
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name, head_dim):
    """By the intervals of rows where those say all, else by every entry."""
    for seqlens in ((333, 333), (200, 333), (400, 270)):
        position = torch.arange(seqlens[1], device=DEVICE)
        attend_with(case(head_dim, seqlens=seqlens), None, DOCUMENTS[name](position // 90, position // 30 % 4))


def bias(problem: Case, name: str) -> score.Score:
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    return score.bias(biases(*shape, DEVICE)[name]())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", biases(1, 1, 2, 2, "cpu"))
def test_biases(name, head_dim):
    """However its entries come to the kernels: in tiles, or one by one."""
    attend_with(case(head_dim), bias(case(head_dim), name), mask.causal())


@pytest.mark.parametrize("dims", [(32, 32), (96, 96), (128, 64), (192, 192), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("name", ["every entry", "fp32"])
def test_biases_by_head_dim(name, dims):
    attend_with(case(*dims), bias(case(*dims), name), mask.full())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("mask_name", ["causal", "window", "document"])
def test_lengths_of_biases_in_tiles(mask_name, seqlens, head_dim):
    """Of many key tiles and of less than one; with fewer rows than a consumer has, and fewer than one consumer has."""
    problem = case(head_dim, seqlens=seqlens)
    the_mask = masks(problem.batch, problem.heads_q, *seqlens, device=DEVICE)[mask_name]()
    attend_with(problem, bias(problem, "every entry"), the_mask)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
def test_gradients_of_biases_in_tiles(shape, head_dim, dtype):
    problem = case(head_dim, seqlens=(264, 336))
    leaf = torch.randn(*shape, 264, 336, device=DEVICE, dtype=dtype).requires_grad_()
    attend_with(problem, score.bias(leaf), mask.causal(), (leaf,))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("order", ["bias, softcap", "softcap, bias", "alibi, bias", "bias, bias"])
def test_chains_with_biases_in_tiles(order, head_dim):
    problem = case(head_dim, seqlens=(264, 336))
    makers = {
        "bias": lambda: score.bias(torch.randn(4, 264, 336, device=DEVICE, dtype=BF16)),
        "softcap": lambda: score.softcap(3.0),
        "alibi": lambda: score.alibi(torch.rand(4, device=DEVICE)),
    }
    first, after = (makers[name]() for name in order.split(", "))
    attend_with(problem, first.then(after), mask.causal())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_in_tiles_are_what_others_read(head_dim):
    """Many programs at many tiles: the same bits as where rows of odd length forbid tiles."""
    q, k, v, do = (torch.randn(2, 16, 3000, head_dim, device=DEVICE, dtype=BF16) for _ in range(4))
    odd = torch.randn(16, 3000, 3001, device=DEVICE, dtype=BF16)[..., :3000]
    tiled = odd.contiguous()
    for _ in range(5):
        results = []
        for tensor in (odd, tiled):
            inputs = leaves(q, k, v)
            o = flash_attention(*inputs, is_causal=True, score=score.bias(tensor), backend=BACKEND)
            results.append((o, *torch.autograd.grad(o, inputs, do)))
        (o, _, dk, dv), (o_tiled, _, dk_tiled, dv_tiled) = results
        for ours, theirs in ((o_tiled, o), (dk_tiled, dk), (dv_tiled, dv)):
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1.6e-2)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_packed_sequences_with_biases_in_tiles(head_dim, is_causal):
    """A tensor for each sequence, of which a short one reads the beginning."""
    lengths = [1, 300, 0, 128, 57], [1, 300, 20, 128, 257]
    tensors = packed(*lengths, dims=(head_dim, head_dim), device=DEVICE, dtype=BF16)
    for shape in ((5, 4, 300, 304), (1, 1, 300, 304)):
        rule = score.bias(torch.randn(shape, device=DEVICE, dtype=BF16))
        check(tensors, *(cumulative(n, DEVICE) for n in lengths), is_causal=is_causal, score=rule, backend=BACKEND)


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
