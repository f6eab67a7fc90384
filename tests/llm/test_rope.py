"""Rotary positions against complex multiplication in fp64, and tables that no cast spoils."""

import pytest
import torch

from flashtile.llm import RotaryPositionalEmbedding


def rotate_by_complex_numbers(x, positions, theta):
    d = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = positions.double()[..., None] * frequencies
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("d_k", [2, 6, 64])
def test_rotates_neighbouring_pairs(d_k, theta):
    x = torch.randn(2, 3, 7, d_k)
    rope = RotaryPositionalEmbedding(theta, d_k, 20)
    positions = torch.tensor([0, 19, 3, 3, 5, 1, 11])
    expected = rotate_by_complex_numbers(x, positions, theta).float()
    torch.testing.assert_close(rope(x, positions), expected, atol=1e-5, rtol=1e-5)


def test_positions_of_each_sequence_serve_all_its_heads():
    x = torch.randn(2, 3, 5, 8)  # batch, heads, seq, d_k
    positions = torch.stack((torch.arange(5), torch.arange(10, 15)))
    rope = RotaryPositionalEmbedding(10_000.0, 8, 20)
    rotated = rope(x, positions)
    for b in range(2):
        for h in range(3):
            assert torch.equal(rotated[b, h], rope(x[b, h], positions[b]))


def test_without_positions_counts_from_start():
    x = torch.randn(2, 5, 8)
    rope = RotaryPositionalEmbedding(10_000.0, 8, 20)
    assert torch.equal(rope(x), rope(x, torch.arange(5)))
    assert torch.equal(rope(x, start=15), rope(x, torch.arange(15, 20)))


def test_keeps_lengths_and_relative_dot_products():
    rope = RotaryPositionalEmbedding(10_000.0, 16, 100)
    q, k = torch.randn(2, 1, 16)
    torch.testing.assert_close(rope(q, torch.tensor([77])).norm(), q.norm())
    near = rope(q, torch.tensor([5])) @ rope(k, torch.tensor([2])).mT
    far = rope(q, torch.tensor([95])) @ rope(k, torch.tensor([92])).mT
    torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_stay_fp32_when_the_model_is_cast(dtype):
    rope = RotaryPositionalEmbedding(10_000.0, 32, 2048).to(dtype)
    angles = torch.outer(torch.arange(2048).double(), 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32))
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert (rope.cos - angles.cos()).abs().max() < 5e-4
    assert (rope.sin - angles.sin()).abs().max() < 5e-4
    x = torch.randn(2048, 32).to(dtype)
    assert rope(x).dtype == dtype
    torch.testing.assert_close(rope(x), RotaryPositionalEmbedding(10_000.0, 32, 2048)(x.float()).to(dtype))


def test_tables_survive_a_detour_over_meta():
    rope = RotaryPositionalEmbedding(10_000.0, 8, 20, device="meta").to_empty(device="cpu")
    assert torch.equal(rope.cos, RotaryPositionalEmbedding(10_000.0, 8, 20).cos)


def test_has_no_state():
    assert not RotaryPositionalEmbedding(10_000.0, 8, 20).state_dict()


def test_gradient_is_the_rotation_back():
    rope = RotaryPositionalEmbedding(10_000.0, 6, 9).double()
    torch.autograd.gradcheck(rope, torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True))


def test_refuses():
    with pytest.raises(ValueError, match="d_k must be even: features are rotated in pairs, got 5"):
        RotaryPositionalEmbedding(10_000.0, 5, 20)
    rope = RotaryPositionalEmbedding(10_000.0, 8, 20)
    with pytest.raises(ValueError, match="positions must stay below max_seq_len=20, got 20"):
        rope(torch.zeros(2, 8), start=19)
    with pytest.raises(ValueError, match=r"x must have 8 features in its last dimension, got shape \(2, 4\)"):
        rope(torch.zeros(2, 4))
