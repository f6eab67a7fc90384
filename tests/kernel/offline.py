"""Compile a kernel for a GPU that is not there, and read what the compiler says of it."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, find_paths_if

from flashtile import mask
from flashtile.kernel import launch
from flashtile.kernel.flash_attention_backward import backward_dkdv_kernel, backward_dq_kernel
from flashtile.kernel.flash_attention_triton import forward_kernel
from flashtile.kernel.tile import sizes

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# Bytes of shared memory that one program may use.
SHARED_LIMIT = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
KERNELS = {"forward": forward_kernel, "backward_dq": backward_dq_kernel, "backward_dkdv": backward_dkdv_kernel}


class Report(NamedTuple):
    """What the compiler made: shared bytes, registers a thread, bytes spilled, tensor-core instructions."""

    shared: int
    registers: int
    spilled: int
    matrix_instructions: int


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
    score: Any = None,
):
    """Compile one kernel as a launch on contiguous, 16-byte aligned tensors would."""
    fn: JITFunction = KERNELS[kernel]
    head_dim_v = head_dim_v or head_dim
    constants = sizes(head_dim, head_dim_v, config)
    values: dict[str, Any] = {"mask": mask_value.on_device(), "score": score, "dlse_ptr": None, "row_stride": None}
    values |= constants
    types: dict[str, Any] = {"softmax_scale": "fp32", "score": "constexpr", "dlse_ptr": "constexpr"}
    types |= dict.fromkeys(constants, "constexpr")
    types["mask"] = type(values["mask"])("constexpr", "constexpr", "constexpr", ())
    copy_engine = arch.startswith("sm_") and int(arch[3:]) >= 90
    for name, wide in (("q", head_dim), ("k", head_dim), ("v", head_dim_v), ("do", head_dim_v), ("o", head_dim_v),
                       ("dq", head_dim), ("dk", head_dim), ("dv", head_dim_v)):  # fmt: skip
        rows = config.block_n if name in ("k", "v") else config.block_m
        types[f"{name}_ptr"] = types[f"{name}_src"] = f"*{TYPES[dtype]}"
        types[f"{name}_strides"] = ("i32", "i32", "i32", "constexpr")
        if copy_engine and dtype.itemsize == 2 and f"{name}_src" in fn.arg_names and wide in (16, 32, 64, 128, 256):
            types[f"{name}_src"] = f"tensordesc<{TYPES[dtype]}[1, 1, {rows}, {wide}]>"
            types[f"{name}_strides"] = ()
    for name in ("lse", "lse_log2", "delta"):
        types[f"{name}_ptr"] = types[f"{name}_src"] = "*fp32"
        if copy_engine:
            types[f"{name}_src"] = f"tensordesc<fp32[1, {config.block_m}]>"
    if copy_engine and "lse_log2_src" in fn.arg_names:
        types["row_stride"] = "constexpr"
    signature = {name: types.get(name, "i32") for name in fn.arg_names}
    listed = list(signature.values())
    constexprs = {}
    for path in find_paths_if(listed, lambda _, value: value == "constexpr"):
        name = fn.arg_names[path[0]]
        value = values.get(name, 1)  # the strides' last entry is 1
        for index in path[1:] if name in values else ():
            value = value[index]
        constexprs[path] = value
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(fn.arg_names) if str(signature[name]).startswith("*")}
    if head_dim % 16 == 0 and head_dim_v % 16 == 0:
        attributes |= {
            (i, j): aligned
            for i, name in enumerate(fn.arg_names)
            if name.endswith("_strides") and signature[name]
            for j in range(3)
        }
    source = ASTSource(fn, signature, constexprs, attributes)
    return triton.compile(source, target=target_of(arch), options=config.options())


def report(compiled) -> Report:
    """Read registers, spills and shared memory of a compiled kernel."""
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        numbers = {
            key: max((int(n) for n in re.findall(rf"\.{key}:\s*(\d+)", text)), default=0)
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        spilled = 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"])
        return Report(shared, numbers["vgpr_count"], spilled, len(re.findall(r"v_mfma", text)))
    ptxas = triton.knobs.nvidia.ptxas.path
    arch = compiled.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        suffix = "a" if arch >= 90 else ""
        log = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{arch}{suffix}", str(ptx), "-o", str(Path(folder, "kernel.cubin"))],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    instructions = len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\btcgen05\.mma", compiled.asm["ptx"]))
    return Report(shared, registers, spills, instructions)
