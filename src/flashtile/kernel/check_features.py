"""What is wrong with a mask, a score, sinks, dropout or packed sequences; ``check.py`` has the rest.

Checks of numbers that lie on a GPU would wait for it, so they run only inside ``with flashtile.checked():``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flashtile.kernel.check import described
from flashtile.kernel.rules import Rules
from flashtile.mask import Mask
from flashtile.score import Score
from flashtile.seqlen import Seqlens

_checking: ContextVar[bool] = ContextVar("flashtile.checked", default=False)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Also check what lies on the device: that cu_seqlens rise from 0 to at most the tensors' length, that seqused fit
    into their sequences, max_seqlen bounds them, and masks and scores have entries for the longest of them. Each check
    waits for the device; tests should run inside. (Lengths on the CPU are read, and checked, anyway.)

    ::

        with flashtile.checked():
            flash_attention_varlen(...)     # ValueError for what would otherwise be undefined
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def kinds(mask: Any, score: Any, sinks: Any) -> None:
    """Raise TypeError unless mask, score and sinks are None or of their kinds."""
    if mask is not None and not isinstance(mask, (Mask, Tensor)):
        more = "; call it, as in mask=causal()" if callable(mask) else ""
        raise TypeError(
            f"mask is {described(mask)}, but wants a value of flashtile.mask, a torch.bool tensor or None{more}"
        )
    if isinstance(mask, Tensor) and mask.dtype is not torch.bool:
        raise TypeError(
            f"mask is a tensor of {mask.dtype}, but wants torch.bool, True where a query sees a key; what is added "
            "to the logits is score=flashtile.score.bias(tensor)"
        )
    if isinstance(mask, Tensor) and not 1 <= mask.ndim <= 4:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, but wants 1 to 4 dimensions that broadcast to (batch, heads_q, "
            "seqlen_q, seqlen_k)"
        )
    if score is not None and not isinstance(score, Score):
        more = "; flashtile.score.bias(tensor) adds a tensor to the logits" if isinstance(score, Tensor) else ""
        more = "; call it, as in score=softcap(30.0)" if callable(score) else more
        raise TypeError(f"score is {described(score)}, but wants a value of flashtile.score or None{more}")
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is {described(sinks)}, but wants a tensor of shape (heads_q,) or None")


def dropout_options(dropout_p: Any, generator: Any, device: torch.device) -> None:
    """Raise unless ``0 <= dropout_p < 1`` and the generator, if any, is one of q's device."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (float, int, torch.SymFloat)):
        raise TypeError(f"dropout_p is {described(dropout_p)}, but wants a float")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, but wants 0 <= dropout_p < 1")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator is {described(generator)}, but wants a torch.Generator or None")
        if generator.device.type != device.type:
            raise ValueError(f"generator is on {generator.device}, but wants {device} like q")


def switches(**values: Any) -> None:
    """Raise TypeError unless every value is a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {described(value)}, but wants True or False")


def rules_fit(rules: Rules, q: Tensor, k: Tensor) -> None:
    """Raise unless mask, score and sinks were made for 4-D q and k (or for their packed sequences)."""
    seqlens = rules.seqlens
    batch, heads_q, seqlen_q, seqlen_k = *q.shape[:3], k.shape[2]
    lengths: tuple[Any, Any] = (seqlen_q, seqlen_k) if seqlens is None else (None, None)
    batch = batch if seqlens is None else seqlens.cu_seqlens_q.shape[0] - 1
    rules.mask.check(batch, heads_q, *lengths, q.device)
    if rules.score is not None:
        rules.score.check(batch, heads_q, *lengths, q.device)
    if seqlens is not None and _reads_lengths(seqlens.cu_seqlens_q, seqlens.cu_seqlens_k):
        _long_enough(rules, seqlens)
    sinks = rules.sinks
    if sinks is not None:
        if sinks.ndim != 1 or sinks.shape[0] != heads_q:
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}, but wants ({heads_q},), one for every head of q")
        if not sinks.is_floating_point():
            raise TypeError(f"sinks has dtype {sinks.dtype}, but wants a floating-point one")
        if sinks.device != q.device:
            raise ValueError(f"sinks is on {sinks.device}, but wants {q.device} like q")


def _long_enough(rules: Rules, seqlens: Seqlens) -> None:
    """Raise ValueError if a sequence is longer than what a mask or a score has entries for."""
    longest = (
        max(_used(seqlens.cu_seqlens_q, seqlens.seqused_q), default=0),
        max(_used(seqlens.cu_seqlens_k, seqlens.seqused_k), default=0),
    )
    sizes = [(f"mask {mask}", mask.sizes[2:]) for mask in _parts(rules.mask)]
    for p in () if rules.score is None else rules.score.parameters():
        if p.bucket is None:
            sizes.append((f"score {p.score.name}", tuple(None if n == 1 else (n, 1) for n in p.tensor.shape[2:])))
    for owner, made_for in sizes:
        for name, met, size in zip(("queries", "keys"), longest, made_for, strict=True):
            if size is not None and size[0] * size[1] < met:
                raise ValueError(f"{owner} is made for {size[0] * size[1]} {name}, but a sequence has {met}")


def _parts(mask: Mask) -> Iterator[Mask]:
    yield mask
    for arg in mask.args:
        if isinstance(arg, Mask):
            yield from _parts(arg)


def _used(cu_seqlens: Tensor, seqused: Tensor | None) -> list[int]:
    """Return how many rows each sequence uses."""
    return [b - a for a, b in itertools.pairwise(cu_seqlens.tolist())] if seqused is None else seqused.tolist()


def packed_inputs(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k, v are tensors of 3 dimensions; what else they want is checked as for dense ones."""
    for name, t, rows, heads in (("q", q, "total_q", "heads_q"), ("k", k, "total_k", "heads_kv"),
                                 ("v", v, "total_k", "heads_kv")):  # fmt: skip
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is {described(t)}, but wants a torch.Tensor")
        if t.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but wants ({rows}, {heads}, head_dim)")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k has {k.shape[0]} rows and v has {v.shape[0]}, but both want total_k")


def seqlens_fit(seqlens: Seqlens, max_seqlen_q: Any, max_seqlen_k: Any, q: Tensor, k: Tensor) -> None:
    """Raise unless the lengths describe packed q ``(total_q, ...)`` and k ``(total_k, ...)``."""
    cu_q, cu_k = seqlens.cu_seqlens_q, seqlens.cu_seqlens_k
    for name, t in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        _lengths(name, t, q.device)
        if t.shape[0] < 1:
            raise ValueError(f"{name} has shape (0,), but wants (batch + 1,), the first entry 0")
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_q has {cu_q.shape[0]} entries and cu_seqlens_k {cu_k.shape[0]}, but both want batch + 1"
        )
    for name, t in (("seqused_q", seqlens.seqused_q), ("seqused_k", seqlens.seqused_k)):
        if t is not None:
            _lengths(name, t, q.device)
            if t.shape[0] != cu_q.shape[0] - 1:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, but wants (batch,) = ({cu_q.shape[0] - 1},)")
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, (int, torch.SymInt))):
            raise TypeError(f"{name} is {described(n)}, but wants an int or None")
        if n is not None and n < 0:
            raise ValueError(f"{name} is {n}, but wants 0 or more")
    if _reads_lengths(cu_q, cu_k):
        hints = (max_seqlen_q, max_seqlen_k) if _checking.get() else (None, None)
        _contents("q", cu_q, seqlens.seqused_q, hints[0], q.shape[0])
        _contents("k", cu_k, seqlens.seqused_k, hints[1], k.shape[0])


def _reads_lengths(*lengths: Tensor) -> bool:
    """Return whether what lengths hold is to be checked: when asked, and on the CPU, where nothing waits for it."""
    if torch.compiler.is_compiling():
        return False
    watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()
    return _checking.get() or (not watched and all(type(t) is Tensor and t.device.type == "cpu" for t in lengths))


def _lengths(name: str, t: Any, device: torch.device) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} is {described(t)}, but wants an int32 tensor")
    if t.dtype is not torch.int32:
        raise TypeError(f"{name} has dtype {t.dtype}, but wants torch.int32")
    if t.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}, but wants one dimension")
    if t.device != device:
        raise ValueError(f"{name} is on {t.device}, but wants {device} like q")


def _contents(name: str, cu_seqlens: Tensor, seqused: Tensor | None, max_seqlen: int | None, total: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens_{name} starts with {bounds[0]}, but wants 0")
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    for i, n in enumerate(lengths):
        if n < 0:
            raise ValueError(f"cu_seqlens_{name} falls from {bounds[i]} to {bounds[i + 1]}, but wants rising entries")
    if bounds[-1] > total:
        raise ValueError(f"cu_seqlens_{name} ends with {bounds[-1]}, but wants at most the {total} rows of {name}")
    used = lengths if seqused is None else seqused.tolist()
    for i, (n, room) in enumerate(zip(used, lengths, strict=True)):
        if not 0 <= n <= room:
            raise ValueError(f"seqused_{name}[{i}] is {n}, but wants 0 to {room}, the length of sequence {i}")
    longest = max(used, default=0)
    if longest > (math.inf if max_seqlen is None else max_seqlen):
        raise ValueError(f"max_seqlen_{name} is {max_seqlen}, but a sequence has {longest} rows")
