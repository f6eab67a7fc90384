"""Every mask: its ranges against its predicate, by brute force. A new mask joins by one entry in MASKS."""

import itertools

import pytest
import torch

from flashtile.kernel.flash_attention_mock import blockwise_backward, blockwise_forward
from flashtile.mask import Mask, causal, full
from flashtile.seqlen import Where
from tests.reference import Case, Result, assert_result_accurate, plain, reference

MASKS = [full(), causal()]
LENGTHS = [(6, 6), (1, 7), (7, 1), (4, 9), (9, 4), (0, 3), (3, 0)]
BATCH, HEADS = 2, 2

all_masks = pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.name)
all_lengths = pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)


def visible(mask: Mask, where: Where) -> list[list[bool]]:
    """Return the mask of one (batch, head) as nested lists, from the predicate on plain integers."""
    return [
        [bool(mask.predicate(where, i, j, mask.args)) for j in range(where.seqlen_k)] for i in range(where.seqlen_q)
    ]


def places(seqlen_q: int, seqlen_k: int) -> list[Where]:
    return [Where(b, h, seqlen_q, seqlen_k) for b in range(BATCH) for h in range(HEADS)]


def check_range(bounds: tuple[int, int, int, int], length: int, tile: list[list[bool]]) -> None:
    """Check (lo, full_lo, full_hi, hi) against ``tile[j]``: what the rows of the tile say about index j."""
    lo, full_lo, full_hi, hi = bounds
    for j in range(length):
        if not lo <= j < hi:
            assert not any(tile[j]), f"index {j} is visible, but outside [{lo}, {hi})"
        if full_lo <= j < full_hi:
            assert all(tile[j]), f"index {j} is in the full range [{full_lo}, {full_hi}), but not visible to all"


@all_masks
@all_lengths
def test_key_range_agrees_with_predicate(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    for where in places(seqlen_q, seqlen_k):
        rows = visible(mask, where)
        for q_lo, q_hi in itertools.combinations(range(seqlen_q + 1), 2):
            columns = [[rows[i][j] for i in range(q_lo, q_hi)] for j in range(seqlen_k)]
            check_range(mask.key_range(where, q_lo, q_hi, mask.args), seqlen_k, columns)


@all_masks
@all_lengths
def test_query_range_agrees_with_predicate(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    for where in places(seqlen_q, seqlen_k):
        rows = visible(mask, where)
        for k_lo, k_hi in itertools.combinations(range(seqlen_k + 1), 2):
            tile = [rows[i][k_lo:k_hi] for i in range(seqlen_q)]
            check_range(mask.query_range(where, k_lo, k_hi, mask.args), seqlen_q, tile)


@all_masks
@all_lengths
def test_predicate_is_the_same_on_tensors(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    where = Where(torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None], seqlen_q, seqlen_k)
    q_idx, k_idx = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    got = mask.predicate(where, q_idx, k_idx, mask.args).expand(BATCH, HEADS, seqlen_q, seqlen_k)
    want = [visible(mask, place) for place in places(seqlen_q, seqlen_k)]
    assert got.flatten(0, 1).tolist() == want


@all_masks
@all_lengths
def test_tiles_agree_with_the_dense_formula(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    case = Case(BATCH, HEADS, HEADS, seqlen_q, seqlen_k, head_dim=4)
    q, k, v, do, dlse = case.tensors()
    options = {"softmax_scale": 0.5, "mask": mask, "block_q": 2, "block_k": 3}
    o, lse = blockwise_forward(q, k, v, **options)
    grads = blockwise_backward(do, q, k, v, o, lse, dlse, **options)
    given = {"softmax_scale": 0.5, "mask": mask, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **given), plain(q, k, v, **given))


def test_causal_is_aligned_bottom_right() -> None:
    assert visible(causal(), Where(0, 0, 2, 4)) == [[True, True, True, False], [True, True, True, True]]
    assert visible(causal(), Where(0, 0, 3, 1)) == [[False], [False], [True]]


def test_masks_are_values() -> None:
    assert causal() == causal()
    assert causal() != full()
    assert hash(causal()) == hash(causal())
