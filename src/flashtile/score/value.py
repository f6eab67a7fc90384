"""What a score is: two plain Python functions, their runtime arguments, and the order of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.mask import jitted
from flashtile.mask.value import checked_function
from flashtile.score.functions import Entries


class DeviceScore(NamedTuple):
    """A score as the kernels receive it: runtime arguments first (see ``DeviceMask``), then jitted functions."""

    args: tuple
    forward: Any
    derivative: Any


class Parts(NamedTuple):
    """A score by parts, of which kernels make less work per logit than of the whole.

    They hold the old logit as ``unit * s``, s being q . k or the result of an earlier score, and want the new one as
    ``unit(unit, args) * scaled(...)``: so a constant factor costs nothing. Each function of one value:

        initial(where, q_idx, k_idx, s, unit, args)          what is added to s at first, or None; the sum q . k may
                                                             begin with it. Of s only the dtype counts
        beside(where, q_idx, k_idx, args)                    what can be read before s is known, or None
        scaled(where, q_idx, k_idx, s, beside, unit, args)   the new logit in the new unit
        unit(unit, args)                                     the new unit: positive where the old one is
        slope(where, q_idx, k_idx, s, beside, scaled, unit, args)
                                                             d(new logit) / d(old logit), where s gave ``scaled``

    (s in ``scaled`` and ``slope`` has ``initial`` in it.) ``initial_behind`` is ``initial`` where ``looks_back`` holds
    of the mask: keys stand behind the query or beside it. ``few_registers``: kernels for Hopper may hold as many logits
    as without a score. ``entries``: which of the args is an ``Entries`` that ``beside`` fetches from and does
    nothing else, so that kernels may bring what it gives another way.
    """

    initial: Callable
    beside: Callable
    scaled: Callable
    unit: Callable
    slope: Callable
    initial_behind: Callable | None = None
    few_registers: bool = False
    entries: int | None = None


class DeviceParts(NamedTuple):
    """A score by parts as the kernels for Hopper receive it: see ``Parts`` and ``DeviceScore``."""

    args: tuple
    initial: Any
    beside: Any
    scaled: Any
    unit: Any
    slope: Any


class Bucket(NamedTuple):
    """Which bucket of a table a logit reads: ``number(where, q_idx, k_idx, args)``; jitted, the form kernels take."""

    number: Any
    args: tuple


class Gradient(NamedTuple):
    """How the logit depends on the tensor ``args[arg]`` of a score.

    ``weight(where, q_idx, k_idx, s, args)`` is d(new logit) / d(entry that it reads). The entry is the one at (batch,
    head, query, key) of an ``Entries``; with ``bucket(where, q_idx, k_idx, args)`` it is the one at (bucket, head) of a
    table.
    """

    arg: int
    weight: Callable
    bucket: Callable | None = None


class Parameter(NamedTuple):
    """A tensor that gradients flow to, as the passes need it.

    ``score`` has the whole score's forward, and as its derivative d(final logit) / d(entry): what turns a gradient with
    respect to logits into one with respect to entries is the same tile with this score. ``index`` counts among
    ``Score.tensors()``. ``tensor`` has four dims, or is a table (buckets, heads) if there is a ``bucket``.
    """

    index: int
    tensor: Tensor
    score: Score
    bucket: Bucket | None


@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """A score value; see the module's text for the meaning of the functions."""

    name: str
    forward: Callable
    derivative: Callable
    args: tuple = ()
    gradients: tuple[Gradient, ...] = ()
    parts: Parts | None = None

    @staticmethod
    def of(forward: Callable, derivative: Callable, args: tuple = (), *, gradients: tuple[Gradient, ...] = ()) -> Score:
        """Return your own score, called after ``forward``; ``gradcheck`` tests the derivatives.

        The functions may use arithmetic, comparisons, what ``flashtile.score`` offers for them, and helpers written so.
        What varies comes in ``args``: ints, floats, tensors (made contiguous, for ``gather``) and ``Entries``. Raises
        TypeError for what no kernel could run.
        """
        forward, derivative = checked_function("forward", forward), checked_function("derivative", derivative)
        checked = []
        for arg, weight, bucket in gradients:
            if not 0 <= arg < len(args):
                raise ValueError(f"gradients: arg is {arg}, but wants the position of a tensor among {len(args)} args")
            bucket = None if bucket is None else checked_function("bucket", bucket)
            wanted = Entries if bucket is None else Tensor
            if not isinstance(args[arg], wanted):
                raise TypeError(
                    f"args[{arg}] is a {type(args[arg]).__name__}, but wants a {wanted.__name__} for its gradient"
                )
            checked.append(Gradient(arg, checked_function("weight", weight), bucket))
        return Score(forward.__name__.strip("_"), forward, derivative, _checked_args(args), tuple(checked))

    def __bool__(self) -> bool:
        raise TypeError(f"score {self.name} has no truth value: scores combine with then")

    def then(self, after: Score) -> Score:
        """Return the score that applies this one first and ``after`` to its result."""
        if not isinstance(after, Score):
            raise TypeError(f"after is a {type(after).__name__}, but wants a value of flashtile.score")
        return Score(f"{self.name}, {after.name}", _then_forward, _then_derivative, (self, after))

    def on_device(self, rough: bool = False) -> DeviceScore:
        """Return the form that kernels take, ``rough`` where it may be as imprecise as 16-bit inputs are."""
        args = _on_device(self.args, rough)
        if any(isinstance(arg, tuple) for arg in args):
            # The later constant that DeviceMask's text speaks of; not None, which `score is None` would trip over.
            args = (*args, 1)
        return DeviceScore(args, jitted(self.forward, rough), jitted(self.derivative, rough))

    def parts_on_device(self, rough: bool, looks_back: bool) -> DeviceParts:
        """Return the form that kernels for Hopper take. Every score has one: without ``parts`` it is taken as a whole.

        ``looks_back`` says whether the mask shows no query a key after it.
        """
        if self.forward is _then_forward:
            parts, args = _THEN, tuple(score.parts_on_device(rough, looks_back) for score in self.args)
        elif self.parts is None:
            parts, args = _WHOLE, (self.on_device(rough),)
        else:
            parts, args = self.parts, _on_device(self.args, rough)
        if any(isinstance(arg, tuple) for arg in args):
            args = (*args, 1)  # as in on_device
        initial = parts.initial_behind if looks_back and parts.initial_behind else parts.initial
        functions = (initial, parts.beside, parts.scaled, parts.unit, parts.slope)
        return DeviceParts(args, *(jitted(function, rough) for function in functions))

    def entries_beside(self) -> Tensor | None:
        """Return the tensor of four dims whose entries by query and key the parts' ``beside`` gives, if it does."""
        if self.forward is _then_forward:
            first, after = self.args
            return (first if first._has_beside() else after).entries_beside()
        if self.parts is None or self.parts.entries is None:
            return None
        tensor = self.args[self.parts.entries].tensor
        return tensor if tensor.shape[2] > 1 and tensor.shape[3] > 1 else None

    def _has_beside(self) -> bool:
        if self.forward is _then_forward:
            return any(score._has_beside() for score in self.args)
        return self.parts is not None and self.parts.beside is not nothing_beside

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor among the arguments, in order."""
        return tuple(_tensors(self.args))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Score:
        """Return the same score with other tensors in place of ``self.tensors()``."""
        return replace(self, args=_replaced(self.args, iter(tensors)))

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the tensors that gradients can flow to, and how."""
        if self.forward is _then_forward:
            first, after = self.args
            # The chain rule is in the composition itself: first with another derivative, then after; and for after's
            # own tensors what lies before it does not count.
            skipped = replace(first, derivative=one, parts=None)
            offset = len(first.tensors())
            return (
                *(p._replace(score=p.score.then(after)) for p in first.parameters()),
                *(p._replace(score=skipped.then(p.score), index=p.index + offset) for p in after.parameters()),
            )
        found = []
        for arg, weight, bucket in self.gradients:
            tensor = self.args[arg]
            found.append(
                Parameter(
                    len(list(_tensors(self.args[:arg]))),
                    tensor.tensor if isinstance(tensor, Entries) else tensor,
                    replace(self, derivative=weight, parts=None),
                    None if bucket is None else Bucket(bucket, self.args),
                )
            )
        return tuple(found)

    def check(self, batch: int, heads_q: int, seqlen_q: int | None, seqlen_k: int | None, device: torch.device) -> None:
        """Check the tensors against a problem; a length of None is not known.

        Raises ValueError for a size that neither is 1 nor fits, or another device, and NotImplementedError for a tensor
        that requires a gradient which the score does not declare.
        """
        for tensor in self.tensors():
            if tensor.device != device:
                raise ValueError(f"score {self.name}: a tensor is on {tensor.device}, but wants {device} like q")
        declared = {p.index for p in self.parameters()}
        for i, tensor in enumerate(self.tensors()):
            if tensor.requires_grad and i not in declared and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"score {self.name}: tensor {i} of shape {tuple(tensor.shape)} requires a gradient, but the score "
                    "declares none for it; give Score.of(..., gradients=(Gradient(...),)), or detach it"
                )
        for p in self.parameters():
            names, sizes = ("batch", "head", "query", "key"), (batch, heads_q, seqlen_q, seqlen_k)
            if p.bucket is not None:
                names, sizes = ("bucket", "head"), (None, heads_q)
            for name, met, want in zip(names, p.tensor.shape, sizes, strict=True):
                shared = p.bucket is None and met == 1
                if want is not None and met != want and not shared:
                    wanted = f"{want}" if p.bucket is not None else f"1 or {want}"
                    raise ValueError(f"score {self.name}: size {met} in the {name} dimension, but wants {wanted}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and self._functions() == other._functions() and _same(self.args, other.args)

    def __hash__(self) -> int:
        return hash(self._functions())

    def __repr__(self) -> str:
        return f"Score({self.name})"

    def _functions(self) -> tuple:
        return self.name, self.forward, self.derivative, self.gradients, self.parts


def _checked_args(args: Any) -> tuple:
    if not isinstance(args, tuple):
        raise TypeError(f"args is a {type(args).__name__}, but wants a tuple")
    for i, arg in enumerate(args):
        if arg is not None and not isinstance(arg, (int, float, Tensor, Entries)):
            raise TypeError(f"args[{i}] is a {type(arg).__name__}, but wants an int, a float, a tensor or Entries")
    return tuple(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Score):
        yield from _tensors(value.args)
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Score):
        return replace(value, args=_replaced(value.args, tensors))
    if isinstance(value, Entries):
        return Entries.of(next(tensors))
    return _each(value, lambda item: _replaced(item, tensors)) if isinstance(value, tuple) else value


def _on_device(value: Any, rough: bool) -> Any:
    if isinstance(value, Score):
        return value.on_device(rough)
    return _each(value, lambda item: _on_device(item, rough)) if isinstance(value, tuple) else value


def _each(value: tuple, function: Callable) -> tuple:
    items = [function(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b


def one(where, q_idx, k_idx, s, args):
    """The derivative of what only adds to a logit."""
    return 1.0


# Triton 3.6 cannot give a tuple that holds functions a name: hence args[0] and args[1], the first score and the next.


def _then_forward(where, q_idx, k_idx, s, args):
    s = args[0].forward(where, q_idx, k_idx, s, args[0].args)
    return args[1].forward(where, q_idx, k_idx, s, args[1].args)


def _then_derivative(where, q_idx, k_idx, s, args):
    between = args[0].forward(where, q_idx, k_idx, s, args[0].args)
    outer = args[1].derivative(where, q_idx, k_idx, between, args[1].args)
    return outer * args[0].derivative(where, q_idx, k_idx, s, args[0].args)


# --- functions of parts -----------------------------------------------------------------------------------------------


def no_initial(where, q_idx, k_idx, s, unit, args):
    """Return nothing: nothing is added to s."""


def nothing_beside(where, q_idx, k_idx, args):
    """Return nothing: nothing is read."""


def as_it_is(where, q_idx, k_idx, s, beside, unit, args):
    """Return s: the parts around it are the score."""
    return s


def same_unit(unit, args):
    """Return ``unit``."""
    return unit


def natural_unit(unit, args):
    """Return 1: the result is the logit itself."""
    return 1.0


def slope_one(where, q_idx, k_idx, s, beside, scaled, unit, args):
    """Return the slope of what only adds to a logit."""
    return 1.0


def _whole_scaled(where, q_idx, k_idx, s, beside, unit, args):
    return args[0].forward(where, q_idx, k_idx, s * unit, args[0].args)


def _whole_slope(where, q_idx, k_idx, s, beside, scaled, unit, args):
    return args[0].derivative(where, q_idx, k_idx, s * unit, args[0].args)


def _then_initial(where, q_idx, k_idx, s, unit, args):
    return args[0].initial(where, q_idx, k_idx, s, unit, args[0].args)


def _then_beside(where, q_idx, k_idx, args):
    first = args[0].beside(where, q_idx, k_idx, args[0].args)
    if first is None:
        return args[1].beside(where, q_idx, k_idx, args[1].args)
    else:
        return first


def _next_beside(where, q_idx, k_idx, beside, args):
    """Return what the next score has beside: it is the chain's if the first one has nothing, else it is read now."""
    if args[0].beside(where, q_idx, k_idx, args[0].args) is not None:
        return args[1].beside(where, q_idx, k_idx, args[1].args)
    elif beside is not None:
        return beside
    else:  # Triton takes None itself for a tensor
        return nothing_beside(where, q_idx, k_idx, args)


def _then_scaled(where, q_idx, k_idx, s, beside, unit, args):
    s = _between(where, q_idx, k_idx, s, beside, unit, args)
    beside = _next_beside(where, q_idx, k_idx, beside, args)
    return args[1].scaled(where, q_idx, k_idx, s, beside, args[0].unit(unit, args[0].args), args[1].args)


def _between(where, q_idx, k_idx, s, beside, unit, args):
    """Return the first score's result and what the next one adds to it at first."""
    between = args[0].scaled(where, q_idx, k_idx, s, beside, unit, args[0].args)
    initial = args[1].initial(where, q_idx, k_idx, s, args[0].unit(unit, args[0].args), args[1].args)
    if initial is None:
        return between
    else:
        return between + initial


def _then_unit(unit, args):
    return args[1].unit(args[0].unit(unit, args[0].args), args[1].args)


def _then_slope(where, q_idx, k_idx, s, beside, scaled, unit, args):
    first = args[0].scaled(where, q_idx, k_idx, s, beside, unit, args[0].args)
    between = _between(where, q_idx, k_idx, s, beside, unit, args)
    between_unit = args[0].unit(unit, args[0].args)
    next_beside = _next_beside(where, q_idx, k_idx, beside, args)
    outer = args[1].slope(where, q_idx, k_idx, between, next_beside, scaled, between_unit, args[1].args)
    return outer * args[0].slope(where, q_idx, k_idx, s, beside, first, unit, args[0].args)


_WHOLE = Parts(no_initial, nothing_beside, _whole_scaled, natural_unit, _whole_slope)
_THEN = Parts(_then_initial, _then_beside, _then_scaled, _then_unit, _then_slope)
