"""The kernels of every GPU, compiled without it: they fit, use the tensor cores and spill no register but as listed.

The default run compiles, per architecture, kernel and width, a row of the launch table, and every measured row. The
sweep over the whole table takes many minutes and runs when asked for: ``pytest -m slow tests/kernel/test_offline.py``.
"""

from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from flashtile.kernel import launch
from tests.kernel.offline import SHARED_LIMIT, TENSOR_MEMORY_LIMIT, Job, compile_all

ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
BITS = {"bf16": 16, "fp16": 16, "fp32": 32}
REPRESENTATIVE = (
    ("forward", 40, "bf16", "causal"),
    ("forward", 128, "fp16", "full"),
    ("forward", 64, "fp32", "causal"),
    ("backward_dq", 96, "bf16", "full"),
    ("backward_dq", 256, "fp16", "causal"),
    ("backward_dq", 128, "fp32", "full"),
    ("backward_dkdv", 64, "bf16", "causal"),
    ("backward_dkdv", 128, "fp16", "full"),
    ("backward_dkdv", 256, "fp32", "causal"),
)


class Spill(NamedTuple):
    """Bytes of memory per thread that a kernel may use for want of registers, and why."""

    bound: int
    reason: str


MEASURED = "measured fastest in spite of it"
# By architecture, kernel, bits and largest head_dim of the row. The bounds leave room for another compiler.
ALLOWED_SPILLS = {
    ("sm_80", "backward_dq", 16, 192): Spill(32, "two more registers; smaller tiles read K and V twice as often"),
    ("sm_86", "backward_dq", 16, 64): Spill(32, "as above"),
    ("sm_86", "backward_dq", 16, 128): Spill(32, "as above"),
    ("sm_86", "backward_dq", 16, 192): Spill(32, "as above"),
    ("sm_90", "forward", 16, 160): Spill(256, MEASURED),
    ("sm_90", "forward", 16, 256): Spill(256, MEASURED),
    ("sm_90", "backward_dq", 16, 256): Spill(256, MEASURED),
    ("sm_90", "backward_dkdv", 16, 64): Spill(512, MEASURED),
    ("sm_90", "backward_dkdv", 16, 96): Spill(256, MEASURED),
    ("sm_90", "backward_dkdv", 16, 128): Spill(256, MEASURED),
    ("sm_90", "backward_dkdv", 16, 160): Spill(768, MEASURED),
    ("sm_90", "backward_dkdv", 16, 192): Spill(768, MEASURED),
    ("sm_90", "backward_dkdv", 16, 256): Spill(256, MEASURED),
    ("sm_100", "forward", 16, 96): Spill(32, "as above"),
    ("sm_100", "backward_dkdv", 16, 48): Spill(32, "as above"),
    ("sm_100", "backward_dkdv", 16, 64): Spill(64, "ten registers given up for a second block per multiprocessor"),
    ("sm_100", "backward_dkdv", 16, 256): Spill(128, "dK and dV of more than 32 keys would overflow tensor memory"),
    ("gfx942", "backward_dkdv", 32, 256): Spill(128, "dK and dV of 16 keys, the fewest, and their operands"),
}
UNALIGNED = Spill(6000, "rows whose stride is no multiple of 16 elements are fetched one by one, through registers")
BORROWED = Spill(6000, "rows chosen for a sibling; they have to fit and to use the tensor cores")
IEEE = Spill(64, "unrolled multiply-adds: the compiler gives up a few registers for a second block per multiprocessor")


def row_of(job: Job) -> tuple[str, str, int, int]:
    """Return architecture, kernel, bits and largest head_dim of the launch table's row for ``job``."""
    arch, bits = launch.SAME_ROWS.get(job.arch, job.arch), BITS[job.dtype]
    return arch, job.kernel, bits, min(d for d, _ in launch.table()[arch, job.kernel, bits] if d >= job.head_dim)


def allowed_spill(job: Job) -> int:
    """Return how many bytes per thread ``job`` may spill."""
    if job.head_dim % 16:
        return UNALIGNED.bound
    if job.arch in launch.SAME_ROWS:
        return BORROWED.bound
    default = IEEE.bound if job.dtype == "fp32" and job.arch.startswith("sm_") else 0
    listed = ALLOWED_SPILLS.get(row_of(job))
    return listed.bound if listed else default


def complaints(jobs: list[Job]) -> list[str]:
    """Compile ``jobs``; return a line for each thing that is not as it should be."""
    lines = []
    for job, result in zip(jobs, compile_all(jobs, timeout=2 + 60 * len(jobs)), strict=True):
        limit = SHARED_LIMIT[launch.SAME_ROWS.get(job.arch, job.arch)]
        if "error" in result:
            lines.append(f"{job}: {result['error']}")
            continue
        if result["shared"] > limit:
            lines.append(f"{job}: {result['shared']} bytes of shared memory, the limit is {limit}")
        if result["tensor_memory"] > TENSOR_MEMORY_LIMIT:
            lines.append(f"{job}: {result['tensor_memory']} columns of tensor memory, the limit is 512")
        if result["spilled"] > allowed_spill(job):
            lines.append(f"{job}: spills {result['spilled']} bytes per thread, allowed are {allowed_spill(job)}")
        if BITS[job.dtype] == 16 and result["matrix_instructions"] == 0:
            lines.append(f"{job}: no tensor-core instruction")
    return lines


@pytest.mark.parametrize("arch", ARCHS)
def test_representative_rows(arch):
    """Full and causal masks; bf16, fp16 and fp32; head dimensions of one and two chunks, aligned and not."""
    jobs = [Job(kernel, arch, head_dim, dtype, mask) for kernel, head_dim, dtype, mask in REPRESENTATIVE]
    assert complaints(jobs) == []


@pytest.mark.parametrize("kernel", launch.KERNELS)
def test_measured_rows(kernel):
    """The rows tuned for time on a GPU also keep within the bounds."""
    measured = [
        Job(kernel, arch, head_dim, "bf16" if bits == 16 else "fp32")
        for (arch, row_kernel, bits), row in launch.table().items()
        for head_dim, config in row
        if row_kernel == kernel and config.source.startswith("measured")
    ]
    assert len(measured) >= 8
    assert complaints(measured) == []


def test_every_architecture_has_every_row():
    for arch in (*ARCHS, *launch.SAME_ROWS):
        for kernel in launch.KERNELS:
            for dtype, bits in BITS.items():
                assert row_of(Job(kernel, arch, 1, dtype))[2] == bits
                assert row_of(Job(kernel, arch, 256, dtype))[3] == 256


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("kernel", launch.KERNELS)
@pytest.mark.parametrize("arch", [*ARCHS, *launch.SAME_ROWS])
def test_sweep(request, arch, kernel, dtype):
    """Every row of the table at its largest head_dim and at smaller ones of two chunks or without alignment."""
    if "slow" not in request.config.option.markexpr:
        pytest.skip("takes many minutes: pytest -m slow tests/kernel/test_offline.py")
    rows = {row_of(Job(kernel, arch, d, dtype))[3] for d in range(1, 257)}
    head_dims = sorted(rows | {8, 40, 48, 80, 96, 100, 136, 160, 192, 200}) if arch in ARCHS else sorted(rows)
    jobs = [Job(kernel, arch, d, dtype, mask) for d in head_dims for mask in ("causal", "full")]
    assert complaints(jobs) == []
