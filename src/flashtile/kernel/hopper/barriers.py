"""Barriers for warp roles that wait for one another: named ones of the hardware, and mbarriers in shared memory.

An mbarrier's arrive costs a barrier over the whole warpgroup in Gluon 3.6 (one elected thread arrives for all); a named
barrier is one instruction; a study of the forward pass gained 2 to 6 % by it. Sixteen exist per program. Triton uses
0 for the kernel's first warps, 1 for handing out roles, and one per further role from 2 on.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

MOST = 16  # named barriers of a program


def first_free(roles: int) -> int:
    """Return the first number that Triton leaves free in a kernel of ``roles`` warp roles."""
    return 1 + roles


@gluon.jit
def mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return ``COUNT`` mbarriers that each wait for ``ARRIVALS`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.constexpr_function
def _assembly(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.b32 $0, $1;"


@gluon.constexpr_function
def _assembly_if(kind, threads):
    return "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p bar." + f"{kind} $1, {threads}; mov.b32 $0, $1; }}"


@gluon.jit
def _per_thread(value, WARPS: gl.constexpr):
    """One element per thread: assembly that is applied to it runs once in every thread."""
    return gl.full([32 * WARPS], value, gl.int32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def sync(number, THREADS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Wait until ``THREADS`` threads, these among them, have come to barrier ``number``."""
    x = _per_thread(number, WARPS)
    gl.inline_asm_elementwise(_assembly("sync", THREADS), "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(number, THREADS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Come to barrier ``number`` without waiting there."""
    x = _per_thread(number, WARPS)
    gl.inline_asm_elementwise(_assembly("arrive", THREADS), "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_if(condition, number, THREADS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Come to barrier ``number`` if ``condition``, a scalar, holds; no branch, which wgmma in flight cannot bear."""
    x, y = _per_thread(number, WARPS), _per_thread(condition.to(gl.int32), WARPS)
    gl.inline_asm_elementwise(_assembly_if("arrive", THREADS), "=r,r,r", [x, y], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """Return ``x``, an int32 that is the same in all threads of a warp, so that the compiler knows it is."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
