"""Masks as values: which key a query may attend to, and which key tiles a query tile has to visit.

    mask.causal() & mask.document(ids)        mask.prefix(lengths) | mask.causal()        mask.Mask.of(my_predicate)

A mask is three plain Python functions and their runtime arguments. The functions use nothing but arithmetic,
comparisons, ``min`` and ``max`` of scalars, and the functions ``gather`` and ``select``, so one definition runs on
Python integers (the brute-force tests), on torch tensors (the reference and the CPU path) and, jitted, in the kernels.

    predicate(where, q_idx, k_idx, args)  -> True where query row q_idx may attend to key k_idx
    key_range(where, q_lo, q_hi, args)    -> (lo, full_lo, full_hi, hi): for the query rows [q_lo, q_hi), keys outside
                                             [lo, hi) are empty for all rows, keys in [full_lo, full_hi) visible to all
    query_range(where, k_lo, k_hi, args)  -> the same with queries and keys exchanged (the backward pass needs it)

A range may reach outside the sequence; the caller clamps it. ``lo <= full_lo <= max(lo, hi)`` holds. Indices are raw
row and column numbers; ``where`` carries the lengths, so causal masks align the last query with the last key.

Numbers and tensors are arguments of the functions: another window, other lengths or documents compile nothing new.
``docs/masks.md`` shows every mask.
"""

from flashtile.mask.kinds import (
    block_sparse,
    causal,
    chunked,
    dense,
    document,
    document_ids,
    full,
    key_padding,
    prefix,
    window,
)
from flashtile.mask.picture import save_png, show
from flashtile.mask.value import DeviceMask, Mask, jitted
from flashtile.seqlen import Where, gather, select

__all__ = [
    "DeviceMask",
    "Mask",
    "Where",
    "block_sparse",
    "causal",
    "chunked",
    "dense",
    "document",
    "document_ids",
    "full",
    "gather",
    "jitted",
    "key_padding",
    "prefix",
    "save_png",
    "select",
    "show",
    "window",
]
