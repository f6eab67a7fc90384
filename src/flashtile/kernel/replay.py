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

_MOST_REMEMBERED = 1024  # kinds of calls, and addresses of each descriptor
_calls: dict[tuple, list[_Launch]] = {}


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


class _Launch(NamedTuple):
    """A launch as the C launcher takes it, and where in ``args`` addresses and tensor maps go.

    ``addresses``: position, which tensor of the call, bytes from its start.
    """

    compiled: Any
    programs: int
    args: list
    addresses: list[tuple[int, int, int]]
    maps: list[_Map]


class Call:
    """A call's launches: made again if an earlier call was like it, else noted while they are made.

    ``options`` stands for all that launches depend on beside ``tensors``: everything that kernels read or write, in
    this order (None where there is none). Without options nothing is known or noted.
    """

    def __init__(self, options: tuple | None, tensors: Sequence[torch.Tensor | None], device: torch.device) -> None:
        self._tensors, self._device, self._key = tensors, device, None
        if options is None:
            return
        self._starts = [0 if t is None else t.data_ptr() for t in tensors]
        key: list[Any] = [options, device.index]
        for t, start in zip(tensors, self._starts, strict=True):
            key += (None,) if t is None else (start & 15, t.dtype, t.shape, t.stride())
        self._key = tuple(key)

    def again(self) -> bool:
        """Make the launches of an earlier call again; return False, and launch nothing, if they are not known."""
        known = None if self._key is None else _calls.get(self._key)
        if known is None or launcher.hooked():
            return False
        starts = self._starts
        with on_device(self._device):
            launcher.prepare(self._device)  # encoding a map takes a context
            ready = []
            for launch in known:
                args = launch.args.copy()
                for position, which, offset in launch.addresses:
                    args[position] = starts[which] + offset
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
        """Note the launches that are made inside."""
        if self._key is None:
            yield
            return
        with launcher.watched() as made:
            yield
        launches = [self._described(*launch) for launch in made]
        if launches and None not in launches:
            if len(_calls) >= _MOST_REMEMBERED:
                _calls.clear()
            _calls[self._key] = launches  # pyright: ignore[reportArgumentType]

    def _described(self, compiled: Any, programs: int, args: tuple, final: list) -> _Launch | None:
        """Return a launch as a pattern for others; None if something in it is of this call alone."""
        if compiled is None:  # it went through Triton
            return None
        addresses, maps, position, encodings = [], [], 0, iter(compiled.encodings)
        for arg in args:
            tensor = arg.tensor if type(arg) is Descriptor else arg
            if isinstance(tensor, torch.Tensor):
                address = tensor.data_ptr()
                place = self._place(address)
                if place is None:
                    return None
                if tensor is arg:
                    addresses.append((position, *place))
                    position += 1
                else:
                    encoding = next(encodings)
                    maps.append(_Map(position, *place, tuple(arg)[1:], encoding, {}))
                    position += len(launcher.tensor_map(arg, encoding))
            elif holds_tensor(arg):
                return None
            else:
                position += 1
        pattern = list(final)
        for position in (*(a[0] for a in addresses), *(m.position for m in maps)):
            pattern[position] = None  # or these tensors would stay alive
        return _Launch(compiled, programs, pattern, addresses, maps)

    def _place(self, address: int) -> tuple[int, int] | None:
        """Return which tensor an address is in and how far from its start; None if that is not the only one."""
        starts = [i for i, start in enumerate(self._starts) if start == address]
        if len(starts) == 1:
            return starts[0], 0
        inside = [
            i
            for i, t in enumerate(self._tensors)
            if t is not None and t.data_ptr() <= address < t.data_ptr() + _extent(t)
        ]
        return (inside[0], address - self._starts[inside[0]]) if len(inside) == 1 else None


def options(name: str, device: torch.device, mask: Mask, rest: tuple, *absent: Any) -> tuple | None:
    """Return a ``Call``'s options, or None where launches may not be repeated.

    They may where they go through the direct launch, none of ``absent`` (scores, packed lengths, ...) is given, and the
    mask consists of functions and numbers.
    """
    if any(x is not None for x in absent) or mask.key_range is None or holds_tensor(mask.args):
        return None
    if not launcher.has_copy_engine(device):
        return None
    return name, mask.predicate, mask.key_range, mask.query_range, mask.args, _kinds(mask.args), *rest


def holds_tensor(arg: Any) -> bool:
    """Return whether a tensor is somewhere in nested tuples and masks."""
    arg = arg.args if isinstance(arg, Mask) else arg
    return isinstance(arg, torch.Tensor) or (isinstance(arg, tuple) and any(map(holds_tensor, arg)))


def _kinds(args: Any) -> Any:
    """Return the types in nested tuples and masks, because 2 == 2.0 and kernels are compiled for one of them."""
    args = args.args if isinstance(args, Mask) else args
    return tuple(map(_kinds, args)) if isinstance(args, tuple) else type(args)


def _extent(t: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first entry to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.itemsize if t.numel() else 0
