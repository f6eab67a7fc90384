"""Which rows a program works on: dense batches and packed sequences of their own lengths, read once per program."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashtile.kernel.launch import ceil_div
from flashtile.seqlen import Seqlens


class Place(NamedTuple):
    """A program's share: a block of one head of one sequence, and where that sequence lies in the tensors.

    ``batch`` is the tensors' first coordinate and ``sequence`` the sequence's number (the same in dense batches; packed
    tensors have a single batch entry; the rows after the last sequence have the number after the last). The sequence's
    first rows are ``q_start`` and ``k_start``; its numbers per query (see ``scratch_length``) start at
    ``scratch_start``. ``block`` is -1 for a program without work.
    """

    batch: Any
    sequence: Any
    head: Any
    block: Any
    q_start: Any
    k_start: Any
    seqlen_q: Any
    seqlen_k: Any
    scratch_start: Any


class Packed(NamedTuple):
    """Packed sequences as a kernel takes them.

    ``seqused_*`` is a tuple of one tensor or of none: Triton 3.6 cannot compile a tuple that holds None.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: tuple
    seqused_k: tuple


_Place = tl.constexpr(Place)


@triton.jit
def sequence_length(cu_seqlens, seqused, i):
    """Return the length of packed sequence ``i``."""
    length = tl.load(cu_seqlens + i + 1) - tl.load(cu_seqlens + i)
    if len(seqused) == 1:
        length = tl.minimum(length, tl.load(seqused[0] + i))
    return length


@triton.jit
def sequence_of(tile, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """Return (sequence, block) of tile number ``tile``; the block may lie past the sequence's end.

    Sequence i has the tiles from ``cu_seqlens[i] // BLOCK + i`` on: at least as many as it has blocks, and known
    without adding up the lengths before it.
    """
    # The last sequence that starts at or before the tile lies in [low, high).
    low = tile * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) // BLOCK + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, tile - (tl.load(cu_seqlens + low) // BLOCK + low)


@triton.jit
def packed_place(tile, num_tiles, seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK: tl.constexpr,
                 OF_KEYS: tl.constexpr):  # fmt: skip
    """Return the Place of tile number ``tile`` out of ``num_tiles`` over packed sequences; see ``place``.

    ``seqlen_q`` and ``seqlen_k`` are the tensors' lengths. The rows after the last sequence count as one more, that has
    no keys (no queries if OF_KEYS): so they get the results of empty rows.
    """
    tiles_per_head = num_tiles // num_heads
    cu_seqlens = packed.cu_seqlens_k if OF_KEYS else packed.cu_seqlens_q
    low, block = sequence_of(tile % tiles_per_head, cu_seqlens, num_sequences + 1, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    q_start, k_start = tl.load(packed.cu_seqlens_q + low), tl.load(packed.cu_seqlens_k + low)
    length_q = q_start * 0 if OF_KEYS else seqlen_q - q_start
    length_k = seqlen_k - k_start if OF_KEYS else k_start * 0
    if low < num_sequences:
        length_q = sequence_length(packed.cu_seqlens_q, packed.seqused_q, low)
        length_k = sequence_length(packed.cu_seqlens_k, packed.seqused_k, low)
    num_blocks = tl.cdiv(length_k if OF_KEYS else length_q, BLOCK)
    block = tl.where(block < num_blocks, block if OF_KEYS else num_blocks - 1 - block, -1)
    scratch_start = (q_start // 4 + low) * 4
    return _Place(low * 0, low, tile // tiles_per_head, block, q_start, k_start, length_q, length_k, scratch_start)


@triton.jit
def place(seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Return this program's Place; blocks are of keys if OF_KEYS, else of queries.

    Long tiles come first under a causal mask: the last query blocks, the first key blocks.
    """
    program = tl.program_id(0)
    if packed is None:
        num_blocks = tl.cdiv(seqlen_k if OF_KEYS else seqlen_q, BLOCK)
        block = program % num_blocks
        if not OF_KEYS:
            block = num_blocks - 1 - block
        batch = program // num_blocks // num_heads
        return _Place(batch, batch, (program // num_blocks) % num_heads, block, 0, 0, seqlen_q, seqlen_k, 0)
    else:
        programs = tl.num_programs(0)
        return packed_place(program, programs, seqlen_q, seqlen_k, num_sequences, packed, num_heads, BLOCK, OF_KEYS)


def scratch_length(seqlens: Seqlens | None, total: int) -> int:
    """Return how many entries a head needs in scratch that holds one fp32 number per query.

    The copy engine faults on a block of a single row that does not start at a multiple of 16 bytes, so every packed
    sequence starts at a multiple of four entries, ``(cu_seqlens_q[i] // 4 + i) * 4``.
    """
    return total if seqlens is None else total + 4 * seqlens.cu_seqlens_q.numel()


def on_device(seqlens: Seqlens | None, total: int, block: int) -> tuple[int, Packed | None, int]:
    """Return ``num_sequences`` and ``packed`` for one kernel, and how many tiles of ``block`` rows a head has at most.

    ``total`` is the number of rows per head that the tiles cover. Packed lengths stay on the device: see
    ``sequence_of``; programs past the end of their sequence have nothing to do. Rows that ``seqused`` cuts off belong
    to no program: the caller fills them.
    """
    if seqlens is None:
        return 0, None, ceil_div(total, block)
    num_sequences = seqlens.cu_seqlens_q.numel() - 1
    used_q, used_k = (() if used is None else (used,) for used in (seqlens.seqused_q, seqlens.seqused_k))
    packed = Packed(seqlens.cu_seqlens_q, seqlens.cu_seqlens_k, used_q, used_k)
    return num_sequences, packed, total // block + num_sequences + 1
