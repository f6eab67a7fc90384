"""Which tiles a mask leaves, found on the device, for masks that cannot say it themselves.

A mask without ranges is evaluated once per (query tile, key tile): no entry visible, some, or all. From that each query
tile gets a list of key tiles, full ones first, then partial ones, and each key tile a list of query tiles. Memory is
O(tiles) and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.kernel import launcher
from flashtile.kernel.launch import HopperConfig, LaunchConfig, ceil_div
from flashtile.kernel.tile import tile_bounds
from flashtile.mask import DeviceMask, Mask
from flashtile.seqlen import Seqlens, Where

FULL, PARTIAL, EMPTY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_Where = tl.constexpr(Where)


class TileLists(NamedTuple):
    """Lists per (batch, head, block): ``order`` (..., blocks, tiles) holds tile numbers, ``counts`` (..., blocks, 2)
    how many are full and how many are not empty."""

    order: Any
    counts: Any
    num_heads: Any
    num_blocks: Any
    num_tiles: Any


@triton.jit(do_not_specialize=["seqlen_q", "seqlen_k", "num_heads", "num_m_blocks", "num_n_blocks"])
def classify_kernel(
    state_ptr, seqlen_q, seqlen_k, num_heads, num_m_blocks, num_n_blocks, mask,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr, WIDTH_M: tl.constexpr,
):  # fmt: skip
    """Program (n_block, m_block, head, batch) writes FULL, PARTIAL or EMPTY for one tile.

    WIDTH_M is the power of two from BLOCK_M on: three warpgroups of 64 queries make a tile of 192. A tile that reaches
    past the end of what is walked over (keys, or queries if OF_KEYS) is never full.
    """
    program = tl.program_id(0)
    n_block = program % num_n_blocks
    m_block = (program // num_n_blocks) % num_m_blocks
    head = (program // num_n_blocks // num_m_blocks) % num_heads
    batch = program // num_n_blocks // num_m_blocks // num_heads
    where = _Where(batch, head, seqlen_q, seqlen_k)
    rows, cols = tl.arange(0, WIDTH_M), tl.arange(0, BLOCK_N)
    q_idx = (m_block * BLOCK_M + rows)[:, None]
    k_idx = (n_block * BLOCK_N + cols)[None, :]
    inside = (rows < BLOCK_M)[:, None] & (q_idx < seqlen_q) & (k_idx < seqlen_k)
    visible = mask.predicate(where, q_idx, k_idx, mask.args) & inside
    seen = tl.sum(tl.sum(visible.to(tl.int32), 1), 0)
    possible = tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
    whole = (m_block + 1) * BLOCK_M <= seqlen_q if OF_KEYS else (n_block + 1) * BLOCK_N <= seqlen_k
    state = tl.where(seen == 0, EMPTY, tl.where((seen == possible) & whole, FULL, PARTIAL))
    tl.store(state_ptr + program.to(tl.int64), state.to(tl.int8))


def tile_lists(
    mask: DeviceMask,
    shape: tuple[int, int, int, int],
    config: LaunchConfig | HopperConfig,
    of_keys: bool,
    device: torch.device,
) -> TileLists:
    """Return the lists of a mask for (batch, heads_q, seqlen_q, seqlen_k), per query block, or per key block."""
    batch, heads, seqlen_q, seqlen_k = shape
    num_m_blocks, num_n_blocks = ceil_div(seqlen_q, config.block_m), ceil_div(seqlen_k, config.block_n)
    state = torch.empty((batch, heads, num_m_blocks, num_n_blocks), dtype=torch.int8, device=device)
    if state.numel():
        args = (state, seqlen_q, seqlen_k, heads, num_m_blocks, num_n_blocks, mask)
        width = triton.next_power_of_2(config.block_m)
        constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "OF_KEYS": of_keys, "WIDTH_M": width}
        launcher.run(classify_kernel, state.numel(), device, args, constants, replace(config, num_warps=4))
    if of_keys:
        state = state.transpose(2, 3)
    order = state.argsort(dim=-1, stable=True).to(torch.int32).contiguous()
    counts = torch.stack([(state == 0).sum(-1), (state < 2).sum(-1)], dim=-1).to(torch.int32)
    return TileLists(order, counts, heads, state.shape[2], state.shape[3])


def on_device(
    mask: Mask,
    q: torch.Tensor,
    seqlen_k: int,
    seqlens: Seqlens | None,
    config: LaunchConfig | HopperConfig,
    of_keys: bool,
) -> tuple[DeviceMask, TileLists | None]:
    """Return a mask as kernels take it, with tile lists if it has no ranges of its own.

    Packed sequences have no common tiles: there such a mask is evaluated in every tile.
    """
    device_mask = mask.on_device()
    if mask.key_range is not None or seqlens is not None:
        return device_mask, None
    shape = (q.shape[0], q.shape[1], q.shape[2], seqlen_k)
    return device_mask, tile_lists(device_mask, shape, config, of_keys, q.device)


@triton.jit
def _list_number(tiles, where, block):
    return (where.batch.to(tl.int64) * tiles.num_heads + where.head) * tiles.num_blocks + block


@triton.jit
def key_tiles(mask, tiles, where, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, full_first, full_end, end) of the walk over the key tiles of a query block: see tile_bounds."""
    if tiles is None:
        start = block * BLOCK_M
        bounds = mask.key_range(where, start, tl.minimum(start + BLOCK_M, where.seqlen_q), mask.args)
        return tile_bounds(bounds, where.seqlen_k, BLOCK_N)
    else:
        counts = tiles.counts + 2 * _list_number(tiles, where, block)
        return 0, 0, tl.load(counts), tl.load(counts + 1)


@triton.jit
def query_tiles(mask, tiles, where, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, full_first, full_end, end) of the walk over the query tiles of a key block."""
    if tiles is None:
        start = block * BLOCK_N
        bounds = mask.query_range(where, start, tl.minimum(start + BLOCK_N, where.seqlen_k), mask.args)
        return tile_bounds(bounds, where.seqlen_q, BLOCK_M)
    else:
        counts = tiles.counts + 2 * _list_number(tiles, where, block)
        return 0, 0, tl.load(counts), tl.load(counts + 1)


@triton.jit
def nth_tile(tiles, where, block, i):
    """Return the tile number of step ``i`` of the walk: ``i`` itself unless there are lists."""
    if tiles is None:
        return i
    else:
        return tl.load(tiles.order + _list_number(tiles, where, block) * tiles.num_tiles + i)
