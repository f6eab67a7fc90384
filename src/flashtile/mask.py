"""Masks as values: which key a query may attend to, and which key tiles a query tile has to visit.

A mask is three plain Python functions and their runtime arguments. The functions use nothing but arithmetic,
comparisons, ``min`` and ``max``, so one definition runs on Python integers (the brute-force tests), on torch tensors
(the reference and the CPU path) and, jitted, inside the kernels.

    predicate(where, q_idx, k_idx, args)  -> True where query row q_idx may attend to key k_idx
    key_range(where, q_lo, q_hi, args)    -> (lo, full_lo, full_hi, hi): for the query rows [q_lo, q_hi), keys outside
                                             [lo, hi) are empty for all rows, keys in [full_lo, full_hi) visible to all
    query_range(where, k_lo, k_hi, args)  -> the same with queries and keys exchanged (the backward pass needs it)

A range may reach outside the sequence; the caller clamps it. Indices are raw row and column numbers; ``where`` carries
the lengths, so causal masks align the last query with the last key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class DeviceMask(NamedTuple):
    """A mask as the kernels receive it: jitted functions (compile-time constants) and runtime arguments."""

    predicate: Any
    key_range: Any
    query_range: Any
    args: tuple


@functools.cache
def jitted(fn: Callable) -> Any:
    """Return ``triton.jit(fn)``, the same object for the same function, importing Triton only now."""
    import triton

    # The interpreter insists on seeing triton.language among the globals of every function that it runs.
    fn.__globals__.setdefault("_triton_language", triton.language)
    return triton.jit(fn)


@dataclass(frozen=True)
class Mask:
    """A mask value; see the module's text for the meaning of the three functions."""

    name: str
    predicate: Callable
    key_range: Callable
    query_range: Callable
    args: tuple = ()

    @functools.cached_property
    def _device_mask(self) -> DeviceMask:
        return DeviceMask(jitted(self.predicate), jitted(self.key_range), jitted(self.query_range), self.args)

    def on_device(self) -> DeviceMask:
        """Return the form that kernels take."""
        return self._device_mask


def _full_predicate(where, q_idx, k_idx, args):
    return (q_idx >= 0) & (k_idx >= 0)


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


@functools.cache
def full() -> Mask:
    """Every query sees every key."""
    return Mask("full", _full_predicate, _full_key_range, _full_query_range)


@functools.cache
def causal() -> Mask:
    """Query i sees key j where ``j <= i + seqlen_k - seqlen_q``: the last query sees every key (bottom-right)."""
    return Mask("causal", _causal_predicate, _causal_key_range, _causal_query_range)
