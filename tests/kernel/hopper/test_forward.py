"""The forward kernel for Hopper without one: it compiles as intended, its roles never wait for ever, its sizes fit."""

import random

import pytest

pytest.importorskip("triton.experimental.gluon")

from flashtile.kernel.hopper import barriers, schedule
from flashtile.kernel.hopper.forward_sizes import SHARED_LIMIT, chunks_of, sizes, two_consumers
from flashtile.kernel.launch import HopperConfig
from tests.kernel.hopper import protocol
from tests.kernel.hopper.compile_forward import Job
from tests.kernel.offline import compile_all

TWO, THREE = (240, 24), (160, 32)  # registers of consumers and producer, by number of consumers
# By (head_dim, head_dim_v): block_m, block_n, consumers, stages and registers.
CONFIGS = {
    (64, 64): (192, 128, 3, 2, *THREE),
    (96, 96): (128, 128, 2, 2, *TWO),
    (128, 128): (128, 128, 2, 2, *TWO),
    (192, 128): (128, 128, 2, 2, *TWO),
    (192, 192): (128, 64, 2, 2, *TWO),
    (256, 256): (128, 64, 2, 2, *TWO),
}


def job(head_dim: int, head_dim_v: int = 0, mask: str = "causal", schedule: str = "queue", **rest) -> Job:
    head_dim_v = head_dim_v or head_dim
    found = next(c for (d, dv), c in CONFIGS.items() if head_dim <= d and head_dim_v <= dv)
    return Job(head_dim, head_dim_v, mask, config=(*found, schedule), **rest)


BIASES = (*(job(d, score="bf16 bias") for d in (64, 128)), job(64, score="bias"), job(64, score="bias of odd rows"))
REPRESENTATIVE = (job(64), job(128, mask="full", dtype="fp16"), job(256), job(192, 128, packed=True))
SWEEP = (
    *(job(*dims, mask=m, dtype=t) for dims in CONFIGS for m in ("causal", "full") for t in ("bf16", "fp16")),
    *(job(*dims, packed=True) for dims in CONFIGS),
    *(job(d, mask=mask) for d in (64, 128) for mask in ("window", "document", "lists")),
    *(job(d, score=score) for d in (64, 128, 256) for score in ("softcap", "alibi", "bias")),
    *(job(64, mask="full", score=score) for score in ("softcap", "alibi")),  # three consumers
    *(job(d, score="bf16 bias") for d in (64, 96, 128, 192, 256)),
    job(128, score="bf16 bias", packed=True, dtype="fp16"),
    *(job(128, score=score) for score in ("softcap, alibi", "bias, softcap", "bias of odd rows", "bias of keys")),
    job(128, sinks=True), job(80), job(64, 128), job(128, schedule="grid"),
)  # fmt: skip
# Instructions that move registers to memory and back, of all roles, with room for another compiler.
SPILLS = 24  # in masked tiles and at the ends of query tiles: the way of a full tile has none
SPILLS_WITH_SCORES = 96  # in masked tiles with three consumers
SPILLS_WITH_TABLES = 160  # where masks and scores read a table at every entry of a tile


def name_of(job: Job) -> str:
    options = [job.mask, job.dtype, job.score, "packed" * job.packed, "sinks" * job.sinks, job.config[-1]]
    return f"{job.head_dim}x{job.head_dim_v} " + " ".join(filter(None, options))


def check(report: dict, job: Job) -> None:
    assert "error" not in report, report["error"]
    assert report["shared"] <= SHARED_LIMIT
    assert report["registers"] in (168, 128)  # of 65,536 for two consumers, for three; the roles trade them
    assert report["matrix_instructions"] > 0
    assert report["warnings"] == []  # matrix instructions one after the other, for want of registers or by a branch
    tables = job.mask in ("document", "lists") or job.score.startswith(("bias", "bf16 bias"))
    assert report["spills"] <= (SPILLS_WITH_TABLES if tables else SPILLS_WITH_SCORES if job.score else SPILLS)
    assert report["spills_on_full_tiles"] <= (12 if tables or job.score else 0)
    reserved = set(range(barriers.first_free(job.config[2] + 1)))
    own = {int(number) for number in report["barriers"]}
    assert max(own) < barriers.MOST
    assert own & reserved  # Triton's own, of warpgroups


@pytest.mark.slow
def test_representative_kernels_compile():
    for one, report in zip(REPRESENTATIVE, compile_with_gluon(REPRESENTATIVE), strict=True):
        check(report, one)


@pytest.mark.slow
def test_biases_come_by_the_copy_engine_where_it_can_read_them():
    """On the way of a full tile nothing is read from global memory; matrices of 16 bits are read as such."""
    *tiled, single, odd = compile_with_gluon(BIASES)
    for report in (*tiled, single):
        assert report["loads_on_full_tiles"] == report["spills_on_full_tiles"] == 0
    assert [report["matrix_loads_on_full_tiles"] for report in (*tiled, single, odd)] == [16, 16, 0, 0]  # 2 consumers
    assert odd["loads_on_full_tiles"] > 0


@pytest.fixture(scope="module")
def reports(request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes minutes: pytest -m slow tests/kernel/hopper")
    return dict(zip(SWEEP, compile_with_gluon(SWEEP), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one compiles for all
@pytest.mark.parametrize("job", SWEEP, ids=name_of)
def test_every_kernel_compiles(reports, job):
    check(reports[job], job)


def compile_with_gluon(jobs):
    return compile_all(jobs, timeout=900, module="tests.kernel.hopper.compile_forward")


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_roles_neither_wait_for_ever_nor_read_too_late(consumers, stages):
    """Any number of query tiles, with any number of key tiles, in any order of steps."""
    chance = random.Random(stages)
    for seed in range(60):
        tiles = [chance.choice((0, 1, 1, 1, 2, 3, 5)) for _ in range(chance.randrange(12))]
        entries = chance.choice((0, consumers, consumers + 1, 2 * consumers))
        protocol.run(tiles, consumers, stages, chance.choice((1, 2)), seed, entries)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_heads_fit_their_tiles(head_dim):
    columns = chunks_of(head_dim)
    assert head_dim <= sum(columns)
    assert all(n & (n - 1) == 0 for n in columns)


@pytest.mark.parametrize("dims", CONFIGS, ids=str)
def test_buffers_and_barriers_fit(dims):
    config = HopperConfig(*CONFIGS[dims])
    found = sizes(*map(chunks_of, dims), config, True, False)
    assert found.q_free.value + found.q_buffers.value <= barriers.MOST
    with pytest.raises(ValueError, match="no room"):
        sizes((256,), (256,), HopperConfig(128, 128, 2, 2, 240, 24), True, False)


def sizes_with(dims, entry_bytes):
    config = HopperConfig(*CONFIGS[dims])
    config = two_consumers(config) if config.consumers == 3 else config
    return sizes(*map(chunks_of, dims), config, True, False, True, entry_bytes)


@pytest.mark.parametrize("dims", CONFIGS, ids=str)
def test_entries_fit_beside_the_rest(dims):
    """A bias of 16 bits comes in tiles at every head_dim that there are square tiles for, one of 32 bits at some."""
    found = sizes_with(dims, 2)
    assert found.entries_buffers.value == {(192, 128): 0, (256, 256): 2}.get(dims, 3)
    assert found.entries_free.value + found.entries_buffers.value <= barriers.MOST
    assert sizes_with(dims, 4).entries_buffers.value == (3 if dims in ((64, 64), (96, 96), (192, 192)) else 0)
    assert sizes_with(dims, 0).entries_buffers.value == 0


def test_sections_hold_whole_groups_of_heads():
    """Query heads that share keys and values are taken together, at least one group, at most all."""
    assert schedule.heads_per_section(2, 16, 4, 2**20) == 32
    assert schedule.heads_per_section(8, 16, 4, 2**24) == 8
    assert schedule.heads_per_section(1, 16, 4, 2**30) == 4
    assert schedule.heads_per_section(1, 16, 16, 0) == 16
