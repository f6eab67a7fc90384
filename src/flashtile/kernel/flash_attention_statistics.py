"""What an attention matrix would show, in Triton, without the matrix: O(n) memory, no atomics, a pass over tiles each.

    P = exp(score(softmax_scale * Q K^T) - lse) where mask

``column_sums``     sum_i w_i P_ij: how much each key is attended to       a program owns BLOCK_N keys of one query head
``row_statistics``  entropy -sum_j P_ij ln P_ij and the largest P_ij       a program owns BLOCK_M query rows
``chosen_rows``     P_ij itself, for the rows i that were asked for        a program owns one tile of the result

All three compute tiles of log2 P from the saved log-sum-exp, in ``log2_probability``; full tiles skip the mask. Since
nothing is summed across programs, results are bit-identical from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flashtile.kernel import launch, launcher, tile_lists
from flashtile.kernel.hiding import visible
from flashtile.kernel.seqlen import place
from flashtile.kernel.tile import (
    HUGE_LOGIT,
    LN2,
    LOG2E,
    dot_transposed,
    load_per_row,
    load_rows,
    lse_to_log2,
    sizes,
)
from flashtile.kernel.tile_lists import key_tiles, nth_tile, query_tiles
from flashtile.mask import Mask
from flashtile.score import Score, for_scale
from flashtile.seqlen import Where

_Where = tl.constexpr(Where)
# Below every candidate of ``sortable``. Free places of a list are NOTHING + 1 + place, so that all are different.
NOTHING = tl.constexpr(-(2**63))
LOW_WORD = tl.constexpr(2**32 - 1)
FIRST_CANDIDATE = tl.constexpr(-(2**63) + 2**32)


@triton.jit
def log2_probability(s, lse_log2, q_idx, k_idx, where, softmax_scale, mask, score, MASKED: tl.constexpr):
    """Return log2 P of one tile of products, -inf where P = 0; queries may run along either axis."""
    if score is None:
        log2_p = s * (softmax_scale * LOG2E) - lse_log2
    else:
        log2_p = score.forward(where, q_idx, k_idx, s * softmax_scale, score.args) * LOG2E - lse_log2
    if MASKED:
        shown = visible(where, q_idx, k_idx, mask) & (q_idx < where.seqlen_q)
        log2_p = tl.where(shown, log2_p, float("-inf"))
    return log2_p


# ---------------------------------------------------------------------------------------------------------- columns


@triton.jit
def column_tile(
    step, total, k, q_src, lse_log2_src, weights_src, q_strides, row_stride, row, at, where, offs_n, softmax_scale,
    mask, score, tiles, HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one query tile's share to the column sums; the tile is held transposed, ``[BLOCK_N, BLOCK_M]``."""
    start_m = nth_tile(tiles, where, at.block, step) * BLOCK_M
    q_idx = (start_m + tl.arange(0, BLOCK_M))[None, :]
    length = where.seqlen_q
    q = load_rows(q_src, q_strides, where.batch, where.head, start_m, length, BLOCK_M, HEAD_DIM, CHUNKS, MASKED)
    lse_log2 = load_per_row(lse_log2_src, row_stride, row, start_m, length, BLOCK_M, MASKED)
    s = dot_transposed(k, q)
    p = tl.exp2(log2_probability(s, lse_log2[None, :], q_idx, offs_n[:, None], where, softmax_scale, mask, score,
                                 MASKED))  # fmt: skip
    if weights_src is not None:
        weights = load_per_row(weights_src, row_stride, row, start_m, length, BLOCK_M, MASKED)
        p = tl.where(p > 0.0, p * weights[None, :], 0.0)
    return total + tl.sum(p, 1)


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k"])
def column_sums_kernel(
    q_src, k_src, lse_log2_src, weights_src, sums_ptr, q_strides, k_strides, row_stride,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, mask, score, tiles,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (n_block, head, batch) writes the column sums of BLOCK_N keys over the queries of one head."""
    at = place(seqlen_q, seqlen_k, 0, None, num_heads_q, BLOCK_N, True)
    where = _Where(at.batch, at.head, seqlen_q, seqlen_k)
    row = at.batch * num_heads_q + at.head
    start_n = at.block * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_src, k_strides, at.batch, at.head // heads_per_kv, start_n, seqlen_k, BLOCK_N, HEAD_DIM, CHUNKS,
                  True)  # fmt: skip
    first, full_first, full_end, last = query_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.range(first, full_first):
        total = column_tile(step, total, k, q_src, lse_log2_src, weights_src, q_strides, row_stride, row, at, where,
                            offs_n, softmax_scale, mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_M, True)  # fmt: skip
    for step in tl.range(full_first, full_end):
        total = column_tile(step, total, k, q_src, lse_log2_src, weights_src, q_strides, row_stride, row, at, where,
                            offs_n, softmax_scale, mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_M, False)  # fmt: skip
    for step in tl.range(full_end, last):
        total = column_tile(step, total, k, q_src, lse_log2_src, weights_src, q_strides, row_stride, row, at, where,
                            offs_n, softmax_scale, mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_M, True)  # fmt: skip
    tl.store(sums_ptr + row.to(tl.int64) * seqlen_k + offs_n, total, mask=offs_n < seqlen_k)


# ------------------------------------------------------------------------------------------------------------- rows


@triton.jit
def sortable(log2_p, k_idx):
    """Pack value and index into an int64 whose order is that of the value, among equals the lower index first.

    The bits of an fp32 number, read as an integer, are in its order if it is positive, in reverse if it is negative.
    """
    bits = log2_p.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (LOW_WORD - k_idx.to(tl.int64))


@triton.jit
def unpacked(packed):
    """Return the (value, index) that ``sortable`` packed."""
    ordered = (packed >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), LOW_WORD - (packed & LOW_WORD)


@triton.jit
def merge_tile(kept, log2_p, k_idx):
    """Merge a tile of candidates into each row's unordered list of the largest seen so far.

    The largest candidate takes the place of the smallest in the list, until no row has one that is larger. In a long
    sequence few tiles hold any, and most cost one look.
    """
    candidates = tl.where(log2_p > float("-inf"), sortable(log2_p, k_idx), NOTHING)
    best = tl.max(candidates, 1)
    smallest = tl.min(kept, 1)
    while tl.max((best > smallest).to(tl.int32), 0) > 0:
        replaced = (kept == smallest[:, None]) & (best > smallest)[:, None]
        kept = tl.where(replaced, best[:, None], kept)
        candidates = tl.where(candidates == best[:, None], NOTHING, candidates)
        best = tl.max(candidates, 1)
        smallest = tl.min(kept, 1)
    return kept


@triton.jit
def row_tile(
    step, state, q, lse_log2, k_src, k_strides, at, where, head_kv, offs_m, softmax_scale, mask, score, tiles,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, ENTROPY: tl.constexpr, TOP_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold one key tile into (sum P log2 P, the largest P); what is not asked for passes through."""
    total, kept = state
    start_n = nth_tile(tiles, where, at.block, step) * BLOCK_N
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(k_src, k_strides, where.batch, head_kv, start_n, where.seqlen_k, BLOCK_N, HEAD_DIM, CHUNKS, MASKED)
    s = dot_transposed(q, k)
    log2_p = log2_probability(s, lse_log2[:, None], offs_m[:, None], k_idx, where, softmax_scale, mask, score, MASKED)
    if ENTROPY:
        total += tl.sum(tl.exp2(log2_p) * tl.where(log2_p == float("-inf"), 0.0, log2_p), 1)
    if TOP_K > 0:
        kept = merge_tile(kept, log2_p, k_idx)
    return total, kept


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "top_k"])
def row_statistics_kernel(
    q_src, k_src, lse_ptr, entropy_ptr, top_value_ptr, top_index_ptr, q_strides, k_strides,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, top_k, mask, score, tiles,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, batch) writes entropy and the top_k <= TOP_K largest probabilities of BLOCK_M rows."""
    at = place(seqlen_q, seqlen_k, 0, None, num_heads_q, BLOCK_M, False)
    head_kv = at.head // heads_per_kv
    where = _Where(at.batch, at.head, seqlen_q, seqlen_k)
    ENTROPY: tl.constexpr = entropy_ptr is not None
    PLACES: tl.constexpr = TOP_K if TOP_K > 0 else 1

    start_m = at.block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    inside = offs_m < seqlen_q
    q = load_rows(q_src, q_strides, at.batch, at.head, start_m, seqlen_q, BLOCK_M, HEAD_DIM, CHUNKS, True)
    row = (at.batch.to(tl.int64) * num_heads_q + at.head) * seqlen_q
    # Rows past the sequence, like rows that see no key, get -inf here: all their probabilities are 0.
    lse_log2 = lse_to_log2(tl.load(lse_ptr + row + offs_m, mask=inside, other=float("-inf")))

    first, full_first, full_end, last = key_tiles(mask, tiles, where, at.block, BLOCK_M, BLOCK_N)
    places = tl.arange(0, PLACES).to(tl.int64)[None, :]
    state = (tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, PLACES), tl.int64) + (NOTHING + 1) + places)
    for step in tl.range(first, full_first):
        state = row_tile(step, state, q, lse_log2, k_src, k_strides, at, where, head_kv, offs_m, softmax_scale,
                         mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_N, ENTROPY, TOP_K, True)  # fmt: skip
    for step in tl.range(full_first, full_end):
        state = row_tile(step, state, q, lse_log2, k_src, k_strides, at, where, head_kv, offs_m, softmax_scale,
                         mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_N, ENTROPY, TOP_K, False)  # fmt: skip
    for step in tl.range(full_end, last):
        state = row_tile(step, state, q, lse_log2, k_src, k_strides, at, where, head_kv, offs_m, softmax_scale,
                         mask, score, tiles, HEAD_DIM, CHUNKS, BLOCK_N, ENTROPY, TOP_K, True)  # fmt: skip
    total, kept = state

    if ENTROPY:
        tl.store(entropy_ptr + row + offs_m, tl.maximum(-LN2 * total, 0.0), mask=inside)
    if TOP_K > 0:
        for rank in tl.range(0, top_k):
            best = tl.max(kept, 1)
            log2_p, index = unpacked(best)
            found = best >= FIRST_CANDIDATE
            entry = (row + offs_m) * top_k + rank
            tl.store(top_value_ptr + entry, tl.where(found, tl.exp2(log2_p), 0.0), mask=inside)
            tl.store(top_index_ptr + entry, tl.where(found, index, -1), mask=inside)
            kept = tl.where(kept == best[:, None], NOTHING, kept)


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "num_rows"])
def chosen_rows_kernel(
    q_src, k_src, lse_ptr, row_index_ptr, p_ptr, q_strides, k_strides,
    softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_rows, mask, score,
    HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (m_block, n_block, head, batch) writes one tile of the probabilities of ``num_rows`` gathered queries."""
    num_m_blocks, num_n_blocks = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(seqlen_k, BLOCK_N)
    m_block = tl.program_id(0) % num_m_blocks
    n_block = (tl.program_id(0) // num_m_blocks) % num_n_blocks
    head = (tl.program_id(0) // num_m_blocks // num_n_blocks) % num_heads_q
    batch = tl.program_id(0) // num_m_blocks // num_n_blocks // num_heads_q
    where = _Where(batch, head, seqlen_q, seqlen_k)

    start_m, start_n = m_block * BLOCK_M, n_block * BLOCK_N
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    inside = offs_m < num_rows
    q = load_rows(q_src, q_strides, batch, head, start_m, num_rows, BLOCK_M, HEAD_DIM, CHUNKS, True)
    k = load_rows(k_src, k_strides, batch, head // heads_per_kv, start_n, seqlen_k, BLOCK_N, HEAD_DIM, CHUNKS, True)
    row = (batch.to(tl.int64) * num_heads_q + head) * num_rows + offs_m
    lse_log2 = lse_to_log2(tl.load(lse_ptr + row, mask=inside, other=float("-inf")))
    q_idx = tl.load(row_index_ptr + offs_m, mask=inside, other=0).to(tl.int32)
    p = tl.exp2(log2_probability(dot_transposed(q, k), lse_log2[:, None], q_idx[:, None], offs_n[None, :], where,
                                 softmax_scale, mask, score, True))  # fmt: skip
    tl.store(p_ptr + row[:, None] * seqlen_k + offs_n[None, :], p, mask=inside[:, None] & (offs_n < seqlen_k)[None, :])


# ------------------------------------------------------------------------------------------------------------- host


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    weights: torch.Tensor | None = None,
    config: launch.LaunchConfig | None = None,
) -> torch.Tensor:
    """Return ``(batch, heads_q, seqlen_k)`` in fp32: the probabilities of each key, summed over the queries.

    q ``(batch, heads_q, seqlen_q, head_dim)``, k ``(batch, heads_kv, seqlen_k, head_dim)``, any strides; lse and
    ``weights``, a factor per query, ``(batch, heads_q, seqlen_q)``. The caller has checked the arguments.
    """
    sums = q.new_zeros((*q.shape[:2], k.shape[2]), dtype=torch.float32)
    if sums.numel() == 0 or q.shape[2] == 0:
        return sums
    config = config or _config("backward_dkdv", q)
    lse_log2 = lse * LOG2E.value
    lse_log2 = torch.where(lse_log2.abs() < HUGE_LOGIT.value, lse_log2, torch.inf)  # as in tile.lse_to_log2
    with launch.on_device(q.device):
        (lse_log2_src, row_stride), (weights_src, _) = (_per_row(t, config.block_m) for t in (lse_log2, weights))
        q_src, q_strides = launcher.operand(q, config.block_m)
        k_src, k_strides = launcher.operand(k, config.block_n)
        args = (
            q_src, k_src, lse_log2_src, weights_src, sums, q_strides, k_strides, row_stride,
            *_scalars(q, k, softmax_scale), *_values(mask, score, softmax_scale, q, k, config, True),
        )  # fmt: skip
        programs: Any = triton.cdiv(k.shape[2], config.block_n) * q.shape[1] * q.shape[0]
        launcher.run(column_sums_kernel, programs, q.device, args, _constants(q, config), config)
    return sums


def row_statistics(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    entropy: bool = True,
    top_k: int = 0,
    config: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return ``(entropy, values, indices)`` of every query in one pass; None for what is not asked for.

    entropy ``(batch, heads_q, seqlen_q)`` in nats; values (fp32) and indices (int64) ``(batch, heads_q, seqlen_q,
    top_k)``: the largest probabilities in falling order and their keys, among equals the lower index first; 0 and -1
    where a query sees fewer keys. Arguments as in ``column_sums``.
    """
    entropies = q.new_zeros(q.shape[:3], dtype=torch.float32) if entropy else None
    values = q.new_zeros((*q.shape[:3], top_k), dtype=torch.float32) if top_k else None
    indices = q.new_full((*q.shape[:3], top_k), -1, dtype=torch.int64) if top_k else None
    if 0 in q.shape or k.shape[2] == 0 or not (entropy or top_k):
        return entropies, values, indices
    config = config or _config("backward_dq", q)
    with launch.on_device(q.device):
        q_src, q_strides = launcher.operand(q, config.block_m)
        k_src, k_strides = launcher.operand(k, config.block_n)
        args = (
            q_src, k_src, lse.contiguous(), entropies, values, indices, q_strides, k_strides,
            *_scalars(q, k, softmax_scale), top_k, *_values(mask, score, softmax_scale, q, k, config, False),
        )  # fmt: skip
        programs: Any = triton.cdiv(q.shape[2], config.block_m) * q.shape[1] * q.shape[0]
        constants = _constants(q, config) | {"TOP_K": triton.next_power_of_2(top_k) if top_k else 0}
        launcher.run(row_statistics_kernel, programs, q.device, args, constants, config)
    return entropies, values, indices


def chosen_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    rows: torch.Tensor,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    config: launch.LaunchConfig | None = None,
) -> torch.Tensor:
    """Return ``(batch, heads_q, len(rows), seqlen_k)`` in fp32: the probabilities of the queries numbered ``rows``.

    ``rows`` is one-dimensional, int64, on q's device. Other arguments as in ``column_sums``.
    """
    score = for_scale(score, softmax_scale)
    p = q.new_zeros((*q.shape[:2], rows.numel(), k.shape[2]), dtype=torch.float32)
    if p.numel() == 0:
        return p
    config = config or _config("backward_dq", q)
    gathered, lse = q.index_select(2, rows), lse.index_select(2, rows)
    with launch.on_device(q.device):
        q_src, q_strides = launcher.operand(gathered, config.block_m)
        k_src, k_strides = launcher.operand(k, config.block_n)
        args = (
            q_src, k_src, lse, rows.contiguous(), p, q_strides, k_strides,
            *_scalars(q, k, softmax_scale), rows.numel(), mask.on_device(),
            launcher.score_on_device(score, q, k),
        )  # fmt: skip
        tiles: Any = triton.cdiv(rows.numel(), config.block_m) * triton.cdiv(k.shape[2], config.block_n)
        programs = tiles * q.shape[1] * q.shape[0]
        launcher.run(chosen_rows_kernel, programs, q.device, args, _constants(q, config), config)
    return p


def _config(kernel: str, q: torch.Tensor) -> launch.LaunchConfig:
    """Return the launch configuration of the gradient kernel that owns the same tiles."""
    return launch.lookup(kernel, launch.arch_of(q.device), q.shape[3], q.shape[3], q.dtype)


def _constants(q: torch.Tensor, config: launch.LaunchConfig) -> dict[str, Any]:
    """Return the compile-time arguments that end every parameter list here, in their order."""
    return {name: value for name, value in sizes(q.shape[3], q.shape[3], config).items() if not name.endswith("_V")}


def _scalars(q: torch.Tensor, k: torch.Tensor, softmax_scale: float) -> tuple:
    return softmax_scale, q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2]


def _values(mask, score, softmax_scale, q, k, config, of_keys) -> tuple:
    """Return mask, score and tile lists as kernels take them."""
    score = for_scale(score, softmax_scale)
    device_mask, tiles = tile_lists.on_device(mask, q, k.shape[2], None, config, of_keys)
    return device_mask, launcher.score_on_device(score, q, k), tiles


def _per_row(t: torch.Tensor | None, block_rows: int) -> tuple[Any, int | None]:
    """Return numbers per query as ``tile.load_per_row`` reads them, in rows that the copy engine can read."""
    if t is None:
        return None, None
    batch, heads, length = t.shape
    rows = t.new_empty((batch * heads, (length + 3) // 4 * 4))
    rows[:, :length] = t.reshape(batch * heads, length)
    source = launcher.row_operand(rows, length, block_rows)
    return source, rows.stride(0) if source is rows else None
