"""What works on this machine: versions, devices, a self-check with numbers, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flashtile import dispatch, mask
from flashtile.attention import flash_attention
from flashtile.kernel import backend, hopper, launch
from flashtile.kernel.flash_attention_mock import dense_attention

FACTORS = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
SLACK = 1e-5
SHAPES = ((2, 4, 100, 64), (2, 2, 133, 64), (2, 2, 133, 64), (2, 4, 100, 64))  # of q, k, v and the output's gradient
FALLBACK = "triton"  # the backend of which any GPU can at least be told what it lacks
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Check:
    """One run of attention: the largest errors against fp64, and what plain PyTorch's own error allows."""

    device: str
    backend: str
    dtype: str
    is_causal: bool
    errors: dict[str, float]
    limits: dict[str, float]
    failure: str = ""
    backward: str = ""  # the backend of the backward pass where it is another one

    @property
    def where(self) -> str:
        """The backend, that of the backward pass if it is another one, and the device where no name says it."""
        names = f"{self.backend}, backward {self.backward}" if self.backward else self.backend
        return names if names == self.device else f"{names} on {self.device}"

    @property
    def share(self) -> float:
        """The worst error as a share of what is allowed; NaN where an error is."""
        shares = [error / self.limits[name] for name, error in self.errors.items()]
        return math.nan if any(map(math.isnan, shares)) else max(shares)

    @property
    def passed(self) -> bool:
        """Whether it ran and every error is within its limit; NaN is not."""
        return not self.failure and self.share <= 1


def report(console: Console) -> bool:
    """Print what works here and what to do about the rest; return whether every self-check passed."""
    facts = Table(show_header=False, box=SIMPLE)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in versions().items():
        facts.add_row(name, value)
    console.print("[bold]This machine[/]", facts)

    with console.status("checking attention against fp64"):
        checks = list(self_checks())
    console.print("[bold]Self-check[/]: largest errors of attention and its gradients against fp64", table_of(checks))
    console.print(
        "The share is that of the allowed error: twice (for gradients three times) the error of plain PyTorch in the "
        "same dtype, plus 1e-5.",
        style="dim",
    )
    for failure in dict.fromkeys(f"{check.where}: {check.failure}" for check in checks if check.failure):
        console.print("failed", failure, style="red", markup=False, highlight=False)
    for advice in advices():
        console.print("-", advice, highlight=False, markup=False)
    return all(check.passed for check in checks)


def table_of(checks: Sequence[Check]) -> Table:
    """Return a row per check; where it is narrow the first column folds, never the verdict."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("backend", overflow="fold")
    for heading in ("dtype", "causal"):
        table.add_column(heading, no_wrap=True)
    for heading in (*FACTORS, "share"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column(no_wrap=True, min_width=len("failed"))
    for check in checks:
        cells = (f"{check.errors[name]:.1e}" if check.errors else "-" for name in FACTORS)
        share = "-" if not check.errors else ">999%" if check.share > 9.99 else f"{check.share:.0%}"
        verdict = "[green]ok[/]" if check.passed else "[bold red]failed[/]" if check.failure else "[bold red]wrong[/]"
        table.add_row(check.where, check.dtype, "yes" if check.is_causal else "no", *cells, share, verdict)
    return table


def versions() -> dict[str, str]:
    """Return what the numbers depend on, by name."""
    found = {
        "flashtile": _version("flashtile"),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, {_built_for()}",
        "Triton": _version("triton") + (" (TRITON_INTERPRET=1: its interpreter)" if dispatch.interpreting() else ""),
        "NumPy": _version("numpy"),
        "CPU": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
    }
    if not torch.cuda.is_available():
        return {**found, "GPU": "none that torch can use"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        arch = launch.arch_of(torch.device("cuda", index))
        found[f"GPU {index}"] = f"{gpu.name}, {arch}, {gpu.total_memory / 2**30:.0f} GiB"
    return {**found, "driver": _driver() or "unknown (nvidia-smi did not answer)"}


def self_checks() -> Iterator[Check]:
    """Run attention forward and backward on each device, by each backend that dispatch could choose, causal and not."""
    runs = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
    if torch.cuda.is_available():
        runs += [("cuda", dtype) for dtype in NAMES]
    for device, dtype in runs:
        names = [name for name in backend.NAMES if _choosable(device, name, dtype)]
        for name in names or [FALLBACK]:  # a device that none serves is a check that fails, and says why
            for is_causal in (False, True):
                yield self_check(device, name, dtype, is_causal)


def _choosable(device: str, name: str, dtype: torch.dtype) -> bool:
    if device == "cpu" and name != "cpu" and dtype is not torch.float32:
        return False  # bfloat16 is wrong in some interpreters
    try:
        dispatch.select(_problem(device, dtype), name)
    except (ValueError, TypeError, ImportError, NotImplementedError):
        return False
    return True


def _problem(device: str, dtype: torch.dtype) -> dispatch.Problem:
    q, k, v, _ = (torch.empty(shape, dtype=dtype, device=device) for shape in SHAPES)
    return dispatch.Problem.of(q, k, v)


def self_check(device: str, name: str, dtype: torch.dtype, is_causal: bool) -> Check:
    """Compare flash_attention's output and gradients with fp64, on GQA with odd lengths."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)
    rule = mask.causal() if is_causal else mask.full()

    def dense(q, k, v):
        return dense_attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5, mask=rule)[0]

    def plain(q, k, v):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        hidden = columns > rows[:, None] + (len(columns) - len(rows)) if is_causal else columns < 0
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden.to(q.device), float("-inf"))
        return torch.softmax(s, dim=-1) @ v

    def ours(q, k, v):
        return flash_attention(q, k, v, is_causal=is_causal, backend=name)

    expected = _output_and_gradients(dense, [t.double() for t in (q, k, v, do)])
    inputs = [t.to(device) for t in (q, k, v, do)]
    ordinary = _errors(_output_and_gradients(plain, inputs), expected)
    limits = {n: FACTORS[n] * error + SLACK for n, error in ordinary.items()}
    errors: dict[str, float] = {}
    backward = failure = ""
    try:
        plan = dispatch.select(_problem(device, dtype)._replace(is_causal=is_causal), name)
        backward = plan.backward if plan.backward != plan.backend else ""
        errors = _errors(_output_and_gradients(ours, inputs), expected)
    except Exception as error:  # whatever fails here is what a doctor is asked about: a compiler, a driver, a bug
        text = (str(error).strip().splitlines() or [""])[0]
        failure = f"{type(error).__name__}: {text[:200]}"
    return Check(device, name, NAMES[dtype], is_causal, errors, limits, failure, backward)


def advices() -> Iterator[str]:
    """Say what is missing here and what to do, in whole sentences."""
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            yield (
                f"torch is {_built_for()} but finds no GPU it can use: see whether the driver answers "
                "(nvidia-smi or rocm-smi) and is new enough. Until then the CPU path serves everything."
            )
        else:
            yield (
                "No GPU is used: this torch is a CPU build. On a machine with a GPU, install a GPU build of torch "
                "(pytorch.org says how). The CPU path serves everything here."
            )
    if not dispatch.has_triton():
        yield "Triton is not installed: the GPU kernels cannot run here. On Linux: pip install triton"
    elif torch.cuda.is_available() and not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        yield "No C compiler is found; Triton needs one to launch its kernels. On Debian and Ubuntu: apt install gcc"
    if torch.cuda.is_available() and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield "Python.h is missing; Triton needs it to launch kernels. On Debian and Ubuntu: apt install python3-dev"
    if torch.cuda.is_available() and dispatch.has_triton() and launch.arch_of(torch.device("cuda")) == "sm_90":
        refused = hopper.refusal(_problem("cuda", torch.bfloat16), "forward")
        if refused:
            yield (
                f"The kernels for this Hopper GPU are not used, the portable ones are: backend 'hopper' {refused}. "
                f"{_how_to_get_triton(hopper.TRITON)}"
            )
    if dispatch.interpreting():
        yield "TRITON_INTERPRET=1 is set: kernels run in Triton's slow interpreter. Unset it for speed."


def _how_to_get_triton(series: str) -> str:
    """Say how to get a Triton of this series: by pip, unless the installed torch is tied to another one."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    tied = next((found[1] for found in (re.match(r"triton *== *([\d.]+)", line) for line in wanted) if found), "")
    if tied and not f"{tied}.".startswith(f"{series}."):
        return f"To use them, install a torch that wants Triton {series}; this one wants {tied}."
    return f"To use them: pip install triton=={tied or f'{series}.0'}"


def _output_and_gradients(attention, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    *leaves, do = inputs
    leaves = [t.detach().requires_grad_() for t in leaves]
    o = attention(*leaves)
    with warnings.catch_warnings():  # torch warns when its own thread of the backward pass meets the GPU first
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        gradients = torch.autograd.grad(o, leaves, do)
    return dict(zip(FACTORS, (o.detach(), *gradients), strict=True))


def _errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: (got[name].double().cpu() - expected[name]).abs().max().item() for name in FACTORS}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "installed" if importlib.util.find_spec(package) else "not installed"


def _built_for() -> str:
    if torch.version.hip:
        return f"built for ROCm {torch.version.hip}"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
