"""Which entries of a tile a mask shows: as its predicate says, or by the interval that each row of the tile sees.

A predicate that reads tables is dozens of loads per thread, because a thread holds few rows of a tile and many columns.
Where rows are known exactly (``Mask.exact``) the interval that the mask's own range gives for a single row says as
much, for a combination of masks too: two numbers per row, and two comparisons per entry.
"""

# Pyright takes device functions for Python: it knows neither what the compiler passes nor constants' attributes.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def keys_are_rows(k_idx):
    """Return whether a tile is (keys, queries), as where the backward pass walks over queries."""
    return int(k_idx.shape[len(k_idx.shape) - 1]) == 1


@triton.constexpr_function
def asks_rows(exact):
    """Return whether ``exact`` of a mask depends on its arguments: where it is always so, the predicate is as short."""
    return exact.__name__ not in ("always", "never")


@triton.jit
def seen_by_rows(where, q_idx, k_idx, mask):
    """Return what each row of a tile may see, [first, end): of the keys, or of the queries if keys are the rows."""
    if keys_are_rows(k_idx):
        bounds = mask.query_range(where, k_idx, k_idx + 1, mask.args)
        return k_idx * 0 + bounds[1], tl.where(k_idx < where.seqlen_k, bounds[2], 0)
    else:
        bounds = mask.key_range(where, q_idx, q_idx + 1, mask.args)
        return q_idx * 0 + bounds[1], tl.minimum(q_idx * 0 + bounds[2], where.seqlen_k)


@triton.jit
def _within(seen, q_idx, k_idx):
    if keys_are_rows(k_idx):
        return (q_idx >= seen[0]) & (q_idx < seen[1])
    else:
        return (k_idx >= seen[0]) & (k_idx < seen[1])


@triton.jit
def shown_by_entry(where, q_idx, k_idx, mask, ENDS: tl.constexpr):
    """Return what the predicate says, with ENDS only of keys that there are."""
    shown = mask.predicate(where, q_idx, k_idx, mask.args)
    if ENDS:
        return shown & (k_idx < where.seqlen_k)
    else:
        return shown


@triton.jit
def visible(where, q_idx, k_idx, mask):
    """Return which entries of a tile the mask shows, of keys that there are."""
    if asks_rows(mask.exact):
        shown = _within(seen_by_rows(where, q_idx, k_idx, mask), q_idx, k_idx)
        if mask.exact(mask.args) == 0:
            shown = shown_by_entry(where, q_idx, k_idx, mask, True)
        return shown
    else:
        return shown_by_entry(where, q_idx, k_idx, mask, True)
