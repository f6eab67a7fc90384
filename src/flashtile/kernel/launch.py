"""Launch configurations: the only place with tile numbers.

The numbers live in ``launch_table.json``, one row per architecture, kernel, largest head_dim served and bits per
element, with a note of where they come from: a measurement (device and date, written by ``bench_mark/tune_launch.py``)
or the compiler's report of registers and shared memory. Nothing is tuned at run time.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

KERNELS = ("forward", "backward_dq", "backward_dkdv")  # of a training step; the table has rows of others after these
# Kernels with options that take registers, and the rows that serve where they have none of their own.
OTHERWISE = {"forward_dropout": "forward"}

# Architectures that share the table rows of another one: the same shared-memory limit and matrix instructions.
SAME_ROWS = {
    "sm_87": "sm_80",
    "sm_89": "sm_86",
    "sm_101": "sm_100",
    "sm_103": "sm_100",
    "sm_120": "sm_86",
    "sm_121": "sm_86",
    "gfx90a": "gfx942",
    "gfx950": "gfx942",
}


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes and launch options of one kernel: block_m query rows by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    source: str = "given by the caller"

    def options(self) -> dict[str, int]:
        """Return the options that Triton's launcher takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class HopperConfig:
    """Numbers of one warp-specialised kernel (``kernel/hopper``): tiles, warp roles, ring of buffers, registers.

    ``consumers`` warpgroups compute; the warps that only move data keep ``registers_producer`` registers a thread.
    ``schedule`` is how tiles are dealt to programs: "grid" (one each), "static" (persistent programs, fixed order) or
    "queue" (persistent programs, the next tile when one is done).
    """

    block_m: int
    block_n: int
    consumers: int
    stages: int
    registers_consumer: int
    registers_producer: int
    schedule: str = "grid"
    source: str = "given by the caller"
    num_warps: int = 4  # of the first consumer; the other roles are added to it

    def options(self) -> dict[str, int]:
        """Return the options that Triton's launcher takes."""
        return {"num_warps": self.num_warps}


@functools.cache
def table() -> dict[tuple[str, str, int], list[tuple[int, LaunchConfig | HopperConfig]]]:
    """Return the launch table: (arch, kernel, bits) to (largest head_dim, config) pairs in rising order."""
    rows = json.loads(resources.files("flashtile.kernel").joinpath("launch_table.json").read_text())
    result: dict[tuple[str, str, int], list[tuple[int, LaunchConfig | HopperConfig]]] = {}
    for row in rows:
        kind = HopperConfig if "consumers" in row else LaunchConfig
        config = kind(**{key: value for key, value in row.items() if key not in ("arch", "kernel", "head_dim", "bits")})
        result.setdefault((row["arch"], row["kernel"], row["bits"]), []).append((row["head_dim"], config))
    for entries in result.values():
        entries.sort(key=lambda entry: entry[0])
    return result


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the architecture's name: ``sm_90`` for CUDA, ``gfx942`` for ROCm, ``interpreter`` for CPU tensors."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def lookup(kernel: str, arch: str, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> LaunchConfig:
    """Return the configuration of a portable kernel (one of KERNELS) for the larger of the two head dimensions.

    Raises NotImplementedError for an architecture or head dimension without a row.
    """
    return _find(kernel, arch, head_dim, head_dim_v, dtype)


def lookup_hopper(kernel: str, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> HopperConfig:
    """Return the configuration of ``hopper_forward`` or ``hopper_backward`` for the larger of the two head dimensions.

    Raises NotImplementedError for a head dimension without a row.
    """
    return _find(kernel, "sm_90", head_dim, head_dim_v, dtype)


@functools.cache
def _find(kernel: str, arch: str, head_dim: int, head_dim_v: int, dtype: torch.dtype) -> Any:
    rows_of = SAME_ROWS.get(arch, arch)
    entries = table().get((rows_of, kernel, dtype.itemsize * 8))
    widest = max(head_dim, head_dim_v)
    if kernel in OTHERWISE and (entries is None or widest > entries[-1][0]):
        return _find(OTHERWISE[kernel], arch, head_dim, head_dim_v, dtype)
    if entries is None:
        known = ", ".join(sorted({key[0] for key in table()} | set(SAME_ROWS)))
        raise NotImplementedError(f"no launch configuration for {kernel} on {arch} in {dtype}; known: {known}")
    for largest, config in entries:
        if widest <= largest:
            return config
    raise NotImplementedError(f"head_dim {widest} is above {entries[-1][0]}, the largest for {kernel} on {arch}")


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Return whether the GPU feeds its matrix units from the bulk tensor copy engine: compute capability 9.0 to 11.x.

    12.x has the engine too, but its products read registers, and loads by address spill less there.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return 9 <= torch.cuda.get_device_capability(device)[0] <= 11


@functools.cache
def has_rough_tanh(device: torch.device) -> bool:
    """Return whether the GPU has the instruction ``tanh.approx`` (NVIDIA, compute capability 7.5 and later)."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (7, 5)
    )


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make ``device`` the current one for a launch, at no cost when it is already (or is no GPU)."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
