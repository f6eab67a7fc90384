"""Every mask in the kernels: outputs and gradients against the fp64 reference, and what a new value compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import mask
from flashtile.kernel.launch import LaunchConfig
from flashtile.mask import Mask, gather
from flashtile.seqlen import Where
from tests.reference import Case, Result, assert_result_accurate, plain, reference

pytest.importorskip("triton")

from flashtile.kernel import tile_lists
from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_triton import forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQLEN = 45


def height(where, k_idx, args):
    return gather(args[0], k_idx + where.batch, args[1])


def stripes(where, q_idx, k_idx, args):
    return height(where, k_idx, args) > (q_idx + k_idx + where.head) % args[2]


def diagonal(where, q_idx, k_idx, args):
    return q_idx // args[0] == k_idx // args[0]


def diagonal_keys(where, q_lo, q_hi, args):
    first, last = q_lo // args[0], (q_hi - 1) // args[0]
    return first * args[0], last * args[0], (first + 1) * args[0], (last + 1) * args[0]


def diagonal_queries(where, k_lo, k_hi, args):
    return diagonal_keys(where, k_lo, k_hi, args)


def packed(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


IDS = torch.stack([packed(20, 3, 22), packed(1, 44)])
MASKS = [
    mask.full(),
    mask.causal(),
    mask.causal(align="top_left"),
    mask.window(9, 0),
    mask.window(1, 20),
    mask.window(-1, 3),
    mask.window(17, -1),
    mask.chunked(20),
    mask.prefix([30, 3]) | mask.causal(),
    mask.key_padding([17, 45]),
    mask.document(IDS),
    mask.document(IDS) & mask.causal() & mask.window(5, 0),
    mask.document(torch.tensor([2, 0, 1] * 15)),
    mask.block_sparse(torch.eye(3).bool() | (torch.arange(3) == 0), 16, 16),
    mask.block_sparse((torch.arange(24).reshape(2, 1, 4, 3) % 5 > 1), 12, 17),
    mask.dense(torch.arange(2 * 2 * SEQLEN * SEQLEN).reshape(2, 2, SEQLEN, SEQLEN) % 7 > 3),
    mask.dense((torch.arange(2 * SEQLEN) % 3 > 0).reshape(2, 1, 1, SEQLEN)) & mask.causal(),
    Mask.of(stripes, (torch.arange(46) % 5, 46, 4)),
    Mask.of(diagonal, (10,), diagonal_keys, diagonal_queries) | mask.prefix(1),
    (mask.prefix(2) | mask.window(4, 0)).without_ranges(),
    ~mask.window(8, 8),
    ~(mask.chunked(16) | mask.prefix([40, 0])),
]


def check(value: Mask, seqlen_q: int, seqlen_k: int, heads_kv: int = 1) -> None:
    case = Case(2, 2, heads_kv, seqlen_q, seqlen_k, 16)
    q, k, v, do, dlse = case.tensors(device=DEVICE)
    config = LaunchConfig(16, 16, 4, 1)
    options = {"softmax_scale": 0.25, "mask": value.to(DEVICE)}
    o, lse = forward(q, k, v, config=config, **options)
    grads = backward(do, q, k, v, o, lse, dlse, config_dq=config, config_dkdv=config, **options)
    expected = {"softmax_scale": 0.25, "mask": value, "do": do, "dlse": dlse}
    assert_result_accurate(Result(o, lse, *grads), reference(q, k, v, **expected), plain(q, k, v, **expected))


@pytest.mark.parametrize("value", MASKS, ids=str)
def test_kernels_agree_with_the_reference(value: Mask) -> None:
    check(value, SEQLEN, SEQLEN)


@pytest.mark.parametrize(
    "value",
    [mask.window(3, 2), mask.chunked(7) & mask.causal(), mask.document(IDS), mask.prefix([9, 0]) | mask.window(0, 0)],
    ids=str,
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 33), (33, 5), (1, 20), (20, 1)])
def test_kernels_with_unequal_lengths(value: Mask, seqlen_q: int, seqlen_k: int) -> None:
    check(value, seqlen_q, seqlen_k, heads_kv=2)


def same_code(a: Mask, b: Mask) -> bool:
    """Whether two masks are the same to a compiler: functions, kinds of arguments, whether numbers are specialised."""
    return kinds(a.on_device()) == kinds(b.on_device())


def kinds(value) -> object:
    if isinstance(value, tuple):
        return tuple(kinds(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    return value


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (mask.window(100, 0), mask.window(1000, 0)),
        (mask.chunked(100), mask.chunked(7)),
        (mask.prefix([3, 4]) | mask.causal(), mask.prefix([7, 9]) | mask.causal()),
        (mask.document(packed(5, 6)), mask.document(packed(3, 3, 9))),
        (mask.dense(torch.ones(5, 7).bool()), mask.dense(torch.ones(9, 3).bool())),
        (Mask.of(diagonal, (10,)), Mask.of(diagonal, (23,))),
    ],
    ids=str,
)
def test_new_values_compile_nothing_new(a: Mask, b: Mask) -> None:
    assert same_code(a, b)
    assert a != b


def test_kernels_compile_with_masks() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.compile_masks"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2], timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [result for result in results if "error" in result] == []
    assert {result["loops"] for result in results if result["kernel"] == "two loops"} == {2}


def test_tile_lists_of_blocks_that_are_no_power_of_two():
    """Three warpgroups of 64 queries make tiles of 192 rows; here 48, against the predicate by brute force."""
    value = mask.block_sparse(torch.rand(1, 2, 5, 7) > 0.6, 20, 16)
    config = LaunchConfig(48, 32, 4, 1)
    lists = tile_lists.tile_lists(value.to(DEVICE).on_device(), (1, 2, 100, 111), config, False, torch.device(DEVICE))
    heads, rows, cols = torch.arange(2)[:, None, None], torch.arange(100)[:, None], torch.arange(111)[None]
    visible = value.predicate(Where(0, heads, 100, 111), rows, cols, value.args)
    for head in range(2):
        for block in range(3):
            tiles = [visible[head, block * 48 : block * 48 + 48, n * 32 : n * 32 + 32] for n in range(4)]
            full = [n for n, tile in enumerate(tiles) if tile.all() and n * 32 + 32 <= 111]
            partial = [n for n, tile in enumerate(tiles) if tile.any() and n not in full]
            counts = [len(full), len(full) + len(partial)]
            assert lists.counts[0, head, block].tolist() == counts
            assert lists.order[0, head, block, : counts[1]].tolist() == full + partial
