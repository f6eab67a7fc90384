"""What a mask does to a tile in the kernels for Hopper: see ``kernel/hiding.py``."""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.kernel.hiding import keys_are_rows, shown_by_entry


@gluon.jit
def _within(x, instead, index, seen):
    """Return ``x`` where ``seen[0] <= index < seen[1]``, else ``instead``.

    In assembly, because the compiler would join this choice with the one in the other branch, and carry the truth
    values of both there, a register each.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, $3; setp.lt.and.s32 p, $2, $4, p; selp.f32 $0, $1, $5, p; }",
        "=f,f,r,r,r,f", [x, gl.broadcast(index, x)[0], seen[0], seen[1], gl.full_like(x, instead)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def hide(x, instead, seen, exact, where, q_idx, k_idx, mask, ENDS: gl.constexpr):
    """Return a tile with ``instead`` where the mask hides an entry, and (with ENDS, at least) past the last key.

    ``seen`` is from ``seen_by_rows``, or None, and ``exact`` from ``mask.exact``.
    """
    if seen is None:
        return gl.where(shown_by_entry(where, q_idx, k_idx, mask, ENDS), x, instead)
    else:
        if exact:
            x = _within(x, instead, q_idx if keys_are_rows(k_idx) else k_idx, seen)
        else:
            x = gl.where(shown_by_entry(where, q_idx, k_idx, mask, ENDS), x, instead)
        return x
