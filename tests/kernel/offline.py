"""Compile a kernel for a GPU that is not there, and read what the compiler says of it.

As a program, a list of jobs in JSON on stdin to a list of results in JSON on stdout: ``compile_all`` starts it, because
a process that has Triton's interpreter switched on cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, find_paths_if

from flashtile import mask
from flashtile.kernel import launch, launcher
from flashtile.kernel.flash_attention_backward import backward_dkdv_kernel, backward_dq_kernel
from flashtile.kernel.flash_attention_triton import forward_kernel
from flashtile.score import Score

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Bytes of shared memory that one program may use, and columns of tensor memory (sm_100: the accumulators live there).
SHARED_LIMIT = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
TENSOR_MEMORY_LIMIT = 512
DTYPES = {name: dtype for dtype, name in TYPES.items()}
MASKS = {"full": mask.full, "causal": mask.causal}
KERNELS = {"forward": forward_kernel, "backward_dq": backward_dq_kernel, "backward_dkdv": backward_dkdv_kernel}


class Job(NamedTuple):
    """One compilation, with the launch table's configuration."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str = "bf16"
    mask: str = "causal"


class Report(NamedTuple):
    """What the compiler made of a kernel."""

    shared: int  # bytes
    tensor_memory: int  # columns
    registers: int  # per thread
    spilled: int  # bytes of memory per thread
    matrix_instructions: int  # in the code, not executed


def target_of(arch: str) -> GPUTarget:
    """Return Triton's name for ``arch``."""
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def compile_kernel(
    kernel: str,
    arch: str,
    head_dim: int,
    dtype: torch.dtype,
    mask_value: mask.Mask,
    config: launch.LaunchConfig,
    head_dim_v: int | None = None,
    score: Score | None = None,
    **features: Any,
):
    """Compile one kernel as a launch on contiguous, 16-byte aligned tensors would."""
    from flashtile.kernel.flash_attention_backward import backward
    from flashtile.kernel.flash_attention_triton import forward

    shape = (2, 2, 1024)
    q, k = (torch.empty(*shape, head_dim, dtype=dtype) for _ in range(2))
    v, do, o = (torch.empty(*shape, head_dim_v or head_dim, dtype=dtype) for _ in range(3))
    lse = torch.empty(shape)
    rules = {"softmax_scale": 0.1, "mask": mask_value, "score": score, **features}
    if kernel == "forward":
        launched = launches(arch, lambda: forward(q, k, v, config=config, **rules))
    else:
        configs = {"config_dq": config, "config_dkdv": config}
        launched = launches(arch, lambda: backward(do, q, k, v, o, lse, None, **configs, **rules))
    return compile_launch(next(one for one in launched if one.kernel is KERNELS[kernel]), arch)


class Launch(NamedTuple):
    """What a pass hands to ``launcher.run``."""

    kernel: JITFunction
    args: tuple
    constants: dict[str, Any]
    config: launch.LaunchConfig


def launches(arch: str, call: Callable[[], Any]) -> list[Launch]:
    """Return the launches that ``call`` would make on a GPU of ``arch``; its tensors may be CPU tensors."""
    recorded: list[Launch] = []
    copy_engine = arch.startswith("sm_") and int(arch[3:]) >= 90
    record = lambda kernel, programs, device, *rest: recorded.append(Launch(kernel, *rest))  # noqa: E731
    with (
        mock.patch.object(launch, "arch_of", return_value=arch),
        mock.patch.object(launcher, "has_copy_engine", return_value=copy_engine),
        mock.patch.object(launcher, "has_rough_tanh", return_value=arch.startswith("sm_")),
        mock.patch.object(launcher, "run", record),
    ):
        call()
    return recorded


def compile_launch(launched: Launch, arch: str):
    """Compile a recorded launch of a kernel in Triton or Gluon, specialised by Triton's own rules."""
    fn, args, constants, config = launched
    target = target_of(arch)
    backend = make_backend(target)
    values = [launcher._as_triton(arg) for arg in args]
    special = [
        native_specialize_impl(type(backend), value, False, not param.do_not_specialize, True)
        for param, value in zip(fn.params, values, strict=False)
    ]
    values += constants.values()
    types = [kind for kind, _ in special] + ["constexpr"] * len(constants)
    keys = [key for _, key in special] + [None] * len(constants)
    constexprs = {path: _at(values, path) for path in find_paths_if(types, lambda _, kind: kind == "constexpr")}
    attributes = find_paths_if(keys, lambda _, key: isinstance(key, str))
    attributes = {path: backend.parse_attr(_at(keys, path)) for path in attributes}
    kind = GluonASTSource if fn.is_gluon() else ASTSource
    source = kind(fn, dict(zip(fn.arg_names, types, strict=True)), constexprs, attributes)
    return triton.compile(source, target=target, options=config.options())


def _at(tree: Any, path: tuple[int, ...]) -> Any:
    for index in path:
        tree = tree[index]
    return tree


def report(compiled) -> Report:
    """Read memory, registers and tensor-core instructions of a compiled kernel.

    The spills are the memory of its own that a thread asks for: the kernels use none unless registers run out.
    """
    metadata, asm = compiled.metadata, compiled.asm
    if "amdgcn" in asm:
        registers, spilled = (
            max(int(n) for n in re.findall(rf"\.{key}:\s*(\d+)", asm["amdgcn"]))
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
        instructions = re.findall(r"\bv_mfma", asm["amdgcn"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, spilled = (max(int(n) for n in re.findall(rf"{key}:(\d+)", usage)) for key in ("REG", "STACK"))
        instructions = re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\btcgen05\.mma", asm["ptx"])
    return Report(metadata.shared, getattr(metadata, "tmem_size", None) or 0, registers, spilled, len(instructions))


def run(job: Job) -> dict[str, Any]:
    """Compile one job; return its report and seconds, or the error's text."""
    start = time.perf_counter()
    dtype = DTYPES[job.dtype]
    try:
        config = launch.lookup(job.kernel, job.arch, job.head_dim, job.head_dim, dtype)
        compiled = compile_kernel(job.kernel, job.arch, job.head_dim, dtype, MASKS[job.mask](), config)
        return report(compiled)._asdict() | {"seconds": time.perf_counter() - start}
    except Exception as error:
        return {"error": f"{error!r}; from {error.__cause__!r}"}


def compile_all(
    jobs: Sequence[Any], timeout: float = 600, module: str = "tests.kernel.offline"
) -> list[dict[str, Any]]:
    """Return ``run`` of every job, computed by one process of ``module`` without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment, cwd=root,
                          timeout=timeout)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the compiling process ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps([run(Job(*job)) for job in json.load(sys.stdin)]))
