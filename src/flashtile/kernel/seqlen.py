"""Which rows a program works on: dense batches and packed sequences of their own lengths, read once per program."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.kernel.launch import ceil_div
from flashtile.seqlen import Seqlens


class Place(NamedTuple):
    """A program's share: a block of one head of one sequence, and where that sequence lies in the tensors.

    ``batch`` is the tensors' first coordinate and ``sequence`` the sequence's number (the same in dense batches; packed
    tensors have a single batch entry). The sequence's first rows are ``q_start`` and ``k_start``; its numbers per query
    (see ``scratch_length``) start at ``scratch_start``. ``block`` is -1 for a program without work.
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
    """Packed sequences as one kernel takes them: ``tile_starts[i]`` is the number of tiles before sequence i.

    ``seqused_*`` is a tuple of one tensor or of none: Triton 3.6 cannot compile a tuple that holds None.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: tuple
    seqused_k: tuple
    tile_starts: Any


_Place = tl.constexpr(Place)


@triton.jit
def _length(cu_seqlens, seqused, i):
    length = tl.load(cu_seqlens + i + 1) - tl.load(cu_seqlens + i)
    if len(seqused) == 1:
        length = tl.minimum(length, tl.load(seqused[0] + i))
    return length


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
        num_tiles = tl.num_programs(0) // num_heads
        tile = program % num_tiles
        # The last sequence that starts at or before the tile lies in [low, high).
        low = tile * 0
        high = low + num_sequences
        while high - low > 1:
            middle = (low + high) // 2
            before = tl.load(packed.tile_starts + middle) <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        seqlen_q = _length(packed.cu_seqlens_q, packed.seqused_q, low)
        seqlen_k = _length(packed.cu_seqlens_k, packed.seqused_k, low)
        num_blocks = tl.cdiv(seqlen_k if OF_KEYS else seqlen_q, BLOCK)
        block = tile - tl.load(packed.tile_starts + low)
        if not OF_KEYS:
            block = num_blocks - 1 - block
        block = tl.where(tile < tl.load(packed.tile_starts + num_sequences), block, -1)
        q_start, k_start = tl.load(packed.cu_seqlens_q + low), tl.load(packed.cu_seqlens_k + low)
        scratch_start = (q_start // 4 + low) * 4
        return _Place(low * 0, low, program // num_tiles, block, q_start, k_start, seqlen_q, seqlen_k, scratch_start)


def scratch_length(seqlens: Seqlens | None, total: int) -> int:
    """Return how many entries a head needs in scratch that holds one fp32 number per query.

    The copy engine faults on a block of a single row that does not start at a multiple of 16 bytes, so every packed
    sequence starts at a multiple of four entries, ``(cu_seqlens_q[i] // 4 + i) * 4``.
    """
    return total if seqlens is None else total + 4 * (seqlens.cu_seqlens_q.numel() - 1)


def on_device(seqlens: Seqlens | None, total: int, block: int, of_keys: bool) -> tuple[int, Packed | None, int]:
    """Return ``num_sequences`` and ``packed`` for one kernel, and how many tiles of ``block`` rows a head has at most.

    ``total`` is the number of rows per head that the tiles cover. Packed lengths stay on the device, so their tiles are
    bounded by ceil(total / block) + sequences; programs past the last one have nothing to do.
    """
    if seqlens is None:
        return 0, None, ceil_div(total, block)
    cu_seqlens, seqused = (
        (seqlens.cu_seqlens_k, seqlens.seqused_k) if of_keys else (seqlens.cu_seqlens_q, seqlens.seqused_q)
    )
    lengths = cu_seqlens.diff()
    if seqused is not None:
        lengths = torch.minimum(lengths, seqused)
    tile_starts = torch.nn.functional.pad(((lengths + block - 1) // block).cumsum(0, dtype=torch.int32), (1, 0))
    num_sequences = cu_seqlens.numel() - 1
    used_q, used_k = (() if used is None else (used,) for used in (seqlens.seqused_q, seqlens.seqused_k))
    packed = Packed(seqlens.cu_seqlens_q, seqlens.cu_seqlens_k, used_q, used_k, tile_starts)
    return num_sequences, packed, ceil_div(total, block) + num_sequences
