"""What score functions may be made of, beside arithmetic: each in a form for torch and one for kernels.

``jitted`` of ``flashtile.mask`` puts the second in place of the first. Scores may call helpers of their own that are
made of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.seqlen import ON_DEVICE, ROUGH_ON_DEVICE, Where, select

if TYPE_CHECKING:
    import triton.language as tl  # in the device forms only, where ``jitted`` provides it


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


def read(entries: Entries, where: Where, q_idx: Any, k_idx: Any, s: Tensor) -> Tensor:
    """Return ``entries.tensor[where.batch, where.head, q_idx, k_idx]`` in the dtype of ``s``.

    Indices past the end, in tiles that reach over it, read something finite, and nothing outside the tensor.
    """
    places = zip(entries.tensor.shape, (where.batch, where.head, q_idx, k_idx), strict=True)
    index = tuple(0 if size == 1 else torch.as_tensor(i).clamp(0, size - 1) for size, i in places)
    return entries.tensor[index].to(s.dtype)


def _read_on_device(entries, where, q_idx, k_idx, s):
    ptr = entries.tensor
    query, key = entries.query, entries.key
    if len(entries.batch) > 0:
        ptr += tl.cast(where.batch, tl.int64) * entries.batch[0]
    if len(entries.head) > 0:
        ptr += tl.cast(where.head, tl.int64) * entries.head[0]
    # The key's size is an argument here, and so known to be a multiple of 16 if it is: then whole vectors are loaded.
    if len(query) > 0 and len(key) > 0:
        ptr = (ptr + q_idx.to(tl.int64) * query[0]) + k_idx.to(tl.int64) * key[0]  # one address per row, then columns
        return tl.load(ptr, mask=(q_idx < query[1]) & (k_idx < key[1]), other=0.0).to(s.dtype)
    elif len(query) > 0:
        return tl.load(ptr + q_idx.to(tl.int64) * query[0], mask=q_idx < query[1], other=0.0).to(s.dtype)
    elif len(key) > 0:
        return tl.load(ptr + k_idx.to(tl.int64) * key[0], mask=k_idx < key[1], other=0.0).to(s.dtype)
    else:
        return tl.load(ptr).to(s.dtype)


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
        read: _read_on_device,
        exp2: _exp2_on_device,
        log2: _log2_on_device,
        absolute: _absolute_on_device,
        tanh: _tanh_on_device,
        real: _real_on_device,
    }
)
ROUGH_ON_DEVICE.update({tanh: _rough_tanh_on_device, real: _rough_real_on_device})
