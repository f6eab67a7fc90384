"""Compile the kernels with every kind of mask for GPUs that are not there.

A program, because a process that has Triton's interpreter switched on cannot compile: prints a JSON list of results.
"""

import json
import sys

import torch

from flashtile import mask
from flashtile.kernel import launch, tile_lists
from flashtile.mask import gather
from tests.kernel import offline


def height(where, k_idx, args):
    return gather(args[0], k_idx + where.batch, args[1])


def stripes(where, q_idx, k_idx, args):
    return height(where, k_idx, args) > (q_idx + k_idx) % args[2]


def floors(where: mask.Where, q_idx: torch.Tensor, k_idx, args) -> torch.Tensor:
    return ((q_idx - k_idx) % args[0] == 1) | ((k_idx - q_idx) // args[1] == 0)


def masks() -> list[mask.Mask]:
    """Masks of every kind, with arguments that Triton specialises (1, multiples of 16) and others."""
    ids = torch.arange(2048).reshape(2, 1024) // 100
    return [
        mask.window(1000, 1),
        mask.chunked(100) & mask.causal(),
        mask.prefix([7]) | mask.causal(align="top_left"),
        mask.document(ids) & mask.causal() & mask.key_padding([1024, 1000]),
        mask.Mask.of(stripes, (torch.arange(9), 9, 1)),
        mask.Mask.of(floors, (3, 1)),
        ~(mask.window(3, -1) | mask.block_sparse(torch.ones(2, 1, 8, 1).bool(), 128, 1024)),
    ]


def compile_one(value: mask.Mask, arch: str, kernel: str) -> dict:
    """Compile one kernel with a mask; return how many loops it has, or the error's text."""
    try:
        config = launch.lookup(kernel, arch, 64, 64, torch.bfloat16)
        compiled = offline.compile_kernel(kernel, arch, 64, torch.bfloat16, value, config)
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        return {"error": str(root)[-500:]}
    return {"loops": compiled.asm["ttgir"].count("scf.for")}


def compile_classification(value: mask.Mask, arch: str) -> dict:
    """Compile the kernel that classifies the tiles of a mask without ranges; return as ``compile_one`` does."""
    config = launch.LaunchConfig(128, 64, 4, 1)
    args = (torch.empty(8, dtype=torch.int8), 1000, 1000, 2, 8, 16, value.on_device())
    constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "OF_KEYS": True, "WIDTH_M": config.block_m}
    launched = offline.Launch(tile_lists.classify_kernel, args, constants, config)
    return {"loops": offline.compile_launch(launched, arch).asm["ttgir"].count("scf.for")}


def main() -> None:
    # The lists of a mask without ranges are made by a kernel, which cannot run here: it is compiled by itself below.
    table = torch.empty(8, dtype=torch.int32)
    tile_lists.tile_lists = lambda *rest: tile_lists.TileLists(table, table, 2, 8, 16)
    results = []
    for value in masks():
        for arch, kernel in (("sm_90", "forward"), ("sm_80", "backward_dq"), ("sm_90", "backward_dkdv")):
            results.append({"mask": str(value), "kernel": f"{arch} {kernel}"} | compile_one(value, arch, kernel))
    results.append({"mask": "stripes", "kernel": "classify"} | compile_classification(masks()[-3], "sm_90"))
    # A mask without a left edge, a combination or not, has no code for one.
    plain, combined = mask.causal(), (mask.prefix(5) | mask.causal()) & mask.key_padding(9)
    for value in (plain, combined):
        results.append({"mask": str(value), "kernel": "two loops"} | compile_one(value, "sm_90", "forward"))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
