"""Gradients to the tensors of a score (bias, slopes, tables) in Triton: one more pass, no atomics, fp32.

    dE[entry] = sum of dS_ij * d(S_ij) / d(entry) over the (batch, head, i, j) that read it,      dS = P * (dP - delta)

That is the tile of the backward pass with another derivative (``Parameter.score``), summed along other lines. A program
owns a block of entries and a share of the places that read them; what several shares found is added up at the end, in
one order. So results are bit-identical from run to run, and memory is O(parameter) + O(programs).

- an entry per query and key (a full bias): the block is a tile, the program walks over the (batch, head) that share it
- an entry per query, or per key: the block is a row or a column of a tile, the program walks along it as well
- an entry per head (ALiBi's slopes), or a table of buckets per head (relative positions): the program walks over all
  tiles, every ``num_m_slots``-th row of them
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashtile.dropout import Dropout
from flashtile.kernel import launch, launcher
from flashtile.kernel.flash_attention_backward import backward_tile
from flashtile.kernel.tile import dot_rows, dot_transposed, head_dim_chunks, load_rows, lse_to_log2, sizes, tile_bounds
from flashtile.mask import Mask, jitted
from flashtile.score import Bucket, Parameter, Score
from flashtile.seqlen import Seqlens, Where

__all__ = ["parameter_gradients", "row_terms_kernel", "score_gradient_kernel"]

# Enough programs for the largest GPUs; more would only cost memory for what they found.
PROGRAMS = 1024

_Where = tl.constexpr(Where)


class Packed(NamedTuple):
    """The first rows and the lengths of packed sequences. (No None here: Triton 3.6 cannot compare such a tuple.)"""

    q_starts: torch.Tensor
    k_starts: torch.Tensor
    q_lengths: torch.Tensor
    k_lengths: torch.Tensor

    @staticmethod
    def of(seqlens: Seqlens | None) -> "Packed | None":
        if seqlens is None:
            return None
        q_lengths, k_lengths = seqlens.cu_seqlens_q.diff(), seqlens.cu_seqlens_k.diff()
        if seqlens.seqused_q is not None:
            q_lengths = torch.minimum(q_lengths, seqlens.seqused_q)
        if seqlens.seqused_k is not None:
            k_lengths = torch.minimum(k_lengths, seqlens.seqused_k)
        return Packed(seqlens.cu_seqlens_q, seqlens.cu_seqlens_k, q_lengths, k_lengths)


class Shares(NamedTuple):
    """How entries and the places that read them are dealt out to programs."""

    batches: int  # of the entries
    heads: int
    rows: int  # of what one (batch, head) writes: queries, or m_slots
    columns: int  # keys, or buckets, or 1
    shared_heads: int  # how many heads read an entry
    num_pairs: int  # how many (batch, head) read an entry
    pairs_per_program: int
    num_m_slots: int
    num_n_slots: int


@triton.jit(do_not_specialize=["num_heads", "num_rows"])
def row_terms_kernel(
    do_src, o_src, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr, do_strides, o_strides, num_heads, num_rows,
    HEAD_DIM_V: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program (m_block, head, batch) writes delta and the LSE in log2 of BLOCK_M query rows."""
    num_m_blocks = tl.cdiv(num_rows, BLOCK_M)
    head = (tl.program_id(0) // num_m_blocks) % num_heads
    batch = tl.program_id(0) // num_m_blocks // num_heads
    start = tl.program_id(0) % num_m_blocks * BLOCK_M
    offs_m = start + tl.arange(0, BLOCK_M)
    do = load_rows(do_src, do_strides, batch, head, start, num_rows, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    o = load_rows(o_src, o_strides, batch, head, start, num_rows, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True)
    row = (batch.to(tl.int64) * num_heads + head) * num_rows
    inside = offs_m < num_rows
    lse = tl.load(lse_ptr + row + offs_m, mask=inside, other=0.0)
    delta = dot_rows(do, o)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row + offs_m, mask=inside, other=0.0)
    delta = tl.where(lse == float("-inf"), 0.0, delta)  # no key, no gradient, whatever dlse says
    tl.store(delta_ptr + row + offs_m, delta, mask=inside)
    tl.store(lse_log2_ptr + row + offs_m, lse_to_log2(lse), mask=inside)


@triton.jit
def _sum_by_bucket(acc, ds, number, BUCKETS: tl.constexpr):
    """Add to ``acc[b]`` the sum of ``ds`` over bucket b, from the first bucket that a tile meets to the last."""
    first = tl.maximum(tl.min(tl.min(number, 1), 0), 0)
    last = tl.minimum(tl.max(tl.max(number, 1), 0), BUCKETS - 1)
    for b in tl.range(first, last + 1):
        total = tl.sum(tl.sum(tl.where(number == b, ds, 0.0), 1), 0)
        acc += tl.where(tl.arange(0, BUCKETS) == b, total, 0.0)
    return acc


@triton.jit
def exact_delta_tile(
    n_block, delta, q, do, lse_log2, k_src, v_src, k_strides, v_strides, batch, k_start, where, head_kv, offs_m,
    softmax_scale, mask, score, dropout, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add one key tile's share to delta as rowsum(P * dP): what rowsum(dO * O) is before O is rounded to 16 bits."""
    start_n = n_block * BLOCK_N
    start, end = k_start + start_n, k_start + where.seqlen_k
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(k_src, k_strides, batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, True, PACKED)
    v = load_rows(v_src, v_strides, batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, True, PACKED)
    dp = dot_transposed(do, v)
    p, _ = backward_tile(dot_transposed(q, k), dp, lse_log2[:, None], 0.0, offs_m[:, None], k_idx, where, softmax_scale,
                         mask, score, True, dropout)  # fmt: skip
    return delta + tl.sum(p * dp, 1)


@triton.jit
def gradient_tile(
    n_block, acc, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, batch, k_start, where, head_kv, offs_m,
    softmax_scale, mask, score, dropout, bucket, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP_Q: tl.constexpr, KEEP_K: tl.constexpr, BUCKETS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add one key tile's share to the sums of this program's entries."""
    start_n = n_block * BLOCK_N
    start, end = k_start + start_n, k_start + where.seqlen_k
    q_idx = offs_m[:, None]
    k_idx = (start_n + tl.arange(0, BLOCK_N))[None, :]
    k = load_rows(k_src, k_strides, batch, head_kv, start, end, BLOCK_N, HEAD_DIM, CHUNKS, True, PACKED)
    v = load_rows(v_src, v_strides, batch, head_kv, start, end, BLOCK_N, HEAD_DIM_V, CHUNKS_V, True, PACKED)
    s = dot_transposed(q, k)
    dp = dot_transposed(do, v)
    _, ds = backward_tile(s, dp, lse_log2[:, None], delta[:, None], q_idx, k_idx, where, softmax_scale, mask, score,
                          True, dropout)  # fmt: skip
    if bucket is not None:
        number = bucket.number(where, q_idx, k_idx, bucket.args) + tl.zeros_like(ds).to(tl.int32)
        return _sum_by_bucket(acc, ds, number, BUCKETS)
    elif KEEP_Q and KEEP_K:
        return acc + ds
    elif KEEP_K:
        return acc + tl.sum(ds, 0)
    else:
        return acc + tl.sum(ds, 1)


@triton.jit(do_not_specialize=["num_heads_q", "heads_per_kv", "seqlen_q", "seqlen_k", "shares"])
def score_gradient_kernel(
    grad_ptr, do_src, q_src, k_src, v_src, lse_log2_ptr, delta_ptr, dlse_ptr, do_strides, q_strides, k_strides,
    v_strides, softmax_scale, num_heads_q, heads_per_kv, seqlen_q, seqlen_k, packed, mask, score, dropout, bucket,
    shares,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP_Q: tl.constexpr, KEEP_K: tl.constexpr, BUCKETS: tl.constexpr, EXACT_DELTA: tl.constexpr,
):  # fmt: skip
    """Program (n_slot, m_slot, head, batch, split) writes one block of its split's (batch, head, rows, columns)."""
    n_slot = tl.program_id(0) % shares.num_n_slots
    m_slot = (tl.program_id(0) // shares.num_n_slots) % shares.num_m_slots
    owner = tl.program_id(0) // shares.num_n_slots // shares.num_m_slots
    first_head = owner % shares.heads
    first_sequence = (owner // shares.heads) % shares.batches
    first_pair = owner // shares.heads // shares.batches * shares.pairs_per_program

    if BUCKETS > 0:
        acc = tl.zeros((BUCKETS,), tl.float32)
    elif KEEP_Q and KEEP_K:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    elif KEEP_K:
        acc = tl.zeros((BLOCK_N,), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M,), tl.float32)
    for pair in tl.range(first_pair, tl.minimum(first_pair + shares.pairs_per_program, shares.num_pairs)):
        head = first_head + pair % shares.shared_heads
        sequence = first_sequence + pair // shares.shared_heads
        if packed is None:
            batch = sequence
            q_start, k_start, length_q, length_k = 0, 0, seqlen_q, seqlen_k
        else:
            batch = sequence * 0
            q_start, length_q = tl.load(packed.q_starts + sequence), tl.load(packed.q_lengths + sequence)
            k_start, length_k = tl.load(packed.k_starts + sequence), tl.load(packed.k_lengths + sequence)
        where = _Where(sequence, head, length_q, length_k)
        row = (batch.to(tl.int64) * num_heads_q + head) * seqlen_q + q_start
        last_m = tl.cdiv(length_q, BLOCK_M)
        if KEEP_Q:
            last_m = tl.minimum(last_m, m_slot + 1)
        for m_block in tl.range(m_slot, last_m, shares.num_m_slots):
            start_m = m_block * BLOCK_M
            bounds = mask.key_range(where, start_m, tl.minimum(start_m + BLOCK_M, length_q), mask.args)
            first, _, _, last = tile_bounds(bounds, length_k, BLOCK_N)
            if KEEP_K:
                first = tl.maximum(first, n_slot)
                last = tl.minimum(last, n_slot + 1)
            if first < last:
                offs_m = start_m + tl.arange(0, BLOCK_M)
                inside = offs_m < length_q
                start, end = q_start + start_m, q_start + length_q
                q = load_rows(q_src, q_strides, batch, head, start, end, BLOCK_M, HEAD_DIM, CHUNKS, True,
                              packed is not None)  # fmt: skip
                do = load_rows(do_src, do_strides, batch, head, start, end, BLOCK_M, HEAD_DIM_V, CHUNKS_V, True,
                               packed is not None)  # fmt: skip
                lse_log2 = tl.load(lse_log2_ptr + row + offs_m, mask=inside, other=0.0)
                if EXACT_DELTA:
                    # Slopes weigh dS by distances: an error of delta, alike for a whole row, would not average out.
                    delta = tl.zeros((BLOCK_M,), tl.float32)
                    for n_block in tl.range(first, last):
                        delta = exact_delta_tile(n_block, delta, q, do, lse_log2, k_src, v_src, k_strides, v_strides,
                                                 batch, k_start, where, head // heads_per_kv, offs_m, softmax_scale,
                                                 mask, score, dropout, HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N,
                                                 packed is not None)  # fmt: skip
                    if dlse_ptr is not None:
                        delta -= tl.load(dlse_ptr + row + offs_m, mask=inside, other=0.0)
                else:
                    delta = tl.load(delta_ptr + row + offs_m, mask=inside, other=0.0)
                for n_block in tl.range(first, last):
                    acc = gradient_tile(n_block, acc, q, do, lse_log2, delta, k_src, v_src, k_strides, v_strides, batch,
                                        k_start, where, head // heads_per_kv, offs_m, softmax_scale, mask, score,
                                        dropout, bucket, HEAD_DIM, HEAD_DIM_V, CHUNKS, CHUNKS_V, BLOCK_N,
                                        KEEP_Q, KEEP_K, BUCKETS, packed is not None)  # fmt: skip

    rows, columns = shares.rows, shares.columns
    grad_ptr += owner.to(tl.int64) * rows * columns
    offs_m, offs_n = m_slot * BLOCK_M + tl.arange(0, BLOCK_M), n_slot * BLOCK_N + tl.arange(0, BLOCK_N)
    if BUCKETS > 0:
        offs = tl.arange(0, BUCKETS)
        tl.store(grad_ptr + m_slot * columns + offs, acc, mask=offs < columns)
    elif KEEP_Q and KEEP_K:
        ptrs = grad_ptr + offs_m.to(tl.int64)[:, None] * columns + offs_n[None, :]
        tl.store(ptrs, acc, mask=(offs_m < rows)[:, None] & (offs_n < columns)[None, :])
    elif KEEP_K:
        tl.store(grad_ptr + m_slot * columns + offs_n, acc, mask=offs_n < columns)
    elif KEEP_Q:
        tl.store(grad_ptr + offs_m, acc, mask=offs_m < rows)
    else:
        tl.store(grad_ptr + m_slot, tl.sum(acc, 0))


def parameter_gradients(
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
    score: Score,
    dropout: Dropout | None = None,
    seqlens: Seqlens | None = None,
    needs: Sequence[bool] | None = None,
    config: launch.LaunchConfig | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every tensor of ``score.tensors()``, in its shape, in fp32; None where none is needed.

    The arguments of ``flash_attention_backward.backward``. ``needs`` says which tensors need a gradient, by default
    those that require one.
    """
    tensors = score.tensors()
    needs = [t.requires_grad for t in tensors] if needs is None else needs
    parameters = [p for p in score.parameters() if needs[p.index]]
    grads: list[torch.Tensor | None] = [None] * len(tensors)
    if not parameters:
        return tuple(grads)
    no_sequence = seqlens is not None and seqlens.cu_seqlens_q.numel() == 1
    if q.numel() == 0 or k.numel() == 0 or no_sequence:
        for p in parameters:
            grads[p.index] = torch.zeros(p.tensor.shape, dtype=torch.float32, device=q.device)
        return tuple(grads)
    chosen = {
        table: config or launch_config(launch.arch_of(q.device), q.shape[3], v.shape[3], q.dtype, table=table)
        for table in {p.bucket is not None for p in parameters}
    }
    with launch.on_device(q.device):
        dlse = None if dlse is None else dlse.contiguous()
        saved = *_row_terms(do, o, lse, dlse, next(iter(chosen.values()))), dlse
        for p in parameters:
            config = chosen[p.bucket is not None]
            grads[p.index] = _gradient(p, do, q, k, v, saved, softmax_scale, mask, dropout, seqlens, config)
    return tuple(grads)


def launch_config(arch: str, head_dim: int, head_dim_v: int, dtype: torch.dtype, *, table: bool) -> launch.LaunchConfig:
    """Return the dQ kernel's tiles, halved where the sums would not fit beside them (the compiler's report)."""
    config = launch.lookup("backward_dq", arch, head_dim, head_dim_v, dtype)
    if (arch == "sm_90" and dtype.itemsize == 2) or arch == "interpreter":  # q and do stay in shared memory
        block_m, block_n, num_stages = config.block_m, config.block_n // (2 if table else 1), 1 if table else 2
    else:
        block_m, block_n, num_stages = config.block_m // 2, config.block_n, 1
    return launch.LaunchConfig(max(block_m, 16), max(block_n, 16), config.num_warps, num_stages, config.source)


def _row_terms(
    do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, config: launch.LaunchConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, num_rows, head_dim_v = o.shape
    lse_log2, delta = torch.empty((2, *lse.shape), dtype=torch.float32, device=o.device)
    (do_src, do_strides), (o_src, o_strides) = (launcher.operand(t, config.block_m) for t in (do, o))
    args = (
        do_src, o_src, lse, dlse, lse_log2, delta, do_strides, o_strides,
        num_heads, num_rows,
    )  # fmt: skip
    constants = {"HEAD_DIM_V": head_dim_v, "CHUNKS_V": head_dim_chunks(head_dim_v), "BLOCK_M": config.block_m}
    programs = _cdiv(num_rows, config.block_m) * num_heads * batch
    launcher.run(row_terms_kernel, programs, o.device, args, constants, config)
    return lse_log2, delta


def _gradient(
    p: Parameter,
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    softmax_scale: float,
    mask: Mask,
    dropout: Dropout | None,
    seqlens: Seqlens | None,
    config: launch.LaunchConfig,
) -> torch.Tensor:
    num_heads_q, seqlen_q, head_dim = q.shape[1:]
    num_heads_kv, seqlen_k, head_dim_v = v.shape[1:]
    num_sequences = q.shape[0] if seqlens is None else seqlens.cu_seqlens_q.numel() - 1
    shares, keep_q, keep_k, buckets = _shares(p, num_sequences, num_heads_q, seqlen_q, config)
    splits = _cdiv(shares.num_pairs, shares.pairs_per_program)
    shape = (splits, shares.batches, shares.heads, shares.rows, shares.columns)
    grad = torch.empty(shape, dtype=torch.float32, device=q.device)
    programs = splits * shares.batches * shares.heads * shares.num_m_slots * shares.num_n_slots
    (do_src, do_strides), (q_src, q_strides) = (launcher.operand(t, config.block_m) for t in (do, q))
    (k_src, k_strides), (v_src, v_strides) = (launcher.operand(t, config.block_n) for t in (k, v))
    args = (
        grad, do_src, q_src, k_src, v_src, *saved, do_strides, q_strides, k_strides, v_strides,
        softmax_scale, num_heads_q, num_heads_q // num_heads_kv, seqlen_q, seqlen_k,
        Packed.of(seqlens), mask.on_device(), launcher.score_on_device(p.score, q, k),
        launcher.dropout_on_device(dropout), p.bucket and Bucket(jitted(p.bucket.number), p.bucket.args), shares,
    )  # fmt: skip
    constants = {
        **sizes(head_dim, head_dim_v, config), "KEEP_Q": keep_q, "KEEP_K": keep_k, "BUCKETS": buckets,
        "EXACT_DELTA": not keep_k and q.itemsize == 2,
    }  # fmt: skip
    launcher.run(score_gradient_kernel, programs, q.device, args, constants, config)
    if keep_q:
        return grad.sum(0) if splits > 1 else grad[0]
    total = grad.sum((0, 3))  # (batches, heads, columns)
    return total[0].t() if buckets else total.unsqueeze(2)


def _shares(
    p: Parameter, num_sequences: int, num_heads: int, seqlen_q: int, config: launch.LaunchConfig
) -> tuple[Shares, bool, bool, int]:
    """Return the shares, whether there is an entry per query and per key, and the table's width as a power of two."""
    if p.bucket is None:
        batches, heads, rows, columns = p.tensor.shape
        # One query, or one key, is as good as sharing.
        keep_q, keep_k, buckets = rows > 1, columns > 1, 0
    else:
        batches, heads, rows, columns = 1, p.tensor.shape[1], 1, p.tensor.shape[0]
        keep_q, keep_k, buckets = False, False, 1 << (columns - 1).bit_length()
    shared_heads = num_heads if heads == 1 else 1
    num_pairs = shared_heads * (num_sequences if batches == 1 else 1)
    num_n_slots = _cdiv(columns, config.block_n) if keep_k else 1
    num_m_slots = _cdiv(rows, config.block_m) if keep_q else 1
    wanted = _cdiv(PROGRAMS, batches * heads * num_m_slots * num_n_slots)
    if not keep_q:
        rows = num_m_slots = min(wanted, _cdiv(seqlen_q, config.block_m))
        wanted = _cdiv(wanted, num_m_slots)
    pairs_per_program = _cdiv(num_pairs, min(wanted, num_pairs))
    shares = Shares(batches, heads, rows, columns, shared_heads, num_pairs, pairs_per_program, num_m_slots, num_n_slots)
    return shares, keep_q, keep_k, buckets


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
