"""Warp-specialised kernels for Hopper GPUs (sm_90), in Gluon: which requests they serve.

``forward.py`` and ``backward.py`` hold the kernels. Nothing here imports Triton, so any machine can ask.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

import torch

HEAD_DIMS = 256  # the widest head
DETERMINISTIC = "deterministic gradients"
TRITON = "3.6"
# What each pass leaves to the portable kernels, and why.
UNSERVED = {
    "forward": {
        "dropout": "has no dropout",
        "max_logits": "does not return the largest logits",
    },
    "backward": {
        "dropout": "has no dropout",
    },
}


def refusal(problem: Any, which: str) -> str | None:
    """Return why the pass ``which`` ("forward" or "backward") cannot serve a ``dispatch.Problem``; None if it can."""
    if problem.arch != "sm_90":
        return f"is written for compute capability 9.0 (sm_90), not for {problem.arch}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {str(problem.dtype).removeprefix('torch.')}"
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIMS:
        return f"serves head_dim up to {HEAD_DIMS}"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "copies heads in blocks, whose rows are a multiple of 16 bytes: head_dim must be a multiple of 8"
    if not problem.copied_in_blocks:
        return (
            "copies q, k and v in blocks: it wants a last stride of 1, the other strides and the addresses in "
            "multiples of 16 bytes, and no tensor without entries"
        )
    for name in problem.asks:
        if name in UNSERVED[which]:
            return UNSERVED[which][name]
    return _other_triton()


@functools.cache
def _other_triton() -> str | None:
    """Return a refusal if the installed Triton is not the one whose Gluon these kernels are written in."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # built with PyTorch, under another name
        version = importlib.import_module("triton").__version__
    if version.split(".")[:2] == TRITON.split("."):
        return None
    return f"is written in the Gluon of Triton {TRITON}, whose interface still moves; installed is {version}"
