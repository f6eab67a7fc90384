"""The implementations that are measured against each other, each with what it supports.

A provider turns a :class:`Case` into a function ``(q, k, v) -> o`` on ``(batch, heads, seqlen, head_dim)`` tensors (or
on ``(batch, seqlen, heads, head_dim)`` where its layout says so; the inputs are then laid out before the clock starts).
What a provider cannot do is said by :meth:`Provider.unsupported` and becomes a row of the table, never a gap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.bench_mark.measure import DETERMINISTIC, Case, Timed

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_LONGEST_MOCK = 2048  # the reference walks over tiles in Python; beyond this one call takes seconds
_HEAVY_CHANNELS, _HEAVY_FACTOR = 4, 100.0


@dataclass(frozen=True)
class Provider:
    """One implementation of attention; empty tuples in its limits mean "any"."""

    name: str
    label: str
    build: Callable[[Case], Attention]
    layout: Literal["bhsd", "bshd"] = "bhsd"
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    backward: bool = True
    deterministic: Mapping[str, Any] | None = None  # what to replace for deterministic gradients; None: it has none
    grouped_heads: bool = True  # fewer heads of k and v than of q
    windows: bool = True
    head_dim_multiple: int = 1
    head_dim_max: int | None = None
    capability_min: tuple[int, int] | None = None
    requires: tuple[str, ...] = ()
    matrices: int = 0  # seqlen x seqlen matrices alive at once: 0 for a fused kernel
    longest: int | None = None
    compiled: bool = False
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    def unsupported(self, case: Case, device: torch.device, mode: str) -> str | None:
        """Return why this provider cannot serve the case, None if it can as far as is known beforehand."""
        if missing := [name for name in self.requires if importlib.util.find_spec(name) is None]:
            return f"{', '.join(missing)} not installed"
        if self.devices and device.type not in self.devices:
            return f"runs on {', '.join(self.devices)} only"
        if self.dtypes and case.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)} only"
        if mode != "forward" and not self.backward:
            return "forward only"
        if mode == DETERMINISTIC and self.deterministic is None:
            return "no deterministic backward pass"
        if case.group > 1 and not self.grouped_heads:
            return "needs as many heads of k and v as of q"
        if case.window and not self.windows:
            return "no sliding window"
        if case.head_dim % self.head_dim_multiple:
            return f"head_dim must be a multiple of {self.head_dim_multiple}"
        if self.head_dim_max and case.head_dim > self.head_dim_max:
            return f"head_dim is at most {self.head_dim_max}"
        if self.longest and case.seqlen > self.longest:
            return f"a Python loop over tiles: only up to seqlen {self.longest}"
        if self.capability_min and torch.cuda.get_device_capability(device) < self.capability_min:
            return "needs sm_{}{}".format(*self.capability_min)
        needed = self.matrices * (1 if mode == "forward" else 2) * _matrix_bytes(case)
        if needed and needed > (available := available_bytes(device)):
            return f"needs about {needed / 2**30:.0f} GiB for score matrices, {available / 2**30:.0f} GiB are free"
        return None

    def with_deterministic_gradients(self) -> Provider:
        """Return this provider with what it needs for gradients that are the same bit for bit in every run."""
        return replace(self, **(self.deterministic or {}))


def _matrix_bytes(case: Case) -> int:
    return case.batch * case.heads * case.seqlen**2 * case.torch_dtype.itemsize


def available_bytes(device: torch.device) -> int:
    """Return the memory that may be asked for, with a tenth (of the CPU's: a half) left in reserve."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(0.9 * (free + cached))
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 4 << 20)
    return kib * 1024 // 2


@dataclass
class Inputs:
    """Random normal q, k, v and the output's gradient, all ``(batch, heads, seqlen, head_dim)``.

    Heavy-tailed ones have a few channels, the same of q, k and v, that are 100 times as large.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int = 0, heavy: bool = False) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v, do = (
            torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)
            for shape in (case.shape, case.shape_kv, case.shape_kv, case.shape)
        )
        if heavy:
            channels = torch.randperm(case.head_dim, generator=generator, device=device)[:_HEAVY_CHANNELS]
            for t in (q, k, v):
                t[..., channels] *= _HEAVY_FACTOR
        return cls(q, k, v, do)


class Prepared:
    """A provider with its inputs laid out, ready to be checked and timed."""

    def __init__(self, provider: Provider, case: Case, inputs: Inputs) -> None:
        self.provider = provider
        self.case = case
        self.attention = provider.build(case)
        self.qkv = [self._laid_out(t).detach() for t in (inputs.q, inputs.k, inputs.v)]
        self._do = self._laid_out(inputs.do)
        # Fresh views of the same memory: each provider grows its own graph.
        self.leaves = [t.detach().requires_grad_() for t in self.qkv]
        self._o: torch.Tensor | None = None

    def _laid_out(self, t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous() if self.provider.layout == "bshd" else t

    def read(self, t: torch.Tensor) -> torch.Tensor:
        """Return an output or gradient as ``(batch, heads, seqlen, head_dim)``."""
        return t.transpose(1, 2) if self.provider.layout == "bshd" else t

    @contextlib.contextmanager
    def _forward_context(self):
        with torch.no_grad(), self.provider.context():
            yield

    def timed(self, mode: str) -> Timed:
        """Return what the clock calls; for a backward pass this runs the forward pass once."""
        if mode == "forward":
            return Timed(lambda: self.attention(*self.qkv), self._forward_context)
        if mode == "both":
            return Timed(self._both, self.provider.context)
        if self._o is None:
            with self.provider.context():
                self._o = self.attention(*self.leaves)
        o = self._o
        return Timed(lambda: torch.autograd.grad(o, self.leaves, self._do, retain_graph=True), self.provider.context)

    def _both(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.attention(*self.leaves), self.leaves, self._do)

    def outputs(self, backward: bool) -> dict[str, torch.Tensor]:
        """Run once and return o, and dq, dk, dv if asked for."""
        forward = self.timed("forward")
        with forward.context():
            found = {"o": self.read(forward.call())}
        if backward:
            timed = self.timed("backward")
            with timed.context():
                found |= dict(zip(("dq", "dk", "dv"), map(self.read, timed.call()), strict=True))
        return found


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int = 0, first: int = 0
) -> torch.Tensor:
    """Attention as the formula says it, with the whole score matrix: ``softmax(q k^T / sqrt(d)) v``.

    The first row of q is at the position ``first``.
    """
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        every = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        hidden = every.triu(first + 1)
        if window:
            hidden |= every.tril(first - window)
        s = s.masked_fill(hidden, float("-inf"))
    return torch.softmax(s, dim=-1) @ v


def fresh_compiler() -> None:
    """Forget every compiled graph, so that no shape inherits another one's, or its recompilation count."""
    torch._dynamo.reset()
    # A compiled backward pass is called many times on one graph here; donated buffers forbid that.
    functorch_config.donated_buffer = False


def _naive(case: Case) -> Attention:
    return lambda q, k, v: naive_attention(q, k, v, case.causal, case.window)


def _naive_compiled(case: Case) -> Attention:
    compiled = torch.compile(naive_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, case.causal, case.window)


def _mock(case: Case) -> Attention:
    from flashtile.kernel.flash_attention_mock import FlashAttentionMock

    return lambda q, k, v: FlashAttentionMock.apply(q, k, v, case.causal)  # pyright: ignore[reportReturnType]


class _DenseCompiled(torch.autograd.Function):
    """The reference's dense formulas, forward as they are and backward through ``torch.compile``."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        from flashtile import mask
        from flashtile.kernel.flash_attention_mock import dense_attention

        rule = mask.causal() if causal else mask.full()
        o, lse = dense_attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5, mask=rule)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        from flashtile.kernel.flash_attention_mock import _flash_attn_backward_compiled

        q, k, v, o, lse = ctx.saved_tensors
        return *_flash_attn_backward_compiled(q, k, v, o, grad_outputs[0], lse, ctx.causal), None


def _dense_compiled(case: Case) -> Attention:
    return lambda q, k, v: _DenseCompiled.apply(q, k, v, case.causal)  # pyright: ignore[reportReturnType]


def _flashtile(backend: str | None, deterministic: bool = False) -> Callable[[Case], Attention]:
    def build(case: Case) -> Attention:
        from flashtile import mask
        from flashtile.attention import flash_attention

        attention: Any = flash_attention
        options: dict[str, Any] = {"backend": backend, "deterministic": deterministic}
        if case.window:
            options["mask"] = mask.window(case.window - 1, 0)
        else:
            options["is_causal"] = case.causal
        return lambda q, k, v: attention(q, k, v, **options)

    return build


def _sdpa(case: Case) -> Attention:
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.group > 1}
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _fa3(case: Case) -> Attention:
    import fa3_fwd_interface  # pyright: ignore[reportMissingImports]

    window = (case.window - 1, 0) if case.window else (-1, -1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = fa3_fwd_interface.flash_attn_func(q, k, v, causal=case.causal, window_size=window)
        return o[0] if isinstance(o, tuple) else o

    return attention


def _flex(case: Case) -> Attention:
    """FlexAttention, compiled for this very shape; ``fullgraph`` makes a failed compilation an error."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    block_mask = None

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal block_mask
        if case.causal and block_mask is None:
            device = str(q.device)
            block_mask = create_block_mask(_flex_mask(case.window), None, None, case.seqlen, case.seqlen, device=device)
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=case.group > 1)

    return attention


def _flex_mask(window: int) -> Callable[..., torch.Tensor]:
    def causal(b, h, q_idx, k_idx):
        return q_idx >= k_idx

    def windowed(b, h, q_idx, k_idx):
        return (q_idx >= k_idx) & (q_idx - k_idx < window)

    return windowed if window else causal


@contextlib.contextmanager
def _flex_fused_only():
    """Turn FlexAttention's warning that it runs unfused, with the whole score matrix, into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*flex_attention called without torch.compile.*")
        yield


def _backend(backend: SDPBackend) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: sdpa_kernel([backend])


def _deterministic(backend: SDPBackend) -> dict[str, Any]:
    @contextlib.contextmanager
    def context():
        with sdpa_kernel([backend]), deterministic_algorithms():
            yield

    return {"context": context}


@contextlib.contextmanager
def deterministic_algorithms():
    """Turn on PyTorch's deterministic mode without its filling of fresh memory, which would be timed too."""
    memory: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fill


_HALF = ("fp16", "bf16")
_GPU = ("cuda",)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("flashtile", "flashtile", _flashtile(None), head_dim_max=256,
                 deterministic={"build": _flashtile(None, deterministic=True)}),
        Provider("flashtile_triton", "flashtile, portable", _flashtile("triton"), devices=_GPU, head_dim_max=256,
                 deterministic={"build": _flashtile("triton", deterministic=True)}),
        Provider("fa2", "FlashAttention-2 (torch)", _sdpa, devices=_GPU, dtypes=_HALF, head_dim_max=256, windows=False,
                 context=_backend(SDPBackend.FLASH_ATTENTION),
                 deterministic=_deterministic(SDPBackend.FLASH_ATTENTION)),
        Provider("cudnn", "cuDNN (torch)", _sdpa, devices=_GPU, dtypes=_HALF, head_dim_multiple=8, windows=False,
                 context=_backend(SDPBackend.CUDNN_ATTENTION),
                 deterministic=_deterministic(SDPBackend.CUDNN_ATTENTION)),
        Provider("fa3", "FlashAttention-3 (fa3-fwd)", _fa3, layout="bshd", devices=_GPU, dtypes=_HALF, backward=False,
                 head_dim_multiple=8, head_dim_max=256, capability_min=(9, 0), requires=("fa3_fwd_interface",)),
        Provider("flex", "FlexAttention (torch.compile)", _flex, devices=_GPU, dtypes=(*_HALF, "fp32"), compiled=True,
                 context=_flex_fused_only),
        Provider("efficient", "memory-efficient (torch)", _sdpa, devices=_GPU, dtypes=(*_HALF, "fp32"), windows=False,
                 grouped_heads=False, context=_backend(SDPBackend.EFFICIENT_ATTENTION)),
        Provider("sdpa", "torch SDPA, its own choice", _sdpa, windows=False),
        Provider("naive", "plain PyTorch", _naive, matrices=3, grouped_heads=False),
        Provider("naive_compiled", "plain PyTorch, compiled", _naive_compiled, matrices=3, compiled=True,
                 grouped_heads=False),
        Provider("dense_compiled", "dense reference, compiled", _dense_compiled, matrices=6, compiled=True,
                 grouped_heads=False, windows=False),
        Provider("mock", "the readable reference", _mock, longest=_LONGEST_MOCK, windows=False),
    )
}  # fmt: skip

OURS = ("flashtile", "flashtile_triton", "mock", "dense_compiled")


def select(names: tuple[str, ...]) -> list[Provider]:
    """Return the providers of these names; raises ValueError for an unknown one."""
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"unknown provider {', '.join(unknown)}; known: {', '.join(PROVIDERS)}")
    return [PROVIDERS[name] for name in names]
