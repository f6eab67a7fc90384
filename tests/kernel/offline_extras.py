"""Compile the tangent and statistics kernels for a GPU that is not there: what ``offline.py`` does for the passes.

As a program, a list of jobs in JSON on stdin to a list of reports in JSON on stdout; ``compile_all`` starts it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import find_paths_if

from flashtile.kernel import flash_attention_jvp, flash_attention_statistics, launch
from flashtile.kernel.tile import sizes
from tests.kernel.offline import DTYPES, MASKS, report, target_of


class Job(NamedTuple):
    """One compilation: a kernel with its own launch configuration, or with the numbers of ``config``."""

    kernel: str
    arch: str
    head_dim: int
    dtype: str = "bf16"
    mask: str = "causal"
    top_k: int = 0
    config: tuple[int, int, int, int] | None = None


def config_of(job: Job) -> launch.LaunchConfig:
    """Return the launch configuration that the host function would take."""
    if job.config:
        return launch.LaunchConfig(*job.config)
    dtype = DTYPES[job.dtype]
    if job.kernel == "jvp":
        return launch.lookup("jvp", job.arch, job.head_dim, job.head_dim, dtype)
    return flash_attention_statistics.launch_config(job.kernel, job.arch, job.head_dim, dtype)


def compile_job(job: Job) -> Any:
    """Compile as a launch on contiguous, 16-byte aligned tensors with every optional one given would."""
    config = config_of(job)
    if job.kernel == "jvp":
        fn, constants = flash_attention_jvp.jvp_kernel, sizes(job.head_dim, job.head_dim, config)
    else:
        fn = flash_attention_statistics.KERNELS[job.kernel]
        constants = flash_attention_statistics.constants(job.kernel, job.head_dim, config, job.top_k)
    absent = ("score", "packed", "dropout", "tiles")
    values: dict[str, Any] = {
        "mask": MASKS[job.mask]().on_device(),
        **dict.fromkeys((*absent, "row_stride")),
        **constants,
    }
    copy_engine = job.arch.startswith("sm_") and int(job.arch[3:]) >= 90
    pointers = {"o": f"*{job.dtype}", "to": f"*{job.dtype}", "row_index": "*i64", "top_index": "*i64"}
    signature: dict[str, Any] = {}
    for name in fn.arg_names:
        stem, _, kind = name.rpartition("_")
        rows = config.block_n if stem in ("k", "v", "tk", "tv") else config.block_m
        described = copy_engine and job.dtype != "fp32" and job.head_dim in (16, 32, 64, 128, 256)
        if name == "mask":
            functions = dict.fromkeys(("predicate", "key_range", "query_range"), "constexpr")
            signature[name] = values["mask"]._replace(args=(), **functions)
        elif name in constants or name in absent or (name == "row_stride" and copy_engine):
            signature[name] = "constexpr"
        elif name == "softmax_scale":
            signature[name] = "fp32"
        elif kind == "src" and stem in ("lse_log2", "weights"):
            signature[name] = f"tensordesc<fp32[1, {config.block_m}]>" if copy_engine else "*fp32"
        elif kind == "src":
            signature[name] = f"tensordesc<{job.dtype}[1, 1, {rows}, {job.head_dim}]>" if described else f"*{job.dtype}"
        elif kind == "strides":
            signature[name] = () if described and f"{stem}_src" in fn.arg_names else ("i32", "i32", "i32", "constexpr")
        elif kind == "ptr":
            signature[name] = pointers.get(stem, "*fp32")
        else:
            signature[name] = "i32"
    constexprs = {}
    for path in find_paths_if(list(signature.values()), lambda _, value: value == "constexpr"):
        name = fn.arg_names[path[0]]
        value = values.get(name, 1)  # the strides' last entry is 1
        for index in path[1:] if name in values else ():
            value = value[index]
        constexprs[path] = value
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(fn.arg_names) if str(signature[name]).startswith("*")}
    if job.head_dim % 16 == 0:
        attributes |= {
            (i, j): aligned
            for i, name in enumerate(fn.arg_names)
            if name.endswith("_strides") and signature[name]
            for j in range(3)
        }
    source = ASTSource(fn, signature, constexprs, attributes)
    return triton.compile(source, target=target_of(job.arch), options=config.options())


def run(job: Job) -> dict[str, Any]:
    """Compile one job; return its report, or the error's text."""
    try:
        return report(compile_job(job))._asdict()
    except Exception as error:
        return {"error": f"{error!r}; from {error.__cause__!r}"}


def compile_all(jobs: list[Job], timeout: float = 600) -> list[dict[str, Any]]:
    """Return ``run`` of every job, computed by one process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.offline_extras"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment, cwd=root,
                          timeout=timeout)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the compiling process ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps([run(Job(*job)) for job in json.load(sys.stdin)]))
