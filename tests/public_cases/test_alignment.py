"""Causal alignment and windows, where the lengths of queries and keys differ."""

import math

import pytest
import torch

from flashtile import flash_attention, flash_attention_varlen, mask
from flashtile.llm.transformer import attend
from tests.public_cases.common import check, everywhere_and_interpreted, interpreted, leaves, run
from tests.reference import Case, reference


@everywhere_and_interpreted
def test_b10_more_queries_than_keys(device, backend):
    """Half of a causal output is zero when there are more queries than keys: by definition
    (Dao-AILab/flash-attention#1778)."""
    _, k, v, do, dlse = Case(1, 2, 2, 5, 2).tensors(device=device)
    q = torch.zeros_like(do)
    got = run(q, k, v, do, dlse, is_causal=True, backend=backend)
    assert torch.count_nonzero(got.o[:, :, :3]) == torch.count_nonzero(got.dq[:, :, :3]) == 0
    assert (got.lse[:, :, :3] == -math.inf).all()
    torch.testing.assert_close(got.o[:, :, 3], v[:, :, 0])
    torch.testing.assert_close(got.o[:, :, 4], v.mean(2))
    torch.testing.assert_close(got.dv[:, :, 1], do[:, :, 4] / 2)
    torch.testing.assert_close(got.dv[:, :, 0], do[:, :, 4] / 2 + do[:, :, 3])


@everywhere_and_interpreted
def test_b10_many_more_queries_than_keys(device, backend):
    """Whole tiles of queries see no key: they are written, as zeros (Dao-AILab/flash-attention#1778)."""
    keys = 70 if interpreted(backend) else 1024
    q, k, v, do, _ = Case(1, 1, 1, 2 * keys, keys, 16).tensors(device=device)
    got = check(q, k, v, do, is_causal=True, backend=backend)
    assert torch.count_nonzero(got.o[:, :, :keys]) == torch.count_nonzero(got.dq[:, :, :keys]) == 0
    assert (got.lse[:, :, :keys] == -math.inf).all()
    square = run(q[:, :, keys:], k, v, do[:, :, keys:], is_causal=True, backend=backend)
    torch.testing.assert_close((got.dk, got.dv), (square.dk, square.dv), atol=1e-5, rtol=1e-5)


@everywhere_and_interpreted
def test_b11_one_causal_query_sees_every_key(device, backend):
    """PyTorch's is_causal is aligned top-left, so that decoding attends to the first key only, and is the wrong oracle
    for bottom-right kernels (pytorch/pytorch#144858)."""
    q, k, v, *_ = Case(1, 2, 2, 1, 16).tensors(device=device)
    causal = flash_attention(q, k, v, is_causal=True, backend=backend)
    every = flash_attention(q, k, v, backend=backend)
    top_left = flash_attention(q, k, v, mask=mask.causal(align="top_left"), backend=backend)
    torch.testing.assert_close(causal, every)
    torch.testing.assert_close(top_left, v[:, :, :1])
    assert torch.equal(reference(q, k, v, is_causal=True).o, reference(q, k, v).o)


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_b11_every_attention_of_the_model_is_aligned_alike(seqlen_q, attention):
    """The same, where a model calls PyTorch's function by itself (pytorch/pytorch#144858)."""
    q, k, v, *_ = Case(1, 2, 2, seqlen_q, 16).tensors()
    want = reference(q, k, v, is_causal=True).o.float()
    torch.testing.assert_close(attend(q, k, v, is_causal=True, attention=attention), want)


@everywhere_and_interpreted
@pytest.mark.parametrize(
    ("right", "seen"), [(100, [4] * 8), (4, [1, 2, 3, 4, 4, 4, 4, 4]), (1, [0, 0, 0, 1, 2, 3, 4, 4])], ids=str
)
def test_b13_a_right_window_wider_than_the_keys(right, seen, device, backend):
    """A right window larger than the number of keys was clipped to it, which dropped keys
    (Dao-AILab/flash-attention#895)."""
    _, k, v, do, _ = Case(1, 1, 1, 8, 4).tensors(device=device)
    q = torch.zeros_like(do)
    got = check(q, k, v, do, mask=mask.window(-1, right), backend=backend)
    want = [v[0, 0, :n].mean(0) if n else torch.zeros(16, device=device) for n in seen]
    torch.testing.assert_close(got.o[0, 0], torch.stack(want))
    torch.testing.assert_close(got.lse[0, 0], torch.tensor(seen, device=device).log())


@everywhere_and_interpreted
def test_b14_packed_causal_sequences_with_fewer_keys_than_queries(device, backend):
    """Packed causal sequences with fewer keys than queries gave NaN in dq (Dao-AILab/flash-attention#443)."""
    ends = [6, 10, 26] if interpreted(backend) else [76, 110, 256]
    cu_q = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    cu_k = torch.arange(4, dtype=torch.int32, device=device)
    q, k, v = leaves(*((3 * torch.randn(n, 1, 32, device=device)).half() for n in (ends[-1], 3, 3)))
    o, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, is_causal=True, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    last = torch.tensor(ends, device=device) - 1
    others = torch.ones(ends[-1], dtype=torch.bool, device=device)
    others[last] = False
    assert torch.equal(o[last], v)
    assert torch.count_nonzero(o[others]) == torch.count_nonzero(dq[others]) == 0
    assert (lse[:, others] == -math.inf).all()
    assert torch.equal(dv, torch.ones_like(v))
    assert dq[last].abs().max() <= 1e-3 * 32**0.5
    assert dk.abs().max() <= 1e-3 * 32**0.5
