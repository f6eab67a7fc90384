"""Which sequence a program works on, and the few operations that mask and score functions need beyond arithmetic.

Mask and score functions are plain Python that runs on integers, on torch tensors and, jitted, in kernels. Arithmetic
and comparisons mean the same everywhere; the functions here have a form for Python and torch, and another for kernels,
which ``mask.jitted`` puts in their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import triton.language as tl  # in the device forms only, where ``mask.jitted`` provides it


class Where(NamedTuple):
    """The place of a tile: its batch entry, its query head, and the two lengths of its sequence.

    Every field is an int, a torch tensor that broadcasts against a score tile, or a Triton scalar,
    so the mask and score functions that read it run in PyTorch and in kernels alike.
    """

    batch: Any
    head: Any
    seqlen_q: Any
    seqlen_k: Any


class Seqlens(NamedTuple):
    """Packed sequences: sequence i has the rows ``[cu_seqlens[i], cu_seqlens[i + 1])`` of queries and of keys.

    ``cu_seqlens_*`` int32 ``(sequences + 1,)`` on the device; ``seqused_*`` int32 ``(sequences,)``, or None, cut a
    sequence to its first rows; ``max_seqlen_*`` int or None are hints, never relied upon.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any = None
    seqused_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def gather(table: Any, index: Any, length: Any) -> Any:
    """Return the entries of a contiguous tensor, seen flat, at ``index``; an index outside [0, length) is moved to the
    nearest end, so that ``length`` (at least 1, at most the number of entries) keeps every read inside the table."""
    flat = table.reshape(-1)
    if isinstance(index, torch.Tensor):
        return flat[index.clamp(0, length - 1)]
    return flat[max(min(index, length - 1), 0)].item()


def _gather_on_device(table, index, length):
    return tl.load(table + tl.maximum(tl.minimum(index, length - 1), 0))


def select(condition: Any, a: Any, b: Any) -> Any:
    """Return ``a`` where the condition holds, elsewhere ``b``, element by element."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def _select_on_device(condition, a, b):
    return tl.where(condition, a, b)


def wide(x: Any) -> Any:
    """Return an index in 64 bits, for products beyond 2**31. (Indices on the host are as wide already.)"""
    return x


def _wide_on_device(x):
    return x.to(tl.int64)


def floor_divide(a: Any, b: Any) -> Any:
    """Return ``a // b`` rounded down: what ``mask.jitted`` makes of the operator in functions of users."""
    return a // b


def _floor_divide_on_device(a, b):
    rest = a % b  # kernels round towards zero, and give the rest the sign of a
    if isinstance(rest, tl.tensor):
        below = (rest != 0) & ((rest < 0) != (b < 0))
        if rest.dtype.is_floating():
            return tl.floor((a - rest) / b - tl.where(below, 1.0, 0.0) + 0.5)
        else:
            return tl.where(below, a // b - 1, a // b)
    else:
        return a // b  # of two numbers known when compiling, which Python divides


def floor_remainder(a: Any, b: Any) -> Any:
    """Return ``a % b`` with the sign of b: what ``mask.jitted`` makes of the operator in functions of users."""
    return a % b


def _floor_remainder_on_device(a, b):
    rest = a % b
    if isinstance(rest, tl.tensor):
        return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    else:
        return rest


def _smaller(a, b):
    return tl.minimum(a, b)


def _larger(a, b):
    return tl.maximum(a, b)


# What ``mask.jitted`` puts in place of each function.
ON_DEVICE = {
    gather: _gather_on_device,
    select: _select_on_device,
    wide: _wide_on_device,
    floor_divide: _floor_divide_on_device,
    floor_remainder: _floor_remainder_on_device,
}
# What it puts there where inputs have 16 bits and indices less than 22 (NVIDIA GPUs, sm_75 and later).
ROUGH_ON_DEVICE: dict[Any, Any] = {}
# Likewise, but what it returns is known when compiling: of two branches only one is compiled.
WHEN_COMPILED: dict[Any, Any] = {}
# What the compiler takes for Python's own, and the interpreter does not.
WHEN_INTERPRETED = {"min": _smaller, "max": _larger}
