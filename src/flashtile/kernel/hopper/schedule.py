"""Which query tile a program works on next, and how one warp, which finds out, tells the others.

Tiles are numbered so that the longest come first under a causal mask and neighbours share keys and values: heads are
taken in sections whose keys and values fit in half of the L2 cache, and in a section first the last block of every
head, then the one before it, ... Only the scheduling warp works that out (a binary search, where sequences are packed);
it writes what the others need on a board in shared memory.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.kernel.hopper.barriers import uniform
from flashtile.kernel.seqlen import Place, packed_place

SECTION_BYTES = 32 * 2**20

_Place = gl.constexpr(Place)


@gluon.jit
def place(tile, num_tiles, section, seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK: gl.constexpr):
    """Return the Place of tile number ``tile`` out of ``num_tiles``; its block is -1 if there is nothing to do."""
    if packed is None:
        num_blocks = gl.cdiv(seqlen_q, BLOCK)
        first = tile // (section * num_blocks) * section
        heads = gl.minimum(section, num_tiles // num_blocks - first)
        rest = tile - first * num_blocks
        head = first + rest % heads
        block = num_blocks - 1 - rest // heads
        batch = head // num_heads
        return _Place(batch, batch, head % num_heads, block, 0, 0, seqlen_q, seqlen_k, 0)
    else:
        return packed_place(tile, num_tiles, seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK, False)


@gluon.jit
def draw(counter):
    """Start to draw the next number from the queue; ``uniform`` of the result waits for it.

    One lane draws for its warp. (``gl.atomic_add`` would wait at once, to hand the number to every thread.)
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.u32 $0, 0;"
        " @p atom.global.add.u32 $0, [$1], 1; }",
        "=&r,l", [counter], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def drawn(number, num_tiles, counter):
    """Return the tile of a number from the queue: every program begins with the tile of its own number.

    So ``num_tiles`` numbers are drawn in all, and who draws the last one sets the counter back for the next launch.
    """
    number = uniform(number)
    if number == num_tiles - 1:
        gl.atomic_xchg(counter, 0)
    return number + gl.num_programs(0)


FIELDS = gl.constexpr(16)  # numbers per slot of the board


@gluon.jit
def board(SLOTS: gl.constexpr):
    """Return room for ``SLOTS`` tiles."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _write(board, slot, FIELD: gl.constexpr, value):
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    board.index(slot * FIELDS + FIELD).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def _read(board, slot, FIELD: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    value = board.index(slot * FIELDS + FIELD).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    return uniform(gl.max(value, 0))


@gluon.jit
def post(board, written, slot, at, first, last, full, PACKED: gl.constexpr):
    """Tell the others of a tile: its Place, and the walk over its key tiles from ``last - 1`` down to ``first``, of
    which consumer ``i`` needs no mask for [full[i][0], full[i][1]).

    Nobody asks whether the slot is free. A consumer reads it until it has begun the second key tile after that tile
    (its rows are written during the first). A tile is posted when the producer has begun the one before it, and has
    seen all consumers let go of the key tile ``stages`` before its latest: with ``stages`` + 4 slots it is late enough.
    """
    _write(board, slot, 0, at.block)
    _write(board, slot, 1, at.batch)
    _write(board, slot, 2, at.head)
    _write(board, slot, 3, first)
    _write(board, slot, 4, last)
    if PACKED:
        _write(board, slot, 5, at.sequence)
        _write(board, slot, 6, at.q_start)
        _write(board, slot, 7, at.k_start)
        _write(board, slot, 8, at.seqlen_q)
        _write(board, slot, 9, at.seqlen_k)
    for i in gl.static_range(len(full)):
        _write(board, slot, 10 + 2 * i, full[i][0])
        _write(board, slot, 11 + 2 * i, full[i][1])
    mbarrier.arrive(written.index(slot), count=1)


@gluon.jit
def post_end(board, written, slot):
    """Tell the others that there are no more tiles."""
    _write(board, slot, 0, -1)
    mbarrier.arrive(written.index(slot), count=1)


@gluon.jit
def read_walk(board, slot):
    """Return whether there is a tile in ``slot``, and its walk: first and last."""
    return _read(board, slot, 0) >= 0, _read(board, slot, 3), _read(board, slot, 4)


@gluon.jit
def read_full(board, slot, CONSUMER: gl.constexpr):
    """Return which key tiles of the tile in ``slot`` a consumer's rows see whole: both ends."""
    return _read(board, slot, 10 + 2 * CONSUMER), _read(board, slot, 11 + 2 * CONSUMER)


@gluon.jit
def read_place(board, slot, seqlen_q, seqlen_k, PACKED: gl.constexpr):
    """Return the Place of the tile in ``slot``, without its number of blocks."""
    block, batch, head = _read(board, slot, 0), _read(board, slot, 1), _read(board, slot, 2)
    if PACKED:
        sequence, q_start, k_start = _read(board, slot, 5), _read(board, slot, 6), _read(board, slot, 7)
        return _Place(batch, sequence, head, block, q_start, k_start, _read(board, slot, 8), _read(board, slot, 9), 0)
    else:
        return _Place(batch, batch, head, block, 0, 0, seqlen_q, seqlen_k, 0)


# --- on the host ------------------------------------------------------------------------------------------------------

_counters: dict[tuple[int, int], torch.Tensor] = {}


def counter_of(device: torch.device) -> torch.Tensor:
    """Return the queue's counter, zero between launches: one per stream, whose launches follow one another.

    While a CUDA graph is captured it is a new one: the graph may be replayed on any stream, and zeroes it each time.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    counter = _counters.get(key)
    if counter is None:  # in another thread: torch.compile's graphs own what their thread allocates while they warm up
        with ThreadPoolExecutor(1) as thread:
            counter = _counters[key] = thread.submit(_zero, device).result()
    return counter


def _zero(device: torch.device) -> torch.Tensor:
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    return counter


def heads_per_section(batch: int, heads_q: int, heads_kv: int, bytes_per_head: int) -> int:
    """Return how many query heads to take at a time: those whose keys and values stay in the L2 cache."""
    group = heads_q // heads_kv
    return min(batch * heads_q, group * max(1, SECTION_BYTES // max(1, bytes_per_head)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run at a time, one per multiprocessor; of an H200 if there is no GPU to ask."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
