"""Packed sequences in padded buffers, and empty ones among them."""

import math

import pytest
import torch

from tests.public_cases.common import HALF, check_packed, everywhere_and_interpreted, interpreted, packed


@everywhere_and_interpreted
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_b56_rows_past_the_last_sequence(is_causal, device, backend):
    """Rows past the last sequence of a padded buffer were never written, in results and gradients
    (Dao-AILab/flash-attention#2324, Dao-AILab/flash-attention#1228)."""
    lengths, heads, head_dim, tail = ([5, 8], 2, 16, 4) if interpreted(backend) else ([40, 0, 91], 8, 64, 29)
    tensors = packed(lengths, lengths, (heads, heads), head_dim, tail=tail, device=device, dtype=HALF)
    got = check_packed(tensors, lengths, lengths, is_causal=is_causal, backend=backend)
    total = sum(lengths)
    for t in (got.o, got.dq, got.dk, got.dv):
        assert t.shape[0] == total + tail
        assert torch.count_nonzero(t[total:]) == 0
    assert (got.lse[:, total:] == -math.inf).all()


@everywhere_and_interpreted
def test_b58_sequences_without_queries_of_wide_heads(device, backend):
    """Sequences without queries made the backward pass of head_dim 256 fault (Dao-AILab/flash-attention#2562)."""
    lengths_q, lengths_k = [0, 12, 8, 0], [25, 17, 8, 30]
    tensors = packed(lengths_q, lengths_k, (4, 1), 256, device=device, dtype=HALF)
    got = check_packed(tensors, lengths_q, lengths_k, backend=backend)
    for t in (got.dk, got.dv):
        assert torch.count_nonzero(t[:25]) == torch.count_nonzero(t[50:]) == 0
