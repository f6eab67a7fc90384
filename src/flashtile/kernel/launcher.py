"""Launch a kernel with little work on the host: the compiled kernel and the tensor maps are looked up, not made.

Triton's own launch takes longer on the host than a small attention takes on the GPU: it binds and specialises every
argument anew and encodes a tensor map per descriptor. Here the first launch of each kind goes through Triton; later
ones call the compiled kernel's launcher directly. Whatever Triton specialises on is part of the key.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from triton import knobs

from flashtile.dropout import Dropout
from flashtile.kernel.launch import HopperConfig, LaunchConfig, has_copy_engine, has_rough_tanh
from flashtile.mask import Mask
from flashtile.mask.kinds import looks_back
from flashtile.score import DeviceParts, DeviceScore, Score, identity

_MOST_REMEMBERED = 4096
_INT22_END, _INT32_END = 2**22, 2**31
_LEAST_UNIT = 2.0**-40

_compiled: dict[tuple, _Compiled] = {}
_tensor_maps: dict[tuple, list] = {}
_layouts: dict[int, Any] = {}
_thread = threading.local()


class Descriptor(NamedTuple):
    """A tensor that a kernel reads through the copy engine, in blocks of ``block``; its last stride is 1.

    ``layout`` is the shared-memory layout of a block where the kernel is written in Gluon; Triton chooses its own.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None


class DeviceDropout(NamedTuple):
    """Dropout as kernels take it: the seed's address, the smallest word that is kept, and 1 / (1 - p)."""

    seed: Any
    threshold: int
    scale: float


def dropout_on_device(dropout: Dropout | None) -> DeviceDropout | None:
    """Return dropout as kernels take it."""
    return dropout and DeviceDropout(dropout.seed, dropout.threshold, dropout.rescale)


def score_on_device(score: Score | None, q: torch.Tensor, k: torch.Tensor) -> DeviceScore | None:
    """Return a score as every kernel takes it that works on q and k; all must take the same, to get the same logits."""
    if score is None:
        return None
    short = q.shape[2] < _INT22_END and k.shape[2] < _INT22_END
    return score.on_device(q.itemsize == 2 and short and has_rough_tanh(q.device))


def score_in_parts(
    score: Score | None, q: torch.Tensor, k: torch.Tensor, mask: Mask, softmax_scale: float
) -> DeviceParts | None:
    """Return a score as the kernels for Hopper take it that work on q and k, or None."""
    if score is None:
        return None
    score = with_unit(score, softmax_scale)
    short = q.shape[2] < _INT22_END and k.shape[2] < _INT22_END
    return score.parts_on_device(short and has_rough_tanh(q.device), looks_back(mask))


def with_unit(score: Score, softmax_scale: float) -> Score:
    """Return the score that kernels by parts must use: with another one first where there is no unit to divide by."""
    return score if _LEAST_UNIT <= softmax_scale <= 1 / _LEAST_UNIT else identity().then(score)


class _Compiled(NamedTuple):
    """A compiled kernel ready to launch: Triton's object, its C launcher, and how each descriptor is encoded."""

    kernel: Any
    launch: Any
    encodings: list


def operand(t: torch.Tensor, block_rows: int) -> tuple[Any, tuple[int, ...]]:
    """Return a (batch, heads, rows, columns) tensor as a kernel takes it: a source and its strides.

    On sm_90 and later a 16-bit tensor that the copy engine can describe (a power of two columns, the last stride 1,
    rows, heads and batches 16 bytes apart or a multiple) becomes a descriptor of ``block_rows`` whole rows, with empty
    strides; any other is passed as it is. ``tile.load_rows`` reads both.
    """
    strides = t.stride()
    columns = t.shape[3]
    if (
        t.itemsize == 2
        and 16 <= columns <= 256
        and columns & (columns - 1) == 0
        and strides[3] == 1
        and (strides[0] | strides[1] | strides[2]) % 8 == 0
        and has_copy_engine(t.device)
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
    ):
        return Descriptor(t, t.shape, strides, (1, 1, block_rows, columns)), ()
    return t, strides_of(t)


def strides_of(t: torch.Tensor) -> tuple[int, ...]:
    """Return the four strides of ``t``, or the first three in units of 16 bytes where rows are dense and aligned to it.

    Triton by itself sees alignment to 16 elements only: rows of 40 or 200 half-precision numbers would be moved one
    element at a time.
    """
    strides, unit = t.stride(), 16 // t.itemsize
    if strides[3] == 1 and (strides[0] | strides[1] | strides[2]) % unit == 0 and t.data_ptr() % 16 == 0:
        return strides[0] // unit, strides[1] // unit, strides[2] // unit
    return strides


def row_operand(t: torch.Tensor, length: int, block_rows: int) -> Any:
    """Return per-query numbers, ``t`` of (rows, row_stride) with ``length`` valid ones, as a descriptor or as it is."""
    if has_copy_engine(t.device):
        return Descriptor(t, (t.shape[0], length), t.stride(), (1, block_rows))
    return t


def run(
    kernel: Any,
    programs: int,
    device: torch.device,
    args: tuple,
    constants: dict[str, Any],
    config: LaunchConfig | HopperConfig,
) -> None:
    """Launch ``programs`` programs of ``kernel`` on ``device``'s current stream.

    ``args`` are the positional arguments (Descriptors among them), ``constants`` the compile-time ones after them.
    """
    if not has_copy_engine(device):  # the interpreter, and GPUs where Triton specialises on more than is keyed here
        kernel[(programs,)](*args, **constants, **config.options())
        return
    prepare(device)
    key = (kernel.fn, device.index, config, *constants.values(), *_key(args, _free(kernel)))
    known = _compiled.get(key)
    made = getattr(_thread, "made", None)
    if known is None or hooked():
        compiled = kernel[(programs,)](*(_as_triton(arg) for arg in args), **constants, **config.options())
        if len(_compiled) >= _MOST_REMEMBERED:
            _compiled.clear()
        _compiled[key] = _Compiled(compiled, _c_launcher(compiled), list(compiled.metadata.tensordesc_meta or ()))
        if made is not None:
            made.append((None, programs, args, []))
        return
    final: list[Any] = []
    encoding = iter(known.encodings)
    for arg in args:
        if type(arg) is Descriptor:
            final += tensor_map(arg, next(encoding))
        else:
            final.append(arg)
    final += constants.values()
    launch(known, programs, torch._C._cuda_getCurrentRawStream(device.index), final)
    if made is not None:
        made.append((known, programs, args, final))


def launch(known: _Compiled, programs: int, stream: int, args: list) -> None:
    """Launch a compiled kernel; tensors among ``args`` may be given by their addresses."""
    kernel = known.kernel
    known.launch(
        programs, 1, 1, stream, kernel.function, False, False, None, None,
        kernel.packed_metadata, None, None, None, *args,
    )  # fmt: skip


@contextlib.contextmanager
def watched() -> Iterator[list[tuple]]:
    """Collect this thread's launches inside: (compiled kernel or None, programs, args, args as they were launched)."""
    _thread.made = made = []
    try:
        yield made
    finally:
        _thread.made = None


def hooked() -> bool:
    """Return whether a profiler asked Triton to be told of launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))  # a chain of hooks since Triton 3.5


def _as_triton(arg: Any) -> Any:
    if type(arg) is not Descriptor:
        return arg
    tensor, shape, strides, block, layout = arg
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, list(shape), list(strides), list(block))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor(tensor, list(shape), list(strides), list(block), layout)


def _key(args: tuple, free: tuple[int, ...] = (), inside_value: bool = False) -> list:
    """Return what Triton's compiled code depends on in ``args``; ``free`` are the positions of unspecialised integers.

    Strides and other integers stand for themselves: a new shape costs one launch through Triton, which compiles only
    if an alignment or a stride of 1 is new. Tensors stand for their dtype and alignment, so none is kept alive.
    """
    key: list[Any] = []
    for i, arg in enumerate(args):
        kind = type(arg)
        if kind is int:
            key.append(arg >= _INT32_END if i in free else arg)
        elif kind is Descriptor:
            key += (arg.tensor.dtype, arg.block, _number_of(arg.layout))
        elif kind is float:  # never specialised, and 2.0 == 2 must not match an integer
            key.append(float)
        elif isinstance(arg, torch.Tensor):
            key += (arg.dtype, arg.data_ptr() % 16 == 0)
        elif isinstance(arg, tuple) and (inside_value or hasattr(kind, "_fields")):  # masks, scores, lengths, ...
            key.append((kind, *_key(arg, inside_value=True)))
        else:
            key.append(arg)
    return key


def _number_of(layout: Any) -> int:
    """Return a number for a layout, which is kept so that no other gets it: hashing one takes a microsecond."""
    number = id(layout)
    if number not in _layouts:
        _layouts[number] = layout
    return number


@functools.cache
def _free(kernel: Any) -> tuple[int, ...]:
    return tuple(kernel.arg_names.index(name) for name in kernel.do_not_specialize)


def tensor_map(descriptor: Descriptor, encoding: dict) -> list:
    """Return the encoded tensor map with its shape and strides, as the C launcher takes them.

    The map holds an address, a shape and strides, so it stays right for any tensor that later has the same ones.
    """
    tensor, shape, strides, block, _ = descriptor
    key = (tensor.data_ptr(), shape, strides, block, tensor.dtype, encoding["swizzle"])
    known = _tensor_maps.get(key)
    if known is None:
        if len(_tensor_maps) >= _MOST_REMEMBERED:
            _tensor_maps.clear()
        known = _tensor_maps[key] = _encode(descriptor, encoding)
    return known


def _encode(descriptor: Descriptor, encoding: dict) -> list:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(_as_triton(descriptor), encoding)


def _c_launcher(compiled: Any) -> Any:
    """Return the C function behind a compiled kernel; Triton wraps it where descriptors have to be encoded."""
    launch = compiled.run.launch
    for cell in getattr(launch, "__closure__", None) or ():
        if callable(cell.cell_contents):
            return cell.cell_contents
    return launch


def prepare(device: torch.device) -> None:
    """Give this thread a CUDA context: autograd's worker threads start without one, and encoding a map needs it."""
    ready = _thread.__dict__.setdefault("devices", set())
    if device.index not in ready:
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # setting the device alone is put off until something needs the context
        ready.add(device.index)
