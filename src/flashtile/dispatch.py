"""Which backend serves a request, with which launch configurations, and why not another one."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.kernel import backend as backends
from flashtile.kernel import check, check_features, hopper, launch
from flashtile.kernel.layout import as_4d, copied_in_blocks

_GPU_TYPES = ("cuda", "xpu")  # ROCm devices are called "cuda" too
# The kernels of each backend's passes, as the launch table calls them.
FORWARD = {"triton": ("forward",), "hopper": ("hopper_forward",)}
BACKWARD = {"triton": ("backward_dq", "backward_dkdv"), "hopper": ("hopper_backward",)}


class Problem(NamedTuple):
    """All that decides which kernel serves a request; a tuple, because it is built and hashed on every eager call."""

    device_type: str
    arch: str
    dtype: torch.dtype
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    is_causal: bool
    asks: tuple[str, ...] = ()  # what not every backend has: see hopper.UNSERVED
    copied_in_blocks: bool = True  # whether the copy engine of sm_90 can read q, k and v where they lie
    options: str = ""  # mask, score and the rest in words: every backend serves them all

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, asks: tuple[str, ...] = ()) -> Problem:
        """Read the problem off checked 4-D tensors."""
        batch, heads_q, seqlen_q, head_dim = q.shape
        _, heads_kv, seqlen_k, head_dim_v = v.shape
        device_type, arch = _device(q.device)
        in_blocks = arch != "sm_90" or (copied_in_blocks(q) and copied_in_blocks(k) and copied_in_blocks(v))
        return cls(
            device_type, arch, q.dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, is_causal,
            asks, in_blocks,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"q ({self.batch}, {self.heads_q}, {self.seqlen_q}, {self.head_dim}), "
            f"k ({self.batch}, {self.heads_kv}, {self.seqlen_k}, {self.head_dim}), "
            f"v ({self.batch}, {self.heads_kv}, {self.seqlen_k}, {self.head_dim_v}), "
            f"{str(self.dtype).removeprefix('torch.')} on {self.arch}, "
            f"{self.options or ('causal' if self.is_causal else 'every query sees every key')}"
        )


@dataclass(frozen=True)
class Plan:
    """The answer: which backend, why, its launch configurations, and why each other backend was not chosen.

    ``backward`` is the backend of the backward pass where it is another one, and ``reason_backward`` says why.
    """

    backend: str
    reason: str
    launch: Mapping[str, launch.LaunchConfig | launch.HopperConfig] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    backward: str = ""
    reason_backward: str = ""


@functools.cache
def _device(device: torch.device) -> tuple[str, str]:
    return device.type, "cpu" if device.type == "cpu" else launch.arch_of(device)


def interpreting() -> bool:
    """Return whether Triton's kernels run in its interpreter (``TRITON_INTERPRET=1``), and so on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Return whether the package triton is installed, without importing it."""
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def _interpreter_knows_bfloat16() -> bool:
    """Return whether Triton's interpreter multiplies bfloat16 as numbers: 1.5 * 1.5, as elements and as matrices.

    Triton 3.6 does not; the tests repair it, and are to be served.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    operand = handle(np.array([[0x3FC0]], dtype=np.uint16), tl.bfloat16)
    product = builder.create_fmul(operand, operand).data.item()
    matrix = builder.create_dot(operand, operand, handle(np.zeros((1, 1), dtype=np.float32), tl.float32), None, 0)
    return product == 0x4010 and matrix.data.item() == 2.25


def _refusal(name: str, problem: Problem) -> tuple[type[Exception], str] | None:
    """Return why backend ``name`` cannot serve ``problem``, as an error's type and text, or None if it can."""
    on = problem.device_type
    if name == "cpu":
        return None if on == "cpu" else (ValueError, f"serves CPU tensors only; these lie on {on}")
    if name == "hopper" and on != "cuda":
        return ValueError, f"serves CUDA tensors, not those on {on}"
    if on not in _GPU_TYPES and on != "cpu":
        return ValueError, f"serves tensors on {' or '.join(_GPU_TYPES)}, not on {on}"
    if problem.dtype is torch.float64:
        return TypeError, "computes in float32 at most, not in float64 (the CPU and FlashAttentionMock do)"
    if on == "cpu" and not interpreting():
        return ValueError, (
            "serves GPU tensors; for CPU tensors set TRITON_INTERPRET=1 in the environment (slow, for tests)"
        )
    if not has_triton():
        return ModuleNotFoundError, "needs the package triton, which is not installed (pip install triton)"
    if on == "cpu" and problem.dtype is torch.bfloat16 and not _interpreter_knows_bfloat16():
        return TypeError, (
            "serves float32 and float16 in Triton's interpreter (TRITON_INTERPRET=1), not bfloat16, whose bits this "
            "version of it multiplies as integers"
        )
    if name == "hopper" and (refusal := hopper.refusal(problem, "forward")):
        return ValueError, refusal
    return None


@functools.lru_cache(maxsize=4096)
def select(problem: Problem, backend: str | None = None) -> Plan:
    """Return the plan for ``problem``: the backend asked for, or else the fastest that can serve it.

    GPU tensors are served by kernels in Triton, on sm_90 where they can by kernels in its Gluon ("hopper"); CPU tensors
    by PyTorch, or by Triton's interpreter when TRITON_INTERPRET=1.

    Raises ValueError, TypeError or ModuleNotFoundError that says what is missing, if none (or the one asked for) can.
    """
    if backend is not None and backend not in backends.NAMES:
        raise ValueError(f"backend is {backend!r}, but wants None or one of {', '.join(map(repr, backends.NAMES))}")
    refusals = {name: _refusal(name, problem) for name in backends.NAMES}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if backend is not None and (refusal := refusals[backend]):
        raise refusal[0](f"backend {backend!r} {refusal[1]}; asked for {problem}")
    if not able:
        reasons = "; ".join(f"backend {name!r} {refusal[1]}" for name, refusal in refusals.items() if refusal)
        error = next(refusals[name][0] for name in ("triton", "cpu") if refusals[name])  # pyright: ignore  # the widest
        raise error(f"no backend serves {problem}: {reasons}")
    chosen = backend or able[0]  # NAMES lists the fastest first
    reason = "asked for" if backend else _why(chosen, problem)
    preferred = f"{chosen!r} was {'asked for' if backend else 'preferred'}"
    rejected = {
        name: refusal[1] if refusal else f"could serve this too, but {preferred}"
        for name, refusal in refusals.items()
        if name != chosen
    }
    backward, reason_backward = chosen, ""
    if chosen == "hopper" and (refusal := hopper.refusal(problem, "backward")):
        backward, reason_backward = "triton", f"hopper {refusal}"
    launches = _launches(chosen, problem, FORWARD) | _launches(backward, problem, BACKWARD)
    return Plan(chosen, reason, launches, rejected, backward, reason_backward)


def _why(name: str, problem: Problem) -> str:
    if name == "cpu":
        return "CPU tensors"
    if problem.device_type == "cpu":
        return "TRITON_INTERPRET=1, so the GPU's kernels run on CPU tensors"
    return "tensors on a GPU of compute capability 9.0" if name == "hopper" else "GPU tensors"


def _launches(name: str, problem: Problem, kernels: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    if name == "cpu" or (kernels is BACKWARD and _only_forward(problem)):
        return {}
    sizes = problem.head_dim, problem.head_dim_v, problem.dtype
    if name == "hopper":
        return {kernel: launch.lookup_hopper(kernel, *sizes) for kernel in kernels[name]}
    arch = "interpreter" if problem.device_type == "cpu" else problem.arch
    return {kernel: launch.lookup(kernel, arch, *sizes) for kernel in kernels[name]}


def _only_forward(problem: Problem) -> bool:
    return max(problem.head_dim, problem.head_dim_v) > check.MAX_HEAD_DIM


def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    is_causal: bool = False,
    mask: Any = None,
    score: Any = None,
    softmax_scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    deterministic: bool = False,
    differentiable_twice: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
) -> str:
    """Return a text that says which backend serves this request and why, with its launch configurations.

    Takes the tensors and options of ``flash_attention``, or a ``Problem`` (of a GPU that this machine need not have).
    """
    if not isinstance(q, Problem):
        check.attention_inputs(q, k, v, any_gradient=differentiable_twice)
        check.options(is_causal, softmax_scale)
        check_features.kinds(mask, score, sinks)
        check_features.dropout_options(dropout_p, generator, q.device)
        check_features.switches(deterministic=deterministic, differentiable_twice=differentiable_twice,
                                return_lse=return_lse, return_max_logits=return_max_logits)  # fmt: skip
        q = Problem.of(as_4d(q), as_4d(_tensor(k)), as_4d(_tensor(v)), is_causal)
        asks = {"dropout": dropout_p, "max_logits": return_max_logits, hopper.DETERMINISTIC: deterministic}
        q = q._replace(
            options=_in_words(is_causal, mask, score, sinks, dropout_p),
            asks=tuple(name for name, asked in asks.items() if asked),
        )
    lines = [f"request       {q}"]
    if differentiable_twice:
        if backend is not None:
            return "\n".join(
                [*lines, f"not served    backend is {backend!r}, but wants None with differentiable_twice"]
            )
        return "\n".join([*lines, "served by     plain PyTorch operations: differentiable_twice=True"])
    try:
        plan = select(q, backend)
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        return "\n".join([*lines, f"not served    {error}"])
    lines.append(f"served by     {plan.backend}: {plan.reason}")
    if _only_forward(q):
        lines.append(f"backward by   none: head_dim {max(q.head_dim, q.head_dim_v)} is above {check.MAX_HEAD_DIM}, the "
                     f"largest with gradients")  # fmt: skip
    elif plan.backward != plan.backend:
        lines.append(f"backward by   {plan.backward}: {plan.reason_backward}")
    lines += [f"{kernel.removeprefix('hopper_'):<13} {_describe(config)}" for kernel, config in plan.launch.items()]
    lines += [f"not chosen    {name}: {why}" for name, why in plan.rejected.items()]
    return "\n".join(lines)


def _in_words(is_causal: bool, mask: Any, score: Any, sinks: Any, dropout_p: float) -> str:
    """Return the options beside is_causal in words; nothing if there are none."""
    seen = "" if mask is None else f"a mask of {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"mask {mask.name}"
    parts = (
        seen and (f"{seen}, causal" if is_causal else seen),
        score is not None and f"score {score.name}",
        "" if sinks is None else "sinks",
        f"dropout {dropout_p}" if dropout_p else "",
    )
    words = ", ".join(part for part in parts if part)
    return words if seen or not words else f"{'causal' if is_causal else 'every query sees every key'}, {words}"


def _tensor(t: Any) -> Tensor:
    return t


def _describe(config: launch.LaunchConfig | launch.HopperConfig) -> str:
    tile = f"{config.block_m} queries x {config.block_n} keys"
    if isinstance(config, launch.HopperConfig):
        return f"{tile}, {config.consumers} consumer warpgroups, {config.stages} stages ({config.source})"
    return f"{tile}, {config.num_warps} warps, {config.num_stages} stages ({config.source})"
