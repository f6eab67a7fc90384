"""The masks that come with the library, each a few lines: functions that run anywhere, and a constructor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.mask.value import EXACT, Mask, always, full_predicate, operands
from flashtile.seqlen import gather, select, wide

# A block of this many entries holds any sequence; twice it is still an int32.
EVERYTHING = 2**30

# --- full, causal, window ---------------------------------------------------------------------------------------------


def _full_key_range(where, q_lo, q_hi, args):
    return 0, 0, where.seqlen_k, where.seqlen_k


def _full_query_range(where, k_lo, k_hi, args):
    return 0, 0, where.seqlen_q, where.seqlen_q


def _causal_predicate(where, q_idx, k_idx, args):
    return k_idx <= q_idx + (where.seqlen_k - where.seqlen_q)


def _causal_key_range(where, q_lo, q_hi, args):
    shift = where.seqlen_k - where.seqlen_q
    return 0, 0, q_lo + shift + 1, q_hi + shift


def _causal_query_range(where, k_lo, k_hi, args):
    shift = where.seqlen_k - where.seqlen_q
    return k_lo - shift, k_hi - 1 - shift, where.seqlen_q, where.seqlen_q


def _top_left_predicate(where, q_idx, k_idx, args):
    return k_idx <= q_idx


def _top_left_key_range(where, q_lo, q_hi, args):
    return 0, 0, q_lo + 1, q_hi


def _top_left_query_range(where, k_lo, k_hi, args):
    return k_lo, min(k_hi - 1, max(k_lo, where.seqlen_q)), where.seqlen_q, where.seqlen_q


# A bound of a window that is None is known to be absent when a kernel is compiled.
def _window_predicate(where, q_idx, k_idx, args):
    distance = k_idx - q_idx - (where.seqlen_k - where.seqlen_q)
    if args[0] is None:
        return distance <= args[1]
    elif args[1] is None:
        return distance >= -args[0]
    else:
        return (distance >= -args[0]) & (distance <= args[1])


def _window_key_range(where, q_lo, q_hi, args):
    shift = where.seqlen_k - where.seqlen_q
    if args[0] is None:
        return 0, 0, q_lo + shift + args[1] + 1, q_hi + shift + args[1]
    elif args[1] is None:
        return q_lo + shift - args[0], q_hi - 1 + shift - args[0], where.seqlen_k, where.seqlen_k
    else:
        return (q_lo + shift - args[0], q_hi - 1 + shift - args[0],
                q_lo + shift + args[1] + 1, q_hi + shift + args[1])  # fmt: skip


def _window_query_range(where, k_lo, k_hi, args):
    shift = where.seqlen_k - where.seqlen_q
    if args[0] is None:
        return k_lo - shift - args[1], k_hi - 1 - shift - args[1], where.seqlen_q, where.seqlen_q
    elif args[1] is None:
        return 0, 0, k_lo - shift + args[0] + 1, k_hi - shift + args[0]
    else:
        return (k_lo - shift - args[1], k_hi - 1 - shift - args[1],
                k_lo - shift + args[0] + 1, k_hi - shift + args[0])  # fmt: skip


_FULL = Mask("full", full_predicate, _full_key_range, _full_query_range)
_CAUSAL = Mask("causal", _causal_predicate, _causal_key_range, _causal_query_range)
_TOP_LEFT = Mask("causal(align='top_left')", _top_left_predicate, _top_left_key_range, _top_left_query_range)


def full() -> Mask:
    """Every query sees every key."""
    return _FULL


def causal(align: str = "bottom_right") -> Mask:
    """Query i sees key j where ``j <= i + seqlen_k - seqlen_q``: the last query sees every key (bottom-right).

    With ``align="top_left"`` where ``j <= i``: the first query sees one key, as PyTorch's ``is_causal`` has it.
    """
    if align == "bottom_right":
        return _CAUSAL
    if align == "top_left":
        return _TOP_LEFT
    raise ValueError(f"align is {align!r}, but wants 'bottom_right' or 'top_left'")


def window(left: int, right: int) -> Mask:
    """Query i sees key j where ``-left <= j - (i + seqlen_k - seqlen_q) <= right``.

    ``left`` and ``right`` count keys besides the current one; -1 is no bound. ``window(n, 0)`` is a causal sliding
    window of n + 1 keys.
    """
    left, right = _bound("left", left), _bound("right", right)
    name = "window" if torch.compiler.is_compiling() else f"window({left}, {right})"
    bounds = tuple(None if n == -1 else n for n in (left, right))
    if bounds == (None, None):
        return full()
    if bounds == (None, 0):
        return causal()
    return Mask(name, _window_predicate, _window_key_range, _window_query_range, bounds)


def looks_back(mask: Mask) -> bool:
    """Return whether a mask is known to let no query see a key after it, ``j > i + seqlen_k - seqlen_q``.

    So are ``causal()``, windows without keys on the right, ``&`` of one of them and anything, and ``|`` of two.
    """
    sign, masks = operands(mask)
    if sign is not None:
        return any(map(looks_back, masks)) if sign == "&" else all(map(looks_back, masks))
    return mask.predicate is _causal_predicate or (mask.predicate is _window_predicate and mask.args[1] == 0)


def most_seen(mask: Mask) -> int:
    """Return a number of keys that no query of a mask sees more than, as far as windows and chunks tell."""
    sign, masks = operands(mask)
    if sign is not None:
        counts = map(most_seen, masks)
        return min(counts) if sign == "&" else min(sum(counts), EVERYTHING)
    if mask.predicate not in (_window_predicate, _chunked_predicate) or not all(type(n) is int for n in mask.args):
        return EVERYTHING
    return max(sum(mask.args) + 1, 0) if mask.predicate is _window_predicate else mask.args[0]


def _bound(name: str, value: Any) -> int:
    value = _integer(name, value, -1, "a number of keys, or -1 for no bound")
    return -1 if value >= EVERYTHING else value


# --- chunks -----------------------------------------------------------------------------------------------------------


def _chunked_predicate(where, q_idx, k_idx, args):
    position = q_idx + (where.seqlen_k - where.seqlen_q)
    return (position >= 0) & (position // args[0] == k_idx // args[0])


def _chunked_key_range(where, q_lo, q_hi, args):
    shift, size = where.seqlen_k - where.seqlen_q, args[0]
    first, last = max(q_lo + shift, 0) // size * size, max(q_hi - 1 + shift, 0) // size * size
    # Queries before the first key are in no chunk.
    return first, last, select(q_lo + shift < 0, last, first + size), last + size


def _chunked_query_range(where, k_lo, k_hi, args):
    shift, size = where.seqlen_k - where.seqlen_q, args[0]
    first, last = k_lo // size * size, (k_hi - 1) // size * size
    return first - shift, last - shift, first + size - shift, last + size - shift


def chunked(size: int) -> Mask:
    """A query sees the keys of its own chunk, ``position // size == j // size``, its position being
    ``i + seqlen_k - seqlen_q``. ``chunked(size) & causal()`` is the chunked attention of Llama 4."""
    size = min(_integer("size", size, 1, "a number of keys"), EVERYTHING)
    return Mask(f"chunked({size})", _chunked_predicate, _chunked_key_range, _chunked_query_range, (size,))


# --- the first keys ---------------------------------------------------------------------------------------------------


def _first_keys(where, args):
    if args[0] is None:
        return args[1]
    else:
        return gather(args[0], where.batch, args[1])


def _first_keys_predicate(where, q_idx, k_idx, args):
    return (k_idx < _first_keys(where, args)) & (q_idx >= 0)


def _first_keys_key_range(where, q_lo, q_hi, args):
    length = _first_keys(where, args)
    return 0, 0, length, length


def _first_keys_query_range(where, k_lo, k_hi, args):
    length = _first_keys(where, args)
    return 0, 0, select(k_hi <= length, where.seqlen_q, 0), select(k_lo < length, where.seqlen_q, 0)


def prefix(lengths: int | Sequence[int] | Tensor) -> Mask:
    """Every query sees the first ``lengths[b]`` keys: ``prefix(lengths) | causal()`` is a prefix language model.

    ``lengths``: one number, or ``(batch,)`` integers.
    """
    return _first_keys_mask("prefix", lengths)


def key_padding(lengths: int | Sequence[int] | Tensor) -> Mask:
    """No query sees keys past the first ``lengths[b]``, which are padding: ``key_padding(lengths) & causal()``.

    ``lengths``: one number, or ``(batch,)`` integers.
    """
    return _first_keys_mask("key_padding", lengths)


def _first_keys_mask(name: str, lengths: Any) -> Mask:
    functions = (_first_keys_predicate, _first_keys_key_range, _first_keys_query_range)
    if isinstance(lengths, int):
        length = min(_integer("lengths", lengths, 0, "a number of keys"), EVERYTHING)
        return Mask(f"{name}({length})", *functions, (None, length))
    table = _integers("lengths", lengths, (1,))
    batch, name = table.shape[0], f"{name}(lengths of {_shape(table)})"
    return Mask(name, *functions, (_readable(table), max(batch, 1)), ((batch, 1), None, None, None))


# --- documents --------------------------------------------------------------------------------------------------------


# args 0 to 4 are tables with a number per key position p: the first position of its document, which stands for the
# document; bounds of the hulls of all documents that have a position from p on, or up to p; start and end of p's run of
# equal ids. Then the length of a row, the distance between rows, the number of entries; and 1 if each document lies in
# one piece.
def _entry(where, position, args, table):
    return gather(args[table], where.batch * args[6] + max(min(position, args[5] - 1), 0), args[7])


def _entries(where, position, args, table):
    inside = select(position < 0, 0, select(position < args[5], position, args[5] - 1))
    return gather(args[table], where.batch * args[6] + inside, args[7])


def _document_predicate(where, q_idx, k_idx, args):
    position = q_idx + (where.seqlen_k - where.seqlen_q)
    return (_entries(where, position, args, 0) == _entries(where, k_idx, args, 0)) & (position >= 0)


def _document_key_range(where, q_lo, q_hi, args):
    first, last = q_lo + (where.seqlen_k - where.seqlen_q), q_hi - 1 + (where.seqlen_k - where.seqlen_q)
    lo, hi = _entry(where, first, args, 1), _entry(where, last, args, 2)
    # Runs of equal ids: if first and last are in the same one it is visible to all, else its "end" is before its start.
    return lo, _entry(where, last, args, 3), select(first < 0, 0, _entry(where, first, args, 4)), hi


def _document_query_range(where, k_lo, k_hi, args):
    shift = where.seqlen_k - where.seqlen_q
    first, last = _entry(where, k_lo, args, 1), _entry(where, k_hi - 1, args, 2)
    full_first, full_last = _entry(where, k_hi - 1, args, 3), _entry(where, k_lo, args, 4)
    return first - shift, full_first - shift, full_last - shift, last - shift


def document(ids: Tensor) -> Mask:
    """A query sees the keys of its own document, ``ids[b, i + seqlen_k - seqlen_q] == ids[b, j]``.

    ``ids`` ``(batch, seqlen)`` or ``(seqlen,)`` integers per key position, in any order; documents that lie in one
    piece have the narrowest tiles. Positions past the end belong to the last position's document; a query before the
    first key sees nothing. Add ``& causal()`` for packed training.
    """
    ids = _integers("ids", ids, (1, 2), keep_dtype=True)
    given, keys = ids.shape[:-1], ids.shape[-1]
    *tables, in_one_piece = _document_tables(_readable(ids.unsqueeze(0) if ids.ndim == 1 else ids))
    rows, length = tables[0].shape
    stride = length if rows > 1 else 0
    functions = (_document_predicate, _document_key_range, _document_query_range)
    # Without any id there is no document that positions past the end could belong to.
    batch = (given[0], 1) if given and given[0] != 1 else None
    sizes = (batch, None, None, None if keys else (0, 1))
    args = (*tables, length, stride, rows * length, in_one_piece)
    return Mask(f"document(ids of {_shape(ids)})", *functions, args, sizes)


def _document_tables(ids: Tensor) -> tuple[Tensor, ...]:
    """Return (first, lo, hi, run_start, run_end), int32 ``(batch, seqlen)``, and whether every document is in one
    piece, int32 ``(1,)``, without waiting for the device."""
    length = ids.shape[1]
    # Equal ids side by side, in their order: each document is one piece of the sorted row.
    ordered, order = ids.sort(dim=1, stable=True)
    start, end = _pieces(ordered)
    back = order.argsort(dim=1)
    first = order.gather(1, start).gather(1, back)
    last = order.gather(1, end - 1).gather(1, back)
    run_start, run_end = _pieces(ids)
    lo = first.flip(1).cummin(dim=1).values.flip(1)
    hi = (last + 1).cummax(dim=1).values
    # Positions past the end belong to the last document.
    belongs_to_last = first == first[:, -1:]
    hi = torch.where(belongs_to_last.cumsum(dim=1) > 0, EVERYTHING, hi)
    in_one_piece = (run_start == first).all().reshape(1)
    run_end = torch.where(run_end == length, EVERYTHING, run_end)
    return tuple(t.to(torch.int32).contiguous() for t in (first, lo, hi, run_start, run_end, in_one_piece))


def _readable(table: Tensor) -> Tensor:
    """Return the table, with an entry where it has none: kernels read one for a batch or keys that are not there."""
    return table if table.numel() else table.new_zeros([max(n, 1) for n in table.shape])


def _pieces(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each entry's run of equal entries starts and ends (the end is past it)."""
    length = ids.shape[1]
    position = torch.arange(length, device=ids.device).expand_as(ids)
    differs = ids[:, 1:] != ids[:, :-1]
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    start = torch.where(torch.cat([edge, differs], 1), position, 0).cummax(dim=1).values
    end = torch.where(torch.cat([differs, edge], 1), position + 1, length).flip(1).cummin(dim=1).values.flip(1)
    return start, end


def document_ids(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Return ids for ``document`` from the boundaries of packed sequences, without waiting for the device.

    ``cu_seqlens`` ``(sequences + 1,)`` rising integers from 0; returns ``(seqlen,)`` int32: position p of sequence s
    gets s.
    """
    cu_seqlens = _integers("cu_seqlens", cu_seqlens, (1,))
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens has shape (0,), but wants (sequences + 1,), the first entry 0")
    position = torch.arange(seqlen, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), position, right=True, out_int32=True)


# --- rows that are known exactly --------------------------------------------------------------------------------------


def _documents_are_in_one_piece(args):
    return gather(args[8], 0, 1) != 0


EXACT[_document_predicate, _document_key_range, _document_query_range] = _documents_are_in_one_piece
for _functions in (
    (full_predicate, _full_key_range, _full_query_range),
    (_causal_predicate, _causal_key_range, _causal_query_range),
    (_top_left_predicate, _top_left_key_range, _top_left_query_range),
    (_window_predicate, _window_key_range, _window_query_range),
    (_chunked_predicate, _chunked_key_range, _chunked_query_range),
    (_first_keys_predicate, _first_keys_key_range, _first_keys_query_range),
):
    EXACT[_functions] = always

# --- blocks and dense tensors -----------------------------------------------------------------------------------------


# args: the table and its number of entries, planes per batch and head, rows, columns, block_q, block_k.
def _blocks_predicate(where, q_idx, k_idx, args):
    plane = wide(where.batch * args[2] + where.head * args[3])
    return gather(args[0], (plane * args[4] + q_idx // args[6]) * args[5] + k_idx // args[7], args[1]) != 0


def block_sparse(block_map: Tensor, block_q: int, block_k: int) -> Mask:
    """Query i sees key j where ``block_map[b, h, i // block_q, j // block_k]``, rows and columns counted from 0.

    ``block_map`` bool, broadcastable to (batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)).
    """
    block_q = _integer("block_q", block_q, 1, "a number of queries")
    block_k = _integer("block_k", block_k, 1, "a number of keys")
    blocks = "blocks" if torch.compiler.is_compiling() else f"{block_q}, {block_k}"
    name = f"block_sparse(block_map of {_shape(block_map)}, {blocks})"
    return _blocks(name, "block_map", block_map, block_q, block_k)


def dense(visible: Tensor) -> Mask:
    """Query i sees key j where ``visible[b, h, i, j]``: a bool tensor broadcastable to (batch, heads_q, seqlen_q,
    seqlen_k). It is read where it lies if it is contiguous apart from expanded dimensions."""
    return _blocks(f"dense(visible of {_shape(visible)})", "visible", visible, 1, 1)


def _blocks(name: str, argument: str, table: Any, block_q: int, block_k: int) -> Mask:
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        met = table.dtype if isinstance(table, Tensor) else type(table).__name__
        more = "; a tensor to be added to the logits is score.bias" if argument == "visible" else ""
        raise TypeError(f"{argument} is {met}, but wants a torch.bool tensor, True where a key is visible{more}")
    if not 1 <= table.ndim <= 4:
        raise ValueError(f"{argument} has shape {tuple(table.shape)}, but wants 1 to 4 dimensions")
    table = table[(None,) * (4 - table.ndim)]
    counts, blocks = table.shape, (1, 1, block_q, block_k)
    sizes = tuple(None if n == 1 and block == 1 else (n, block) for n, block in zip(counts, blocks, strict=True))
    table = _readable(table)
    for dim in range(4):
        if table.stride(dim) == 0:  # expanded: one entry serves for all
            table = table.narrow(dim, 0, 1)
    batch, heads, rows, cols = table.shape
    block_q, block_k = (EVERYTHING if n == 1 else block for n, block in ((rows, block_q), (cols, block_k)))
    table = table.contiguous().view(torch.uint8)
    per_batch, per_head = (heads if batch > 1 else 0), (1 if heads > 1 else 0)
    args = (table, table.numel(), per_batch, per_head, rows, cols, block_q, block_k)
    return Mask(name, _blocks_predicate, None, None, args, sizes)


# --- arguments --------------------------------------------------------------------------------------------------------


def _integer(name: str, value: Any, least: int, wanted: str) -> Any:
    """Return a checked int; a compiler's symbol stays one."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} is {value!r}, but wants an int: {wanted}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} is {value}, but wants at least {least}: {wanted}")
    return value


def _integers(name: str, values: Any, dims: tuple[int, ...], keep_dtype: bool = False) -> Tensor:
    """Return a tensor of integers, int32 unless the dtype is to be kept, contiguous."""
    if not isinstance(values, (Tensor, list, tuple)):
        raise TypeError(f"{name} is a {type(values).__name__}, but wants a tensor or a sequence of integers")
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=None if values else torch.int32)
    if tensor.dtype in (torch.bool,) or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} has dtype {tensor.dtype}, but wants integers")
    if tensor.ndim not in dims:
        wanted = " or ".join(str(n) for n in dims)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but wants {wanted} dimension(s)")
    return (tensor if keep_dtype else tensor.clamp(-1, EVERYTHING).to(torch.int32)).contiguous()


def _shape(t: Any) -> str:
    if torch.compiler.is_compiling():  # it has no text for a size that varies, and compiles anew for another name
        return "any shape"
    return " x ".join(str(n) for n in t.shape) if isinstance(t, Tensor) else type(t).__name__
