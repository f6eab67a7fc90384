"""Sinks, dropout, packed sequences, tile lists and wide heads in the portable kernels, against the fp64 reference."""

import math

import pytest
import torch

from flashtile import mask
from flashtile.dropout import Dropout, keep_mask
from flashtile.kernel.launch import LaunchConfig
from flashtile.mask import Mask
from flashtile.seqlen import Seqlens, Where
from tests.reference import Case, Result, assert_accurate, assert_result_accurate, max_error, plain, reference

pytest.importorskip("triton")

from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_triton import forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchConfig(16, 32, 4, 1)


def dense64(q, k, v, *, causal, scale=None, sinks=None, keep=None, rescale=1.0):
    """Attention in fp64 by the book, differentiable by autograd; rows without a key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
        s = s.masked_fill(j > i + s.shape[3] - s.shape[2], -1e300)
    dead = (s == -1e300).all(-1, keepdim=True)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = s.softmax(-1)
    if sinks is not None:
        p, dead = p[..., :-1], torch.zeros_like(dead)
    if keep is not None:
        p = torch.where(keep, p * rescale, 0.0)
    return torch.where(dead, 0.0, p @ v), lse.masked_fill(dead.squeeze(-1), -math.inf)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(40, 50), (50, 20)], ids=str)
def test_sinks_take_part_in_the_denominator(is_causal, lengths):
    case = Case(2, 4, 2, lengths[0], lengths[1], 16, is_causal=is_causal)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    sinks = torch.randn(4, device=DEVICE)
    options = {"softmax_scale": 0.25, "mask": case.mask}
    o, lse = forward(q, k, v, sinks=sinks, config=SMALL, **options)
    grads = backward(do, q, k, v, o, lse, dlse, config_dq=SMALL, config_dkdv=SMALL, **options)
    inputs = [t.cpu().double().requires_grad_() for t in (q, k, v)]
    o64, lse64 = dense64(*inputs, causal=is_causal, sinks=sinks.cpu().double())
    grads64 = torch.autograd.grad((o64, lse64), inputs, (do.cpu().double(), dlse.cpu().double()))
    for got, want in zip((o, lse, *grads), (o64, lse64, *grads64), strict=True):
        assert max_error(got, want) < 2e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("p", [0.25, 0.7])
@pytest.mark.parametrize("config", [SMALL, LaunchConfig(32, 16, 4, 1)], ids=["16x32", "32x16"])
def test_dropout_drops_what_the_reference_drops(is_causal, p, config):
    case = Case(2, 4, 2, 45, 50, 16, is_causal=is_causal)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    dropout = Dropout(p, torch.tensor([1234567890123], device=DEVICE))
    options = {"softmax_scale": 0.25, "mask": case.mask, "dropout": dropout}
    o, lse = forward(q, k, v, config=config, **options)
    grads = backward(do, q, k, v, o, lse, dlse, config_dq=config, config_dkdv=config, **options)
    where = Where(torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], 45, 50)
    keep = keep_mask(dropout.seed.cpu(), where, torch.arange(45)[:, None], torch.arange(50), p)
    inputs = [t.cpu().double().requires_grad_() for t in (q, k, v)]
    o64, lse64 = dense64(*inputs, causal=is_causal, keep=keep, rescale=1 / (1 - p))
    grads64 = torch.autograd.grad((o64, lse64), inputs, (do.cpu().double(), dlse.cpu().double()))
    for got, want in zip((o, lse, *grads), (o64, lse64, *grads64), strict=True):
        assert max_error(got, want) < 5e-5


LENGTHS = {
    "odd": ([5, 33, 1, 40], [7, 20, 64, 40]),
    "empty": ([0, 30, 0, 0, 17, 0], [5, 0, 0, 9, 17, 3]),
    "single": ([70], [70]),
    "fewer keys than queries": ([76, 34, 46], [1, 1, 1]),
    "one token": ([0, 0, 0, 1], [0, 0, 0, 1]),
}


def packed(lengths, used=None, tail=6, heads=(4, 2), dtype=torch.float32):
    """Return packed q, k, v, do as 4-D views, with ``tail`` rows of NaN behind, and their Seqlens."""
    (lengths_q, lengths_k), (heads_q, heads_kv) = lengths, heads
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32) for lengths in (lengths_q, lengths_k))
    total_q, total_k = sum(lengths_q), sum(lengths_k)

    def rows(total, heads):
        t = torch.randn(total + tail, heads, 16, device=DEVICE, dtype=dtype)
        t[total:] = math.nan
        return t.transpose(0, 1).unsqueeze(0)

    tensors = rows(total_q, heads_q), rows(total_k, heads_kv), rows(total_k, heads_kv), rows(total_q, heads_q)
    used = [None if u is None else torch.tensor(u, dtype=torch.int32, device=DEVICE) for u in used or (None, None)]
    return tensors, Seqlens(cu_q, cu_k, used[0], used[1])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("use_less", [False, True], ids=["all", "seqused"])
def test_packed_sequences_equal_each_on_its_own(is_causal, name, use_less):
    lengths_q, lengths_k = LENGTHS[name]
    used_q = [max(n - 2, 0) for n in lengths_q] if use_less else lengths_q
    used_k = [max(n - 3, 0) for n in lengths_k] if use_less else lengths_k
    (q, k, v, do), seqlens = packed(LENGTHS[name], (used_q, used_k) if use_less else None)
    options = {"softmax_scale": 0.25, "mask": mask.causal() if is_causal else mask.full(), "seqlens": seqlens}
    o, lse = forward(q, k, v, config=SMALL, **options)
    got = Result(o, lse, *backward(do, q, k, v, o, lse, None, config_dq=SMALL, config_dkdv=SMALL, **options))
    want = Result(*(torch.zeros(t.shape) for t in (q, q[..., 0], q, k, v)))
    want.lse.fill_(-math.inf)
    plain_ = Result(*(t.clone() for t in want))
    for i, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        a, b = int(seqlens.cu_seqlens_q[i]), int(seqlens.cu_seqlens_k[i])
        one = [t[:, :, start : start + size] for t, start, size in ((q, a, n), (k, b, m), (v, b, m))]
        arguments = {"is_causal": is_causal, "do": do[:, :, a : a + n]}
        for whole, part in ((want, reference(*one, **arguments)), (plain_, plain(*one, **arguments))):
            for field, start, size in (("o", a, n), ("lse", a, n), ("dq", a, n), ("dk", b, m), ("dv", b, m)):
                getattr(whole, field)[:, :, start : start + size] = getattr(part, field)
    assert_result_accurate(got, want, plain_)


def test_a_neighbours_nan_stays_with_the_neighbour():
    (q, k, v, do), seqlens = packed(([20, 20], [20, 20]), tail=0, dtype=torch.float16)
    options = {"softmax_scale": 0.25, "mask": mask.causal(), "seqlens": seqlens}
    o, lse = forward(q, k, v, config=SMALL, **options)
    expected = Result(o, lse, *backward(do, q, k, v, o, lse, None, **options))
    for t in (q, k, v, do):
        t[:, :, 20:] = math.nan
    o, lse = forward(q, k, v, config=SMALL, **options)
    got = Result(o, lse, *backward(do, q, k, v, o, lse, None, **options))
    for ours, want in zip(got, expected, strict=True):
        assert torch.equal(ours[:, :, :20], want[:, :, :20])


def _checkerboard(where, q_idx, k_idx, args):
    return ((q_idx // 24 + k_idx // 40 + where.head) % 3 != 1) & (k_idx % 7 != args[0])


@pytest.mark.parametrize("lengths", [(100, 130), (64, 64), (70, 33)], ids=str)
@pytest.mark.parametrize("config", [SMALL, LaunchConfig(32, 16, 4, 1)], ids=["16x32", "32x16"])
def test_a_mask_without_ranges_gets_tile_lists(lengths, config):
    value = Mask("checkerboard", _checkerboard, None, None, (9,))  # type: ignore[arg-type]
    case = Case(2, 4, 2, lengths[0], lengths[1], 16)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    options = {"softmax_scale": 0.25, "mask": value}
    o, lse = forward(q, k, v, config=config, **options)
    got = Result(o, lse, *backward(do, q, k, v, o, lse, dlse, config_dq=config, config_dkdv=config, **options))
    expected = {"mask": value, "do": do, "dlse": dlse}
    assert_result_accurate(got, reference(q, k, v, **expected), plain(q, k, v, **expected))


def test_tile_lists_hold_every_tile_once_and_in_the_right_class():
    from flashtile.kernel.tile_lists import tile_lists

    value = Mask("checkerboard", _checkerboard, None, None, (9,))  # type: ignore[arg-type]
    shape, block_m, block_n = (1, 3, 100, 130), 16, 32
    i, j = torch.arange(100)[:, None], torch.arange(130)
    for of_keys in (False, True):
        config = LaunchConfig(block_m, block_n, 4, 1)
        lists = tile_lists(value.on_device(), shape, config, of_keys, torch.device(DEVICE))
        for head in range(3):
            seen = _checkerboard(Where(0, head, 100, 130), i, j, (9,))
            for m in range(7):
                for n in range(5):
                    tile = seen[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
                    whole = (m + 1) * block_m <= 100 if of_keys else (n + 1) * block_n <= 130
                    state = 2 if not tile.any() else 0 if tile.all() and whole else 1
                    block, other = (n, m) if of_keys else (m, n)
                    order, counts = lists.order[0, head, block].tolist(), lists.counts[0, head, block].tolist()
                    step = order.index(other)
                    assert state == (0 if step < counts[0] else 1 if step < counts[1] else 2)


def test_the_largest_logit_of_every_row():
    case = Case(2, 4, 2, 40, 50, 16, is_causal=True)
    q, k, v, _, _ = case.tensors(device=DEVICE)
    largest = torch.empty(2, 4, 40, device=DEVICE)
    forward(q, k, v, softmax_scale=0.25, mask=case.mask, max_logits=largest, config=SMALL)
    s = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.25
    s = s.masked_fill(torch.ones(40, 50, device=DEVICE, dtype=torch.bool).triu(11), -math.inf)
    assert max_error(largest, s.amax(-1)) < 1e-5


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(512, 512), (576, 512)])
def test_wide_heads_forward(head_dim, head_dim_v):
    case = Case(1, 2, 1, 20, 40, head_dim, head_dim_v, is_causal=True, dtype=torch.float16)
    q, k, v, _, _ = case.tensors(device=DEVICE)
    o, lse = forward(q, k, v, softmax_scale=head_dim**-0.5, mask=case.mask)
    expected = reference(q, k, v, is_causal=True)
    theirs = plain(q, k, v, is_causal=True)
    assert_accurate(o, expected.o, theirs.o)
    assert_accurate(lse, expected.lse, theirs.lse)
