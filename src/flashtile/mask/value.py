"""What a mask is: three plain Python functions, their runtime arguments, and the algebra of masks."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from flashtile.mask import text
from flashtile.seqlen import (
    ON_DEVICE,
    ROUGH_ON_DEVICE,
    WHEN_COMPILED,
    WHEN_INTERPRETED,
    Where,
    select,
)

Sizes = tuple[tuple[int, int] | None, ...]  # of (batch, heads_q, seqlen_q, seqlen_k)
ANY_SIZES: Sizes = (None, None, None, None)


class DeviceMask(NamedTuple):
    """A mask as the kernels receive it: jitted functions (compile-time constants) and runtime arguments.

    ``args`` comes first for a reason: Triton 3.6 makes a constant of an argument that is 1, and forgets its value when
    control flow copies a nested tuple, unless a constant of the tuple around it comes later.
    """

    args: tuple
    predicate: Any
    key_range: Any
    query_range: Any
    exact: Any


@functools.cache
def jitted(fn: Callable, rough: bool = False) -> Any:
    """Return ``triton.jit`` of a plain function, the same object for the same function, importing Triton only now.

    A copy of the function is jitted, in whose globals ``gather``, ``select`` and ``wide`` have their device forms
    (``rough``: those that are good enough for 16-bit inputs), other plain functions that it calls are jitted likewise,
    and ``tl`` is ``triton.language``. In functions of users ``//`` and ``%`` floor, as they do in Python.
    """
    import triton
    from triton import knobs

    fn = fn if text.is_own(fn) else text.floored(fn)
    scope = {"tl": triton.language, **fn.__globals__}
    # The interpreter insists on seeing triton.language among the globals of every function that it runs.
    scope["_triton_language"] = triton.language
    if text.is_own(fn) and "gl" in _globals_read(fn):  # in a branch that only kernels in Gluon take
        from triton.experimental.gluon import language

        scope["gl"] = language
    for name in _globals_read(fn):
        if name in WHEN_INTERPRETED and name not in scope and knobs.runtime.interpret:
            scope[name] = WHEN_INTERPRETED[name]  # Python's own ask a tensor for a single truth value
        value = scope.get(name)
        if isinstance(inner := getattr(value, "fn", None), types.FunctionType) and not text.is_own(inner):
            # A user's helper that is jitted already, and stays as it is if nothing in it has to floor.
            scope[name] = value if text.floored(inner) is inner else jitted(inner, rough)
            continue
        if not isinstance(value, types.FunctionType) or value.__module__.startswith("triton."):
            continue
        if value in WHEN_COMPILED:
            scope[name] = triton.constexpr_function(WHEN_COMPILED[value])
        else:
            device_form = ON_DEVICE.get(value, value)
            scope[name] = jitted(ROUGH_ON_DEVICE.get(value, device_form) if rough else device_form, rough)
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__)
    copy.__annotations__ = fn.__annotations__
    return triton.jit(copy)


def _globals_read(fn: Callable) -> set[str]:
    return {step.argval for step in dis.get_instructions(fn) if step.opname == "LOAD_GLOBAL"}


_OF_TILES = (text.WHERE, text.TENSOR, text.TENSOR, text.NUMBER)
_OF_LOGITS = (text.WHERE, text.TENSOR, text.TENSOR, text.TENSOR, text.NUMBER)
_OF_RANGES = (text.NUMBER,) * 4
_PARAMETERS = {"predicate": _OF_TILES, "bucket": _OF_TILES, "key_range": _OF_RANGES, "query_range": _OF_RANGES}


def checked_function(name: str, fn: Any) -> Callable:
    """Return a user's function in its plain form, or raise: it must be one that kernels can run as well.

    ``name`` is the argument that it was given for, which says what its parameters are.
    """
    fn = getattr(fn, "fn", fn)  # what triton.jit was applied to
    if torch.compiler.is_compiling():  # it cannot read a function's text; a call outside of it does
        return fn
    if not isinstance(fn, types.FunctionType):
        raise TypeError(f"{name} is {fn!r}, but wants a Python function")
    if fn.__name__ == "<lambda>":
        raise TypeError(f"{name} is a lambda, but wants a function written with def: kernels are made from its text")
    if fn.__closure__:
        free = ", ".join(fn.__code__.co_freevars)
        raise TypeError(f"{name} {fn.__name__} uses {free} of the function around it; pass what varies in args")
    for used in sorted(_globals_read(fn)):
        value = fn.__globals__.get(used)
        home = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None) or ""
        if home.split(".")[0] in ("torch", "numpy") and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} {fn.__name__} uses {used} of {home}, which kernels do not have; it wants arithmetic, "
                "comparisons, & | ^, and the functions of flashtile.mask and flashtile.score"
            )
        if isinstance(value, (int, float, torch.Tensor)):
            raise TypeError(f"{name} {fn.__name__} reads the global {used}; write the number out or pass it in args")
    text.refuse(name, fn, _PARAMETERS.get(name, _OF_LOGITS))
    return fn


def checked_args(args: Any) -> tuple:
    """Return runtime arguments of a user's function as a tuple, its tensors contiguous."""
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args is a {type(args).__name__}, but wants a tuple")
    for i, arg in enumerate(args):
        if arg is not None and not isinstance(arg, (int, float, torch.Tensor, Mask)):
            raise TypeError(f"args[{i}] is a {type(arg).__name__}, but wants an int, a float, a torch.Tensor or a Mask")
        if isinstance(arg, torch.Tensor) and arg.numel() == 0:
            raise ValueError(f"args[{i}] is a tensor of shape {tuple(arg.shape)}, but wants at least one entry")
    return tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)


_MOST_PROBED = 2**20  # entries of a tensor: gather copies the stand-in for it


def _check_truth(predicate: Callable, args: tuple) -> None:
    """Raise TypeError unless a predicate returns truth values: asked about one place, without waiting for a device.

    Tensors are replaced by others of their shapes on the CPU; what fails on those says nothing about the predicate.
    """
    tensors = (a for a in args if isinstance(a, torch.Tensor))
    if torch.compiler.is_compiling() or any(t.numel() > _MOST_PROBED for t in tensors):
        return
    place = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu")
    stand_ins = tuple(
        torch.ones((), dtype=a.dtype, device="cpu").expand(a.shape) if isinstance(a, torch.Tensor) else a for a in args
    )
    try:
        found = predicate(Where(place, place, 1, 1), place, place, stand_ins)
    except (ArithmeticError, AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return
    if not isinstance(found, torch.Tensor) or found.dtype is not torch.bool:
        met = f"a tensor of {found.dtype}" if isinstance(found, torch.Tensor) else repr(found)
        raise TypeError(
            f"predicate {predicate.__name__} returns {met}, but wants a tensor of torch.bool: a comparison with q_idx "
            "or k_idx, such as k_idx >= 0"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A mask value; the package's text says what the functions mean. Masks combine with ``&``, ``|`` and ``~``.

    Without ranges (None) the kernels find out by themselves which tiles are empty, full or partial. ``sizes`` says what
    (batch, heads_q, seqlen_q, seqlen_k) the arguments were made for: as (blocks, block length), None for any.
    """

    name: str
    predicate: Callable
    key_range: Callable | None
    query_range: Callable | None
    args: tuple = ()
    sizes: Sizes = ANY_SIZES

    @staticmethod
    def of(
        predicate: Callable,
        args: tuple = (),
        key_range: Callable | None = None,
        query_range: Callable | None = None,
        name: str | None = None,
    ) -> Mask:
        """Return the mask of a function of your own, ``predicate(where, q_idx, k_idx, args) -> visible``.

        It may use arithmetic, comparisons, ``& | ^``, ``gather`` and ``select`` (both in ``flashtile.mask``), and other
        functions written so; whatever varies (ints, floats, contiguous tensors) comes in ``args``, so that new values
        compile nothing new. Give both ranges or none. Raises TypeError for a function that no kernel could run.
        """
        predicate = checked_function("predicate", predicate)
        if (key_range is None) != (query_range is None):
            given, absent = ("query_range", "key_range") if key_range is None else ("key_range", "query_range")
            raise ValueError(f"{absent} is None beside a {given}, but wants a function too; or give neither")
        if key_range is not None:
            key_range = checked_function("key_range", key_range)
            query_range = checked_function("query_range", query_range)
        args = checked_args(args)
        _check_truth(predicate, args)
        return Mask(name or predicate.__name__.strip("_"), predicate, key_range, query_range, args)

    def on_device(self) -> DeviceMask:
        """Return the form that kernels take."""
        return self._device_mask

    @functools.cached_property
    def _device_mask(self) -> DeviceMask:
        args = tuple(arg.on_device() if isinstance(arg, Mask) else arg for arg in self.args)
        if any(isinstance(arg, DeviceMask) for arg in args):
            args = (*args, None)  # the later constant that DeviceMask's text speaks of
        functions = (self.predicate, self.key_range or any_key_range, self.query_range or any_query_range)
        return DeviceMask(args, *map(jitted, (*functions, self.exact)))

    @functools.cached_property
    def exact(self) -> Callable:
        """``exact(args)`` says whether the full range of a single query, and of a single key, is all that it sees."""
        sign, masks = operands(self)
        if sign is None:
            return EXACT.get((self.predicate, self.key_range, self.query_range), never)
        if (self.key_range, self.query_range) != (_AND[1:] if sign == "&" else _OR[1:]):
            return never
        kinds = [never if mask.exact is never else always if mask.exact is always else exact for mask in masks]
        return _BOTH_EXACT[tuple(kinds)] if sign == "&" and never not in kinds else never

    def to(self, device: Any) -> Mask:
        """Return the mask with its tensors on ``device``."""
        moved = (arg.to(device) if isinstance(arg, (Mask, torch.Tensor)) else arg for arg in self.args)
        return replace(self, args=tuple(moved)) if self.args else self

    def without_ranges(self) -> Mask:
        """Return the same mask with the ranges forgotten: the kernels then look for empty tiles between the others too.

        Worth it where one interval per tile says too little, as for ``prefix(...) | window(...)``.
        """
        return replace(self, key_range=None, query_range=None)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor among the arguments."""
        for arg in self.args:
            if isinstance(arg, Mask):
                yield from arg.tensors()
            elif isinstance(arg, torch.Tensor):
                yield arg

    def check(self, batch: int, heads_q: int, seqlen_q: int | None, seqlen_k: int | None, device: Any = None) -> None:
        """Raise ValueError if the arguments were made for other sizes, or lie on another device; None is not checked.

        (Packed sequences have no common lengths.)
        """
        for arg in self.args:
            if isinstance(arg, Mask):
                arg.check(batch, heads_q, seqlen_q, seqlen_k, device)
            elif isinstance(arg, torch.Tensor) and device is not None and arg.device != device:
                raise ValueError(f"mask {self} has a tensor on {arg.device}, but wants {device}; mask.to() moves it")
        names = ("batch", "heads_q", "seqlen_q", "seqlen_k")
        for name, met, size in zip(names, (batch, heads_q, seqlen_q, seqlen_k), self.sizes, strict=True):
            if met is not None and size is not None and -(-met // size[1]) != size[0]:
                made_for = f"{size[0]}" if size[1] == 1 else f"{size[0]} blocks of {size[1]}"
                raise ValueError(f"mask {self} is made for {name} {made_for}, but the tensors have {name} {met}")

    def show(self, seqlen_q: int, seqlen_k: int | None = None, **options: Any) -> str:
        """Return a picture in characters: see ``flashtile.mask.show``."""
        from flashtile.mask.picture import show

        return show(self, seqlen_q, seqlen_k, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # not what is cached for kernels

    def __bool__(self) -> bool:
        raise TypeError(f"mask {self} has no truth value: masks combine with &, | and ~, not with and, or, not")

    def __and__(self, other: Mask) -> Mask:
        """A key is visible where both masks show it."""
        if not isinstance(other, Mask):
            return _no_mask(other)
        return self if is_full(other) else other if is_full(self) else _combined(self, other, "&")

    def __or__(self, other: Mask) -> Mask:
        """A key is visible where either mask shows it."""
        if not isinstance(other, Mask):
            return _no_mask(other)
        return other if is_full(other) else self if is_full(self) else _combined(self, other, "|")

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Mask:
        """A key is visible where the mask hides it."""
        ranges = (None, None) if self.key_range is None else (_not_key_range, _not_query_range)
        return Mask(f"~{_in_parentheses(self, ' ')}", _not_predicate, *ranges, (self,))

    def __repr__(self) -> str:
        return f"{self.name}()" if self.name.isidentifier() else self.name

    def _identity(self) -> tuple:
        """What makes two masks equal: the functions and the arguments, tensors by identity."""
        args = tuple(("tensor", id(arg)) if isinstance(arg, torch.Tensor) else arg for arg in self.args)
        return self.predicate, self.key_range, self.query_range, args

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


def _no_mask(other: object) -> Any:
    if isinstance(other, torch.Tensor):
        raise TypeError(
            "a mask combines with masks, not with a tensor: flashtile.mask.dense(tensor) makes a mask of one"
        )
    return NotImplemented


def is_full(mask: Mask) -> bool:
    """Return whether a mask is ``full()``."""
    return mask.predicate is full_predicate


def operands(mask: Mask) -> tuple[str | None, tuple[Mask, ...]]:
    """Return what a mask combines: ("&" or "|", the masks), or (None, ())."""
    sign = {_and_predicate: "&", _or_predicate: "|"}.get(mask.predicate)
    return (None, ()) if sign is None else (sign, mask.args)


def _in_parentheses(mask: Mask, loose: str) -> str:
    return f"({mask.name})" if loose in _outside_parentheses(mask.name) else str(mask)


def _outside_parentheses(text: str) -> str:
    depth, kept = 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        kept += char if depth == 0 else ""
    return kept


def _combined(a: Mask, b: Mask, sign: str) -> Mask:
    other = " | " if sign == "&" else " & "
    name = "combined"
    if not torch.compiler.is_compiling():  # which would compile anew for another name
        name = f"{_in_parentheses(a, other)} {sign} {_in_parentheses(b, other)}"
    functions = _AND if sign == "&" else _OR
    if a.key_range is None or b.key_range is None:
        functions = (functions[0], None, None)
    return Mask(name, *functions, (a, b))


# --- rows that are known exactly --------------------------------------------------------------------------------------
#
# Where the full range of each query alone, or key, is all that it sees, two comparisons per entry do for a predicate
# that reads tables. ``|``, ``~`` and functions of users are never known to be so.


def always(args):
    return True


def never(args):
    return False


def exact(args):
    return args[0].exact(args[0].args) & args[1].exact(args[1].args)


def _first_is_exact(args):
    return args[0].exact(args[0].args)


def _second_is_exact(args):
    return args[1].exact(args[1].args)


EXACT: dict[tuple, Callable] = {}  # by predicate, key_range, query_range
_BOTH_EXACT: dict[tuple, Callable] = {
    (always, always): always, (exact, always): _first_is_exact, (always, exact): _second_is_exact, (exact, exact): exact
}  # fmt: skip


# --- the functions of full masks, of unknown ranges, and of combinations ---------------------------------------------


def full_predicate(where, q_idx, k_idx, args):
    return (q_idx >= 0) & (k_idx >= 0)


def any_key_range(where, q_lo, q_hi, args):
    return 0, 0, 0, where.seqlen_k


def any_query_range(where, k_lo, k_hi, args):
    return 0, 0, 0, where.seqlen_q


def _in_both(a, b):
    lo, hi = max(a[0], b[0]), min(a[3], b[3])
    full_lo, full_hi = max(a[1], b[1]), min(a[2], b[2])
    # Only what is not known to be lo when compiled needs bounding: see tile_bounds in kernel/tile.py.
    return lo, select(full_lo > lo, min(full_lo, max(lo, hi)), lo), min(full_hi, hi), hi


def _in_either(a, b):
    lo, hi = min(a[0], b[0]), max(a[3], b[3])
    # Two full ranges that touch are one; of two apart the longer counts.
    touch = max(a[1], b[1]) <= min(a[2], b[2])
    a_longer = a[2] - a[1] >= b[2] - b[1]
    full_lo = select(touch, min(a[1], b[1]), select(a_longer, a[1], b[1]))
    full_hi = select(touch, max(a[2], b[2]), select(a_longer, a[2], b[2]))
    return lo, select(full_lo > lo, min(full_lo, max(lo, hi)), lo), full_hi, hi


def _outside(a, length):
    """Visible are the indices outside a's full range, all of them on the longer side of a's hull."""
    full_lo, full_hi = min(a[1], length), max(a[2], 0)
    some_full = full_lo < full_hi
    lo = select(some_full & (full_lo <= 0), min(full_hi, length), 0)
    hi = select(some_full & (full_hi >= length), max(full_lo, 0), length)
    empty_lo, empty_hi = max(min(a[0], length), 0), max(min(a[3], length), 0)
    empty_lo, empty_hi = select(empty_lo < empty_hi, empty_lo, length), select(empty_lo < empty_hi, empty_hi, length)
    left = empty_lo >= length - empty_hi
    full_lo, full_hi = select(left, 0, empty_hi), select(left, empty_lo, length)
    return lo, min(max(full_lo, lo), max(lo, hi)), min(full_hi, hi), hi


# (A value that holds jitted functions cannot be given a name inside a kernel: hence args[0] again and again.)
def _and_predicate(where, q_idx, k_idx, args):
    return args[0].predicate(where, q_idx, k_idx, args[0].args) & args[1].predicate(where, q_idx, k_idx, args[1].args)


def _and_key_range(where, q_lo, q_hi, args):
    return _in_both(
        args[0].key_range(where, q_lo, q_hi, args[0].args), args[1].key_range(where, q_lo, q_hi, args[1].args)
    )


def _and_query_range(where, k_lo, k_hi, args):
    return _in_both(
        args[0].query_range(where, k_lo, k_hi, args[0].args), args[1].query_range(where, k_lo, k_hi, args[1].args)
    )


def _or_predicate(where, q_idx, k_idx, args):
    return args[0].predicate(where, q_idx, k_idx, args[0].args) | args[1].predicate(where, q_idx, k_idx, args[1].args)


def _or_key_range(where, q_lo, q_hi, args):
    return _in_either(
        args[0].key_range(where, q_lo, q_hi, args[0].args), args[1].key_range(where, q_lo, q_hi, args[1].args)
    )


def _or_query_range(where, k_lo, k_hi, args):
    return _in_either(
        args[0].query_range(where, k_lo, k_hi, args[0].args), args[1].query_range(where, k_lo, k_hi, args[1].args)
    )


def _not_predicate(where, q_idx, k_idx, args):
    return args[0].predicate(where, q_idx, k_idx, args[0].args) ^ True


def _not_key_range(where, q_lo, q_hi, args):
    return _outside(args[0].key_range(where, q_lo, q_hi, args[0].args), where.seqlen_k)


def _not_query_range(where, k_lo, k_hi, args):
    return _outside(args[0].query_range(where, k_lo, k_hi, args[0].args), where.seqlen_q)


_AND = (_and_predicate, _and_key_range, _and_query_range)
_OR = (_or_predicate, _or_key_range, _or_query_range)
