"""Compile Gluon kernels for an H200 that is not there, and read what the compiler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs

from tests.kernel import offline
from tests.kernel.offline import Launch, launches

SHARED_LIMIT = 232_448  # bytes of shared memory that one program may use


class Report(NamedTuple):
    """What the compiler made of a kernel."""

    shared: int  # bytes
    registers: int  # per thread, at the launch: the roles trade them afterwards
    stack: int  # bytes of memory per thread, for want of registers
    spills: int  # instructions in all that move registers to and from that memory
    spills_in_loops: int  # those in the innermost loops with matrix instructions
    spills_on_full_tiles: int  # those of them that are not in a branch: on the way of a tile that needs no mask
    loads_on_full_tiles: int  # from global memory, on the same way
    matrix_loads_on_full_tiles: int  # of matrices from shared memory (ldmatrix)
    matrix_instructions: int  # in the code, not executed
    instructions: int
    warnings: tuple[str, ...]  # such as matrix instructions that are serialised
    barriers: dict[int, int]  # named barriers by number: how many instructions name it


def gluon_launches(call: Callable[[], Any]) -> list[Launch]:
    """Return the Gluon launches that ``call`` would make on an H200; its tensors may be CPU tensors."""
    return [launched for launched in launches("sm_90", call) if launched.kernel.is_gluon()]


def compile_launch(launched: Launch):
    """Compile a recorded launch for an H200."""
    return offline.compile_launch(launched, "sm_90")


def report(compiled, folder: str | None = None) -> Report:
    """Read the code of a compiled kernel; with ``folder`` its PTX and SASS stay there."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        ptx, cubin = place / "kernel.ptx", place / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(place / "again.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if folder:
            (place / "kernel.sass").write_text(sass)
    code = [(int(a, 16), text) for a, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)]
    spills = [address for address, text in code if re.search(r"\b(STL|LDL)\b", text)]
    loops = _loops_of_products(code)
    in_loops = [a for a in spills if any(first <= a <= last for first, last in loops)]
    on_full_tiles = set().union(*(_straight(code, *loop) for loop in loops))
    straight = [a for a in spills if a in on_full_tiles]
    found = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes stack frame", log)
    registers, stack = (int(match[1]) if match else 0 for match in found)
    return Report(
        compiled.metadata.shared, registers, stack, len(spills), len(in_loops), len(straight),
        sum("LDG" in text for a, text in code if a in on_full_tiles),
        sum("LDSM" in text for a, text in code if a in on_full_tiles),
        sum("HGMMA" in text for _, text in code), len(code),
        tuple(line.strip() for line in log.splitlines() if re.search(r"warning|C7\d\d\d|serializ", line)),
        _named_barriers(code),
    )  # fmt: skip


def _loops_of_products(code: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """Return the innermost loops with matrix instructions, (first, last) address of each.

    Where a role waits in a tight loop and then jumps back to its work is no end of a loop.
    """
    products = [address for address, text in code if "HGMMA" in text]
    loops, waited = [], False
    for address, text in code:
        start = _target(text, address)
        inside = [a for a in products if start <= a < address]
        if inside and not waited and not any(start <= first and last <= address for first, last in loops):
            loops.append((start, address))
        waited = address - 64 <= start < address
    return loops


def _target(text: str, otherwise: int) -> int:
    match = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
    return int(match[1], 16) if match else otherwise


def _straight(code: list[tuple[int, str]], first: int, last: int) -> set[int]:
    """Return the addresses that a loop goes through when it takes every longer branch forward inside of it."""
    addresses, after = set(), first
    for address, text in code:
        if after <= address <= last:
            addresses.add(address)
            if address + 16 * 40 < (target := _target(text, 0)) <= last:
                after = target
    return addresses


def _named_barriers(code: list[tuple[int, str]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for _, text in code:
        match = re.search(r"\bBAR\.(?:SYNC|ARV)\S*\s+(0x[0-9a-f]+),", text)
        if match:
            counts[int(match[1], 16)] = counts.get(int(match[1], 16), 0) + 1
    return counts
