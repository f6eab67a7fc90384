"""The numbers of a forward launch: how heads are cut into chunks, what fits in shared memory, and the operands."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from flashtile.kernel.hopper import barriers, rows
from flashtile.kernel.launch import HopperConfig

ROWS = 64  # of a consumer: what one wgmma takes
SHARED_LIMIT = 232_448  # bytes of shared memory that one program may use
_BOOKKEEPING = 1024  # of them at most: the board and the mbarriers
# Columns of the tiles by largest head_dim served. Gluon's tiles are powers of two, so some heads are two tiles.
CHUNKS = {64: (64,), 96: (64, 32), 128: (128,), 192: (128, 64), 256: (256,)}


@dataclass(frozen=True, eq=False)
class Sizes:
    """What is known when the kernel is compiled, as Gluon's constants; equal to itself only, so that it hashes fast."""

    block_n: Any
    consumers: Any
    stages: Any  # of the rings of K and of V
    q_buffers: Any
    chunks_v: tuple  # columns of the tiles of V and O
    o_width: Any  # columns of O that are written at a time
    o_buffers: Any  # how many of those there is room for
    queue: Any
    packed: Any
    hot_loop: Any  # whether the key tiles in the middle of a walk have a loop of their own
    wait_after: Any  # what of the softmax is done before P V is waited for: "nothing", "maximum" or "exponentials"
    registers_consumer: Any
    registers_producer: Any
    threads: Any  # of a barrier between all consumers and the producer
    threads_of_one: Any  # of one between a consumer and the producer
    slots: Any  # of the board: see schedule.post
    # The first of several named barriers: the consumers' turns, and the release of each buffer of a ring.
    turn: Any
    k_free: Any
    v_free: Any
    q_free: Any
    entries_free: Any
    entries_buffers: Any  # for a score's entries, each of one consumer's rows of a tile; 0 if they are read otherwise


@functools.cache
def chunks_of(head_dim: int) -> tuple[int, ...]:
    """Return the columns of the tiles that hold a head; the copy engine fills those past ``head_dim`` with zeros."""
    return next(columns for widest, columns in CHUNKS.items() if head_dim <= widest)


@functools.cache
def sizes(
    chunks: tuple[int, ...],
    chunks_v: tuple[int, ...],
    config: HopperConfig,
    queue: bool,
    packed: bool,
    scored: bool = False,
    entry_bytes: int = 0,
) -> Sizes:
    """Return the constants of a launch, ``scored`` if it has a score, with entries of ``entry_bytes`` in tiles if any.

    Raises ValueError if its buffers do not fit in shared memory. Room is given first to the rings of K and V, then to
    a score's entries if there is enough, then to the rows of O, then to queries ahead of time.
    """
    columns, columns_v = sum(chunks), sum(chunks_v)
    o_width = min(64, chunks_v[-1])
    block_m = ROWS * config.consumers
    rings = config.stages * config.block_n * (columns + columns_v)
    slices = columns_v // o_width
    turn = barriers.first_free(config.consumers + 2)
    k_free = turn + config.consumers
    v_free, q_free = k_free + config.stages, k_free + 2 * config.stages
    entry_bytes *= ROWS * config.block_n
    # A consumer needs a buffer of its own, and one more between two lets both copies take longer than a tile.
    counts = (config.consumers + 1, config.consumers, 0) if entry_bytes else (0,)
    ways = [(e, q, o) for e in counts for o in range(slices, 0, -1) for q in (2, 1) if _named(q_free, q, e)]

    def fits(e: int, q: int, o: int) -> bool:
        halves = rings + block_m * (q * columns + o * o_width)
        return 2 * halves + e * entry_bytes + _BOOKKEEPING <= SHARED_LIMIT

    fitting = [way for way in ways if fits(*way)]
    if config.block_m != block_m or not fitting:
        raise ValueError(
            f"{config} does not serve {columns} columns of K and {columns_v} of V: wrong block_m, or no room"
        )
    entries_buffers, q_buffers, o_buffers = fitting[0]
    if q_free + q_buffers > barriers.MOST:
        raise ValueError(f"{config} needs more than the {barriers.MOST} named barriers that there are")
    # Where measured to be faster; and for narrower heads with a score, where it saves 45 of 717 instructions per tile.
    hot_loop = config.consumers == 2 and (0 if scored else 64) < max(columns, columns_v) <= 128
    # Exponentials that wait for P V are 64 registers more, which there are in the hot loop only.
    wait_after = "exponentials" if hot_loop else "maximum" if config.consumers == 2 else "nothing"
    number = gl.constexpr
    return Sizes(
        number(config.block_n), number(config.consumers), number(config.stages), number(q_buffers),
        tuple(map(number, chunks_v)), number(o_width), number(o_buffers),
        number(queue), number(packed), number(hot_loop), number(wait_after),
        number(config.registers_consumer), number(config.registers_producer),
        number(128 * config.consumers + 32), number(128 + 32), number(config.stages + 4),
        number(turn), number(k_free), number(v_free), number(q_free),
        number(q_free + q_buffers), number(entries_buffers),
    )  # fmt: skip


def _named(q_free: int, q_buffers: int, entries_buffers: int) -> bool:
    """Return whether there are named barriers for so many buffers; without entries, the caller looks."""
    return entries_buffers == 0 or q_free + q_buffers + entries_buffers <= barriers.MOST


@functools.cache
def two_consumers(config: HopperConfig) -> HopperConfig:
    """Return a configuration of three consumers with two, which have half as many registers again."""
    return replace(config, block_m=2 * ROWS, consumers=2, registers_consumer=240, registers_producer=24)


def operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, SIZES: Sizes) -> tuple:
    """Return Q, K, V and O as the kernel takes them: the first three as one chunk of columns, and another or None."""
    block_n, packed = SIZES.block_n.value, SIZES.packed.value
    return (
        *_in_chunks(q, ROWS, packed), *_in_chunks(k, block_n, packed), *_in_chunks(v, block_n, packed),
        rows.described(o, ROWS, SIZES.o_width.value, packed),
    )  # fmt: skip


def _in_chunks(t: torch.Tensor, block_rows: int, packed: bool) -> tuple[Any, Any]:
    columns = chunks_of(t.shape[3])
    first = rows.described(t, block_rows, columns[0], packed)
    return first, rows.described(t, block_rows, columns[1], packed) if len(columns) == 2 else None
