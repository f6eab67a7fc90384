"""Everything that attention is told beside q, k and v, as one value; and that value taken apart for PyTorch.

Autograd saves tensors, operators take tensors, numbers and text, and a compiler must not compile anew for another
window or cap. So ``flatten`` takes rules apart into a structure (functions and types, hashable, without any number),
tensors, integers and floats, and ``unflatten`` puts them together again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.dropout import Dropout
from flashtile.mask import Mask, causal
from flashtile.mask.value import _AND, is_full
from flashtile.score import Entries, Gradient, Score
from flashtile.seqlen import Seqlens

# How a leaf is written in a structure.
_TENSOR, _INT, _FLOAT, _ENTRIES = "tensor", "int", "float", "entries"


class Rules(NamedTuple):
    """What turns q, k, v into o: every option of ``flash_attention`` that a pass has to know."""

    softmax_scale: float
    mask: Mask
    score: Score | None = None
    sinks: Tensor | None = None
    dropout: Dropout | None = None
    seqlens: Seqlens | None = None
    backend: str | None = None
    deterministic: bool = False

    def asks(self) -> tuple[str, ...]:
        """Return what not every backend has, as ``dispatch.Problem`` names it."""
        return ("dropout",) if self.dropout is not None else ()

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a pass."""
        given: dict[str, Any] = {"softmax_scale": self.softmax_scale, "mask": self.mask}
        if self.score is not None:
            given["score"] = self.score
        if self.sinks is not None:
            given["sinks"] = self.sinks
        if self.dropout is not None:
            given["dropout"] = self.dropout
        if self.seqlens is not None:
            given["seqlens"] = self.seqlens
        return given

    def learned(self) -> tuple[Tensor, ...]:
        """Return the tensors that can have gradients: those of the score, then the sinks."""
        of_score = () if self.score is None else self.score.tensors()
        return of_score if self.sinks is None else (*of_score, self.sinks)

    def others(self) -> tuple[Tensor, ...]:
        """Return the tensors that have none: those of the mask, of dropout and of packed sequences."""
        of_dropout = () if self.dropout is None else (self.dropout.seed,)
        of_seqlens = () if self.seqlens is None else [t for t in self.seqlens if isinstance(t, Tensor)]
        return *self.mask.tensors(), *of_dropout, *of_seqlens


CAUSAL = causal()


def also_causal(mask: Mask) -> Mask:
    """Return ``mask & causal()``."""
    if not torch.compiler.is_compiling():
        return mask & CAUSAL
    # A compiler would compile anew for another name, and a window's name holds its width.
    ranges = _AND[1:] if mask.key_range is not None else (None, None)
    return CAUSAL if is_full(mask) else Mask("mask & causal()", _AND[0], *ranges, (mask, CAUSAL))


class Flat(NamedTuple):
    """Rules taken apart: the structure, and its leaves in the order in which they occur."""

    structure: tuple
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def flatten(rules: Rules) -> Flat:
    """Take rules apart; ``rules.learned()`` comes first among the tensors. softmax_scale is left out."""
    tensors: list[Tensor] = []
    ints: list[int] = []
    floats: list[float] = []
    parts = (rules.score, rules.sinks, rules.mask, rules.dropout, rules.seqlens, rules.backend, rules.deterministic)
    return Flat(_flatten(parts, tensors, ints, floats), tensors, ints, floats)


def unflatten(softmax_scale: float, flat: Flat) -> Rules:
    """Put rules together again, with the leaves of ``flat``."""
    leaves = iter(flat.tensors), iter(flat.ints), iter(flat.floats)
    score, sinks, mask, *others = _unflatten(flat.structure, *leaves)
    return Rules(softmax_scale, mask, score, sinks, *others)


# A compiler reads this function too, so it is plain: no dispatch on types, no generators.
def _flatten(value: Any, tensors: list, ints: list, floats: list) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return ("constant", value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, (int, torch.SymInt)):
        ints.append(value)
        return _INT
    if isinstance(value, (float, torch.SymFloat)):
        floats.append(value)
        return _FLOAT
    if isinstance(value, Entries):  # its strides are those of the tensor, whichever that is
        tensors.append(value.tensor)
        return _ENTRIES
    if isinstance(value, Mask):
        args = _flatten(value.args, tensors, ints, floats)
        return (Mask, value.predicate, value.key_range, value.query_range, args)
    if isinstance(value, Score):
        args = _flatten(value.args, tensors, ints, floats)
        gradients = tuple([(g.arg, g.weight, g.bucket) for g in value.gradients])
        return (Score, value.name, value.forward, value.derivative, gradients, value.parts, args)
    if isinstance(value, tuple):
        return (type(value), tuple([_flatten(item, tensors, ints, floats) for item in value]))
    raise TypeError(f"an argument of a mask or score is a {type(value).__name__}, but wants a tensor or a number")


def _unflatten(structure: Any, tensors: Iterator[Tensor], ints: Iterator[int], floats: Iterator[float]) -> Any:
    if structure == _TENSOR:
        return next(tensors)
    if structure == _INT:
        return next(ints)
    if structure == _FLOAT:
        return next(floats)
    if structure == _ENTRIES:
        return Entries.of(next(tensors))
    kind, *parts = structure
    if kind == "constant":
        return parts[0]
    args = _unflatten(parts[-1], tensors, ints, floats) if kind in (Mask, Score) else None
    if kind is Mask:
        predicate, key_range, query_range = parts[:3]
        return Mask(predicate.__name__.strip("_"), predicate, key_range, query_range, args)  # pyright: ignore
    if kind is Score:
        name, forward, derivative, gradients, of_score = parts[:5]
        return Score(name, forward, derivative, args, tuple(Gradient(*g) for g in gradients), of_score)  # pyright: ignore
    items = [_unflatten(item, tensors, ints, floats) for item in parts[0]]
    return tuple(items) if kind is tuple else kind(*items)


def resolved(rules: Rules) -> Rules:
    """Return rules whose tensors hold their signs themselves."""
    flat = flatten(rules)
    return unflatten(rules.softmax_scale, flat._replace(tensors=[t.resolve_neg() for t in flat.tensors]))


_structures: dict[str, tuple] = {}
_keys: dict[tuple, str] = {}


def key_of(structure: tuple) -> str:
    """Return the text that stands for a structure in this process: operators take text, not functions."""
    key = _keys.get(structure)
    if key is None:
        key = _keys.setdefault(structure, f"{_readable(structure)} #{len(_keys)}".strip())
        _structures[key] = structure
    return key


# Compilers call this while they trace and keep the result (torch.compiler.assume_constant_result, without its import).
key_of._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def structure_of(key: str) -> tuple:
    """Return the structure that ``key_of`` gave this text; raises ValueError for a text from another process."""
    if key not in _structures:
        raise ValueError(
            f"rules are {key!r}, but want a text that this process made: masks and scores stay where they are"
        )
    return _structures[key]


def _readable(structure: Any) -> str:
    if not isinstance(structure, tuple) or not structure:
        return ""
    name = structure[1].__name__.strip("_") if structure[0] is Mask else structure[1] if structure[0] is Score else ""
    return " ".join(filter(None, (name, *map(_readable, structure))))


def rules_of(
    key: str, softmax_scale: float, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> Rules:
    """Return the rules that an operator was given."""
    return unflatten(softmax_scale, Flat(structure_of(key), list(tensors), list(ints), list(floats)))


@functools.cache
def num_learned(key: str) -> int:
    """Return how many tensors ``rules.learned()`` has."""
    score, sinks = structure_of(key)[1][:2]
    of_score = _num_tensors(score[-1]) if score[0] is Score else 0  # (of its arguments)
    return of_score + _num_tensors(sinks)


def _num_tensors(structure: Any) -> int:
    if structure in (_TENSOR, _ENTRIES):
        return 1
    return sum(map(_num_tensors, structure)) if isinstance(structure, tuple) and structure[:1] != ("constant",) else 0


def mask_predicate(key: str) -> Any:
    """Return the predicate of the rules' mask."""
    mask = structure_of(key)[1][2]
    return mask[1]
