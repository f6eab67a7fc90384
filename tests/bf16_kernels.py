"""Three kernels that show how bfloat16 behaves."""

import triton
import triton.language as tl


@triton.jit
def dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * M + m[None, :])
    tl.store(out_ptr + m[:, None] * M + m[None, :], tl.dot(a, b))


@triton.jit
def copy(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, -x)
    tl.store(out_ptr + 4 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 5 * N + i, tl.where(x < y, x, y * 2.0))
