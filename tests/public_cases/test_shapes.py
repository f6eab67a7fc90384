"""Lengths, head dims, grouped heads, empty tensors, and sizes past 32 bits."""

import math

import pytest
import torch

from flashtile import flash_attention_varlen, score
from tests.public_cases.common import (
    HALF,
    check,
    check_packed,
    everywhere_and_interpreted,
    interpreted,
    leaves,
    packed,
    run,
)
from tests.reference import Case


@everywhere_and_interpreted
@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 104, 160, 192])
def test_b16_padded_head_dims(head_dim, device, backend):
    """Head dims padded to no multiple of 32 leaked stale columns of the accumulator into dq
    (Dao-AILab/flash-attention#2896)."""
    heads, seqlen = (8, 512) if device == "cuda" else (1, 20) if interpreted(backend) else (2, 130)
    check(*Case(1, heads, heads, seqlen, seqlen, head_dim, dtype=HALF).tensors(device=device)[:4], backend=backend)
    tensors = packed([seqlen], [seqlen], (heads, heads), head_dim, device=device, dtype=HALF)
    check_packed(tensors, [seqlen], [seqlen], backend=backend)


@everywhere_and_interpreted
@pytest.mark.parametrize("head_dims", [(64, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_b17_groups_unlike_the_number_of_heads_and_values_of_another_width(is_causal, head_dims, device, backend):
    """The backward pass mixed up heads where the group size is not the number of KV heads, and used the width of k for
    v (XunhaoLai/native-sparse-attention-triton#27)."""
    seqlen = 20 if interpreted(backend) else 130
    case = Case(1, 6, 2, seqlen, seqlen, *head_dims, is_causal=is_causal, dtype=HALF)
    q, k, v, do, _ = case.tensors(device=device)
    got = check(q, k, v, do, is_causal=is_causal, backend=backend)
    assert got.o.shape == (1, 6, seqlen, head_dims[1])
    wide = run(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), do, is_causal=is_causal, backend=backend)
    assert torch.equal(got.o, wide.o)
    assert torch.equal(got.dq, wide.dq)
    for ours, theirs in ((got.dk, wide.dk), (got.dv, wide.dv)):
        summed = theirs.float().unflatten(1, (2, 3)).sum(2)
        torch.testing.assert_close(ours.float(), summed, atol=5e-2, rtol=2e-2)


@everywhere_and_interpreted
@pytest.mark.parametrize("shape", [(0, 3952, 16), (2, 0, 16), (2, 40, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_b19_empty_tensors(is_causal, shape, device, backend):
    """Batch 0 or empty tensors raised instead of giving an empty result (Dao-AILab/flash-attention#1159,
    facebookresearch/xformers#852)."""
    batch, seqlen_q, seqlen_k = shape
    q, do = (torch.randn(batch, seqlen_q, 10, 64, device=device).half().transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(batch, seqlen_k, 10, 64, device=device).half().transpose(1, 2) for _ in range(2))
    got = run(q, k, v, do, is_causal=is_causal, backend=backend)
    assert [t.shape for t in got] == [q.shape, q.shape[:3], q.shape, k.shape, v.shape]
    assert all(torch.count_nonzero(t) == 0 for t in (got.o, got.dq, got.dk, got.dv))
    assert (got.lse == -math.inf).all()


@everywhere_and_interpreted
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_b19_no_sequence_at_all(twice, device, backend):
    """The same for packed sequences, and the tensors of a score (Dao-AILab/flash-attention#1159)."""
    q, k, v = leaves(*packed([], [], (2, 1), 16, tail=3, device=device)[:3])
    slopes = torch.ones(2, device=device, requires_grad=True)
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    backend = None if twice else backend
    rule = score.alibi(slopes)
    o = flash_attention_varlen(q, k, v, cu, cu, score=rule, backend=backend, differentiable_twice=twice)
    grads = torch.autograd.grad(o, (q, k, v, slopes), torch.ones_like(o), allow_unused=True, materialize_grads=True)
    assert all(torch.count_nonzero(t) == 0 for t in (o, *grads))


@everywhere_and_interpreted
def test_b20_fewer_tokens_than_sequences(device, backend):
    """Grouped heads and fewer tokens than sequences failed in a reshape of a decoding shortcut
    (Dao-AILab/flash-attention#1619)."""
    lengths = [0, 0, 0, 1]
    q, k, v, do = packed(lengths, lengths, (21, 7), 120, device=device)
    got = check_packed((q, k, v, do), lengths, lengths, backend=backend)
    torch.testing.assert_close(got.o, v.repeat_interleave(3, 1))


@everywhere_and_interpreted
def test_b20_single_queries_among_empty_sequences(device, backend):
    """Grouped heads, max_seqlen 1 and empty sequences failed in the same shortcut (Dao-AILab/flash-attention#1537)."""
    lengths_q, lengths_k = [0, 1, 0, 1], [0, 3, 0, 5]
    tensors = packed(lengths_q, lengths_k, (9, 3), 64, device=device)
    check_packed(tensors, lengths_q, lengths_k, is_causal=True, max_seqlen_q=1, max_seqlen_k=5, backend=backend)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("batch", [699, 700])
def test_b22_rows_times_their_stride_past_32_bits(batch):
    """The backward pass computed row times stride in 32 bits and crashed past 2**31 (pytorch/pytorch#190857,
    fla-org/flash-linear-attention#1080)."""
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of free GPU memory")
    torch.use_deterministic_algorithms(False)  # no filling of gigabytes
    k, v = (torch.randn(24_000, batch, 128, device="cuda", dtype=HALF).transpose(0, 1)[:, None] for _ in range(2))
    q, do = (torch.randn(256, batch, 128, device="cuda", dtype=HALF).transpose(0, 1)[:, None] for _ in range(2))
    got = run(q, k, v, do)
    for entry in (0, batch - 1):
        alone = run(*(t[entry : entry + 1].contiguous() for t in (q, k, v, do)))
        for name, ours, theirs in zip(got._fields, got, alone, strict=True):
            ours = ours[entry : entry + 1]
            if name == "dq":  # may be summed in another order
                torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
            else:
                assert torch.equal(ours, theirs), name
