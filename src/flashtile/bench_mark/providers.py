"""The implementations that are measured against each other, each with what it supports.

A provider turns a :class:`Case` into a function ``(q, k, v) -> o`` on ``(batch, heads, seqlen, head_dim)`` tensors (or
on ``(batch, seqlen, heads, head_dim)`` where its layout says so; the inputs are then laid out before the clock starts).
What a provider cannot do is said by :meth:`Provider.unsupported` and becomes a row of the table, never a gap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile.bench_mark.measure import Case, Timed

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_LONGEST_MOCK = 2048  # the reference walks over tiles in Python; beyond this one call takes seconds


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
    """Random normal q, k, v and the output's gradient, all ``(batch, heads, seqlen, head_dim)``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int = 0) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        make = lambda: torch.randn(case.shape, generator=generator, device=device, dtype=case.torch_dtype)  # noqa: E731
        return cls(make(), make(), make(), make())


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
        """Return what the clock calls; for "backward" this runs the forward pass once."""
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


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention as the formula says it, with the whole score matrix: ``softmax(q k^T / sqrt(d)) v``."""
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, float("-inf"))
    return torch.softmax(s, dim=-1) @ v


def fresh_compiler() -> None:
    """Forget every compiled graph, so that no shape inherits another one's, or its recompilation count."""
    torch._dynamo.reset()
    # A compiled backward pass is called many times on one graph here; donated buffers forbid that.
    functorch_config.donated_buffer = False


def _naive(case: Case) -> Attention:
    return lambda q, k, v: naive_attention(q, k, v, case.causal)


def _naive_compiled(case: Case) -> Attention:
    compiled = torch.compile(naive_attention, dynamic=False, fullgraph=True)
    return lambda q, k, v: compiled(q, k, v, case.causal)


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


def _flashtile(backend: str | None) -> Callable[[Case], Attention]:
    def build(case: Case) -> Attention:
        from flashtile.attention import flash_attention

        attention: Any = flash_attention
        return lambda q, k, v: attention(q, k, v, is_causal=case.causal, backend=backend)

    return build


def _sdpa(case: Case) -> Attention:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)


def _fa3(case: Case) -> Attention:
    import fa3_fwd_interface  # pyright: ignore[reportMissingImports]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = fa3_fwd_interface.flash_attn_func(q, k, v, causal=case.causal)
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
            block_mask = create_block_mask(_flex_causal, None, None, case.seqlen, case.seqlen, device=device)
        return compiled(q, k, v, block_mask=block_mask)

    return attention


def _flex_causal(b, h, q_idx, k_idx):
    return q_idx >= k_idx


@contextlib.contextmanager
def _flex_fused_only():
    """Turn FlexAttention's warning that it runs unfused, with the whole score matrix, into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*flex_attention called without torch.compile.*")
        yield


def _backend(backend: SDPBackend) -> Callable[[], contextlib.AbstractContextManager]:
    return lambda: sdpa_kernel([backend])


_HALF = ("fp16", "bf16")
_GPU = ("cuda",)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("flashtile", "flashtile", _flashtile(None), head_dim_max=256),
        Provider("flashtile_triton", "flashtile, portable", _flashtile("triton"), devices=_GPU, head_dim_max=256),
        Provider("flashtile_hopper", "flashtile, Hopper", _flashtile("hopper"), devices=_GPU, dtypes=_HALF,
                 head_dim_max=256, head_dim_multiple=8, capability_min=(9, 0)),
        Provider("fa2", "FlashAttention-2 (torch)", _sdpa, devices=_GPU, dtypes=_HALF, head_dim_max=256,
                 context=_backend(SDPBackend.FLASH_ATTENTION)),
        Provider("cudnn", "cuDNN (torch)", _sdpa, devices=_GPU, dtypes=_HALF, head_dim_multiple=8,
                 context=_backend(SDPBackend.CUDNN_ATTENTION)),
        Provider("fa3", "FlashAttention-3 (fa3-fwd)", _fa3, layout="bshd", devices=_GPU, dtypes=_HALF, backward=False,
                 head_dim_multiple=8, head_dim_max=256, capability_min=(9, 0), requires=("fa3_fwd_interface",)),
        Provider("flex", "FlexAttention (torch.compile)", _flex, devices=_GPU, dtypes=(*_HALF, "fp32"), compiled=True,
                 context=_flex_fused_only),
        Provider("efficient", "memory-efficient (torch)", _sdpa, devices=_GPU, dtypes=(*_HALF, "fp32"),
                 context=_backend(SDPBackend.EFFICIENT_ATTENTION)),
        Provider("sdpa", "torch SDPA, its own choice", _sdpa),
        Provider("naive", "plain PyTorch", _naive, matrices=3),
        Provider("naive_compiled", "plain PyTorch, compiled", _naive_compiled, matrices=3, compiled=True),
        Provider("dense_compiled", "dense reference, compiled", _dense_compiled, matrices=6, compiled=True),
        Provider("mock", "the readable reference", _mock, longest=_LONGEST_MOCK),
    )
}  # fmt: skip

OURS = ("flashtile", "flashtile_triton", "flashtile_hopper", "mock", "dense_compiled")


def select(names: tuple[str, ...]) -> list[Provider]:
    """Return the providers of these names; raises ValueError for an unknown one."""
    unknown = [name for name in names if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"unknown provider {', '.join(unknown)}; known: {', '.join(PROVIDERS)}")
    return [PROVIDERS[name] for name in names]
