"""Dropout's random words: the published ones, the same on the device, and as random as they should be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtile.dropout import Dropout, draw_seed, keep_mask, philox
from flashtile.seqlen import Where

INDEX = torch.arange(512)


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, want) -> None:
    words = philox((torch.tensor(key[0]), torch.tensor(key[1])), tuple(torch.tensor(x) for x in counter))
    assert tuple(x.item() for x in words) == want


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_fraction_kept(p: float) -> None:
    where = Where(INDEX[:2].view(2, 1, 1, 1), INDEX[:3].view(3, 1, 1), 512, 512)
    kept = keep_mask(seed_of(7), where, INDEX[:, None], INDEX, p)
    assert kept.shape == (2, 3, 512, 512)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) <= 4 * deviation
    for dim in range(4):  # no index is treated better than others
        kept_along = kept.double().mean(tuple(d for d in range(4) if d != dim))
        count = kept.numel() // kept.shape[dim]
        assert (kept_along - (1 - p)).abs().max() <= 5 * (p * (1 - p) / count) ** 0.5


def test_rows_heads_batches_and_seeds_are_independent() -> None:
    def row(seed: int = 7, batch: int = 1, head: int = 2, query: int = 3) -> torch.Tensor:
        return keep_mask(seed_of(seed), Where(batch, head, 9, 9), query, torch.arange(4096), 0.5)

    one = row()
    for other in (row(seed=8), row(seed=7 + 2**32), row(batch=2), row(head=1), row(query=4), row(head=3, query=2)):
        assert abs((one == other).double().mean().item() - 0.5) < 5 * 0.5 / 64
    assert torch.equal(one, row())


def test_a_part_is_the_part_of_the_whole() -> None:
    where = Where(torch.arange(2).view(2, 1, 1, 1), torch.arange(4).view(4, 1, 1), 512, 512)
    whole = keep_mask(seed_of(-5), where, INDEX[:, None], INDEX, 0.3)
    part = keep_mask(seed_of(-5), Where(1, 3, 1, 1), INDEX[100:117, None], INDEX[33:50], 0.3)
    assert torch.equal(part, whole[1, 3, 100:117, 33:50])
    assert not torch.equal(whole[0, 0], whole[0, 0].T)


@pytest.mark.parametrize("p", [1.0, -0.1, 1.5, float("nan")])
def test_a_probability_outside_its_range_is_named(p: float) -> None:
    with pytest.raises(ValueError, match=rf"dropout p is {p}, but wants 0 <= p < 1"):
        _ = Dropout(p, seed_of(0)).threshold


def test_threshold_and_rescale() -> None:
    assert Dropout(0.0, seed_of(0)).threshold == 0
    assert Dropout(0.75, seed_of(0)).threshold == 3 << 30
    assert Dropout(0.75, seed_of(0)).rescale == 4.0
    assert Dropout(1 - 2**-53, seed_of(0)).threshold == 2**32 - 1


def test_seeds_come_from_torch_s_generator_which_advances() -> None:
    """flash-attention#314: two calls, two masks; the same after the same manual_seed."""
    torch.manual_seed(3)
    first, second = draw_seed("cpu"), draw_seed("cpu")
    assert first.dtype == torch.int64
    assert first.shape == (1,)
    assert first != second
    torch.manual_seed(3)
    assert (draw_seed("cpu"), draw_seed("cpu")) == (first, second)
    torch.manual_seed(3)
    draw_seed("cpu")
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert not torch.equal(torch.rand(4), drawn)
    own = torch.Generator().manual_seed(3)
    assert draw_seed("cpu", own) == first
    assert draw_seed("cpu", own) == second


@pytest.mark.gpu
def test_a_cuda_graph_draws_a_new_seed_at_every_replay() -> None:
    def draw() -> torch.Tensor:
        return keep_mask(draw_seed("cuda"), Where(0, 0, 64, 64), torch.arange(64, device="cuda")[:, None],
                         torch.arange(64, device="cuda"), 0.5)  # fmt: skip

    draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = draw()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(kept.clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    torch.cuda.manual_seed(5)
    graph.replay()
    again = kept.clone()
    torch.cuda.manual_seed(5)
    graph.replay()
    assert torch.equal(kept, again)


# -------------------------------------------------------------------------------------------------------- on the device

triton = pytest.importorskip("triton")
tl = triton.language
from flashtile.kernel.dropout import keep  # noqa: E402

_Where = tl.constexpr(Where)


@triton.jit
def _keep_kernel(out_ptr, seed_ptr, batch, head, q_start, k_start, threshold, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    kept = keep(tl.load(seed_ptr), _Where(batch, head, 9, 9), (q_start + rows)[:, None], (k_start + cols)[None, :],
                threshold)  # fmt: skip
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], kept.to(tl.int8))


@triton.jit
def _transposed_kernel(out_ptr, seed_ptr, batch, head, q_start, k_start, threshold, M: tl.constexpr, N: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    kept = keep(tl.load(seed_ptr), _Where(batch, head, 9, 9), (q_start + rows)[None, :], (k_start + cols)[:, None],
                threshold)  # fmt: skip
    tl.store(out_ptr + cols[:, None] * M + rows[None, :], kept.to(tl.int8))


PLACES = [(0, 0, 0, 0), (1, 5, 77, 1000), (70_000, 3, 2**31 - 64, 2**31 - 32)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123_456_789_012_345])
def test_the_device_keeps_the_same_weights(seed: int, p: float, place: tuple[int, int, int, int]) -> None:
    batch, head, q_start, k_start = place
    out = torch.empty(64, 32, dtype=torch.int8, device=DEVICE)
    dropout = Dropout(p, seed_of(seed).to(DEVICE))
    _keep_kernel[(1,)](out, dropout.seed, batch, head, q_start, k_start, dropout.threshold, 64, 32)
    q_idx, k_idx = q_start + torch.arange(64)[:, None], k_start + torch.arange(32)
    want = keep_mask(seed_of(seed), Where(batch, head, 9, 9), q_idx, k_idx, p)
    assert torch.equal(out.bool().cpu(), want)
    _transposed_kernel[(1,)](out.view(32, 64), dropout.seed, batch, head, q_start, k_start, dropout.threshold, 64, 32)
    assert torch.equal(out.view(32, 64).bool().cpu(), want.T)


OFFLINE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.test_dropout import _keep_kernel
for integer in ("i32", "i64"):
    signature = dict.fromkeys(_keep_kernel.arg_names, "i32") | {"out_ptr": "*i8", "seed_ptr": "*i64"}
    signature |= {"threshold": integer, "M": "constexpr", "N": "constexpr"}
    source = ASTSource(_keep_kernel, signature, {(7,): 64, (8,): 32})
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        compiled = triton.compile(source, target=target)
        print(integer, target.arch, compiled.asm.get("ptx", "").count("mul.hi.u32"))
"""


def test_it_compiles_for_gpus_that_are_not_there() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=environment, cwd=Path(__file__).parents[1],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\n") == 4
