"""Strides."""

import pytest
import torch

from flashtile import flash_attention
from tests.public_cases.common import HALF, check_packed, everywhere_and_interpreted, interpreted, leaves, packed, run
from tests.reference import Case, Result

DO_LAYOUTS = {
    "b-n-h-d": lambda do: do.transpose(1, 2).contiguous().transpose(1, 2),
    "last-stride-2": lambda do: torch.stack((do, do + 1), -1)[..., 0],
    "d-before-n": lambda do: do.mT.contiguous().mT,
    "odd-offset": lambda do: torch.cat((do.new_zeros(1), do.reshape(-1)))[1:].view(do.shape),
}


def assert_equal(got: Result, want: Result):
    for name, ours, theirs in zip(Result._fields, got, want, strict=True):
        assert torch.equal(ours, theirs), name


@everywhere_and_interpreted
@pytest.mark.parametrize("layout", DO_LAYOUTS)
def test_b23_a_gradient_that_is_not_contiguous(layout, device, backend):
    """The backward pass took the incoming gradient for contiguous and returned wrong gradients
    (Dao-AILab/flash-attention#355)."""
    q, k, v, do, _ = Case(2, 4, 1, 32, 32, 128, dtype=torch.float16).tensors(device=device)
    strided = DO_LAYOUTS[layout](do)
    assert torch.equal(strided, do)
    assert layout == "odd-offset" or not strided.is_contiguous()
    assert_equal(run(q, k, v, strided, backend=backend), run(q, k, v, do, backend=backend))


@everywhere_and_interpreted
@pytest.mark.parametrize("layout", ["h-n-d", "last-stride-2", "stride-0"])
def test_b23_a_gradient_that_is_not_contiguous_of_packed_sequences(layout, device, backend):
    """The same for packed sequences (Dao-AILab/flash-attention#355)."""
    q, k, v, do = packed([20, 13], [20, 13], (4, 1), 32, device=device, dtype=torch.float16)
    strided = {
        "h-n-d": do.transpose(0, 1).contiguous().transpose(0, 1),
        "last-stride-2": torch.stack((do, do + 1), -1)[..., 0],
        "stride-0": do[:1, :1].expand(do.shape),
    }[layout]
    got, want = (
        check_packed((q, k, v, t), [20, 13], [20, 13], backend=backend) for t in (strided, strided.contiguous())
    )
    assert_equal(got, want)


@everywhere_and_interpreted
@pytest.mark.parametrize("seqlen", [33, 65, 257])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("seen", ["full", "causal", "mask"])
def test_b25_keys_and_values_of_stride_zero(seen, head_dim, seqlen, device, backend):
    """Keys and values broadcast over the heads gave badly wrong output at lengths of 1 modulo 32
    (pytorch/pytorch#191937)."""
    if interpreted(backend) and (seqlen > 33 or head_dim > 64):
        pytest.skip("the interpreter takes small sizes only")
    heads = 2 if interpreted(backend) else 4
    q, k, v, do, _ = Case(1, heads, 1, seqlen, seqlen, head_dim, dtype=HALF).tensors(device=device)
    visible = torch.rand(seqlen, seqlen, device=device) > 0.3
    options = {"is_causal": seen == "causal", "mask": visible if seen == "mask" else None, "backend": backend}
    shape = 1, heads, seqlen, head_dim
    wide_k, wide_v = k.expand(shape), v.expand(shape)
    want = run(q, wide_k.contiguous(), wide_v.contiguous(), do, **options)
    assert_equal(run(q, wide_k, wide_v, do, **options), want)
    q, k, v = leaves(q, k, v)
    o = flash_attention(q, k.expand(shape), v.expand(shape), **options)
    _, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    for ours, theirs in ((dk, want.dk), (dv, want.dv)):
        torch.testing.assert_close(ours, theirs.sum(1, keepdim=True))
