"""The backward pass for Hopper without one: it compiles as intended, and what surrounds the kernel is right."""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import dataclasses
import itertools
import math

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton
import triton.language as tl

from flashtile import mask, score
from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, seqlen
from flashtile.kernel.hopper import backward as hopper
from flashtile.kernel.hopper import backward_sizes, forward, pre_post, rows
from flashtile.kernel.layout import copied_in_blocks
from flashtile.kernel.tile import head_dim_chunks
from flashtile.seqlen import Seqlens, Where
from tests import reference
from tests.conftest import INTERPRETED
from tests.kernel.hopper import backward_protocol
from tests.kernel.hopper.compile_backward import Job
from tests.kernel.hopper.offline import SHARED_LIMIT
from tests.kernel.offline import compile_all

DIMS = ((32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (128, 64), (192, 192), (192, 128), (256, 256))
BIASES = (
    *(Job(d, d, score="bf16 bias") for d in (64, 96, 128, 192, 256)),
    Job(128, 128, "full", "bf16 bias", "fp16", packed=True),
    Job(128, 128, score="bf16 bias", deterministic=True),
    Job(64, 64, score="fp32 bias"),
    Job(64, 64, score="bias, softcap"),
)
JOBS = (
    *(Job(*dims) for dims in DIMS),
    Job(64, 64, "full"),
    Job(128, 128, "full", dtype="fp16"),
    Job(256, 256, "full"),
    Job(128, 128, "window", packed=True),
    Job(256, 256, "causal", packed=True),
    Job(64, 64, "prefix"),
    Job(64, 64, "document"),
    Job(128, 128, "document"),
    Job(128, 128, "lists"),
    Job(64, 64, score="softcap"),
    Job(64, 64, score="alibi"),
    Job(64, 64, score="bias"),
    Job(128, 128, score="softcap"),
    Job(128, 128, score="softcap, alibi"),
    Job(128, 128, score="bias"),
    Job(128, 128, score="alibi"),
    Job(256, 256, score="alibi"),
    *BIASES,
    Job(64, 64, deterministic=True),
    Job(64, 64, packed=True, deterministic=True),
    Job(128, 128, "window", deterministic=True),
    Job(256, 256, packed=True, deterministic=True),
)
_Where = tl.constexpr(Where)
# Instructions that move registers to memory and back in the loops over query tiles, of both consumers, and why. Room is
# left for another compiler.
SPILLS = {
    "wide tiles at head_dim 64": 80,
    "the slope of every logit at head_dim 128": 96,
    "a table read at every logit": 128,
    "elsewhere": 24,
}


@pytest.fixture(scope="module")
def reports(request):
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes minutes: pytest -m slow tests/kernel/hopper")
    return dict(zip(JOBS, compile_with_gluon(JOBS), strict=True))


def compile_with_gluon(jobs):
    return compile_all(jobs, timeout=900, module="tests.kernel.hopper.compile_backward")


def job_name(job: Job) -> str:
    words = job.mask, job.score, "packed" * job.packed, "deterministic" * job.deterministic, job.dtype
    return " ".join([f"{job.head_dim}x{job.head_dim_v}", *filter(None, words)])


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=job_name)
def test_compiles_for_hopper(reports, job):
    check(reports[job], job)


@pytest.mark.slow
def test_representative_kernels_compile():
    jobs = (Job(64, 64), Job(128, 128, packed=True), Job(256, 256, "full", deterministic=True))
    for job, report in zip(jobs, compile_with_gluon(jobs), strict=True):
        check(report, job)


@pytest.mark.slow
@pytest.mark.parametrize("job", BIASES, ids=job_name)
def test_biases_come_by_the_copy_engine(reports, job):
    """On the way of a full tile nothing is read from global memory; matrices of 16 bits are read as such."""
    assert reports[job]["loads_on_full_tiles"] == 0
    assert reports[job]["spills_on_full_tiles"] <= (16 if job.head_dim in (64, 256) else 0)  # of both consumers
    assert (reports[job]["matrix_loads_on_full_tiles"] > 0) == (job.score != "fp32 bias")


def check(report: dict, job: Job) -> None:
    """It fits, its matrix instructions are asynchronous, and its loops keep their numbers in registers."""
    assert "error" not in report, report["error"]
    assert report["shared"] <= SHARED_LIMIT
    assert report["matrix_instructions"] > 0
    assert report["warnings"] == []
    kind = "a table read at every logit" if job.score == "bias" or job.mask == "document" else "elsewhere"
    if max(job.head_dim, job.head_dim_v) <= 64 and job.score != "bias":
        kind = "wide tiles at head_dim 64"
    elif job.score.startswith("softcap"):
        kind = "the slope of every logit at head_dim 128"
    assert report["spills_in_loops"] <= SPILLS[kind]


def config_of(head_dim: int, head_dim_v: int) -> launch.HopperConfig:
    return launch.lookup_hopper("hopper_backward", head_dim, head_dim_v, torch.bfloat16)


@pytest.mark.parametrize(
    "dims", [(n, n) for n in range(8, 257, 8)] + [(192, 128), (64, 256), (256, 8), (8, 256)], ids=str
)
def test_sizes_cover_heads_and_fit(dims):
    """Tiles are at least as wide as the heads, boxes cover dQ, and one program's buffers fit."""
    for packed in (False, True):
        size = backward_sizes.of(*dims, config_of(*dims), packed)
        assert size.head_dim >= dims[0]
        assert size.head_dim_v >= dims[1]
        assert sum(size.dq_boxes) * 64 * 32 == size.block_m * size.head_dim
        assert size.head_dim % size.panel == size.head_dim_v % size.panel == 0
        assert size.bytes <= backward_sizes.SHARED_LIMIT


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_entries_fit_beside_the_rest(dims):
    """A bias of 16 bits comes in tiles at every head_dim, one of 32 bits at most; the rest is as without."""
    config = dataclasses.replace(config_of(*dims), block_m=64)
    plain = backward_sizes.of(*dims, config, False)
    for entry_bytes in (2, 4):
        size = backward_sizes.of(*dims, config, False, False, entry_bytes)
        assert size.bytes <= backward_sizes.SHARED_LIMIT
        assert size.entries_stages > 0 or (dims, entry_bytes) == ((256, 256), 4)
        assert dataclasses.replace(size, entry_bytes=0, entries_stages=0) == plain


def test_entries_fit_beside_wide_tiles():
    size = backward_sizes.of(64, 64, config_of(64, 64), False, False, 2)
    assert (size.block_m, size.entries_stages) == (128, 1)
    assert backward_sizes.of(64, 64, config_of(64, 64), False, False, 4).entries_stages == 0


def in_thread_order(x: torch.Tensor) -> torch.Tensor:
    """What ``store_dq`` makes of 64 rows: element (row, col) goes where the thread that holds it has its 16 bytes."""
    boxes = x.shape[1] // 32
    return x.reshape(4, 2, 8, 4 * boxes, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(-1)


def in_reading_order(x: torch.Tensor) -> torch.Tensor:
    """What ``per_query`` makes of one number per query."""
    return x.reshape(-1, 4, 2, 2).permute(0, 2, 1, 3).reshape(-1)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize("in_turn", [False, True], ids=["as they come", "in turn"])
@pytest.mark.parametrize("packed", [None, (0, 10, 10, 140)], ids=["dense", "packed"])
@pytest.mark.parametrize("dims", [(64, 64), (40, 80), (128, 64), (192, 128)], ids=str)
def test_before_and_after(dims, packed, in_turn):
    """Delta, LSE and turns before; the sums back in order, scaled, after; nothing of one sequence in another's tile."""
    head_dim, head_dim_v = dims
    size = backward_sizes.of(head_dim, head_dim_v, config_of(*dims), packed is not None, in_turn)
    batch, heads, total = (1 if packed else 2), 3, 150
    starts = torch.tensor(packed or (0, total), dtype=torch.int32)
    num_sequences, on_device, tiles = seqlen.on_device(Seqlens(starts, starts) if packed else None, total, size.block_m)
    o, do = torch.randn(batch, heads, total, head_dim_v), torch.randn(batch, total, heads, head_dim_v).transpose(1, 2)
    lse, dlse = torch.randn(batch, heads, total), torch.randn(batch, heads, total)
    lse[:, :, 3] = -math.inf
    per_query = batch * heads * tiles * size.block_m
    lse_log2, delta, sums = (torch.full((per_query * n,), math.nan) for n in (1, 1, size.head_dim))
    turns = torch.full((batch * heads * tiles, 2), 99, dtype=torch.int32)
    where = (heads, total, total, num_sequences, tiles, on_device)
    strides = launcher.strides_of(do), launcher.strides_of(o)
    device_mask = mask.causal(align="top_left").on_device() if in_turn else None
    first_rising = 1
    pre_post.before_kernel[(batch * heads * tiles,)](
        do, o, lse, dlse, lse_log2, delta, turns, *strides, total, *where, device_mask, first_rising,
        head_dim_v, head_dim_chunks(head_dim_v), size,
    )  # fmt: skip
    dq = torch.full((batch, heads, total, head_dim), math.nan)
    want = dq.clone()
    want_delta = torch.where(lse == -math.inf, 0.0, (do * o).sum(-1) - dlse)
    want_lse = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))
    ends = [*starts.tolist(), total]
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        for sequence, (start, end) in enumerate(itertools.pairwise(ends)):
            for block in range(-(-(end - start) // size.block_m)):
                tile = (b * heads + h) * tiles + block + (start // size.block_m + sequence if packed else 0)
                rows = torch.arange(start + block * size.block_m, min(start + (block + 1) * size.block_m, end))
                here = slice(tile * size.block_m, (tile + 1) * size.block_m)
                got = in_reading_order(lse_log2[here]), in_reading_order(delta[here])
                torch.testing.assert_close(got[0][: len(rows)], want_lse[b, h, rows])
                torch.testing.assert_close(got[1][: len(rows)], want_delta[b, h, rows], rtol=1e-4, atol=1e-4)
                assert (got[0][len(rows) :] == math.inf).all()
                assert (got[1][len(rows) :] == 0).all()
                # Every query sees key 0, in the first block; in falling order the block at the diagonal comes first.
                num_blocks = -(-(end - start) // size.block_n)
                turn = num_blocks - 1 - block * size.block_m // size.block_n if b * heads + h < first_rising else 0
                assert turns[tile].tolist() == [turn + pre_post.UNTOUCHED if in_turn else 0] * 2
                want[b, h, rows] = 0.0
                if block or h:  # the other tiles are left as if nobody had come by
                    tile_dq = torch.randn(size.block_m, size.head_dim)
                    fill(sums[here.start * size.head_dim : here.stop * size.head_dim], tile_dq, size)
                    turns[tile] = 1 if in_turn else 2
                    want[b, h, rows] = tile_dq[: len(rows), :head_dim] * 0.5
    strides = launcher.strides_of(dq)
    pre_post.after_kernel[(batch * heads * tiles,)](sums, turns, dq, strides, 0.5, *where, head_dim, size)
    assert torch.equal(dq, want)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "value",
    [mask.full(), mask.causal(), mask.window(100, 0), mask.window(0, 90), mask.chunked(200)],
    ids=repr,
)
@pytest.mark.parametrize("rising", [False, True], ids=["falling", "rising"])
def test_next_turn_names_every_block_that_walks_over_a_tile(value, rising):
    """From turn to turn, ``next_turn`` names those blocks whose range of query tiles holds the tile, and ends."""
    size = backward_sizes.of(64, 64, config_of(64, 64), False, True)
    where = Where(0, 0, 700, 900)
    num_blocks = -(-where.seqlen_k // size.block_n)
    for m_block in range(-(-where.seqlen_q // size.block_m)):
        want = []
        for block in range(num_blocks):
            lo, _, _, hi = value.query_range(
                where, block * size.block_n, min((block + 1) * size.block_n, where.seqlen_k), value.args
            )
            first, last = max(lo, 0) // size.block_m, -(-max(min(hi, where.seqlen_q), 0) // size.block_m)
            if first <= m_block < last:
                want.append(block)
        if not rising:
            want = [num_blocks - 1 - block for block in reversed(want)]
        out = torch.full((num_blocks + 1,), -1, dtype=torch.int32)
        _turns_kernel[(1,)](out, 0, 0, where.seqlen_q, where.seqlen_k, value.on_device(), m_block, int(rising), size)
        assert out[: len(want) + 1].tolist() == [*want, num_blocks]


def fill(sums: torch.Tensor, tile_dq: torch.Tensor, size: backward_sizes.Sizes) -> None:
    """Store a tile of dQ as the two consumers would."""
    for consumer, boxes in enumerate(size.dq_boxes):
        for kept in range(0, boxes, size.dq_kept):
            width = min(size.dq_kept, boxes - kept)
            box = consumer * size.dq_boxes[0] + kept
            if size.block_m == 128:
                part = tile_dq[64 * consumer : 64 * consumer + 64]
            else:
                part = tile_dq[:, 32 * box : 32 * (box + width)]
            sums[64 * 32 * box : 64 * 32 * (box + width)] = in_thread_order(part)


FORMS = {
    "head_dim 64": backward_protocol.Form(False, 2, 2, False, (1, 1)),
    "head_dim 128": backward_protocol.Form(False, 2, 2, True, (1, 1)),
    "head_dim 192": backward_protocol.Form(True, 2, 2, False, (1, 2)),
    "head_dim 256": backward_protocol.Form(True, 2, 1, False, (2, 2)),
    "head_dim 64, 256": backward_protocol.Form(True, 2, 2, False, (0, 1)),
}
FORMS |= {f"{name}, {n} of entries": form._replace(entries=n) for name, form in FORMS.items() for n in (1, 2)}


@pytest.mark.parametrize("works", [[], [0], [1], [2], [3], [1, 1], [0, 0, 0], [2, 0, 3, 1], [5, 1, 1, 0, 2]], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_roles_wait_for_one_another(form, works):
    """Whatever the order of their steps: no deadlock, nothing overwritten that is still read, nothing left out."""
    for seed in range(8):
        backward_protocol.run(FORMS[form], [[(work, i) for i in range(n)] for work, n in enumerate(works)], seed)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", FORMS)
def test_programs_take_turns(form, is_causal):
    """However many programs run, they add to every tile in the order of their work, and all come to an end.

    The order is that of ``key_block``: one head in falling order of the blocks, walks up; one rising, walks down.
    """
    falling = [[(0, i) for i in range(block if is_causal else 0, 5)] for block in reversed(range(5))]
    rising = [[(1, i) for i in reversed(range(block if is_causal else 0, 5))] for block in range(5)]
    for seed, programs in enumerate((1, 2, 3, 5, 12)):
        backward_protocol.run(FORMS[form], falling + rising, seed, programs)


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (64, 256)], ids=str
)
def test_model_of_the_protocol_has_the_sizes_of_the_kernel(dims):
    size = backward_sizes.of(*dims, config_of(*dims), False)
    parts = tuple(-(-boxes // size.dq_kept) for boxes in size.dq_boxes)
    form = backward_protocol.Form(
        size.block_n == 64, size.stages, size.stages_do, size.dk_late and size.block_n > 64, parts
    )
    assert form in FORMS.values()


@triton.jit
def _turns_kernel(out_ptr, batch, head, seqlen_q, seqlen_k, mask, m_block, rising, SIZES: tl.constexpr):
    where = _Where(batch, head, seqlen_q, seqlen_k)
    num_blocks = tl.cdiv(seqlen_k, SIZES.block_n)
    rising = rising != 0
    turn = pre_post.next_turn(mask, where, m_block, num_blocks * 0, rising, SIZES)
    tl.store(out_ptr, turn)
    while turn < num_blocks:
        out_ptr += 1
        turn = pre_post.next_turn(mask, where, m_block, turn + 1, rising, SIZES)
        tl.store(out_ptr, turn)


def test_packed_rows_end_with_their_sequence():
    """The extra dimensions of a packed descriptor cancel in 64 bits, and rows past the end are outside."""
    t = torch.empty(1, 3, 1000, 64, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    size = backward_sizes.of(64, 64, config_of(64, 64), True)
    descriptor = rows.described(t, 128, size.panel, True)
    start, length, head = 777, 100, 2
    for row in (0, 5, 99, 100, 127):
        coordinates = (2**30, start + length, head, 2**30 - length + row, 8)
        address = sum(c * stride for c, stride in zip(coordinates, descriptor.strides, strict=True)) * 2 % 2**64
        assert address == 2 * (head * t.stride(1) + (start + row) * t.stride(2) + 8)
        inside = all(0 <= c < n for c, n in zip(coordinates, descriptor.shape, strict=True))
        assert inside == (row < length)


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
def test_nothing_to_do_gives_zeros(shape):
    """No batch entry, no query or no key: gradients of 0, and no launch."""
    batch, heads, seqlen_q, seqlen_k = shape
    q, do = (torch.randn(batch, heads, seqlen_q, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, heads, seqlen_k, 64, dtype=torch.bfloat16) for _ in range(2))
    lse = torch.full((batch, heads, seqlen_q), -math.inf)
    grads = hopper.backward(do, q, k, v, do, lse, None, softmax_scale=1.0, mask=mask.full())
    for grad, t in zip(grads, (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(t))


def test_dropout_is_refused():
    q = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16)
    dropout = Dropout(0.1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="dropout"):
        hopper.backward(q, q, q, q, q, q[..., 0].float(), None, softmax_scale=1.0, mask=mask.full(), dropout=dropout)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

CASES = {
    "causal": {"mask": mask.causal()},
    "full": {},
    "window": {"mask": mask.window(50, 20)},
    "lists": {"mask": mask.causal().without_ranges()},
    "softcap": {"mask": mask.causal(), "score": score.softcap(3.0)},
    "packed": {"mask": mask.causal(), "cu_seqlens": ([0, 7, 7, 200, 300], [0, 9, 30, 222, 260])},
}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_gradients(dims, case, deterministic):
    """Gradients as accurate as the rule asks, with grouped heads and rows that end inside a tile."""
    options = {"mask": mask.full(), "score": None} | CASES[case]
    cu_seqlens = options.pop("cu_seqlens", None)
    batch, seqlen_q, seqlen_k = (1, 300, 260) if cu_seqlens else (2, 300, 260)
    seqlens = cu_seqlens and Seqlens(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in cu_seqlens))
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k = random(batch, 4, seqlen_q, dims[0]), random(batch, 2, seqlen_k, dims[0])
    v, do = random(batch, 2, seqlen_k, dims[1]), random(batch, 4, seqlen_q, dims[1])
    dlse = torch.randn(batch, 4, seqlen_q, device="cuda")
    scale = dims[0] ** -0.5
    given = {"do": do, "dlse": dlse, "softmax_scale": scale, "seqlens": seqlens, **options}
    want, plain = reference.reference(q, k, v, **given), reference.plain(q, k, v, **given)
    o, lse = want.o.to(q), want.lse.float().cuda()
    assert all(map(copied_in_blocks, (q, k, v)))
    options |= {"softmax_scale": scale, "seqlens": seqlens, "deterministic": deterministic}
    grads = hopper.backward(do, q, k, v, o, lse, dlse, **options)
    for _ in range(3 if deterministic else 0):
        assert all(map(torch.equal, grads, hopper.backward(do, q, k, v, o, lse, dlse, **options)))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        bound = reference.BACKWARD_FACTOR
        reference.assert_accurate(grad, getattr(want, name), getattr(plain, name), bound, name)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)
@pytest.mark.parametrize("value", [mask.full(), mask.causal(), mask.window(300, 20)], ids=repr)
@pytest.mark.parametrize("cu_seqlens", [None, (0, 10, 1500, 1500, 2100, 4000)], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_turns_of_many_programs(head_dim, cu_seqlens, value):
    """More work than programs, several launches at a time: nobody waits for ever, and dq is the same in every one."""
    shape = (1 if cu_seqlens else 4, 24, 4000 if cu_seqlens else 1500, head_dim)
    q, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16)[:, :8] for _ in range(2))
    starts = cu_seqlens and torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")
    seqlens = None if starts is None else Seqlens(starts, starts)
    options = {"softmax_scale": head_dim**-0.5, "mask": value, "seqlens": seqlens}
    o, lse = forward.forward(q, k, v, **options)
    want = hopper.backward(do, q, k, v, o, lse, None, **options)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(hopper.backward(do, q, k, v, o, lse, None, deterministic=True, **options))
    torch.cuda.synchronize()
    for result in results:
        assert all(map(torch.equal, result, results[0]))
    for ours, theirs in zip(results[0], want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
