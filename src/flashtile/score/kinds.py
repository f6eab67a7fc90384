"""The scores of the library."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flashtile.score.functions import Entries, absolute, ahead, ahead_times, fetch, number, read, reciprocal, tanh
from flashtile.score.value import (
    Gradient,
    Parts,
    Score,
    as_it_is,
    natural_unit,
    no_initial,
    nothing_beside,
    one,
    same_unit,
    slope_one,
)
from flashtile.seqlen import gather

# --------------------------------------------------------------------------------------------- functions of s alone


def _identity_forward(where, q_idx, k_idx, s, args):
    return s


def _in_natural_units(where, q_idx, k_idx, s, beside, unit, args):
    return s * unit


@functools.cache
def identity() -> Score:
    """Leave every logit as it is, but scale logits before the row maximum is taken."""
    parts = Parts(no_initial, nothing_beside, _in_natural_units, natural_unit, slope_one, few_registers=True)
    return Score("identity", _identity_forward, one, parts=parts)


def for_scale(score: Score | None, softmax_scale: float) -> Score | None:
    """Return the score that a kernel must use: without one it takes the row maximum before scaling, right for
    positive scales only, so that other scales get ``identity()``."""
    return identity() if score is None and softmax_scale <= 0 else score


def few_registers(score: Score | None) -> bool:
    """Return whether kernels for Hopper may hold as many logits with this score as without one."""
    return score is None or (score.parts is not None and score.parts.few_registers)


def only_adds(score: Score | None) -> bool:
    """Return whether the score only adds to logits: the derivative of the new one by the old one is the number 1."""
    return score is not None and score.parts is not None and score.parts.slope is slope_one


def _softcap_scaled(where, q_idx, k_idx, s, beside, unit, args):
    return tanh(s * (unit * args[1]))


def _softcap_unit(unit, args):
    return args[0]


def _softcap_slope(where, q_idx, k_idx, s, beside, scaled, unit, args):
    return 1.0 - scaled * scaled


def _softcap_forward(where, q_idx, k_idx, s, args):
    return args[0] * _softcap_scaled(where, q_idx, k_idx, s, None, 1.0, args)


def _softcap_derivative(where, q_idx, k_idx, s, args):
    t = _softcap_scaled(where, q_idx, k_idx, s, None, 1.0, args)
    return _softcap_slope(where, q_idx, k_idx, s, None, t, 1.0, args)


_SOFTCAP = Parts(no_initial, nothing_beside, _softcap_scaled, _softcap_unit, _softcap_slope, few_registers=True)


def softcap(cap: float) -> Score:
    """Keep logits within (-cap, cap): ``cap * tanh(s / cap)``.

    Raises ValueError unless ``cap`` is positive and finite. Source: Gemma 2 (2024, arXiv 2408.00118).
    """
    _positive("softcap", "cap", cap)
    return Score("softcap", _softcap_forward, _softcap_derivative, (float(cap), 1.0 / float(cap)), parts=_SOFTCAP)


def _temperature_forward(where, q_idx, k_idx, s, args):
    return s * args[0]


def _temperature_derivative(where, q_idx, k_idx, s, args):
    return args[0]


def _temperature_unit(unit, args):
    return unit * args[0]


def _temperature_slope(where, q_idx, k_idx, s, beside, scaled, unit, args):
    return args[0]


_TEMPERATURE = Parts(no_initial, nothing_beside, as_it_is, _temperature_unit, _temperature_slope, few_registers=True)


def temperature(t: float) -> Score:
    """Divide logits by ``t``: below 1 sharpens, above 1 flattens. Raises ValueError unless positive and finite."""
    _positive("temperature", "t", t)
    return Score("temperature", _temperature_forward, _temperature_derivative, (1.0 / float(t),), parts=_TEMPERATURE)


def _positive(score: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{score}: {name} is {value!r}, but wants a positive finite number")
    if not 0.0 < value < math.inf:
        raise ValueError(f"{score}: {name} is {value}, but wants a positive finite number")


# ------------------------------------------------------------------------------------------- something is added to s


def _minus_distance(where, q_idx, k_idx, s, args):
    return -absolute(ahead(where, q_idx, k_idx, s))


def _alibi_forward(where, q_idx, k_idx, s, args):
    return s + _minus_distance(where, q_idx, k_idx, s, args) * read(args[0], where, q_idx, k_idx, s)


def _alibi_initial(where, q_idx, k_idx, s, unit, args):
    return absolute(ahead(where, q_idx, k_idx, s)) * (read(args[0], where, q_idx, k_idx, s) * -reciprocal(unit))


# Of keys behind the query: one instruction per logit instead of two, without the absolute value.
def _alibi_initial_behind(where, q_idx, k_idx, s, unit, args):
    return ahead_times(where, q_idx, k_idx, s, read(args[0], where, q_idx, k_idx, s) * reciprocal(unit))


_ALIBI = Parts(
    _alibi_initial, nothing_beside, as_it_is, same_unit, slope_one, _alibi_initial_behind, few_registers=True
)


def alibi(slopes: Tensor) -> Score:
    """Penalise distance: ``s - slope * |k_idx - (q_idx + seqlen_k - seqlen_q)|``.

    slopes ``(heads_q,)`` or ``(batch, heads_q)``, any real numbers; they get gradients.
    Source: Press, Smith & Lewis, "Train Short, Test Long" (2021, arXiv 2108.12409).
    """
    _floating("alibi", "slopes", slopes)
    if slopes.ndim not in (1, 2):
        raise ValueError(f"alibi: slopes has shape {tuple(slopes.shape)}, but wants (heads_q,) or (batch, heads_q)")
    entries = Entries.of(slopes.reshape(slopes.shape[0] if slopes.ndim == 2 else 1, slopes.shape[-1], 1, 1))
    return Score("alibi", _alibi_forward, one, (entries,), (Gradient(0, _minus_distance),), _ALIBI)


def _bias_forward(where, q_idx, k_idx, s, args):
    return s + read(args[0], where, q_idx, k_idx, s)


def _bias_beside(where, q_idx, k_idx, args):
    return fetch(args[0], where, q_idx, k_idx)


def _bias_scaled(where, q_idx, k_idx, s, beside, unit, args):
    # Not in another unit: an entry that stands for -inf, the least number there is, must stay finite.
    return s * unit + number(beside, k_idx, s)


_BIAS = Parts(no_initial, _bias_beside, _bias_scaled, natural_unit, slope_one, entries=0)


def bias(tensor: Tensor) -> Score:
    """Add ``tensor[batch, head, q_idx, k_idx]`` to each logit.

    tensor: up to four dims that broadcast to ``(batch, heads_q, seqlen_q, seqlen_k)``, any of them 1, with any strides;
    it gets a gradient, summed over the dims that are 1.
    """
    _floating("bias", "tensor", tensor)
    if not 1 <= tensor.ndim <= 4:
        raise ValueError(f"bias: tensor has shape {tuple(tensor.shape)}, but wants one to four dimensions")
    entries = Entries.of(tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape)))
    return Score("bias", _bias_forward, one, (entries,), (Gradient(0, one),), _BIAS)


def _relative_bucket(where, q_idx, k_idx, args):
    _, buckets, farthest, distances, _, _ = args
    return gather(buckets, k_idx - q_idx - (where.seqlen_k - where.seqlen_q) + farthest, distances)


def _relative_forward(where, q_idx, k_idx, s, args):
    table, buckets, farthest, distances, heads, size = args
    bucket = gather(buckets, k_idx - q_idx - (where.seqlen_k - where.seqlen_q) + farthest, distances)
    return s + gather(table, bucket * heads + where.head, size).to(s.dtype)


def relative_position(table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """Add a number per head and bucket of relative positions: ``s + table[bucket(k_idx - q_idx - shift), head]``.

    table ``(buckets, heads_q)``, the weight of T5's embedding (give ``weight.T`` of a ``(heads_q, buckets)`` one); it
    gets a gradient. Buckets are T5's: half of them for single distances, the rest growing with the logarithm up to
    ``max_distance``, past which all share the last; ``bidirectional`` gives keys after the query buckets of their own.
    ``shift = seqlen_k - seqlen_q``. Source: Raffel et al. (2019, arXiv 1910.10683).
    """
    _floating("relative_position", "table", table)
    if table.ndim != 2:
        raise ValueError(f"relative_position: table has shape {tuple(table.shape)}, but wants (buckets, heads_q)")
    count, heads = table.shape
    exact = count // 4 if bidirectional else count // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"relative_position: {count} buckets with max_distance {max_distance}, but want at least "
            f"{4 if bidirectional else 2} buckets and max_distance > {exact}"
        )
    buckets = _bucket_of_distance(count, bidirectional, max_distance, table.device)
    args = (table.contiguous(), buckets, max_distance, 2 * max_distance + 1, heads, count * heads)
    return Score("relative_position", _relative_forward, one, args, (Gradient(0, one, _relative_bucket),))


@functools.lru_cache(maxsize=64)
def _bucket_of_distance(count: int, bidirectional: bool, max_distance: int, device: torch.device) -> Tensor:
    """Return T5's bucket of every relative position from -max_distance to max_distance, int32.

    A table, because where a logarithm is rounded decides the bucket: so it is the same on every device.
    """
    distance = torch.arange(-max_distance, max_distance + 1)
    after = torch.zeros_like(distance)
    if bidirectional:
        count //= 2
        after = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = count // 2
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
    return (after + torch.where(distance < exact, distance, far)).int().to(device)


def _floating(score: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        met = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{score}: {name} is {met}, but wants a floating-point tensor")
