"""Every mask in the kernels: outputs and gradients against the fp64 reference, and what a new value compiles."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile import mask
from flashtile.kernel.launch import LaunchConfig
from flashtile.mask import Mask, gather, jitted
from flashtile.seqlen import Where
from tests.reference import Case, Result, assert_result_accurate, plain, reference

pytest.importorskip("triton")

import triton

from flashtile.kernel import tile_lists
from flashtile.kernel.flash_attention_backward import backward
from flashtile.kernel.flash_attention_triton import forward
from tests.kernel.offline import compile_all

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


def third(distance, args):
    return distance % args[0]


def floors(where, q_idx, k_idx, args):
    """The operands are negative on one side of the diagonal, where a kernel's own operators round the other way."""
    half = (k_idx - q_idx) // 2  # a sign // in a comment
    half //= 1
    return (third(q_idx - k_idx, args) == 1) | (((half)
        // (args[1])) == 0) | ((q_idx - k_idx) % -7 == -3)  # fmt: skip


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
    mask.document(IDS).without_ranges(),
    mask.document(IDS) & mask.causal().without_ranges(),
    mask.document(torch.tensor([2, 0, 1] * 15)),
    mask.block_sparse(torch.eye(3).bool() | (torch.arange(3) == 0), 16, 16),
    mask.block_sparse((torch.arange(24).reshape(2, 1, 4, 3) % 5 > 1), 12, 17),
    mask.dense(torch.arange(2 * 2 * SEQLEN * SEQLEN).reshape(2, 2, SEQLEN, SEQLEN) % 7 > 3),
    mask.dense((torch.arange(2 * SEQLEN) % 3 > 0).reshape(2, 1, 1, SEQLEN)) & mask.causal(),
    Mask.of(stripes, (torch.arange(46) % 5, 46, 4)),
    Mask.of(diagonal, (10,), diagonal_keys, diagonal_queries) | mask.prefix(1),
    Mask.of(floors, (3, 2)),
    Mask.of(triton.jit(floors), (3, -2)),
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


def test_kernels_floor_by_brute_force() -> None:
    """Against the operators of Python on integers, entry by entry."""
    value = Mask.of(floors, (3, 2))
    table = [[value.predicate(Where(0, 0, 40, 30), i, j, value.args) for j in range(30)] for i in range(40)]
    q, k, v = (torch.randn(1, 1, n, 16, device=DEVICE) for n in (40, 30, 30))
    same = {"softmax_scale": 1.0, "config": LaunchConfig(16, 16, 4, 1)}
    o, lse = forward(q, k, v, mask=value, **same)
    want, lse_want = forward(q, k, v, mask=mask.dense(torch.tensor(table)).to(DEVICE), **same)
    assert torch.equal(o, want)
    assert torch.equal(lse, lse_want)


@triton.jit
def jitted_third(distance, args):
    return distance % args[0]


def through_a_jitted_helper(where, q_idx, k_idx, args):
    return jitted_third(q_idx - k_idx, args) == 1


def through_a_helper(where, q_idx, k_idx, args):
    return third(q_idx - k_idx, args) == 1


def test_helpers_floor_too() -> None:
    q, k, v = (torch.randn(1, 1, 40, 16, device=DEVICE) for _ in range(3))
    masks = Mask.of(through_a_helper, (3,)), Mask.of(through_a_jitted_helper, (3,))
    one, other = (forward(q, k, v, softmax_scale=1.0, mask=value)[0] for value in masks)
    assert torch.equal(one, other)


def test_rewritten_text_keeps_its_lines() -> None:
    """What errors of the compiler show is the function's own text, at its own lines."""
    lines, first = inspect.getsourcelines(jitted(floors).fn)
    own, own_first = inspect.getsourcelines(floors)
    assert (first, len(lines)) == (own_first, len(own))
    assert lines[3] == "    half = flashtile_floor_divide(half, 1)\n"
    assert jitted(height) is jitted(height)
    assert inspect.getsource(jitted(height).fn) == inspect.getsource(height)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_functions_that_floor_compile_for_hopper(kernel) -> None:
    pytest.importorskip("triton.experimental.gluon")
    jobs = [(64, 64, "own"), (64, 64, "causal", "own") if kernel == "backward" else (64, 64, "causal", "bf16", "own")]
    results = compile_all(jobs, timeout=300, module=f"tests.kernel.hopper.compile_{kernel}")
    assert [result["error"] for result in results if "error" in result] == []


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
