"""bfloat16 in Triton's interpreter, as a GPU computes it.

Triton 3.6's interpreter keeps bfloat16 as ``uint16`` bit patterns and hands them to NumPy as they are: ``tl.dot``,
``+ - * /``, comparisons and most casts then work on the integers, and the cast from fp32 truncates where hardware
rounds to nearest even. ``install()`` replaces those few builder methods, each only where a one-element probe shows
that the installed Triton gets it wrong. Reductions (``tl.sum`` of bfloat16) stay as they are: kernels reduce in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


def to_float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32; exact, the missing mantissa bits are zero."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def from_float32(x: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bit patterns, rounded to nearest even; NaN stays NaN."""
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # a carry out of the mantissa lands in the exponent: right
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def install() -> list[str]:
    """Repair the interpreter's bfloat16 where it needs it; return the names of the methods replaced."""
    from triton import language as tl
    from triton.runtime import interpreter as it

    def wrap(x: np.ndarray) -> Any:
        return it.TensorHandle(from_float32(x), tl.bfloat16)

    def is_bf16(handle: Any) -> bool:
        return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16

    def widen(handle: Any) -> Any:
        return it.TensorHandle(to_float32(handle.data), tl.float32) if is_bf16(handle) else handle

    def dot(original: Callable) -> Callable:
        @functools.wraps(original)
        def create_dot(self, a, b, d, *rest):
            return original(self, widen(a), widen(b), d, *rest)

        return create_dot

    def cast(original: Callable) -> Callable:
        @functools.wraps(original)
        def cast_impl(self, src, dst_type, *rest):
            src = widen(src)
            if dst_type.scalar == tl.bfloat16:
                return wrap(src.data)
            return src if dst_type.scalar == src.dtype.scalar else original(self, src, dst_type, *rest)

        return cast_impl

    def binary(original: Callable) -> Callable:
        @functools.wraps(original)
        def binary_op(self, lhs, rhs, op):
            if not (is_bf16(lhs) and is_bf16(rhs)):
                return original(self, lhs, rhs, op)
            out = op(to_float32(lhs.data), to_float32(rhs.data))
            return it.TensorHandle(out, tl.int1) if out.dtype == np.bool_ else wrap(out)

        return binary_op

    builder, run = it.InterpreterBuilder, it.interpreter_builder
    three_halves, zero = np.array([[1.5]], dtype=np.float32), np.zeros((1, 1), dtype=np.float32)
    above_tie = np.array([1 + 2**-8 + 2**-10], dtype=np.float32)  # rounds up to 1 + 2**-7; truncates to 1

    def probe_dot() -> float:
        operand = wrap(three_halves)
        return run.create_dot(operand, operand, it.TensorHandle(zero, tl.float32), None, 0).data.item()

    def probe_cast() -> float:
        return to_float32(run.create_fp_trunc(it.TensorHandle(above_tie, tl.float32), tl.bfloat16).data).item()

    def probe_binary() -> float:
        return to_float32(run.create_fmul(wrap(three_halves), wrap(three_halves)).data).item()

    replaced = []
    for name, repair, probe, want in (
        ("create_dot", dot, probe_dot, 2.25),
        ("cast_impl", cast, probe_cast, 1 + 2**-7),
        ("binary_op", binary, probe_binary, 2.25),
    ):
        if probe() != want:
            setattr(builder, name, repair(getattr(builder, name)))
            replaced.append(name)
    if not hasattr(builder, "get_bf16"):  # a bfloat16 constant raises AttributeError
        builder.get_bf16 = lambda self, value: wrap(np.array([value], dtype=np.float32))  # pyright: ignore
        replaced.append("get_bf16")
    return replaced
