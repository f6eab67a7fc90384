"""The backward pass for Hopper in Gluon: warps that load and add beside two warpgroups that compute.

    P = exp(score(S) - lse)     dP = dO V^T     delta = rowsum(dO * O) - dlse     dS = P * (dP - delta) * score'(S)
    dQ = softmax_scale dS K     dK = softmax_scale dS^T Q     dV = P^T dO

A program takes a block of keys of one kv head and walks over the query tiles of every query head that reads it: K and
V stay in shared memory, dK and dV in registers. Then it takes the next block. dQ is summed over programs in fp32 in
global memory, by the copy engine, in the order in which programs come by: dQ is then not the same bit for bit from run
to run (dK and dV are), unless programs take turns.
``pre_post.py`` has what comes before (delta, zeros) and after (dQ into its dtype).

Source: Shah et al., FlashAttention-3 (2024); the portable version is in ``flash_attention_backward.py``.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher, replay, seqlen, tile_lists
from flashtile.kernel.hopper import backward_narrow, backward_sizes, backward_wide, rows, schedule, score_entries
from flashtile.kernel.hopper.backward_movers import loader, reducer
from flashtile.kernel.hopper.backward_parts import (
    BOX,
    ROWS,
    Buffers,
    Copies,
    Signals,
    blocks,
    panel_layout,
)
from flashtile.kernel.hopper.backward_sizes import Sizes
from flashtile.kernel.hopper.backward_work import FIELDS, READERS, SLOTS, Problem
from flashtile.kernel.hopper.barriers import mbarriers
from flashtile.kernel.hopper.pre_post import after_kernel, before_kernel
from flashtile.kernel.launcher import Descriptor
from flashtile.kernel.layout import copied_in_blocks, empty_in_order_of
from flashtile.kernel.tile import head_dim_chunks
from flashtile.mask import Mask
from flashtile.mask.value import is_full
from flashtile.score import Score, few_registers, for_scale, only_adds
from flashtile.seqlen import Seqlens

__all__ = ["backward", "backward_kernel"]

SECTION_BYTES = 32 * 2**20  # of Q, dO and sums of dQ, which the programs of a section should find in the L2 cache

# A mask's arguments for which there are 8 bytes of shared memory each where a score's entries fill all the rest; masks
# that read tables had better leave a wide tile's registers to them.
FEW_NUMBERS = 8

_Buffers, _Copies = gl.constexpr(Buffers), gl.constexpr(Copies)
_Problem, _Signals = gl.constexpr(Problem), gl.constexpr(Signals)
_narrow_consumer = backward_narrow.consumer
_p_consumer, _ds_consumer = backward_wide.p_consumer, backward_wide.ds_consumer


@gluon.jit
def _buffers(q_desc, k_desc, lse_desc, dq_desc, entries_desc, P_DTYPE: gl.constexpr, SIZES: gl.constexpr):
    """Allocate shared memory."""
    PANELS: gl.constexpr = SIZES.head_dim // SIZES.panel
    PANELS_V: gl.constexpr = SIZES.head_dim_v // SIZES.panel
    HALVES: gl.constexpr = SIZES.block_n // ROWS
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    ds = gl.allocate_shared_memory(dtype, [2 * HALVES, ROWS, SIZES.block_m], panel_layout(64))
    p = ds
    if HALVES == 1:
        p = gl.allocate_shared_memory(P_DTYPE, [ROWS, SIZES.block_m], panel_layout(64))
    if entries_desc is None:
        entries = ()
    else:
        shape: gl.constexpr = blocks(HALVES * SIZES.entries_stages, entries_desc)
        entries = (gl.allocate_shared_memory(entries_desc.dtype, shape, entries_desc.layout),)
    return _Buffers(
        gl.allocate_shared_memory(dtype, blocks(SIZES.stages * PANELS, q_desc), q_desc.layout),
        gl.allocate_shared_memory(dtype, blocks(HALVES * PANELS, k_desc), k_desc.layout),
        gl.allocate_shared_memory(dtype, blocks(HALVES * PANELS_V, k_desc), k_desc.layout),
        gl.allocate_shared_memory(dtype, blocks(SIZES.stages_do * PANELS_V, q_desc), q_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SIZES.stages, SIZES.block_m], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SIZES.stages_do, SIZES.block_m], lse_desc.layout),
        ds,
        p,
        gl.allocate_shared_memory(gl.float32, [2 * SIZES.dq_kept, ROWS, BOX], dq_desc.layout),
        gl.allocate_shared_memory(gl.int32, [2 * SIZES.stages, 1], NUMBERS),
        gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], NUMBERS),
        entries,
    )


@gluon.jit
def _entries_signals(SIZES: gl.constexpr):
    return mbarriers(SIZES.entries_stages, 1), mbarriers(SIZES.entries_stages, SIZES.block_n // ROWS)


@gluon.jit(
    do_not_specialize=["num_works", "heads_per_section", "num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k",
                       "num_sequences", "tiles_per_head", "first_rising"]
)  # fmt: skip
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, softmax_scale,
    num_works, heads_per_section, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences, tiles_per_head,
    turns_ptr, first_rising, counter, packed, mask, score, entries_desc, tiles, SIZES: gl.constexpr,
):  # fmt: skip
    """A piece of work, (section, n_block, kv head), writes dK and dV of its keys and adds to dQ where they are seen."""
    problem = _Problem(num_works, heads_per_section, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, num_sequences,
                       tiles_per_head, turns_ptr, first_rising)  # fmt: skip
    copies = _Copies(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
                     () if entries_desc is None else (entries_desc,))  # fmt: skip
    P_DTYPE: gl.constexpr = gl.float16 if score is None else q_desc.dtype
    buffers = _buffers(q_desc, k_desc, lse_desc, dq_desc, entries_desc, P_DTYPE, SIZES)
    signals = _Signals(
        mbarriers(SIZES.stages, 1), mbarriers(1, 1), mbarriers(1, 1), mbarriers(SIZES.stages_do, 1),
        mbarriers(1, 2), mbarriers(1, 2), mbarriers(2, 1), mbarriers(SLOTS, 1), mbarriers(SLOTS, READERS),
        () if entries_desc is None else _entries_signals(SIZES),
    )  # fmt: skip
    fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # (A tuple that holds jitted functions cannot be given a name.)
    if SIZES.block_n > ROWS:
        gl.warp_specialize(
            [
                (_narrow_consumer, (FIRST, copies, buffers, signals, softmax_scale, mask, score, SIZES)),
                (_narrow_consumer, (SECOND, copies, buffers, signals, softmax_scale, mask, score, SIZES)),
                (loader, (copies, buffers, signals, problem, counter, packed, mask, tiles, SIZES)),
                (reducer, (FIRST, copies, buffers, signals, problem, mask, tiles, SIZES)),
                (reducer, (SECOND, copies, buffers, signals, problem, mask, tiles, SIZES)),
            ],
            [4, 1, 1, 1],
            [SIZES.registers_consumer, SIZES.registers_mover, SIZES.registers_mover, SIZES.registers_mover],
        )
    else:
        gl.warp_specialize(
            [
                (_p_consumer, (copies, buffers, signals, softmax_scale, mask, score, SIZES)),
                (_ds_consumer, (copies, buffers, signals, softmax_scale, SIZES)),
                (loader, (copies, buffers, signals, problem, counter, packed, mask, tiles, SIZES)),
                (reducer, (FIRST, copies, buffers, signals, problem, mask, tiles, SIZES)),
                (reducer, (SECOND, copies, buffers, signals, problem, mask, tiles, SIZES)),
            ],
            [4, 1, 1, 1],
            [SIZES.registers_consumer, SIZES.registers_mover, SIZES.registers_mover, SIZES.registers_mover],
        )


# --- on the host ------------------------------------------------------------------------------------------------------


@functools.cache
def _fp32_layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(0 if rank == 1 else 128, 32, rank)


def _sections(mask: Mask, heads: int, group: int, seqlen_q: int, size: Sizes) -> tuple[int, int]:
    """Return how many kv heads (out of ``heads``, all batch entries) to take at a time, and the first of the last ones.

    One is best where all blocks of keys take equally long; but to take turns, blocks of one head had better not start
    at the same time. There are two sections at least, because the last one is special: see ``key_block``. Packed
    sequences that take turns have none that is: in rising order, blocks of a short one would wait for one another.
    """
    if not size.in_turn and (size.packed or is_full(mask)):
        return 1, heads - 1
    in_cache = SECTION_BYTES // max(1, group * seqlen_q * (6 * size.head_dim + 2 * size.head_dim_v))
    if size.packed:
        return max(1, min(heads, in_cache)), heads
    section = max(1, min(launch.ceil_div(heads, 2), in_cache))
    return section, (heads - 1) // section * section


def _numbers_in(args: Any) -> int:
    """Return how many numbers are in nested tuples and masks: too many if there is a tensor."""
    if isinstance(args, Mask):
        return _numbers_in(args.args)
    if isinstance(args, tuple):
        return sum(map(_numbers_in, args))
    return FEW_NUMBERS + 1 if isinstance(args, torch.Tensor) else 1


def backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask,
    score: Score | None = None,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    deterministic: bool = False,
    config: launch.HopperConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(dq, dk, dv)`` for the gradients ``do`` of o and ``dlse`` of the log-sum-exp (None: zero).

    Shapes as in ``flash_attention_triton.forward``. The copy engine reads q, k and v where they lie
    (``hopper.refusal``); do too, unless it has to be copied first; o may have any strides. Memory beyond the gradients:
    an fp32 dQ and two numbers per query, whole tiles of them. With ``deterministic`` dq too is the same bit for bit in
    every run, because programs add to it in turn. Raises NotImplementedError for dropout.
    """
    if dropout is not None:
        raise NotImplementedError("the backward pass for Hopper has no dropout; backend='triton' has")
    score = for_scale(score, softmax_scale)
    batch, num_heads_q, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    dq, dk, dv = (empty_in_order_of(t, t.shape) for t in (q, k, v))
    nothing = 0 in (batch * num_heads_q, seqlen_q, seqlen_k)
    if nothing or (seqlens is not None and seqlens.seqused_q is not None):
        dq.zero_()
    if nothing or (seqlens is not None and seqlens.seqused_k is not None):
        dk.zero_()
        dv.zero_()
    if nothing:
        return dq, dk, dv
    config = config or launch.lookup_hopper("hopper_backward", head_dim, head_dim_v, q.dtype)
    entries = score_entries.tensor_of(score, softmax_scale)
    entry_bytes = 0 if entries is None else entries.itemsize
    rest_of_size = seqlens is not None, deterministic, entry_bytes
    size = backward_sizes.of(head_dim, head_dim_v, config, *rest_of_size)
    wide = few_registers(score) or (size.entries_stages and only_adds(score) and _numbers_in(mask.args) <= FEW_NUMBERS)
    if config.block_m > 64 and not wide:  # what is read, or the derivative, has no registers
        config = dataclasses.replace(config, block_m=64)
        size = backward_sizes.of(head_dim, head_dim_v, config, *rest_of_size)
    if not copied_in_blocks(do):
        do = do.clone(memory_format=torch.contiguous_format)  # (one at an odd address is contiguous)
    num_sequences, packed, tiles_per_head = seqlen.on_device(seqlens, seqlen_q, size.block_m)
    num_works = seqlen.on_device(seqlens, seqlen_k, size.block_n)[2] * num_heads_kv * batch
    num_tiles = batch * num_heads_q * tiles_per_head
    per_query = num_tiles * size.block_m
    lengths = [per_query, per_query, per_query * size.head_dim, 2 * num_tiles]
    scratch = torch.empty(sum(lengths), dtype=torch.float32, device=q.device)
    counter = schedule.counter_of(q.device)
    dlse = None if dlse is None else dlse.contiguous()
    tensors, fresh = (do, q, k, v, o, lse, dlse), (dq, dk, dv, scratch, counter)
    rest = (softmax_scale, deterministic, config)
    call = replay.Call("hopper_backward", q.device, tensors, mask, *rest, score, seqlens, fresh=fresh)
    if call.again():
        return dq, dk, dv
    lse_log2, delta, dq_sum, turns = scratch.split(lengths)
    turns = turns.view(torch.int32)
    if deterministic and mask.key_range is None:  # lists do not say which other blocks of keys walk over a tile
        device_mask, tiles = mask.on_device(), None
    else:
        device_mask, tiles = tile_lists.on_device(mask, q, seqlen_k, seqlens, config, True)
    group = num_heads_q // num_heads_kv
    section, rising = _sections(mask, batch * num_heads_kv, group, seqlen_q // max(1, num_sequences), size)
    first_rising = rising * group
    where = (num_heads_q, seqlen_q, seqlen_k, num_sequences, tiles_per_head, packed)
    before = (
        do, o, lse, dlse, lse_log2, delta, turns,
        launcher.strides_of(do), launcher.strides_of(o), seqlen_q, *where, device_mask if deterministic else None,
        first_rising,
    )  # fmt: skip
    query_rows, key_rows = (size.block_m, size.panel, size.packed), (ROWS.value, size.panel, size.packed)
    args = (
        rows.described(q, *query_rows), rows.described(k, *key_rows), rows.described(v, *key_rows),
        rows.described(do, *query_rows),
        *(Descriptor(t, (per_query,), (1,), (size.block_m,), _fp32_layout(1)) for t in (lse_log2, delta)),
        rows.described(dk, *key_rows), rows.described(dv, *key_rows),
        Descriptor(dq_sum, (dq_sum.numel() // 32, 32), (32, 1), (ROWS.value, BOX.value), _fp32_layout(2)),
        softmax_scale, num_works, section, num_heads_q, group, seqlen_q, seqlen_k, num_sequences, tiles_per_head,
        turns, first_rising, counter, packed, device_mask,
        launcher.score_in_parts(score, q, k, mask, softmax_scale),
        score_entries.described(entries, size.block_m, ROWS.value, size.entries_stages), tiles,
    )  # fmt: skip
    after = (dq_sum, turns, dq, launcher.strides_of(dq), softmax_scale, *where)
    of_v = {"HEAD_DIM_V": head_dim_v, "CHUNKS_V": head_dim_chunks(head_dim_v), "SIZES": size}
    with launch.on_device(q.device), call.noted():
        launcher.run(before_kernel, num_tiles, q.device, before, of_v, config)
        programs = min(num_works, schedule.multiprocessors(q.device))
        launcher.run(backward_kernel, programs, q.device, args, {"SIZES": size}, config)
        launcher.run(after_kernel, num_tiles, q.device, after, {"HEAD_DIM": head_dim, "SIZES": size}, config)
    return dq, dk, dv
