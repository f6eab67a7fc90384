"""Make the launches of an earlier call again, with other addresses.

Between calls with the same shapes, strides and options nothing changes but where the tensors lie. Working the launches
out (tiles, sizes, descriptors, keys) takes the host longer than a small attention takes the GPU: so the second such
call notes them, and those after it only fill in addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flashtile.kernel import launcher
from flashtile.kernel.launch import on_device
from flashtile.kernel.launcher import Descriptor
from flashtile.mask import Mask
from flashtile.score import Score
from flashtile.seqlen import Seqlens

_MOST_REMEMBERED = 1024  # kinds of calls, and addresses of each descriptor
_calls: dict[tuple, list[_Launch]] = {}  # without launches: such a call was there once


class _Map(NamedTuple):
    """Where a tensor map goes: at ``position``, for what lies ``offset`` bytes into a tensor of the call.

    ``parameters`` are a Descriptor's beside the tensor; ``known`` has the maps encoded so far, by address.
    """

    position: int
    which: int
    offset: int
    parameters: tuple
    encoding: dict
    known: dict[int, Any]

    def at(self, address: int, tensor: torch.Tensor) -> Any:
        """Return the map for an address in ``tensor``."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MOST_REMEMBERED:
                self.known.clear()
            there = tensor.as_strided((1,), (1,), tensor.storage_offset() + self.offset // tensor.itemsize)
            found = launcher.tensor_map(Descriptor(there, *self.parameters), self.encoding)[0]
            self.known[address] = found
        return found


class _Pattern(NamedTuple):
    """Arguments of a kernel, or a tuple among them, and where in ``items`` addresses and further tuples go.

    ``addresses``: position, which tensor of the call, bytes from its start. ``tuples``: position and pattern.
    """

    items: list
    addresses: list[tuple[int, int, int]]
    tuples: list[tuple[int, _Pattern]]

    def filled(self, starts: list[int]) -> list:
        """Return the items for tensors that start at these addresses."""
        items = self.items.copy()
        for position, which, offset in self.addresses:
            items[position] = starts[which] + offset
        for position, pattern in self.tuples:
            items[position] = tuple(pattern.filled(starts))
        return items


class _Launch(NamedTuple):
    """A launch as the C launcher takes it, and the tensor maps that go into ``args``."""

    compiled: Any
    programs: int
    args: _Pattern
    maps: list[_Map]


class Call:
    """A call's launches: made again if an earlier call was like it, else noted while they are made.

    Launches may depend on nothing but what is given here: ``tensors`` that kernels read or write (None where there is
    none), the mask, and ``options``: numbers, configurations, scores, packed lengths, dropout; tensors are looked for
    in them too. ``fresh`` are tensors that the call has just allocated; their shapes and strides follow from the rest.
    Nothing is noted where there is no direct launch, nor under a mask without ranges, whose tile lists are made for
    each call.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        mask: Mask,
        *options: Any,
        fresh: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._device, self._key = device, None
        self._tensors, self._starts = list(tensors), []
        if mask.key_range is None or not launcher.has_copy_engine(device):
            return
        key: list[Any] = [name, device.index]
        _take_apart((mask, *options), key, self._tensors)
        numbers: dict[int, int] = {}  # of addresses: calls are alike only if the same tensors lie at one address
        for t in self._tensors:
            start = 0 if t is None else t.data_ptr()
            self._starts.append(start)
            if t is None:
                key.append(None)
            else:
                key += (start & 15, numbers.setdefault(start, len(numbers)), t.dtype, t.shape, t.stride())
        self._tensors += fresh
        for t in fresh:
            start = 0 if t is None else t.data_ptr()
            self._starts.append(start)
            key.append(None if t is None else start & 15)
        self._key = tuple(key)

    def again(self) -> bool:
        """Make the launches of an earlier call again; return False, and launch nothing, if they are not known."""
        known = None if self._key is None else _calls.get(self._key)
        if not known or launcher.hooked():
            return False
        starts = self._starts
        with on_device(self._device):
            launcher.prepare(self._device)  # encoding a map takes a context
            ready = []
            for launch in known:
                args = launch.args.filled(starts)
                for map_ in launch.maps:
                    tensor: Any = self._tensors[map_.which]
                    args[map_.position] = map_.at(starts[map_.which] + map_.offset, tensor)
                ready.append(args)
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            for launch, args in zip(known, ready, strict=True):
                launcher.launch(launch.compiled, launch.programs, stream, args)
        return True

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the launches that are made inside, if such a call was there before.

        Noting takes longer than launching, and a call with another number of packed sequences may never come again.
        """
        if self._key is None:
            yield
            return
        if self._key not in _calls:
            if len(_calls) >= _MOST_REMEMBERED:
                _calls.clear()
            _calls[self._key] = []
            yield
            return
        with launcher.watched() as made:
            yield
        launches = [self._described(*launch) for launch in made]
        if None not in launches:
            _calls[self._key] = launches  # pyright: ignore[reportArgumentType]

    def _described(self, compiled: Any, programs: int, args: tuple, final: list) -> _Launch | None:
        """Return a launch as a pattern for others; None if something in it is of this call alone."""
        if compiled is None:  # it went through Triton
            return None
        maps, position, encodings = [], 0, iter(compiled.encodings)
        for arg in args:
            if type(arg) is Descriptor:
                place, encoding = self._place(arg.tensor), next(encodings)
                if place is None:
                    return None
                maps.append(_Map(position, *place, tuple(arg)[1:], encoding, {}))
                position += len(launcher.tensor_map(arg, encoding))
            else:
                position += 1
        pattern = self._pattern(final)
        return None if pattern is None else _Launch(compiled, programs, pattern, maps)

    def _pattern(self, values: Sequence) -> _Pattern | None:
        """Return arguments without their tensors, which would stay alive; None if one has no place."""
        items, addresses, tuples = list(values), [], []
        for position, item in enumerate(values):
            if isinstance(item, torch.Tensor):
                place = self._place(item)
                if place is None:
                    return None
                addresses.append((position, *place))
                items[position] = None
            elif isinstance(item, tuple):
                pattern = self._pattern(item)
                if pattern is None:
                    return None
                if pattern.addresses or pattern.tuples:
                    tuples.append((position, pattern))
                    items[position] = None
        return _Pattern(items, addresses, tuples)

    def _place(self, t: torch.Tensor) -> tuple[int, int] | None:
        """Return which tensor of the call ``t`` is, or else lies in, and how far from its start; None if unknown.

        Of several at one address any will do: they are at one address in every call like this.
        """
        address = t.data_ptr()
        known = [(i, start, other) for i, (start, other) in enumerate(zip(self._starts, self._tensors, strict=True))]
        for i, start, other in known:
            if start == address and other is not None and other.dtype == t.dtype:
                return i, 0
        inside = [
            (i, address - start)
            for i, start, other in known
            if other is not None and start <= address < start + _extent(other)
        ]
        return inside[0] if len(inside) == 1 else None


def _take_apart(values: tuple, key: list, tensors: list) -> None:
    """Append the tensors in nested tuples, masks and scores to ``tensors``, and all that is left of these to ``key``.

    Numbers come with their types, because 2 == 2.0 and kernels are compiled for one of them; and 0.0 == -0.0.
    """
    for value in values:
        if value is None:
            key.append(None)
            continue
        kind, parts = type(value), value
        if isinstance(value, torch.Tensor):
            key.append(torch.Tensor)
            tensors.append(value)
            continue
        if kind is Mask:
            key += (value.predicate, value.key_range, value.query_range)
            parts = value.args
        elif kind is Score:
            key += (value.forward, value.derivative, value.parts)
            parts = value.args
        elif kind is Seqlens:
            parts = value[:4]  # without hints, of which no launch knows
        elif not isinstance(value, tuple):
            key += (kind, value or repr(value))
            continue
        key += (kind, len(parts))
        _take_apart(parts, key, tensors)


def _extent(t: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first entry to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize if t.numel() else 0
