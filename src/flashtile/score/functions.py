"""What score functions may be made of, beside arithmetic: each in a form for torch and one for kernels.

``jitted`` of ``flashtile.mask`` puts the second in place of the first. Scores may call helpers of their own that are
made of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.seqlen import ON_DEVICE, ROUGH_ON_DEVICE, WHEN_COMPILED, Where, select

if TYPE_CHECKING:
    # In the device forms only, where ``jitted`` provides them.
    import triton.language as tl
    from triton.experimental.gluon import language as gl


class Entries(NamedTuple):
    """A tensor ``(batch | 1, heads_q | 1, seqlen_q | 1, seqlen_k | 1)`` for ``read``, and each dimension's stride and
    size, or ``()`` where one entry serves all. (Not None: Triton 3.6 cannot compare a tuple that holds one.)"""

    tensor: Tensor
    batch: tuple[int, ...]
    head: tuple[int, ...]
    query: tuple[int, ...]
    key: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Entries:
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        return Entries(tensor, *(() if size == 1 else (stride, size) for stride, size in dims))


# Functions without a form for devices are compiled as they are written: no annotations, which kernels cannot look up.


def read(entries, where, q_idx, k_idx, s):
    """Return ``entries.tensor[where.batch, where.head, q_idx, k_idx]`` in the dtype of ``s``.

    Indices past the end, in tiles that reach over it, read something finite, and nothing outside the tensor.
    """
    return number(fetch(entries, where, q_idx, k_idx), k_idx, s)


def fetch(entries: Entries, where: Where, q_idx: Any, k_idx: Any) -> Tensor:
    """Return what ``read`` does, in the tensor's own dtype; ``number`` makes the rest of ``read`` of it.

    Two steps, because in between numbers of 16 bits take half as many registers.
    """
    places = zip(entries.tensor.shape, (where.batch, where.head, q_idx, k_idx), strict=True)
    index = tuple(0 if size == 1 else torch.as_tensor(i).clamp(0, size - 1) for size, i in places)
    return entries.tensor[index]


def _fetch_on_device(entries, where, q_idx, k_idx):
    ptr = entries.tensor
    query, key = entries.query, entries.key
    if len(entries.batch) > 0:
        ptr += tl.cast(where.batch, tl.int64) * entries.batch[0]
    if len(entries.head) > 0:
        ptr += tl.cast(where.head, tl.int64) * entries.head[0]
    # The key's size is an argument here, and so known to be a multiple of 16 if it is: then whole vectors are loaded.
    if len(query) > 0 and len(key) > 0:
        ptr = _addresses(ptr, q_idx, k_idx, query[0], key[0])
        return tl.load(ptr, mask=(q_idx < query[1]) & (k_idx < key[1]), other=0.0)
    elif len(query) > 0:
        return tl.load(_addresses_along(ptr, q_idx, query[0]), mask=q_idx < query[1], other=0.0)
    elif len(key) > 0:
        return tl.load(_addresses_along(ptr, k_idx, key[0]), mask=k_idx < key[1], other=0.0)
    else:
        return tl.load(ptr)


def number(x, k_idx, s):
    """Return ``x``, fetched at ``k_idx``, in the dtype of ``s``."""
    return x.to(s.dtype)


def _rough_number_on_device(x, k_idx, s):
    # Of two bf16 numbers in one register: the compiler takes three instructions for them.
    if x.dtype == tl.bfloat16 and _in_pairs(x, k_idx):
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(s.dtype)


def _in_pairs(x: Any, k_idx: Any) -> bool:
    """Return whether neighbouring keys of a tile lie in neighbouring registers: in Gluon kernels, keys along rows."""
    return False


def _in_pairs_when_compiled(x, k_idx):
    shape = [int(n) for n in x.shape]
    return len(shape) == 2 and min(shape) > 1 == int(k_idx.shape[0]) and getattr(k_idx.type, "layout", None) is not None


def _layout(index: Any) -> Any:
    """Return the layout of an index along rows or columns in a Gluon kernel, else None."""


def _layout_when_compiled(index):
    shape = [int(n) for n in index.shape]
    return getattr(index.type, "layout", None) if len(shape) == 2 and min(shape) == 1 < max(shape) else None


def _in_tile(index):
    """Return (start, place) of indices in a tile, the sum of which they are; the start is the same for all."""
    if index.shape[1] == 1:
        place = gl.arange(0, index.shape[0], layout=gl.SliceLayout(1, _layout(index)))[:, None]
    else:
        place = gl.arange(0, index.shape[1], layout=gl.SliceLayout(0, _layout(index)))[None, :]
    return tl.max_constancy(index - place, [place.shape[0], place.shape[1]]), place


def _summands(index):
    """Return likewise (start, by thread, by register): what differs between a thread's registers are constants.

    That is so for accumulators of matrix products, where a thread's columns are 8 n + {0, 1}, its rows 64 n + {0, 8}.
    """
    start, place = _in_tile(index)
    if index.shape[1] == 1:
        return start, place & 55, place & -56
    else:
        # 0 0 2 2 4 4 6 6 0 0 ... and 0 1 0 1 0 1 0 1 8 9 ..., of which the compiler would not see that pairs are whole.
        by_thread = tl.multiple_of(tl.max_constancy(place & 6, [1, 2]), [1, 2])
        return start, by_thread, tl.multiple_of(tl.max_contiguous(place & -7, [1, 2]), [1, 8])


# Addresses by query and key. In Gluon kernels, whose instructions count, they are one per thread, then one per query
# that a thread has, and the keys, whose stride is 1 as a rule, are constants within the load.


def _addresses(ptr, q_idx, k_idx, q_stride, k_stride):
    if _layout(q_idx) is None or _layout(k_idx) is None:
        return (ptr + q_idx.to(tl.int64) * q_stride) + k_idx.to(tl.int64) * k_stride
    else:
        q_start, q_by_thread, q_by_register = _summands(q_idx)
        k_start, k_by_thread, k_by_register = _summands(k_idx)
        ptr = ptr + (q_start + q_by_thread).to(tl.int64) * q_stride + (k_start + k_by_thread).to(tl.int64) * k_stride
        return (ptr + q_by_register.to(tl.int64) * q_stride) + k_by_register.to(tl.int64) * k_stride


def _addresses_along(ptr, index, stride):
    if _layout(index) is None:
        return ptr + index.to(tl.int64) * stride
    else:
        start, by_thread, by_register = _summands(index)
        return (ptr + (start + by_thread).to(tl.int64) * stride) + by_register.to(tl.int64) * stride


def exp2(x: Tensor) -> Tensor:
    """Return 2**x."""
    return torch.exp2(x)


def _exp2_on_device(x):
    return tl.exp2(x)


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2."""
    return torch.log2(x)


def _log2_on_device(x):
    return tl.log2(x)


def reciprocal(x):
    """Return 1 / x, to a relative 1e-7, of a number that is neither huge nor tiny."""
    return 1.0 / x


def _rough_reciprocal_on_device(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def absolute(x: Any) -> Any:
    """Return |x|, of indices and logits."""
    return abs(x)


def _absolute_on_device(x):
    return tl.abs(x)


def real(index: Any, s: Any) -> Any:
    """Return an index as a number of the kind of ``s``, exact up to 2**24.

    To be applied before indices along rows and columns are combined: converting a whole tile of integers takes a GPU as
    long as its exponentials.
    """
    return index.to(s.dtype) if isinstance(index, torch.Tensor) else float(index)


def _real_on_device(index, s):
    return index.to(s.dtype)


def ahead(where, q_idx, k_idx, s):
    """Return how far the key stands after the query, ``k_idx - (q_idx + seqlen_k - seqlen_q)``, as a number like ``s``.

    Use this rather than the formula: in kernels it is one addition per logit.
    """
    return real(k_idx, s) - real(q_idx + (where.seqlen_k - where.seqlen_q), s)


def _rough_ahead_on_device(where, q_idx, k_idx, s):
    # Exact in any order: so the columns' share is a constant, and there is next to nothing to do per column.
    shift = where.seqlen_k - where.seqlen_q
    if _layout(q_idx) is None or _layout(k_idx) is None:
        return real(k_idx, s) - real(q_idx + shift, s)
    elif q_idx.shape[1] == 1:
        start, by_thread, by_register = _summands(k_idx)
        return (real(start, s) + real(by_thread, s) - real(q_idx + shift, s)) + by_register.to(s.dtype)
    else:
        start, by_thread, by_register = _summands(q_idx)
        return (real(k_idx - shift, s) - real(start, s) - real(by_thread, s)) - by_register.to(s.dtype)


def ahead_times(where, q_idx, k_idx, s, factor):
    """Return ``ahead(where, q_idx, k_idx, s) * factor``: in kernels one instruction per logit."""
    return ahead(where, q_idx, k_idx, s) * factor


def _rough_ahead_times_on_device(where, q_idx, k_idx, s, factor):
    shift = where.seqlen_k - where.seqlen_q
    if _layout(q_idx) is None or _layout(k_idx) is None:
        return (real(k_idx, s) - real(q_idx + shift, s)) * factor
    elif q_idx.shape[1] == 1:
        start, by_thread, by_register = _summands(k_idx)
        by_thread = (real(start, s) + real(by_thread, s) - real(q_idx + shift, s)) * factor
        return by_thread + by_register.to(s.dtype) * factor
    else:
        start, by_thread, by_register = _summands(q_idx)
        by_thread = (real(k_idx - shift, s) - real(start, s) - real(by_thread, s)) * factor
        return by_thread - by_register.to(s.dtype) * factor


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent; in kernels to 4e-7 of its value, and to 5e-4 where q, k, v have 16 bits.

    (About what a logit loses that is rounded to them: the relative error of fp16 is 5e-4, of bf16 4e-3.)
    """
    return torch.tanh(x)


def _tanh_on_device(x):
    # A ratio of exponentials would be inf / inf for large x: here exp2 may overflow, and 2 / inf is 0. Near 0, where
    # the difference cancels, an odd polynomial: minimax of tanh(x) / x on |x| < 1/2 with a constant term of 1, 1.5e-8.
    far = 1.0 - 2.0 / (1.0 + exp2(x * 2.8853900817779268))  # 2 log2(e)
    u = x * x
    near = x + x * u * (-0.33333144 + u * (0.13325879 + u * (-0.05304549 + u * 0.01724149)))
    return select(absolute(x) < 0.5, near, far)


def _rough_tanh_on_device(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def _rough_real_on_device(index, s):
    # An integer below 2**22 added to the bits of 1.5 * 2**23: arithmetic instead of a conversion, and as exact.
    return (index + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


ON_DEVICE.update(
    {
        fetch: _fetch_on_device,
        exp2: _exp2_on_device,
        log2: _log2_on_device,
        absolute: _absolute_on_device,
        tanh: _tanh_on_device,
        real: _real_on_device,
    }
)
ROUGH_ON_DEVICE.update(
    {
        tanh: _rough_tanh_on_device,
        real: _rough_real_on_device,
        ahead: _rough_ahead_on_device,
        ahead_times: _rough_ahead_times_on_device,
        number: _rough_number_on_device,
        reciprocal: _rough_reciprocal_on_device,
    }
)
# (Its type calls all of them predicates.)
WHEN_COMPILED.update({_layout: _layout_when_compiled, _in_pairs: _in_pairs_when_compiled})  # pyright: ignore
