"""What a program of the backward pass for Hopper works on next, and how its warps learn of it.

The loader takes blocks of keys from a queue and posts each on a board in shared memory, early enough to fetch its first
tiles while the consumers write out the block before it. The others read the board.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashtile.kernel.hopper import schedule
from flashtile.kernel.hopper.pre_post import in_order
from flashtile.kernel.seqlen import Place, packed_place
from flashtile.kernel.tile_lists import query_tiles
from flashtile.seqlen import Where

_Where, _Place = gl.constexpr(Where), gl.constexpr(Place)

SLOTS, FIELDS = gl.constexpr(2), gl.constexpr(16)  # of the board, and numbers in a slot
# Field by field: the number of query tiles over all query heads of the group (-1: there is no more work), the Place,
# and the first key.
TOTAL, BLOCK, BATCH, SEQUENCE, HEAD, Q_START, K_START, SEQLEN_Q, SEQLEN_K, FIRST_KEY = map(gl.constexpr, range(10))
READERS = gl.constexpr(4)  # of the board: two consumers and two reducers


class Problem(NamedTuple):
    """All programs' work: ``num_works`` blocks of keys, in sections of ``heads_per_section`` kv heads.

    Tiles of queries are numbered (batch, query head, tile), ``tiles_per_head`` for each head; ``turns`` points to two
    numbers per tile, for the reducers. The order of blocks turns at query head ``first_rising``: see ``key_block``.
    """

    num_works: Any
    heads_per_section: Any
    num_heads_q: Any
    heads_per_kv: Any
    seqlen_q: Any
    seqlen_k: Any
    num_sequences: Any
    tiles_per_head: Any
    turns: Any
    first_rising: Any


@gluon.jit
def first_work(SIZES: gl.constexpr):
    """Return the number of a program's first piece of work, or -1 if it has to be drawn like all others.

    So it is where programs take turns: a program waits for turns of lower numbers, which only programs that run may
    have. (Another kernel may keep a program from starting, even one that waits likewise.)
    """
    if SIZES.in_turn:
        return gl.program_id(0) * 0 - 1
    else:
        return gl.program_id(0)


@gluon.jit
def next_work(counter, problem, SIZES: gl.constexpr):
    """Draw the number of a program's next piece of work."""
    ticket = schedule.draw(counter)
    if SIZES.in_turn:
        return schedule.drawn(ticket, problem.num_works + gl.num_programs(0), counter) - gl.num_programs(0)
    else:
        return schedule.drawn(ticket, problem.num_works, counter)


@gluon.jit
def key_block(work, problem, packed, SIZES: gl.constexpr):
    """Return the Place of piece of work number ``work``; its block is -1 if there is none.

    Heads are taken in sections whose Q, dO and dQ stay in the L2 cache; in a section, first a block of every head, then
    the next of every head. In the last section, from query head ``first_rising`` (of all batch entries) on, blocks come
    in rising order, else in falling order: so under a causal mask the shortest come last of all.

    Programs that take turns at a tile of dQ take them in the order of their work. In falling order walks go up: under a
    causal mask a block comes to the first tile of the block after it one or two tiles after that one, and need not wait
    even if all start at once. In rising order walks go down: all blocks of a head begin with the same tile, one after
    the other as programs become free; the falling ones before leave those free at different times.
    """
    num_heads = problem.num_heads_q // problem.heads_per_kv
    num_blocks = gl.cdiv(problem.seqlen_k, SIZES.block_n) if packed is None else problem.num_works // num_heads
    first = work // (problem.heads_per_section * num_blocks) * problem.heads_per_section
    heads = gl.minimum(problem.heads_per_section, problem.num_works // num_blocks - first)
    rest = work - first * num_blocks
    head, block = first + rest % heads, rest // heads
    block = in_order(block, num_blocks, head * problem.heads_per_kv >= problem.first_rising)
    if packed is None:
        batch = head // num_heads
        return _Place(batch, batch, head % num_heads, block, 0, 0, problem.seqlen_q, problem.seqlen_k, 0)
    else:
        return packed_place(head * num_blocks + block, problem.num_works, problem.seqlen_q, problem.seqlen_k,
                            problem.num_sequences, packed, num_heads, SIZES.block_n, True)  # fmt: skip


@gluon.jit
def is_rising(at, problem):
    """Return whether turns at the tiles of a kv head come in rising order of the blocks of keys."""
    return at.batch * problem.num_heads_q + at.head * problem.heads_per_kv >= problem.first_rising


@gluon.jit
def walk(head, at, problem, mask, tiles, SIZES: gl.constexpr):
    """Return (where, the number of the first tile of a query head's sequence, bounds of steps as ``query_tiles``)."""
    where = _Where(at.sequence, head, at.seqlen_q, at.seqlen_k)
    tile = (at.batch * problem.num_heads_q + head) * problem.tiles_per_head
    if SIZES.packed:
        tile += at.q_start // SIZES.block_m + at.sequence
    return where, tile, query_tiles(mask, tiles, where, at.block, SIZES.block_m, SIZES.block_n)


@gluon.jit
def start_of(at, first, last, tiles, SIZES: gl.constexpr):
    """Return with which step, counted from ``first``, a block of keys begins its walk.

    Blocks of one head, which run at the same time, begin with queries as far along as their keys are: if all began with
    the first tile they would come to every tile of dQ together, and wait there for the one that stores it.
    """
    num_blocks = gl.cdiv(at.seqlen_k, SIZES.block_n)
    if SIZES.in_turn:
        return first * 0
    elif tiles is None:
        level = at.block * gl.cdiv(at.seqlen_q, SIZES.block_m) // num_blocks
        return gl.maximum(gl.minimum(level, last - 1) - first, 0)
    else:
        return at.block * (last - first) // num_blocks


@gluon.jit
def step_of(i, start, rising, first, last, SIZES: gl.constexpr):
    """Return step ``i`` of the walk that begins with step ``start`` and goes round.

    Where programs take turns, it goes straight up, or down if turns come in rising order: see ``key_block``.
    """
    if SIZES.in_turn:
        return gl.where(rising, last - 1 - i, first + i)
    else:
        step = first + start + i
        return gl.where(step < last, step, step - (last - first))


@gluon.jit
def count_tiles(at, problem, mask, tiles, SIZES: gl.constexpr):
    """Return the number of query tiles that a block of keys walks over, all query heads of the group together."""
    total = at.block * 0
    for head in range(at.head * problem.heads_per_kv, (at.head + 1) * problem.heads_per_kv):
        _, _, bounds = walk(head, at, problem, mask, tiles, SIZES)
        total += bounds[3] - bounds[0]
    return total


# --- the board --------------------------------------------------------------------------------------------------------


@gluon.jit
def write_number(smem, i, value):
    WARPS: gl.constexpr = gl.num_warps()
    smem.index(i).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def read_number(smem, i):
    WARPS: gl.constexpr = gl.num_warps()
    return gl.max(smem.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def post(board, signals, number, total, at, BLOCK_N: gl.constexpr):
    """Post the program's piece of work ``number``, when all have read the one before in its slot."""
    if number >= SLOTS:
        mbarrier.wait(signals.read.index(number % SLOTS), (number // SLOTS - 1) & 1)
    slot = number % SLOTS * FIELDS
    write_number(board, slot + BLOCK, at.block)
    write_number(board, slot + BATCH, at.batch)
    write_number(board, slot + SEQUENCE, at.sequence)
    write_number(board, slot + HEAD, at.head)
    write_number(board, slot + Q_START, at.q_start)
    write_number(board, slot + K_START, at.k_start)
    write_number(board, slot + SEQLEN_Q, at.seqlen_q)
    write_number(board, slot + SEQLEN_K, at.seqlen_k)
    write_number(board, slot + FIRST_KEY, at.block * BLOCK_N)
    write_number(board, slot + TOTAL, total)
    mbarrier.arrive(signals.posted.index(number % SLOTS), count=1)


@gluon.jit
def post_end(board, signals, number):
    """Say that there is no more work."""
    if number >= SLOTS:
        mbarrier.wait(signals.read.index(number % SLOTS), (number // SLOTS - 1) & 1)
    write_number(board, number % SLOTS * FIELDS + TOTAL, -1)
    mbarrier.arrive(signals.posted.index(number % SLOTS), count=1)


@gluon.jit
def read_total(board, signals, number):
    """Wait for the program's piece of work ``number``, and return its number of query tiles, -1 if there is none."""
    mbarrier.wait(signals.posted.index(number % SLOTS), (number // SLOTS) & 1)
    return read_number(board, number % SLOTS * FIELDS + TOTAL)


@gluon.jit
def read_place(board, number):
    """Return the Place of piece of work ``number``."""
    slot = number % SLOTS * FIELDS
    return _Place(
        read_number(board, slot + BATCH), read_number(board, slot + SEQUENCE), read_number(board, slot + HEAD),
        read_number(board, slot + BLOCK), read_number(board, slot + Q_START), read_number(board, slot + K_START),
        read_number(board, slot + SEQLEN_Q), read_number(board, slot + SEQLEN_K), 0,
    )  # fmt: skip


@gluon.jit
def done(signals, number):
    """Say that this role needs the board's slot of piece of work ``number`` no longer."""
    mbarrier.arrive(signals.read.index(number % SLOTS), count=1)
